"""What a bench gives: a comparison of commands, with their losses, and what to know about how they ran."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from effgpu import units
from effgpu.attaching.ticking import BACKWARD, TICKS
from effgpu.comparison import CONTROL, Column, Comparison
from effgpu.measuring.intervals import BUILDS
from effgpu.measuring.measurement import Measurement
from effgpu.storing import read_fields


@dataclass(frozen=True, repr=False)
class Bench(Comparison):
    """A comparison of commands. `commands` says by label what ran and `logs` where its output is.

    `losses` has the losses of the first fifty steps and of every tenth after them, by label and step number. `steps` is
    how many steps were timed, `sources` what ended them: `tick`, or the optimizer's name. `notes` say what went wrong,
    or what to know about the numbers. `alone` is true where the commands did not run side by side. `crashed` names the
    commands that failed, also those that had been measured before.
    """

    min_effect: float = 0.02  # two processes of one script differ by up to 1 %, as their memory is laid out differently
    commands: dict[str, str] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alone: bool = False
    interrupted: bool = False
    sources: dict[str, str] = field(default_factory=dict)
    crashed: tuple[str, ...] = ()

    @property
    def memory_name(self) -> str:
        """What the memory is: of a GPU's allocator, or the resident memory of the process."""
        return super().memory_name if self.device.kind == "cuda" else "peak resident memory"

    def loss_difference(self, label: str) -> tuple[float, int] | None:
        """The largest difference from the baseline's loss at the same step, and that step; NaN is the largest."""
        ours, theirs = self.losses.get(label, {}), self.losses.get(self.baseline.label, {})
        gaps = {step: abs(ours[step] - theirs[step]) for step in sorted(ours.keys() & theirs.keys())}
        worst = max(gaps, key=lambda step: math.inf if math.isnan(gaps[step]) else gaps[step], default=None)
        return None if worst is None else (gaps[worst], worst)

    def _columns(self) -> list[Column]:
        """Those of a comparison, with the losses of the same steps, and the steps timed."""
        return [
            *super()._columns(),
            *self._loss_columns(),
            ("steps timed", lambda m: str(self.steps.get(m.label, 0))),
        ]

    def _loss_columns(self) -> Iterator[Column]:
        given = [set(self.losses.get(m.label, {})) for m in self if not m.failed]
        common = set.intersection(*given or [set()])
        for step in sorted({min(common), max(common)} if common else ()):
            yield f"loss at step {step}", partial(self._tell_loss, step=step)
        yield "largest difference of loss", self._tell_difference

    def _tell_loss(self, m: Measurement, step: int) -> str:
        loss = self.losses.get(m.label, {}).get(step)
        return units.NOT_MEASURED if loss is None else f"{loss:.4g}"

    def _tell_difference(self, m: Measurement) -> str:
        gap = self.loss_difference(m.label) if m is not self.baseline else None
        return f"{gap[0]:.4g}" + f" (step {gap[1]})" * bool(gap[0]) if gap else units.NOT_MEASURED

    def caption(self) -> str:
        """That of a comparison, then what to know about the commands."""
        alone = ["Nothing to compare with: give a second command, or --control."] if len(self) == 1 else []
        return "\n".join([super().caption(), *alone, *self.notes])

    def how_timed(self) -> str:
        """How the commands ran, in one sentence."""
        if self.alone:
            return f"One process at a time, {BUILDS} times each: the commands did not run side by side."
        return f"One process per command, in turns.{self._tell_sources()}"

    def _tell_sources(self) -> str:
        """What a step is, where the scripts do not say it with `tick`."""
        seen = {source for source in self.sources.values() if source != TICKS}
        if not seen:
            return ""
        ends = " or ".join(sorted(seen))
        what = f"from one of the {ends} to the next" if seen == {BACKWARD} else f"between two steps of {ends}"
        return f" A step is what lies {what}; its loss is what backward was called on."

    def markdown(self) -> str:
        """The table and its caption in Markdown, for a pull request."""
        headings, rows = self.table()
        lines = [headings, ["---"] * len(headings), *rows]
        table = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        labels = [f"* {label}: `{command}`" for label, command in self.commands.items()]
        caption, *notes = self.caption().split("\n")
        return "\n".join([*table, "", *labels, "", caption, *(["", "```", *notes, "```"] if notes else [])])

    def judge(self, slower: float | None = None, more_memory: float | None = None) -> tuple[list[str], list[str]]:
        """In words: what exceeds the shares that are allowed, and where the interval does not tell.

        A command is within its time if the whole interval is, and exceeds it if the whole interval does. Peak memory
        has no interval, and is open where it is not known. The control is the baseline, whatever it shows.
        """
        exceeded, unclear = [], []
        for m in (each for each in self.measurements[1:] if each.label != CONTROL):
            time_ratio, memory_ratio = self.time_ratio(m.label), self.ratio(m.label, "memory")
            if slower is not None and (time_ratio is None or time_ratio.high > 1 + slower):
                limit = f"more than the {100 * slower:g} % allowed"
                if time_ratio and time_ratio.low > 1 + slower:
                    exceeded.append(f"{m.label} is {self.tell(m.label)}, {limit}")
                else:
                    unclear.append(f"it is open whether {m.label} takes {limit}: {self.tell(m.label)}")
            if more_memory is not None and (memory_ratio is None or memory_ratio > 1 + more_memory):
                limit, what = f"more than the {100 * more_memory:g} % allowed", self.memory_name
                if memory_ratio:
                    exceeded.append(f"the {what} of {m.label} is {self.tell(m.label, 'memory')}, {limit}")
                else:
                    unclear.append(f"it is open whether {m.label} needs {limit}: the {what} is not known of both")
        return exceeded, unclear

    def verdicts(self) -> dict[str, dict]:
        """Of each command but the first: the verdict on time, and the ratio of times with its interval, if known."""
        found = {}
        for m in self.measurements[1:]:
            ratio = self.time_ratio(m.label)
            found[m.label] = {"verdict": self.verdict(m.label), **(ratio.to_dict() if ratio else {})}
        return found

    def to_dict(self) -> dict:
        """The comparison in JSON's types, with what only a bench has under "bench"."""
        losses = {
            label: [[step, loss if math.isfinite(loss) else None] for step, loss in found.items()]
            for label, found in self.losses.items()
        }
        own = {"commands": self.commands, "losses": losses, "steps": self.steps, "logs": self.logs}
        own |= {"notes": list(self.notes), "alone": self.alone, "interrupted": self.interrupted}
        own |= {"sources": self.sources, "crashed": list(self.crashed), "verdicts": self.verdicts()}
        return super().to_dict() | {"kind": "bench", "bench": own}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "Bench":
        """A bench from what `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        own = dict(stored["bench"])
        losses = {
            label: {int(step): math.nan if loss is None else float(loss) for step, loss in found}
            for label, found in own.pop("losses").items()
        }
        return replace(super().from_dict(stored), **read_fields(cls, own), losses=losses)
