"""The optimizers of a step: which there are, when one works, what it keeps, and what it does only in some steps."""

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from types import CodeType
from typing import TYPE_CHECKING

import torch
from torch.optim import LBFGS, Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching.sites import LIBRARY, READER, find_site, whose
from effgpu.errors import CannotPredict
from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import FakeTensor
from effgpu.predicting.allocator import GPU, Block, round_size
from effgpu.predicting.facts import ASSUMED, RARE, UNTIMED
from effgpu.predicting.rare import find_remainders
from effgpu.predicting.rules import defaults_to_foreach

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_OPTIMIZERS = sys.modules[Optimizer.__module__].__file__  # whose wrapper calls every optimizer's step
_TOLERANCES = ("tolerance_grad", "tolerance_change")
_MOST_CLOSURES = 1000
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # torch.optim's, with a fused kernel
_CURVED = 1e-10  # above it, LBFGS keeps a direction


def describe_optimizer(optimizer: Optimizer) -> tuple[str, bool | None]:
    """Its name, and whether its step is fused; None where PyTorch has no fused kernel for it."""
    kind = type(optimizer)
    has_kernel = kind.__module__.startswith("torch.optim") and kind.__name__ in _FUSED
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return kind.__name__, fused if has_kernel else None


class Optimizers:
    """Those that a step has built, and those that have made a step. What is not known of them, the recorder says."""

    def __init__(self, recorder: "Recorder"):
        self.working: list[tuple[Optimizer, tuple[str, bool | None]]] = []  # in whose step it is, the innermost last
        self.built: weakref.WeakSet = weakref.WeakSet()
        self.stepped: weakref.WeakSet = weakref.WeakSet()
        self._recorder = recorder
        self._built_at = weakref.WeakKeyDictionary()  # the line of each
        self._tolerances: dict[Optimizer, dict[str, float]] = {}  # of LBFGS, while it makes a step
        self._code: set[CodeType] = set()  # what computes in their steps
        self._dropped = WeakTensorKeyDictionary()  # weights whose gradient a script let go of, with the line
        self._untrained = weakref.WeakKeyDictionary()  # such lines, by the optimizer that never updated their weights

    @property
    def at_work(self) -> tuple[str, bool | None] | None:
        """The one in whose step it is, described; None outside of them."""
        return self.working[-1][1] if self.working else None

    def note_built(self, built: Optimizer) -> None:
        """There is one more, made by the line that is running."""
        self.built.add(built)
        self._recorder.products[-1] = 0  # what came before it was no step
        if site := find_site():
            self._built_at[built] = site.where

    def note_kernel(self) -> None:
        """Something is computed in an optimizer's step."""
        self._code.update(_running())

    def keeps_direction(self, func, args: tuple) -> bool:
        """Whether it is LBFGS's question whether to keep a direction."""
        return func is torch.ops.aten.gt.Scalar and bool(self._tolerances) and args[1] == _CURVED

    def note_dropped(self, weight: torch.Tensor) -> None:
        """A weight is about to lose its gradient: where a backward pass has just given it, it is not trained yet."""
        if self._recorder.products[-1] and weight.grad is not None and (site := find_site()):
            self._dropped[weight] = site

    def begin_pass(self) -> None:
        """A backward pass begins, which gives gradients anew: those of before were no part of it."""
        self._dropped.clear()

    def _note_untrained(self, optimizer: Optimizer) -> None:
        """Note the lines that drop gradients of weights which an optimizer has never updated."""
        weights = (weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is None)
        never = (weight for weight in weights if not optimizer.state.get(weight))
        self._untrained[optimizer] = {self._dropped[weight] for weight in never if weight in self._dropped}
        self._dropped.clear()

    def idle(self) -> list[str]:
        """Those that have made no step, where others have. One that shares its groups, as SAM's, is none.

        Nor is SGD of weights that others train, if it keeps nothing: a pattern for the inner steps of MAML.
        """
        if not self.stepped:
            return []
        stepped = {id(group) for one in self.stepped for group in one.param_groups}
        trained = {id(weight) for one in self.stepped for group in one.param_groups for weight in group["params"]}
        if self.built - self.stepped:
            gc.collect()  # what was given up, as by an attempt that ran out of memory, may be in a circle of references
        idle = (one for one in self.built - self.stepped if not stepped.issuperset(map(id, one.param_groups)))
        idle = (one for one in idle if not _is_pattern(one, trained))
        return [f"the {type(one).__name__} of {self._built_at.get(one, 'the step')}" for one in idle]

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """A hook before every optimizer's step. A closure that the step calls is no part of the optimizer's work."""
        self.working.append((optimizer, describe_optimizer(optimizer)))
        self.stepped.add(optimizer)
        if isinstance(optimizer, LBFGS):  # whose losses would be equal, so that it stopped at the second
            (group,) = optimizer.param_groups
            # a search along a line begins with one call, and may make all that are left
            calls = group["max_eval"] + 1 if group["line_search_fn"] else min(group["max_iter"], group["max_eval"])
            if calls > _MOST_CLOSURES:
                text = f"LBFGS calls its closure up to {calls:,} times in a step"
                raise CannotPredict(f"{text}: give it a smaller max_iter and max_eval, such as 20, and three steps")
            self._tolerances[optimizer] = {name: group[name] for name in _TOLERANCES}
            group.update(dict.fromkeys(_TOLERANCES, -1.0))
            say = functools.partial(self._recorder.say, ASSUMED)
            say(f"LBFGS calls its closure as often as it may, {calls} times")
            say(f"LBFGS keeps as many of its directions as it may, {group['history_size']}")
        self._note_untrained(optimizer)
        by_default = self._recorder.capability and defaults_to_foreach(optimizer)
        for group in optimizer.param_groups:
            if by_default and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
            if not all(isinstance(parameter, FakeTensor) for parameter in group["params"]):
                self._recorder.say(UNTIMED, "the optimizer takes on the CPU, where its weights are")
            gradients = [parameter.grad for parameter in group["params"]]
            if any(gradient is not None and gradient.is_sparse for gradient in gradients):
                self._recorder.say(UNTIMED, f"the {type(optimizer).__name__} takes for sparse gradients")
            self._recorder.storages.name(gradients, "gradients")
            self._recorder.storages.name(group["params"], "weights")
        wrap = lambda value: self._aside(value) if callable(value) and value is not optimizer else value
        return tuple(map(wrap, args)), {name: wrap(value) for name, value in kwargs.items()}

    def _aside(self, closure: Callable) -> Callable:
        @functools.wraps(closure)
        def called():
            working, self.working = self.working, []
            try:
                return closure()
            finally:
                self.working = working

        return called

    def after_step(self, optimizer: Optimizer, *_: object) -> None:
        """A hook after every optimizer's step."""
        self.end_step()
        self.name_state(optimizer)

    def end_step(self) -> None:
        """The innermost step is over, or has failed."""
        if not self.working:  # another hook failed, before ours
            return
        optimizer, _ = self.working.pop()
        for group in optimizer.param_groups:
            group.update(self._tolerances.pop(optimizer, {}))

    def name_rare_updates(self) -> None:
        """Name what an optimizer does only in some steps: whether it is in the one that was counted is not known.

        And the lines that keep it from updating some weights.
        """
        for site in sorted({site for sites in self._untrained.values() for site in sites}):
            self._recorder.say(RARE, f"what a step takes once more weights are trained: {site}")
        for site in sorted({site for code in self._code for site in find_remainders(code)}):
            self._recorder.say(UNTIMED, f"an optimizer takes for what it does only in some steps: {site}")

    def fill_histories(self) -> None:
        """Count what LBFGS has yet to keep: two vectors for each direction, as large as its weights."""
        for optimizer in self.stepped:
            if isinstance(optimizer, LBFGS):
                (group,) = optimizer.param_groups
                size = round_size(sum(each.nbytes for each in group["params"]))
                left = group["history_size"] - len(optimizer.state[group["params"][0]].get("old_dirs", ()))
                histories = [Block(size, 0, "optimizer state", place=GPU) for _ in range(2 * left)]
                self._recorder.storages.blocks += histories

    def name_state(self, optimizer: Optimizer) -> None:
        """Say whose the tensors are that an optimizer keeps."""
        for state in optimizer.state.values():
            if isinstance(state, dict):
                kept = tensors_of(list(state.values()))  # of LBFGS, lists, too
                self._recorder.storages.name(kept, "optimizer state")


def _running() -> list[CodeType]:
    """The code of the optimizer's that is running now, a reader's or a library's."""
    seen, found = [], []
    for frame, _ in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file == _OPTIMIZERS:
            found = list(seen)  # what is further out is the training loop
        elif whose(file) in (READER, LIBRARY):
            seen.append(frame.f_code)
    return found


def _is_pattern(optimizer: Optimizer, trained: set[int]) -> bool:
    """Whether it is SGD without momentum, of weights that are `trained` by others."""
    groups = optimizer.param_groups if type(optimizer) is torch.optim.SGD else []
    weights = {id(weight) for group in groups for weight in group["params"]}
    return bool(groups) and weights <= trained and not any(group["momentum"] for group in groups)
