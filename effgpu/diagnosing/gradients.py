"""Gradients that a script computes and does not use, and its steps without them."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from effgpu.attaching.replacing import replaced
from effgpu.attaching.sites import Site, find_site
from effgpu.measuring.torch_internals import _engine_run_backward
from effgpu.predicting.order import leaves
from effgpu.predicting.placing import ScriptRecorder
from effgpu.predicting.timeline import GRADIENTS, Event

_PASS = _engine_run_backward.__name__


class Freezing:
    """Weights that get no gradients for a while, if it `may`: those that no optimizer has, and in a backward pass those
    whose gradients are dropped before an optimizer has used them, as a GAN drops those of the other network.
    """

    def __init__(self, may: bool):
        self.frozen: list[torch.Tensor] = []  # now
        self.weights: list[torch.Tensor] = []  # that no optimizer has
        self.dropped: dict[int, list[torch.Tensor]] = {}  # by the number of the pass in its step
        self._may = may
        self._step = self._looked = 0  # which one it is, and which was looked at
        self._number = 0  # of the last pass in its step
        self._sites: dict[int, Site | None] = {}  # by the number of the pass
        self._in_vain: dict[tuple[int, int], list[TensorWeakRef]] = {}  # by the step, and the number of the pass in it
        self._given = WeakTensorKeyDictionary()  # what a weight's gradient is, and the passes that it is from

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each pass is seen, and what becomes of its gradients."""
        run = functools.partial(self._run, getattr(torch.autograd, _PASS))
        hook = register_optimizer_step_pre_hook(self._use)
        try:
            with replaced([(torch.autograd, _PASS, run)]):
                yield
        finally:
            hook.remove()

    def next_step(self) -> None:
        """A step is over."""
        self._step, self._number = self._step + 1, 0

    def look(self, recorder: ScriptRecorder, events: Iterable[Event]) -> None:
        """After a step, find the weights. A script that reads gradients may use them itself."""
        self._may &= not any(event.lasting == GRADIENTS for event in events)
        self._looked = self._step - 1
        if self._may:
            self.weights = recorder.find_untrained()

    def look_back(self) -> None:
        """A step later, find what has been dropped of the one that was looked at."""
        known = {id(None), *map(id, self.weights)}
        for (step, number), weights in self._in_vain.items() if self._may else ():
            others = [weight for each in weights if id(weight := each()) not in known]
            if step == self._looked and others:
                self.dropped[number] = others

    def count_dropped(self) -> tuple[int, tuple[Site, ...]]:
        """How many gradients are dropped, and the lines of the passes that give them, if these are known."""
        sites = dict.fromkeys(self._sites[number] for number in sorted(self.dropped))
        return sum(map(len, self.dropped.values())), tuple(filter(None, sites))

    @contextlib.contextmanager
    def freezing(self) -> Iterator[None]:
        """Inside, the weights get no gradients."""
        self._set(False)
        self.frozen += [*self.weights, *(weight for weights in self.dropped.values() for weight in weights)]
        try:
            yield
        finally:
            self.frozen.clear()
            self._set(True)

    def _set(self, requires_grad: bool) -> None:
        for weight in self.weights:
            weight.requires_grad_(requires_grad)

    def _run(self, run_backward: Callable, tensors: tuple, *args, **kwargs) -> tuple:
        """Run a pass. `args` are those of `torch.autograd.graph._engine_run_backward`."""
        if not kwargs.get("accumulate_grad"):
            return run_backward(tensors, *args, **kwargs)
        *before, inputs = args
        given = inputs or [leaf for leaf in leaves(tensors) if leaf.requires_grad]
        self._number = number = self._number + 1
        place = self._step, number  # both may be others once the pass is over
        self._sites[number] = find_site()
        self._note_dropped()
        were = [_state(leaf) for leaf in given]
        if self.frozen and number in self.dropped:
            left_out = {*map(id, self.dropped[number])}
            inputs = tuple(leaf for leaf in given if id(leaf) not in left_out) or inputs
        result = run_backward(tensors, *before, inputs, **kwargs)
        for leaf, was in zip(given, were):
            if leaf.grad is not None and _state(leaf) != was:
                _, passes = self._given.get(leaf, (None, ()))
                self._given[leaf] = weakref.ref(leaf.grad), (*passes, place)
        return result

    def _note_dropped(self) -> None:
        """Note the weights whose gradients are gone, and nobody has used them: no optimizer, and nobody holds one."""
        for weight, (gradient, passes) in list(self._given.items()):
            if weight.grad is None or weight.grad is not gradient():
                del self._given[weight]
                for place in passes if gradient() is None else ():
                    self._in_vain.setdefault(place, []).append(TensorWeakRef(weight))

    def _use(self, optimizer: Optimizer, *_: object) -> None:
        """An optimizer uses what its weights were given."""
        for group in optimizer.param_groups:
            for weight in group["params"]:
                self._given.pop(weight, None)


def _state(leaf: torch.Tensor) -> tuple[int, int] | None:
    """By which to see whether a pass has given it a gradient."""
    return None if leaf.grad is None else (id(leaf.grad), leaf.grad._version)
