"""Tests of effgpu.predicting.full_size: what is predicted of a comparison's variants, in words."""

from dataclasses import replace

import pytest
from conftest import predicted_sizes

from effgpu.predicting.full_size import tell_range
from effgpu.units import GiB


def test_a_predicted_difference_is_told_with_its_middle_whatever_the_range():
    assert tell_range((1.04, 1.01, 1.11)) == "1.04 × slower [1.01, 1.11]"
    assert tell_range((1.04, 0.98, 1.11)) == "1.04 × slower [1.02 × faster, 1.11 × slower]"
    assert tell_range((0.8, 0.5, 1.25)) == "1.25 × faster [1.25 × slower, 2.00 × faster]"
    about_the_same = "about the same [1.10 × slower, 1.11 × faster]"
    assert tell_range((1.001, 0.9, 1.1)) == tell_range((0.999, 0.9, 1.1)) == about_the_same
    assert tell_range((1.0, 1.0, 1.0)) == "same"


@pytest.mark.parametrize(
    "ratio, told",
    [
        ((0.5, 0.4, 0.6), "2.00 × faster [1.67, 2.50]"),
        ((0.5, 0.4, 1.2), "perhaps 2.00 × faster"),
        ((1.001, 0.9, 1.1), "about the same"),
        ((1.0, 1.0, 1.0), "same"),
    ],
)
def test_a_plot_says_perhaps_where_the_range_would_be_long(ratio, told):
    (size,) = predicted_sizes(GiB, GiB)["new"]
    assert replace(size, ratio=ratio).tell_time(brief=True) == told
    too_large = replace(size, ratio=ratio, verdict="does not fit")
    assert too_large.tell_time(brief=True) == f"{told}, does not fit"
