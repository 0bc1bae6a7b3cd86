"""Tests of effgpu.ablation: known costs come out as they are, whatever all blocks share and whatever did not fit."""

import html
import itertools
import json
import random
import re
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effgpu import comparison
from effgpu.ablation import MOST_FOR_ALL, Ablation, Change, ablate, switches_on
from effgpu.comparison import FASTER, INCONCLUSIVE, SAME, Comparison, compare
from effgpu.measuring import power
from effgpu.measuring.device import Device, memory_limit
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.units import MiB

CPU = Device("Test CPU", "cpu", None, 2, versions={"python": "3.11.0", "torch": "2.15.0"})
QUICK = {"seconds": 0.001, "energy": True}

# What each subset of the switches adds to a step once all of it is on: milliseconds, MiB, joules.
MILLISECONDS = {(): 10, ("a",): -4, ("b",): -3, ("c",): 1, ("b", "c"): 2}
MEBIBYTES = {(): 20, ("a",): -10, ("b",): 5, ("a", "b"): -4}
JOULES = {(): 5, ("a",): -1, ("c",): -2, ("a", "c"): 1}


def total(costs, on):
    return sum(cost for together, cost in costs.items() if set(together) <= set(on))


def turns(times):
    return tuple((time, time) for time in times)


def bare(told):
    """Without the interval, which rounding errors make one of no width."""
    return re.sub(r" \[.*?\]", "", told)


def subsets(switches):
    return [on for size in range(len(switches) + 1) for on in itertools.combinations(switches, size)]


@pytest.fixture
def simulated(monkeypatch, no_collecting):
    """A `build` whose steps cost what the tables say, on a simulated machine."""
    clock, built = [0.0], []
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    measured = comparison.measure_all

    def with_energy(variants, energy, **options):  # which is measured on a GPU only
        joules = {label: total(JOULES, switches_on(label)) if energy else None for label in variants}
        return [m if m.failed else replace(m, joules=joules[m.label]) for m in measured(variants, **options)]

    monkeypatch.setattr(comparison, "measure_all", with_energy)

    def build(**on):
        built.append(on)

        def step():
            clock[0] += total(MILLISECONDS, on) / 1000
            return torch.empty(total(MEBIBYTES, on) * MiB, dtype=torch.uint8)

        return step

    build.built = built
    return build


def by_hand(switches, costs, drift=(1.0,) * 15, peaks=None, items=None, failed=(), noise=0.0):
    """An ablation of all combinations that took what `costs` add up to, times the block's drift."""
    found = []
    for on in subsets(switches):
        label, seconds = " + ".join(on) or "none", total(costs, on)
        noisy = [d * (1 + noise * (-1) ** (n + len(found))) for n, d in enumerate(drift)]
        if on in failed:
            found.append(Measurement(label, (), CPU, failed=OUT_OF_MEMORY))
        else:
            peak = 1000 if peaks is None else total(peaks, on)
            counted = items(on) if items else None
            found.append(Measurement(label, turns(seconds * d for d in noisy), CPU, counted, peak_allocated=peak))
    return Ablation("by_hand", tuple(found))


# What is found


def test_known_costs_are_found_as_they_are(simulated):
    """Alone, in the stack and on top of the rest: each is the sum of what the tables say is added there."""
    result = ablate(simulated, [*"abc"], **QUICK)
    for quantity, costs in {"time": MILLISECONDS, "memory": MEBIBYTES, "energy": JOULES}.items():
        for place, switch in enumerate("abc"):
            for among in ((), tuple("abc"[:place]), tuple("abc")):
                others = set(among) - {switch}
                expected = (total(costs, others | {switch}) - total(costs, others)) / costs[()]
                change = result.effect(switch, among, quantity)
                assert (change.value, change.low, change.high) == pytest.approx((expected,) * 3), (quantity, switch)
                assert expected == 0 or not change.verdict
                assert quantity == "time" or change.low == change.value == change.high, "counted once"


