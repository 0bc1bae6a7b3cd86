"""`doctor` for a script as it is: plans in the script's own process, on a GPU or without one."""

import contextlib
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from effgpu.attaching.child import Again
from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import Marks, Plan, ScriptOver
from effgpu.diagnosing.batches import count_ahead, describe_loader, padding_shares
from effgpu.diagnosing.causes import PRECISION, TF32
from effgpu.diagnosing.diagnosis import NO_LOADER, ONLY_CALLS, THRESHOLD
from effgpu.diagnosing.gradients import Freezing
from effgpu.diagnosing.loaders import Loading, on_this_machine
from effgpu.diagnosing.loops import find_loop, find_updates
from effgpu.diagnosing.observed import Observed
from effgpu.diagnosing.observing import Graphs, find_trainer, goes_to
from effgpu.diagnosing.turns import Supply, are_16_bits_on, in_16_bits, observe, tell_failure, time_turns
from effgpu.measuring.torch_internals import _current_graph_task_id
from effgpu.predicting.asked import Asked
from effgpu.predicting.facts import WORKERS_IDLE
from effgpu.predicting.files import Files
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.placing import ScriptRecorder
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.scripts import find_work, recording, walk
from effgpu.predicting.timeline import (
    BACKWARD,
    BATCHED,
    FORWARD,
    NOTHING,
    OUTSIDE_ATTENTION,
    Event,
    Timeline,
)
from effgpu.predicting.weights import weights_set_aside

# Attention may run in one kernel in one of two steps alone. And PyTorch takes a batched product in place of another one
# for a weight that autocast copies without a graph.
_PRODUCTS = *OUTSIDE_ATTENTION, *BATCHED
_OTHER_STEPS = 3  # in 16 bits, until one does what the predicted one did
_WITHIN = "the optimizer steps in the backward pass: what precision saves, and what is kept in vain, was not looked at"
_OPEN = "autocast is on where the optimizer steps: what precision saves was not looked at"
_COMPILED = "what compiling again for other shapes takes was not looked at"
_OTHER_WORK = "the steps in 16 bits did other work than the one before: what precision saves is not known"
_TOO_FEW = "what precision saves was not looked at, as the script ended"


# --- on a GPU ---


@contextlib.contextmanager
def measuring(marks: Marks, gpu: Gpu, began: float, refused: str = "") -> Iterator[Callable[[], Plan]]:
    """What makes the plan whose result is what was seen of the script's step, and measured in turns, on this GPU.

    A file that was there when it `began`, in seconds since 1970, stays as it is, and nothing that is trained is left.
    `refused` says that no step can be in 16 bits, and why. Raises Again where that shows.
    """
    loading, moving, disturbances, files = Loading(), Moving(), Disturbances(), Files(began)
    marks.listeners += [loading.next_step, moving.next_step]
    marks.leaving += [functools.partial(files.clean, goes_on=False), files.close]
    seeing = loading.replacing(disturbances.note), moving.replacing(), disturbances.replacing()
    with weights_set_aside(files), replaced(itertools.chain(*seeing)):

        def make_plan() -> Plan:
            files.note_computed()
            seen = yield from _measure(marks, gpu, loading, moving, disturbances, refused)
            seen.notes += tuple(files.tell("are thrown away"))
            return seen

        with _without_what_fails():
            yield make_plan


@contextlib.contextmanager
def _without_what_fails(frozen: Collection[torch.Tensor] = ()) -> Iterator[None]:
    """An error of a step that runs in 16 bits, or while weights are `frozen`, is no fault of the script's.

    It runs again without such steps.
    """
    try:
        yield
    except Exception as error:
        if frozen:
            raise Again({"freezes": False}) from error
        if are_16_bits_on():
            raise Again({"refused": tell_failure(error)}) from error
        raise


def _measure(
    marks: Marks, gpu: Gpu, loading: Loading, moving: "Moving", disturbances: "Disturbances", refused: str
) -> Plan:
    yield 1  # then the loop is known
    loader = loading.taken[0] if loading.taken else None
    batches = max(1, len(loading.taken))
    is_open = torch.is_autocast_enabled("cuda")
    supply = Supply(
        loader=loader,
        same=loading.same,
        on_gpu=moving.on_gpu,
        last=lambda: list(moving.last.values()),
        settle=lambda: math.ceil(count_ahead(loader) / batches),
        handing=lambda: loading.time_handing(loading.taken, loading.time(loading.taken)[0]),
        disturbed=disturbances.happened,
        fixed=(PRECISION, TF32) if is_open else (PRECISION,) * bool(refused),
        loop=marks.loop or (marks.mark.__code__,),
    )
    seen, optimizers = yield from observe(supply)
    seen.trainer = find_trainer()
    seen.notes += (_OPEN,) if is_open else (refused,) * bool(refused)
    if loader is None:
        seen.notes += (NO_LOADER,)
    yield from time_turns(seen, optimizers, supply, gpu)
    return seen


