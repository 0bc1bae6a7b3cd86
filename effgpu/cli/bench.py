"""`effgpu bench`: training scripts as they are, compared in turns."""

import argparse
import math
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from effgpu.attaching.commands import STARTERS
from effgpu.benching import checks
from effgpu.cli import output, target
from effgpu.cli.exits import EXCEEDED, FAILED, INTERRUPTED, REFUSED, SUCCEEDED, UNCLEAR, Exit, check_installed, refusing

if TYPE_CHECKING:
    from effgpu.benching.result import Bench

# options that are keywords of `effgpu.bench`
_KEYWORDS = ("seconds", "precision", "skip", "timeout", "unit", "one_at_a_time", "control", "logs")
_KEYWORDS += ("seeds", "until", "until_loss")


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    text = "compare training scripts as they are, in turns"
    more = target.tell_more(
        "effgpu bench 'python train.py' 'python train.py --bf16'",
        "effgpu bench --ref main --ref my-branch -- python train.py",
        "effgpu bench --seeds 5 --until 500 'python train.py --seed {seed}' 'python train.py --bf16 --seed {seed}'",
        gpus=False,
    )
    parser = commands.add_parser("bench", help=text, description=text, **more)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", help="such as 'python train.py --bf16', in quotes")
    parser.add_argument("--name", action="append", default=[], metavar="LABEL=COMMAND", help="a command with its label")
    ref_help = "a commit in which to run the one command, after --; at least twice"
    parser.add_argument("--ref", action="append", default=[], metavar="COMMIT", help=ref_help)
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="most of each command; default: 5")
    parser.add_argument(
        "--precision",
        type=percentage,
        metavar="PERCENT",
        help="of the interval to aim at, such as 1%%, the default on a GPU; on a CPU: 3%%",
    )
    parser.add_argument(
        "--skip",
        type=int,
        default=5,
        metavar="STEPS",
        help="so many steps at the start are not timed, as they compile and warm up; default: 5",
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="longest wait for a step; default: 300"
    )
    parser.add_argument("--unit", default="items", help="what items are, such as tokens")
    seeds_help = "train each command with so many seeds, which stand for {seed} in it, and compare the losses, too"
    parser.add_argument("--seeds", type=int, metavar="N", help=seeds_help)
    parser.add_argument("--until", type=int, metavar="STEP", help="with --seeds: the last step; else the script's end")
    parser.add_argument("--until-loss", type=float, metavar="LOSS", help="with --seeds: also compare the time to it")
    control_help = "a row more: the baseline against its own copy, the noise of this machine"
    parser.add_argument("--control", action="store_true", help=control_help)
    parser.add_argument("--one-at-a-time", action="store_true", help="restart the commands for their turns")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="folder for the commands' output; else a temporary one"
    )
    parser.add_argument("--json", metavar="FILE", help="store the result; - is standard output, without table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result, as PNG, SVG or PDF")
    parser.add_argument("--markdown", action="store_true", help="print the table in Markdown")
    slower_help = "such as 5%%: exit with code 3 if all of the interval is slower by more than it, with 4 if a part is"
    parser.add_argument("--fail-if-slower", type=percentage, metavar="PERCENT", help=slower_help)
    memory_help = "such as 10%%: exit with code 3 if the peak memory is larger by more than it, with 4 if not known"
    parser.add_argument("--fail-if-more-memory", type=percentage, metavar="PERCENT", help=memory_help)
    parser.set_defaults(command=run, makes_folders=("--json",))


def percentage(text: str) -> float:
    """A share of 1 from a percentage: "5%" or "5". argparse shows the function's name: invalid percentage value."""
    number = float(text.strip().removesuffix("%"))
    if not 0 <= number < math.inf:
        raise ValueError
    return number / 100


def run(chosen: argparse.Namespace) -> int:
    """Compare; returns the exit code."""
    if chosen.plot:
        check_installed("--plot", "matplotlib")
    if not (chosen.commands or chosen.name):
        raise Exit(REFUSED, "bench: expected commands, such as effgpu bench 'python train.py' 'python train.py --bf16'")
    options = {name: getattr(chosen, name) for name in _KEYWORDS}
    with refusing(TypeError, ValueError):
        commands = _read_commands(chosen)
        checks.check(commands, chosen.ref, **options)
    if chosen.plot:
        from effgpu.figures.panels import can_save
        from effgpu.figures.plot import plot

        if not can_save(chosen.plot):
            raise Exit(REFUSED, f"--plot: expected a name that ends in .png, .svg or .pdf, got {chosen.plot}")
    from effgpu import results
    from effgpu.benching.bench import bench

    try:
        with refusing(OSError, TypeError, ValueError):
            result = bench(commands, refs=chosen.ref, **options)
    except KeyboardInterrupt:
        print("effgpu: interrupted before anything was measured", file=sys.stderr)
        raise
    print(f"output: {', '.join(result.logs.values())}", file=sys.stderr)
    try:
        output.give(result, chosen, result.markdown() if chosen.markdown else result, results.save)
    finally:
        if chosen.plot:
            with refusing(OSError, ValueError):
                plot(result).savefig(chosen.plot)
                if chosen.seeds and (curves := result.curves).by_label:
                    plot(curves).savefig(chosen.plot.with_stem(f"{chosen.plot.stem}-losses"))
    return _judge(result, chosen)


def _judge(result: "Bench", chosen: argparse.Namespace) -> int:
    """The exit code; verdicts that decide it are said on standard error."""
    if result.interrupted:
        return INTERRUPTED
    trained = [run for runs in result.runs.values() for run in runs] if chosen.seeds else []
    if result.crashed or any(each.failed for each in [*result, *trained]):
        return FAILED
    if chosen.seeds and result.seeds_change_nothing:
        return UNCLEAR
    exceeded, unclear = result.judge(chosen.fail_if_slower, chosen.fail_if_more_memory)
    for verdict in [*exceeded, *unclear]:
        print(f"effgpu: {verdict}", file=sys.stderr)
    return EXCEEDED if exceeded else UNCLEAR if unclear else SUCCEEDED


def _read_commands(chosen: argparse.Namespace) -> list[str] | dict[str, str]:
    """The commands, by label where one has one, those last. Raises ValueError for no label, or the same twice."""
    commands = chosen.commands
    if len(commands) > 1 and (chosen.ref or re.fullmatch(STARTERS, Path(commands[0]).name)):  # one command's words
        commands = [shlex.join(commands)]
    if not chosen.name:
        return commands
    named = [text.partition("=") for text in chosen.name]
    given = [*zip(commands, commands), *((label.strip(), command.strip()) for label, _, command in named)]
    if not all(label and command for label, command in given) or len(dict(given)) < len(given):
        raise ValueError(f"--name: expected LABEL=COMMAND, each label once, got {chosen.name}")
    return dict(given)
