"""Tests of effgpu.comparison: verdicts at their borders, ratios in words, predictions, a table that is consistent."""

import html
import json
import re
from dataclasses import replace
from functools import partial, reduce
from operator import getitem

import numpy as np
import pytest
import torch
from conftest import predicted_sizes
from hypothesis import example, given
from hypothesis import strategies as st

from effgpu import comparison
from effgpu.comparison import CONTROL, QUANTITIES, Comparison, compare
from effgpu.measuring.device import Device
from effgpu.measuring.intervals import FEWEST_BLOCKS
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.predicting.gpus import known_gpus
from effgpu.results import comparison_from_dict
from effgpu.units import GiB
from effgpu.verdicts import FASTER, INCONCLUSIVE, SAME, SLOWER

CPU = Device("Test CPU", "cpu", None, 2)
positive = st.floats(1e-6, 1e6)


def turns(times):
    return tuple((time, time) for time in times)


def pair(ours, theirs, **fields):
    both = {"theirs": theirs, "ours": ours}
    return Comparison("pair", tuple(Measurement(name, turns(times), CPU, **fields) for name, times in both.items()))


def stored_as_json(result):
    return json.loads(json.dumps(result.to_dict()))


def cells(result, label):
    """A variant's row as it is shown: a list of cells for each heading, as some headings come more than once."""
    headings, rows = result.table()
    (row,) = (row for row in rows if row[0] == label)
    return {heading: [cell for name, cell in zip(headings, row) if name == heading] for heading in headings}


@pytest.mark.parametrize(
    ("ours", "min_effect", "verdict"),
    [
        ([0.98] * 15, 0.01, FASTER),
        ([0.96] * 15, 0.05, SAME),
        ([0.5] * 14 + [1.5], 0.01, FASTER),  # one block that was held up does not decide
        ([0.5] * 10 + [2.0] * 5, 0.01, INCONCLUSIVE),
    ],
)
def test_blocks_that_agree_decide_from_the_smallest_effect_that_matters_on(ours, min_effect, verdict):
    assert replace(pair(ours, [1.0] * 15), min_effect=min_effect).verdict("ours") == verdict


def test_with_too_few_blocks_or_builds_nothing_can_be_concluded():
    assert pair([0.5] * 3, [1.0] * 3, builds=4).time_ratio("ours") is None
    assert pair([0.0, *[0.5] * 15], [1.0] * 16).time_ratio("ours").value == 0.5, "the first is too short for the clock"
    result = pair([0.5] * 7, [1.0] * 7)
    assert result.time_ratio("ours") is None and result.verdict("ours") == result.tell("ours") == INCONCLUSIVE
    assert result.value("ours", "time") == 0.5 and cells(result, "ours")["against the baseline"] == [INCONCLUSIVE]


def test_four_builds_are_four_observations():
    result = pair([0.50, 0.51, 0.49, 0.50], [1.0] * 4, builds=4)
    assert result.tell("ours") == "2.00 × faster [1.91, 2.10]" and "each was built 4 times" in repr(result)


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


def test_items_that_differ_count_in_time_and_energy_but_not_in_memory(make_measurement):
    fields = {"joules": 4.0, "peak_allocated": 100, "unit": "samples"}
    small = make_measurement("small", 0.01, items=8, **fields)
    result = Comparison("items", (small, make_measurement("large", 0.02, items=32, **fields)))
    assert [result.ratio("large", quantity) for quantity in QUANTITIES] == pytest.approx([0.5, 1, 0.25])
    assert result.verdict("large") == FASTER and result.per == "sample"
    assert result.value("small", "time") == pytest.approx(0.00125)
    row = cells(result, "large")
    assert row["time per sample"] == ["625 µs"] and row["throughput"] == ["1,600 samples/s"]
    assert row["energy per sample"] == ["125 mJ (\u221275 %)"]
    micro = Comparison("items", tuple(replace(m, unit="steps") for m in result))
    assert cells(micro, "large")["time per step"] == ["625 µs"], "also where an item is called a step"