class Moving:
    """What the script moves from the host to the GPU in a step, in its order."""

    def __init__(self):
        self.last: dict[tuple, torch.Tensor] = {}  # what the last step's moves gave
        self._now: dict[tuple, torch.Tensor] = {}
        self._counts: Counter = Counter()
        self._kept: dict[tuple, torch.Tensor] | None = None

    def next_step(self) -> None:
        """A step is over."""
        self.last, self._now = self._now, {}
        self._counts.clear()

    def on_gpu(self) -> AbstractContextManager:
        """Inside, what moves is on the GPU already: the script gets what the same move of the last step gave."""
        return replaced([(self, "_kept", dict(self.last))])

    def replacing(self) -> Iterator[tuple[type, str, Callable]]:
        """(class, name, what stands there). Attributes, as a mode would cost each operation some microseconds."""
        for name in ("to", "cuda"):
            yield torch.Tensor, name, self._moved(name, getattr(torch.Tensor, name))

    def _moved(self, name: str, move: Callable) -> Callable:
        @functools.wraps(move)
        def moved(tensor, *args, **kwargs):
            if tensor.is_cuda or isinstance(tensor, torch.nn.Parameter):
                return move(tensor, *args, **kwargs)
            if name == "to" and goes_to(args, kwargs) != "cuda":
                return move(tensor, *args, **kwargs)
            kind = tensor.shape, tensor.dtype
            key = (*kind, self._counts[kind])
            self._counts[kind] += 1
            kept = self._kept.get(key) if self._kept else None
            self._now[key] = move(tensor, *args, **kwargs) if kept is None else kept
            return self._now[key]

        return moved


class Disturbances:
    """What happens in a window now and then, and is no part of a usual step: an evaluation, a checkpoint, an epoch."""

    def __init__(self):
        self._seen = False

    def note(self) -> None:
        """There was one."""
        self._seen = True

    def happened(self) -> bool:
        """Whether there was one since this was asked last."""
        seen, self._seen = self._seen, False
        return seen

    def replacing(self) -> Iterator[tuple[object, str, Callable]]:
        """(owner, name, what stands there)."""
        train, save = torch.nn.Module.train, torch.save

        @functools.wraps(train)
        def train_noted(module, mode=True):
            self._seen |= not mode
            return train(module, mode)

        @functools.wraps(save)
        def save_noted(*args, **kwargs):
            self._seen = True
            return save(*args, **kwargs)

        yield torch.nn.Module, "train", train_noted  # which eval calls
        yield torch, "save", save_noted


# --- without a GPU ---


@contextlib.contextmanager
def predicting(
    marks: Marks, asked: Asked, *, refused: str = "", freezes: bool = True, **again: object
) -> Iterator[Callable[[], Plan]]:
    """What makes the plan whose result is the Prediction that is asked for, of one GPU, and what was seen of the step.

    Nothing but the loader is measured. `refused` is as in `measuring`; with `freezes`, steps also run without the
    gradients that no optimizer uses. What is raised is as in `predicting.scripts.planned`.
    """
    loading = Loading()
    marks.leaving.append(loading.end)
    seeing = itertools.chain(loading.replacing(), loading.keeping_aside())
    with replaced(seeing), recording(marks, asked, **again) as recorder:
        loading.recorder = recorder
        freezing = Freezing(freezes)
        marks.listeners += [loading.next_step, freezing.next_step]
        with _without_what_fails(freezing.frozen), freezing.watching():
            yield functools.partial(_predict, marks, asked.gpu, recorder, loading, refused, freezing)


