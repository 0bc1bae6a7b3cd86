"""One device for several lessons at once: a kernel holds a lock while it may measure, and no longer.

`effgpu run --at-once 4` names a file in the environment variable EFFGPU_DEVICE_LOCK and lets each kernel call
`hold_in_cells`. From the moment that a kernel uses CUDA, a cell that may use it waits for the lock. It is free while a
kernel predicts, draws (`free`) or compiles, so what is measured has the GPU for itself. Without the variable nothing is
locked.

On a CPU each cell waits for the lock, and it is free only while a kernel predicts. What predicts takes a core, so it
calls `stand_aside` between operations: while another kernel holds the lock, it waits.
"""

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Iterator
from time import monotonic

import torch

from effgpu.measuring.device import AT_ONCE
from effgpu.measuring.torch_internals import _lazy_call

VARIABLE = "EFFGPU_DEVICE_LOCK"
_OFTEN = 0.005  # seconds between two looks at the lock
# What a cell may call without using the GPU: effgpu's own frees the lock while it works.
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
    """The lock of this process, on a GPU or on the CPU. Raises OSError for a file that cannot be opened."""

    def __init__(self, path: str, *, on_cpu: bool = False):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self._next = 0.0
        self.on_cpu, self.held = on_cpu, False

    def take(self, *_) -> None:
        import fcntl

        if not self.held:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self.held = True

    def give_back(self, *_) -> None:
        import fcntl

        if self.held:
            self.held = False
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def stand_aside(self) -> None:
        """Wait while another process holds the lock."""
        import fcntl

        if not self.held and monotonic() > self._next:
            fcntl.flock(self._file, fcntl.LOCK_SH)
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._next = monotonic() + _OFTEN


_lock: _Lock | None = None


def hold_in_cells() -> None:
    """Let each cell of this kernel hold the lock while it runs: on a GPU if it may use it, from the first use on.

    Raises KeyError where EFFGPU_DEVICE_LOCK names no file, and OSError for one that cannot be opened.
    """
    from IPython import get_ipython

    global _lock
    _lock = _Lock(os.environ[VARIABLE], on_cpu=AT_ONCE not in os.environ)  # which is set for a GPU
    events = get_ipython().events

    def begin(info) -> None:
        if _lock.on_cpu or (torch.cuda.is_initialized() and may_use_gpu(info.raw_cell)):
            _lock.take()

    events.register("pre_run_cell", begin)
    # the plots of the cell are drawn between the two
    events.register("post_run_cell" if _lock.on_cpu else "post_execute", _lock.give_back)
    _lazy_call(_lock.take)  # PyTorch calls it once it has initialised CUDA


def may_use_gpu(source: str) -> bool:
    """Whether a cell may use the GPU: not if it only imports and defines, or calls nothing but what is harmless."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic
        return True
    defines = ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom
    run = [node for statement in statements if not isinstance(statement, defines) for node in ast.walk(statement)]
    called = {getattr(call.func, "attr", getattr(call.func, "id", "")) for call in run if isinstance(call, ast.Call)}
    return not called <= _HARMLESS


@contextlib.contextmanager
def free(*, stands_aside: bool = False) -> Iterator[None]:
    """Inside, other kernels may use the GPU: this one does not. So with the CPU, for code that calls `stand_aside`."""
    if _lock is None or not _lock.held or (_lock.on_cpu and not stands_aside):
        yield
        return
    _lock.give_back()
    try:
        yield
    finally:
        _lock.take()


def stand_aside() -> None:
    """Wait while another kernel has the CPU for itself. Costs nothing where no lessons share one."""
    if _lock is not None and _lock.on_cpu:
        _lock.stand_aside()


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Inside, this kernel has the GPU for itself, also within `free`."""
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
    if _lock is None or _lock.on_cpu or "torch._dynamo" not in sys.modules:
        return
    from effgpu.measuring.torch_internals import callback_handler

    if _lock.give_back not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_lock.give_back)
        callback_handler.register_end_callback(_lock.take)
