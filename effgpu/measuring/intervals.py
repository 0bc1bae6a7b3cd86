"""The statistics of a comparison: intervals, how many blocks they need, and when two things count as the same."""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

FEWEST_BLOCKS, MOST_BLOCKS = 15, 80  # of 15 blocks, one that was held up does not decide
BUILDS = 4  # how often variants are built that cannot be kept together
CONFIDENCE = 0.99  # of all intervals and so of all verdicts of a table; not 95 %, as readers make many comparisons
# Neighbouring blocks resemble each other a little: ρ is about 0.1 in 87 stored comparisons, and 0.2 is to be covered,
# which widens an interval by √((1 + ρ) / (1 - ρ)) = 1.22. An estimate of ρ from 15 blocks would be noise, so the factor
# is fixed, with a reserve, as the first blocks also decide how many there are (tests/benchmarks/aa.py coverage).
_DEPENDENCE = 1.25
_FARTHEST = 300.0  # of a logarithm: ratios of 10¹³⁰, as of two seeds that tell nothing
Interval = tuple[float, float, float]  # middle, low end, high end


def find_interval(logs: list[float], builds: int = 1, confidence: float = CONFIDENCE) -> Interval | None:
    """Middle, low and high end for the logarithms of blocks, or of so many builds; None for too few of them."""
    if builds > 1:
        return interval_of_builds(logs, confidence) if len(logs) >= builds else None
    return interval_of_blocks(logs, confidence) if len(logs) >= count_fewest(confidence) else None


def interval_of_blocks(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Middle, low and high end of an interval that covers the centre of the values in `confidence` of all cases.

    The middle is Hodges and Lehmann's estimate, the median of all averages of two values. The interval leaves out as
    many of these averages at each end as Wilcoxon's signed-rank distribution allows (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, chapter 3). It assumes symmetry, as of the log ratios of blocks whose order is
    drawn at random. It is widened by a fixed factor, because neighbouring blocks resemble each other.
    tests/benchmarks/aa.py shows its coverage. Raises ValueError for fewer values than have such an interval.
    """
    if len(values) < (fewest := count_fewest(confidence)):
        raise ValueError(f"values: expected at least {fewest}, got {len(values)}")
    return _hodges_lehmann(tuple(values), confidence)


def interval_of_builds(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The same for one value of each of a few builds, or of runs with different seeds, by Student's t.

    It assumes that the values are normal. Raises ValueError for fewer than two.
    """
    if len(values) < 2:
        raise ValueError(f"values: expected at least two, got {len(values)}")
    mean = statistics.fmean(values)
    half = quantile_of_student(len(values) - 1, confidence) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def bounded(log: float) -> float:
    """A logarithm, or where no number holds its ratio, the farthest that is kept. NaN stays NaN."""
    return min(max(log, -_FARTHEST), _FARTHEST)


def divide_confidence(comparisons: int) -> float:
    """The confidence of each of so many intervals, so that all of them hold in `CONFIDENCE` of all tables.

    Bonferroni's: what may go wrong is divided among them.
    """
    return 1 - (1 - CONFIDENCE) / max(1, comparisons)


def one_sided(confidence: float) -> float:
    """The confidence of the interval whose ends are one-sided bounds of `confidence`."""
    return 2 * confidence - 1


def count_fewest(confidence: float = CONFIDENCE) -> int:
    """The fewest blocks that have an interval: of n blocks, all are on one side with a chance of 2 in 2ⁿ."""
    return math.ceil(1 - math.log2(1 - confidence) - 1e-9)


@lru_cache
def quantile_of_student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """How many standard errors, on both sides, hold a mean with so many degrees of freedom."""
    low, high = 0.0, 1.0
    while _share_within(high, freedom) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < confidence else (low, middle)
    return high


def _share_within(t: float, freedom: int) -> float:
    """The chance that Student's t lies between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = total = cosine if odd else 1.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + math.sin(angle) * total * (freedom > 1))


def count_blocks(values: Sequence[float], target: float, confidence: float = CONFIDENCE) -> int:
    """How many blocks give an interval of about ±`target` (a share), judged by the logarithms of the first blocks.

    The width falls with the square root of the number. Stein's two stages (1945): the first ones say how many it takes,
    then the result is looked at once. To stop at the first narrow interval instead would make intervals too narrow.
    """
    if len(values) < (fewest := count_fewest(confidence)):  # as of 165 variants
        return fewest
    _, low, high = interval_of_blocks(values, confidence)
    wanted = len(values) * ((high - low) / 2 / math.log1p(target)) ** 2
    return max(FEWEST_BLOCKS, min(MOST_BLOCKS, math.ceil(wanted)))


@lru_cache(maxsize=1024)  # a table, its caption and its plot ask for the same ones
def _hodges_lehmann(values: tuple[float, ...], confidence: float) -> Interval:
    averages = sorted((a + b) / 2 for a, b in combinations_with_replacement(values, 2))
    cut, middle = _count_cut(len(values), confidence), statistics.median(averages)
    low, high = averages[cut - 1], averages[-cut]
    return middle, middle - _DEPENDENCE * (middle - low), middle + _DEPENDENCE * (high - middle)


@lru_cache
def _count_cut(n: int, confidence: float) -> int:
    """The largest k for which twice the chance of a signed-rank sum below k is at most 1 - `confidence`."""
    ways = [1]  # in which ranks 1 to n, each with either sign, give each positive sum
    for rank in range(1, n + 1):
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways)]
    below, k = 0, 0
    while 2 * (below + ways[k]) <= (1 - confidence) * 2**n:
        below += ways[k]
        k += 1
    return k
