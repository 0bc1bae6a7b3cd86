"""Which tensors of a whole script are real, and which are fake: what is on the CPU is real, what is on the GPU is fake.

So data is read, tokenised and sampled as ever. What a module builds is fake before it moves to the GPU, too: it takes
no memory and no time, and counts as in the host's memory until it moves.
"""

import contextlib
import functools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from traceback import walk_stack

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching.sites import Site, find_site
from effgpu.attaching.steps import Marks
from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    _current_graph_task_id,
    _len_torch_function_stack,
    fake_tensor,
    storage_key,
)
from effgpu.predicting import tensor_types
from effgpu.predicting.allocator import HOST, Block
from effgpu.predicting.asked import Asked
from effgpu.predicting.facts import COMPILED, UNKNOWN, UNTIMED, memory_is_known
from effgpu.predicting.files import Files
from effgpu.predicting.full import Room
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.own import OwnWork
from effgpu.predicting.parameters import is_plain
from effgpu.predicting.reading import reader
from effgpu.predicting.recorder import LARGE, Recorder, device_while_looked_up
from effgpu.predicting.refusals import check_array, check_devices
from effgpu.predicting.repeated import Repeated
from effgpu.predicting.timeline import FORWARD, OWN, is_non_blocking
from effgpu.predicting.translator import (
    CPU,
    FACTORIES,
    Translator,
    all_on_cpu,
    converts_there,
    default_device,
    innermost,
    name_by_number,
    name_device,
    on_real_tensors,
    with_numbers,
)
from effgpu.predicting.values import MOST
from effgpu.units import format_seconds

MORE_WORK = 1.1  # by this factor, one step does more than another
_SENT = 16  # tensors of the last batches
LONG = 5.0  # seconds of forward passes that are worth a line
_FORWARD = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.convolution}
_COPIES = ("aten::copy_", "aten::_foreach_copy_")
_DATA_GIVEN = (torch.tensor, torch.as_tensor, torch.asarray, torch.from_file)
_READS = ("__bool__", "__float__", "__int__", "__index__", "item")
_READS_ALL = ("tolist", "numpy", "__array__")
_SETS_DATA = torch.Tensor.data.__set__
_UNDONE = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
    NotImplementedError,
)


