"""Tests of effgpu.comparison: an interval that covers, a verdict inside the evidence, a table that says it."""

import html
import json
import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effgpu import comparison, power
from effgpu.comparison import BASELINE_FAILED, MIME_TYPE, Comparison, Ratio, compare
from effgpu.device import Device
from effgpu.measurement import OUT_OF_MEMORY, Measurement, rank_interval

CPU = Device("Test CPU", "cpu", None, 2, versions={"python": "3.11.0", "torch": "2.15.0"})
GPU = Device("NVIDIA Test", "cuda", 2**36, 16, 132, (9, 0), "580.1", {"bf16": "yes"}, {"torch": "2.15", "cuda": "13.0"})
positive = st.floats(1e-6, 1e6)


@st.composite
def measurements(draw, label, rounds, device):
    if draw(st.booleans()) and draw(st.booleans()):
        return Measurement(label, (), device, failed=OUT_OF_MEMORY)
    times = tuple(draw(st.lists(positive, min_size=rounds, max_size=rounds)))
    energies = tuple(draw(st.one_of(st.just(()), st.lists(positive, min_size=rounds, max_size=rounds))))
    peak = draw(st.none() | st.integers(0, 2**40))
    reserved = draw(st.none() | st.integers(0, 2**40))
    items, flops = draw(st.none() | positive), draw(st.none() | positive)
    return Measurement(label, times, device, items, draw(st.text(max_size=9)), peak, reserved, energies, flops)


@st.composite
def comparisons(draw):
    labels = draw(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4, unique=True))
    rounds, device = draw(st.integers(6, 10)), draw(st.sampled_from([CPU, GPU]))
    return Comparison("some_name", tuple(draw(measurements(label, rounds, device)) for label in labels))


def pair(ours, theirs, device=CPU, **fields):
    return Comparison(
        "pair",
        (Measurement("theirs", tuple(theirs), device, **fields), Measurement("ours", tuple(ours), device, **fields)),
    )


# The ratio


def test_a_ratio_of_another_quantity_is_refused():
    with pytest.raises(ValueError, match=r"^quantity: expected one of \['time', 'memory', 'energy'\], got 'speed'"):
        pair([1.0] * 8, [1.0] * 8).ratio("ours", "speed")


def test_a_thousand_rounds_are_told_at_once(make_measurement):
    result = Comparison("many", (make_measurement("a", rounds=1500), make_measurement("b", 0.01, rounds=1500)))
    assert "faster" in repr(result)


# Ratios and verdicts


@given(
    st.lists(st.tuples(positive, positive), min_size=8, max_size=12),
    st.floats(1e-3, 1e3),
    st.data(),
)
def test_ratios_know_no_scale_and_no_drift_that_both_share(pairs, scale, data):
    drift = data.draw(st.lists(st.floats(0.1, 10), min_size=len(pairs), max_size=len(pairs)))
    ours, theirs = zip(*pairs)
    ratio = pair(ours, theirs).time_ratio("ours")
    scaled = pair([o * scale * d for o, d in zip(ours, drift)], [t * scale * d for t, d in zip(theirs, drift)])
    again = scaled.time_ratio("ours")
    assert (again.value, again.low, again.high) == pytest.approx((ratio.value, ratio.low, ratio.high))
    assert ratio.low <= ratio.value <= ratio.high
    assert pair(ours, theirs, energies=tuple(theirs)).energy_ratio("ours").value == 1


@given(st.lists(st.tuples(st.floats(0.9, 1.1), st.floats(0.9, 1.1)), min_size=8, max_size=12))
def test_faster_or_slower_only_where_the_whole_interval_is(pairs):
    result = pair(*zip(*pairs))
    _, low, high = rank_interval([math.log(ours / theirs) for ours, theirs in pairs])
    expected = "faster" if high < 0 else "slower" if low > 0 else "within noise"
    assert result.verdict("ours") == expected
    assert result.verdict("theirs") == "baseline"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ([0.98] * 8, "faster"),
        ([1.02] * 8, "slower"),
        ([1.0] * 8, "within noise"),
        ([0.5] * 7 + [1.0], "within noise"),  # of eight rounds all must agree
        ([0.5] * 20 + [2.0] * 2, "faster"),  # of more, a few may not
    ],
)
def test_verdicts(ours, verdict):
    assert pair(ours, [1.0] * len(ours)).verdict("ours") == verdict


@pytest.mark.parametrize("rounds", [8, 15, 16, 17, 40])
def test_variants_that_disturb_each_other_are_told_from_sixteen_rounds_on(rounds):
    """Half of its rounds, in which another one runs before it, take twice the time; and the machine slows down."""
    drift = [1 + 0.01 * number for number in range(rounds)]
    ours = [d * (2 if number % 2 else 1) for number, d in enumerate(drift)]
    result = pair(ours, drift)
    assert result.disturbed() == (["ours"] if rounds >= 16 else [])
    told = "Disturbed by what ran just before: ours."
    assert (told in repr(result)) == (told in result._repr_html_()) == (rounds >= 16)


