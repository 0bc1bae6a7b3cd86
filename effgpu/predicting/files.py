"""What a script has done to files while it is looked at: no checkpoint is written, and no file from before is lost.

A script rotates its files: it lists them, renames or deletes an old checkpoint, and writes a new one. Here the new one
is not written, as its weights have no values, or are thrown away. So the old one stays, and what would have been
written is there for the script alone: it can be listed, loaded, looked at, copied, renamed and deleted. What it writes
in place of any file from before, such as a log or the best loss so far, goes into a file without a name: it may hold
values that nobody knows. So may what it writes where nothing was, once it has computed: that is deleted at the end.
`calls.py` has what stands in place of Python's own functions, `elsewhere.py` what other code opens.
"""

import contextlib
import errno
import io
import itertools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from math import inf
from threading import get_ident
from typing import BinaryIO, NamedTuple

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
FOLDER = "/dev/fd/"  # of files without a name
_MOST_LINKS = 40  # that lead to one another, as in Linux
WORD = 64  # bytes, of which the first ones tell what a file holds
_REMEMBERED = "effgpu, weights without values: "  # and their number
_NAMED = 8  # files of a folder that are each told by name
_LOOKS = 0.1  # seconds that looking around may take: a folder may lie in a network
_OTHERS = ".", "__"  # begin the names of folders that tools keep for themselves
_SAVED_BY_ITSELF = ".ipynb"  # ends the names of files that an editor saves
_PACKED = "gzip", "bz2", "lzma"  # modules whose files are open ones with other bytes in them


class Saved(NamedTuple):
    """What a file would hold: a value, or what another file holds, or folder, which was not moved; or a link's text."""

    value: object = None
    source: str | None = None
    link: str | None = None
    when: int = 0  # it was saved, in nanoseconds


class Moved(NamedTuple):
    """Where a folder is that was not moved, and what in it was deleted before."""

    source: str
    without: frozenset[str]


class _Named:
    """A file with this name in a temporary folder, which is gone once it is closed."""

    def __init__(self, name: str):
        self._folder = tempfile.mkdtemp(prefix="effgpu-")
        self.name = os.path.join(self._folder, name)

    def close(self) -> None:
        for path in [self._folder, *_all_in(self._folder)][::-1]:
            with contextlib.suppress(OSError):
                _unlink(path) if path != self._folder else _rmdir(path)


