"""Tests of effgpu.comparison: verdicts at their borders, ratios in words, predictions, a table that is consistent."""

import html
import json
import math
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from conftest import predicted_sizes
from hypothesis import example, given
from hypothesis import strategies as st

from effgpu import comparison
from effgpu.comparison import (
    BASELINE_FAILED,
    FASTER,
    INCONCLUSIVE,
    MIME_TYPE,
    SAME,
    SLOWER,
    Comparison,
    Ratio,
    compare,
)
from effgpu.measuring.device import Device
from effgpu.measuring.intervals import FEWEST_BLOCKS, interval_of_blocks
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.predicting.full_size import tell_ratio
from effgpu.predicting.gpus import known_gpus
from effgpu.units import GiB

CPU = Device("Test CPU", "cpu", None, 2, versions={"python": "3.11.0", "torch": "2.15.0"})
GPU = Device("NVIDIA Test", "cuda", 2**36, 16, 132, (9, 0), "580.1", {"bf16": "yes"}, {"torch": "2.15", "cuda": "13.0"})
positive = st.floats(1e-6, 1e6)
QUANTITIES = ("time", "memory", "energy")


def turns(times):
    return tuple((time, time) for time in times)


def pair(ours, theirs, device=CPU, **fields):
    both = {"theirs": theirs, "ours": ours}
    return Comparison("pair", tuple(Measurement(name, turns(times), device, **fields) for name, times in both.items()))


def cells(result, label):
    """A variant's row as it is shown: a list of cells for each heading, as some headings come more than once."""
    headings, rows = result.table()
    (row,) = (row for row in rows if row[0] == label)
    return {heading: [cell for name, cell in zip(headings, row) if name == heading] for heading in headings}


# Verdicts


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (0.8, 0.5, 0.9, FASTER),
        (1.2, 1.1, 2.0, SLOWER),
        (1.0, 0.9, 1.1, INCONCLUSIVE),
        (1.1, 1.0051, 1.2, SLOWER),
        (1.1, 1.0049, 1.2, INCONCLUSIVE),  # it would be shown as [1.00, 1.20]
        (0.9, 0.8, 1 / 1.0051, FASTER),
        (0.9, 0.8, 1 / 1.0049, INCONCLUSIVE),
        (1.011, 1.006, 1.02, SLOWER),
        (1.009, 1.006, 1.02, INCONCLUSIVE),  # an effect too small to matter, which may yet be larger
        (1.0, 1.0, 1.0, SAME),
        (1.008, 1.006, 1.01, SAME),
        (1.0, 1 / 1.0101, 1.0, INCONCLUSIVE),
    ],
)
def test_each_verdict_holds_up_to_its_very_border(value, low, high, verdict):
    assert Ratio(value, low, high).verdict() == verdict


def test_the_same_is_decided_by_two_one_sided_tests():
    """At 99 % each, which is within the ends of the 98 % interval and not of the wider one that is shown."""
    assert Ratio(1.0, 0.985, 1.015, within=0.0099).verdict() == SAME
    assert Ratio(1.0, 0.995, 1.005, within=0.0101).verdict() == INCONCLUSIVE
    noise = random.Random(4)
    ours = [1 + noise.gauss(0, 0.012) for _ in range(20)]
    ratio = pair(ours, [1.0] * 20).time_ratio("ours")
    _, low, high = interval_of_blocks([math.log(time) for time in ours], 0.98)
    assert (
        ratio.within == pytest.approx(math.expm1(max(high, -low))) and ratio.within < max(ratio.high, 1 / ratio.low) - 1
    )


@given(st.floats(0.5, 2), st.floats(1, 1.5), st.floats(1, 1.5))
def test_what_is_told_never_contradicts_itself(value, below, above):
    """Never "1.00 × faster", and no interval of a difference shows 1.00 as an end."""
    told = Ratio(value, value / below, value * above).tell()
    if "×" in told:
        assert "1.00" not in told


