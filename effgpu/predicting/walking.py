"""The walk of a variant on fake tensors: no GPU, no memory, a few seconds. Its record is concluded as a `Prediction`.

The variant's step runs as it is, but no kernel does: PyTorch's FakeTensorMode knows each result's shape and dtype. A
dispatch mode adds up the storages and notes the kernels. The tensors say that they are on the CPU, which works on every
machine; where a GPU keeps something else than a CPU, the rules of rules.py answer as the GPU would.
"""

import contextlib
import inspect
import math
import os
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from time import monotonic
from types import CodeType

from effgpu.attaching.sites import Site
from effgpu.attaching.steps import Plan, drive
from effgpu.errors import BadType, CannotPredict
from effgpu.measuring import device_lock
from effgpu.measuring.device import NO_CACHING, gc_frozen, random_states_kept
from effgpu.measuring.torch_internals import fake_tensor
from effgpu.measuring.variants import Step, Variant, run_variant
from effgpu.predicting.allocator import VARIABLES, Block, count_reserved
from effgpu.predicting.as_gpu import as_gpu
from effgpu.predicting.asked import Asked
from effgpu.predicting.facts import ASSUMED, RARE, UNKNOWN, UNTIMED
from effgpu.predicting.prediction import OWNERS, ByteRange, Prediction
from effgpu.predicting.rare import find_captures, find_chances, find_rare, find_sizes, find_types
from effgpu.predicting.recorder import Recorder
from effgpu.predicting.refusals import tell_sparse
from effgpu.units import MiB, format_bytes, join_names

MOST_CALLS, PATIENCE = 64, 5.0  # in which an optimizer has to make a step: calls, and seconds
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CACHED = 1.5  # by this factor or more, the allocator holds more than the peak: of blocks that grow, it keeps each
_SMALL = 0.0001  # of the peak: a step that makes so little more is no larger one
_GROWS, _VARIES = 1.001, 1.05  # by these factors, a step is larger or smaller than the one before: what grows may go on
_ASKS_CUDA = ("no NVIDIA driver", "not compiled with CUDA", "CUDA driver version", "No CUDA GPUs", "attribute '_cuda")

_RARE = (
    (partial(find_rare, what="passes"), RARE, "what the backward pass takes that comes only in some steps"),
    (partial(find_rare, what="trains_more"), RARE, "what a step takes once more weights are trained"),
    (find_chances, UNTIMED, "a step takes where chance decides otherwise"),
    (find_sizes, ASSUMED, "a size that the step's number decides is that of the step that was counted"),
    (partial(find_rare, what="copies"), ASSUMED, "without the copy that is made only in some steps"),
    (find_types, UNKNOWN, "which way a line goes that compares a tensor's exact type, and not by isinstance"),
    (find_captures, ASSUMED, "a step that launches its operations: one that is replayed as a CUDA graph takes less"),
)


def walk(variant_of: Callable[[Recorder], Variant], asked: Asked) -> Prediction:
    """The prediction that is asked for: of a variant, which `variant_of` gives for whoever records it.

    It is walked again with another guess where an error follows a value that was guessed. Raises RuntimeError, with the
    reason, for a step that cannot run without values.
    """
    first, answers = None, {}
    while True:
        recorder = Recorder(asked, answers)
        try:
            _walk_once(variant_of(recorder), recorder)
            break
        except Exception as error:
            if why := explain(error) or _explain_mixing(error):
                raise CannotPredict(why) from error
            if not recorder.guesses.made and first is None:
                if guessed := recorder.guesses.tell():
                    error.add_note(f"not known here: {guessed}")
                raise
            first = first or (error, recorder.guesses.made)
            if not recorder.guesses.answer_otherwise(object):
                read = dict.fromkeys(f"{guess.where} read a value, taken as {guess.value}" for guess in first[1][-3:])
                text = f"{type(first[0]).__name__}: {first[0]}, after {', '.join(read)}: predicted without values"
                raise CannotPredict(text) from first[0]
        answers = recorder.guesses.answers
    return conclude(recorder)


def _explain_mixing(error: Exception) -> str | None:
    if "capturable" in str(error):
        return 'capturable=True asks for weights on the GPU: build the model there, as with device="cuda"'
    if "devices" in str(error) and "cuda" in str(error):
        text = "the step mixes its own tensors with those that lie on the GPU outside of the variant"
        return f"{text}: keep those on the CPU, and let the step move them with .to(device)"
    return None


