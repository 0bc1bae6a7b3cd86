"""What can hold a step back: each cause with its advice, its lesson, its events, and the step without it.

To add a cause, add a row to `CAUSES`.
"""

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

from effgpu.attaching.sites import Site
from effgpu.diagnosing.lists import Updates, in_lists
from effgpu.predicting import kinds
from effgpu.predicting.kinds import PRODUCT, Kernel
from effgpu.predicting.timeline import (
    BACKWARD,
    BATCHED,
    COPY,
    FORWARD,
    KERNEL,
    NOTHING,
    OUTSIDE_ATTENTION,
    READ,
    Event,
    Range,
    Timeline,
    looks_for_nan,
)
from effgpu.units import format_bytes, format_seconds

LOADING, COPYING, OPTIMIZER, VALIDATION = "data loading", "copies to the GPU", "optimizer", "validation"
WAITS, LAUNCHING, PRECISION, PADDING, COMPILING = "hidden waits", "launching", "precision", "padding", "recompiling"
TF32, ATTENTION, EVALUATING = "TF32", "plain attention", "evaluation in each step"
UPDATES, UNTRAINED, DOUBLE = "loops over weights", "unused gradients", "double precision"
ANOMALY, CHECKPOINTS = "anomaly mode", "checkpointing"
BATCHES = 8  # whose shapes are looked at
_MOST = 0.5  # a share of the calls
_PIECES = 16  # copies, one after the other: of a batch that was taken apart


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
    events in 16 bits, `frozen` those without the gradients of so many `untrained` weights, which no optimizer has,
    `frozen_halved` those with both changes. `loop` is the one that calls most of its forward pass, `updates` are those
    over weights. `trainer` is the library that makes the steps, one of `_AS_16_BITS`, or "". `padding` is the share of
    the tokens that are padding, `padding_pairs` that of the pairs of a text's tokens that hold some.
    """

    events: tuple[Event, ...] = ()
    halved: tuple[Event, ...] = ()
    frozen: tuple[Event, ...] = ()
    frozen_halved: tuple[Event, ...] = ()
    untrained: int = 0
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


@dataclass(frozen=True)
class Cause:
    """`advice` are the lines to change, for what was seen. `concerns` says whether an event is one of the cause's.

    `without` is the step's timeline without the cause; where it is not given, its events are left out. `note` says
    what was seen, from the events that it concerns. `place` gives an event's line, where it is one to change.
    """

    name: str
    lesson: str
    advice: Callable[[Observed], str]
    concerns: Callable[[Event, Observed], bool] = lambda event, seen: False
    without: Callable[[Timeline, Observed], Timeline] | None = None
    note: Callable[[Observed, list[Event]], str] = lambda seen, events: ""
    place: Callable[[Event], Site | None] = lambda event: event.site

    def change(self, timeline: Timeline, seen: Observed) -> Timeline:
        """The step's timeline without the cause."""
        if self.without:
            return self.without(timeline, seen)
        return replace(timeline, events=tuple(e for e in timeline.events if not self.concerns(e, seen)))


def _load_faster(seen: Observed) -> str:
    if sum(seen.working.values()) > seen.loading[0]:
        site = next(iter(seen.working))
        line = site.place
        if any(event.kind == READ and event.site == site for event in seen.events):  # no worker has what the GPU made
            return f"what {line} computes, every 100 steps, or on the GPU"
        whose = "the" if seen.has_loader else "a"
        return (
            f"what {line} computes, in {whose} DataLoader's workers, as its data set's or collate_fn's, or on the GPU"
        )
    cores = os.cpu_count() or 1
    if not seen.has_loader:
        return "DataLoader(..., num_workers=2), so that batches are made while the GPU works"
    if seen.remade:
        return "one DataLoader for all epochs, with persistent_workers=True: each new one starts its workers anew"
    at_once = "whole batches from the data set itself, with batch_size=None" if seen.streams else _AT_ONCE
    if seen.handing and seen.workers:
        return f"fewer bytes, such as uint8, to hand over; {at_once}, without workers"
    if seen.handing:  # a loader that takes longer may read and decode: nothing tells
        files = "; where each sample is read or decoded: fewer bytes, such as uint8, to hand over, and num_workers=2"
        return at_once + files * (seen.handing < seen.loading[0])
    if seen.trainer == "transformers" and not seen.workers:
        return "TrainingArguments(dataloader_num_workers=2, dataloader_persistent_workers=True)"
    if seen.workers >= 2 * cores:
        return "less work per sample: decode, resize or tokenise once, before the training; augment batches on the GPU"
    keep = "" if seen.persistent else ", persistent_workers=True"
    return f"DataLoader(..., num_workers={max(2, 2 * seen.workers)}{keep})"


