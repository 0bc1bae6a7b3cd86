"""The kernels of a step as records: what a GPU runs for an operation, and of which kind it is. None of PyTorch."""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PRODUCT, ATTENTION, CONVOLUTION = "matrix products", "attention", "convolutions"
NORM, OPTIMIZER, OTHER = "norms and softmax", "optimizer", "other operations"
COPY = "copies to the CPU and back"
# Tensors of each list that one kernel takes, by the number of lists: ATen/native/cuda/MultiTensorApply.cuh
TENSORS_A_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
NARROW_HEAD = 64  # numbers in a head, up to which Hopper's attention is the slower one
KINDS = (PRODUCT, CONVOLUTION, ATTENTION, NORM, OPTIMIZER, OTHER, COPY)


class Kernel(NamedTuple):
    """What a GPU runs for one operation.

    `flops` counts a multiplication and an addition as two. `bytes` are read and written in memory. `format` is that of
    the numbers that are multiplied: "fp32", "tf32", "fp16", "bf16". `product` is (batch, rows, columns, depth) of the
    matrix product that the operation is, or that a convolution comes to. `even` says that it walks over its tensors in
    their order in memory, without casting; of a product, that tensor cores can load its rows as they lie. `layout` is a
    convolution's, a batch norm's or a pooling's: "nchw" or "nhwc". A convolution has "depthwise", "grouped" or "wide"
    (a kernel of more than one pixel) before it. Attention's is "flash" or "efficient", flash's with "narrow" for heads
    of at most 64, and with "backward"; of a copy over the bus, "pinned" or "ordinary", as the CPU's memory. `across`
    says how many of a product's two matrices do not lie along its depth.
    """

    name: str
    kind: str
    format: str
    flops: int
    bytes: int
    launches: int = 1
    product: tuple[int, int, int, int] | None = None
    even: bool = True
    layout: str = ""
    across: int = 0


@dataclass
class Segment:
    """What runs between two moments at which the CPU waits for the GPU: kernels, and operations that the CPU calls."""

    kernels: Counter = field(default_factory=Counter)
    calls: float = 0.0
