"""Tests of effgpu.measuring.measurement: memory of each alone, then turns; out of memory is a result."""

import dataclasses
import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import psutil
import pynvml
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from effgpu.measuring import measurement, memory, power, progress, timing, turns, variants, workers
from effgpu.measuring.device import Device, describe, memory_limit, release_memory
from effgpu.measuring.intervals import BUILDS, interval_of_blocks, interval_of_builds
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement, measure, measure_all
from effgpu.units import GiB, MiB

QUICK = {"seconds": 0.001, "blocks": 3}
CPU = Device("Test CPU", "cpu", None, 2)


class Faulty:
    """A variant that raises at a step (None: in the build) of a build and, with `always`, of all after it.

    Build 0 is for the memory, build 1 to be kept, build 2 and later where each turn builds.
    """

    def __init__(self, build=99, step=None, error=torch.OutOfMemoryError, *, always=True, cyclic=False, clock=None):
        self.at_build, self.at_step, self.error, self.always = build, step, error, always
        self.cyclic, self.spend, self.models = cyclic, clock.spend if clock else lambda seconds: None, []

    def __call__(self):
        build, calls, model = len(self.models), [], torch.nn.Linear(4, 4)
        model.itself = [model] if self.cyclic else []  # then, only the garbage collector frees it
        self.models.append(weakref.ref(model))
        at_fault = build == self.at_build or (self.always and build > self.at_build)
        if at_fault and self.at_step is None:
            raise self.error("a fault")

        def step():
            calls.append(model(torch.ones(1, 4)))
            self.spend(0.01)
            if at_fault and len(calls) == self.at_step:
                raise self.error("a fault")

        return step

    @property
    def alive(self):
        return any(model() is not None for model in self.models)


class Clock:
    """Time that passes only where a test spends it."""

    def __init__(self):
        self.now, self.steps = 0.0, 0

    def spend(self, seconds):
        self.now += seconds
        self.steps += 1

    def step(self, seconds):
        """A variant whose step takes so many seconds."""
        return lambda: partial(self.spend, seconds)


def replace_clock(monkeypatch, read, sleep=lambda seconds: None):
    for module in (measurement, timing, turns):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=read, sleep=sleep))


@pytest.fixture
def clock(monkeypatch):
    simulated = Clock()
    replace_clock(monkeypatch, lambda: simulated.now)
    return simulated


@pytest.fixture
def only_turns(monkeypatch):
    """No memory is traced and no switches are looked at, as both take real time."""
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace((0,), ("forward",), 0))
    monkeypatch.setattr(variants, "_SWITCHES", ())


@pytest.fixture
def gpu(simulate_gpu, monkeypatch, only_turns):
    """A simulated GPU, whose clock is also the CPU's, with turns but no memory to be measured."""
    simulated = simulate_gpu()
    simulated.variant = lambda seconds: lambda: partial(simulated.step, seconds)
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    monkeypatch.setattr(power, "read_clock", lambda: None)
    replace_clock(monkeypatch, lambda: simulated.clock)
    return simulated


@given(st.lists(st.tuples(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3)), min_size=2, max_size=30))
def test_median_and_interval_are_those_of_the_blocks(turns):
    found = Measurement("a", tuple(turns), CPU)
    times = [(forward + backward) / 2 for forward, backward in turns]
    assert found.times == pytest.approx(times) and found.median == pytest.approx(statistics.median(times))
    logs = [math.log(time) for time in found.times]
    for builds, find, enough in [(1, interval_of_blocks, len(turns) >= 8), (4, interval_of_builds, len(turns) >= 4)]:
        expected = pytest.approx([math.exp(end) for end in find(logs)[1:]]) if enough else None
        assert dataclasses.replace(found, builds=builds).interval == expected


def test_a_measurement_shows_itself():
    assert repr(Measurement("fp32", ((0.02, 0.02),) * 15, CPU, 32, "samples", 3 * MiB, None, 1.5)) == (
        "fp32: 20.0 ms per step [20.0 ms, 20.0 ms], 1,600 samples/s, peak 3.00 MiB, 1.50 J per step "
        "on Test CPU (CPU, 2 cores)"
    )
    assert repr(Measurement("b", ((0.02, 0.02),), CPU)) == "b: 20.0 ms per step on Test CPU (CPU, 2 cores)"
    assert repr(Measurement("c", ((0.0, 0.0),) * 15, CPU, 3)) == "c: 0 s per step on Test CPU (CPU, 2 cores)"
    assert repr(Measurement("a", (), CPU, failed=OUT_OF_MEMORY)) == "a: out of memory"


