"""The commands. Where signals, imports or standard error matter, they run in a process of their own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import nbformat
import pytest
from test_runner import FAILING, compares, write_lesson

from effgpu import results
from effgpu.__main__ import main
from effgpu.comparison import Comparison
from effgpu.course import runner
from effgpu.measuring import device, timing
from effgpu.measuring.device import Device

ENDLESS = """\
import os, pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.part").write_text(f"{os.getpid()} {worker.pid}")
os.rename("pids.part", "pids")
time.sleep(600)"""
HEAVY = ("transformers", "datasets", "matplotlib")


def effgpu(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "effgpu", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300)


def environment() -> dict[str, str]:
    here = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return os.environ | here


@pytest.mark.parametrize("arguments, unwanted", [(["--help"], ("torch", *HEAVY)), (["info"], HEAVY)])
def test_what_is_asked_for_at_once_loads_nothing_heavy(arguments, unwanted, tmp_path):
    script = (
        "import sys\nfrom effgpu.__main__ import main\n"
        f"try: main({arguments})\nexcept SystemExit: pass\n"
        f"print('loaded', [name for name in {unwanted} if name in sys.modules])"
    )
    options = {"env": environment(), "cwd": tmp_path, "capture_output": True, "text": True}
    answer = subprocess.run([sys.executable, "-c", script], **options)
    assert answer.stdout.splitlines()[-1] == "loaded []", answer.stderr


def test_info_says_plainly_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(device, "describe", lambda: Device("Abacus", "cpu", 2**30, 3, versions={"torch": "2.8.0"}))
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for text in ("Abacus (CPU, 3 cores)", "1.00 GiB", "2.8.0", "No GPU", "Every lesson still runs"):
        assert text in printed
    assert "compute capability" not in printed


def test_info_says_what_the_gpu_supports(monkeypatch, capsys):
    gpu = Device("Tesla T4", "cuda", 2**34, 2, 40, (7, 5), "570.1", {"bf16": "emulated", "fp8": "no"}, {"cuda": "12.8"})
    monkeypatch.setattr(device, "describe", lambda: gpu)
    assert main(["info"]) == 0
    printed = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("device Tesla T4", "memory 16.0 GiB", "compute capability 7.5", "driver 570.1", "CPU cores 2"):
        assert line in printed
    assert "bf16 emulated" in printed and "fp8 no" in printed and "cuda 12.8" in printed


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder to run commands in, in this process, which keeps its signals and its environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(timing.CAP, "inf")
    return tmp_path


def test_a_run_leaves_notebooks_results_and_a_report_that_names_what_failed(here, capfd):
    for name, cell in {"01_one": compares("01_one"), "02_bad": FAILING, "03_two": compares("two")}.items():
        write_lesson(here / "notebooks", name, "1 + 1", cell)
    before = (here / "notebooks" / "01_one.ipynb").read_bytes()
    answer = effgpu("run", cwd=here)
    assert answer.returncode == 1
    lines = [re.sub(r" +\d+ s  ", " 0 s  ", line) for line in answer.stdout.splitlines()]
    assert lines == [
        "01_one 0 s  fast: 2.00 × faster [2.00, 2.00], −50 % memory",
        "02_bad 0 s  failed",
        "03_two 0 s  nothing to compare on this machine",
        "2 of 3 lessons ran without an error: out/report.html",
    ]
    assert "01_one" in answer.stderr and "left" in answer.stderr and "WARNING" not in answer.stderr
    assert answer.stderr.splitlines()[-1] == "failed: 02_bad: cell [2] '# a comment': ArithmeticError: no such number"
    made = sorted(str(path.relative_to(here / "out")) for path in (here / "out").rglob("*.*"))
    calculator = "results/cpu-pocket-calculator-1-cores.json"
    assert made == [*(f"notebooks/{name}.ipynb" for name in ("01_one", "02_bad", "03_two")), "report.html", calculator]
    assert [comparison.name for comparison in results.load(here / "out" / calculator)] == ["01_one", "two"]
    assert "no such number" in (here / "out" / "report.html").read_text()
    assert (here / "notebooks" / "01_one.ipynb").read_bytes() == before
    assert main(["run", "01"]) == 0
    assert capfd.readouterr().out.endswith("\n1 of 1 lessons ran without an error: out/report.html\n")
    page = (here / "out" / "report.html").read_text()
    assert "no such number" in page, "of a lesson that was not run again"
    assert "03_two" not in page, "it was measured on another machine"


def test_seconds_cap_every_measurement_of_a_run(here):
    lesson = write_lesson(here, "01_one", f"import os; print(os.environ[{timing.CAP!r}])")
    assert main(["run", str(lesson), "--seconds", "0.5"]) == 0
    assert not list((here / "out").glob("*.html")), "a quick look must not replace results"
    executed = nbformat.read(here / "out" / "look" / "notebooks" / "01_one.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "0.5\n"


def test_whatever_stops_a_run_the_results_of_the_lessons_before_are_there(here, capsys):
    """Here the second lesson removes the folder that it is to be written to."""
    write_lesson(here / "notebooks", "01_done", compares("done"))
    removes = "import shutil; shutil.rmtree('../out/notebooks'); open('../out/notebooks', 'w')"
    write_lesson(here / "notebooks", "02_removes", removes)
    assert main(["run"]) == 1
    assert "failed: 02_removes: could not be written: " in capsys.readouterr().err
    (stored,) = (here / "out" / "results").glob("*.json")
    assert [comparison.name for comparison in results.load(stored)] == ["done"]


def test_what_cannot_be_stored_ends_no_run(here, monkeypatch, capsys, make_measurement, make_gpu):
    def outcome(lesson, gpu):
        return runner.Outcome(lesson, lesson, (Comparison(lesson, (make_measurement("a", device=make_gpu(gpu)),)),))

    def run(lessons, out, inplace):
        (out / "report.html").mkdir()
        (out / "results" / "nvidia-test.json").write_text("{")
        yield outcome("a", "NVIDIA Test")
        yield outcome("b", "NVIDIA Other")

    write_lesson(here / "notebooks", "a", "1 + 1")
    monkeypatch.setattr(runner, "run", run)
    assert main(["run"]) == 1
    assert [comparison.name for comparison in results.load("out/results/nvidia-other.json")] == ["b"]
    broken, page = capsys.readouterr().err.splitlines()
    assert broken.startswith("failed: a: results could not be stored: out/results/nvidia-test.json: expected")
    assert page.startswith("failed: the report: out/report.html: expected a file that can be written")


def test_a_killed_run_ends_as_an_interrupted_one(tmp_path, monkeypatch, capsys):
    def run(lessons, out, inplace):
        yield runner.Outcome("01_one", "One")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    write_lesson(tmp_path / "notebooks", "01_one", "1 + 1")
    write_lesson(tmp_path / "notebooks", "02_two", "1 + 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runner, "run", run)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert main(["run"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "interrupted: 1 of 2 lessons were not run\n"


def test_an_interrupted_run_leaves_no_kernel_and_keeps_what_is_done(tmp_path):
    write_lesson(tmp_path / "notebooks", "01_done", compares("done"))
    write_lesson(tmp_path / "notebooks", "02_endless", compares("begun"), ENDLESS)
    write_lesson(tmp_path / "notebooks", "03_never", "1 + 1")
    run = subprocess.Popen(
        [sys.executable, "-m", "effgpu", "run"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    pids = wait_for(tmp_path / "notebooks" / "pids").split()
    run.send_signal(signal.SIGINT)
    _, printed = run.communicate(timeout=100)
    assert run.returncode == 130
    ending = "failed: 02_endless: interrupted\ninterrupted: 1 of 3 lessons were not run\n"
    assert "Traceback" not in printed and printed.endswith(ending), printed
    assert [pid for pid in pids if is_running(pid)] == []
    assert [path.name for path in (tmp_path / "out" / "notebooks").iterdir()] == ["01_done.ipynb"]
    (stored,) = (tmp_path / "out" / "results").iterdir()
    assert [comparison.name for comparison in results.load(stored)] == ["done", "begun"]
    assert "begun" in (tmp_path / "out" / "report.html").read_text()


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.1)
    return path.read_text()


def is_running(pid: str) -> bool:
    status = Path("/proc", pid, "stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_cannot_be_run_is_refused_before_anything_runs(tmp_path, monkeypatch, capsys):
    def is_refused(*arguments, printed):
        code, answer = main([*arguments]), capsys.readouterr().err
        one_line = answer.startswith("effgpu: error: ") and answer.count("\n") == 1
        return code == 2 and one_line and all(text in answer for text in printed)

    monkeypatch.chdir(tmp_path)
    lesson = write_lesson(tmp_path / "notebooks", "01_one", "open('ran', 'w')")
    (tmp_path / "file").write_text("")
    assert is_refused("run", "2", printed=("'2'", "01_one"))
    assert is_refused("run", "--out", "file/out", printed=("file/out",))
    assert is_refused("run", "--seconds", "nan", printed=("--seconds: expected a positive number, got nan",))
    with monkeypatch.context() as capped:
        capped.setenv(timing.CAP, "few")
        assert is_refused("run", printed=("'few'",))
        capped.setenv(timing.CAP, "0.5")
        assert is_refused("run", "--inplace", printed=("--inplace", timing.CAP))
    (tmp_path / "out" / "results").mkdir(parents=True)
    (tmp_path / "out" / "results" / "mine.json").write_text("[]")
    assert is_refused("run", printed=("mine.json",))
    assert not (lesson.parent / "ran").exists() and not (tmp_path / "ran").exists()


def test_inplace_reaches_the_run(here, monkeypatch):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    asked = []
    monkeypatch.setattr(runner, "prepare", lambda out, *others: asked.append([*map(str, others)]))
    monkeypatch.setattr(runner, "run", lambda lessons, out, inplace: asked.append(inplace) or ())
    assert main(["run"]) == main(["run", "--inplace"]) == 0
    assert asked == [[], False, ["notebooks"], True]


def test_a_report_goes_to_report_html_and_does_not_overwrite_the_results(here, capsys, make_measurement):
    path = results.save([Comparison("some", (make_measurement("a"), make_measurement("b")))], "a.json")
    before = path.read_bytes()
    assert main(["report", "a.json"]) == 0
    assert capsys.readouterr().out == "report.html\n" and Path("report.html").exists()
    assert main(["report", "a.json", "--out", str(path.absolute())]) == 2
    assert "--out: expected a file for the report" in capsys.readouterr().err and path.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "missing", "expected"),
    [
        (["run"], ("nbclient", "matplotlib"), "running lessons needs more: pip install nbclient matplotlib"),
        (["report", "some.json"], ("matplotlib",), "a report needs more: pip install matplotlib"),
        (["bench", "true", "--plot", "some.png"], ("matplotlib",), "--plot needs more: pip install matplotlib"),
    ],
)
def test_a_missing_library_is_refused_with_what_installs_it(arguments, missing, expected, monkeypatch, capsys):
    monkeypatch.setattr("effgpu.__main__.find_spec", lambda name: None if name in missing else object())
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"effgpu: error: {expected}\n"


EMPTY = json.dumps(results.FORMAT | {"comparisons": []})


@pytest.mark.parametrize("content", ["{}", json.dumps(results.FORMAT | {"comparisons": [{}]}), EMPTY, None])
def test_results_that_are_not_effgpus_are_refused(content, here, capsys):
    if content is not None:
        Path("foreign.json").write_text(content)
    assert main(["report", "foreign.json"]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("effgpu: error: foreign.json: expected") and printed.count("\n") == 1
    assert not Path("report.html").exists()


STEP = """
import torch

