"""One GPU for several lessons at once: a kernel holds a lock while it may use the GPU, and no longer.

`effgpu run --at-once 4` names a file in the environment variable EFFGPU_GPU_LOCK and lets each kernel call
`hold_in_cells`. From the moment that a kernel uses CUDA, a cell that may use it waits for the lock. It is free while a
kernel predicts, draws (`free`) or compiles, so what is measured has the GPU for itself. Without the variable nothing is
locked.
"""

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Iterator

import torch

from effgpu.measuring.torch_internals import _lazy_call

VARIABLE = "EFFGPU_GPU_LOCK"
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
    """The lock of this process. Raises OSError for a file that cannot be opened."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT)
        self.held = False

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


_lock: _Lock | None = None


def hold_in_cells() -> None:
    """Let each cell of this kernel that may use the GPU hold the lock while it runs, from the first use of CUDA on.

    Raises KeyError where EFFGPU_GPU_LOCK names no file, and OSError for one that cannot be opened.
    """
    from IPython import get_ipython

    global _lock
    _lock = _Lock(os.environ[VARIABLE])
    events = get_ipython().events
    events.register(
        "pre_run_cell", lambda info: torch.cuda.is_initialized() and may_use_gpu(info.raw_cell) and _lock.take()
    )
    events.register("post_execute", _lock.give_back)  # before the plots of the cell are drawn
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
def free() -> Iterator[None]:
    """Inside, other kernels may use the GPU: this one does not."""
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
    if _lock is None or "torch._dynamo" not in sys.modules:
        return
    from effgpu.measuring.torch_internals import callback_handler

    if _lock.give_back not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_lock.give_back)
        callback_handler.register_end_callback(_lock.take)