def test_it_is_a_comparison_of_all_combinations_with_none(simulated):
    result = ablate(simulated, ["a", "b", "c"], name="mine", items=4, unit="rows", **QUICK)
    assert [m.label for m in result] == ["none", "a", "b", "c", "a + b", "a + c", "b + c", "a + b + c"]
    assert (result.name, result.switches, result.baseline.label) == ("mine", ("a", "b", "c"), "none")
    assert result["a + b"].items == 4 and result["a + b"].unit == "rows"
    assert result["a + b"].peak_allocated == 11 * MiB
    assert result.time_ratio("a + b").value == pytest.approx(0.3) and result.verdict("a + b") == FASTER
    assert result.find(["b", "a"]) is result.find("a + b") is result["a + b"] and result.find(()) is result.baseline


def test_the_stack_is_a_comparison(simulated):
    result = ablate(simulated, [*"abc"], name="mine", **QUICK)
    assert type(result.stack) is Comparison and result.stack.name == "mine.stack"
    assert [m.label for m in result.stack] == ["none", "a", "a + b", "a + b + c"]
    assert result.stack.time_ratio("a + b + c").value == pytest.approx(6 / 10)


def test_of_many_switches_each_alone_the_stack_and_each_left_out(simulated):
    switches = "abcdef"
    assert len(switches) > MOST_FOR_ALL
    result = ablate(simulated, [*switches], **QUICK)
    expected = {
        "",
        "abcdef",
        *switches,
        *(switches[:n] for n in range(6)),
        *(switches.replace(s, "") for s in switches),
    }
    assert {"".join(switches_on(m.label)) for m in result} == expected and len(result.measurements) == len(expected)
    assert (result.baseline.label, result.switches) == ("none", tuple(switches))
    assert result.effect("c", [*switches]).value == pytest.approx(0.3)
    with pytest.raises(KeyError, match="no variant 'b \\+ c' in 'ablation'"):
        result.effect("b", "c")


def test_changes_are_per_item_in_time_and_energy_but_not_in_memory(simulated):
    """`a` makes the step of 10 ms one of 6 ms, and here also a step of three items instead of one."""
    result = ablate(simulated, {"a": 3, "b": True}, items=lambda a=1, b=False: a, **QUICK)
    assert simulated.built == 2 * [{}, {"a": 3}, {"b": True}, {"a": 3, "b": True}], "for the memory, and for the time"
    assert [(m.label, m.items) for m in result] == [("none", 1), ("a", 3), ("b", 1), ("a + b", 3)]
    assert result.effect("a").value == pytest.approx(2 / 10 - 1)
    assert result.effect("a", quantity="energy").value == pytest.approx(4 / 3 / 5 - 1)
    assert result.effect("a", quantity="memory").value == pytest.approx(-0.5)
    assert result.effect("b", "a").value == pytest.approx((3 / 3 - 6 / 3) / 10)


# The arithmetic

costs_of_three = st.fixed_dictionaries(
    {on: st.sampled_from([-45, -15, -5, 0, 5, 15, 45]) for on in subsets("abc") if on} | {(): st.just(1000)}
)
drifts = st.lists(st.floats(0.5, 2), min_size=15, max_size=18)


@given(costs_of_three, drifts, st.permutations("abc"))
def test_the_rungs_add_up_to_all_in_whatever_order(costs, drift, order):
    result = by_hand("abc", costs, drift)
    rungs = [result.effect(switch, order[:place]).value for place, switch in enumerate(order)]
    whole = total(costs, "abc") / total(costs, "") - 1
    assert sum(rungs) == pytest.approx(whole, abs=1e-9)
    assert result.stack.time_ratio("a + b + c").value == pytest.approx(1 + whole)


def test_noise_is_as_often_more_as_less_also_where_there_is_a_lot_of_it():
    generator = random.Random(0)
    trials, told = 400, []
    for _ in range(trials):
        times = {on: [generator.lognormvariate(0, 0.5) for _ in range(30)] for on in ("none", "a")}
        found = (Measurement(on, turns(values), CPU, peak_allocated=1) for on, values in times.items())
        change = Ablation("noise", tuple(found)).effect("a")
        told.append((change.verdict != INCONCLUSIVE) * (1 if change.value > 0 else -1))
    assert max(told.count(1), told.count(-1)) / trials <= 0.005 + 3 * (0.005 * 0.995 / trials) ** 0.5


