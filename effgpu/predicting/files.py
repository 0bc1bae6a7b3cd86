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
import itertools
import os
import shutil
import stat
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple
from unittest.mock import patch

from effgpu.attaching.replacing import replaced

_NAMES = "src", "dst", "path", "file"  # of arguments that say which file
_DIRECTORIES = "dir_fd", "src_dir_fd", "dst_dir_fd"  # which a name is relative to, in what rmtree calls
_REMEMBERED = "effgpu, weights without values: "  # and their number
# Python's own, also of what a script takes for deleted
_open, _access, _scandir, _stat, _lstat, _readlink, _unlink, _rmdir = (
    open,
    os.access,
    os.scandir,
    os.stat,
    os.lstat,
    os.readlink,
    os.unlink,
    os.rmdir,
)
_MOST_LINKS = 40  # that lead to one another, as in Linux


class Saved(NamedTuple):
    """What a file would hold: a value, or what another file holds, or folder, which was not moved; or a link's text."""

    value: object = None
    source: str | None = None
    link: str | None = None
    when: int = 0  # it was saved, in nanoseconds


class _Moved(NamedTuple):
    """Where a folder is that was not moved, and what in it was deleted before."""

    source: str
    without: frozenset[str]


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


class Files:
    """What a script has saved, moved and deleted, by path, where that was not done; and which files were left alone."""

    def __init__(self, began: float):
        self.unwritten: dict[str, None] = {}  # what was not written, for its weights
        self._left_alone: dict[str, None] = {}
        self._began = began
        self._saved: dict[str, Saved] = {}  # by path
        self._moved: dict[str, _Moved] = {}  # folders, by the path that they have for the script
        self._gone: set[str] = set()  # what the script has deleted or moved, and is still there
        self._stand_ins: dict[str, str] = {}  # the path of what a file stands for that the script writes in its place
        self._open: dict[str, BinaryIO] = {}  # these files, which nobody else finds
        self._made: set[str] = set()  # folders, by the script
        self._in_memory: list[object] = []  # what it has saved into memory

    def tell(self, why: str) -> list[str]:
        """What was not written, as of its weights `why` is true, and which files from before were left alone."""
        unwritten = [f"not written, as its weights {why}: {what}" for what in self.unwritten]
        return unwritten + [f"left as it is, a file from before: {file}" for file in self._left_alone]

    def has_path(self, file: object) -> bool:
        """Whether it is a file with a name, or its name: no pipe, and no memory."""
        return self._path(file) is not None

    def aside(self, file: object) -> str:
        """A file to write in place of this one, which the script alone finds."""
        saved = self.find(file)
        return saved.source if saved and saved.source in self._stand_ins else self._stand_in(self._end(file))

    def save(self, file: object, value: object) -> None:
        """Remember what would be in this file from now on."""
        if path := self._end(file):
            self._saved[path] = Saved(value, when=time.time_ns())
            self._gone.discard(path)

    def keep(self, file: object, value: object) -> bool:
        """Whether a file is from before, and left alone: then the value is saved for the script."""
        if left := self.leave(file):
            self.save(file, value)
        return left

    def write_into_memory(self, file: io.BytesIO, value: object) -> None:
        """Remember what memory would hold, which gets a word by which it is found again, wherever its bytes go."""
        self._in_memory.append(value)
        file.write(f"{_REMEMBERED}{len(self._in_memory) - 1}\n".encode())

    def recall(self, begins: bytes) -> Saved | None:
        """What bytes that begin so stand for; None for any others."""
        word, _, number = begins.partition(b"\n")[0].partition(b": ")
        is_ours = word + b": " == _REMEMBERED.encode() and number.isdigit()
        return Saved(self._in_memory[int(number)]) if is_ours and int(number) < len(self._in_memory) else None

    def find(self, file: object) -> Saved | None:
        """What a file would hold; None where it holds that, or is not there."""
        return self._follow(file)[1]

    def name(self, file: object) -> str:
        """What a person calls a file that is named, or open."""
        if (path := _path(file)) in self._stand_ins:
            return os.path.relpath(self._stand_ins[path])
        return str(file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", file))

    def _path(self, file: object) -> str | None:
        """The path of a file that is named, or open. Links to its folder are followed."""
        path = _path(file)
        if path is None or path in self._stand_ins:
            return self._stand_ins.get(path)
        return os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path))

    def _end(self, file: object) -> str | None:
        """The path that a file's name leads to: of a symbolic link, that of the file."""
        path = self._path(file)
        return None if path is None else self._resolve(path)

    def _resolve(self, path: str, most: int = _MOST_LINKS) -> str:
        """Where a path leads to, by the links that the script finds there."""
        folder, name = os.path.split(path)
        if not name or not most:
            return path
        path = os.path.join(self._resolve(folder, most), name)
        if path in self._saved or path in self._gone:
            link = self._saved[path].link if path in self._saved else None
        else:
            link = _readlink(path) if _is_link(path) else None
        return path if link is None else self._resolve(os.path.normpath(os.path.join(folder, link)), most - 1)

    def _follow(self, file: object, *, by_links: bool = True) -> tuple[str | None, Saved | None, bool]:
        """The path that a file's name leads to, and what stands there for the script, as `_look_up` tells."""
        path = self._end(file) if by_links else self._path(file)
        instead, is_gone = self._look_up(path)
        if by_links and path and not (instead or is_gone):
            named = _path(file)
            if any(saved.link and _lies_in(named, link) for link, saved in self._saved.items()):
                instead = Saved(source=path)  # the link is not really there
        return path, instead, is_gone

    def _look_up(self, path: str | None) -> tuple[Saved | None, bool]:
        """What stands for the script at a path, if that is not what is there; and whether nothing is."""
        if path in self._saved:
            return self._saved[path], False
        if path in self._gone:
            return None, True
        for folder, moved in self._moved.items():
            if path is not None and _lies_in(path, folder):
                there = moved.source + path.removeprefix(folder)
                is_there = there not in moved.without and _is_there(there)
                return (Saved(source=there), False) if is_there else (None, True)
        return None, False

    def _stand_in(self, path: str, filled: object = None) -> str:
        """A file for the script to write and read in place of another: empty, or `filled` with what one holds."""
        folder = os.path.dirname(path)  # where there is room for it
        file = tempfile.TemporaryFile(dir=folder if _access(folder, os.W_OK) else None)  # noqa: SIM115
        if filled is not None:
            with _open(filled, "rb") as before:
                shutil.copyfileobj(before, file)
            file.flush()
        source = f"/dev/fd/{file.fileno()}"
        self._open[source], self._stand_ins[source], self._saved[path] = file, path, Saved(source=source)
        self._gone.discard(path)
        self._close_lost()
        return source

    def _close_lost(self) -> None:
        """Close what the script can find no more: only then is its room on the disk free."""
        for source in self._open.keys() - {saved.source for saved in self._saved.values()}:
            self._open.pop(source).close()
            del self._stand_ins[source]

    def _is_from_before(self, path: str | None) -> bool:
        """Whether a file, a link or a folder with such a one is from before the script was started."""
        try:
            return path is not None and any(_lstat(each).st_ctime < self._began for each in _files_in(path))
        except OSError:
            return False

    def leave(self, file: object) -> bool:
        """Whether a file is from before, and left alone."""
        return self._leave(self._end(file))

    def _leave(self, path: str | None) -> bool:
        """Whether to leave a file alone, as it is from before."""
        if left := self._is_from_before(path):
            self._left_alone[self.name(path).removeprefix(os.getcwd() + os.sep)] = None
        return left

    def _forget(self, path: str) -> None:
        """What is in a path is no longer deleted: something new is there, for the script."""
        self._gone -= {each for each in self._gone if _lies_in(each, path)}

    def _take_away(self, path: str) -> tuple[frozenset[str], dict[str, Saved]]:
        """What is there is no longer there, for the script.

        Returns what was not there before, and by the rest of its path what was saved in it.
        """
        folder = next((each for each in self._moved if _lies_in(path, each)), None)
        without = frozenset(self._gone) if folder is None else self._moved[folder].without
        if path == folder:
            del self._moved[folder]
        elif folder:
            there = self._moved[folder].source + path.removeprefix(folder)
            self._moved[folder] = _Moved(self._moved[folder].source, without | {there})
        self._gone |= {path, *_all_in(path)} if _is_there(path) else set()
        return without, self._pop_saved(path)

    def _pop_saved(self, path: str) -> dict[str, Saved]:
        inside = [each for each in self._saved if _lies_in(each, path)]
        return {each.removeprefix(path): self._saved.pop(each) for each in inside}

    def _listed(self, folder: str | os.PathLike, names: Callable[[str], list[str]]) -> list[str]:
        """The names that a script finds in a folder: not what it has deleted, but what it has saved."""
        whole, instead, is_gone = self._follow(folder)
        if is_gone:
            raise _missing(folder)
        found = names(instead.source if instead and instead.source else folder)
        there = [name for name in found if not self._look_up(os.path.join(whole, name))[1]]
        new = [os.path.basename(path) for path in (*self._saved, *self._moved) if os.path.dirname(path) == whole]
        return [*dict.fromkeys(there + new)]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a script keeps its files from before."""
        ways = {
            os: {
                "rename": self._move,
                "replace": self._move,
                "link": self._link,
                "symlink": self._link_by_name,
                "remove": self._remove,
                "unlink": self._remove,
                "mkdir": self._make,
                "rmdir": self._remove_empty,
                "stat": self._look,
                "lstat": self._look,
                "access": self._may_use,
                "readlink": self._read_link,
                "chmod": self._change,
                "utime": self._change,
                "listdir": self._list_names,
                "scandir": self._scan,
            },
            shutil: {
                "copyfile": self._copy,
                "copymode": self._copy_mode,
                "copystat": self._copy_mode,
                "rmtree": self._remove,
            },
            builtins: {"open": self._open_other},
            io: {"open": self._open_other},
            tarfile: {"bltn_open": self._open_other},
        }
        every = ((owner, name, way) for owner, by_name in ways.items() for name, way in by_name.items())
        changes = [(owner, name, _instead(getattr(owner, name), way)) for owner, name, way in every]
        known = {way for owner, name, way in changes if getattr(owner, name) in os.supports_follow_symlinks}
        with (
            replaced(changes),
            replaced([(os, "supports_follow_symlinks", os.supports_follow_symlinks | known)]),
            patch.dict(_openers_of_numpy(), {None: _instead(_open, self._open_other)}),
        ):
            yield

    def clean(self) -> None:
        """Delete what the script has made for weights, folders and open files: each would be taken for a checkpoint."""
        for path, saved in self._saved.items():
            with contextlib.suppress(OSError):
                if saved.value is not None and not _stat(path).st_size and not self._is_from_before(path):
                    _unlink(path)
        for folder in self._made:
            if any(_lies_in(path, folder) and saved.value is not None for path, saved in self._saved.items()):
                with contextlib.suppress(OSError):
                    _delete(folder)

    def _move(self, real: Callable, source, target, *args, **kwargs):
        old, new = self._path(source), self._path(target)
        instead, is_gone = self._look_up(old)
        if is_gone:
            raise _missing(source)
        if old in self._saved:
            del self._saved[old]
            if _is_there(old) and not self._leave(old):  # a temporary file, which has no values
                os.remove(old)
        elif instead or self._leave(old) or (_is_folder(old) and self._is_from_before(new)):
            instead = instead or Saved(source=old)
        elif self._leave(new):
            self._stand_in(new, old)
            os.remove(old)
            return target
        else:
            real(source, target, *args, **kwargs)
            self._made = {new + each.removeprefix(old) if _lies_in(each, old) else each for each in self._made}
            self._saved |= {new + rest: saved for rest, saved in self._pop_saved(old).items()}
            return target
        without, inside = self._take_away(old)
        self._forget(new)
        self._saved |= {new + rest: saved for rest, saved in inside.items()}
        if instead.source and _is_folder(instead.source):
            self._moved[new] = _Moved(instead.source, without)
        else:
            self._saved[new] = instead
        return target

    def _copy(self, real: Callable, source, target, *args, **kwargs):
        instead, path = self.find(source), self._end(target)
        if instead and not instead.source:
            self._saved[path] = instead
            self._gone.discard(path)
        elif instead or self._leave(path):
            self._stand_in(path, instead.source if instead else source)
        else:
            return real(source, target, *args, **kwargs)
        return target

    def _copy_mode(self, real: Callable, source, target, *args, **kwargs):
        if not (self.find(source) or self.find(target)):
            real(source, target, *args, **kwargs)

    def _link(self, real: Callable, source, target, *args, **kwargs):
        path, instead = self._path(target), self.find(source)
        if instead is None and path in self._gone:
            instead = Saved(source=self._path(source))
        if instead is None:
            return real(source, target, *args, **kwargs)
        self._saved[path] = instead
        self._gone.discard(path)

    def _link_by_name(self, real: Callable, source, target, *args, **kwargs):
        path = self._path(target)
        end = self._end(os.path.join(os.path.dirname(path), source))
        if not (path in self._gone or self._look_up(end)[0] or any(_lies_in(each, end) for each in self._saved)):
            return real(source, target, *args, **kwargs)
        self._saved[path] = Saved(link=os.fspath(source), when=time.time_ns())
        self._gone.discard(path)

    def _read_link(self, real: Callable, file, *args, **kwargs):
        _, instead, is_gone = self._follow(file, by_links=False)
        if is_gone:
            raise _missing(file)
        return instead.link if instead and instead.link else real(file, *args, **kwargs)

    def _remove(self, real: Callable, file, *args, **kwargs):
        path = self._path(file)
        instead, is_gone = self._look_up(path)
        if is_gone and not kwargs.get("ignore_errors"):
            raise _missing(file)
        if self._leave(path) or (instead and not _is_there(path)):
            self._take_away(path)
        elif not is_gone:
            real(file, *args, **kwargs)
            self._pop_saved(path)
        self._close_lost()

    def _remove_empty(self, real: Callable, folder, *args, **kwargs):
        path = self._path(folder)
        if self._leave(path) and not os.listdir(folder):
            self._gone.add(path)
        else:
            real(folder, *args, **kwargs)

    def _make(self, real: Callable, folder, *args, **kwargs):
        path = self._path(folder)
        if path in self._gone and _is_folder(path):
            self._gone.remove(path)
        else:
            real(folder, *args, **kwargs)
            self._made.add(path)

    def _look(self, real: Callable, file, *args, **kwargs):
        if self._is_untouched():
            return real(file, *args, **kwargs)
        by_links = real is not _lstat and kwargs.get("follow_symlinks", True)
        path, instead, is_gone = self._follow(file, by_links=by_links)
        if is_gone:
            raise _missing(file)
        if instead and not instead.source:
            return _describe(path, instead)
        if instead and instead.source in self._stand_ins:  # whose name is a link
            return _stat(instead.source)
        return real(instead.source if instead else file, *args, **kwargs)

    def _may_use(self, real: Callable, file, *args, **kwargs):
        _, instead, is_gone = self._follow(file)
        return not is_gone and (instead is not None or real(file, *args, **kwargs))

    def _change(self, real: Callable, file, *args, **kwargs):
        path, instead, is_gone = self._follow(file)
        if is_gone:
            raise _missing(file)
        if not (instead or self._is_from_before(path)):
            real(file, *args, **kwargs)

    def _open_other(self, real: Callable, file, mode="r", *args, **kwargs):
        path, instead, is_gone = self._follow(file)
        source = instead.source if instead else None
        if not {*"wax+"} & {*mode} or (source in self._stand_ins and "x" not in mode):
            if is_gone:
                raise _missing(file)
            empty = os.devnull if instead and not source and not _is_there(path) else file
            return real(source or empty, mode, *args, **kwargs)
        if is_gone and "r" in mode:
            raise _missing(file)
        is_file = path is not None and not os.path.isdir(path)  # into a folder goes a temporary file
        if is_file and (source or is_gone or self._leave(path)) and not (source and "x" in mode):
            stays = None if is_gone or "w" in mode else source or path
            file, mode = self._stand_in(path, stays), mode.replace("x", "w" if is_gone else "x")
        return real(file, mode, *args, **kwargs)

    def _is_untouched(self) -> bool:
        """Whether all is as it really is: a folder of a million images is then listed as fast as ever."""
        return not (self._saved or self._moved or self._gone)

    def _list_names(self, real: Callable, folder=None, *args):
        folder = "." if folder is None else folder
        if self._is_untouched() or not isinstance(folder, (str, os.PathLike)):
            return real(folder, *args)
        return self._listed(folder, real)

    def _scan(self, real: Callable, folder=None, *args):
        folder = "." if folder is None else folder
        if self._is_untouched() or not isinstance(folder, (str, os.PathLike)):
            return real(folder, *args)
        found: dict[str, os.DirEntry] = {}

        def names(there):
            with real(there) as entries:
                listed = {entry.name: entry for entry in entries}
            found.update(listed if there is folder else {})
            return [*listed]

        whole = os.fspath(folder)
        return _Entries(found.get(name) or _Entry(whole, name) for name in self._listed(folder, names))


def _lies_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)


def _delete(folder: str) -> None:
    """What shutil.rmtree does, whatever stands in the places that it calls."""
    with _scandir(folder) as entries:
        for entry in entries:
            _delete(entry.path) if entry.is_dir(follow_symlinks=False) else _unlink(entry.path)
    _rmdir(folder)


def _is_there(path: str) -> bool:
    """Whether there really is a file, a link or a folder."""
    try:
        return bool(_lstat(path))
    except (OSError, ValueError):
        return False


def _is_link(path: str) -> bool:
    """Whether there really is one."""
    return _is_there(path) and stat.S_ISLNK(_lstat(path).st_mode)


def _describe(path: str, saved: Saved) -> os.stat_result:
    """What os.stat gives of a file that was not written, or of a link that was not made."""
    kind = stat.S_IFLNK | 0o777 if saved.link else stat.S_IFREG | 0o644
    times = (saved.when // 10**9,) * 3
    exact = {f"st_{one}time_ns": saved.when for one in "amc"} | {f"st_{one}time": saved.when / 1e9 for one in "amc"}
    return os.stat_result((kind, hash(path) % 2**63, 0, 1, os.getuid(), os.getgid(), 0, *times), exact)


def _is_folder(path: str) -> bool:
    """Whether there really is one."""
    return stat.S_ISDIR(_stat(path).st_mode)


def _all_in(path: str) -> Iterator[str]:
    """The paths of all that is really in a folder; nothing for a file, or a link."""
    if _is_link(path):
        return
    with contextlib.suppress(NotADirectoryError), _scandir(path) as entries:
        for entry in entries:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from _all_in(entry.path)


def _files_in(path: str) -> Iterator[str]:
    """The path of a file, or those of all files that are really in a folder."""
    return (each for each in itertools.chain([path], _all_in(path)) if _is_link(each) or not _is_folder(each))


def _openers_of_numpy() -> dict:
    """By which np.savetxt opens files: it got Python's own when it was imported."""
    source = sys.modules.get("numpy.lib._datasource")
    return getattr(getattr(source, "_file_openers", None), "_file_openers", {})


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
