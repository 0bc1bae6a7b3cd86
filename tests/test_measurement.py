"""Tests of effgpu.measurement: rounds alternate, one variant is alive at a time, out of memory is a result."""

import dataclasses
import gc
import io
import itertools
import json
import math
import random
import statistics
import sys
import time
import weakref
from functools import partial

import numpy as np
import pynvml
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effgpu import measurement, memory, power, timing
from effgpu.device import Device, describe, memory_limit, older_objects_spared, release_memory
from effgpu.measurement import OUT_OF_MEMORY, Measurement, measure, measure_all, rank_interval
from effgpu.units import GiB, MiB

QUICK = {"seconds": 0.001, "rounds": 3}
CPU = Device("Test CPU", "cpu", None, 2)
seconds_lists = st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30)


class Faulty:
    """A variant that raises at a given build (0 for the memory, 1 to rehearse) and step of it (None: in the build)."""

    def __init__(self, build=None, step=None, error=torch.OutOfMemoryError):
        self.at_build, self.at_step, self.error = build, step, error
        self.builds, self.models = 0, []

    def __call__(self):
        build, calls = self.builds, []
        self.builds += 1
        model = torch.nn.Linear(4, 4)
        self.models.append(weakref.ref(model))
        if build == self.at_build and self.at_step is None:
            raise self.error("a fault")

        def step():
            calls.append(model(torch.ones(1, 4)))
            if build == self.at_build and len(calls) == self.at_step:
                raise self.error("a fault")

        return step

    @property
    def alive(self):
        return any(model() is not None for model in self.models)


# The value


@given(seconds_lists)
def test_median_and_interval_are_those_of_the_times(times):
    found = Measurement("a", tuple(times), CPU)
    assert found.median == statistics.median(times)
    assert found.interval == (rank_interval(times)[1:] if len(times) >= 8 else None)


@given(seconds_lists, st.floats(0.1, 1e6))
def test_throughput_is_items_over_the_median(times, items):
    found = Measurement("a", tuple(times), CPU, items)
    assert found.throughput * statistics.median(times) == pytest.approx(items)


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=9))
def test_joules_are_the_median_of_the_energies(energies):
    assert Measurement("a", (1.0,), CPU, energies=tuple(energies)).joules == statistics.median(energies)


def test_what_was_not_measured_is_none():
    found = Measurement("a", (), CPU, 32, failed=OUT_OF_MEMORY)
    assert {found.median, found.interval, found.throughput, found.joules, found.peak_allocated} == {None}
    assert Measurement("a", (0.5,), CPU).throughput is None


def test_a_measurement_is_a_value_that_shows_itself():
    found = Measurement("fp32", (0.02,) * 8, CPU, 32, "samples", 3 * MiB, None, (1.5,))
    assert repr(found) == (
        "fp32: 20.0 ms per step [20.0 ms, 20.0 ms], 1,600 samples/s, peak 3.00 MiB, 1.50 J per step "
        "on Test CPU (CPU, 2 cores)"
    )
    assert repr(Measurement("b", (0.02,), CPU)) == "b: 20.0 ms per step on Test CPU (CPU, 2 cores)"
    assert repr(Measurement("a", (), CPU, failed=OUT_OF_MEMORY)) == "a: out of memory"
    assert found == dataclasses.replace(found) != dataclasses.replace(found, items=33)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.label = "other"


# The interval


@pytest.mark.parametrize("n", range(8, 15))
def test_interval_cuts_as_many_averages_as_the_signed_ranks_allow(n):
    """By brute force: the k-th smallest average is above the centre if fewer than k averages are below it."""
    sums = [sum(itertools.compress(range(1, n + 1), signs)) for signs in itertools.product((0, 1), repeat=n)]
    k = max(k for k in range(n * n) if 100 * 2 * sum(total < k for total in sums) <= 2**n)
    values = random.Random(n).sample([2**i for i in range(n)], n)
    averages = sorted((a + b) / 2 for i, a in enumerate(values) for b in values[i:])
    assert rank_interval(values) == (statistics.median(averages), averages[k - 1], averages[-k])


