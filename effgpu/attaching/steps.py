"""Where a training step ends, and plans. A plan is a generator that yields how many steps may pass.

`drive` pulls a function through a plan, a call a step. In a script, its own loop pushes the plan through `Marks`: a
step is what lies between two steps of the optimizer that stepped first. So accumulation, several optimizers, a
GradScaler, closures, a Trainer need no case of their own.
"""

import contextlib
import functools
import gc
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.optim import optimizer as optimizer_module
from torch.optim.optimizer import register_optimizer_step_post_hook

from effgpu.attaching import ticking
from effgpu.attaching.replacing import replaced
from effgpu.attaching.sites import readers_frames
from effgpu.attaching.ticking import BACKWARD, TICKS
from effgpu.measuring.variants import Step, check_worked

Plan = Generator[int, None, Any]
_BACKWARD = "_engine_run_backward"  # of torch.autograd: see torch_internals
_HOOKS = "_global_optimizer_post_hooks"  # of torch.optim.optimizer


class ScriptOver(Exception):
    """What a plan gets that waits for more steps of a script that has ended: it may conclude from those before."""


def drive(plan: Plan, step: Step) -> Any:
    """Call `step` as often as the plan asks for, and return what the plan returns."""
    ended, result = False, None

    def advance() -> int:
        nonlocal ended, result
        try:
            return next(plan)
        except StopIteration as end:  # the plan's own: a step that runs out of data raises one, too
            ended, result = True, end.value
            return 0

    with contextlib.closing(plan):  # after an error of the step, too, all that the plan has changed is put back
        while not ended:
            for _ in range(advance()):
                check_worked(step())
    return result


class _Snapshots(OrderedDict):
    """A dictionary that may change while one goes through its values."""

    def values(self) -> list:
        """The values as they are now."""
        return list(super().values())


def _find_loop() -> tuple[CodeType, ...]:
    """The code that makes the step, and the reader's innermost that was running at the last call, too.

    The latter is not called anew for each step: its frame is known by what it has got instead of a trace function, as a
    new frame has none, wherever it lies.
    """
    frames = readers_frames()
    found = next((frame for frame in frames if frame.f_trace is _was_running), None)
    for frame in frames:
        if frame.f_trace in (None, _was_running):
            frame.f_trace = None if found else _was_running
    return (frames[0].f_code, found.f_code) if found else ()


def _was_running(*_: object) -> None:
    """Traces nothing."""


def noting_failed_steps(note: Callable[[], object]) -> tuple[object, str, object]:
    """(owner, name, what stands there), which calls `note` where an optimizer's step fails: then no hook runs.

    Each step is a range of PyTorch's own profiler, which is left in any case.
    """
    leave = record_function.__exit__

    @functools.wraps(leave)
    def leave_noted(self, kind, value, trace):
        if kind is not None and self.name.startswith("Optimizer.step#"):
            note()
        return leave(self, kind, value, trace)

    return record_function, "__exit__", leave_noted


