"""Bytes: the trace of one step, its peak, and what autograd saves for backward. One mechanism for CPU and GPU."""

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import inf
from numbers import Integral
from operator import attrgetter

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy
from torch.profiler import record_function

from effgpu.device import current_limit, find_device, is_out_of_memory, older_objects_spared
from effgpu.timing import check_step
from effgpu.units import check_positive, format_bytes
from effgpu.variants import Step, Variant, check_worked, use

_WINDOW = "effgpu::step"


@dataclass(frozen=True, repr=False)
class Trace:
    """The bytes alive after each allocation and free of one step, above what was alive before the variant was built.

    `bytes[0]` is what the step began with: parameters, optimizer state, inputs. `phases` names for each entry what was
    running: "forward", "backward" or, after the last backward pass, "optimizer". `reserved` is the most that the
    caching allocator held, above what it held before; None on a CPU. On a GPU, libraries take room to work in, which
    counts: cuBLAS some 8 to 32 MiB, by GPU, for each of two threads all the time (PyTorch 2.11) or for each product
    while it runs (2.15). So peaks of two versions differ by it. What a CUDA graph keeps for its replays counts, too.
    """

    bytes: tuple[int, ...]
    phases: tuple[str, ...]
    reserved: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment of the step."""
        return max(0, *self.bytes)

    def __repr__(self) -> str:
        return (
            f"Trace(peak={format_bytes(self.peak)}, start={format_bytes(self.bytes[0])}, events={len(self.bytes) - 1})"
        )


def trace(variant: Variant, *, warmup: int = 2) -> Trace:
    """Build the variant, warm it up, record every allocation of one more step, and free it all.

    The events are the allocator's own, as it reports them to PyTorch's profiler: on a CPU the same step has the same
    peak at every run. Seen are the thread that runs the step and autograd's, not threads or processes that the step
    starts by itself. Raises torch.OutOfMemoryError where memory, or what `memory_limit` left of it, did not suffice,
    whichever library said so; ValueError for a step that works on another GPU than the current one; RuntimeError where
    another profiler runs, in the step or around it.
    """
    check_positive(Integral, warmup=warmup)
    with older_objects_spared():
        before = _held(torch.cuda.memory_reserved)
        records, held = _record(variant, warmup, before)
    levels, phases = _read(records)
    levels = tuple(level + held.by_graphs - before.by_graphs for level in levels)
    reserved = None if held.reserved is None else max(0, held.reserved - before.reserved, *levels)
    recorded = Trace(levels, phases, reserved)
    limit = current_limit()
    if limit is not None and find_device().type == "cpu" and recorded.peak > limit:
        needed, allowed = format_bytes(recorded.peak), format_bytes(limit)
        raise torch.OutOfMemoryError(f"out of memory: the step needs {needed}, the limit is {allowed}")
    return recorded


def peak_bytes(variant: Variant, *, warmup: int = 2) -> int | None:
    """The most bytes alive at any moment of the variant's step, as `trace` records them; None where memory ran out."""
    try:
        return trace(variant, warmup=warmup).peak
    except torch.OutOfMemoryError:
        return None


