"""Measurement: what one variant took. First the memory of each variant alone, then all take turns to be timed."""

import math
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import combinations_with_replacement, pairwise
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
from effgpu.measuring.variants import Stage, Step, Variant, check_variants
from effgpu.units import check_positive

OUT_OF_MEMORY = "out of memory"
FEWEST_BLOCKS, MOST_BLOCKS = 8, 200  # eight observations are the fewest that allow a verdict
CONFIDENCE = 0.99  # of every interval and so of every verdict; not 95 %, as readers make many comparisons
_SECONDS = {"cpu": 0.6, "cuda": 2.0}  # per variant: a GPU's turns are longer
_SHORTEST_TURN = {"cpu": 0.005, "cuda": 0.1}  # seconds; a GPU's clock needs that long to settle on its load
_LEAD_IN = 4  # steps of a turn from which on one more, not timed, goes first
_CACHES_FILL = 0.005  # seconds of warm-up after which the caches hold the step's own data
_CLOCK_RISE = 0.5  # seconds after which a GPU has left its idle clock
_DISTURBED = 2.0  # a turn that took so many times its variant's median: something else held the machine up
_FORGIVEN = 2  # disturbed blocks that further blocks make up for; with more, an interval tells how noisy the machine is
_ROOM = 0.9  # of the free memory that variants kept together may take: allocators need some slack


@dataclass(frozen=True, repr=False)
class Measurement:
    """Time, memory and energy of one variant's step. Seconds, bytes, joules; None for what was not measured.

    `turns` has a pair for each block: seconds per step in the variant's forward and in its backward turn, each averaged
    over the turn's steps. `items` are the samples, tokens, ... of a step, `joules` the energy of the whole
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

    @property
    def times(self) -> tuple[float, ...]:
        """Seconds per step, one value a block."""
        return tuple(map(statistics.fmean, self.turns))

    @property
    def median(self) -> float | None:
        """Median seconds per step."""
        return statistics.median(self.times) if self.turns else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Low and high end of the 99 % interval of the seconds per step; None with too few blocks for one."""
        if len(self.turns) < FEWEST_BLOCKS or min(self.times) <= 0:
            return None
        _, low, high = map(math.exp, hodges_lehmann_interval([math.log(time) for time in self.times]))
        return low, high

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


def measure(variant: Variant, **options) -> Measurement:
    """Measure one variant, named after its function. The options are those of `measure_all`."""
    return measure_all({getattr(variant, "__name__", "step"): variant}, **options)[0]


def measure_all(
    variants: Mapping[str, Variant],
    *,
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    seconds: float | None = None,
    blocks: int | None = None,
    min_steps: int = 1,
    warmup: int = 2,
    energy: bool = True,
) -> list[Measurement]:
    """Measure the memory of each variant, one alive at a time, then time all of them in turns.

    A variant is a function that builds its own state and returns one training step. For the timing all variants are
    built, warmed up (`warmup` steps or more) and kept. In each block every variant has a turn in the order A, B, C and
    another in the order C, B, A, so that drift and order effects cancel within the block: one block is one observation.
    A turn is at least `min_steps` steps. Variants that do not fit into memory together, and those with worker processes
    (a DataLoader's would work in the others' turns), are built anew for their turns.

    `seconds` is how long each variant is timed in all, building and warm-up not counted: 2 by default, on a CPU 0.6.
    There are at least 8 blocks, which take longer where steps are slow, and at most 200. `blocks` sets their number.
    A turn takes at least 0.1 s on a GPU, whose clock settles no sooner: so 8 blocks take at least 1.6 s.
    If a turn takes more than twice as long as its variant's others, there are up to 21, of which two do no harm.
    Give `min_steps` where steps come in bursts, as from DataLoader workers: a turn tells what they cost only if it is
    longer than a burst. `energy` adds one window of some seconds per variant where NVML has an energy counter.

    `items` per step (a number, or one for each label), named by `unit`, are noted with the results. A variant that runs
    out of memory, in whatever phase, is marked as failed. Any other error frees everything and is raised. Raises
    TypeError or ValueError for arguments that are not as expected.
    """
    variants = check_variants(variants)
    check_positive(Integral, blocks=1 if blocks is None else blocks, min_steps=min_steps, warmup=warmup)
    kind = find_device().type
    seconds = _SECONDS[kind] if seconds is None else seconds
    check_positive(seconds=seconds)
    if blocks is None:
        seconds = max(seconds, 2 * FEWEST_BLOCKS * _SHORTEST_TURN[kind])
    check_unit(unit)
    items_of = _items_of(variants, items)
    allowed = timing.cap_seconds(seconds)
    capped = allowed < seconds
    plan = _Plan(allowed, capped, blocks, 1 if capped else min_steps, warmup)
    records = {label: _Record() for label in variants}
    with gc_frozen(), random_states_kept(), _progress() as bar:
        bar.reset(len(variants) * (2 + 2 * plan.count()))
        for label, variant in variants.items():
            _attempt(bar, label, records[label], partial(_take_memory, variant, records[label], warmup))
        energy = energy and not capped and torch.cuda.is_available()
        _time_turns(bar, variants, records, plan, energy=energy)
    device = describe()
    return [records[label].finish(label, device, items_of[label], unit) for label in variants]


