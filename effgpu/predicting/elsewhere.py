"""Files that libraries open in C++, past Python: each library gets the name of the file that the script should find."""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple
from urllib.parse import quote, unquote

from effgpu.attaching.replacing import replaced
from effgpu.predicting import imports
from effgpu.predicting.files import Files
from effgpu.units import MiB

_LARGE = 256 * MiB  # a database that is only read here


class _Opener(NamedTuple):
    """A function, or a class's, and its argument that names a file; the mode, or the argument that has it."""

    function: str
    place: int
    name: str
    mode: str = "r"
    mode_at: int | None = None


_OPENERS = {
    "pyarrow": (
        _Opener("OSFile", 0, "path", mode_at=1),
        _Opener("memory_map", 0, "path", mode_at=1),
        _Opener("input_stream", 0, "source"),
        _Opener("output_stream", 0, "source", "w"),
    ),
    "pyarrow.ipc": (
        _Opener("open_file", 0, "source"),
        _Opener("open_stream", 0, "source"),
        _Opener("new_file", 0, "sink", "w"),
        _Opener("new_stream", 0, "sink", "w"),
    ),
    "pyarrow.csv": (_Opener("read_csv", 0, "input_file"), _Opener("write_csv", 1, "output_file", "w")),
    "pyarrow.feather": (_Opener("read_table", 0, "source"), _Opener("write_feather", 1, "dest", "w")),
    "pyarrow.parquet.core": (
        _Opener("ParquetFile.__init__", 1, "source"),
        _Opener("ParquetDataset.__init__", 1, "path_or_paths"),
        _Opener("ParquetWriter.__init__", 1, "where", "w"),
    ),
    "h5py._hl.files": (_Opener("File.__init__", 1, "name", mode_at=2),),
    "cv2": (_Opener("imread", 0, "filename"), _Opener("imwrite", 0, "filename", "w")),
    "soundfile": (_Opener("SoundFile.__init__", 1, "file", mode_at=2),),
    "torchvision.io.image": (_Opener("read_file", 0, "path"), _Opener("write_file", 0, "filename", "w")),
}


@contextlib.contextmanager
def past_python(files: Files) -> Iterator[None]:
    """Inside, these libraries and sqlite3 find the script's files, and write over none from before."""
    changes = {name: functools.partial(_change, files, openers) for name, openers in _OPENERS.items()}
    with replaced(_databases(files)), imports.changed(changes):
        yield


def _change(files: Files, openers: tuple[_Opener, ...], module: ModuleType) -> contextlib.AbstractContextManager:
    """Let functions of a module open what the script should find."""
    found = []
    for opener in openers:
        owner, _, name = opener.function.rpartition(".")
        owner = getattr(module, owner, None) if owner else module
        if real := getattr(owner, name, None):
            found.append((owner, name, _redirected(files, opener, real)))
    return replaced(found)


def _redirected(files: Files, opener: _Opener, real: Callable) -> Callable:
    @functools.wraps(real)
    def call(*args, **kwargs):
        mode = opener.mode
        if opener.mode_at is not None:
            given = args[opener.mode_at] if len(args) > opener.mode_at else kwargs.get("mode")
            mode = given or mode
        if files.is_elsewhere():
            pass
        elif opener.name in kwargs:
            kwargs[opener.name] = files.place(kwargs[opener.name], mode)
        elif len(args) > opener.place:
            there = files.place(args[opener.place], mode)
            args = (*args[: opener.place], there, *args[opener.place + 1 :])
        return real(*args, **kwargs)

    return call


def _databases(files: Files) -> Iterator[tuple[object, str, object]]:
    """sqlite3 writes into a copy of a database from before, beside which its journal has room."""
    try:
        import sqlite3
    except ImportError:
        return
    connect = sqlite3.connect

    @functools.wraps(connect)
    def connect_to_copy(database, *args, **kwargs):
        by_uri = bool(kwargs.get("uri")) and str(database).startswith("file:")
        name, _, query = os.fsdecode(database).removeprefix("file:" * by_uri).partition("?" if by_uri else "\0")
        name = unquote(name) if by_uri else name
        if files.is_elsewhere() or not name or name == ":memory:" or "mode=memory" in query:
            return connect(database, *args, **kwargs)
        found, large = files.find(name), os.path.exists(name) and os.path.getsize(name) > _LARGE
        if found is None and large and files.is_from_before(files.end(name)):
            files.place(name, "r")
            return connect(f"file:{quote(os.path.abspath(name))}?mode=ro", *args, **kwargs | {"uri": True})
        there = files.place(name, "r" if "mode=ro" in query else "r+")
        if there == name:
            return connect(database, *args, **kwargs)
        if found is None and os.path.exists(log := f"{name}-wal"):
            shutil.copyfile(log, f"{there}-wal")
        return (
            connect(f"file:{quote(there)}?{query}", *args, **kwargs | {"uri": True})
            if by_uri
            else connect(there, *args, **kwargs)
        )

    yield sqlite3, "connect", connect_to_copy
    yield sqlite3.dbapi2, "connect", connect_to_copy