def _copy_faster(seen: Observed) -> str:
    if _longest_run(seen.events) >= _PIECES:
        return "one copy of the whole batch: copy it before it is taken apart, or stack its parts on the CPU"
    waiting = [event for event in seen.events if event.kind == COPY and event.waits]
    if not waiting:
        return "fewer bytes: copy uint8 or 16 bits, and convert on the GPU"
    pinned = all(event.pinned for event in waiting)
    if not pinned and seen.pinned and all(event.evaluating for event in waiting if not event.pinned):
        return "DataLoader(..., pin_memory=True), of the evaluation, too, and .to(device, non_blocking=True)"
    if not pinned and seen.pinned:  # so what is copied is not what the loader gave
        return "what the script makes of the loader's batch, made on the GPU, or in the data set or collate_fn"
    # Not tensor.pin_memory() in the loop: it copies, too, and while the step waits
    # (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
    first = "" if pinned or seen.has_loader else "all data on the GPU before the loop, if it fits; or "
    changes = [] if pinned else ["DataLoader(..., pin_memory=True)"]
    changes += [] if all(event.non_blocking for event in waiting) else [".to(device, non_blocking=True)"]
    return first + " and ".join(changes)


def _longest_run(events: Iterable[Event]) -> int:
    """The most copies of one line and one size between two kernels; 0 where no kernels were seen."""
    longest, runs, kernels = 0, Counter(), False
    for event in events:
        if event.kernels:
            runs.clear()
            kernels = True
        elif event.kind == COPY:
            runs[event.site, event.bytes] += 1
            longest = max(longest, runs[event.site, event.bytes])
    return longest * kernels


def _update_faster(seen: Observed) -> str:
    fewer, each = "fewer updates: accumulate gradients over larger batches", dict.fromkeys(seen.optimizers)
    if len(each) != 1:
        return fewer
    ((name, fused),) = each
    if fused is None:
        return f"{fewer}; or torch.compile the step of {name}, or let it take weights of equal shape in one batch"
    return fewer if fused else f"{name}(..., fused=True), or {fewer}"


def _tell_update(seen: Observed, events: list[Event]) -> str:
    """Whose step takes longest, where there are several."""
    if len(names := dict.fromkeys(name for name, _ in seen.optimizers)) > 1:
        return f"which takes longest is not known: {', '.join(names)}"
    several = len({event.optimizer for event in events}) > 1
    return f"the step of {seen.optimizers[0][0]} takes longest" if several else ""


_KEEP = "keep the value on the GPU, loss.detach(), and read it every 100 steps"
_CHOOSE = "torch.where(mask, tensor, 0) in place of tensor[mask] and nonzero(): a known size needs no wait"
_OF_LIBRARY = "the library reads there: an option of it, if it has one; a larger batch waits as often for more work"
_NEEDLESS = {
    "synchronize": "no synchronize() in the loop: only a stopwatch needs it",
    "empty_cache": "no empty_cache() in the loop: PyTorch gives memory back by itself before it runs out",
}


def _read_less(seen: Observed) -> str:
    sites = [event.site for event in seen.events if event.kind == READ and event.site]
    filters = [(site.inside.rpartition(":")[0] or site.file).endswith(_TRAINER) for site in sites]
    if any(filters) and all(filter or site.inside for filter, site in zip(filters, sites)):  # libraries' reads alone
        return "TrainingArguments(logging_nan_inf_filter=False): else the Trainer looks at the loss of each step"
    needless = {site: [each for each in _NEEDLESS if f"{each}(" in site.code] for site in sites}
    chosen = {
        event.site for before, event in itertools.pairwise(seen.events) if event.kind == READ and _chooses(before)
    }
    others = [site for site in sites if site not in chosen and not needless[site]]
    read = [_KEEP] * (not sites or bool(others))
    if sites and all(site.inside for site in sites):
        read = [_OF_LIBRARY] * (not all(needless.values()))
    elif chosen:
        read.insert(0 if 2 * len(others) < len(sites) else 1, _CHOOSE)
    return "; ".join([*read, *dict.fromkeys(_NEEDLESS[each] for calls in needless.values() for each in calls)])


