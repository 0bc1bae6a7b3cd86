"""The commands, as processes of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from test_course import FAILING, compares, write_lesson

from effgpu import __main__ as main_module
from effgpu import course, device, reference, timing
from effgpu.__main__ import main
from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.device import Device
from effgpu.measurement import Measurement

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
    told = capsys.readouterr().out
    for text in ("Abacus (CPU, 3 cores)", "1.00 GiB", "2.8.0", "No GPU", "Every lesson still runs"):
        assert text in told
    assert "compute capability" not in told


def test_info_says_what_the_gpu_supports(monkeypatch, capsys):
    gpu = Device("Tesla T4", "cuda", 2**34, 2, 40, (7, 5), "570.1", {"bf16": "emulated", "fp8": "no"}, {"cuda": "12.8"})
    monkeypatch.setattr(device, "describe", lambda: gpu)
    assert main(["info"]) == 0
    told = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in ("device Tesla T4", "memory 16.0 GiB", "compute capability 7.5", "driver 570.1", "CPU cores 2"):
        assert line in told
    assert "bf16 emulated" in told and "fp8 no" in told and "cuda 12.8" in told


def test_a_run_leaves_notebooks_results_and_a_page(tmp_path):
    for name in ("01_one", "02_two"):
        write_lesson(tmp_path / "notebooks", name, compares(name))
    before = (tmp_path / "notebooks" / "01_one.ipynb").read_bytes()
    answer = effgpu("run", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "2 of 2 lessons ran without an error: out/report.html\n"
    assert "01_one" in answer.stderr and "left" in answer.stderr and "WARNING" not in answer.stderr
    made = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.*"))
    results = "results/cpu-pocket-calculator-1-cores.json"
    assert made == ["notebooks/01_one.ipynb", "notebooks/02_two.ipynb", "report.html", results]
    assert [comparison.name for comparison in reference.load(tmp_path / "out" / results)] == ["01_one", "02_two"]
    assert (tmp_path / "notebooks" / "01_one.ipynb").read_bytes() == before


def test_seconds_cap_every_measurement_of_a_run(tmp_path):
    lesson = write_lesson(tmp_path, "01_one", "import effgpu; print(effgpu.timing.cap_seconds(2))")
    assert effgpu("run", lesson, "--seconds", "0.5", cwd=tmp_path).returncode == 0
    assert not list((tmp_path / "out").glob("*.html")), "a look must not replace results"
    executed = nbformat.read(tmp_path / "out" / "look" / "notebooks" / "01_one.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "0.5\n"


def test_the_page_of_a_partial_run_keeps_this_machines_other_lessons(tmp_path):
    def compared(name, where):
        return Comparison(name, tuple(Measurement(label, (1.0,) * 8, where) for label in ("slow", "fast")))

    here = device.describe()
    course.prepare(tmp_path)
    for name, where in {"01_here": here, "02_elsewhere": Device("Abacus", "cpu", 2**30, 3)}.items():
        data = {MIME_TYPE: compared(name, where).to_dict(), "text/plain": ""}
        cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("display_data", data=data)])
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "notebooks" / f"{name}.ipynb")
    now = course.Outcome("03_now", "03_now", (compared("03_now", here),))
    page = main_module._keep([now], tmp_path).read_text()
    assert "01_here" in page and "03_now" in page and "02_elsewhere" not in page


def test_a_failing_lesson_is_named_at_the_end_and_on_the_page(tmp_path):
    write_lesson(tmp_path / "notebooks", "01_bad", "1 + 1", FAILING)
    write_lesson(tmp_path / "notebooks", "02_good", "1 + 1")
    answer = effgpu("run", "--out", "here", cwd=tmp_path)
    assert answer.returncode == 1
    assert answer.stderr.splitlines()[-1] == "failed: 01_bad: cell [2] '# a comment': ArithmeticError: no such number"
    assert "no such number" in (tmp_path / "here" / "report.html").read_text()
    assert (tmp_path / "here" / "notebooks" / "02_good.ipynb").exists()
    answer = effgpu("run", "02", "--out", "here", cwd=tmp_path)
    assert answer.returncode == 0
    assert "no such number" in (tmp_path / "here" / "report.html").read_text()  # it still stands as it was


def test_whatever_stops_a_run_the_results_of_the_lessons_before_are_there(tmp_path):
    """Here: there is no folder any more to write the second lesson to."""
    write_lesson(tmp_path / "notebooks", "01_done", compares("done"))
    write_lesson(
        tmp_path / "notebooks",
        "02_removes",
        "import shutil; shutil.rmtree('../out/notebooks'); open('../out/notebooks', 'w')",
    )
    (tmp_path / "out").mkdir()
    answer = effgpu("run", cwd=tmp_path)
    assert answer.returncode == 1 and "failed: 02_removes: could not be written: " in answer.stderr, answer.stderr
    (results,) = (tmp_path / "out" / "results").glob("*.json")
    assert [comparison.name for comparison in reference.load(results)] == ["done"]


def test_what_cannot_be_stored_ends_no_run(tmp_path, monkeypatch, capsys, make_measurement, make_gpu):
    def outcome(lesson, name, device):
        return course.Outcome(lesson, lesson, (Comparison(name, (make_measurement("a", device=device),)),))

    def run(lessons, out, inplace):
        (out / "report.html").mkdir()
        yield outcome("a", "one", make_gpu())
        yield outcome("b", "one", make_gpu())
        (out / "results" / "nvidia-test.json").write_text("{")
        yield outcome("c", "two", make_gpu())
        yield outcome("d", "three", make_gpu("NVIDIA Other"))

    write_lesson(tmp_path / "notebooks", "a", "1 + 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(course, "run", run)
    assert main(["run"]) == 1
    assert [comparison.name for comparison in reference.load("out/results/nvidia-other.json")] == ["three"]
    name, broken, page = capsys.readouterr().err.splitlines()
    assert name.startswith("failed: b: both a and b have a comparison called 'one'")
    assert broken.startswith("failed: c: results could not be stored: out/results/nvidia-test.json: expected")
    assert page.startswith("failed: the page: out/report.html: expected a file that can be written")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_no_kernel_and_keeps_what_is_done(tmp_path, number):
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
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # ignored where tests run in the background
    )
    pids = wait_for(tmp_path / "notebooks" / "pids").split()
    run.send_signal(number)
    _, told = run.communicate(timeout=300)
    assert run.returncode == 130
    ending = "failed: 02_endless: interrupted\ninterrupted: 1 of 3 lessons were not run\n"
    assert "Traceback" not in told and told.endswith(ending), told
    assert [pid for pid in pids if is_running(pid)] == []
    assert [path.name for path in (tmp_path / "out" / "notebooks").iterdir()] == ["01_done.ipynb"]
    (results,) = (tmp_path / "out" / "results").iterdir()
    assert [comparison.name for comparison in reference.load(results)] == ["done", "begun"]
    assert "begun" in (tmp_path / "out" / "report.html").read_text()


def test_a_run_outlives_its_terminal_where_it_was_told_to(tmp_path, monkeypatch):
    """As `nohup` does."""
    handled = []
    write_lesson(tmp_path / "notebooks", "01_one", "1 + 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "getsignal", {signal.SIGHUP: signal.SIG_IGN}.get)
    monkeypatch.setattr(signal, "signal", lambda number, _: handled.append(number))
    monkeypatch.setattr(course, "run", lambda lessons, out, inplace: ())
    assert main(["run"]) == 0 and handled == [signal.SIGTERM]


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
    def is_refused(*arguments, told):
        code, answer = main([*arguments]), capsys.readouterr().err
        one_line = answer.startswith("effgpu: error: ") and answer.count("\n") == 1
        return code == 2 and one_line and all(text in answer for text in told)

    monkeypatch.chdir(tmp_path)
    lesson = write_lesson(tmp_path / "notebooks", "01_one", "open('ran', 'w')")
    (tmp_path / "file").write_text("")
    assert is_refused("run", "2", told=("'2'", "01_one"))
    assert is_refused("run", "--out", "file/out", told=("file/out",))
    with monkeypatch.context() as capped:
        capped.setenv(timing.CAP, "few")
        assert is_refused("run", told=("'few'",))
        capped.setenv(timing.CAP, "0.5")
        assert is_refused("run", "--inplace", told=("--inplace", timing.CAP))
    (tmp_path / "out" / "results").mkdir(parents=True)
    (tmp_path / "out" / "results" / "mine.json").write_text("[]")
    assert is_refused("run", told=("mine.json",))
    assert not (lesson.parent / "ran").exists() and not (tmp_path / "ran").exists()


def test_inplace_reaches_the_run(tmp_path, monkeypatch):
    write_lesson(tmp_path / "notebooks", "01_one", "1 + 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    asked = []
    monkeypatch.setattr(course, "prepare", lambda out, *others: asked.append([*map(str, others)]))
    monkeypatch.setattr(course, "run", lambda lessons, out, inplace: asked.append(inplace) or ())
    assert main(["run"]) == main(["run", "--inplace"]) == 0
    assert asked == [[], False, ["notebooks"], True]


def test_a_report_goes_to_report_html_and_says_so(tmp_path, monkeypatch, capsys, make_measurement, make_gpu):
    monkeypatch.chdir(tmp_path)
    both = tuple(make_measurement(label, device=make_gpu()) for label in "ab")
    assert main(["report", str(reference.save([Comparison("some", both)], tmp_path / "a.json"))]) == 0
    assert capsys.readouterr().out == "report.html\n" and (tmp_path / "report.html").exists()


def test_a_report_does_not_overwrite_the_results(tmp_path, monkeypatch, capsys, make_measurement):
    monkeypatch.chdir(tmp_path)
    path = reference.save([Comparison("some", (make_measurement("a"),))], tmp_path / "a.json")
    before = path.read_bytes()
    assert main(["report", "a.json", "--out", str(path)]) == 2
    assert "--out: expected a file for the page" in capsys.readouterr().err and path.read_bytes() == before


def test_a_missing_runner_is_refused_with_what_installs_it(monkeypatch, capsys):
    monkeypatch.setattr("effgpu.__main__.find_spec", lambda name: None if name == "nbclient" else object())
    assert main(["run"]) == 2
    assert capsys.readouterr().err == 'effgpu: error: running lessons takes nbclient: pip install "effgpu[lab]"\n'


@pytest.mark.parametrize("content", ["", "{}", json.dumps(reference.FORMAT | {"comparisons": [{}]}), None])
def test_results_that_are_not_effgpus_are_refused(content, tmp_path, capsys):
    if content is not None:
        (tmp_path / "foreign.json").write_text(content)
    assert main(["report", str(tmp_path / "foreign.json"), "--out", str(tmp_path / "report.html")]) == 2
    told = capsys.readouterr().err
    assert told.startswith("effgpu: error: ") and "foreign.json" in told and told.count("\n") == 1
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ("abc", "--seconds: invalid float value: 'abc'"),
        ("0", "--seconds: expected a positive number, got 0.0"),
        ("nan", "--seconds: expected a positive number, got nan"),
    ],
)
def test_seconds_that_are_none_are_refused_by_the_name_they_were_given_by(capsys, seconds, expected):
    try:
        code = main(["run", "--seconds", seconds])
    except SystemExit as refused:
        code = refused.code
    told = capsys.readouterr().err
    assert code == 2 and told.count("\n") == 1 and expected in told


def test_results_without_a_comparison_are_refused(tmp_path, capsys):
    empty = reference.save([], tmp_path / "empty.json")
    assert main(["report", str(empty)]) == 2
    assert "empty.json: no comparisons" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--fast"], ["report"]])
def test_a_wrong_command_line_is_refused_in_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    told = capsys.readouterr().err
    assert refused.value.code == 2 and told.startswith("effgpu: error: ") and told.count("\n") == 1