class Files:
    """What a script has saved, moved and deleted, by path, where that was not done; and which files were left alone.

    A file is from before where it was there when the script `began`, in seconds since 1970. Threads that are not in
    `threads`, if these are given, are not the script's.
    """

    def __init__(self, began: float, threads: set[int] | None = None):
        self.unwritten: dict[str, None] = {}  # what was not written, for its weights
        self.left_alone: dict[str, str] = {}  # the names of files, by path
        self._threads = threads
        self._as_they_are: frozenset[int] = frozenset()  # threads
        self.saved: dict[str, Saved] = {}  # by path
        self.moved: dict[str, Moved] = {}  # folders, by the path that they have for the script
        self.gone: set[str] = set()  # what the script has deleted or moved, and is still there
        self.stand_ins: dict[str, str] = {}  # the path of what a file stands for that the script writes in its place
        self.made: set[str] = set()  # folders, by the script
        self.written: set[str] = set()  # files and links, by the script, where nothing was
        self._began = began
        self._computed = inf  # when the script first had values that nobody knows
        self._open: dict[str, BinaryIO | _Named] = {}  # the files that stand for others, which nobody else finds
        self._seen: dict[str, tuple[int, int]] = {}  # files in the working folder, and their time and size
        self._saw_all = False
        self._in_memory: list[object] = []  # what it has saved into memory

    def note_computed(self) -> None:
        """From here on, what the script writes may hold values that nobody knows."""
        if self._computed == inf:
            with tempfile.TemporaryFile() as file:  # whose clock is that of files
                self._computed = os.fstat(file.fileno()).st_ctime

    def tell(self, why: str) -> list[str]:
        """What was not written, as of its weights `why` is true, and which files from before were left alone."""
        unwritten = [f"not written, as its weights {why}: {what}" for what in self.unwritten]
        self._forget_locks(self._open)
        left = [f"left as it is, a file from before: {file}" for file in _name_few(self.left_alone.values())]
        code = "changed by another program, or by code that is not followed"
        changed = [f"{code}: {file}" for file in _name_few(self._changed())]
        return unwritten + left + changed

    def look_around(self) -> None:
        """Note what lies in and below the working folder, to tell at the end what was changed there nevertheless."""
        self._seen, self._saw_all = _look(os.getcwd())

    def _changed(self) -> Iterator[str]:
        """The files that other code has written, changed or deleted, by their names."""
        now, saw_all = _look(os.getcwd())
        for path in dict.fromkeys([*self._seen, *now]) if self._saw_all and saw_all else ():
            is_own = path in self.written or os.path.dirname(path) in self.made
            if self._seen.get(path) != now.get(path) and not is_own:
                yield os.path.relpath(path)

    # --- weights ---

    def save(self, file: object, value: object) -> None:
        """Remember what would be in this file from now on."""
        if path := self.end(file):
            self.saved[path] = Saved(value, when=time.time_ns())
            self.gone.discard(path)

    def leave_out(self, how: str, value: object, file: object) -> None:
        """Remember a value that was to be saved in this way and cannot be written, for whoever loads it from there.

        Memory, or a part of a file, gets a word by which it is found again, wherever its bytes go.
        """
        if self.has_path(file):
            self.unwritten[f"{how} to {self.name(file)}"] = None
            self.save(file, value)
        else:
            self.unwritten[f"{how} into {'memory' if isinstance(file, io.BytesIO) else 'a part of a file'}"] = None
            file.write(self._word(value))

    def find_value(self, file: object) -> Saved | None:
        """What a file would hold, or stands for, that is named, or open: then its next bytes tell."""
        found = self.find(file)
        if found and found.value:
            return found
        if isinstance(file, (str, os.PathLike)):
            with contextlib.suppress(OSError), _open(found.source if found else file, "rb") as opened:
                return self.recall(opened.read(WORD)) or found
            return found
        with contextlib.suppress(Exception):  # of whatever a file may be
            if file.seekable():
                place = file.tell()
                recalled = self.recall(file.read(WORD))
                file.seek(place)
                if recalled:
                    file.readline()
                    return recalled
        return found

    def aside(self, file: object) -> str:
        """A file to write in place of this one, which the script alone finds."""
        saved = self.find(file)
        return saved.source if saved and saved.source in self.stand_ins else self.stand_in(self.end(file))

    def place(self, file: object, mode: str = "w") -> object:
        """Where what is not Python opens a file in a mode of `open`: itself, or one that stands for it.

        That one has the same name, as it may decide on the format, and room for other files beside it.
        """
        if not isinstance(file, (str, os.PathLike)) or _path(file) in self.stand_ins:
            return file
        path, instead, is_gone = self.follow(file)
        source = instead.source if instead else None
        if source in self.stand_ins or ("w" not in mode and "a" not in mode and "+" not in mode):
            if is_gone:
                raise missing(file)
            return source or file
        if source or is_gone or self.leave_path(path):
            return self.stand_in(path, None if is_gone or "w" in mode else source or path, named=True)
        self.pop_saved(path)
        if not is_there(path):
            self.note_written(path)
        return file

    def recall(self, begins: bytes) -> Saved | None:
        """What bytes that begin so stand for; None for any others."""
        word, _, number = begins.partition(b"\n")[0].partition(b": ")
        is_ours = word + b": " == _REMEMBERED.encode() and number.isdigit()
        return Saved(self._in_memory[int(number)]) if is_ours and int(number) < len(self._in_memory) else None

    def _word(self, value: object) -> bytes:
        """What stands for a value among bytes."""
        if not any(each is value for each in self._in_memory):
            self._in_memory.append(value)
        number = next(number for number, each in enumerate(self._in_memory) if each is value)
        return f"{_REMEMBERED}{number}\n".encode()

    @contextlib.contextmanager
    def as_bytes(self, saved: Saved) -> Iterator[str]:
        """Inside, a file is there that is as long as a value's, which begins with the word for it, and is a hole."""
        with tempfile.TemporaryFile() as file:
            file.write(self._word(saved.value))
            file.truncate(max(file.tell(), size_of(saved.value)))
            file.seek(0)
            yield f"{FOLDER}{file.fileno()}"

    # --- where a path leads to, and what is there for the script ---

    def has_path(self, file: object) -> bool:
        """Whether it is a file with a name, or its name: no pipe, and no memory."""
        return self.path(file) is not None

    def name(self, file: object) -> str:
        """What a person calls a file that is named, or open."""
        if (path := _path(file)) in self.stand_ins:
            return os.path.relpath(self.stand_ins[path])
        return str(file if isinstance(file, (str, os.PathLike)) else getattr(file, "name", type(file).__name__))

    def find(self, file: object) -> Saved | None:
        """What a file would hold; None where it holds that, or is not there."""
        return self.follow(file)[1]

    def path(self, file: object) -> str | None:
        """The path of a file that is named, or open. Links to its folder are followed."""
        path = _path(file)
        if path is None or path in self.stand_ins:
            return self.stand_ins.get(path)
        return os.path.join(self._resolve(os.path.dirname(path)), os.path.basename(path))

    def end(self, file: object) -> str | None:
        """The path that a file's name leads to: of a symbolic link, that of the file."""
        path = self.path(file)
        return None if path is None else self._resolve(path)

    def _resolve(self, path: str, most: int = _MOST_LINKS) -> str:
        """Where a path leads to, by the links that the script finds there."""
        folder, name = os.path.split(path)
        if not name or not most:
            return path
        path = os.path.join(self._resolve(folder, most), name)
        if path in self.saved or path in self.gone:
            link = self.saved[path].link if path in self.saved else None
        else:
            link = _readlink(path) if _is_link(path) else None
        return path if link is None else self._resolve(os.path.normpath(os.path.join(folder, link)), most - 1)

    def follow(self, file: object, *, by_links: bool = True) -> tuple[str | None, Saved | None, bool]:
        """The path that a file's name leads to, and what stands there for the script, as `look_up` tells."""
        path = self.end(file) if by_links else self.path(file)
        instead, is_gone = self.look_up(path)
        if by_links and path and not (instead or is_gone):
            named = _path(file)
            if any(saved.link and lies_in(named, link) for link, saved in self.saved.items()):
                instead = Saved(source=path)  # the link is not really there
        return path, instead, is_gone

    def look_up(self, path: str | None) -> tuple[Saved | None, bool]:
        """What stands for the script at a path, if that is not what is there; and whether nothing is."""
        if path in self.saved:
            return self.saved[path], False
        if path in self.gone:
            return None, True
        for folder, moved in self.moved.items():
            if path is not None and lies_in(path, folder):
                there = moved.source + path.removeprefix(folder)
                found = there not in moved.without and is_there(there)
                return (Saved(source=there), False) if found else (None, True)
        return None, False

    def listed(self, folder: str | os.PathLike, names: Callable[[str], list[str]]) -> list[str]:
        """The names that a script finds in a folder: not what it has deleted, but what it has saved."""
        whole, instead, is_gone = self.follow(folder)
        if is_gone:
            raise missing(folder)
        found = names(instead.source if instead and instead.source else folder)
        there = [name for name in found if not self.look_up(os.path.join(whole, name))[1]]
        new = [os.path.basename(path) for path in (*self.saved, *self.moved) if os.path.dirname(path) == whole]
        return [*dict.fromkeys(there + new)]

    def is_untouched(self) -> bool:
        """Whether all is as it really is: a folder of a million images is then listed as fast as ever."""
        return not (self.saved or self.moved or self.gone)

    def is_elsewhere(self) -> bool:
        """Whether the thread that runs is none of the script's, or looks at files as they are."""
        here = get_ident()
        return here in self._as_they_are or (self._threads is not None and here not in self._threads)

    @contextlib.contextmanager
    def as_they_are(self) -> Iterator[None]:
        """Inside, this thread finds files as they really are: a source may be another one for the script."""
        here = get_ident()
        before = self._as_they_are
        self._as_they_are = before | {here}
        try:
            yield
        finally:
            self._as_they_are = before

    # --- what is from before, and what is the script's own ---

    def is_from_before(self, path: str | None) -> bool:
        """Whether a file, a link or a folder with such a one is from before the script was started."""
        return path is not None and _any_file(path, self._is_old)

    def _is_old(self, path: str) -> bool:
        if path in self.written or not is_there(path) or _is_device(path):
            return False
        return path in self._seen or self._predates(path)  # a log that grows is new

    def _predates(self, path: str) -> bool:
        return _lstat(path).st_ctime < self._began

    def leave_path(self, path: str | None) -> bool:
        """Whether to leave a file alone, as it is from before."""
        left = self.is_from_before(path)
        if left and _any_file(path, self._predates):  # none of an earlier walk's
            self.left_alone[path] = self.name(path).removeprefix(os.getcwd() + os.sep)
        return left

    def note_written(self, path: str | None) -> None:
        """The script writes a file where nothing was: it is its own."""
        if path is not None and not (is_folder(path) or _is_device(path)):
            self.written.add(path)

    def stand_in(self, path: str, filled: object = None, *, named: bool = False) -> str:
        """A file for the script to write and read in place of another: empty, or `filled` with what one holds.

        It has no name, or with `named` the other's, in a folder of its own.
        """
        folder = os.path.dirname(path)  # where there is room for it
        if named:
            file = _Named(os.path.basename(path))
            source = file.name
        else:
            file = tempfile.TemporaryFile(dir=folder if _access(folder, os.W_OK) else None)  # noqa: SIM115
            source = f"{FOLDER}{file.fileno()}"
        if filled is not None:
            with _open(filled, "rb") as before, _open(source, "wb") as after:
                shutil.copyfileobj(before, after)
        self._open[source], self.stand_ins[source], self.saved[path] = file, path, Saved(source=source)
        self.gone.discard(path)
        self.close_lost()
        return source

    def close_lost(self) -> None:
        """Close what the script can find no more: only then is its room on the disk free."""
        self._close(self._open.keys() - {saved.source for saved in self.saved.values()})

    def _forget_locks(self, sources: Iterable[str]) -> None:
        """A file that was empty, and is opened but not written to, is none to tell of."""
        for source in sources:
            path = self.stand_ins[source]
            with contextlib.suppress(OSError):
                if _stat(source).st_size == _stat(path).st_size == 0:
                    self.left_alone.pop(path, None)

    def _close(self, sources: set[str]) -> None:
        self._forget_locks(sources)
        for source in sources:
            self._open.pop(source).close()
            del self.stand_ins[source]

    def forget(self, path: str) -> None:
        """What is in a path is no longer deleted: something new is there, for the script."""
        self.gone -= {each for each in self.gone if lies_in(each, path)}

    def take_away(self, path: str) -> tuple[frozenset[str], dict[str, Saved]]:
        """What is there is no longer there, for the script.

        Returns what was not there before, and by the rest of its path what was saved in it.
        """
        folder = next((each for each in self.moved if lies_in(path, each)), None)
        without = frozenset(self.gone) if folder is None else self.moved[folder].without
        if path == folder:
            del self.moved[folder]
        elif folder:
            there = self.moved[folder].source + path.removeprefix(folder)
            self.moved[folder] = Moved(self.moved[folder].source, without | {there})
        self.gone |= {path, *_all_in(path)} if is_there(path) else set()
        return without, self.pop_saved(path)

    def pop_saved(self, path: str) -> dict[str, Saved]:
        """What was saved in a path, by the rest of its own; it is no longer there."""
        inside = [each for each in self.saved if lies_in(each, path)]
        return {each.removeprefix(path): self.saved.pop(each) for each in inside}

    def note_renamed(self, old: str, new: str) -> None:
        """What is the script's own has really moved."""
        for own in (self.made, self.written):
            inside = {each for each in own if lies_in(each, old)}
            own -= inside
            own |= {new + each.removeprefix(old) for each in inside}
        self.saved |= {new + rest: saved for rest, saved in self.pop_saved(old).items()}

    def clean(self, *, goes_on: bool = True) -> None:
        """Delete what the script has made of what it computed, and folders of its own that held weights, or nothing.

        Where its process `goes_on`, temporary files stay, as they may be the process's own, such as multiprocessing's.
        """
        self._close({*self._open})
        weights = {path for path, saved in self.saved.items() if saved.value is not None}
        stays = self._is_temporary if goes_on else lambda path: False
        folders = {folder for folder in self.made if not stays(folder)}
        inside = {each for folder in folders for each in _all_in(folder)}
        computed = {each for each in self.written | inside | weights if self._is_computed(each) and not stays(each)}
        with_weights = {folder for folder in folders if any(lies_in(each, folder) for each in weights)}
        for path in sorted(computed | weights | inside | folders, key=len, reverse=True):
            with contextlib.suppress(OSError):
                if is_folder(path) and not _is_link(path):
                    _rmdir(path)
                elif not self._is_old(path) and (path in computed | weights or os.path.dirname(path) in with_weights):
                    _unlink(path)

    def _is_temporary(self, path: str) -> bool:
        """Whether a path lies among temporary files, or in a folder of the script's there."""
        temporary = os.path.realpath(tempfile.gettempdir())
        own = (each for each in self.made if os.path.dirname(each) == temporary)
        return os.path.dirname(path) == temporary or any(lies_in(path, each) for each in own)

    def close(self) -> None:
        """From here on, no thread is the script's: what has got hold of a function keeps it."""
        self._threads = set()

    def _is_computed(self, path: str) -> bool:
        """Whether a file or a link may hold values that nobody knows."""
        try:
            found = _lstat(path)
        except OSError:
            return False
        return found.st_ctime > self._computed and not stat.S_ISDIR(found.st_mode)


