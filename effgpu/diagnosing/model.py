"""A model by its name, as a script that fine-tunes it: `effgpu doctor --model`."""

import json
import sys
from typing import NoReturn

from effgpu.diagnosing.diagnosis import Diagnosis
from effgpu.diagnosing.doctor import doctor
from effgpu.predicting.models import fine_tuning


def diagnose_model(model: str, gpu: str | None = None, **how: object) -> Diagnosis:
    """Say what holds the fine-tuning of a model back: `doctor`, for the step of `fine_tuning`, which takes `how`.

    It runs as a script does, in a process of its own: without a GPU, on tensors without values. Raises what both raise.
    """
    fine_tuning(model, **how)  # refuses what is wrong before a process starts
    return doctor([sys.executable, "-m", __name__, json.dumps({"model": model, **how})], gpu=gpu)


def train(how: dict[str, object]) -> NoReturn:
    """Fine-tune until the process ends, as a plan of doctor's ends it."""
    step = fine_tuning(**how)()
    while True:
        step()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