@given(st.lists(st.floats(-1e9, 1e9), min_size=8, max_size=40))
def test_interval_holds_its_middle_and_lies_within_the_values(values):
    middle, low, high = rank_interval(values)
    assert min(values) <= low <= middle <= high <= max(values)


@given(st.lists(st.floats(-1e3, 1e3), min_size=8, max_size=20), st.floats(-1e3, 1e3))
def test_interval_moves_with_the_values(values, shift):
    moved = rank_interval([value + shift for value in values])
    assert moved == pytest.approx([end + shift for end in rank_interval(values)], abs=1e-6)


@pytest.mark.parametrize("n", [8, 9, 12, 30])
@pytest.mark.parametrize("noise", ["normal", "two humps"])
def test_interval_covers_the_true_centre_99_times_in_100(n, noise):
    generator = random.Random(f"{n} {noise}")
    draw = {
        "normal": lambda: generator.gauss(1, 1),
        "two humps": lambda: 1 + generator.choice([-1, 1]) * generator.uniform(1, 2),
    }[noise]
    trials = 2000
    covered = 0
    for _ in range(trials):
        _, low, high = rank_interval([draw() for _ in range(n)])
        covered += low <= 1 <= high
    assert covered / trials >= 0.99 - 3 * math.sqrt(0.99 * 0.01 / trials)


def test_too_few_values_for_an_interval():
    rank_interval([1.0] * 8)
    with pytest.raises(ValueError, match="values: expected at least 8, got 7"):
        rank_interval([1.0] * 7)


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
    found = measure(tiny, items=4, unit="rows", flops=10, **QUICK)
    assert (found.label, found.items, found.unit, found.flops, found.failed) == ("tiny_variant", 4, "rows", 10, None)
    assert len(found.times) == 3 and min(found.times) > 0 and found.throughput > 0
    assert found.peak_allocated == memory.trace(tiny).peak > 0
    assert found.peak_reserved is None and found.energies == () and found.joules is None
    assert found.device == describe()
    assert measure(tiny, label="mine", **QUICK).label == "mine"


@pytest.mark.parametrize("rounds", [1, 4])
def test_builds_once_a_round_once_for_memory_and_once_to_rehearse(rounds, no_collecting):
    one = Faulty()
    found = measure(one, seconds=0.001, rounds=rounds)
    assert one.builds == rounds + 2 and len(found.times) == rounds


@pytest.mark.parametrize(("cost", "rounds"), [(0.001, 100), (0.05, 40), (0.3, 8)])
def test_rounds_are_as_many_as_fit_but_never_fewer_than_eight(cost, rounds, monkeypatch, no_collecting):
    """`cost` is what a round takes: building, warming up, and the five steps that are the least."""
    clock, asked = [0.0], []

    def build():
        clock[0] += cost
        return lambda: None

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "time_for", lambda step, seconds, fewest: asked.append(seconds) or [1.0])
    found = measure_all({"a": build, "b": build}, seconds=2)
    assert [len(m.times) for m in found] == [rounds, rounds]
    assert asked == [measurement._CACHES_FILL, 2 / 100] * 2 * (1 + rounds)


def test_one_slow_round_takes_its_time_and_no_more(monkeypatch, no_collecting):
    """The rounds that are left are planned anew after each."""
    clock, builds = [0.0], iter(range(1000))

    def build():
        clock[0] += 0.55 if next(builds) == 2 else 0.05  # in the first round that counts
        return lambda: None

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "time_for", lambda step, seconds, fewest: [1.0])
    assert len(measure(build, seconds=2).times) == 30


def test_what_ran_out_of_memory_takes_none_of_the_time(monkeypatch, no_collecting):
    """A round's cost is shared by those that are still measured, not by those that cost nothing."""
    clock = [0.0]

    def build():
        clock[0] += 0.05
        return lambda: None

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "time_for", lambda step, seconds, fewest: [1.0])
    fits, *_ = measure_all({"fits": build} | {f"fails {k}": Faulty(0) for k in range(9)}, seconds=2)
    assert len(fits.times) == 40


