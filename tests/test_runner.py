"""Runs of tiny lessons: who goes when, what a budget leaves out, and what is stored of the results."""

import asyncio
import itertools
import re
import textwrap
import time
from pathlib import Path

import nbformat
import pytest
import torch
from tiny_lessons import FAILING, compares, write_lesson

from effgpu import results
from effgpu.comparison import Comparison
from effgpu.course import runner
from effgpu.course.outcomes import INTERRUPTED, OUT_OF_TIME, Outcome


@pytest.fixture
def out(tmp_path) -> Path:
    runner.prepare(tmp_path / "out")
    return tmp_path / "out"


def test_results_of_another_edition_are_refused_with_what_to_do(out):
    """Which is not to measure again: that is what was asked for."""
    (out / "results" / "cpu.json").write_text('{"format": "effgpu results", "version": 3, "comparisons": []}')
    with pytest.raises(ValueError, match=r"cpu\.json: expected version 4 .*: move it away, or give another folder"):
        runner.prepare(out)


def test_a_failing_lesson_is_named_does_not_stop_the_others_and_is_not_overwritten(tmp_path, out, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failing = write_lesson(tmp_path, "01_failing", compares("before"), "", FAILING, "print('never')")
    broken = tmp_path / "02_broken.ipynb"
    broken.write_text("{")
    good = write_lesson(tmp_path, "03_good", "1 + 1")
    before = failing.read_bytes()
    first, second, third = runner.run([failing, broken, Path(good.name)], out, inplace=True)
    assert first.failure == "cell [2] '# a comment': ArithmeticError: no such number"
    assert [comparison.name for comparison in first.comparisons] == ["before"]
    assert second.failure.startswith("not a notebook: ") and third.failure is None
    executed = nbformat.read(out / "notebooks" / "01_failing.ipynb", as_version=4)
    assert "stale" not in str(executed.cells) and executed.cells[-1].execution_count is None
    assert failing.read_bytes() == before and broken.read_text() == "{"
    copy, drawing = (out / "notebooks" / "03_good.ipynb").read_text(), "](../../../images/a.svg)"
    assert drawing in copy and good.read_text() == copy.replace(drawing, "](../images/a.svg)")


LOG = "with open('log', 'a') as log: log.write(f'{what} {time.monotonic()} ')"
WORK = f"for what in ('begin', 'end'):\n    {LOG}\n    time.sleep(0.3)"


def turns_of(folders):
    """When each cell of WORK began and ended, in all folders."""
    turns = []
    for folder in folders:
        words = (folder / "log").read_text().split()[1::2]
        turns += zip(map(float, words[::2]), map(float, words[1::2]))
    return sorted(turns)


def test_lessons_at_once_take_turns_on_the_gpu_but_not_while_they_predict(tmp_path, out, monkeypatch):
    """CUDA counts as in use from the second cell on. A turn of it is a cell, less what is `free` in it."""
    monkeypatch.setattr(runner, "find_device", lambda: torch.device("cuda"))
    predict = "from effgpu.measuring import device_lock\nwith device_lock.free():\n    time.sleep(1.5)"
    settings = "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['TORCH_CPP_LOG_LEVEL'])"
    cells = [f"{settings}\nimport time, torch\ntorch.cuda.is_initialized = lambda: True", WORK, predict, WORK]
    lessons = [write_lesson(tmp_path / name, name, *cells) for name in ("a", "b")]
    outcomes = list(runner.run(lessons, out, at_once=2))
    assert {outcome.name for outcome in outcomes} == {"a", "b"} and not any(outcome.failure for outcome in outcomes)
    told = nbformat.read(out / "notebooks" / "a.ipynb", as_version=4).cells[1].outputs[0].text.split()
    assert int(told[0]) >= 1 and told[1] == "ERROR", "a log line of PyTorch's holds the hour"
    turns = turns_of([tmp_path / "a", tmp_path / "b"])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns)), "two at once"
    assert turns[-1][1] - turns[0][0] < 2 * 1.5 + 4 * 0.6, "each waited while the other one predicted"


PREDICT = """
import os, effgpu
from torch import nn

def training():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(100)])

    def step():
        while not os.path.exists("../done"):
            with open("predicts", "a") as log:
                log.write(f"{time.monotonic()} ")
            model(torch.empty(8, 8, device="cpu"))
        model(torch.empty(8, 8)).sum().backward()

    return step

effgpu.predict(training, "T4")
"""


WAIT = """
import os, time
from effgpu.measuring import device_lock

with device_lock.free(stands_aside=True):
    while not os.path.exists("../a/predicts"):
        time.sleep(0.01)
"""


