"""Tests of effgpu.power: joules per step against a simulated board, and None wherever NVML does not tell."""

from types import SimpleNamespace

import pynvml
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from effgpu.measuring import power


class Board:
    """A board at work: the host launches, the GPU runs behind it, and a counter of energy moves in ticks."""

    def __init__(self, *, watts=300.0, tick=0.05, step=0.01, launch=1e-5):
        self.watts, self.tick, self.seconds_per_step, self.launch = watts, tick, step, launch
        self.now = self.busy_until = 5.0  # on the host's clock
        self.answer, self.idle = 0.0, 0.0  # seconds that NVML takes to answer, and that the GPU stood still

    def step(self):
        self.now += self.launch
        self.idle += max(0.0, self.now - self.busy_until)
        self.busy_until = max(self.busy_until, self.now) + self.seconds_per_step

    def clock(self):
        self.now += 1e-6
        return self.now

    def millijoules(self, handle):
        assert handle == "handle"
        self.now += self.answer
        return int(int(self.now / self.tick) * self.tick * self.watts * 1000)

    def install(self, monkeypatch):
        board = self

        class Event:
            at = 0.0

            def record(self):
                self.at = board.busy_until

            def synchronize(self):
                board.now = max(board.now, self.at)

            def query(self):
                return board.now >= self.at

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(power, "find_board", lambda: "handle")
        monkeypatch.setattr(power, "time_for", lambda step, seconds, fewest: [board.seconds_per_step])
        monkeypatch.setattr(power, "time", SimpleNamespace(perf_counter=board.clock))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", board.millijoules)
        return board


def refuse(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@given(
    watts=st.floats(20, 1000),
    tick=st.floats(0.02, 0.1),
    step=st.floats(0.001, 1.5),
    seconds=st.floats(0.3, 3.0),
    launching=st.floats(0.001, 2.0),
)
@example(watts=300.0, tick=0.02, step=0.1, seconds=0.5, launching=0.12)
@example(watts=300.0, tick=0.05, step=1.0, seconds=0.5, launching=0.05)
def test_joules_per_step_are_right_within_the_ticks(watts, tick, step, seconds, launching):
    """However long the host takes to launch a step: at first it is ahead by fewer steps than later on."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        board = Board(watts=watts, tick=tick, step=step, launch=launching * step).install(monkeypatch)
        joules = power.measure_energy(board.step, seconds=seconds)
    lasts = max(1, launching) * step  # of a step
    resolution = min(tick, lasts) + 2 * (power._POLL + lasts * (lasts < tick or 0.5 < launching < 1))  # at the ends
    assert joules == pytest.approx(watts * lasts, rel=resolution / max(seconds, lasts) + 1e-3)
    assert board.now - 5.0 >= seconds


def test_a_cap_on_the_seconds_makes_the_window_short(monkeypatch):
    monkeypatch.setenv("EFFGPU_SECONDS", "0.1")
    board = Board().install(monkeypatch)
    assert power.measure_energy(board.step, seconds=5.0) == pytest.approx(3.0, rel=0.2)
    assert board.now - 5.0 < 0.5


def test_a_counter_that_stands_still_or_fails_midway_is_none(monkeypatch):
    board = Board().install(monkeypatch)
    failing = lambda handle: board.millijoules(handle) if board.now < 5.2 else refuse()
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", failing)
    assert power.measure_energy(board.step, seconds=2.0) is None
    board = Board().install(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 123_456)
    assert power.measure_energy(board.step, seconds=0.5) is None
    assert board.now - 5.0 < 1.0, "gave up too late"


@pytest.mark.parametrize("prefix", ["", "GPU-"])
def test_the_handle_is_asked_for_by_uuid(simulate_gpu, monkeypatch, prefix):
    properties = simulate_gpu().properties
    uuid, properties.uuid = properties.uuid, prefix + properties.uuid
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: ("handle", uuid))
    assert power.find_board() == ("handle", f"GPU-{uuid}")


@pytest.mark.parametrize("on_gpu", [False, True])
def test_without_a_gpu_or_nvml_there_is_no_handle_and_no_step_is_run(on_gpu, simulate_gpu, monkeypatch):
    simulate_gpu() if on_gpu else None
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    assert [power.find_board(), power.read_clock(), power.measure_energy(None)] == [None] * 3


def test_the_clock_is_read_with_nvmls_reasons_for_it(monkeypatch):
    names = ["GpuIdle", "SwPowerCap", "SwThermalSlowdown", "HwThermalSlowdown"]
    bits = sum(getattr(pynvml, f"nvmlClocksThrottleReason{name}") for name in names)
    monkeypatch.setattr(power, "find_board", lambda: "handle")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", lambda board, kind: {pynvml.NVML_CLOCK_SM: 1980}[kind])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda handle: bits | 0x1000)
    assert power.read_clock() == (1980, ("power cap", "thermal", "hardware thermal"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetClockInfo", refuse)
    assert power.read_clock() is None


@pytest.mark.parametrize("answer", [0.005, 0.03])
def test_the_gpu_does_not_stand_still_while_nvml_answers(answer, monkeypatch):
    board = Board(step=0.0005).install(monkeypatch)
    board.answer = answer
    power.measure_energy(board.step, seconds=0.5)
    assert board.idle < 3 * board.answer + 1e-3  # before the steps begin, it is asked three times
