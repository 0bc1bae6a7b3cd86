"""Attention as a formula, whose scores go through memory: where it is in a step, and the step with a fused kernel."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from effgpu.predicting import kinds
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kinds import NARROW_HEAD, Kernel
from effgpu.predicting.timeline import BACKWARD, BATCHED, FORWARD, KERNEL, OUTSIDE_ATTENTION, Event, Timeline

_SOFTMAX = ("_softmax", "_softmax_backward_data")
_OTHER_PRODUCTS = (*OUTSIDE_ATTENTION, "convolution_backward")
_MASKS = ("masked_fill", "masked_fill_", "where", "add", "add_")
_BYTES = {"_softmax": (4, 16), "_softmax_backward_data": (6, 20)}  # for each score: 16 bits, and 32 in long rows


def runs(event: Event, names: Iterable[str]) -> bool:
    """Whether one of an event's kernels has one of these names."""
    return any(kernel.name in names for kernel in event.kernels)


def find_attention(events: Sequence[Event]) -> tuple[set[int], set[int]]:
    """The places of what attention as a formula does to its scores in memory, and those of its batched products.

    It is what lies between a batched product and the next, without another product, where a softmax reads as many
    numbers as the first of them made: a backward pass has as many. Linear attention's softmaxes read other ones. There
    is none where scores go on, to the next layer or into a loss: a fused kernel does not give them. Copies beside its
    products belong to it: a fused kernel takes heads as they lie, and gives them so. So does all that
    scaled_dot_product_attention does where it is the formula, which casts and scales what it is given.
    """
    if any(event.reads_on for event in events):
        return set(), set()
    scores: set[int] = set()
    products: set[int] = set()
    sizes: set[int] = set()  # how many scores the softmaxes of forward passes read
    run: list[int] = []  # the batched products since the last other one
    for place, event in enumerate(events):
        if runs(event, _OTHER_PRODUCTS):
            run = []
        elif runs(event, BATCHED):
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
    called = {place for place, event in enumerate(events) if event.formula and scores} - products
    names = ("clone", "_to_copy", "mul") if called else ("clone",)
    return called.union(scores, *(_copies(events, places, names) for places in beside)), products


def _copies(events: Sequence[Event], places: Iterable[int], names: Iterable[str]) -> set[int]:
    """Those of these places at which tensors are copied, or others of these are done, until something else is."""

    def copies(place: int) -> bool:
        return events[place].kind == KERNEL and all(kernel.name in names for kernel in events[place].kernels)

    return {place for place in itertools.takewhile(copies, places) if events[place].kernels}


def fuse_attention(timeline: Timeline) -> Timeline:
    """Nothing between the batched products, and these as fast as a fused kernel's.

    What changes the scores may be a causal mask, of which a fused kernel computes half.
    """
    scores, products = find_attention(timeline.events)
    share = 0.5 if may_mask(timeline.events, scores) else 1.0
    given = next((event.formula[1] for event in timeline.events if event.formula), "")
    kept = (
        _as_fused(event, share, timeline.gpu, given) if place in products else event
        for place, event in enumerate(timeline.events)
        if place not in scores
    )
    return replace(timeline, events=tuple(kept))


def may_mask(events: Sequence[Event], scores: set[int]) -> bool:
    """Whether a forward pass may mask scores: a bias that is added looks the same."""
    return any(events[place].phase == FORWARD and runs(events[place], _MASKS) for place in scores)


def _as_fused(event: Event, share: float, gpu: Gpu, given: str) -> Event:
    """The event, with this share of its batched products as fast as in fused attention, which moves no scores.

    It runs two of a forward pass in one kernel, and in a backward pass five in place of four: one is done again. Where
    it is `given` 16 bits, a formula multiplies in 32.
    """
    backward = event.phase == BACKWARD and not event.again
    given = "fp16" if given == "bf16" and gpu.capability < (8, 0) else given
    again, together = (5 / 4, 4) if backward else (1, 2)

    def fuse(kernel: Kernel) -> Kernel:
        format = given or kernel.format
        full = format in ("fp32", "tf32")
        narrow = " narrow" * (min(kernel.product[1:]) <= NARROW_HEAD)
        layout = "efficient" if full or gpu.capability < (8, 0) else "flash" + narrow
        return kernel._replace(
            kind=kinds.ATTENTION,
            format="fp32" if full else format,
            product=None,
            layout=layout + " backward" * backward,
            launches=0,
            bytes=0,
            flops=int(share * again * kernel.flops),
        )

    changed = (fuse(kernel) if kernel.name in BATCHED else kernel for kernel in event.kernels)
    return event._replace(kernels=tuple(changed), calls=event.calls / together)


def reads_scores(event: Event, events: Sequence[Event]) -> bool:
    """Whether an event of the step's is a softmax of scores in memory."""
    scores, _ = find_attention(events) if runs(event, _SOFTMAX) else ((), ())
    return any(events[place] is event for place in scores)
