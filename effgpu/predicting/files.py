"""What a script does with files while it is looked at: no checkpoint is written, and no file from before is lost.

A script rotates its files: it lists them, renames or deletes an old checkpoint, and writes a new one. Here the new one
is not written, as its weights have no values, or are thrown away. So the old one stays, and what would have been
written is there for the script alone: it can be listed, loaded, looked at, copied, renamed and deleted. What it writes
in place of any file from before, such as a log or the best loss so far, goes into a file without a name: it may hold
values that nobody knows.
"""

import builtins
import contextlib
import errno
import functools
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from effgpu.attaching.replacing import replaced

_NAMES = "src", "dst", "path", "file"  # of arguments that say which file
_open = open  # Python's own, also of what a script takes for deleted
_DIRECTORIES = "dir_fd", "src_dir_fd", "dst_dir_fd"  # which a name is relative to, in what rmtree calls


class Saved(NamedTuple):
    """What a file would hold: a value, or what another file holds, which was not moved."""

    value: object = None
    source: str | None = None


class _Entry:
    """What `os.scandir` would give of a file that was not written."""

    def __init__(self, folder: str, name: str):
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, **_) -> os.stat_result:
        return os.stat(self.path)

    def is_file(self, **_) -> bool:
        return True

    def is_dir(self, **_) -> bool:
        return False

    is_symlink = is_junction = is_dir


class _Entries(contextlib.closing):
    """What `os.scandir` gives: an iterator that can be closed, by `with` too."""

    def __init__(self, entries: Iterable):
        super().__init__(self)
        self._entries = iter(entries)

    def __iter__(self) -> Iterator:
        return self._entries

    def __next__(self) -> object:
        return next(self._entries)

    def close(self) -> None:
        self._entries = iter(())


