"""What a loss, or a metric, says of a training: its end, its change over seeds with an interval, when it is reached."""

import math
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from effgpu.measuring.intervals import CONFIDENCE, bounded, interval_of_builds, one_sided, quantile_of_student
from effgpu.verdicts import INCONCLUSIVE, NOISY, SAME

LOWER, HIGHER = "lower", "higher"
MIN_EFFECT = 0.01  # a smaller difference of a loss or a metric counts as none
POWER = 0.9  # how often as many seeds as are asked for show a difference of that size
MOST_SEEDS = 1000  # more are not counted
_SHARE_AT_THE_END = 10  # the last tenth of the steps
_SMOOTHED = 10  # steps whose mean loss says that a loss is reached


@dataclass(frozen=True)
class Change:
    """How much a number at the end of training differs from the baseline's, as a share of it, with its interval.

    `within` is the smallest share within which two one-sided tests call the two the same. `spread` is the standard
    deviation of the pairs' differences, `confidence` that of the interval.
    """

    value: float
    low: float
    high: float
    within: float
    spread: float
    confidence: float

    @property
    def seeds(self) -> int | None:
        """About how many seeds show a difference of 1 %; None for more than 1,000."""
        return count_seeds(self.spread, MIN_EFFECT, self.confidence)

    @property
    def verdict(self) -> str:
        """Same within 1 %; lower or higher if the interval excludes 0, as it is shown, and the change is beyond 1 %."""
        if self.within <= MIN_EFFECT:
            return SAME
        if abs(self.value) > MIN_EFFECT and round(self.low, 3) > 0:
            return HIGHER
        if abs(self.value) > MIN_EFFECT and round(self.high, 3) < 0:
            return LOWER
        return INCONCLUSIVE

    def __str__(self) -> str:
        verdict = self.verdict
        if verdict == SAME:
            return f"{SAME} (within {100 * MIN_EFFECT:g} %)"
        if verdict == INCONCLUSIVE:
            half = (self.high - self.low) / 2
            told = f"too noisy, above ±{NOISY}" if 100 * half >= NOISY else f"±{_percent(half).lstrip('+')}"
            return f"{INCONCLUSIVE} ({told} %)"
        low, high = (f"{_percent(end)} %" for end in (self.low, self.high))
        return f"{verdict}: {_percent(self.value)} % [{low}, {high}]"


def _percent(share: float) -> str:
    number = 100 * share
    return f"{number:+.{0 if abs(number) >= 100 else 1}f}".replace("-", "−")


def find_change(
    ours: Sequence[float], theirs: Sequence[float], confidence: float = CONFIDENCE, *, ratios: bool = True
) -> Change | None:
    """The change from `theirs` to `ours`, paired by seed, by Student's t; None for fewer than two seeds.

    With `ratios` on logarithms, where all are positive; else on differences, as shares of the mean of `theirs`.
    """
    if len(ours) < 2:
        return None
    if ratios and min(*ours, *theirs) > 0:
        values, share = [math.log(a / b) for a, b in zip(ours, theirs)], lambda log: math.expm1(bounded(log))
    else:
        size = abs(statistics.fmean(theirs)) or 1.0
        values, share = [(a - b) / size for a, b in zip(ours, theirs)], float
    _, low, high = interval_of_builds(values, one_sided(confidence))
    middle = map(share, interval_of_builds(values, confidence))
    return Change(*middle, share(max(high, -low)), statistics.stdev(values), confidence)


def count_seeds(spread: float, effect: float, confidence: float = CONFIDENCE) -> int | None:
    """About how many seeds show a difference of `effect`, in 9 of 10 cases; None for more than 1,000.

    `spread` is the standard deviation of the differences of a pair.
    """

    def shows(seeds: int) -> bool:
        errors = quantile_of_student(seeds - 1, confidence) + quantile_of_student(seeds - 1, 2 * POWER - 1)
        return errors * spread / math.sqrt(seeds) <= effect

    counts = range(2, MOST_SEEDS + 1)
    place = bisect_left(counts, True, key=shows)  # more seeds always show more
    return counts[place] if place < len(counts) else None


def at_the_end(values: Mapping[int, float], steps: int) -> float | None:
    """The mean over the last tenth of the steps; the last value where there is none in it."""
    last = [value for step, value in values.items() if step > steps - max(1, round(steps / _SHARE_AT_THE_END))]
    last = last or [values[max(values)]] if values else last
    return statistics.fmean(last) if last else None


def reached(losses: Mapping[int, float], seconds: Mapping[int, float], target: float) -> float | None:
    """The seconds at which the mean loss of the last ten steps was first `target` or less."""
    steps = sorted(losses.keys() & seconds.keys())
    for place in range(_SMOOTHED, len(steps) + 1):
        if statistics.fmean(losses[step] for step in steps[place - _SMOOTHED : place]) <= target:
            return seconds[steps[place - 1]]
    return None
