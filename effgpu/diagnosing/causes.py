"""What can hold a step back: each cause with its advice, its lesson, its events, and the step without it.

To add a cause, add a row to `CAUSES`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from effgpu.attaching.sites import Site
from effgpu.diagnosing import advice
from effgpu.diagnosing.attention import find_attention, fuse_attention, reads_scores
from effgpu.diagnosing.lists import in_lists
from effgpu.diagnosing.observed import BATCHES, Observed
from effgpu.predicting import kinds
from effgpu.predicting.kinds import PRODUCT
from effgpu.predicting.timeline import COPY, FORWARD, KERNEL, NOTHING, READ, Event, Timeline, looks_for_nan
from effgpu.units import format_bytes

LOADING, COPYING, OPTIMIZER, VALIDATION = "data loading", "copies to the GPU", "optimizer", "validation"
WAITS, LAUNCHING, PRECISION, PADDING, COMPILING = "hidden waits", "launching", "precision", "padding", "recompiling"
TF32, ATTENTION, EVALUATING = "TF32", "plain attention", "evaluation in each step"
UPDATES, UNTRAINED, DOUBLE = "loops over weights", "unused gradients", "double precision"
ANOMALY, CHECKPOINTS, BLOCKING = "anomaly mode", "checkpointing", "blocking launches"


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


def _launch_nothing(timeline: Timeline, seen: Observed) -> Timeline:
    """The CPU needs no time to call; and where one call does for all rounds of a loop, no small kernel has a floor."""
    return replace(timeline, launch=0.0, events=tuple(map(_join, timeline.events)) if seen.loop else timeline.events)


def _join(event: Event) -> Event:
    """The event as a part of a larger one, unless it is the optimizer's."""
    return event if event.optimizing else event._replace(kernels=tuple(k._replace(launches=0) for k in event.kernels))


def _freeze(timeline: Timeline, seen: Observed) -> Timeline:
    """Without the gradients that no optimizer uses; in 16 bits, where the timeline is."""
    return replace(timeline, events=seen.frozen_halved if timeline.events is seen.halved else seen.frozen)


def _train_alone(timeline: Timeline, seen: Observed) -> Timeline:
    """Without the evaluation, and what loading takes for it."""
    load = tuple(max(0.0, whole - part) for whole, part in zip(timeline.load, seen.evaluating))
    return replace(timeline, events=tuple(e for e in timeline.events if not e.evaluating), load=load)


def _pack(timeline: Timeline, seen: Observed) -> Timeline:
    """The GPU works on fewer tokens, and attention on fewer pairs of them.

    The CPU calls as many operations, and the optimizer updates as many weights.
    """
    attention = set().union(*find_attention(timeline.events))

    def pack(place: int, event: Event) -> Event:
        pairs = place in attention or any(kernel.kind == kinds.ATTENTION for kernel in event.kernels)
        return event._replace(scale=event.scale * (1 - (seen.padding_pairs if pairs else seen.padding)))

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


def by_anomaly_mode(event: Event) -> bool:
    """Whether anomaly mode keeps a traceback for an event, or looks for a NaN in it."""
    return event.traced > 0 or looks_for_nan(event)


def _leave_anomaly_mode(timeline: Timeline, seen: Observed) -> Timeline:
    """Without what anomaly mode does: tracebacks, and isnan, whether any is true, and the read of that."""
    looks = (place for place, event in enumerate(timeline.events) if looks_for_nan(event))
    left_out = {near for place in looks for near in (place - 1, place, place + 1)}
    kept = (event for place, event in enumerate(timeline.events) if place not in left_out)
    events = (event._replace(calls=event.calls - event.traced, traced=0.0) for event in kept)
    return replace(timeline, events=tuple(events))


def _launch_ahead(timeline: Timeline, seen: Observed) -> Timeline:
    """The CPU goes on where it waits for nothing but a kernel."""
    events = (event._replace(waits=False, blocking=False) if event.blocking else event for event in timeline.events)
    return replace(timeline, events=tuple(events))


CAUSES = {
    cause.name: cause
    for cause in (  # precision first, as it replaces all events, and then what knows that
        Cause(PRECISION, "08", advice.halve, without=lambda line, seen: replace(line, events=seen.halved)),
        Cause(
            UNTRAINED,
            "23",
            advice.give_fewer_gradients,
            without=_freeze,
            note=advice.tell_unused_gradients,
        ),
        Cause(
            DOUBLE,
            "08",
            lambda seen: (
                "float32: .float() of what NumPy gave, which is float64, no .double() of a model and no "
                "set_default_dtype(torch.float64); 64 bits for the part alone that needs them"
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
        Cause(OPTIMIZER, "09", advice.update_faster, lambda event, seen: event.optimizing, note=advice.tell_update),
        Cause(
            ANOMALY,
            "12",
            lambda seen: "torch.autograd.set_detect_anomaly(False): anomaly mode is there to find a NaN, and then off",
            lambda event, seen: by_anomaly_mode(event),
            _leave_anomaly_mode,
            lambda seen, events: (
                f"the tracebacks of {sum(event.traced > 0 for event in events)} operations are kept, and "
                f"{sum(map(looks_for_nan, events)) or 'no'} gradients are looked at for a NaN"
            ),
        ),
        Cause(
            BLOCKING,
            "12",
            lambda seen: "no CUDA_LAUNCH_BLOCKING=1: it is there to find the line of an error",
            lambda event, seen: event.blocking,
            _launch_ahead,
            lambda seen, events: f"the CPU waits for each of {len(events)} operations",
            lambda event: None,
        ),
        Cause(
            WAITS,
            "12",
            advice.read_less,
            lambda event, seen: event.kind == READ,
            note=lambda seen, events: f"waits of the CPU in a step: {len(events)}",
        ),
        Cause(COPYING, "03", advice.copy_faster, lambda event, seen: event.kind == COPY, note=advice.tell_copies),
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
                "with torch.no_grad(): around what is not trained there, which saves memory above all: a policy that "
                "acts, a validation; and this one less often"
            ),
            lambda event, seen: event.kind == KERNEL and event.site in seen.unused,
            note=lambda seen, events: (
                f"{format_bytes(sum(seen.unused.values()))} are kept here for a backward pass that never comes"
            ),
        ),
        Cause(
            ATTENTION,
            "12",
            advice.attend_at_once,
            lambda event, seen: reads_scores(event, seen.events),
            lambda line, seen: fuse_attention(line),
            lambda seen, events: f"{len(events)} softmaxes read their scores from memory",
            advice.called_at,
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
            advice.update_in_lists,
            lambda event, seen: any(each.find(event) for each in seen.updates),
            lambda line, seen: replace(line, events=in_lists(line.events, seen.updates)),
            lambda seen, events: "; ".join(
                f"{each.calls} calls in {each.rounds} rounds of the loop at {each.site.place}" for each in seen.updates
            ),
            advice.called_at,
        ),
        Cause(
            LAUNCHING,
            "05 and 14",
            advice.launch_less,
            without=_launch_nothing,
            note=advice.tell_launching,
        ),
        Cause(
            LOADING,
            "02",
            advice.load_faster,
            without=lambda line, seen: replace(line, load=NOTHING, working={}),
            note=advice.tell_loading,
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
