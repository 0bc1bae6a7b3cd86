"""`predict --model` and `doctor --model`: a model of transformers, by its name, in place of a script."""

import argparse
from collections.abc import Sequence

from effgpu.cli.exits import REFUSED, Exit, check_installed, refusing
from effgpu.predicting import choices

_ASKED = ("length", "lora", "four_bits", "checkpointing", "optimizer", "precision")  # keywords of `fine_tuning`


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, and what is asked of it; its `--batch` is the command's own."""
    model = parser.add_argument_group("a model of transformers, by its name, in place of a script")
    model_help = "a name on the Hugging Face Hub, or a folder with a config.json; no weights are downloaded"
    model.add_argument("--model", metavar="NAME", help=model_help)
    model.add_argument("--length", type=int, metavar="TOKENS", help="of each text; default: 512, or all it takes")
    lora_help = "train adapters of this rank, 8 where none is given, in place of the weights"
    model.add_argument("--lora", type=int, nargs="?", const=8, metavar="RANK", help=lora_help)
    model.add_argument("--4bit", dest="four_bits", action="store_true", help="frozen weights in 4 bits, with --lora")
    model.add_argument("--checkpointing", action="store_true", help="compute activations again, do not keep them")
    model.add_argument("--optimizer", metavar="NAME", help="adamw (default), sgd, momentum or adafactor")
    model.add_argument("--precision", metavar="NAME", help="mixed (default), pure (16 bits), tf32 or fp32")


def check_asked(
    chosen: argparse.Namespace, command: str, not_with_a_model: Sequence[str], only_with_a_model: Sequence[str] = ()
) -> dict[str, object]:
    """What is asked of a model beside its name: keywords of `fine_tuning`. Refuses what does not go together."""
    if not chosen.model:
        if any(map(_is_given, (getattr(chosen, name) for name in (*_ASKED, *only_with_a_model)))):
            names = ", ".join(f"--{name}" for name in (*_ASKED, *only_with_a_model)).replace("four_bits", "4bit")
            raise Exit(REFUSED, f"{command}: expected --model with {names}")
        if not chosen.words:
            raise Exit(
                REFUSED, f"{command}: expected a command, as in -- python train.py, FILE.py:VARIANT, or --model NAME"
            )
        return {}
    if chosen.words:
        raise Exit(REFUSED, "--model: expected no command beside it")
    if given := [name for name in not_with_a_model if getattr(chosen, name) is not None]:
        raise Exit(REFUSED, f"--{given[0]}: expected a command or FILE.py:VARIANT, and no --model")
    if chosen.batch is None:
        raise Exit(REFUSED, "--model: expected --batch, the texts of a step")
    check_installed("--model", "transformers")
    asked = {name: getattr(chosen, name) for name in _ASKED}
    how = {name: value for name, value in asked.items() if _is_given(value)} | {"batch": chosen.batch}
    with refusing(ValueError):
        choices.check(**how)
    return how


def _is_given(value: object) -> bool:
    """Whether an option stands in the command: 0 does, too."""
    return value is not None and value is not False