def _walk_once(variant: Variant, recorder: Recorder) -> None:
    def walk_step(step: Step) -> None:
        drive(count(recorder), _check_takes_nothing(step))
        recorder.work.counts = False  # what puts back the settings that a variant has changed is no part of the step
        code = getattr(inspect.unwrap(step.func if isinstance(step, partial) else step), "__code__", None)
        name_rare(recorder, [code] if code else [])

    with device_lock.free(stands_aside=True), gc_frozen(), random_states_kept(), as_gpu(recorder):
        run_variant(variant, walk_step)


def name_rare(recorder: Recorder, loop: Iterable[CodeType]) -> None:
    """Say what the code of a step does only in some steps, where its lines can be read."""
    ran = {(event.site.file, event.site.line) for event in recorder.work.events if event.site}
    for find, kind, text in _RARE:
        for site, lines in dict.fromkeys(each for code in loop for each in find(code)):
            if not ran.intersection((site.file, line) for line in lines):  # what the counted step has done is no news
                recorder.say(kind, f"{text}: {site}")


def _check_takes_nothing(step: Step) -> Step:
    with contextlib.suppress(ValueError):  # a callable that has no signature
        try:
            inspect.signature(step).bind()
        except TypeError as error:
            raise BadType(f"step: expected one that takes nothing, and loads its batch itself: {error}") from None
    return step


def count(recorder: Recorder) -> Plan:
    """The plan of a prediction, from the moment when all is built: the last step's kernels are noted.

    Of a function whose optimizer makes no step in its first call, it is the call with the second: gradients accumulate,
    and a counter decides.
    """

    def call(*, last: bool) -> Plan:
        if last:
            recorder.begin_step()
        yield 1
        recorder.end_step()

    def waits() -> bool:
        more = calls < MOST_CALLS and monotonic() - began < PATIENCE
        return asked.awaits_update and recorder.optimizers.built and not every and more

    asked = recorder.asked
    recorder.start()
    began, calls, every = monotonic(), 0, 0
    while calls < asked.steps or waits():
        calls += 1
        yield from call(last=calls >= asked.steps)  # each may be the last one
        every = every or calls * bool(recorder.optimizers.stepped)
    if not asked.awaits_update or every == 1 or not recorder.optimizers.built:
        return
    if not every:
        recorder.say(RARE, f"what the optimizer takes, which made no step in {calls} calls")
        return
    for left in reversed(range(-calls % every or every)):
        yield from call(last=not left)
    recorder.say(ASSUMED, f"times are those of every {every} calls' last, in which the optimizer makes its step")


def conclude(recorder: Recorder) -> Prediction:
    """What was recorded, as the prediction that was asked for."""
    gpus = recorder.asked.gpus
    for idle in recorder.idle:
        recorder.say(RARE, f"what {idle} takes, which made no step in those that were looked at")
    if recorder.cudnn_attends and (those := [gpu.name for gpu in gpus if gpu.capability[0] in (9, 10)]):
        # sdp_utils.cpp, check_prefer_cudnn_attention; what cuDNN's kernel takes beside its results is not known
        recorder.say(ASSUMED, f"on {join_names(those)}, cuDNN's attention takes no more than PyTorch's own")
    if recorder.holds_from > (0, 0) and any(gpu.bandwidth is None for gpu in gpus):  # given as a size
        least = ".".join(map(str, recorder.holds_from))
        text = f"a GPU of compute capability {least} or higher: an older one takes other kernels or formats"
        recorder.say(ASSUMED, text)
    for variable in VARIABLES:
        recorder.note_settings(os.environ.get(variable, ""), variable)
    if recorder.capability and os.environ.get(NO_CACHING):
        recorder.say(UNTIMED, f"it takes to ask for all memory anew in each step, as {NO_CACHING} asks for")
    if recorder.capability and os.environ.get(_VISIBLE) in ("", "-1"):
        recorder.say(ASSUMED, f"a GPU is seen, though {_VISIBLE} hides all")
    if paged := recorder.storages.paged:
        text = f"what is paged, {format_bytes(paged)}, moves to the host where the GPU is full"
        recorder.say(ASSUMED, f"{text}: the time that it takes to move is not counted")
    recorder.optimizers.fill_histories()
    recorder.optimizers.name_rare_updates()
    storages = recorder.storages
    (peak, _), at_peak = storages.peak(), storages.at_peak()
    owners = _divide(at_peak)
    _compare_sizes(recorder, peak)
    blocks = [block for block in storages.on_gpu if block.died > storages.emptied]
    reserved = count_reserved(blocks)
    tight = count_reserved(blocks, peak) if reserved > _CACHED * peak else None
    unknown = (fact for fact in recorder.said if fact.kind == UNKNOWN)
    return Prediction(
        peak,
        owners,
        reserved,
        ByteRange(*recorder.work.workspaces()),
        gpus,
        tuple(recorder.said),
        sum(owners[name] for name in OWNERS[:3]),  # what stays from step to step
        recorder.holds_from,
        notes=tuple(recorder.files.tell("have no values")),
        paged=paged,
        events=tuple(recorder.work.events),
        peak=_divide_by_line(at_peak),
        kept=storages.kept,
        tight=tight,
        certain=storages.peak_until(min((recorder.known_until.get(fact, 0) for fact in unknown), default=math.inf)),
    )