# Measuring


def test_measures_a_variant(tiny):
    found = measure(tiny, items=4, unit="rows", **QUICK)
    assert (found.label, found.items, found.unit, found.failed) == ("tiny_variant", 4, "rows", None)
    assert len(found.turns) == 3 and min(map(min, found.turns)) > 0
    assert found.peak_allocated == memory.trace(tiny).peak > 0
    assert (found.peak_reserved, found.joules, found.sm_clock, found.throttled) == (None, None, None, ())
    assert found.device == describe()


def test_the_turns_of_a_block_are_told_apart(clock, only_turns):
    durations = iter([1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 5.0])  # the warm-up first
    found = measure(lambda: lambda: clock.spend(next(durations)), seconds=0.001, blocks=2)
    assert found.turns == ((2.0, 3.0), (4.0, 5.0)) and found.times == (2.5, 4.5)


def test_the_memory_is_measured_with_one_variant_alive_before_any_is_timed(monkeypatch):
    found, alive, trace = {label: Faulty(cyclic=True) for label in "abc"}, [], memory.trace

    def watched(variant, warmup):
        alive.append([other.alive for other in found.values()])
        return trace(variant, warmup=warmup)

    monkeypatch.setattr(memory, "trace", watched)
    measure_all(found, **QUICK)
    assert alive == [[False] * 3] * 3 and [len(variant.models) for variant in found.values()] == [2] * 3
    assert not any(variant.alive for variant in found.values())


# How long


@pytest.mark.parametrize(
    ("milliseconds", "warm_up", "steps"),
    [(0.1, 2 + 50, 50 + 1), (2, 2 + 3, 3), (20, 2 + 1, 1)],
    ids=["many, and one that leads in", "few", "one"],
)
def test_a_warm_up_and_a_turn_take_at_least_five_milliseconds_and_one_step(
    milliseconds, warm_up, steps, clock, only_turns
):
    measure(clock.step(milliseconds / 1000), seconds=0.001, blocks=5)
    assert clock.steps == pytest.approx(warm_up + 5 * 2 * steps, abs=1)


def test_turns_are_longer_where_eighty_of_them_leave_time(clock, only_turns):
    measure(clock.step(0.001), seconds=4, blocks=80)
    assert clock.now == pytest.approx(4, rel=0.1)


def test_a_cap_on_the_seconds_makes_blocks_and_steps_few(monkeypatch, clock):
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    found = measure(clock.step(0.01), seconds=60, warmup=1)
    assert len(found.turns) == 1 and found.interval is None
    assert clock.steps == (1 + 1) + 1 + 1 + 2 * 1  # for the memory, a warm-up, and a step in each turn


def test_what_still_compiles_is_no_load(gpu):
    """A GPU is warmed up for a quarter of a second of steps, whatever its first calls took."""
    slow = itertools.chain([5.0, 5.0, 0.01, 0.01, 5.0], itertools.repeat(0.01))
    measure(lambda: lambda: gpu.step(next(slow)), seconds=0.01, blocks=1)
    assert gpu.clock > 15 + 0.25 + 2 * 0.075
    assert gpu.log.count("step") == pytest.approx(3 + 25 + 2 * (3 + 5), abs=3)


# Together, or one at a time


@pytest.mark.parametrize(("free", "builds"), [(2800, 1), (2700, BUILDS)])
def test_variants_are_kept_together_where_all_fit(free, builds, clock, monkeypatch):
    """Three that hold 600 bytes between steps, of which one needs 700 more in its step: 2500, and a tenth of slack."""
    needs = iter([(600, 800), (600, 1300), (600, 600)])
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: memory.Trace(next(needs), ("forward",) * 2))
    monkeypatch.setattr(measurement, "free_memory", lambda: free)
    alive = []
    watching = SimpleNamespace(spend=lambda s: alive.append(sum(v.alive for v in found.values())) or clock.spend(s))
    found = {label: Faulty(clock=watching) for label in "abc"}
    measured = measure_all(found, seconds=1, blocks=2)
    assert [len(variant.models) for variant in found.values()] == [builds] * 3
    assert max(alive) == (3 if builds == 1 else 1)
    assert [(len(m.turns), m.builds) for m in measured] == [(2 if builds == 1 else BUILDS, builds)] * 3
    assert [m.median for m in measured] == pytest.approx([0.01] * 3)


