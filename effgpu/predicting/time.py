"""The time of a step on a GPU that is not there, from its kernels and from what the GPU reaches.

A kernel takes the larger of its arithmetic and its traffic, and at least what any kernel takes. The GPU runs one kernel
after another while the CPU calls the operations that follow. Between two moments at which the CPU waits for the GPU,
the slower of the two decides. After a wait, the GPU idles until the CPU has called the next operation.

`rates.py` says what one kernel takes, `spreads.py` how far a time may be off.
"""

import html
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from effgpu import units
from effgpu.errors import BadArgument
from effgpu.predicting.audited import CONVOLUTIONAL, OTHERS, TRANSFORMERS, audited_runs
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kinds import ATTENTION, CONVOLUTION, COPY, KINDS, NORM, OTHER, PRODUCT, Segment
from effgpu.predicting.rates import LAYOUTS, counted_as, kernel_seconds
from effgpu.predicting.spreads import LAUNCH_RANGE, Network, Sources, spread_of_ratio, spread_of_time, widen

PRODUCTS_BOUND, MEMORY_BOUND, LAUNCH_BOUND = "matrix products", "memory bandwidth", "launching operations"
BUS_BOUND = "PCI Express"
# Perfect fusion: of a chain of operations on one tensor, one reads and one writes. Not measured: the range says so.
FUSED, FUSED_CALLS = 1 / 3, 0.2
FUSES = NORM, OTHER  # kinds of kernels
_SOFTMAX = "_softmax", "exp"  # the latter of one that is written out
_SOME = 0.1  # of the products' time, without attention: ConvNeXt's convolutions take a fifth to a third of it


class Row(NamedTuple):
    """What one kind of operation takes in a step: seconds on the GPU, FLOPs, bytes moved, number of kernels."""

    seconds: float
    flops: int
    bytes: int
    number: int