def _chooses(event: Event) -> bool:
    """Whether what it finds by a mask has a size that the CPU reads next."""
    return event.kind == KERNEL and _names(event, ("nonzero",))


def _launch_less(seen: Observed) -> str:
    if _updating_share(seen.events) > _MOST:
        return _update_faster(seen)
    if loop := seen.loop:
        return f"one call for all {loop.rounds} rounds of the loop at {loop.site.place}, if none needs the one before"
    return 'a larger batch, or torch.compile(model, mode="reduce-overhead")' if seen.compiled else _COMPILE


def _tell_launching(seen: Observed, events: list[Event]) -> str:
    share = _updating_share(seen.events)
    if share > _MOST:
        return f"{share:.0%} of the CPU's calls are in the optimizer's step"
    loop = seen.loop
    return f"{loop.share:.0%} of the forward pass's calls are in a loop of {loop.rounds} rounds" if loop else ""


def _launch_nothing(timeline: Timeline, seen: Observed) -> Timeline:
    """The CPU needs no time to call; and where one call does for all rounds of a loop, no small kernel has a floor."""
    return replace(timeline, launch=0.0, events=tuple(map(_join, timeline.events)) if seen.loop else timeline.events)


def _join(event: Event) -> Event:
    """The event as a part of a larger one, unless it is the optimizer's."""
    return event if event.optimizing else event._replace(kernels=tuple(k._replace(launches=0) for k in event.kernels))


def _updating_share(events: Iterable[Event]) -> float:
    """The share of the CPU's calls that are in an optimizer's step."""
    calls = {True: 0.0, False: 0.0}
    for event in events:
        calls[event.optimizing] += event.calls
    return calls[True] / max(1.0, sum(calls.values()))


def _halve(seen: Observed) -> str:
    now, then = map(_formats, (seen.events, seen.halved))
    if "bf16" in now - then:
        return "fp16 with a GradScaler (the Trainer's fp16=True): this GPU has no tensor cores for bf16"
    if now & {"fp16", "bf16"}:
        return "what autocast does not reach: move the loss and all forward passes into it"
    if seen.trainer:
        return _AS_16_BITS[seen.trainer].format(next(iter(then & {"fp16", "bf16"}), "bf16")).replace("fp16-", "16-")
    around = "with torch.autocast(...): around the forward pass and the loss; fp16 needs a GradScaler"
    refused = any(_names(event, ("binary_cross_entropy",)) for event in seen.events)
    return around + ", and BCELoss to be BCEWithLogitsLoss" * refused


def _formats(events: Iterable[Event]) -> set[str]:
    """In which numbers are multiplied."""
    return {kernel.format for event in events for kernel in event.kernels if kernel.product}


def _freeze(timeline: Timeline, seen: Observed) -> Timeline:
    """Without the gradients that no optimizer uses; in 16 bits, where the timeline is."""
    return replace(timeline, events=seen.frozen_halved if timeline.events is seen.halved else seen.frozen)


def _train_alone(timeline: Timeline, seen: Observed) -> Timeline:
    """Without the evaluation, and what loading takes for it."""
    load = tuple(max(0.0, whole - part) for whole, part in zip(timeline.load, seen.evaluating))
    return replace(timeline, events=tuple(e for e in timeline.events if not e.evaluating), load=load)


_AS_16_BITS = {
    "transformers": "TrainingArguments({}=True)",
    "lightning": 'Trainer(precision="{}-mixed")',
    "accelerate": 'Accelerator(mixed_precision="{}")',
}


def find_trainer() -> str:
    """The library that makes the step which ends here, the first of `_AS_16_BITS` whose code runs; "" if none does."""
    frame, files = sys._getframe(1), []
    while frame:
        files.append(Path(frame.f_code.co_filename).as_posix())
        frame = frame.f_back
    return next((name for name, parts in _LOOPS.items() if any(part in file for part in parts for file in files)), "")


_AT_ONCE = "whole batches of what is in memory: tensors[rows] for rows in torch.randperm(len(tensors)).split(size)"
_TRAINER = os.path.join("transformers", "trainer.py")
_LOOPS = {
    "transformers": ("transformers/trainer.py",),
    "lightning": ("lightning/pytorch/loops/", "pytorch_lightning/loops/"),
    "accelerate": ("accelerate/optimizer.py",),
}
_COMPILE = "a larger batch, or torch.compile(model)"


