"""What is said of arguments that a command does not take: in one sentence, with what was meant."""

import argparse
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from effgpu.attaching.commands import STARTERS
from effgpu.errors import did_you_mean

_ELSEWHERE = {("bench", "--gpu"): "bench measures on this machine: effgpu predict --gpu tells of another GPU"}


def explain(
    arguments: Sequence[str], chosen: argparse.Namespace, unknown: Sequence[str], options: Iterable[str]
) -> str:
    """Why `unknown` words are among the arguments, and what to give: the command may be one without -- or quotes."""
    name, first = arguments[0], unknown[0].partition("=")[0]
    words = getattr(chosen, "words", None) or getattr(chosen, "commands", None) or ()
    begin = arguments.index(words[0]) if words else len(arguments)
    follows = begin < arguments.index(unknown[0]) and "--" not in arguments
    if follows and " " not in words[0] and not re.search(r"\.py:\w*$", words[0]):
        if name == "bench":
            return f"bench: quote each command, as in {quote_each(arguments, begin)}"
        return f"{name}: put -- before your command, as in {_with_dashes(arguments, begin)}"
    if meant := _ELSEWHERE.get((name, first)):
        return meant
    if guess := did_you_mean(first, options):
        return f"{name}: there is no option {first}: {guess}"
    if follows and name != "bench":
        ours, at = list(arguments), 0
        for word in unknown:
            at = ours.index(word, at)
            del ours[at]
        return f"{name}: put -- before what your file takes, as in {_join([*ours, '--', *unknown])}"
    return f"{name}: expected no {first}; effgpu {name} --help says what it takes"


def quote_each(arguments: Sequence[str], begin: int) -> str:
    """The command line of a bench whose commands begin at this argument, each in quotes."""
    commands: list[list[str]] = []
    for word in arguments[begin:]:
        if not commands or re.fullmatch(STARTERS, Path(word).name):
            commands.append([])
        commands[-1].append(word)
    return _join([*arguments[:begin], *map(shlex.join, commands)])


def _with_dashes(arguments: Sequence[str], begin: int) -> str:
    """The command line with -- before the script's command, which begins at this argument, and each --gpu before it."""
    before, command = list(arguments[:begin]), list(arguments[begin:])
    while "--gpu" in command:
        at = command.index("--gpu")
        before += command[at : at + 2]
        del command[at : at + 2]
    return _join([*before, "--", *command])


def _join(arguments: Sequence[str]) -> str:
    return shlex.join(["effgpu", *arguments])
