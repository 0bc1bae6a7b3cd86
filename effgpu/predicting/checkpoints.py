"""What a script does with checkpoints while it is predicted: none is written, and none from before is lost.

A script rotates its files: it renames or deletes an old checkpoint, and writes a new one. Here the new one is not
written, as its weights have no values. So the old one stays, and what would have been written is there for the script
alone: it can be loaded, looked at, copied, renamed and deleted. What it writes by itself in place of a checkpoint from
before goes into a file without a name.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from effgpu.attaching.replacing import replaced

_DIRECTORIES = "dir_fd", "src_dir_fd", "dst_dir_fd"  # which a name is relative to, in what rmtree calls
_WEIGHTS = (".bin", ".ckpt", ".npy", ".npz", ".pkl", ".pt", ".pth", ".safetensors", ".tar")


class Saved(NamedTuple):
    """What a file would hold: a value, or what another file holds, which was not moved."""

    value: object = None
    source: str | None = None


class Checkpoints:
    """What a script has saved, by path, without having written it; and which files from before were left alone."""

    def __init__(self):
        self.left_alone: dict[str, None] = {}
        self._began = time.time()
        self._saved: dict[str, Saved] = {}  # by path
        self._gone: set[str] = set()  # what the script has deleted, and what was left alone
        self._stand_ins: dict[str, str] = {}  # the path of what a file stands for that the script writes in its place
        self._open: list[BinaryIO] = []  # these files, which nobody else finds

    def save(self, file: object, value: object) -> None:
        """Remember what would be in this file from now on."""
        if path := self._path(file):
            self._saved[path] = Saved(value)
            self._gone.discard(path)

    def keep(self, file: object, value: object) -> bool:
        """Whether a file is a checkpoint from before, which is left alone: then the value is saved for the script."""
        if left := self._leave(file):
            self.save(file, value)
        return left

    def find(self, file: object) -> Saved | None:
        """What a file would hold; None where it holds that."""
        return self._saved.get(self._path(file))

    def __contains__(self, file: object) -> bool:
        return self._path(file) in self._saved

    def _path(self, file: object) -> str | None:
        path = _path(file)
        return self._stand_ins.get(path, path)

    def _stand_in(self, file: object) -> str:
        """An empty file for the script to write and read in place of one from before."""
        self._open.append(tempfile.TemporaryFile())  # noqa: SIM115, it stays open
        source, path = f"/dev/fd/{self._open[-1].fileno()}", self._path(file)
        self._stand_ins[source], self._saved[path] = path, Saved(source=source)
        self._gone.discard(path)
        return source

    def _is_from_before(self, file: object) -> bool:
        """Whether it is a checkpoint, or a folder with one, that was there before the script was started."""
        if (name := _path(file)) is None:  # a pipe, or memory
            return False
        path = Path(name)
        if self._path(file) in self._gone:
            return True
        try:
            if path.is_dir():
                return any(map(self._is_from_before, path.iterdir()))
            return path.suffix in _WEIGHTS and path.is_file() and path.stat().st_mtime < self._began
        except OSError:
            return False

    def _leave(self, file: object) -> bool:
        """Whether to leave a file alone, as it is a checkpoint from before."""
        if left := self._is_from_before(file):
            self.left_alone[str(file)] = None
        return left

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Inside, a script keeps its checkpoints from before."""

        def move(real: Callable, source, target, *args, **kwargs):
            if source in self:
                self._saved[self._path(target)] = self._saved.pop(self._path(source))
            elif self._leave(source) or (not self._is_new(source) and self._leave(target)):
                self._saved[self._path(target)] = Saved(source=self._path(source))
            else:
                return real(source, target, *args, **kwargs)
            return target

        def copy(real: Callable, source, target, *args, **kwargs):
            inside = Path(target, Path(source).name) if os.path.isdir(target) else target
            if source in self:
                self._saved[self._path(inside)] = self._saved[self._path(source)]
            elif not self._is_new(source) and self._leave(inside):
                self._saved[self._path(inside)] = Saved(source=self._path(source))
            else:
                return real(source, target, *args, **kwargs)
            return target

        def link(real: Callable, source, target, *args, **kwargs):
            beside = os.path.join(os.path.dirname(target), source)  # what a symbolic link's source is relative to
            if found := self.find(source) or self.find(beside):
                self._saved[self._path(target)] = found
            else:
                real(source, target, *args, **kwargs)

        def remove(real: Callable, file, *args, **kwargs):
            if self._path(file) in self._gone and not kwargs.get("ignore_errors"):
                raise _missing(file)
            saved = self._saved.pop(self._path(file), None)
            if self._leave(file):
                self._gone.add(self._path(file))
            elif saved is None or os.path.lexists(file):
                real(file, *args, **kwargs)

        def make(real: Callable, folder, *args, **kwargs):
            if self._path(folder) not in self._gone:
                return real(folder, *args, **kwargs)
            self._gone.remove(self._path(folder))

        def look(real: Callable, file, *args, **kwargs):
            path, saved = self._path(file), self.find(file)
            if path in self._gone:
                raise _missing(file)
            if saved and saved.source in self._stand_ins:
                return real(saved.source, *args, **kwargs)
            try:
                return real(file, *args, **kwargs)
            except FileNotFoundError:
                if not saved:
                    raise
            now = int(time.time())
            return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), 0, now, now, now))

        def open_other(real: Callable, file, mode="r", *args, **kwargs):
            saved = self.find(file)
            if saved and saved.source in self._stand_ins:
                file = saved.source
            elif "w" in mode and not os.path.isdir(file) and self._leave(file):  # a folder: a temporary file in it
                file = self._stand_in(file)
            return real(file, mode, *args, **kwargs)

        ways = [(os, name, move) for name in ("rename", "replace")]
        ways += [(shutil, name, copy) for name in ("copyfile", "copy", "copy2")]
        ways += [(os, name, link) for name in ("link", "symlink")]
        ways += [(os, "remove", remove), (os, "unlink", remove), (shutil, "rmtree", remove)]
        ways += [(os, "mkdir", make), (os, "stat", look), (builtins, "open", open_other), (io, "open", open_other)]
        with replaced((owner, name, _instead(getattr(owner, name), way)) for owner, name, way in ways):
            yield

    def _is_new(self, file: object) -> bool:
        return os.path.lexists(file) and os.lstat(file).st_mtime >= self._began


def _instead(real: Callable, way: Callable) -> Callable:
    @functools.wraps(real)
    def call(*args, **kwargs):
        if any(kwargs.get(name) is not None for name in _DIRECTORIES):
            return real(*args, **kwargs)
        return way(real, *args, **kwargs)

    return call


def _missing(file: object) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(file))


def _path(file: object) -> str | None:
    """The whole path of a file that is named, or open."""
    name = file if isinstance(file, (str, bytes, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else None
