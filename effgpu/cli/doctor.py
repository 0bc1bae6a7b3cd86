"""`effgpu doctor`: what holds a training step back, and what each change would save."""

import argparse
import shlex
from typing import TYPE_CHECKING

from effgpu.cli import model, output, target
from effgpu.cli.exits import REFUSED, SUCCEEDED, Exit, refusing
from effgpu.errors import BadArgument
from effgpu.predicting.gpus import check_speed, find_gpu
from effgpu.units import join_names

if TYPE_CHECKING:
    from effgpu.diagnosing.diagnosis import Diagnosis

_BEFORE = """\
effgpu: runs {} for some steps. It writes no weights, changes no file that is there, \
and leaves nothing that it computed"""
_BEFORE_ON_GPU = """\
effgpu: trains {} for some hundred steps, some of them altered. The weights that it trains are thrown away, and no \
file that is there changes. Before, it is run for some steps to predict what is not measured"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    text = "say what holds a training step back, and what each change would save"
    more = target.tell_more(
        "effgpu doctor --gpu T4 -- python train.py --batch 12",
        "effgpu doctor --gpu T4 --json found.json --trace step.json -- python train.py --batch 12",
        "effgpu doctor --gpu T4 --model distilbert-base-uncased --batch 32",
    )
    parser = commands.add_parser("doctor", help=text, description=text, **more)
    target.add_words(parser)
    loader_help = "what gives batches of a function's step, by its name in the same file: then the step takes a batch"
    parser.add_argument("--loader", metavar="NAME", help=loader_help)
    parser.add_argument(
        "--gpu",
        action="append",
        metavar="GPU",
        help="predict all for this one, all names below; else this machine's, or a T4",
    )
    parser.add_argument("--batch", type=int, metavar="B", help="samples of a step, with --model")
    model.add_options(parser)
    output.add_options(parser)
    parser.set_defaults(command=run)


def run(chosen: argparse.Namespace) -> int:
    """Diagnose; returns the exit code."""
    how = model.check_asked(chosen, "doctor", not_with_a_model=("loader", "trace"))
    if not chosen.model and chosen.batch is not None:
        raise Exit(REFUSED, "doctor: expected --model with --batch")
    if len(given := chosen.gpu or ()) > 1:
        raise Exit(REFUSED, f"doctor: expected one --gpu, got {join_names(given)}: effgpu predict takes several")
    chosen.gpu = next(iter(given), None)
    if chosen.gpu:
        with refusing(ValueError):
            check_speed(find_gpu(chosen.gpu))
    found = _diagnose_model(chosen, how) if chosen.model else _diagnose(chosen)
    output.give(found, chosen, timeline=found.timeline if chosen.trace else None)
    return SUCCEEDED


def _diagnose(chosen: argparse.Namespace) -> "Diagnosis":
    command = target.read_words(chosen.words)
    if chosen.loader and command is not None:
        raise Exit(REFUSED, "doctor: expected --loader with FILE.py:VARIANT: a script has its own")
    from effgpu.diagnosing.doctor import doctor, find_target

    here = not chosen.gpu and find_target(None)[1]
    with target.opened(chosen.words, command, _BEFORE_ON_GPU if here else _BEFORE) as (looked_at, names):
        if chosen.loader and chosen.loader not in names:
            raise Exit(REFUSED, f"{shlex.join(chosen.words)}: expected a loader called {chosen.loader}")
        found = doctor(looked_at, names[chosen.loader] if chosen.loader else None, chosen.gpu)
        if chosen.trace and not found.timeline:
            raise BadArgument(f"--trace: {found.notes[-1]}")
    return found


def _diagnose_model(chosen: argparse.Namespace, how: dict[str, object]) -> "Diagnosis":
    from effgpu.diagnosing.model import diagnose_model

    with refusing(TypeError, ValueError, RuntimeError, ConnectionError):
        return diagnose_model(chosen.model, chosen.gpu, **how)
