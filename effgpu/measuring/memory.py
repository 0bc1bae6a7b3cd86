"""Memory: the bytes of one step over its course, its peak, and what autograd saves. One mechanism for CPU and GPU."""

import contextlib
import gc
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from numbers import Integral
from operator import attrgetter
from typing import NamedTuple

import torch
from torch.profiler import record_function

from effgpu.measuring.device import (
    NO_CACHING,
    check_accelerator,
    current_limit,
    find_device,
    gc_frozen,
    is_out_of_memory,
)
from effgpu.measuring.timing import check_step, on_current_gpu
from effgpu.measuring.torch_internals import storage_key
from effgpu.measuring.variants import Step, Variant, check_worked, run_variant
from effgpu.units import check_positive, format_bytes

_WINDOW = "effgpu::step"


@dataclass(frozen=True, repr=False)
class Trace:
    """The bytes allocated during one step, above what was allocated before the variant was built.

    `bytes` has an entry for the start of the step and one for each allocation and free. `phases` says for each entry
    what was running: "forward", "backward" or, after the last backward pass, "optimizer". On a GPU, `reserved` is the
    most that the caching allocator reserved and `allocated_peak` its own statistic of the peak; both are None on a CPU.

    On a GPU the bytes include the memory of CUDA graphs and the workspaces of libraries. cuBLAS takes 8 to 32 MiB,
    depending on the GPU: for each of two threads all the time (PyTorch 2.11), or only during a matrix product (2.15).
    So the peaks of two PyTorch versions differ.
    """

    bytes: tuple[int, ...]
    phases: tuple[str, ...]
    reserved: int | None = None
    allocated_peak: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes allocated at any moment of the step: the allocator's statistic on a GPU, else the curve's."""
        return self._highest if self.allocated_peak is None else self.allocated_peak

    @property
    def start(self) -> int:
        """The bytes before the step: weights, optimizer state, inputs."""
        return self.bytes[0]

    @property
    def difference(self) -> int | None:
        """The peak of the recorded curve minus the allocator's statistic, which should agree; None on a CPU."""
        return None if self.allocated_peak is None else self._highest - self.allocated_peak

    @property
    def _highest(self) -> int:
        return max(0, *self.bytes)

    def __repr__(self) -> str:
        parts = [
            f"peak={format_bytes(self.peak)}",
            f"start={format_bytes(self.start)}",
            f"events={len(self.bytes) - 1}",
        ]
        if self.difference and abs(self.difference) > 0.01 * self.peak:
            parts.append(f"difference={format_bytes(self.difference)}")
        return f"Trace({', '.join(parts)})"


def trace(variant: Variant, *, warmup: int = 2) -> Trace:
    """Build the variant, warm it up, record every allocation of one more step, and free everything.

    On one CPU, the same step has the same peak in every run. CPUs differ in what oneDNN's convolutions take: copies of
    weights in an order that depends on the CPU's instructions. Python's garbage is collected before the step and not
    during it. The trace covers the thread that runs the step and autograd's threads, but no other threads and processes
    that the step starts. Compiled code is freed with its variant, so the peaks do not depend on the order of variants.

    Raises torch.OutOfMemoryError if the step runs out of memory or its peak is above `memory_limit`, whichever library
    reports it. Raises ValueError if the step runs on another GPU than the current one, and RuntimeError if another
    profiler runs, or if the allocator counts nothing because of PYTORCH_NO_CUDA_MEMORY_CACHING.
    """
    check_positive(Integral, warmup=warmup)
    if find_device().type == "cuda" and os.environ.get(NO_CACHING):
        raise RuntimeError(f"trace: with {NO_CACHING}, PyTorch counts no memory of the GPU: unset it")
    with gc_frozen():
        before = _held()
        start, records, held = _record(variant, warmup, before)
    graphs = held.by_graphs - before.by_graphs
    levels, phases = _read(records, start + graphs)
    recorded = Trace(levels, phases)
    if held.reserved is not None:
        recorded = Trace(levels, phases, held.reserved - before.reserved, held.allocated - before.allocated + graphs)
    limit = current_limit()
    if limit is not None and recorded.peak > limit:
        needed, allowed = format_bytes(recorded.peak), format_bytes(limit)
        raise torch.OutOfMemoryError(f"out of memory: the step needs {needed}, the limit is {allowed}")
    return recorded


