"""FLOPs of a step, the matmul rate that this device reaches, and the share of it that a step uses (MFU)."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from effgpu.measuring.device import find_device, pick_sizes
from effgpu.measuring.timing import check_step, time_fastest
from effgpu.measuring.variants import check_worked, uncompiled
from effgpu.units import check_positive

aten = torch.ops.aten
_CPU_ATTENTION = {  # missing from PyTorch 2.9's own list
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
        grad, q, k, v
    ),
}


def count_flops(step: Callable[[], object]) -> int:
    """FLOPs of the matrix products, convolutions and attention in one call of `step`, forward and backward.

    A multiplication and an addition count as two. Recomputation under checkpointing counts, element-wise operations do
    not (torch.utils.flop_counter). Raises TypeError if `step` is a variant.
    """
    check_step(step=step)
    with uncompiled(), FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        result = step()
    check_worked(result)
    return counter.get_total_flops()


def matmul_peak(dtype: torch.dtype = torch.float32, *, size: int | None = None, seconds: float = 0.5) -> float:
    """FLOP/s of a square matrix product on random data: the practical peak for `dtype` on this device.

    The fastest millisecond in `seconds` counts, or the fastest product if one takes longer. `size` is the number of
    rows, by default enough to fill the device. Products of float32 run in TF32 if that is on.
    """
    size = pick_sizes(cpu=1024, small=4096, large=8192) if size is None else size
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected one of torch's, as torch.bfloat16, got {dtype!r}")
    device = find_device()
    draw = torch.Generator(device).manual_seed(0)  # leaves the global generator as it is
    a, b = (torch.randn(size, size, device=device, generator=draw).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / time_fastest(lambda: torch.mm(a, b, out=out), seconds)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilisation: `flops` in `seconds` as a share of `peak` FLOP/s (PaLM, 2022, appendix B)."""
    check_positive(flops=flops, seconds=seconds, peak=peak)
    return flops / seconds / peak