@pytest.mark.parametrize(("min_effect", "verdict"), [(0.03, FASTER), (0.05, SAME)])
def test_the_smallest_effect_that_matters_decides_what_is_the_same(min_effect, verdict):
    result = pair([0.96] * 15, [1.0] * 15)
    assert replace(result, min_effect=min_effect).verdict("ours") == verdict


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([0.98] * 15, FASTER),
        ([1.003] * 15, SAME),
        ([0.5] * 14 + [1.5], FASTER),  # one block that was held up does not decide
        ([0.5] * 10 + [2.0] * 5, INCONCLUSIVE),
    ],
)
def test_what_blocks_that_agree_or_do_not_come_to(ours, verdict):
    assert pair(ours, [1.0] * len(ours)).verdict("ours") == verdict


def test_with_fewer_than_fifteen_blocks_nothing_can_be_concluded():
    result = pair([0.5] * 14, [1.0] * 14)
    assert result.time_ratio("ours") is None and result.verdict("ours") == result.tell("ours") == INCONCLUSIVE
    assert result.value("ours", "time") == 0.5 and cells(result, "ours")["against the baseline"] == [INCONCLUSIVE]


def test_four_builds_are_four_observations():
    result = pair([0.50, 0.51, 0.49, 0.50], [1.0] * 4, builds=4)
    ratio = result.time_ratio("ours")
    assert ratio.value == pytest.approx(0.5, rel=1e-3) and ratio.high / ratio.low == pytest.approx(1.10, abs=0.01)
    assert result.verdict("ours") == FASTER and "each was built 4 times" in repr(result)
    assert pair([0.5] * 3, [1.0] * 3, builds=4).time_ratio("ours") is None


# Words


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (Ratio(1 / 1.86, 1 / 2.01, 1 / 1.71), "1.86 × faster [1.71, 2.01]"),
        (Ratio(1.43, 1.42, 1.45), "1.43 × slower [1.42, 1.45]"),
        (Ratio(1.001, 0.998, 1.004), "same (within 1 %)"),
        (Ratio(1.0, 1 / 1.12, 1.12), "inconclusive (±12 %)"),
        (Ratio(1.0, 1 / 1.023, 1.023), "inconclusive (±2.3 %)"),
    ],
)
def test_a_ratio_of_times_is_told_in_words(ratio, told):
    assert ratio.tell() == str(ratio) == told
    assert Ratio(1.0, 0.999, 1.001).tell(0.0125) == "same (within 1.25 %)"


# Ratios


@given(st.lists(st.tuples(positive, positive), min_size=15, max_size=18), st.floats(1e-3, 1e3), st.data())
def test_ratios_know_no_scale_and_no_drift_that_both_share(pairs, scale, data):
    drift = data.draw(st.lists(st.floats(0.1, 10), min_size=len(pairs), max_size=len(pairs)))
    ours, theirs = zip(*pairs)
    ratio = pair(ours, theirs).time_ratio("ours")
    scaled = pair([o * scale * d for o, d in zip(ours, drift)], [t * scale * d for t, d in zip(theirs, drift)])
    again = scaled.time_ratio("ours")
    assert again.value == pytest.approx(ratio.value, rel=1e-6)
    assert (again.low, again.high) == pytest.approx((ratio.low, ratio.high), rel=1e-3)
    assert ratio.low <= ratio.value <= ratio.high


def test_a_ratio_of_another_quantity_is_refused():
    with pytest.raises(ValueError, match=r"^quantity: expected one of \['time', 'memory', 'energy'\], got 'speed'"):
        pair([1.0] * 8, [1.0] * 8).ratio("ours", "speed")


def test_items_that_differ_count_in_time_and_energy_but_not_in_memory(make_measurement):
    fields = {"joules": 4.0, "peak_allocated": 100, "unit": "samples"}
    small = make_measurement("small", 0.01, items=8, **fields)
    large = make_measurement("large", 0.02, items=32, **fields)
    result = Comparison("items", (small, large))
    assert result.time_ratio("large").value == pytest.approx(0.5)
    assert result.ratio("large", "energy") == pytest.approx(0.25) and result.ratio("large", "memory") == 1
    assert result.verdict("large") == FASTER and result.per == "sample"
    assert result.value("small", "time") == pytest.approx(0.00125)
    assert result.value("large", "time") == pytest.approx(0.000625) and result.value("large", "energy") == 0.125
    row = cells(result, "large")
    assert row["time per sample"] == ["625 µs"] and row["throughput"] == ["1,600 samples/s"]
    assert row["energy per sample"] == ["125 mJ"] and row["change of energy"] == ["\u221275 %"]