def test_building_anew_is_announced_with_what_it_will_take_and_one_alone_is_kept(
    clock, only_turns, monkeypatch, capsys
):
    monkeypatch.setattr(measurement, "free_memory", lambda: -1)
    monkeypatch.setattr(memory, "trace", lambda variant, warmup: clock.spend(60) or memory.Trace((0,), ("forward",)))
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    measure_all(dict.fromkeys("ab", lambda: clock.spend(60) or partial(clock.spend, 0.01)), seconds=2)
    told = "The variants do not fit into memory together, so each is built 4 times: about 8 min 04 s.\n"
    assert capsys.readouterr() == ("", told), "and no bar, which is for terminals"
    assert clock.now - 2 * 60 == pytest.approx(484, rel=0.005)
    assert measure(clock.step(0.01)).builds == 1


def test_a_turn_that_runs_out_of_memory_beside_another_is_taken_alone(clock):
    """And what was timed until then does not count: turns of two kinds are no blocks."""
    both = {"a": Faulty(clock=clock), "b": Faulty(1, 6, always=False, clock=clock)}  # in its second block
    found = measure_all(both, **QUICK)
    assert [m.failed for m in found] == [None, None] and [len(m.turns) for m in found] == [4, 4]


@pytest.mark.parametrize(
    ("retried", "builds"), [(range(1, 8), 1), (range(17, 22), BUILDS)], ids=["in the warm-up", "in a turn"]
)
def test_variants_that_crowd_the_gpus_memory_in_their_turns_are_timed_one_at_a_time(retried, builds, gpu):
    """The allocator raises nothing: it gives cached blocks back and asks again, in the midst of a turn."""
    crowded = []

    def spend(_):
        crowded.append(all(variant.alive for variant in both.values()))
        gpu.step(0.05)
        gpu.retries += crowded[-1] and crowded.count(True) in retried

    both = {label: Faulty(clock=SimpleNamespace(spend=spend)) for label in "ab"}
    found = measure_all(both, seconds=0.4, blocks=2)
    assert [m.builds for m in found] == [builds] * 2 and gpu.retries
    turns = crowded[-2 * 2 * len(found[0].turns) * 2 :]  # those that count, of two steps at least
    assert set(turns) == {builds == 1}


def is_stopped(pid, expected):
    """Where one is expected to be, its signal may still be on its way, on a busy machine."""
    deadline = time.monotonic() + expected
    while not (stopped := psutil.Process(pid).status() == psutil.STATUS_STOPPED) and time.monotonic() < deadline:
        time.sleep(0.001)
    return stopped


def load():
    """A step that gets a batch from a worker process, and the processes that this started."""
    before = set(multiprocessing.active_children())
    batches = iter(DataLoader(TensorDataset(torch.arange(10_000.0)), num_workers=1, persistent_workers=True))
    return partial(next, batches), set(multiprocessing.active_children()) - before


def loading(seen, label):
    """A variant whose batches come from a worker process; it notes which processes are stopped during its steps."""

    def build():
        load_batch, started = load()
        seen[label] |= {child.pid for child in started}

        def step():
            load_batch()
            expected = {of: workers.CAN_FREEZE and of not in (label, "reader") for of in ("a", "b", "reader")}
            there = {of: [pid for pid in seen[of] if psutil.pid_exists(pid)] for of in expected}
            stopped = (any([is_stopped(pid, expected[of]) for pid in pids]) for of, pids in there.items())
            seen["stopped"].append((label, *stopped))

        return step

    return build