def _name_few(files: Iterable[str]) -> Iterator[str]:
    """Files by their names; of a folder with many, such as of images that are made anew, one, and how many more."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folders.setdefault(os.path.dirname(file), []).append(file)
    for folder, inside in folders.items():
        few = len(inside) <= _NAMED
        yield from inside if few else [f"{inside[0]}, and {len(inside) - 1:,} others in {folder or 'the same folder'}"]


def _look(folder: str) -> tuple[dict[str, tuple[int, int]], bool]:
    """When each file in and below a folder was changed, in nanoseconds, and its bytes; and whether these are all.

    What is further down is looked at last, and left out where it takes long.
    """
    found, folders, until = {}, [folder], time.monotonic() + _LOOKS
    for each in folders:
        with contextlib.suppress(OSError), _scandir(each) as entries:
            for entry in entries:
                if time.monotonic() > until:
                    return found, False
                if entry.name.endswith(_SAVED_BY_ITSELF):
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    there = entry.stat(follow_symlinks=False)
                    found[entry.path] = there.st_mtime_ns, there.st_size
                elif not entry.name.startswith(_OTHERS):
                    folders.append(entry.path)
    return found, True


def lies_in(path: str, folder: str) -> bool:
    """Whether a path is a folder's, or that of something in it."""
    return path == folder or path.startswith(folder + os.sep)


