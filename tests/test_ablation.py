"""Tests of effgpu.ablation: known costs come out as they are, what interacts is named, what fits is recommended."""

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

from effgpu import comparison, results
from effgpu.ablation import MOST_FOR_ALL, Ablation, Change, ablate, switches_on
from effgpu.comparison import FASTER, INCONCLUSIVE, MIME_TYPE, SAME, Comparison, compare
from effgpu.measuring import power
from effgpu.measuring.device import Device, memory_limit
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.units import GiB, MiB

CPU = Device("Test CPU", "cpu", None, 2, versions={"python": "3.11.0", "torch": "2.15.0"})
QUICK = {"seconds": 0.001, "blocks": 8, "energy": True}

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


def by_hand(switches, costs, drift=(1.0,) * 8, peaks=None, items=None, failed=(), noise=0.0):
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


def test_exactly_the_interactions_that_are_there_are_named(simulated):
    result = ablate(simulated, [*"abc"], **QUICK)
    found = {(i.quantity, i.first, i.second): i.change.value for i in result.interactions()}
    expected = {("time", "b", "c"): 2 / 10, ("memory", "a", "b"): -4 / 20, ("energy", "a", "c"): 1 / 5}
    assert found.keys() == expected.keys() and found == pytest.approx(expected)
    assert [bare(str(i)) for i in result.interactions()] == [
        "b and c help less together than apart: time +20.0 %",
        "a and b help more together than apart: memory −20.0 %",
        "a and c help less together than apart: energy +20.0 %",
    ]


def test_it_is_a_comparison_of_all_combinations_with_none(simulated):
    result = ablate(simulated, ["a", "b", "c"], name="mine", items=4, unit="rows", **QUICK)
    assert [m.label for m in result] == ["none", "a", "b", "c", "a + b", "a + c", "b + c", "a + b + c"]
    assert (result.name, result.switches, result.baseline.label) == ("mine", ("a", "b", "c"), "none")
    assert result["a + b"].items == 4 and result["a + b"].unit == "rows"
    assert result["a + b"].peak_allocated == 11 * MiB
    assert result.time_ratio("a + b").value == pytest.approx(0.3) and result.verdict("a + b") == FASTER
    assert result.find(["b", "a"]) is result.find("a + b") is result["a + b"] and result.find(()) is result.baseline


def test_one_switch_may_be_named_by_itself(no_collecting):
    result = ablate(lambda bf16=False, fused=False: lambda: None, ["bf16", "fused"], **QUICK)
    assert result.find("bf16").label == "bf16"
    assert result.effect("bf16", "fused") == result.effect("bf16", ["fused"])


def test_the_stack_is_a_comparison(simulated):
    result = ablate(simulated, [*"abc"], name="mine", **QUICK)
    assert type(result.stack) is Comparison and result.stack.name == "mine.stack"
    assert [m.label for m in result.stack] == ["none", "a", "a + b", "a + b + c"]
    assert result.stack.time_ratio("a + b + c").value == pytest.approx(6 / 10)


def test_only_what_is_on_is_handed_over_once_for_its_memory_and_once_for_its_time(simulated):
    ablate(simulated, {"b": 7, "a": True}, **QUICK)
    assert simulated.built == 2 * [{}, {"b": 7}, {"a": True}, {"b": 7, "a": True}]


def test_energy_is_only_measured_where_it_is_asked_for(simulated):
    result = ablate(simulated, ["a"], seconds=0.001, blocks=8)
    assert {m.joules for m in result} == {None} and result.effect("a", quantity="energy") is None
    assert {row[0] for row in result.table()[1]} == {"time", "memory"}


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
    assert [(i.quantity, i.first, i.second) for i in result.interactions()] == [
        *(("time", "b", "the rest"), ("time", "c", "the rest")),
        *(("memory", "a", "the rest"), ("memory", "b", "the rest")),
        *(("energy", "a", "the rest"), ("energy", "c", "the rest")),
    ]
    with pytest.raises(KeyError, match="no variant 'b \\+ c' in 'ablation'"):
        result.effect("b", "c")


def test_one_switch_has_nothing_to_interact_with(simulated):
    result = ablate(simulated, [*"a"], **QUICK)
    assert [m.label for m in result] == ["none", "a"] and result.interactions() == []
    assert result.effect("a").value == result.effect("a", "a").value == pytest.approx(-0.4)
    assert "together than apart" not in repr(result) and "among the fastest: a, " in repr(result)


