"""What was seen of a step that is diagnosed."""

from dataclasses import dataclass, field
from typing import NamedTuple

from effgpu.attaching.sites import Site
from effgpu.diagnosing.lists import Updates
from effgpu.predicting.timeline import NOTHING, Event, Range

BATCHES = 8  # whose shapes are looked at
TRAINERS = {  # libraries that make the steps of a script, by parts of their files' names, the outermost first
    "transformers": ("transformers/trainer.py",),
    "lightning": ("lightning/pytorch/loops/", "pytorch_lightning/loops/"),
    "accelerate": ("accelerate/optimizer.py",),
}


class Loop(NamedTuple):
    """The line of a loop from which the CPU calls most, its rounds, and their share of the forward pass's calls."""

    site: Site
    rounds: int
    share: float


@dataclass
class Observed:
    """What was seen of a step: of the real one, or where the script has no GPU, of the one on fake tensors.

    `loading` is what the loader takes for a step, in seconds; `workers`, `pinned`, `persistent` and `streams` describe
    it, `remade` says that it is made anew for each epoch. None of them is known where no `has_loader`. `handing` is
    what one worker takes to hand the step's batches over, if that is more than half of `loading`: then workers are no
    cure. `working` are the seconds per step in which the script itself computes on the CPU, by line, the longest first.
    `evaluating` is what an evaluation in the step takes of `loading`. `step`, `calls` and `saved` were measured on a
    GPU: the step's seconds, those of the CPU's calls up to its first wait, and what each set of changes saves.
    `optimizers` has the name of each optimizer and whether it is fused; in a predicted step, of the one alone whose
    updates take longest. `multiplied` are the FLOPs of the forward pass's products, `stepped` counts the optimizers'
    steps. `time_first` says that a module takes the batch with time as its first dimension. `halved` are the step's
    events in 16 bits, `frozen` those without the gradients of so many `untrained` weights, which no optimizer has, and
    without so many that are `dropped` before an optimizer uses them, which the backward passes in these lines give;
    `frozen_halved` those with both changes. `loop` is the one that calls most of its forward pass, `updates` are those
    over weights. `graphed` says that torch.compile replays CUDA graphs. `trainer` is the library that makes the steps,
    one of `TRAINERS`, or "". `padding` is the share of the tokens that are padding, `padding_pairs` that of the pairs
    of a text's tokens that hold some.
    """

    events: tuple[Event, ...] = ()
    halved: tuple[Event, ...] = ()
    frozen: tuple[Event, ...] = ()
    frozen_halved: tuple[Event, ...] = ()
    untrained: int = 0
    dropped: tuple[int, tuple[Site, ...]] = (0, ())
    loop: Loop | None = None
    updates: tuple[Updates, ...] = ()
    has_loader: bool = False
    loading: Range = NOTHING
    handing: float = 0.0
    working: dict[Site, float] = field(default_factory=dict)
    evaluating: Range = NOTHING
    workers: int = 0
    pinned: bool = False
    persistent: bool = False
    streams: bool = False
    remade: bool = False
    trainer: str = ""
    padding: float = 0.0
    padding_pairs: float = 0.0
    unused: dict[Site, int] = field(default_factory=dict)
    compiling: float | None = 0.0  # None where it was not looked at
    compiled: bool = False
    graphed: bool = False
    shapes: int = 1
    optimizers: tuple[tuple[str, bool | None], ...] = ()
    stepped: int = 0
    time_first: bool = False
    multiplied: int | None = None
    step: Range | None = None
    calls: float | None = None
    saved: dict[frozenset[str], Range] = field(default_factory=dict)  # by what was changed together
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # of what no change of the step mends
