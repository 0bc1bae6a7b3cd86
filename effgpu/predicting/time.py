"""The time of a step on a GPU that is not there: its kernels, and how fast that GPU is.

A kernel takes the larger of its arithmetic and its traffic, and at least what any kernel takes. A GPU runs them one
after another, while the CPU calls the next. The step takes what the slower of the two takes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kernels import ATTENTION, CONVOLUTION, NORM, OPTIMIZER, OTHER, PRODUCT, Kernel, Segment

# The share of a copy's bandwidth that kernels reach.
EVEN, UNEVEN, NORMS, LISTS = 0.95, 0.75, 0.65, 0.9
# Tiles of a matrix product that a multiprocessor computes at a time, and the share of the peak that each reaches.
TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.88), (64, 64, 0.75), (32, 64, 0.5))
UNALIGNED = 0.5
START = 32
FLASH = {"flash": 0.65, "flash backward": 0.5, "efficient": 0.4, "efficient backward": 0.3}


@lru_cache(maxsize=100_000)
def kernel_seconds(kernel: Kernel, gpu: Gpu) -> tuple[float, float]:
    """Seconds that a kernel computes and seconds that it moves bytes on a GPU; the larger of the two is its time."""
    return _arithmetic(kernel, gpu), _traffic(kernel, gpu)


def _arithmetic(kernel: Kernel, gpu: Gpu) -> float:
    if kernel.kind == ATTENTION:
        return kernel.flops / gpu.rate(kernel.format) / FLASH[kernel.layout]
    if not kernel.product:
        return 0.0
    return multiply_seconds(kernel.product, gpu.rate(kernel.format), gpu) 


def multiply_seconds(product, rate, gpu):
    batch, rows, columns, depth = product
    best = math.inf
    for tall, wide, share in TILES:
        for a, b in {(tall, wide), (wide, tall)}:
            tiles = batch * math.ceil(rows / a) * math.ceil(columns / b)
            for split in (1, 2, 4, 8, 16, 32):
                if split > 1 and depth < 256 * split: break
                waves = math.ceil(tiles * split / gpu.multiprocessors)
                seconds = waves * gpu.multiprocessors * 2 * a * b * (depth / split + START) / rate / share
                if split > 1: seconds += 8 * split * batch * rows * columns / gpu.bandwidth
                best = min(best, seconds)
    return best


def _traffic(kernel: Kernel, gpu: Gpu) -> float:
    share = NORMS if kernel.kind == NORM else LISTS if kernel.name.startswith(("_foreach", "_fused")) else EVEN if kernel.even else UNEVEN
    return kernel.bytes / (gpu.bandwidth * share)
