"""The plan of `predict` in a script's own process: its third step is counted, as a function's second call is."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import replace

from effgpu.attaching.child import NOTE, Refused
from effgpu.attaching.steps import BACKWARD, Marks, Plan
from effgpu.predicting.as_gpu import as_gpu
from effgpu.predicting.files import weights_without_values
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.hardware import replaced
from effgpu.predicting.placing import ScriptRecorder, fakes_in_place
from effgpu.predicting.prediction import conclude, count, explain, walking_as
from effgpu.predicting.ranks import alone
from effgpu.units import format_seconds

_MORE = 2  # steps that are counted in place of one with an evaluation in it
_LONG = 5.0  # seconds of forward passes that are worth a line


@contextlib.contextmanager
def planned(
    marks: Marks, gpus: tuple[Gpu, ...], capability: tuple[int, int], steps: int, taken: float | None
) -> Iterator[Plan]:
    """The plan whose result is the Prediction for these GPUs; inside, the script's GPU has this capability.

    Raises Refused for what cannot be walked.
    """
    with recording(marks, gpus, capability, taken) as recorder:
        yield walk(marks, recorder, gpus, steps)


@contextlib.contextmanager
def recording(
    marks: Marks, gpus: tuple[Gpu, ...], capability: tuple[int, int], taken: float | None = None
) -> Iterator[ScriptRecorder]:
    """Inside, a script has the first of these GPUs with this capability: what it does is recorded, and not done."""
    recorder = walking_as(ScriptRecorder(capability), gpus)
    recorder.taken = taken
    marks.listeners.append(lambda: setattr(recorder, "loop", marks.loop or recorder.loop))
    with (
        _refusing(recorder),
        weights_without_values(recorder),
        recorder.checkpoints.kept(),
        as_gpu(recorder),
        replaced([*fakes_in_place(recorder), *alone()]),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield recorder


def walk(marks: Marks, recorder: ScriptRecorder, gpus: tuple[Gpu, ...], steps: int) -> Plan:
    """The plan whose result is the Prediction of a script's step."""
    _check_on_gpu(recorder)  # the first step is done
    yield from count(recorder, steps)
    for _ in range(_MORE):
        if not recorder.evaluated:
            break
        recorder.note_kernels()
        yield 1
        recorder.end_step()
    notes = []
    if marks.source is BACKWARD:
        notes.append("no optimizer of PyTorch's: a step is counted from one backward pass to the next")
    if recorder.evaluated:
        notes.append("an evaluation is part of the step that was counted: the script evaluates in each")
    if recorder.passes_before > steps * recorder.passes_within:  # as many steps came before
        text = "forward passes without gradients ran before the third step, such as of an evaluation or of a rollout,"
        took = format_seconds(recorder.without_gradients)
        slow = f" and took {took} here: let the script evaluate on one batch" * (recorder.without_gradients > _LONG)
        notes.append(f"{text} and are not counted{slow}")
    concluded = conclude(recorder, gpus)
    return replace(concluded, notes=(*concluded.notes, *notes))


def _check_on_gpu(recorder: ScriptRecorder) -> None:
    if not recorder.on_gpu:
        raise Refused('trains on the CPU: move its model and its batches to the GPU, as with .to("cuda")')


@contextlib.contextmanager
def _refusing(recorder: ScriptRecorder) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as error:
        cause = recorder.trouble if isinstance(error, SystemExit) else error
        if not isinstance(error, Refused) and cause and (why := explain(cause)):
            raise Refused(why) from error
        if not isinstance(error, (Refused, SystemExit)) and (guessed := recorder.tell_guesses()):
            error.add_note(f"{NOTE}not known here: {guessed}")
        raise
    if recorder.trouble and (why := explain(recorder.trouble)):
        raise Refused(why) from recorder.trouble
