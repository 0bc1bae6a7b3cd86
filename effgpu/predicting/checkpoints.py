"""What a script does with checkpoints while it is predicted: none is written, and none from before is lost.

A script rotates its files: it renames or deletes an old checkpoint, and writes a new one. Here the new one is not
written, as its weights have no values. So the old one stays, and what would have been written is there for the script
alone: it can be loaded, looked at, copied, renamed and deleted.
"""

import builtins
import contextlib
import functools
import io
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from effgpu.attaching.replacing import replaced

_DIRECTORIES = "dir_fd", "src_dir_fd", "dst_dir_fd"  # which a name is relative to, in what rmtree calls
_WEIGHTS = (".bin", ".ckpt", ".pkl", ".pt", ".pth", ".safetensors", ".tar")


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

    def save(self, file: object, value: object) -> None:
        """Remember what would be in this file from now on."""
        if path := _path(file):
            self._saved[path] = Saved(value)

    def keep(self, file: object, value: object) -> bool:
        """Whether a file is a checkpoint from before, which is left alone: then the value is saved for the script."""
        if left := self._leave(file):
            self.save(file, value)
        return left

    def find(self, file: object) -> Saved | None:
        """What a file would hold; None where it holds that."""
        return self._saved.get(_path(file))

    def __contains__(self, file: object) -> bool:
        return _path(file) in self._saved

    def _is_from_before(self, file: object) -> bool:
        """Whether it is a checkpoint, or a folder with one, that was there before the script was started."""
        if (name := _path(file)) is None:  # a pipe, or memory
            return False
        path = Path(name)
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
                self._saved[_path(target)] = self._saved.pop(_path(source))
            elif self._leave(source) or (not self._is_new(source) and self._leave(target)):
                self._saved[_path(target)] = Saved(source=_path(source))
            else:
                return real(source, target, *args, **kwargs)
            return target

        def copy(real: Callable, source, target, *args, **kwargs):
            inside = Path(target, Path(source).name) if os.path.isdir(target) else target
            if source in self:
                self._saved[_path(inside)] = self._saved[_path(source)]
            elif not self._is_new(source) and self._leave(inside):
                self._saved[_path(inside)] = Saved(source=_path(source))
            else:
                return real(source, target, *args, **kwargs)
            return target

        def link(real: Callable, source, target, *args, **kwargs):
            beside = os.path.join(os.path.dirname(target), source)  # what a symbolic link's source is relative to
            if found := self.find(source) or self.find(beside):
                self._saved[_path(target)] = found
            else:
                real(source, target, *args, **kwargs)

        def remove(real: Callable, file, *args, **kwargs):
            saved = self._saved.pop(_path(file), None)
            if not self._leave(file) and (saved is None or os.path.lexists(file)):
                real(file, *args, **kwargs)

        def look(real: Callable, file, *args, **kwargs):
            try:
                return real(file, *args, **kwargs)
            except FileNotFoundError:
                if isinstance(file, int) or file not in self:
                    raise
            now = int(time.time())
            return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, os.getuid(), os.getgid(), 0, now, now, now))

        def open_other(real: Callable, file, mode="r", *args, **kwargs):
            if "w" in mode and not os.path.isdir(file) and self._leave(file):  # a folder: a temporary file in it
                return tempfile.TemporaryFile(mode if "+" in mode else f"{mode}+", *args, **kwargs)
            return real(file, mode, *args, **kwargs)

        ways = [(os, name, move) for name in ("rename", "replace")]
        ways += [(shutil, name, copy) for name in ("copyfile", "copy", "copy2")]
        ways += [(os, name, link) for name in ("link", "symlink")]
        ways += [(os, name, remove) for name in ("remove", "unlink")] + [(shutil, "rmtree", remove)]
        ways += [(os, "stat", look), (builtins, "open", open_other), (io, "open", open_other)]
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


def _path(file: object) -> str | None:
    """The whole path of a file that is named, or open."""
    name = file if isinstance(file, (str, bytes, os.PathLike)) else getattr(file, "name", None)
    return os.path.abspath(os.fsdecode(name)) if isinstance(name, (str, bytes, os.PathLike)) else None