def test_a_cap_on_the_seconds_makes_rounds_and_steps_fewer(monkeypatch, no_collecting):
    ran = []

    def step():
        ran.append(time.sleep(0.001))

    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    assert len(measure(lambda: step, seconds=60, warmup=1).times) == 8
    assert len(ran) == 2 * (2 + 8)  # a warm-up and a step: for the memory, to rehearse, and in each round


def test_a_round_has_at_least_min_steps(monkeypatch, no_collecting):
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",)))
    monkeypatch.setattr(measurement, "_CACHES_FILL", 1e-9)
    ran = []
    measure(lambda: lambda: ran.append("step"), seconds=1e-9, rounds=3, min_steps=20, warmup=1)
    assert len(ran) == (1 + 3) * (1 + 20)  # a rehearsal, and the rounds


def test_the_seconds_that_energy_takes_do_not_make_rounds_fewer(monkeypatch, no_collecting):
    clock = [0.0]

    def build():
        clock[0] += 0.05
        return lambda: None

    def measure_energy(step):
        clock[0] += 0.7

    monkeypatch.setattr(measurement.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "time_for", lambda step, seconds, fewest: [1.0])
    monkeypatch.setattr(power, "measure_energy", measure_energy)
    assert len(measure(build, seconds=2).times) == 40


@pytest.mark.parametrize("rise", [0.0, 0.2])
def test_a_gpu_is_kept_busy_until_its_steps_get_no_faster(rise, simulate_gpu, monkeypatch, no_collecting):
    gpu, busy = simulate_gpu(), []
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",), 0))

    def variant():
        built = gpu.clock  # idle until now, at a third of its clock

        def step():
            busy.append(gpu.clock - built)
            gpu.step(0.001 if busy[-1] >= rise else 0.003 - 0.002 * busy[-1] / rise)

        return step

    assert measure(variant, seconds=0.01, rounds=3, warmup=1).times == pytest.approx([0.001] * 3)
    assert max(busy) < rise + 0.15


def test_a_gpus_long_steps_need_no_more_warming_up(simulate_gpu, monkeypatch, no_collecting):
    gpu = simulate_gpu()
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",), 0))
    measure(lambda: partial(gpu.step, 0.3), seconds=0.01, rounds=1, warmup=2)
    assert gpu.log.count("step") == 2 * (3 + 6)  # rehearsed and counted: one leads in each time


def test_a_run_that_is_cut_short_takes_energy_once(monkeypatch, no_collecting):
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    monkeypatch.setattr(power, "measure_energy", lambda step: 2.0)
    assert measure(lambda: lambda: None).energies == (2.0,)


def test_energy_is_taken_in_the_first_eight_rounds(monkeypatch, no_collecting):
    monkeypatch.setattr(power, "measure_energy", lambda step: 2.0)
    assert measure(lambda: lambda: None, seconds=0.01, rounds=20).energies == (2.0,) * 8
    assert measure(lambda: lambda: None, seconds=0.01, rounds=20, energy=False).energies == ()


def test_rounds_alternate(no_collecting):
    built = []

    def make(label):
        return lambda: built.append(label) or (lambda: None)

    measure_all({label: make(label) for label in "abc"}, seconds=0.001, rounds=4)
    assert "".join(built) == 2 * "abc" + "abc" + "cba" + "abc" + "cba"


def test_a_round_is_its_warm_up_and_its_share_of_the_seconds_averaged(monkeypatch, no_collecting):
    ran = []

    def time_for(step, seconds, fewest):
        ran.append((seconds, fewest))
        return [1.0, 2.0, 6.0]

    monkeypatch.setattr(timing, "time_for", time_for)
    found = measure(lambda: lambda: ran.append("step"), seconds=12, rounds=3, warmup=2)
    memory_pass, warm_up = ["step"] * 3, (measurement._CACHES_FILL, 2)
    rehearsal, each_round = [warm_up, (0.12, timing.FEWEST_STEPS)], [warm_up, (4.0, timing.FEWEST_STEPS)]
    assert ran == memory_pass + rehearsal + each_round * 3
    assert found.times == (3.0,) * 3


