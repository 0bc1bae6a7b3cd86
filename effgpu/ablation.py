"""Ablation: techniques as switches of one step, measured alone, stacked and together."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations

from effgpu.comparison import Comparison, compare
from effgpu.measuring.variants import Step, is_function

NONE = "none"
MOST_FOR_ALL = 5  # switches have 32 combinations; of more switches not all are measured


def ablate(
    build: Callable[..., Step],
    switches: Iterable[str] | Mapping[str, object],
    *,
    name: str = "ablation",
    items: float | Callable[..., float] | None = None,
    energy: bool = False,
    **options,
) -> Comparison:
    """Compare switches of a training step with none of them: each alone, stacked in their order, each left out of all.

    `build` is your own function with a keyword for each technique, off by default; it builds its state and returns one
    training step. It is called with the keywords that are on: `build()` is the baseline, "none". `switches` names the
    keywords, which are True when on, or maps each to its value when on: `{"bf16": True, "batch": 64}`. Of up to five
    switches all combinations are measured, in turns. Their labels are "bf16", "bf16 + batch", and so on.

    `items` per step are a number or a function of the same keywords as `build`. `name` and the options are those of
    `compare`: unit, seconds (for each combination), precision, warmup, energy (off by default here). Out of
    memory is a result. Raises TypeError or ValueError for bad arguments.

    >>> result = ablate(build, ["bf16", "fused", "checkpoint"], items=32, unit="samples")
    """
    values = _check_switches(switches)
    _check_build(build, values)
    settings = {" + ".join(on) or NONE: {switch: values[switch] for switch in on} for on in _choose(tuple(values))}
    if callable(items):
        items = {label: items(**keywords) for label, keywords in settings.items()}
    return compare(build, settings, name=name, items=items, energy=energy, **options)


def _choose(switches: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The combinations that are measured, from none of the switches to all of them."""
    sizes = range(len(switches) + 1)
    if len(switches) <= MOST_FOR_ALL:
        return [on for size in sizes for on in combinations(switches, size)]
    alone, left_out = combinations(switches, 1), combinations(switches, len(switches) - 1)
    stack = [switches[:size] for size in sizes]
    return list(dict.fromkeys(sorted([*alone, *left_out, *stack], key=len)))


def _check_switches(switches: Iterable[str] | Mapping[str, object]) -> dict[str, object]:
    """Each switch with its value when on. Raises TypeError or ValueError that says what was expected."""
    if isinstance(switches, str | set | frozenset) or not isinstance(switches, Iterable):  # a set has no order
        raise TypeError(f"switches: expected names of build's keywords, or a mapping of them, got {switches!r}")
    values = dict(switches) if isinstance(switches, Mapping) else dict.fromkeys(switches, True)
    if not values or NONE in values:
        raise ValueError(f"switches: expected at least one of build's keywords, not {NONE!r}, got {list(values)}")
    return values


def _check_build(build: Callable[..., Step], values: Mapping[str, object]) -> None:
    """Raises TypeError or ValueError for what cannot build the step with and without the switches."""
    if not is_function(build):
        raise TypeError(f"build: expected a function that returns a training step, got {type(build).__name__}")
    signature = inspect.signature(build)
    for on in ({}, values):
        try:
            signature.bind(**on)
        except TypeError as error:
            raise TypeError(f"build: expected a function that takes the switches as keywords: {error}") from None
    for switch, value in values.items():
        if switch in signature.parameters and signature.parameters[switch].default == value:
            raise ValueError(f"switches: expected {switch!r} to be off by default, build has {value!r} by default")
