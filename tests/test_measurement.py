"""Tests of effgpu.measurement: memory of each alone, then turns; out of memory is a result; intervals hold."""

import dataclasses
import gc
import importlib
import io
import itertools
import json
import math
import multiprocessing
import random
import statistics
import sys
import traceback
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from effgpu.measuring import device, measurement, memory, power, timing, variants
from effgpu.measuring.device import Device, describe, gc_frozen, memory_limit, release_memory
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement, hodges_lehmann_interval, measure, measure_all
from effgpu.units import GiB, MiB

QUICK = {"seconds": 0.001, "blocks": 3}
CPU = Device("Test CPU", "cpu", None, 2)
blocks_of_turns = st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=2, max_size=30)


@pytest.fixture(autouse=True, scope="module")
def _fast_collections():
    """What was there before the tests, a large compiler included, need not be looked at in every collection."""
    importlib.import_module("torch._dynamo")
    with gc_frozen():
        yield


class Faulty:
    """A variant that raises at a step (None: in the build) of a build and, with `always`, of all after it.

    Build 0 is for the memory, build 1 to be kept, build 2 and later where each turn builds.
    """

    def __init__(self, build=None, step=None, error=torch.OutOfMemoryError, *, always=True, cyclic=False, clock=None):
        self.cyclic = cyclic
        self.at_build, self.at_step, self.error, self.always, self.clock = build, step, error, always, clock
        self.builds, self.models = 0, []

    def __call__(self):
        build, calls = self.builds, []
        self.builds += 1
        model = torch.nn.Linear(4, 4)
        model.itself = [model] if self.cyclic else []  # then, only the garbage collector frees it
        self.models.append(weakref.ref(model))
        at_fault = self.at_build is not None and (build == self.at_build or (self.always and build > self.at_build))
        if at_fault and self.at_step is None:
            raise self.error("a fault")

        def step():
            calls.append(model(torch.ones(1, 4)))
            if self.clock:
                self.clock.spend(0.01)
            if at_fault and len(calls) == self.at_step:
                raise self.error("a fault")

        return step

    @property
    def alive(self):
        return any(model() is not None for model in self.models)


class Clock:
    """Time that passes only where a test spends it."""

    def __init__(self):
        self.now = 100.0

    def spend(self, seconds):
        self.now += seconds

    def step(self, seconds):
        """A variant whose step takes so many seconds."""
        return lambda: partial(self.spend, seconds)


@pytest.fixture
def clock(monkeypatch):
    simulated = Clock()
    for module in (measurement, timing):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: simulated.now))
    return simulated


@pytest.fixture
def only_turns(monkeypatch, no_collecting):
    """No memory is traced and no switches are looked at, as both take real time."""
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",)))
    monkeypatch.setattr(variants, "_SWITCHES", ())


@pytest.fixture
def turns(monkeypatch, clock):
    """The seconds of each turn, with the steps that lead in."""
    taken = []

    def watch(take):
        def timed(*given):
            before = clock.now
            take(*given)
            taken.append(clock.now - before)

        return timed

    for name in ("_take_turn", "_take_built_turn"):
        monkeypatch.setattr(measurement, name, watch(getattr(measurement, name)))
    return taken


# The value


@given(blocks_of_turns)
def test_median_and_interval_are_those_of_the_blocks(turns):
    found = Measurement("a", tuple(turns), CPU)
    times = [(forward + backward) / 2 for forward, backward in turns]
    assert found.times == pytest.approx(times) and found.median == pytest.approx(statistics.median(times))
    if len(turns) < 8:
        assert found.interval is None
    else:
        logs = hodges_lehmann_interval([math.log(time) for time in found.times])
        assert found.interval == pytest.approx([math.exp(end) for end in logs[1:]])


@given(blocks_of_turns, st.floats(0.1, 1e6))
def test_throughput_is_per_median_second(turns, amount):
    found = Measurement("a", tuple(turns), CPU, amount)
    assert found.throughput * found.median == pytest.approx(amount)


def test_what_was_not_measured_is_none():
    found = Measurement("a", (), CPU, 32, failed=OUT_OF_MEMORY)
    assert {found.median, found.interval, found.throughput, found.joules, found.peak_allocated} == {None}
    assert Measurement("a", ((0.5, 0.5),), CPU).throughput is None
    assert Measurement("a", ((0.0, 0.0),) * 8, CPU, 3).interval is None


def test_a_measurement_is_a_value_that_shows_itself():
    found = Measurement("fp32", ((0.02, 0.02),) * 8, CPU, 32, "samples", 3 * MiB, None, 1.5)
    assert repr(found) == (
        "fp32: 20.0 ms per step [20.0 ms, 20.0 ms], 1,600 samples/s, peak 3.00 MiB, 1.50 J per step "
        "on Test CPU (CPU, 2 cores)"
    )
    assert repr(Measurement("b", ((0.02, 0.02),), CPU)) == "b: 20.0 ms per step on Test CPU (CPU, 2 cores)"
    assert repr(Measurement("a", (), CPU, failed=OUT_OF_MEMORY)) == "a: out of memory"
    assert found == dataclasses.replace(found) != dataclasses.replace(found, items=33)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.label = "other"


# The interval


@pytest.fixture
def not_widened(monkeypatch):
    monkeypatch.setattr(measurement, "_widening", lambda values: 1.0)
    measurement._interval_of.cache_clear()
    yield
    measurement._interval_of.cache_clear()


def test_interval_of_a_textbook_s_example(not_widened):
    """Hollander and Wolfe, table 3.1: a depression scale before and after a therapy. Their estimate is -0.46."""
    changes = [-0.952, 0.147, -1.022, -0.430, -0.620, -0.590, -0.490, 0.080, -0.010]
    expected = (-0.46, (-1.022 - 0.952) / 2, (0.147 + 0.080) / 2)  # P(T <= 1) = 2 / 512, P(T <= 2) = 3 / 512
    assert hodges_lehmann_interval(changes) == pytest.approx(expected)


