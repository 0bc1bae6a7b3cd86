"""Seconds per step, without serialising the steps: no wait between them, one at the end."""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from itertools import pairwise
from numbers import Integral
from typing import TypeVar

import torch

from effgpu.errors import BadArgument, BadType
from effgpu.measuring.device import check_accelerator, check_gpus, find_device
from effgpu.measuring.variants import check_worked, is_function
from effgpu.units import check_positive

Result = TypeVar("Result")
_LATE = 0.1  # of a turn: work of other streams that is still running so long after it is worth a warning
OTHER_STREAM = (
    "the step leaves work on another CUDA stream than the current one, and that work is not timed: let the current "
    "stream wait for it, with torch.cuda.current_stream().wait_stream(other)"
)
CAP = "EFFGPU_SECONDS"  # the environment variable that `effgpu run --seconds` sets for the lessons it runs


def time_steps(step: Callable[[], object], count: int) -> list[float]:
    """Seconds that each of `count` consecutive steps took, as a training loop would run them.

    On a GPU, CUDA events mark the ends of the steps and the only wait is after the last: a wait per step would hide
    every overlap of copies, loading and launches with the GPU's work. One more step leads in and does not count, or the
    first would hold what the CPU does before its first kernel. The events are of the current stream: a step that works
    on another stream has to make the current one wait, and a warning says so where it does not. On a CPU,
    `time.perf_counter`. Raises TypeError for what is no step, as a variant in its place, and ValueError for a count
    that is no positive whole number or a step that works on another GPU than the current one, or on several.
    """
    marks = _drive(step, count, _mark(count, every=1, lead=1 if find_device().type == "cuda" else 0))
    return [after - before for before, after in pairwise(marks)]


def time_turn(
    step: Callable[[], object], count: int, *, lead: int = 1, meanwhile: Callable[[], object] | None = None
) -> float:
    """Mean seconds per step of `count` consecutive steps, after `lead` steps that do not count.

    As `time_steps`, but with two events for all of the turn: an event for each step would cost short steps some per
    cent. `meanwhile` is called before the wait, while a GPU works. Raises what `time_steps` raises.
    """
    return _drive(step, count, window(count, lead=lead, meanwhile=meanwhile))


def window(count: int, *, lead: int = 1, meanwhile: Callable[[], object] | None = None) -> Generator[int, None, float]:
    """`time_turn` as a plan, for a loop that is not ours: yields how many steps may pass; gives the mean seconds."""
    began, ended = yield from _mark(count, every=count, lead=lead, meanwhile=meanwhile)
    return (ended - began) / count


def _drive(step: Callable[[], object], count: int, plan: Generator[int, None, Result]) -> Result:
    """What a plan gives that times `count` steps, where each is a call of `step`."""
    check_step(step=step)
    check_positive(Integral, count=count)
    called = False
    while True:
        try:
            steps = next(plan)
        except StopIteration as end:
            check_accelerator()
            return end.value
        for _ in range(steps):
            result = step()
            if not called:
                check_worked(result)
                called = True


def _mark(
    count: int, *, every: int, lead: int, meanwhile: Callable[[], object] | None = None
) -> Generator[int, None, list[float]]:
    """A plan: the seconds on the clock before the first of `count` steps, and after every so many of them.

    On a GPU by CUDA events, with one wait when all is over. The first `lead` steps go before the clock starts.
    """
    marks = _mark_on_gpu if find_device().type == "cuda" else _mark_on_cpu
    return marks(count, every, lead, meanwhile)


def _mark_on_cpu(count: int, every: int, lead: int, _meanwhile) -> Generator[int, None, list[float]]:
    yield lead
    marks = [time.perf_counter()]
    for _ in range(count // every):
        yield every
        marks.append(time.perf_counter())
    return marks


def _mark_on_gpu(count: int, every: int, lead: int, meanwhile) -> Generator[int, None, list[float]]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(1 + count // every)]
    for mark in marks:
        mark.record()  # the first time, CUDA makes the event: not while steps are timed
    torch.cuda.synchronize()
    with on_current_gpu():
        yield lead
    marks[0].record()
    for mark in marks[1:]:
        yield every
        mark.record()
    if meanwhile:
        meanwhile()
    late = _wait(marks[-1])
    seconds = [marks[0].elapsed_time(mark) / 1000 for mark in marks]
    if is_late(late, seconds[-1]):
        warnings.warn(OTHER_STREAM, stacklevel=2)
    return seconds


def _wait(mark: "torch.cuda.Event") -> float:
    """Wait for the GPU. Returns the seconds of work that other streams still had when the mark was reached."""
    mark.synchronize()
    done = time.perf_counter()
    torch.cuda.synchronize()
    return time.perf_counter() - done


def time_for(step: Callable[[], object], seconds: float, *, fewest: int = 5) -> list[float]:
    """Seconds of each of as many steps as fill `seconds`: never fewer than `fewest`, which tell how many more fit.

    Raises ValueError for seconds that are no positive number, and for a fewest that is no positive whole number.
    """
    check_positive(seconds=seconds)
    check_positive(Integral, fewest=fewest)
    times = time_steps(step, fewest)
    more = round((cap_seconds(seconds) - sum(times)) * fewest / max(sum(times), 1e-6))
    return times + (time_steps(step, more) if more > 0 else [])


@contextlib.contextmanager
def on_current_gpu() -> Iterator[None]:
    """Raise ValueError at the end of the `with` block if another GPU than the current one was asked for memory."""
    before = _count_allocations()
    yield
    check_gpus([gpu for gpu, (then, now) in enumerate(zip(before, _count_allocations())) if now > then])


def check_step(**named: object) -> None:
    """Raise TypeError, with the name, for what is not a function without arguments, such as a model."""
    ((name, step),) = named.items()
    if not is_function(step):
        raise BadType(f"{name}: expected a function that is called without arguments, got {type(step).__name__}")


def cap_seconds(seconds: float) -> float:
    """`seconds`, or what the environment variable EFFGPU_SECONDS allows a measurement at most, where that is less.

    Results that are cut short only show that something runs: there may be too few blocks for an interval. Raises
    ValueError if it is not a positive number.
    """
    cap = os.environ.get(CAP, "inf")
    with contextlib.suppress(ValueError):
        if float(cap) > 0:
            return min(seconds, float(cap))
    raise BadArgument(f"{CAP}: expected a positive number of seconds, got {cap!r}")


def is_late(late: float, seconds: float) -> bool:
    """Whether work that ran on so long after a window of so many seconds was left out of it."""
    return late > max(_LATE * seconds, 1e-3)


def _count_allocations() -> list[int]:
    """How often each GPU's allocator was asked for memory; nothing to look at where there is but one."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.cuda.memory_stats(gpu)["allocation.all.allocated"] for gpu in gpus] if len(gpus) > 1 else []
