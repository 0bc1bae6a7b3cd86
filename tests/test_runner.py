"""Tiny notebooks run in real kernels."""

import asyncio
import base64
import io
import itertools
import re
import time
from dataclasses import replace
from pathlib import Path

import nbformat
import numpy as np
import pytest
from conftest import predicted_sizes
from matplotlib.patches import Rectangle
from PIL import Image, ImageColor

from effgpu import results
from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.course import runner
from effgpu.figures.panels import to_png
from effgpu.figures.plot import plot
from effgpu.measuring.device import Device
from effgpu.measuring.measurement import Measurement
from effgpu.units import GiB

CALCULATOR = Device("Pocket calculator", "cpu", 2**30, 1, versions={"torch": "2.8.0"})
MADE = Measurement("old", ((0.2, 0.21),) * 15, CALCULATOR, peak_allocated=2000)
PICTURE = """\
from IPython.display import display
display({"image/png": "aGVsbG8=\\n", "text/plain": "Figure"}, raw=True)"""
WIPED_BAR = "import sys\nprint('\\r 1/2', end='', file=sys.stderr)\nprint('\\r      \\r', end='', file=sys.stderr)"
FAILING = "\n# a comment\nraise ArithmeticError('no such number\\nat all')"
DYING = "import os\nos._exit(1)"


def write_lesson(folder: Path, name: str, *sources: str) -> Path:
    """A notebook with a heading and these code cells, as JupyterLab would leave it: executed once, long ago."""
    cells = [nbformat.v4.new_markdown_cell(f"# The {name} lesson\n![a drawing](../images/a.svg)")]
    for number, source in enumerate(sources):
        stale = nbformat.v4.new_output("stream", text="stale")
        timing = {"execution": {"iopub.execute_input": "2020-01-01T00:00:00Z"}}
        cells.append(nbformat.v4.new_code_cell(source, outputs=[stale], execution_count=number + 7, metadata=timing))
    metadata = {"language_info": {"name": "python", "version": "3.1"}, "kernelspec": {"name": "x", "display_name": "X"}}
    metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def compares(name: str, seconds: float = 0.1) -> str:
    """The source of a cell that shows a comparison, without importing torch in its kernel."""
    slow = Measurement("slow", ((0.2, 0.2),) * 15, CALCULATOR, peak_allocated=2000)
    fast = Measurement("fast", ((seconds, seconds),) * 15, CALCULATOR, peak_allocated=1000)
    shown = {MIME_TYPE: Comparison(name, (slow, fast)).to_dict(), "text/plain": ""}
    return f"from IPython.display import display\ndisplay({shown}, raw=True)"


@pytest.fixture
def out(tmp_path) -> Path:
    runner.prepare(tmp_path / "out")
    return tmp_path / "out"


def test_lessons_are_found_beside_the_package_from_anywhere_and_named_in_one_of_five_ways(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    for name in ("01_anatomy", "02_dataloader", "03_pinned_memory"):
        write_lesson(folder, name)
    found = lambda *names: [path.stem[:2] for path in runner.find_lessons(names)]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runner, "LESSONS", folder)
    assert found() == ["01", "02", "03"]
    monkeypatch.setattr(runner, "LESSONS", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no lessons"):
        found()
    monkeypatch.chdir(tmp_path)
    assert found() == ["01", "02", "03"] and found("03", "pinned_memory", "01") == ["03", "01"]
    for name in ("02", "02_dataloader", "dataloader", "02_dataloader.ipynb", str(folder / "02_dataloader.ipynb")):
        assert found(name) == ["02"]


def test_an_executed_lesson_carries_all_that_it_measured(tmp_path, out):
    again = compares("good", 0.15), compares("good")  # another of the same name, and the first once more
    plots = f"# effgpu.plot(result)\n{PICTURE}", f"# effgpu.plot(traces)\n{PICTURE}"  # of the comparison above, or not
    cells = f"{PICTURE}\n{compares('good')}", PICTURE, *again, compares("other", 0.05), *plots
    lesson = write_lesson(tmp_path, "05_good", *cells)
    shares = []
    outcome = asyncio.run(runner._run_lesson(lesson, out / "notebooks", False, shares.append))
    assert (outcome.name, outcome.title, outcome.failure) == ("05_good", "The 05_good lesson", None)
    found = {comparison.name: comparison["fast"].times[0] for comparison in outcome.comparisons}
    assert found == {"good": 0.1, "good-2": 0.15, "other": 0.05}
    first, _, last = (comparison.alt_text() for comparison in outcome.comparisons)
    assert "fast: 2.00 × faster" in first and "fast: 4.00 × faster" in last
    words = "Plot of the lesson The 05_good lesson"
    assert list(outcome.pictures) == [runner.Picture("aGVsbG8=", alt) for alt in (first, words, last, words)]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert runner.read_lessons(out / "notebooks") == [outcome]


def test_an_executed_lesson_has_nothing_of_the_machine_or_the_hour(tmp_path, out):
    after_words = "print('words')\n" + WIPED_BAR.replace("stderr", "stdout")
    lesson = write_lesson(tmp_path, "stable", compares("stable"), WIPED_BAR, after_words)
    list(runner.run([lesson], out))
    first = (out / "notebooks" / "stable.ipynb").read_bytes()
    notebook = nbformat.reads(first.decode(), as_version=4)
    assert notebook.metadata.language_info == {"name": "python"}
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert all(not cell.metadata for cell in notebook.cells)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3]
    assert notebook.cells[2].outputs == [] and notebook.cells[3].outputs[0].text == "words\n"  # nothing of the bar
    list(runner.run([out / "notebooks" / "stable.ipynb"], out))
    assert (out / "notebooks" / "stable.ipynb").read_bytes() == first


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


