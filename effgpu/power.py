"""Utilisation, power and energy of the GPU, from NVML. Where NVML does not tell, the answer is None."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

import pynvml
import torch

from effgpu import units
from effgpu.timing import cap_seconds, check_step, time_for

_LONGEST_TICK = 0.5  # seconds: the counter moves every 20 to 100 ms; standing still for longer, it is of no use
_POLL = 0.002  # seconds between two looks at the counter, so that asking does not slow short steps
_AHEAD = 0.01  # seconds of work that wait for the GPU, so that it does not stand still while NVML answers


@dataclass(frozen=True)
class Sample:
    """One reading of the board: the share of time in which any kernel ran (0 to 1), bytes in use by all processes,
    watts now, joules since the driver was loaded.
    """

    utilisation: float | None
    memory_used: int | None
    watts: float | None
    joules: float | None

    def __str__(self) -> str:
        busy = units.NOT_MEASURED if self.utilisation is None else f"{self.utilisation:.0%}"
        watts = units.NOT_MEASURED if self.watts is None else f"{self.watts:.0f} W"
        return f"{busy} of the time busy, {units.format_bytes(self.memory_used)} in use, {watts}"


def sample() -> Sample | None:
    """Read the current GPU once; None without a GPU or NVML."""
    handle = _handle()
    if handle is None:
        return None
    return Sample(
        _ask(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        _ask(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used),
        _ask(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        _joules(handle),
    )


def measure_energy(step: Callable[[], object], *, seconds: float = 0.5) -> float | None:
    """Joules per step of the whole board, over at least `seconds` of steps.

    The counter (nvmlDeviceGetTotalEnergyConsumption, Volta and newer) moves in ticks, so a window is as exact as its
    ends: both are laid on a tick, with the GPU at work. None where there is no such counter.
    """
    check_step(step=step)
    units.check_positive(seconds=seconds)
    handle, seconds = _handle(), cap_seconds(seconds)
    if handle is None or _joules(handle) is None:
        return None
    ahead = max(2, round(_AHEAD / max(fmean(time_for(step, _AHEAD, fewest=1)), 1e-6)))
    paced = _paced(step, ahead)
    for _ in range(2 * ahead):  # from here on, what waits for the GPU mostly stays as much
        next(paced)
    begin, began = _next_tick(handle, paced), time.perf_counter()
    while begin and time.perf_counter() - began < seconds:
        next(paced)
    end = begin and _next_tick(handle, paced)
    return end and (end[1] - begin[1]) / (end[0] - begin[0])


def _next_tick(handle, paced: Iterator[int]) -> tuple[int, float] | None:
    """Run steps until the counter moves: how many are done by then, and joules. None where it does not, or fails."""
    before = _joules(handle)
    polled = began = time.perf_counter()
    for done in paced:
        if time.perf_counter() - polled < _POLL:
            continue
        joules, polled = _joules(handle), time.perf_counter()
        if joules is None or before is None or (joules == before and polled - began > _LONGEST_TICK):
            return None
        if joules != before:
            return done, joules


def _paced(step: Callable[[], object], ahead: int) -> Iterator[int]:
    """Run steps for ever, the CPU so many ahead of the GPU, so that overlaps stay; yields how many are done."""
    spare, waiting, done = [torch.cuda.Event() for _ in range(ahead + 1)], deque(), 0
    while True:
        step()
        waiting.append(spare.pop())
        waiting[-1].record()
        while waiting and (not spare or waiting[0].query()):
            waiting[0].synchronize()
            spare.append(waiting.popleft())
            done += 1
        yield done


def _handle():
    """NVML's handle of CUDA's current device: by UUID, since the two number their devices differently."""
    if not torch.cuda.is_available():
        return None
    uuid = str(torch.cuda.get_device_properties().uuid)
    return _ask(lambda: pynvml.nvmlInit() or pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"))


def _joules(handle) -> float | None:
    return _ask(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000)


def _ask(question: Callable[[], object]):
    try:
        return question()
    except pynvml.NVMLError:
        return None
