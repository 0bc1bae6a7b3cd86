"""From what was seen, measured and predicted of a step to the ranking of what each change would save."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

from effgpu import units
from effgpu.attaching.sites import Site
from effgpu.diagnosing.causes import (
    ANOMALY,
    BLOCKING,
    CAUSES,
    CHECKPOINTS,
    COMPILING,
    COPYING,
    DOUBLE,
    EVALUATING,
    LAUNCHING,
    LOADING,
    PRECISION,
    TF32,
    UNTRAINED,
    UPDATES,
    WAITS,
    by_anomaly_mode,
    is_double,
)
from effgpu.diagnosing.diagnosis import THRESHOLD, Diagnosis, Finding
from effgpu.diagnosing.observed import Observed
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.prediction import FITS, Prediction
from effgpu.predicting.timeline import BACKWARD, COPY, NOTHING, Event, Range, Timeline, saved

BEHIND = 0.85  # of a step: a CPU whose calls take less is ahead of the GPU, which then never waits for it
_ALONE = 0.6  # of what two changes save together: of a pair whose parts hide each other, neither saves more alone
_UNSCALES = "_amp_foreach_non_finite_check"
_NOT_SCALED = (  # 2⁻²⁴ is the least that fp16 holds
    "fp16 without a GradScaler: gradients below 6e-8 become 0, unless the loss is scaled by hand (lesson 08)"
)
_ALIKE = (frozenset({PRECISION, TF32}),)  # of which one leaves nothing to the other


def rank(gpu: Gpu, seen: Observed, prediction: Prediction | None, why: str = "") -> Diagnosis:
    """Rank what was measured, and what the predicted step says of the rest. `why` there is no prediction."""
    alone = {name: saving for names, saving in seen.saved.items() if len(names) == 1 for name in names}
    examined = {name: Finding(name, *saving, measured=True) for name, saving in alone.items()}
    notes = [*seen.notes, *([f"nothing is predicted: {why}"] if why else [])]
    events, timeline, names, warnings = seen.events, None, [], [*seen.warnings]
    if prediction:
        timeline = _timeline(prediction, gpu, seen)
        events, names = prediction.events, _changeable(gpu, seen, prediction)
        for name in names:
            examined.setdefault(name, _predict(name, timeline, seen, names))
        notes += [*prediction.notes, *(f"assumed: {what}" for what in prediction.assumptions)]
        notes += [*(f"not known: {what}" for what in prediction.unknown), *prediction.tell_unchecked([gpu])]
        warnings += [prediction.grows(gpu)] * bool(prediction.grows(gpu))
        warnings += [_NOT_SCALED] * _lacks_scaler(events)
    slowest = _find_slowest_optimizer(timeline) if timeline else ()
    facts = replace(seen, events=events, optimizers=slowest or seen.optimizers)
    ranked = sorted((_explain(one, facts, timeline) for one in examined.values()), key=lambda finding: -finding.seconds)
    result = Diagnosis(
        gpu.name,
        *(seen.step or timeline.range()),
        measured=seen.step is not None,
        examined=tuple(ranked),
        memory=prediction,
        notes=tuple(dict.fromkeys(notes)),
        warnings=tuple(warnings),
        timeline=timeline,
    )
    if result.measured:
        pairs = {names: saving for names, saving in seen.saved.items() if len(names) == 2}
    else:
        pairs = _pair(timeline, seen, result, names)
    hidden = _hidden(result, pairs)
    return replace(result, together=_together(result, pairs, hidden), hidden=hidden)


def _lacks_scaler(events: Iterable[Event]) -> bool:
    """Whether a backward pass multiplies in fp16, and no GradScaler looks at its gradients."""
    kernels = [(event.phase, kernel) for event in events for kernel in event.kernels]
    if any(kernel.name.startswith(_UNSCALES) for _, kernel in kernels):
        return False
    return any(phase == BACKWARD and kernel.product and kernel.format == "fp16" for phase, kernel in kernels)


def _timeline(prediction: Prediction, gpu: Gpu, seen: Observed) -> Timeline:
    return replace(
        prediction.timeline(gpu),
        load=seen.loading,
        workers=seen.workers,
        working=seen.working,
        compiling=seen.compiling or 0.0,
    )


def _find_slowest_optimizer(timeline: Timeline) -> tuple[tuple[str, bool | None], ...]:
    """The optimizer whose updates take longest, if any."""
    updates: dict[tuple[str, bool | None], list[Event]] = {}
    for event in timeline.events:
        if event.optimizer:
            updates.setdefault(event.optimizer, []).append(event)
    alone = {one: replace(timeline, events=tuple(events), load=NOTHING) for one, events in updates.items()}
    return tuple(sorted(alone, key=lambda one: -alone[one].seconds())[:1])


def _changeable(gpu: Gpu, seen: Observed, prediction: Prediction) -> list[str]:
    """What can be changed in the predicted step."""
    events, fits = prediction.events, prediction.verdict(gpu) == FITS
    can_be = {  # all others always can
        TF32: gpu.capability >= (8, 0),
        PRECISION: seen.halved,
        UNTRAINED: seen.frozen,
        DOUBLE: any(map(is_double, events)),
        ANOMALY: any(map(by_anomaly_mode, events)),
        BLOCKING: any(event.blocking for event in events),
        CHECKPOINTS: fits and any(event.again for event in events),
        LOADING: seen.has_loader or seen.loading[0] or seen.working,
        COPYING: seen.has_loader or any(event.kind == COPY for event in seen.events),
        EVALUATING: any(event.evaluating for event in events),
        UPDATES: seen.updates and not seen.compiled,  # compiled: all calls count as fewer
        COMPILING: seen.compiling is not None,
    }
    return [name for name in CAUSES if can_be.get(name, True)]


def _predict(name: str, timeline: Timeline, seen: Observed, names: list[str]) -> Finding:
    before, cause = timeline, CAUSES[name]
    if name == LAUNCHING:  # to blame where nothing else makes the CPU late
        for other in (ANOMALY, BLOCKING, WAITS, LOADING, COPYING, COMPILING):
            before = CAUSES[other].change(before, seen) if other in names else before
    after = cause.change(before, seen)
    idle = _idle_seconds(seen, timeline, CAUSES[WAITS].change(timeline, seen), after) if name == LAUNCHING else None
    return Finding(name, *(idle or saved(before, after)))


def _pair(timeline: Timeline, seen: Observed, result: Diagnosis, names: list[str]) -> dict[frozenset[str], Range]:
    """What two changes save together: the two largest findings, and pairs that save much more than each alone."""
    alone, pairs = {one.name: one.seconds for one in result.examined}, {}
    changed = {name: CAUSES[name].change(timeline, seen) for name in names}
    whole = timeline.seconds()
    for first, second in combinations(names, 2):  # in their order, as precision replaces all events
        if frozenset({first, second}) in _ALIKE or changed[second] == timeline or changed[first] == timeline:
            continue
        if {first, second} == {PRECISION, UNTRAINED} and not seen.frozen_halved:
            continue
        both = CAUSES[second].change(changed[first], seen)
        beyond = whole - both.seconds() - alone[first] - alone[second]
        hides = beyond >= THRESHOLD * result.seconds and LAUNCHING not in (first, second)  # which is late by others
        if hides or {first, second} == set(_best(result)):
            pairs[frozenset({first, second})] = saved(timeline, both)
    return pairs


def _best(result: Diagnosis) -> list[str]:
    """The two largest findings that are known in the same way as the step."""
    return [one.name for one in result.findings if one.measured == result.measured and one.name != TF32][:2]


def _together(result: Diagnosis, pairs: dict[frozenset[str], Range], hidden: tuple[Finding, ...]) -> Finding | None:
    """What the two largest findings save when both are changed, where no pair tells of either."""
    best = _best(result)
    told = any(name in pair.name.split(" and ") for pair in hidden for name in best)
    saving = pairs.get(frozenset(best)) if len(best) == 2 and not told else None
    if saving and saving[0] < max(one.seconds for one in result.examined if one.name in best):
        return None  # either alone saves more: together, other waits show
    return saving and Finding(" and ".join(best), *saving, measured=result.measured)


def _hidden(result: Diagnosis, pairs: dict[frozenset[str], Range]) -> tuple[Finding, ...]:
    """The pairs that save much more together than each alone, as one hides the other; the largest of each finding."""
    found, alone, taken = [], {one.name: one for one in result.examined}, set()
    for names, saving in sorted(pairs.items(), key=lambda item: -item[1][0]):
        ones = sorted((alone[name] for name in names), key=lambda one: -one.seconds)
        beyond = saving[0] - sum(one.seconds for one in ones)
        hides = beyond >= THRESHOLD * result.seconds and ones[0].seconds <= _ALONE * saving[0]
        if hides and saving[1] > 0 and not names & taken:
            taken |= names
            notes = (one.note for one in ones if one.name == LOADING)  # what its advice goes by
            each = ", ".join(f"{one.name} {units.format_seconds(max(0.0, one.seconds))}" for one in ones)
            found.append(
                Finding(
                    " and ".join(one.name for one in ones),
                    *saving,
                    result.measured,
                    lines=tuple(line for one in ones for line in one.lines[:1]),
                    note="; ".join([f"each hides the other; alone could save: {each}", *filter(None, notes)]),
                    lesson=" and ".join(one.lesson for one in ones),
                    advice="; ".join(one.advice for one in ones),
                )
            )
    return tuple(found)


def _explain(finding: Finding, seen: Observed, timeline: Timeline | None) -> Finding:
    """The finding with its advice, its lines, the one that keeps the GPU busy for longest first, and what was seen."""
    cause = CAUSES[finding.name]
    concerned = [event for event in seen.events if cause.concerns(event, seen)]
    lines: Counter[Site] = Counter()
    for event in concerned:
        if site := cause.place(event):
            lines[site] += timeline.busy(event) if timeline else 1.0
    if finding.name == LOADING:
        lines.update(seen.working)
    if finding.name == LAUNCHING and seen.loop:
        lines[seen.loop.site] += 1
    return replace(
        finding,
        lesson=cause.lesson,
        advice=cause.advice(seen),
        note=cause.note(seen, concerned),
        lines=tuple(line for line, _ in lines.most_common()),
    )


def _idle_seconds(seen: Observed, timeline: Timeline, unread: Timeline, work: Timeline) -> Range | None:
    """Seconds that the GPU idles in a measured step that has its batch: the wall clock, less its predicted work.

    Less what the step's reads take by prediction (the `timeline` without them is `unread`), and what compiling takes,
    too: they are other findings. Nothing where the CPU's calls take less than is left: then the GPU is busy, however
    far off its predicted work is. None without a measured step.
    """
    if not seen.step:
        return None
    fed = seen.saved.get(feeding(frozenset().union(*seen.saved)), NOTHING)
    busy, waits = work.range(), saved(timeline, unread)
    left = seen.step[0] - fed[0] - waits[0] - (seen.compiling or 0.0)
    calls = _all_calls(seen, timeline.events)
    if calls is not None and calls < BEHIND * left:
        return NOTHING
    ends = (1, 2), (2, 1)
    idle = [
        seen.step[0] - fed[0] - busy[0] - waits[0],
        *(seen.step[low] - fed[high] - busy[high] - waits[high] for low, high in ends),
    ]
    return tuple(max(0.0, seconds - (seen.compiling or 0.0)) for seconds in idle)


def _all_calls(seen: Observed, events: tuple[Event, ...]) -> float | None:
    """Seconds of the CPU's calls in a step: those up to its first wait were timed, and the others take as long each."""
    first = next((number for number, event in enumerate(events) if reads(event)), None)
    timed, everything = (sum(event.calls for event in each) for each in (events[:first], events))
    return seen.calls * everything / timed if seen.calls is not None and timed else None


def reads(event: Event) -> bool:
    """Whether the CPU waits here for a value of the GPU's."""
    return event.waits and event.kind != COPY


def feeding(names: Iterable[str]) -> frozenset[str]:
    """What there is to change of how the step gets its batch."""
    return frozenset(names) & {LOADING, COPYING}
