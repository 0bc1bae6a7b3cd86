"""Code that is given to torch.compile, traced, or captured: it runs as it is, and is noted as such.

What is compiled is told so.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch
from torch.distributions import Distribution

from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import FakeTensor, _current_graph_task_id
from effgpu.predicting.facts import ASSUMED, COMPILED, GRAPHED, UNKNOWN
from effgpu.predicting.imports import is_insider

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition")  # backends of torch.compile that compile nothing
_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile that capture CUDA graphs
_VALIDATES = "_validate_args"  # of torch.distributions.Distribution: see torch_internals
_COMPILES, _DISABLES = "compile_wrapper", "_fn"  # what torch._dynamo.eval_frame puts around a function


def running_eagerly(recorder: "Recorder") -> Iterator[tuple[object, str, object]]:
    """What torch.compile was given runs as it is, and what runs so is noted as compiled."""
    from effgpu.measuring.torch_internals import OptimizedModule, eval_frame

    def mark(function, graphs=False):
        @functools.wraps(function)
        def run(*args, **kwargs):  # what is never called is never compiled
            if eval_frame._stance.stance == "force_eager" or eval_frame.config.disable:
                return function(*args, **kwargs)
            note_compiled(graphs)
            return _run_compiled(function, args, kwargs)

        return run

    def run_eagerly(model=None, **options):
        if model is None:
            return functools.partial(run_eagerly, **options)
        off = options.get("disable") or os.environ.get("TORCHDYNAMO_DISABLE") == "1" or _is_disabled(model)
        if not off:
            stop_validating()
        if off or options.get("backend") in _EAGER:
            return OptimizedModule(model, lambda forward: forward) if isinstance(model, torch.nn.Module) else model
        graphs = options.get("mode") in _GRAPHS or (options.get("options") or {}).get("triton.cudagraphs", False)
        wrap = functools.partial(mark, graphs=graphs)
        return OptimizedModule(model, wrap) if isinstance(model, torch.nn.Module) else wrap(model)

    @functools.cache
    def stop_validating():  # the arguments of distributions: the first torch.compile of a process does so
        if not eval_frame.TorchPatcher.patch.cache_info().currsize:
            Distribution.set_default_validate_args(False)

    def run_uncompiled(callback):
        if callback and not eval_frame.config.disable:
            note_compiled()

    def note_compiled(graphs=False):
        from effgpu.measuring.torch_internals import activation_memory_budget as budget  # as it is now

        recorder.say(*COMPILED)
        if graphs:
            recorder.say(*GRAPHED)
        if budget < 1:
            recorder.say(UNKNOWN, f"how much less compiled code keeps, with activation_memory_budget={budget:g}")

    trace = torch.jit.trace

    @functools.wraps(trace)
    def run_untraced(func=None, example_inputs=None, *args, **options):
        if getattr(func, "__name__", "") == "forward":  # of a module, which PyTorch traces then
            func = getattr(func, "__self__", func)
        weights = func.parameters() if isinstance(func, torch.nn.Module) else ()
        if not any(isinstance(each, FakeTensor) for each in tensors_of([*weights, example_inputs])):
            return trace(func, example_inputs, *args, **options)
        recorder.say(ASSUMED, "traced code takes what it takes without torch.jit.trace")
        if not hasattr(func, "save"):  # which a module of the script's may have, and read
            func.save = functools.partial(torch.jit.save, func)
        return func

    def run_uncaptured(callables, *_, **__):
        recorder.say(UNKNOWN, "how much more the CUDA graphs of make_graphed_callables keep")
        return callables

    def is_compiling():  # PyTorch's own code runs as it is
        asker = sys._getframe(1)
        return COMPILED in recorder.said and not is_insider(asker.f_code.co_filename) and recorder.compiled.has(asker)

    yield Distribution, _VALIDATES, getattr(Distribution, _VALIDATES)  # as it is, and is again after the walk
    yield torch, "compile", run_eagerly
    yield torch.jit, "trace", run_untraced
    yield torch.cuda, "make_graphed_callables", run_uncaptured
    yield eval_frame, "_callback_from_stance", run_uncompiled
    yield from ((torch.compiler, name, is_compiling) for name in ("is_compiling", "is_dynamo_compiling"))


def _run_compiled(function: Callable, args: tuple, kwargs: dict) -> object:
    return function(*args, **kwargs)


class Compiled:
    """Which code would be compiled."""

    def __init__(self):
        self._found: set[CodeType] = set()

    def has(self, frame: FrameType) -> bool:
        """Whether what a frame runs would be. What a backward pass runs again is if it was in the forward pass."""
        code = frame.f_code
        if _current_graph_task_id() != -1:
            return code in self._found
        if is_compiled := _runs_compiled(frame):
            self._found.add(code)
        return is_compiled


def _runs_compiled(frame: FrameType) -> bool:
    """Whether torch.compile is further in than torch.compiler.disable, of which PyTorch's own use does not count."""
    from effgpu.measuring.torch_internals import eval_frame

    theirs, inner = eval_frame.__file__, frame
    while frame is not None:
        code = frame.f_code
        if code is _run_compiled.__code__ or (code.co_filename == theirs and code.co_name == _COMPILES):
            return True
        if code.co_filename == theirs and code.co_name == _DISABLES and not is_insider(inner.f_code.co_filename):
            return False
        frame, inner = frame.f_back, frame
    return False


def _is_disabled(model: object) -> bool:
    """Whether it is what torch.compiler.disable gave."""
    return getattr(getattr(model, "forward", model), "_torchdynamo_disable", False)