def hodges_lehmann_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Middle, low and high end of an interval that covers the centre of the values in 99 of 100 cases.

    The middle is Hodges and Lehmann's estimate, the median of all averages of two values; the interval leaves out as
    many of these at each end as Wilcoxon's signed-rank distribution allows (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, chapter 3). It assumes that the values are symmetric, as log ratios of a step to
    itself are. Values that depend on the one before, as on a busy machine, tell less than their number: the interval is
    widened by what their autocorrelation costs (see `_widening`). Raises ValueError for fewer than eight values.
    """
    if len(values) < FEWEST_BLOCKS:
        raise ValueError(f"values: expected at least {FEWEST_BLOCKS}, got {len(values)}")
    return _interval_of(tuple(values))


@lru_cache(maxsize=1024)  # a table, its caption and its plot ask for the same ones
def _interval_of(values: tuple[float, ...]) -> tuple[float, float, float]:
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    cut = _averages_to_cut(len(values))
    middle, wider = statistics.median(averages), _widening(values)
    return middle, middle - wider * (middle - averages[cut - 1]), middle + wider * (averages[-cut] - middle)


def _widening(values: Sequence[float]) -> float:
    """By what factor dependence between neighbours widens an interval: the square root of (1 + ρ) / (1 - ρ).

    That holds for a first-order autoregression with lag-1 autocorrelation ρ (Priestley, Spectral Analysis and Time
    Series, section 5.3). The estimate of ρ is corrected for its bias, (1 + 3 ρ) / n (Kendall, 1954), and raised by
    its standard error, as too small a ρ does more harm. tests/benchmarks/aa.py shows the coverage.
    """
    count, middle = len(values), statistics.median(values)
    spread = sorted(abs(value - middle) for value in values)[int(0.95 * (count - 1))]  # outliers would hide dependence
    rest = [max(-spread, min(value - middle, spread)) for value in values]
    total = sum(r * r for r in rest)
    found = sum(a * b for a, b in pairwise(rest)) / total if total else 0.0
    rho = found + (1 + 3 * max(found, 0)) / count + math.sqrt(max(0, 1 - found**2) / count)
    rho = min(max(rho, 0.0), 0.95)
    return math.sqrt((1 + rho) / (1 - rho))


@lru_cache
def _averages_to_cut(n: int) -> int:
    """The largest k for which twice the chance of a signed-rank sum below k is at most 1 - CONFIDENCE."""
    if n > MOST_BLOCKS:  # where the sum is all but normal, and the exact count would take seconds
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
    """Raise TypeError for what cannot name a unit."""
    if not isinstance(unit, str):
        raise TypeError(f"unit: expected a string such as 'samples', got {unit!r}")


@dataclass
class _Record:
    """What has been measured of a variant so far."""

    trace: memory.Trace | None = None
    turns: list[float] = field(default_factory=list)
    clocks: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    joules: float | None = None
    failed: str | None = None

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
        )


@dataclass(frozen=True)
class _Plan:
    """How long each variant is timed. `seconds` are cut short by EFFGPU_SECONDS where `capped`."""

    seconds: float
    capped: bool
    blocks: int | None
    min_steps: int
    warmup: int

    def count(self, block: float = 0.0, *, keep: bool = True, disturbed: int = 0) -> int:
        """How many blocks, where one takes so many seconds of each variant; few where each turn builds its variant.

        So many blocks were `disturbed`: there are enough for an interval that leaves them out.
        """
        if self.blocks:
            return self.blocks
        fewest = FEWEST_BLOCKS if self.capped else _forgiving(disturbed)
        if not keep:
            return fewest
        most = min(MOST_BLOCKS, round(self.seconds / (2 * _SHORTEST_TURN[find_device().type])))
        return max(fewest, min(most, round(self.seconds / block) if block else most))

    def steps(self, pace: float, slowest: float) -> int:
        """Steps in a turn of a variant whose step takes `pace` seconds, where the slowest variant's takes `slowest`.

        Turns of all variants take about as long: their share of the seconds, or longer where the slowest needs that.
        But one that is long beyond the seconds makes the others no longer, unless steps come in bursts.
        """
        pace, share = max(pace, 1e-6), self.seconds / (2 * self.count())
        least = min(slowest, self.seconds / (2 * FEWEST_BLOCKS)) if self.min_steps == 1 else self.min_steps * slowest
        if self.count() == (self.blocks or FEWEST_BLOCKS):
            fitting = round(share / pace)
        else:  # no shorter than the share: blocks can become fewer, but not more
            fitting = math.ceil(share / pace - 1e-6)
        return max(self.min_steps, fitting, round(least / pace))


class _NotTogether(Exception):
    """Variants turn out not to go together: they have to be built one at a time."""


def _time_turns(bar: tqdm, variants: Mapping, records: Mapping[str, _Record], plan: _Plan, *, energy: bool) -> None:
    """Time all variants in turns: kept together if that works, else built for each turn."""
    alive = {label: variant for label, variant in variants.items() if not records[label].failed}
    if _fit_together([records[label].trace for label in alive]):
        try:
            return _take_blocks(bar, alive, records, plan, keep=True, energy=energy)
        except _NotTogether:
            for record in records.values():
                record.turns.clear()
                record.clocks.clear()
    _take_blocks(bar, alive, records, plan, keep=False, energy=energy)


def _fit_together(traces: Iterable[memory.Trace]) -> bool:
    """Whether what all variants hold between steps, and the most that a step adds to it, fit into the free memory."""
    traces = list(traces)
    held = sum(trace.start for trace in traces)
    return held + max((t.peak - t.start for t in traces), default=0) <= _ROOM * free_memory()


def _take_blocks(bar: tqdm, variants: Mapping, records: Mapping, plan: _Plan, *, keep: bool, energy: bool) -> None:
    pace: dict[str, float] = {}  # seconds a step takes, by the warm-up

    def prepare(label: str, step: Step) -> None:
        pace[label] = _warm_up(step, plan.warmup)

    def turn(label: str, action: Callable[[Step], None]) -> None:
        _attempt(bar, label, records[label], partial(stage.turn, label, action), together=keep and len(variants) > 1)

    def alive() -> list[str]:
        return [label for label in variants if not records[label].failed]

    def expect(blocks: int) -> None:
        bar.total = bar.n + (2 * blocks + energy) * len(alive())

    with Stage(variants, keep=keep, prepare=prepare) as stage:
        if keep:
            workers = multiprocessing.active_children()
            for label in variants:
                turn(label, id)  # to build it is all
            if len(variants) > 1 and set(multiprocessing.active_children()) - set(workers):
                raise _NotTogether
        blocks = plan.count(2 * plan.min_steps * max(pace.values(), default=0), keep=keep)
        expect(blocks)
        started, done, retries = time.perf_counter(), 0, count_retries()
        while done < blocks and alive():
            kept = alive() if keep else []
            paces = {label: statistics.median(records[label].turns or [pace[label]]) for label in kept}
            for label in [*alive(), *reversed(alive())]:
                if keep:
                    act = partial(_take_turn, records[label], plan.steps(paces[label], max(paces.values())))
                else:
                    act = partial(_take_built_turn, records[label], plan)
                turn(label, act)
            if keep and len(variants) > 1 and count_retries() > retries:
                raise _NotTogether  # the allocator gave cached memory back and asked again, in the midst of a turn
            done += 1
            if alive():
                block = (time.perf_counter() - started) / done / len(alive())
                disturbed = _disturbed(records[label].turns for label in alive())
                blocks = max(done, plan.count(block, keep=keep, disturbed=disturbed))
            expect(blocks - done)
        for label in alive() if energy else ():
            turn(label, partial(_take_energy, records[label]))


def _disturbed(of_each: Iterable[Sequence[float]]) -> int:
    """How many blocks have a turn of a variant, or of the first, that took far longer than others: the most of any."""
    first, *others = (
        {place // 2 for place, seconds in enumerate(turns) if seconds > _DISTURBED * statistics.median(turns)}
        for turns in of_each
    )
    return max((len(first | found) for found in others), default=len(first))


@lru_cache
def _forgiving(disturbed: int) -> int:
    """The fewest blocks whose interval leaves out so many blocks, however far off they are."""
    disturbed, blocks = min(disturbed, _FORGIVEN), FEWEST_BLOCKS
    while disturbed and _averages_to_cut(blocks) <= disturbed * blocks - math.comb(disturbed, 2):
        blocks += 1
    return blocks


def _attempt(bar: tqdm, label: str, record: _Record, act: Callable[[], None], *, together: bool = False) -> None:
    """Out of memory is a result; of variants that are kept together, a reason to build them one at a time.

    Any other error goes on to the caller, with the label of its variant.
    """
    bar.set_description_str(label)
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
    bar.update()


def _take_memory(variant: Variant, record: _Record, warmup: int) -> None:
    record.trace = memory.trace(variant, warmup=warmup)


def _warm_up(step: Step, fewest: int) -> float:
    """Run the step until caches are filled and a GPU's clock has risen; returns the seconds that one takes by then."""
    long = _CLOCK_RISE if find_device().type == "cuda" else _CACHES_FILL
    times = timing.time_for(step, long, fewest=fewest)
    return statistics.fmean(times[1:] or times)


