"""Measurement: what one variant took. The measuring alternates variants in rounds and keeps one alive at a time."""

import gc
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

from effgpu import memory, power, timing, units
from effgpu.device import Device, describe, is_out_of_memory, release_memory
from effgpu.variants import Step, Variant, check_variants, use

OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, repr=False)
class Measurement:
    """Time, memory and energy of one variant's step. Seconds, bytes, joules; None for what was not measured.

    `times` has an entry a round: seconds per step, averaged over the round's steps, as torch.utils.benchmark does, so
    that steps which come in bursts (a DataLoader's workers) count with what they cost. `energies` likewise, joules per
    step of the whole board. `items` are the samples, tokens, ... of a step, `flops` the model's FLOPs in it. `failed`
    says why there is no result.
    """

    label: str
    times: tuple[float, ...]
    device: Device
    items: float | None = None
    unit: str = "items"
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    energies: tuple[float, ...] = ()
    flops: float | None = None
    failed: str | None = None

    @property
    def median(self) -> float | None:
        """Median seconds per step."""
        return statistics.median(self.times) if self.times else None

    @property
    def quartiles(self) -> tuple[float, float] | None:
        """First and third quartile of the seconds per step."""
        if len(self.times) < 2:
            return (self.times[0], self.times[0]) if self.times else None
        first, _, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return first, third

    @property
    def iqr(self) -> float | None:
        """Interquartile range of the seconds per step."""
        return self.quartiles[1] - self.quartiles[0] if self.quartiles else None

    @property
    def throughput(self) -> float | None:
        """Items per second."""
        return self.items / self.median if self.items and self.times else None

    @property
    def joules(self) -> float | None:
        """Median joules per step, of the whole board."""
        return statistics.median(self.energies) if self.energies else None

    def __repr__(self) -> str:
        if self.failed:
            return f"{self.label}: {self.failed}"
        told = [f"{units.format_seconds(self.median)} per step (IQR {units.format_seconds(self.iqr)})"]
        if self.throughput:
            told.append(units.format_count(self.throughput, f"{self.unit}/s"))
        if self.peak_allocated is not None:
            told.append(f"peak {units.format_bytes(self.peak_allocated)}")
        if self.joules is not None:
            told.append(f"{units.format_joules(self.joules)} per step")
        return f"{self.label}: {', '.join(told)} on {self.device.label}"


def measure(variant: Variant, *, label: str | None = None, **options) -> Measurement:
    """Measure one variant. `label` defaults to the function's name; for the other options see `measure_all`."""
    name = label or getattr(variant, "__name__", "step")
    return measure_all({name: variant}, **options)[0]


def measure_all(
    variants: Mapping[str, Variant],
    *,
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    flops: float | None = None,
    seconds: float = 2.0,
    rounds: int = 8,
    warmup: int = 2,
) -> list[Measurement]:
    """Measure all variants, one alive at a time: first the memory of each, then its time in alternating rounds.

    A variant is a function that builds its own state and returns one training step. Every round builds it, runs
    `warmup` steps, times its share of `seconds` (at least five steps), takes the energy where NVML has a counter, and
    frees it; every other round goes backwards, so that drift hits all alike.

    `items` per step (a number, or one for each label) named by `unit`, and `flops` per step, are noted with the
    results. A variant that runs out of memory, in whatever phase, is marked as failed. Any other error frees everything
    and is raised. Raises TypeError or ValueError for arguments that are not as expected.
    """
    variants = check_variants(variants)
    whole = {"rounds": rounds, "warmup": warmup}
    for name, value in (whole | {"seconds": seconds} | ({} if flops is None else {"flops": flops})).items():
        if not is_positive(value) or (name in whole and not isinstance(value, int)):
            raise ValueError(f"{name}: expected a positive {'whole ' * (name in whole)}number, got {value!r}")
    items_of = _items_by_label(variants, items)
    records = {label: _Record() for label in variants}
    jobs = [(label, partial(_take_memory, warmup=warmup)) for label in variants]
    for number in range(rounds):
        order = list(variants)[:: -1 if number % 2 else 1]
        jobs += [(label, partial(_take_round, warmup=warmup, seconds=seconds / rounds)) for label in order]
    with _older_objects_spared(), _progress(len(jobs)) as bar:
        for label, take in jobs:
            bar.set_description_str(label)
            if not records[label].failed:
                _attempt(take, label, variants[label], records[label])
            bar.update()
    device = describe()
    return [records[label].finish(label, device, items_of[label], unit, flops) for label in variants]


@dataclass
class _Record:
    """What has been measured of a variant so far."""

    trace: memory.Trace | None = None
    times: list[float] = field(default_factory=list)
    energies: list[float | None] = field(default_factory=list)
    failed: str | None = None

    def finish(self, label: str, device: Device, items: float | None, unit: str, flops: float | None) -> Measurement:
        if self.failed:
            return Measurement(label, (), device, items, unit, flops=flops, failed=self.failed)
        peaks = self.trace.peak, self.trace.reserved
        energies = () if None in self.energies else tuple(self.energies)  # rounds are compared with their like
        return Measurement(label, tuple(self.times), device, items, unit, *peaks, energies, flops)


@contextmanager
def _older_objects_spared() -> Iterator[None]:
    """Let the garbage collector pass over all that is older than the measuring, or its rounds would time a tenth of a
    second of collecting each.
    """
    release_memory()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _attempt(take: Callable[[Variant, _Record], None], label: str, variant: Variant, record: _Record) -> None:
    """Out of memory is a result; any other error goes on to the caller, with the label of its variant."""
    try:
        take(variant, record)
    except BaseException as error:
        if not is_out_of_memory(error):
            error.add_note(f"raised while measuring the variant {label!r}")
            raise
        record.failed = OUT_OF_MEMORY


def _take_memory(variant: Variant, record: _Record, *, warmup: int) -> None:
    record.trace = memory.trace(variant, warmup=warmup)


def _take_round(variant: Variant, record: _Record, *, warmup: int, seconds: float) -> None:
    def action(step: Step) -> None:
        for _ in range(warmup):
            step()
        record.times.append(statistics.fmean(timing.time_for(step, seconds)))
        record.energies.append(power.measure_energy(step))

    use(variant, action)


def _items_by_label(
    variants: Mapping[str, Variant], items: float | Mapping[str, float] | None
) -> dict[str, float | None]:
    if items is None:
        return dict.fromkeys(variants)
    by_label = dict(items) if isinstance(items, Mapping) else dict.fromkeys(variants, items)
    if set(by_label) != set(variants):
        raise ValueError(f"items: expected a number for each of {list(variants)}, got them for {list(by_label)}")
    for label, value in by_label.items():
        if not is_positive(value):
            raise ValueError(f"items: expected a positive number for {label!r}, got {value!r}")
    return by_label


def is_positive(value: object) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _progress(total: int) -> tqdm:
    """A plain bar, for a terminal or a notebook somebody looks at, that wipes itself out when it is done."""
    watched = sys.stderr.isatty() or "ipykernel" in sys.modules
    shape = "{desc}: {n_fmt}/{total_fmt} |{bar:30}| {remaining} left"
    return tqdm(total=total, leave=False, disable=not watched, bar_format=shape)
