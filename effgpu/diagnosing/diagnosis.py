"""What holds a step back, as it is shown: a list of findings, the largest first."""

import html
from collections.abc import Iterable
from dataclasses import dataclass

from effgpu import units
from effgpu.attaching.sites import Site
from effgpu.predicting.predict import Largest
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS, Prediction
from effgpu.predicting.timeline import Timeline

# A share of the step. Predicted ratios of times are off by 4 % where all else is known (LEAST_OF_RATIOS in
# predicting/spreads.py), so a smaller ceiling cannot be told from none. And it would not pay for a change.
THRESHOLD = 0.05
NO_LOADER = "no DataLoader: what the script takes to make its batches was not looked at"
ONLY_CALLS = "no DataLoader: of what the script takes to make its batches, only what takes long was looked at"
_LISTS = ("findings", "hidden", "perhaps", "examined")


@dataclass(frozen=True)
class Finding:
    """What one change would save at most, in seconds per step: `seconds`, and the interval or range `low` to `high`.

    `measured` says that the interval is one of measured turns, all of which hold in 99 % of all diagnoses; else all is
    predicted. What is measured and what is predicted on one line, such as a loader's seconds beside a GPU's, counts as
    predicted. `lines` are the lines of the reader's code that it is about. `advice` are the lines to change, `lesson`
    is the number of the lesson about it, `note` says what was seen.
    """

    name: str
    seconds: float
    low: float
    high: float
    measured: bool = False
    lines: tuple[Site, ...] = ()
    note: str = ""
    lesson: str = ""
    advice: str = ""

    def in_words(self, step: float, *, longer: bool = False) -> str:
        """What it could save, with its interval or range, and the share of a step of so many seconds, or `longer`."""
        seconds, low, high = map(units.format_seconds, (self.seconds, self.low, self.high))
        return f"could save {seconds} [{low}, {high}], {'at most ' * longer}{self.seconds / step:.0%} of the step"

    @property
    def what_to_change(self) -> str:
        """The advice, with its lesson."""
        return f"{self.advice} (lesson{'s' * (' and ' in self.lesson)} {self.lesson})"

    def to_dict(self, step: float) -> dict:
        """Seconds, the share of a step of so many seconds, and what to change."""
        lines = [{"file": line.file, "line": line.line, "inside": line.inside} for line in self.lines]
        names = ("name", "seconds", "low", "high", "measured", "note", "lesson", "advice")
        return {name: getattr(self, name) for name in names} | {"share": self.seconds / step, "lines": lines}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What holds a step back on a GPU. Shows itself as a numbered list.

    `seconds` is the time of the step, `low` to `high` its interval or range. `examined` are all ceilings, the largest
    first; `findings` those of 5 % of the step and more. They do not add up: `together` is what the two largest save
    when both are changed. `hidden` are pairs that save little alone, as each hides the other, and much together: a
    pair is shown in place of its two.
    `memory` is the prediction of the step's memory. `batches` is how many times the loader's batch fits into the GPU;
    None where that is not known. `notes` say what was not looked at, and what was assumed. `warnings` tell what no
    finding holds: memory that grows from step to step or spills to the host, fp16 without a GradScaler, a clock that is
    held down. `timeline` is the predicted step: `.save(path)` writes a trace for Perfetto.
    """

    gpu: str
    seconds: float
    low: float
    high: float
    measured: bool
    examined: tuple[Finding, ...]
    together: Finding | None = None
    hidden: tuple[Finding, ...] = ()
    memory: Prediction | None = None
    batches: Largest | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    timeline: Timeline | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What saves 5 % of the step or more, and surely more than nothing; the most first."""
        return tuple(one for one in self._large if one.low > 0)

    @property
    def perhaps(self) -> tuple[Finding, ...]:
        """What may save 5 % of the step or more, or nothing."""
        return tuple(one for one in self._large if one.low <= 0)

    @property
    def _large(self) -> tuple[Finding, ...]:
        return tuple(one for one in self.examined if one.seconds >= THRESHOLD * self.seconds)

    def to_dict(self) -> dict:
        """All of it for a program to read, in seconds and bytes: docs/doctor.md says what each name means."""
        batches = self.batches and {"fits": self.batches.fits, "may_fit": self.batches.may_fit}
        several = {name: [one.to_dict(self.seconds) for one in getattr(self, name)] for name in _LISTS}
        fields = {name: getattr(self, name) for name in ("gpu", "measured", "seconds", "low", "high")} | several
        fields |= {"seconds": None, "high": None} if self._is_longer else {}
        fields |= {"together": self.together and self.together.to_dict(self.seconds), "batches": batches}
        return fields | {
            "memory": self.memory and self.memory.to_dict(),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }

    def _tell(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """Each finding in one line, with what was seen, the reader's lines and what to change: pairs of label, text."""
        told = []
        for one in sorted((*self._alone(self.findings), *self.hidden), key=lambda one: -one.seconds):
            how = f" ({'measured' if one.measured else 'predicted'})" * self.measured  # and not all of it may be
            details = [("seen", one.note)] if one.note else []
            details += [("line", str(line)) for line in one.lines[:3]]
            details.append(("change", one.what_to_change))
            told.append((f"{one.name}: {self._in_words(one)}{how}", details))
        return told

    @property
    def _is_longer(self) -> bool:
        """Whether the predicted step, or another one, takes longer, nobody knows how much."""
        return not self.measured and self.memory is not None and bool(self.memory.untimed(self.memory.gpus[0]))

    def _in_words(self, one: Finding) -> str:
        return one.in_words(self.seconds, longer=self._is_longer)

    def _alone(self, found: Iterable[Finding]) -> list[Finding]:
        """Those that no pair tells of."""
        told = {name for pair in self.hidden for name in pair.name.split(" and ")}
        return [one for one in found if one.name not in told]

    def _heading(self) -> list[str]:
        """The time of a step; before it, that the step does not fit where it was not seen to run."""
        seconds, low, high = map(units.format_seconds, (self.seconds, self.low, self.high))
        how = "measured" if self.measured else "predicted"
        time = f"at least {low} per step" if self._is_longer else f"{seconds} per step [{low}, {high}]"
        time = f"{self.gpu}: {time} ({how})"
        if self.measured or self.memory is None or self.memory.verdict() != DOES_NOT_FIT:
            return [time]
        gpu = self.memory.gpus[0]
        needs = f"needs {self.memory.tell_total(gpu)} of {units.format_bytes(gpu.memory)} (predicted)"
        return [f"{self.gpu}: does not fit: {needs}", f"{time}, if it had the room"]

    def _nothing(self) -> str:
        return f"nothing {'surely ' if self.perhaps else ''}above {THRESHOLD:.0%} of the step"

    def _below(self) -> list[str]:
        """What stands below the findings."""
        lines = []
        if self.together:
            lines.append(f"{self.together.name}, together: {self._in_words(self.together)}")
        for one in self._alone(self.perhaps):
            lines.append(f"{one.name}, perhaps: {self._in_words(one)}; to try: {one.what_to_change}")
        if small := ", ".join(one.name for one in self._alone(self.examined) if one not in self._large):
            lines.append(f"looked at, and below {THRESHOLD:.0%} each: {small}")
        return lines + self._describe_memory() + units.join_places(self.notes)

    def _describe_memory(self) -> list[str]:
        if self.memory is None:
            return []
        memory, gpu = self.memory, self.memory.gpus[0]
        lines = [f"memory, predicted: {memory.tell_total(gpu)} of {units.format_bytes(gpu.memory)}: {memory.verdict()}"]
        if self.batches is not None:
            fits, may_fit = self.batches.fits, self.batches.may_fit
            lines[0] += f"; a batch {fits} times as large fits, too, and {may_fit} times as large may"
        if memory.verdict() == FITS:
            return lines
        lines.append("  {} – {} of it are CUDA's own".format(*map(units.format_bytes, gpu.context)))
        for site, owner, size in memory.peak[:3]:
            lines.append(f"  {units.format_bytes(size)} {owner}" + (f", {site}" if site else ""))
        kept = units.format_bytes(memory.owners["activations"])
        state = units.format_bytes(memory.owners["gradients"] + memory.owners["optimizer state"])
        freed = f"{kept} by checkpointing (lesson 07) or accumulating (06), {state} by LoRA (23)"
        return [*lines, f"  to free at most: {freed}"]

    def __repr__(self) -> str:
        lines = [*self._heading(), *self.warnings, ""]
        for number, (finding, details) in enumerate(self._tell(), start=1):
            lines += [f"{number}. {finding}", *(f"   {label:6}  {text}" for label, text in details)]
        lines += [] if self.findings or self.hidden else [self._nothing()]
        return "\n".join([*lines, "", *self._below()])

    def _repr_html_(self) -> str:
        def item(finding: str, details: list[tuple[str, str]]) -> str:
            return "<br>".join([html.escape(finding), *(html.escape(f"{label}: {text}") for label, text in details)])

        above = "<br>".join(map(html.escape, [*self._heading(), *self.warnings]))
        items = "".join(f"<li>{item(*each)}</li>" for each in self._tell())
        found = f"<ol>{items}</ol>" if items else html.escape(self._nothing())
        below = "<br>".join(map(html.escape, self._below()))
        return f"<p>{above}</p>{found}<p><small>{below}</small></p>"
