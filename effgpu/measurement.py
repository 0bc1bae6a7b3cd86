"""Measurement: what one variant took. The measuring alternates variants in rounds and keeps one alive at a time."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations_with_replacement
from numbers import Integral

import torch
from tqdm import tqdm

from effgpu import memory, power, timing, units
from effgpu.device import Device, describe, find_device, is_out_of_memory, older_objects_spared
from effgpu.units import check_positive
from effgpu.variants import Step, Variant, check_variants, use

OUT_OF_MEMORY = "out of memory"
FEWEST_ROUNDS, MOST_ROUNDS = 8, 100  # of fewer than eight, not even all can make a verdict
CONFIDENCE = 0.99  # of every interval, and so of every verdict; not the usual 95 %, as readers make many comparisons
_CACHES_FILL = 0.005  # seconds in which a step makes the caches its own
_CLOCK_STEADY = 0.025  # seconds of a GPU's steps that are held against those before them: are they faster?
_CLOCK_RISE = 0.5  # seconds after which a GPU has left its idle clock


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
    def interval(self) -> tuple[float, float] | None:
        """Low and high end of the 99 % interval of the seconds per step; None where the rounds are too few for one."""
        return rank_interval(self.times)[1:] if len(self.times) >= FEWEST_ROUNDS else None

    @property
    def throughput(self) -> float | None:
        """Items per second."""
        return self.items / self.median if self.items and self.median else None

    @property
    def flop_rate(self) -> float | None:
        """The model's FLOPs per second."""
        return self.flops / self.median if self.flops and self.median else None

    @property
    def joules(self) -> float | None:
        """Median joules per step, of the whole board."""
        return statistics.median(self.energies) if self.energies else None

    def __repr__(self) -> str:
        if self.failed:
            return f"{self.label}: {self.failed}"
        told = [f"{units.format_seconds(self.median)} per step"]
        if self.interval:
            told[0] += " [{}, {}]".format(*map(units.format_seconds, self.interval))
        if self.throughput:
            told.append(units.format_count(self.throughput, f"{self.unit}/s"))
        if self.peak_allocated is not None:
            told.append(f"peak {units.format_bytes(self.peak_allocated)}")
        if self.joules is not None:
            told.append(f"{units.format_joules(self.joules)} per step")
        return f"{self.label}: {', '.join(told)} on {self.device.label}"


def measure(variant: Variant, *, label: str | None = None, **options) -> Measurement:
    """Measure one variant. `label` defaults to the function's name; the other options are those of `compare`."""
    name = label or getattr(variant, "__name__", "step")
    return measure_all({name: variant}, **options)[0]


def measure_all(
    variants: Mapping[str, Variant],
    *,
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    flops: float | Mapping[str, float] | None = None,
    seconds: float = 2.0,
    rounds: int | None = None,
    min_steps: int = timing.FEWEST_STEPS,
    warmup: int = 2,
    energy: bool = True,
) -> list[Measurement]:
    """Measure all variants, one alive at a time: first the memory of each, then its time in alternating rounds.

    A variant is a function that builds its own state and returns one training step. Every round builds it, runs
    `warmup` steps or more (for 5 ms, until the caches are its own, and on a GPU, whose clock has to rise, until they
    get no faster), times at least `min_steps`, and frees it; every other round goes backwards, so that drift hits all
    alike. The first round of all is a rehearsal and does not count, for what happens only once happens then. In
    `rounds` rounds each variant is timed for `seconds` in all. Without `rounds`, there are as many as fit into
    `seconds` for each variant, with all that a round takes, at least 8 and at most 100: what disturbs a machine mostly
    outlasts a round, so that many short rounds see through it better than few long ones. The first eight rounds take
    the energy, where NVML has a counter; each takes half a second of it, on top, which `energy=False` saves where there
    are many variants. Where steps come in bursts, as from DataLoader workers, a round tells what they cost only if it
    is longer than a burst: give `min_steps`.

    `items` per step named by `unit`, and `flops` per step (each a number, or one for each label), are noted with the
    results. A variant that runs out of memory, in whatever phase, is marked as failed. Any other error frees everything
    and is raised. Raises TypeError or ValueError for arguments that are not as expected.
    """
    variants = check_variants(variants)
    check_positive(Integral, rounds=FEWEST_ROUNDS if rounds is None else rounds, min_steps=min_steps, warmup=warmup)
    check_positive(seconds=seconds)
    check_unit(unit)
    items_of, flops_of = _by_label(variants, items=items), _by_label(variants, flops=flops)
    fewest = min_steps if timing.cap_seconds(seconds) == seconds else 1
    seconds = timing.cap_seconds(seconds)
    records = {label: _Record() for label in variants}
    planned = rounds or MOST_ROUNDS
    take = partial(_take_round, warmup=warmup, seconds=seconds / planned, fewest=fewest)
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with older_objects_spared(), torch.random.fork_rng(gpus), _progress() as bar:
        bar.reset(len(variants) * (2 + planned))
        _take_turns(bar, variants, records, partial(_take_memory, warmup=warmup))
        _take_turns(bar, variants, records, partial(take, seconds=seconds / MOST_ROUNDS, energy=False))
        for record in records.values():
            record.times.clear()  # that was a rehearsal
        started, done = time.perf_counter(), 0
        while done < planned:
            turn = dict(reversed(variants.items())) if done % 2 else variants
            wanted = energy and done < (FEWEST_ROUNDS if fewest == min_steps else 1)
            _take_turns(bar, turn, records, partial(take, energy=wanted))
            done += 1
            if rounds is None:
                took = time.perf_counter() - started - sum(record.on_energy for record in records.values())
                planned = _plan_rounds(seconds, took / done / (sum(not r.failed for r in records.values()) or 1))
                bar.total = len(variants) * (2 + planned)
    device = describe()
    return [records[label].finish(label, device, items_of[label], unit, flops_of[label]) for label in variants]


