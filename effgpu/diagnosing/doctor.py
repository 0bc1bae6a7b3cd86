"""`doctor`: what holds a training step back, as a list of what each change would save at most, the most first."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from effgpu.attaching import scripts
from effgpu.attaching.commands import Program, read_program
from effgpu.diagnosing.diagnosis import Diagnosis
from effgpu.diagnosing.observed import Observed
from effgpu.diagnosing.ranking import rank
from effgpu.errors import BadArgument
from effgpu.predicting.asked import STEPS, Asked
from effgpu.predicting.gpus import Gpu, GpuLike, check_speed, find_gpu, gpu_here

if TYPE_CHECKING:
    from effgpu.measuring.variants import Variant

DEFAULT_GPU = "T4"
_PLANS = "effgpu.diagnosing.scripts"  # which run in the script's process, and alone load PyTorch
_WALKED = 1 + STEPS + 3  # steps that a script has to make without a GPU: one whose graphs are looked at, two in 16 bits


def doctor(variant: "Variant | str | Sequence[str]", loader: object = None, gpu: GpuLike | None = None) -> Diagnosis:
    """Say what holds a training step back: what each change would save at most, before it is made.

    `variant` is the command of a training script, as it is: "train.py --batch 12", "python -m package.train". Or it is
    a function that builds everything and returns one training step. With a `loader`, such a step takes one batch, as
    in `for batch in loader: step(batch)`. The loader is a DataLoader, a list of batches, or a function that returns
    one. Without it, the step takes nothing, and data loading and copies are not looked at. A script has its own.

    On a GPU, the step runs as it is and with one thing changed, in turns: with the same batch again, with a batch that
    is on the GPU, with optimizers whose step is empty, under autocast, with TF32. All else is predicted, as is
    everything for a `gpu` that is named or, on a machine without one, a T4. Then the loader is measured here, and the
    time of the step is replayed from a walk on fake tensors; a function's step is also observed here for two calls.
    Each saving is a ceiling.

    The step is called often: on a GPU for about 5 s as it is, as long with each of up to six changes, and again for up
    to three pairs of them. What it trains is thrown away.

    Raises ValueError for a GPU whose speed is not known and a command that starts no Python program, TypeError for a
    step that does not take what it is given, RuntimeError for a loader that ends and does not start anew and for a step
    that cannot be predicted, with the reason; torch.OutOfMemoryError if the step does not fit this device. What the
    step raises is raised, with the number of the call; what a script raises as ScriptFailed, a RuntimeError.
    """
    target, measured = find_target(gpu)
    if isinstance(variant, (str, list, tuple)):
        if loader is not None:
            raise BadArgument('loader: expected none for a script, which has its own; name a GPU as gpu="T4"')
        return diagnose_script(read_program(variant), target, measured=measured)
    from effgpu.diagnosing.functions import diagnose_function

    return diagnose_function(variant, loader, target, measured=measured)


def find_target(gpu: GpuLike | None) -> tuple[Gpu, bool]:
    """The GPU of a diagnosis, and whether it is the one that is here. Raises ValueError for an unknown speed."""
    if gpu is None:
        from effgpu.measuring.device import describe, find_device

        if find_device().type == "cuda":
            device = describe()
            return gpu_here(device.name, device.memory, device.capability), True
    target = find_gpu(DEFAULT_GPU if gpu is None else gpu)
    check_speed(target)
    return target, False


def diagnose_script(program: Program, gpu: Gpu, *, measured: bool) -> Diagnosis:
    """What holds the script's step back on this GPU, by its own loop. With `measured`, it is the GPU that is here.

    Raises ScriptFailed for an error of the script's, and RuntimeError where it cannot be followed.
    """
    predicted, walked, why = None, Observed(), f"{gpu.name} is not in the table of GPUs"
    if gpu.bandwidth is not None:
        try:
            asked = Asked((gpu,), gpu.capability)
            predicted, walked = scripts.run(program, f"{_PLANS}:predicting", needs=_WALKED, asked=asked)
            why = ""
        except scripts.ScriptFailed:
            raise
        except RuntimeError as error:
            if not measured:
                raise
            why = str(error)
    if not measured:
        return rank(gpu, walked, predicted)
    seen = scripts.run(program, f"{_PLANS}:measuring", needs="some hundred", gpu=gpu, began=time.time())
    if predicted:
        from effgpu.diagnosing.agreement import check_walked

        try:
            seen.notes += tuple(check_walked(seen, predicted))
        except RuntimeError as error:
            predicted, why = None, str(error)
    for name in ("halved", "frozen", "frozen_halved", "untrained", "dropped", "loop", "updates", "graphed"):
        setattr(seen, name, getattr(walked, name))
    seen.compiled |= walked.compiled
    return rank(gpu, seen, predicted, why)