def test_changes_show_themselves():
    assert str(Change(-0.4, -0.412, -0.391)) == "−40.0 % [−41.2, −39.1]"
    assert str(Change(0.25, 0.25, 0.25)) == "+25.0 %" and str(Change(-0.0001, -0.0001, -0.0001)) == "0.0 %"
    assert str(Change(0.1, -0.1, 0.2)) == "+10.0 % [−10.0, +20.0] inconclusive"
    assert Change(0.1, -0.1, 0.2).short == "+10.0 %  inconclusive" and Change(-0.4, -0.412, -0.391).short == "−40.0 %"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.01, 0.01, SAME),
        (0.002, 0.01, SAME),
        (-0.0101, 0.0, INCONCLUSIVE),
        (0.0, 0.0101, INCONCLUSIVE),
        (0.002, 0.0101, ""),
        (-0.0101, -0.002, ""),
        (0.0, 0.0, ""),  # counted once
        (0.5, 0.5, ""),
    ],
)
def test_each_verdict_on_a_change_holds_up_to_its_border(low, high, verdict):
    assert Change((low + high) / 2, low, high).verdict == verdict


def test_the_smallest_effect_that_matters_holds_for_changes_and_the_stack():
    costs = {(): 10.0, ("a",): -0.4, ("b",): -3.0, ("a", "b"): 0.4}
    fine = by_hand("ab", costs, noise=0.0005)
    assert fine.effect("a").verdict == ""
    coarse = replace(fine, min_effect=0.05)
    assert coarse.effect("a").verdict == SAME
    assert coarse.stack.verdict("a") == coarse.verdict("a") == SAME != fine.stack.verdict("a")
    assert coarse.stack.min_effect == 0.05


def test_predictions_go_to_the_stack_if_it_has_their_variants(no_collecting):
    options = QUICK | {"predicted": {"a": {"time": 0.5}, "a + b": {"time": 0.4}}}
    result = ablate(sound, ["a", "b"], min_effect=0.02, **options)
    assert result.predicted == {"a": {"time": 0.5}, "a + b": {"time": 0.4}} and result.min_effect == 0.02
    assert result.stack.predicted == result.predicted
    for view in (result, result.stack):
        assert type(view).from_dict(json.loads(json.dumps(view.to_dict()))) == view


def test_a_quantity_that_the_baseline_lacks_has_no_changes(make_measurement):
    rows = [make_measurement(label, joules=None if label == "none" else 2.0) for label in ("none", "a", "b", "a + b")]
    result = Ablation("partly", tuple(rows))
    assert result.effect("a", "b", "energy") is None and "energy" in repr(result)


# Out of memory


def test_what_does_not_fit_leaves_the_others_their_effects(simulated):
    """Without `a`, a step needs 20 MiB or more."""
    with memory_limit(15 * MiB):
        result = ablate(simulated, [*"abc"], **QUICK)
    assert [m.label for m in result if m.failed] == ["none", "b", "c", "b + c"]
    assert {m.failed for m in result} == {None, OUT_OF_MEMORY}
    assert result.effect("a") is None and result.effect("b") is None
    assert result.whole.label == "a" and result.effect("b", "a").value == pytest.approx(-3 / 6)
    assert "Out of memory: none, b, c, b + c.\nChanges are shares of what 'a' takes" in repr(result)
    assert by_hand("a", {(): 1}, failed=subsets("a")).table()[1] == [], "nothing fits"


# As a table, as data


def test_table_has_a_row_a_switch_for_each_quantity(simulated):
    headings, rows = ablate(simulated, [*"abc"], **QUICK).table()
    assert headings == ["change in", "switch", "alone", "in the stack", "on top of the rest"]
    assert [row[:2] for row in rows] == [
        [q, s] for q in ("time", "memory", "energy") for s in ("a", "b", "c", "all of them")
    ]
    assert [bare(cell) for cell in rows[2][2:]] == ["+10.0 %", "+30.0 %", "+30.0 %"]
    assert [bare(cell) for cell in rows[3][2:]] == ["", "−40.0 %", ""]
    assert rows[4][2:] == ["−50.0 %", "−50.0 %", "−70.0 %"] and rows[6][2:] == ["0.0 %"] * 3


