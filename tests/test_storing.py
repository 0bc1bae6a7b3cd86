"""Tests of effgpu.storing: files that are written whole or not at all, and dataclasses that JSON held."""

import os
from dataclasses import dataclass

import pytest

from effgpu.storing import read_fields, write_atomic


def test_a_file_is_written_with_its_folder(tmp_path):
    path = write_atomic(str(tmp_path / "new folder" / "some.json"), "ä\n")
    assert path.read_text(encoding="utf-8") == "ä\n" and os.listdir(path.parent) == ["some.json"]


@pytest.mark.skipif(os.name != "posix", reason="links need a permission, and there are no named pipes")
def test_a_link_stays_one_and_what_is_no_file_is_written_as_it_is(tmp_path):
    """Else root's `--json /dev/null` would leave a file in its place."""
    folder, link, pipe = tmp_path / "folder", tmp_path / "link.json", tmp_path / "pipe"
    folder.mkdir()
    link.symlink_to("folder/some.json")
    for text in ("first", "second"):
        assert write_atomic(link, text) == link and link.is_symlink() and (folder / "some.json").read_text() == text
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(pipe, "told")
    assert os.read(reader, 10) == b"told" and pipe.is_fifo()
    os.close(reader)


def test_a_file_whose_folder_takes_no_other_is_written_in_its_place(tmp_path, monkeypatch):
    path = write_atomic(tmp_path / "some.json", "before")
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path)
    monkeypatch.setattr(os, "replace", None)
    assert write_atomic(path, "after").read_text() == "after" and os.listdir(tmp_path) == ["some.json"]


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