def test_what_was_not_measured_has_no_ratio_and_borrows_no_figure(make_measurement):
    rows = make_measurement("a", joules=2.0, items=4), make_measurement("b", failed=True, items=4)
    result = Comparison("t", (*rows, make_measurement("c", peak_allocated=None, items=4)))
    for label, quantities in {"b": QUANTITIES, "c": ("memory", "energy")}.items():
        assert all(result.value(label, each) is None is result.ratio(label, each) for each in quantities)
    assert [result.ratio("a", quantity) for quantity in QUANTITIES] == [None] * 3, "of the baseline"
    row = cells(result, "b")
    assert row.pop("variant") == ["b"] and row.pop("against the baseline") == [OUT_OF_MEMORY]
    assert {cell for cells in row.values() for cell in cells} == {"–"}
    nothing = Comparison("none", (make_measurement("a", peak_allocated=0), make_measurement("b")))
    assert nothing.ratio("b", "memory") is None


def test_a_baseline_out_of_memory_leaves_no_ratios_but_values(make_measurement):
    rows = make_measurement("a", failed=True), make_measurement("b"), make_measurement("c", failed=True)
    result = Comparison("oom", rows)
    assert [result.verdict(label) for label in "abc"] == [OUT_OF_MEMORY, comparison.BASELINE_FAILED, OUT_OF_MEMORY]
    assert result.table()[1][1] == ["b", "20.0 ms", comparison.BASELINE_FAILED, "1000 B"]


def test_a_label_or_a_quantity_that_is_not_there_is_named():
    result = pair([1.0] * 15, [1.0] * 15)
    assert result["ours"].label == "ours" and [m.label for m in result] == ["theirs", "ours"]
    assert len(result) == 2 and "ours" in result and "c" not in result
    with pytest.raises(KeyError, match=r"no variant 'c' in 'pair', only \['theirs', 'ours'\]"):
        result["c"]
    with pytest.raises(ValueError, match=r"^quantity: expected one of \['time', 'memory', 'energy'\], got 'speed'"):
        result.ratio("ours", "speed")


def test_the_table_leaves_out_what_was_not_measured(make_measurement):
    bare = Comparison("t", (make_measurement("a", peak_allocated=None), make_measurement("b", peak_allocated=None)))
    assert bare.table()[0] == ["variant", "time per step", "against the baseline"]
    fields = {"items": 32, "unit": "rows", "joules": 1.0}
    rich = Comparison("t", (make_measurement("a", 0.02, **fields), make_measurement("b", 0.01, **fields)))
    assert rich.table() == (
        ["variant", "time per step", "throughput", "against the baseline", "peak memory", "energy per step"],
        [
            ["a", "20.0 ms", "1,600 rows/s", "baseline", "1000 B", "1.00 J"],
            ["b", "10.0 ms", "3,200 rows/s", "2.00 × faster [2.00, 2.00]", "1000 B (0 %)", "1.00 J (0 %)"],
        ],
    )


UNITS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "rows/s": 1, "M rows/s": 1e6}


def shown(cell):
    """What a cell shows: the number times its unit."""
    number, unit = cell.split(" ", 1)
    return float(number.replace(",", "")) * UNITS[unit]


