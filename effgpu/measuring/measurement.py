"""Measurement: what one variant took. First the memory of each variant alone, then all take turns to be timed."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral

import torch
from tqdm import tqdm

from effgpu import units
from effgpu.measuring import memory, power, timing
from effgpu.measuring.device import (
    Device,
    count_retries,
    describe,
    find_device,
    free_memory,
    gc_frozen,
    is_out_of_memory,
    random_states_kept,
)
from effgpu.measuring.intervals import BUILDS, FEWEST_BLOCKS, MOST_BLOCKS, interval_of_blocks, interval_of_builds
from effgpu.measuring.turns import take_blocks, take_builds
from effgpu.measuring.variants import Stage, Step, Variant, check_variants, run_variant
from effgpu.measuring.workers import CAN_FREEZE
from effgpu.units import check_positive

OUT_OF_MEMORY = "out of memory"
PRECISION = {"cpu": 0.03, "cuda": 0.01}  # the half width of an interval that a comparison aims at, as a share
SECONDS = {"cpu": 2.0, "cuda": 10.0}  # the most that a variant is timed
_TURN = {"cpu": 0.005, "cuda": 0.1}  # seconds that a turn takes at least; a GPU's clock needs that long to settle
_CAPPED_TURN = 0.5  # the same where the power cap holds the clock down: it is regulated over a longer time
_LEAD = 0.05  # seconds of a GPU's turn that do not count: its clock is still that of the variant before
_REFILL = 4  # steps of a CPU's turn from which on one more, which does not count, refills the caches first
_LOAD = {"cpu": 0.005, "cuda": 0.5}  # seconds of warm-up: caches fill, a GPU leaves its idle clock
_COMPILING = {"cpu": 1, "cuda": 3}  # first calls that are no load: they compile, tune, and record CUDA graphs
_ROOM = 0.9  # of the free memory that variants kept together may take: allocators need some slack


@dataclass(frozen=True, repr=False)
class Measurement:
    """Time, memory and energy of one variant's step. Seconds, bytes, joules; None for what was not measured.

    `turns` has a pair for each block: seconds per step in the variant's two turns, each averaged over the turn's steps.
    Where the variants did not fit together, each was built several times: `builds` says how often, and `turns` has a
    pair for each build. `items` are the samples, tokens, ... of a step, `joules` the energy of the whole
    board per step. `sm_clock` is the median clock of the GPU in MHz while it was timed, `throttled` what held the clock
    down. `failed` says why there is no result.
    """

    label: str
    turns: tuple[tuple[float, float], ...]
    device: Device
    items: float | None = None
    unit: str = "items"
    peak_allocated: int | None = None
    peak_reserved: int | None = None
    joules: float | None = None
    sm_clock: int | None = None
    throttled: tuple[str, ...] = ()
    failed: str | None = None
    builds: int = 1

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds per step, one value for each block or build."""
        return tuple(map(statistics.fmean, self.turns))

    @property
    def median(self) -> float | None:
        """Median seconds per step."""
        return statistics.median(self.times) if self.turns else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Low and high end of the 99 % interval of the seconds per step; None with too few blocks for one."""
        found = find_interval([math.log(time) for time in self.times if time > 0], self.builds)
        return found and (math.exp(found[1]), math.exp(found[2]))

    @property
    def throughput(self) -> float | None:
        """Items per second."""
        return self.items / self.median if self.items and self.median else None

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


def find_interval(logs: list[float], builds: int = 1, **confidence: float) -> tuple[float, float, float] | None:
    """Middle, low and high end for the logarithms of blocks, or of so many builds; None for too few of them."""
    if builds > 1:
        return interval_of_builds(logs, **confidence) if len(logs) == BUILDS else None
    return interval_of_blocks(logs, **confidence) if len(logs) >= FEWEST_BLOCKS else None


def measure(variant: Variant, **options) -> Measurement:
    """Measure one variant, named after its function. The options are `compare`'s, from `items` to `energy`."""
    return measure_all({getattr(variant, "__name__", "step"): variant}, **options)[0]


