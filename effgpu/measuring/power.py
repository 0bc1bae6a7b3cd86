"""Clock and energy of the GPU, from NVML. What NVML does not report is None."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median

import pynvml
import torch

from effgpu.measuring.timing import cap_seconds, time_for

_LONGEST_TICK = 0.5  # seconds: a counter that does not change for longer does not work; most change every 20 to 100 ms
_POLL = 0.002  # seconds between two readings of the counter, so that reading does not slow short steps
_AHEAD = 0.01  # seconds of queued work, or more, that keep the GPU busy while NVML answers
POWER_CAP = "power cap"
_SLOWED = {"hardware slowdown", "thermal", "hardware thermal", "power brake"}
_FULL, _LOW = 0.95, 0.75  # of the highest clock: a power cap of some percent is usual
_REASONS = {
    0x002: "application clocks",
    0x004: POWER_CAP,
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
    0x100: "display clocks",
}  # nvmlClocksEventReason..., what holds the clock down; 0x001 says that nothing runs


def find_board(uuid: str | None = None):
    """NVML's handle of the GPU with this UUID, or of CUDA's current device. None without a GPU or NVML.

    By UUID, because NVML and CUDA number the GPUs differently. With one, CUDA is not asked.
    """
    if uuid is None:
        if not torch.cuda.is_available():
            return None
        uuid = str(torch.cuda.get_device_properties().uuid)
    return _ask(lambda: pynvml.nvmlInit() or pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}"))


def read_clock(board=None) -> tuple[int, tuple[str, ...]] | None:
    """The SM clock in MHz, and what holds it down. None where NVML does not report the clock.

    `board` is what `find_board` gave, by default for the current GPU. Two quick questions to NVML, which do not wait
    for the GPU: call it while kernels are queued.
    """
    board = find_board() if board is None else board
    clock = None if board is None else _ask(lambda: pynvml.nvmlDeviceGetClockInfo(board, pynvml.NVML_CLOCK_SM))
    return None if clock is None else (clock, _throttled(board))


def summarize(clocks: Sequence[tuple[int, tuple[str, ...]]]) -> tuple[int | None, tuple[str, ...]]:
    """The median of what `read_clock` gave, and all that held a clock down."""
    reasons = {reason for _, held_down_by in clocks for reason in held_down_by}
    return round(median(clock for clock, _ in clocks)) if clocks else None, tuple(sorted(reasons))


def tell_slow(clocks: Sequence[tuple[int, tuple[str, ...]]]) -> list[str]:
    """One sentence on a clock that is held down, by heat or by far: of what `read_clock` gave; none where it is not."""
    clock, reasons = summarize(clocks)
    board = find_board()
    most = board and _ask(lambda: pynvml.nvmlDeviceGetMaxClockInfo(board, pynvml.NVML_CLOCK_SM))
    if not (clock and most and clock < _FULL * most and (clock < _LOW * most or _SLOWED & {*reasons})):
        return []
    by = f", held down by: {', '.join(reasons)}" if reasons else ""
    longer = f"a step may take up to {most / clock:.1f} × as long as at full clock"
    return [f"the GPU runs at {clock:,} of {most:,} MHz{by}: {longer}"]


def read_joules(board) -> float | None:
    """The joules that a board has taken since its driver was loaded. None without an energy counter."""
    return _ask(lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(board) / 1000)


def measure_energy(step: Callable[[], object], *, seconds: float = 1.0) -> float | None:
    """Joules per step of the whole board, over one window of at least `seconds`. None without an energy counter.

    The counter (nvmlDeviceGetTotalEnergyConsumption, Volta and newer) changes every 20 to 100 ms. So the window begins
    and ends at such a change, with the GPU at work: a second makes the error of both ends small.
    """
    handle, seconds = find_board(), cap_seconds(seconds)
    if handle is None or read_joules(handle) is None:
        return None
    asked = time.perf_counter()
    read_joules(handle)
    queued = max(_AHEAD, 2 * (time.perf_counter() - asked))  # NVML is slow in some virtual machines
    ahead = max(2, round(queued / max(fmean(time_for(step, _AHEAD, fewest=1)), 1e-6)))
    paced = _paced(step, ahead)
    for _ in range(2 * ahead):  # fill the queue; from here on its length hardly changes
        next(paced)
    begin, began = _next_tick(handle, paced), time.perf_counter()
    while begin and time.perf_counter() - began < seconds:
        next(paced)
    end = begin and _next_tick(handle, paced)
    return end and (end[1] - begin[1]) / (end[0] - begin[0])


def _next_tick(handle, paced: Iterator[int]) -> tuple[int, float] | None:
    """Run steps until the counter changes. Return the number of finished steps and the joules, or None if it fails."""
    before = read_joules(handle)
    polled = began = time.perf_counter()
    for done in paced:
        if time.perf_counter() - polled < _POLL:
            continue
        joules, polled = read_joules(handle), time.perf_counter()
        if joules is None or before is None or (joules == before and polled - began > _LONGEST_TICK):
            return None
        if joules != before:
            return done, joules


def _paced(step: Callable[[], object], ahead: int) -> Iterator[int]:
    """Run steps without end, the CPU at most `ahead` steps before the GPU. Yields the number of finished steps."""
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


def _throttled(handle) -> tuple[str, ...]:
    # by the older name of EventReasons, which drivers before 535 know, too
    bits = _ask(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    return tuple(reason for bit, reason in _REASONS.items() if bits & bit)


def _ask(question: Callable[[], object]):
    try:
        return question()
    except pynvml.NVMLError:
        return None
