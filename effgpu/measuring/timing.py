"""Seconds per step, without serialising the steps: no wait between them, one at the end."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from numbers import Integral
from statistics import median

import torch

from effgpu.measuring.device import find_device
from effgpu.measuring.variants import check_worked, is_function
from effgpu.units import check_positive

FEWEST_STEPS = 5
_MILLISECOND = 1e-3
CAP = "EFFGPU_SECONDS"  # the environment variable that `effgpu run --seconds` sets for the lessons it runs


def time_steps(step: Callable[[], object], count: int, *, meanwhile: Callable[[], object] | None = None) -> list[float]:
    """Seconds that each of `count` consecutive steps took, as a training loop would run them.

    On a GPU, CUDA events mark the ends of the steps and the only wait is after the last: a wait per step would hide
    every overlap of copies, loading and launches with the GPU's work. One more step leads in and does not count, or the
    first would hold what the CPU does before its first kernel. The events are of the current stream: a step that works
    on another one has to make it wait. `meanwhile` is called before that wait, while the GPU works. On a CPU,
    `time.perf_counter`. Raises TypeError for what is no step, as a variant in its place, and ValueError for a count
    that is no positive whole number or a step that works on another GPU than the current one.
    """
    check_step(step=step)
    check_positive(Integral, count=count)
    return _time_on_gpu(step, count, meanwhile) if find_device().type == "cuda" else _time_on_cpu(step, count)


def time_for(step: Callable[[], object], seconds: float, *, fewest: int = FEWEST_STEPS) -> list[float]:
    """Seconds of each of as many steps as fill `seconds`: never fewer than `fewest`, which tell how many more fit.

    Raises ValueError for seconds that are no positive number, and for a fewest that is no positive whole number.
    """
    check_positive(seconds=seconds)
    check_positive(Integral, fewest=fewest)
    times = time_steps(step, fewest)
    more = round((cap_seconds(seconds) - sum(times)) * fewest / max(sum(times), 1e-6))
    return times + (time_steps(step, more) if more > 0 else [])


def time_fastest(step: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call of `step`, in windows of a millisecond or more that fill `seconds`.

    Shorter windows are below the timer's resolution.
    """
    count = max(1, round(_MILLISECOND / median(time_for(step, _MILLISECOND))))

    def often() -> None:
        for _ in range(count):
            step()

    return min(time_for(often, seconds)) / count


@contextlib.contextmanager
def on_current_gpu() -> Iterator[None]:
    """Raise ValueError at the end of the `with` block if only other GPUs than the current one were asked for memory."""
    before = _count_allocations()
    yield
    used = [gpu for gpu, (then, now) in enumerate(zip(before, _count_allocations())) if now > then]
    if used and (here := torch.cuda.current_device()) not in used:
        told = f"the step works on GPU {used[0]}, and only the current one ({here}) is measured"
        raise ValueError(f"{told}: call torch.cuda.set_device({used[0]}) first")


def check_step(**named: object) -> None:
    """Raise TypeError, with the name, for what is not a function without arguments, such as a model."""
    ((name, step),) = named.items()
    if not is_function(step):
        raise TypeError(f"{name}: expected a function that is called without arguments, got {type(step).__name__}")


def cap_seconds(seconds: float) -> float:
    """`seconds`, or what the environment variable EFFGPU_SECONDS allows a measurement at most, where that is less.

    Results that are cut short only show that something runs. Raises ValueError if it is not a positive number.
    """
    cap = os.environ.get(CAP, "inf")
    with contextlib.suppress(ValueError):
        if float(cap) > 0:
            return min(seconds, float(cap))
    raise ValueError(f"{CAP}: expected a positive number of seconds, got {cap!r}")


def _time_on_cpu(step: Callable[[], object], count: int) -> list[float]:
    marks = [time.perf_counter()]
    check_worked(step())  # the first one alone: to look costs time
    marks.append(time.perf_counter())
    for _ in range(count - 1):
        step()
        marks.append(time.perf_counter())
    return [after - before for before, after in pairwise(marks)]


def _time_on_gpu(step: Callable[[], object], count: int, meanwhile: Callable[[], object] | None) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for mark in marks:
        mark.record()  # the first time, CUDA makes the event: not while steps are timed
    torch.cuda.synchronize()
    with on_current_gpu():
        check_worked(step())
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    if meanwhile:
        meanwhile()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def _count_allocations() -> list[int]:
    """How often each GPU's allocator was asked for memory; nothing to look at where there is but one."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [torch.cuda.memory_stats(gpu)["allocation.all.allocated"] for gpu in gpus] if len(gpus) > 1 else []