class ScriptRecorder(Recorder):
    """Records what a script does on the GPU. What has no fake tensor in it runs for real, unrecorded."""

    def __init__(self, asked: Asked, answers: Mapping[Hashable, bool] | None, marks: Marks, room: Room):
        super().__init__(asked, answers)
        self.files = Files(asked.began)  # all threads are the script's
        self.room, self._marks = room, marks
        self.on_host = False  # whether what is made now is in the host's memory
        self.trouble: Exception | None = None  # the last operation that has no fake result
        self.without_gradients = 0.0  # seconds of forward passes without gradients before the step that counts
        self._since_step = 0.0  # of these, those since the last step
        self.passes_before = self.passes_within = 0  # products of such passes before that step, and in it
        self.passes = [0]  # of them in each step, and in the one that has begun
        self.evaluated = False  # whether a module was set to evaluate since the step that counts began
        self.noted = 0  # steps whose events were noted
        self._evaluating: dict[torch.nn.Module, int] = {}  # that evaluate now: the events before, in the step
        self._evaluated_to: set[int] = set()  # storages of what modules that evaluate gave in this step
        self._last_without = -math.inf
        self._placing_at = 0  # how deep in what says where new fake tensors are
        self._given: tuple = ()  # the arguments of the script's call that runs
        self.worked: dict[Site, float] = {}  # seconds of the script's own work on the CPU in the last step, by line
        self.own = OwnWork(lambda site: self.work.note_host(OWN, site))
        self.pinned = WeakTensorKeyDictionary()  # real tensors that a script has pinned
        self.sent: deque[torch.Tensor] = deque(maxlen=_SENT)  # the last that moved to the GPU and may be texts
        self.received = WeakTensorKeyDictionary()  # real tensors that something was copied into from the GPU
        self.unknown = WeakTensorKeyDictionary()  # real tensors with something in them that nobody knows
        self.repeated = Repeated(self)

    def translator(self) -> "_Placer":
        """The mode that tells real tensors from fake ones, for `as_gpu`."""
        return _Placer(self)

    def start(self) -> None:
        """The script has made its first step: count from here on, and not what another optimizer did before."""
        super().start()
        self.products = self.products[-2:]

    def begin_step(self) -> None:
        """The step that follows counts, in place of the one that did."""
        super().begin_step()
        self.passes_before += self.passes_within
        self.evaluated, self.passes_within, self.worked = False, 0, {}

    def noted_so_far(self) -> tuple:
        """What a step that begins would put another in the place of, for `take_back`."""
        return self.work.events, self.evaluated, self.passes_before, self.passes_within, self.worked

    def take_back(self, noted: tuple) -> None:
        """The step before counts, after all."""
        self.work.events, self.evaluated, self.passes_before, self.passes_within, self.worked = noted

    def aside(self, tell: Callable) -> Callable:
        """The same, so that it is no work of the loop's own."""
        return self.own.apart()(tell)

    def note_mode(self, module: torch.nn.Module, training: bool) -> None:
        """A module is set to train, or to evaluate."""
        self.evaluated |= not training
        if not training:
            self._evaluating.setdefault(module, len(self.work.events))
        elif module in self._evaluating:
            self.work.note_evaluation(self._evaluating[module])
            self._evaluating.clear()  # what it holds is set to train after it

    def note_work(self, made: object, seconds: float) -> None:
        """A call on real tensors took so long: what a thread or a DataLoader does is not the loop's own work."""
        counts = self.work.counts and not self.loading and threading.current_thread() is threading.main_thread()
        if counts and any(tensor.numel() > LARGE for tensor in tensors_of([made])) and (site := find_site()):
            self.worked[site] = self.worked.get(site, 0.0) + seconds
            self.work.note_host(OWN, site)

    def next_step(self) -> None:
        """A step is over."""
        self.work.loop = self._marks.loop or self.work.loop
        self.products.append(0)
        self.passes.append(0)
        self._evaluating.clear()
        self._evaluated_to.clear()
        self._since_step, self._marks.slowed = 0.0, ""
        self.noted += self.work.counts
        self.own.next_step(self.work.loop)
        self.repeated.forget()

    def ran_more_passes(self) -> bool:
        """Whether the last step ran more forward passes without gradients than the one before, as in an evaluation."""
        *_, before, last, _ = self.passes
        return last > MORE_WORK * before

    def is_on_host(self, fake: FakeTensor) -> bool:
        """Whether a fake tensor is in the host's memory."""
        block = self.storages.of(fake)
        return block is not None and block.place == HOST

    def _lies_on_gpu(self, tensor: torch.Tensor) -> bool | None:
        """Whether it does; None where that is not told: PyTorch makes tensors in C++ and moves them by itself."""
        block = self.storages.of(tensor) if isinstance(tensor, FakeTensor) else None
        if block is not None and block.place != HOST:
            return True
        given = (innermost(each) for each in _flat(self._given) if isinstance(each, torch.Tensor))
        key = storage_key(tensor) if tensor.layout is torch.strided else None
        is_given = any(each.layout is torch.strided and storage_key(each) == key for each in given)
        return False if is_given and (block or not isinstance(tensor, FakeTensor)) else None

    def of_host(self, real: torch.Tensor) -> torch.Tensor:
        """The tensor itself: what is on the CPU is real."""
        return real

    def device_of(self, fake: FakeTensor) -> torch.device:
        """Where a script finds a fake tensor: all that is not in the host's memory is on the GPU."""
        if self._depth or fake.fake_mode.in_kernel_invocation:
            return device_while_looked_up(fake)
        return CPU if self.is_on_host(fake) else FIRST_GPU

    @contextlib.contextmanager
    def placed(self, on_host: bool, given: tuple = ()) -> Iterator[None]:
        """Inside, new fake tensors are in the host's memory, or on the GPU. `given` are the arguments of the call."""
        before = self.on_host, self._given
        self.on_host, self._given = on_host, given
        self._placing_at += 1
        try:
            yield
        finally:
            self.on_host, self._given = before
            self._placing_at -= 1

    def placing_on_gpu(self) -> contextlib.AbstractContextManager:
        """Inside, new tensors lie on the GPU."""
        return self.placed(False)

    def fetch(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """A copy on the GPU of what was sent. `_Placer`, which would leave it on the host, does not see it."""
        with self.placed(False), DisableTorchFunction():
            return super().fetch(tensor, pinned)

    def page(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that moves to the host where the GPU is full: fake, though it is made by hand."""
        with self.placed(False):
            return super().page(shape, dtype)

    def take_in(self, real: torch.Tensor) -> torch.Tensor:
        """What a file holds is on the CPU, and real."""
        return real

    def _dispatch(self, func, args: tuple, kwargs: dict):
        given = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, torch.Tensor)]
        by_hand = not given and self._is_made_by_hand()
        if by_hand and _is_large(args) and _builds_module():
            with self.placed(True):
                return super()._dispatch(func, args, kwargs)
        fakes = [each for each in given if isinstance(each, FakeTensor)]
        if by_hand or (given and not fakes):
            with on_real_tensors():
                return func(*args, **kwargs)
        in_backward, on_host = _current_graph_task_id() != -1, bool(fakes) and all(map(self.is_on_host, fakes))
        if in_backward and on_host and not (self.on_host or self._moving):
            with self.placed(True):
                return self._dispatch(func, args, kwargs)
        if len(given) > 1 and not (in_backward or self._moving or self.optimizers.working):
            check_devices(func, args, given, self._lies_on_gpu)  # not where gradients are
        if func.overloadpacket in _FORWARD:
            self.files.note_computed()
        if func.overloadpacket in _FORWARD and in_backward:
            self.products[-1] += 1
        elif func.overloadpacket in _FORWARD and not (self.loading or on_host) and self._lacks_gradients():
            self.passes[-1] += 1
            if self.work.counts:
                self.passes_within += 1
            else:
                self._note_pass_before()
        try:
            return super()._dispatch(func, args, kwargs)
        except _UNDONE as error:
            self.trouble = error
            raise

    def _note_pass_before(self) -> None:
        """A forward pass without gradients ran before the step that counts: whoever waits may want fewer of them."""
        now = time.perf_counter()
        took = now - self._last_without if now - self._last_without < 1 else 0.0
        self.passes_before += 1
        self.without_gradients, self._since_step = self.without_gradients + took, self._since_step + took
        self._last_without = now
        if self._since_step > LONG:
            self._marks.slowed = (
                f"{format_seconds(self._since_step)} of it in forward passes without gradients, such as of an "
                "evaluation or of a rollout: let the script run fewer"
            )

    def _is_made_by_hand(self) -> bool:
        """Whether it is `torch.LongTensor(20)` or its like, on the CPU: no mode tells it of a default device."""
        return self._depth == 1 and not self._placing_at and _current_graph_task_id() == -1

    def _evaluates(self) -> bool:
        """Whether this is no part of training: without gradients, before the step that counts."""
        return not self.work.counts and self._lacks_gradients()

    def _lacks_gradients(self) -> bool:
        if self.optimizers.working or torch.is_grad_enabled():
            return False
        return _current_graph_task_id() == -1 and not _in_autograd_function()

    def _read(self, func, args, kwargs):
        before = dict(self.said)
        try:
            return super()._read(func, args, kwargs)
        finally:
            if self._evaluates():
                self.said = before

    def _add(self, tensor: torch.Tensor) -> None:
        if not self.on_host:
            if self.room.ran_out:  # by now the script has let go of what it gave up
                self.storages.emptied, self.room.ran_out = self.storages.now, False
                self.products[-1] = self.passes[-1] = 0
            before = len(self.storages.blocks)
            super()._add(tensor)
            for block in filter(self.storages.is_on_gpu, self.storages.blocks[before:]):
                self.room.taken += block.size
                if self.room.taken > self.room.size and COMPILED not in self.said and memory_is_known(self.said):
                    self.room.run_out(block.size)
        else:
            self._watch(tensor, self.storages.add_on_host(tensor))

    def _drop(self, key: int, block: Block) -> None:
        interrupted = sys._getframe(1).f_back  # by weakref's own frame: what lets go of the tensor
        frees = self.storages.is_on_gpu(block)
        self.own.enter(interrupted.f_code.co_filename if interrupted else "", frees=frees)
        super()._drop(key, block)
        self._evaluated_to.discard(key)
        self.room.taken -= block.size * frees
        self.own.leave()

    def note_operation(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """Note what it copies from the GPU in any step, and its work in the one that counts."""
        for host, _, to_gpu in self._find_crossing(args) if func._schema.name in _COPIES else ():
            if not (to_gpu or isinstance(host, FakeTensor)):
                self.received[_whole(host)] = True
        self._follow_evaluation(func, args, kwargs, result)
        super().note_operation(func, args, kwargs, result)

    def _follow_evaluation(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """It is none where the training goes on with what it gave, such as labels."""
        if not (self._evaluating or self._evaluated_to) or self.work.phase != FORWARD:
            return
        given = [each for each in tensors_of((args, kwargs)) if isinstance(each, FakeTensor)]
        keys = _keys(given)
        follows = not keys.isdisjoint(self._evaluated_to)
        if follows and not self._evaluating and torch.is_grad_enabled() and any(each.requires_grad for each in given):
            self.evaluated = False
            self.work.forget_evaluations()
            self._evaluated_to.clear()
        elif follows or self._evaluating:  # weights that are swapped, and views of them, are no results
            made = [each for each in tensors_of(result) if isinstance(each, FakeTensor)]
            self._evaluated_to |= _keys(made) - keys

    def _note(self, func, args: tuple, kwargs: dict, result: object) -> None:
        if func._schema.name in _COPIES and (crossing := self._find_crossing(args)):
            non_blocking = is_non_blocking(args, kwargs)
            for host, moved, to_gpu in crossing:
                block = self.storages.of(moved)
                if to_gpu and not isinstance(host, FakeTensor) and not (block and block.owner == "weights"):
                    self.note_copy(host, non_blocking)
                else:  # the GPU converts, unless the CPU waits: then it does, in ordinary memory
                    pinned = isinstance(host, FakeTensor) or self.is_pinned(host)
                    pinned &= non_blocking or host.dtype == moved.dtype
                    self.work.note_bus(host if non_blocking else moved, pinned=pinned)
                    if not non_blocking:
                        self.work.wait(own=to_gpu)  # only what comes from there is read
        elif not self.on_host:
            super()._note(func, args, kwargs, result)
        elif self.optimizers.working:
            self.say(UNTIMED, "the optimizer takes on the CPU, where its weights are")

    def _find_crossing(self, args: tuple) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
        """Of copies between the host and the GPU: the host's tensor, the GPU's, and whether that is written."""
        found = []
        for written, read in zip(*map(tensors_of, args[:2])):
            of_host = [not isinstance(each, FakeTensor) or self.is_on_host(each) for each in (written, read)]
            if of_host[0] != of_host[1]:
                found.append((written, read, False) if of_host[0] else (read, written, True))
        return found

    def _see_real(self, value: object) -> None:
        """What is real is on the CPU: a number, or indices."""

    def is_pinned(self, real: torch.Tensor) -> bool:
        """Whether a script has pinned a real tensor, or one that it is a part of, in one piece."""
        part = real.layout is torch.strided and real._base is not None and real.is_contiguous()
        return real in self.pinned or (part and real._base in self.pinned)

    def note_copy(self, real: torch.Tensor, non_blocking: bool) -> None:
        """A real tensor moves to the GPU: a batch, if it has not come from there."""
        if _whole(real) in self.received:
            self.work.note_bus(real, pinned=self.is_pinned(real))
            if not non_blocking:
                self.work.wait(own=True)
            return
        if real.dim() == 2 and not real.is_floating_point():
            self.sent.append(real)
        self.work.note_copy(sum(part.nbytes for part in tensors_of([real])), self.is_pinned(real), non_blocking)

    def _numbers_looked_up(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Those of a batch of the same shape where some are masked on the GPU, and nobody knows which.

        Labels of -100, and a mask of zeros and ones, have that shape, too.
        """
        if (known := super()._numbers_looked_up(tokens)) is not None:
            return known
        alike = (real for real in reversed(self.sent) if real.shape == tokens.shape and real.dtype == tokens.dtype)
        with on_real_tensors():
            return next((real for real in alike if real.numel() and real.min() >= 0 and real.max() > 1), None)


class _Placer(Translator):
    """Calls on real tensors run for real; what names the GPU, or has a fake tensor, runs on fake ones."""

    _recorder: ScriptRecorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        own = self._recorder.own
        own.enter(sys._getframe(1).f_code.co_filename)
        try:
            return super().__torch_function__(func, types, args, kwargs)
        finally:
            own.leave()

    def _run(self, func, args: tuple, kwargs: dict, name: str) -> object:
        if name == "__get__":
            return self._describe(func, args)
        if func is torch.device or name == "_parse_to":  # the latter reads the arguments of Module.to
            return func(*args, **kwargs)
        if name == "pin_memory":
            self._recorder.pinned[args[0]] = True
            return args[0]
        if name == "is_pinned":
            return self._recorder.is_pinned(args[0])
        if name == "type" and tensor_types.read(kwargs.get("dtype", args[-1])):
            return super()._run(func, args, kwargs, name)
        if name in ("tensor", "as_tensor") and args and _has_fake(args[:1]):
            args, kwargs = with_numbers(*args, **kwargs)
        values = args[:1] if name == "__deepcopy__" else (*args, *kwargs.values())  # what was copied may be fake
        fakes = [value for value in map(innermost, _flat(values)) if isinstance(value, FakeTensor)]
        if name == "__set__" and fakes and isinstance(args[1], torch.Tensor) and not _has_fake(args[1:]):
            args = args[0], self._recorder.imitate(args[1].detach(), self._recorder.is_on_host(args[0]))
        if func == _SETS_DATA and fakes and not _has_fake(args[:1]):
            return self._become(args[0], args[1].detach())
        if name in ("numpy", "__array__") and fakes and not self._recorder.is_on_host(fakes[0]):
            check_array(name, kwargs)
            self._recorder.work.wait(fakes[0].nbytes)
        if name in ("get_device", "data_ptr") and fakes:
            return super()._run(func, args, kwargs, name)
        if name == "type_as":
            func, name = torch.Tensor.to, "to"
        if fakes and (name == "new_tensor" or (name == "new" and _is_data(args[1:]))):
            func, name, args, kwargs = self._make_like(*args, **kwargs)
        args, kwargs, where = self._find_place(func, name, args, kwargs)
        if name == "to" and (fakes or where == FIRST_GPU) and where and converts_there(args, kwargs, where):
            args = self._move(args[0], where, is_non_blocking(args, kwargs)), *args[1:]
            fakes = [innermost(args[0])]
        if where is not None and where.type == "meta" and fakes:
            return _outline(fakes[0], args, kwargs)
        if where != FIRST_GPU and not fakes:
            return self._run_real(func, args, kwargs, where)
        made_there = where == CPU and (name.endswith("_like") or name.startswith("new_"))
        on_host = made_there or (where != FIRST_GPU and all(map(self._recorder.is_on_host, fakes)))
        if fakes and args and _writes(name) and isinstance(args[0], torch.Tensor) and not _has_fake(args[:1]):
            self._recorder.unknown[_whole(args[0])] = True
        with self._recorder.placed(on_host, (args, kwargs)):
            result = super()._run(func, args, kwargs, name)
        return result if where is None else self._move(result, where, is_non_blocking(args, kwargs))

    def _to_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself: `_move` sees to it."""
        return tensor

    def _call(self, func, name: str, args: tuple, kwargs: dict) -> object:
        """The call on the CPU, where fake tensors are; `placed` says where a script finds its result."""
        args, kwargs = all_on_cpu(args, kwargs)
        return func(*args, **kwargs)

    def _make_like(self, tensor: torch.Tensor, data: object, **options: object) -> tuple:
        """The call that `tensor.new_tensor(data)` is, which PyTorch makes in C++."""
        options = {"dtype": tensor.dtype, "device": self._recorder.device_of(innermost(tensor))} | options
        return torch.tensor, "tensor", (data,), options

    def _find_place(self, func, name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict, torch.device | None]:
        """The device that a call names, and its arguments with the GPU named as one device. None: it names none."""
        if name in ("cuda", "cpu") and args and isinstance(args[0], torch.Tensor):
            return args, kwargs, FIRST_GPU if name == "cuda" else CPU
        if name == "to" and len(args) > 1 and isinstance(args[1], torch.Tensor):
            other = args[1]
            kwargs, args = kwargs | {"dtype": other.dtype, "device": other.device}, (args[0], *args[2:])
        args, kwargs = name_by_number(name, args, kwargs)
        named = next(filter(None, map(name_device, (*args, *kwargs.values()))), None)
        if named is None and func in FACTORIES and (named := name_device(default_device())):
            kwargs = kwargs | {"device": named}
        return args, kwargs, named

    def _run_real(self, func, args: tuple, kwargs: dict, where: torch.device | None) -> object:
        """A call without a fake tensor, not for the GPU: its result is fake where a module builds something large."""
        on_cpu = where is None or where == CPU
        if on_cpu and func in FACTORIES and func not in _DATA_GIVEN and _builds_module():
            with self._recorder.placed(True):
                made = super()._run(func, args, kwargs, getattr(func, "__name__", ""))
            if made.numel() > LARGE:
                return made
        pinned = kwargs.get("pin_memory")
        with on_real_tensors():
            began = time.perf_counter()
            made = func(*args, **{name: value for name, value in kwargs.items() if name != "pin_memory"})
            self._recorder.note_work(made, time.perf_counter() - began)
        if pinned:
            self._recorder.pinned[made] = True
        if (unknown := self._recorder.unknown) and any(_whole(each) in unknown for each in tensors_of((args, kwargs))):
            if (name := getattr(func, "__name__", "")) in _READS:
                return self._recorder.guesses.take(made, reader())
            if name in _READS_ALL:
                self._recorder.guesses.fill(reader(), whole=not args[0].is_floating_point())
            unknown.update((_whole(each), True) for each in tensors_of([made]))
        return made

    def _move(self, result: object, where: torch.device, non_blocking: bool) -> object:
        """The tensor on this device, copied if it is elsewhere."""
        if not isinstance(result, torch.Tensor) or result.device.type == "meta":
            return result
        fake = innermost(result)
        if not isinstance(fake, FakeTensor):
            if where != CPU:
                self._recorder.note_copy(result, non_blocking)
            return self._of_its_class(self._recorder.imitate(result, where == CPU, MOST), result)
        if self._recorder.is_on_host(fake) == (where == CPU):
            return result
        self._recorder.work.note_bus(fake, pinned=where != CPU or non_blocking)
        if not non_blocking:
            self._recorder.work.wait(own=where != CPU)
        back = CPU if where == FIRST_GPU else FIRST_GPU
        with self._recorder.placed(where == CPU), self._recorder.placing("", moving=True), DisableTorchFunction():
            copy = result.clone()
            if copy.requires_grad:
                copy.register_hook(lambda gradient: self._move(gradient, back, non_blocking=True))
        return copy

    def _become(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """`real.data = fake`: from here on, what was real is fake, with what it holds."""
        made = self._of_its_class(fake, real).requires_grad_(real.requires_grad)
        vars(made).update(vars(real))
        torch.utils.swap_tensors(real, made)

    def _of_its_class(self, fake: FakeTensor, real: torch.Tensor) -> torch.Tensor:
        """The fake tensor, with the class of the real one and what it holds."""
        if (kind := type(real)) in (torch.Tensor, torch.nn.Parameter):
            return fake
        if not is_plain(kind):
            self._recorder.say(UNKNOWN, f"what {kind.__name__} does on the GPU that a plain tensor does not")
            return fake
        made = fake.as_subclass(kind)
        vars(made).update(vars(real))
        return made


def _outline(fake: FakeTensor, args: tuple, kwargs: dict) -> torch.Tensor:
    """What moving a fake tensor to the device "meta" gives, or making one like it there."""
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), fake.dtype)
    with on_real_tensors():
        return torch.empty(tuple(fake.shape), dtype=dtype, device="meta", requires_grad=fake.requires_grad)


def _flat(values: tuple) -> Iterator[object]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        elif isinstance(value, dict):
            yield from _flat(tuple(value.values()))
        else:
            yield value


def _keys(tensors: list[FakeTensor]) -> set[int]:
    """The storages of tensors that have one."""
    return {storage_key(each) for each in tensors if each.layout is torch.strided}


def _writes(name: str) -> bool:
    """Whether a call changes its first argument."""
    return name == "__setitem__" or (not name.startswith("_") and name.endswith("_") and not name.endswith("__"))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor is a part of; itself, if of none."""
    return tensor if tensor._base is None else tensor._base


def _is_data(args: tuple) -> bool:
    """Whether the old constructor gets numbers, and no shape."""
    return len(args) == 1 and not isinstance(args[0], (int, torch.Size, torch.Tensor))


def _is_large(args: tuple) -> bool:
    """Whether the first argument is the shape of a large tensor."""
    return bool(args) and isinstance(args[0], (list, tuple)) and math.prod(args[0]) > LARGE


def _has_fake(values: tuple) -> bool:
    return any(isinstance(value, FakeTensor) for value in _flat(values))


def _builds_module() -> bool:
    """Whether a module's __init__ is running."""
    builders = (frame for frame, _ in walk_stack(sys._getframe(2)) if frame.f_code.co_name == "__init__")
    return any(isinstance(frame.f_locals.get("self"), torch.nn.Module) for frame in builders)


def _in_autograd_function() -> bool:
    """Whether an autograd.Function's forward pass is running, such as that of a checkpoint: it has no gradients.

    It is known by its first argument's name. A frame that is asked for its variables would keep those that it drops.
    """
    codes = (frame.f_code for frame, _ in walk_stack(sys._getframe(2)))
    return any(code.co_name == "forward" and code.co_argcount and code.co_varnames[0] == "ctx" for code in codes)


def fakes_in_place(recorder: ScriptRecorder) -> Iterator[tuple[type, str, object]]:
    """(class, name, what stands there). A parameter is fake from the beginning, as optimizers hold on to it."""
    create = torch.nn.Parameter.__new__

    def is_real(data: object) -> bool:
        tensor = isinstance(data, torch.Tensor) and not isinstance(data, FakeTensor) and data.device.type != "meta"
        return tensor and data.layout is torch.strided and _len_torch_function_stack() > 0

    @functools.wraps(create)
    def create_fake(cls, data=None, requires_grad=True):
        if is_real(data):
            data = recorder.imitate(data.detach(), True)
        return create(cls, data, requires_grad)

    from effgpu.measuring.torch_internals import _make_subclass as make_subclass  # as it is now

    @functools.wraps(make_subclass)
    def make_fake(kind, data, *args, **options):
        if issubclass(kind, torch.nn.Parameter) and is_real(data):
            data = recorder.imitate(data.detach(), True)
        return make_subclass(kind, data, *args, **options)

    groups = [sys.modules[each.__module__] for each in (torch.nn.utils.clip_grad_norm_, torch.optim.Optimizer)]
    group = groups[0]._group_tensors_by_device_and_dtype  # in C++, where fake tensors are on the CPU

    @functools.wraps(group)
    def group_in_place(tensors, *args, **options):
        return {
            (recorder.device_of(one) if isinstance(one := lists[0][0], FakeTensor) else device, dtype): (lists, indices)
            for (device, dtype), (lists, indices) in group(tensors, *args, **options).items()
        }

    yield from ((module, group.__name__, group_in_place) for module in groups)
    train = torch.nn.Module.train

    @functools.wraps(train)
    def note_evaluation(module, mode=True):  # which eval calls, that of transformers' models, too
        with recorder.own.apart():
            recorder.note_mode(module, mode)
        return train(module, mode)

    yield torch.nn.Module, "train", note_evaluation
    yield from recorder.repeated.replacing()
    yield torch.nn.Parameter, "__new__", staticmethod(create_fake)
    yield torch.Tensor, "_make_subclass", staticmethod(make_fake)
