"""What stands in place of Python's functions of files while a script is looked at: `files.py` knows what was done."""

import builtins
import bz2
import contextlib
import errno
import functools
import io
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from unittest.mock import patch

from effgpu.attaching.replacing import replaced
from effgpu.predicting import imports
from effgpu.predicting.files import Files, Moved, Saved, describe, is_folder, is_there, lies_in, missing

_NAMES = "src", "dst", "path", "file"  # of arguments that say which file
_DIRECTORIES = "dir_fd", "src_dir_fd", "dst_dir_fd"  # which a name is relative to, in what rmtree calls
# Python's own
_open, _stat, _lstat, _remove = open, os.stat, os.lstat, os.remove


@contextlib.contextmanager
def kept(files: Files) -> Iterator[None]:
    """Inside, a script keeps its files from before, and finds what it has done to them. Of what it made, none stays."""
    calls = _Calls(files)
    files.look_around()
    ways = {
        os: {
            "rename": calls.move,
            "replace": calls.move,
            "link": calls.link,
            "symlink": calls.link_by_name,
            "remove": calls.remove,
            "unlink": calls.remove,
            "mkdir": calls.make,
            "rmdir": calls.remove_empty,
            "stat": calls.look,
            "lstat": calls.look,
            "access": calls.may_use,
            "readlink": calls.read_link,
            "chmod": calls.change,
            "chown": calls.change,
            "utime": calls.change,
            "listdir": calls.list_names,
            "scandir": calls.scan,
            "open": calls.open_number,
            "truncate": calls.cut,
        },
        shutil: {
            "copyfile": calls.copy,
            "copymode": calls.copy_mode,
            "copystat": calls.copy_mode,
            "rmtree": calls.remove,
        },
        builtins: {"open": calls.open},
        io: {"open": calls.open},
        tarfile: {"bltn_open": calls.open},
        bz2: {"_builtin_open": calls.open},
    }
    every = ((owner, name, way) for owner, by_name in ways.items() for name, way in by_name.items())
    changes = [(owner, name, _instead(files, getattr(owner, name), way)) for owner, name, way in every]
    changes.append((io, "FileIO", _raw(files, calls)))
    known = {way for owner, name, way in changes if getattr(owner, name) in os.supports_follow_symlinks}
    imported = [(name, getattr(owner, name), way) for owner, name, way in changes if owner in (os, shutil, io)]
    try:
        with (
            imports.exchanged(imported),
            replaced(changes),
            replaced([(os, "supports_follow_symlinks", os.supports_follow_symlinks | known)]),
            patch.dict(_openers_of_numpy(), {None: _instead(files, _open, calls.open)}),
        ):
            yield
    finally:
        files.clean()
        files.close()


class _Way(NamedTuple):
    """How a file is opened: to be read, made, made anew; it must not be there."""

    reads: bool
    creates: bool
    anew: bool
    exclusive: bool

    @property
    def writes(self) -> bool:
        return self.creates or self.anew or not self.reads


class _Entry:
    """What `os.scandir` would give of a file, or a folder, that is elsewhere, or was not written."""

    def __init__(self, folder: str, name: str):
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def stat(self, **_) -> os.stat_result:
        return os.stat(self.path)

    def is_dir(self, **_) -> bool:
        return os.path.isdir(self.path)

    def is_file(self, **_) -> bool:
        return not self.is_dir()

    def is_symlink(self) -> bool:
        return os.path.islink(self.path)

    def is_junction(self) -> bool:
        return False


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


