"""`effgpu bench`: training scripts as they are, each in a process of its own, measured in turns."""

import contextlib
import itertools
import math
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from effgpu import units
from effgpu.benching.processes import Command, Fault, Process, check_out, end_all, read_command
from effgpu.comparison import Comparison, check_name, read_fields
from effgpu.measuring import power, timing
from effgpu.measuring.device import Device, describe_cpu
from effgpu.measuring.intervals import BUILDS, FEWEST_BLOCKS
from effgpu.measuring.measurement import PRECISION, Measurement, check_unit
from effgpu.measuring.turns import take_blocks, take_builds

SECONDS, SKIP, TIMEOUT = 5.0, 5, 300.0  # the defaults: seconds per command, steps, seconds for one step
PLAIN = "plain"  # the label of a command without arguments of its own
_TURN = {"cpu": 0.05, "cuda": 0.1}  # seconds that a turn takes at least; a GPU's clock needs that long to settle
_LEAD = 0.05  # seconds of a GPU's turn that do not count: its clock is still that of the command before
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
        """The largest difference from the baseline's loss at the same step, and that step; NaN counts as infinite."""
        ours, theirs = self.losses.get(label, {}), self.losses.get(self.baseline.label, {})
        differences = [(abs(ours[step] - theirs[step]), -step) for step in ours.keys() & theirs.keys()]
        difference, step = max(((d if d == d else math.inf, step) for d, step in differences), default=(None, 0))
        return None if difference is None else (difference, -step)

    def _columns(self) -> list[tuple[str, list[str]]]:
        """Those of a comparison, with reserved memory, the losses of the same steps, and the steps timed."""
        columns = super()._columns()
        after = [name for name, _ in columns].index(self.memory_name) + 1
        columns.insert(after, ("reserved", [units.format_bytes(m.peak_reserved) for m in self]))
        return [*columns, *self._loss_columns(), ("steps timed", [str(self.steps.get(m.label, 0)) for m in self])]

    def _loss_columns(self) -> Iterator[tuple[str, list[str]]]:
        given = [set(self.losses.get(m.label, {})) for m in self if not m.failed]
        common = set.intersection(*given) if given else set()
        for step in sorted({min(common), max(common)} if common else ()):
            yield f"loss at step {step}", [_tell_loss(self.losses.get(m.label, {}).get(step)) for m in self]
        found = {m.label: self.loss_difference(m.label) for m in self if m is not self.baseline}
        yield "largest difference of loss", [_tell_difference(found.get(m.label)) for m in self]

    def caption(self) -> str:
        """That of a comparison, then how the commands ran and what to know about them."""
        told = super().caption().replace(", ;", ";")  # a script without torch has no version to show
        return "\n".join([told, *self.notes])

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
                    ends = f": {time_ratio.low:.3f} to {time_ratio.high:.3f} times the baseline's" if time_ratio else ""
                    unclear.append(f"it is open whether {m.label} takes {limit}{ends}")
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
    seconds: float = SECONDS,
    precision: float | None = None,
    skip: int = SKIP,
    unit: str = "items",
    one_at_a_time: bool = False,
    timeout: float = TIMEOUT,
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
    units.check_positive(seconds=seconds, timeout=timeout, precision=1.0 if precision is None else precision)
    if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
        raise ValueError(f"skip: expected a whole number of steps, got {skip!r}")
    check_name(name)
    check_unit(unit)
    if not hasattr(os, "killpg"):
        raise OSError("effgpu bench needs Linux or macOS: it freezes and ends groups of processes")
    allowed = timing.cap_seconds(seconds)
    energy = energy and allowed == seconds
    with contextlib.ExitStack() as stack:
        read = _read_commands(commands, stack.enter_context(check_out(refs)) if refs else None)
        folder = Path(logs or tempfile.mkdtemp(prefix="effgpu-bench-"))
        folder.mkdir(parents=True, exist_ok=True)
        run = _Run(read, folder, _Plan(allowed, precision, skip, timeout, energy))
        stack.callback(run.end)
        try:
            run.measure(one_at_a_time)
        except KeyboardInterrupt:
            run.interrupted = True
            if run.blocks() < run.fewest:
                raise
    return run.finish(name, unit)


def read_arguments(commands: Sequence[str], named: Sequence[str], refs: Sequence[str] = ()) -> dict | list:
    """The commands of a command line, those with labels (`LABEL=COMMAND`) last. Raises ValueError for no label."""
    if refs and len(commands) > 1:
        commands = [shlex.join(commands)]  # the words after `--`
    if not named:
        return list(commands)
    split = [text.partition("=") for text in named]
    if wrong := [text for text, (label, _, command) in zip(named, split) if not (label.strip() and command.strip())]:
        raise ValueError(f"--name: expected LABEL=COMMAND, got {wrong[0]!r}")
    labels = name_commands(list(map(read_command, commands))) if commands else []
    both = [*zip(labels, commands), *((label.strip(), command) for label, _, command in split)]
    if len(dict(both)) < len(both):
        raise ValueError(f"--name: expected different labels, got {[label for label, _ in both]}")
    return dict(both)


