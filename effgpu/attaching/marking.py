"""A script's own steps, shown to `effgpu bench`: where they end, their loss, and how many samples they took.

A step ends where `Marks` says. Its loss is what it called `backward` on, each pass added. Its samples are those of the
batch that a DataLoader gave last before a backward pass, so that an evaluation's do not count.
"""

import contextlib
import functools
from collections import deque
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from effgpu.attaching import ticking
from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import _BACKWARD, BACKWARD, Marks, Plan, noting_failed_steps
from effgpu.attaching.ticking import Pieces
from effgpu.measuring.torch_internals import _BaseDataLoaderIter


def attach() -> None:
    """Show the steps of this process to the bench that started it, until the process ends."""
    if (script := ticking._script) is None:
        return
    seen = _Seen(script)
    marks = Marks(lambda result: None)
    script.seen = seen
    _ATTACHED.enter_context(marks.pushing(functools.partial(_show_each_step, marks, seen)))
    ticking._script = script  # `tick` stays the bench's own
    _note_losses(seen)
    _note_batches(seen)


_ATTACHED = contextlib.ExitStack()


def _show_each_step(marks: Marks, seen: "_Seen") -> Plan:
    while True:
        seen.script.mark(BACKWARD if marks.source is BACKWARD else type(marks.source).__name__)
        yield 1


class _Seen:
    """The losses and samples of the step that is under way."""

    def __init__(self, script: ticking._Script):
        self.script = script
        self.losses = Pieces()
        self.optimizing = False  # inside of an optimizer's step, where a closure may run several passes
        self.loader: object = None  # whose batch came last
        self.fetched = 0  # its samples since the last backward pass
        self.samples = 0
        self.usual: int | None = None  # samples of the step before: a loader that reads ahead gives a last one none
        self.unknown = False

    def note_loss(self, loss: torch.Tensor) -> None:
        if self.script.keeps_loss() and not (self.optimizing and self.losses):
            self.losses.append(loss.detach().clone())

    def take_loss(self) -> Pieces | None:
        losses, self.losses = self.losses, Pieces()
        return losses or None

    def note_batch(self, loader: object, samples: int | None) -> None:
        if loader is not self.loader:
            self.loader, self.fetched = loader, 0
        self.unknown |= samples is None
        self.fetched += samples or 0

    def use_batch(self) -> None:
        """A backward pass is under way: what was fetched is the step's."""
        self.samples += self.fetched
        self.loader, self.fetched = None, 0

    def take_samples(self) -> int | None:
        self.usual, self.samples = self.samples or self.usual, 0
        return None if self.unknown else self.usual


def _note_losses(seen: _Seen) -> None:
    run_backward, scale = getattr(torch.autograd, _BACKWARD), torch.amp.GradScaler.scale
    depth = 0

    @functools.wraps(run_backward)
    def noting(roots, *args, **kwargs):
        nonlocal depth
        if not depth and kwargs.get("accumulate_grad"):  # not within a pass, nor torch.autograd.grad
            seen.use_batch()
            if len(roots) == 1 and isinstance(roots[0], torch.Tensor) and roots[0].numel() == 1:
                seen.note_loss(getattr(roots[0], _UNSCALED, roots[0]))
        depth += 1
        try:
            return run_backward(roots, *args, **kwargs)
        finally:
            depth -= 1

    @functools.wraps(scale)
    def scale_and_tell(scaler, outputs):
        scaled = scale(scaler, outputs)
        if isinstance(scaled, torch.Tensor) and scaled is not outputs:
            setattr(scaled, _UNSCALED, outputs)
        return scaled

    setattr(torch.autograd, _BACKWARD, noting)
    torch.amp.GradScaler.scale = scale_and_tell

    def optimizing(on: bool):
        return lambda *_: setattr(seen, "optimizing", on)

    register_optimizer_step_pre_hook(optimizing(True))
    register_optimizer_step_post_hook(optimizing(False))
    _ATTACHED.enter_context(replaced([noting_failed_steps(optimizing(False))]))


_UNSCALED = "_effgpu_unscaled"


def _note_batches(seen: _Seen) -> None:
    kind = _BaseDataLoaderIter
    next_index, next_batch = kind._next_index, kind.__next__
    asked: WeakKeyDictionary = WeakKeyDictionary()  # by iterator: its sampler's, and samples of batches to come

    @functools.wraps(next_index)
    def noting_index(self):
        index = next_index(self)
        sampler, samples = asked.get(self, (None, None))
        if sampler is not self._sampler_iter:  # the first of an epoch
            asked[self] = _, samples = self._sampler_iter, deque()
        samples.append(len(index) if isinstance(index, list | tuple) else None)
        return index

    @functools.wraps(next_batch)
    def noting_batch(self):
        batch = next_batch(self)
        _, samples = asked.get(self, (None, None))
        seen.note_batch(self, samples.popleft() if samples else None)
        return batch

    kind._next_index, kind.__next__ = noting_index, noting_batch
