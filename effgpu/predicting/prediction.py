"""Will a training step fit a GPU, and how long will it take? Counted on fake tensors: no GPU, no memory, a few seconds.

The variant's step runs as it is, but no kernel does: PyTorch's FakeTensorMode knows each result's shape and dtype. A
dispatch mode adds up the storages and notes the kernels. The tensors say that they are on the CPU, which works on every
machine; where a GPU keeps something else than a CPU, the rules of rules.py answer as the GPU would.
"""

import contextlib
import html
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from numbers import Integral, Real
from time import monotonic, time
from types import CodeType

from effgpu.attaching import scripts
from effgpu.attaching.commands import read_program
from effgpu.attaching.sites import Site
from effgpu.attaching.steps import Plan, drive
from effgpu.errors import BadArgument, BadType, CannotPredict
from effgpu.measuring import gpu_lock
from effgpu.measuring.device import gc_frozen, random_states_kept
from effgpu.measuring.torch_internals import fake_tensor
from effgpu.measuring.variants import Step, Variant, run_variant
from effgpu.predicting.allocator import count_reserved, find_peak
from effgpu.predicting.as_gpu import as_gpu
from effgpu.predicting.asked import STEPS, Asked
from effgpu.predicting.facts import (
    ASSUMED,
    ASSUMPTIONS,
    COMPILED,
    NOT_KNOWN,
    RARE,
    UNKNOWN,
    UNTIMED,
    Fact,
    memory_is_known,
    others_take_more,
    tell,
)
from effgpu.predicting.gpus import Gpu, GpuLike, find_gpu, find_gpus
from effgpu.predicting.kernels import Segment
from effgpu.predicting.rare import find_captures, find_chances, find_rare, find_sizes, find_types
from effgpu.predicting.recorder import Recorder
from effgpu.predicting.refusals import tell_sparse
from effgpu.predicting.time import FUSED_CALLS, FUSES, Time, list_unchecked, step_time
from effgpu.predicting.timeline import Event, Timeline, segments_of
from effgpu.units import (
    NOT_MEASURED,
    MiB,
    align,
    check_positive,
    format_bytes,
    format_seconds,
    html_table,
    join_places,
    with_article,
)

FITS, DOES_NOT_FIT, MAY_NOT_FIT = "fits", "does not fit", "may not fit"
OWNERS = ("weights", "gradients", "optimizer state", "activations", "other")
MOST_CALLS, PATIENCE = 64, 5.0  # in which an optimizer has to make a step: calls, and seconds
_LONG_RUN = 1_000_000  # steps
_GIVES_BACK = (
    "where memory is tight, PyTorch gives back what it has cached and asks for it anew: that time is not counted"
)
_CACHED = 1.5  # by this factor or more, the allocator holds more than the peak: of blocks that grow, it keeps each
_SMALL = 0.0001  # of the peak: a step that makes so little more is no larger one
_GROWS, _VARIES = 1.001, 1.05  # by these factors, a step is larger or smaller than the one before: what grows may go on
_RANGE = "times: in brackets, where 9 of 10 published ones lie; without loading data, on one GPU, at its usual clock"
_COMPILED = "times of compiled code: from perfect fusion to eager"
_TRUST = "predicted, not measured: docs/predict.md says how far published runs differ"
_ASKS_CUDA = ("no NVIDIA driver", "not compiled with CUDA", "CUDA driver version", "No CUDA GPUs", "attribute '_cuda")
# How much less, and more, a run may need than predicted: with workspaces, no case of docs/predict.md needs more.
LESS, MORE = 0.06, 0.08
# How much more of the peak compiled code may need: published are 3 % for vision transformers (torchao), 5 for GPT-2.
# And how much less of what does not stay from step to step: torchtune's packed Llama-3.2-3B falls by a quarter of it.
COMPILED_MORE, COMPILED_LESS = 0.05, 0.5