@pytest.mark.parametrize("can_freeze", [True, False])
def test_worker_processes_but_the_readers_own_are_frozen_while_others_have_their_turn(can_freeze, monkeypatch, capsys):
    """Where nothing can be frozen, variants with workers are built one at a time."""
    for module in (workers, measurement):
        monkeypatch.setattr(module, "CAN_FREEZE", can_freeze)
    readers = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    readers.start()
    before = set(multiprocessing.active_children())
    seen = {"a": set(), "b": set(), "reader": {readers.pid}, "stopped": []}
    found = measure_all({label: loading(seen, label) for label in "ab"}, seconds=0.001, blocks=4)
    assert [(len(m.turns), m.builds) for m in found] == [(4, 1 if can_freeze else BUILDS)] * 2
    assert ("have worker processes" in "".join(capsys.readouterr())) is not can_freeze
    stopped = seen["stopped"][seen["stopped"].index(("b", can_freeze, False, False)) :]  # from the warm-up of b on
    assert set(stopped) == {("a", False, can_freeze, False), ("b", can_freeze, False, False)}
    assert set(multiprocessing.active_children()) == before
    readers.kill()
    readers.join()


def be_killed(pid):
    """Measure two variants, and be killed in the second one's warm-up, with the worker process of the first frozen."""
    calls = []

    def step():
        calls.append(1)
        if len(calls) == 4:  # after the memory
            pid.value = multiprocessing.active_children()[0].pid
            os.kill(os.getpid(), signal.SIGKILL)

    measure_all({"loading": lambda: load()[0], "killed": lambda: step}, blocks=1)


@pytest.mark.slow  # a worker looks every five seconds whether its parent is still there
def test_no_frozen_worker_outlives_a_killed_process():
    fork = multiprocessing.get_context("fork")
    pid = fork.Value("i", 0)
    killed = fork.Process(target=be_killed, args=(pid,))
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid.value) and psutil.Process(pid.value).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, psutil.Process(pid.value).status()
        time.sleep(0.05)


def test_ctrl_c_of_a_terminal_which_reaches_the_guard_prints_nothing_of_it(capfd):
    own = workers.Workers()
    with own.awake("a"):
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
        worker.start()
    time.sleep(0.5)  # until it looks
    own._guard.send_signal(signal.SIGINT)
    time.sleep(0.3)
    ended = own._guard.poll()
    own.release()
    worker.kill()
    worker.join()
    assert ended is None and capfd.readouterr().err == ""


# Out of memory, and other faults


PLACES = {  # by build and step: the memory takes two steps and one that is traced, a warm-up three, a turn one
    "in the build": (0, None),
    "in the traced step": (0, 3),
    "in the build for the turns": (1, None),
    "in the warm-up before the turns": (1, 2),
    "in the turn back": (1, 5),
    "in the last block": (1, 9),
}


@pytest.mark.parametrize("failing", ["baseline", "other"])
@pytest.mark.parametrize("place", [place for place in PLACES if place != "in the last block"])  # alone, it gets there
def test_out_of_memory_is_a_result(failing, place, clock):
    both = {"baseline": Faulty(clock=clock), "other": Faulty(clock=clock)}
    both[failing] = Faulty(*PLACES[place], clock=clock)
    found = {m.label: m for m in measure_all(both, items=8, unit="rows", **QUICK)}
    failed = found.pop(failing)
    assert (failed.failed, failed.turns, failed.peak_allocated) == (OUT_OF_MEMORY, (), None)
    assert (failed.items, failed.unit) == (8, "rows")
    (kept,) = found.values()
    assert kept.failed is None and len(kept.turns) in (3, 4) and kept.peak_allocated > 0


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


def test_an_interrupt_ends_worker_processes():
    workers = []

    def loading():
        load_batch, started = load()
        workers.extend(started)

        def step():
            load_batch()
            if len(workers) == 2:  # not in the measuring of the memory
                raise KeyboardInterrupt

        return step

    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: F841  keeps the error alive
        measure(loading, **QUICK)
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)


BAD = {
    "items": [0, "8", {"a": None}, {"b": 8}],
    "blocks": [0, 2.5],
    "seconds": [-1, "1"],
    "precision": [0, "1 %"],
    "warmup": [0, 1.5],
    "unit": [None],
}