def saved_bytes(forward: Callable[[], object]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward`: each storage once, parameters not counted.

    Seen by torch.autograd.graph.saved_tensors_hooks; the same at every run. Devices differ where their kernels keep
    other things: of a dropout mask, a GPU keeps a byte an element and a CPU four. `forward` returns its loss or output.
    """
    check_step(forward=forward)
    held: Counter[tuple[int, int]] = Counter()  # of each storage and its size, the saved tensors that keep it
    most = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        saved = tensor.detach()  # an operation that saves its own output would keep its graph alive for ever
        root = tensor if tensor._base is None else tensor._base
        if not isinstance(root, torch.nn.Parameter) and not (root.is_leaf and root.requires_grad):
            storage = saved.untyped_storage()
            key = storage._cdata, storage.nbytes()
            held[key] += 1
            weakref.finalize(saved, held.subtract, [key])
            most = max(most, sum(size for (_, size), count in held.items() if count))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        check_worked(forward())
    return most


@dataclass(frozen=True)
class _Held:
    """Bytes on a GPU: reserved by the allocator, kept by CUDA graphs for their replays (though no tensor is in them),
    and allocated on each of the machine's GPUs.
    """

    reserved: int | None = None
    by_graphs: int = 0
    allocated: tuple[int, ...] = ()


def _held(reserved: Callable[[], int]) -> _Held:
    here = find_device()
    if here.type == "cpu":
        return _Held()
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == here.index)
    private = [s for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return _Held(
        reserved(),
        sum(segment["total_size"] - segment["allocated_size"] for segment in private),
        tuple(map(torch.cuda.memory_allocated, range(torch.cuda.device_count()))),
    )


def _record(variant: Variant, warmup: int, before: _Held) -> tuple[list, _Held]:
    """What the threads of the variant did, in the profiler's words, and what was held at the end of its step.

    The profiler is PyTorch's older one. torch.profiler tells the same, but on a GPU it attaches CUPTI to the process,
    which stays there and, as users report, slows what is launched and timed from then on (pytorch/pytorch#144455).
    """
    try:
        _enable_profiler_legacy(
            ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
        )
        try:
            held = use(variant, lambda step: _run(step, warmup, before))
        finally:
            records = _disable_profiler_legacy()
    except Exception as error:
        if "Profiler is already enabled" in str(error):
            raise RuntimeError(
                "trace: another profiler runs, and memory is recorded by one: only one can run"
            ) from error
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from None
        raise
    return records, held


def _run(step: Step, warmup: int, before: _Held) -> _Held:
    for _ in range(warmup):
        check_worked(step())
    if find_device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with record_function(_WINDOW):
        step()
    held = _held(torch.cuda.max_memory_reserved)
    _check_gpu(before, held)
    return held


def _check_gpu(before: _Held, held: _Held) -> None:
    here = find_device().index
    used = [gpu for gpu, (then, now) in enumerate(zip(before.allocated, held.allocated)) if now > then]
    if used and here not in used:
        told = f"the step allocates on GPU {used[0]}, and only the current one ({here}) is measured"
        raise ValueError(f"{told}: call torch.cuda.set_device({used[0]}) first")


def _read(threads: list[list]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Bytes and phases over the window, from what the profiler recorded of each thread."""
    moved = attrgetter(f"{find_device().type}_memory_usage")
    time = threads[0][0].cpu_elapsed_us  # since the first of all
    records = sorted(chain.from_iterable(threads), key=time)
    ends = {record.handle(): time(record) for record in records if record.kind() == "pop"}
    backward = [ends[record.handle()] for record in records if record.kind() == "push" and _is_backward(record.name())]
    alive, phase, until, end, last = 0, "forward", 0.0, inf, inf
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
            levels, phases, phase, until, end = [alive], ["forward"], "forward", 0.0, ends[record.handle()]
            last = max((done for done in backward if start < done < end), default=inf)
        elif record.kind() == "push" and name.startswith("Optimizer.zero_grad"):
            until = max(until, ends[record.handle()])  # of whatever phase comes before it, wherever it is called
        elif record.kind() == "push":
            between = None if start < until else "forward" if start < last else "optimizer"
            if (running := _phase(name, between)) is not None:
                phase = running
                until = max(until, ends[record.handle()]) if phase != "forward" else until
    return tuple(levels), tuple(phases)


def _phase(name: str, between: str | None) -> str | None:
    """The phase that an event begins; `between` is that of an operation outside of backward and optimizer events."""
    if _is_backward(name):
        return "backward"
    if name.startswith("Optimizer.step"):
        return "optimizer"
    return between if name.startswith("aten::") else None


def _is_backward(name: str) -> bool:
    return name.startswith("autograd::engine::evaluate_function")
