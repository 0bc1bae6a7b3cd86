"""Will a training step fit a GPU, and how long will it take? `predict` answers, and `largest` for the largest batch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from time import time
from typing import TYPE_CHECKING

from effgpu.attaching import scripts
from effgpu.attaching.commands import read_program
from effgpu.errors import BadArgument
from effgpu.predicting.asked import STEPS, Asked, check_taken
from effgpu.predicting.gpus import Gpu, GpuLike, find_gpu, find_gpus
from effgpu.predicting.prediction import Prediction
from effgpu.units import check_positive, with_article

if TYPE_CHECKING:
    from effgpu.measuring.variants import Variant


def predict(
    variant: "Variant | str | Sequence[str]",
    gpu: GpuLike | Iterable[GpuLike] | None = None,
    *,
    steps: int = STEPS,
    taken: float | None = None,
) -> Prediction:
    """Predict what a training step takes on a GPU, memory and time, and whether it fits, without a GPU.

    `variant` is what `compare` takes, or the command of a training script, as it is: "train.py --batch 12", "python -m
    package.train". Such a script runs here, in a process of its own, for three to five steps: what lies between two
    steps of the optimizer that stepped first. What it has on the CPU is real, its data too; what it moves to the GPU
    has no values, and is written nowhere. `gpu` is a name ("T4", "A100 80 GB"), a size ("16 GiB"; bytes), several of
    them, or None for all known GPUs. `steps` steps are counted after building, or after a script's first. They run on
    fake tensors, without values. Everything that the variant builds or uses counts as on the GPU. `taken` is the share,
    from 0 to 1, that each boolean index takes, `nonzero` and the like: where it is not given, what is known, or else
    half.

    Raises ValueError for an unknown GPU, a share that is none, and a command that starts no Python program. Raises
    RuntimeError, with the reason, for a step that cannot run without values: a result's shape depends on them, or an
    operation is not known to fake tensors; and for a script that makes fewer than three steps. ScriptFailed, a
    RuntimeError, is a script's own error.
    """
    check_positive(Integral, steps=steps)
    check_taken(taken)
    if not (gpus := find_gpus(gpu)):
        raise BadArgument("gpu: expected at least one GPU, got none")
    program = read_program(variant) if isinstance(variant, (str, list, tuple)) else None

    began = time()

    def walk_on(capability: tuple[int, int]) -> Prediction:
        asked = Asked(gpus, capability, steps, taken, awaits_update=program is None, began=began)
        if program is None:
            from effgpu.predicting.walking import walk  # loads PyTorch, which a script has in its own process

            return walk(lambda _: variant, asked)
        return scripts.run(program, "effgpu.predicting.scripts:planned", asked=asked)

    def walk_down(capability: tuple[int, int]) -> Prediction:
        predicted = walk_on(capability)
        older = [gpu.capability for gpu in gpus if gpu.capability < predicted.holds_from]
        return replace(predicted, older=walk_down(max(older))) if older else predicted

    return walk_down(max(gpu.capability for gpu in gpus))


@dataclass(frozen=True, repr=False)
class Largest:
    """The largest size whose step fits `gpu`, and the largest that may: between them it is too close to tell.

    0 means that no size does. `tried` holds the prediction for each size that was looked at.
    """

    gpu: Gpu
    fits: int
    may_fit: int
    tried: Mapping[int, Prediction]

    def __repr__(self) -> str:
        if not self.may_fit:
            return f"nothing fits {with_article(self.gpu.name)}"
        size = self.fits if self.fits else "no size surely"
        sure = f"{size} fits {with_article(self.gpu.name)}"
        return sure + (f", up to {self.may_fit} may" if self.may_fit > self.fits else "") + " (predicted)"


def largest(variant_of: "Callable[[int], Variant]", gpu: GpuLike, *, most: int = 65536) -> Largest:
    """The largest batch, or length, that fits a GPU: `largest(lambda batch: partial(training, batch), "T4")`.

    `variant_of` returns the variant for a size. Sizes from 1 to `most` are tried by bisection, guided by the sizes seen
    so far. Raises what `predict` raises.
    """
    from effgpu.measuring.device import gc_frozen

    check_positive(Integral, most=most)
    gpu, tried = find_gpu(gpu), {}

    def surplus(size: int, end: str) -> int:
        if not size:  # what stays from step to step, as the smallest tells
            least = min(tried)
            return surplus(least, end) - tried[least].allocated + tried[least].resting
        if size not in tried:
            tried[size] = predict(variant_of(size), gpu)
        return (tried[size].total(gpu).low if end == "low" else tried[size].enough(gpu)) - gpu.memory

    with gc_frozen():
        fits = _bisect(partial(surplus, end="high"), most)
        may_fit = _bisect(partial(surplus, end="low"), most, tuple(tried))
    return Largest(gpu, fits, may_fit, dict(sorted(tried.items())))


def _bisect(surplus: Callable[[int], int], most: int, seen: Iterable[int] = ()) -> int:
    """The largest size from 0 to `most` whose surplus is not positive, by bisection from the sizes seen before.

    Memory grows with the size, nearly as a line: where two sizes are known, the next one is where the line says. The
    surplus of size 0 is asked for once another one is known.
    """
    known = {size: surplus(size) for size in seen}
    low = max((size for size, more in known.items() if more <= 0), default=0)
    high = min((size for size, more in known.items() if more > 0), default=most + 1)
    turn = 0
    while high - low > 1:
        below, above = known.get(low), known.get(high)
        earlier = max((size for size in known if size < low), default=None)
        if low and above is None and earlier is None:
            earlier, known[0] = 0, surplus(0)
        if below is not None and above is not None and turn % 3 < 2:
            size = low + int((high - low) * -below / (above - below))
        elif above is None and earlier is not None and known[low] > known[earlier]:
            size = low + 1 + int(-below * (low - earlier) / (below - known[earlier]))
        else:
            size = (low + high) // 2 if above is not None else 8 * low or 1
        size = min(max(size, low + 1), high - 1)
        known[size] = surplus(size)
        low, high, turn = (size, high, turn + 1) if known[size] <= 0 else (low, size, turn + 1)
    return low
