"""Bytes: the trace of one step, its peak, and what autograd saves for backward. One mechanism for CPU and GPU."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from effgpu.device import current_limit, find_device, is_out_of_memory, older_objects_spared
from effgpu.units import format_bytes
from effgpu.variants import Step, Variant, use

_WINDOW = "effgpu::step"


@dataclass(frozen=True, repr=False)
class Trace:
    """The bytes alive after each allocation and free of one step, above what was alive before the variant was built.

    `bytes[0]` is what the step began with: parameters, optimizer state, inputs. `phases` names for each entry what was
    running: "forward", "backward" or "optimizer". `reserved` is the most that the caching allocator held, above what it
    held before; None on a CPU. On a GPU, libraries take room to work in, which counts: cuBLAS up to 32 MiB for each of
    two threads on Hopper, 8 MiB elsewhere; and so does what a CUDA graph keeps for its replays.
    """

    bytes: tuple[int, ...]
    phases: tuple[str, ...]
    reserved: int | None = None

    @property
    def peak(self) -> int:
        """The most bytes alive at any moment of the step."""
        return max(self.bytes)

    def __repr__(self) -> str:
        return (
            f"Trace(peak={format_bytes(self.peak)}, start={format_bytes(self.bytes[0])}, events={len(self.bytes) - 1})"
        )


def trace(variant: Variant, *, warmup: int = 2) -> Trace:
    """Build the variant, warm it up, record every allocation of one more step, and free it all.

    The events are the allocator's own, as torch.profiler reports them: on a CPU the peak is the same at every run.
    Seen are the thread that runs the step and autograd's, not threads or processes that the step starts by itself.
    Raises torch.OutOfMemoryError where memory, or what `memory_limit` left of it, did not suffice, whichever library
    said so; ValueError for a step that works on another GPU than the current one.
    """
    with older_objects_spared(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # it has one cycle
        reserved_before, graphs_before = _held(torch.cuda.memory_reserved), _held_by_graphs()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            reserved, graphs = _used(variant, warmup)
    levels, phases = _read(profiler.profiler.kineto_results.events())
    levels = tuple(level + graphs - graphs_before for level in levels)
    recorded = Trace(levels, phases, None if reserved is None else reserved - reserved_before)
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
        forward()
    return most


def _used(variant: Variant, warmup: int) -> tuple[int | None, int]:
    try:
        return use(variant, lambda step: _record(step, warmup))
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, torch.OutOfMemoryError):
            raise torch.OutOfMemoryError(str(error)) from None
        raise


def _record(step: Step, warmup: int) -> tuple[int | None, int]:
    """Leave the step's events in the profiler, and return the most that was reserved and what CUDA graphs hold."""
    for _ in range(warmup):
        step()
    if find_device().type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with record_function(_WINDOW):
        step()
    return _held(torch.cuda.max_memory_reserved), _held_by_graphs()


def _held(by_allocator: Callable[[], int]) -> int | None:
    return by_allocator() if find_device().type == "cuda" else None


def _held_by_graphs() -> int:
    """Bytes that CUDA graphs keep for their replays, though no tensor is in them: a replay allocates nothing."""
    if find_device().type == "cpu":
        return 0
    private = (s for s in torch.cuda.memory_snapshot() if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in private)


def _read(events) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Bytes and phases over the window, from the profiler's events in the order of their start."""
    kind = find_device().type.upper()
    end = next((event.end_ns() for event in events if event.name() == _WINDOW), None)
    if end is None:
        raise RuntimeError("trace: the step ran a profiler of its own, which ended the one that records the memory")
    moved = [event for event in events if event.name() == "[memory]" and event.device_type().name == kind]
    _check_gpu(event.device_index() for event in moved)
    alive, phase, until = 0, "forward", 0
    levels: list[int] = []
    phases: list[str] = []
    for event in sorted(events, key=lambda event: event.start_ns()):
        name, start = event.name(), event.start_ns()
        if start > end:
            break
        if name == _WINDOW:
            levels, phases, phase, until = [alive], ["forward"], "forward", 0
        elif name == "[memory]" and event.device_type().name == kind:
            alive += event.nbytes()
            if levels:
                levels.append(alive)
                phases.append(phase)
        elif (running := _phase(name, start >= until)) is not None:
            phase = running
            until = max(until, event.end_ns()) if phase != "forward" else until
    return tuple(levels), tuple(phases)


def _check_gpu(indices: Iterable[int]) -> None:
    here, used = find_device().index, set(indices)
    elsewhere = {index for index in used if index >= 0 and index != here}
    if elsewhere and here is not None and here not in used:
        there = min(elsewhere)
        told = f"the step allocates on GPU {there}, and only the current one ({here}) is measured"
        raise ValueError(f"{told}: call torch.cuda.set_device({there}) first")


def _phase(name: str, outside: bool) -> str | None:
    """The phase that an event begins: "forward" only where no backward or optimizer event is still running."""
    if name.startswith("autograd::engine::evaluate_function"):
        return "backward"
    if name.startswith("Optimizer."):
        return "optimizer"
    return "forward" if outside and name.startswith("aten::") else None