def test_ratios_of_what_was_not_measured_are_none(make_measurement):
    result = Comparison("none", (make_measurement("a"), make_measurement("b", peak_allocated=None)))
    assert result.ratio("b", "energy") is None and result.ratio("b", "memory") is None
    no_base = Comparison("none", (make_measurement("a", peak_allocated=0), make_measurement("b")))
    assert no_base.ratio("b", "memory") is None
    assert [result.ratio("a", quantity) for quantity in QUANTITIES] == [None] * 3


def test_a_block_too_short_for_the_clock_is_left_out(cpu):
    rows = (Measurement("a", turns([1.0] * 16), cpu), Measurement("b", turns([0.0, *[0.5] * 15]), cpu))
    assert Comparison("some", rows).time_ratio("b").value == 0.5


def test_a_baseline_out_of_memory_leaves_no_ratios(make_measurement):
    result = Comparison(
        "oom", (make_measurement("a", failed=True), make_measurement("b"), make_measurement("c", failed=True))
    )
    assert [result.verdict(label) for label in "abc"] == [OUT_OF_MEMORY, BASELINE_FAILED, OUT_OF_MEMORY]
    assert result.time_ratio("b") is None and result.ratio("b", "memory") is None
    assert result.table()[0] == ["variant", "time per step", "against the baseline", "peak memory"]
    assert cells(result, "b") == {
        **{"variant": ["b"], "time per step": ["20.0 ms"]},
        **{"against the baseline": [BASELINE_FAILED], "peak memory": ["1000 B"]},
    }
    assert "b" in repr(result) and "out of memory" in result._repr_html_()


def test_a_label_that_is_not_there_is_named(make_measurement):
    result = Comparison("some", (make_measurement("a"), make_measurement("b")))
    assert result["b"].label == "b" and [m.label for m in result] == ["a", "b"]
    assert len(result) == 2 and "b" in result and "c" not in result
    with pytest.raises(KeyError, match=r"no variant 'c' in 'some', only \['a', 'b'\]"):
        result["c"]


# As a table


def test_the_table_leaves_out_what_was_not_measured(make_measurement):
    bare = Comparison("t", (make_measurement("a", peak_allocated=None), make_measurement("b", peak_allocated=None)))
    assert bare.table()[0] == ["variant", "time per step", "against the baseline"]
    plain = Comparison("t", (make_measurement("a", 0.02), make_measurement("b", 0.01)))
    assert plain.table()[0] == ["variant", "time per step", "against the baseline", "peak memory", "change of memory"]
    rich = Comparison("t", tuple(replace(m, items=32, unit="rows", joules=1.0) for m in plain))
    assert rich.table()[0] == [
        *("variant", "time per step", "throughput", "against the baseline", "peak memory", "change of memory"),
        *("energy per step", "change of energy"),
    ]
    assert rich.table()[1] == [
        ["a", "20.0 ms", "1,600 rows/s", "baseline", "1000 B", "–", "1.00 J", "–"],
        ["b", "10.0 ms", "3,200 rows/s", "2.00 × faster [2.00, 2.00]", "1000 B", "0 %", "1.00 J", "0 %"],
    ]


def test_no_figure_is_borrowed_from_another_row(make_measurement):
    rows = make_measurement("a", joules=2.0, items=4), make_measurement("b", failed=True, items=4)
    result = Comparison("t", (*rows, make_measurement("c", peak_allocated=None, items=4)))
    for label, quantities in {"b": QUANTITIES, "c": ("memory", "energy")}.items():
        assert [result.value(label, quantity) for quantity in quantities] == [None] * len(quantities)
    row = cells(result, "b")
    assert row.pop("variant") == ["b"] and row.pop("against the baseline") == [OUT_OF_MEMORY]
    assert {cell for cells in row.values() for cell in cells} == {"–"}