def name_commands(commands: Sequence[Command]) -> list[str]:
    """A label for each command: the arguments, options with their values, that not all commands have."""
    parts = [_split(command) for command in commands]
    shared = [part for part in parts[0] if all(part in other for other in parts)] if len(parts) > 1 else parts[0][:-1]
    differing = [[part for part in own if part not in shared] for own in parts]
    short = [" ".join(re.sub(r"[^\s=]*/", "", part) for part in own) for own in differing]  # files without folders
    full = [" ".join(own) for own in differing]
    names = [a if short.count(a) == full.count(b) else b for a, b in zip(short, full)]
    names = [name or PLAIN for name in names]
    labels = []
    for name in names:
        again = (f"{name} ({number})" for number in itertools.count(2))
        labels.append(next(label for label in itertools.chain([name], again) if label not in labels))
    return labels


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


def _read_commands(given: Sequence | Mapping, checkouts: Mapping[str, Path] | None) -> dict[str, Command]:
    if isinstance(given, str) or not isinstance(given, Sequence | Mapping) or not given:
        raise TypeError(f"commands: expected a list of commands, or a mapping of labels to commands, got {given!r}")
    if checkouts is not None:
        if len(given) != 1 or len(checkouts) < 2:
            raise ValueError("refs: expected one command and at least two commits")
        (line,) = given.values() if isinstance(given, Mapping) else given
        return {ref: read_command(line, folder) for ref, folder in checkouts.items()}
    if isinstance(given, Mapping):
        return {str(label): read_command(line) for label, line in given.items()}
    read = [read_command(line) for line in given]
    return dict(zip(name_commands(read), read))


@dataclass(frozen=True)
class _Plan:
    seconds: float
    precision: float | None
    skip: int
    timeout: float
    energy: bool

    def lead(self, pace: float, workers: int, kind: str) -> int:
        """Steps that are not counted after a pause: one that refills queues and caches, and one for each worker.

        A frozen worker loads nothing ahead, but a read that was under way goes on: each may have one batch ready.
        """
        return max(1, math.ceil(_LEAD / pace) if kind == "cuda" else 1) + workers

    def steps(self, pace: float, workers: int, kind: str, seconds: float | None = None) -> int:
        """Steps that are timed in a turn, of so many seconds: in whole rounds of the workers, as batches in bursts."""
        lead, share = self.lead(pace, workers, kind), self.seconds / (2 * FEWEST_BLOCKS)
        fitting = min(max(_TURN[kind] / pace, 3 * (1 + workers)), share / pace - lead)
        if seconds is not None:
            fitting = seconds / pace
        return math.ceil(max(1, fitting) / max(1, workers)) * max(1, workers)


@dataclass
class _Turn:
    seconds: float
    steps: int
    items: float | None

    @property
    def pace(self) -> float:
        return max(self.seconds / self.steps, 1e-9)

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
    reserved: int | None = None
    hello: dict | None = None
    pace: float = 0.0
    energy: tuple[float, _Turn] | None = None  # watts, and the turn in which they were measured
    fault: Fault | None = None
    notes: dict[str, None] = field(default_factory=dict)  # each once, in order

    def note(self, report: dict) -> None:
        """Take over what a report says apart from times."""
        for step, loss in report["losses"]:
            self.losses.setdefault(step, loss)
        memory = report["memory"]
        self.peak = max(filter(None, (self.peak, memory["peak"])), default=None)
        self.reserved = max(filter(None, (self.reserved, memory["reserved"])), default=None)

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
        mean = sum(turn.items for turn in self.counted) / sum(turn.steps for turn in self.counted)
        return round(mean) if math.isclose(mean, round(mean)) else mean


class _NotTogether(Exception):
    """The commands cannot run side by side; the message says why."""


