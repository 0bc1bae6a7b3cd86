"""Tests of effgpu.measuring.timing: one wait before the steps, one after, none between; seconds give their number."""

import time
import warnings
from itertools import repeat
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effgpu.measuring import memory, timing


def spend(durations, monkeypatch):
    """A step that takes the next of these seconds, by a clock that only it moves."""
    clock, durations = [100.0], iter(durations)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    return lambda: clock.__setitem__(0, clock[0] + next(durations))


def test_gpu_is_waited_for_once_before_and_once_after_the_steps_and_never_between(simulate_gpu):
    gpu = simulate_gpu()
    durations = iter([9.0, 0.01, 0.03, 0.02])  # the first one leads in
    times = timing.time_steps(lambda: gpu.step(next(durations)), 3)
    waits = ["wait for event", "wait"]  # that of the current stream, then of any other
    assert gpu.log == [*["record"] * 4, "wait", "step", "record", *["step", "record"] * 3, *waits]
    assert times == pytest.approx([0.01, 0.03, 0.02])


def test_a_turn_has_two_events_and_leads_in_with_the_steps_that_do_not_count(simulate_gpu):
    gpu = simulate_gpu()
    durations = iter([9.0, 9.0, 0.01, 0.03, 0.02])
    mean = timing.time_turn(lambda: gpu.step(next(durations)), 3, lead=2, meanwhile=lambda: gpu.log.append("asked"))
    assert mean == pytest.approx(0.02)
    steps = ["step", "step", "record", "step", "step", "step", "record"]
    assert gpu.log == ["record", "record", "wait", *steps, "asked", "wait for event", "wait"]


@pytest.mark.parametrize(("late", "warned"), [(0.0, False), (0.0009, False), (0.05, True)])
def test_work_that_is_left_on_another_stream_is_warned_of(late, warned, simulate_gpu, monkeypatch):
    """The current stream is done, but the GPU is not: what the step left on another stream was not timed."""
    gpu = simulate_gpu()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: gpu.clock))
    synchronize = torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: gpu.step(late) or synchronize())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        timing.time_turn(lambda: gpu.step(0.1), 1, lead=0)
    assert ["another CUDA stream" in str(warning.message) for warning in caught] == [True] * warned


@pytest.mark.parametrize("used", [None, 0, 1])
def test_a_step_on_another_gpu_than_the_current_one_is_refused_after_its_first_call(used, simulate_gpu):
    gpu = simulate_gpu()
    gpu.asked = [5, 7]  # two GPUs, of which the first is the current one

    def step():
        if used is not None:
            gpu.asked[used] += 1
        gpu.step(0.02)

    if used == 1:
        told = r"^the step works on GPU 1, and only the current one \(0\) is measured: call torch.cuda.set_device\(1\)"
        with pytest.raises(ValueError, match=told):
            timing.time_steps(step, 3)
        assert gpu.log.count("step") == 1
    else:
        assert timing.time_steps(step, 3) == pytest.approx([0.02] * 3)


@pytest.mark.parametrize(("kind", "counter"), [("mps", "current_allocated_memory"), ("xpu", "memory_allocated")])
def test_an_accelerator_that_cannot_be_waited_for_is_refused_once_it_is_used(kind, counter, monkeypatch):
    """Its step would be timed as a CPU's, and only the time to ask for it would count."""
    held = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check=False: torch.device(kind))
    monkeypatch.setattr(getattr(torch, kind), counter, lambda: 1024 * len(held))
    assert timing.time_steps(lambda: None, 1), "a step on the CPU is measured there, too"
    told = f"cannot wait for the accelerator '{kind}': move the model and the batches to the CPU"
    with pytest.raises(RuntimeError, match=told):
        timing.time_steps(lambda: held.append(1), 1)
    with pytest.raises(RuntimeError, match=told):
        memory.trace(lambda: lambda: None)


def test_cpu_times_each_step_with_nothing_before_the_first_or_after_the_last(monkeypatch):
    durations = [0.5, 0.25, 1.0, 2.0]
    assert timing.time_steps(spend(durations, monkeypatch), 4) == pytest.approx(durations)


@pytest.mark.parametrize("count", [0, 2.5])
def test_needs_a_number_of_steps(count):
    with pytest.raises(ValueError, match=r"^count: expected a positive whole number, got"):
        timing.time_steps(lambda: None, count)
    with pytest.raises(ValueError, match=r"^fewest: expected a positive whole number, got"):
        timing.time_for(lambda: None, 0.1, fewest=count)
    with pytest.raises(ValueError, match=r"^seconds: expected a positive number, got"):
        timing.time_for(lambda: None, 0)


@pytest.mark.parametrize("step", [3, torch.nn.Linear(1, 1)])
def test_what_is_no_step_is_refused(step):
    got = type(step).__name__
    with pytest.raises(TypeError, match=f"^step: expected a function that is called without arguments, got {got}$"):
        timing.time_steps(step, 3)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_variant_in_place_of_its_step_is_refused_once_it_has_built_one(on_gpu, simulate_gpu, tiny):
    simulate_gpu() if on_gpu else None
    built = []
    with pytest.raises(TypeError, match="step: expected a training step that does its work when called, got a func"):
        timing.time_for(lambda: built.append(1) or tiny(), 1)
    assert len(built) == 1


@given(duration=st.floats(1e-5, 100), seconds=st.floats(0.001, 0.1))
def test_steps_fill_the_time_and_are_never_fewer_than_five(duration, seconds):
    with pytest.MonkeyPatch.context() as monkeypatch:
        times = timing.time_for(spend(repeat(duration), monkeypatch), seconds)
    assert times == pytest.approx([duration] * len(times), rel=1e-3)
    assert len(times) == 5 or (len(times) > 5 and len(times) * duration == pytest.approx(seconds, abs=duration))


def test_the_environment_can_cap_what_a_measurement_takes(monkeypatch):
    assert timing.cap_seconds(2.0) == 2.0
    for cap, expected in [("0.5", 0.5), ("3", 2.0)]:
        monkeypatch.setenv("EFFGPU_SECONDS", cap)
        assert timing.cap_seconds(2.0) == expected
    for cap in ("", "much", "0", "nan"):
        monkeypatch.setenv("EFFGPU_SECONDS", cap)
        with pytest.raises(ValueError, match=r"^EFFGPU_SECONDS: expected a positive number of seconds, got"):
            timing.time_for(lambda: None, 1)


@pytest.mark.gpu
def test_gpu_steps_are_launched_ahead_of_the_gpu():
    launched = []

    def step():
        torch.cuda._sleep(20_000_000)
        launched.append(time.perf_counter())

    timing.time_steps(step, 3)
    launched.clear()
    times = timing.time_steps(step, 10)
    assert launched[-1] - launched[0] < sum(times) / 2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_real_step_on_another_gpu_is_refused():
    with pytest.raises(ValueError, match="works on GPU 1"):
        timing.time_steps(lambda: torch.ones(100, device="cuda:1") + 1, 3)
