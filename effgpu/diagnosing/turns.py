"""Plans of the doctor: a step is observed, and on a GPU timed as it is and with one thing changed, in turns.

A function is pulled through them, a script's own loop pushes them: see attaching/steps.py.
"""

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType

import torch

from effgpu.attaching.child import describe_error, find_line
from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import Plan, drive
from effgpu.diagnosing.batches import describe_loader, padding_shares
from effgpu.diagnosing.causes import COPYING, LOADING, OPTIMIZER, PRECISION, TF32
from effgpu.diagnosing.diagnosis import THRESHOLD
from effgpu.diagnosing.observed import BATCHES, Observed
from effgpu.diagnosing.observing import Observer, UntilRead
from effgpu.diagnosing.ranking import feeding, reads
from effgpu.measuring import power
from effgpu.measuring.device import multiplying_as, tell_spilled
from effgpu.measuring.intervals import FEWEST_BLOCKS, divide_confidence, interval_of_blocks
from effgpu.measuring.timing import cap_seconds, window
from effgpu.measuring.torch_internals import _nn, counters
from effgpu.measuring.turns import OF_SCRIPTS, orders
from effgpu.measuring.variants import uncompiled
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.optimizers import describe_optimizer
from effgpu.predicting.timeline import COPY, NOTHING, Range

_SECONDS = 2 * FEWEST_BLOCKS * OF_SCRIPTS.shortest["cuda"]  # of each change
_CALLING = 5  # steps whose calls are timed
_TRIES = 4  # of a turn that something else was part of, such as an evaluation
_DISTURBED = "each turn holds an evaluation, a checkpoint or the start of an epoch: the script makes one so often"


@dataclass
class Supply:
    """What gives the step its batches, and how that is changed.

    `same` and `on_gpu` are context managers: inside, the step gets the same batch again, or one that is on the GPU.
    `batch` has the tensors whose copies to the GPU count, None for all. `settle` is called after turns with the same
    batch, while workers have loaded ahead: it returns how many steps the next turn has to lead in with. `disturbed`
    says whether there was an evaluation or the like since it was asked last. `last` gives the tensors of the last step.
    `handing` says what `Observed.handing` is: it times the loader.
    """

    loader: object
    same: Callable[[], contextlib.AbstractContextManager]
    on_gpu: Callable[[], contextlib.AbstractContextManager]
    last: Callable[[], list[torch.Tensor]]
    settle: Callable[[], int] = lambda: 0
    disturbed: Callable[[], bool] = lambda: False
    handing: Callable[[], float] = lambda: 0.0
    batch: tuple | None = None
    fixed: tuple[str, ...] = ()  # what cannot be changed here
    loop: tuple[CodeType, ...] = (drive.__code__,)


def observe(supply: Supply) -> Plan:
    """Let two steps pass, the second of them observed, and where code is compiled for shapes eight more."""
    loader = describe_loader(supply.loader)
    with supply.same():
        graphs = _count_graphs()
        yield 1
        compiles = _count_graphs() > graphs
        observer = Observer(supply.batch, pinned=loader["pinned"], loop=supply.loop)
        with uncompiled(), observer.looking():
            yield 1
    padding, padding_pairs = padding_shares(observer.tokens)
    seen = Observed(
        events=tuple(observer.events),
        **loader,
        padding=padding,
        padding_pairs=padding_pairs,
        unused=observer.graphs.unused(),
        compiled=compiles,
        optimizers=tuple(describe_optimizer(optimizer) for optimizer in observer.optimizers),
        stepped=observer.stepped,
        time_first=observer.time_first,
        multiplied=observer.multiplied,
        notes=observer.graphs.tell(),
    )
    if compiles:
        seen.compiling, seen.shapes = yield from _time_compiling(supply)
    return seen, observer.optimizers


def _count_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    return counters["stats"]["unique_graphs"] if "torch._dynamo" in sys.modules else 0