def test_changes_are_per_item_in_time_and_energy_but_not_in_memory(simulated):
    """`a` makes the step of 10 ms one of 6 ms, and here also a step of three items instead of one."""
    result = ablate(simulated, {"a": 3, "b": True}, items=lambda a=1, b=False: a, **QUICK)
    assert [(m.label, m.items) for m in result] == [("none", 1), ("a", 3), ("b", 1), ("a + b", 3)]
    assert result.effect("a").value == pytest.approx(2 / 10 - 1)
    assert result.effect("a", quantity="energy").value == pytest.approx(4 / 3 / 5 - 1)
    assert result.effect("a", quantity="memory").value == pytest.approx(-0.5)
    assert result.effect("b", "a").value == pytest.approx((3 / 3 - 6 / 3) / 10)


# The arithmetic

costs_of_three = st.fixed_dictionaries(
    {on: st.sampled_from([-45, -15, -5, 0, 5, 15, 45]) for on in subsets("abc") if on} | {(): st.just(1000)}
)
drifts = st.lists(st.floats(0.5, 2), min_size=8, max_size=12)


@given(costs_of_three, drifts)
def test_interactions_are_what_two_switches_add_together_whatever_all_blocks_share(costs, drift):
    result = by_hand("abc", costs, drift)
    expected = {pair: costs[pair] / 1000 for pair in itertools.combinations("abc", 2) if abs(costs[pair]) >= 10}
    found = {(i.first, i.second): i.change.value for i in result.interactions() if i.quantity == "time"}
    assert found.keys() == expected.keys() and found == pytest.approx(expected)


@given(costs_of_three, drifts, st.permutations("abc"))
def test_the_rungs_add_up_to_all_in_whatever_order(costs, drift, order):
    result = by_hand("abc", costs, drift)
    rungs = [result.effect(switch, order[:place]).value for place, switch in enumerate(order)]
    whole = total(costs, "abc") / total(costs, "") - 1
    assert sum(rungs) == pytest.approx(whole, abs=1e-9)
    assert result.stack.time_ratio("a + b + c").value == pytest.approx(1 + whole)


@given(costs_of_three, drifts)
def test_left_out_of_all_is_alone_and_all_that_it_adds_together_with_others(costs, drift):
    result = by_hand("abc", costs, drift)
    for switch in "abc":
        together = sum(cost for on, cost in costs.items() if switch in on and len(on) > 1) / 1000
        alone, last = result.effect(switch).value, result.effect(switch, list("abc")).value
        assert last - alone == pytest.approx(together, abs=1e-9)


def test_two_that_leave_each_other_alone_are_named_once_in_a_hundred():
    generator = random.Random(0)
    trials, named = 600, 0
    for _ in range(trials):
        times = {on: [seconds * generator.gauss(1, 0.05) for _ in range(10)] for on, seconds in COSTS_OF_TWO.items()}
        found = (Measurement(on, turns(values), CPU, peak_allocated=1) for on, values in times.items())
        named += bool(Ablation("noise", tuple(found)).interactions())
    assert named / trials <= 0.01 + 3 * (0.01 * 0.99 / trials) ** 0.5


def test_noise_is_as_often_more_as_less_also_where_there_is_a_lot_of_it():
    generator = random.Random(0)
    trials, told = 400, []
    for _ in range(trials):
        times = {on: [generator.lognormvariate(0, 0.5) for _ in range(30)] for on in ("none", "a")}
        found = (Measurement(on, turns(values), CPU, peak_allocated=1) for on, values in times.items())
        change = Ablation("noise", tuple(found)).effect("a")
        told.append((change.verdict != INCONCLUSIVE) * (1 if change.value > 0 else -1))
    assert max(told.count(1), told.count(-1)) / trials <= 0.005 + 3 * (0.005 * 0.995 / trials) ** 0.5


COSTS_OF_TWO = {"none": 10.0, "a": 6.0, "b": 7.0, "a + b": 3.0}


def test_an_interaction_that_may_be_none_is_not_named():
    def noisy(wobble):
        times = {on: [seconds] * 8 for on, seconds in (COSTS_OF_TWO | {"a + b": 4.0}).items()}
        times["a"] = [6 + wobble * (-1) ** n for n in range(8)]
        found = (Measurement(on, turns(values), CPU, peak_allocated=1) for on, values in times.items())
        return Ablation("noise", tuple(found)).interactions()

    assert [i.change.value for i in noisy(0.5)] == pytest.approx([0.1])
    assert noisy(1.5) == []


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


