"""Commands that run side by side: their processes take turns, and what each turn took is kept."""

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from effgpu import units
from effgpu.attaching.commands import Command
from effgpu.benching.processes import Ended, Fault, Process, end_all, keep, read_device
from effgpu.benching.progress import Progress
from effgpu.benching.result import Bench
from effgpu.measuring import power, timing
from effgpu.measuring.intervals import BUILDS, FEWEST_BLOCKS, MOST_BLOCKS, count_fewest, divide_confidence
from effgpu.measuring.measurement import PRECISION, Measurement
from effgpu.measuring.turns import OF_SCRIPTS, choose_blocks, log_ratios, take_blocks, take_builds

_LONG = 0.2  # seconds of a step of a CPU beside which its caches refill in no time
_GROWTH = 8  # how many times longer a turn of the warm-up may be than the one before
_ENERGY_SECONDS = 3.0


@dataclass
class _Turn:
    seconds: float
    steps: int
    items: float | None

    @property
    def pace(self) -> float:
        return max(self.seconds / self.steps, 1e-6)

    def per_step_of(self, items: float | None) -> float:
        """Seconds per step of so many items, as steps of texts differ in theirs."""
        return self.pace if items is None else self.seconds * items / self.items


@dataclass
class _Record:
    """What has been measured of a command so far."""

    turns: list[_Turn] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    clocks: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    peak: int | None = None
    hello: dict = field(default_factory=dict)
    pace: float = 0.0  # seconds per step, at the end of the warm-up
    energy: tuple[float, _Turn] | None = None  # watts, and the turn in which they were measured
    fault: Fault | None = None
    late: bool = False  # whether a turn left work on another stream
    source: str | None = None  # what ends a step

    def note(self, report: dict) -> None:
        """Take over what a report says apart from times."""
        if report["source"] != self.source:  # the script calls `tick`, and counts its steps itself
            self.source, self.losses = report["source"], {}
        for step, loss in report["losses"]:
            self.losses.setdefault(step, loss)
        self.peak = max(self.peak or 0, report["peak"] or 0) or None

    @property
    def blocks(self) -> int:
        return len(self.turns) // 2

    @property
    def counted(self) -> list[_Turn]:
        """The turns of whole blocks."""
        return self.turns[: 2 * self.blocks]

    @property
    def items(self) -> float | None:
        """Items per step, if every step named some, which is no NaN, as of a mean of nothing."""
        if not self.counted or not all(turn.items and 0 < turn.items < math.inf for turn in self.counted):
            return None
        return sum(turn.items for turn in self.counted) / sum(turn.steps for turn in self.counted)


class _NotTogether(Exception):
    """The commands cannot run side by side; the message says why."""