def _take_turn(record: _Record, steps: int, step: Step) -> None:
    """Time one turn of a kept step."""
    if steps >= _LEAD_IN and find_device().type == "cpu":  # on a GPU, `time_steps` leads in
        step()  # refills the caches after the other variants' turns
    record.turns.append(statistics.fmean(timing.time_steps(step, steps, meanwhile=lambda: _note_clock(record))))


def _take_built_turn(record: _Record, plan: _Plan, step: Step) -> None:
    """Time one turn of a newly built step: as many as turn out to fit into its share of the seconds."""
    share = plan.seconds / (2 * plan.count(keep=False))
    fewest = max(plan.min_steps, timing.FEWEST_STEPS * (not plan.capped))
    record.turns.append(statistics.fmean(timing.time_for(step, share, fewest=fewest)))


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


def _progress() -> tqdm:
    """A plain bar, for a terminal or a notebook that somebody looks at. It wipes itself out when it is done.

    In a notebook it is written to stdout, so that what is printed next takes the wiped line.
    """
    notebook = "ipykernel" in sys.modules
    shape = "{desc}: {n_fmt}/{total_fmt} |{bar:30}| {remaining} left"
    file = sys.stdout if notebook else sys.stderr
    return tqdm(leave=False, file=file, disable=not (notebook or sys.stderr.isatty()), bar_format=shape)