@pytest.mark.parametrize("n", range(8, 15))
def test_interval_cuts_as_many_averages_as_the_signed_ranks_allow(n, not_widened):
    """By brute force: the k-th smallest average is above the centre if fewer than k averages are below it."""
    sums = [sum(itertools.compress(range(1, n + 1), signs)) for signs in itertools.product((0, 1), repeat=n)]
    k = max(k for k in range(n * n) if 100 * 2 * sum(total < k for total in sums) <= 2**n)
    values = random.Random(n).sample([2**i for i in range(n)], n)
    averages = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert hodges_lehmann_interval(values) == (statistics.median(averages), averages[k - 1], averages[-k])


many_values = st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=30)


@given(st.lists(st.floats(-1e9, 1e9), min_size=8, max_size=40))
def test_interval_holds_its_middle_which_lies_within_the_values(values):
    middle, low, high = hodges_lehmann_interval(values)
    assert low <= middle <= high and min(values) <= middle <= max(values)


@given(many_values, st.floats(-1e3, 1e3))
def test_interval_moves_with_the_values(values, shift):
    if max(values) - min(values) > 1e-3:  # or rounding decides what their dependence is
        moved = hodges_lehmann_interval([value + shift for value in values])
        assert moved == pytest.approx([end + shift for end in hodges_lehmann_interval(values)], rel=1e-3, abs=1e-3)


@given(many_values)
def test_interval_turns_round_with_the_values(values):
    """So that A over B is one over B over A."""
    middle, low, high = hodges_lehmann_interval(values)
    turned = hodges_lehmann_interval([-value for value in values])
    assert turned == pytest.approx((-middle, -high, -low), abs=1e-9)


@given(many_values, st.floats(0.1, 100))
def test_interval_grows_with_the_scale(values, scale):
    wider = hodges_lehmann_interval([value * scale for value in values])
    assert wider == pytest.approx([end * scale for end in hodges_lehmann_interval(values)], rel=1e-6, abs=1e-6)


def noise(generator, n, rho):
    """Normal noise around 1, each value leaning on the one before."""
    value, values = generator.gauss(0, 1), []
    for _ in range(n):
        values.append(1 + value)
        value = rho * value + math.sqrt(1 - rho**2) * generator.gauss(0, 1)
    return values


def coverage(draw, trials):
    """The share of intervals that hold 1, and what three standard deviations of the share are."""
    ends = [hodges_lehmann_interval(draw())[1:] for _ in range(trials)]
    return sum(low <= 1 <= high for low, high in ends) / trials, 3 * math.sqrt(0.99 * 0.01 / trials)


@pytest.mark.parametrize("n", [8, 9, 12, 30, 60])
@pytest.mark.parametrize("kind", ["normal", "two humps"])
def test_interval_covers_the_true_centre_99_times_in_100(n, kind):
    generator = random.Random(f"{n} {kind}")
    draw = {
        "normal": lambda: generator.gauss(1, 1),
        "two humps": lambda: 1 + generator.choice([-1, 1]) * generator.uniform(1, 2),
    }[kind]
    covered, slack = coverage(lambda: [draw() for _ in range(n)], 600 if n < 30 else 200)
    assert covered >= 0.99 - slack


@pytest.mark.parametrize("n", [60, 120])
def test_interval_covers_the_true_centre_where_values_lean_on_the_one_before(n):
    generator = random.Random(n)
    covered, slack = coverage(lambda: noise(generator, n, 0.6), 300)
    assert covered >= 0.985 - slack


def test_dependence_widens_the_interval_and_independence_hardly_does():
    generator = random.Random(5)
    mean = {
        rho: statistics.fmean(measurement._widening(noise(generator, 60, rho)) for _ in range(100))
        for rho in (-0.6, 0, 0.3, 0.6, 0.8)
    }
    assert mean[-0.6] == 1 and 1 <= mean[0] < 1.2
    assert list(mean.values()) == sorted(mean.values())
    for rho in (0.3, 0.6, 0.8):
        assert 1 < mean[rho] / math.sqrt((1 + rho) / (1 - rho)) < 1.4
    assert measurement._widening([1, -1] * 30) == 1
    assert measurement._widening([2.0] * 60) < 1.2


def test_an_outlier_does_not_hide_dependence():
    values = noise(random.Random(7), 60, 0.8)
    assert measurement._widening([*values[:30], 1000.0, *values[30:]]) > 0.8 * measurement._widening(values)


def test_too_few_values_for_an_interval():
    hodges_lehmann_interval([1.0] * 8)
    with pytest.raises(ValueError, match="values: expected at least 8, got 7"):
        hodges_lehmann_interval([1.0] * 7)


@given(n=st.integers(101, 300))
@settings(max_examples=5, deadline=None)
def test_of_many_values_the_cut_is_the_normal_one_a_little_on_the_cautious_side(n):
    ways = [1]
    for rank in range(1, n + 1):
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways)]
    tails = itertools.accumulate(ways)
    exact = next(k for k, tail in enumerate(tails) if 100 * 2 * tail > 2**n)
    assert 0 <= exact - measurement._averages_to_cut(n) <= 0.003 * exact


# Measuring


def test_measures_a_variant(tiny, no_collecting):
    found = measure(tiny, items=4, unit="rows", **QUICK)
    assert (found.label, found.items, found.unit, found.failed) == ("tiny_variant", 4, "rows", None)
    assert len(found.turns) == 3 and min(map(min, found.turns)) > 0 and found.throughput > 0
    assert found.peak_allocated == memory.trace(tiny).peak > 0
    assert (found.peak_reserved, found.joules, found.sm_clock, found.throttled) == (None, None, None, ())
    assert found.device == describe()


