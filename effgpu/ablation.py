"""Ablation: techniques as switches of one step, measured alone, stacked, left out and together; what interacts."""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from statistics import median

from effgpu import units
from effgpu.comparison import BASELINE, BASELINE_FAILED, INCONCLUSIVE, MIN_EFFECT, SAME, Comparison, compare
from effgpu.measuring.measurement import Measurement, find_interval
from effgpu.measuring.variants import Step, is_function

NONE, PLUS, REST = "none", " + ", "the rest"
AS_FAST = 1.02  # so much slower counts as equally fast when it takes fewer switches
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


@dataclass(frozen=True)
class Interaction:
    """Two switches whose changes do not add up: what both together take above their sum; below 0, less than it."""

    quantity: str  # "time", "memory" or "energy"
    first: str
    second: str
    change: Change

    def __str__(self) -> str:
        how = "less" if self.change.value > 0 else "more"
        return f"{self.first} and {self.second} help {how} together than apart: {self.quantity} {self.change}"


@dataclass(frozen=True, repr=False)
class Ablation(Comparison):
    """The comparison of combinations of switches with none of them ("none", "bf16", "bf16 + fused", ...).

    Its table has a row a switch: what it changes alone, in the stack, and on top of all the rest, as shares of what the
    baseline takes. Shares add up where two techniques leave each other alone, as the seconds that they save do.
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
        expected = {"predicted": self.predicted, "guess": self.guess}
        expected = {which: {k: v for k, v in given.items() if k in labels} for which, given in expected.items()}
        other = tuple(label for label in labels if label in self.other_training)
        return Comparison(
            f"{self.name}.stack", measurements, **expected, min_effect=self.min_effect, other_training=other
        )

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
        return self._change(quantity, [{switch, *others}], [others])

    def interactions(self) -> list[Interaction]:
        """The switches that help less, or more, together than apart: surely, and by `min_effect` of the baseline.

        What both change together, less what each changes alone. Of up to five switches every two are looked at, of
        more each with all the rest. "Surely" is at 99 % for each: of ten pairs that leave each other alone, one is
        named in ten ablations.
        """
        found = []
        for quantity in SERIES:
            for first, second, others in self._pairs():
                change = self._change(quantity, [{first, *others}, ()], [{first}, others])
                if change and not change.verdict and abs(change.value) >= self.min_effect:
                    found.append(Interaction(quantity, first, second, change))
        return found

    def fastest(self, memory: float | None = None) -> Measurement:
        """The combination to use: the fastest per item whose peak is at most `memory` bytes.

        Of those that are as fast (all of the interval is at most 2 % above the fastest) the one with the fewest
        switches. On a GPU a card must hold what the allocator reserves and CUDA's context, so both count. Raises
        ValueError where nothing fits.
        """
        units.check_positive(memory=1 if memory is None else memory)
        fitting = [m for m in self._fitted() if memory is None or _needed(m) <= memory]
        if not fitting:
            raise ValueError(self._say_what_is_needed(memory))
        best = min(fitting, key=self._time)
        ratios = {m.label: Comparison(self.name, (best, m)).time_ratio(m.label) for m in fitting if m is not best}
        equal = [m for m in fitting if (ratio := ratios.get(m.label)) and ratio.high <= AS_FAST]
        return min([best, *equal], key=lambda m: (len(switches_on(m.label)), self._time(m)))

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each switch, in time, in memory and, where it was measured, in energy."""
        headings = ["change in", "switch", "alone", "in the stack", "on top of the rest"]
        measured = [quantity for quantity, values in SERIES.items() if any(map(values, self))]
        return headings, [row for quantity in measured for row in self._rows(quantity)]

    def caption(self) -> str:
        """What interacts, which combination is the fastest, and where it was measured."""
        told = [f"{interaction}." for interaction in self.interactions()]
        if not told and len(self.switches) > 1 and not any(m.failed for m in self):
            told.append("No two are seen to help less, or more, together than apart.")
        if failed := [m.label for m in self if m.failed]:
            told.append(f"Out of memory: {', '.join(failed)}.")
        if self._fitted():
            told.append(self._say_which_is_fastest())
        told.append(f"Changes are shares of what {self.whole.label!r} takes, with 99 % intervals: below 0 is less.")
        return "\n".join([*told, super().caption()])

    def to_dict(self) -> dict:
        """As a comparison's, and that it is an ablation."""
        return super().to_dict() | {"kind": "ablation"}

    def _names(self, on: Iterable[str]) -> set[str]:
        return set(switches_on(on) if isinstance(on, str) else on)

    def _change(self, quantity: str, plus: Iterable[Iterable[str]], minus: Iterable[Iterable[str]]) -> Change | None:
        """Some combinations less others over the whole, block by block, so that what slows one slows them all."""
        if quantity not in SERIES:
            raise ValueError(f"quantity: expected one of {list(SERIES)}, got {quantity!r}")
        values = SERIES[quantity]
        added, taken = (zip(*(values(self.find(on)) for on in side)) for side in (plus, minus))
        whole = self._whole_by_block(values)
        shares = [(sum(a) - sum(t)) / level for a, t, level in zip(added, taken, whole) if level]
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

    def _pairs(self) -> Iterator[tuple[str, str, set[str]]]:
        """Two that may interact: a switch, the name of the other side, and its switches."""
        if len(self.switches) <= MOST_FOR_ALL:
            yield from ((first, second, {second}) for first, second in itertools.combinations(self.switches, 2))
        else:
            yield from ((switch, REST, set(self.switches) - {switch}) for switch in self.switches)

    def _fitted(self) -> list[Measurement]:
        return [m for m in self if m.times and m.peak_allocated is not None]

    def _time(self, m: Measurement) -> float:
        return self.value(m.label, "time")

    def _say_what_is_needed(self, memory: float | None) -> str:
        if not self._fitted():
            return "every combination ran out of memory: none can be recommended"
        least = min(self._fitted(), key=_needed)
        needed, allowed = units.format_bytes(_needed(least)), units.format_bytes(memory)
        return f"memory: expected at least {needed}, which {least.label!r} needs, the least of all, got {allowed}"

    def _say_which_is_fastest(self) -> str:
        best = self.fastest()
        facts = {
            f"{units.format_seconds(self.value(best.label, 'time'))} per {self.per}": self.tell(best.label),
            f"peak {units.format_bytes(best.peak_allocated)}": self.tell(best.label, "memory"),
        }
        untold = (BASELINE, BASELINE_FAILED, units.NOT_MEASURED)
        told = [fact + (f" ({how})" if how not in untold else "") for fact, how in facts.items()]
        return f"Fewest switches among the fastest: {best.label}, {', '.join(told)}."

    def _rows(self, quantity: str) -> Iterator[list[str]]:
        for place, switch in enumerate(self.switches):
            among = ((), self.switches[:place], self.switches)
            effects = (self.effect(switch, others, quantity) for others in among)
            yield [quantity, switch, *map(units.format_optional, effects)]
        yield [quantity, "all of them", "", units.format_optional(self._change(quantity, [self.switches], [()])), ""]

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
    `compare`: unit, seconds (for each combination), blocks, warmup, energy (off by default here). Out of
    memory is a result. Raises TypeError or ValueError for bad arguments.

    >>> result = ablate(build, ["bf16", "fused", "checkpoint"], items=32, unit="samples")
    """
    values = _check_switches(switches)
    _check_build(build, values)
    on = {_label(names): {switch: values[switch] for switch in names} for names in _combinations(tuple(values))}
    variants = {label: partial(build, **keywords) for label, keywords in on.items()}
    if callable(items):
        _check_call("items", items, values)
        items = {label: items(**keywords) for label, keywords in on.items()}
    found = compare(variants, name=name, items=items, energy=energy, **options)
    return Ablation(**{field.name: getattr(found, field.name) for field in fields(found)})


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


def _needed(measurement: Measurement) -> int:
    """Bytes that a card must hold: on a GPU what the allocator reserved, and CUDA's context."""
    return (measurement.peak_reserved or measurement.peak_allocated) + (measurement.device.context or 0)