def is_there(path: str) -> bool:
    """Whether there really is a file, a link or a folder."""
    try:
        return bool(_lstat(path))
    except (OSError, ValueError):
        return False


def is_folder(path: str) -> bool:
    """Whether there really is one."""
    try:
        return stat.S_ISDIR(_stat(path).st_mode)
    except OSError:
        return False


def _is_link(path: str) -> bool:
    """Whether there really is one."""
    return is_there(path) and stat.S_ISLNK(_lstat(path).st_mode)


def _is_device(path: str) -> bool:
    """Whether there really is one, a pipe, or a socket: nothing that is written is kept there."""
    try:
        mode = _stat(path).st_mode
    except OSError:  # a link that leads nowhere, too
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def describe(path: str, saved: Saved) -> os.stat_result:
    """What os.stat gives of a file that was not written, or of a link that was not made."""
    kind = stat.S_IFLNK | 0o777 if saved.link else stat.S_IFREG | 0o644
    size = len(os.fsencode(saved.link)) if saved.link else size_of(saved.value)
    times = (saved.when // 10**9,) * 3
    exact = {f"st_{one}time_ns": saved.when for one in "amc"} | {f"st_{one}time": saved.when / 1e9 for one in "amc"}
    return os.stat_result((kind, hash(path) % 2**63, 0, 1, os.getuid(), os.getgid(), size, *times), exact)


def size_of(value: object) -> int:
    """The bytes that a value takes in a file."""
    return getattr(value, "size", 0)


def missing(file: object) -> FileNotFoundError:
    """The error that is raised where there is no such file."""
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(file))