def test_only_one_variant_is_alive_at_a_time():
    models = []

    def variant():
        assert not any(model() is not None for model in models), "the one before was not freed"
        model = torch.nn.Linear(4, 4)
        model.itself = [model]  # only the garbage collector frees it
        models.append(weakref.ref(model))
        return lambda: model(torch.ones(1, 4))

    measure_all({"a": variant, "b": variant}, seconds=0.001, rounds=2)
    assert len(models) == 8 and not any(model() is not None for model in models)


def test_energy_is_taken_each_round(monkeypatch, no_collecting):
    answers = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr(power, "measure_energy", lambda step: next(answers))
    found = measure(lambda: lambda: None, **QUICK)
    assert found.energies == (3.0, 2.0, 1.0) and found.joules == 2.0


@pytest.mark.parametrize("answers", [(None, None, None), (3.0, None, 1.0)])
def test_energy_that_a_round_lacks_is_not_measured(answers, monkeypatch, no_collecting):
    """Or the rounds that have one would be held against others of the baseline's."""
    told = iter(answers)
    monkeypatch.setattr(power, "measure_energy", lambda step: next(told))
    found = measure(lambda: lambda: None, **QUICK)
    assert found.energies == () and found.joules is None


def test_older_objects_are_collected_again_after_measuring(monkeypatch):
    frozen, before = [], gc.get_freeze_count()  # Python 3.12 has some of its own
    monkeypatch.setattr(timing, "time_for", lambda step, seconds, fewest: frozen.append(gc.get_freeze_count()) or [1.0])
    measure(lambda: lambda: None, **QUICK)
    assert min(frozen) > before + 1000 and gc.get_freeze_count() <= before


def test_older_objects_are_collected_again_after_an_error():
    before = gc.get_freeze_count()
    with pytest.raises(RuntimeError), older_objects_spared():
        assert gc.get_freeze_count() > before + 1000
        raise RuntimeError
    assert gc.get_freeze_count() <= before


# Out of memory, and other faults


PLACES = {
    "in the build": (0, None),
    "in the warm-up": (0, 1),
    "in the step": (0, 3),
    "in the rehearsal": (1, 2),
    "in the build of the first round": (2, None),
    "in the warm-up of the first round": (2, 1),
    "in a step of the first round": (2, 4),
    "in the build of a later round": (4, None),
    "in a step of a later round": (4, 6),
}


@pytest.mark.parametrize("failing", ["baseline", "other"])
@pytest.mark.parametrize("place", PLACES)
def test_out_of_memory_is_a_result(failing, place, no_collecting):
    both = {"baseline": Faulty(), "other": Faulty()}
    both[failing] = Faulty(*PLACES[place])
    found = {m.label: m for m in measure_all(both, items=8, unit="rows", **QUICK)}
    failed = found.pop(failing)
    assert (failed.failed, failed.times, failed.peak_allocated) == (OUT_OF_MEMORY, (), None)
    assert (failed.items, failed.unit) == (8, "rows")
    assert both[failing].builds == PLACES[place][0] + 1, "measured on after it had failed"
    (kept,) = found.values()
    assert kept.failed is None and len(kept.times) == 3 and kept.peak_allocated > 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_what_ran_out_of_memory_is_freed(error):
    faulty = Faulty(1, 2, error)
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
def test_any_other_error_comes_through_and_names_its_variant(place, error, no_collecting):
    faulty = Faulty(*PLACES[place], error)
    with pytest.raises(error, match="a fault") as caught:
        measure_all({"sound": Faulty(), "broken one": faulty}, **QUICK)
    assert "raised while measuring the variant 'broken one'" in caught.value.__notes__


@pytest.mark.parametrize("place", ["in the build", "in the step", "in a step of a later round"])
def test_any_other_error_leaves_nothing_behind_though_it_is_kept(place):
    sound, faulty = Faulty(), Faulty(*PLACES[place], RuntimeError)
    with pytest.raises(RuntimeError) as caught:
        measure_all({"sound": sound, "broken": faulty}, **QUICK)
    assert faulty.models and not faulty.alive and not sound.alive
    del caught


# Arguments


def sound():
    return lambda: None


