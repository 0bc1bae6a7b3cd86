"""The time of a step on a GPU that is not there, from its kernels and from what the GPU reaches.

A kernel takes the larger of its arithmetic and its traffic, and at least what any kernel takes. The GPU runs one kernel
after another while the CPU calls the operations that follow. Between two moments at which the CPU waits for the GPU,
the slower of the two decides. After a wait, the GPU idles until the CPU has called the next operation.

Every constant has its source beside it, or was fitted on the calibration rows that docs/predict.md names. That page
also says which constants were chosen after seeing rows of the audit.
"""

import html
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from effgpu import units
from effgpu.errors import BadArgument
from effgpu.predicting.audited import CONVOLUTIONAL, TRANSFORMERS, audited_runs
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kernels import (
    ATTENTION,
    CONVOLUTION,
    COPY,
    KINDS,
    NORM,
    OPTIMIZER,
    OTHER,
    PRODUCT,
    Kernel,
    Segment,
)

PRODUCTS_BOUND, MEMORY_BOUND, LAUNCH_BOUND = "matrix products", "memory bandwidth", "launching operations"
BUS_BOUND = "PCI Express"

# Of the rate of a large product. NeuSight's linear layers in fp32; in 16 bits Liger-Kernel's SwiGLU on an A100.
PRODUCT_SHARE = {"fp32": 0.93, "tf32": 0.93, "fp16": 1.0, "bf16": 1.0}
# A depthwise convolution that adds up to 49 products for a number (7 × 7) takes as long as it reads. With more, as in
# larger kernels and in each gradient of a weight, which adds up all pixels, it reaches this share of the fp32 rate.
# Guessed, and kept as timm's networks of the audit come out nearer with it.
READ_AT_ONCE, DEPTHWISE_SHARE = 49, 0.12
# Rows and columns of the tile that a multiprocessor computes at a time, and the share of its rate. NeuSight, fp32.
TILES = ((256, 128, 1.0), (128, 128, 1.0), (128, 64, 0.92), (64, 64, 0.8), (64, 32, 0.6), (32, 32, 0.45))
FILL = 32  # what filling and draining a tile costs without tensor cores, as depth
FILL_SECONDS = 1.5e-6  # and with them
SPLITS, LEAST_DEPTH = (1, 2, 4, 8, 16, 32), 128  # parts of the depth that are computed side by side, and their least
MISALIGNED = 0.5  # efficient-dl-systems: width 8191 takes 1.93 times as long as 8192
CACHED = 0.6  # of the time that goes, where all fits into the L2 cache: NeuSight's L4, 572 GB/s instead of 235


class _Layout(NamedTuple):
    """Shares that convolutional networks reach in a layout: of the rate, by kernel size, and of the bandwidth."""

    wide: float  # kernels of more than one pixel
    pointwise: float
    narrow: float  # groups of as many channels as NARROW says
    grouped: float  # others
    traffic: float
    depthwise: float
    batch_norm: float
    pooling: float
    pointwise_traffic: float


class _Shares(NamedTuple):
    """What a generation of GPUs reaches: of the rate of products, and of the bandwidth of a copy."""

    attention: dict[str, float]  # by layout, and by layout and format where one differs
    across: tuple[float, float, float]  # TF32, by how many of the two matrices do not lie along the depth
    even: float  # operations that walk over memory in order
    uneven: float  # a tensor is broadcast, cast or strided
    norms: float
    softmax: float
    lists: float  # an optimizer's
    odd_channels: float  # a convolution whose channels tensor cores cannot load as they lie, such as an image's three
    layouts: dict[str, _Layout]