def _is_within_its_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step whose hooks are running was called by another one of the same optimizer.

    A subclass may call its parent's step, which has hooks of its own as soon as anybody makes a parent. What runs them
    is the frame that called our hook.
    """
    hooked = sys._getframe(2)
    outside = (frame for frame, _ in walk_stack(hooked.f_back) if frame.f_code is hooked.f_code)
    return any(frame.f_locals.get("self") is optimizer for frame in outside)


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What does the step inside of another library's wrappers, such as accelerate's."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _nobody() -> None:
    """What ends the steps, where nothing has yet."""


class Marks:
    """Counts a script's steps and moves its plan on. The plan begins after the first step: by then all is built.

    `done` gets what the plan returns. `count` is the number of steps so far, `source` what ends them: the optimizer
    that stepped first, or `effgpu.tick`. Where a script makes no optimizer of PyTorch's, a step goes from one backward
    pass to the next. A script that drops that optimizer, and steps another one, has only tried something, such as a
    learning rate: its steps are counted anew, under a new plan. `most` are the most steps of one of them, `total` those
    of all. So many `probes` are awaited in backward passes, in case an optimizer is made after them. `loop` is, from
    the second step on, the code that makes a step, and that which runs the steps: the same, or what calls it.
    `listeners` are called at each, `leaving` before the process ends.
    """

    connection = None  # to nobody: what `ticking` asks after a fork

    def __init__(self, done: Callable[[Any], None]):
        self.count = self.most = self.total = 0
        self.probes = 1
        self.in_thread = False  # whether another thread than the main one has made an optimizer, or failed
        self.guessed = ""  # what a plan has guessed, if the script ends too early
        self.doing = ""  # what a plan does itself at a mark that takes long, for whoever waits
        self.slowed = ""  # what the script itself has done for long since the last step, for whoever waits
        self.loop: tuple[CodeType, ...] = ()
        self.listeners: list[Callable[[], object]] = []
        self.leaving: list[Callable[[], object]] = []
        self._source: Callable[[], object] = _nobody
        self._others: weakref.WeakSet = weakref.WeakSet()  # optimizers that stepped where another one is the source
        self._make_plan: Callable[[], Plan] | None = None
        self._plan: Plan | None = None
        self._done, self._left = done, 1

    @property
    def source(self) -> object:
        """What ends the steps; None where nothing has, or what did is gone."""
        return self._source()

    def mark(self, source: object) -> None:
        """`source` has made a step."""
        is_another = isinstance(source, torch.optim.Optimizer) and self.source not in (None, source)
        if is_another and source not in self._others:
            self._others.add(source)
            gc.collect()  # the one before may be gone, but for references in a circle, as schedulers make them
        if self.source is None:
            self._begin(source)
        if source is not self.source:
            return
        self.count, self.total = self.count + 1, self.total + 1
        self.most = max(self.most, self.count)
        self.loop = self.loop or _find_loop()
        for listener in self.listeners:
            listener()
        self._left -= 1
        if self._left:
            return
        try:
            self._left = next(self._plan)
        except StopIteration as end:
            self._done(end.value)

    def end(self) -> None:
        """The script has ended: the plan may do without the steps that it waits for."""
        if self._plan is None:
            return
        try:
            self._plan.throw(ScriptOver())
        except StopIteration as end:
            self._done(end.value)
        except ScriptOver:
            self._left = 0  # nothing pushes it

    def _begin(self, source: object) -> None:
        if self._plan:
            self._plan.close()
        self._source = weakref.ref(source) if isinstance(source, torch.optim.Optimizer) else lambda: source
        self._plan, self._left = self._make_plan(), self.probes if source is BACKWARD else 1
        self.count, self.loop = 0, ()

    def tick(self, items: object = None, loss: object = None, metric: object = None) -> None:
        """What `effgpu.tick` calls."""
        if self.source is BACKWARD:  # which ends the steps only where nothing else does
            self._source = _nobody
        self.mark(TICKS)

    @contextlib.contextmanager
    def pushing(self, make_plan: Callable[[], Plan]) -> Iterator[None]:
        """Inside, the steps of optimizers and ticks are marks, which push the plan.

        So are what a GradScaler skips, and calls of a `step` that was put on the instance: PyTorch's hooks see neither.
        """
        scaler, optimizers = torch.amp.GradScaler, torch.optim.Optimizer
        step_unless_overflown, prepare = scaler._maybe_opt_step, optimizers.__init__
        self._made, self._inside, self._make_plan = [], [], make_plan

        @functools.wraps(prepare)
        def prepared(optimizer, *args, **kwargs):
            self._made.append(True)
            self.in_thread |= threading.current_thread() is not threading.main_thread()
            if self.source is BACKWARD:  # passes before the training, such as to see what they take
                self._source = _nobody
            return prepare(optimizer, *args, **kwargs)

        @functools.wraps(step_unless_overflown)
        def scaled(one, optimizer, *args, **kwargs):
            return self._marking_step(step_unless_overflown, optimizer)(one, optimizer, *args, **kwargs)

        def replace_step(optimizer, name, value):
            object.__setattr__(optimizer, name, self._marking_step(value, optimizer) if name == "step" else value)

        hooks = _Snapshots(getattr(optimizer_module, _HOOKS))  # as a plan may add some, or take some away, at a mark
        passes = ((torch.autograd, _BACKWARD), (torch.Tensor, "backward"))  # outside of all modes: a plan may end one
        others = [
            (optimizer_module, _HOOKS, hooks),
            (scaler, "_maybe_opt_step", scaled),
            (optimizers, "__init__", prepared),
            (optimizers, "__setattr__", replace_step),
            (ticking, "_script", self),
            *((owner, name, self._marking_backward(getattr(owner, name))) for owner, name in passes),
        ]
        with replaced(others):
            register_optimizer_step_post_hook(lambda one, *_: None if _is_within_its_step(one) else self.mark(one))
            yield

    def _marking_step(self, step: Callable, optimizer: torch.optim.Optimizer) -> Callable:
        """A step that marks itself, unless a hook has done so."""

        @functools.wraps(step)
        def marking(*args, **kwargs):
            before = self.total
            result = step(*args, **kwargs)
            if self.total == before:
                self.mark(_innermost(optimizer))
            return result

        return marking

    def _marking_backward(self, run: Callable) -> Callable:
        """A backward pass that is a mark, as long as no optimizer is made."""

        @functools.wraps(run)
        def marking(*args, **kwargs):
            if not self._made and not self._inside:
                self.mark(BACKWARD)
            self._inside.append(True)  # checkpointing may run a pass within a pass
            try:
                return run(*args, **kwargs)
            finally:
                self._inside.pop()

        return marking
