"""Tiny lessons executed in real kernels: what is in their outputs, and what is not; kernels that die or hang."""

import asyncio
from pathlib import Path

import nbformat
from tiny_lessons import CALCULATOR, compares, write_lesson

from effgpu.course import execution
from effgpu.course.execution import run_lesson
from effgpu.course.lessons import find_origin, is_missing, lessons_of_gpus
from effgpu.course.outcomes import Picture, read_lessons

PICTURE = """\
from IPython.display import display
display({"image/png": "aGVsbG8=\\n", "text/plain": "Figure"}, raw=True)"""
WIPED_BAR = "import sys\nprint('\\r 1/2', end='', file=sys.stderr)\nprint('\\r      \\r', end='', file=sys.stderr)"
DYING = "import os\nos._exit(1)"


def execute(lesson, folder, inplace=False, progress=lambda share: None):
    """The outcome of a lesson, which is written into the folder as it was executed."""
    return asyncio.run(run_lesson(lesson, folder, inplace, progress))


def test_an_executed_lesson_carries_all_that_it_measured(tmp_path):
    again = compares("good", 0.15), compares("good")  # another of the same name, and the first once more
    plots = f"# effgpu.plot(result)\n{PICTURE}", f"# effgpu.plot(traces)\n{PICTURE}"  # of the comparison above, or not
    cells = f"{PICTURE}\n{compares('good')}", PICTURE, *again, compares("other", 0.05), *plots
    lesson = write_lesson(tmp_path, "05_good", *cells)
    shares = []
    outcome = execute(lesson, tmp_path / "out", progress=shares.append)
    assert (outcome.name, outcome.title, outcome.failure) == ("05_good", "The 05_good lesson", None)
    found = {comparison.name: comparison["fast"].times[0] for comparison in outcome.comparisons}
    assert found == {"good": 0.1, "good-2": 0.15, "other": 0.05}
    first, _, last = (comparison.alt_text() for comparison in outcome.comparisons)
    assert "fast: 2.00 × faster" in first and "fast: 4.00 × faster" in last
    words = "Plot of the lesson The 05_good lesson"
    assert list(outcome.pictures) == [Picture("aGVsbG8=", alt) for alt in (first, words, last, words)]
    assert shares[0] == 0 and shares[-1] == 1 and shares == sorted(shares)
    assert read_lessons(tmp_path / "out") == [outcome]


def test_an_executed_lesson_has_nothing_of_the_machine_or_the_hour(tmp_path):
    after_words = "print('words')\n" + WIPED_BAR.replace("stderr", "stdout")
    lesson = write_lesson(tmp_path, "stable", compares("stable"), WIPED_BAR, after_words)
    execute(lesson, tmp_path / "out")
    first = (tmp_path / "out" / "stable.ipynb").read_bytes()
    notebook = nbformat.reads(first.decode(), as_version=4)
    assert notebook.metadata.language_info == {"name": "python"}
    assert notebook.metadata.kernelspec.name == "python3" and "widgets" not in notebook.metadata
    assert all(not cell.metadata for cell in notebook.cells)
    assert [cell.execution_count for cell in notebook.cells[1:]] == [1, 2, 3]
    assert notebook.cells[2].outputs == [] and notebook.cells[3].outputs[0].text == "words\n"  # nothing of the bar
    execute(tmp_path / "out" / "stable.ipynb", tmp_path / "out")
    assert (tmp_path / "out" / "stable.ipynb").read_bytes() == first


def test_outputs_say_which_device_and_which_code_they_are_of(tmp_path, make_gpu):
    lesson = write_lesson(tmp_path, "01_some", compares("some"))
    missing = lambda: [is_missing(lesson, device) for device in (CALCULATOR, make_gpu())]
    assert find_origin(lesson) is None and missing() == [True, True]
    execute(lesson, tmp_path / "out", inplace=True)
    stored = [find_origin(path).device for path in (lesson, tmp_path / "out" / lesson.name)]
    assert stored == [CALCULATOR.slug] * 2 and missing() == [False, True]
    notebook = nbformat.read(lesson, as_version=4)
    notebook.cells[0].source += "\nMore prose."
    nbformat.write(notebook, lesson)
    assert missing() == [False, True] and lessons_of_gpus([lesson]) == []
    notebook.metadata["effgpu"]["device"] = make_gpu().slug
    nbformat.write(notebook, lesson)
    assert missing() == [False, False], "a CPU has nothing better"
    assert lessons_of_gpus([lesson]) == ["01_some"]
    notebook.cells[1].source += "\n1 + 1"
    nbformat.write(notebook, lesson)
    assert missing() == [True, True] and lessons_of_gpus([lesson]) == []


def test_a_dead_kernel_is_noticed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "CELL_TIMEOUT", 300)  # not noticed, it would be a CellTimeoutError
    lesson = write_lesson(tmp_path, "dying", compares("before"), DYING, "1 + 1")
    outcome = execute(lesson, tmp_path / "out")
    assert outcome.failure == "cell [2] 'import os': DeadKernelError: Kernel died"
    assert [comparison.name for comparison in outcome.comparisons] == ["before"]
    assert read_lessons(tmp_path / "out") == [outcome]


def test_a_cell_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "CELL_TIMEOUT", 1)
    slow = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(600)"
    outcome = execute(write_lesson(tmp_path, "sleepy", slow), tmp_path / "out")
    assert outcome.failure.startswith("cell [1] 'import os, time': CellTimeoutError")
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()