@pytest.mark.parametrize("blocks", [1, 4])
def test_each_variant_is_built_once_for_its_memory_and_once_for_all_its_turns(blocks, no_collecting):
    both = {"a": Faulty(), "b": Faulty()}
    found = measure_all(both, seconds=0.001, blocks=blocks)
    assert [len(m.turns) for m in found] == [blocks] * 2
    assert [variant.builds for variant in both.values()] == [2, 2]


def test_a_block_is_a_turn_of_each_forward_and_one_backward(clock, only_turns):
    ran = []

    def make(label):
        return lambda: lambda: ran.append(label) or clock.spend(0.01)

    measure_all({label: make(label) for label in "abc"}, seconds=0.001, blocks=3)
    assert "".join(ran) == "aabbcc" + 3 * "abccba"  # the warm-up, and the blocks


def test_the_turns_of_a_block_are_told_apart(clock, only_turns):
    durations = iter([1.0, 1.0, 2.0, 3.0, 4.0, 5.0])  # the warm-up first
    found = measure(lambda: lambda: clock.spend(next(durations)), seconds=0.001, blocks=2)
    assert found.turns == ((2.0, 3.0), (4.0, 5.0)) and found.times == (2.5, 4.5)


def test_a_turn_is_the_mean_of_its_steps(clock, only_turns):
    durations = itertools.chain([1.0] * 2, itertools.cycle([9.0, 1.0, 2.0, 6.0, 1.0]))  # 9.0 leads in
    found = measure(lambda: lambda: clock.spend(next(durations)), seconds=0.001, blocks=1, min_steps=4)
    assert found.turns == ((2.5, 2.5),)


def test_the_memory_is_measured_with_one_variant_alive_before_any_is_timed():
    order, models = [], {}

    def make(label):
        def build():
            first = label not in models
            assert not (first and any(model() is not None for model in models.values())), "the one before was not freed"
            model = torch.nn.Linear(4, 4)
            model.itself = [model]  # only the garbage collector frees it
            models[label] = weakref.ref(model)
            order.append(label)
            return lambda: model(torch.ones(1, 4))

        return build

    measure_all({label: make(label) for label in "abc"}, **QUICK)
    assert order == [*"abc", *"abc"]
    assert [model() for model in models.values()] == [None] * 3


def test_switches_are_in_force_in_the_turns_of_their_own_variant_only(clock, no_collecting):
    before, seen = torch.get_num_threads(), {"plain": set(), "threads": set(), "later": set()}

    def make(label, at_build=None, at_step=None):
        def build():
            if at_build:
                torch.set_num_threads(at_build)
            calls = []

            def step():
                calls.append(seen[label].add(torch.get_num_threads()))
                clock.spend(0.01)
                if at_step and len(calls) == 6:
                    torch.set_num_threads(at_step)

            return step

        return build

    both = {"plain": make("plain"), "threads": make("threads", before + 1), "later": make("later", None, before + 2)}
    measure_all(both, seconds=0.001, blocks=5)
    assert seen == {"plain": {before}, "threads": {before + 1}, "later": {before, before + 2}}
    assert torch.get_num_threads() == before


def test_measuring_draws_nothing_from_the_readers_generator(no_collecting):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    measure(lambda: lambda: torch.rand(1), **QUICK)
    assert torch.equal(torch.rand(1), expected)


def test_older_objects_are_not_collected_while_measuring_and_are_again_after_it(monkeypatch):
    gc.unfreeze()
    monkeypatch.setattr(device, "_frozen", False)
    frozen, before = [], gc.get_freeze_count()  # Python 3.12 has some of its own
    measure(lambda: lambda: frozen.append(gc.get_freeze_count()), **QUICK)
    assert min(frozen) > before + 1000 and gc.get_freeze_count() <= before
    with pytest.raises(RuntimeError), gc_frozen():
        assert gc.get_freeze_count() > before + 1000
        raise RuntimeError
    assert gc.get_freeze_count() <= before
    gc.freeze()


# How long


@contextmanager
def simulated_turns(overhead=0.0):
    """What `clock`, `only_turns` and `turns` are, for hypothesis: anew for each example; each turn has an overhead."""
    simulated, taken, take = Clock(), [], measurement._take_turn

    def timed(*given):
        before = simulated.now
        take(*given)
        taken.append(simulated.now - before)
        simulated.spend(overhead)

    with pytest.MonkeyPatch.context() as patch:
        for module in (measurement, timing):
            patch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: simulated.now))
        patch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",)))
        patch.setattr(measurement, "_take_turn", timed)
        patch.setattr(measurement, "gc_frozen", nullcontext)
        patch.setattr(variants, "_SWITCHES", ())
        patch.setattr(variants, "release_memory", lambda: None)
        yield simulated, taken


@given(milliseconds=st.floats(-1, 2).map(lambda power: 10**power), seconds=st.sampled_from([None, 1.0, 2.0, 5.0]))
@settings(max_examples=20)
def test_each_variant_is_timed_for_the_seconds_given(milliseconds, seconds):
    duration = milliseconds / 1000
    with simulated_turns() as (clock, turns):
        found = measure_all(dict.fromkeys("ab", clock.step(duration)), seconds=seconds)
    blocks = len(found[0].turns)
    assert 8 <= blocks <= 200 and len(turns) == 2 * 2 * blocks
    assert sum(turns) / 2 == pytest.approx(max(seconds or 0.6, 16 * duration), rel=0.2), "0.6 s is a CPU's default"
    assert min(turns) >= 0.005 * (1 - 1e-6)
    assert found[0].times == pytest.approx([duration] * blocks)