def _predict(
    marks: Marks, gpu: Gpu, recorder: ScriptRecorder, loading: Loading, refused: str, freezing: Freezing
) -> Plan:
    recorder.own.counts = True
    predicted: Prediction = yield from walk(marks, recorder)
    worked = dict(recorder.worked)
    tokens, taken = recorder.looked_up, loading.taken
    within = _current_graph_task_id() != -1  # the optimizer's step: what PyTorch remembers in a pass ends with it
    is_open = not within and torch.is_autocast_enabled("cuda")  # the script's own would end in the middle of ours
    halved, frozen, frozen_halved = (), (), ()
    graphs = Graphs(recorder.work.loop, functools.partial(recorder.storages.were_there, recorder.storages.now))
    if not within:
        freezing.look(recorder, predicted.events)
    notes = (_WITHIN,) * within + (_OPEN,) * is_open + (refused,) * bool(refused)
    with contextlib.nullcontext() if within else graphs.looking():
        yield 1
    freezing.look_back()
    working = find_work(Counter(worked) + Counter(recorder.own.in_each()), predicted)
    usual = len(recorder.work.evaluations)

    def freeze() -> Plan:
        with freezing.freezing():
            return (yield from _repeat(recorder, predicted.events, backward=False))

    freezes = bool(freezing.weights or freezing.dropped)
    try:
        if freezes:  # before 16 bits: what a step in these leaves to the next one may not go with 32
            frozen = yield from freeze()
        if not notes:
            with in_16_bits(gpu):
                halved = yield from _repeat(recorder, predicted.events)
                frozen_halved = (yield from freeze()) if halved and frozen else ()
            notes += (_OTHER_WORK,) * (not halved)
    except ScriptOver:
        if not freezes:
            raise
        notes += (_TOO_FEW,) * (not (halved or notes))
    recorder.own.end()
    marks.doing = "now its loader is measured"
    with on_this_machine():
        try:
            if any(map(loading.gives_fakes, taken)):
                raise RuntimeError("its tensors are on the GPU, or came from there")
            took, loader = loading.time(taken)
            evaluating, _ = loading.time(loading.evaluated)
            handing = loading.time_handing(taken, took)
        except Exception as error:  # such as of a data set that holds a module, whose weights are fake
            took, loader, handing, evaluating = NOTHING, None, 0.0, NOTHING
            why = (str(error).strip().splitlines() or [type(error).__name__])[-1]  # a worker's error ends with its own
            notes += (f"what loading takes is not known, as it cannot be timed: {why}",)
        padding, padding_pairs = padding_shares(tokens)
    notes += graphs.tell() + (_COMPILED,) * predicted.compiled
    notes += (NO_LOADER if not working else ONLY_CALLS,) * (not taken)
    said = tuple(fact for fact in predicted.said if fact != WORKERS_IDLE)  # they did run, for the loader
    return replace(predicted, said=said), Observed(
        events=predicted.events,
        halved=halved,
        frozen=frozen,
        frozen_halved=frozen_halved,
        untrained=len(freezing.weights),
        dropped=freezing.count_dropped(),
        loop=find_loop(predicted.events),
        updates=find_updates(predicted.events),
        loading=took,
        handing=handing,
        working=working,
        evaluating=evaluating,
        **describe_loader(loader),
        remade=loading.is_remade(loader),
        trainer=find_trainer(),
        padding=padding,
        padding_pairs=padding_pairs,
        compiling=None if predicted.compiled else 0.0,
        unused=graphs.unused(),
        compiled=predicted.compiled,
        graphed=predicted.graphed,
        notes=notes,
        warnings=tuple(_tell_evaluations(recorder, predicted.timeline(gpu), usual)),
    )


def _tell_evaluations(recorder: ScriptRecorder, step: Timeline, usual: int) -> Iterator[str]:
    """What evaluations take that are in some steps, and not in the one that was predicted, if it is much.

    The first of them, so many, are `usual`, and the others ran in 16 bits.
    """
    evaluations = recorder.work.evaluations
    if not evaluations or any(event.evaluating for event in step.events):
        return
    times = max(replace(step, events=each).seconds() for each in evaluations[:usual] or evaluations) / step.seconds()
    if times * len(evaluations) / recorder.noted >= THRESHOLD:
        ran = f"an evaluation ran in {len(evaluations)} of the {recorder.noted} steps that were looked at"
        took = f"takes as long as {times:.1f} steps{' or more' * (not usual)} (predicted, without its loading)"
        yield f"{ran}, and {took}: evaluate less often"


def _repeat(recorder: ScriptRecorder, like: Iterable[Event], *, backward: bool = True) -> Plan:
    """A plan: the events of a step with as many products as these; none where each step does other work.

    So it may be where each tenth does. Those of a `backward` pass may be left out of the count. The first step ends
    what the one before began: a GAN's forward pass of the other network. Of a batch of another size, as of longer
    texts, the GPU's work counts as that of these events.
    """
    yield 1
    for _ in range(_OTHER_STEPS):
        recorder.begin_step()
        yield 1
        events = recorder.work.events
        for names in (OUTSIDE_ATTENTION, _PRODUCTS):
            if _count(events, names, backward) == _count(like, names, backward):
                scale = _sum_forward(like, names) / (_sum_forward(events, names) or math.inf) or 1.0
                return tuple(event if event.optimizing else event._replace(scale=scale) for event in events)
    return ()


def _sum_forward(events: Iterable[Event], names: Collection[str]) -> int:
    kernels = (kernel for event in events if event.phase == FORWARD for kernel in event.kernels)
    return sum(kernel.flops for kernel in kernels if kernel.name in names)


def _count(events: Iterable[Event], names: Collection[str], backward: bool) -> int:
    """How many products have one of these names, by which to tell whether two steps do the same."""
    counted = (event for event in events if backward or event.phase != BACKWARD)
    return sum(kernel.name in names for event in counted for kernel in event.kernels)