@dataclass
class SideBySide:
    """The processes of a bench, and what they have reported.

    `seconds` and `precision` are as in `bench`, `skip` is how many first steps are not timed, `alone` whether the
    commands run one at a time.
    """

    commands: dict[str, Command]
    folder: Path
    seconds: float
    precision: float | None
    skip: int
    timeout: float
    energy: bool
    alone: bool
    interrupted: bool = False
    progress: Progress = field(default_factory=Progress)
    processes: dict[str, Process] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.logs = name_logs(self.folder, self.commands)
        self.records = {label: _Record() for label in self.commands}
        self.confidence = divide_confidence(len(self.commands) - 1)

    @property
    def fewest(self) -> int:
        """How many blocks, or runs of each command alone, give a verdict."""
        return 2 if self.alone else count_fewest(self.confidence)

    def end(self) -> None:
        """End all processes."""
        end_all(self.processes.values())
        self.processes.clear()
        self.progress.clear()

    def has_results(self) -> bool:
        """Whether there is anything to show."""
        return any(record.turns for record in self.records.values())

    def blocks(self) -> int:
        """How many whole blocks all commands without a fault have."""
        return min((record.blocks for record in self.records.values() if not record.fault), default=0)

    def measure(self) -> None:
        """Measure all commands side by side if that works, or else one at a time."""
        if not self.alone:
            try:
                return self._measure_together()
            except _NotTogether as reason:
                self.end()
                self.alone = True
                self.notes.append(f"Measured one at a time: {reason}.")
                self.records = {label: _Record() for label in self.commands}
        runs = f"{BUILDS * len(self.commands)} runs, one at a time"
        self.progress.announce(f"{runs}, each to its first steps and for {self.seconds / BUILDS:.3g} s or a step more")
        take_builds(self._alive, self._measure_alone, self._show)

    def finish(self, name: str, unit: str) -> Bench:
        """What was measured, as a comparison."""
        for label, record in self.records.items():
            if record.late:
                self.notes.append(f"{label}: {timing.OTHER_STREAM}")
            if record.fault:
                self.notes.append(f"{label}: {record.fault}")
        if self.interrupted:
            few = f", too little for a verdict, which takes {self.fewest} blocks" if self.blocks() < self.fewest else ""
            self.notes.append(f"Interrupted: this is what had been measured{few}.")
        return Bench(
            name,
            tuple(self._measurement(label, unit) for label in self.commands),
            commands={label: str(command) for label, command in self.commands.items()},
            losses={label: record.losses for label, record in self.records.items() if record.losses},
            steps={label: sum(turn.steps for turn in record.counted) for label, record in self.records.items()},
            logs={label: str(path) for label, path in self.logs.items()},
            notes=tuple(self.notes),
            alone=self.alone,
            interrupted=self.interrupted,
            sources={label: record.source for label, record in self.records.items() if record.source},
            confidence=self.confidence,
            crashed=tuple(
                label for label, record in self.records.items() if record.fault and not isinstance(record.fault, Ended)
            ),
        )

    def _measurement(self, label: str, unit: str) -> Measurement:
        record = self.records[label]
        device, first = (read_device(each.hello) for each in (record, next(iter(self.records.values()))))
        items = record.items if all(each.items for each in self.records.values() if each.counted) else None
        if record.fault and record.blocks < (BUILDS if self.alone else self.fewest):
            return Measurement(label, (), device, items, unit, failed=record.fault.short)
        paces = [turn.per_step_of(items) for turn in record.counted]
        watts, turn = record.energy or (None, None)
        clock, throttled = power.summarize(record.clocks)
        return Measurement(
            label,
            tuple(zip(paces[::2], paces[1::2])),
            device,
            items,
            unit,
            record.peak if device.kind == first.kind else None,  # a process's is not a GPU's
            joules=watts and watts * turn.per_step_of(items if turn.items else None),
            sm_clock=clock,
            throttled=throttled,
            builds=max(2, min(BUILDS, self.blocks())) if self.alone else 1,
        )

    def _measure_together(self) -> None:
        for label in self.commands:  # one after the other: what a first step tries out must not be disturbed
            if label in self._alive():
                self._attempt(label)
        if not (alive := self._alive()):
            return
        self._announce(alive)
        take_blocks(
            self._alive,
            lambda label: self._attempt(label, self._take_turn),
            lambda: log_ratios([turn.pace for turn in self.records[label].counted] for label in self._alive()),
            target=self.precision or PRECISION[self.records[alive[0]].hello["kind"]],
            seconds=self.seconds,
            fewest=self.fewest,
            confidence=self.confidence,
            say=self._show,
        )
        for label in self._alive() if self.energy else ():
            self.progress.show(f"energy of {label}")
            self._attempt(label, self._take_energy)

    def _announce(self, labels: list[str]) -> None:
        """Say what it will take, now that the paces are known."""
        plans = {label: self._plan_turn(label, self.records[label].pace) for label in labels}
        block = sum(2 * sum(plan) * self.records[label].pace for label, plan in plans.items())
        fit = self.seconds * len(labels) / max(block, 1e-9)
        least = choose_blocks(fit, self.seconds, self.fewest)
        most = max(least, min(MOST_BLOCKS, int(fit)))
        paces = ", ".join(f"{label} {units.format_seconds(self.records[label].pace)}" for label in labels)
        about = units.format_seconds(least * block)
        if most > least:
            about += f" to {units.format_seconds(most * block)}"
        elif least == self.fewest:
            about += f", the least that a verdict takes ({least} blocks, each of two turns of every command)"
        self.progress.announce(f"a step takes {paces}; measuring takes about {about}")

    def _show(self, done: int, total: int, left: float | None) -> None:
        about = "" if left is None else f", about {units.format_seconds(left)} left"
        self.progress.show(f"turn {done + 1} of {total}{about}")

    def _measure_alone(self, label: str) -> None:
        """Run a command alone, for two turns that share its part of the seconds."""
        self.end()
        seconds = self.seconds / (2 * BUILDS)
        for _ in range(2):
            self._attempt(label, lambda label: self._take_turn(label, seconds))
        if self.energy and self.records[label].blocks == BUILDS:
            self._attempt(label, self._take_energy)

    def _attempt(self, label: str, act: Callable[[str], object] = lambda label: None) -> None:
        """Let a command's process act, started and warmed up first where it is not there.

        A fault ends the command, not the bench; out of memory may be the others' doing.
        """
        record = self.records[label]
        if record.fault:
            return
        try:
            if label not in self.processes:
                self._start(label)
            act(label)
        except Fault as fault:
            if len(self.processes) > 1 and fault.crowded and record.blocks < self.fewest:
                raise _NotTogether(f"side by side, {label} was {fault.short}") from fault
            record.fault = fault
            end_all([self.processes.pop(label)])

    def _start(self, label: str) -> None:
        """Start a command, skip its first steps, then find its pace.

        In turns that grow: the first steps may live on a full queue, and a turn as long as their pace asks for would
        not end.
        """
        self.progress.show(f"waiting for the first step of {label}")
        record = self.records[label]
        process = Process(self.commands[label], self.logs[label], self.timeout, self.progress.refresh)
        self.processes[label] = process  # before it starts, so that an interruption leaves none behind
        process.start()
        record.hello = process.hello
        record.note(process.hello)
        if process.hello["ranks"] > 1 and not self.alone and len(self.commands) > 1:
            raise _NotTogether(f"{label} has {process.hello['ranks']} ranks, and those that wait keep working")
        self.progress.show(f"warm-up of {label}")
        lead, steps = self.skip, 1
        while True:
            report = process.turn(lead, steps)
            record.note(report)
            record.pace = _Turn(report["seconds"], steps, None).pace
            lead, wanted = self._plan_turn(label, record.pace)
            if 2 * steps >= wanted:
                return
            steps = min(wanted, _GROWTH * steps)

    def _plan_turn(self, label: str, pace: float, seconds: float | None = None) -> tuple[int, int]:
        """Steps that are not counted after a pause, and steps that are timed after them, for so many seconds.

        Not counted is one that refills queues and caches, if it is short, and one for each worker. A frozen worker
        loads nothing ahead, but a read that was under way goes on: each may have one batch ready. Whole rounds of the
        workers are timed, as batches come in bursts.
        """
        kind, workers = self.records[label].hello["kind"], self.processes[label].last["workers"]
        refills = 0 if kind == "cpu" and pace > _LONG and not workers else 1
        lead = max(refills, math.ceil(OF_SCRIPTS.lead[kind] / pace)) + workers
        if seconds is None:
            share = self.seconds / (2 * FEWEST_BLOCKS)
            steps = min(max(OF_SCRIPTS.shortest[kind] / pace, 3 * (1 + workers)), share / pace - lead)
        else:
            steps = seconds / pace
        return lead, math.ceil(max(1, steps) / max(1, workers)) * max(1, workers)

    def _turn(self, label: str, seconds: float | None, meanwhile: Callable[[], object] | None) -> _Turn:
        record = self.records[label]
        pace = statistics.median([turn.pace for turn in record.turns] or [record.pace])
        lead, steps = self._plan_turn(label, pace, seconds)
        report = self.processes[label].turn(lead, steps, (lead + steps) * pace, meanwhile)
        record.note(report)
        record.late |= timing.is_late(report["late"], report["seconds"])
        return _Turn(report["seconds"], steps, report["items"])

    def _take_turn(self, label: str, seconds: float | None = None) -> None:
        record, board, clocks = self.records[label], self._board(label), []
        settled = time.perf_counter() + OF_SCRIPTS.shortest["cuda"] / 2

        def read_clock() -> None:
            if not clocks and time.perf_counter() > settled:
                clocks.append(power.read_clock(board))

        record.turns.append(self._turn(label, seconds, read_clock if board else None))
        record.clocks += filter(None, clocks)

    def _take_energy(self, label: str) -> None:
        """Average watts over some seconds, between two changes of the board's counter."""
        if (board := self._board(label)) is None:
            return
        record, changes = self.records[label], []
        settled = time.perf_counter() + 0.2 + 2 * record.pace

        def read_counter() -> None:
            now, joules = time.perf_counter(), power.read_joules(board)
            if joules is not None and now > settled and (not changes or joules != changes[-1][1]):
                changes.append((now, joules))

        turn = self._turn(label, _ENERGY_SECONDS, read_counter)
        if len(changes) > 2:  # the first is no change, but the first look
            (began, before), (ended, after) = changes[1], changes[-1]
            record.energy = (after - before) / (ended - began), turn

    def _board(self, label: str):
        """NVML's handle of the GPU on which a command runs, without CUDA in this process; None on a CPU."""
        uuid = self.records[label].hello.get("uuid")
        return power.find_board(uuid) if uuid else None

    def _alive(self) -> list[str]:
        return keep(self.records, [label for label, record in self.records.items() if record.fault])


def name_logs(folder: Path, labels: Mapping[str, object]) -> dict[str, Path]:
    """A file in the folder for the output of each of the labels."""
    names = [re.sub(r"[^\w.=-]+", "_", label)[:60] for label in labels]
    return {label: folder / f"{at}_{name}.log" for at, (label, name) in enumerate(zip(labels, names))}
