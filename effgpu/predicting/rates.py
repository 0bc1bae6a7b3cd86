"""What one kernel takes on a GPU: its arithmetic, at the share of the rate that its kind reaches, and its traffic.

Every constant has its source beside it, or was fitted on the calibration rows that docs/predict.md names. That page
also says which constants were chosen after seeing rows of the audit.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kinds import ATTENTION, CONVOLUTION, COPY, NORM, Kernel

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
            wide=0.8,
            pointwise=1.0,
            narrow=0.9,
            grouped=0.38,
            traffic=0.54,
            depthwise=0.53,
            batch_norm=0.43,
            pooling=0.41,
            pointwise_traffic=0.54,
        ),
        "nhwc": _Layout(
            wide=0.94,
            pointwise=1.0,
            narrow=0.95,
            grouped=0.073,
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
_REORDERED = USUAL.layouts["nchw"]._replace(
    wide=0.53,
    pointwise=0.25,
    narrow=0.18,
    grouped=0.14,
    traffic=0.27,
    pointwise_traffic=0.27,
)
TURING = USUAL._replace(layouts=USUAL.layouts | {"nchw": _REORDERED})
SHARES = {(7, 5): TURING, (9, 0): HOPPER}  # by compute capability; USUAL elsewhere
LAYOUTS = tuple(USUAL.layouts)
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


@lru_cache(maxsize=100_000)
def kernel_seconds(kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
    """Seconds that a kernel's arithmetic takes on a GPU, and seconds that its traffic takes."""
    return _arithmetic(kernel, gpu), _traffic(kernel, gpu)


def _arithmetic(kernel: Kernel, gpu: Gpu) -> float:
    rate, format = gpu.rate(kernel.format), counted_as(kernel.format, gpu)
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


def counted_as(format: str, gpu: Gpu) -> str:
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
    if counted_as(kernel.format, gpu) == "fp32":
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
        if counted_as(kernel.format, gpu) == "fp32":
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
