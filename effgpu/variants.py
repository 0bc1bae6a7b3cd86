"""A variant's life: a function builds a training step, the step is used, and all of it is freed, whatever happens."""

import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from effgpu.device import release_memory

Step = Callable[[], object]
Variant = Callable[[], Step]
Result = TypeVar("Result")


def use(variant: Variant, action: Callable[[Step], Result]) -> Result:
    """Build the variant's step, return what `action` makes of it, and free everything that the variant held.

    Also when it raises or is interrupted: the frames in the traceback would keep models and DataLoader workers alive,
    so their local variables are dropped. Raises TypeError for a variant that returns no step.
    """
    try:
        return action(_build(variant))
    except BaseException as error:
        _drop_locals(error)
        raise
    finally:
        release_memory()


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


def _build(variant: Variant) -> Step:
    step = variant()
    if not callable(step):
        name, got = getattr(variant, "__name__", repr(variant)), type(step).__name__
        raise TypeError(f"variant {name!r}: expected it to return its training step, a function, got {got}")
    return step


def _drop_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