@given(
    st.lists(st.tuples(st.floats(1e-3, 1.0), st.floats(1e-3, 1.0)), min_size=15, max_size=17),
    st.sampled_from([(1, 1), (8, 8), (8, 32), (100, 3)]),
)
@example([(0.5, 0.1)] * 8 + [(0.01, 0.9)] * 8, (8, 8))  # the medians say one thing, the pairs another
def test_a_table_never_contradicts_itself(pairs, items):
    """The time shown is the baseline's times the ratio, also where a variant's own median is another."""
    made = zip("ab", zip(*pairs), items)
    result = Comparison("t", tuple(Measurement(a, turns(t), CPU, items=n, unit="rows") for a, t, n in made))
    per_row = result.per == "row"
    of_baseline, ratio = result.value("a", "time"), result.time_ratio("b").value
    assert of_baseline == pytest.approx(result.baseline.median / (items[0] if per_row else 1))
    told, heading = cells(result, "b"), f"time per {result.per}"
    seconds = shown(told[heading][0])
    assert seconds == pytest.approx(of_baseline * ratio, rel=0.006)
    assert shown(told["throughput"][0]) * seconds == pytest.approx(1 if per_row else items[1], rel=0.012)
    if words := re.match(r"(\S+) × (faster|slower)", told["against the baseline"][0]):
        factor = float(words[1]) if words[2] == SLOWER else 1 / float(words[1])
        assert seconds == pytest.approx(shown(cells(result, "a")[heading][0]) * factor, rel=0.02)


def test_what_holds_the_clock_down_is_told(make_measurement, make_gpu):
    slow = make_measurement("a", device=make_gpu(), sm_clock=1755, throttled=("power cap",))
    rows = slow, make_measurement("b", device=make_gpu()), make_measurement("c", device=make_gpu(), sm_clock=1980)
    told = Comparison("clock", rows).caption()
    assert told.startswith("NVIDIA Test, torch 2.15.0 cuda 13.0.")
    assert "SM clock 1755 to 1980 MHz, at times held down by power cap." in told
    other = Comparison("clock", (make_measurement("a"),)).caption()
    assert other == "Test CPU (CPU, 2 cores), torch 2.15.0; a CPU's times, not a GPU's."


def test_labels_names_and_devices_are_escaped(make_measurement, cpu):
    evil = "<script>alert('x')</script>"
    device = replace(cpu, name=evil)
    page = Comparison("a", (make_measurement(evil, device=device),))._repr_html_()
    assert page.count("&lt;script&gt;") == 2
    assert set(re.findall(r"</?([a-z]+)", page)) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}


def test_predictions_at_full_size_have_a_table_of_their_own_and_a_small_model_on_a_cpu_one_sentence(
    make_measurement, make_gpu
):
    full_size = predicted_sizes(20 * GiB, 5 * GiB)
    on_cpu = Comparison("big", (make_measurement("old"), make_measurement("new", 0.01)), full_size=full_size)
    expected = ["predicted", "T4", "peak memory on a T4"]
    rows = [["old", "4.00 s, does not fit", "20.0 GiB"], ["new", "4.00 × faster [3.33, 5.00]", "5.00 GiB"]]
    ((headings, cells, told),) = on_cpu.tables()
    assert (headings, cells) == (expected, rows)
    assert told.startswith("Predicted, at full size. Brackets hold about 9 of 10 published times")
    assert told.endswith(f"on {on_cpu.device.label}, which tells nothing of a GPU's time: old 20.0 ms; new 10.0 ms.")
    here = {label: size for label, (size,) in predicted_sizes(GiB, GiB, ("fits", "fits")).items()}
    on_gpu = tuple(make_measurement(label, device=make_gpu(), sm_clock=1980) for label in ("old", "new"))
    on_gpu = Comparison("big", on_gpu, full_size=full_size, here=here)
    (headings, cells, told), predicted = on_gpu.tables()
    assert headings[:4] == ["measured", "time per step", "against the baseline", "predicted for this GPU"]
    assert [row[3] for row in cells] == ["4.00 s", "4.00 × faster [3.33, 5.00]"]
    assert "Brackets: the 99 % interval" in told and "MHz" not in told, "a steady clock"
    assert predicted[:2] == (expected, rows)
    for result in (on_cpu, on_gpu):
        assert Comparison.from_dict(stored_as_json(result)) == result
        shown = [cell for headings, rows, told in result.tables() for row in [headings, *rows, [told]] for cell in row]
        assert all(cell in repr(result) and html.escape(cell) in result._repr_html_() for cell in shown)


