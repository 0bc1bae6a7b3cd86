"""Tests of effgpu.units: three digits that read back as the value, in order, and never an exponent; ratios in words."""

import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effgpu import units
from effgpu.units import (
    GiB,
    KiB,
    MiB,
    format_bytes,
    format_change,
    format_count,
    format_ends,
    format_joules,
    format_seconds,
    format_speed,
    read_ratio,
)

PREFIXES = {"µ": 1e-6, "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
SCALES = {prefix + unit: scale for prefix, scale in PREFIXES.items() for unit in ("s", "J", "FLOP", " items")}
SCALES |= {"items": 1, "B": 1, "KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": 2**40}


@pytest.mark.parametrize(
    ("format_value", "values"),
    [
        (format_seconds, st.floats(1e-9, 119.9)),
        (format_bytes, st.integers(1, 2**50)),
        (format_joules, st.floats(1e-9, 1e9)),
        (partial(format_count, unit="FLOP"), st.floats(1e-6, 1e18)),
        (partial(format_count, unit="items"), st.floats(1e-6, 1e18)),
    ],
)
@given(data=st.data())
def test_a_plain_number_and_a_unit_read_back_within_three_digits(format_value, values, data):
    value = data.draw(values)
    number, unit = re.fullmatch(r"(-?[\d,]+(?:\.\d+)?) (.+)", format_value(value)).groups()
    assert float(number.replace(",", "")) * SCALES[unit] == pytest.approx(value, rel=0.00501)


@pytest.mark.parametrize(
    "tell", [format_seconds, format_bytes, format_joules, format_count, format_speed, format_change]
)
def test_what_was_not_measured_is_a_dash(tell):
    assert tell(None) == units.NOT_MEASURED == "–"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_seconds(0.0123), "12.3 ms"),
        (format_seconds(0.00099951), "1.00 ms"),
        (format_seconds(3e-10), "0.000300 µs"),
        (format_seconds(0), "0 s"),
        (format_seconds(120), "2 min 00 s"),
        (format_seconds(7200), "2 h 00 min"),
        (format_bytes(1_500_000), "1.43 MiB"),
        (format_bytes(1024), "1.00 KiB"),
        (format_bytes(MiB - 500), "1.00 MiB"),
        (format_bytes(0), "0 B"),
        (format_joules(0.25), "250 mJ"),
        (format_joules(999.5), "1.00 kJ"),
        (format_count(2853, "samples/s"), "2,850 samples/s"),
        (format_count(999_500, "items"), "1.00 M items"),
        (format_count(2.5e6), "2.50 M"),
        (format_count(1.3e12, "FLOP/s"), "1.30 TFLOP/s"),
        (format_speed(0.54, 0.5, 0.58), "1.85 × faster [1.72, 2.00]"),
        (format_speed(1234.0), "1234 × slower"),
        (format_speed(1 / 1.0049), "same"),
        (format_speed(1 / 1.0051), "1.01 × faster"),
        (format_speed(1.004, 1.002, 1.006), "1.004 × slower [1.002, 1.01]"),
        (format_ends(0.5, 0.58), "[1.72, 2.00]"),
        (format_ends(0.98, 1.11, slower=True), "[1.02 × faster, 1.11 × slower]"),
        (format_ends(0.5, 1.2), "[1.20 × slower, 2.00 × faster]"),
        (format_ends(0.998, 1.11, slower=True), "[same, 1.11 × slower]"),
        (format_change(0.48), "−52 %"),
        (format_change(0.9996), "0 %"),
        (format_change(1.0996), "+10 %"),
        (format_change(13.5), "+1,250 %"),
        (units.singular("batches"), "batch"),
        (units.singular("samples"), "sample"),
        (units.with_article("T4"), "a T4"),
        (units.with_article("L4"), "an L4"),
        (units.with_article("11 GiB"), "an 11 GiB"),
        (units.with_article("1.1 GiB"), "a 1.1 GiB"),
        (units.with_article("110 GiB"), "a 110 GiB"),
    ],
)
def test_examples_and_boundaries(text, expected):
    assert text == expected


@given(st.floats(0.01, 1e3))
def test_a_ratio_reads_back_within_its_last_digit(ratio):
    assert read_ratio("time", format_speed(ratio)) == pytest.approx(ratio, rel=0.00505)
    told = format_change(ratio)
    assert read_ratio("memory", told) == pytest.approx(ratio, abs=0.000501 if "." in told else 0.00501)


@given(st.floats(0.01, 100), st.floats(1, 2), st.floats(1, 2))
def test_the_interval_is_told_from_low_to_high_and_never_as_a_speed_below_1(ratio, below, above):
    told = format_speed(ratio, ratio / below, ratio * above)
    value, low, high = re.findall(r"same|[\d.]+(?: × (?:faster|slower))?", told)
    assert value.endswith("slower" if ratio > 1 else "faster")
    if low[-1].isdigit():  # in the direction of the value
        low, high = low + value[-9:], high + value[-9:]
    ends = [read_ratio("end", end) for end in (low, high)]
    assert ends == pytest.approx(sorted([ratio / below, ratio * above], reverse=ratio <= 1), rel=0.00505)
    assert all(float(number) >= 1 for number in re.findall(r"\d[\d.]*", told))


@pytest.mark.parametrize(
    ("given", "ratio"),
    [(np.float32(0.5), 0.5), ("same", 1), (" 2 × slower ", 2), ("2x faster", 0.5), ("−52%", 0.48), ("-50 %", 0.5)],
)
def test_a_ratio_can_be_given_as_results_are_told(given, ratio):
    assert read_ratio("time", given) == pytest.approx(ratio) and isinstance(read_ratio("time", given), float)


@pytest.mark.parametrize(
    "wrong",
    [
        *(0, -1, math.inf, math.nan, True, None),
        *("", "2", "faster", "0 × faster", "-2 × slower", "2,5 × slower", "1.5 × slower [1.4, 1.6]", "-100 %"),
    ],
)
def test_what_is_no_ratio_is_refused_with_its_name(wrong):
    with pytest.raises(ValueError, match=r"^predicted\['a'\]: expected a ratio to the baseline, .*, got "):
        read_ratio("predicted['a']", wrong)


@pytest.mark.parametrize("wrong", [0, -1, math.inf, math.nan, True, None, "3"])
def test_what_is_not_positive_is_refused_with_its_name(wrong):
    with pytest.raises(ValueError, match=r"^seconds: expected a positive number, got "):
        units.check_positive(seconds=wrong)


def test_names_are_joined_as_people_do():
    told = [units.join_names(names) for names in ([], ["T4"], ["T4", "P100"], ["T4", "P100", "V100"])]
    assert told == ["", "T4", "T4 and P100", "T4, P100 and V100"]


def test_lines_that_say_the_same_of_several_places_become_one():
    lines = ["not known: a", "assumed: a.py:3 reads a number", "assumed: b.py:9 reads a number", "not known: a"]
    lines += ["b.py:9 decides", "assumed: b.py:9 reads a number"]
    told = ["not known: a", "assumed: a.py:3, b.py:9: reads a number", "b.py:9 decides"]
    assert units.join_places(lines) == told and units.join_places(told[::2]) == told[::2]


def test_values_that_are_taken_in_one_place_are_one_line():
    lines = [f"assumed: {place} reads a number, taken as {value}" for place in ("a.py:3", "b.py:9") for value in "12"]
    assert units.join_places([*lines[::-1], "c"]) == ["assumed: b.py:9, a.py:3: reads a number, taken as 2, 1", "c"]