def _time_compiling(supply: Supply) -> Plan:
    """Seconds per step that compiling takes beyond a step's own time, over the next batches; and how many shapes."""
    seconds, compiled, shapes = [], [], set()
    for _ in range(BATCHES):
        graphs, began = _count_graphs(), time.perf_counter()
        yield 1
        seconds.append(time.perf_counter() - began)
        compiled.append(_count_graphs() > graphs)
        shapes.add(tuple(tensor.shape for tensor in supply.last()))
    own = min(seconds)  # where every step compiles, this holds some of it: the result is then too low, never too high
    return sum(each - own for each, slow in zip(seconds, compiled) if slow) / len(seconds), len(shapes)


@contextlib.contextmanager
def emptied(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, a step of these optimizers calls its closure, if it has one, and does nothing else.

    Where something puts the true step back, as accelerate does in fp16, it finds no gradients.
    """

    def do_nothing(closure: Callable | None = None, **_: object):
        return closure() if closure else None

    def drop_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            own = vars(optimizer)  # of which some has a step, such as one that a scheduler has put there
            if "step" in own:
                stack.callback(own.__setitem__, "step", own["step"])
            else:
                stack.callback(own.pop, "step", None)
            stack.callback(optimizer.register_step_pre_hook(drop_gradients).remove)
            optimizer.step = do_nothing
        yield


@contextlib.contextmanager
def in_16_bits(gpu: Gpu) -> Iterator[None]:
    """Inside, autocast is on, in the 16-bit format that a GPU is fast in; a step cannot switch it off.

    It remembers no weights in 16 bits, as it would beyond their update. The binary cross entropy, which autocast
    refuses, runs without it.
    """
    kind = torch.autocast
    with kind("cuda", torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16, cache_enabled=False):
        others = [
            (kind, "__enter__", _enter_nothing),
            (kind, "__exit__", lambda *_: None),
            (_nn, "binary_cross_entropy", partial(_in_full, _nn.binary_cross_entropy)),
        ]
        with replaced(others):
            yield


def _enter_nothing(autocast: torch.autocast) -> torch.autocast:
    return autocast


def are_16_bits_on() -> bool:
    """Whether it is inside of `in_16_bits`."""
    return torch.autocast.__enter__ is _enter_nothing


def tell_failure(error: Exception) -> str:
    """A note: a step failed in 16 bits, as which nobody has written it."""
    line = find_line(error)
    where = f" ({line})" if line else ""
    return f"in 16 bits the step fails, so what precision saves was not looked at: {describe_error(error)}{where}"


def _in_full(function: Callable, *args: object) -> torch.Tensor:
    """What a function gives without autocast, of tensors in 32 bits."""
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cuda", "cpu")}
    try:
        for device in enabled:
            torch.set_autocast_enabled(device, False)
        return function(*(each.float() if isinstance(each, torch.Tensor) else each for each in args))
    finally:
        for device, on in enabled.items():
            torch.set_autocast_enabled(device, on)


def time_turns(seen: Observed, optimizers: Iterable, supply: Supply, target: Gpu) -> Plan:
    """Time the step on this GPU, as it is and with each change, in turns; then with pairs of changes.

    Fills in what was measured. A step that compiles would do so again in the mode that looks for its first wait.
    """

    def take_turn(names: frozenset[str], steps: int, lead: int) -> Plan:
        supply.disturbed()
        for _ in range(_TRIES):
            with _changed(names, optimizers, supply, target):
                took = yield from window(steps, lead=lead)
            if not supply.disturbed():
                break
        else:
            seen.notes = tuple(dict.fromkeys([*seen.notes, _DISTURBED]))
        return took

    def compare(changes: list[frozenset[str]]) -> Plan:
        turns: dict[frozenset[str], list[float]] = {names: [] for names in (frozenset(), *changes)}
        more = 0
        for order in orders(list(turns), FEWEST_BLOCKS):
            for names in order:
                turns[names].append((yield from take_turn(names, count, lead + more)))
                more = supply.settle() if LOADING in names else 0
        blocks = {names: list(map(statistics.fmean, zip(each[::2], each[1::2]))) for names, each in turns.items()}
        unchanged = blocks.pop(frozenset())
        seen.step = seen.step or interval_of_blocks(unchanged)
        return {names: [was - now for was, now in zip(unchanged, each)] for names, each in blocks.items()}

    pace = yield from take_turn(frozenset(), 3, 1)
    seconds = cap_seconds(_SECONDS)
    count = max(1, seen.workers, round(seconds / (2 * FEWEST_BLOCKS) / max(pace, 1e-6)))
    lead = 1 if seconds < _SECONDS else max(1, math.ceil(OF_SCRIPTS.lead["cuda"] / max(pace, 1e-6)))
    names = [PRECISION] + [TF32] * (target.capability >= (8, 0)) + [OPTIMIZER] * bool(optimizers)
    names += [LOADING] * seen.has_loader + [COPYING] * any(event.kind == COPY for event in seen.events)
    alone = [frozenset({name}) for name in names if name not in supply.fixed]
    fed = feeding(frozenset().union(*alone))
    has_reads = any(map(reads, seen.events))
    if not (has_reads and seen.compiled):
        with _changed(fed, optimizers, supply, target):
            seen.calls = yield from _time_calls(has_reads)
    savings = yield from compare([*alone, fed] if fed else alone)
    if pairs := _choose_pairs(alone, fed, _intervals_together(savings)):
        savings |= yield from compare(pairs)
    seen.saved = _intervals_together(savings)
    yield from _note_slowness(seen)
    if seen.saved.get(frozenset({LOADING}), NOTHING)[0] >= THRESHOLD * seen.step[0]:
        seen.handing = supply.handing()


def _intervals_together(savings: dict[frozenset[str], list[float]]) -> dict[frozenset[str], Range]:
    """The interval of what each change saves in the blocks; all of them hold in `CONFIDENCE` of all diagnoses."""
    confidence = divide_confidence(len(savings))
    return {names: interval_of_blocks(each, confidence) for names, each in savings.items()}


@contextlib.contextmanager
def _changed(names: frozenset[str], optimizers: Iterable, supply: Supply, target: Gpu) -> Iterator[None]:
    """Inside, the step has the changes of these names."""
    with contextlib.ExitStack() as stack:
        for name, change in (
            (OPTIMIZER, lambda: emptied(optimizers)),
            (PRECISION, lambda: in_16_bits(target)),
            (TF32, lambda: multiplying_as("tf32")),
            (LOADING, supply.same),
            (COPYING, supply.on_gpu),
        ):
            if name in names:
                stack.enter_context(change())
        yield


def _choose_pairs(
    alone: list[frozenset[str]], fed: frozenset[str], saved: dict[frozenset[str], Range]
) -> list[frozenset[str]]:
    """The pairs to try: the two that save most, the first of them with the loader, the loader with 16 bits."""
    additive = [name for name in alone if TF32 not in name]  # under autocast, TF32 has nothing left to do
    ranked = sorted(additive, key=lambda name: -saved[name][0])
    pairs = [frozenset().union(*ranked[:2])]
    if LOADING in fed:
        pairs.append(ranked[0] | {LOADING})
        if frozenset({PRECISION}) in alone:
            pairs.append(frozenset({LOADING, PRECISION}))
    return [pair for pair in dict.fromkeys(pairs) if len(pair) == 2 and pair not in saved]


def _note_slowness(seen: Observed) -> Plan:
    """Fill in, over some steps, what slows this GPU down itself."""
    clocks = []
    for _ in range(_CALLING):
        yield 1
        clocks.append(power.read_clock())  # while the GPU works
    seen.warnings += (*power.tell_slow(list(filter(None, clocks))), *tell_spilled())


def _time_calls(has_reads: bool) -> Plan:
    """Seconds that the CPU takes to call a step's operations, up to the first of its reads: the median of five steps.

    Each finds the GPU idle. So the CPU does not wait for a place in its queue, which has room for 1,024 kernels.
    """
    seconds = []
    for _ in range(_CALLING):
        torch.cuda.synchronize()
        with UntilRead(time.perf_counter) if has_reads else contextlib.nullcontext() as until:
            began = time.perf_counter()
            yield 1
            ended = time.perf_counter()
        seconds.append((until.at if until and until.at is not None else ended) - began)
    return statistics.median(seconds)