def test_the_smallest_effect_that_matters_holds_for_changes_interactions_and_the_stack():
    costs = {(): 10.0, ("a",): -0.4, ("b",): -3.0, ("a", "b"): 0.4}
    fine = by_hand("ab", costs, noise=0.0005)
    assert (fine.effect("a").verdict, len(fine.interactions())) == ("", 1)
    coarse = replace(fine, min_effect=0.05)
    assert (coarse.effect("a").verdict, coarse.interactions()) == (SAME, [])
    assert coarse.stack.verdict("a") == coarse.verdict("a") == SAME != fine.stack.verdict("a")
    assert coarse.stack.min_effect == 0.05


def test_predictions_and_marks_go_to_the_stack_if_it_has_their_variants(no_collecting):
    options = QUICK | {"predicted": {"a": {"time": 0.5}, "a + b": {"time": 0.4}}, "other_training": ["b"]}
    result = ablate(sound, ["a", "b"], guess={"b": {"memory": 0.5}}, min_effect=0.02, **options)
    assert result.predicted == {"a": {"time": 0.5}, "a + b": {"time": 0.4}} and result.min_effect == 0.02
    assert result.stack.predicted == result.predicted and result.stack.guess == {}
    assert result.other_training == ("b",) and result.stack.other_training == ()
    for view in (result, result.stack):
        assert type(view).from_dict(json.loads(json.dumps(view.to_dict()))) == view


# What is recommended

sizes = st.fixed_dictionaries({on: st.integers(1, 6) for on in subsets("abc")})


@given(sizes, sizes, st.sets(st.sampled_from(subsets("abc")), max_size=8), st.integers(1, 7))
def test_the_fastest_that_fits_and_the_front_are_those_of_a_search(times, peaks, failed, memory):
    """By brute force; of the equally fast ones it is the one with the fewest switches."""
    given_times, given_peaks = ({on: sum_to(table, on) for on in table} for table in (times, peaks))
    result = by_hand("abc", given_times, peaks=given_peaks, failed=failed)
    alive = [on for on in subsets("abc") if on not in failed]
    fitting = [on for on in alive if peaks[on] <= memory]
    if fitting:
        least = min(times[on] for on in fitting)
        best = min((on for on in fitting if times[on] == least), key=len)
        chosen = result.fastest(memory)
        assert chosen.median == least and chosen.peak_allocated <= memory
        assert len(switches_on(chosen.label)) == len(best)
    else:
        with pytest.raises(ValueError, match="memory: expected at least" if alive else "every combination ran out"):
            result.fastest(memory)


def sum_to(table, on):
    """What `on` adds, so that the sum over its subsets is what the table says."""
    return table[on] - sum(sum_to(table, less) for less in subsets(on) if less != on)


@pytest.mark.parametrize(
    ("of_a", "best"),
    [
        ([0.5] * 8, "a"),
        ([0.5099] * 8, "a"),  # 1.98 % slower than with both
        ([0.5101] * 8, "a + b"),  # 2.02 % slower
        ([0.49, 0.52] * 4, "a + b"),  # as fast on average, but it may be 4 % slower
    ],
)
def test_of_what_is_at_most_two_per_cent_slower_the_fewest_switches_are_recommended(of_a, best):
    times = {"none": [1.0] * 8, "a": of_a, "b": [0.6] * 8, "a + b": [0.5] * 8}
    found = (Measurement(on, turns(values), CPU, peak_allocated=1) for on, values in times.items())
    assert Ablation("noise", tuple(found)).fastest().label == best


def test_on_a_gpu_what_is_reserved_and_the_context_must_fit(make_gpu):
    gpu = replace(make_gpu(), context=500 * MiB)
    sizes = {"none": (8000, 9000), "a": (6000, 7200), "b": (7000, 7100), "a + b": (5000, None)}
    found = [
        Measurement(label, turns([n + 1.0] * 8), gpu, peak_allocated=peak * MiB, peak_reserved=most and most * MiB)
        for n, (label, (peak, most)) in enumerate(sizes.items())
    ]
    result = Ablation("card", tuple(found))
    assert result.fastest().label == "none" and result.fastest(9500 * MiB).label == "none"
    assert result.fastest(9500 * MiB - 1).label == result.fastest(7700 * MiB).label == "a"
    assert result.fastest(7700 * MiB - 1).label == "b"
    assert result.fastest(7600 * MiB - 1).label == result.fastest(5500 * MiB).label == "a + b"
    with pytest.raises(ValueError, match=r"expected at least 5.37 GiB, which 'a \+ b' needs, .* got 5.37 GiB"):
        result.fastest(5500 * MiB - 1)


