"""A variant's life: a function builds a training step, the step is used, and all of it is freed, whatever happens."""

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import TypeVar

import torch

from effgpu.device import release_memory

Step = Callable[[], object]
Variant = Callable[[], Step]
Result = TypeVar("Result")
_NOT_RUN = (AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType, partial)


def use(variant: Variant, action: Callable[[Step], Result]) -> Result:
    """Build the variant's step, return what `action` makes of it, and free everything that the variant held.

    Also when it raises or is interrupted: the frames in the traceback would keep models and DataLoader workers alive
    for as long as somebody keeps the error, as a notebook does, so the error takes along their text instead. PyTorch's
    switches for the whole process (TF32, cuDNN's, threads, anomaly mode, ...) are set back to what they were. Raises
    TypeError for a variant that returns no step, RuntimeError for a step that runs out of data.
    """
    handled = sys.exception()  # by the caller, and none of ours, though an error here is chained to it
    try:
        with _recompiling(), _switches_kept():
            result = action(_build(variant))
    except BaseException as error:
        if ended := next((e for e in (error, error.__cause__) if isinstance(e, StopIteration)), None):
            error = RuntimeError("the step ran out of data: a measurement calls it often, so let its loader start anew")
            error.__cause__ = ended
        _drop_frames(error, handled)
        with contextlib.suppress(RuntimeError):  # a GPU that has failed fails at this, too
            release_memory()
        raise error
    release_memory()
    return result


def check_worked(result: object) -> None:
    """Raises TypeError for what a step returns that has done nothing: a function, a generator, a coroutine."""
    if isinstance(result, _NOT_RUN):
        got = type(result).__name__
        raise TypeError(f"step: expected a training step that does its work when called, got a {got} from it")


def check_variants(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """The variants as a dict. Raises TypeError or ValueError that says what was expected."""
    if not isinstance(variants, Mapping):
        raise TypeError(f"variants: expected a mapping of labels to functions, got {type(variants).__name__}")
    if not variants:
        raise ValueError("variants: expected at least one labelled function, got an empty mapping")
    for label, variant in variants.items():
        if not isinstance(label, str) or not label.strip():
            raise TypeError(f"variants: expected every label to be a non-empty string, got {label!r}")
        if not is_function(variant):
            got = type(variant).__name__
            raise TypeError(f"variants[{label!r}]: expected a function that returns a training step, got {got}")
    return dict(variants)


def _recompiling() -> contextlib.AbstractContextManager:
    """Let torch.compile compile as often as variants are built: past its limit, of eight, it runs a step eagerly."""
    dynamo = sys.modules.get("torch._dynamo")
    most = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    return dynamo.config.patch(most) if dynamo else contextlib.nullcontext()


@contextlib.contextmanager
def _switches_kept() -> Iterator[None]:
    """Set PyTorch's switches for the whole process back: one variant's would be the next one's, too."""
    before = [_ask(read) for read, _ in _SWITCHES]
    try:
        yield
    finally:
        for (read, write), was in zip(_SWITCHES, before):
            if was is not None and _ask(read) != was:
                write(was)


def _ask(read: Callable) -> object | None:
    """What a switch is set to; None where PyTorch cannot tell: by the older way to ask for TF32 once the newer one has
    been used.
    """
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError, AttributeError):
        warnings.simplefilter("ignore")
        return read()


def _flag(holder: object, name: str) -> tuple[Callable, Callable]:
    return partial(getattr, holder, name), partial(setattr, holder, name)


_SWITCHES = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    # set to the CPU, which it is without one, a mode would be left on that looks at every call
    (
        lambda: (torch.empty(0).device, torch.overrides._len_torch_function_stack()),
        lambda was: torch.set_default_device(None if was[0].type == "cpu" else was[0]),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # which torch.use_deterministic_algorithms sets as well, but the mode does not set back
    (
        lambda: getattr(sys.modules.get("torch._inductor.config"), "deterministic", False),
        lambda on: setattr(sys.modules["torch._inductor.config"], "deterministic", on),
    ),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda on: torch.autograd.set_detect_anomaly(*on),
    ),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        (partial(read, kind), partial(write, kind))
        for kind in ("cpu", "cuda")
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    # first of those for TF32, as they write the others
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _flag(torch.backends.cudnn, "allow_tf32"),
    _flag(torch.backends, "fp32_precision"),
    _flag(torch.backends.cudnn, "fp32_precision"),
    _flag(torch.backends.cuda.matmul, "fp32_precision"),
    _flag(torch.backends.cudnn.conv, "fp32_precision"),
    _flag(torch.backends.cudnn.rnn, "fp32_precision"),
    _flag(torch.backends.mkldnn.matmul, "fp32_precision"),
    _flag(torch.backends.mkldnn.conv, "fp32_precision"),
    _flag(torch.backends.mkldnn.rnn, "fp32_precision"),
    (torch.backends.cuda.preferred_blas_library,) * 2,
    (torch.backends.cuda.preferred_linalg_library,) * 2,
    _flag(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _flag(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _flag(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    _flag(torch.backends.mkldnn, "enabled"),
    _flag(torch.backends.mkldnn, "deterministic"),
    _flag(torch.backends.cudnn, "enabled"),
    _flag(torch.backends.cudnn, "benchmark"),
    _flag(torch.backends.cudnn, "benchmark_limit"),
    _flag(torch.backends.cudnn, "deterministic"),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
)


def is_function(value: object) -> bool:
    """Whether it can be a variant or a step: a model can be called, too, and is neither."""
    return callable(value) and not isinstance(value, torch.nn.Module)


def _build(variant: Variant) -> Step:
    if not is_function(variant):
        got = type(variant).__name__
        raise TypeError(f"variant: expected a function that builds and returns a training step, got {got}")
    step = variant()
    if not is_function(step):
        name, got = getattr(variant, "__name__", repr(variant)), type(step).__name__
        raise TypeError(f"variant {name!r}: expected it to return its training step, a function, got {got}")
    return step


def _drop_frames(error: BaseException, handled: BaseException | None) -> None:
    """Turn the tracebacks of an error, and of all that it is chained to, into a note.

    To clear the frames' local variables would not do: a frame keeps its function, and a step its model in its closure.
    """
    error.add_note("In the variant:\n" + "".join(traceback.format_exception(error)))
    dropped, linked = [handled, None], [error]
    while linked:
        error = linked.pop()
        if not any(error is other for other in dropped):
            error.__traceback__ = None
            dropped.append(error)
            linked += [error.__cause__, error.__context__, *getattr(error, "exceptions", ())]
