"""Tests of effgpu.measuring.intervals: they cover what they should, and are no wider than they need to be."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effgpu.measuring.intervals import (
    BUILDS,
    FEWEST_BLOCKS,
    MOST_BLOCKS,
    count_blocks,
    count_fewest,
    divide_confidence,
    interval_of_blocks,
    interval_of_builds,
    one_sided,
    quantile_of_student,
)


@pytest.mark.parametrize(("options", "confidence"), [((), 0.99), ((one_sided(0.99),), 0.98)])
def test_interval_cuts_as_many_averages_as_the_signed_ranks_allow(options, confidence, n=15):
    """By brute force: the k-th smallest average is above the centre if fewer than k averages are below it."""
    sums = [sum(itertools.compress(range(1, n + 1), signs)) for signs in itertools.product((0, 1), repeat=n)]
    k = max(k for k in range(n * n) if 2 * sum(total < k for total in sums) <= (1 - confidence) * 2**n)
    values = random.Random(n).sample([2**i for i in range(n)], n)
    averages = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    middle = statistics.median(averages)
    wider = [middle + 1.25 * (end - middle) for end in (averages[k - 1], averages[-k])]
    assert interval_of_blocks(values, *options) == pytest.approx((middle, *wider))


@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=15, max_size=30),
    scale=st.floats(0.1, 100) | st.floats(-100, -0.1),
    shift=st.floats(-1e3, 1e3),
)
def test_interval_holds_its_middle_and_moves_grows_and_turns_round_with_the_values(values, scale, shift):
    middle, low, high = interval_of_blocks(values)
    assert low <= middle <= high and min(values) <= middle <= max(values)
    expected = [shift + scale * end for end in ((middle, low, high) if scale > 0 else (middle, high, low))]
    assert interval_of_blocks([shift + scale * value for value in values]) == pytest.approx(expected, abs=1e-6)


def draw(generator, n, rho=0.0, outliers=0.0):
    """Normal noise around 1, in which each value resembles the one before; some values are far off."""
    value, values = generator.gauss(0, 1), []
    for _ in range(n):
        values.append(1 + value + (generator.random() < outliers) * generator.choice([-10, 10]))
        value = rho * value + math.sqrt(1 - rho**2) * generator.gauss(0, 1)
    return values


@pytest.mark.parametrize(("rho", "outliers"), [(0, 0), (0.2, 0), (0.2, 0.05)])
@pytest.mark.parametrize("n", [15, 40])
def test_interval_covers_the_centre_and_is_hardly_wider_than_that_takes(n, rho, outliers):
    """Student's t is the narrowest interval for normal noise: with the factor for dependence, ours is no wider than it
    by more than a tenth. Half the width would cover too little, and twice the width would be wider than that.
    """
    generator = random.Random(f"{n} {rho} {outliers}")
    found = [interval_of_blocks(draw(generator, n, rho, outliers)) for _ in range(800)]
    covered = sum(low <= 1 <= high for _, low, high in found) / len(found)
    assert covered >= 0.985 - 3 * math.sqrt(0.985 * 0.015 / len(found))
    if not outliers:
        student = {15: 2.977, 40: 2.708}[n] / math.sqrt(n)
        width = statistics.median((high - low) / 2 for _, low, high in found)
        assert 0.95 < width / (1.25 * student) < 1.15


def test_one_block_that_was_held_up_does_no_harm():
    values = draw(random.Random(1), 15)
    _, low, high = interval_of_blocks(values)
    _, held_up_low, held_up_high = interval_of_blocks([*values[:-1], 1000.0])
    assert held_up_high - held_up_low < 2 * (high - low)


def test_the_interval_of_builds_is_students():
    """Four values, three degrees of freedom: 5.841 standard errors on each side at 99 %, 4.541 at 98 %."""
    assert interval_of_builds([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 2.5 - 3.770, 2.5 + 3.770), abs=1e-3)
    generator = random.Random(2)
    found = [interval_of_builds(draw(generator, BUILDS), 0.98) for _ in range(2000)]
    assert sum(low <= 1 <= high for _, low, high in found) / len(found) == pytest.approx(0.98, abs=0.01)


@pytest.mark.parametrize(
    ("freedom", "confidence", "quantile"),
    [
        (1, 0.99, 63.657),
        (2, 0.99, 9.925),
        (3, 0.99, 5.841),
        (4, 0.99, 4.604),
        (9, 0.99, 3.250),
        (19, 0.99, 2.861),
        (10, 0.95, 2.228),
        (120, 0.99, 2.617),
        (3, 0.998, 10.215),
    ],
)
def test_the_quantiles_of_student_are_those_of_the_tables(freedom, confidence, quantile):
    assert quantile_of_student(freedom, confidence) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize("comparisons", [1, 2, 9, 31])
def test_where_many_are_compared_with_one_all_intervals_hold_together(comparisons):
    """Of simulated tables of so many true differences of 0, at most 1 in 100 has one that says otherwise."""
    generator, confidence, wrong = random.Random(comparisons), divide_confidence(comparisons), 0
    for _ in range(tables := 1500 if comparisons < 31 else 500):
        intervals = (
            interval_of_builds([generator.gauss(0, 1) for _ in range(5)], confidence) for _ in range(comparisons)
        )
        wrong += any(low > 0 or high < 0 for _, low, high in intervals)
    assert wrong <= 0.01 * tables + 3 * math.sqrt(0.01 * tables)


def test_the_fewest_blocks_are_those_that_an_interval_can_be_had_of():
    for confidence, fewest in [(0.99, 8), (0.98, 7), (0.995, 9), (divide_confidence(9), 11)]:
        assert count_fewest(confidence) == fewest and 2 / 2**fewest <= 1 - confidence + 1e-12 < 2 / 2 ** (fewest - 1)
        values = [float(value) for value in range(fewest)]
        _, low, high = interval_of_blocks(values, confidence)
        assert low < 0 and high > fewest - 1, "none is left out"


@pytest.mark.parametrize(("find", "expected"), [(interval_of_blocks, "8, got 7"), (interval_of_builds, "two, got 1")])
def test_too_few_values_for_an_interval(find, expected):
    with pytest.raises(ValueError, match=f"values: expected at least {expected}"):
        find([1.0] * int(expected[-1]))


@pytest.mark.parametrize("sigma", [0.001, 0.04, 0.05, 1.0])
def test_as_many_blocks_as_the_first_ones_ask_for(sigma):
    """Two stages: with the number that 15 blocks give, the interval comes out as wide as was asked for, or narrower."""
    generator, widths, counts = random.Random(f"{sigma}"), [], []
    for _ in range(200):
        first = [sigma * (value - 1) for value in draw(generator, FEWEST_BLOCKS)]
        counts.append(count_blocks(first, 0.03))
        rest = [sigma * (value - 1) for value in draw(generator, counts[-1] - FEWEST_BLOCKS)]
        _, low, high = interval_of_blocks([*first, *rest])
        widths.append(math.expm1((high - low) / 2))
    if sigma < 0.01 or sigma > 0.5:
        assert set(counts) == {FEWEST_BLOCKS if sigma < 0.01 else MOST_BLOCKS}
    else:
        assert FEWEST_BLOCKS < statistics.median(counts) < MOST_BLOCKS
        assert 0.02 < statistics.median(widths) < 0.031


def test_a_table_of_very_many_variants_takes_the_blocks_that_its_intervals_ask_for():
    confidence = divide_confidence(200)
    assert count_blocks([0.0] * FEWEST_BLOCKS, 0.02, confidence) == count_fewest(confidence) > FEWEST_BLOCKS