# Attention: Dao 2023, FlashAttention-2, figures 4 to 6, A100: about 180 and 140 TFLOP/s of 257, with heads of 64 and of
# 128. Bandwidth: NeuSight, 0.93 to 1.0 in order, 0.60 to 0.67 for norms and softmax; Liger-Kernel, 0.6 to 0.75 where a
# tensor is broadcast, cast or strided. Layouts: timm's calibration rows, RTX 3090, fp16.
USUAL = _Shares(
    attention={
        "flash": 0.7,
        "flash backward": 0.55,
        "flash narrow": 0.7,
        "flash narrow backward": 0.55,
        "efficient": 0.45,
        "efficient backward": 0.33,
    },
    across=(1.0, 1.0, 1.0),
    even=0.95,
    uneven=0.75,
    norms=0.65,
    softmax=0.65,
    lists=0.9,
    odd_channels=1.0,
    layouts={
        "nchw": _Layout(
            wide=0.82,
            pointwise=1.0,
            narrow=0.9,
            grouped=0.48,
            traffic=0.54,
            depthwise=0.53,
            batch_norm=0.43,
            pooling=0.41,
            pointwise_traffic=0.54,
        ),
        "nhwc": _Layout(
            wide=1.0,
            pointwise=0.95,
            narrow=0.95,
            grouped=0.1,
            traffic=0.72,
            depthwise=0.67,
            batch_norm=0.71,
            pooling=0.53,
            pointwise_traffic=0.72,
        ),
    },
)
# Hopper: our own survey of an H100, its rows with an even number (effgpu/course/survey_h100.json). Its tensor cores
# take TF32 along the depth alone, and images only with their channels last: what lies otherwise is copied first.
HOPPER = USUAL._replace(
    attention=USUAL.attention
    | {
        "flash": 0.74,
        "flash backward": 0.56,
        "flash narrow": 0.51,
        "flash narrow backward": 0.34,
        "efficient fp32": 0.57,
        "efficient backward fp32": 0.53,
    },
    across=(1.0, 0.83, 0.6),
    norms=0.71,
    softmax=0.94,
    lists=0.7,
    odd_channels=0.23,
    layouts={
        "nchw": USUAL.layouts["nchw"]._replace(traffic=0.17, depthwise=0.15, pointwise_traffic=0.9),
        "nhwc": USUAL.layouts["nhwc"]._replace(pointwise_traffic=0.82),
    },
)
# Turing's tensor cores take images in 16 bits with their channels last: cuDNN reorders others. Fitted on every second
# model of pytorch-gpu-benchmark's RTX 2080 Ti. A T4's Wide-ResNet meets it (docs/audit.md). Channels last: not known.
_REORDERED = _Layout(
    wide=0.53,
    pointwise=0.3,
    narrow=0.27,
    grouped=0.14,
    traffic=0.27,
    depthwise=0.53,
    batch_norm=0.43,
    pooling=0.41,
    pointwise_traffic=0.27,
)
TURING = USUAL._replace(layouts=USUAL.layouts | {"nchw": _REORDERED})
SHARES = {(7, 5): TURING, (9, 0): HOPPER}  # by compute capability; USUAL elsewhere
# Convolutions cannot feed a multiprocessor that is faster than the RTX 3090's. By pytorch-gpu-benchmark's calibration
# rows, an A100 reaches 0.6 of that share in fp16, and in TF32, whose rate is that of the RTX 3090's fp16, 0.87.
FED, HUNGER, IN_TF32 = 1.02e12, 0.65, 0.87
NARROW = (4, 8, 16, 32)  # channels of a group that cuDNN has kernels for
# NeuSight's convolutions in fp32, 3 × 3: Winograd's algorithm saves products, most on Turing.
WINOGRAD = {(7, 5): 1.35}
WINOGRAD_ELSEWHERE = 1.05
SIMPLE, PLAIN_TRAFFIC = 0.9, 0.8  # without tensor cores, images need not be reordered; guessed
# Bytes per second of a copy to the CPU or back, by the memory there and the GPU's capability: a T4's PCI Express is of
# generation 3, an A100's of 4, an H100's of 5. Lesson 03 lists the sources, and measured an H100.
BUS = {"pinned": {7: 11e9, 8: 24e9, 9: 54e9}, "ordinary": {7: 3.7e9, 8: 5.7e9, 9: 7.8e9}}

