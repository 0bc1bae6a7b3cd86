"""One GPU for several lessons at once: a kernel holds a lock while it may use the GPU, and no longer.

`effgpu run --at-once 4` names a file in the environment variable EFFGPU_GPU_LOCK and lets each kernel call
`hold_in_cells`. From the moment that a kernel uses CUDA, its cells wait for the lock. It is free while a kernel
predicts (`free`) or compiles, so what is measured has the GPU for itself. Without the variable nothing is locked.
"""

import contextlib
import os
import sys
from collections.abc import Iterator

import torch

from effgpu.measuring.torch_internals import _lazy_call

VARIABLE = "EFFGPU_GPU_LOCK"


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
    """Let each cell of this kernel hold the lock while it runs, from the first use of CUDA on.

    Raises KeyError where EFFGPU_GPU_LOCK names no file, and OSError for one that cannot be opened.
    """
    from IPython import get_ipython

    global _lock
    _lock = _Lock(os.environ[VARIABLE])
    events = get_ipython().events
    events.register("pre_run_cell", lambda *_: torch.cuda.is_initialized() and _lock.take())
    events.register("post_run_cell", _lock.give_back)
    _lazy_call(_lock.take)  # PyTorch calls it once it has initialised CUDA


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