def measure_all(
    variants: Mapping[str, Variant],
    *,
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    seconds: float | None = None,
    precision: float | None = None,
    blocks: int | None = None,
    min_steps: int = 1,
    warmup: int = 2,
    energy: bool = True,
) -> list[Measurement]:
    """Measure the memory of each variant, one alive at a time, then time all of them in turns.

    `compare` explains the arguments; `blocks` sets the number of blocks. For the timing all variants are built, warmed
    up and kept, and take turns (`take_blocks`). A turn takes at least 5 ms, or 0.1 s on a GPU, whose clock settles no
    sooner (0.5 s where the power cap holds it down). Worker processes, such as a DataLoader's, are frozen while others
    have their turn. Variants that do not fit into memory together are built four times each for their turns. What that
    will take is announced.

    A variant that runs out of memory, in whatever phase, is marked as failed. Any other error frees everything and is
    raised. Raises TypeError or ValueError for arguments that are not as expected.
    """
    variants = check_variants(variants)
    kind = find_device().type
    seconds = SECONDS[kind] if seconds is None else seconds
    precision = PRECISION[kind] if precision is None else precision
    check_positive(Integral, blocks=1 if blocks is None else blocks, min_steps=min_steps, warmup=warmup)
    check_positive(seconds=seconds, precision=precision)
    check_unit(unit)
    items_of = _items_of(variants, items)
    allowed = timing.cap_seconds(seconds)
    capped = allowed < seconds
    energy = energy and not capped and torch.cuda.is_available()
    plan = _Plan(allowed, capped, precision, blocks, 1 if capped else min_steps, warmup, energy)
    records = {label: _Record() for label in variants}
    with gc_frozen(), random_states_kept(), _Progress() as progress:
        for done, (label, variant) in enumerate(variants.items()):
            progress.show(f"memory of {label}", done, len(variants))
            _attempt(label, records[label], partial(_take_memory, variant, records[label], warmup))
        _time_turns(progress, variants, records, plan)
    device = describe()
    return [records[label].finish(label, device, items_of[label], unit) for label in variants]


def check_unit(unit: str) -> None:
    """Raise TypeError for what cannot name a unit."""
    if not isinstance(unit, str):
        raise TypeError(f"unit: expected a string such as 'samples', got {unit!r}")


@dataclass
class _Record:
    """What has been measured of a variant so far. `preparing` is the seconds that it took to build and to warm up."""

    trace: memory.Trace | None = None
    preparing: float = 0.0
    pace: float = 0.0
    turns: list[float] = field(default_factory=list)
    clocks: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    joules: float | None = None
    failed: str | None = None
    builds: int = 1

    def finish(self, label: str, device: Device, items: float | None, unit: str) -> Measurement:
        if self.failed:
            return Measurement(label, (), device, items, unit, failed=self.failed)
        return Measurement(
            label,
            tuple(zip(self.turns[::2], self.turns[1::2])),
            device,
            items,
            unit,
            self.trace.peak,
            self.trace.reserved,
            self.joules,
            *power.summarize(self.clocks),
            builds=self.builds,
        )


@dataclass(frozen=True)
class _Plan:
    """How the variants are timed. `seconds` are cut short by EFFGPU_SECONDS where `capped`: turns are of one step."""

    seconds: float
    capped: bool
    precision: float
    blocks: int | None
    min_steps: int
    warmup: int
    energy: bool

    def count_steps(self, pace: float, shortest: float, workers: int = 0) -> int:
        """Steps in a turn of at least `shortest` seconds, where a step takes `pace`: whole rounds of the workers."""
        share, shortest = self.seconds / (2 * MOST_BLOCKS), 0.0 if self.capped else shortest
        steps = max(self.min_steps, 1, round(share / pace), math.ceil(shortest / pace - 1e-6))
        return math.ceil(steps / max(1, workers)) * max(1, workers)


class _NotTogether(Exception):
    """Variants turn out not to go together: they have to be built one at a time."""


