"""What commands that train with the same seeds give: speed and loss, each with an interval over seeds."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial

from effgpu import units
from effgpu.benching.losses import Change, find_change
from effgpu.benching.result import Bench
from effgpu.comparison import Column, Comparison
from effgpu.measuring.measurement import Measurement
from effgpu.storing import read_fields
from effgpu.verdicts import INCONCLUSIVE, SAME, Ratio


@dataclass(frozen=True)
class Run:
    """One training with one seed. Seconds are from the start of its command, None where nothing is known.

    `seconds_per_step` leaves out the first steps. `loss` and `metric` are those at the end. `seconds_to_loss` is when
    the loss that was asked for was reached. `curve` has (step, seconds, loss) for equal parts of the training, `digits`
    tells the losses of two runs apart. `failed` says why there is no result.
    """

    seed: int
    steps: int = 0
    seconds_per_step: float | None = None
    loss: float | None = None
    metric: float | None = None
    seconds_to_loss: float | None = None
    curve: tuple[tuple[int, float, float], ...] = ()
    digits: str | None = None
    peak: int | None = None
    failed: str | None = None


@dataclass(frozen=True)
class Curves:
    """The losses of trainings, to be drawn: by label, those of each seed as (step, seconds, loss)."""

    name: str
    device: str
    by_label: dict[str, list[tuple[tuple[int, float, float], ...]]]


@dataclass(frozen=True, repr=False)
class SeedBench(Bench):
    """A comparison of commands over seeds. `runs` has, by label, the training with each seed.

    `until` is the step at which each training was ended, None where the scripts end by themselves; `until_loss` the
    loss whose time is reported.
    """

    runs: dict[str, tuple[Run, ...]] = field(default_factory=dict)
    until: int | None = None
    until_loss: float | None = None
    together = "all of a column"

    def kept(self, label: str) -> list[Run]:
        """The runs of the seeds with which no command failed that has any result."""
        failed = {run.seed for m in self if not m.failed for run in self.runs[m.label] if run.failed}
        finished = [{run.seed for run in self.runs[m.label]} for m in self if not m.failed]
        common = set.intersection(*finished) - failed if finished else set()
        return [run for run in self.runs[label] if run.seed in common]

    def change(self, label: str, what: str) -> Change | None:
        """How "loss" or "metric" at the end differs from the baseline's; None where one is not known or not finite."""
        ours, theirs = ([getattr(run, what) for run in self.kept(each)] for each in (label, self.baseline.label))
        if len(ours) != len(theirs) or not all(
            value is not None and math.isfinite(value) for value in [*ours, *theirs]
        ):
            return None
        return find_change(ours, theirs, self.confidence, ratios=what == "loss")

    def end(self, label: str, what: str) -> float | None:
        """The mean over seeds of "loss" or "metric" at the end."""
        values = [getattr(run, what) for run in self.kept(label)]
        return statistics.fmean(values) if values and None not in values else None

    def time_to_loss(self, label: str) -> Ratio | None:
        """The seconds to the loss that was asked for over the baseline's; None where a seed did not reach it."""
        ours, theirs = ([run.seconds_to_loss for run in self.kept(each)] for each in (label, self.baseline.label))
        if None in ours or None in theirs:
            return None
        return Ratio.from_logs([math.log(a / b) for a, b in zip(ours, theirs)], self.confidence, builds=2)

    @property
    def seeds_change_nothing(self) -> list[str]:
        """The labels of commands whose losses are the same with every seed, digit for digit."""
        digits = {label: [run.digits for run in runs if run.digits] for label, runs in self.runs.items()}
        return [label for label, found in digits.items() if len(found) > 1 and len(set(found)) == 1]

    def tell_end(self, label: str, what: str) -> str:
        """A loss or a metric at the end against the baseline's, in words."""
        if label == self.baseline.label or self[label].failed:
            return self.verdict(label)
        ours, theirs = self.kept(label), self.kept(self.baseline.label)
        values = [getattr(run, what) for run in [*ours, *theirs]]
        if not values or None in values:
            return units.NOT_MEASURED
        for who, runs in ((label, ours), ("the baseline", theirs)):
            if lost := [run for run in runs if not math.isfinite(getattr(run, what))]:
                whose = "" if who == label else f" {who}"
                return f"not finite in {len(lost)} of {len(runs)} seeds{' of' + whose if whose else ''}"
        if self.seeds_change_nothing:
            return "the seeds change nothing"
        if what == "loss" and ours[0].digits and [run.digits for run in ours] == [run.digits for run in theirs]:
            return f"{SAME}, digit for digit"
        change = self.change(label, what)
        return str(change) if change else INCONCLUSIVE

    def _columns(self) -> list[Column]:
        """Those of a comparison; behind its speed the loss and the metric, each against the baseline's."""
        return [*Comparison._columns(self, *self._end_columns()), ("seeds", self._tell_seeds)]

    def _end_columns(self) -> list[Column]:
        columns = []
        for what in ("loss", "metric"):
            if any(self.end(m.label, what) is not None for m in self):
                columns.append((f"{what} at the end", partial(self._show_end, what=what)))
                columns.append((f"{what} against the baseline", lambda m, what=what: self.tell_end(m.label, what)))
        if self.until_loss is not None:
            columns.append((f"time to loss {self.until_loss:g}", self._tell_reached))
            columns.append(("against the baseline", self._tell_time_to_loss))
        return columns

    def _show_end(self, m: Measurement, what: str) -> str:
        end = self.end(m.label, what)
        return units.NOT_MEASURED if end is None else f"{end:.4g}"

    def _tell_time_to_loss(self, m: Measurement) -> str:
        ratio = self.time_to_loss(m.label) if m is not self.baseline else None
        return ratio.tell(self.min_effect) if ratio else units.NOT_MEASURED

    def _tell_seeds(self, m: Measurement) -> str:
        runs = self.runs[m.label]
        return f"failed with {len(runs)} of {len(runs)}" if m.failed else str(len(self.kept(m.label)))

    def _tell_reached(self, m: Measurement) -> str:
        if m.failed:
            return m.failed
        found = [run.seconds_to_loss for run in self.kept(m.label)]
        if lost := found.count(None):
            return f"not reached with {lost} of {len(found)} seeds"
        return units.format_seconds(statistics.fmean(found) if found else None)

    def how_timed(self) -> str:
        """How the commands ran, in one sentence."""
        steps = f"to step {self.until}" if self.until else "to their ends"
        return (
            f"One training at a time, {steps}; a pair with the same seed is one observation (Student's t)."
            f" Loss at the end: the mean of the last tenth of the steps.{self._tell_sources()}"
        )

    def verdicts(self) -> dict[str, dict]:
        """Those of a bench on time, and for "loss", "metric" and "time_to_loss" the same where they are known."""
        found = super().verdicts()
        for label, one in found.items():
            for what in ("loss", "metric"):
                if change := self.change(label, what):
                    one[what] = {"verdict": change.verdict, **asdict(change), "seeds": change.seeds}
            if ratio := self.time_to_loss(label):
                one["time_to_loss"] = {"verdict": ratio.verdict(self.min_effect), **ratio.to_dict()}
        return found

    @property
    def curves(self) -> Curves:
        """The losses of all runs that did not fail, which `plot` draws against steps and against time."""
        by_label = {m.label: [run.curve for run in self.runs[m.label] if run.curve] for m in self}
        return Curves(self.name, self.device.label, {label: curves for label, curves in by_label.items() if curves})

    def to_dict(self) -> dict:
        """The bench in JSON's types, with the runs of each seed."""
        stored = super().to_dict()
        rows = {label: [_finite(asdict(run)) for run in runs] for label, runs in self.runs.items()}
        seeds = {"runs": rows, "until": self.until, "until_loss": self.until_loss}
        return stored | {"kind": "seeds", "bench": stored["bench"] | seeds}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "SeedBench":
        """A bench from what `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        runs = {
            label: tuple(Run(**read_fields(Run, _with_nan(row))) for row in rows)
            for label, rows in stored["bench"]["runs"].items()
        }
        bench = Bench.from_dict(stored)
        own = {name: getattr(bench, name) for name in Bench.__dataclass_fields__}
        return cls(**own, runs=runs, until=stored["bench"]["until"], until_loss=stored["bench"]["until_loss"])


_NOT_FINITE = "not finite"  # JSON has no NaN


def _finite(value: object) -> object:
    return _each(value, lambda x: _NOT_FINITE if isinstance(x, float) and not math.isfinite(x) else x)


def _with_nan(value: object) -> object:
    return _each(value, lambda x: math.nan if isinstance(x, str) and x == _NOT_FINITE else x)


def _each(value: object, change: Callable[[object], object]) -> object:
    if isinstance(value, Mapping):
        return {key: _each(one, change) for key, one in value.items()}
    return [_each(one, change) for one in value] if isinstance(value, list | tuple) else change(value)
