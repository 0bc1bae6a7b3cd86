"""A step as it would run on a GPU, event by event: what the CPU calls, what the GPU runs, and where one waits.

A GPU and the CPU that feeds it are two clocks. The CPU calls one operation after the other and does not wait. The GPU
starts a kernel when the one before is done and the CPU has called it. Where the CPU waits, the two clocks meet.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from effgpu.attaching.sites import Site
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kinds import Kernel, Segment
from effgpu.predicting.rates import bus_rate, kernel_seconds
from effgpu.predicting.spreads import LAUNCH_RANGE
from effgpu.predicting.time import FUSES

KERNEL, READ, COPY = "kernel", "read", "copy"
WEIGHTS, GRADIENTS = "weights", "gradients"
LOAD, OWN = "load", "own work"  # what the CPU does, and asks nothing of the GPU
SWITCHED_OFF, NO_BF16, NOT_TAKEN = "switched off", "no bf16", "not taken"  # why attention takes no fused kernel
FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"  # the phases of a step; the last is the optimizer's
Range = tuple[float, float, float]  # middle, low, high
NOTHING: Range = (0.0, 0.0, 0.0)
SMALL_COPY = 64 * 1024  # bytes that cudaMemcpyAsync takes from ordinary memory at once (CUDA C++ Programming Guide)
_COPY_RANGE = 0.57, 1.75  # of those times
_ROUNDING = 1e-9  # seconds
LISTED = 0.05  # of a call: what the CPU takes for each tensor of a list that a foreach operation gets
_STEPS = 4  # that are played; the first does not count
CPU, GPU = 1, 2  # the tracks of a trace
WORK, WAIT = "work", "wait"


class Event(NamedTuple):
    """What the CPU asks of the GPU: kernels, a value that it reads, or a copy to the GPU. Or what it does meanwhile.

    `calls` is what the CPU does for it, in calls of an operation. `waits` says that the CPU goes on only when the GPU
    has done it, `non_blocking` that a copy asks for no wait. `scale` is the share of the GPU's work that is left.
    `site` is, of a kernel, the line of the step itself; of a read or a copy, the line that asks for it. `inner` is a
    kernel's innermost line. `lasting` says of what kernels change or read each number, without a graph: WEIGHTS, which
    holds buffers, or GRADIENTS. `reads_on` says that kernels read scores of attention that is over, `beside` that the
    event is seen by the timeline alone: it is part of no segment. `optimizer` is, in an update, its name and whether
    its step is fused. `evaluating` says that a module is set to evaluate, and that nothing is trained until it is set
    back, `packed` that a recurrent layer gets no padding, `again` that checkpointing computes it anew. Of the calls,
    `traced` are the traceback that anomaly mode keeps. `blocking` says that the CPU waits since all launches block,
    `formula` why scaled_dot_product_attention runs it in place of a fused kernel, and in which format it was given its
    arguments.
    """

    kind: str
    site: Site | None
    kernels: tuple[Kernel, ...] = ()
    calls: float = 1.0
    bytes: int = 0
    waits: bool = False
    pinned: bool = False
    non_blocking: bool = False
    scale: float = 1.0
    phase: str = FORWARD
    reads_on: bool = False
    beside: bool = False
    optimizer: tuple[str, bool | None] | None = None
    evaluating: bool = False
    inner: Site | None = None
    lasting: str = ""
    packed: bool = False
    again: bool = False
    traced: float = 0.0
    blocking: bool = False
    formula: tuple[str, str] | None = None

    @property
    def optimizing(self) -> bool:
        """Whether an optimizer's step asks for it."""
        return self.phase == UPDATE


class Span(NamedTuple):
    """What the CPU or the GPU does for an event, in seconds since the CPU began the step; None is no event's."""

    track: int
    doing: str
    name: str
    begin: float
    end: float
    event: Event | None = None

    @property
    def launches(self) -> bool:
        """Whether the CPU calls kernels in it."""
        return self.track == CPU and self.doing == WORK and self.event is not None and bool(self.event.kernels)


def segments_of(events: Iterable[Event]) -> tuple[Segment, ...]:
    """What runs between two waits. The copy of a batch is in none: a prediction's time is without loading."""
    found = [Segment()]
    for event in events:
        if event.kind == COPY or event.beside:
            continue
        found[-1].kernels.update(event.kernels)
        found[-1].calls += event.calls
        if event.waits:
            found.append(Segment())
    return tuple(found)


LOOKS_FOR_NAN = "_is_any_true"  # what anomaly mode alone asks of a gradient, between isnan and a read


def looks_for_nan(event: Event) -> bool:
    """Whether anomaly mode looks for a NaN in a gradient: it reads the answer next."""
    return any(kernel.name == LOOKS_FOR_NAN for kernel in event.kernels)


