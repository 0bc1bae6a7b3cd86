"""A model by its name, as a script that fine-tunes it: `effgpu doctor --model`."""

import json
import sys
from dataclasses import replace
from typing import NoReturn

from effgpu.attaching.commands import read_program
from effgpu.diagnosing.causes import PRECISION, TF32
from effgpu.diagnosing.diagnosis import NO_LOADER, ONLY_CALLS, Diagnosis, Finding
from effgpu.diagnosing.doctor import diagnose_script, find_target
from effgpu.predicting.models import fine_tuning

_NO_TEXTS = "a model alone has no texts to load: what loading takes was not looked at"


def diagnose_model(model: str, gpu: str | None = None, **how: object) -> Diagnosis:
    """Say what holds the fine-tuning of a model back: `doctor`, for the step of `fine_tuning`, which takes `how`.

    It runs as a script does, in a process of its own: without a GPU, on tensors without values. Raises what both raise.
    """
    fine_tuning(model, **how)  # refuses what is wrong before a process starts
    program = read_program([sys.executable, "-m", __name__, json.dumps({"model": model, **how})])
    target, measured = find_target(gpu)
    found = diagnose_script(replace(program, called=f"the fine-tuning of {model}"), target, measured=measured)
    return _as_options(found, how.get("precision", "mixed"))


def _as_options(found: Diagnosis, precision: str) -> Diagnosis:
    """The diagnosis, which advises options in place of lines of a script, where there are such options."""
    options = {TF32: "--precision tf32"} | ({PRECISION: "--precision mixed"} if precision != "mixed" else {})
    lines = {one.advice: options[one.name] for one in found.examined if one.name in options}

    def advise(one: Finding) -> Finding:
        advice = one.advice  # of a pair, that of both
        for line, option in lines.items():
            advice = advice.replace(line, option)
        return replace(one, advice=advice)

    kept = [note for note in found.notes if note not in (NO_LOADER, ONLY_CALLS)]
    return replace(
        found,
        examined=tuple(map(advise, found.examined)),
        hidden=tuple(map(advise, found.hidden)),
        notes=(*kept, _NO_TEXTS),
    )


def train(how: dict[str, object]) -> NoReturn:
    """Fine-tune until the process ends, as a plan of doctor's ends it."""
    step = fine_tuning(**how)()
    while True:
        step()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
