"""`doctor`: what holds a training step back, as a list of what each change would save at most, the most first."""

import contextlib
import copy
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from effgpu import units
from effgpu.attaching.sites import Site
from effgpu.diagnosing.diagnosis import (
    COMPILING,
    COPYING,
    LAUNCHING,
    LOADING,
    OPTIMIZER,
    PADDING,
    PRECISION,
    TF32,
    VALIDATION,
    WAITS,
    Diagnosis,
    Finding,
)
from effgpu.diagnosing.replay import Range, Scene, Walk, as_tf32, in_16_bits, saved, walk_step
from effgpu.diagnosing.watch import COPY, KERNEL, READ, Event, UntilRead, Watch, call, tensors_in
from effgpu.measuring.device import (
    describe,
    find_device,
    gc_frozen,
    is_out_of_memory,
    multiplying_as,
    random_states_kept,
)
from effgpu.measuring.intervals import FEWEST_BLOCKS, interval_of_blocks
from effgpu.measuring.timing import cap_seconds, time_turn
from effgpu.measuring.torch_internals import counters
from effgpu.measuring.turns import take_blocks
from effgpu.measuring.variants import Variant, check_worked, is_function, run_variant, uncompiled
from effgpu.predicting.gpus import UNKNOWN_CONTEXT, Gpu, find_gpu
from effgpu.predicting.prediction import Largest, largest

DEFAULT_GPU = "T4"
_SECONDS = 3.0  # of each change on a GPU, in 30 turns: its clock needs 0.1 s to settle
_LEAD = 0.05  # seconds of a turn that do not count: the clock is still that of the change before
_CALLING = 5  # steps whose calls are timed
_BEHIND = 0.85  # of a step: a CPU whose calls take less is ahead of the GPU, which then never waits for it
_BATCHES = 8  # whose shapes are looked at
_AHEAD = 2  # batches that each worker of a DataLoader loads ahead, where prefetch_factor does not say


def doctor(variant: Variant, loader: object = None, gpu: "str | Gpu | None" = None) -> Diagnosis:
    """Say what holds a training step back: what each change would save at most, before it is made.

    `variant` is a function that builds everything and returns one training step. With a `loader`, the step takes one
    batch, as in `for batch in loader: step(batch)`. The loader is a DataLoader, a list of batches, or a function that
    returns one. Without it, the step takes nothing, and data loading and copies are not looked at.

    On a GPU, the step runs as it is and with one thing changed, in turns: with the same batch again, with a batch that
    is on the GPU, with optimizers whose step is empty, under autocast, with TF32. All else is predicted, as is
    everything for a `gpu` that is named or, on a machine without one, a T4: then the loader is measured here, the step
    is watched here for two calls, and its time is replayed from a walk on fake tensors. Each saving is a ceiling.

    The step is called often: on a GPU for about 6 s for each of seven changes. What it trains is thrown away.

    Raises ValueError for a GPU whose speed is not known, TypeError for a step that does not take what it is given,
    RuntimeError for a loader that ends and does not start anew and for a step that cannot be predicted, with the
    reason; torch.OutOfMemoryError if the step does not fit this device. What the step raises is raised, with the number
    of the call.
    """
    measured = gpu is None and find_device().type == "cuda"
    target = _this_gpu() if measured else find_gpu(DEFAULT_GPU if gpu is None else gpu)
    if target.bandwidth is None and not measured:
        raise ValueError(f"gpu: expected a GPU whose speed is known, such as T4, got {target.name}")
    with gc_frozen(), random_states_kept():
        feed = _Feed(loader)
        seen = run_variant(variant, partial(_examine, feed=feed, target=target if measured else None))
        if target.bandwidth is None:
            return _conclude(target, feed, seen, (), f"{target.name} is not in the table of GPUs")
        try:
            walk = partial(walk_step, variant, feed.batch, target, pinned=feed.pinned)
            walks = walk(), walk(halve=True)
            batches = _largest_batch(variant, feed.batch, target)
        except RuntimeError as error:
            if not measured:
                error.add_note(f"doctor: measured all the same: {_tell_measured(feed, seen)}")
                raise
            return _conclude(target, feed, seen, (), str(error))
    return replace(_conclude(target, feed, seen, walks), batches=batches)


def _largest_batch(variant: Variant, batch: tuple, gpu: Gpu) -> Largest | None:
    """How many times the batch fits; None without one, and for a step that takes no other size than this one."""

    def variant_of(times: int) -> Variant:
        larger = change_tensors(batch, lambda tensor: _repeat(tensor, times))
        return lambda: partial(call, variant(), larger)

    with contextlib.suppress(Exception):  # of the step: any error says that it takes no other size
        return largest(variant_of, gpu) if batch else None


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """A tensor of so many times as many samples: only its shape counts, so nothing is written into it."""
    return tensor.new_empty(times * len(tensor), *tensor.shape[1:], device="cpu") if tensor.dim() else tensor