@given(
    milliseconds=st.lists(st.floats(-1, 2).map(lambda power: 10**power), min_size=2, max_size=4),
    overhead=st.floats(0, 2),
)
@settings(max_examples=20)
def test_variants_of_unlike_speed_share_the_seconds(milliseconds, overhead):
    """Each turn has an overhead of some milliseconds, as for switches: it must not eat up the blocks."""
    with simulated_turns(overhead / 1000) as (clock, turns):
        all_of_them = {str(i): clock.step(duration / 1000) for i, duration in enumerate(milliseconds)}
        blocks = len(measure_all(all_of_them, seconds=2)[0].turns)
    whole = sum(turns) + overhead / 1000 * len(turns)
    assert whole / len(milliseconds) == pytest.approx(2, rel=0.25) or blocks == 8
    of_each = [sum(turns[i :: 2 * len(milliseconds)]) for i in range(len(milliseconds))]
    assert max(of_each) <= 2.5 * min(of_each)
    assert blocks * max(0.01, 0.002 * max(milliseconds)) > 0.9, "many short blocks, not a few long ones"


@pytest.mark.parametrize("min_steps, of_the_quick", [(1, 0.4), (3, 3 * 16 * 0.1)])
def test_one_long_step_makes_the_others_turns_no_longer(clock, only_turns, turns, min_steps, of_the_quick):
    measure_all({"long": clock.step(0.1), "quick": clock.step(0.001)}, seconds=0.4, min_steps=min_steps)
    long, quick = turns[::4] + turns[3::4], turns[1::4] + turns[2::4]
    assert sum(long) == pytest.approx(16 * 0.1 * min_steps) and sum(quick) == pytest.approx(of_the_quick, rel=0.05)


def test_a_warm_up_that_misleads_costs_no_time(clock, only_turns, turns):
    """What a step takes is learned from the turns, too."""

    def build():
        calls = []

        def step():
            calls.append(None)
            clock.spend(0.02 if len(calls) <= 2 else 0.001)

        return step

    found = measure(build, seconds=2)
    assert sum(turns) == pytest.approx(2, rel=0.2) and len(found.turns) > 100


def test_one_slow_block_takes_its_time_and_no_more(clock, only_turns, turns):
    calls = itertools.count()

    def step():
        clock.spend(0.8 if next(calls) == 6 else 0.01)

    found = measure(lambda: step, seconds=2)
    assert sum(turns) == pytest.approx(2, rel=0.2) and len(found.turns) > 50


def test_what_ran_out_of_memory_takes_none_of_the_time(clock, no_collecting, turns):
    fits, *failed = measure_all({"fits": clock.step(0.01)} | {f"fails {k}": Faulty(0) for k in range(5)}, seconds=1)
    assert sum(turns) == pytest.approx(1, rel=0.2) and len(fits.turns) == 50
    assert {m.failed for m in failed} == {OUT_OF_MEMORY}


@pytest.mark.parametrize("stalls, blocks", [((), 8), ((6,), 15), ((6, 7), 15), ((6, 10), 21), ((6, 10, 14, 20), 21)])
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_further_blocks_make_up_for_turns_that_were_held_up(clock, only_turns, stalls, blocks, order):
    """After two calls of warm-up, each block has two. With at most two such blocks, the interval is as without."""
    calls = itertools.count()

    def disturbed():
        clock.spend(1.0 if next(calls) in stalls else 0.1)

    both = {"a": lambda: disturbed, "b": clock.step(0.11)}
    plain, slower = sorted(measure_all({label: both[label] for label in order}, seconds=0.5), key=lambda m: m.label)
    assert len(plain.turns) == len(slower.turns) == blocks
    _, low, high = hodges_lehmann_interval([math.log(b / a) for a, b in zip(plain.times, slower.times)])
    assert (low, high) == (pytest.approx(math.log(1.1)),) * 2 or (len(stalls) > 2 and low < 0)


def test_a_given_number_of_blocks_stays(clock, only_turns):
    calls = itertools.count()
    found = measure(lambda: lambda: clock.spend(1.0 if next(calls) == 6 else 0.1), blocks=9)
    assert len(found.turns) == 9


@pytest.mark.parametrize("blocks", [1, 8, 40])
def test_the_number_of_blocks_can_be_given(blocks, clock, only_turns, turns):
    found = measure_all(dict.fromkeys("ab", clock.step(0.001)), seconds=2, blocks=blocks)
    assert [len(m.turns) for m in found] == [blocks] * 2
    assert sum(turns) / 2 == pytest.approx(2, rel=0.2)


def test_a_turn_has_at_least_min_steps(clock, only_turns):
    ran = []
    measure(lambda: lambda: ran.append(clock.spend(0.01)), seconds=0.001, blocks=3, min_steps=20)
    assert len(ran) == 2 + 3 * 2 * (20 + 1)  # the warm-up, and one step that leads in to each turn


def test_with_min_steps_the_blocks_become_fewer(clock, only_turns, turns):
    found = measure(clock.step(0.001), seconds=2, min_steps=40)
    assert len(found.turns) == pytest.approx(2 / 0.08, rel=0.1) and sum(turns) == pytest.approx(2, rel=0.2)


def test_a_cap_on_the_seconds_makes_blocks_and_steps_few(monkeypatch, clock, no_collecting):
    ran = []
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    found = measure(lambda: lambda: ran.append(clock.spend(0.001)), seconds=60, warmup=1, min_steps=50)
    assert len(found.turns) == 8
    assert len(ran) == (1 + 1) + 1 + 2 * 8  # for the memory, a warm-up, and a step in each turn


def test_the_warm_up_lasts_until_caches_are_full(clock, only_turns):
    ran = []
    measure(lambda: lambda: ran.append(clock.spend(0.0001)), seconds=0.0004, blocks=1)
    assert len(ran) == pytest.approx(50 + 2 * 2, abs=2)


# Together, or one at a time


def labelled_builds(clock, labels, seconds=0.01):
    """Variants, and the labels in the order in which they are built."""
    built = []

    def make(label):
        return lambda: built.append(label) or partial(clock.spend, seconds)

    return {label: make(label) for label in labels}, built


