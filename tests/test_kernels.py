"""Kernels as forks: they are what a kernel of its own is, sooner; and none outlives who started it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from effgpu.course import kernels

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux alone")

TELLS = """
import json, multiprocessing, os, sys
said, way = os.environ.get("SAID"), multiprocessing.get_start_method()
print(json.dumps([os.getpid(), os.getppid(), os.getpgid(0), os.getcwd(), said, way, "torch" in sys.modules]))
"""
DRAWS = "import matplotlib.pyplot as plt; plt.plot([1, 2]); plt.show()"


def execute(*sources, cwd):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(notebook, kernel_name="python3", extra_arguments=["--log-level=ERROR"])
    kernels.fork_kernel(client.create_kernel_manager())
    client.execute(cwd=str(cwd))
    return [output for cell in notebook.cells for output in cell.outputs]


def test_a_kernel_is_a_fork_with_its_own_folder_environment_and_process_group(tmp_path, monkeypatch):
    found = []
    for said in ("one", "other"):
        monkeypatch.setenv("SAID", said)
        (tmp_path / said / "lessons").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / said)
        told, picture = execute(TELLS, DRAWS, cwd="lessons")
        pid, parent, *rest = json.loads(told.text)
        folder = str(tmp_path / said / "lessons")
        assert rest == [pid, folder, said, multiprocessing.get_start_method(), True]
        assert "image/png" in picture.data
        found.append((pid, parent))
    (first, server), (second, same_server) = found
    assert first != second
    assert server == same_server != os.getpid()
    assert Path("/proc", str(server)).exists() and not Path("/proc", str(first)).exists()


ENDS = """
import atexit, string

string.kept = open("kept", "w")
string.kept.write("flushed where modules are taken apart")
atexit.register(lambda: open("left", "w").close())
"""


def test_a_kernel_runs_what_is_to_run_at_its_end_and_is_not_taken_apart(tmp_path):
    execute(ENDS, cwd=tmp_path)
    wait_until((tmp_path / "left").exists)
    assert not (tmp_path / "kept").read_text()


NO_CUDA = """
import torch

def refuse(*arguments):
    raise AssertionError("it starts CUDA")

torch._C._cuda_getDeviceCount = refuse
if hasattr(torch._C, "_cuda_init"):
    torch._C._cuda_init = refuse
from importlib import import_module
from effgpu.course.kernels import IMPORTED
for name in IMPORTED:
    import_module(name)
"""


def test_what_is_imported_before_the_fork_does_not_start_cuda():
    subprocess.run([sys.executable, "-c", NO_CUDA], check=True, timeout=120)


BECOMES = """
import sys
from effgpu.course.kernels import LAUNCHER, _become_kernel

opened = open(sys.argv[1], "w")
_become_kernel([sys.executable, "-c", "print('begun anew')", LAUNCHER, "--version"], "/", {})
"""


@pytest.mark.parametrize("opened, anew", [("nvidia-uvm", True), ("other", False)])
def test_where_something_has_started_cuda_all_the_same_the_kernel_begins_anew(opened, anew, tmp_path):
    command = [sys.executable, "-c", BECOMES, str(tmp_path / opened)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and ("begun anew" in done.stdout) == anew, done.stderr


def test_a_kernel_ends_when_who_started_it_is_killed(tmp_path):
    sleeps = "import os, time; open('told', 'w').write(str(os.getpid())); time.sleep(600)"
    lesson = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sleeps)])
    nbformat.write(lesson, tmp_path / "sleepy.ipynb")
    run = [sys.executable, "-m", "effgpu", "run", tmp_path / "sleepy.ipynb", "--out", tmp_path / "out"]
    runner = subprocess.Popen(run)
    told = tmp_path / "told"
    wait_until(lambda: told.exists() and told.read_text())
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    wait_until(lambda: not Path("/proc", told.read_text()).exists())


def wait_until(happened, seconds=60):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)