def _this_gpu() -> Gpu:
    """The current GPU, without its speed where it has no line in the table."""
    device = describe()
    try:
        return find_gpu(device.name)
    except ValueError:
        return Gpu(device.name, device.memory, device.capability or (8, 0), UNKNOWN_CONTEXT)


def _tell_measured(feed: "_Feed", seen: "_Seen") -> str:
    """What was measured of a step that cannot be predicted, in one line."""
    told = [f"the loader takes {units.format_seconds(seen.loading[0])} per batch"] * (feed.loader is not None)
    told += [f"the CPU waits at {event.site}" for event in seen.watch.events if event.kind == READ]
    told += [f"{seen.padding:.0%} of the tokens are padding"] * bool(seen.padding)
    return "; ".join(dict.fromkeys(told)) or "nothing"


class _Feed:
    """The loader's batches, as the arguments of a step: a tuple of one batch, or an empty one without a loader."""

    def __init__(self, loader: object):
        self._make = loader if is_function(loader) and not isinstance(loader, Iterable) else lambda: loader
        self._batches: Iterator | None = None
        self._served = 0
        self.loader = self._make()
        if self.loader is not None and not isinstance(self.loader, Iterable):
            raise TypeError(f"loader: expected batches that can be iterated over, got {type(self.loader).__name__}")
        self.workers = getattr(self.loader, "num_workers", 0)
        self.pinned = bool(getattr(self.loader, "pin_memory", False))
        self.batch = self.next()

    def next(self) -> tuple:
        """The next batch. The loader starts anew where it ends."""
        if self.loader is None:
            return ()
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                self._served += 1
                return (batch,)
            self.loader, self._batches = self._make(), None
        told = f"loader: it ended after {self._served} batches and does not start anew, and a diagnosis takes many"
        raise RuntimeError(f"{told}: give a DataLoader, a list, or a function that returns a new iterator")

    def drain(self) -> None:
        """Take what workers have loaded ahead while nobody waited."""
        ahead = getattr(self.loader, "prefetch_factor", None) or _AHEAD
        for _ in range(self.workers * (ahead + 1)):
            self.next()

    def measure(self) -> Range:
        """Seconds that the loader takes for a batch, with a 99 % interval."""
        if self.loader is None:
            return 0.0, 0.0, 0.0
        each = max(1, self.workers)
        self.next()  # the first one waits for workers to start
        self.drain()
        seconds = []
        for _ in range(FEWEST_BLOCKS):
            began = time.perf_counter()
            for _ in range(each):
                self.next()
            seconds.append((time.perf_counter() - began) / each)
        middle, low, high = interval_of_blocks(seconds)
        return middle, max(0.0, low), high

    def shapes(self) -> int:
        """How many shapes the next batches have."""
        return len({tuple(tensor.shape for tensor in tensors_in(self.next())) for _ in range(_BATCHES)})


@dataclass
class _Seen:
    """What was seen of the real step: `saved` by measured changes, and the step's own time, on a GPU."""

    watch: Watch
    padding: float = 0.0
    unused: dict[Site, int] = field(default_factory=dict)
    loading: Range = (0.0, 0.0, 0.0)
    compiling: float = 0.0
    shapes: int = 1
    step: Range | None = None
    calls: float | None = None  # seconds of the CPU's calls in a step that has its batch, up to its first wait
    saved: dict[frozenset[str], Range] = field(default_factory=dict)  # by what was changed together


class _Calls:
    """Calls the step, counts the calls, and says in an error which one failed."""

    def __init__(self, step: Callable, with_batch: bool):
        self._step, self._with_batch, self.made = step, with_batch, 0

    def __call__(self, batch: tuple) -> None:
        self.made += 1
        try:
            check_worked(call(self._step, batch))
        except Exception as error:
            if self.made == 1 and isinstance(error, TypeError) and error.__traceback__.tb_next.tb_next is None:
                takes = "one batch, as there is a loader" if self._with_batch else "nothing, as there is no loader"
                raise TypeError(f"step: expected one that takes {takes} ({error})") from error
            told = "ran out of memory" if is_out_of_memory(error) else "failed"
            error.add_note(f"doctor: the step {told} in call {self.made}. It has to bear being called often.")
            raise