def shown(cell, units):
    """The number in a cell, and how far rounding to three digits may have moved it, as a share."""
    number, unit = cell.split(" ")
    return float(number.replace(",", "")) * units[unit]


SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1}
RATES = {"rows/s": 1, "M rows/s": 1e6}


@given(
    st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)), min_size=15, max_size=17),
    st.sampled_from([(1, 1), (8, 8), (8, 32), (100, 3)]),
)
@example([(0.5, 0.1)] * 8 + [(0.01, 0.9)] * 8, (8, 8))  # the medians say one thing, the pairs another
def test_a_table_never_contradicts_itself(pairs, items):
    """The time shown is the baseline's times the ratio, also where a variant's own median is another."""
    rows = [
        Measurement(label, turns(times), CPU, items=n, unit="rows") for label, times, n in zip("ab", zip(*pairs), items)
    ]
    result = Comparison("table", tuple(rows))
    of_baseline, of_b, ratio = result.value("a", "time"), result.value("b", "time"), result.time_ratio("b")
    assert of_baseline == pytest.approx(rows[0].median / (items[0] if items[0] != items[1] else 1))
    assert of_b == pytest.approx(of_baseline * ratio.value)
    told = cells(result, "b")
    seconds = shown(told[f"time per {result.per}"][0], SECONDS)
    assert seconds == pytest.approx(of_b, rel=0.006)
    assert shown(told["throughput"][0], RATES) * seconds == pytest.approx(
        1 if result.per == "row" else items[1], rel=0.012
    )
    if (words := re.match(r"(\S+) × (faster|slower)", told["against the baseline"][0])) is not None:
        factor = float(words[1]) if words[2] == SLOWER else 1 / float(words[1])
        assert seconds == pytest.approx(
            shown(cells(result, "a")[f"time per {result.per}"][0], SECONDS) * factor, rel=0.02
        )


def test_what_holds_the_clock_down_is_told(make_measurement, make_gpu):
    fields = {"device": make_gpu(), "sm_clock": 1755}
    rows = [make_measurement("a", **fields, throttled=("power cap",)), make_measurement("b", device=make_gpu())]
    told = Comparison("clock", (*rows, make_measurement("c", **fields | {"sm_clock": 1980}))).caption()
    assert "SM clock 1755 to 1980 MHz, held down by power cap." in told
    assert told.startswith("NVIDIA Test, torch 2.15.0 cuda 13.0.")
    other = Comparison("clock", (make_measurement("a"),)).caption()
    assert other == "Test CPU (CPU, 2 cores), torch 2.15.0; a CPU's times, not a GPU's."


def test_labels_names_and_devices_are_escaped(make_measurement, cpu):
    evil = "<script>alert('x')</script>"
    device = replace(cpu, name=f"CPU {evil}")
    rows = (make_measurement(evil, device=device), make_measurement(f'"{evil}&', device=device))
    page = Comparison("a", rows)._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert set(re.findall(r"</?([a-z]+)", page)) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_full_size_has_columns_and_is_stored(make_measurement):
    both = make_measurement("old"), make_measurement("new", 0.01)
    result = Comparison("big", both, full_size=predicted_sizes(20 * GiB, 5 * GiB))
    headings, rows = result.table()
    assert headings[:3] == ["variant", "T4, predicted", "peak memory on a T4, predicted"], "a CPU's times come last"
    assert rows[0][1:3] == ["4.00 s, does not fit", "20.0 GiB"] and rows[1][1:3] == [
        *("4.00 × faster [3.33, 5.00]", "5.00 GiB")
    ]
    assert "in brackets a range, not an interval" in result.caption()
    assert Comparison.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_a_predicted_difference_is_told_where_the_range_bears_it_out():
    assert tell_ratio((1.04, 0.98, 1.11)) == "1.02 × faster to 1.11 × slower"
    assert tell_ratio((1.04, 0.999, 1.11)) == "same to 1.11 × slower"
    assert tell_ratio((1.0, 0.999, 1.001)) == "same"
    assert tell_ratio((1.04, 1.01, 1.11)) == "1.04 × slower [1.01, 1.11]"


