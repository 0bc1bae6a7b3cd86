"""What is known of numbers that nobody knows: how many they can be, what share of them is true, how many that makes.

Those of argmax are as many as what it chooses from; one of n numbers is equal to a given one in one of n places; and n
counts of N things are N / n each. `Values` has the counts as assumed numbers.
"""

from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import FakeTensor

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

HALF = 0.5  # of a mask's elements are true, where nothing else is known
_KEEPS = ("view", "_unsafe_view", "clone", "_to_copy", "detach", "alias", "squeeze", "unsqueeze", "slice")
_KEEPS += ("select", "permute", "t", "transpose", "expand", "index", "masked_select")


class Counting:
    """The ranges of a step's whole numbers, and the shares of its elements that are true, or one."""

    def __init__(self, recorder: "Recorder"):
        self._recorder = recorder
        self._ranges = WeakTensorKeyDictionary()
        self._shares = WeakTensorKeyDictionary()

    def range_of(self, tensor: torch.Tensor) -> float:
        """How many different numbers a tensor can hold."""
        return self._ranges.get(tensor, float("inf"))

    def share_of(self, mask: torch.Tensor) -> float:
        """The share of its elements that are true: by predicates, as `taken` says, or by ranges."""
        if mask in self._recorder.truths:
            return float(self._recorder.truths[mask])
        return self._shares.get(mask, HALF) if self._recorder.asked.taken is None else self._recorder.asked.taken

    def spread(self, made: torch.Tensor, total: int) -> None:
        """Assume of counts that they are equal, and `total` together."""
        if made.numel():
            least, rest = divmod(total, made.numel())
            counts = lambda: (least + (torch.arange(made.numel()) < rest)).view(made.shape)
            self._recorder.values.assume(made, counts)

    def follow(self, name: str, args: tuple, result: object) -> None:
        """Note what an operation's result can be."""
        if name == "eq" and (known := [arg for arg in args if isinstance(arg, FakeTensor) and arg in self._ranges]):
            self._shares[result] = 1 / max(1, self._ranges[known[0]])
        elif name == "any" and args[0] in self._shares:
            self._shares[result] = min(1.0, self._shares[args[0]] * args[0].numel() / max(1, result.numel()))
        elif name in ("argmax", "argmin", "max", "min", "topk"):
            dim = -1 if name == "topk" else args[1] if len(args) > 1 else None
            for made in tensors_of(result):
                if made.dtype is torch.int64 and (dim is None or isinstance(dim, int)):
                    self._ranges[made] = args[0].numel() if dim is None else args[0].shape[dim]
        elif name in ("scatter", "scatter_") and not isinstance(args[3], torch.Tensor) and args[3] == 1:
            self._shares[result] = min(1.0, args[2].numel() / max(1, args[0].numel()))  # as one_hot does, into zeros
        elif name in ("sum", "count_nonzero") and self._counts(args[0]) and self._recorder.values.of(result) is None:
            self.spread(result, round(self.share_of(args[0]) * args[0].numel()))
        elif name == "histc" and args[0].numel():
            self.spread(result, args[0].numel())
        elif name in _KEEPS:
            for known in tensors_of(args[:1]):
                for noted in (self._ranges, self._shares):
                    if known in noted:
                        noted.update((made, noted[known]) for made in tensors_of(result))

    def _counts(self, summed: torch.Tensor) -> bool:
        return isinstance(summed, FakeTensor) and (summed.dtype is torch.bool or summed in self._shares)