def test_chance_alone_is_hardly_ever_called_a_disturbance():
    draw = random.Random(0)
    results = [pair(*([draw.gauss(1, 0.1) for _ in range(20)] for _ in range(2))) for _ in range(500)]
    assert sum(len(result.disturbed()) for result in results) <= 5  # of a thousand, at 99.9 %


def test_items_that_differ_count_in_time_and_energy_but_not_in_memory(make_measurement):
    fields = {"energies": (4.0,) * 8, "peak_allocated": 100}
    small = make_measurement("small", 0.01, items=8, **fields)
    large = make_measurement("large", 0.02, items=32, **fields)
    result = Comparison("items", (small, large))
    assert result.time_ratio("large").value == pytest.approx(0.5)
    assert result.energy_ratio("large").value == pytest.approx(0.25)
    assert result.memory_ratio("large") == Ratio(1, 1, 1)
    assert result.verdict("large") == "faster"


def test_ratios_of_what_was_not_measured_are_none(make_measurement):
    result = Comparison("none", (make_measurement("a"), make_measurement("b", peak_allocated=None)))
    assert result.energy_ratio("b") is None and result.memory_ratio("b") is None
    no_base = Comparison("none", (make_measurement("a", peak_allocated=0), make_measurement("b")))
    assert no_base.memory_ratio("b") is None


def test_a_round_too_short_for_the_clock_is_left_out(cpu):
    rows = (Measurement("a", (1.0,) * 9, cpu), Measurement("b", (0.0, *(0.5,) * 8), cpu))
    assert Comparison("some", rows).time_ratio("b").value == 0.5


def test_a_baseline_out_of_memory_leaves_no_ratios(make_measurement):
    result = Comparison(
        "oom", (make_measurement("a", failed=True), make_measurement("b"), make_measurement("c", failed=True))
    )
    assert [result.verdict(label) for label in "abc"] == [OUT_OF_MEMORY, BASELINE_FAILED, OUT_OF_MEMORY]
    assert result.time_ratio("b") is None and result.memory_ratio("b") is None
    headings, rows = result.table()
    assert headings == ["variant", "time per step", "peak memory", "verdict"]
    assert [row[-1] for row in rows] == [OUT_OF_MEMORY, BASELINE_FAILED, OUT_OF_MEMORY]
    assert "b" in repr(result) and "out of memory" in result._repr_html_()


def test_a_label_that_is_not_there(make_measurement):
    result = Comparison("some", (make_measurement("a"), make_measurement("b")))
    assert result["b"].label == "b" and [m.label for m in result] == ["a", "b"]
    assert len(result) == 2 and "b" in result and "c" not in result
    with pytest.raises(KeyError, match=r"no variant 'c' in 'some', only \['a', 'b'\]"):
        result["c"]


# As a table, as JSON


def test_table_leaves_out_what_was_not_measured(make_measurement):
    plain = Comparison("t", (make_measurement("a", 0.02), make_measurement("b", 0.01, failed=False)))
    assert plain.table()[0] == ["variant", "time per step", "time", "peak memory", "memory", "verdict"]
    rich = Comparison("t", tuple(replace(m, items=32, unit="rows", flops=4e9, energies=(1.0,) * 8) for m in plain))
    assert rich.table()[0] == [
        *("variant", "time per step", "throughput", "FLOP rate", "time", "peak memory", "memory"),
        *("energy per step", "energy", "verdict"),
    ]
    assert rich.table()[1][1] == [
        *("b", "10.0 ms", "3,200 rows/s", "400 GFLOP/s", "0.500 ×", "1000 B", "1.000 ×", "1.00 J", "1.000 ×", "faster")
    ]


def test_a_ratio_shows_its_interval():
    assert str(Ratio(0.5, 0.48, 0.52)) == "0.500 × [0.480, 0.520]"
    assert str(Ratio(0.5, 0.5, 0.5)) == "0.500 ×"
    assert str(Ratio(25.04, 24.26, 26)) == "25.0 × [24.3, 26.0]"


@given(comparisons())
def test_shows_every_variant_its_verdict_and_the_device(result):
    page = result._repr_html_()
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", page, re.DOTALL)]
    for m in result:
        assert m.label in repr(result) and m.label in cells
        assert result.verdict(m.label) in repr(result) and result.verdict(m.label) in cells
    for text in (repr(result), html.unescape(page)):
        assert result.device.label in text and f"torch {result.device.versions['torch']}" in text
        assert ("CPU's" in text) == (result.device.kind == "cpu")


def test_html_escapes_labels_names_and_devices(make_measurement, cpu):
    evil = "<script>alert('x')</script>"
    device = replace(cpu, name=f"CPU {evil}")
    result = Comparison("a", (make_measurement(evil, device=device), make_measurement(f'"{evil}&', device=device)))
    page = result._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert set(re.findall(r"</?([a-z]+)", page)) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