@pytest.mark.parametrize(("free", "together"), [(2800, True), (2700, False)])
def test_variants_are_kept_together_where_all_fit(free, together, clock, monkeypatch, no_collecting):
    """Three that hold 600 bytes between steps, of which one needs 700 more in its step: 2500, and a tenth of slack."""
    needs = iter([(600, 800), (600, 1300), (600, 600)])
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace(next(needs), ("forward",) * 2))
    monkeypatch.setattr(measurement, "free_memory", lambda: free)
    all_of_them, built = labelled_builds(clock, "abc")
    found = measure_all(all_of_them, seconds=1, blocks=2)
    assert "".join(built) == ("abc" if together else "abcbabcba")
    assert [len(m.turns) for m in found] == [2] * 3 and [m.median for m in found] == pytest.approx([0.01] * 3)


def test_under_a_memory_limit_variants_that_fit_alone_are_built_one_at_a_time(no_collecting):
    models = {"a": [], "b": []}

    def make(label):
        def build():
            weights = torch.nn.Parameter(torch.zeros(MiB))
            models[label].append(weakref.ref(weights))
            return lambda: weights[:100].sum().item()

        return build

    both = {label: make(label) for label in models}
    with memory_limit(6 * MiB):
        found = measure_all(both, **QUICK)
    assert [m.failed for m in found] == [None, None] and [len(m.turns) for m in found] == [3, 3]
    assert len(models["b"]) == 1 + 3, "one for the memory, one in each block"
    with memory_limit(20 * MiB):
        measure_all(both, **QUICK)
    assert len(models["b"]) == 1 + 3 + 2


def test_one_at_a_time_only_one_is_alive_and_the_blocks_are_eight(clock, monkeypatch):
    monkeypatch.setattr(measurement, "free_memory", lambda: 0)
    both = {"a": Faulty(clock=clock), "b": Faulty(clock=clock)}
    seen = []
    spend = clock.spend
    monkeypatch.setattr(clock, "spend", lambda s: seen.append([v.alive for v in both.values()]) or spend(s))
    found = measure_all(both, seconds=2)
    assert set(map(tuple, seen)) == {(True, False), (False, True)}
    assert [len(m.turns) for m in found] == [8, 8]
    assert [v.builds for v in both.values()] == [1 + 9, 1 + 8], "turns in a row share a build"


def test_one_at_a_time_the_seconds_are_the_same(clock, only_turns, turns, monkeypatch):
    monkeypatch.setattr(measurement, "free_memory", lambda: -1)
    measure_all(dict.fromkeys("ab", clock.step(0.01)), seconds=2)
    assert sum(turns) / 2 == pytest.approx(2, rel=0.2) and len(turns) == 4 * 8


def test_a_variant_that_cannot_be_built_beside_another_gets_a_result_alone(clock):
    """What it needs to be built is not known: its peak is that of a step."""
    first, builds = Faulty(clock=clock), []

    def second():
        builds.append(1)
        if first.alive:
            raise torch.OutOfMemoryError("no room beside the first one")
        return partial(clock.spend, 0.01)

    found = measure_all({"first": first, "second": second}, **QUICK)
    assert [m.failed for m in found] == [None, None] and [len(m.turns) for m in found] == [3, 3]
    assert len(builds) == 1 + 1 + 3


def test_a_turn_that_runs_out_of_memory_beside_another_is_taken_alone(clock, no_collecting):
    """And what was timed until then does not count: turns of two kinds are no blocks."""
    both = {"a": Faulty(clock=clock), "b": Faulty(1, 5, always=False, clock=clock)}  # in its second block
    found = measure_all(both, **QUICK)
    assert [m.failed for m in found] == [None, None] and [len(m.turns) for m in found] == [3, 3]


def test_variants_that_crowd_the_gpus_memory_are_timed_one_at_a_time(gpu):
    """The allocator raises nothing: it gives cached blocks back and asks again, in the midst of a turn."""
    alive, crowded = {"a": 0, "b": 0}, []

    def make(label):
        def build():
            alive[label] += 1
            holder = set()
            weakref.finalize(holder, lambda: alive.update({label: alive[label] - 1}))

            def step(holder=holder):
                gpu.step(0.05)
                gpu.retries += all(alive.values())
                crowded.append(all(alive.values()))

            return step

        return build

    found = measure_all({"a": make("a"), "b": make("b")}, seconds=0.4, blocks=2)
    assert [len(m.turns) for m in found] == [2, 2]
    assert any(crowded) and not any(crowded[-2 * 2 * 2 * 2 :]), "the turns that count, of two steps at least"


def test_variants_with_worker_processes_are_timed_one_at_a_time():
    others = set(multiprocessing.active_children())
    seen = {"a": [], "b": []}

    def make(label):
        def build():
            loader = DataLoader(TensorDataset(torch.arange(10_000.0)), num_workers=1, persistent_workers=True)
            batches = iter(loader)

            def step():
                next(batches)
                seen[label].append(len(set(multiprocessing.active_children()) - others))

            return step

        return build

    found = measure_all({"a": make("a"), "b": make("b")}, seconds=0.001, blocks=1)
    assert [len(m.turns) for m in found] == [1, 1]
    assert 2 in seen["b"], "both were built together, to see"
    assert {*seen["a"][-5:], *seen["b"][-10:]} == {1}, "the last builds of each"
    assert set(multiprocessing.active_children()) == others


def test_one_variant_with_worker_processes_is_kept(no_collecting):
    builds = []

    def build():
        builds.append(iter(DataLoader(TensorDataset(torch.arange(10_000.0)), num_workers=1)))
        return partial(next, builds[-1])

    measure(build, seconds=0.001, blocks=3)
    assert len(builds) == 2
    builds.clear()


# Out of memory, and other faults


PLACES = {  # by build and step, where a warm-up has two steps and a turn one; built for its turn, five
    "in the build": (0, None),
    "in the warm-up": (0, 1),
    "in the traced step": (0, 3),
    "in the build for the turns": (1, None),
    "in the warm-up before the turns": (1, 2),
    "in the first turn": (1, 3),
    "in the turn back": (1, 4),
    "in the last block": (1, 8),
}


