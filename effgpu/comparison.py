"""Comparison: variants against the first of them, as ratios with an interval and a verdict within the evidence."""

import html
import math
import re
import reprlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from types import UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from effgpu import units
from effgpu.device import Device
from effgpu.measurement import FEWEST_ROUNDS, Measurement, measure_all, rank_interval
from effgpu.variants import Variant

FASTER, SLOWER, WITHIN_NOISE, BASELINE, BASELINE_FAILED = (
    "faster",
    "slower",
    "within noise",
    "baseline",
    "baseline failed",
)
_BEYOND_CHANCE = statistics.NormalDist().inv_cdf(1 - 0.001 / 2)
MIME_TYPE = "application/vnd.effgpu.comparison+json"


@dataclass(frozen=True)
class Ratio:
    """A variant's value over the baseline's, and its 99 % interval; below 1 the variant takes less."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return units.format_ratio(self.value)
        low, high = (units.format_ratio(end).removesuffix(" ×") for end in (self.low, self.high))
        return f"{units.format_ratio(self.value)} [{low}, {high}]"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Measurements taken in the same rounds; the first one is the baseline. Shows itself as a table."""

    name: str
    measurements: tuple[Measurement, ...]

    @property
    def baseline(self) -> Measurement:
        """The variant that the others are held against."""
        return self.measurements[0]

    @property
    def device(self) -> Device:
        """The device, with the versions, that all of it ran on."""
        return self.baseline.device

    def __getitem__(self, label: str) -> Measurement:
        for measurement in self.measurements:
            if measurement.label == label:
                return measurement
        raise KeyError(f"no variant {label!r} in {self.name!r}, only {[m.label for m in self.measurements]}")

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def __contains__(self, label: str) -> bool:
        return any(measurement.label == label for measurement in self)

    def time_ratio(self, label: str) -> Ratio | None:
        """Time per item (per step, where no items were given) over the baseline's; None where either has none."""
        return self._round_by_round(label, lambda m: m.times)

    def energy_ratio(self, label: str) -> Ratio | None:
        """Energy per item (per step, where no items were given) over the baseline's; None where none was measured."""
        return self._round_by_round(label, lambda m: m.energies)

    def memory_ratio(self, label: str) -> Ratio | None:
        """Peak of allocated memory over the baseline's: counted, not sampled, so its interval is a point."""
        ours, theirs = self[label].peak_allocated, self.baseline.peak_allocated
        return Ratio(ours / theirs, ours / theirs, ours / theirs) if ours is not None and theirs else None

    def ratio(self, label: str, quantity: str) -> Ratio | None:
        """What stands beside a value of "time", "memory" or "energy": its ratio; None for the baseline's own."""
        ratios = {"time": self.time_ratio, "memory": self.memory_ratio, "energy": self.energy_ratio}
        if quantity not in ratios:
            raise ValueError(f"quantity: expected one of {list(ratios)}, got {quantity!r}")
        return None if label == self.baseline.label else ratios[quantity](label)

    def verdict(self, label: str) -> str:
        """Faster or slower only where the whole interval of the time ratio is on that side of 1."""
        if self[label].failed or label == self.baseline.label:
            return self[label].failed or BASELINE
        if self.baseline.failed:
            return BASELINE_FAILED
        ratio = self.time_ratio(label)
        return WITHIN_NOISE if ratio is None or ratio.low <= 1 <= ratio.high else FASTER if ratio.high < 1 else SLOWER

    def disturbed(self) -> list[str]:
        """The variants whose time depends on which one ran just before: every other round runs in reverse.

        By the rank sums of the rounds of either order, at 99.9 %, which takes sixteen rounds (Hollander, Wolfe and
        Chicken, chapter 4). Threads that a library leaves spinning between its calls are one cause.
        """
        return [m.label for m in self if abs(_rank_sum_score(m.times[::2], m.times[1::2])) > _BEYOND_CHANCE]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings a variant; columns in which nothing was measured are left out."""
        columns = {
            "variant": lambda m: m.label,
            "time per step": lambda m: units.format_seconds(m.median),
            "throughput": lambda m: units.format_count(m.throughput, f"{m.unit}/s"),
            "FLOP rate": lambda m: units.format_count(m.flop_rate, "FLOP/s"),
            "time": lambda m: units.told(self.ratio(m.label, "time")),
            "peak memory": lambda m: units.format_bytes(m.peak_allocated),
            "memory": lambda m: units.told(self.ratio(m.label, "memory")),
            "energy per step": lambda m: units.format_joules(m.joules),
            "energy": lambda m: units.told(self.ratio(m.label, "energy")),
            "verdict": lambda m: self.verdict(m.label),
        }
        filled = {name: [cell(m) for m in self] for name, cell in columns.items()}
        filled = {name: cells for name, cells in filled.items() if set(cells) != {units.NOT_MEASURED}}
        return list(filled), [list(row) for row in zip(*filled.values())]

    def caption(self) -> str:
        """Where it was measured, with the versions that made the kernels, and whether variants disturbed each other."""
        versions = " ".join(f"{name} {v}" for name, v in self.device.versions.items() if name in ("torch", "cuda"))
        whose = "" if self.device.kind == "cuda" else "; times are this CPU's, not a GPU's"
        per = f" per {self.baseline.unit.removesuffix('s')}" * (len({m.items for m in self}) > 1)
        ratios = f" Ratios{per} to {self.baseline.label!r}, round by round, with 99 % intervals."
        disturbed = ", ".join(self.disturbed())
        disturbed = f" Disturbed by what ran just before: {disturbed}." if disturbed else ""
        return f"{self.name} on {self.device.label}, {versions}{whose}.{ratios * (len(self) > 1)}{disturbed}"

    def alt_text(self) -> str:
        """The verdicts in one line, for those who cannot see the plot."""
        verdicts = ", ".join(f"{measurement.label}: {self.verdict(measurement.label)}" for measurement in self)
        return f"Plot of {self.name} on {self.device.label}. {verdicts}"

    def to_dict(self) -> dict:
        """The comparison in JSON's types; `from_dict` reads it back."""
        rows = [{key: value for key, value in asdict(m).items() if key != "device"} for m in self]
        return {"name": self.name, "device": asdict(self.device), "measurements": rows}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "Comparison":
        """A comparison from what `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        device = Device(**_read_fields(Device, stored["device"]))
        measurements = tuple(
            Measurement(device=device, **_read_fields(Measurement, row)) for row in stored["measurements"]
        )
        labels = [m.label for m in measurements]
        if not labels or len(set(labels)) < len(labels):
            raise ValueError(f"measurements: expected at least one, each with a label of its own, got {labels}")
        return cls(check_name(stored["name"]), measurements)

    def _round_by_round(self, label: str, values: Callable[[Measurement], Sequence[float]]) -> Ratio | None:
        """Each round's own ratio, so that what slows a round down slows both sides of it."""
        ours, theirs = self[label], self.baseline
        scale = (theirs.items or 1) / (ours.items or 1)
        ratios = [math.log(a / b * scale) for a, b in zip(values(ours), values(theirs)) if a > 0 < b]
        return Ratio(*map(math.exp, rank_interval(ratios))) if len(ratios) >= FEWEST_ROUNDS else None

    def __repr__(self) -> str:
        headings, rows = self.table()
        widths = [max(map(len, column)) for column in zip(headings, *rows)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [headings, *rows]]
        return "\n".join([*lines, self.caption()])

    def _repr_html_(self) -> str:
        headings, rows = self.table()
        head = "".join(f"<th>{html.escape(name)}</th>" for name in headings)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        caption = f'<caption style="caption-side: bottom; text-align: left">{html.escape(self.caption())}</caption>'
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """Beside the table its data, so that an executed notebook carries its own evidence."""
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME_TYPE: self.to_dict()}