# A fused kernel of attention has batched products, which other devices run one by one.
OUTSIDE_ATTENTION, BATCHED = ("mm", "addmm", "convolution"), ("bmm", "baddbmm")


def count_products(kernels: Iterable[Kernel]) -> int:
    """FLOPs of matrix products and convolutions, but for batched ones, which attention may hold or not."""
    return sum(kernel.flops for kernel in kernels if kernel.name in OUTSIDE_ATTENTION)


def copy_waits(size: int, *, pinned: bool, non_blocking: bool) -> bool:
    """Whether the CPU waits for a copy of so many bytes to the GPU.

    PyTorch ends each copy with a wait that is not asked to be without (memcpy_and_sync in c10/cuda/CUDAFunctions.h).
    """
    return not non_blocking or (not pinned and size > SMALL_COPY)


def is_non_blocking(args: tuple, kwargs: dict) -> bool:
    """Whether a call of `Tensor.to` or `Tensor.cuda` with these arguments asks for a copy without a wait."""
    asked = (value for value in args if isinstance(value, bool))  # the second is `copy`
    return bool(kwargs.get("non_blocking", next(asked, False)))


@dataclass(frozen=True)
class Timeline:
    """A step on a GPU: its events, and what the CPU does beside them, in seconds.

    `load` is what the loader takes for a step: by the CPU that launches, or where there are `workers` by them, all
    together. `working` is what the script itself computes on the CPU in a step, by line. Both are where events say so,
    and where none does, at the step's begin. `compiling` is what compiling takes, `launch` the time of calling an
    operation. `off` is by how much the GPU's predicted work may be off, as a factor; `launches` are the least and the
    most of launching. `fused` is the share of their time that kernels take which compiled code fuses.
    """

    events: tuple[Event, ...]
    gpu: Gpu
    load: Range = NOTHING
    workers: int = 0
    working: dict[Site, float] = field(default_factory=dict)
    compiling: float = 0.0
    launch: float = 0.0
    off: float = 1.0
    launches: tuple[float, float] = LAUNCH_RANGE
    fused: float = 1.0

    def seconds(self, *, work: float = 1.0, launches: float = 1.0, copies: float = 1.0, load: int = 0) -> float:
        """Seconds per step where the GPU's work, launching and copies take so many times as long.

        `load` picks the middle, low or high end of what loading takes.
        """
        costs = [
            (*self._gpu_seconds(event, work, copies), event.calls * self.launch * launches, event.waits)
            for event in self.events
        ]
        ends = self._play(costs, self.load[load])
        return (ends[-1] - ends[0]) / (_STEPS - 1)

    def _play(self, costs: list[tuple[bool, float, float, bool]], load: float, last: list | None = None) -> list[float]:
        """When each of a few steps ends; `last` gets, of the last one, when each event is called, runs, and is over.

        A cost says whether the GPU runs anything, for how long, how long the CPU calls it, and whether it then waits.
        """
        cpu = gpu = 0.0
        ends, (batches, own), beside = [], self._begin(), self._beside()
        for number in range(_STEPS):
            began, taken = cpu, number + batches
            cpu = max(cpu, taken * load) if self.workers else cpu + batches * load
            loaded = cpu
            cpu += own + self.compiling
            noted = last if number == _STEPS - 1 else None
            if noted is not None:
                noted.append((began, loaded, cpu, cpu, cpu))
            for (runs, seconds, calling, waits), (share, working) in zip(costs, beside):
                called = cpu
                taken += share
                cpu = max(cpu, taken * load) if share and self.workers else cpu + share * load
                cpu += working + calling
                begins = max(gpu, cpu)
                if runs:
                    gpu = begins + seconds
                free = max(cpu, gpu) if waits else cpu
                if noted is not None:
                    noted.append((called, cpu, begins, gpu if runs else begins, free))
                cpu = free
            ends.append(max(cpu, gpu))
        return ends

    def _beside(self) -> list[tuple[float, float]]:
        """Of each event the share of the step's loading, and the seconds of the script's own work."""
        found = Counter((event.kind, event.site if event.kind == OWN else None) for event in self.events)
        return [
            (
                1 / found[LOAD, None] if event.kind == LOAD else 0.0,
                self.working.get(event.site, 0.0) / found[OWN, event.site] if event.kind == OWN else 0.0,
            )
            for event in self.events
        ]

    def _begin(self) -> tuple[float, float]:
        """The same of the step's begin, of what no event says where it is."""
        placed = {event.site for event in self.events if event.kind == OWN}
        loads = any(event.kind == LOAD for event in self.events)
        return float(not loads), sum(seconds for site, seconds in self.working.items() if site not in placed)

    def settings(self) -> list[dict[str, float]]:
        """As expected, and with each thing that is uncertain at either end: arguments for `seconds`."""
        ends = {"work": (1 / self.off, self.off), "launches": self.launches, "copies": _COPY_RANGE, "load": (1, 2)}
        return [{}, *({name: value} for name, values in ends.items() for value in values)]

    def range(self) -> Range:
        """Seconds per step, and from where to where they may be."""
        return _spread([self.seconds(**setting) for setting in self.settings()])

    def busy(self, event: Event) -> float:
        """Seconds that the GPU takes for an event."""
        return self._gpu_seconds(event)[1]

    def _gpu_seconds(self, event: Event, work: float = 1.0, copies: float = 1.0) -> tuple[bool, float]:
        """Whether the GPU does anything for an event, and for how long."""
        gpu = self.gpu
        moving = copies * event.bytes / bus_rate(gpu, "pinned" if event.pinned else "ordinary")
        if event.kind == COPY:
            return True, event.scale * moving
        if event.kind == READ:
            return True, event.scale * (gpu.kernel + moving)
        seconds = sum(
            max(event.scale * max(kernel_seconds(kernel, gpu)), gpu.kernel * kernel.launches)
            * (self.fused if kernel.kind in FUSES else 1)
            for kernel in event.kernels
        )
        return bool(event.kernels), work * seconds

    def spans(self) -> list[Span]:
        """What CPU and GPU do in one step, and when."""
        costs = [(*self._gpu_seconds(e), e.calls * self.launch, e.waits) for e in self.events]
        played: list[tuple[float, ...]] = []
        self._play(costs, self.load[0], played)
        (zero, loaded, ready, *_), *played = played
        worked = ready - self.compiling
        loading = (WAIT, "wait for the loader") if self.workers else (WORK, "load")
        spans = [Span(CPU, *loading, zero, loaded), Span(CPU, WORK, "work of the script's own", loaded, worked)]
        spans.append(Span(CPU, WORK, "compile", worked, ready))
        for event, (called, launched, begins, ends, free) in zip(self.events, played):
            if event.kind in (LOAD, OWN):
                doing = loading if event.kind == LOAD else (WORK, "work of the script's own")
                spans.append(Span(CPU, *doing, called, launched, event))
                continue
            name = _name(event)
            spans.append(Span(CPU, WORK, name, called, launched, event))
            spans.append(Span(GPU, WORK, name, begins, ends, event))
            spans.append(Span(CPU, WAIT, f"wait for the {_WAITS_FOR[event.kind]}", launched, free, event))
        return [one._replace(begin=one.begin - zero, end=one.end - zero) for one in spans if one.end > one.begin]

    def trace(self) -> dict:
        """One step as Chrome trace events, which Perfetto (ui.perfetto.dev) shows: a track of the CPU, one of the GPU.

        Times are microseconds from the moment when the CPU begins the step. `args` holds the reader's line.
        """
        slices = [
            {
                "name": f"launch {span.name}" if span.launches else span.name,
                "cat": span.event.phase if span.event else "host",
                "ph": "X",
                "pid": 1,
                "tid": span.track,
                "ts": 1e6 * span.begin,
                "dur": 1e6 * (span.end - span.begin),
                "args": _describe(span.event) if span.event else {},
            }
            for span in self.spans()
        ]
        names = {CPU: "CPU: calls and waits", GPU: f"{self.gpu.name}: kernels and copies"}
        named = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "one step, predicted"}}]
        for track, name in names.items():
            named.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})
        about = {
            "gpu": self.gpu.name,
            "predicted": True,
            "seconds": dict(zip(("expected", "low", "high"), self.range())),
        }
        return {"traceEvents": named + slices, "displayTimeUnit": "ms", "otherData": about}

    def save(self, path: str | Path) -> None:
        """Write the trace to a file."""
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")