@pytest.mark.parametrize("failing", ["baseline", "other"])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_is_a_result(failing, place, clock, no_collecting):
    both = {"baseline": Faulty(clock=clock), "other": Faulty(clock=clock)}
    both[failing] = Faulty(*PLACES[place], clock=clock)
    found = {m.label: m for m in measure_all(both, items=8, unit="rows", **QUICK)}
    failed = found.pop(failing)
    assert (failed.failed, failed.turns, failed.peak_allocated) == (OUT_OF_MEMORY, (), None)
    assert (failed.items, failed.unit) == (8, "rows")
    (kept,) = found.values()
    assert kept.failed is None and len(kept.turns) == 3 and kept.peak_allocated > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_what_ran_out_of_memory_is_freed(error):
    faulty = Faulty(1, 2, error, cyclic=True)
    assert measure(faulty, **QUICK).failed == OUT_OF_MEMORY
    assert len(faulty.models) == 2 and not faulty.alive


def test_a_real_allocation_that_cannot_be_met_is_out_of_memory(no_collecting):
    assert measure(lambda: lambda: torch.empty(2**60, dtype=torch.uint8), **QUICK).failed == OUT_OF_MEMORY


def test_above_the_limit_is_out_of_memory_and_what_comes_next_is_not(tiny, no_collecting):
    with memory_limit(memory.trace(tiny).peak - 1):
        assert measure(tiny, **QUICK).failed == OUT_OF_MEMORY
    assert measure(tiny, **QUICK).failed is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_any_other_error_comes_through_and_names_its_variant(place, error, clock):
    sound, faulty = Faulty(cyclic=True, clock=clock), Faulty(*PLACES[place], error, cyclic=True, clock=clock)
    with pytest.raises(error, match="a fault") as caught:
        measure_all({"sound": sound, "broken one": faulty}, **QUICK)
    assert "raised while measuring the variant 'broken one'" in caught.value.__notes__
    text = "".join(traceback.format_exception(caught.value))
    assert "in step" in text or "in __call__" in text, "the line that failed"
    if error is not KeyboardInterrupt:
        assert faulty.alive, "a debugger looks at it"
        del caught
        gc.collect()
    assert sound.models and faulty.models and not sound.alive and not faulty.alive


def test_an_interrupt_between_two_turns_frees_everything(clock, monkeypatch):
    both, updates = {label: Faulty(cyclic=True, clock=clock) for label in "ab"}, itertools.count()

    class Bar(tqdm):
        def update(self, n=1):
            if next(updates) == 6:  # two peaks, two builds, two turns
                raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "_progress", lambda: Bar(file=io.StringIO()))
    with pytest.raises(KeyboardInterrupt) as caught:
        measure_all(both, **QUICK)
    assert [v.builds for v in both.values()] == [2, 2] and not any(v.alive for v in both.values())
    del caught


def test_an_interrupt_ends_worker_processes_and_frees_what_waits_for_its_turn():
    before = set(multiprocessing.active_children())
    waiting, workers = Faulty(), []

    def loading():
        loader = DataLoader(TensorDataset(torch.arange(10_000.0)), num_workers=1, persistent_workers=True)
        batches, first = iter(loader), not workers

        def step():
            next(batches)
            if not first:
                raise KeyboardInterrupt

        workers.extend(set(multiprocessing.active_children()) - before)
        return step

    with pytest.raises(KeyboardInterrupt) as caught:
        measure_all({"waiting": waiting, "loading": loading}, **QUICK)
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)
    assert len(waiting.models) == 2 and not waiting.alive
    del caught


# Arguments


def sound():
    return lambda: None


BAD = {
    "items": [0, -1, math.nan, math.inf, True, "8", {"a": 0}, {"a": None}, {"b": 8}, {}, {"a": 8, "b": 8}],
    "blocks": [0, -1, math.nan, True, 2.5, "8", False],
    "seconds": [0, -1, math.nan, math.inf, True, "1"],
    "warmup": [0, -1, True, 1.5, None],
    "min_steps": [0, -1, True, 1.5, None],
}


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_argument_is_named_before_anything_is_built(argument, value):
    one = Faulty()
    with pytest.raises((TypeError, ValueError), match=f"^{argument}( of 'a')?: expected a"):
        measure_all({"a": one}, **{argument: value})
    assert one.builds == 0


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({}, ValueError, "variants: expected at least one"),
        ([sound], TypeError, "variants: expected a mapping"),
        ({"a": sound()()}, TypeError, r"variants\['a'\]: expected a function"),
        ({"a": 3}, TypeError, r"variants\['a'\]: expected a function"),
        ({"": sound}, TypeError, "variants: expected every label"),
        ({"a": sound, "b": lambda: None}, TypeError, "expected it to return its training step, a function, got None"),
    ],
)
def test_a_bad_variant_is_named(bad, error, message, no_collecting):
    with pytest.raises(error, match=message):
        measure_all(bad, **QUICK)


def test_a_bad_variant_of_measure_is_named():
    with pytest.raises(TypeError, match="expected a function that returns a training step, got int"):
        measure(3)


def test_items_may_differ_between_variants(no_collecting):
    found = measure_all({"a": sound, "b": sound}, items={"b": 16, "a": 8}, **QUICK)
    assert [(m.label, m.items) for m in found] == [("a", 8), ("b", 16)]


def test_a_number_of_numpy_is_a_number(no_collecting):
    (found,) = measure_all({"a": sound}, items=np.int64(8), **QUICK)
    assert json.dumps(found.items) == "8.0"


# The progress bar


class Terminal(io.StringIO):
    def __init__(self, watched):
        super().__init__()
        self.watched = watched

    def isatty(self):
        return self.watched