@given(comparisons())
def test_a_notebook_keeps_the_data_beside_the_table(result):
    bundle = json.loads(json.dumps(result._repr_mimebundle_()))
    assert bundle.keys() == {"text/plain", "text/html", MIME_TYPE}
    assert Comparison.from_dict(bundle[MIME_TYPE]) == result
    assert bundle["text/plain"] == repr(result) and bundle["text/html"] == result._repr_html_()


def spoil(stored, path, value):
    *parents, last = path
    for key in parents:
        stored = stored[key]
    stored[last] = value


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["name"], "../elsewhere"),
        (["name"], None),
        (["device"], None),
        (["device", "colour"], "red"),
        (["measurements"], []),
        (["measurements"], None),
        (["measurements", 0], "row"),
        (["measurements", 0, "times"], None),
        (["measurements", 0, "times"], ["soon"]),
        (["measurements", 0, "colour"], "red"),
        (["device", "name"], None),
        (["device", "kind"], "tpu"),
        (["device", "memory"], "8 GiB"),
        (["device", "cores"], 2.5),
        (["device", "cores"], True),
        (["device", "multiprocessors"], "many"),
        (["device", "capability"], [9]),
        (["device", "driver"], 580),
        (["device", "supports"], {"bf16": True}),
        (["device", "versions"], ["torch"]),
        (["measurements", 0, "times"], "12345678"),
        (["measurements", 0, "times"], ["1"] * 8),
        (["measurements", 0, "energies"], [True] * 8),
        (["measurements", 0, "peak_allocated"], -1),
        (["measurements", 0, "peak_allocated"], True),
        (["measurements", 0, "peak_reserved"], 0.5),
        (["measurements", 0, "failed"], True),
    ],
)
def test_what_is_no_comparison_is_refused(make_measurement, path, value):
    stored = Comparison("some", (make_measurement("a"), make_measurement("b"))).to_dict()
    spoil(stored, path, value)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Comparison.from_dict(json.loads(json.dumps(stored)))


# compare


def test_compare_measures_all_and_keeps_their_order(tiny, no_collecting):
    result = compare({"first": tiny, "second": tiny}, name="two", items=4, unit="rows", seconds=0.001)
    assert (result.name, [m.label for m in result], result.baseline.label) == ("two", ["first", "second"], "first")
    assert result.memory_ratio("second") == Ratio(1, 1, 1)
    assert len(result["second"].times) >= 8 and result.time_ratio("second").value > 0
    assert result.verdict("second") in ("faster", "slower", "within noise")


@pytest.mark.parametrize("failing", ["first", "second"])
def test_compare_survives_out_of_memory(tiny, failing, no_collecting):
    def too_large():
        return lambda: torch.empty(2**60, dtype=torch.uint8)

    result = compare({"first": tiny, "second": tiny} | {failing: too_large}, seconds=0.001, rounds=8)
    assert result[failing].failed == result.verdict(failing) == OUT_OF_MEMORY
    assert sum(m.failed is None for m in result) == 1 and OUT_OF_MEMORY in repr(result)


@pytest.mark.parametrize("name", ["", "a b", "../a", "a/b", "a\\b", ".hidden", "a\n", "ä", "a:b", "-a", None, 3])
def test_names_that_are_no_file_name(name, tiny):
    with pytest.raises((TypeError, ValueError), match=r"^name: expected"):
        compare({"a": tiny}, name=name)


@pytest.mark.parametrize("name", ["a", "mixed_precision", "08_mixed-precision.v2", "_a"])
def test_names_that_are_one(name):
    assert comparison.check_name(name) == name


@pytest.mark.parametrize("rounds", [1, 7, np.int64(3), 0, -3, True, 8.5, math.nan])
def test_compare_needs_eight_rounds(rounds, tiny):
    with pytest.raises(ValueError, match=r"^rounds: expected"):
        compare({"a": tiny, "b": tiny}, rounds=rounds)


@pytest.mark.gpu
def test_a_tenth_more_work_is_slower_on_this_gpu():
    def products(count):
        def variant():
            a, b = torch.randn(2, 2048, 2048, device="cuda")
            return lambda: [a @ b for _ in range(count)]

        return variant

    result = compare({"20": products(20), "22": products(22)}, seconds=1, energy=False)
    assert result.verdict("22") == "slower"
    assert result.time_ratio("22").value == pytest.approx(1.1, abs=0.05)


@pytest.mark.gpu
def test_the_same_step_twice_is_within_noise(monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: None)

    def variant():
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, device="cuda") for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(2048, 2048, device="cuda")

        def step():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    compare({"warm": variant}, seconds=1)  # until the clock has risen from idle
    results = [compare({"a": variant, "again": variant}, seconds=0.5) for _ in range(10)]
    verdicts = [result.verdict("again") for result in results]
    assert verdicts.count("within noise") >= 9, [str(result.time_ratio("again")) for result in results]
    for result in results:
        assert result.memory_ratio("again").value == pytest.approx(1, abs=0.01)
        assert result.time_ratio("again").value == pytest.approx(1, abs=0.05)