def _time_turns(progress: "_Progress", variants: Mapping, records: Mapping, plan: _Plan) -> None:
    """Time all variants in turns: kept together if that works, else built anew. One alone has nothing beside it."""
    traces = [record.trace for record in records.values() if not record.failed]
    if len(traces) < 2 or _fit_together(traces):
        try:
            return _time_together(progress, variants, records, plan)
        except _NotTogether:
            for record in records.values():
                record.turns.clear()
                record.clocks.clear()
    _time_one_at_a_time(progress, variants, records, plan)


def _fit_together(traces: list[memory.Trace]) -> bool:
    """Whether what all variants hold between steps, and the most that a step adds to it, fit into the free memory."""
    held = sum(trace.start for trace in traces)
    return held + max(trace.peak - trace.start for trace in traces) <= _ROOM * free_memory()


def _alive(records: Mapping[str, _Record]) -> list[str]:
    return [label for label, record in records.items() if not record.failed]


def _time_together(progress: "_Progress", variants: Mapping, records: Mapping, plan: _Plan) -> None:
    together, retries, alive = len(variants) > 1, count_retries(), partial(_alive, records)

    def attempt(label: str, action: Callable[[Step], None]) -> None:
        _attempt(label, records[label], partial(stage.turn, label, action), together=together)
        if together and count_retries() > retries:
            raise _NotTogether  # the allocator gave cached memory back and asked again, in the midst of a turn

    def take_turn(label: str) -> None:
        attempt(label, partial(_take_turn, records[label], plan, _shortest(records.values()), stage.workers[label]))

    with Stage(variants) as stage:
        for done, label in enumerate(alive()):
            progress.show(f"warm-up of {label}", done, len(variants))
            attempt(label, partial(_warm_up, records[label], plan.warmup))
        if together and not CAN_FREEZE and any(stage.workers[label] for label in variants):
            raise _NotTogether
        retries = count_retries()  # those of the warm-up do no harm
        take_blocks(
            alive,
            take_turn,
            lambda: _log_ratios([records[label] for label in alive()]),
            target=plan.precision,
            seconds=plan.seconds,
            blocks=plan.blocks,
            say=partial(progress.show, "timing"),
        )
        for done, label in enumerate(alive() if plan.energy else ()):
            progress.show(f"energy of {label}", done, len(variants))
            attempt(label, partial(_take_energy, records[label]))


def _time_one_at_a_time(progress: "_Progress", variants: Mapping, records: Mapping, plan: _Plan) -> None:
    alive = partial(_alive, records)

    def take_build(label: str) -> None:
        record = records[label]
        _attempt(label, record, partial(run_variant, variants[label], partial(_time_build, record, plan)))

    expected = BUILDS * sum(records[label].preparing for label in alive()) + plan.seconds * len(alive())
    told = f"The variants do not fit into memory together, so each is built {BUILDS} times"
    progress.announce(f"{told}: about {units.format_seconds(expected)}.")
    for label in alive():
        records[label].builds = BUILDS
    take_builds(alive, take_build, partial(progress.show, "timing"))


def _log_ratios(records: list[_Record]) -> list[list[float]]:
    """The logarithms of each block's ratio of every variant to the first, or of the seconds of one variant alone."""
    first, *others = [
        [math.log(max(a + b, 1e-9)) for a, b in zip(record.turns[::2], record.turns[1::2])] for record in records
    ]
    return [[ours - theirs for ours, theirs in zip(other, first)] for other in others] or [first]


def _attempt(label: str, record: _Record, act: Callable[[], None], *, together: bool = False) -> None:
    """Out of memory is a result; of variants that are kept together, a reason to build them one at a time.

    Any other error goes on to the caller, with the label of its variant.
    """
    try:
        if not record.failed:
            act()
    except BaseException as error:
        if not is_out_of_memory(error):
            error.add_note(f"raised while measuring the variant {label!r}")
            raise
        if together:
            raise _NotTogether from None
        record.failed = OUT_OF_MEMORY


def _take_memory(variant: Variant, record: _Record, warmup: int) -> None:
    began = time.perf_counter()
    record.trace = memory.trace(variant, warmup=warmup)
    record.preparing = time.perf_counter() - began


