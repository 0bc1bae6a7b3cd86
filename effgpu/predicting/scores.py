"""Whether anything reads the scores of attention that is written as a formula, but the attention itself.

Where scores go on to the next layer, as in RealFormer or PatchTST, or into a loss, a fused kernel cannot give them.
"""

from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching import sites
from effgpu.measuring.ops import tensors_of
from effgpu.predicting.timeline import BATCHED, OUTSIDE_ATTENTION

_OWN_READS = ("/nn/functional.py",)  # where nn.MultiheadAttention averages its weights, which nobody may read


class Scores:
    """What follows from a batched product in a forward pass, up to the next one, until another product comes."""

    def __init__(self):
        self._made_after = WeakTensorKeyDictionary()  # how many other products came before such a tensor
        self._products = 0
        self._attended: set[int] = set()  # after how many of them a softmax read scores

    def read_on(self, func, args: tuple, kwargs: dict, result: object) -> bool:
        """Follow an operation. Whether it reads scores of attention that is over."""
        name = func.overloadpacket.__name__
        self._products += name in OUTSIDE_ATTENTION
        given = tensors_of((args, kwargs)) if self._made_after else ()
        made = {self._made_after[each] for each in given if each in self._made_after}
        if name == "_softmax":
            self._attended |= made
        if not made and name in BATCHED:
            self._made_after[result] = self._products
        elif made and name not in BATCHED + OUTSIDE_ATTENTION:
            for each in tensors_of(result):
                self._made_after[each] = max(made)
        over = {after for after in made & self._attended if after < self._products}
        return bool(over) and not sites.asked_by_torch(_OWN_READS)
