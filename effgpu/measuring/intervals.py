"""The statistics of a comparison: intervals, how many blocks they need, and when two things count as the same."""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

FEWEST_BLOCKS, MOST_BLOCKS = 15, 80  # of 15 blocks, one that was held up does not decide
BUILDS = 4  # how often variants are built that cannot be kept together
CONFIDENCE = 0.99  # of every interval and so of every verdict; not 95 %, as readers make many comparisons
ONE_SIDED = 0.98  # of the interval whose ends are one-sided bounds of CONFIDENCE
# Neighbouring blocks resemble each other a little: ρ is about 0.1 in 87 stored comparisons, and 0.2 is to be covered,
# which widens an interval by √((1 + ρ) / (1 - ρ)) = 1.22. An estimate of ρ from 15 blocks would be noise, so the factor
# is fixed, with a reserve, as the first blocks also decide how many there are (tests/benchmarks/aa.py coverage).
_DEPENDENCE = 1.25
_STUDENT = {
    CONFIDENCE: 5.841,
    ONE_SIDED: 4.541,
}  # Student's t with BUILDS - 1 = 3 degrees of freedom, two-sided

Interval = tuple[float, float, float]  # middle, low end, high end


def interval_of_blocks(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Middle, low and high end of an interval that covers the centre of the values in `confidence` of all cases.

    The middle is Hodges and Lehmann's estimate, the median of all averages of two values. The interval leaves out as
    many of these averages at each end as Wilcoxon's signed-rank distribution allows (Hollander, Wolfe and Chicken,
    Nonparametric Statistical Methods, chapter 3). It assumes symmetry, as of the log ratios of blocks whose order is
    drawn at random. It is widened by a fixed factor, because neighbouring blocks resemble each other.
    tests/benchmarks/aa.py shows its coverage. Raises ValueError for fewer than 15 values.
    """
    if len(values) < FEWEST_BLOCKS:
        raise ValueError(f"values: expected at least {FEWEST_BLOCKS}, got {len(values)}")
    return _hodges_lehmann(tuple(values), confidence)


def interval_of_builds(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """The same for one value of each of four builds, by Student's t. Raises ValueError for another number of values."""
    if len(values) != BUILDS:
        raise ValueError(f"values: expected {BUILDS}, got {len(values)}")
    mean = statistics.fmean(values)
    half = _STUDENT[confidence] * statistics.stdev(values) / math.sqrt(BUILDS)
    return mean, mean - half, mean + half


def count_blocks(values: Sequence[float], target: float) -> int:
    """How many blocks give an interval of about ±`target` (a share), judged by the logarithms of the first blocks.

    The width falls with the square root of the number. Stein's two stages (1945): the first ones say how many it takes,
    then the result is looked at once. To stop at the first narrow interval instead would make intervals too narrow.
    """
    _, low, high = interval_of_blocks(values)
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