# Standard deviations of what is not known, as shares: fitted on calibration rows, so that 9 of 10 lie in the range.
# Of products on tensor cores, what sources of the GPU's rate differ by counts where it is more.
SPREAD = {PRODUCT: 0.08, ATTENTION: 0.15, CONVOLUTION: 0.22, "groups": 0.5}
SPREAD |= {NORM: 0.12, OPTIMIZER: 0.1, OTHER: 0.1, "launch": 0.3}
SPREAD[COPY] = 0.3  # an A100 copied 12 to 26 GB/s from pinned memory, 3.3 to 10 from ordinary
# What a source that was not seen is off by, beyond that, and what is added where no run of a kind and format was
# compared on a GPU: fitted on all published times (tests/benchmarks/ranges.py), with least widths for transformers and
# for what nothing checks.
SPREAD_OF_SOURCES = {TRANSFORMERS: 0.085, CONVOLUTIONAL: 0.21}
EXTRAPOLATED = 0.1
# The same for ratios of times, where the steps have less than 1 − DIFFER of the longer one's time in common, and the
# least where they have all. Fitted on published ratios; convolutional networks would ask for more: docs/predict.md.
SPREAD_OF_RATIOS = {TRANSFORMERS: 0.1, CONVOLUTIONAL: 0.14}
DIFFER, LEAST_OF_RATIOS = 0.25, 0.04
OF_LAYOUTS = 0.25  # of the variance of a kind and format: what its layouts do not share
NINE_OF_TEN = 1.645  # standard deviations of a normal distribution on each side
LAUNCH_RANGE = 0.4, 2.6  # times the usual launch cost: 6 to 40 µs for an operation
# Perfect fusion: of a chain of operations on one tensor, one reads and one writes. Not measured: the range says so.
FUSED, FUSED_CALLS = 1 / 3, 0.2
FUSES = NORM, OTHER  # kinds of kernels


class Row(NamedTuple):
    """What one kind of operation takes in a step: seconds on the GPU, FLOPs, bytes moved, number of kernels."""

    seconds: float
    flops: int
    bytes: int
    number: int


