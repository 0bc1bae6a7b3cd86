"""What holds a step back, as it is told: a list of findings, the largest first."""

import html
from dataclasses import dataclass

from effgpu import units
from effgpu.attaching.sites import Site
from effgpu.predicting.prediction import FITS, Largest, Prediction

# A share of the step. Predicted ratios of times are off by 4 % where all else is known (SPREAD_OF_RATIOS in
# predicting/time.py), so a smaller ceiling cannot be told from none. And it would not pay for a change.
THRESHOLD = 0.05
LOADING, COPYING, OPTIMIZER, VALIDATION = "data loading", "copies to the GPU", "optimizer", "validation"
WAITS, LAUNCHING, PRECISION, PADDING, COMPILING = "hidden waits", "launching", "precision", "padding", "recompiling"
TF32 = "TF32"
_ADVICE = {  # what to change, and the lesson about it
    LOADING: ("DataLoader(..., num_workers=2, persistent_workers=True)", "02"),
    COPYING: ("DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)", "03"),
    OPTIMIZER: ("AdamW(..., fused=True), or fewer updates: accumulate gradients", "09"),
    VALIDATION: ("with torch.no_grad(): around the validation, and validate less often", "11"),
    WAITS: ("keep the value on the GPU, loss.detach(), and read it every 100 steps", "12"),
    LAUNCHING: ("a larger batch, or torch.compile(model)", "05 and 14"),
    PRECISION: ("with torch.autocast(...): around the forward pass and the loss; fp16 needs a GradScaler", "08"),
    TF32: ('torch.set_float32_matmul_precision("high"), where autocast is not wanted', "08"),
    PADDING: ("pack the texts, or sort them by length and pad each batch to its longest", "04"),
    COMPILING: ("torch.compile(model, dynamic=True), or pad to a few lengths", "14"),
}
_NOTHING = f"nothing above {THRESHOLD:.0%} of the step"


@dataclass(frozen=True)
class Finding:
    """What one change would save at most, in seconds per step: `seconds`, and the interval or range `low` to `high`.

    `measured` says that the interval is one of measured turns (99 %); else all is predicted. What is measured and what
    is predicted on one line, such as a loader's seconds beside a GPU's, counts as predicted. `lines` are the lines of
    the reader's code that it is about. `lesson` is the number of the lesson. `note` says what was seen.
    """

    name: str
    seconds: float
    low: float
    high: float
    measured: bool = False
    lines: tuple[Site, ...] = ()
    note: str = ""

    @property
    def lesson(self) -> str:
        """The number of the lesson about it."""
        return _ADVICE[self.name][1]

    @property
    def advice(self) -> str:
        """The lines to change."""
        return _ADVICE[self.name][0]

    def cells(self, step: float) -> list[str]:
        """What it saves, with its interval or range, and the share of a step of so many seconds."""
        seconds, low, high = map(units.format_seconds, (self.seconds, self.low, self.high))
        return [f"{seconds} [{low}, {high}]", f"{self.seconds / step:.0%}"]

    def tell(self, step: float) -> str:
        """The same in words."""
        return "at most {}, {} of the step".format(*self.cells(step))


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What holds a step back on a GPU. Shows itself as a table.

    `seconds` is the time of the step, `low` to `high` its interval or range. `examined` are all ceilings, the largest
    first; `findings` those of 5 % of the step and more. They do not add up: `together` is what the two largest save
    when both are changed. `memory` is the prediction of the step's memory, `peak` who owns it: (line, owner, bytes).
    `batches` is how many times the loader's batch fits into the GPU; None where that is not known. `notes`
    say what was not looked at, and what was assumed.
    """

    gpu: str
    seconds: float
    low: float
    high: float
    measured: bool
    examined: tuple[Finding, ...]
    together: Finding | None = None
    memory: Prediction | None = None
    peak: tuple[tuple[Site | None, str, int], ...] = ()
    batches: Largest | None = None
    notes: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What saves 5 % of the step or more, and surely more than nothing; the most first."""
        return tuple(one for one in self.examined if one.seconds >= THRESHOLD * self.seconds and one.low > 0)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each finding."""
        headings = ["what", "saves at most, per step", "of the step", "lesson", "what to change"]
        rows = [[one.name, *one.cells(self.seconds), one.lesson, one.advice] for one in self.findings]
        if self.measured:  # and not all of it may be
            headings.insert(3, "how known")
            for row, one in zip(rows, self.findings):
                row.insert(3, "measured" if one.measured else "predicted")
        return headings, rows

    def _heading(self) -> str:
        seconds, low, high = map(units.format_seconds, (self.seconds, self.low, self.high))
        how = "measured" if self.measured else "predicted"
        return f"{self.gpu}: {seconds} per step [{low}, {high}] ({how})"

    def _told(self) -> list[str]:
        """What stands below the table."""
        told = [f"{one.name}: {one.note}" for one in self.findings if one.note]
        told += [f"{one.name}: {line}" for one in self.findings for line in one.lines[:3]]
        if self.together:
            told.append(f"{self.together.name} together: {self.together.tell(self.seconds)}")
        rest = [one for one in self.examined if one not in self.findings]
        large = [one for one in rest if one.seconds >= THRESHOLD * self.seconds]
        told += [f"{one.name}, perhaps: {one.tell(self.seconds)}" for one in large]
        small = ", ".join(one.name for one in rest if one not in large)
        told += [f"below {THRESHOLD:.0%} each: {small}"] if small else []
        return told + self._tell_memory() + list(self.notes)

    def _tell_memory(self) -> list[str]:
        if self.memory is None:
            return []
        memory, gpu = self.memory, self.memory.gpus[0]
        told = [f"memory, predicted: {memory.total()} of {units.format_bytes(gpu.memory)}: {memory.verdict()}"]
        if self.batches is not None:
            fits, may_fit = self.batches.fits, self.batches.may_fit
            told[0] += f"; a batch {fits} times as large fits, one {may_fit} times as large may fit"
        if memory.verdict() == FITS:
            return told
        told.append("  {} – {} of it are CUDA's own".format(*map(units.format_bytes, gpu.context)))
        for site, owner, size in self.peak[:3]:
            told.append(f"  {units.format_bytes(size)} {owner}" + (f", {site}" if site else ""))
        kept = units.format_bytes(memory.owners["activations"])
        state = units.format_bytes(memory.owners["gradients"] + memory.owners["optimizer state"])
        freed = f"{kept} by checkpointing (lesson 07) or accumulating (06), {state} by LoRA (23)"
        return [*told, f"  to free at most: {freed}"]

    def __repr__(self) -> str:
        table = units.align([self.table()[0], *self.table()[1]]) if self.findings else [_NOTHING]
        return "\n".join([self._heading(), "", *table, "", *self._told()])

    def _repr_html_(self) -> str:
        table = f"<table>{units.html_table(*self.table())}</table>" if self.findings else html.escape(_NOTHING)
        told = "<br>".join(map(html.escape, self._told()))
        return f"<p>{html.escape(self._heading())}</p>{table}<p><small>{told}</small></p>"