def _examine(step: Callable, feed: _Feed, target: Gpu | None) -> _Seen:
    """Watch two calls of the step, and time the loader or, with a target, the changes that can be made here."""
    run = _Calls(step, feed.loader is not None)
    graphs = _count_graphs()
    run(feed.batch)
    compiles = _count_graphs() > graphs
    watch = Watch(feed.batch, pinned=feed.pinned)
    with uncompiled(), watch.looking():
        run(feed.batch)
    seen = _Seen(watch, padding_share(watch.tokens), watch.unused_graphs())
    if feed.loader is not None:
        seen.shapes = feed.shapes()
    if compiles:
        seen.compiling = _measure_compiling(run, feed)
    if target is None:
        seen.loading = feed.measure()
    else:
        _take_turns(run, feed, watch, target, seen, compiles)
    return seen


def _count_graphs() -> int:
    """How many graphs torch.compile has compiled in this process."""
    return counters["stats"]["unique_graphs"] if "torch._dynamo" in sys.modules else 0


def _measure_compiling(run: _Calls, feed: _Feed) -> float:
    """Seconds per step that compiling takes beyond a step's own time, over the next batches."""
    seconds, compiled = [], []
    for _ in range(_BATCHES):
        batch, graphs, began = feed.next(), _count_graphs(), time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - began)
        compiled.append(_count_graphs() > graphs)
    own = min(seconds)  # where every step compiles, this holds some of it: the result is then too low, never too high
    return sum(each - own for each, slow in zip(seconds, compiled) if slow) / len(seconds)


