"""How wide ranges have to be to hold a source that was not seen: fitted by leaving out one source after the other.

A range is as wide as what is not known of a step's operations, of a source, and, where no run of a kind and format was
compared on a GPU, of that. The first was fitted on calibration rows. This fits the other two. With one source left out,
what it alone checks counts as not compared.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from unittest.mock import patch

from benchmarks.published_times import Outcome, find_pairs

from effgpu.predicting import spreads
from effgpu.predicting.audited import COLUMNS, CONVOLUTIONAL, TRANSFORMERS, family
from effgpu.predicting.gpus import known_gpus
from effgpu.predicting.time import range_of

WIDTHS = [number / 100 for number in range(41)]  # standard deviations that are tried
WANTED = 0.9


@dataclass(frozen=True)
class Fit:
    """Standard deviations: of a source, by the kind of network, and of what no run was compared with."""

    sources: dict[str, float]
    extrapolated: float


# Few sources speak for transformers, and most of those for an A100: as wide as half a width of 20 % allows. What a GPU
# is off by that nothing checks was seen on few: guessed.
LEAST = Fit({TRANSFORMERS: 0.08, CONVOLUTIONAL: 0.0}, 0.1)
NONE = Fit({TRANSFORMERS: 0.0, CONVOLUTIONAL: 0.0}, 0.0)


def cell(outcome: Outcome) -> tuple[str, str, str]:
    """What a run checks: a GPU, a kind of network, a format."""
    case = outcome.case
    format = {"TF32": "tf32"}.get(case.format, case.format)
    return family(case.gpu), CONVOLUTIONAL if case.convolutional else TRANSFORMERS, format


def is_inside(outcome: Outcome, source: float, unseen: float = 0.0) -> bool:
    """Whether the published time lies in the range, with these standard deviations. Compiled code has its own."""
    if outcome.time.compiled:
        return outcome.is_inside
    known, gpu = outcome.time, outcome.time.gpu
    spread = math.hypot(source, unseen, *spreads.spreads_of_kinds(known.sources, gpu))
    expected, low, high = range_of(known.between_waits, gpu, spread)
    step, scale = outcome.published - outcome.case.idle[0], outcome.expected - outcome.case.idle[0]
    return low / expected <= step / scale <= high / expected


def fit(outcomes: Sequence[Outcome], least: Fit = LEAST) -> Fit:
    """The least standard deviations with which nine of ten lie inside, each source counting as much as another."""
    sources = {}
    for kind in (TRANSFORMERS, CONVOLUTIONAL):
        chosen = [o for o in outcomes if cell(o)[1] == kind and _others_check(o, outcomes)]
        sources[kind] = max(least.sources[kind], _least(is_inside, chosen))
    alone = [o for o in outcomes if not _others_check(o, outcomes)]
    unseen = _least(lambda o, width: is_inside(o, sources[cell(o)[1]], width), alone)
    return Fit(sources, max(least.extrapolated, unseen))


def fit_ratios(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The same for ratios, by the kind of network. A ratio of compiled code to eager has a range of its own."""
    return {kind: _least_of_ratios(outcomes, kind) for kind in (TRANSFORMERS, CONVOLUTIONAL)}


def _least_of_ratios(outcomes: Sequence[Outcome], kind: str) -> float:
    compiled = {id(o.case) for o in outcomes if o.time.compiled}
    for width in WIDTHS:
        with patch.dict(spreads.SPREAD_OF_RATIOS, {kind: width}):
            pairs = [pair for pair in find_pairs(outcomes) if pair.ours.convolutional == (kind == CONVOLUTIONAL)]
        by_source = defaultdict(list)
        for pair in pairs:
            if len({id(pair.ours) in compiled, id(pair.theirs) in compiled}) == 1:
                by_source[pair.ours.source].append(pair.is_inside)
        if _mean_share(by_source) >= WANTED:
            return width
    return WIDTHS[-1]


def _others_check(outcome: Outcome, outcomes: Iterable[Outcome]) -> bool:
    return any(cell(o) == cell(outcome) and o.case.source != outcome.case.source for o in outcomes)