def _compare_sizes(recorder: Recorder, peak: int) -> None:
    """Say that the last two steps differ in size, if it is more than a small part of the peak."""
    steps = recorder.storages.made[-2:]
    if len(steps) < 2:
        return
    made = [sum(map(sum, step.values())) for step in steps]
    if abs(made[1] - made[0]) < _SMALL * peak or len({*map(format_bytes, made)}) < 2:
        return
    before, last = ({line: len(sizes) for line, sizes in step.items()} for step in steps)
    sizes = " and ".join(map(format_bytes, made))
    if made[0] > _VARIES * made[1] + MiB and recorder.ran_more_before():
        text, larger = "what ran in the step before the one that was counted took more: {} in their forward passes", ""
    elif before == last or made[1] > _GROWS * made[0] or made[0] > _VARIES * made[1] + MiB:
        text = "steps differ in size, as two that were looked at make {} in their forward pass"
        larger = "; a later step may be larger still"
    else:
        return
    recorder.say(ASSUMED, f"{text.format(sizes)}: the time is the last one's, and the peak that of the larger{larger}")


def _divide(blocks: Iterable[Block]) -> dict[str, int]:
    """The bytes of these blocks by owner."""
    owners = dict.fromkeys(OWNERS, 0)
    for block in blocks:
        owners[block.owner] += block.size
    return owners


def _divide_by_line(blocks: Iterable[Block]) -> tuple[tuple[Site | None, str, int], ...]:
    """The bytes of these blocks by line and owner, the most first."""
    owned: Counter[tuple[Site | None, str]] = Counter()
    for block in blocks:
        owned[block.site, block.owner] += block.size
    return tuple((*key, size) for key, size in owned.most_common())


def explain(error: BaseException) -> str | None:
    """What an error of fake tensors, or of ours, means for the step; None for any other error."""
    if isinstance(error, CannotPredict):
        return error.args[0]
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return f"the shape of a result depends on values, by {error.func}: such a step cannot be predicted"
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return f"the step reads values, by {error.func}: such a step cannot be predicted"
    unsupported = isinstance(
        error, fake_tensor.UnsupportedOperatorException | fake_tensor.UnsupportedFakeTensorException
    )
    unsupported |= isinstance(error, NotImplementedError) and "fake" in str(error).lower()
    if unsupported or "no fake impl registered" in str(error):
        return f"an operation has no fake implementation, so its result is unknown: {error}"
    if isinstance(error, NotImplementedError) and (found := re.search(r"Sparse(Cs[rc]|Bs[rc])Tensor", str(error))):
        return tell_sparse(found[1])
    if found := re.search(r"(\w+) dispatch: attempting to run unimplemented operator.*op='([\w.]+)'", str(error)):
        return f"{found[1]} has no rule for {found[2]} on tensors without values, so its result is unknown"
    if isinstance(error, AttributeError) and "'FakeTensor' object" in str(error):
        return f"the code takes a tensor for something else ({error}): ask isinstance(x, torch.Tensor), not type(x)"
    if "DTensor" in str(error) or "_local_tensor" in str(error):
        return "a DTensor, as of parallelize_module, cannot be predicted: leave it out, for one rank"
    if found := re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error)):
        return f"{found[1]} cannot be predicted: let the script call plain operations in its place"
    inside = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if "shape_env must not be None" in str(error) or "create_symbolic_nested_int" in inside:  # PyTorch 2.9 has no words
        return "the step makes sizes that depend on values, as nested tensors have them: predict it with padded ones"
    if any(words in str(error) for words in _ASKS_CUDA):
        return "the step calls torch.cuda itself, and there is no GPU here: leave out what has no answer without one"
    return None