def rank_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Middle, low and high end of the interval that covers the centre of the values in 99 of 100 cases at least.

    The middle is Hodges and Lehmann's estimate, the median of all averages of two values; the interval leaves off as
    many of these at each end as Wilcoxon's signed-rank distribution allows (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, chapter 3). Nothing is assumed but symmetry, which the ratios of a step to itself
    have, as either may be the larger. Raises ValueError where even all values do not suffice: fewer than eight.
    """
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    cut = _averages_to_cut(len(values))
    if cut == 0:
        raise ValueError(f"values: expected at least {FEWEST_ROUNDS}, got {len(values)}")
    return statistics.median(averages), averages[cut - 1], averages[-cut]


@cache
def _averages_to_cut(n: int) -> int:
    """The largest k for which twice the chance of a signed-rank sum below k is at most 1 - CONFIDENCE."""
    if n > 100:  # where the sum is all but normal, and the exact count would take minutes
        mean, deviation = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
        return int(mean - statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation)
    ways = [1]  # in which ranks 1 to n, each with either sign, give each positive sum
    for rank in range(1, n + 1):
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways)]
    below, k = 0, 0
    while 2 * (below + ways[k]) <= (1 - CONFIDENCE) * 2**n:
        below += ways[k]
        k += 1
    return k


def check_unit(unit: str) -> None:
    """Raises TypeError for what cannot name a unit."""
    if not isinstance(unit, str):
        raise TypeError(f"unit: expected a string such as 'samples', got {unit!r}")


@dataclass
class _Record:
    """What has been measured of a variant so far."""

    trace: memory.Trace | None = None
    times: list[float] = field(default_factory=list)
    energies: list[float | None] = field(default_factory=list)
    on_energy: float = 0.0  # seconds
    failed: str | None = None

    def finish(self, label: str, device: Device, items: float | None, unit: str, flops: float | None) -> Measurement:
        if self.failed:
            return Measurement(label, (), device, items, unit, flops=flops, failed=self.failed)
        peaks = self.trace.peak, self.trace.reserved
        energies = () if None in self.energies else tuple(self.energies)  # rounds are compared with their like
        return Measurement(label, tuple(self.times), device, items, unit, *peaks, energies, flops)


def _plan_rounds(seconds: float, cost: float) -> int:
    """How many rounds fit into `seconds` at a mean `cost`."""
    return min(MOST_ROUNDS, max(FEWEST_ROUNDS, round(seconds / cost)))


def _take_turns(bar: tqdm, variants: Mapping[str, Variant], records: dict[str, _Record], take: Callable) -> None:
    for label, variant in variants.items():
        bar.set_description_str(label)
        if not records[label].failed:
            _attempt(take, label, variant, records[label])
        bar.update()


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


def _take_round(variant: Variant, record: _Record, *, warmup: int, seconds: float, fewest: int, energy: bool) -> None:
    def action(step: Step) -> None:
        warm = timing.time_for(step, _CACHES_FILL, fewest=warmup)
        if find_device().type == "cuda":
            _raise_clock(step, sum(warm))
        record.times.append(statistics.fmean(timing.time_for(step, seconds, fewest=fewest)))
        if energy:
            begun = time.perf_counter()
            record.energies.append(power.measure_energy(step))
            record.on_energy += time.perf_counter() - begun

    use(variant, action)


def _raise_clock(step: Step, busy: float) -> None:
    """Keep the GPU busy until its steps get no faster, or until it was for long enough."""
    before = math.inf
    while busy < _CLOCK_RISE:
        times = timing.time_for(step, _CLOCK_STEADY, fewest=1)
        if statistics.fmean(times) > 0.98 * before:
            return
        before = statistics.fmean(times)
        busy += sum(times)


def _by_label(variants: Mapping[str, Variant], **named: float | Mapping[str, float] | None) -> dict[str, float | None]:
    """The one argument as a number for each variant."""
    ((name, given),) = named.items()
    if given is None:
        return dict.fromkeys(variants)
    by_label = dict(given) if isinstance(given, Mapping) else dict.fromkeys(variants, given)
    if set(by_label) != set(variants):
        raise ValueError(f"{name}: expected a number for each of {list(variants)}, got them for {list(by_label)}")
    for label, value in by_label.items():
        check_positive(**{f"{name} of {label!r}": value})
    return {label: value if isinstance(value, int) else float(value) for label, value in by_label.items()}


def _progress() -> tqdm:
    """A plain bar, for a terminal or a notebook somebody looks at, that wipes itself out when it is done.

    In a notebook it is written where print writes, so that what comes next takes the wiped line.
    """
    notebook = "ipykernel" in sys.modules
    shape = "{desc}: {n_fmt}/{total_fmt} |{bar:30}| {remaining} left"
    file = sys.stdout if notebook else sys.stderr
    return tqdm(leave=False, file=file, disable=not (notebook or sys.stderr.isatty()), bar_format=shape)