def test_a_caption_says_what_disturbed_the_times(make_measurement, make_gpu):
    device = replace(make_gpu(), variables={"EFFGPU_AT_ONCE": "4", "CUDA_LAUNCH_BLOCKING": "1", "NEW": "1"})
    told = Comparison("busy", (make_measurement("old", device=device),)).caption()
    assert "CUDA_LAUNCH_BLOCKING=1 was set, so nothing overlaps. 4 lessons ran at once" in told and "NEW" not in told


def test_a_small_model_that_fails_on_a_cpu_says_so(make_measurement):
    rows = make_measurement("old", failed=True), make_measurement("new")
    ((*_, told),) = Comparison("big", rows, full_size=predicted_sizes(20 * GiB, 5 * GiB)).tables()
    assert told.endswith(f"old {OUT_OF_MEMORY}; new 20.0 ms.")


def test_a_prediction_is_told_by_its_gpus_name(make_measurement):
    rows = make_measurement("old"), make_measurement("new")
    result = Comparison("big", rows, full_size=predicted_sizes(20 * GiB, 5 * GiB))
    assert result.tell("new", gpu="t4") == "4.00 × faster [3.33, 5.00]"
    assert result.tell("new", "memory", gpu="T4") == "5.00 GiB"
    with pytest.raises(ValueError, match=r"gpu: expected one that 'new' is predicted for, \['T4'\], got 'L4'"):
        result.tell("new", gpu="L4")
    with pytest.raises(ValueError, match=r"quantity: expected one of \['time', 'memory'\] for a GPU, got 'energy'"):
        result.tell("new", "energy", gpu="T4")


def test_the_plot_in_words_tells_each_result(make_measurement):
    told = Comparison("some", (make_measurement("a"), make_measurement("b", 0.01))).alt_text()
    assert told == "Plot of some on Test CPU (CPU, 2 cores). a: baseline, b: 2.00 × faster [2.00, 2.00]"


@pytest.fixture
def not_measured(monkeypatch, make_measurement):
    """`compare` without the seconds that measuring takes."""
    monkeypatch.setattr(comparison, "measure_all", lambda variants, **_: list(map(make_measurement, variants)))


@pytest.fixture
def foretold(make_measurement):
    """A result with a prediction, 1.44 times slower and 52 % smaller than its baseline."""
    a, c = (make_measurement(label, peak_allocated=1000, joules=2.0) for label in "ac")
    b = make_measurement("b", 0.0288, peak_allocated=480, joules=3.0)
    return Comparison("foretold", (a, b, c), {"b": {"time": 4 / 3, "memory": 0.46, "energy": 1.5}})


def test_predictions_stand_beside_what_was_measured_with_how_far_off_they_were(foretold):
    row = cells(foretold, "b")
    assert foretold.table()[0] == [
        *("variant", "time per step", "against the baseline", "predicted", "peak memory"),
        *("predicted", "energy per step", "predicted"),
    ]
    assert row["against the baseline"] == ["1.44 × slower [1.44, 1.44]"]
    assert row["peak memory"] == ["480 B (\u221252 %)"] and row["energy per step"] == ["3.00 J (+50 %)"]
    assert row["predicted"] == ["1.33 × slower", "\u221254 %", "+50 %"]
    assert cells(foretold, "c")["predicted"] == ["–"] * 3
    for told in (repr(foretold), html.unescape(foretold._repr_html_())):
        assert all(cell in told for cell in [*row["predicted"], "predicted"])
        assert "Against the prediction: b time +8.0 %, memory +4.3 %, energy 0 %." in told
    assert "prediction" not in replace(foretold, predicted={}).caption()


