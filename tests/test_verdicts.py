"""Tests of effgpu.verdicts: at their borders, in words, and with their intervals."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effgpu.measuring.intervals import divide_confidence, interval_of_blocks
from effgpu.verdicts import INCONCLUSIVE, SAME, Ratio


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Ratio(1 / 1.86, 1 / 2.01, 1 / 1.71), "1.86 × faster [1.71, 2.01]"),
        (Ratio(0.9, 0.8, 1 / 1.0051), "1.11 × faster [1.01, 1.25]"),
        (Ratio(0.9, 0.8, 1 / 1.0004), "1.11 × faster [1.0004, 1.25]"),
        (Ratio(0.9, 0.8, 1.0), "inconclusive (±12 %)"),
        (Ratio(1.1, 1.0051, 1.2), "1.10 × slower [1.01, 1.20]"),
        (Ratio(1.1, 1.0049, 1.2), "1.10 × slower [1.005, 1.20]"),
        (Ratio(1.1, 1.0, 1.2), "inconclusive (±9.5 %)"),
        (Ratio(1.5, 0.5, 1.9), "inconclusive (±95 %)"),
        (Ratio(1.5, 0.2, 9.86), "inconclusive (too noisy, above ±100 %)"),
        (Ratio(1.011, 1.006, 1.02), "1.01 × slower [1.01, 1.02]"),
        (Ratio(1.009, 1.006, 1.02), "inconclusive (±0.7 %)"),  # an effect too small to matter, which may yet be larger
        (Ratio(1.0, 1.0, 1.0), "same (within 1 %)"),
        (Ratio(1.008, 1.006, 1.01), "same (within 1 %)"),
        (Ratio(1.0, 1 / 1.0101, 1.0), "inconclusive (±0.5 %)"),
    ],
)
def test_each_verdict_holds_up_to_its_very_border(ratio, told):
    assert ratio.tell() == str(ratio) == told and ratio.verdict() in told
    assert Ratio(1.0, 0.999, 1.001).tell(0.0125) == "same (within 1.25 %)"


def test_a_smaller_effect_that_matters_has_a_verdict():
    faster, slower = Ratio(0.997, 0.9965, 0.9975), Ratio(1.003, 1.0024, 1.0034)
    assert faster.tell(0.001) == "1.003 × faster [1.003, 1.004]"
    assert slower.tell(0.001) == "1.003 × slower [1.002, 1.003]"


@given(st.floats(0.5, 2), st.floats(1, 1.5), st.floats(1, 1.5))
def test_what_is_told_never_contradicts_itself(value, below, above):
    """Never "1.00 × faster", and no interval of a difference shows 1.00 as an end."""
    told = Ratio(value, value / below, value * above).tell()
    assert "×" not in told or not re.search(r"\b1\.0+\b", told)


def test_two_seeds_that_tell_nothing_have_a_verdict_among_ten_commands():
    """Student's t of two is 573 there, and no number holds the ratio at the ends."""
    ratio = Ratio.from_logs([3.4, -0.2], divide_confidence(9), builds=2)
    assert 0 < ratio.low < ratio.high < math.inf and ratio.tell() == "inconclusive (too noisy, above ±100 %)"


def test_the_same_is_decided_by_two_one_sided_tests():
    """At 99 % each, which is within the ends of the 98 % interval and not of the wider one that is shown."""
    assert Ratio(1.0, 0.985, 1.015, within=0.0099).verdict() == SAME
    assert Ratio(1.0, 0.995, 1.005, within=0.0101).verdict() == INCONCLUSIVE
    logs = [math.log(1 + 0.02 * math.sin(7 * block)) for block in range(20)]
    ratio = Ratio.from_logs(logs, 0.99)
    _, low, high = interval_of_blocks(logs, 0.98)
    assert ratio.within == pytest.approx(math.expm1(max(high, -low)))
    assert ratio.within < max(ratio.high, 1 / ratio.low) - 1


def test_more_confidence_is_a_wider_interval():
    logs = [math.log(1.0 + 0.01 * (n % 5)) for n in range(20)]
    alone, among = (Ratio.from_logs(logs, share) for share in (0.99, 0.999))
    assert among.low < alone.low < alone.value == among.value < alone.high < among.high
    assert among.within > alone.within
