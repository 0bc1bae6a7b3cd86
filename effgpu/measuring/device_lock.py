"""One GPU or CPU for several lessons at once: a kernel holds a lock while it may measure, and no longer.

`effgpu run --at-once 4` names a file in the environment variable EFFGPU_DEVICE_LOCK and lets each kernel call
`hold_in_cells`. From the moment that a kernel uses CUDA, a cell that may use it waits for the lock. It is free while a
kernel predicts, draws (`free`) or compiles, so what is measured has the GPU for itself. Without the variable nothing is
locked.

On a CPU it is the same from the first cell on. What predicts takes a core there, so whoever holds the lock also pauses
the other kernels, with all that they have started: they are children of the process that forks them (kernels.py).
"""

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import psutil
import torch

from effgpu.measuring.device import AT_ONCE
from effgpu.measuring.torch_internals import _lazy_call

VARIABLE = "EFFGPU_DEVICE_LOCK"
# What a cell may call without computing: effgpu's own frees the lock while it works.
_HARMLESS = {
    *dir(builtins),
    "plot",
    "predict",
    "partial",
    "time",
    "items",
    "values",
    "keys",
    "join",
    "append",
    "display",
}


class _Lock:
    """The lock of this process, which `pauses` the others or not. Raises OSError for a file that cannot be opened."""

    def __init__(self, path: str, *, pauses: bool = False):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._paused: list[psutil.Process] = []
        self.pauses, self.held = pauses, False

    def take(self, *_) -> None:
        import fcntl

        if not self.held:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.held = True
            if self.pauses:
                self._paused = _pause_siblings()

    def give_back(self, *_) -> None:
        import fcntl

        if self.held:
            self.held = False
            resume(self._paused)
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _pause_siblings() -> list[psutil.Process]:
    """Pause the other children of this process's parent, and theirs; returns those that were not paused before."""
    paused, this = [], psutil.Process()
    with contextlib.suppress(psutil.Error):  # of a parent that has ended
        waiting = [each for each in this.parent().children() if each != this]
        while waiting:
            process = waiting.pop()
            with contextlib.suppress(psutil.Error):  # of one that has ended
                if process.status() != psutil.STATUS_STOPPED:  # as what `compare` has frozen is
                    process.suspend()
                    paused.append(process)
                waiting += process.children()
    return paused


def resume(processes: Iterable[psutil.Process]) -> None:
    """Let processes go on that were paused."""
    for process in processes:
        with contextlib.suppress(psutil.Error):  # of one that has ended
            process.resume()


def resume_if_free(path: str, kernels: Iterable[psutil.Process]) -> None:
    """Let kernels go on that were paused by one that has ended: then nobody holds the lock."""
    import fcntl

    with open(path, "a") as file, contextlib.suppress(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for kernel in kernels:
            with contextlib.suppress(psutil.Error):
                if kernel.status() == psutil.STATUS_STOPPED:
                    resume([*kernel.children(recursive=True), kernel])


_lock: _Lock | None = None


def hold_in_cells() -> None:
    """Let each cell of this kernel that may measure hold the lock as it runs; on a GPU, from the first use of CUDA on.

    Raises KeyError where EFFGPU_DEVICE_LOCK names no file, and OSError for one that cannot be opened.
    """
    from IPython import get_ipython

    global _lock
    _lock = _Lock(os.environ[VARIABLE], pauses=AT_ONCE not in os.environ)  # which is set for a GPU
    events = get_ipython().events

    def begin(info) -> None:
        if (_lock.pauses or torch.cuda.is_initialized()) and may_use_device(info.raw_cell):
            _lock.take()

    events.register("pre_run_cell", begin)
    events.register("post_execute", _lock.give_back)  # before the plots of the cell are drawn
    _lazy_call(_lock.take)  # PyTorch calls it once it has initialised CUDA


def may_use_device(source: str) -> bool:
    """Whether a cell may compute: not if it only imports and defines, or calls nothing but what is harmless."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic
        return True
    defines = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    run = [node for statement in statements if not isinstance(statement, defines) for node in ast.walk(statement)]
    called = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in run if isinstance(call, ast.Call)}
    return not called <= _HARMLESS


@contextlib.contextmanager
def free() -> Iterator[None]:
    """Inside, other kernels may measure: this one does not."""
    if _lock is None or not _lock.held:
        yield
        return
    _lock.give_back()
    try:
        yield
    finally:
        _lock.take()


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Inside, this kernel has the device for itself, also within `free`."""
    if _lock is None or _lock.held:
        yield
        return
    _lock.take()
    try:
        yield
    finally:
        _lock.give_back()


def free_while_compiling() -> None:
    """Free the lock while torch.compile compiles, until the next `torch.compiler.reset`, which forgets it."""
    if _lock is None or "torch._dynamo" not in sys.modules:
        return
    from effgpu.measuring.torch_internals import callback_handler

    if _lock.give_back not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_lock.give_back)
        callback_handler.register_end_callback(_lock.take)