def test_shows_what_changes_are_shares_of_and_the_device(simulated):
    result = ablate(simulated, [*"abc"], name="mine", **QUICK)
    page = html.unescape(result._repr_html_())
    for shown in (repr(result), page):
        assert "Changes are shares of what 'none' takes" in shown
        assert result.device.label in shown and "a CPU's times, not a GPU's" in shown
    assert "\n" not in page and page.count("<br>") == 1


@pytest.mark.parametrize(
    "labels", [[], ["none"], ["a", "none"], ["none", "a", "b"], ["none", "a", "a + b"], ["x", "y"]]
)
def test_other_comparisons_are_no_ablation(make_measurement, labels):
    with pytest.raises(ValueError, match="measurements: expected the combinations that `ablate` measures, got"):
        Ablation("other", tuple(make_measurement(label) for label in labels))


# Arguments


def sound(a=False, b=False):
    return lambda: None


@pytest.mark.parametrize(
    ("build", "switches", "error", "message"),
    [
        (sound, [], ValueError, r"switches: expected at least one of build's keywords, .* got \[\]"),
        (sound, "ab", TypeError, "switches: expected names of build's keywords, or a mapping of them, got 'ab'"),
        (sound, {"a", "b"}, TypeError, "switches: expected names of build's keywords, or a mapping of them, got {"),
        (sound, ["a", 3], TypeError, "build: expected a function that takes the switches as keywords: keywords must"),
        (lambda **on: sound(), ["none"], ValueError, r"and none called 'none', got \['none'\]"),
        (sound, ["a", "c"], TypeError, "takes the switches as keywords: got an unexpected keyword argument 'c'"),
        (lambda width: sound(), ["width"], TypeError, "takes the switches as keywords: missing a required .*'width'"),
        (lambda a=True: sound(), ["a"], ValueError, "expected 'a' to be off by default, build has True by default"),
        (lambda batch=8: sound(), {"batch": 8}, ValueError, "expected 'batch' to be off by default, build has 8"),
        (torch.nn.Linear(1, 1), ["a"], TypeError, "build: expected a function that returns a training step, got Lin"),
        (
            lambda a=False: None if a else sound(),
            ["a"],
            TypeError,
            r"variant .*a=True.*: expected it to return its training step, a function, got NoneType",
        ),
    ],
)
def test_bad_arguments_are_named(build, switches, error, message, no_collecting):
    with pytest.raises(error, match=message):
        ablate(build, switches, **QUICK)


def test_bad_arguments_are_named_before_anything_is_built(simulated):
    for bad in ({"name": "a b"}, {"items": lambda a=1: 0}, {"items": lambda n: n}, {"predicted": {"b": {"time": 1}}}):
        with pytest.raises((TypeError, ValueError), match=r"expected|missing 1 required positional argument: 'n'"):
            ablate(simulated, **{"switches": ["a"]} | bad)
    assert simulated.built == []


@pytest.mark.parametrize("wrong", ["x", ("a", "x")])
def test_an_unknown_switch_is_named(wrong):
    with pytest.raises(KeyError, match=r"no switch 'x' in 'by_hand', only \['a', 'b'\]"):
        by_hand("ab", {(): 1}).find(wrong)
    with pytest.raises(ValueError, match=r"quantity: expected one of .*, got 'speed'"):
        by_hand("ab", {(): 1}).effect("a", quantity="speed")


# On a GPU


@pytest.mark.gpu
def test_a_real_model(monkeypatch):
    """Half the precision is faster and smaller, and a switch that does nothing changes nothing."""
    monkeypatch.setattr(power, "measure_energy", lambda step: None)

    def build(half=False, idle=False):
        dtype = torch.float16 if half else torch.float32
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, dtype=dtype, device="cuda") for _ in range(4)))
        batch = torch.randn(4096, 4096, device="cuda", dtype=dtype)
        return lambda: model(batch).square().mean().backward()

    compare({"warm": build}, seconds=1)  # until the clock has risen from idle
    result = ablate(build, ["half", "idle"], seconds=0.5)
    assert result.verdict("half") == FASTER and result.effect("half", quantity="memory").value < -0.3
    assert abs(result.effect("idle").value) < 0.05