BAD = {
    "items": [0, -1, math.nan, math.inf, True, "8", {"a": 0}, {"a": None}, {"b": 8}, {}, {"a": 8, "b": 8}],
    "rounds": [0, -1, math.nan, True, 2.5, "8"],
    "seconds": [0, -1, math.nan, math.inf, True, None, "1"],
    "warmup": [0, -1, True, 1.5, None],
    "min_steps": [0, -1, True, 1.5, None],
    "flops": [0, -1, math.nan, True],
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


def test_flops_may_differ_between_variants(no_collecting):
    found = measure_all({"a": sound, "b": sound}, flops={"a": 8e9, "b": 16e9}, **QUICK)
    assert [m.flops for m in found] == [8e9, 16e9]


def test_a_number_of_numpy_is_a_number(no_collecting):
    (found,) = measure_all({"a": sound}, items=np.int64(8), **QUICK)
    assert json.dumps(found.items) == "8.0"


def test_measuring_draws_nothing_from_the_readers_generator(no_collecting):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    measure(lambda: lambda: torch.rand(1), **QUICK)
    assert torch.equal(torch.rand(1), expected)


# The progress bar


class Terminal(io.StringIO):
    def __init__(self, watched):
        super().__init__()
        self.watched = watched

    def isatty(self):
        return self.watched


@pytest.mark.parametrize("watched", [False, True])
def test_the_progress_bar_is_for_terminals_only(watched, monkeypatch, capsys, no_collecting):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    terminal = Terminal(watched)
    monkeypatch.setattr(sys, "stderr", terminal)
    measure_all({"first label": sound, "second label": sound}, seconds=0.001)
    written = terminal.getvalue()
    if watched:
        assert "first label: 0/204" in written, "the most rounds that there may be, and two before them"
        assert "first label: 19/20 |" in written, "eight fitted, the last of them backwards"
        assert written.endswith("\r") and not written.rsplit("\r", 2)[-2].strip(), "the bar was left standing"
    else:
        assert written == ""
    assert capsys.readouterr().out == ""


def test_in_a_notebook_the_bar_is_written_where_print_writes(monkeypatch, no_collecting):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    printed, errors = Terminal(False), Terminal(False)  # a notebook's streams are no terminals
    monkeypatch.setattr(sys, "stdout", printed)
    monkeypatch.setattr(sys, "stderr", errors)
    measure_all({"a label": sound}, **QUICK)
    assert "a label" in printed.getvalue() and errors.getvalue() == ""


@pytest.mark.parametrize("unit", [5, None])
def test_a_unit_that_is_none_is_refused_before_anything_is_measured(unit):
    with pytest.raises(TypeError, match=r"unit: expected a string such as 'samples', got"):
        measure(lambda: 1 / 0, items=3, unit=unit)


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
    found = measure_all({"a": make_gpu_variant(), "b": make_gpu_variant(128)}, seconds=0.1, rounds=2)
    assert torch.cuda.memory_allocated() <= before
    for m in found:
        assert m.peak_reserved >= m.peak_allocated >= 64 * MiB
        assert len(m.times) == 2 and m.device.kind == "cuda"
    assert found[1].peak_allocated - found[0].peak_allocated == pytest.approx(64 * MiB, rel=0.01)


@pytest.mark.gpu
def test_a_limit_makes_a_real_out_of_memory_that_the_next_measuring_survives(monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    release_memory()
    before = torch.cuda.memory_allocated()
    both = {"small": make_gpu_variant(64), "large": make_gpu_variant(2048)}
    with memory_limit(GiB):
        small, large = measure_all(both, seconds=0.1, rounds=2)
        assert (small.failed, large.failed) == (None, OUT_OF_MEMORY)
        assert len(small.times) == 2
    small, large = measure_all(both, seconds=0.1, rounds=2)
    assert (small.failed, large.failed) == (None, None)
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_energy_is_that_of_a_board_at_work(energy_counter):
    try:
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(power._handle()) / 1000
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML: {error}")
    found = measure(make_gpu_variant(), seconds=0.1, rounds=2)
    assert len(found.energies) == 2
    assert 0.05 * limit < found.joules / found.median < 1.1 * limit  # watts: a board at rest takes a tenth and more
