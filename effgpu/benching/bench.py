"""`effgpu bench`: training scripts as they are, each in a process of its own, measured in turns."""

import contextlib
import math
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from effgpu import units
from effgpu.attaching.commands import Command, read_command
from effgpu.benching.processes import Fault, Process, check_out, end_all
from effgpu.comparison import Comparison, check_name, read_fields
from effgpu.measuring import power, timing
from effgpu.measuring.device import Device, describe_cpu
from effgpu.measuring.intervals import BUILDS, FEWEST_BLOCKS
from effgpu.measuring.measurement import PRECISION, Measurement, check_unit
from effgpu.measuring.turns import take_blocks, take_builds

_TURN = {"cpu": 0.05, "cuda": 0.1}  # seconds that a turn takes at least; a GPU's clock needs that long to settle
_LEAD = {"cpu": 0.0, "cuda": 0.05}  # seconds of a turn that do not count: a GPU's clock is still that of the one before
_GROWTH = 8  # how many times longer a turn of the warm-up may be than the one before
_ENERGY_SECONDS = 3.0


@dataclass(frozen=True, repr=False)
class Bench(Comparison):
    """A comparison of commands. `commands` says by label what ran and `logs` where its output is.

    `losses` has the losses of the first fifty steps and of every tenth after them, by label and step number. `steps` is
    how many steps were timed. `notes` say what went wrong, or what to know about the numbers. `alone` is true where the
    commands did not run side by side.
    """

    min_effect: float = 0.02  # two processes of one script differ by up to 1 %, as their memory is laid out differently
    commands: dict[str, str] = field(default_factory=dict)
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    alone: bool = False
    interrupted: bool = False

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

    def _columns(self) -> list[tuple[str, list[str]]]:
        """Those of a comparison, with the losses of the same steps, and the steps timed."""
        return [
            *super()._columns(),
            *self._loss_columns(),
            ("steps timed", [str(self.steps.get(m.label, 0)) for m in self]),
        ]

    def _loss_columns(self) -> Iterator[tuple[str, list[str]]]:
        given = [set(self.losses.get(m.label, {})) for m in self if not m.failed]
        common = set.intersection(*given or [set()])
        for step in sorted({min(common), max(common)} if common else ()):
            losses = [self.losses.get(m.label, {}).get(step) for m in self]
            yield f"loss at step {step}", [units.NOT_MEASURED if loss is None else f"{loss:.4g}" for loss in losses]
        found = [self.loss_difference(m.label) if m is not self.baseline else None for m in self]
        cells = [f"{gap[0]:.4g}" + f" (step {gap[1]})" * bool(gap[0]) if gap else units.NOT_MEASURED for gap in found]
        yield "largest difference of loss", cells

    def caption(self) -> str:
        """That of a comparison, then what to know about the commands."""
        return "\n".join([super().caption(), *self.notes])

    def how_timed(self) -> str:
        """How the commands ran, in one sentence."""
        if self.alone:
            return f"One process at a time, {BUILDS} times each: the commands did not run side by side."
        return "One process per command, in turns."

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
        has no interval.
        """
        exceeded, unclear = [], []
        for m in self.measurements[1:]:
            time_ratio, memory_ratio = self.time_ratio(m.label), self.ratio(m.label, "memory")
            if slower is not None and (time_ratio is None or time_ratio.high > 1 + slower):
                limit = f"more than the {100 * slower:g} % allowed"
                if time_ratio and time_ratio.low > 1 + slower:
                    exceeded.append(f"{m.label} is {self.tell(m.label)}, {limit}")
                else:
                    unclear.append(f"it is open whether {m.label} takes {limit}: {self.tell(m.label)}")
            if more_memory is not None and memory_ratio and memory_ratio > 1 + more_memory:
                limit = f"more than the {100 * more_memory:g} % allowed"
                exceeded.append(f"the {self.memory_name} of {m.label} is {self.tell(m.label, 'memory')}, {limit}")
        return exceeded, unclear

    def to_dict(self) -> dict:
        """The comparison in JSON's types, with what only a bench has under "bench"."""
        losses = {
            label: [[step, loss if math.isfinite(loss) else None] for step, loss in found.items()]
            for label, found in self.losses.items()
        }
        own = {"commands": self.commands, "losses": losses, "steps": self.steps, "logs": self.logs}
        own |= {"notes": list(self.notes), "alone": self.alone, "interrupted": self.interrupted}
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