def test_the_fastest_is_so_by_the_times_that_are_shown():
    """By its own median `b` is faster than `a`; by the ratios of the blocks, which are shown, it is not."""
    times = {"none": [1, 1, 1, 1, 2, 2, 2, 2, 2], "a": [0.8] * 4 + [1.6] * 5, "b": [0.9] * 5 + [1.5, 1.7, 1.9, 1.9]}
    times["a + b"] = [3 * seconds for seconds in times["none"]]
    found = [Measurement(on, turns(map(float, of_on)), CPU, peak_allocated=9) for on, of_on in times.items()]
    result = Ablation("front", tuple(found))
    assert result["b"].median < result["a"].median and result.value("a", "time") < result.value("b", "time")
    assert result.fastest().label == "a"


def test_a_quantity_that_the_baseline_lacks_has_no_changes(make_measurement):
    rows = [make_measurement(label, joules=None if label == "none" else 2.0) for label in ("none", "a", "b", "a + b")]
    result = Ablation("partly", tuple(rows))
    assert result.effect("a", "b", "energy") is None and "energy" in repr(result)


def test_the_recommendation_counts_items():
    result = by_hand("a", {(): 1.0, ("a",): 0.5}, items=lambda on: 2 if on else 1)
    assert result.fastest().label == "a"


@pytest.mark.parametrize("memory", [0, -1, float("nan"), float("inf"), "15 GiB"])
def test_a_memory_that_is_no_number_of_bytes(memory):
    with pytest.raises(ValueError, match="memory: expected a positive number, got"):
        by_hand("a", {(): 1}).fastest(memory)


def test_nothing_fits():
    result = by_hand("ab", {(): 1}, peaks={(): 3 * MiB, ("b",): -MiB})
    with pytest.raises(ValueError, match=r"at least 2.00 MiB, which 'b' needs, the least of all, got 1.00 MiB"):
        result.fastest(MiB)
    nothing = by_hand("a", {(): 1}, failed=subsets("a"))
    with pytest.raises(ValueError, match="every combination ran out of memory"):
        nothing.fastest()
    assert nothing.table()[1] == [] and "fastest" not in repr(nothing)


# Out of memory


def test_what_does_not_fit_leaves_the_others_their_effects(simulated):
    """Without `a`, a step needs 20 MiB or more."""
    with memory_limit(15 * MiB):
        result = ablate(simulated, [*"abc"], **QUICK)
    assert [m.label for m in result if m.failed] == ["none", "b", "c", "b + c"]
    assert {m.failed for m in result} == {None, OUT_OF_MEMORY}
    assert result.effect("a") is None and result.effect("b") is None and result.interactions() == []
    assert result.whole.label == "a" and result.effect("b", "a").value == pytest.approx(-3 / 6)
    assert result.fastest().label == "a + b"
    told = repr(result)
    assert "Changes are shares of what 'a' takes" in told and re.search(
        r"among the fastest: a \+ b, \S+ ms per step, peak 11.0 MiB\.\n", told
    )
    assert "together than apart" not in told, "nobody has looked"
    assert "Out of memory: none, b, c, b + c." in told


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


def test_the_table_says_what_is_inconclusive_and_what_is_the_same(make_measurement):
    wobbly = make_measurement("a", 0.02)
    other = [tuple((a * (1 + 0.05 * (-1) ** n), a) for n, (a, _) in enumerate(wobbly.turns)), wobbly.turns]
    told = [Ablation("x", (make_measurement("none", 0.02), Measurement("a", of_a, CPU))) for of_a in other]
    assert told[0].table()[1][0][2].endswith("] inconclusive")
    rounded = replace(wobbly, turns=tuple((a * (1 + 0.001 * (-1) ** n), a) for n, (a, _) in enumerate(wobbly.turns)))
    assert Ablation("x", (make_measurement("none"), rounded)).table()[1][0][2].endswith("] same")


def test_shows_interactions_the_fastest_and_the_device(simulated):
    result = ablate(simulated, [*"abc"], name="mine", **QUICK)
    page = html.unescape(result._repr_html_())
    for told in (repr(result), page):
        assert "b and c help less together than apart: time +20.0 %" in told
        fastest = r"among the fastest: a \+ b, 3.00 ms per step \(3.33 × faster\), peak 11.0 MiB \(−45 %\)\."
        assert re.search(fastest, bare(told))
        assert result.device.label in told and "a CPU's times, not a GPU's" in told
    assert "\n" not in page and page.count("<br>") == 5
    assert "No two are seen to help less, or more" in repr(by_hand("ab", {(): 2, ("a",): -1}))