def test_outputs_say_which_device_and_which_code_they_are_of(tmp_path, out, make_gpu):
    lesson = write_lesson(tmp_path, "01_some", compares("some"))
    missing = lambda: [runner.is_missing(lesson, device) for device in (CALCULATOR, make_gpu())]
    assert runner.find_origin(lesson) is None and missing() == [True, True]
    list(runner.run([lesson], out, inplace=True))
    stored = [runner.find_origin(path).device for path in (lesson, out / "notebooks" / lesson.name)]
    assert stored == [CALCULATOR.slug] * 2 and missing() == [False, True]
    notebook = nbformat.read(lesson, as_version=4)
    notebook.cells[0].source += "\nMore prose."
    nbformat.write(notebook, lesson)
    assert missing() == [False, True] and runner.lessons_of_gpus([lesson]) == []
    notebook.metadata["effgpu"]["device"] = make_gpu().slug
    nbformat.write(notebook, lesson)
    assert missing() == [False, False], "a CPU has nothing better"
    assert runner.lessons_of_gpus([lesson]) == ["01_some"]
    notebook.cells[1].source += "\n1 + 1"
    nbformat.write(notebook, lesson)
    assert missing() == [True, True] and runner.lessons_of_gpus([lesson]) == []


def test_lessons_at_once_take_turns_on_the_gpu_but_not_while_they_predict(tmp_path, out):
    """CUDA counts as in use from the second cell on. A turn of it is a cell, less what is `free` in it."""
    write = "with open('log', 'a') as log: log.write(f'{what} {time.monotonic()} ')"
    work = f"for what in ('begin', 'end'):\n    {write}\n    time.sleep(0.3)"
    predict = "from effgpu.measuring import gpu_lock\nwith gpu_lock.free():\n    time.sleep(1.5)"
    settings = "import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['TORCH_CPP_LOG_LEVEL'])"
    cells = [f"{settings}\nimport time, torch\ntorch.cuda.is_initialized = lambda: True", work, predict, work]
    lessons = [write_lesson(tmp_path / name, name, *cells) for name in ("a", "b")]
    outcomes = list(runner.run(lessons, out, at_once=2))
    assert {outcome.name for outcome in outcomes} == {"a", "b"} and not any(outcome.failure for outcome in outcomes)
    turns = []
    told = nbformat.read(out / "notebooks" / "a.ipynb", as_version=4).cells[1].outputs[0].text.split()
    assert int(told[0]) >= 1 and told[1] == "ERROR", "a log line of PyTorch's holds the hour"
    for name in ("a", "b"):
        words = (tmp_path / name / "log").read_text().split()[1::2]
        turns += zip(map(float, words[::2]), map(float, words[1::2]))
    turns.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(turns)), "two at once"
    assert turns[-1][1] - turns[0][0] < 2 * 1.5 + 4 * 0.6, "each waited while the other one predicted"