def _all_in(path: str) -> Iterator[str]:
    """The paths of all that is really in a folder; nothing for a file, or a link."""
    if _is_link(path):
        return
    with contextlib.suppress(NotADirectoryError, FileNotFoundError), _scandir(path) as entries:
        for entry in entries:
            yield entry.path
            if entry.is_dir(follow_symlinks=False):
                yield from _all_in(entry.path)


def _files_in(path: str) -> Iterator[str]:
    """The path of a file, or those of all files that are really in a folder."""
    return (each for each in itertools.chain([path], _all_in(path)) if _is_link(each) or not is_folder(each))


def _any_file(path: str, holds: Callable[[str], bool]) -> bool:
    """Whether that holds of a file, or of any in a folder; it is taken to hold of what cannot be looked at."""
    try:
        return any(map(holds, _files_in(path)))
    except OSError:
        return True


def _path(file: object) -> str | None:
    """The whole path of a file that is named, or open: not of what it is a part of, or packed in."""
    if isinstance(file, (str, bytes, os.PathLike)):
        name = file
    else:
        name = getattr(file, "name", None)
        if not isinstance(name, (str, bytes, os.PathLike)) or type(file).__module__ in _PACKED or not _has_number(file):
            return None
    return os.path.abspath(os.fsdecode(name))


def _has_number(file: object) -> bool:
    """Whether the system knows an open file."""
    try:
        return file.closed or isinstance(file.fileno(), int)
    except (AttributeError, OSError, ValueError):
        return False