def test_steps_of_the_same_kernels_are_predicted_to_take_the_same(not_measured):
    variants = {"full": squaring, "again": squaring, "half": lambda width: squaring(width, half=True)}
    variants["compiled"] = lambda width: torch.compile(squaring(width))
    result = compare(variants, full_size={"width": 2**28}, gpus=["T4"])
    told = [result.full_size[label][0].tell_time() for label in variants]
    assert told[0].endswith(" ms") and told[1] == "same" and "faster" in told[2] and "same" not in told[3]


def test_on_a_gpu_the_measurement_comes_first_and_its_prediction_stands_beside_it(make_measurement, make_gpu):
    both = [make_measurement(label, 0.02, device=make_gpu()) for label in ("old", "new")]
    here = {label: size for label, (size,) in predicted_sizes(GiB, GiB, ("fits", "fits")).items()}
    result = Comparison("big", tuple(both), full_size=predicted_sizes(20 * GiB, 5 * GiB), here=here)
    headings, rows = result.table()
    assert headings[:4] == ["variant", "time per step, measured", "against the baseline", "predicted for this GPU"]
    assert headings[-2:] == ["T4, predicted", "peak memory on a T4, predicted"]
    assert [row[3] for row in rows] == ["4.00 s", "4.00 × faster [3.33, 5.00]"]
    assert Comparison.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_the_plot_in_words_tells_each_result(make_measurement):
    told = Comparison("some", (make_measurement("a"), make_measurement("b", 0.01))).alt_text()
    assert told == "Plot of some on Test CPU (CPU, 2 cores). a: baseline, b: 2.00 × faster [2.00, 2.00]"


# Predictions


@pytest.fixture
def not_measured(monkeypatch, make_measurement):
    """`compare` without the seconds that measuring takes."""
    monkeypatch.setattr(
        comparison, "measure_all", lambda variants, **_: [make_measurement(label) for label in variants]
    )


@pytest.fixture
def foretold(make_measurement):
    """A result with a prediction, 1.44 times slower and 52 % smaller than its baseline."""
    fields = {"a": (0.02, 1000, 2.0), "b": (0.0288, 480, 3.0), "c": (0.02, 1000, 2.0)}
    rows = [make_measurement(label, s, peak_allocated=p, joules=j) for label, (s, p, j) in fields.items()]
    predicted = {"b": {"time": 4 / 3, "memory": 0.46, "energy": 1.5}}
    return Comparison("foretold", tuple(rows), predicted)