@dataclass(frozen=True, repr=False)
class Time:
    """The predicted seconds of a step on a GPU: `expected`, and `low` to `high`.

    The range is fitted to hold 9 of 10 published times of transformers; of convolutional networks it holds fewer.

    `bound` says what decides: "matrix products" (with convolutions and attention), "memory bandwidth", "launching
    operations" or "PCI Express". `table` holds a Row (seconds, FLOPs, bytes, number of kernels) for each kind of
    operation. Their sum is what the GPU works; `expected` is more where the GPU waits for the CPU. `between_waits` has,
    of each stretch between two waits of the CPU, the seconds of both: the longer count, and what the GPU idles after a
    wait. `sources` has the GPU's seconds by what they are uncertain for. `network` is the kind of the network and its
    format, and `checked_by` says how many runs of such on such a GPU were compared; None for a step that multiplies
    nothing. The time of `compiled` code reaches from perfect fusion to eager. Loading data is not in it.
    """

    gpu: Gpu
    expected: float
    low: float
    high: float
    bound: str
    table: dict[str, Row]
    compiled: bool = False
    checked_by: int | None = None
    network: Network | None = None
    between_waits: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    sources: Sources = field(default_factory=dict, compare=False)

    def with_launches(self, times: float) -> float:
        """Expected seconds on a CPU that takes so many times as long to launch an operation."""
        return _add_stretches(self.between_waits, self.gpu, launches=times)

    def tell_unchecked(self) -> str:
        """What no run was compared with: "transformers in fp16"; empty where there are some."""
        return " in ".join(self.network).replace("tf32", "TF32") if self.network and not self.checked_by else ""

    def times(self, steps: int) -> str:
        """What so many steps take, in words: "23.5 s [20.1 s, 27.4 s]"."""
        expected, low, high = (units.format_seconds(steps * time) for time in (self.expected, self.low, self.high))
        return f"{expected} [{low}, {high}]"

    def to_dict(self) -> dict:
        """Seconds, what decides, and for each kind of operation its seconds, FLOPs, bytes and kernels."""
        fields = {name: getattr(self, name) for name in ("expected", "low", "high", "bound", "checked_by")}
        names = ("seconds", "FLOPs", "bytes", "kernels")
        return fields | {"kinds": {kind: dict(zip(names, row)) for kind, row in self.table.items()}}

    def __str__(self) -> str:
        return self.times(1)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each kind of operation, the longest first."""
        rows = sorted(self.table.items(), key=lambda item: -item[1].seconds)
        return ["kind", "time", "FLOPs", "bytes", "kernels"], [
            [
                kind,
                units.format_seconds(row.seconds),
                units.format_count(row.flops, "FLOP") if row.flops else units.NOT_MEASURED,
                units.format_bytes(row.bytes),
                f"{row.number:,}",
            ]
            for kind, row in rows
        ]

    def __repr__(self) -> str:
        headings, rows = self.rows()
        text = f"{self.gpu.name}: {self} per step, bound by {self.bound} (predicted)"
        return "\n".join([text, *units.align([headings, *rows])])

    def _repr_html_(self) -> str:
        text = html.escape(f"{self.gpu.name}: {self} per step, bound by {self.bound} (predicted)")
        return f"<table><caption>{text}</caption>{units.html_table(*self.rows())}</table>"


def step_time(segments: Sequence[Segment], gpu: Gpu, *, compiled: bool = False) -> Time:
    """Predict a step's time on a GPU from its kernels.

    `compiled` gives a range from perfect fusion to eager. Raises ValueError for a GPU whose speed is not known.
    """
    if gpu.bandwidth is None:
        raise BadArgument(f"gpu: expected a GPU whose speed is known, to predict a time, got {gpu.name}")
    work = _add_up(segments, gpu)
    expected, low, high = work.range(gpu)
    if compiled:
        fused, low, _ = _add_up(segments, gpu, fused=True).range(gpu)
        expected = math.sqrt(expected * fused)
    cpu = sum(cpu for _, cpu in work.between_waits)
    bound = max(work.bounds, key=work.bounds.get) if work.bounds else LAUNCH_BOUND
    if cpu > sum(work.seconds.values()):
        bound = LAUNCH_BOUND
    table = {kind: Row(work.seconds[kind], *work.counts[kind]) for kind in KINDS if kind in work.counts}
    network = work.network(gpu)
    checked_by = audited_runs(gpu.name, *network) if network else None
    known = checked_by, network, tuple(work.between_waits), dict(work.sources)
    return Time(gpu, expected, low, high, bound, table, compiled, *known)


@dataclass
class _Work:
    """What the kernels of a step take on a GPU, added up."""

    seconds: Counter = field(default_factory=Counter)  # by kind
    counts: dict = field(default_factory=lambda: defaultdict(lambda: (0, 0, 0)))  # by kind: FLOPs, bytes, kernels
    sources: Counter = field(default_factory=Counter)  # as Sources
    bounds: Counter = field(default_factory=Counter)  # seconds by what decides them
    multiplied: Counter = field(default_factory=Counter)  # seconds by kind and format of what multiplies
    between_waits: list = field(default_factory=list)  # seconds of the GPU and of the CPU
    attends: bool = False

    def network(self, gpu: Gpu) -> Network | None:
        """The kind of the network by what takes the most time of its arithmetic, and the format of most of that."""
        if not self.multiplied:
            return None
        others = self.seconds[PRODUCT] + self.seconds[ATTENTION]
        convolves = self.seconds[CONVOLUTION] > others * (1 if self.attends else _SOME)
        chosen = [(seconds, each[1]) for each, seconds in self.multiplied.items() if each[0] == convolves]
        kind = CONVOLUTIONAL if convolves else TRANSFORMERS if self.attends else OTHERS
        return kind, counted_as(max(chosen)[1], gpu)

    def range(self, gpu: Gpu) -> tuple[float, float, float]:
        """Expected, least and most seconds of the step."""
        return range_of(self.between_waits, gpu, spread_of_time(self.sources, self.network(gpu), gpu))


def _add_up(segments: Sequence[Segment], gpu: Gpu, fused: bool = False) -> _Work:
    work = _Work(attends=_attends(segments))
    for segment in segments:
        together = 0.0
        for kernel, number in segment.kernels.items():
            computes, moves = kernel_seconds(kernel, gpu)
            least = gpu.kernel * kernel.launches
            if fused and kernel.kind in FUSES:
                moves, least = moves * FUSED, least * FUSED
            seconds = number * max(computes, moves, least)
            together += seconds
            work.seconds[kernel.kind] += seconds
            flops, moved, kernels = work.counts[kernel.kind]
            flops, moved = flops + number * kernel.flops, moved + number * kernel.bytes
            work.counts[kernel.kind] = flops, moved, kernels + number * kernel.launches
            bound = PRODUCTS_BOUND if computes > max(moves, least) else MEMORY_BOUND if moves > least else LAUNCH_BOUND
            bound = BUS_BOUND if kernel.kind == COPY else bound
            work.bounds[bound] += seconds
            what = "groups" if kernel.layout.startswith(("grouped", "depthwise")) else kernel.kind
            what = "launch" if bound == LAUNCH_BOUND else what
            layout = kernel.layout[-4:] if kernel.layout.endswith(LAYOUTS) else ""
            work.sources[what, counted_as(kernel.format, gpu) * bool(computes), layout] += seconds
            if kernel.kind in (PRODUCT, ATTENTION, CONVOLUTION):
                work.multiplied[kernel.kind == CONVOLUTION, kernel.format] += seconds
        work.between_waits.append((together, segment.calls * (FUSED_CALLS if fused else 1) * gpu.launch))
    return work


def _attends(segments: Sequence[Segment]) -> bool:
    """Whether a step has attention, in one kernel or as a formula: a softmax and products of batches of matrices."""
    kernels = {kernel for segment in segments for kernel in segment.kernels}
    in_batches = any(kernel.kind == PRODUCT and kernel.product[0] > 1 for kernel in kernels)
    weighs = in_batches and any(kernel.name in _SOFTMAX for kernel in kernels)
    return weighs or any(kernel.kind == ATTENTION for kernel in kernels)


def _add_stretches(
    between_waits: Sequence[tuple[float, float]], gpu: Gpu, work: float = 1, launches: float = 1
) -> float:
    """Seconds of a step where the GPU's work and the CPU's calls take so many times as long.

    Between two stretches the CPU waits: the GPU copies what is read, and then idles until it is called again. Between
    two steps it does not: what follows a step's last wait, and the next step up to its first, are one stretch.
    """
    if len(between_waits) < 2:
        return sum(max(work * busy, launches * cpu) for busy, cpu in between_waits)
    first, *others, last = between_waits
    stretches = *others, (first[0] + last[0], first[1] + last[1])
    return sum(max(work * busy + launches * gpu.launch, launches * cpu) + work * gpu.kernel for busy, cpu in stretches)


def range_of(between_waits: Sequence[tuple[float, float]], gpu: Gpu, spread: float) -> tuple[float, float, float]:
    """Expected, least and most seconds of a step whose work is off by such a standard deviation."""
    off = widen(spread)
    ends = zip((1.0, 1 / off, off), (1.0, *LAUNCH_RANGE))  # of the GPU's time, and of the CPU's
    return tuple(_add_stretches(between_waits, gpu, *end) for end in ends)


def time_ratio(ours: Time, theirs: Time) -> tuple[float, float, float]:
    """How many times as long one step takes as another on the same GPU, and the range for 9 of 10 networks.

    What is wrong in both of the predicted times cancels, the more so the more the steps have in common.

    Raises ValueError for a step without kernels.
    """
    if not (ours.sources and theirs.sources):
        raise ValueError("expected times of two steps that run kernels, got one that runs none")
    off = widen(spread_of_ratio(ours.sources, theirs.sources, ours.network or theirs.network, ours.gpu))
    slower = [ours.with_launches(times) / theirs.with_launches(times) for times in (1.0, *LAUNCH_RANGE)]
    value = ours.expected / theirs.expected
    low, high = min(*slower, value), max(*slower, value)
    if ours.compiled != theirs.compiled:
        ends = ours.low / theirs.low, ours.high / theirs.high
        low, high = min(low, *ends), max(high, *ends)
    return value, low / off, high * off