def test_what_does_not_fit_into_the_budget_is_left_out_and_named(tmp_path, out):
    sources = {"1": compares("1"), "2": "import time; time.sleep(100)", "3": "1 + 1"}
    lessons = [write_lesson(tmp_path, name, source) for name, source in sources.items()]
    began = time.monotonic()
    outcomes = {outcome.name: outcome.failure for outcome in runner.run(lessons, out, budget=8)}
    assert outcomes == {"1": None} | dict.fromkeys("23", runner.OUT_OF_TIME)
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
            failure = runner.INTERRUPTED
        return runner.Outcome(path.name, path.name, failure=failure, seconds=time.monotonic() - began)

    monkeypatch.setattr(runner, "_run_lesson", run_lesson)
    outcomes = list(runner.run([Path(name) for name in "abcdefghij"], out, budget=4))
    assert {each.name for each in outcomes if each.failure} == set(left_out)
    assert all(each.failure == runner.OUT_OF_TIME and 0.5 < each.seconds < 4 for each in outcomes if each.failure)
    assert begun[:10] == list("abcdefghij") and begun[10] == "a"
    assert sorted(each.name for each in outcomes) == list("abcdefghij"), "each once"


def test_pictures_are_stored_light_and_look_the_same():
    """Areas keep their colours. Small ones, as in a legend, keep their hue."""
    figure = plot(Comparison("some", (MADE, replace(MADE, label="new"))))
    sides = {"#eef7fc": 0.1, "#e5f1f8": 0.1, "#8cbedc": 0.02, "#8dd3c1": 0.02}
    for place, (color, side) in enumerate(sides.items()):
        figure.add_artist(Rectangle((0.2 * place, 0), side, side, color=color))
    png = to_png(figure)
    light = base64.b64decode(runner.lighten(base64.b64encode(png).decode()))
    before, after = (np.asarray(Image.open(io.BytesIO(each)).convert("RGB"), dtype=int) for each in (png, light))
    assert len(light) < 0.45 * len(png) and before.shape == after.shape
    assert np.abs(before - after).mean() < 0.5 and np.abs(before - after).max() < 60
    apart = [np.abs(after - ImageColor.getrgb(color)).max(axis=-1).min() for color in sides]
    assert apart[:2] == [0, 0] and max(apart) < 24
    assert runner.lighten(base64.b64encode(light).decode()) == base64.b64encode(light).decode()


def test_what_is_no_plot_is_stored_as_it_is():
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    photograph = base64.b64encode(file.getvalue()).decode()
    assert [runner.lighten(each) for each in (photograph, "aGVsbG8=")] == [photograph, "aGVsbG8="]


FIRST_SCREEN = "# A title: and more\n\n**One *bold* `sentence`.** Another.\n\n| | |\n|---|---|\n| **Buys** | time |"


def test_a_lesson_tells_its_title_and_its_first_bold_sentence_and_other_files_are_passed_over(tmp_path):
    (tmp_path / "03_broken.ipynb").write_text("{")
    (tmp_path / "04_foreign.ipynb").write_text('{"nbformat": 4, "nbformat_minor": 5, "cells": [{}], "metadata": {}}')
    for name, first in {"01_new": FIRST_SCREEN, "02_old": "# Old\n\n**The claim.** Words.", "my_own": "# Mine"}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(first)])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    expected = [("01_new", "A title: and more", "One bold sentence."), ("02_old", "Old", "")]
    found = runner.read_lessons(tmp_path)
    assert [(lesson.name, lesson.title, lesson.about) for lesson in found] == [*expected, ("my_own", "Mine", "")]


