"""The plan of `predict` in a script's own process: its third step is counted, or the next usual one."""

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch.optim.optimizer import register_optimizer_step_pre_hook

from effgpu.attaching.child import NOTE, Again, CannotFollow, describe_error
from effgpu.attaching.sites import Site
from effgpu.attaching.steps import BACKWARD, Marks, Plan, ScriptOver
from effgpu.errors import CannotPredict
from effgpu.predicting.as_gpu import as_gpu
from effgpu.predicting.asked import STEPS, Asked
from effgpu.predicting.facts import ASSUMED, RARE, UNTIMED
from effgpu.predicting.full import Room
from effgpu.predicting.guesses import Filled, Guesses
from effgpu.predicting.loading import compare_last
from effgpu.predicting.placing import LONG, MORE_WORK, ScriptRecorder, fakes_in_place
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.walking import conclude, count, explain, name_rare
from effgpu.units import format_bytes, format_seconds, with_article

_OF_SIZES = (RuntimeError, IndexError, ValueError, ZeroDivisionError)  # what a size may lead to that is not right
_MORE = 2  # steps that may count in place of the third, where that is no usual one
_HIGHER = 1.02  # by this factor, what came before the steps that are counted is told
_FEW, _FEWEST = 0.1, 1e-4  # shares of the weights
_WORTH = 0.05  # of the step: work on the CPU that is worth a line


@contextlib.contextmanager
def planned(marks: Marks, asked: Asked, **again: object) -> Iterator[Callable[[], Plan]]:
    """What makes the plan whose result is the Prediction that is asked for; inside, the script has its GPU.

    Raises CannotFollow for what cannot be walked, and Again, with options of `recording`, where a script may then go
    on.
    """
    with recording(marks, asked, **again) as recorder:
        yield partial(walk, marks, recorder)


@contextlib.contextmanager
def recording(
    marks: Marks,
    asked: Asked,
    *,
    runs_out: bool = True,
    answers: Mapping[Hashable, bool] | None = None,
    tries: int = 2,
    probes: int = 16,
) -> Iterator[ScriptRecorder]:
    """Inside, a script has the GPU that is asked for: what it does is recorded, and not done.

    With `runs_out`, a script that catches running out of memory does so where one GPU, the only one, is full. `answers`
    are those of `Guesses`. After an error that follows a guess, so many `tries` take it the other way round. So many
    backward passes are `probes`, such as for a batch that fits, until an optimizer is made.
    """
    room = Room(min(gpu.memory - gpu.context[0] for gpu in asked.gpus), runs_out and len(asked.gpus) == 1)
    recorder = ScriptRecorder(asked, answers, marks, room)
    marks.probes = probes
    marks.listeners.append(recorder.next_step)
    marks.leaving += [partial(recorder.files.clean, goes_on=False), recorder.files.close]

    def check_first(*_: object) -> None:  # a step of LBFGS may run the model for minutes
        if not marks.total:
            _check_on_gpu(recorder.storages.on_gpu)

    with _explaining(marks, recorder, tries), as_gpu(recorder, fakes_in_place(recorder)):
        checking = register_optimizer_step_pre_hook(check_first)
        try:
            yield recorder
        finally:
            checking.remove()
            marks.guessed = recorder.guesses.tell()


def walk(marks: Marks, recorder: ScriptRecorder) -> Plan:
    """The plan whose result is the Prediction of a script's step."""
    _check_on_gpu(recorder.storages.on_gpu)  # the first step is done
    yield from count(recorder)
    _check_on_gpu(not recorder.capability or any(event.kernels for event in recorder.work.events))
    is_last = yield from _take_a_usual_one(recorder)
    _name_rare_work(recorder)
    _name_larger_batches(recorder)
    concluded = conclude(recorder)
    before, site = recorder.storages.peak_before()
    notes = [*concluded.notes, *(_tell_caught(recorder, *places) for places in recorder.room.caught.items())]
    notes += _tell_step(marks, recorder, is_last)
    if work := find_work(recorder.worked, concluded):
        took, most = format_seconds(sum(work.values())), "most of it " * (len(work) > 1)
        notes.append(
            f"beside the step, the script works on the CPU: {took} here, per step, {most}at {next(iter(work))}"
        )
    if before > _HIGHER * concluded.allocated:
        took = f"before the step that was counted, the script took more, {format_bytes(before)} (predicted)"
        notes.append(f"{took}: {site}" if site else took)
        concluded = replace(concluded, before=before)
    return replace(concluded, notes=tuple(notes))


def _take_a_usual_one(recorder: ScriptRecorder) -> Plan:
    """The plan that lets later steps count where the one that did is no usual one.

    It has an evaluation in it, an epoch's last batch, or shows much. Its result is whether the step that counts is the
    script's last.
    """
    after_evaluation, shown = False, None
    for _ in range(_MORE):
        evaluated = recorder.evaluated or recorder.ran_more_passes()
        cut_short = recorder.is_cut_short() and not after_evaluation  # such a one may follow each evaluation
        shows = recorder.work.find_shown()
        if not (evaluated or cut_short or shows):
            break
        shown = shows or shown
        if not evaluated:
            recorder.storages.leave_out()
        after_evaluation, before = evaluated, recorder.noted_so_far()
        recorder.begin_step()
        try:
            yield 1
        except ScriptOver:
            recorder.take_back(before)
            return True
        recorder.end_step()
    if shown and not recorder.work.find_shown():
        recorder.say(ASSUMED, f"without what is copied to the CPU only in some steps: {shown}")
    return False


