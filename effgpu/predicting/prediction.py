"""A prediction: what a step needs of memory and time, GPU by GPU, with its ranges, and what is not known of it."""

import html
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from effgpu.attaching.sites import Site
from effgpu.errors import BadArgument
from effgpu.predicting.audited import list_unchecked
from effgpu.predicting.facts import (
    ASSUMPTIONS,
    COMPILED,
    GRAPHED,
    NOT_KNOWN,
    RARE,
    UNTIMED,
    Fact,
    memory_is_known,
    others_take_more,
    tell,
)
from effgpu.predicting.gpus import Gpu, GpuLike, find_gpu
from effgpu.predicting.kinds import Segment
from effgpu.predicting.spreads import LAUNCH_RANGE
from effgpu.predicting.time import FUSED_CALLS, FUSES, Time, step_time
from effgpu.predicting.timeline import Event, Timeline, segments_of
from effgpu.units import (
    NOT_MEASURED,
    align,
    format_bytes,
    format_seconds,
    html_table,
    join_names,
    join_places,
)

FITS, DOES_NOT_FIT, MAY_NOT_FIT = "fits", "does not fit", "may not fit"
OWNERS = ("weights", "gradients", "optimizer state", "activations", "other")
_LONG_RUN = 1_000_000  # steps
_GIVES_BACK = (
    "where memory is tight, PyTorch gives back what it has cached and asks for it anew: that time is not counted"
)
_RANGE = "times: in brackets, where 9 of 10 published ones lie; without loading data, on one GPU, at its usual clock"
_COMPILED = "times of compiled code: from perfect fusion to eager"
_TRUST = "predicted, not measured: docs/predict.md says how far published runs differ"
# How much less, and more, a run may need than predicted: with workspaces, no case of docs/predict.md needs more.
LESS, MORE = 0.06, 0.08
# How much more of the peak compiled code may need: published are 3 % for vision transformers (torchao), 5 for GPT-2.
# And how much less of what does not stay from step to step: torchtune's packed Llama-3.2-3B falls by a quarter of it.
COMPILED_MORE, COMPILED_LESS = 0.05, 0.5


@dataclass(frozen=True)
class ByteRange:
    """From `low` to `high` bytes."""

    low: int
    high: int

    def __str__(self) -> str:
        return " – ".join(dict.fromkeys(map(format_bytes, (self.low, self.high))))