class Files:
    """What a script has saved, by path, without having written it; and which files from before were left alone."""

    def __init__(self, began: float):
        self.unwritten: dict[str, None] = {}  # what was not written, for its weights
        self._left_alone: dict[str, None] = {}
        self._began = began
        self._saved: dict[str, Saved] = {}  # by path
        self._gone: set[str] = set()  # what the script has deleted, and what was left alone
        self._stand_ins: dict[str, str] = {}  # the path of what a file stands for that the script writes in its place
        self._open: list[BinaryIO] = []  # these files, which nobody else finds

    def tell(self, why: str) -> list[str]:
        """What was not written, as of its weights `why` is true, and which files from before were left alone."""
        unwritten = [f"not written, as its weights {why}: {what}" for what in self.unwritten]
        return unwritten + [f"left as it is, a file from before: {file}" for file in self._left_alone]

    def names(self, file: object) -> bool:
        """Whether it is a file with a name, or its name: no pipe, and no memory."""
        return self._path(file) is not None

    def aside(self, file: object) -> str:
        """A file to write in place of this one, which the script alone finds."""
        saved = self.find(file)
        return saved.source if saved and saved.source in self._stand_ins else self._stand_in(file)

    def save(self, file: object, value: object) -> None:
        """Remember what would be in this file from now on."""
        if path := self._path(file):
            self._saved[path] = Saved(value)
            self._gone.discard(path)

    def keep(self, file: object, value: object) -> bool:
        """Whether a file is from before, and left alone: then the value is saved for the script."""
        if left := self._leave(file):
            self.save(file, value)
        return left

    def find(self, file: object) -> Saved | None:
        """What a file would hold; None where it holds that."""
        return self._saved.get(self._path(file))

    def __contains__(self, file: object) -> bool:
        return self._path(file) in self._saved

    def name(self, file: object) -> str:
        """What a person calls a file that is named, or open."""
        if (path := _path(file)) in self._stand_ins:
            return os.path.relpath(self._stand_ins[path])
        return str(file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", file))

    def _path(self, file: object) -> str | None:
        path = _path(file)
        return self._stand_ins.get(path, path)

    def _stand_in(self, file: object, filled: object = None) -> str:
        """A file for the script to write and read in place of one from before: empty, or `filled` with another's."""
        path = self._path(file)
        folder = os.path.dirname(path)  # where there is room for it
        self._open.append(tempfile.TemporaryFile(dir=folder if os.access(folder, os.W_OK) else None))  # noqa: SIM115
        if filled is not None:
            with _open(filled, "rb") as before:
                shutil.copyfileobj(before, self._open[-1])
            self._open[-1].flush()
        source = f"/dev/fd/{self._open[-1].fileno()}"
        self._stand_ins[source], self._saved[path] = path, Saved(source=source)
        self._gone.discard(path)
        return source

    def _is_from_before(self, file: object) -> bool:
        """Whether it is a file, or a folder with one, from before the script was started."""
        if (name := _path(file)) is None:  # a pipe, or memory
            return False
        path = Path(name)
        if self._path(file) in self._gone or ((saved := self.find(file)) and saved.source in self._stand_ins):
            return True
        try:
            if path.is_dir():
                return any(map(self._is_from_before, path.iterdir()))
            return path.is_file() and path.stat().st_mtime < self._began
        except OSError:
            return False

    def _leave(self, file: object) -> bool:
        """Whether to leave a file alone, as it is from before."""
        if left := self._is_from_before(file):
            name, here = self.name(file), os.getcwd() + os.sep
            self._left_alone[name.removeprefix(here)] = None
        return left

    def _listed(self, folder: str | os.PathLike, found: Iterable, name_of: Callable, make: Callable) -> list:
        """What a script finds in a folder: not what it has deleted, but what it has saved."""
        whole, folder = self._path(folder), os.fspath(folder)
        there = [each for each in found if os.path.join(whole, name_of(each)) not in self._gone]
        names = {name_of(each) for each in there}
        saved = [os.path.basename(path) for path in self._saved if os.path.dirname(path) == whole]
        return there + [make(folder, name) for name in saved if name not in names]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a script keeps its files from before."""
        ways = {
            os: {
                "rename": self._move,
                "replace": self._move,
                "link": self._link,
                "symlink": self._link,
                "remove": self._remove,
                "unlink": self._remove,
                "mkdir": self._make,
                "stat": self._look,
                "listdir": self._list_names,
                "scandir": self._scan,
            },
            shutil: {"copyfile": self._copy, "copy": self._copy, "copy2": self._copy, "rmtree": self._remove},
            builtins: {"open": self._open_other},
            io: {"open": self._open_other},
        }
        every = ((owner, name, way) for owner, by_name in ways.items() for name, way in by_name.items())
        with replaced((owner, name, _instead(getattr(owner, name), way)) for owner, name, way in every):
            yield

    def _move(self, real: Callable, source, target, *args, **kwargs):
        old, new = self._path(source), self._path(target)
        if source in self:
            self._saved[new] = self._saved.pop(old)
            if os.path.lexists(source) and not self._leave(source):  # a temporary file, which has no values
                os.remove(source)
        elif self._leave(source):
            self._saved[new] = Saved(source=old)
        elif not self._leave(target):
            return real(source, target, *args, **kwargs)
        elif os.path.isdir(source):
            self._saved[new] = Saved(source=old)
        else:
            self._stand_in(target, source)
            os.remove(source)
        self._gone.discard(new)
        self._gone |= {old} & {*filter(os.path.lexists, [old])}
        return target

    def _copy(self, real: Callable, source, target, *args, **kwargs):
        inside = Path(target, Path(source).name) if os.path.isdir(target) else target
        if source in self:
            self._saved[self._path(inside)] = self._saved[self._path(source)]
            self._gone.discard(self._path(inside))
        elif self._leave(inside):
            self._stand_in(inside, source)
        else:
            return real(source, target, *args, **kwargs)
        return target

    def _link(self, real: Callable, source, target, *args, **kwargs):
        beside = os.path.join(os.path.dirname(target), source)  # what a symbolic link's source is relative to
        if found := self.find(source) or self.find(beside):
            self._saved[self._path(target)] = found
        else:
            real(source, target, *args, **kwargs)

    def _remove(self, real: Callable, file, *args, **kwargs):
        if self._path(file) in self._gone and not kwargs.get("ignore_errors"):
            raise _missing(file)
        saved = self._saved.pop(self._path(file), None)
        if self._leave(file):
            inside = Path(file).rglob("*") if os.path.isdir(file) else ()
            self._gone |= {self._path(file), *map(self._path, inside)}
        elif saved is None or os.path.lexists(file):
            real(file, *args, **kwargs)

    def _make(self, real: Callable, folder, *args, **kwargs):
        if self._path(folder) not in self._gone:
            return real(folder, *args, **kwargs)
        self._gone.remove(self._path(folder))

    def _look(self, real: Callable, file, *args, **kwargs):
        saved = self.find(file)
        if self._path(file) in self._gone:
            raise _missing(file)
        if saved and saved.source:
            return real(saved.source, *args, **kwargs)
        try:
            return real(file, *args, **kwargs)
        except FileNotFoundError:
            if not saved:
                raise
        now = int(time.time())
        return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), 0, now, now, now))

    def _open_other(self, real: Callable, file, mode="r", *args, **kwargs):
        saved, gone = self.find(file), self._path(file) in self._gone
        writes = {*"wax+"} & {*mode} and not os.path.isdir(file)  # into a folder goes a temporary file
        source = saved.source if saved else None
        if gone and "r" in mode:
            raise _missing(file)
        if source in self._stand_ins or (source and not writes):
            file = source
        elif writes and (source or self._leave(file)):
            stays = None if gone or {*"wx"} & {*mode} else source or file
            file, mode = self._stand_in(file, stays), mode.replace("x", "w" if gone else "x")
        return real(file, mode, *args, **kwargs)

    def _list_names(self, real: Callable, folder=None, *args):
        if not isinstance(folder := "." if folder is None else folder, (str, os.PathLike)):
            return real(folder, *args)
        return self._listed(folder, real(folder), str, lambda _, name: name)

    def _scan(self, real: Callable, folder=None, *args):
        if not isinstance(folder := "." if folder is None else folder, (str, os.PathLike)):
            return real(folder, *args)
        with real(folder) as entries:
            return _Entries(self._listed(folder, entries, lambda entry: entry.name, _Entry))


def _instead(real: Callable, way: Callable) -> Callable:
    @functools.wraps(real)
    def call(*args, **kwargs):
        if any(kwargs.get(name) is not None for name in _DIRECTORIES):
            return real(*args, **kwargs)
        named = [kwargs.pop(name) for name in _NAMES if name in kwargs]
        return way(real, *args, *named, **kwargs)

    return call


def _missing(file: object) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(file))


def _path(file: object) -> str | None:
    """The whole path of a file that is named, or open."""
    name = file if isinstance(file, (str, bytes, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else None