@contextlib.contextmanager
def emptied(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
    """Inside, a step of these optimizers calls its closure, if it has one, and does nothing else."""

    def do_nothing(closure: Callable | None = None, **_: object):
        return closure() if closure else None

    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if "step" in vars(optimizer):  # a scheduler's, for example
                stack.callback(setattr, optimizer, "step", optimizer.step)
            else:
                stack.callback(delattr, optimizer, "step")
            optimizer.step = do_nothing
        yield


def _time_calls(step: Callable[[], None], reads: bool) -> float:
    """Seconds that the CPU takes to call a step's operations, up to the first of its `reads`: the median of five steps.

    Each finds the GPU idle. So the CPU does not wait for a place in its queue, which has room for 1,024 kernels.
    """
    seconds = []
    for _ in range(_CALLING):
        torch.cuda.synchronize()
        with UntilRead(lambda: time.perf_counter()) if reads else contextlib.nullcontext() as until:
            began = time.perf_counter()
            step()
            ended = time.perf_counter()
        seconds.append((until.at if until and until.at is not None else ended) - began)
    return statistics.median(seconds)


def _take_turns(run: _Calls, feed: _Feed, watch: Watch, target: Gpu, seen: _Seen, compiles: bool) -> None:
    """Time the step on this GPU, as it is and with each change, in turns; then with the two changes that save most.

    A step that `compiles` would do so again in the mode that looks for its first wait.
    """
    device = find_device()
    on_gpu = change_tensors(feed.batch, lambda tensor: tensor.to(device))

    def change(names: frozenset[str], stack: contextlib.ExitStack) -> Callable[[], None]:
        """The step with these things changed."""
        if OPTIMIZER in names:
            stack.enter_context(emptied(watch.optimizers))
        if PRECISION in names:
            stack.enter_context(in_16_bits(target))
        if TF32 in names:
            stack.enter_context(multiplying_as("tf32"))

        def step() -> None:
            batch = feed.batch if LOADING in names else feed.next()
            run(on_gpu if COPYING in names else batch)

        return step

    def compare(changes: list[frozenset[str]]) -> dict[frozenset[str], Range]:
        labels = {" and ".join(sorted(names)): names for names in (frozenset(), *changes)}
        turns: dict[str, list[float]] = {label: [] for label in labels}

        def take_turn(label: str) -> None:
            with contextlib.ExitStack() as stack:
                turns[label].append(time_turn(change(labels[label], stack), count, lead=lead))
            if LOADING in labels[label]:
                feed.drain()

        take_blocks(lambda: list(labels), take_turn, lambda: [], target=1, seconds=1, blocks=FEWEST_BLOCKS)
        blocks = {label: list(map(statistics.fmean, zip(each[::2], each[1::2]))) for label, each in turns.items()}
        seen.step = seen.step or interval_of_blocks(blocks[""])
        return {
            names: interval_of_blocks([was - now for was, now in zip(blocks[""], blocks[label])])
            for label, names in labels.items()
            if names
        }

    with contextlib.ExitStack() as stack:
        pace = time_turn(change(frozenset(), stack), 3)
    seconds = cap_seconds(_SECONDS)
    count = max(1, feed.workers, round(seconds / (2 * FEWEST_BLOCKS) / max(pace, 1e-6)))
    lead = 1 if seconds < _SECONDS else max(1, math.ceil(_LEAD / max(pace, 1e-6)))
    names = [PRECISION] + [TF32] * _has_tf32(target) + [OPTIMIZER] * bool(watch.optimizers)
    names += [LOADING] * (feed.loader is not None) + [COPYING] * any(event.kind == COPY for event in watch.events)
    alone = [frozenset({name}) for name in names]
    reads = any(_reads(event) for event in watch.events)
    if not (reads and compiles):
        with contextlib.ExitStack() as stack:
            seen.calls = _time_calls(change(_feeding(names), stack), reads)
    seen.saved = compare([*alone, _feeding(names)])
    additive = [name for name in alone if TF32 not in name]  # under autocast, TF32 has nothing left to do
    best = frozenset().union(*sorted(additive, key=lambda name: -seen.saved[name][0])[:2])
    if best not in seen.saved:
        seen.saved |= compare([best])


def _has_tf32(gpu: Gpu) -> bool:
    return gpu.capability >= (8, 0)


def _feeding(names: Iterable[str]) -> frozenset[str]:
    """What there is to change of how the step gets its batch."""
    return frozenset(names) & {LOADING, COPYING}


def _conclude(target: Gpu, feed: _Feed, seen: _Seen, walks: tuple[Walk, ...], why: str = "") -> Diagnosis:
    """Rank what was measured, and what replays of the walked step say of the rest. `why` there are no walks."""
    alone = {name: saving for names, saving in seen.saved.items() if len(names) == 1 for name in names}
    examined = {name: Finding(name, *saving, measured=True) for name, saving in alone.items()}
    notes = [f"nothing is predicted: {why}"] if why else []
    if feed.loader is None:
        notes.append("data loading and copies were not looked at: give the loader, and let the step take a batch")
    scene, changes, walk = None, {}, walks[0] if walks else None
    if walk:
        scene = replace(walk.scene(target), load=seen.loading, workers=feed.workers, compiling=seen.compiling)
        changes = _changes(feed, seen, walks)
        for name in changes:
            before = scene
            if name == LAUNCHING:  # to blame where nothing else makes the CPU late
                for other in (WAITS, LOADING, COPYING, COMPILING):
                    before = changes[other](before) if other in changes else before
            after = changes[name](before)
            idle = _idle_seconds(seen, scene, changes[WAITS](scene), after) if name == LAUNCHING else None
            examined.setdefault(name, Finding(name, *(idle or saved(before, after))))
        notes += [f"assumed: {told}" for told in walk.prediction.assumptions]
        notes += [f"not known: {told}" for told in walk.prediction.unknown]
    events = walk.events if walk else tuple(seen.watch.events)
    ranked = sorted(examined.values(), key=lambda finding: -finding.seconds)
    ranked = [replace(finding, **_detail(finding.name, feed, seen, events)) for finding in ranked]
    result = Diagnosis(
        target.name,
        *(seen.step or scene.range()),
        measured=seen.step is not None,
        examined=tuple(ranked),
        memory=walk and walk.prediction,
        peak=walk.peak if walk else (),
        notes=tuple(notes),
    )
    known = [finding.name for finding in result.findings if finding.measured == result.measured]
    best = [name for name in known if name != TF32][:2]
    together = seen.saved.get(frozenset(best))
    if len(best) == 2 and not result.measured:
        both = scene
        for name in changes:  # in their order, as precision replaces all events
            both = changes[name](both) if name in best else both
        together = saved(scene, both)
    if len(best) < 2 or not together:
        return result
    return replace(result, together=Finding(" and ".join(best), *together, measured=result.measured))


def _idle_seconds(seen: _Seen, scene: Scene, unread: Scene, work: Scene) -> Range | None:
    """Seconds that the GPU idles in a measured step that has its batch: the wall clock, less its predicted work.

    Less what the step's reads take by prediction (the `scene` without them is `unread`), and what compiling takes, too:
    they are other findings. Nothing where the CPU's calls take less than is left: then the GPU is busy, however far off
    its predicted work is. None without a measured step.
    """
    if not seen.step:
        return None
    fed = seen.saved.get(_feeding(frozenset().union(*seen.saved)), (0.0, 0.0, 0.0))
    busy, waits = work.range(), saved(scene, unread)
    left = seen.step[0] - fed[0] - waits[0] - seen.compiling
    calls = _all_calls(seen, scene.events)
    if calls is not None and calls < _BEHIND * left:
        return 0.0, 0.0, 0.0
    ends = (1, 2), (2, 1)
    idle = [
        seen.step[0] - fed[0] - busy[0] - waits[0],
        *(seen.step[low] - fed[high] - busy[high] - waits[high] for low, high in ends),
    ]
    return tuple(max(0.0, seconds - seen.compiling) for seconds in idle)


def _all_calls(seen: _Seen, events: tuple[Event, ...]) -> float | None:
    """Seconds of the CPU's calls in a step: those up to its first wait were timed, and the others take as long each."""
    first = next((number for number, event in enumerate(events) if _reads(event)), None)
    timed, everything = (sum(event.calls for event in each) for each in (events[:first], events))
    return seen.calls * everything / timed if seen.calls is not None and timed else None


def _reads(event: Event) -> bool:
    """Whether the CPU waits here for a value of the GPU's."""
    return event.waits and event.kind != COPY


def _concerns(name: str, event: Event, seen: _Seen) -> bool:
    """Whether an event is left out where this thing is changed."""
    if name == VALIDATION:
        return event.kind == KERNEL and event.site in seen.unused
    return event.optimizing if name == OPTIMIZER else event.kind == {WAITS: READ, COPYING: COPY}.get(name)


def _changes(feed: _Feed, seen: _Seen, walks: tuple[Walk, ...]) -> dict[str, Callable[[Scene], Scene]]:
    """What can be changed in a replay, by name; precision first, as it replaces all events."""

    def without(name: str) -> Callable[[Scene], Scene]:
        return lambda scene: replace(scene, events=tuple(e for e in scene.events if not _concerns(name, e, seen)))

    def pack(scene: Scene) -> Scene:
        return replace(scene, events=tuple(event._replace(scale=1 - seen.padding) for event in scene.events))

    changes = {PRECISION: lambda scene: replace(scene, events=walks[1].events)}
    if _has_tf32(walks[0].prediction.gpus[0]):
        changes[TF32] = lambda scene: replace(scene, events=tuple(map(as_tf32, scene.events)))
    changes |= {name: without(name) for name in (OPTIMIZER, WAITS, COPYING, VALIDATION)}
    changes[LAUNCHING] = lambda scene: replace(scene, launch=0.0)
    changes[LOADING] = lambda scene: replace(scene, load=(0.0, 0.0, 0.0))
    changes[PADDING] = pack
    changes[COMPILING] = lambda scene: replace(scene, compiling=0.0)
    unseen = () if feed.loader is not None else (LOADING, COPYING)
    return {name: change for name, change in changes.items() if name not in unseen}


def _detail(name: str, feed: _Feed, seen: _Seen, events: tuple[Event, ...]) -> dict[str, object]:
    """The lines that a finding is about, the most frequent first, and what was seen."""
    concerned = [event for event in events if _concerns(name, event, seen)]
    size = units.format_bytes(sum(event.bytes for event in concerned))
    kept = units.format_bytes(sum(seen.unused.values()))
    notes = {
        LOADING: f"{units.format_seconds(seen.loading[0])} per batch, measured here, num_workers={feed.workers}"
        * (seen.step is None),
        COPYING: f"{size} from {'pinned' if feed.pinned else 'ordinary'} memory",
        WAITS: f"the CPU waits {len(concerned)} times in a step",
        VALIDATION: f"{kept} are kept here for a backward pass that never comes",
        PADDING: f"{seen.padding:.0%} of the tokens",
        COMPILING: f"measured here: {_BATCHES} batches of {seen.shapes} shapes",
    }
    lines = Counter(event.site for event in concerned if event.site)
    return {"note": notes.get(name, ""), "lines": tuple(line for line, _ in lines.most_common())}


def padding_share(looked_up: list[torch.Tensor]) -> float:
    """The share of the tokens that the step looks up that are padding.

    Padding is the token that most texts end or begin with, as often as it stands there in a row.
    """
    padded = total = 0
    for tokens in looked_up:
        if tokens.dim() != 2 or len(tokens) < 2 or (tokens == tokens[0, 0]).all():
            continue
        runs = []
        for row in (tokens, tokens.flip(1)):
            pad = row[:, 0].mode().values
            runs.append(int((row == pad).cumprod(1).sum()))
        padded, total = padded + max(runs), total + tokens.numel()
    return padded / total if total else 0.0


def change_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """A batch with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value)  # a BatchEncoding stays one
        for key, item in value.items():
            changed[key] = change_tensors(item, change)
        return changed
    if isinstance(value, tuple | list):
        items = [change_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