def test_predictions_stand_beside_what_was_measured(foretold):
    row = cells(foretold, "b")
    assert foretold.table()[0] == [
        *("variant", "time per step", "against the baseline", "predicted", "peak memory", "change of memory"),
        *("predicted", "energy per step", "change of energy", "predicted"),
    ]
    assert row["against the baseline"] == ["1.44 × slower [1.44, 1.44]"]
    assert row["change of memory"] == ["\u221252 %"] and row["change of energy"] == ["+50 %"]
    assert row["predicted"] == ["1.33 × slower", "\u221254 %", "+50 %"]
    assert cells(foretold, "c")["predicted"] == ["–"] * 3
    shown = [html.unescape(cell) for cell in re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>", foretold._repr_html_())]
    for told in (repr(foretold), shown):
        assert all(cell in told for cell in [*row["predicted"], "predicted"])


def test_a_result_says_how_far_off_its_prediction_was(foretold):
    assert "Against the prediction: b time +8.0 %, memory +4.3 %, energy 0 %." in foretold.caption()
    assert "prediction" not in replace(foretold, predicted={}).caption()


def test_predictions_are_numbers_or_text_in_the_words_of_results(tiny, not_measured):
    given = {"b": {"time": "2 × slower", "memory": "-52 %", "energy": np.float64(0.5)}, "c": {"time": "same"}, "d": {}}
    result = compare(dict.fromkeys("abcd", tiny), predicted=given)
    assert result.predicted == {"b": {"time": 2, "memory": 0.48, "energy": 0.5}, "c": {"time": 1}, "d": {}}
    assert Comparison.from_dict(json.loads(json.dumps(result.to_dict()))) == result


NO_RATIO = "expected a ratio to the baseline, a positive number or text as '2 × faster' or '-50 %', got"


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"x": {"time": 2}}, ValueError, ": expected labels out of ['b'], the variants but the baseline, got 'x'"),
        (
            {"b": {"speed": 2}},
            ValueError,
            "['b']: expected quantities out of ['time', 'memory', 'energy'], got 'speed'",
        ),
        ({"b": {"time": 0}}, ValueError, f"['b']['time']: {NO_RATIO} 0"),
        ({"b": 2}, TypeError, "['b']: expected a mapping such as dict(time=0.5), got 2"),
        ([("b", 2)], TypeError, ": expected a mapping of labels to quantities, got list"),
    ],
)
def test_a_prediction_that_is_none_is_named_before_anything_is_built(given, error, message):
    built = []
    with pytest.raises(error, match=f"^{re.escape('predicted' + message)}$"):
        compare({"a": lambda: built.append("a"), "b": lambda: built.append("b")}, predicted=given)
    assert built == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_effect": 0}, "min_effect: expected a positive number, got 0"),
        ({"min_effect": 1}, "min_effect: expected a share below 1, such as 0.01 for 1 %, got 1"),
        ({"full_size": {"c": lambda: None}}, "full_size: expected labels out of ['a', 'b'], got 'c'"),
        ({"full_size": {}}, "full_size: expected at least one labelled function, got an empty mapping"),
        ({"gpus": ["T4", "Z80"]}, f"gpu: expected one of {', '.join(known_gpus())} or a size as \"16 GiB\", got 'Z80'"),
    ],
)
def test_other_bad_arguments_are_named_before_anything_is_built(options, message):
    built = []
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compare({"a": lambda: built.append("a"), "b": lambda: built.append("b")}, **options)
    assert built == []


# As JSON


def test_a_notebook_keeps_the_data_beside_the_table(foretold, make_measurement, make_gpu):
    fields = {"device": make_gpu(), "items": 8, "throttled": ("power cap",), "sm_clock": 1000}
    other = Comparison("other", (make_measurement("a", **fields), make_measurement("b", failed=True, **fields)))
    for result in (foretold, other):
        bundle = json.loads(json.dumps(result._repr_mimebundle_()))
        assert bundle.keys() == {"text/plain", "text/html", MIME_TYPE}
        assert Comparison.from_dict(bundle[MIME_TYPE]) == result
        assert bundle["text/plain"] == repr(result) and bundle["text/html"] == result._repr_html_()


def test_a_field_of_another_edition_is_left_out(make_measurement):
    result = Comparison("some", (make_measurement("a"),))
    stored = result.to_dict()
    stored["device"]["context"] = stored["measurements"][0]["colour"] = None
    assert Comparison.from_dict(stored) == result


def spoil(stored, path, value):
    *parents, last = path
    for key in parents:
        stored = stored[key]
    stored[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["name"], "../elsewhere"),
        (["measurements"], []),
        (["measurements", 0, "turns"], None),
        (["measurements", 0, "turns"], [1.0] * 8),
        (["measurements", 0, "joules"], "much"),
        (["device", "versions"], ["torch"]),
        (["predicted"], {"c": {"time": 2}}),
        (["full_size"], {"b": 3}),
    ],
)
def test_what_is_no_comparison_is_refused(make_measurement, path, value):
    stored = Comparison("some", (make_measurement("a"), make_measurement("b"))).to_dict()
    stored = json.loads(json.dumps(stored))
    assert len(Comparison.from_dict(stored)) == 2
    spoil(stored, path, value)
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        Comparison.from_dict(stored)


