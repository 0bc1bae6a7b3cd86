"""Kernels that are written in Triton: they cannot run here, and write into tensors that are there before."""

import contextlib
from collections.abc import Callable
from types import ModuleType

from effgpu.attaching.replacing import replaced
from effgpu.measuring.ops import tensors_of
from effgpu.predicting.recorder import Recorder

MODULE = "triton.runtime.jit"


def left_out(recorder: Recorder, module: ModuleType) -> contextlib.AbstractContextManager:
    """Inside, `kernel[grid](...)` runs nothing: the GPU reads or writes each of its tensors once."""

    def choose_grid(kernel: object, grid: object) -> Callable[..., None]:
        inner = kernel
        while hasattr(inner, "fn"):  # of an autotuner, and of heuristics
            inner = inner.fn

        def launch(*args: object, **kwargs: object) -> None:
            recorder.work.note_custom(getattr(inner, "__name__", "a kernel"), tensors_of((args, kwargs)))

        return launch

    return replaced([(module.KernelInterface, "__getitem__", choose_grid)])