@pytest.mark.parametrize(("argument", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_argument_is_named_before_anything_is_built(argument, value):
    one = Faulty()
    with pytest.raises((TypeError, ValueError), match=f"^{argument}( of 'a')?: expected a"):
        measure_all({"a": one}, **{argument: value})
    assert not one.models


def test_items_may_differ_between_variants():
    found = measure_all(dict.fromkeys("ab", lambda: lambda: None), items={"b": np.int64(16), "a": 8}, **QUICK)
    assert json.dumps([(m.label, m.items) for m in found]) == '[["a", 8], ["b", 16.0]]'


def test_a_terminal_has_a_progress_bar(monkeypatch, capsys, clock):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "tqdm", partial(progress.tqdm, mininterval=0))
    measure_all({"first": clock.step(0.01), "second": clock.step(0.01)}, seconds=0.2)
    written = terminal.getvalue()
    assert "memory of first |" in written and "warm-up of second |" in written
    assert "timing |" in written, "before the first turn nothing is promised"
    assert "timing, about 590 ms left |" in written, "60 turns of 10 ms, less the first"
    assert written.endswith("\r") and not written.rsplit("\r", 2)[-2].strip(), "the bar was left standing"
    assert capsys.readouterr().out == ""


def test_without_a_standard_error_there_is_no_bar(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(measurement, "free_memory", lambda: -1)  # so that building anew is announced
    assert len(measure_all(dict.fromkeys("ab", lambda: lambda: None), **QUICK)) == 2
    assert capsys.readouterr().out == ""


def test_in_a_notebook_the_bar_is_written_where_print_writes(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    measure_all({"a label": lambda: lambda: None}, **QUICK)
    printed = capsys.readouterr()
    assert "a label" in printed.out and printed.err == ""


# On a simulated GPU


@pytest.mark.parametrize(("reasons", "shortest"), [((), 0.05), (("power cap",), 0.2)])
@pytest.mark.parametrize("milliseconds", [0.3, 35, 600])
def test_a_turn_on_a_gpu_lasts_until_its_clock_has_settled(milliseconds, reasons, shortest, gpu, monkeypatch):
    """Its first 25 ms do not count. Where the power cap holds the clock down, 15 blocks fill the seconds."""
    turns, time_turn = [], timing.time_turn

    def watch(step, count, *, lead=1, meanwhile=None):
        seconds = time_turn(step, count, lead=lead, meanwhile=meanwhile)
        if meanwhile:
            turns.append((lead * seconds, count * seconds))
        return seconds

    monkeypatch.setattr(timing, "time_turn", watch)
    monkeypatch.setattr(power, "read_clock", lambda: (1000, reasons))
    found = measure(gpu.variant(milliseconds / 1000), seconds=6, blocks=15)
    assert len(turns) == 30 and found.median == pytest.approx(milliseconds / 1000)
    for lead, counted in turns[1:]:  # of the first, the reasons are not known yet
        assert lead >= 0.025 * (1 - 1e-6) and counted >= shortest * (1 - 1e-6)
        assert lead < 0.025 + milliseconds / 1000 and counted < shortest + milliseconds / 1000 + 1e-6


@given(seconds=st.floats(0.5, 20), pace=st.floats(0.001, 0.1), reasons=st.sampled_from([(), ("power cap",)]))
def test_variants_on_a_gpu_take_no_more_seconds_than_they_may_or_fifteen_blocks_of_short_turns(seconds, pace, reasons):
    """One reading of "power cap" once made each turn of every variant half a second long, whatever `seconds` said."""
    record = measurement._Record(clocks=[(1000, reasons)], pace=pace)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(measurement, "find_device", lambda: torch.device("cuda"))
        run = measurement._Run(None, {"a": None}, seconds, 0.01, None, 2, False)
        run.records["a"], taken = record, []
        monkeypatch.setattr(run, "time_steps", lambda record, step, steps, lead: taken.append((steps + lead) * pace))
        run.take_turn(0, record, None)
    shortest = turns.OF_VARIANTS.shortest["cuda"] + turns.OF_VARIANTS.lead["cuda"]
    assert 30 * taken[0] <= seconds + 30 * (shortest + 2 * pace + 1e-6)


def test_the_clock_is_read_in_the_middle_of_a_turn_though_all_of_it_is_queued_at_once(gpu, monkeypatch):
    """Right after the launches, the clock was still that of the variant before."""
    read, began = [], []

    def time_turn(step, count, *, lead=1, meanwhile=None):
        began.append((gpu.clock, lead, count))
        meanwhile and meanwhile()
        return 0.01

    monkeypatch.setattr(timing, "time_turn", time_turn)
    monkeypatch.setattr(power, "read_clock", lambda: read.append(gpu.clock))
    replace_clock(monkeypatch, lambda: gpu.clock, lambda seconds: setattr(gpu, "clock", gpu.clock + seconds))
    measure(gpu.variant(0.01), seconds=2, blocks=1)
    turns = began[-2:]
    assert read == pytest.approx([at + 0.01 * (lead + count / 2) for at, lead, count in turns])


def test_clocks_and_throttle_reasons_of_the_turns_are_noted(gpu, monkeypatch):
    told = itertools.chain([(1500, ()), (1200, ("power cap",)), (1300, ("thermal",)), None], itertools.repeat(None))

    def read_clock():
        gpu.log.append("asked")
        return next(told)

    monkeypatch.setattr(power, "read_clock", read_clock)
    found = measure(gpu.variant(0.05), seconds=2, blocks=2)
    assert (found.sm_clock, found.throttled) == (1300, ("power cap", "thermal"))
    asked = [at for at, what in enumerate(gpu.log) if what == "asked"]
    assert [(gpu.log[at - 1], gpu.log[at + 1]) for at in asked] == [("record", "wait for event")] * 4, "at work"


def test_energy_is_one_window_of_each_variant_after_all_turns(gpu, monkeypatch):
    answers = iter([3.0, None])
    monkeypatch.setattr(power, "measure_energy", lambda step: gpu.log.append("energy") or next(answers))
    found = measure_all(dict.fromkeys("ab", gpu.variant(0.05)), seconds=2, blocks=2)
    assert [m.joules for m in found] == [3.0, None]
    assert "step" not in gpu.log[gpu.log.index("energy") :]


def test_no_energy_is_taken_where_it_is_not_wanted_or_the_run_is_cut_short(gpu, monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: 2.0)
    assert measure(gpu.variant(0.05), seconds=2, blocks=1, energy=False).joules is None
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    gpu.log.clear()
    assert measure(gpu.variant(0.05), seconds=2, blocks=1).joules is None
    assert gpu.log.count("step") == pytest.approx(3 + 5 + 2 * (1 + 1), abs=1), "and its turns are of one step"


def test_measuring_draws_nothing_from_the_readers_generators(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    state = torch.get_rng_state()
    measure(lambda: lambda: gpu.step(0.05) or torch.rand(1), seconds=0.001, blocks=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert gpu.log.count("state kept") == gpu.log.count("state given back") == 1


def make_gpu_variant(megabytes=64):
    def variant():
        model = torch.nn.Linear(1024, 1024, device="cuda")
        batch = torch.randn(1024, 1024, device="cuda")
        held = torch.zeros(megabytes * MiB, dtype=torch.uint8, device="cuda")

        def step():
            model(batch).square().mean().backward()
            model.zero_grad()
            return held

        return step

    return variant


@pytest.mark.gpu
def test_a_real_out_of_memory_is_a_result_and_measuring_leaves_nothing_on_the_gpu(monkeypatch):
    monkeypatch.setattr(power, "measure_energy", lambda step: None)
    release_memory()
    before = torch.cuda.memory_allocated()
    both = {"small": make_gpu_variant(64), "large": make_gpu_variant(2048)}
    with memory_limit(GiB):
        assert [m.failed for m in measure_all(both, seconds=0.1, blocks=2)] == [None, OUT_OF_MEMORY]
    small, large = measure_all(both, seconds=0.1, blocks=2)
    assert torch.cuda.memory_allocated() <= before
    for m in (small, large):
        assert m.peak_reserved >= m.peak_allocated >= 64 * MiB
        assert (m.failed, len(m.turns), m.device.kind) == (None, 2, "cuda")
    assert large.peak_allocated - small.peak_allocated == pytest.approx(1984 * MiB, rel=0.01)


@pytest.mark.gpu
def test_energy_is_that_of_a_board_at_work_and_repeats_itself(energy_counter):
    try:
        limit = pynvml.nvmlDeviceGetEnforcedPowerLimit(power.find_board()) / 1000
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML: {error}")
    first, second = (measure(make_gpu_variant(), seconds=0.1, blocks=2) for _ in range(2))
    assert 0.05 * limit < first.joules / first.median < 1.1 * limit  # watts: a board at rest takes a tenth and more
    assert second.joules == pytest.approx(first.joules, rel=0.25)