def test_predictions_are_numbers_or_text_in_the_words_of_results(tiny, not_measured):
    given = {"b": {"time": "2 × slower", "memory": "-52 %", "energy": np.float64(0.5)}, "c": {"time": "same"}, "d": {}}
    result = compare(dict.fromkeys("abcd", tiny), predicted=given)
    assert result.predicted == {"b": {"time": 2, "memory": 0.48, "energy": 0.5}, "c": {"time": 1}, "d": {}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_effect": 0}, "min_effect: expected a positive number, got 0"),
        ({"min_effect": 1}, "min_effect: expected a share below 1, such as 0.01 for 1 %, got 1"),
        ({"full_size": {"c": lambda: None}}, "full_size: expected labels out of ['a', 'b'], got 'c'"),
        ({"full_size": {}}, "full_size: expected at least one labelled function, got an empty mapping"),
        ({"gpus": ["T4", "Z80"]}, f"gpu: expected one of {', '.join(known_gpus())} or a size as \"16 GiB\", got 'Z80'"),
        ({"predicted": [("b", 2)]}, "predicted: expected a mapping of labels to quantities, got list"),
        ({"predicted": {"b": 2}}, "predicted['b']: expected a mapping such as dict(time=0.5), got 2"),
        ({"predicted": {"x": {"time": 2}}}, "predicted: expected labels out of ['b'], the variants but the baseline, "),
        ({"predicted": {"b": {"speed": 2}}}, "predicted['b']: expected quantities out of ['time', 'memory', "),
        ({"predicted": {"b": {"time": 0}}}, "predicted['b']['time']: expected a ratio to the baseline, "),
        *(({"name": name}, "name: expected ") for name in ("", "../a", ".hidden", "a\n", None)),
    ],
)
def test_a_bad_argument_is_named_before_anything_is_built(options, message):
    built = []
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        compare({"a": lambda: built.append("a"), "b": lambda: built.append("b")}, **options)
    assert built == []


def test_a_notebook_keeps_the_data_beside_the_table_which_another_edition_can_read(foretold):
    bundle = json.loads(json.dumps(foretold._repr_mimebundle_()))
    stored = bundle.pop(comparison.MIME_TYPE)
    stored["device"]["context"] = stored["measurements"][0]["colour"] = None
    assert Comparison.from_dict(stored) == foretold
    assert bundle == {"text/plain": repr(foretold), "text/html": foretold._repr_html_()}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["name"], "../elsewhere"),
        (["measurements"], []),
        (["device", "versions"], ["torch"]),
        (["predicted"], {"c": {"time": 2}}),
        (["full_size"], {"b": 3}),
    ],
)
def test_what_is_no_comparison_is_refused(make_measurement, path, value):
    stored = stored_as_json(Comparison("some", (make_measurement("a"), make_measurement("b"))))
    assert len(comparison_from_dict(stored)) == 2
    *parents, last = path
    reduce(getitem, parents, stored)[last] = value
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        comparison_from_dict(stored)


def test_compare_measures_all_in_their_order_and_survives_out_of_memory(tiny):
    variants = {"first": tiny, "second": tiny, "too large": lambda: lambda: torch.empty(2**60)}
    result = compare(variants, name="two", items=4, unit="rows", seconds=0.001, min_effect=0.5)
    assert (result.name, [m.label for m in result], result.min_effect) == ("two", [*variants], 0.5)
    assert result.ratio("second", "memory") == 1 and len(result["second"].times) >= FEWEST_BLOCKS
    assert result.verdict("too large") == OUT_OF_MEMORY in repr(result)
    assert not result["first"].failed and result.predicted == {}


def squaring(width=8, half=False):
    """A variant that squares a vector and goes back."""
    weight = torch.zeros(width, requires_grad=True, dtype=torch.float16 if half else torch.float32)
    return lambda: (weight * weight).sum().backward()


