"""A variant's life: a function builds a training step, the step is used, and all of it is freed, whatever happens."""

import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from effgpu.device import release_memory

Step = Callable[[], object]
Variant = Callable[[], Step]
Result = TypeVar("Result")


def use(variant: Variant, action: Callable[[Step], Result]) -> Result:
    """Build the variant's step, return what `action` makes of it, and free everything that the variant held.

    Also when it raises or is interrupted: the frames in the traceback would keep models and DataLoader workers alive
    for as long as somebody keeps the error, as a notebook does, so the error takes along their text instead. Raises
    TypeError for a variant that returns no step.
    """
    handled = sys.exception()  # by the caller, and none of ours, though an error here is chained to it
    try:
        with _recompiling():
            result = action(_build(variant))
    except BaseException as error:
        _drop_frames(error, handled)
        with contextlib.suppress(RuntimeError):  # a GPU that has failed fails at this, too
            release_memory()
        raise
    release_memory()
    return result


def check_variants(variants: Mapping[str, Variant]) -> dict[str, Variant]:
    """The variants as a dict. Raises TypeError or ValueError that says what was expected."""
    if not isinstance(variants, Mapping):
        raise TypeError(f"variants: expected a mapping of labels to functions, got {type(variants).__name__}")
    if not variants:
        raise ValueError("variants: expected at least one labelled function, got an empty mapping")
    for label, variant in variants.items():
        if not isinstance(label, str) or not label.strip():
            raise TypeError(f"variants: expected every label to be a non-empty string, got {label!r}")
        if not callable(variant):
            got = type(variant).__name__
            raise TypeError(f"variants[{label!r}]: expected a function that returns a training step, got {got}")
    return dict(variants)


def _recompiling() -> contextlib.AbstractContextManager:
    """Let torch.compile compile as often as variants are built: past its limit, of eight, it runs a step eagerly."""
    dynamo = sys.modules.get("torch._dynamo")
    most = {"recompile_limit": sys.maxsize, "accumulated_recompile_limit": sys.maxsize}
    return dynamo.config.patch(most) if dynamo else contextlib.nullcontext()


def _build(variant: Variant) -> Step:
    step = variant()
    if not callable(step):
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
