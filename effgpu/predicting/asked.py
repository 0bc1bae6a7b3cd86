"""What a walk is asked for: the GPUs, and how far it goes. A script's process gets the same."""

import functools
import time
from dataclasses import dataclass, field
from numbers import Real

from effgpu.errors import BadArgument
from effgpu.predicting.gpus import Gpu

STEPS = 2  # the first creates the optimizer's state, the second is like all that follow


@dataclass(frozen=True)
class Asked:
    """A prediction for these GPUs, with the kernels that one of this compute capability takes.

    With None, the step runs as on a CPU, as tests compare it with a trace of one: without a GPU's rules, and sizes are
    not rounded. `steps` are counted. `taken` is the share that an index takes that depends on values; None: as known,
    or half. `awaits_update` says that a function is called until an optimizer has made a step. A file that was there
    when it `began`, in seconds since 1970, is one from before: a script may be walked more than once.
    """

    gpus: tuple[Gpu, ...]
    capability: tuple[int, int] | None
    steps: int = STEPS
    taken: float | None = None
    awaits_update: bool = False
    began: float = field(default_factory=time.time)

    @functools.cached_property
    def first(self) -> Gpu:
        """Whose peak a result shows: the first of the GPUs that a walk for this capability is for."""
        return next((gpu for gpu in self.gpus if gpu.capability <= (self.capability or (0, 0))), self.gpus[0])

    @property
    def gpu(self) -> Gpu | None:
        """Whose hardware PyTorch answers for: the first of the GPUs that has this capability."""
        return next((gpu for gpu in self.gpus if gpu.capability == self.capability), None)


def check_taken(taken: object) -> None:
    """Raise ValueError for what is no share, and not None either."""
    if taken is not None and not (isinstance(taken, Real) and 0 <= taken <= 1):
        raise BadArgument(f"taken: expected a share from 0 to 1, got {taken!r}")