@pytest.fixture
def make_headline(make_measurement):
    """A function that makes the headline of a lesson: the variant "new" takes so many seconds and bytes, "old" 1, 1000.

    With `noise` the interval of its time includes 1. Without seconds it ran out of memory.
    """

    def make(seconds=1.0, peak=1000, noise=False, old_failed=False, **fields):
        old = make_measurement("old", 1.0, failed=old_failed)
        new = make_measurement("new", seconds or 1, peak_allocated=peak, failed=seconds is None)
        if noise:
            new = replace(new, turns=tuple((seconds * (0.5 if n % 2 else 1.6),) * 2 for n in range(16)))
        return runner.Outcome("01_some", "Some", (Comparison("01_some", (old, new), **fields),)).headline

    return make


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seconds": 0.5}, "2.00 × faster [2.00, 2.00]"),
        ({"seconds": 0.5, "peak": 1500}, "2.00 × faster [2.00, 2.00], +50 % memory"),
        ({"peak": 500}, "−50 % memory, same time (within 1 %)"),
        ({"peak": 500, "noise": True}, "−50 % memory"),
        ({"seconds": 2.0, "peak": 500}, "−50 % memory, 2.00 × slower [2.00, 2.00]"),
        ({"peak": 995, "noise": True}, "inconclusive (±79 %)"),
        ({"seconds": None}, "out of memory"),
        ({"old_failed": True}, "runs where old does not (out of memory)"),
    ],
)
def test_a_headline_says_what_is_gained_first(make_headline, fields, told):
    assert re.sub(r"±\d+", "±79", make_headline(**fields).tell()) == told


def test_a_headline_tells_what_is_predicted_at_a_gpus_size(make_headline):
    def told(*needed):
        return make_headline(full_size=predicted_sizes(*needed)).full_size

    assert told(20 * GiB, 5 * GiB) == "4.00 × faster, 20.0 → 5.00 GiB on a T4, so that it fits (predicted)"
    assert told(2 * GiB, GiB // 2, ("fits", "fits")) == "4.00 × faster, 2.00 GiB → 512 MiB on a T4 (predicted)"
    assert told(GiB, GiB, ("fits", "fits")) == "4.00 × faster on a T4 (predicted)"
    assert make_headline().full_size == told(GiB, GiB, ["fits"], ["new"]) == ""


def test_the_headline_is_of_the_last_variant_with_a_prediction(make_measurement):
    def label(name="01_some", labels="abcd", **expected):
        rows = tuple(make_measurement(each) for each in labels)
        headline = runner.Outcome("01_some", "Some", (Comparison(name, rows, **expected),)).headline
        return headline and headline.label

    assert label() == "d" and label(predicted={each: {"time": 0.5} for each in "bc"}) == "c"
    assert label("01_other") is None and label(labels="a") is None


def test_a_dead_kernel_is_noticed_at_once(tmp_path, out, monkeypatch):
    monkeypatch.setattr(runner, "CELL_TIMEOUT", 300)  # not noticed, it would be a CellTimeoutError
    lesson = write_lesson(tmp_path, "dying", compares("before"), DYING, "1 + 1")
    (outcome,) = runner.run([lesson], out)
    assert outcome.failure == "cell [2] 'import os': DeadKernelError: Kernel died"
    assert [comparison.name for comparison in outcome.comparisons] == ["before"]
    assert runner.read_lessons(out / "notebooks") == [outcome]


def test_a_cell_that_takes_too_long_is_ended(tmp_path, out, monkeypatch):
    monkeypatch.setattr(runner, "CELL_TIMEOUT", 1)
    slow = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    (outcome,) = runner.run([write_lesson(tmp_path, "sleepy", slow)], out)
    assert outcome.failure.startswith("cell [1] 'import os, time': CellTimeoutError")
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


@pytest.fixture
def make_outcome(make_measurement):
    """A function that makes what a lesson gave: comparisons of these names."""

    def make(lesson, *named, seconds=0.01, failure=None):
        rows = make_measurement("slow", 0.02), make_measurement("fast", seconds)
        return runner.Outcome(lesson, lesson, tuple(Comparison(name, rows) for name in named), failure=failure)

    return make


def stored_verdicts(folder: Path) -> dict[str, str]:
    stored = results.load(folder / "cpu-test-cpu-2-cores.json")
    return {comparison.name: comparison.verdict("fast") for comparison in stored}


def test_the_results_of_a_partial_run_join_those_in_the_folder(tmp_path, make_outcome):
    for outcome in (make_outcome("01", "first"), make_outcome("02", "second")):
        assert runner.store(outcome, tmp_path) == outcome
    runner.store(make_outcome("02", "second", "third", seconds=0.04), tmp_path)
    assert stored_verdicts(tmp_path) == {"first": "faster", "second": "slower", "third": "slower"}


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