def variant():
    model = torch.nn.Linear({width}, {width})

    def step():
        model(torch.ones(4, {width})).sum().backward()

    return step
"""


@pytest.mark.parametrize("width, gpu, code", [(64, "T4", 0), (60_000, "T4", 3), (35_000, "T4", 4), (64, None, 0)])
def test_fit_says_by_its_exit_code_whether_a_step_fits(width, gpu, code, tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(STEP.format(width=width))
    asked = ["predict", f"{path}:variant", *(["--gpu", gpu] if gpu else [])]
    assert main(asked) == code
    assert "T4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "asked, why",
    [
        (["train.py"], "FILE.py:VARIANT"),
        (["{path}:other"], "a function called other"),
        (["{path}:torch"], "a function called torch"),
        (["missing.py:variant"], "missing.py: expected a Python file"),
        (["{path}:variant", "--gpu", "T5"], "gpu: expected one of"),
        (["{path}:nothing"], "variant 'nothing': expected it to return its training step"),
        (["{path}:by_value"], "the shape of a result depends on values"),
    ],
)
def test_fit_says_what_it_expected(asked, why, tmp_path, capsys):
    path = tmp_path / "train.py"
    by_value = "lambda: lambda: torch.ones(3)[torch.ones(3) > 0]"
    path.write_text(STEP.format(width=8) + f"\ndef nothing(): pass\nby_value = {by_value}\n")
    assert main(["predict", *(word.format(path=path) for word in asked)]) == 2
    printed = capsys.readouterr().err
    assert why in printed and printed.count("\n") == 1


PLACES = ("file", "variant", "step")
FAILS = """
{file}
def variant():
    {variant}
    def step():
        {step}
    return step
"""


@pytest.mark.parametrize("where", PLACES)
def test_an_error_of_the_script_keeps_its_traceback(where, tmp_path):
    path = tmp_path / "train.py"
    lines = {name: "raise ValueError('the script')" if name == where else "pass" for name in PLACES}
    path.write_text(FAILS.format(**lines))
    with pytest.raises(ValueError, match="the script") as raised:
        main(["predict", f"{path}:variant"])
    told = "".join(traceback.format_exception(raised.value))
    assert "train.py" in told and "raise ValueError('the script')" in told


def test_fit_tells_the_measured_owners_too(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text(STEP.format(width=512))
    assert main(["predict", f"{path}:variant", "--measured"]) == 0
    told = capsys.readouterr().out
    for owner in ("weights", "gradients"):
        assert re.search(rf"^  {owner} .*\(measured here: 1\.00 MiB\)$", told, re.MULTILINE), told


def test_fit_finds_the_modules_beside_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "its_neighbour.py").write_text("width = 8")
    (tmp_path / "train.py").write_text(STEP.format(width="its_neighbour.width") + "\nimport its_neighbour\n")
    assert main(["predict", f"{tmp_path / 'train.py'}:variant", "--gpu", "T4"]) == 0
