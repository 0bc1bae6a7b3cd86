"""The life of a variant: a function builds a training step, the step takes turns, and all of it is freed."""

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import TypeVar

import torch

from effgpu.errors import BadArgument, BadType, CannotRun
from effgpu.measuring import device_lock
from effgpu.measuring.device import is_out_of_memory, release_memory
from effgpu.measuring.torch_internals import _GLOBAL_DEVICE_CONTEXT, exchange_compiled_shapes, has_compiled
from effgpu.measuring.workers import Workers

Step = Callable[[], object]
Variant = Callable[[], Step]
Result = TypeVar("Result")
_NOT_RUN = (AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType, partial)


def run_variant(variant: Variant, action: Callable[[Step], Result]) -> Result:
    """Build the variant's step, return what `action` makes of it, and free everything that the variant held.

    Raises TypeError for a variant that returns no step, RuntimeError for a step that runs out of data.
    """
    with BuiltVariants({"": variant}) as built:
        return built.turn("", action)


class BuiltVariants:
    """Variants that take turns. Each is built in its first turn, and kept.

    A turn starts with the switches of `_SWITCHES` that its own variant has set, and ends with those from before. So
    one variant's switches never reach the next, and neither do the shapes that torch.compile has seen. Worker processes
    are frozen between their variant's turns. All is freed at the end of the `with` block, whatever happens. An
    out-of-memory error or an interrupt carries the text of its traceback in place of its frames: they would hold models
    and DataLoader workers as long as a notebook keeps the error. Others can be debugged.
    """

    def __init__(self, variants: Mapping[str, Variant]):
        self.variants, self.workers = variants, Workers()
        self._built: dict[str, Step] = {}
        self._settings: dict[str, _Settings] = {}

    def __enter__(self) -> "BuiltVariants":
        return self

    def __exit__(self, *_) -> None:
        if self._built:
            self._free()

    def turn(self, label: str, action: Callable[[Step], Result]) -> Result:
        """Return what `action` makes of the variant's step, which is built first where it is not there."""
        handled = sys.exception()  # by the caller, and none of ours, though an error here is chained to it
        gpu = _current_gpu()
        try:
            awake = self.workers.awake(label) if len(self.variants) > 1 else contextlib.nullcontext()
            with _recompiling(), self._settings.setdefault(label, _Settings()).applied(), awake:
                if label not in self._built:
                    self._built[label] = _build(self.variants[label])
                    if (now := _current_gpu()) != gpu:
                        text = f"a variant must not change the current GPU: call torch.cuda.set_device({now})"
                        raise BadArgument(f"{text} before effgpu's function")
                device_lock.free_while_compiling()
                return action(self._built[label])
        except BaseException as error:
            if is_out_of_memory(error) or isinstance(error, KeyboardInterrupt):
                _drop_frames(error, handled)
            with contextlib.suppress(RuntimeError):  # a GPU that has failed fails at this, too
                self._free()
            if isinstance(error, StopIteration):
                message = "the step ran out of data: a measurement calls it often, so let its loader start anew"
                raise CannotRun(message) from error
            raise

    def _free(self) -> None:
        """Free all that is built, with its compiled graphs. What is built again starts with no switches set."""
        self.workers.release()
        self._built.clear()
        self._settings.clear()
        forget_compiled()
        release_memory()


def _current_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() else None


class _Settings:
    """What a variant has set for the whole process, and what torch.compile has learned of its shapes."""

    def __init__(self):
        self.switches: dict[int, object] = {}  # by their place in _SWITCHES, those that differ from outside
        self.shapes = None

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        before = [_read(read) for read, _ in _SWITCHES]
        shapes = exchange_compiled_shapes(self.shapes)
        try:
            for place, value in self.switches.items():
                _SWITCHES[place][1](value)
            yield
        finally:
            self.shapes = exchange_compiled_shapes(shapes)
            now = [_read(read) for read, _ in _SWITCHES]
            changed = [i for i, was in enumerate(before) if was is not None and now[i] != was]
            self.switches = {i: now[i] for i in changed if now[i] is not None}  # None: PyTorch cannot tell any more
            if changed:  # one may write another, as the older way to ask for TF32 does: read each again, twice
                for (read, write), was in 2 * list(zip(_SWITCHES, before)):
                    if was is not None and _read(read) != was:
                        write(was)


def forget_compiled() -> None:
    """Drop every compiled graph, with the memory of its CUDA graphs, where anything was compiled: it takes 3 s to load.

    Graphs outlive the variant that compiled them: the next one would find them, and its peak would depend on the order.
    """
    if has_compiled():
        torch.compiler.reset()


