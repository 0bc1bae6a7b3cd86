"""Trains each command with each seed, one after the other, and follows every step."""

import hashlib
import json
import math
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from effgpu.attaching.commands import Command
from effgpu.benching.checks import SEED, with_seed
from effgpu.benching.losses import at_the_end, reached
from effgpu.benching.processes import Ended, Fault, Process, end_all, keep, read_device
from effgpu.benching.progress import Progress
from effgpu.benching.seeds import Run, SeedBench
from effgpu.benching.side_by_side import name_logs
from effgpu.measuring.intervals import divide_confidence
from effgpu.measuring.measurement import Measurement
from effgpu.units import format_seconds
from effgpu.verdicts import INCONCLUSIVE

_HOPELESS = 2  # seeds with which a command fails before it is given up
_POINTS = 200  # of a stored curve


@dataclass
class _Followed:
    """What the reports of a training say so far, by step; `seconds` are from the start of its command."""

    losses: dict[int, float] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    source: str | None = None
    steps: int = 0
    peak: int | None = None

    def note(self, report: dict, began: float) -> None:
        if report["source"] != self.source:  # the script calls `tick`, and counts its steps itself
            self.__init__(source=report["source"])
        self.losses |= {step: float(loss) for step, loss in report["losses"]}
        self.metrics |= {step: float(metric) for step, metric in report["metrics"]}
        stamps = report.get("stamps", [])
        self.seconds |= {report["step"] - back: stamp - began for back, stamp in enumerate(reversed(stamps))}
        self.steps, self.peak = report["step"], max(self.peak or 0, report["peak"] or 0) or None

    def finish(self, seed: int, until: int | None, skip: int, target: float | None) -> Run:
        """What there is to say of the training, up to step `until`."""
        steps = min(self.steps, until or self.steps)
        losses, metrics, seconds = (
            {step: value for step, value in values.items() if step <= steps}
            for values in (self.losses, self.metrics, self.seconds)
        )
        timed = sorted(step for step in seconds if step > skip)
        pace = None
        if len(timed) > 1:
            pace = (seconds[timed[-1]] - seconds[timed[0]]) / (timed[-1] - timed[0])
        digits = None
        if any(map(math.isfinite, losses.values())):  # NaN looks the same with every seed
            digits = hashlib.sha256(json.dumps(sorted(losses.items())).encode()).hexdigest()[:16]
        return Run(
            seed,
            steps,
            pace,
            at_the_end(losses, steps),
            at_the_end(metrics, steps),
            None if target is None else reached(losses, seconds, target),
            _thin(losses, seconds),
            digits,
            self.peak,
        )


def _thin(losses: dict[int, float], seconds: dict[int, float]) -> tuple[tuple[int, float, float], ...]:
    """The means of equal parts of the training."""
    steps = sorted(losses.keys() & seconds.keys())
    size = max(1, math.ceil(len(steps) / _POINTS))
    parts = [steps[at : at + size] for at in range(0, len(steps), size)]
    return tuple((part[-1], seconds[part[-1]], statistics.fmean(losses[step] for step in part)) for part in parts)