def test_a_notebook_carries_it_as_a_comparison(simulated):
    result = ablate(simulated, [*"ab"], name="mine", **QUICK)
    bundle = json.loads(json.dumps(result._repr_mimebundle_()))
    assert bundle["text/plain"] == repr(result) and bundle["text/html"] == result._repr_html_()
    stored = Comparison.from_dict(bundle[MIME_TYPE])
    assert stored == Comparison("mine", result.measurements)
    assert Ablation.from_dict(bundle[MIME_TYPE]) == result == Ablation(stored.name, stored.measurements)
    assert result.alt_text().startswith("Plot of mine on ")


def test_is_saved_and_loaded_as_any_comparison(simulated, tmp_path):
    result = ablate(simulated, [*"ab"], **QUICK)
    (loaded,) = results.load(
        results.save(
            [
                result,
            ],
            tmp_path / "results.json",
        )
    )
    assert Ablation(loaded.name, loaded.measurements) == result


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
        (sound, [], ValueError, "switches: expected at least one of build's keywords, got none"),
        (sound, {}, ValueError, "switches: expected at least one"),
        (sound, "ab", TypeError, "switches: expected names of build's keywords, or a mapping of them, got 'ab'"),
        (sound, {"a", "b"}, TypeError, "switches: expected names of build's keywords, or a mapping of them, got {"),
        (sound, None, TypeError, "switches: expected names of build's keywords, or a mapping of them, got None"),
        (sound, ["a", "b", "a"], ValueError, "switches: expected each keyword once, got 'a' twice"),
        (sound, ["a", 3], ValueError, "switches: expected names of build's keywords, .* got 3"),
        (sound, ["a + b"], ValueError, "switches: expected names of build's keywords, .* got 'a \\+ b'"),
        (lambda **on: sound(), ["none"], ValueError, "and none called 'none', got 'none'"),
        (sound, ["a", "c"], TypeError, r"that are on, as build\(a=True, c=True\): got an unexpected keyword .* 'c'"),
        (lambda width: sound(), ["width"], TypeError, r"that are on, as build\(\): missing a required .*'width'"),
        (lambda a=True: sound(), ["a"], ValueError, "expected 'a' to be off by default, build has True by default"),
        (lambda batch=8: sound(), {"batch": 8}, ValueError, "expected 'batch' to be off by default, build has 8"),
        ("build", ["a"], TypeError, "build: expected a function that returns a training step, got str"),
        (torch.nn.Linear(1, 1), ["a"], TypeError, "build: expected a function that returns a training step, got Lin"),
        (lambda a=False: None, ["a"], TypeError, "variant .*: expected it to return its training step"),
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


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (lambda n: n, r"\(\): missing a required argument: 'n'"),
        (lambda n=1: n, r"\(a=True\): got an unexpected keyword argument 'a'"),
    ],
)
def test_items_as_a_function_take_the_switches(function, call, simulated):
    expected = f"items: expected a function that can be called with the switches that are on, as items{call}"
    with pytest.raises(TypeError, match=f"^{expected}$"):
        ablate(simulated, ["a"], items=function)
    assert simulated.built == []


def test_bad_arguments_are_named_before_anything_is_built(simulated):
    for bad in (
        {"switches": ["a", "a"]},
        {"name": "a b"},
        {"blocks": 3},
        {"items": lambda a=1: 0},
        {"predicted": {"b": {"time": 1}}},
    ):
        with pytest.raises(ValueError, match="expected"):
            ablate(simulated, **{"switches": ["a"]} | bad)
    assert simulated.built == []


def test_an_error_names_the_combination_it_was_raised_in(no_collecting):
    def build(a=False, b=False):
        if a and b:
            raise RuntimeError("a fault")
        return lambda: None

    with pytest.raises(RuntimeError, match="a fault") as caught:
        ablate(build, ["a", "b"], **QUICK)
    assert "raised while measuring the variant 'a + b'" in caught.value.__notes__


@pytest.mark.parametrize("wrong", ["x", ("a", "x")])
def test_an_unknown_switch_is_named(wrong):
    with pytest.raises(KeyError, match=r"no switch 'x' in 'by_hand', only \['a', 'b'\]"):
        by_hand("ab", {(): 1}).find(wrong)


def test_an_unknown_quantity_is_named():
    with pytest.raises(ValueError, match=r"quantity: expected one of \['time', 'memory', 'energy'\], got 'speed'"):
        by_hand("a", {(): 1}).effect("a", quantity="speed")


# On a GPU


@pytest.mark.gpu
def test_a_real_model(monkeypatch):
    """Half the precision is faster and smaller, and a switch that does nothing is not recommended."""
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
    half = result["half"]
    room = half.peak_reserved + half.device.context + MiB
    assert result.fastest(room).label == "half" and half.peak_allocated < result["none"].peak_allocated < 8 * GiB
