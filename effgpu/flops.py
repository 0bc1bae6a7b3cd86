"""FLOPs of a step, the matmul rate that this device reaches, and how much of it a step uses (MFU)."""

from collections.abc import Callable
from numbers import Integral

import torch
from torch.utils.flop_counter import FlopCounterMode

from effgpu.device import by_tier, find_device
from effgpu.timing import check_step, time_fastest
from effgpu.units import check_positive
from effgpu.variants import check_worked


def count_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products, convolutions and attention that one call of `step` runs, forward and backward.

    A multiplication and an addition are two. Counted by torch.utils.flop_counter: what a checkpointed step computes
    twice counts twice, element-wise operations do not count. Raises TypeError for a variant in place of its step.
    """
    check_step(step=step)
    with FlopCounterMode(display=False) as counter:
        result = step()
    check_worked(result)
    return counter.get_total_flops()


def matmul_peak(dtype: torch.dtype = torch.float32, *, size: int | None = None, seconds: float = 0.5) -> float:
    """FLOP/s of a square matrix product on random data: the practical ceiling for `dtype` on this device.

    The fastest millisecond of products in `seconds` counts, or the fastest product where one takes longer: a ceiling is
    what was reached at best. `size` is the edge of the matrices, by default one that fills the device. Products of
    float32 run as TF32 where that is turned on.
    """
    size = by_tier(cpu=1024, small=4096, large=8192) if size is None else size
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected one of torch's, as torch.bfloat16, got {dtype!r}")
    check_positive(Integral, size=size)
    device = find_device()
    draw = torch.Generator(device).manual_seed(0)  # the reader's own stays as it is
    a, b = (torch.randn(size, size, device=device, generator=draw).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_fastest(lambda: torch.mm(a, b, out=out), seconds)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: the share of `peak` FLOP/s that `flops` in `seconds` make (PaLM, 2022, appendix B)."""
    check_positive(flops=flops, seconds=seconds, peak=peak)
    return flops / seconds / peak