_WAITS_FOR = {KERNEL: "GPU", READ: "value", COPY: "copy"}


def _name(event: Event) -> str:
    if event.kind != KERNEL:
        return "read a value" if event.kind == READ else "copy to the GPU"
    names = list(dict.fromkeys(kernel.name for kernel in event.kernels))
    return " and ".join(names[:2]) if names else "a view"


def _describe(event: Event) -> dict[str, object]:
    fields: dict[str, object] = {"phase": event.phase} | ({"line": str(event.site)} if event.site else {})
    if event.bytes:
        fields |= {"bytes": event.bytes, "memory": "pinned" if event.pinned else "ordinary"}
    if event.kernels:
        fields |= {"kind": event.kernels[0].kind, "format": event.kernels[0].format}
        fields |= {
            name: sum(getattr(kernel, name) for kernel in event.kernels) for name in ("flops", "bytes", "launches")
        }
    return fields


def saved(before: Timeline, after: Timeline) -> Range:
    """Seconds per step that a change saves, and from where to where they may be."""
    settings = before.settings()
    savings = [before.seconds(**setting) - after.seconds(**setting) for setting in settings]
    return _spread([saving if saving > _ROUNDING else 0.0 for saving in savings])


def _spread(values: list[float]) -> Range:
    return values[0], min(values), max(values)