def test_full_size_by_label_is_predicted_without_running_it(tiny, not_measured):
    full_size = {"first": partial(squaring, 2**40), "second": partial(squaring, 2**30)}  # 4 TiB would not be there
    result = compare(dict.fromkeys(full_size, tiny), full_size=full_size, gpus="24 GiB")
    (first,), (second,) = result.full_size.values()
    assert (first.verdict, second.verdict, second.gpu, second.seconds) == ("does not fit", "fits", "24 GiB", None)
    assert 2 * 4 <= second.allocated / GiB <= 6 * 4  # two to six vectors of 4 GiB


def test_a_cpu_measures_for_less_long_beside_a_prediction(tiny, monkeypatch, make_measurement, simulate_gpu):
    seconds = []
    measured = lambda variants, **options: seconds.append(options["seconds"]) or list(map(make_measurement, variants))
    monkeypatch.setattr(comparison, "measure_all", measured)
    large = {"full_size": {"a": squaring, "b": squaring}}
    for options in ({}, large, large | {"seconds": 3.0}):
        compare({"a": tiny, "b": tiny}, gpus="T4", **options)
    simulate_gpu("NVIDIA Unknown", (9, 9), 15 * GiB)
    compare({"a": tiny, "b": tiny}, gpus="T4", **large)
    assert seconds == [None, comparison.BESIDE_PREDICTION, 3.0, None]


def test_full_size_as_keywords_holds_for_all_variants_on_each_gpu(not_measured):
    variants = {"fp32": squaring, "again": squaring, "fp16": lambda width: squaring(width, half=True)}
    variants["compiled"] = lambda width: torch.compile(squaring(width))
    result = compare(variants, full_size={"width": 2**28}, gpus=["T4", "A100 80 GB"])
    assert result.full_size_gpus == ["T4", "A100 80 GB"]
    for full, again, half, compiled in zip(*result.full_size.values()):
        assert full.ratio is None and full.bound == half.bound == "memory bandwidth"
        assert full.seconds[1] < full.seconds[0] < full.seconds[2]
        assert full.parts["matrix products"] == full.parts["optimizer"] == 0 < full.parts["everything else"]
        assert 0.45 < half.ratio[0] < 0.55 and half.ratio[1] < half.ratio[0] < half.ratio[2]
        assert again.tell_time() == "same" != compiled.tell_time(), "the same kernels take the same"
    assert result.full_size["fp32"][0].seconds[0] > 4 * result.full_size["fp32"][1].seconds[0]


def test_on_a_gpu_that_is_known_the_measured_variants_are_predicted_as_they_are(simulate_gpu, not_measured):
    settings = {"small": {"width": 2**20}, "large": {"width": 2**24}}
    ask = lambda: compare(squaring, settings, full_size={"width": 2**28}, gpus="T4").here
    simulate_gpu("Tesla T4", (7, 5), 15 * GiB)
    here = ask()
    assert [here[label].gpu for label in settings] == ["T4", "T4"] and 8 < here["large"].ratio[0] < 20
    simulate_gpu("NVIDIA Unknown", (9, 9), 15 * GiB)
    assert ask() == {}


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


def test_a_control_is_a_row_of_its_own_and_several_variants_share_the_confidence(tiny, monkeypatch):
    """What stored results say stays as it was: without the field, each of their intervals has 99 %."""
    monkeypatch.setenv("EFFGPU_SECONDS", "0.05")
    variants = {"a": tiny, "b": tiny}
    result = compare(variants, items={"a": 2, "b": 3}, control=True)
    assert [m.label for m in result] == ["a", CONTROL, "b"] and [m.items for m in result] == [2, 2, 3]
    assert result.confidence == pytest.approx(0.995) and "The control shows the noise of this machine." in repr(result)
    assert "Brackets: the 99 % interval, for all of them together." in repr(result)
    stored = result.to_dict()
    assert Comparison.from_dict(stored).confidence == result.confidence
    del stored["confidence"]
    old = Comparison.from_dict(stored)
    assert old.confidence == 0.99 and "Brackets: the 99 % interval. " in repr(old)
    assert compare(variants).confidence == 0.99