def _pack(timeline: Timeline, seen: Observed) -> Timeline:
    """The GPU works on fewer tokens, and attention on fewer pairs of them.

    The CPU calls as many operations, and the optimizer updates as many weights.
    """
    attention = set().union(*_find_attention(timeline.events))

    def pack(place: int, event: Event) -> Event:
        pairs = place in attention or any(kernel.kind == kinds.ATTENTION for kernel in event.kernels)
        return event._replace(scale=1 - (seen.padding_pairs if pairs else seen.padding))

    events = enumerate(timeline.events)
    kept = (event if event.optimizing or event.packed else pack(place, event) for place, event in events)
    return replace(timeline, events=tuple(kept))


def _as_tf32(event: Event) -> Event:
    """The event, with its products of fp32 tensors computed in TF32."""
    kernels = [
        kernel._replace(format="tf32") if (kernel.kind, kernel.format) == (PRODUCT, "fp32") else kernel
        for kernel in event.kernels
    ]
    return event._replace(kernels=tuple(kernels))


_SINGLE = 64  # bytes: a kernel of so few is of single numbers, such as a GradScaler's scale


def is_double(event: Event) -> bool:
    """Whether the GPU computes with many numbers in 64 bits."""
    return any(kernel.format == "fp64" and kernel.bytes > _SINGLE for kernel in event.kernels)