def _call(name: str, on: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{switch}={value!r}' for switch, value in on.items())})"


def _check_switches(switches: Iterable[str] | Mapping[str, object]) -> dict[str, object]:
    """Each switch with its value when on. Raises TypeError or ValueError that says what was expected."""
    unfit = (str, set, frozenset)  # of letters; and without an order to stack them in
    if isinstance(switches, unfit) or not isinstance(switches, Iterable):
        raise TypeError(f"switches: expected names of build's keywords, or a mapping of them, got {switches!r}")
    names = list(switches)
    if not names:
        raise ValueError("switches: expected at least one of build's keywords, got none")
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or name == NONE:
            raise ValueError(f"switches: expected names of build's keywords, and none called {NONE!r}, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"switches: expected each keyword once, got {name!r} twice")
    return dict(switches) if isinstance(switches, Mapping) else dict.fromkeys(names, True)


def _check_build(build: Callable[..., Step], values: Mapping[str, object]) -> None:
    """Raises TypeError or ValueError for what cannot build the step with and without the switches."""
    if not is_function(build):
        raise TypeError(f"build: expected a function that returns a training step, got {type(build).__name__}")
    _check_call("build", build, values)
    parameters = inspect.signature(build).parameters
    for switch, value in values.items():
        if switch in parameters and parameters[switch].default == value:
            raise ValueError(f"switches: expected {switch!r} to be off by default, build has {value!r} by default")


def _check_call(name: str, function: Callable, values: Mapping[str, object]) -> None:
    """Raises TypeError for a function that cannot be called with and without the switches."""
    for on in ({}, values):
        try:
            inspect.signature(function).bind(**on)
        except TypeError as error:
            expected = f"a function that can be called with the switches that are on, as {_call(name, on)}"
            raise TypeError(f"{name}: expected {expected}: {error}") from None