class _Run:
    """The processes of a bench, and what they have reported."""

    def __init__(self, commands: Mapping[str, Command], logs: Path, plan: _Plan):
        self.commands, self.plan = commands, plan
        names = [re.sub(r"[^A-Za-z0-9.=-]+", "_", label).strip("_-.") or "command" for label in commands]
        self.logs = {label: logs / f"{number}_{name}.log" for number, (label, name) in enumerate(zip(commands, names))}
        self.records = {label: _Record() for label in commands}
        self.processes: dict[str, Process] = {}
        self.notes: list[str] = []
        self.alone = self.interrupted = False

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

    def measure(self, alone: bool) -> None:
        """Measure all commands side by side if that works, or else one at a time."""
        self.alone = alone
        if not alone:
            try:
                return self._measure_together()
            except _NotTogether as reason:
                self.end()
                self.alone = True
                self.notes.append(f"Measured one at a time: {reason}.")
                self.records = {label: _Record() for label in self.commands}
        take_builds(self._alive, self._measure_alone, partial(_show, "timing"))

    def finish(self, name: str, unit: str) -> Bench:
        """What was measured, as a comparison."""
        items = self._items()
        on = {label: self._device(label) for label in self.commands}
        for label, record in self.records.items():
            if on[label].kind != on[next(iter(on))].kind:
                record.peak = record.reserved = None
                self.notes.append(f"{label} ran on another device than the baseline: their memory is not compared.")
            self.notes += [f"{label}: {note}" for note in record.notes]
            if record.fault:
                self.notes.append(f"{label}: {record.fault}")
            if wrong := [step for step, loss in record.losses.items() if not math.isfinite(loss)]:
                self.notes.append(f"The loss of {label} is not finite from step {min(wrong)} on.")
        if self.interrupted:
            self.notes.append("Interrupted: this is what had been measured.")
        return Bench(
            name,
            tuple(self._measurement(label, on[label], items[label], unit) for label in self.commands),
            commands={label: str(command) for label, command in self.commands.items()},
            losses={label: record.losses for label, record in self.records.items() if record.losses},
            steps={label: sum(turn.steps for turn in record.counted) for label, record in self.records.items()},
            logs={label: str(path) for label, path in self.logs.items()},
            notes=tuple(self.notes),
            alone=self.alone,
            interrupted=self.interrupted,
        )

    def _measure_together(self) -> None:
        self._start_all()
        for label in self._alive():
            self._attempt(label, lambda label: None)  # to be warmed up
        if not (alive := self._alive()):
            return
        kind = self.records[alive[0]].hello["kind"]
        take_blocks(
            self._alive,
            lambda label: self._attempt(label, self._take_turn),
            self._log_ratios,
            target=self.plan.precision or PRECISION[kind],
            seconds=self.plan.seconds,
            say=partial(_show, "timing"),
        )
        for label in self._alive() if self.plan.energy else ():
            _say(f"energy: {label}")
            self._attempt(label, self._take_energy)

    def _measure_alone(self, label: str) -> None:
        """Run a command alone, for two turns that share its part of the seconds."""
        end_all(self.processes.values())
        self.processes.clear()
        seconds = self.plan.seconds / (2 * BUILDS)
        for _ in range(2):
            self._attempt(label, partial(self._take_turn, seconds=seconds))
        if self.plan.energy and self.records[label].blocks == BUILDS:
            self._attempt(label, self._take_energy)

    def _log_ratios(self) -> list[list[float]]:
        """The logarithms of each block's ratio of every command to the first; of one alone, those of its seconds."""
        first, *others = [
            [math.log(a.pace + b.pace) for a, b in zip(turns[::2], turns[1::2])]
            for turns in (self.records[label].counted for label in self._alive())
        ]
        return [[ours - theirs for ours, theirs in zip(other, first)] for other in others] or [first]

    def _start_all(self) -> None:
        """Start the commands together, as most of the start is their own business, and wait for their first ticks."""
        for label in self.commands:
            self._guard(label, self._start)
        while self._alive() and (waiting := [label for label, p in self.processes.items() if p.hello is None]):
            _say(f"waiting for the first tick: {', '.join(waiting)}")
            for label in waiting:
                self._guard(label, self._greet)

    def _start(self, label: str) -> None:
        process = Process(self.commands[label], self.logs[label], self.plan.timeout)
        self.processes[label] = process  # before it starts, so that an interruption leaves none behind
        process.start()

    def _greet(self, label: str) -> None:
        """See whether the first tick has come; whoever is there waits, frozen, for the others."""
        if self.processes[label].greet(0.05):
            self.processes[label].freeze()

    def _attempt(self, label: str, act: Callable[[str], object]) -> None:
        """Let a command's process act, started and warmed up first where it is not there."""
        if self.records[label].fault is None:
            self._guard(label, self._prepare)
        if self.records[label].fault is None:
            self._guard(label, act)

    def _guard(self, label: str, act: Callable[[str], object]) -> None:
        """A fault ends the command, not the bench; out of memory may be the others' doing."""
        record = self.records[label]
        try:
            act(label)
        except Fault as fault:
            if len(self.processes) > 1 and fault.crowded and record.blocks < FEWEST_BLOCKS:
                raise _NotTogether(f"side by side, {label} was {fault.short}") from fault
            record.fault = fault
            if label in self.processes:
                end_all([self.processes.pop(label)])

    def _prepare(self, label: str) -> None:
        """Have the command's process past its warm-up."""
        record = self.records[label]
        if label not in self.processes:
            end_all(self.processes.values())
            self.processes.clear()
            _say(f"waiting for the first tick: {label}")
            self._start(label)
            while not self.processes[label].greet(1.0):
                pass
        elif record.hello:
            return
        process = self.processes[label]
        record.hello = process.hello
        record.note(process.hello)
        if process.hello["ranks"] > 1 and not self.alone and len(self.commands) > 1:
            raise _NotTogether(f"{label} has {process.hello['ranks']} ranks, and those that wait do not rest")
        self._warm_up(record, process)

    def _warm_up(self, record: _Record, process: Process) -> None:
        """Skip the first steps, then find the pace, in turns that grow: the first steps may live on a full queue."""
        steps = 1
        report = process.turn(self.plan.skip, steps)
        while True:
            record.note(report)
            record.pace = max(report["seconds"] / steps, 1e-6)
            how = record.pace, report["workers"], process.hello["kind"]
            wanted = self.plan.steps(*how)
            if 2 * steps >= wanted:
                return
            steps = min(wanted, _GROWTH * steps)
            report = process.turn(self.plan.lead(*how), steps)

    def _turn(self, label: str, seconds: float | None, meanwhile: Callable[[], object] | None) -> _Turn:
        record, process = self.records[label], self.processes[label]
        pace = max(statistics.median([turn.pace for turn in record.turns] or [record.pace]), 1e-6)
        how = pace, process.last["workers"], process.hello["kind"]
        lead, steps = self.plan.lead(*how), self.plan.steps(*how, seconds)
        report = process.turn(lead, steps, (lead + steps) * pace, meanwhile)
        record.note(report)
        if timing.is_late(report["late"], report["seconds"]):
            record.notes[timing.OTHER_STREAM] = None
        return _Turn(report["seconds"], report["steps"], report["items"])

    def _take_turn(self, label: str, seconds: float | None = None) -> None:
        record, board, clocks = self.records[label], self._board(label), []
        settled = time.perf_counter() + min(_TURN["cuda"], self.plan.seconds / (2 * FEWEST_BLOCKS)) / 2

        def note_clock() -> None:
            if not clocks and time.perf_counter() > settled:
                clocks.append(power.read_clock(board))
                record.clocks += filter(None, clocks)

        record.turns.append(self._turn(label, seconds, note_clock if board else None))

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

    def _items(self) -> dict[str, float | None]:
        """Items per step by label; none at all if not every command names them in all its steps."""
        items = {label: record.items for label, record in self.records.items()}
        lacking = [label for label, record in self.records.items() if record.counted and items[label] is None]
        if lacking and any(items.values()):
            told = ", ".join(lacking)
            self.notes.append(f"Times are per step: not every step of {told} gave items to effgpu.tick.")
            return dict.fromkeys(items)
        return items

    def _device(self, label: str) -> Device:
        hello = self.records[label].hello or {}
        if told := hello.get("device"):
            capability = told["capability"] and tuple(told["capability"])
            return Device(**told | {"capability": capability})
        return describe_cpu(hello.get("versions", {}))

    def _measurement(self, label: str, on: Device, items: float | None, unit: str) -> Measurement:
        record = self.records[label]
        if record.fault and record.blocks < self.fewest:
            return Measurement(label, (), on, items, unit, failed=record.fault.short)
        paces = [turn.per_step_of(items) for turn in record.counted]
        watts, turn = record.energy or (None, None)
        return Measurement(
            label,
            tuple(zip(paces[::2], paces[1::2])),
            on,
            items,
            unit,
            record.peak,
            record.reserved,
            watts and watts * turn.per_step_of(items if turn.items else None),
            *power.summarize(record.clocks),
            builds=BUILDS if self.alone else 1,
        )


def _tell_loss(loss: float | None) -> str:
    return units.NOT_MEASURED if loss is None else f"{loss:.4g}"


def _tell_difference(found: tuple[float, int] | None) -> str:
    return _tell_loss(found and found[0]) + (f" (step {found[1]})" if found and found[0] else "")


def _show(what: str, done: int, total: int, left: float | None) -> None:
    about = "" if left is None else f", about {units.format_seconds(left)} left"
    _say(f"{what}: turn {done + 1} of {total}{about}")


def _say(text: str) -> None:
    """One line that shows where the bench is, on a terminal; the next one overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)