def peak_bytes(variant: Variant, *, warmup: int = 2) -> int | None:
    """The peak of the variant's step in bytes, as in `trace`, or None if it runs out of memory."""
    try:
        return trace(variant, warmup=warmup).peak
    except torch.OutOfMemoryError:
        return None


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd saves for the backward pass of `forward`. Each storage counts once, parameters do not count.

    `forward` runs a forward pass and returns its loss or output. The result is the same in every run. Devices differ
    if their kernels save different tensors: for a dropout mask, a GPU saves one byte per element and a CPU four.
    """
    check_step(forward=forward)
    held: Counter[tuple[int, int]] = Counter()  # (storage, bytes) -> number of saved tensors that use it
    total = most = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total, most
        saved = tensor.detach()  # the original could keep its own graph alive: an operation may save its output
        root = tensor if tensor._base is None else tensor._base
        if not isinstance(root, torch.nn.Parameter) and not (root.is_leaf and root.requires_grad):
            storage = saved.untyped_storage()
            key = storage_key(storage), storage.nbytes()
            held[key] += 1
            if held[key] == 1:
                total += key[1]
                most = max(most, total)
            weakref.finalize(saved, drop, key)
        return saved

    def drop(key: tuple[int, int]) -> None:
        nonlocal total
        held[key] -= 1
        if not held[key]:
            total -= key[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        check_worked(forward())
    return most


class _Held(NamedTuple):
    """Bytes on a GPU. `by_graphs` is what CUDA graphs keep for their replays although no tensor uses it."""

    reserved: int | None = None
    allocated: int | None = None
    by_graphs: int = 0


def _held(*, peak: bool = False) -> _Held:
    """What is held now; with `peak`, the most that was reserved and allocated since the statistics were reset."""
    here = find_device()
    if here.type == "cpu":
        return _Held()
    segments = []
    with contextlib.suppress(RuntimeError):  # the backend cudaMallocAsync has no snapshot
        segments = torch.cuda.memory_snapshot()
    private = [s for s in segments if s["device"] == here.index and tuple(s["segment_pool_id"]) != (0, 0)]
    by_graphs = sum(segment["total_size"] - segment["allocated_size"] for segment in private)
    if peak:
        return _Held(torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated(), by_graphs)
    return _Held(torch.cuda.memory_reserved(), torch.cuda.memory_allocated(), by_graphs)


def _record(variant: Variant, warmup: int, before: _Held) -> tuple[int, list[list], _Held]:
    """The bytes at the start of the step, the profiler's records of it, and what was held at its peak."""
    on_gpu = find_device().type == "cuda"
    profiler = _Profiler()

    def action(step: Step) -> tuple[int, _Held]:
        with on_current_gpu():
            for _ in range(warmup):
                check_worked(step())
        check_accelerator()
        if on_gpu:
            torch.cuda.synchronize()
        with _gc_paused():
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
                start = torch.cuda.memory_allocated() - before.allocated
                profiler.start()
            else:
                start = _sum_changes(profiler.restart())
            with record_function(_WINDOW):
                step()
            held = _held(peak=True)
        return start, held

    try:
        with contextlib.closing(profiler):
            if not on_gpu:  # a CPU has no statistics: add up what the build and the warm-up allocate and free
                profiler.start()
            start, held = run_variant(variant, action)
            return start, profiler.stop(), held  # not earlier: PyTorch would remember the sizes of what is freed unseen
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from error
        raise


class _Profiler:
    """PyTorch's older profiler, which records every operation, allocation and free of a thread and of autograd's.

    torch.profiler records the same. But on a GPU it attaches CUPTI to the process, which stays there and, as users
    report, slows all launches that are timed afterwards (pytorch/pytorch#144455).
    """

    def __init__(self):
        self._running = False

    def start(self) -> None:
        from effgpu.measuring.torch_internals import _enable_profiler_legacy, _ExperimentalConfig

        state = torch.autograd.ProfilerState.CPU
        config = torch.autograd.ProfilerConfig(state, False, True, False, False, False, _ExperimentalConfig())
        _enable_profiler_legacy(config)
        self._running = True

    def stop(self) -> list[list]:
        """End the session and return its records, a list for each thread."""
        from effgpu.measuring.torch_internals import _disable_profiler_legacy

        self._running = False
        return _disable_profiler_legacy()

    def restart(self) -> list[list]:
        """End a session and begin the next. PyTorch remembers the sizes of what the first allocated."""
        records = self.stop()
        self.start()
        return records

    def close(self) -> None:
        if self._running:
            self.stop()


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Collect garbage, and then not again: when Python collects differs from run to run, and the peak must not.

    A tensor that is collected between two of the profiler's sessions would also be missed by both.
    """
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _bytes_moved() -> Callable:
    """How to read a record's allocated (positive) or freed (negative) bytes on this device."""
    return attrgetter(f"{find_device().type}_memory_usage")


def _sum_changes(threads: list[list]) -> int:
    moved = _bytes_moved()
    return sum(moved(record)() for record in chain.from_iterable(threads) if record.kind() == "memory_alloc")


def _read(threads: list[list], alive: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Bytes and phases over the window, from the records of each thread. `alive` is the bytes before the first."""
    moved = _bytes_moved()
    time = threads[0][0].cpu_elapsed_us  # since the first of all
    records = sorted(chain.from_iterable(threads), key=time)
    ends = {record.handle(): time(record) for record in records if record.kind() == "pop"}
    backward = [ends[record.handle()] for record in records if record.kind() == "push" and _is_backward(record.name())]
    phase, until, end, last = "forward", 0.0, inf, inf
    levels: list[int] = []
    phases: list[str] = []
    for record in records:
        name, start = record.name(), time(record)
        if start > end:
            break
        if record.kind() == "memory_alloc":
            alive += moved(record)()
            if levels and moved(record)():
                levels.append(alive)
                phases.append(phase)
        elif name == _WINDOW:
            levels, phases, end = [alive], ["forward"], ends[record.handle()]
            last = max((done for done in backward if start < done < end), default=inf)
        elif record.kind() == "push" and (_is_backward(name) or name.startswith("Optimizer.step")):
            phase, until = "backward" if _is_backward(name) else "optimizer", max(until, ends[record.handle()])
        elif record.kind() == "push" and name.startswith("aten::") and start >= until:  # outside of both
            phase = "forward" if start < last else "optimizer"
    return tuple(levels), tuple(phases)


def _is_backward(name: str) -> bool:
    return name.startswith("autograd::engine::evaluate_function")
