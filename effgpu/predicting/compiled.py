"""Code that is given to torch.compile: it runs as it is, and is noted as compiled."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from effgpu.predicting.facts import COMPILED, UNKNOWN

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")  # backends of torch.compile that compile nothing


def running_eagerly(recorder: "Recorder") -> Iterator[tuple[object, str, object]]:
    """What torch.compile was given runs as it is, and what runs so is noted as compiled."""
    from effgpu.measuring.torch_internals import OptimizedModule, eval_frame

    def mark(function):
        @functools.wraps(function)
        def run(*args, **kwargs):  # what is never called is never compiled
            if eval_frame._stance.stance == "force_eager":
                return function(*args, **kwargs)
            note_compiled()
            recorder.compiled += 1
            try:
                return function(*args, **kwargs)
            finally:
                recorder.compiled -= 1

        return run

    def run_eagerly(model=None, **options):
        if model is None:
            return functools.partial(run_eagerly, **options)
        if options.get("disable") or options.get("backend") in _EAGER or _is_disabled(model):
            return OptimizedModule(model, lambda forward: forward) if isinstance(model, torch.nn.Module) else model
        return OptimizedModule(model, mark) if isinstance(model, torch.nn.Module) else mark(model)

    def run_uncompiled(callback):
        if callback:
            note_compiled()
            recorder.compiled += 1  # for good: where such code ends is not seen

    def note_compiled():
        from effgpu.measuring.torch_internals import activation_memory_budget as budget  # as it is now

        recorder.say(*COMPILED)
        if budget < 1:
            recorder.say(UNKNOWN, f"how much less compiled code keeps, with activation_memory_budget={budget:g}")

    yield torch, "compile", run_eagerly
    yield eval_frame, "_callback_from_stance", run_uncompiled


def _is_disabled(model: object) -> bool:
    """Whether it is what torch.compiler.disable gave."""
    return getattr(getattr(model, "forward", model), "_torchdynamo_disable", False)
