"""Ablation: techniques as switches of one step, measured alone, stacked, left out and together."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import median

from effgpu import units
from effgpu.comparison import INCONCLUSIVE, MIN_EFFECT, SAME, Comparison, compare
from effgpu.measuring.measurement import Measurement, find_interval
from effgpu.measuring.variants import Step, is_function

NONE, PLUS = "none", " + "
MOST_FOR_ALL = 5  # switches have 32 combinations; of more switches not all are measured
SERIES: dict[str, Callable[[Measurement], list[float]]] = {  # of time a value a block; per item, where items were given
    "time": lambda m: [seconds / (m.items or 1) for seconds in m.times],
    "memory": lambda m: [] if m.peak_allocated is None else [m.peak_allocated],
    "energy": lambda m: [m.joules / (m.items or 1)] if m.joules else [],
}


@dataclass(frozen=True)
class Change:
    """A change as a share of what the baseline takes, with its 99 % interval; below 0 the step takes less."""

    value: float
    low: float
    high: float
    min_effect: float = MIN_EFFECT

    @property
    def verdict(self) -> str:
        """ "same" if all of the interval is within `min_effect`, "inconclusive" if it covers none, else empty."""
        if self.low == self.high:
            return ""
        if max(-self.low, self.high) <= self.min_effect:
            return SAME
        return INCONCLUSIVE if self.low <= 0 <= self.high else ""

    def __str__(self) -> str:
        low, high = (format_share(end).removesuffix(" %") for end in (self.low, self.high))
        interval = f" [{low}, {high}]" * (self.low < self.high)
        return f"{format_share(self.value)}{interval} {self.verdict}".rstrip()

    @property
    def short(self) -> str:
        """The same without the interval, as a plot writes it."""
        return f"{format_share(self.value)}  {self.verdict}".rstrip()


@dataclass(frozen=True, repr=False)
class Ablation(Comparison):
    """The comparison of combinations of switches with none of them ("none", "bf16", "bf16 + fused", ...).

    Its table has a row a switch: what it changes alone, in the stack, and on top of all the rest, as shares of what the
    baseline takes. The three are equal where techniques leave each other alone; where they differ, techniques interact.
    """

    def __post_init__(self):
        labels = [m.label for m in self.measurements]
        expected = [_label(on) for on in _combinations(self.switches)]
        if len(labels) < 2 or labels[0] != NONE or sorted(labels) != sorted(expected):
            raise ValueError(f"measurements: expected the combinations that `ablate` measures, got {labels}")

    @property
    def switches(self) -> tuple[str, ...]:
        """The switches, in the order of the stack."""
        return tuple(m.label for m in self if m.label != NONE and PLUS not in m.label)

    @property
    def stack(self) -> Comparison:
        """The switches one on top of the other in their order, against none.

        Its name is its own, so that showing it does not replace the whole.
        """
        measurements = tuple(self.find(self.switches[:n]) for n in range(len(self.switches) + 1))
        labels = [m.label for m in measurements]
        predicted = {label: ratios for label, ratios in self.predicted.items() if label in labels}
        return Comparison(f"{self.name}.stack", measurements, predicted, self.min_effect)

    @property
    def whole(self) -> Measurement:
        """What changes are shares of: the baseline or, where that ran out of memory, the first one that did not."""
        return next((m for m in self if not m.failed), self.baseline)

    def find(self, on: Iterable[str]) -> Measurement:
        """The measurement of the combination of some switches, or of its label. Raises KeyError for another one."""
        on = self._names(on)
        if unknown := on - set(self.switches):
            raise KeyError(f"no switch {min(unknown)!r} in {self.name!r}, only {list(self.switches)}")
        return self[_label(switch for switch in self.switches if switch in on)]

    def effect(self, switch: str, among: Iterable[str] = (), quantity: str = "time") -> Change | None:
        """What a switch changes where those `among` are on: in "time", "memory" or "energy".

        Time and energy are per item (per step, where no items were given), memory is the peak. None where one of the
        two was not measured or ran out of memory. Raises KeyError for a combination that is not there.
        """
        others = self._names(among) - {switch}
        return self._change(quantity, {switch, *others}, others)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each switch, in time, in memory and, where it was measured, in energy."""
        headings = ["change in", "switch", "alone", "in the stack", "on top of the rest"]
        measured = [quantity for quantity, values in SERIES.items() if any(map(values, self))]
        return headings, [row for quantity in measured for row in self._rows(quantity)]

    def caption(self) -> str:
        """What ran out of memory, what the changes are shares of, and where it was measured."""
        lines = [f"Changes are shares of what {self.whole.label!r} takes, with 99 % intervals: below 0 is less."]
        if failed := [m.label for m in self if m.failed]:
            lines.insert(0, f"Out of memory: {', '.join(failed)}.")
        return "\n".join([*lines, super().caption()])

    def to_dict(self) -> dict:
        """As a comparison's, and that it is an ablation."""
        return super().to_dict() | {"kind": "ablation"}

    def _names(self, on: Iterable[str]) -> set[str]:
        return set(switches_on(on) if isinstance(on, str) else on)

    def _change(self, quantity: str, on: Iterable[str], off: Iterable[str]) -> Change | None:
        """One combination less another over the whole, block by block, so that what slows one slows them all."""
        if quantity not in SERIES:
            raise ValueError(f"quantity: expected one of {list(SERIES)}, got {quantity!r}")
        values = SERIES[quantity]
        blocks = zip(values(self.find(on)), values(self.find(off)), self._whole_by_block(values))
        shares = [(one - other) / whole for one, other, whole in blocks if whole]
        if quantity != "time":  # counted once, without an interval
            return Change(*shares * 3, self.min_effect) if shares else None
        interval = find_interval(shares, self.whole.builds)
        return interval and Change(*interval, self.min_effect)

    def _whole_by_block(self, values: Callable[[Measurement], list[float]]) -> list[float]:
        """The median of the whole, times what slowed all combinations in a block.

        A noisy denominator would bias shares upward, so the whole's own value of each block is not used.
        """
        measured = [series for series in map(values, self) if series and median(series)]
        paces = zip(*([value / median(series) for value in series] for series in measured))
        level = values(self.whole)
        return [median(level) * median(pace) for pace in paces] if level else []

    def _rows(self, quantity: str) -> Iterator[list[str]]:
        for place, switch in enumerate(self.switches):
            among = ((), self.switches[:place], self.switches)
            effects = (self.effect(switch, others, quantity) for others in among)
            yield [quantity, switch, *map(units.format_optional, effects)]
        yield [quantity, "all of them", "", units.format_optional(self._change(quantity, self.switches, ())), ""]

    def _repr_html_(self) -> str:
        return super()._repr_html_().replace("\n", "<br>")


