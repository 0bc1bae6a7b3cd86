"""`effgpu predict`: whether a training step fits a GPU that is not there, and how long it takes."""

import argparse
import math
from typing import TYPE_CHECKING

from effgpu.cli import model, output, target
from effgpu.cli.exits import EXCEEDED, SUCCEEDED, UNCLEAR, refusing
from effgpu.predicting.asked import check_taken
from effgpu.predicting.gpus import find_gpus
from effgpu.units import align, check_positive

if TYPE_CHECKING:
    from effgpu.predicting.prediction import Prediction

_BEFORE = """\
effgpu: runs {} for three to five steps. It writes no weights, changes no file that is there, \
and leaves nothing that it computed"""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    text = "predict whether a training step fits a GPU, and its time, without having one"
    more = target.tell_more(
        "effgpu predict --gpu T4 -- python train.py --batch 12",
        'effgpu predict --gpu T4 --gpu "A100 80 GB" --samples 50000 --batch 12 -- python train.py --batch 12',
        "effgpu predict --model distilbert-base-uncased --batch 32 --gpu T4",
    )
    parser = commands.add_parser("predict", help=text, description=text, **more)
    target.add_words(parser)
    gpu_help = 'such as T4, "A100 80 GB" or "16 GiB", once or more, all names below; else all that are known'
    parser.add_argument("--gpu", action="append", metavar="GPU", help=gpu_help)
    parser.add_argument("--samples", type=int, metavar="N", help="samples of an epoch, to tell its time")
    parser.add_argument("--batch", type=int, metavar="B", help="samples of a step, with --samples or --model")
    taken_help = (
        "of the rows that are chosen by a condition, as in x[mask], the share from 0 to 1; else what is known, or half"
    )
    parser.add_argument("--taken", type=float, metavar="SHARE", help=taken_help)
    price_help = "of an hour, to tell what an epoch of --samples costs, with --model"
    parser.add_argument("--price", type=float, metavar="P", help=price_help)
    model.add_options(parser)
    output.add_options(parser)
    parser.set_defaults(command=run)


def run(chosen: argparse.Namespace) -> int:
    """Predict; returns the exit code."""
    how = model.check_asked(chosen, "predict", not_with_a_model=("taken", "trace"), only_with_a_model=("price",))
    with refusing(ValueError):
        find_gpus(chosen.gpu)
        check_taken(chosen.taken)
    if chosen.model:
        return _predict_model(chosen, how)
    epoch = {"--samples": chosen.samples, "--batch": chosen.batch}
    given = {option: value for option, value in epoch.items() if value is not None}
    with refusing(ValueError):
        check_positive(**given)
        if len(given) == 1:
            more = "--batch" if "--samples" in given else "--samples or --model"
            raise ValueError(f"predict: expected {more} with {next(iter(given))}")
        if chosen.trace and len(chosen.gpu or ()) != 1:
            raise ValueError("--trace: expected one --gpu, whose timeline it is")
    command = target.read_words(chosen.words)
    from effgpu.predicting.predict import predict

    with target.opened(chosen.words, command, _BEFORE) as (looked_at, _):
        predicted = predict(looked_at, chosen.gpu, taken=chosen.taken)
        timeline = predicted.timeline() if chosen.trace else None
    shown = [repr(predicted)]
    if chosen.samples:
        steps = math.ceil(chosen.samples / chosen.batch)
        times = [(gpu.name, predicted.tell_time(gpu, steps)) for gpu in predicted.gpus if gpu.bandwidth]
        shown += ["", f"an epoch of {chosen.samples:,} samples takes {steps:,} steps", *align(times)]
    output.give(predicted, chosen, "\n".join(shown), timeline=timeline)
    return _judge_fit(predicted) if chosen.gpu else SUCCEEDED


def _predict_model(chosen: argparse.Namespace, how: dict[str, object]) -> int:
    from effgpu.predicting import models

    with refusing(TypeError, ValueError, RuntimeError, ConnectionError):
        found = models.predict_model(chosen.model, gpu=chosen.gpu, samples=chosen.samples, price=chosen.price, **how)
    output.give(found, chosen)
    return _judge_fit(found.predicted) if chosen.gpu else SUCCEEDED


def _judge_fit(predicted: "Prediction") -> int:
    """The exit code for the GPUs that were named."""
    from effgpu.predicting.prediction import DOES_NOT_FIT, MAY_NOT_FIT

    verdicts = {predicted.verdict(gpu) for gpu in predicted.gpus}
    if DOES_NOT_FIT in verdicts:
        return EXCEEDED
    return UNCLEAR if MAY_NOT_FIT in verdicts else SUCCEEDED