class _Calls:
    """What each function does: it gets Python's own first, and then its arguments."""

    def __init__(self, files: Files):
        self._files = files

    def move(self, real: Callable, source, target, *args, **kwargs):
        files = self._files
        old, new = files.path(source), files.path(target)
        instead, is_gone = files.look_up(old)
        if is_gone:
            raise missing(source)
        if old in files.saved:
            del files.saved[old]
            if is_there(old) and not files.leave_path(old):  # a temporary file, which has no values
                _remove(old)
        elif instead or files.leave_path(old) or (is_folder(old) and files.is_from_before(new)):
            instead = instead or Saved(source=old)
        elif files.leave_path(new):
            files.stand_in(new, old)
            _remove(old)
            return
        else:
            real(source, target, *args, **kwargs)
            files.pop_saved(new)
            files.note_renamed(old, new)
            return
        without, inside = files.take_away(old)
        files.forget(new)
        files.saved |= {new + rest: saved for rest, saved in inside.items()}
        if instead.source and is_folder(instead.source):
            files.moved[new] = Moved(instead.source, without)
        else:
            files.saved[new] = instead

    def copy(self, real: Callable, source, target, *args, **kwargs):
        files = self._files
        instead, path = files.find(source), files.end(target)
        if instead and not instead.source:
            files.saved[path] = instead
            files.gone.discard(path)
        elif instead or path in files.saved or path in files.gone or files.leave_path(path):
            files.stand_in(path, instead.source if instead else source)
        else:
            if not is_there(path):
                files.note_written(path)
            return real(source, target, *args, **kwargs)
        return target

    def copy_mode(self, real: Callable, source, target, *args, **kwargs):
        if not (self._files.find(source) or self._files.find(target)):
            real(source, target, *args, **kwargs)

    def link(self, real: Callable, source, target, *args, **kwargs):
        files = self._files
        path, instead = files.path(target), files.find(source)
        if instead is None and path in files.gone:
            instead = Saved(source=files.path(source))
        if instead is None:
            real(source, target, *args, **kwargs)
            files.note_written(path)
            return
        files.saved[path] = instead
        files.gone.discard(path)

    def link_by_name(self, real: Callable, source, target, *args, **kwargs):
        files = self._files
        path = files.path(target)
        end = files.end(os.path.join(os.path.dirname(path), source))
        if not (path in files.gone or files.look_up(end)[0] or any(lies_in(each, end) for each in files.saved)):
            real(source, target, *args, **kwargs)
            files.note_written(path)
            return
        files.saved[path] = Saved(link=os.fspath(source), when=time.time_ns())
        files.gone.discard(path)

    def read_link(self, real: Callable, file, *args, **kwargs):
        _, instead, is_gone = self._files.follow(file, by_links=False)
        if is_gone:
            raise missing(file)
        return instead.link if instead and instead.link else real(file, *args, **kwargs)

    def remove(self, real: Callable, file, *args, **kwargs):
        files = self._files
        path = files.path(file)
        instead, is_gone = files.look_up(path)
        if is_gone and not (any(args) or any(kwargs.values())):  # which tell rmtree what to do about it
            raise missing(file)
        if files.leave_path(path) or (instead and not is_there(path)):
            files.take_away(path)
        elif not is_gone:
            real(file, *args, **kwargs)
            files.pop_saved(path)
        files.close_lost()

    def remove_empty(self, real: Callable, folder, *args, **kwargs):
        path = self._files.path(folder)
        if self._files.leave_path(path) and not os.listdir(folder):
            self._files.gone.add(path)
        else:
            real(folder, *args, **kwargs)

    def make(self, real: Callable, folder, *args, **kwargs):
        path = self._files.path(folder)
        if path in self._files.gone and is_folder(path):
            self._files.gone.remove(path)
        else:
            real(folder, *args, **kwargs)
            self._files.made.add(path)

    def look(self, real: Callable, file, *args, **kwargs):
        files = self._files
        if files.is_untouched():
            return real(file, *args, **kwargs)
        by_links = real is not _lstat and kwargs.get("follow_symlinks", True)
        path, instead, is_gone = files.follow(file, by_links=by_links)
        if is_gone:
            raise missing(file)
        if instead and not instead.source:
            return describe(path, instead)
        if instead and instead.source in files.stand_ins:  # whose name is a link
            return _stat(instead.source)
        return real(instead.source if instead else file, *args, **kwargs)

    def may_use(self, real: Callable, file, *args, **kwargs):
        _, instead, is_gone = self._files.follow(file)
        return not is_gone and (instead is not None or real(file, *args, **kwargs))

    def change(self, real: Callable, file, *args, **kwargs):
        path, instead, is_gone = self._files.follow(file)
        if is_gone:
            raise missing(file)
        if not (instead or self._files.is_from_before(path)):
            real(file, *args, **kwargs)

    def open(self, real: Callable, file, mode="r", *args, **kwargs):
        letters = {*mode} if isinstance(mode, str) else set()
        way = _Way("r" in letters or not letters & {*"wax"}, bool(letters & {*"wax"}), "w" in letters, "x" in letters)
        with self._placed(file, way if "+" not in letters or way.writes else way._replace(reads=False)) as there:
            return real(there, mode if there is file else mode.replace("x", "w"), *args, **kwargs)

    def open_number(self, real: Callable, file, flags, *args, **kwargs):
        reads = not flags & (os.O_WRONLY | os.O_RDWR)
        way = _Way(reads, *(bool(flags & each) for each in (os.O_CREAT, os.O_TRUNC, os.O_EXCL)))
        with self._placed(file, way, named=True) as there:  # filelock takes a file without a name for a deleted one
            if there is not file:
                flags &= ~(os.O_EXCL | getattr(os, "O_NOFOLLOW", 0))  # its name is a link, and it is there
            return real(there, flags, *args, **kwargs)

    def cut(self, real: Callable, file, *args, **kwargs):
        with self._placed(file, _Way(False, False, False, False)) as there:
            return real(there, *args, **kwargs)

    @contextlib.contextmanager
    def _placed(self, file: object, way: _Way, *, named: bool = False) -> Iterator[object]:
        """Inside, the file is there that is opened this way: itself, or what stands in its place, `named` or not."""
        files = self._files
        path, instead, is_gone = files.follow(file)
        if path is None:
            yield file
            return
        source = instead.source if instead else None
        if is_gone and not way.creates:
            raise missing(file)
        if instead and way.exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(file))
        if not way.writes or source in files.stand_ins:
            if instead and instead.value is not None:
                with files.as_bytes(instead) as there:
                    yield there
            else:
                yield source or file
        elif not is_gone and (way.exclusive or is_folder(path)):  # an error where it is there; a file without a name
            yield file
            files.note_written(path)
        elif source or is_gone or files.leave_path(path):
            stays = None if is_gone or way.anew else source or path
            yield files.stand_in(path, stays, named=named)
        else:
            if way.anew:
                files.pop_saved(path)
            is_new = not is_there(path)
            yield file
            if is_new:
                files.note_written(path)

    def list_names(self, real: Callable, folder=None, *args):
        folder = "." if folder is None else folder
        if self._files.is_untouched() or not isinstance(folder, (str, os.PathLike)):
            return real(folder, *args)
        return self._files.listed(folder, real)

    def scan(self, real: Callable, folder=None, *args):
        folder = "." if folder is None else folder
        if self._files.is_untouched() or not isinstance(folder, (str, os.PathLike)):
            return real(folder, *args)
        found: dict[str, os.DirEntry] = {}

        def names(there):
            with real(there) as entries:
                listed = {entry.name: entry for entry in entries}
            found.update(listed if there is folder else {})
            return [*listed]

        whole = os.fspath(folder)
        return _Entries(found.get(name) or _Entry(whole, name) for name in self._files.listed(folder, names))


def _instead(files: Files, real: Callable, way: Callable) -> Callable:
    @functools.wraps(real)
    def call(*args, **kwargs):
        if files.is_elsewhere() or any(kwargs.get(name) is not None for name in _DIRECTORIES):
            return real(*args, **kwargs)
        named = [kwargs.pop(name) for name in _NAMES if name in kwargs]
        return way(real, *args, *named, **kwargs)

    return call


def _raw(files: Files, calls: _Calls) -> type:
    """The class that `io.FileIO` is: what `open` gives is of it, too."""
    real = io.FileIO

    class Kind(type):
        def __instancecheck__(cls, one):
            return isinstance(one, real)

    class FileIO(real, metaclass=Kind):
        def __init__(self, file, mode="r", *args, **kwargs):
            if files.is_elsewhere():
                super().__init__(file, mode, *args, **kwargs)
            else:
                calls.open(super().__init__, file, mode, *args, **kwargs)

    return FileIO


def _openers_of_numpy() -> dict:
    """By which np.savetxt opens files: it got Python's own when it was imported."""
    source = sys.modules.get("numpy.lib._datasource")
    return getattr(getattr(source, "_file_openers", None), "_file_openers", {})
