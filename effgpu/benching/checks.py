"""What is wrong with a bench's commands and options, before PyTorch is imported or anything runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from effgpu.attaching.commands import Command, read_command
from effgpu.units import check_positive

SEED = "{seed}"  # what stands for the seed in a command


def check(
    commands: Sequence[str | Sequence[str]] | Mapping[str, str | Sequence[str]],
    refs: Sequence[str] = (),
    *,
    seconds: float = 1.0,
    timeout: float = 1.0,
    precision: float | None = None,
    skip: int = 0,
    seeds: int | None = None,
    until: int | None = None,
    until_loss: float | None = None,
    **_: object,
) -> None:
    """Raise TypeError or ValueError for what `bench` does not take; with `refs`, git may refuse more."""
    if isinstance(commands, str) or not isinstance(commands, Sequence | Mapping) or not commands:
        raise TypeError(f"commands: expected a list of commands, or a mapping of labels to commands, got {commands!r}")
    if refs and (isinstance(commands, Mapping) or len(commands) != 1 or len(set(refs)) < 2):
        raise ValueError("refs: expected one command, without a label, and at least two commits")
    check_positive(seconds=seconds, timeout=timeout, precision=1.0 if precision is None else precision)
    if not isinstance(skip, int) or skip < 0:
        raise ValueError(f"skip: expected a whole number of steps, got {skip!r}")
    _check_seeds(seeds, until, until_loss, skip)
    if not refs:  # whose commands are those of their checkouts
        check_commands(read_commands(commands), seeds)


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


def check_commands(commands: Mapping[str, Command], seeds: int | None) -> None:
    """Raise ValueError for a command that has no place for the seeds, or one and there are none."""
    for command in commands.values():
        takes = with_seed(command, 0) != command
        if seeds and not takes:
            raise ValueError(f"command {str(command)!r}: expected {SEED} in it, as in --seed {SEED}")
        if takes and not seeds:
            raise ValueError(f"command {str(command)!r}: expected seeds with {SEED}, as in --seeds 5")


def with_seed(command: Command, seed: int) -> Command:
    """The command with this seed in its arguments and variables."""
    arguments = tuple(argument.replace(SEED, str(seed)) for argument in command.arguments)
    variables = {name: value.replace(SEED, str(seed)) for name, value in command.variables.items()}
    return replace(command, arguments=arguments, variables=variables)


def read_commands(given: Sequence | Mapping) -> dict[str, Command]:
    """The commands by label. Raises ValueError as `read_command` does."""
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
