"""Tests of effgpu.storing: files that are written whole or not at all, and dataclasses that JSON held."""

import os
from dataclasses import dataclass

import pytest

from effgpu.storing import read_fields, write_atomic


def test_a_file_is_written_with_its_folder(tmp_path):
    path = write_atomic(str(tmp_path / "new folder" / "some.json"), "ä\n")
    assert path.read_text(encoding="utf-8") == "ä\n" and os.listdir(path.parent) == ["some.json"]


@pytest.mark.parametrize("fault", [OSError("no space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, fault):
    path = write_atomic(tmp_path / "some.json", "before")

    def fail(*_):
        raise fault

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(fault), match=r"some\.json: .*no space" if isinstance(fault, OSError) else None):
        write_atomic(path, "after")
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["some.json"]


@dataclass
class Point:
    places: tuple
    name: str = ""


def test_fields_are_read_with_tuples_for_lists_and_without_those_of_another_edition():
    assert read_fields(Point, {"places": [[1, 2], [3]], "colour": "red"}) == {"places": ((1, 2), (3,))}