@dataclass
class OverSeeds:
    """The trainings of a bench. `until` is the step that ends each, None for the script's own end."""

    commands: dict[str, Command]
    folder: Path
    seeds: int
    until: int | None
    until_loss: float | None
    skip: int
    timeout: float
    interrupted: bool = False
    progress: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)
    took: list[float] = field(default_factory=list)  # seconds of each training
    process: Process | None = None

    def __post_init__(self):
        self.logs = name_logs(self.folder, self.commands)
        self.runs: dict[str, list[Run]] = {label: [] for label in self.commands}
        self.sources: dict[str, str] = {}
        self.kinds: dict[str, str] = {}
        self.hello: dict = {}

    def end(self) -> None:
        """End the process that trains."""
        end_all([self.process] if self.process else [])
        self.process = None
        self.progress.clear()

    def measure(self) -> None:
        """Train each command with each seed, in a random order; two seeds that give the same losses are enough."""
        steps = f"of {self.until} steps" if self.until else "to the scripts' ends"
        total = self.seeds * len(self.commands)
        self.progress.announce(f"{total} trainings {steps}, one after the other; the first shows how long they take")
        for seed in range(self.seeds):
            order = keep(self.commands, self._dead())
            random.SystemRandom().shuffle(order)
            for label in order:
                self.runs[label].append(self._train(label, seed))
                if len(self.took) == 1:
                    one, others = format_seconds(self.took[0]), format_seconds(self.took[0] * (total - 1))
                    self.progress.announce(f"the first took {one}: about {others} for the others")
            if seed == 1 and self._result("bench", "items").seeds_change_nothing:
                break

    def has_results(self) -> bool:
        """Whether there is anything to show."""
        return any(self.runs.values())

    def finish(self, name: str, unit: str) -> SeedBench:
        """What was measured; where it was interrupted, the seeds with which all commands were trained."""
        result = self._result(name, unit)
        notes = [*self.notes]
        for label in result.seeds_change_nothing:
            notes.append(f"{label}: seeds change nothing, all losses are the same digit for digit: does it use {SEED}?")
        for m in result.measurements[1:]:
            for what in ("loss", "metric"):
                change = result.change(m.label, what)
                if change and change.verdict == INCONCLUSIVE and not result.seeds_change_nothing:
                    count = "more than 1,000 seeds" if change.seeds is None else f"about {change.seeds} seeds"
                    notes.append(f"{m.label}: to see 1 % of its {what} takes {count} (in 9 of 10 cases).")
        if self.interrupted:
            notes.append("Interrupted: this is what had been measured, of the seeds with which all had trained.")
        return replace(result, notes=tuple(notes), interrupted=self.interrupted)

    def _result(self, name: str, unit: str) -> SeedBench:
        measured = {label: self._measurement(label, unit) for label in self.commands}
        return SeedBench(
            name,
            tuple(measured.values()),
            commands={label: str(command) for label, command in self.commands.items()},
            logs={label: str(path) for label, path in self.logs.items()},
            steps={label: sum(run.steps for run in runs) for label, runs in self.runs.items()},
            sources=self.sources,
            confidence=divide_confidence(len(self.commands) - 1),
            runs={label: tuple(runs) for label, runs in self.runs.items()},
            until=self.until,
            until_loss=self.until_loss,
        )

    def _measurement(self, label: str, unit: str) -> Measurement:
        device, dead = read_device(self.hello), self._dead()
        if label in dead:
            return Measurement(label, (), device, failed=self.runs[label][-1].failed)
        alive = [runs for other, runs in self.runs.items() if other not in dead]
        good = [{run.seed for run in runs if not run.failed and run.seconds_per_step} for runs in alive]
        kept = [run for run in self.runs[label] if run.seed in set.intersection(*good)]
        peaks = [run.peak for run in kept if run.peak] if len(set(self.kinds.values())) == 1 else []
        turns = tuple((run.seconds_per_step,) * 2 for run in kept)
        peak = max(peaks, default=None)
        return Measurement(label, turns, device, None, unit, peak, builds=max(2, len(kept)))

    def _dead(self) -> list[str]:
        """Commands that fail with every seed."""
        return [
            label
            for label, runs in self.runs.items()
            if len(runs) >= min(_HOPELESS, self.seeds) and all(run.failed for run in runs)
        ]

    def _train(self, label: str, seed: int) -> Run:
        self.progress.show(f"{label}, seed {seed}: waiting for its first step")
        followed, began = _Followed(), time.monotonic()
        command = with_seed(self.commands[label], seed)
        self.process = process = Process(command, self.logs[label], self.timeout, self.progress.refresh)
        try:
            process.start()
            self.kinds[label] = process.hello["kind"]
            self.hello = self.hello or process.hello
            followed.note(process.hello | {"stamps": [process.hello["at"]]}, process.began)
            for report in process.follow(self.until):
                followed.note(report, process.began)
                self._show(label, seed, followed)
        except Ended as ended:
            if self.until and followed.steps < self.until:
                return self._fail(label, seed, f"ended after step {followed.steps}", str(ended))
        except Fault as fault:
            return self._fail(label, seed, fault.short, str(fault))
        finally:
            if followed.source:
                self.sources[label] = followed.source
            end_all([process])
            self.process = None
        self.took.append(time.monotonic() - began)
        return followed.finish(seed, self.until, self.skip, self.until_loss)

    def _fail(self, label: str, seed: int, short: str, why: str) -> Run:
        self.notes.append(f"{label}, seed {seed}: left out of all commands, as it {why}")
        return Run(seed, failed=short)

    def _show(self, label: str, seed: int, followed: _Followed) -> None:
        done, total = sum(map(len, self.runs.values())), self.seeds * len(self.commands)
        of = f" of {self.until}" if self.until else ""
        left = f", about {format_seconds(statistics.fmean(self.took) * (total - done))} left" if self.took else ""
        self.progress.show(f"training {done + 1} of {total}, {label}, seed {seed}: step {followed.steps}{of}{left}")
