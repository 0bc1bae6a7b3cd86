"""What lessons showed, read from notebooks; which lessons there are."""

import re
from dataclasses import replace

import nbformat
import pytest
from conftest import predicted_sizes
from tiny_lessons import write_lesson

from effgpu.comparison import Comparison
from effgpu.course import lessons
from effgpu.course.outcomes import Outcome, read_lessons
from effgpu.units import GiB


def test_lessons_are_found_beside_the_package_from_anywhere_and_named_in_one_of_five_ways(tmp_path, monkeypatch):
    folder = tmp_path / "notebooks"
    for name in ("01_anatomy", "02_dataloader", "03_pinned_memory"):
        write_lesson(folder, name)
    found = lambda *names: [path.stem[:2] for path in lessons.find_lessons(names)]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(lessons, "LESSONS", folder)
    assert found() == ["01", "02", "03"]
    monkeypatch.setattr(lessons, "LESSONS", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no lessons"):
        found()
    monkeypatch.chdir(tmp_path)
    assert found() == ["01", "02", "03"] and found("03", "pinned_memory", "01") == ["03", "01"]
    for name in ("02", "02_dataloader", "dataloader", "02_dataloader.ipynb", str(folder / "02_dataloader.ipynb")):
        assert found(name) == ["02"]


FIRST_SCREEN = "# A title: and more\n\n**One *bold* `sentence`.** Another.\n\n| | |\n|---|---|\n| **Buys** | time |"


def test_a_lesson_tells_its_title_and_its_first_bold_sentence_and_other_files_are_passed_over(tmp_path):
    (tmp_path / "03_broken.ipynb").write_text("{")
    (tmp_path / "04_foreign.ipynb").write_text('{"nbformat": 4, "nbformat_minor": 5, "cells": [{}], "metadata": {}}')
    for name, first in {"01_new": FIRST_SCREEN, "02_old": "# Old\n\n**The claim.** Words.", "my_own": "# Mine"}.items():
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(first)])
        nbformat.write(notebook, tmp_path / f"{name}.ipynb")
    expected = [("01_new", "A title: and more", "One bold sentence."), ("02_old", "Old", "")]
    found = read_lessons(tmp_path)
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
        return Outcome("01_some", "Some", (Comparison("01_some", (old, new), **fields),)).headline

    return make


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seconds": 0.5}, "2.00 × faster [2.00, 2.00]"),
        ({"seconds": 0.5, "peak": 1500}, "2.00 × faster [2.00, 2.00], +50 % memory"),
        ({"peak": 500}, "−50 % memory, same time (within 1 %)"),
        ({"peak": 500, "noise": True}, "−50 % memory"),
        ({"seconds": 2.0, "peak": 500}, "−50 % memory, 2.00 × slower [2.00, 2.00]"),
        ({"peak": 995, "noise": True}, "inconclusive (too noisy, above ±79 %)"),
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
        headline = Outcome("01_some", "Some", (Comparison(name, rows, **expected),)).headline
        return headline and headline.label

    assert label() == "d" and label(predicted={each: {"time": 0.5} for each in "bc"}) == "c"
    assert label("01_other") is None and label(labels="a") is None