def compare(variants: Mapping[str, Variant], *, name: str = "comparison", **options) -> Comparison:
    """Measure variants side by side; the first one is the baseline.

    A variant is a function that builds its own state and returns one training step. What it takes from outside (a model
    of the notebook) is not counted as its memory; what it sets in PyTorch for the whole process (TF32, threads, ...) is
    set back before the next one. `name` is what the result is stored under. The options are those of
    `effgpu.measurement.measure_all`: items, unit, flops, seconds, rounds (at least eight), min_steps, warmup, energy.

    >>> result = compare({"fp32": fp32, "bf16": bf16}, name="mixed_precision", items=batch_size)
    """
    check_name(name)
    rounds = options.get("rounds")
    if isinstance(rounds, Integral) and 0 < rounds < FEWEST_ROUNDS:
        raise ValueError(f"rounds: expected at least {FEWEST_ROUNDS}, as many as a verdict takes, got {rounds}")
    return Comparison(name, tuple(measure_all(variants, **options)))


def _read_fields(kind: type, stored: Mapping) -> dict:
    """The stored fields of a dataclass, lists as tuples. Raises TypeError or ValueError where a type is another one."""
    fields = dict(stored)
    for name, hint in get_type_hints(kind).items():
        if name in fields and not _fits(fields[name], hint):
            whose, expected = fields.get("label", fields.get("name")), getattr(hint, "__name__", hint)
            got = reprlib.repr(fields[name])
            raise ValueError(f"{name} of {whose!r}: expected {expected}, finite and not negative, got {got}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


def _fits(value: object, hint: object) -> bool:
    """Whether a value is of an annotated type; a number must be finite and not negative."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in parts
    if origin is UnionType:
        return any(_fits(value, part) for part in parts)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, parts[1]) for item in value.values())
    if origin is tuple:
        known = isinstance(value, list | tuple) and (parts[-1] is ... or len(value) == len(parts))
        return known and all(_fits(item, parts[0]) for item in value)
    if hint in (int, float):
        of_kind = isinstance(value, int | hint) and not isinstance(value, bool)
        return of_kind and 0 <= value <= sys.float_info.max
    return isinstance(value, hint)


def check_name(name: str) -> str:
    """The name, if it can be a file's on every system. Raises TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"name: expected letters, digits, '_', '-' and '.' only, as in a file name, got {name!r}")
    return name


def _rank_sum_score(first: Sequence[float], second: Sequence[float]) -> float:
    """By how many standard deviations the one sample ranks higher in both than if they were alike."""
    pairs = len(first) * len(second)
    higher = sum((a > b) + (a == b) / 2 for a in first for b in second)
    return (higher - pairs / 2) / math.sqrt(pairs * (len(first) + len(second) + 1) / 12) if pairs else 0.0