@pytest.mark.parametrize("watched", [False, True])
def test_the_progress_bar_is_for_terminals_only(watched, monkeypatch, capsys, clock, no_collecting):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    terminal = Terminal(watched)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(measurement, "_progress", partial(unthrottled, measurement._progress))
    measure_all({"first label": clock.step(0.01), "second label": clock.step(0.01)}, seconds=0.2)
    written = terminal.getvalue()
    if watched:
        assert "first label: 0/84" in written, "two peaks, two builds, and the most turns that there may be"
        assert "first label: 43/44 |" in written, "ten blocks fitted, the last turn is the first variant's"
        assert written.endswith("\r") and not written.rsplit("\r", 2)[-2].strip(), "the bar was left standing"
    else:
        assert written == ""
    assert capsys.readouterr().out == ""


def unthrottled(make):
    bar = make()
    bar.mininterval = bar.miniters = 0
    return bar


def test_in_a_notebook_the_bar_is_written_where_print_writes(monkeypatch, no_collecting):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    printed, errors = Terminal(False), Terminal(False)  # a notebook's streams are no terminals
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", errors)
    measure_all({"a label": sound}, **QUICK)
    assert "a label" in printed.getvalue() and errors.getvalue() == ""


@pytest.mark.parametrize("energy", [False, True])
@pytest.mark.parametrize(
    "b", [None, *PLACES.values(), "does not fit"], ids=["sound", *PLACES, "does not fit beside the other"]
)
def test_the_bar_never_runs_over_and_ends_full(b, energy, clock, monkeypatch, no_collecting, simulate_gpu):
    if energy:
        simulate_gpu()
        monkeypatch.setattr(memory, "trace", fake_trace)
        monkeypatch.setattr(power, "measure_energy", lambda step: 1.0)
        monkeypatch.setattr(power, "read_clock", lambda: None)
        monkeypatch.setattr(timing, "time_steps", lambda step, count, meanwhile=None: [step() or 0.01] * count)
        monkeypatch.setattr(measurement, "free_memory", lambda: GiB)
    if b == "does not fit":
        monkeypatch.setattr(measurement, "free_memory", lambda: -1)
    bars = []

    class Bar(tqdm):
        def update(self, n=1):
            super().update(n)
            assert self.n <= self.total
            bars.append(self)

    monkeypatch.setattr(measurement, "_progress", lambda: Bar(file=io.StringIO()))
    faulty = Faulty(*(b if isinstance(b, tuple) else ()), clock=clock)
    measure_all({"a": Faulty(clock=clock), "b": faulty, "c": Faulty(0)}, seconds=0.2)
    assert bars[-1].n == bars[-1].total > 3


def fake_trace(variant, warmup):
    """Build the variant and run it, as a trace does."""
    step = variant()
    for _ in range(warmup + 1):
        step()
    return memory.Trace((0,), ("forward",), 0)


def test_the_bar_of_what_fails_altogether_ends_full(monkeypatch, no_collecting):
    bars = []
    monkeypatch.setattr(measurement, "_progress", lambda: bars.append(tqdm(file=io.StringIO())) or bars[0])
    measure_all({"a": Faulty(0), "b": Faulty(0)}, seconds=1)
    assert bars[0].n == bars[0].total == 2


@pytest.mark.parametrize("unit", [5, None])
def test_a_unit_that_is_none_is_refused_before_anything_is_measured(unit):
    with pytest.raises(TypeError, match=r"unit: expected a string such as 'samples', got"):
        measure(lambda: 1 / 0, items=3, unit=unit)


# On a simulated GPU


@pytest.fixture
def gpu(simulate_gpu, monkeypatch, no_collecting):
    """A simulated GPU, whose clock is also the CPU's, with turns but no memory to be measured."""
    simulated = simulate_gpu()
    simulated.variant = lambda seconds: lambda: partial(simulated.step, seconds)
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",), 0))
    monkeypatch.setattr(variants, "_SWITCHES", ())
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    monkeypatch.setattr(power, "read_clock", lambda: None)
    monkeypatch.setattr(measurement, "time", SimpleNamespace(perf_counter=lambda: simulated.clock))
    return simulated


@pytest.mark.parametrize("milliseconds", [0.3, 1, 16, 30, 60, 70, 99, 150])
def test_a_turn_on_a_gpu_lasts_until_its_clock_has_settled(milliseconds, gpu, monkeypatch):
    turns, time_steps = [], timing.time_steps

    def watch(step, count, *, meanwhile=None):
        times = time_steps(step, count, meanwhile=meanwhile)
        if meanwhile:
            turns.append(sum(times))
        return times

    monkeypatch.setattr(timing, "time_steps", watch)
    found = measure(gpu.variant(milliseconds / 1000))
    assert sum(turns) >= 1.75, "2 s are a GPU's default"
    assert len(turns) == 2 * len(found.turns) >= 16 and min(turns) >= 0.1 * (1 - 1e-6)
    assert found.median == pytest.approx(milliseconds / 1000)


def test_a_gpus_turns_are_long_enough_also_where_few_seconds_are_asked_for(gpu):
    found = measure_all(dict.fromkeys("ab", gpu.variant(0.001)), seconds=0.2, energy=False)
    assert [len(m.turns) for m in found] == [8, 8] and found[0].median == pytest.approx(0.001)
    assert gpu.log.count("step") > 2 * 8 * 2 * 100, "of 1 ms, 100 in each turn"


def test_a_gpu_is_warmed_up_for_half_a_second(gpu):
    measure(gpu.variant(0.01), seconds=0.01, blocks=1)
    warm_up = gpu.log[: len(gpu.log) - gpu.log[::-1].index("wait") - 1].count("step")
    assert 50 <= warm_up < 70


def test_a_long_step_of_a_gpu_needs_no_more_warming_up(gpu):
    measure(gpu.variant(0.3), seconds=0.01, blocks=1, warmup=2)
    assert gpu.log.count("step") == 3 + 2 * 2  # one leads in each time