# compare


def test_compare_measures_all_and_keeps_their_order(tiny, no_collecting):
    result = compare({"first": tiny, "second": tiny}, name="two", items=4, unit="rows", seconds=0.001, min_effect=0.5)
    assert (result.name, [m.label for m in result], result.baseline.label) == ("two", ["first", "second"], "first")
    assert result.ratio("second", "memory") == 1 and result.min_effect == 0.5
    assert len(result["second"].times) >= FEWEST_BLOCKS
    assert result.predicted == {}


def test_compare_survives_out_of_memory(tiny, no_collecting):
    result = compare({"fits": tiny, "too large": lambda: lambda: torch.empty(2**60)}, seconds=0.001)
    assert result.verdict("too large") == OUT_OF_MEMORY in repr(result) and not result["fits"].failed


def squaring(width=8, half=False):
    """A variant that squares a vector and goes back."""
    weight = torch.zeros(width, requires_grad=True, dtype=torch.float16 if half else torch.float32)
    return lambda: (weight * weight).sum().backward()


def test_compare_predicts_full_size_without_running_it(tiny, not_measured):
    sizes = {"first": 2**40, "second": 2**30}  # 4 TiB would not be there
    variants = dict.fromkeys(sizes, tiny)
    result = compare(variants, full_size={label: partial(squaring, n) for label, n in sizes.items()}, gpus="24 GiB")
    assert [needed.verdict for (needed,) in result.full_size.values()] == ["does not fit", "fits"]
    assert {(needed.gpu, needed.seconds) for (needed,) in result.full_size.values()} == {("24 GiB", None)}
    assert 2 * 4 <= result.full_size["second"][0].allocated / 2**30 <= 6 * 4  # two to six vectors of 4 GiB


def test_full_size_as_keywords_holds_for_all_variants_on_each_gpu(not_measured):
    settings = {"fp32": {}, "fp16": {"half": True}}
    result = compare(squaring, settings, full_size={"width": 2**28}, gpus=["T4", "A100 80 GB"])
    assert result.full_size_gpus == ["T4", "A100 80 GB"]
    for full, half in zip(*result.full_size.values()):
        assert full.ratio is None and full.bound == half.bound == "memory bandwidth"
        assert 0.45 < half.ratio[0] < 0.55 and half.ratio[1] < half.ratio[0] < half.ratio[2]
        assert full.seconds[1] < full.seconds[0] < full.seconds[2] and full.products == 0 < full.others
    assert result.full_size["fp32"][0].seconds[0] > 4 * result.full_size["fp32"][1].seconds[0]


def test_on_a_gpu_that_is_known_the_measured_variants_are_predicted_as_they_are(simulate_gpu, not_measured):
    simulate_gpu("Tesla T4", (7, 5), 15 * GiB)
    settings = {"small": {"width": 2**20}, "large": {"width": 2**24}}
    result = compare(squaring, settings, full_size={"width": 2**28}, gpus="T4")
    assert {label: here.gpu for label, here in result.here.items()} == {"small": "T4", "large": "T4"}
    assert 8 < result.here["large"].ratio[0] < 20
    simulate_gpu("NVIDIA Unknown", (9, 9), 15 * GiB)
    assert compare(squaring, settings, full_size={"width": 2**28}, gpus="T4").here == {}


@pytest.mark.parametrize("name", ["", "../a", ".hidden", "a\n", None])
def test_names_that_are_no_file_name_are_refused(name, tiny):
    with pytest.raises((TypeError, ValueError), match=r"^name: expected"):
        compare({"a": tiny}, name=name)


@pytest.mark.gpu
def test_a_tenth_more_work_is_slower_on_this_gpu():
    def products(count):
        def variant():
            a, b = torch.randn(2, 2048, 2048, device="cuda")
            return lambda: [a @ b for _ in range(count)]

        return variant

    result = compare({"20": products(20), "22": products(22)}, seconds=1, energy=False)
    assert result.verdict("22") == SLOWER
    assert result.time_ratio("22").value == pytest.approx(1.1, abs=0.05)