def _warm_up(record: _Record, fewest: int, step: Step) -> None:
    """Run the step until it is compiled, caches are filled and a GPU's clock has risen; note the seconds it takes then.

    A call that still compiles is no load: of each window, as many seconds count as its steps take at their fastest.
    """
    kind = find_device().type
    timing.time_turn(step, max(fewest, _COMPILING[kind]), lead=0)
    record.pace, load = math.inf, 0.0
    while load < _LOAD[kind]:
        count = min(math.ceil((_LOAD[kind] - load) / max(record.pace, 1e-6)), 1000) or 1
        record.pace = max(min(record.pace, timing.time_turn(step, count, lead=0)), 1e-6)
        load += count * record.pace


def _shortest(records: Iterable[_Record]) -> float:
    """Seconds that a turn takes at least: longer where the power cap holds a variant's clock down."""
    capped = any(power.POWER_CAP in reasons for record in records for _, reasons in record.clocks)
    return _CAPPED_TURN if capped else _TURN[find_device().type]


def _take_turn(record: _Record, plan: _Plan, shortest: float, workers: int, step: Step) -> None:
    """Time one turn of a kept step."""
    pace = max(statistics.median(record.turns or [record.pace]), 1e-6)
    steps = plan.count_steps(pace, shortest, workers)
    lead = int(steps >= _REFILL or workers > 0)
    if find_device().type == "cuda":
        lead = 1 if plan.capped else max(1, math.ceil(_LEAD / pace))
    lead += workers  # a frozen worker loads nothing ahead, but each may have finished the batch that it was at
    record.turns.append(timing.time_turn(step, steps, lead=lead, meanwhile=partial(_note_clock, record)))


def _time_build(record: _Record, plan: _Plan, step: Step) -> None:
    """Time two windows of a newly built step, which share its part of the seconds; the last build's energy, too."""
    _warm_up(record, plan.warmup, step)
    steps = plan.count_steps(record.pace, max(plan.seconds / (2 * BUILDS), _TURN[find_device().type]))
    for _ in range(2):
        record.turns.append(timing.time_turn(step, steps, lead=0, meanwhile=partial(_note_clock, record)))
    if plan.energy and len(record.turns) == 2 * BUILDS:
        _take_energy(record, step)


def _note_clock(record: _Record) -> None:
    if clock := power.read_clock():
        record.clocks.append(clock)


def _take_energy(record: _Record, step: Step) -> None:
    record.joules = power.measure_energy(step)


def _items_of(labels: Iterable[str], items: float | Mapping[str, float] | None) -> dict[str, float | None]:
    """Items per step by label."""
    if items is None:
        return dict.fromkeys(labels)
    by_label = dict(items) if isinstance(items, Mapping) else dict.fromkeys(labels, items)
    if set(by_label) != set(labels):
        raise ValueError(f"items: expected a number for each of {list(labels)}, got them for {list(by_label)}")
    for label, value in by_label.items():
        check_positive(**{f"items of {label!r}": value})
    return {label: value if isinstance(value, int) else float(value) for label, value in by_label.items()}


class _Progress:
    """A plain bar, for a terminal or a notebook that somebody looks at. It wipes itself out when it is done.

    It promises no seconds before it knows them. In a notebook it is written to stdout, so that what is printed next
    takes the wiped line.
    """

    def __init__(self):
        notebook = "ipykernel" in sys.modules
        self._file = sys.stdout if notebook else sys.stderr
        off = not (notebook or sys.stderr.isatty())
        self._bar = tqdm(leave=False, file=self._file, disable=off, bar_format="{desc} |{bar:30}|", miniters=0)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def show(self, what: str, done: int, total: int, left: float | None = None) -> None:
        """Say what is under way, how much of it is done, and the seconds that are left where they are known."""
        about = "" if left is None else f", about {units.format_seconds(max(left, 0.1))} left"
        self._bar.total, self._bar.n = total, done
        self._bar.set_description_str(what + about, refresh=done == 0)
        self._bar.update(0)

    def announce(self, text: str) -> None:
        """Print a line above the bar, also where nobody looks at the bar."""
        self._bar.write(text, file=self._file)
