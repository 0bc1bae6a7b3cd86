"""FLOPs of a step."""

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from effgpu.measuring.timing import check_step
from effgpu.measuring.variants import check_worked, uncompiled

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