def _as_fp32(event: Event) -> Event:
    """The event, with numbers in 32 bits in place of 64."""
    kernels = (
        kernel._replace(format="fp32", bytes=kernel.bytes // 2) if kernel.format == "fp64" else kernel
        for kernel in event.kernels
    )
    return event._replace(kernels=tuple(kernels))


def _look_for_no_nan(timeline: Timeline, seen: Observed) -> Timeline:
    """Without what anomaly mode does: isnan, whether any is true, and the read of that."""
    looks = (place for place, event in enumerate(timeline.events) if looks_for_nan(event))
    left_out = {near for place in looks for near in (place - 1, place, place + 1)}
    return replace(timeline, events=tuple(e for place, e in enumerate(timeline.events) if place not in left_out))


_SOFTMAX = ("_softmax", "_softmax_backward_data")
_OTHER_PRODUCTS = (*OUTSIDE_ATTENTION, "convolution_backward")
_MASKS = ("masked_fill", "masked_fill_", "where", "add", "add_")
_BYTES = {"_softmax": (4, 16), "_softmax_backward_data": (6, 20)}  # for each score: 16 bits, and 32 in long rows


def _names(event: Event, names: Iterable[str]) -> bool:
    return any(kernel.name in names for kernel in event.kernels)


def _find_attention(events: Sequence[Event]) -> tuple[set[int], set[int]]:
    """The places of what attention as a formula does to its scores in memory, and those of its batched products.

    It is what lies between a batched product and the next, without another product, where a softmax reads as many
    numbers as the first of them made: a backward pass has as many. Linear attention's softmaxes read other ones. There
    is none where scores go on, to the next layer or into a loss: a fused kernel does not give them. Copies beside its
    products belong to it: a fused kernel takes heads as they lie, and gives them so.
    """
    if any(event.reads_on for event in events):
        return set(), set()
    scores: set[int] = set()
    products: set[int] = set()
    sizes: set[int] = set()  # how many scores the softmaxes of forward passes read
    run: list[int] = []  # the batched products since the last other one
    for place, event in enumerate(events):
        if _names(event, _OTHER_PRODUCTS):
            run = []
        elif _names(event, BATCHED):
            between = range(run[-1] + 1, place) if run else ()
            softmaxes = [kernel for number in between for kernel in events[number].kernels if kernel.name in _SOFTMAX]
            made = {prod(kernel.product[:3]) for at in run for kernel in events[at].kernels if kernel.product}
            for softmax in softmaxes:
                least, most = _BYTES[softmax.name]
                read = {size for size in made if least * size <= softmax.bytes <= most * size}
                sizes |= read if softmax.name == "_softmax" else set()
                if read & sizes:
                    scores |= {number for number in between if events[number].kind == KERNEL}
            run.append(place)
            if scores & set(range(run[0], place)):
                products |= set(run)
    beside = (places for at in products for places in (range(at - 1, -1, -1), range(at + 1, len(events))))
    return scores.union(*(_copies(events, places) for places in beside)), products


def _copies(events: Sequence[Event], places: Iterable[int]) -> set[int]:
    """Those of these places at which tensors are copied, until something else is done."""

    def copies(place: int) -> bool:
        return events[place].kind == KERNEL and all(kernel.name == "clone" for kernel in events[place].kernels)

    return {place for place in itertools.takewhile(copies, places) if events[place].kernels}


def _fuse_attention(timeline: Timeline, seen: Observed) -> Timeline:
    """Nothing between the batched products, and these as fast as a fused kernel's, which does some of them twice.

    What changes the scores may be a causal mask, of which a fused kernel computes half.
    """
    scores, products = _find_attention(timeline.events)
    share = 0.5 if _masks(timeline.events, scores) else 1.0
    kept = (
        _as_fused(event, share) if place in products else event
        for place, event in enumerate(timeline.events)
        if place not in scores
    )
    return replace(timeline, events=tuple(kept))


def _masks(events: Sequence[Event], scores: set[int]) -> bool:
    """Whether a forward pass may mask scores: a bias that is added looks the same."""
    return any(events[place].phase == FORWARD and _names(events[place], _MASKS) for place in scores)


def _as_fused(event: Event, share: float) -> Event:
    """The event, with this share of its batched products as fast as in fused attention, which moves no scores."""

    def fuse(kernel: Kernel) -> Kernel:
        layout = "efficient" if kernel.format in ("fp32", "tf32") else "flash" + " backward" * (event.phase == BACKWARD)
        return kernel._replace(
            kind=kinds.ATTENTION, product=None, layout=layout, bytes=0, flops=int(share * kernel.flops)
        )

    changed = (fuse(kernel) if kernel.name in BATCHED else kernel for kernel in event.kernels)
    return event._replace(kernels=tuple(changed))


def _called_at(event: Event) -> Site | None:
    """The innermost line of a forward pass that called an operation."""
    return event.inner if event.phase != BACKWARD else None


def _attend_at_once(seen: Observed) -> str:
    scores, _ = _find_attention(seen.events)
    inside = [site.inside for place in scores if (site := _called_at(seen.events[place]))]
    if inside and all(file.startswith("transformers/") for file in inside):
        return 'attn_implementation="sdpa", as an argument of from_pretrained or of the config'
    causal = " (is_causal=True in place of a causal mask)" * _masks(seen.events, scores)
    return f"scaled_dot_product_attention(q, k, v){causal}, or need_weights=False for nn.MultiheadAttention"


def _reads_scores(event: Event, seen: Observed) -> bool:
    scores, _ = _find_attention(seen.events) if _names(event, _SOFTMAX) else ((), ())
    return any(seen.events[place] is event for place in scores)


def _update_in_lists(seen: Observed) -> str:
    calls = dict.fromkeys(name for each in seen.updates for name in each.instead())
    return f"{'; '.join(calls)}: lists in place of the loop, made once where their tensors stay"


def _tell_loading(seen: Observed, events: list[Event]) -> str:
    how = f"num_workers={seen.workers}" if seen.has_loader else "by the script itself"
    loading = [f"loading takes {format_seconds(seen.loading[0])} per step, measured here, {how}"] * (seen.step is None)
    loading = loading if seen.has_loader or seen.loading[0] else []
    working = sum(seen.working.values())
    loading += [f"the script's own work on the CPU takes {format_seconds(working)} per step, here"] * bool(working)
    handing = [f"a worker takes {format_seconds(seen.handing)} to hand a batch over"] * bool(seen.handing)
    return "; ".join(loading + handing)


def _tell_copies(seen: Observed, events: list[Event]) -> str:
    kinds = {name: [event.bytes for event in events if event.pinned == pinned] for name, pinned in _KINDS.items()}
    told = (
        f"{format_bytes(sum(sizes))} from {kind} memory, {len(sizes)} {'copies' if len(sizes) > 1 else 'copy'}"
        for kind, sizes in kinds.items()
        if sizes
    )
    return "; ".join(told)


_KINDS = {"pageable": False, "pinned": True}


CAUSES = {
    cause.name: cause
    for cause in (  # precision first, as it replaces all events, and then what knows that
        Cause(PRECISION, "08", _halve, without=lambda line, seen: replace(line, events=seen.halved)),
        Cause(
            UNTRAINED,
            "23",
            lambda seen: (
                "requires_grad_(False) for the weights that no optimizer has, or torch.no_grad() around what needs no "
                "graph: both save memory, too"
            ),
            without=_freeze,
            note=lambda seen, events: f"{seen.untrained} weights get gradients, and no optimizer has them",
        ),
        Cause(
            DOUBLE,
            "08",
            lambda seen: (
                "float32: .float() of what NumPy gave, which is float64, and no .double() of a model; 64 bits for the "
                "part alone that needs them"
            ),
            lambda event, seen: is_double(event),
            lambda line, seen: replace(line, events=tuple(map(_as_fp32, line.events))),
            place=lambda event: event.site if event.phase == FORWARD else None,
        ),
        Cause(
            TF32,
            "08",
            lambda seen: 'torch.set_float32_matmul_precision("high"), where autocast is not wanted',
            without=lambda line, seen: replace(line, events=tuple(map(_as_tf32, line.events))),
        ),
        Cause(OPTIMIZER, "09", _update_faster, lambda event, seen: event.optimizing, note=_tell_update),
        Cause(
            ANOMALY,
            "12",
            lambda seen: "torch.autograd.set_detect_anomaly(False): anomaly mode is there to find a NaN, and then off",
            lambda event, seen: looks_for_nan(event),
            _look_for_no_nan,
            lambda seen, events: (
                f"{len(events)} gradients are looked at for a NaN; the traceback of each operation that is kept, too, "
                "takes longer still, and is not predicted"
            ),
        ),
        Cause(
            WAITS,
            "12",
            _read_less,
            lambda event, seen: event.kind == READ,
            note=lambda seen, events: f"waits of the CPU in a step: {len(events)}",
        ),
        Cause(COPYING, "03", _copy_faster, lambda event, seen: event.kind == COPY, note=_tell_copies),
        Cause(
            EVALUATING,
            "11",
            lambda seen: "evaluate once in many steps, or at an epoch's end",
            lambda event, seen: event.evaluating,
            _train_alone,
        ),
        Cause(
            VALIDATION,
            "11",
            lambda seen: (
                "with torch.no_grad(): around what is not trained there, which saves memory above all: a teacher, a "
                "policy that acts, a validation; and this one less often"
            ),
            lambda event, seen: event.kind == KERNEL and event.site in seen.unused,
            note=lambda seen, events: (
                f"{format_bytes(sum(seen.unused.values()))} are kept here for a backward pass that never comes"
            ),
        ),
        Cause(
            ATTENTION,
            "12",
            _attend_at_once,
            _reads_scores,
            _fuse_attention,
            lambda seen, events: f"{len(events)} softmaxes read their scores from memory",
            _called_at,
        ),
        Cause(
            CHECKPOINTS,
            "07",
            lambda seen: (
                (
                    "TrainingArguments(gradient_checkpointing=False)"
                    if seen.trainer == "transformers"
                    else "no checkpoint, or one around fewer layers"
                )
                + ", as far as there is memory: effgpu predict tells"
            ),
            lambda event, seen: event.again,
            note=lambda seen, events: f"{sum(bool(event.kernels) for event in events)} operations run twice",
            place=lambda event: event.inner,
        ),
        Cause(
            UPDATES,
            "09",
            _update_in_lists,
            lambda event, seen: any(each.find(event) for each in seen.updates),
            lambda line, seen: replace(line, events=in_lists(line.events, seen.updates)),
            lambda seen, events: "; ".join(
                f"{each.calls} calls in {each.rounds} rounds of the loop at {each.site.place}" for each in seen.updates
            ),
            _called_at,
        ),
        Cause(
            LAUNCHING,
            "05 and 14",
            _launch_less,
            without=_launch_nothing,
            note=_tell_launching,
        ),
        Cause(
            LOADING,
            "02",
            _load_faster,
            without=lambda line, seen: replace(line, load=NOTHING, working={}),
            note=_tell_loading,
        ),
        Cause(
            PADDING,
            "04",
            lambda seen: "pack the texts, or sort them by length and pad each batch to its longest",
            without=_pack,
            note=lambda seen, events: f"{seen.padding:.0%} of the tokens are padding",
        ),
        Cause(
            COMPILING,
            "14",
            lambda seen: "torch.compile(model, dynamic=True), or pad to a few lengths",
            without=lambda line, seen: replace(line, compiling=0.0),
            note=lambda seen, events: f"measured here: {BATCHES} batches of {seen.shapes} shapes",
        ),
    )
}