@dataclass(frozen=True, repr=False)
class Prediction:
    """What a step is predicted to need, in bytes. Shows itself as a table; `verdict` answers for one GPU.

    `allocated` is the peak of allocated memory and `owners` divides it. `reserved` is what PyTorch's caching allocator
    would hold for it. `workspaces` is what cuBLAS and cuDNN take beside it. `gpus` are the GPUs of the table.
    `said` is what was taken for granted, such as the values that the step read, and what could not be predicted:
    `assumptions` and `unknown` tell it. Where memory depends on what is not known, a step only "fits" if twice the
    high end does; where other steps than the one that was counted may take more, none does. `resting` is the part of
    the peak that stays from step to step: weights, gradients, optimizer state.
    `holds_from` is the lowest compute capability that the prediction is for. `notes` says what else was seen of a
    script. `older` is the prediction for GPUs below `holds_from`, on which the step takes other kernels or formats.
    `paged` are the bytes of an optimizer's state that lie on the GPU as far as there is room, as bitsandbytes keeps it:
    no part of the peak. `events` are what the CPU asks of the GPU in the last step, in order: `time` and `timeline`
    follow from them, and `segments`. `peak` says who owns the peak: (line, owner, bytes); `kept` what each step leaves
    behind, so that memory grows from step to step. `before` is the peak of a script before the steps that are counted,
    where that is the higher one; else 0. `tight` is what the allocator would hold where it has to give back what it has
    cached, if `reserved` is far more. `certain` is the peak up to where something is not known.
    """

    allocated: int
    owners: Mapping[str, int]
    reserved: int
    workspaces: ByteRange
    gpus: tuple[Gpu, ...]
    said: tuple[Fact, ...] = ()
    resting: int = 0
    holds_from: tuple[int, int] = (0, 0)
    older: "Prediction | None" = None
    notes: tuple[str, ...] = ()
    paged: int = 0
    events: tuple[Event, ...] = ()
    peak: tuple[tuple[Site | None, str, int], ...] = ()
    kept: tuple[tuple[Site | None, int], ...] = ()
    before: int = 0
    tight: int | None = None
    certain: int = 0

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The kernels and calls of the last step, from one wait to the next."""
        return segments_of(self.events)

    @property
    def graphed(self) -> bool:
        """Whether torch.compile replays a part of the step as a CUDA graph."""
        return GRAPHED in self.said

    @property
    def compiled(self) -> bool:
        """Whether the step runs code that torch.compile has compiled."""
        return COMPILED in self.said

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What was taken for granted, in words; for older GPUs, too."""
        return tell(self._said_of_all, *ASSUMPTIONS)

    @property
    def unknown(self) -> tuple[str, ...]:
        """What could not be predicted, in words; for older GPUs, too."""
        return tell(self._said_of_all, *NOT_KNOWN)

    @property
    def _said_of_all(self) -> tuple[Fact, ...]:
        return tuple(dict.fromkeys((*self.said, *(self.older._said_of_all if self.older else ()))))

    def for_gpu(self, gpu: GpuLike | None = None) -> "tuple[Prediction, Gpu]":
        """The prediction for a GPU, which is `older` on some, and the GPU; None is the first of `gpus`."""
        gpu = self.gpus[0] if gpu is None else find_gpu(gpu)
        return self.older.for_gpu(gpu) if self.older and gpu.capability < self.holds_from else (self, gpu)

    def total(self, gpu: GpuLike | None = None) -> ByteRange:
        """All bytes that the process takes on the GPU: the step, workspaces and CUDA's context, and what is paged.

        `gpu` is as in `predict`, with sizes in bytes; None is the first of `gpus`.
        """
        one, gpu = self.for_gpu(gpu)
        peak = one.allocated if memory_is_known(one.said) else max(one.certain, one.resting)
        passing = (peak - one.resting) * (1 - COMPILED_LESS * one.compiled) * (gpu.capability >= one.holds_from)
        low = int((one.resting + passing) * (1 - LESS)) + one.workspaces.low + gpu.context[0]
        return ByteRange(max(low, int(one.before * (1 - LESS)) + gpu.context[0]), one._most(gpu) + one.paged)

    def _most(self, gpu: Gpu) -> int:
        """The most bytes that cannot leave the GPU."""
        return self._take(self.tight if self._gives_back(gpu) else self.reserved_range.high, gpu)

    def _take(self, reserved: int, gpu: Gpu) -> int:
        """The most bytes on the GPU where the step takes so many, with what lies beside them."""
        more = MORE + COMPILED_MORE * self.compiled
        return int(max(reserved, self.before) * (1 + more)) + self.workspaces.high + gpu.context[1]

    def _gives_back(self, gpu: Gpu) -> bool:
        """Whether the allocator has to give back there what it has cached."""
        return self.tight is not None and self._take(self.reserved_range.high, gpu) > gpu.memory

    def verdict(self, gpu: GpuLike | None = None) -> str:
        """Return "fits", "does not fit" or "may not fit". "fits" means that the high end of `total` fits.

        What is not known may need more: then twice the high end must fit. What only other steps do, or an optimizer
        that made none, may need any number of bytes more: then nothing "fits".
        `gpu` is as in `predict`, with sizes in bytes; None is the first of `gpus`, not all of them.
        """
        one, gpu = self.for_gpu(gpu)
        if one.total(gpu).low > gpu.memory:
            return DOES_NOT_FIT
        if gpu.capability < one.holds_from:
            return MAY_NOT_FIT
        return FITS if one.enough(gpu) <= gpu.memory else MAY_NOT_FIT

    def enough(self, gpu: GpuLike | None = None) -> float:
        """The bytes that the step fits: the high end of `total`, and twice that where something is not known.

        What is paged needs no room. No number of bytes is enough where other steps may take more.
        """
        one, gpu = self.for_gpu(gpu)
        if others_take_more(one.said):
            return math.inf
        return one._most(gpu) * (1 if memory_is_known(one.said) else 2)

    def time(self, gpu: GpuLike | None = None) -> Time:
        """The time of a step on a GPU, in seconds, with its range; None is the first of `gpus`.

        Raises ValueError for a GPU whose speed is not known, as for one that is given as a size, and for one that takes
        other kernels than those that were predicted.
        """
        one, gpu = self._at_speed(gpu)
        return step_time(one.segments, gpu, compiled=one.compiled)

    def _at_speed(self, gpu: GpuLike | None) -> "tuple[Prediction, Gpu]":
        one, gpu = self.for_gpu(gpu)
        if gpu.capability < one.holds_from:
            least = ".".join(map(str, one.holds_from))
            text = f"a time for the {gpu.name}, as GPUs below compute capability {least} take other kernels or formats"
            raise BadArgument(f"gpu: expected one that was predicted for, not {text}: predict for it")
        return one, gpu

    def timeline(self, gpu: GpuLike | None = None) -> Timeline:
        """The step on a GPU with two clocks, the CPU's and the GPU's: `.save(path)` writes a trace for Perfetto.

        Raises ValueError for the GPUs for which `time` does.
        """
        one, gpu = self._at_speed(gpu)
        kernels = sum((segment.kernels for segment in one.segments), Counter())
        work = step_time([Segment(kernels)], gpu, compiled=one.compiled)  # the GPU's alone: events say when it waits
        off = work.high / work.expected if work.expected else 1.0
        called = math.sqrt(FUSED_CALLS) if one.compiled else 1.0  # the middle between perfect fusion and none
        launches = LAUNCH_RANGE[0] * called, LAUNCH_RANGE[1] / called
        fuses = sum(row.seconds for kind, row in work.table.items() if kind in FUSES)
        apart = sum(row.seconds for row in work.table.values()) - work.expected  # what compiling is expected to save
        fused = 1 - apart / fuses if fuses else 1.0
        return Timeline(one.events, gpu, launch=gpu.launch * called, off=off, launches=launches, fused=fused)

    def to_dict(self) -> dict:
        """All of it for a program to read: bytes, seconds, and for each GPU its verdict."""
        gpus = [
            {
                "name": gpu.name,
                "memory": gpu.memory,
                "needed": self._total_for_a_program(gpu),
                "verdict": self.verdict(gpu),
                "time": self._time_for_a_program(gpu) if gpu.bandwidth else None,
            }
            for gpu in self.gpus
        ]
        fields = {"allocated": self.allocated, "owners": dict(self.owners), "reserved": vars(self.reserved_range)}
        fields |= {"workspaces": vars(self.workspaces), "paged": self.paged, "gpus": gpus}
        fields["warnings"] = self._warnings()
        return fields | {name: list(getattr(self, name)) for name in ("unknown", "assumptions", "notes")}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each GPU."""
        headings = ["GPU", "memory", "needed", "verdict"]
        rows = [[gpu.name, format_bytes(gpu.memory), self.tell_total(gpu), self.verdict(gpu)] for gpu in self.gpus]
        if any(gpu.bandwidth for gpu in self.gpus):
            headings += ["time per step", "bound by"]
            for row, gpu in zip(rows, self.gpus):
                row += [self.tell_time(gpu), self.time(gpu).bound] if gpu.bandwidth else [NOT_MEASURED] * 2
        return headings, rows

    def _total_for_a_program(self, gpu: Gpu) -> dict[str, int | None]:
        """The range of `total`; no high end where other steps may need more."""
        open_end = {"high": None} if others_take_more(self.for_gpu(gpu)[0].said) else {}
        return vars(self.total(gpu)) | open_end

    def _time_for_a_program(self, gpu: Gpu) -> dict:
        """The time; neither expected nor a high end where it is at least the low one."""
        return self.time(gpu).to_dict() | ({"expected": None, "high": None} if self.untimed(gpu) else {})

    def tell_total(self, gpu: Gpu) -> str:
        """What is needed, with its range; the least where other steps may need more."""
        total = self.total(gpu)
        return f"at least {format_bytes(total.low)}" if others_take_more(self.for_gpu(gpu)[0].said) else str(total)

    def tell_time(self, gpu: Gpu, steps: int = 1) -> str:
        """What so many steps take, with its range; the least where the time of a part of the step is not known."""
        time = self.time(gpu)
        return f"at least {format_seconds(steps * time.low)}" if self.untimed(gpu) else time.times(steps)

    def untimed(self, gpu: Gpu) -> str:
        """Why the step's time, or that of others, may be longer, nobody knows how much; empty if it is known."""
        return "; ".join(tell(self.for_gpu(gpu)[0].said, UNTIMED, RARE))

    def _summary(self) -> list[tuple[str, str]]:
        return [
            ("predicted peak, allocated", format_bytes(self.allocated)),
            *((f"  {name}", format_bytes(size)) for name, size in self.owners.items() if size),
            ("predicted reserved", str(self.reserved_range)),
            ("workspaces of cuBLAS and cuDNN", str(self.workspaces)),
            *([("paged, on the GPU or the host", format_bytes(self.paged))] if self.paged else []),
        ]

    @property
    def reserved_range(self) -> ByteRange:
        """From the allocated peak to what the allocator holds if it never has to give anything back."""
        return ByteRange(self.allocated, max(self.allocated, self.reserved))

    def grows(self, gpu: GpuLike | None = None) -> str:
        """One sentence on memory that grows from step to step, and when a GPU is full; "" where it does not.

        What would fill it only after a million steps, such as a loss that is kept, does not count.
        """
        one, gpu = self.for_gpu(gpu)
        growth, room = sum(size for *_, size in one.kept), gpu.memory - one.total(gpu).high
        if not growth or room > _LONG_RUN * growth:
            return ""
        after = f"; if it is no buffer that fills up, the {gpu.name} is full after {room // growth:,} steps"
        lines = [f": {site}" for site, *_ in one.kept if site][:1]
        text = f"memory grows by {format_bytes(growth)} in the step that was counted (predicted)"
        return "".join([text, after * (room > 0), *lines])

    def _warnings(self) -> list[str]:
        """What no change of the GPU mends: memory that grows, as the first GPU sees it."""
        return [*filter(None, map(self.grows, self.gpus[:1]))]

    def _notes(self) -> list[str]:
        notes = [f"not known: {why}" for why in self.unknown] + [f"assumed: {what}" for what in self.assumptions]
        notes = join_places(notes)
        if others := [gpu.name for gpu in self.gpus if self.for_gpu(gpu)[0].allocated != self.allocated]:
            text = "the step takes other kernels, formats or sizes: the peak above is not theirs"
            notes.append(f"on {join_names(others)}, {text}")
        if any(self._gives_back(gpu) for gpu in self.gpus):
            notes.append(_GIVES_BACK)
        if any(gpu.bandwidth for gpu in self.gpus):  # else no time is shown
            notes += [_RANGE, *[_COMPILED] * self.compiled]
        return [*self._warnings(), *self.notes, *notes, *self.tell_unchecked(self.gpus)]

    def tell_unchecked(self, gpus: Iterable[Gpu]) -> list[str]:
        """Where no run stands beside the predicted times, published or ours: their ranges are wider."""
        found = [(gpu.name, self.time(gpu).tell_unchecked()) for gpu in gpus if gpu.bandwidth]
        return [f"no published time to check this by: {missing}" for missing in list_unchecked(found)]

    def _kinds(self) -> tuple[list[str], list[list[str]]]:
        """What kinds of operation take the time, where one GPU was asked for."""
        return self.time().rows() if len(self.gpus) == 1 and self.gpus[0].bandwidth else ([], [])

    def __repr__(self) -> str:
        headings, rows = self.table()
        kinds, shares = self._kinds()
        lines = [*align(self._summary()), "", *align([headings, *rows]), ""]
        lines += [*align([kinds, *shares]), ""] if kinds else []
        return "\n".join([*lines, *self._notes(), _TRUST])

    def _repr_html_(self) -> str:
        summary = html_table([], [(name.replace("  ", "– ", 1), value) for name, value in self._summary()])
        notes = "".join(f"<br>{html.escape(note)}" for note in self._notes())
        verdicts = html_table(*self.table())
        kinds = f"<table>{html_table(*kinds)}</table>" if (kinds := self._kinds())[0] else ""
        return f"<table>{summary}</table><table>{verdicts}</table>{kinds}<small>{_TRUST}{notes}</small>"
