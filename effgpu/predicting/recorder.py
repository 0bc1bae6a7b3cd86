"""Records a step on fake tensors: it sees every operation, gives what it gives on a GPU, and passes on what it means.

What is recorded: `storages.py` has what the step allocates, `work.py` what the GPU runs, `reading.py` what the step
reads of values, `values.py` and `counting.py` what is known of them.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from threading import RLock, get_ident

import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching import sites
from effgpu.errors import CannotPredict
from effgpu.measuring import device_lock
from effgpu.measuring.ops import lists_of, runs_kernel, tensors_of
from effgpu.measuring.torch_internals import (
    DisableTorchFunction,
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    _current_graph_task_id,
    storage_key,
)
from effgpu.predicting import by_values, experts, quantized, shapes
from effgpu.predicting.allocator import GPU, HOST, PAGED, Block, find_settings
from effgpu.predicting.asked import Asked
from effgpu.predicting.compiled import Compiled
from effgpu.predicting.counting import Counting
from effgpu.predicting.facts import ASSUMED, UNKNOWN, UNTIMED, Fact
from effgpu.predicting.files import Files
from effgpu.predicting.guesses import Guesses
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.optimizers import Optimizers
from effgpu.predicting.reading import Reading, reader
from effgpu.predicting.reductions import reduction_buffer
from effgpu.predicting.refusals import check_determinism, check_formats, tell_sparse
from effgpu.predicting.rules import AS_ONE, STORED, TEMPORARY, in_parts, made_of_others, tiles_of_winograd
from effgpu.predicting.storages import Storages, running_node
from effgpu.predicting.timeline import LOOKS_FOR_NAN
from effgpu.predicting.translator import CPU, Translator, name_device, on_real_tensors
from effgpu.predicting.uses import find_reader, is_shown, makes_a_statistic
from effgpu.predicting.values import Values
from effgpu.predicting.work import Work
from effgpu.units import join_names

aten = torch.ops.aten
LARGE = 100_000  # elements: of what is made or loaded with fewer, such as a schedule, the values are known
# Backward passes write into what they have just made, but not if somebody like us looks on: FunctionsManual.cpp,
# areAnyTensorSubclassLike.
_SELECTED = "Max Min Sort Topk Kthvalue Median Nanmedian Mode Cummax Cummin"  # value_selecting_reduction_backward
_IN_PLACE = {
    aten.index_put.default: (("IndexBackward0",), aten.index_put_.default),
    aten.index_add.default: (("IndexSelectBackward0",), aten.index_add_.default),
    aten.scatter_add.default: (("GatherBackward0",), aten.scatter_add_.default),
    aten.put.default: (("TakeBackward0",), aten.put_.default),
    aten.masked_scatter.default: (("MaskedSelectBackward0",), aten.masked_scatter_.default),
    aten.scatter.src: (
        tuple(f"{name}Backward{number}" for name in _SELECTED.split() for number in (0, 1)),
        aten.scatter_.src,
    ),
}
_COMPARES_GPUS = ("nn/parallel/data_parallel.py",)
_COMPARES = {aten.allclose.default, aten.equal.default}
_CROSSES = {aten.copy_, aten._to_copy, aten._foreach_copy_, aten._foreach_copy}  # from one device to another

device_while_looked_up = FakeTensor.device.fget


class Recorder(TorchDispatchMode):
    """The mode in which a variant, or a script, is walked.

    `asked` says for which GPU, `answers` are those of `Guesses`. `as_gpu` puts it to work, on fake tensors.
    """

    def __init__(self, asked: Asked, answers: Mapping[Hashable, bool | int | float] | None = None):
        super().__init__()
        self.asked, self.capability = asked, asked.capability
        self.fakes: FakeTensorMode | None = None  # the mode of `as_gpu`
        self.over = False
        self.one_at_a_time = RLock()  # calls of the step's threads
        self.said: dict[Fact, None] = {}  # in the order of their appearance
        self.known_until: dict[Fact, float] = {}  # the event of the last step up to which memory was, of what is not
        self._known_until: dict[Fact, float] = {}  # the same for the step that it is
        self.holds_from = (0, 0)  # the lowest capability that behaves the same
        self.storages = Storages(rounded=bool(self.capability))
        self.work = Work(self)
        self.reading = Reading(self)
        self.values = Values()
        self.counting = Counting(self)
        self.guesses = Guesses(self, answers or {})
        self.optimizers = Optimizers(self)
        self.threads = {get_ident()}  # of the step
        self.files = Files(asked.began, self.threads)
        self.loaded: tuple[DataLoader, int] | None = None  # whose batch the step that counts took, and its bytes
        self.cut_short = False  # whether the last batch of a DataLoader was one with fewer samples than the others
        self.loading = False  # whether a DataLoader makes a batch
        self.looked_up: list[torch.Tensor] = []  # by embeddings in the last step, where their numbers are known
        self.idle: list[str] = []  # those that have made no step where others have, at the end of the last one
        self.products = [0]  # of the backward pass of each of a script's steps, and of the one that has begun
        self.copied = WeakTensorKeyDictionary()  # parameters, which no module registers
        self.cudnn_attends = False  # on a GPU that prefers its kernel
        self.compiled = Compiled()
        self._called = 0  # the event at which the step has called PyTorch last
        self._started = False
        self._depth = 0  # of operations that are being looked up
        self._placing, self._moving = "", False  # where the tensors lie that an operation makes; it is a copy to there
        self._modules: weakref.WeakSet = weakref.WeakSet()
        self._finalizers: list[weakref.finalize] = []  # of tensors that live on

    @functools.cached_property
    def _made_of_others(self) -> dict[object, Callable]:
        return made_of_others(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: without PyTorch's wrapper, each of the many calls is cheaper."""
        return False

    def start(self) -> None:
        """The variant is built: count from here on."""
        self.name_owners()
        self.files.note_computed()
        self._started = True
        self.storages.start()

    def device_of(self, fake: FakeTensor) -> torch.device:
        """Where the step finds a fake tensor, and where PyTorch finds it while an operation is looked up.

        Where the GPU is named, that is there, but for what was sent to the CPU: what does not say where it lies may
        meet the GPU's tensors later, and a checkpoint compares devices.
        """
        if not self.storages.names_gpu or self._depth or fake.fake_mode.in_kernel_invocation:
            return device_while_looked_up(fake)
        block = self.storages.of(fake)
        return device_while_looked_up(fake) if block is not None and block.place == HOST else FIRST_GPU

    def say(self, kind: str, text: str, *, until: float = 0) -> None:
        """Something is taken for granted, or not known: one of the kinds of `facts`.

        `until` is the event up to which the memory of the step is known all the same.
        """
        fact = Fact(kind, text)
        self.said[fact] = None
        if kind == UNKNOWN:
            self._known_until.setdefault(fact, until)

    def aside(self, tell: Callable) -> Callable:
        """What tells the script of memory: what that takes is the walk's own."""
        return tell

    def note_capability(self) -> None:
        """The step has asked what the GPU is: another one may take another way, unless GPUs are compared, of one."""
        if sites.asked_by_torch(_COMPARES_GPUS):
            return
        self.holds_from = max(self.holds_from, self.capability or (0, 0))

    def note_name(self) -> None:
        """The step has asked for the GPU's name; nothing follows where it only shows it."""
        if not makes_a_statistic(find_reader()[1]):
            self.note_capability()
            self._note_own("what follows from a GPU's name is that")

    def note_memory(self) -> None:
        """The step has asked how much memory the GPU has: sizes may follow from it, but where it only shows it."""
        if not is_shown(find_reader()[1]):
            self.note_capability()
            self._note_own("sizes that follow from a GPU's memory are those")

    def note_emptied_cache(self) -> None:
        """The GPU gives back what PyTorch has reserved, once it has done all."""
        self.work.wait()
        if self.work.counts:
            self.say(UNTIMED, "it takes to ask for the memory anew that empty_cache() in the step has given back")

    def note_settings(self, given: str, by: str) -> None:
        """Something asks for these settings of the allocator, which is predicted as it is without."""
        if self.capability and (settings := find_settings(given)):
            self.say(ASSUMED, f"memory as without {join_names(settings)}, which {by} asks for")

    def note_fraction(self, fraction: float, *_: object, **__: object) -> None:
        """The step may take this part of the GPU."""
        self.note_settings(f"per_process_memory_fraction:{fraction:g}", "set_per_process_memory_fraction")

    def _note_own(self, what: str) -> None:
        site, alike = sites.find_site(), [gpu.capability for gpu in self.asked.gpus].count(self.capability)
        if alike > 1 and site and not site.inside:  # those of another kind are predicted for apart
            text = f"{what} of the {self.asked.gpu.name}, which {site.place} asks for: predict for each GPU alone"
            self.say(ASSUMED, text)

    def translator(self) -> Translator:
        """The mode that makes a GPU of the CPU, for `as_gpu`."""
        return Translator(self)

    def note_call(self) -> None:
        """The step calls PyTorch: what is made from here on, PyTorch makes."""
        self._called = self.storages.now

    def begin_step(self) -> None:
        """The step that follows counts, in place of the one that did."""
        self.work.begin()
        self.looked_up = []

    def end_step(self) -> None:
        """A step is over: say whose its storages are, and what it leaves behind more than the one before."""
        self.name_owners()
        self.idle = self.optimizers.idle()
        self.known_until, self._known_until = self._known_until, {}
        self.guesses.end_step()
        self.storages.end_step()

    def accumulates(self) -> bool:
        """Whether autograd gives a weight its gradient at this moment."""
        return _name_node() == "torch::autograd::AccumulateGrad"

    def is_cut_short(self) -> bool:
        """Whether the last step took an epoch's last batch, which has fewer samples than the one before."""
        return self.cut_short and self.storages.made_smaller()

    def ran_more_before(self) -> bool:
        """Whether the step before the last ran a forward pass more, and no backward pass: its graph was not used."""
        return self.storages.made_less() and len(self.products) > 2 and self.products[-3] == self.products[-2]

    def stop(self) -> None:
        """The step has run: let go of what lives on."""
        self.over = self.fakes.over = True
        for finalizer in self._finalizers:
            finalizer.detach()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.over:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        device_lock.stand_aside()
        self._depth += 1
        try:
            with DisableTorchFunction():  # what is asked of tensors in here needs no translation, which takes long
                return self._dispatch(func, args, kwargs or {})
        finally:
            self._depth -= 1

    def _dispatch(self, func, args: tuple, kwargs: dict):
        if name_device(kwargs.get("device")) == FIRST_GPU:  # named where no function mode sees it, as within torch.func
            with self.placing_on_gpu():
                return self._dispatch(func, args, kwargs | {"device": CPU})
        if func in (aten._local_scalar_dense.default, aten.item.default):  # the latter of what inference mode made
            return self._read(func, args, kwargs)
        if func in _COMPARES:
            self.work.wait()
            return self.guesses.take(False, reader())
        name = func._schema.name
        if func.namespace == quantized.LIBRARY and (made := quantized.parts(self.work.note_8_bits).get(name)):
            with self:
                return made(*args, **kwargs)
        if made := experts.RULES.get(name):
            return made(self, *args, **kwargs)
        if func.overloadpacket in by_values.RULES and (result := self._run_by_values(func, args, kwargs)) is not None:
            return result
        if func.namespace != "aten":
            self.reading.chosen_from = next((t.shape[0] for t in args if isinstance(t, torch.Tensor) and t.dim()), 0)
        if (in_place := _IN_PLACE.get(func)) and _name_node() in in_place[0]:
            return self._dispatch(in_place[1], args, kwargs)
        if self.capability and (made := in_parts(func, args)):
            with self:
                result = made(*args, **kwargs)
            self.counting.follow(func, name.removeprefix("aten::"), args, result)
            return result
        if _is_composite(func) and not (self.capability and func in AS_ONE):
            return self._take_apart(func, args, kwargs)
        if func is not aten.lift_fresh.default:  # which takes the real numbers that a tensor is made of
            for value in (*args, *kwargs.values()):
                self._see_real(value)
        place = self._meet(func, args, kwargs) if self.storages.names_gpu else self._placing
        check_formats(func, args)
        if self.capability:
            check_determinism(func, args)
        result = shapes.run(self.fakes, func, args, kwargs)
        if name in STORED and self.capability:
            whole = torch.empty(max(result.numel(), STORED[name](*args)), dtype=result.dtype, device=CPU)
            result = whole.as_strided(result.shape, result.stride())
        self._see_placed(place, args, result)
        if self.storages.names_gpu and not (place or self._moving or "device" in kwargs):
            self.storages.link(tensors_of(result), tensors_of((args, kwargs)))
        if func is aten.add.Tensor:
            self.storages.note_sum(args[0], result)
        if self.capability and (place == GPU or not self.storages.names_gpu):
            self._take_for_a_moment(func, name, args, kwargs)
        self.values.follow(func, args, kwargs, result)
        if self.capability and not self._moving and not is_meta(result):
            elsewhere = self.storages.names_gpu and self._is_not_the_gpus(func, args, kwargs)
            if not elsewhere:
                self.note_operation(func, args, kwargs, result)
        self._note_meaning(func, name.removeprefix("aten::"), args, result)
        return result

    def _take_for_a_moment(self, func, name: str, args: tuple, kwargs: dict) -> None:
        """Count what the GPU's kernels of an operation take while they run."""
        takes = TEMPORARY[name](*args, *kwargs.values()) if name in TEMPORARY else 0
        if func in (aten.convolution.default, aten.convolution_backward.default):
            takes += self._transform(func, args)
        if takes:
            self.storages.take_for_a_moment(takes)
        if buffer := reduction_buffer(func, args, kwargs, self.asked.first):
            self.storages.take_for_a_moment(buffer)

    def _transform(self, func, args: tuple) -> int:
        """What a convolution takes for Winograd's algorithm; nothing in TF32, which older GPUs do not have."""
        tiles = tiles_of_winograd(func.overloadpacket.__name__, args)
        if tiles and self.capability >= (8, 0) and torch.backends.cudnn.conv.fp32_precision == "tf32":
            self.holds_from = max(self.holds_from, (8, 0))
            return 0
        if tiles:
            self.say(ASSUMED, "cuDNN takes Winograd's algorithm for convolutions of many channels, and memory for it")
        return tiles

    def _read(self, func, args: tuple, kwargs: dict) -> bool | int | float:
        return self.reading.number(func, args, kwargs)

    def _see_placed(self, place: str, args: tuple, result: object) -> None:
        """Count what an operation made. Of a list, each lies where that lies which it was made of."""
        before, lists = self._placing, lists_of(args)
        pairs = zip(result, lists[0]) if isinstance(result, list) and lists else [(result, None)]
        for each, of in pairs:
            block = self.storages.of(of) if of is not None else None
            self._placing = place if block is None else block.place
            self.see(each)
        self._placing = before

    def _run_by_values(self, func, args: tuple, kwargs: dict) -> object:
        """What an operation gives whose shape depends on values, by a rule of ours; it lies with its arguments."""
        place = self._meet(func, args, kwargs) if self.storages.names_gpu else self._placing
        with self.placing(place, self._moving):
            return by_values.run(self, func, args, kwargs)

    def _note_meaning(self, func, name: str, args: tuple, result: object) -> None:
        """Note what an operation says of its result: how many, a truth, zeros, what was looked up."""
        self.counting.follow(func, name, args, result)
        self.work.note_libraries(name, args)
        if self.optimizers.keeps_direction(func, args):
            self.counting.truths[result] = True
        elif name == LOOKS_FOR_NAN:
            self.counting.truths[result] = False
        elif name == "_amp_foreach_non_finite_check_and_unscale_":
            self.reading.zeros.add(storage_key(args[1]))
        elif name == "embedding" and self.work.counts and (known := self._numbers_looked_up(args[1])) is not None:
            self.looked_up.append(known)

    def _numbers_looked_up(self, tokens: torch.Tensor) -> torch.Tensor | None:
        return self.values.of(tokens)

    def note_operation(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """Note the work of an operation, if it is in the step that counts."""
        if self.work.counts:
            self._note(func, args, kwargs, result)

    def _note(self, func, args: tuple, kwargs: dict, result: object) -> None:
        self.work.note(func, args, kwargs, result)

    def page(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in memory that moves to the host where the GPU is full, by itself: PyTorch does not count it."""
        with self.placing(PAGED), DisableTorchFunction():
            return torch.zeros(shape, dtype=dtype, device="cpu")

    def _take_apart(self, func, args, kwargs):
        """The result of an operation that is made of others, which are noted in its place.

        Autograd takes such operations apart, but inference mode leaves it out, and so does what a library calls in the
        place of an operation. So does torch/utils/flop_counter.py.
        """
        with self:
            if self.capability and (made := self._made_of_others.get(func)):
                return made(*args, **kwargs)
            return func.decompose(*args, **kwargs)

    def see(self, value: object) -> None:
        """Count the storages of what an operation made."""
        if isinstance(value, torch.Tensor):
            if isinstance(value, FakeTensor):
                self._add(value)
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.see(item)

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.layout is torch.sparse_coo:
            for part in (aten._indices.default(tensor), aten._values.default(tensor)):
                self._add(part)
        if tensor.layout is not torch.strided:
            return
        is_forward = self._started and not self.optimizers.working and _current_graph_task_id() == -1
        self._watch(tensor, None if is_meta(tensor) else self.storages.add(tensor, self._placing, forward=is_forward))

    def _watch(self, tensor: torch.Tensor, block: Block | None) -> None:
        """Note when a tensor's storage is let go of, if it has a new block."""
        if block is None:
            return
        finalizer = weakref.finalize(tensor.untyped_storage(), self._drop, storage_key(tensor), block)
        if not isinstance(tensor, FakeTensor):
            self._finalizers.append(finalizer)

    def _drop(self, key: int, block: Block) -> None:
        if self.storages.drop(key, block):
            self.reading.zeros.discard(key)
            self.values.forget(key)

    def _see_real(self, value: object) -> None:
        """Count, once, a tensor that was built outside of the variant."""
        if isinstance(value, (tuple, list)):
            for item in value:
                self._see_real(item)
        elif isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) and value.device.type != "meta":
            if value.requires_grad and value.is_leaf:
                raise CannotPredict(
                    "the step uses parameters from outside of the variant: build the model inside of it"
                )
            if value.dim() and value.numel() and not self._moving:
                self._add(value)
                self.say(ASSUMED, "tensors that were made outside of the function are on the GPU, too")

    def is_on_host(self, fake: FakeTensor) -> bool:
        """Whether a script has made a fake tensor in the host's memory, or moved it there."""
        return False

    def _meet(self, func, args: tuple, kwargs: dict) -> str:
        """Where the results of an operation lie: on the GPU with what it takes, which brings all of that there."""
        given = [t for t in tensors_of((args, kwargs)) if not isinstance(t, FakeTensor) or t.constant is None]
        blocks = [(tensor, self.storages.of(tensor)) for tensor in given]
        if not any(block is not None and block.place == GPU for _, block in blocks):
            return self._placing
        each_alone = func._schema.name.startswith("aten::_foreach_")  # where a list may have some of both
        if func.overloadpacket not in _CROSSES and not self._moving and not each_alone:
            for tensor, block in blocks:
                if block is not None and block.place not in (GPU, PAGED) and tensor.dim():
                    self.storages.bring(block)
        return self._placing or GPU

    def placing_on_gpu(self) -> contextlib.AbstractContextManager:
        """Inside, new tensors lie on the GPU."""
        return self.placing(GPU)

    @contextlib.contextmanager
    def placing(self, place: str, moving: bool = False) -> Iterator[None]:
        """Inside, new tensors lie there."""
        before = self._placing, self._moving
        self._placing, self._moving = place, moving
        try:
            yield
        finally:
            self._placing, self._moving = before

    def _is_not_the_gpus(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether it is no kernel of the GPU's: a copy over the bus, which is noted here, or the CPU's own work."""
        blocks = {id(tensor): self.storages.of(tensor) for tensor in tensors_of((args, kwargs))}
        places = {block.place for block in blocks.values() if block is not None} - {PAGED}
        if func is aten.copy_.default and GPU in places and len(places) == 2:
            block = blocks[id(args[0])]
            inside = block.born > self._called  # by PyTorch in C++, for what it is given: pad_sequence
            if not block.place and inside:
                block.place = GPU
                return False
            if not block.place:
                self.storages.suppose_on_host(block)
            if HOST in (block.place, blocks[id(args[1])].place):  # what is loaded has no place
                self.work.note_bus(args[0])
            return True
        if GPU in places or not (HOST in places or (places == {""} and self._is_work(func, args, kwargs))):
            return False
        if runs_kernel(func) and self.work.counts:
            self.say(UNTIMED, f"the CPU takes for what it computes itself, such as {func.overloadpacket}")
        return True

    def _is_work(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether the CPU takes long for it, too: a product, or an update of weights that nothing has sent away."""
        updates = self.optimizers.working and any(tensor.dim() for tensor in tensors_of((args, kwargs)))
        return func.overloadpacket in flop_registry or bool(updates)

    def move(self, tensor: torch.Tensor, place: str, pinned: bool = False) -> torch.Tensor:
        """The tensor's copy there; itself, if it lies there. What does not say where it lies, is not on the GPU.

        PyTorch has memory `pinned` for what it copies to the CPU without a wait.
        """
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or is_meta(tensor):
            return tensor
        block = self.storages.of(tensor)
        if (block is not None and block.place == GPU) == (place == GPU):
            return tensor
        if block is not None and HOST in (place, block.place):  # what is loaded has no place: that takes no time here
            self.work.note_bus(tensor, pinned=pinned or place == GPU)
        with self.placing(place, moving=True):
            copy = tensor.clone()
        if copy.requires_grad:
            copy.register_hook(lambda gradient: self.move(gradient, HOST if place == GPU else GPU))
        return copy

    def send(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """A copy on the CPU, whatever the step says of the tensor."""
        self.work.note_bus(tensor, pinned=pinned)
        with self.placing(HOST, moving=True):
            return tensor.detach().clone()

    def fetch(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """A copy on the GPU of what was sent."""
        self.work.note_bus(tensor, pinned=pinned)
        with self.placing(GPU, moving=True):
            return tensor.clone()

    def placed(self, on_host: bool) -> contextlib.AbstractContextManager:
        """Inside, new fake tensors are where a step puts them."""
        return contextlib.nullcontext()

    def imitate(self, real: torch.Tensor, on_host: bool, kept: int = 1) -> FakeTensor:
        """A fake tensor like a real one. Of up to `kept` elements the values are: what follows from them is known."""
        if real.layout is torch.sparse_coo:
            parts = (self.imitate(part, on_host) for part in (real._indices(), real._values()))
            return torch.sparse_coo_tensor(*parts, real.shape, check_invariants=False)
        if real.layout is not torch.strided:
            raise CannotPredict(tell_sparse(real.layout))
        with self.placed(on_host), torch.no_grad(), DisableTorchFunction():
            fake = torch.empty_strided(real.shape, _dense_strides(real), dtype=real.dtype, device=CPU)
        if real.numel() <= kept and not real.requires_grad:
            with on_real_tensors():
                self.values.keep(fake, real.detach)
        return fake.requires_grad_(real.requires_grad)

    def take_in(self, real: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor that was read from a file."""
        return self.imitate(real, True, LARGE)

    def of_host(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's, which an operation on the GPU gives, too: its numbers are known."""
        made = self.imitate(real, True, LARGE)
        with self.placing(HOST):
            self.see(made)
        return made

    def note_module(self, module: torch.nn.Module, *_: object) -> None:
        """A hook for every parameter and buffer that a module registers."""
        self._modules.add(module)

    def trained_share(self) -> float:
        """The share of the modules' weights that the optimizers which have made a step train; 0 if it is not known."""
        held = (each for module in self._modules for each in module._parameters.values() if each is not None)
        weights = {id(each): each.numel() for each in held if not is_meta(each)}  # such a model has none, only shapes
        groups = (group for one in self.optimizers.stepped for group in one.param_groups)
        given = {id(each): each for group in groups for each in group["params"]}
        known = sum(weights[name] for name, each in given.items() if name in weights and each.requires_grad)
        others = sum(each.numel() for name, each in given.items() if name not in weights)  # such as copies on the CPU
        return known / max(1, sum(weights.values())) if others < known else 0.0

    def find_untrained(self) -> list[torch.nn.Parameter]:
        """The modules' weights that have got a gradient, and that no optimizer has."""
        groups = (group for one in self.optimizers.built for group in one.param_groups)
        given = {id(each) for group in groups for each in group["params"]}
        held = {id(each): each for module in self._modules for each in module._parameters.values() if each is not None}
        weights = (each for name, each in held.items() if name not in given)
        return [each for each in weights if each.requires_grad and each.grad is not None]

    def name_owners(self) -> None:
        """Say of all storages alive whose they are."""
        for module in list(self._modules):
            parameters = [p for p in module._parameters.values() if p is not None]
            self.storages.name(parameters, "weights")
            self.storages.name((parameter.grad for parameter in parameters), "gradients")
        copied = list(self.copied)
        self.storages.name(copied, "weights")
        self.storages.name((parameter.grad for parameter in copied), "gradients")
        for optimizer in list(self.optimizers.stepped):
            self.optimizers.name_state(optimizer)


def _name_node() -> str:
    """The name of autograd's node that is running; empty outside of a backward pass."""
    return node.name() if (node := running_node()) is not None else ""


@functools.cache
def _is_composite(func) -> bool:
    """Whether an operation is made of others. One such as `silu_backward` could be, and has a kernel of its own."""
    has = func.has_kernel_for_dispatch_key
    return has(DispatchKey.CompositeImplicitAutograd) and not has(DispatchKey.CPU)


def _dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Those of a copy: what is expanded, or a part of something larger, is stored in full, and without the rest."""
    if tensor.is_contiguous():
        return tensor.stride()
    with on_real_tensors():
        return torch.empty_like(tensor, device="meta").stride()


def is_meta(value: object) -> bool:
    """Whether it is a tensor on the device "meta", which a fake one hides."""
    if isinstance(value, FakeTensor):
        return value.fake_device.type == "meta"
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
