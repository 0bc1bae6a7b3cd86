"""Products of groups of rows, each with a matrix of its own, as in a mixture of experts: one kernel, or one a group.

aten/src/ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda: GPUs of compute capability 9 and 10 have a kernel for bf16.
Else the CPU reads how the groups are cut, and calls a product for each. transformers does the same where PyTorch does
not (integrations/moe.py). PyTorch's own rule for fake tensors refuses fp32, which a GPU multiplies.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from effgpu.predicting.facts import ASSUMED
from effgpu.predicting.kernels import note
from effgpu.predicting.kinds import Kernel

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

aten = torch.ops.aten
LIBRARY = "transformers"
_IN_ONE_KERNEL = (9, 10)  # compute capabilities
_EQUAL = "each group of a grouped product, such as the tokens of an expert, is as large as any other"


def multiply(
    recorder: "Recorder", a: torch.Tensor, b: torch.Tensor, offs=None, bias=None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """What `_grouped_mm` gives. The groups are cut from the dimension that a pair of shapes shares, by these ends.

    [rows, depth] and [groups, depth, columns] give [rows, columns]; [groups, rows, depth] and [depth, columns] give
    [rows, columns]; [rows, depth] and [depth, columns] give [groups, rows, columns], and two of three dimensions, too.
    """
    given = out_dtype or a.dtype
    if a.dim() == b.dim() == 3:
        with recorder:
            return torch.bmm(a, b).to(given)
    groups = (a if a.dim() == 3 else b if b.dim() == 3 else offs).shape[0]
    shape = (groups,) * (a.dim() == b.dim()) + (a.shape[-2], b.shape[-1])
    with recorder:
        made = a.new_empty(shape, dtype=given)
    _note(recorder, a, b, groups)
    return made


def _note(recorder: "Recorder", a: torch.Tensor, b: torch.Tensor, groups: int) -> None:
    """The kernels of a product for each group."""
    recorder.say(ASSUMED, _EQUAL)
    at_once = recorder.capability[0] in _IN_ONE_KERNEL and a.dtype is torch.bfloat16
    if recorder.capability[0] >= min(_IN_ONE_KERNEL):
        recorder.note_capability()
    cut = a.shape[-1] if a.dim() == b.dim() else a.shape[0] if a.dim() == 2 else b.shape[1]
    size = -(-cut // groups)
    count = -(-cut // size) if size else 0
    if not count:
        return
    if a.dim() == b.dim():
        one, other = a[:, :size], b[:size]
    else:
        one, other = (a[:size], b[0]) if a.dim() == 2 else (a[0], b[:, :size])
    (kernel,) = note(aten.mm.default, (one, other), {}, aten.mm.default(one, other), False)
    recorder.work.note_groups(kernel, count, None if at_once else groups * 4)


def joined(kernel: Kernel, count: int) -> Kernel:
    """So many equal products in one kernel."""
    _, *product = kernel.product
    return kernel._replace(flops=count * kernel.flops, bytes=count * kernel.bytes, product=(count, *product))


def _forward(recorder: "Recorder", rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    with recorder:
        made = rows.new_zeros(rows.shape[0], weight.shape[2])
    _note(recorder, rows, weight, weight.shape[0])
    return made


def _backward(recorder: "Recorder", rows, weight, offs, gradient) -> tuple[torch.Tensor, torch.Tensor]:
    with recorder:
        made = torch.zeros_like(rows), torch.zeros_like(weight)
    _note(recorder, gradient, weight.transpose(-2, -1), weight.shape[0])
    _note(recorder, rows.t(), gradient, weight.shape[0])
    return made


RULES: dict[str, Callable] = {
    "aten::_grouped_mm": multiply,
    f"{LIBRARY}::grouped_mm_fallback": _forward,
    f"{LIBRARY}::grouped_mm_fallback_backward": _backward,
}
