"""A step as it would run on a GPU, event by event, and the same step with one thing changed.

A GPU and the CPU that feeds it are two clocks. The CPU calls one operation after the other and does not wait. The GPU
starts a kernel when the one before is done and the CPU has called it. Where the CPU waits, the two clocks meet.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from effgpu.attaching.sites import Site, find_site
from effgpu.diagnosing.watch import COPY, KERNEL, READ, Event, Watch, call
from effgpu.measuring.variants import Variant
from effgpu.predicting.allocator import find_peak
from effgpu.predicting.fake_gpu import Recorder
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kernels import PRODUCT, Segment
from effgpu.predicting.prediction import Prediction, walk
from effgpu.predicting.time import FUSED_CALLS, LAUNCH_RANGE, kernel_seconds, step_time

Range = tuple[float, float, float]  # middle, low, high
# Bytes per second between host and GPU, over PCI Express of generation 3 and 4: the published rates that lesson 03
# lists. Ordinary memory reaches less than pinned memory, and its rate depends on the host.
PINNED, PAGEABLE = {3: 11e9, 4: 24e9}, {3: 3.7e9, 4: 5.7e9}
_COPY_RANGE = 0.57, 1.75  # of those times
_ROUNDING = 1e-9  # seconds
_STEPS = 4  # that are replayed; the first does not count


@dataclass(frozen=True)
class Scene:
    """A step on a GPU: its events, and what the CPU does beside them, in seconds.

    `load` is what the loader takes for a batch: by the CPU that launches, or where there are `workers` by them, all
    together. `compiling` is the time that compiling takes per step. `launch` is that of calling an operation. `off` is
    by how much the GPU's predicted work may be off, as a factor.
    """

    events: tuple[Event, ...]
    gpu: Gpu
    load: Range = (0.0, 0.0, 0.0)
    workers: int = 0
    compiling: float = 0.0
    launch: float = 0.0
    off: float = 1.0

    def seconds(self, *, work: float = 1.0, launches: float = 1.0, copies: float = 1.0, load: int = 0) -> float:
        """Seconds per step where the GPU's work, launching and copies take so many times as long.

        `load` picks the middle, low or high end of what loading takes.
        """
        timeline = [
            (
                *_gpu_seconds(event, self.gpu, work, copies),
                event.scale * event.calls * self.launch * launches,
                event.waits,
            )
            for event in self.events
        ]
        cpu = gpu = 0.0
        ends = []
        for number in range(_STEPS):
            ready = (number + 1) * self.load[load]
            cpu = max(cpu, ready) if self.workers else cpu + self.load[load]
            cpu += self.compiling
            for runs, seconds, calling, waits in timeline:
                cpu += calling
                if runs:
                    gpu = max(gpu, cpu) + seconds
                if waits:
                    cpu = max(cpu, gpu)
            ends.append(max(cpu, gpu))
        return (ends[-1] - ends[0]) / (_STEPS - 1)

    def settings(self) -> list[dict[str, float]]:
        """As expected, and with each thing that is uncertain at either end: arguments for `seconds`."""
        ends = {"work": (1 / self.off, self.off), "launches": LAUNCH_RANGE, "copies": _COPY_RANGE, "load": (1, 2)}
        return [{}, *({name: value} for name, values in ends.items() for value in values)]

    def range(self) -> Range:
        """Seconds per step, and from where to where they may be."""
        return _spread([self.seconds(**setting) for setting in self.settings()])


def saved(before: Scene, after: Scene) -> Range:
    """Seconds per step that a change saves, and from where to where they may be."""
    settings = before.settings()
    savings = [before.seconds(**setting) - after.seconds(**setting) for setting in settings]
    return _spread([saving if saving > _ROUNDING else 0.0 for saving in savings])


def _spread(values: list[float]) -> Range:
    return values[0], min(values), max(values)


def _gpu_seconds(event: Event, gpu: Gpu, work: float, copies: float) -> tuple[bool, float]:
    """Whether the GPU does anything for an event, and for how long."""
    generation = 3 if gpu.capability < (8, 0) else 4
    if event.kind == COPY:
        return True, copies * event.scale * event.bytes / (PINNED if event.pinned else PAGEABLE)[generation]
    if event.kind == READ:
        return True, event.scale * (gpu.kernel + copies * event.bytes / PAGEABLE[generation])
    seconds = sum(max(*kernel_seconds(kernel, gpu), gpu.kernel * kernel.launches) for kernel in event.kernels)
    return bool(event.kernels), work * event.scale * seconds


@dataclass(frozen=True)
class Walk:
    """One step, walked on fake tensors: its events, what is predicted for it, and who owns its peak.

    `peak` has an entry for each line and owner: (line of the step, "weights" or "activations" ..., bytes).
    """

    events: tuple[Event, ...]
    prediction: Prediction
    peak: tuple[tuple[Site | None, str, int], ...]

    def scene(self, gpu: Gpu) -> Scene:
        """The walked step on the GPU."""
        prediction = self.prediction
        kernels = sum((segment.kernels for segment in prediction.segments), Counter())
        work = step_time([Segment(kernels)], gpu)  # the GPU's alone: the events say when it waits
        off = work.high / work.expected if work.expected else 1.0
        launch = gpu.launch * (FUSED_CALLS if prediction.compiled else 1)
        return Scene(self.events, gpu, launch=launch, off=off)


def walk_step(variant: Variant, batch: tuple, gpu: Gpu, *, pinned: bool = False, halve: bool = False) -> Walk:
    """Walk a variant's step as it is, or with `halve` under autocast, with the 16-bit format that the GPU is fast in.

    Raises RuntimeError, with the reason, for a step that cannot run without values.
    """
    watch = Watch(batch, pinned=pinned)
    witness = _Witness(gpu.capability, watch)

    def watched():
        step = variant()

        def run():
            with watch.looking(walked=True), in_16_bits(gpu) if halve else contextlib.nullcontext():
                return call(step, batch)

        return run

    prediction = walk(watched, (gpu,), witness)
    return Walk(tuple(watch.events), prediction, witness.owners_at_peak())


@contextlib.contextmanager
def in_16_bits(gpu: Gpu) -> Iterator[None]:
    """Inside, autocast is on, in the 16-bit format that a GPU is fast in; a step cannot switch it off."""
    kind = torch.autocast
    with kind("cuda", torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16):
        begin, end = kind.__enter__, kind.__exit__
        kind.__enter__, kind.__exit__ = (lambda autocast: autocast), (lambda *_: None)
        try:
            yield
        finally:
            kind.__enter__, kind.__exit__ = begin, end


def as_tf32(event: Event) -> Event:
    """The event, with its products of fp32 tensors computed in TF32."""
    kernels = [
        kernel._replace(format="tf32") if (kernel.kind, kernel.format) == (PRODUCT, "fp32") else kernel
        for kernel in event.kernels
    ]
    return event._replace(kernels=tuple(kernels))


class _Witness(Recorder):
    """A recorder that keeps the order of the last step, and the line of the reader's that each storage is from."""

    def __init__(self, capability: tuple[int, int], watch: Watch):
        super().__init__(capability)
        self._watch = watch
        self._sites: dict[int, Site | None] = {}  # by the block's place

    def _made_of(self) -> tuple:
        return self.capability, self._watch

    def note_kernels(self) -> None:
        super().note_kernels()
        self._watch.events.clear()

    def owners_at_peak(self) -> tuple[tuple[Site | None, str, int], ...]:
        """The bytes at the peak by line and owner, the most first."""
        _, at = find_peak(self.on_gpu, self.first)
        owned: dict[tuple[Site | None, str], int] = {}
        for place, block in enumerate(self.blocks):
            if self.is_on_gpu(block) and block.born <= at < block.died:
                key = self._sites.get(place), block.owner
                owned[key] = owned.get(key, 0) + block.size
        return tuple((*key, size) for key, size in sorted(owned.items(), key=lambda item: -item[1]))

    def _read(self, func, args, kwargs):
        if getattr(args[0], "constant", None) is None:
            self._watch.read()
        return super()._read(func, args, kwargs)

    def _add_kernels(self, kernels, calls):
        super()._add_kernels(kernels, calls)
        site = find_site(outermost=True, until=call.__code__) if kernels else None
        self._watch.events.append(Event(KERNEL, site, tuple(kernels), calls, optimizing=bool(self.optimizing)))

    def _add(self, tensor: torch.Tensor) -> None:
        place = len(self.blocks)
        super()._add(tensor)
        if len(self.blocks) > place:
            self._sites[place] = find_site()