def test_one_step_leads_in_to_each_turn_on_a_gpu(gpu):
    measure(gpu.variant(0.02), seconds=0.2, blocks=1)
    told = [word for word in gpu.log if word in ("step", "wait")]
    runs = [len(list(run)) for word, run in itertools.groupby(told) if word == "step"]
    assert runs[-2:] == [1 + 5, 1 + 5]


def test_clocks_and_throttle_reasons_of_the_turns_are_noted(gpu, monkeypatch):
    told = itertools.chain([(1500, ()), (1200, ("power cap",)), (1300, ("thermal",)), None], itertools.repeat(None))

    def read_clock():
        gpu.log.append("asked")
        return next(told)

    monkeypatch.setattr(power, "read_clock", read_clock)
    found = measure(gpu.variant(0.05), seconds=2, blocks=2)
    assert (found.sm_clock, found.throttled) == (1300, ("power cap", "thermal"))
    assert gpu.log.count("asked") == 4
    asked = [at for at, what in enumerate(gpu.log) if what == "asked"]
    assert [(gpu.log[at - 1], gpu.log[at + 1]) for at in asked] == [("record", "wait")] * 4, "while the GPU works"


def test_a_gpu_that_does_not_tell_its_clock_is_measured_without(gpu):
    found = measure(gpu.variant(0.05), seconds=2, blocks=2)
    assert (found.sm_clock, found.throttled) == (None, ())


def test_each_variants_clocks_are_its_own(gpu, monkeypatch):
    clocks = itertools.cycle([(1000, ("slow",)), (2000, ()), (2000, ()), (1000, ("slow",))])
    monkeypatch.setattr(power, "read_clock", lambda: next(clocks))
    a, b = measure_all(dict.fromkeys("ab", gpu.variant(0.05)), seconds=2, blocks=2)
    assert (a.sm_clock, a.throttled, b.sm_clock, b.throttled) == (1000, ("slow",), 2000, ())


def test_energy_is_one_window_of_each_variant_after_all_turns(gpu, monkeypatch):
    answers = iter([3.0, None])
    monkeypatch.setattr(power, "measure_energy", lambda step: gpu.log.append("energy") or next(answers))
    found = measure_all(dict.fromkeys("ab", gpu.variant(0.05)), seconds=2, blocks=2)
    assert [m.joules for m in found] == [3.0, None]
    assert gpu.log[-2:].count("energy") == 2 or "step" not in gpu.log[gpu.log.index("energy") :]


def test_no_energy_is_taken_where_it_is_not_wanted_or_the_run_is_cut_short(gpu, monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: 2.0)
    assert measure(gpu.variant(0.05), seconds=2, blocks=1, energy=False).joules is None
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    assert measure(gpu.variant(0.05), seconds=2, blocks=1).joules is None


def test_the_seconds_that_energy_takes_do_not_make_blocks_fewer(gpu, monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: gpu.step(3.0))
    alone = len(measure(gpu.variant(0.01), seconds=2, energy=False).turns)
    assert len(measure(gpu.variant(0.01), seconds=2).turns) == alone


@pytest.mark.parametrize("always", [False, True])
def test_out_of_memory_while_energy_is_taken_is_a_result(always, gpu, monkeypatch):
    calls = itertools.count()

    def measure_energy(step):
        if step.args == (0.06,) and (next(calls) == 0 or always):
            raise torch.OutOfMemoryError
        return 2.0

    monkeypatch.setattr(power, "measure_energy", measure_energy)
    a, b = measure_all({"a": gpu.variant(0.05), "b": gpu.variant(0.06)}, seconds=2, blocks=2)
    assert (a.failed, a.joules, len(a.turns)) == (None, 2.0, 2)
    assert b.failed == (OUT_OF_MEMORY if always else None)


def test_the_generator_of_the_gpu_is_the_readers_again(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    measure(gpu.variant(0.05), seconds=0.001, blocks=1)
    assert gpu.log.count("state kept") == gpu.log.count("state given back") == 1


# On a GPU


def make_gpu_variant(megabytes=64, width=1024):
    def variant():
        model = torch.nn.Linear(width, width, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        batch = torch.randn(1024, width, device="cuda")
        held = torch.zeros(megabytes * MiB, dtype=torch.uint8, device="cuda")

        def step():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return held

        return step

    return variant


@pytest.mark.gpu
def test_measuring_leaves_nothing_on_the_gpu(monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    release_memory()
    before = torch.cuda.memory_allocated()
    found = measure_all({"a": make_gpu_variant(), "b": make_gpu_variant(128)}, seconds=0.1, blocks=2)
    assert torch.cuda.memory_allocated() <= before
    for m in found:
        assert m.peak_reserved >= m.peak_allocated >= 64 * MiB
        assert len(m.turns) == 2 and m.device.kind == "cuda"
    assert found[1].peak_allocated - found[0].peak_allocated == pytest.approx(64 * MiB, rel=0.01)


@pytest.mark.gpu
def test_a_limit_makes_a_real_out_of_memory_that_the_next_measuring_survives(monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    release_memory()
    before = torch.cuda.memory_allocated()
    both = {"small": make_gpu_variant(64), "large": make_gpu_variant(2048)}
    with memory_limit(GiB):
        small, large = measure_all(both, seconds=0.1, blocks=2)
        assert (small.failed, large.failed) == (None, OUT_OF_MEMORY)
        assert len(small.turns) == 2
    small, large = measure_all(both, seconds=0.1, blocks=2)
    assert (small.failed, large.failed) == (None, None)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_energy_is_that_of_a_board_at_work(energy_counter):
    try:
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(power.find_board()) / 1000
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML: {error}")
    found = measure(make_gpu_variant(), seconds=0.1, blocks=2)
    assert 0.05 * limit < found.joules / found.median < 1.1 * limit  # watts: a board at rest takes a tenth and more