def ablate(
    build: Callable[..., Step],
    switches: Iterable[str] | Mapping[str, object],
    *,
    name: str = "ablation",
    items: float | Callable[..., float] | None = None,
    energy: bool = False,
    **options,
) -> Ablation:
    """Measure what switches of a training step do: each alone, stacked in their order, each left out of the full stack.

    `build` is your own function with a keyword for each technique, off by default; it builds its state and returns one
    training step. It is called with the keywords that are on: `build()` is the baseline. `switches` names the keywords,
    which are True when on, or maps each to its value when on: `{"bf16": True, "batch": 64}`. Of up to five switches all
    combinations are measured, in turns.

    `items` per step are a number or a function of the same keywords as `build`. `name` and the options are those of
    `compare`: unit, seconds (for each combination), precision, warmup, energy (off by default here). Out of
    memory is a result. Raises TypeError or ValueError for bad arguments.

    >>> result = ablate(build, ["bf16", "fused", "checkpoint"], items=32, unit="samples")
    """
    values = _check_switches(switches)
    _check_build(build, values)
    on = {_label(names): {switch: values[switch] for switch in names} for names in _combinations(tuple(values))}
    variants = {label: partial(build, **keywords) for label, keywords in on.items()}
    if callable(items):
        items = {label: items(**keywords) for label, keywords in on.items()}
    comparison = compare(variants, name=name, items=items, energy=energy, **options)
    return Ablation(**{field.name: getattr(comparison, field.name) for field in fields(comparison)})


def format_share(share: float) -> str:
    """A change as a share: `-0.4` -> `"−40.0 %"`, `0` -> `"0.0 %"`."""
    percent = round(100 * share, 1)
    return f"{percent:+.1f} %".replace("-", "−") if percent else "0.0 %"


def switches_on(label: str) -> list[str]:
    """The switches that a label names: `"bf16 + fused"` -> `["bf16", "fused"]`, `"none"` -> `[]`."""
    return [] if label == NONE else label.split(PLUS)


def _combinations(switches: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Those that are measured, none first and all last."""
    if len(switches) <= MOST_FOR_ALL:
        return [on for size in range(len(switches) + 1) for on in itertools.combinations(switches, size)]
    stack = [switches[:size] for size in range(len(switches) + 1)]
    alone = [(switch,) for switch in switches]
    left_out = [tuple(other for other in switches if other != switch) for switch in switches]
    return list(dict.fromkeys(sorted([*stack, *alone, *left_out], key=len)))


def _label(on: Iterable[str]) -> str:
    return PLUS.join(on) or NONE


def _check_switches(switches: Iterable[str] | Mapping[str, object]) -> dict[str, object]:
    """Each switch with its value when on. Raises TypeError or ValueError that says what was expected."""
    unfit = (str, set, frozenset)  # of letters; and without an order to stack them in
    if isinstance(switches, unfit) or not isinstance(switches, Iterable):
        raise TypeError(f"switches: expected names of build's keywords, or a mapping of them, got {switches!r}")
    values = dict(switches) if isinstance(switches, Mapping) else dict.fromkeys(switches, True)
    if not values or NONE in values:
        told = f"at least one of build's keywords, and none called {NONE!r}"
        raise ValueError(f"switches: expected {told}, got {list(values)}")
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
