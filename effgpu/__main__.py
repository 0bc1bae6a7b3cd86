"""The command line: `effgpu` and `python -m effgpu`. It reads what was asked for and hands it to a module of `cli/`."""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from typing import NoReturn

from effgpu import __version__
from effgpu.cli import bench, calibrate, doctor, info, misread, output, predict, report, run, target
from effgpu.cli.exits import INTERRUPTED, REFUSED, SUCCEEDED, UNREAD, Exit, check_installed
from effgpu.errors import did_you_mean

_QUESTIONS = {  # an example of each command, and what it answers
    "effgpu predict --gpu T4 -- python train.py": "Will my script fit a GPU, and how long will a step take there?",
    "effgpu doctor --gpu T4 -- python train.py": "What holds my training back, and what would each change save?",
    "effgpu bench 'python train.py' 'python train.py --bf16'": "Is a change faster, and by how much?",
    "effgpu run": "What does each technique of the course bring on this machine?",
    "effgpu report one.json other.json": "How do machines compare?",
    "effgpu info": "What does this machine support?",
    "effgpu calibrate": "How fast is this GPU, for all predictions of it from now on?",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Returns the exit code.

    0: success; of `predict`, that the step fits or no GPU was named. 1: a lesson, a script or a benched command failed.
    2: bad arguments or files, a step that cannot be predicted, or no GPU to calibrate. 3: more time or memory than
    `bench` allows, or than a GPU of `predict` has. 4: it may not fit, or the intervals of `bench` do not tell.
    130: Ctrl-C. 141: nobody reads the output to its end, as of a program that SIGPIPE ends.
    """
    _prepare_streams()
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)  # for what is flushed at the end of Python
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nothing, stream.fileno())
        return UNREAD


def _prepare_streams() -> None:
    """Let no print fail where a stream is closed, or its encoding lacks a sign, as that of a pipe on Windows."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  it stays open
        elif getattr(stream, "errors", None) == "strict":
            stream.reconfigure(errors="replace")


def _main(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = argparse.Namespace(json="-" if output.asks_for_json(arguments) else None)  # until it is read
    try:
        chosen = _read(arguments)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # `kill` ends all that was started, as Ctrl-C does
        output.check_files(chosen)
        target.check_one_variant(arguments)
        check_installed("effgpu", "torch")  # which an installation without its dependencies lacks
        return chosen.command(chosen)
    except Exit as end:
        code, text = end.args
        print(f"effgpu: error: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        code, text = INTERRUPTED, "interrupted"
    if getattr(chosen, "json", None) == "-" and "printed" not in chosen:
        output.print_failed(text)
    return code


def _read(arguments: list[str]) -> argparse.Namespace:
    """What argparse reads, or an Exit that says in one sentence what was meant."""
    parser = make_parser()
    if arguments and arguments[0] not in parser.by_name and not arguments[0].startswith("-"):
        guess = did_you_mean(arguments[0], parser.by_name) or f"expected one of {', '.join(parser.by_name)}"
        raise Exit(REFUSED, f"there is no command {arguments[0]!r}: {guess}")
    chosen, unknown = parser.parse_known_args(target.put_variant_last(arguments))
    if unknown and arguments[0] in parser.by_name:
        options = parser.by_name[arguments[0]]._option_string_actions
        raise Exit(REFUSED, misread.explain(arguments, chosen, unknown, options))
    if unknown:
        parser.error(f"expected no {unknown[0]}")
    return chosen


class _Parser(argparse.ArgumentParser):
    """One whose errors are one line. `by_name` are the parsers of its commands."""

    by_name: Mapping[str, argparse.ArgumentParser] = {}

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("effgpu").strip()
        raise Exit(REFUSED, f"{f'{name}: ' * bool(name)}{message}; {self.prog} --help says what it takes")


def make_parser() -> argparse.ArgumentParser:
    """What reads the arguments. `command` of what it gives is the function that takes them and returns an exit code."""
    parser = _Parser(prog="effgpu", description="Measure what a training technique does to time, memory and energy.")
    parser.add_argument("--version", action="version", version=f"effgpu {__version__}")
    parser.set_defaults(command=_show_questions)
    commands = parser.add_subparsers(metavar="COMMAND")
    for module in (info, run, report, predict, doctor, calibrate, bench):
        module.add(commands)
    parser.by_name = commands.choices
    return parser


def _show_questions(chosen: argparse.Namespace) -> int:
    """What `effgpu` alone prints: the questions, each with the command that answers it."""
    for command, question in _QUESTIONS.items():
        print(f"{question}\n    {command}\n")
    print("effgpu COMMAND --help says what else it takes.")
    return SUCCEEDED


if __name__ == "__main__":
    sys.exit(main())
