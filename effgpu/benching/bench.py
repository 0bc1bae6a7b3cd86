"""`effgpu bench`: training scripts as they are, each in a process of its own, measured in turns."""

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from effgpu import units
from effgpu.attaching.commands import Command, read_command
from effgpu.benching.commits import check_out
from effgpu.benching.result import Bench
from effgpu.benching.side_by_side import SideBySide
from effgpu.benching.training import SEED, OverSeeds, with_seed
from effgpu.comparison import add_control, check_name
from effgpu.measuring import timing
from effgpu.measuring.measurement import check_unit


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
    control: bool = False,
    seeds: int | None = None,
    until: int | None = None,
    until_loss: float | None = None,
    name: str = "bench",
    logs: str | Path | None = None,
) -> Bench:
    """Compare training scripts, each run as a command in a process of its own; the first one is the baseline.

    The scripts stay as they are: a step is what lies between two steps of the optimizer that stepped first, or between
    two calls of `effgpu.tick()` where a script makes some. The processes take turns: one runs a few steps, the others
    are frozen, with their DataLoader workers. A command is a line as for a shell, or a list of arguments; a mapping
    gives them labels, which else are the arguments that differ. With `refs`, one command runs in several commits of
    this git repository.

    The bench aims at an interval of ±`precision` (a share; 0.03 on a CPU, 0.01 on a GPU), with at least 15 blocks, and
    at most as many as fit into `seconds` of each command. Where 15 would take much longer, because steps are
    long, there are 8, the fewest that have an interval (more with several commands). `skip` is how
    many steps go first (compilation, warm-up), and `timeout` the longest that a step may take. `one_at_a_time` runs
    each command four times, alone; it is chosen by itself if they do not fit into memory together. `energy` adds a
    window of some seconds per command on a GPU. `control` adds a row: the baseline against its own copy, which shows
    the noise of this machine. The output of the scripts goes to files in the folder `logs`, by default a temporary one.

    A script that fails, hangs or ends early is part of the result, with what was measured before; so is Ctrl-C once a
    turn was measured, though perhaps without a verdict. Raises ValueError or TypeError for arguments that are not as
    expected.

    With `seeds`, each command trains with each seed, which stands for `{seed}` in it, from its start to step `until`,
    or to its own end. The result compares the losses at the end, too, and with `until_loss` the time to that loss: the
    mean loss of ten steps. It is a SeedBench; `seconds`, `precision`, `one_at_a_time` and `energy` are then without
    effect.

    >>> effgpu.bench(["python train.py", "python train.py --bf16"])
    >>> effgpu.bench(["python train.py --seed {seed}", "python train.py --bf16 --seed {seed}"], seeds=5, until=500)
    """
    if isinstance(commands, str) or not isinstance(commands, Sequence | Mapping) or not commands:
        raise TypeError(f"commands: expected a list of commands, or a mapping of labels to commands, got {commands!r}")
    if refs and (isinstance(commands, Mapping) or len(commands) != 1 or len(set(refs)) < 2):
        raise ValueError("refs: expected one command, without a label, and at least two commits")
    units.check_positive(seconds=seconds, timeout=timeout, precision=1.0 if precision is None else precision)
    if not isinstance(skip, int) or skip < 0:
        raise ValueError(f"skip: expected a whole number of steps, got {skip!r}")
    _check_seeds(seeds, until, until_loss, skip)
    check_name(name)
    check_unit(unit)
    if not hasattr(os, "killpg"):
        raise OSError("effgpu bench needs Linux or macOS: it freezes and ends groups of processes")
    allowed = timing.cap_seconds(seconds)
    with contextlib.ExitStack() as stack:
        read = stack.enter_context(check_out(commands[0], refs)) if refs else _read_commands(commands)
        _check_commands(read, seeds)
        if control:
            read = add_control(read)
        folder = Path(logs or tempfile.mkdtemp(prefix="effgpu-bench-"))
        folder.mkdir(parents=True, exist_ok=True)
        if seeds:
            run = OverSeeds(read, folder, seeds, until, until_loss, skip, timeout)
        else:
            energy = energy and allowed == seconds
            run = SideBySide(read, folder, allowed, precision, skip, timeout, energy, one_at_a_time)
        stack.callback(run.end)
        try:
            run.measure()
        except KeyboardInterrupt:
            run.interrupted = True
            if not run.has_results():
                raise
    return run.finish(name, unit)


def _check_seeds(seeds: int | None, until: int | None, until_loss: float | None, skip: int) -> None:
    if seeds is None:
        if until is not None or until_loss is not None:
            raise ValueError("until, until_loss: expected seeds with them, as in --seeds 5")
        return
    if not isinstance(seeds, int) or seeds < 2:
        raise ValueError(f"seeds: expected a whole number from 2 on, got {seeds!r}")
    if until is not None and (not isinstance(until, int) or until < skip + 2):
        raise ValueError(f"until: expected a step from {skip + 2} on, as the first {skip} are not timed, got {until!r}")
    if until_loss is not None and not math.isfinite(until_loss):
        raise ValueError(f"until_loss: expected a number, got {until_loss!r}")


def _check_commands(commands: Mapping[str, Command], seeds: int | None) -> None:
    for command in commands.values():
        takes = with_seed(command, 0) != command
        if seeds and not takes:
            raise ValueError(f"command {str(command)!r}: expected {SEED} in it, as in --seed {SEED}")
        if takes and not seeds:
            raise ValueError(f"command {str(command)!r}: expected seeds with {SEED}, as in --seeds 5")


def _read_commands(given: Sequence | Mapping) -> dict[str, Command]:
    if isinstance(given, Mapping):
        return {str(label): read_command(line) for label, line in given.items()}
    commands = [read_command(line) for line in given]
    return dict(zip(name_commands(commands), commands))


def name_commands(commands: Sequence[Command]) -> list[str]:
    """A label for each command: the arguments, options with their values, that not all commands have.

    One command alone has the name of its script.
    """
    parts = [_split(command) for command in commands]
    if len(parts) == 1:  # the script's name
        return [next((part for part in parts[0] if part.endswith(".py") or part.startswith("-m ")), parts[0][-1])]
    shared = [part for part in parts[0] if all(part in other for other in parts)]
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