def find_work(worked: Mapping[Site, float], predicted: Prediction) -> dict[Site, float]:
    """Seconds of the script's own work on the CPU in a step, by line, the longest first.

    Empty where they are less than 5 % of the step on each GPU.
    """
    speeds = [gpu for gpu in predicted.gpus if gpu.bandwidth and gpu.capability >= predicted.holds_from]
    least = min((predicted.time(gpu).expected for gpu in speeds), default=math.inf)
    if sum(worked.values()) <= _WORTH * least:
        return {}
    return dict(sorted(worked.items(), key=lambda item: -item[1]))


def _name_rare_work(recorder: ScriptRecorder) -> None:
    *earlier, counted, _ = recorder.products
    if max(earlier) > MORE_WORK * counted:
        most = f"{max(earlier)} matrix products in its backward pass, and {counted} in the one that was counted"
        recorder.say(UNTIMED, f"work takes that comes only in some steps: one before had {most}")
        return
    if counted > MORE_WORK * max(earlier):
        recorder.say(ASSUMED, "times are those of a step with more work in its backward pass than the one before")
    name_rare(recorder, recorder.work.loop)


def _name_larger_batches(recorder: ScriptRecorder) -> None:
    if recorder.loaded and (factor := compare_last(*recorder.loaded)) > MORE_WORK:
        text = f"the last is {factor:.1f} times as large as the one that was counted"
        recorder.say(RARE, f"what a step takes of a later batch: {text}")


def _tell_step(marks: Marks, recorder: ScriptRecorder, is_last: bool) -> Iterator[str]:
    """What is part of the step that was counted, and what is not."""
    if marks.source is BACKWARD:
        yield "no optimizer of PyTorch's: a step is counted from one backward pass to the next"
    if 0 < (share := recorder.trained_share()) < _FEW:
        told = f"{share:.2%}" if share > _FEWEST else f"less than {_FEWEST:.2%}"
        yield f"the step that was counted trains {told} of the weights of all modules"
    if recorder.evaluated:
        why = "the script ends after it" if is_last else "the script evaluates in each"
        yield f"an evaluation is part of the step that was counted: {why}"
    if recorder.passes_before > (marks.count - 1) * recorder.passes_within:  # so many steps came before
        text = "forward passes without gradients ran before the step that was counted, and are not counted: such as"
        took = format_seconds(recorder.without_gradients)
        slow = f"; they took {took} here: let the script run fewer" * (recorder.without_gradients > LONG)
        yield f"{text} an evaluation's, a rollout's or a reference model's{slow}"


def _tell_caught(recorder: ScriptRecorder, catcher: Site, full: Site) -> str:
    gpus = recorder.asked.gpus
    smallest = min(gpus, key=lambda gpu: gpu.memory - gpu.context[0]).name
    text = f"{full.where} runs out of memory on {with_article(smallest)} (predicted), and {catcher.where} catches that"
    if len(gpus) > 1:
        return f'{text}: predict for "{smallest}" alone to see what follows'
    if recorder.room.raises:
        return f"{text}: what follows is predicted"
    return f"{text}, and ends: predicted as if it fitted"


def _check_on_gpu(there_is: object) -> None:
    if not there_is:
        raise CannotFollow('trains on the CPU: move its model and its batches to the GPU, as with .to("cuda")')


@contextlib.contextmanager
def _explaining(marks: Marks, recorder: ScriptRecorder, tries: int) -> Iterator[None]:
    try:
        yield
    except Again:
        raise
    except (Exception, SystemExit) as error:
        _ask_again(recorder)
        if not isinstance(error, (CannotFollow, CannotPredict, SystemExit)):
            _ask_otherwise(recorder.guesses, tries, bool, *((Filled,) if isinstance(error, _OF_SIZES) else ()))
        cause = recorder.trouble if isinstance(error, SystemExit) else error
        if not isinstance(error, CannotFollow) and cause and (why := explain(cause)):
            raise CannotFollow(why) from error
        if not isinstance(error, (CannotFollow, SystemExit)) and (guessed := recorder.guesses.tell()):
            error.add_note(f"{NOTE}not known here: {guessed}")
            if isinstance(error, _OF_SIZES) and any(type(guess.value) is int for guess in recorder.guesses.made):
                raise CannotFollow(f"fails without values: {describe_error(error)}") from error
        raise
    _ask_again(recorder)
    _ask_otherwise(recorder.guesses, tries, bool if marks.total else object)  # a guess may have ended the training
    if marks.source is BACKWARD and marks.count > STEPS and marks.probes > 1:
        raise Again({"probes": 1})
    if recorder.trouble and (why := explain(recorder.trouble)):
        raise CannotFollow(why) from recorder.trouble


def _ask_again(recorder: ScriptRecorder) -> None:
    """A script that has run out of memory, and ends, is walked as if it all fitted: its size is what one asks for."""
    if recorder.room.caught and recorder.room.raises:
        raise Again({"runs_out": False})


def _ask_otherwise(guesses: Guesses, tries: int, *kinds: type) -> None:
    """An error may come of a guess of these kinds. Where another one leads to an error, too, the first is shown."""
    if tries and guesses.answer_otherwise(*kinds):
        raise Again({"answers": guesses.answers, "tries": tries - 1})
    if guesses.answers:
        raise Again({"answers": {}, "tries": 0})