def bench(
    commands: Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]],
    *,
    refs: Sequence[str] = (),
    seconds: float = 5.0,
    precision: float | None = None,
    skip: int = 5,
    unit: str = "items",
    one_at_a_time: bool = False,
    timeout: float = 300.0,
    energy: bool = True,
    name: str = "bench",
    logs: str | Path | None = None,
) -> Bench:
    """Compare training scripts, each run as a command in a process of its own; the first one is the baseline.

    Each script calls `effgpu.tick()` once per step. The processes take turns: one runs a few steps, the others are
    frozen, with their DataLoader workers. A command is a line as for a shell, or a list of arguments; a mapping gives
    them labels, which else are the arguments that differ. With `refs`, one command runs in several commits of this
    git repository.

    The bench aims at an interval of ±`precision` (a share; 0.03 on a CPU, 0.01 on a GPU), with at least 15 blocks, and
    at most as many as fit into `seconds` of each command. `skip` is how many steps go first (compilation, warm-up), and
    `timeout` the longest that a step may take. `one_at_a_time` runs each command four times, alone; it is chosen by
    itself if they do not fit into memory together. `energy` adds a window of some seconds per command on a GPU. The
    output of the scripts goes to files in the folder `logs`, by default a temporary one.

    A script that fails, hangs or ends early is part of the result, with what was measured before; so is Ctrl-C once
    there are enough turns for a verdict. Raises ValueError or TypeError for arguments that are not as expected.

    >>> effgpu.bench(["python train.py", "python train.py --bf16"])
    """
    if isinstance(commands, str) or not isinstance(commands, Sequence | Mapping) or not commands:
        raise TypeError(f"commands: expected a list of commands, or a mapping of labels to commands, got {commands!r}")
    if refs and (isinstance(commands, Mapping) or len(commands) != 1 or len(set(refs)) < 2):
        raise ValueError("refs: expected one command, without a label, and at least two commits")
    units.check_positive(seconds=seconds, timeout=timeout, precision=1.0 if precision is None else precision)
    if not isinstance(skip, int) or skip < 0:
        raise ValueError(f"skip: expected a whole number of steps, got {skip!r}")
    check_name(name)
    check_unit(unit)
    if not hasattr(os, "killpg"):
        raise OSError("effgpu bench needs Linux or macOS: it freezes and ends groups of processes")
    allowed = timing.cap_seconds(seconds)
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(check_out(commands[0], refs)) if refs else _read_commands(commands)
        folder = Path(logs or tempfile.mkdtemp(prefix="effgpu-bench-"))
        folder.mkdir(parents=True, exist_ok=True)
        run = _Run(read, folder, allowed, precision, skip, timeout, energy and allowed == seconds, one_at_a_time)
        stack.callback(run.end)
        try:
            run.measure()
        except KeyboardInterrupt:
            run.interrupted = True
            if run.blocks() < run.fewest:
                raise
    return run.finish(name, unit)


def _read_commands(given: Sequence | Mapping) -> dict[str, Command]:
    if isinstance(given, Mapping):
        return {str(label): read_command(line) for label, line in given.items()}
    commands = [read_command(line) for line in given]
    return dict(zip(name_commands(commands), commands))