@lru_cache(maxsize=100_000)
def kernel_seconds(kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
    """Seconds that a kernel's arithmetic takes on a GPU, and seconds that its traffic takes."""
    return _arithmetic(kernel, gpu), _traffic(kernel, gpu)


def _arithmetic(kernel: Kernel, gpu: Gpu) -> float:
    rate, format = gpu.rate(kernel.format), _counted_as(kernel.format, gpu)
    shares = _shares(gpu)
    if kernel.kind == ATTENTION:
        share = shares.attention.get(f"{kernel.layout} {format}", shares.attention[kernel.layout])
        return kernel.flops / (rate * share)
    if not kernel.product:
        return 0.0
    if kernel.layout.startswith("depthwise"):
        *_, depth = kernel.product
        return kernel.flops / (gpu.rate("fp32") * DEPTHWISE_SHARE) if depth > READ_AT_ONCE else 0.0
    if kernel.kind == CONVOLUTION:
        return _multiply(kernel.product, rate * _convolution_share(kernel, gpu), gpu, format == "fp32")
    if 1 in kernel.product[1:3]:  # with a vector: cuBLAS's gemv reads the matrix once
        return kernel.flops / rate
    share = PRODUCT_SHARE[format] * (shares.across[kernel.across] if format == "tf32" else 1.0)
    if not kernel.even and format != "fp32":
        share *= MISALIGNED
    return _multiply(kernel.product, rate * share, gpu, format == "fp32")


def _shares(gpu: Gpu) -> _Shares:
    return SHARES.get(gpu.capability, USUAL)


def _counted_as(format: str, gpu: Gpu) -> str:
    """The format, with fp32 for a TF32 that the GPU does not have."""
    return format if format in dict(gpu.rates) else "fp32"


def _multiply(product: tuple[int, int, int, int], rate: float, gpu: Gpu, plain: bool) -> float:
    """Seconds of a matrix product: tiles are computed in waves, one on each multiprocessor at a time.

    `plain` says that it does without tensor cores.
    """
    batch, rows, columns, depth = product
    fill, fill_seconds = (FILL, 0.0) if plain else (0, FILL_SECONDS)
    least = math.inf
    for height, width, share in TILES:
        for tall, wide in {(height, width), (width, height)}:
            tiles = batch * -(-rows // tall) * -(-columns // wide)
            for parts in SPLITS:
                if parts > 1 and depth < LEAST_DEPTH * parts:
                    break
                waves = tiles * parts / gpu.multiprocessors
                waves = (max(waves, 1) + math.ceil(waves)) / 2  # the last wave has its multiprocessors' clock higher
                work = waves * gpu.multiprocessors * 2 * tall * wide * (depth / parts + fill)
                summed = 8 * parts * batch * rows * columns / gpu.bandwidth if parts > 1 else 0
                least = min(least, work / (rate * share) + waves * fill_seconds + summed)
    return least


def _convolution_share(kernel: Kernel, gpu: Gpu) -> float:
    layout = kernel.layout.split()
    if _counted_as(kernel.format, gpu) == "fp32":
        return WINOGRAD.get(gpu.capability, WINOGRAD_ELSEWHERE) if "wide" in layout else SIMPLE
    shares = _shares(gpu).layouts["nhwc" if "nhwc" in layout else "nchw"]
    fast = gpu.rate(kernel.format) / gpu.multiprocessors / FED
    fed = (fast**-HUNGER if fast > 1 else 1.0) * (IN_TF32 if kernel.format == "tf32" else 1.0)
    if "grouped" in layout:
        width = min(kernel.product[1:])
        return fed * (shares.narrow if width in NARROW else shares.grouped)
    fed *= 1.0 if kernel.even else _shares(gpu).odd_channels
    return fed * (shares.wide if "wide" in layout else shares.pointwise)


def bus_rate(gpu: Gpu, memory: str) -> float:
    """Bytes per second between a GPU and the host's `memory`, which is "pinned" or "ordinary"."""
    rates = BUS[memory]
    return rates[min(max(gpu.capability[0], min(rates)), max(rates))]


def _traffic(kernel: Kernel, gpu: Gpu) -> float:
    if kernel.kind == COPY:
        return kernel.bytes / bus_rate(gpu, kernel.layout)
    hits = max(0.0, 1 - kernel.bytes / gpu.cache) if gpu.cache else 0.0
    return kernel.bytes / (gpu.bandwidth * _bandwidth_share(kernel, gpu)) * (1 - CACHED * hits)


def _bandwidth_share(kernel: Kernel, gpu: Gpu) -> float:
    reached = _shares(gpu)
    shares = reached.layouts.get(kernel.layout.split()[-1]) if kernel.layout else None
    if kernel.kind == CONVOLUTION:
        if kernel.layout.startswith("depthwise"):
            return shares.depthwise
        if _counted_as(kernel.format, gpu) == "fp32":
            return PLAIN_TRAFFIC
        return shares.traffic if kernel.layout.startswith(("wide", "grouped")) else shares.pointwise_traffic
    if kernel.kind == NORM:
        if shares and kernel.format != "fp32":
            return shares.batch_norm
        return reached.softmax if "softmax" in kernel.name else reached.norms
    if shares:
        return shares.pooling
    if kernel.name.startswith(("_foreach", "_fused", "_amp_foreach")):
        return reached.lists
    return reached.even if kernel.even else reached.uneven


@dataclass(frozen=True, repr=False)
class Time:
    """The predicted seconds of a step on a GPU: `expected`, and `low` to `high`, the range for 9 of 10 transformers.

    `bound` says what decides: "matrix products" (with convolutions and attention), "memory bandwidth", "launching
    operations" or "PCI Express". `table` holds a Row (seconds, FLOPs, bytes, number of kernels) for each kind of
    operation. Their sum is what the GPU works; `expected` is more where the GPU waits for the CPU. `between_waits` has,
    of each stretch between two waits of the CPU, the seconds of both: the longer count, and what the GPU idles after a
    wait. `network` is the kind of the network and its format, and `checked_by` says how many runs of such on such a
    GPU were compared; None for a step that multiplies nothing. Loading data is not in it.
    """

    gpu: Gpu
    expected: float
    low: float
    high: float
    bound: str
    table: dict[str, Row]
    compiled: bool = False
    checked_by: int | None = None
    network: tuple[str, str] | None = None
    between_waits: tuple[tuple[float, float], ...] = field(default=(), compare=False)
    sources: dict[tuple[str, str, str], float] = field(default_factory=dict, compare=False)

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
    expected, low, high = _range(work, gpu)
    if compiled:
        fused = _add_up(segments, gpu, fused=True)
        expected, low = math.sqrt(expected * _range(fused, gpu)[0]), _range(fused, gpu)[1]
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
    seconds: Counter = field(default_factory=Counter)  # by kind
    counts: dict = field(default_factory=lambda: defaultdict(lambda: (0, 0, 0)))  # by kind: FLOPs, bytes, kernels
    sources: Counter = field(default_factory=Counter)  # seconds by what they are uncertain for: see _group
    bounds: Counter = field(default_factory=Counter)
    multiplied: Counter = field(default_factory=Counter)  # seconds by kind and format of what multiplies
    between_waits: list = field(default_factory=list)  # seconds of the GPU and of the CPU

    def network(self, gpu: Gpu) -> tuple[str, str] | None:
        """The kind of the network by what takes the most time of its arithmetic, and the format of most of that."""
        if not self.multiplied:
            return None
        convolves = self.seconds[CONVOLUTION] > self.seconds[PRODUCT] + self.seconds[ATTENTION]
        chosen = [(seconds, each[1]) for each, seconds in self.multiplied.items() if each[0] == convolves]
        return CONVOLUTIONAL if convolves else TRANSFORMERS, _counted_as(max(chosen)[1], gpu)


def _add_up(segments: Sequence[Segment], gpu: Gpu, fused: bool = False) -> _Work:
    work = _Work()
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
            layout = kernel.layout[-4:] if kernel.layout.endswith(tuple(USUAL.layouts)) else ""
            work.sources[what, _counted_as(kernel.format, gpu) * bool(computes), layout] += seconds
            if kernel.kind in (PRODUCT, ATTENTION, CONVOLUTION):
                work.multiplied[kernel.kind == CONVOLUTION, kernel.format] += seconds
        work.between_waits.append((together, segment.calls * (FUSED_CALLS if fused else 1) * gpu.launch))
    return work


def _add_stretches(
    between_waits: Sequence[tuple[float, float]], gpu: Gpu, work: float = 1, launches: float = 1
) -> float:
    """Seconds of a step where the GPU's work and the CPU's calls take so many times as long.

    Between two stretches the CPU waits: the GPU copies what is read, and then idles until it is called again.
    """
    total = 0.0
    for number, (busy, cpu) in enumerate(between_waits):
        waits = number > 0
        total += max(work * busy + waits * launches * gpu.launch, launches * cpu) + waits * work * gpu.kernel
    return total


def _group(sources: dict[tuple[str, str, str], float], parts: int) -> Counter:
    """Seconds by the first parts of what they are uncertain for: the kind of operation, its format, its layout."""
    grouped = Counter()
    for source, seconds in sources.items():
        grouped[source[:parts]] += seconds
    return grouped


def _spread(source: tuple, gpu: Gpu) -> float:
    """The standard deviation of the seconds of a kind of operation in a format, as a share."""
    kind, format = source[:2]
    by_tensor_cores = kind == PRODUCT and _counted_as(format, gpu) != "fp32"
    return max(SPREAD[kind], gpu.spread) if by_tensor_cores else SPREAD[kind]


def _spreads(sources: dict[tuple[str, str, str], float], gpu: Gpu) -> list[float]:
    """What the kinds of operation add to the standard deviation of a step's time, as shares of it."""
    total = sum(sources.values()) or 1.0
    return [_spread(source, gpu) * seconds / total for source, seconds in _group(sources, 2).items()]


def _ends(between_waits: Sequence[tuple[float, float]], gpu: Gpu, spread: float) -> tuple[float, float, float]:
    """Expected, least and most seconds of a step whose work is off by such a standard deviation."""
    off = math.exp(NINE_OF_TEN * spread)
    ends = zip((1.0, 1 / off, off), (1.0, *LAUNCH_RANGE))  # of the GPU's time, and of the CPU's
    return tuple(_add_stretches(between_waits, gpu, *end) for end in ends)


def _range(work: _Work, gpu: Gpu) -> tuple[float, float, float]:
    """Expected, least and most seconds."""
    network = work.network(gpu)
    apart = SPREAD_OF_SOURCES[network[0]] if network else EXTRAPOLATED
    unseen = EXTRAPOLATED if network and not audited_runs(gpu.name, *network) else 0.0
    return _ends(work.between_waits, gpu, math.hypot(apart, unseen, *_spreads(work.sources, gpu)))


def list_unchecked(found: Iterable[tuple[str, str]]) -> list[str]:
    """Of GPUs' names and what `Time.tell_unchecked` says there: "transformers in fp16 on T4, L4"."""
    names: dict[str, dict[str, None]] = {}
    for gpu, missing in found:
        if missing:
            names.setdefault(missing, {})[gpu] = None
    return [f"{missing} on {', '.join(those)}" for missing, those in names.items()]


def time_ratio(ours: Time, theirs: Time) -> tuple[float, float, float]:
    """How many times as long one step takes as another on the same GPU, and the range for 9 of 10 networks.

    What is wrong in both of the predicted times cancels, the more so the more the steps have in common.

    Raises ValueError for a step without kernels.
    """
    if not (ours.sources and theirs.sources):
        raise ValueError("expected times of two steps that run kernels, got one that runs none")
    totals = [sum(time.sources.values()) for time in (ours, theirs)]
    mine, others = (_group(time.sources, 2) for time in (ours, theirs))
    differ = 1 - (mine & others).total() / max(totals)
    network = ours.network or theirs.network
    apart = SPREAD_OF_RATIOS[network[0] if network else TRANSFORMERS] * min(1.0, differ / DIFFER)
    differences = []
    for parts, part in ((2, 1 - OF_LAYOUTS), (3, OF_LAYOUTS)):
        mine, others = (_group(time.sources, parts) for time in (ours, theirs))
        for source in mine | others:
            share = mine[source] / totals[0] - others[source] / totals[1]
            differences.append(_spread(source, ours.gpu) * share * math.sqrt(part))
    spread = math.hypot(LEAST_OF_RATIOS, apart, *differences)
    off = math.exp(NINE_OF_TEN * spread)
    slower = [ours.with_launches(times) / theirs.with_launches(times) for times in (1.0, *LAUNCH_RANGE)]
    value = ours.expected / theirs.expected
    low, high = min(*slower, value), max(*slower, value)
    if ours.compiled != theirs.compiled:
        ends = ours.low / theirs.low, ours.high / theirs.high
        low, high = min(low, *ends), max(high, *ends)
    return value, low / off, high * off