def _least(holds: Callable[[Outcome, float], bool], outcomes: Sequence[Outcome]) -> float:
    for width in WIDTHS:
        if cover(outcomes, [holds(o, width) for o in outcomes]) >= WANTED:
            return width
    return WIDTHS[-1]


def cover(outcomes: Sequence[Outcome], inside: Sequence[bool]) -> float:
    """The share inside, each source counting as much as another; 1 for none."""
    by_source = defaultdict(list)
    for outcome, lies in zip(outcomes, inside):
        by_source[outcome.case.source].append(lies)
    return _mean_share(by_source)


def _mean_share(by_source: dict[str, list[bool]]) -> float:
    shares = [sum(each) / len(each) for each in by_source.values()]
    return sum(shares) / len(shares) if shares else 1.0


def leave_out(outcomes: Sequence[Outcome], least: Fit = LEAST) -> dict[str, tuple[int, int]]:
    """For each source, how many of its runs lie in the ranges that the others ask for, and how many there are."""
    found = {}
    for source in dict.fromkeys(o.case.source for o in outcomes):
        rest = [o for o in outcomes if o.case.source != source]
        fitted, own = fit(rest, least), [o for o in outcomes if o.case.source == source]
        seen = {cell(o) for o in rest}
        lie = [is_inside(o, fitted.sources[cell(o)[1]], 0.0 if cell(o) in seen else fitted.extrapolated) for o in own]
        found[source] = sum(lie), len(own)
    return found


def by_source(outcomes: Sequence[Outcome]) -> list[str]:
    """The audit of times by source, as rows of a table: last, what lies in ranges which never saw the source."""
    left_out = leave_out(outcomes)
    lines = []
    for source, (lie, number) in left_out.items():
        own = [o for o in outcomes if o.case.source == source]
        errors = sorted(abs(o.error) for o in own)
        gpus = ", ".join(dict.fromkeys(o.case.gpu for o in own))
        told = f"{gpus} | {median(errors):.1%} | {errors[math.ceil(0.9 * number) - 1]:.1%}"
        inside = sum(o.is_inside for o in own)
        lines.append(f"| {source} | {told} | {inside} of {number} | {lie} of {number} |")
    lie, number = (sum(each) for each in zip(*left_out.values()))
    lines.append(f"| all | | | | {sum(o.is_inside for o in outcomes)} of {number} | {lie} of {number} |")
    return lines


def cells(outcomes: Iterable[Outcome], ours: Iterable[tuple[tuple[str, str, str], float]]) -> dict:
    """Errors by cell, with the sources; `ours` are cells and errors of what we measured."""
    found: dict[tuple[str, str, str], list[tuple[float, str]]] = defaultdict(list)
    for o in outcomes:
        found[cell(o)].append((abs(o.error), o.case.source))
    for where, error in ours:
        found[where].append((abs(error), "measured by us"))
    return found


def as_table(found: dict) -> list[str]:
    """Rows by GPU, two columns for each format: the median error and the number of runs, "–" for an empty cell."""
    lines = []
    for gpu in dict.fromkeys(map(family, known_gpus())):
        told = []
        for kind in (TRANSFORMERS, CONVOLUTIONAL):
            for format in ("fp32", "tf32", "fp16", "bf16"):
                errors = [error for error, _ in found.get((gpu, kind, format), ())]
                told.append(f"{median(errors):.0%} ({len(errors)})" if errors else "–")
        lines.append(f"| {gpu} | {' | '.join(told)} |")
    return lines


def as_csv(found: dict) -> str:
    """The table that the package reads: audited.csv."""
    lines = [",".join(COLUMNS)]
    for (gpu, kind, format), runs in sorted(found.items()):
        errors, sources = sorted(error for error, _ in runs), {source for _, source in runs}
        last = errors[math.ceil(0.9 * len(errors)) - 1]
        lines.append(f"{gpu},{kind},{format},{len(runs)},{len(sources)},{median(errors):.3f},{last:.3f}")
    return "\n".join(lines) + "\n"