def name_commands(commands: Sequence[Command]) -> list[str]:
    """A label for each command: the arguments, options with their values, that not all commands have."""
    parts = [_split(command) for command in commands]
    shared = [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else parts[0][:-1]
    names = [" ".join(part for part in own if part not in shared) or "plain" for own in parts]
    return [name if name not in names[:at] else f"{name} ({at + 1})" for at, name in enumerate(names)]


def _split(command: Command) -> list[str]:
    """The arguments, with an option's value beside it; the variables come first."""
    parts = [f"{name}={value}" for name, value in command.variables.items()]
    for argument in command.arguments:
        before = parts[-1] if parts else ""
        if before.startswith("-") and " " not in before and "=" not in before and not argument.startswith("-"):
            parts[-1] = f"{before} {argument}"
        else:
            parts.append(argument)
    return parts


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

    def note(self, report: dict) -> None:
        """Take over what a report says apart from times."""
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
        """Items per step, if every step named some."""
        if not self.counted or not all(turn.items for turn in self.counted):
            return None
        return sum(turn.items for turn in self.counted) / sum(turn.steps for turn in self.counted)

    @property
    def device(self) -> Device:
        told = self.hello.get("device")
        return Device(**read_fields(Device, told)) if told else describe_cpu(self.hello.get("versions", {}))


class _NotTogether(Exception):
    """The commands cannot run side by side; the message says why."""


@dataclass
class _Run:
    """The processes of a bench, and what they have reported."""

    commands: dict[str, Command]
    folder: Path
    seconds: float
    precision: float | None
    skip: int
    timeout: float
    energy: bool
    alone: bool
    interrupted: bool = False
    processes: dict[str, Process] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self):
        names = [re.sub(r"[^\w.=-]+", "_", label)[:60] for label in self.commands]
        self.logs = {
            label: self.folder / f"{at}_{name}.log" for at, (label, name) in enumerate(zip(self.commands, names))
        }
        self.records = {label: _Record() for label in self.commands}

    @property
    def fewest(self) -> int:
        """How many blocks, or runs of each command alone, give a verdict."""
        return BUILDS if self.alone else FEWEST_BLOCKS

    def end(self) -> None:
        """End all processes."""
        end_all(self.processes.values())
        self.processes.clear()
        _say("")

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
        take_builds(self._alive, self._measure_alone, _show)

    def finish(self, name: str, unit: str) -> Bench:
        """What was measured, as a comparison."""
        for label, record in self.records.items():
            if record.late:
                self.notes.append(f"{label}: {timing.OTHER_STREAM}")
            if record.fault:
                self.notes.append(f"{label}: {record.fault}")
        if self.interrupted:
            self.notes.append("Interrupted: this is what had been measured.")
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
        )

    def _measurement(self, label: str, unit: str) -> Measurement:
        record, first = self.records[label], next(iter(self.records.values()))
        items = record.items if all(each.items for each in self.records.values() if each.counted) else None
        if record.fault and record.blocks < self.fewest:
            return Measurement(label, (), record.device, items, unit, failed=record.fault.short)
        paces = [turn.per_step_of(items) for turn in record.counted]
        watts, turn = record.energy or (None, None)
        clock, throttled = power.summarize(record.clocks)
        return Measurement(
            label,
            tuple(zip(paces[::2], paces[1::2])),
            record.device,
            items,
            unit,
            record.peak if record.device.kind == first.device.kind else None,  # a process's is not a GPU's
            joules=watts and watts * turn.per_step_of(items if turn.items else None),
            sm_clock=clock,
            throttled=throttled,
            builds=BUILDS if self.alone else 1,
        )

    def _measure_together(self) -> None:
        for label in self.commands:  # one after the other: what a first step tries out must not be disturbed
            if label in self._alive():
                self._attempt(label)
        if not (alive := self._alive()):
            return
        take_blocks(
            self._alive,
            lambda label: self._attempt(label, self._take_turn),
            self._log_ratios,
            target=self.precision or PRECISION[self.records[alive[0]].hello["kind"]],
            seconds=self.seconds,
            say=_show,
        )
        for label in self._alive() if self.energy else ():
            _say(f"energy: {label}")
            self._attempt(label, self._take_energy)

    def _measure_alone(self, label: str) -> None:
        """Run a command alone, for two turns that share its part of the seconds."""
        self.end()
        seconds = self.seconds / (2 * BUILDS)
        for _ in range(2):
            self._attempt(label, lambda label: self._take_turn(label, seconds))
        if self.energy and self.records[label].blocks == BUILDS:
            self._attempt(label, self._take_energy)

    def _log_ratios(self) -> list[list[float]]:
        """The logarithms of each block's ratio of every command to the first; of one alone, those of its seconds."""
        first, *others = [
            [math.log(a.pace + b.pace) for a, b in zip(turns[::2], turns[1::2])]
            for turns in (self.records[label].counted for label in self._alive())
        ]
        return [[ours - theirs for ours, theirs in zip(other, first)] for other in others] or [first]

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
            if len(self.processes) > 1 and fault.crowded and record.blocks < FEWEST_BLOCKS:
                raise _NotTogether(f"side by side, {label} was {fault.short}") from fault
            record.fault = fault
            end_all([self.processes.pop(label)])

    def _start(self, label: str) -> None:
        """Start a command, skip its first steps, then find its pace.

        In turns that grow: the first steps may live on a full queue, and a turn as long as their pace asks for would
        not end.
        """
        _say(f"waiting for the first tick: {label}")
        record, process = self.records[label], Process(self.commands[label], self.logs[label], self.timeout)
        self.processes[label] = process  # before it starts, so that an interruption leaves none behind
        process.start()
        record.hello = process.hello
        record.note(process.hello)
        if process.hello["ranks"] > 1 and not self.alone and len(self.commands) > 1:
            raise _NotTogether(f"{label} has {process.hello['ranks']} ranks, and those that wait do not rest")
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

        Not counted is one that refills queues and caches, and one for each worker. A frozen worker loads nothing ahead,
        but a read that was under way goes on: each may have one batch ready. Whole rounds of the workers are timed, as
        batches come in bursts.
        """
        kind, workers = self.records[label].hello["kind"], self.processes[label].last["workers"]
        lead = max(1, math.ceil(_LEAD[kind] / pace)) + workers
        if seconds is None:
            share = self.seconds / (2 * FEWEST_BLOCKS)
            steps = min(max(_TURN[kind] / pace, 3 * (1 + workers)), share / pace - lead)
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
        settled = time.perf_counter() + _TURN["cuda"] / 2

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
        """The commands that are worth going on with: none without the baseline or anything to compare with it."""
        alive = [label for label, record in self.records.items() if record.fault is None]
        first = next(iter(self.commands))
        return alive if first in alive and (len(alive) > 1 or len(self.commands) == 1) else []


def _show(done: int, total: int, left: float | None) -> None:
    about = "" if left is None else f", about {units.format_seconds(left)} left"
    _say(f"timing: turn {done + 1} of {total}{about}")


def _say(text: str) -> None:
    """One line that shows where the bench is, on a terminal; the next one overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