def test_on_a_cpu_a_lesson_that_predicts_stands_aside_while_another_one_runs_a_cell(tmp_path, out):
    """The first predicts until the second, which waits for it, has worked twice, and drawn what a cell's end draws."""
    lessons = [write_lesson(tmp_path / "a", "a", "import time, torch", PREDICT)]
    draws = f"def draw():\n{textwrap.indent(WORK, '    ')}\nget_ipython().events.register('post_execute', draw)"
    lessons += [write_lesson(tmp_path / "b", "b", WAIT, WORK, draws, "open('../done', 'w').close()")]
    outcomes = list(runner.run(lessons, out, at_once=2))
    assert not any(outcome.failure for outcome in outcomes), outcomes
    times = [float(word) for word in (tmp_path / "a" / "predicts").read_text().split()]
    for begin, end in turns_of([tmp_path / "b"]):
        assert not [each for each in times if begin + 0.1 < each < end]


def test_what_does_not_fit_into_the_budget_is_left_out_and_named(tmp_path, out):
    sources = {"1": compares("1"), "2": "import time; time.sleep(100)", "3": "1 + 1"}
    lessons = [write_lesson(tmp_path, name, source) for name, source in sources.items()]
    began = time.monotonic()
    outcomes = {outcome.name: outcome.failure for outcome in runner.run(lessons, out, budget=8)}
    assert outcomes == {"1": None} | dict.fromkeys("23", OUT_OF_TIME)
    assert 8 <= time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("slow", "left_out"),
    [({"a": 1.2}, ""), ({"a": 60, "c": 60}, "ac")],
    ids=["begun again when the others are done", "left out, and no other with them"],
)
def test_a_slow_lesson_leaves_the_others_their_share_of_the_budget(slow, left_out, out, monkeypatch):
    """The lesson `a` goes first. Each of the ten has 0.4 s, and up to twice that while others wait."""
    begun = []

    async def run_lesson(path, folder, inplace, progress):
        begun.append(path.name)
        began, failure = time.monotonic(), None
        try:
            await asyncio.sleep(slow.get(path.name, 0.02))
        except asyncio.CancelledError:
            failure = INTERRUPTED
        return Outcome(path.name, path.name, failure=failure, seconds=time.monotonic() - began)

    monkeypatch.setattr(runner, "run_lesson", run_lesson)
    outcomes = list(runner.run([Path(name) for name in "abcdefghij"], out, budget=4))
    assert {each.name for each in outcomes if each.failure} == set(left_out)
    assert all(each.failure == OUT_OF_TIME and 0.5 < each.seconds < 4 for each in outcomes if each.failure)
    assert begun[:10] == list("abcdefghij") and begun[10] == "a"
    assert sorted(each.name for each in outcomes) == list("abcdefghij"), "each once"


@pytest.fixture
def make_outcome(make_measurement):
    """A function that makes what a lesson gave: comparisons of these names."""

    def make(lesson, *named, seconds=0.01, failure=None):
        rows = make_measurement("slow", 0.02), make_measurement("fast", seconds)
        return Outcome(lesson, lesson, tuple(Comparison(name, rows) for name in named), failure=failure)

    return make


def stored_verdicts(folder: Path) -> dict[str, str]:
    stored = results.load(folder / "cpu-test-cpu-2-cores.json")
    return {comparison.name: comparison.verdict("fast") for comparison in stored}


def test_the_results_of_a_partial_run_join_those_in_the_folder(tmp_path, make_outcome):
    for outcome in (make_outcome("01", "first"), make_outcome("02", "second")):
        assert runner.store(outcome, tmp_path) == outcome
    runner.store(make_outcome("02", "second", "third", seconds=0.04), tmp_path)
    assert stored_verdicts(tmp_path) == {"first": "faster", "second": "slower", "third": "slower"}


def test_results_are_in_the_order_of_their_names_whichever_lesson_ended_first(tmp_path, make_outcome):
    for outcome in (make_outcome("02", "02_second"), make_outcome("01", "01_first")):
        runner.store(outcome, tmp_path)
    assert list(stored_verdicts(tmp_path)) == ["01_first", "02_second"]


def test_no_results_are_lost_to_another_lesson_of_the_run(tmp_path, make_outcome):
    first, second = make_outcome("a", "same"), make_outcome("b", "same", "other", seconds=0.04)
    third = make_outcome("c", "same", seconds=0.04)
    runner.store(first, tmp_path)
    failure = runner.store(second, tmp_path, [first]).failure
    assert failure.startswith("both a and b have a comparison called 'same', and a's is stored: give this one a name")
    assert runner.store(third, tmp_path, [first, second]).failure.startswith("both a and c")
    assert stored_verdicts(tmp_path) == {"same": "faster", "other": "slower"}


def test_what_could_not_be_stored_is_a_failure_beside_the_lessons_own(tmp_path, make_outcome):
    (tmp_path / "cpu-test-cpu-2-cores.json").write_text("{")
    failure = "cell 3; results could not be stored: .*cpu-test-cpu-2-cores.json: expected a results file"
    assert re.match(failure, runner.store(make_outcome("01", "first", failure="cell 3"), tmp_path).failure)