_RARE = (
    (partial(find_rare, what="passes"), RARE, "what the backward pass takes that comes only in some steps"),
    (partial(find_rare, what="trains_more"), RARE, "what a step takes once more weights are trained"),
    (find_chances, UNTIMED, "a step takes where chance decides otherwise"),
    (find_sizes, ASSUMED, "a size that the step's number decides is that of the step that was counted"),
    (partial(find_rare, what="copies"), ASSUMED, "without the copy that is made only in some steps"),
    (find_types, UNKNOWN, "which way a line goes that compares a tensor's exact type, and not by isinstance"),
    (find_captures, ASSUMED, "a step that launches its operations: one that is replayed as a CUDA graph takes less"),
)


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
    cached, if `reserved` is far more.
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

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The kernels and calls of the last step, from one wait to the next."""
        return segments_of(self.events)

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
        is_known = memory_is_known(one.said) and gpu.capability >= one.holds_from
        passing = 0 if not is_known else (one.allocated - one.resting) * (1 - COMPILED_LESS * one.compiled)
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
        launch = gpu.launch * (FUSED_CALLS if one.compiled else 1)
        fuses = sum(row.seconds for kind, row in work.table.items() if kind in FUSES)
        apart = sum(row.seconds for row in work.table.values()) - work.expected  # what compiling is expected to save
        return Timeline(one.events, gpu, launch=launch, off=off, fused=1 - apart / fuses if fuses else 1.0)

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
            notes.append(f"on {' and '.join(others)} {text}")
        if any(self._gives_back(gpu) for gpu in self.gpus):
            notes.append(_GIVES_BACK)
        return [*self._warnings(), *self.notes, *notes, _RANGE, *[_COMPILED] * self.compiled, *self._unchecked()]

    def _unchecked(self) -> list[str]:
        """Where no run stands beside the predicted times, published or ours: their ranges are wider."""
        found = [(gpu.name, self.time(gpu).tell_unchecked()) for gpu in self.gpus if gpu.bandwidth]
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


def predict(
    variant: Variant | str | Sequence[str],
    gpu: GpuLike | Iterable[GpuLike] | None = None,
    *,
    steps: int = STEPS,
    taken: float | None = None,
) -> Prediction:
    """Predict what a training step takes on a GPU, memory and time, and whether it fits, without a GPU.

    `variant` is what `compare` takes, or the command of a training script, as it is: "train.py --batch 12", "python -m
    package.train". Such a script runs here, in a process of its own, up to its third step: what lies between two steps
    of the optimizer that stepped first. What it has on the CPU is real, its data too; what it moves to the GPU has no
    values, and is written nowhere. `gpu` is a name ("T4", "A100 80 GB"), a size ("16 GiB"; bytes), several of them, or
    None for all known GPUs. `steps` steps are counted after building, or after a script's first. They run on fake
    tensors, without values. Everything that the variant builds or uses counts as on the GPU. `taken` is the share, from
    0 to 1, that each boolean index takes, `nonzero` and the like: where it is not given, what is known, or else half.

    Raises ValueError for an unknown GPU, a share that is none, and a command that starts no Python program. Raises
    RuntimeError, with the reason, for a step that cannot run without values: a result's shape depends on them, or an
    operation is not known to fake tensors; and for a script whose third step is not seen. ScriptFailed, a RuntimeError,
    is a script's own error.
    """
    check_positive(Integral, steps=steps)
    if taken is not None and not (isinstance(taken, Real) and 0 <= taken <= 1):
        raise BadArgument(f"taken: expected a share from 0 to 1, got {taken!r}")
    if not (gpus := find_gpus(gpu)):
        raise BadArgument("gpu: expected at least one GPU, got none")
    program = read_program(variant) if isinstance(variant, (str, list, tuple)) else None

    began = time()

    def walk_on(capability: tuple[int, int]) -> Prediction:
        asked = Asked(gpus, capability, steps, taken, awaits_update=program is None, began=began)
        if program is None:
            return walk(lambda _: variant, asked)
        return scripts.run(program, "effgpu.predicting.scripts:planned", asked=asked)

    def walk_down(capability: tuple[int, int]) -> Prediction:
        predicted = walk_on(capability)
        older = [gpu.capability for gpu in gpus if gpu.capability < predicted.holds_from]
        return replace(predicted, older=walk_down(max(older))) if older else predicted

    return walk_down((8, 0) if gpu is None else max(gpu.capability for gpu in gpus))


def walk(variant_of: Callable[[Recorder], Variant], asked: Asked) -> Prediction:
    """The prediction that is asked for: of a variant, which `variant_of` gives for whoever records it.

    It is walked again with another guess where an error follows a value that was guessed. Raises RuntimeError, with the
    reason, for a step that cannot run without values.
    """
    first, answers = None, {}
    while True:
        recorder = Recorder(asked, answers)
        try:
            _walk_once(variant_of(recorder), recorder)
            break
        except Exception as error:
            if why := explain(error) or _explain_mixing(error):
                raise CannotPredict(why) from error
            if not recorder.guesses.made and first is None:
                if guessed := recorder.guesses.tell():
                    error.add_note(f"not known here: {guessed}")
                raise
            first = first or (error, recorder.guesses.made)
            if not recorder.guesses.answer_otherwise():
                read = dict.fromkeys(f"{guess.where} read a value, taken as {guess.value}" for guess in first[1][-3:])
                text = f"{type(first[0]).__name__}: {first[0]}, after {', '.join(read)}: predicted without values"
                raise CannotPredict(text) from first[0]
        answers = recorder.guesses.answers
    return conclude(recorder)


def _explain_mixing(error: Exception) -> str | None:
    if "capturable" in str(error):
        return 'capturable=True asks for weights on the GPU: build the model there, as with device="cuda"'
    if "devices" in str(error) and "cuda" in str(error):
        text = "the step mixes its own tensors with those that lie on the GPU outside of the variant"
        return f"{text}: keep those on the CPU, and let the step move them with .to(device)"
    return None


def _walk_once(variant: Variant, recorder: Recorder) -> None:
    def walk_step(step: Step) -> None:
        drive(count(recorder), _check_takes_nothing(step))
        code = getattr(inspect.unwrap(step.func if isinstance(step, partial) else step), "__code__", None)
        name_rare(recorder, [code] if code else [])

    with gpu_lock.free(), gc_frozen(), random_states_kept(), as_gpu(recorder):
        run_variant(variant, walk_step)


def name_rare(recorder: Recorder, loop: Iterable[CodeType]) -> None:
    """Say what the code of a step does only in some steps, where its lines can be read."""
    ran = {(event.site.file, event.site.line) for event in recorder.events if event.site}
    for find, kind, text in _RARE:
        for site, lines in dict.fromkeys(each for code in loop for each in find(code)):
            if not ran.intersection((site.file, line) for line in lines):  # what the counted step has done is no news
                recorder.say(kind, f"{text}: {site}")


def _check_takes_nothing(step: Step) -> Step:
    with contextlib.suppress(ValueError):  # a callable that has no signature
        try:
            inspect.signature(step).bind()
        except TypeError as error:
            raise BadType(f"step: expected one that takes nothing, and loads its batch itself: {error}") from None
    return step


def count(recorder: Recorder) -> Plan:
    """The plan of a prediction, from the moment when all is built: the last step's kernels are noted.

    Of a function whose optimizer makes no step in its first call, it is the call with the second: gradients accumulate,
    and a counter decides.
    """

    def call(*, last: bool) -> Plan:
        if last:
            recorder.note_kernels()
        yield 1
        recorder.end_step()

    def waits() -> bool:
        more = calls < MOST_CALLS and monotonic() - began < PATIENCE
        return asked.awaits_update and recorder.optimizers.built and not every and more

    asked = recorder.asked
    recorder.start()
    began, calls, every = monotonic(), 0, 0
    while calls < asked.steps or waits():
        calls += 1
        yield from call(last=calls >= asked.steps)  # each may be the last one
        every = every or calls * bool(recorder.optimizers.stepped)
    if not asked.awaits_update or every == 1 or not recorder.optimizers.built:
        return
    if not every:
        recorder.say(RARE, f"what the optimizer takes, which made no step in {calls} calls")
        return
    for left in reversed(range(-calls % every or every)):
        yield from call(last=not left)
    recorder.say(ASSUMED, f"times are those of every {every} calls' last, in which the optimizer makes its step")


def conclude(recorder: Recorder) -> Prediction:
    """What was recorded, as the prediction that was asked for."""
    gpus = recorder.asked.gpus
    for idle in recorder.idle:
        recorder.say(RARE, f"what {idle} takes, which made no step in those that were looked at")
    if recorder.cudnn_attends and (those := [gpu.name for gpu in gpus if gpu.capability[0] in (9, 10)]):
        # sdp_utils.cpp, check_prefer_cudnn_attention; what cuDNN's kernel takes beside its results is not known
        recorder.say(ASSUMED, f"on {' and '.join(those)}, cuDNN's attention takes no more than PyTorch's own")
    if recorder.holds_from > (0, 0) and any(gpu.bandwidth is None for gpu in gpus):  # given as a size
        least = ".".join(map(str, recorder.holds_from))
        text = f"a GPU of compute capability {least} or higher: an older one takes other kernels or formats"
        recorder.say(ASSUMED, text)
    if paged := recorder.paged:
        text = f"what is paged, {format_bytes(paged)}, moves to the host where the GPU is full"
        recorder.say(ASSUMED, f"{text}: the time that it takes to move is not counted")
    recorder.optimizers.fill_histories()
    recorder.optimizers.name_rare_updates()
    peak, owners, resting = _divide(recorder)
    _compare_sizes(recorder, peak)
    blocks = [block for block in recorder.on_gpu if block.died > recorder.emptied]
    reserved = count_reserved(blocks)
    tight = count_reserved(blocks, peak) if reserved > _CACHED * peak else None
    return Prediction(
        peak,
        owners,
        reserved,
        ByteRange(*recorder.workspaces()),
        gpus,
        tuple(recorder.said),
        resting,
        recorder.holds_from,
        notes=tuple(recorder.files.tell("have no values")),
        paged=paged,
        events=tuple(recorder.events),
        peak=recorder.owners_at_peak(),
        kept=recorder.kept,
        tight=tight,
    )


def _compare_sizes(recorder: Recorder, peak: int) -> None:
    """Say that the last two steps differ in size, if it is more than a small part of the peak."""
    made = recorder.made[-2:]
    if len(made) < 2 or abs(made[1] - made[0]) < _SMALL * peak or len({*map(format_bytes, made)}) < 2:
        return
    sizes = " and ".join(map(format_bytes, made))
    if made[0] > _VARIES * made[1] + MiB and recorder.ran_more_before():
        text = f"what ran in the step before the one that was counted took more: {sizes} in their forward passes"
    elif made[1] > _GROWS * made[0] or made[0] > _VARIES * made[1] + MiB:
        text = f"steps differ in size, as two that were looked at make {sizes} in their forward pass"
    else:
        return
    larger = "larger; a later step may be larger still" if made[1] > made[0] else "larger"
    recorder.say(ASSUMED, f"{text}: the time is the last one's, and the peak that of the {larger}")


def _divide(recorder: Recorder) -> tuple[int, dict[str, int], int]:
    """The recorded peak, its bytes by owner, and how much of it stays from step to step."""
    peak, at = find_peak(recorder.on_gpu, recorder.first)
    owners = dict.fromkeys(OWNERS, 0)
    for block in recorder.on_gpu:
        if block.born <= at < block.died:
            owners[block.owner] += block.size
    return peak, owners, sum(owners[name] for name in OWNERS[:3])


@dataclass(frozen=True, repr=False)
class Largest:
    """The largest size whose step fits `gpu`, and the largest that may: between them it is too close to tell.

    0 means that no size does. `tried` holds the prediction for each size that was looked at.
    """

    gpu: Gpu
    fits: int
    may_fit: int
    tried: Mapping[int, Prediction]

    def __repr__(self) -> str:
        if not self.may_fit:
            return f"nothing fits {with_article(self.gpu.name)}"
        size = self.fits if self.fits else "no size surely"
        sure = f"{size} fits {with_article(self.gpu.name)}"
        return sure + (f", up to {self.may_fit} may" if self.may_fit > self.fits else "") + " (predicted)"


def largest(variant_of: Callable[[int], Variant], gpu: GpuLike, *, most: int = 65536) -> Largest:
    """The largest batch, or length, that fits a GPU: `largest(lambda batch: partial(training, batch), "T4")`.

    `variant_of` returns the variant for a size. Sizes from 1 to `most` are tried by bisection, guided by the sizes seen
    so far. Raises what `predict` raises.
    """
    check_positive(Integral, most=most)
    gpu, tried = find_gpu(gpu), {}

    def surplus(size: int, end: str) -> int:
        if size not in tried:
            tried[size] = predict(variant_of(size), gpu)
        return (tried[size].total(gpu).low if end == "low" else tried[size].enough(gpu)) - gpu.memory

    with gc_frozen():
        fits = _bisect(partial(surplus, end="high"), most)
        may_fit = _bisect(partial(surplus, end="low"), most, tuple(tried))
    return Largest(gpu, fits, may_fit, dict(sorted(tried.items())))


def _bisect(surplus: Callable[[int], int], most: int, seen: Iterable[int] = ()) -> int:
    """The largest size from 0 to `most` whose surplus is not positive, by bisection from the sizes seen before.

    Memory grows with the size, nearly as a line: where two sizes are known, the next one is where the line says.
    """
    known = {size: surplus(size) for size in seen}
    low = max((size for size, more in known.items() if more <= 0), default=0)
    high = min((size for size, more in known.items() if more > 0), default=most + 1)
    turn = 0
    while high - low > 1:
        below, above = known.get(low), known.get(high)
        earlier = max((size for size in known if size < low), default=None)
        if below is not None and above is not None and turn % 3 < 2:
            size = low + int((high - low) * -below / (above - below))
        elif above is None and earlier is not None and known[low] > known[earlier]:
            size = low + 1 + int(-below * (low - earlier) / (below - known[earlier]))
        else:
            size = (low + high) // 2 if above is not None else 8 * low or 1
        size = min(max(size, low + 1), high - 1)
        known[size] = surplus(size)
        low, high, turn = (size, high, turn + 1) if known[size] <= 0 else (low, size, turn + 1)
    return low


def explain(error: BaseException) -> str | None:
    """What an error of fake tensors, or of ours, means for the step; None for any other error."""
    if isinstance(error, CannotPredict):
        return error.args[0]
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return f"the shape of a result depends on values, by {error.func}: such a step cannot be predicted"
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return f"the step reads values, by {error.func}: such a step cannot be predicted"
    unsupported = isinstance(
        error, fake_tensor.UnsupportedOperatorException | fake_tensor.UnsupportedFakeTensorException
    )
    unsupported |= isinstance(error, NotImplementedError) and "fake" in str(error).lower()
    if unsupported or "no fake impl registered" in str(error):
        return f"an operation has no fake implementation, so its result is unknown: {error}"
    if isinstance(error, NotImplementedError) and (found := re.search(r"Sparse(Cs[rc]|Bs[rc])Tensor", str(error))):
        return tell_sparse(found[1])
    if found := re.search(r"(\w+) dispatch: attempting to run unimplemented operator.*op='([\w.]+)'", str(error)):
        return f"{found[1]} has no rule for {found[2]} on tensors without values, so its result is unknown"
    if isinstance(error, AttributeError) and "'FakeTensor' object" in str(error):
        return f"the code takes a tensor for something else ({error}): ask isinstance(x, torch.Tensor), not type(x)"
    if "DTensor" in str(error) or "_local_tensor" in str(error):
        return "a DTensor, as of parallelize_module, cannot be predicted: leave it out, for one rank"
    if found := re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error)):
        return f"{found[1]} cannot be predicted: let the script call plain operations in its place"
    if "shape_env must not be None" in str(error):
        return "the step makes sizes that depend on values, as nested tensors have them: predict it with padded ones"
    if any(words in str(error) for words in _ASKS_CUDA):
        return "the step calls torch.cuda itself, and there is no GPU here: leave out what has no answer without one"
    return None
