"""Measurement: what one variant took. First the memory of each variant alone, then all take turns to be timed."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral

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
from effgpu.measuring.intervals import BUILDS, FEWEST_BLOCKS, MOST_BLOCKS, divide_confidence, find_interval
from effgpu.measuring.progress import Progress
from effgpu.measuring.turns import OF_VARIANTS, log_ratios, take_blocks, take_builds
from effgpu.measuring.variants import BuiltVariants, Step, Variant, check_variants, run_variant
from effgpu.measuring.workers import CAN_FREEZE
from effgpu.units import check_positive

OUT_OF_MEMORY = "out of memory"
PRECISION = {"cpu": 0.03, "cuda": 0.01}  # the half width of an interval that a comparison aims at, as a share
SECONDS = {"cpu": 2.0, "cuda": 5.0}  # the most that a variant is timed
_CAPPED_TURN = 0.5  # seconds of a turn where the power cap holds the clock down, which takes longer, if there is time
_REFILL = 4  # steps of a CPU's turn from which on one more, which does not count, refills the caches first
_LOAD = {"cpu": 0.005, "cuda": 0.25}  # seconds of warm-up: caches fill, a GPU leaves its idle clock
_COMPILING = {"cpu": 1, "cuda": 3}  # first calls that are no load: they compile, tune, and record CUDA graphs
_TOO_LARGE, _NOT_FROZEN = "do not fit into memory together", "have worker processes, which cannot be frozen here"
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

    def __repr__(self) -> str:
        if self.failed:
            return f"{self.label}: {self.failed}"
        lines = [f"{units.format_seconds(self.median)} per step"]
        if self.interval:
            lines[0] += " [{}, {}]".format(*map(units.format_seconds, self.interval))
        if self.items and self.median:
            lines.append(units.format_count(self.items / self.median, f"{self.unit}/s"))
        if self.peak_allocated is not None:
            lines.append(f"peak {units.format_bytes(self.peak_allocated)}")
        if self.joules is not None:
            lines.append(f"{units.format_joules(self.joules)} per step")
        return f"{self.label}: {', '.join(lines)} on {self.device.label}"


def measure(variant: Variant, **options) -> Measurement:
    """Measure one variant, named after its function. The options are those of `measure_all`."""
    return measure_all({getattr(variant, "__name__", "step"): variant}, **options)[0]


def measure_all(
    variants: Mapping[str, Variant],
    *,
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    seconds: float | None = None,
    precision: float | None = None,
    blocks: int | None = None,
    warmup: int = 2,
    energy: bool = True,
) -> list[Measurement]:
    """Measure the memory of each variant, one alive at a time, then time all of them in turns.

    `compare` explains the arguments; `blocks` sets the number of blocks. For the timing all variants are built, warmed
    up and kept, and take turns (`take_blocks`). A turn takes at least 5 ms, or 0.05 s on a GPU, whose clock settles no
    sooner (up to 0.5 s where the power cap holds it down: 15 blocks of it within `seconds`). Worker processes, such as
    a DataLoader's, are frozen while others have their turn. Variants that do not fit into memory together are built
    four times each for their turns. What that will take is announced.

    A variant that runs out of memory, in whatever phase, is marked as failed. Any other error frees everything and is
    raised. Raises TypeError or ValueError for arguments that are not as expected.
    """
    variants = check_variants(variants)
    kind = find_device().type
    seconds = SECONDS[kind] if seconds is None else seconds
    precision = PRECISION[kind] if precision is None else precision
    check_positive(Integral, blocks=1 if blocks is None else blocks, warmup=warmup)
    check_positive(seconds=seconds, precision=precision)
    check_unit(unit)
    items_of = _items_of(variants, items)
    with gc_frozen(), random_states_kept(), Progress() as progress:
        run = _Run(progress, variants, seconds, precision, blocks, warmup, energy)
        run.take_memory()
        run.take_turns()
    device = describe()
    return [run.records[label].finish(label, device, items_of[label], unit) for label in variants]


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


class _NotTogether(Exception):
    """Variants turn out not to go together, and why: they have to be built one at a time."""


class _Run:
    """What is measured of some variants, and how. EFFGPU_SECONDS cuts it short: to turns of one step, in few blocks."""

    def __init__(self, progress: Progress, variants: Mapping, seconds, precision, blocks, warmup, energy):
        self.progress, self.variants, self.kind = progress, variants, find_device().type
        self.precision, self.blocks, self.warmup = precision, blocks, warmup
        self.seconds = timing.cap_seconds(seconds)
        self.capped = self.seconds < seconds
        self.energy = energy and not self.capped and self.kind == "cuda"
        self.records = {label: _Record() for label in variants}

    def alive(self) -> list[str]:
        return [label for label, record in self.records.items() if not record.failed]

    def shown(self, what: str) -> Iterator[str]:
        """The label of each variant that has not failed, shown as what is under way."""
        for done, label in enumerate(self.alive()):
            self.progress.show(f"{what} of {label}", done, len(self.variants))
            yield label

    @contextlib.contextmanager
    def noting(self, label: str, *, together: bool = False) -> Iterator[None]:
        """Out of memory is a result; of variants that are kept together, a reason to build them one at a time.

        Any other error goes on to the caller, with the label of its variant.
        """
        try:
            yield
        except BaseException as error:
            if not is_out_of_memory(error):
                error.add_note(f"raised while measuring the variant {label!r}")
                raise
            if together:
                raise _NotTogether(_TOO_LARGE) from None
            self.records[label].failed = OUT_OF_MEMORY

    def take_memory(self) -> None:
        for label in self.shown("memory"):
            began = time.perf_counter()
            with self.noting(label):
                self.records[label].trace = memory.trace(self.variants[label], warmup=self.warmup)
            self.records[label].preparing = time.perf_counter() - began

    def take_turns(self) -> None:
        """Time all variants in turns: kept together if that works, else built anew. One alone has nothing beside it."""
        why = _TOO_LARGE
        if len(self.alive()) < 2 or self.fit_together():
            try:
                return self.time_together()
            except _NotTogether as reason:
                why = str(reason)
                for record in self.records.values():
                    record.turns.clear()
                    record.clocks.clear()
        self.time_one_at_a_time(why)

    def fit_together(self) -> bool:
        """Whether what all hold between steps, and the most that a step adds to it, fit into the free memory."""
        traces = [self.records[label].trace for label in self.alive()]
        held = sum(trace.start for trace in traces)
        return held + max(trace.peak - trace.start for trace in traces) <= _ROOM * free_memory()

    def time_together(self) -> None:
        together = len(self.variants) > 1

        def turn(label: str, action: Callable[[_Record, Step], None]) -> None:
            with self.noting(label, together=together):
                built.turn(label, partial(action, self.records[label]))
            if together and count_retries() > retries:
                # the allocator gave cached memory back and asked again, in the midst of a turn
                raise _NotTogether(_TOO_LARGE)

        with BuiltVariants(self.variants) as built:
            retries = math.inf  # in the warm-up they do no harm
            for label in self.shown("warm-up"):
                turn(label, self.warm_up)
            if together and not CAN_FREEZE and any(built.workers[label] for label in self.variants):
                raise _NotTogether(_NOT_FROZEN)
            retries = count_retries()
            take_blocks(
                self.alive,
                lambda label: turn(label, partial(self.take_turn, built.workers[label])),
                lambda: log_ratios(self.records[label].turns for label in self.alive()),
                target=self.precision,
                seconds=self.seconds,
                blocks=self.blocks,
                capped=self.capped,
                confidence=divide_confidence(len(self.variants) - 1),
                say=partial(self.progress.show, "timing"),
            )
            for label in self.shown("energy") if self.energy else ():
                turn(label, self.take_energy)

    def time_one_at_a_time(self, why: str) -> None:
        def take_build(label: str) -> None:
            with self.noting(label):
                run_variant(self.variants[label], partial(self.time_build, self.records[label]))

        records = [self.records[label] for label in self.alive()]
        expected = BUILDS * sum(record.preparing for record in records) + self.seconds * len(records)
        text = f"The variants {why}, so each is built {BUILDS} times"
        self.progress.announce(f"{text}: about {units.format_seconds(expected)}.")
        for record in records:
            record.builds = BUILDS
        take_builds(self.alive, take_build, partial(self.progress.show, "timing"))

    def warm_up(self, record: _Record, step: Step) -> None:
        """Run the step until it is compiled, caches are filled and a GPU's clock has risen; note what it takes then.

        A call that still compiles is no load: of each window, as many seconds count as its steps take at their fastest.
        """
        timing.time_turn(step, max(self.warmup, _COMPILING[self.kind]), lead=0)
        record.pace, load = math.inf, 0.0
        while load < _LOAD[self.kind]:
            count = min(math.ceil((_LOAD[self.kind] - load) / max(record.pace, 1e-6)), 1000) or 1
            record.pace = max(min(record.pace, timing.time_turn(step, count, lead=0)), 1e-6)
            load += count * record.pace

    def take_turn(self, workers: int, record: _Record, step: Step) -> None:
        """Time one turn of a kept step: longer where the power cap holds a variant's clock down."""
        slowed = any(power.POWER_CAP in reasons for each in self.records.values() for _, reasons in each.clocks)
        pace = max(statistics.median(record.turns or [record.pace]), 1e-6)
        capped_turn = max(OF_VARIANTS.shortest[self.kind], min(_CAPPED_TURN, self.seconds / (2 * FEWEST_BLOCKS)))
        steps = self.count_steps(pace, capped_turn if slowed else OF_VARIANTS.shortest[self.kind])
        steps = math.ceil(steps / max(1, workers)) * max(1, workers)  # whole rounds of the workers
        lead = int(steps >= _REFILL or workers > 0)
        if self.kind == "cuda":
            lead = 1 if self.capped else max(1, math.ceil(OF_VARIANTS.lead[self.kind] / pace))
        lead += workers  # a frozen worker loads nothing ahead, but each may have finished the batch that it was at
        self.time_steps(record, step, steps, lead)

    def time_build(self, record: _Record, step: Step) -> None:
        """Time two windows of a newly built step, which share its part of the seconds; the last build's energy, too."""
        self.warm_up(record, step)
        steps = self.count_steps(record.pace, max(self.seconds / (2 * BUILDS), OF_VARIANTS.shortest[self.kind]))
        for _ in range(2):
            self.time_steps(record, step, steps, 0)
        if self.energy and len(record.turns) == 2 * BUILDS:
            self.take_energy(record, step)

    def count_steps(self, pace: float, shortest: float) -> int:
        """Steps in a turn of at least `shortest` seconds, where a step takes `pace`."""
        shortest = 0.0 if self.capped else shortest
        return max(1, round(self.seconds / (2 * MOST_BLOCKS) / pace), math.ceil(shortest / pace - 1e-6))

    def time_steps(self, record: _Record, step: Step, steps: int, lead: int) -> None:
        began = time.perf_counter()

        def note_clock() -> None:  # in the middle of the turn, though all may be queued much sooner
            time.sleep(max(0.0, (lead + steps / 2) * record.pace - (time.perf_counter() - began)))
            if clock := power.read_clock():
                record.clocks.append(clock)

        record.turns.append(timing.time_turn(step, steps, lead=lead, meanwhile=note_clock))

    def take_energy(self, record: _Record, step: Step) -> None:
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
