"""What is known of numbers that nobody knows: whether they are true, what share of them is, how many they can be.

In a healthy step, a loss is finite, and a test for NaNs finds none. Those of argmax are as many as what it chooses
from; one of n numbers is equal to a given one in one of n places; numbers that are drawn between 0 and 1 are below 0.15
in 15 % of them; and n counts of N things are N / n each. `Values` has the counts as assumed numbers.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import FakeTensor, _disable_current_modes, storage_key

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

HALF = 0.5  # of a mask's elements are true, where nothing else is known
_SURE = 5.0  # are expected to be true: in less than 1 % of the steps, none is
_KEEPS = ("view", "_unsafe_view", "clone", "_to_copy", "detach", "alias", "squeeze", "unsqueeze", "slice")
_KEEPS += ("select", "unbind", "split", "permute", "t", "transpose", "expand", "index", "masked_select")
_ASKS_BELOW = {"lt": True, "le": True, "gt": False, "ge": False}  # and not above; a loss is below infinity
_KEEPS_TRUTH = ("any", "all", "clone", "_to_copy", "view")
_DRAWN, _DRAWN_BY = ("rand", "rand_like"), ("bernoulli", "bernoulli_")  # the latter with a share of ones
_DECIDED_BY = {"logical_or": True, "bitwise_or": True, "logical_and": False, "bitwise_and": False}  # one operand alone


class Counting:
    """The ranges of a step's whole numbers, and the shares of its elements that are true, or one."""

    def __init__(self, recorder: "Recorder"):
        self.truths = WeakTensorKeyDictionary()  # of what predicates gave: the value that they have in a healthy step
        self._recorder = recorder
        self._ranges = WeakTensorKeyDictionary()
        self._shares = WeakTensorKeyDictionary()
        self._drawn = WeakTensorKeyDictionary()  # numbers between 0 and 1, all as likely

    def range_of(self, tensor: torch.Tensor) -> float:
        """How many different numbers a tensor can hold."""
        return self._ranges.get(tensor, float("inf"))

    def share_of(self, mask: torch.Tensor) -> float:
        """The share of its elements that are true: by predicates, as `taken` says, or by ranges."""
        if mask in self.truths:
            return float(self.truths[mask])
        return self._shares.get(mask, HALF) if self._recorder.asked.taken is None else self._recorder.asked.taken

    def spread(self, made: torch.Tensor, total: int) -> None:
        """Assume of counts that they are equal, and `total` together."""
        if made.numel():
            least, rest = divmod(total, made.numel())
            counts = lambda: (least + (torch.arange(made.numel()) < rest)).view(made.shape)
            self._recorder.values.assume(made, counts)

    def follow(self, func, name: str, args: tuple, result: object) -> None:
        """Note what an operation's result can be."""
        if self.truths:
            self._follow_truths(func, name, args, result)
        if name in _ASKS_BELOW and not args[0].dim() and isinstance(args[1], float) and math.isinf(args[1]):
            self.truths[result] = _ASKS_BELOW[name] == (args[1] > 0)
        if self._drawn and func._schema.is_mutable and isinstance(args[0], FakeTensor):
            for drawn in [each for each in self._drawn if storage_key(each) == storage_key(args[0])]:
                del self._drawn[drawn]
        if name in ("eq", "ne") and (known := [a for a in args if isinstance(a, FakeTensor) and a in self._ranges]):
            share = 1 / max(1, self._ranges[known[0]])
            self._shares[result] = share if name == "eq" else 1 - share
        elif name in ("bitwise_not", "logical_not") and args[0].dtype is torch.bool and args[0] in self._shares:
            self._shares[result] = 1 - self._shares[args[0]]
        elif (by := _DECIDED_BY.get(name.removesuffix("_"))) is not None and (shares := self._shares_of(args[:2])):
            first, second = shares
            self._shares[result] = 1 - (1 - first) * (1 - second) if by else first * second
        elif name in _DRAWN or (name == "uniform_" and tuple(args[1:]) in ((), (0, 1))):
            self._drawn[result] = True
        elif name in _ASKS_BELOW and args[0] in self._drawn and isinstance(args[1], (int, float)):
            below = min(1.0, max(0.0, args[1]))
            self._shares[result] = below if _ASKS_BELOW[name] else 1 - below
        elif name in _DRAWN_BY and (share := self._mean_of(args[len(args) > 1])) is not None:
            self._shares[result] = share
        elif name == "any" and args[0] in self._shares:
            expected = self.share_of(args[0]) * args[0].numel() / max(1, result.numel())
            self._shares[result] = min(1.0, expected)
            if result.numel() == 1 and expected > _SURE:
                self.truths[result] = True
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
                for noted in (self._ranges, self._shares, self._drawn):
                    if noted and known in noted:
                        noted.update((made, noted[known]) for made in tensors_of(result))

    def _follow_truths(self, func, name: str, args: tuple, result: object) -> None:
        """Note the truth of a result that follows from that of its arguments, and forget that of what is written."""
        known = [self.truths.get(arg) if isinstance(arg, FakeTensor) else None for arg in args[:2]]
        name = name.removesuffix("_") if func._schema.is_mutable else name
        truth = None
        if name in _KEEPS_TRUTH:
            truth = known[0]
        elif name in ("logical_not", "bitwise_not"):
            truth = None if known[0] is None else not known[0]
        elif name in _DECIDED_BY:
            truth = _DECIDED_BY[name] if _DECIDED_BY[name] in known else known[0] if known[0] == known[1] else None
        if func._schema.is_mutable and isinstance(args[0], FakeTensor) and args[0].dtype is torch.bool:
            for mask in [each for each in self.truths if storage_key(each) == storage_key(args[0])]:
                del self.truths[mask]
        if truth is not None and isinstance(result, torch.Tensor):
            self.truths[result] = truth

    def _shares_of(self, masks: tuple) -> list[float] | None:
        """The shares of two masks, of which one may be known, as of a text's padding; None where nothing is."""
        if not all(isinstance(mask, FakeTensor) and mask.dtype is torch.bool for mask in masks):
            return None
        shares = [self._shares.get(mask, self._mean_of(mask)) for mask in masks]
        return None if None in shares else shares

    def _mean_of(self, share: object) -> float | None:
        """A share that all elements have, or the mean of those that they have, if these are known."""
        known = self._recorder.values.of(share) if isinstance(share, torch.Tensor) else None
        with _disable_current_modes():
            return share if isinstance(share, float) else None if known is None else known.double().mean().item()

    def _counts(self, summed: torch.Tensor) -> bool:
        return isinstance(summed, FakeTensor) and (summed.dtype is torch.bool or summed in self._shares)
