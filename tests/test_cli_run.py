"""`effgpu run` and `effgpu report`, on tiny lessons; an interrupted run in a process of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import psutil
import pytest
from tiny_lessons import CALCULATOR, FAILING, compares, write_lesson

from effgpu import results
from effgpu.__main__ import main
from effgpu.comparison import Comparison
from effgpu.course import runner
from effgpu.course.lessons import digest
from effgpu.course.outcomes import OUT_OF_TIME, Outcome
from effgpu.measuring import timing

ENDLESS = """\
import os, pathlib, subprocess, time
worker = subprocess.Popen(["sleep", "600"])
pathlib.Path("pids.part").write_text(f"{os.getpid()} {worker.pid}")
os.rename("pids.part", "pids")
time.sleep(600)"""
RUN = [sys.executable, "-m", "effgpu", "run"]


def test_a_run_leaves_notebooks_results_and_a_report_that_names_what_failed(here, capfd):
    for name, cell in {"01_one": compares("01_one"), "02_bad": FAILING, "03_two": compares("two")}.items():
        write_lesson(here / "notebooks", name, "1 + 1", cell)
    before = (here / "notebooks" / "01_one.ipynb").read_bytes()
    answer = subprocess.run(RUN, capture_output=True, text=True)
    assert answer.returncode == 1
    lines = [re.sub(r" +\d+ s  ", " 0 s  ", line) for line in answer.stdout.splitlines()]
    assert sorted(lines[:3]) + lines[3:] == [
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
    before = dict(os.environ)
    assert main(["run", str(lesson), "--seconds", "0.5"]) == 0
    assert os.environ == before
    assert not list((here / "out").glob("*.html")), "a quick look must not replace results"
    executed = nbformat.read(here / "out" / "look" / "notebooks" / "01_one.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "0.5\n"


def test_a_lesson_and_a_report_that_cannot_be_written_keep_the_results(here, capsys):
    removes = "import os\nos.rmdir('../out/notebooks')\nopen('../out/notebooks', 'w')\nos.mkdir('../out/report.html')"
    write_lesson(here / "notebooks", "01_removes", compares("done"), removes)
    assert main(["run"]) == 1
    errors = capsys.readouterr().err
    assert "failed: 01_removes: could not be written: " in errors
    assert "failed: the report: out/report.html: expected a file that can be written" in errors
    (stored,) = (here / "out" / "results").glob("*.json")
    assert [comparison.name for comparison in results.load(stored)] == ["done"]


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_run_leaves_no_kernel_and_keeps_what_is_done(sent, here):
    for name, last in {"01_done": "1 + 1", "02_endless": ENDLESS, "03_never": "1 + 1"}.items():
        write_lesson(here / "notebooks", name, compares(name), last)
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where tests run in the background
    run = subprocess.Popen(
        [*RUN, "--at-once=1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard
    )
    pids, deadline = here / "notebooks" / "pids", time.monotonic() + 120
    while not pids.exists():
        assert time.monotonic() < deadline, "the lesson does not run"
        time.sleep(0.1)
    run.send_signal(sent)
    _, printed = run.communicate(timeout=100)
    assert run.returncode == 130
    ending = "failed: 02_endless: interrupted\ninterrupted: 1 of 3 lessons were not run\n"
    assert "Traceback" not in printed and printed.endswith(ending), printed
    started = [*map(int, pids.read_text().split())]
    assert not [p for p in psutil.process_iter() if p.pid in started and p.status() != psutil.STATUS_ZOMBIE]
    assert [path.name for path in (here / "out" / "notebooks").iterdir()] == ["01_done.ipynb"]
    (stored,) = (here / "out" / "results").iterdir()
    assert [comparison.name for comparison in results.load(stored)] == ["01_done", "02_endless"]
    assert "02_endless" in (here / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "arguments, cap, told",
    [
        (["run", "2"], "inf", "unknown lesson '2'; known: 01_one"),
        (["run", "--out", "file/out"], "inf", "file/out"),
        (["run", "--out", "old"], "inf", "old/results/mine.json: expected"),
        (["run", "--seconds", "nan"], "inf", "--seconds: expected a positive number, got nan"),
        (["run"], "few", "'few'"),
        (["run", "--at-once", "0"], "inf", "--at-once: expected a positive whole number, got 0"),
        (["run", "--inplace"], "0.5", "--inplace stores results, but --seconds or EFFGPU_SECONDS"),
        (["report", "old/results/mine.json"], "inf", "old/results/mine.json: expected"),
        (["report", "file"], "inf", "file: expected comparisons, got none"),
    ],
)
def test_what_cannot_be_run_or_reported_is_refused_in_one_line(arguments, cap, told, here, monkeypatch, capsys):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    (here / "old" / "results").mkdir(parents=True)
    (here / "old" / "results" / "mine.json").write_text("{}")
    (here / "file").write_text(json.dumps(results.FORMAT | {"comparisons": []}))
    monkeypatch.setenv(timing.CAP, cap)
    monkeypatch.setattr(runner, "run", None)
    assert main(arguments) == 2 and not Path("report.html").exists()
    answer = capsys.readouterr().err
    assert answer.startswith("effgpu: error: ") and answer.count("\n") == 1 and told in answer


@pytest.mark.parametrize(
    ("system", "kind", "cores", "expected"),
    [("linux", "cpu", 1, 1), ("linux", "cpu", 8, 2), ("win32", "cpu", 8, 1), ("darwin", "cuda", 8, 1)],
)
def test_lessons_run_at_once_on_a_cpu_only_where_they_can_take_turns(
    system, kind, cores, expected, here, monkeypatch, capsys
):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    asked = []
    monkeypatch.setattr(runner, "run", lambda lessons, out, *, at_once, **others: asked.append(at_once) or [])
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("effgpu.measuring.device.describe", lambda: replace(CALCULATOR, kind=kind, cores=cores))
    codes = [main(["run"]), main(["run", "--at-once", "3"])]
    if system == "win32":
        assert (codes, asked) == ([0, 2], [1])
        assert "--at-once: expected 1, as Windows has no lock" in capsys.readouterr().err
    else:
        assert (codes, asked) == ([0, 0], [expected, 3])


def test_inplace_reaches_the_run(here, monkeypatch):
    write_lesson(here / "notebooks", "01_one", "1 + 1")
    asked = []
    monkeypatch.setattr(runner, "prepare", lambda out, *others: asked.append([*map(str, others)]))
    monkeypatch.setattr(runner, "run", lambda lessons, out, inplace, **_: asked.append(inplace) or ())
    assert main(["run"]) == main(["run", "--inplace"]) == 0
    assert asked == [[], False, ["notebooks"], True]


def test_a_run_says_what_its_budget_left_out(here, monkeypatch, capsys):
    names = ("01_done", "02_slow", "03_never")
    for name in names:
        write_lesson(here / "notebooks", name, "1 + 1")
    seconds = {"02_slow": 70.4}
    late = [Outcome(name, name, failure=OUT_OF_TIME, seconds=seconds.get(name, 0.0)) for name in names[1:]]
    asked = []
    outcomes = [Outcome("01_done", "One"), *late]
    monkeypatch.setattr(runner, "run", lambda lessons, out, budget, **_: asked.append(budget) or outcomes)
    assert main(["run", "--budget", "1.5m"]) == 0 and asked == [90]
    told = capsys.readouterr().out.splitlines()
    assert "left out, as the time was over: 02_slow (stopped after 70 s), 03_never" in told
    assert told[-1].startswith("1 of 3 lessons ran without an error")


def test_a_cpus_outputs_do_not_replace_a_gpus(here, monkeypatch, capsys):
    path = write_lesson(here / "notebooks", "01_one", "1 + 1")
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["effgpu"] = {"device": "nvidia-test", "code": digest(notebook)}
    nbformat.write(notebook, path)
    monkeypatch.setattr(runner, "run", None)
    assert main(["run", "--inplace"]) == 2
    assert "01_one stores a GPU's outputs, which a CPU's would replace" in capsys.readouterr().err
    assert main(["run", "--inplace", "--missing"]) == 0
    assert capsys.readouterr().out == "every lesson stores outputs of its code\n"


def test_a_report_goes_to_report_html_and_does_not_overwrite_the_results(here, capsys, make_measurement):
    path = results.save([Comparison("some", (make_measurement("a"), make_measurement("b")))], "a.json")
    before = path.read_bytes()
    assert main(["report", "a.json"]) == 0
    assert capsys.readouterr().out == "report.html\n" and Path("report.html").exists()
    assert main(["report", "a.json", "--out", str(path.absolute())]) == 2
    assert "--out: expected a file for the report" in capsys.readouterr().err and path.read_bytes() == before