def uncompiled() -> contextlib.AbstractContextManager:
    """Inside, what torch.compile has compiled runs as it was written, and is not marked as impossible to compile.

    PyTorch 2.9 does that for good to a function that it meets first under a dispatch mode.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()


def check_worked(result: object) -> None:
    """Raises TypeError for what a step returns that has done nothing: a function, a generator, a coroutine."""
    if isinstance(result, _NOT_RUN):
        got = type(result).__name__
        _close(result)
        raise BadType(f"step: expected a training step that does its work when called, got a {got} from it")


def _close(result: object) -> None:
    """Close what an `async def` gives: Python warns of one that nobody awaits."""
    if isinstance(result, CoroutineType):
        result.close()


def check_variants(variants: Mapping[str, Variant], name: str = "variants") -> dict[str, Variant]:
    """The variants as a dict. Raises TypeError or ValueError that says what was expected of the argument `name`."""
    if not isinstance(variants, Mapping):
        raise BadType(f"{name}: expected a mapping of labels to functions, got {type(variants).__name__}")
    if not variants:
        raise BadArgument(f"{name}: expected at least one labelled function, got an empty mapping")
    for label, variant in variants.items():
        if not isinstance(label, str) or not label.strip():
            raise BadType(f"{name}: expected every label to be a non-empty string, got {label!r}")
        if not is_function(variant):
            got = type(variant).__name__
            raise BadType(f"{name}[{label!r}]: expected a function that returns a training step, got {got}")
    return dict(variants)


def _recompiling() -> contextlib.AbstractContextManager:
    """Let torch.compile compile as often as variants are built: past its limit, of eight, it runs a step eagerly."""
    dynamo = sys.modules.get("torch._dynamo")
    most = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    return dynamo.config.patch(most) if dynamo else contextlib.nullcontext()


def _read(read: Callable) -> object | None:
    """What a switch is set to; None where PyTorch cannot tell: by the older way to ask for TF32 once the newer one has
    been used.
    """
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore")
        return read()


def _get_default_device() -> torch.device:
    return torch.empty(0).device  # torch.get_default_device of PyTorch 2.9 fails once the device was set back


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None also removes the mode, which takes time
    if device.type == "cpu":  # the None that stays makes torch.get_default_device of PyTorch 2.9 fail, which others ask
        vars(_GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def _flag(holder: object, name: str) -> tuple[Callable, Callable]:
    return partial(getattr, holder, name), partial(setattr, holder, name)


def _precision(holder: object) -> tuple[Callable, Callable]:
    """A switch for TF32, which inherits that of what is above it wherever this gives what it was."""

    def write(precision: str) -> None:
        holder.fp32_precision = "none"
        if holder.fp32_precision != precision:
            holder.fp32_precision = precision

    return partial(getattr, holder, "fp32_precision"), write


def _reduction(name: str) -> tuple[Callable, Callable]:
    """What sums in 16 bits, and whether a product may be split for them, which PyTorch before 2.10 does not tell."""
    matmul = torch.backends.cuda.matmul
    return (
        lambda: (getattr(matmul, name), getattr(matmul, f"{name}_split_k", True)),
        lambda both: setattr(matmul, name, both[0] if both[1] else both),
    )


# What training code sets for the whole process: how to read it, and how to write it. Not everything that PyTorch has:
# another switch belongs in the step, or the variants into processes of their own (`effgpu bench`).
_SWITCHES = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_get_default_device, _set_default_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda on: torch.autograd.set_detect_anomaly(*on),
    ),
    *(
        (partial(read, kind), partial(write, kind))
        for kind in ("cpu", "cuda")
        for read, write in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
    *(_flag(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
    _flag(torch.backends.cudnn, "benchmark_limit"),
    *(_flag(torch.backends.mkldnn, name) for name in ("enabled", "deterministic")),
    _flag(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
    *(_reduction(f"allow_{kind}_reduced_precision_reduction") for kind in ("fp16", "bf16")),
    *(
        _precision(holder)
        for holder in (
            torch.backends,
            torch.backends.cudnn,
            torch.backends.cuda.matmul,
            torch.backends.mkldnn.matmul,
            torch.backends.cudnn.conv,
            torch.backends.cudnn.rnn,
            torch.backends.mkldnn.conv,
            torch.backends.mkldnn.rnn,
        )
    ),
    # after those for TF32, which they write
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _flag(torch.backends.cudnn, "allow_tf32"),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (
        torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    (torch.backends.cuda.preferred_blas_library, torch.backends.cuda.preferred_blas_library),
    (torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_linalg_library),
    (_current_gpu, lambda gpu: torch.cuda.set_device(gpu)),
    (lambda: torch.cuda.current_stream() if torch.cuda.is_available() else None, torch.cuda.set_stream),
)


def is_function(value: object) -> bool:
    """Whether it can be a variant or a step: a model can be called, too, and is neither."""
    return callable(value) and not isinstance(value, torch.nn.Module)


def _build(variant: Variant) -> Step:
    if not is_function(variant):
        got = type(variant).__name__
        raise BadType(f"variant: expected a function that builds and returns a training step, got {got}")
    step = variant()
    if not is_function(step):
        name, got = getattr(variant, "__name__", repr(variant)), type(step).__name__
        _close(step)
        raise BadType(f"variant {name!r}: expected it to return its training step, a function, got {got}")
    return step


def _drop_frames(error: BaseException, handled: BaseException | None) -> None:
    """Turn the tracebacks of an error, and of all that it is chained to, into a note.

    To clear the frames' local variables would not do: a frame keeps its function, and a step its model in its closure.
    """
    error.add_note("In the variant:\n" + "".join(traceback.format_exception(error)))
    while error is not None and error is not handled and error.__traceback__:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
