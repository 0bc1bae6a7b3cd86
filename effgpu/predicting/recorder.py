"""Records a step on fake tensors: what it allocates, which kernels a GPU would run, what it reads of values."""

import contextlib
import functools
import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from threading import RLock, current_thread, main_thread

import torch
from torch.utils.data import DataLoader
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching import sites
from effgpu.attaching.sites import Site
from effgpu.attaching.steps import drive
from effgpu.errors import CannotPredict
from effgpu.measuring.ops import lists_of, runs_kernel, tensors_of
from effgpu.measuring.torch_internals import (
    DisableTorchFunction,
    DispatchKey,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    _current_autograd_node,
    _current_graph_task_id,
    _disable_current_modes,
    storage_key,
)
from effgpu.predicting import by_values, experts, quantized, shapes
from effgpu.predicting.allocator import GPU, HOST, PAGED, Block, find_peak, round_size
from effgpu.predicting.asked import Asked
from effgpu.predicting.counting import HALF, Counting
from effgpu.predicting.facts import ASSUMED, CHOSEN, UNKNOWN, UNTIMED, Fact
from effgpu.predicting.files import Files
from effgpu.predicting.gpus import FP8, FP8_FROM
from effgpu.predicting.guesses import Guesses, find_reader, makes_a_statistic
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.kernels import (
    CONVOLUTION,
    TIMED,
    Kernel,
    copy_over_bus,
    has_sparse,
    lacks_rule,
    note,
    touching,
)
from effgpu.predicting.optimizers import Optimizers
from effgpu.predicting.refusals import check_formats, tell_sparse
from effgpu.predicting.rules import STORED, TEMPORARY, attention, convolution_workspace, dropout, recurrent_layers
from effgpu.predicting.scores import Scores
from effgpu.predicting.timeline import BACKWARD, FORWARD, KERNEL, READ, UPDATE, Event
from effgpu.predicting.translator import CPU, Translator, name_device, on_real_tensors
from effgpu.predicting.values import Values
from effgpu.units import MiB

aten = torch.ops.aten
LARGE = 100_000  # elements: of what is made or loaded with fewer, such as a schedule, the values are known
_BELOW_INFINITY = {"lt": True, "le": True, "gt": False, "ge": False}  # what a loss is
_KEEPS_TRUTH = ("any", "all", "clone", "_to_copy", "view")
_DECIDED_BY = {"logical_or": True, "bitwise_or": True, "logical_and": False, "bitwise_and": False}  # one operand alone
# What the CPU takes for a view, for each tensor of a list that a foreach operation gets, and for a convolution, in
# calls of an operation.
_VIEW, _LISTED, _CUDNN = 0.3, 0.05, 3
# Backward passes write into what they have just made, but not if somebody like us looks on: FunctionsManual.cpp,
# areAnyTensorSubclassLike.
_IN_PLACE = {
    aten.index_put.default: ("IndexBackward0", aten.index_put_.default),
    aten.index_add.default: ("IndexSelectBackward0", aten.index_add_.default),
    aten.scatter_add.default: ("GatherBackward0", aten.scatter_add_.default),
    aten.put.default: ("TakeBackward0", aten.put_.default),
    aten.masked_scatter.default: ("MaskedSelectBackward0", aten.masked_scatter_.default),
}
_NO_SUM = None, None, 0
_COMPARES = {aten.allclose.default, aten.equal.default}
_CROSSES = {aten.copy_, aten._to_copy, aten._foreach_copy_, aten._foreach_copy}  # from one device to another

OWN_READS = ("/amp/", "/optim/", "/utils/data/")  # PyTorch's, which a reader cannot leave out
_READS_WITHOUT_EFFECT = (*OWN_READS, "/nn/utils/clip_grad.py", "/nn/init.py", "/_tensor_str.py")

_MADE_ONCE = ("gradients", "optimizer state")  # for each weight, if not in the first step: no leak

device_while_looked_up = FakeTensor.device.fget


class Recorder(TorchDispatchMode):
    """Every storage that operations create, as a `Block` with its owner, in order of events.

    `asked` says for which GPU, `answers` are those of `Guesses`. `as_gpu` puts it to work, on fake tensors.
    """

    def __init__(self, asked: Asked, answers: Mapping[Hashable, bool | int | float] | None = None):
        super().__init__()
        self.asked, self.capability = asked, asked.capability
        self.fakes: FakeTensorMode | None = None  # the mode of `as_gpu`
        self.over = False
        self.one_at_a_time = RLock()  # calls of the step's threads
        self.blocks: list[Block] = []
        self.first = 0
        self.said: dict[Fact, None] = {}  # in the order of their appearance
        self.holds_from = (0, 0)  # the lowest capability that behaves the same
        self._most_from = 0  # the event from which on the most in use is asked for
        self.emptied = 0  # the event at which the allocator last held no more than what was in use, as all was full
        self._events = 0
        self._called = 0  # the event at which the step has called PyTorch last
        self._started = False
        self._blocks: dict[int, Block] = {}  # by storage
        self._summed: tuple = _NO_SUM  # a gradient, the sum that was just made of it, and the sum's storage
        self._continued: dict[int, Block] = {}  # the block that a sum's goes on in, by the sum's
        self.truths = WeakTensorKeyDictionary()  # of what predicates gave: the value that they have in a healthy step
        self.values = Values()
        self.counting = Counting(self)
        self.guesses = Guesses(self, answers or {})
        self.names_gpu = False  # for a tensor: then what does not say where it lies, and never meets one, is on the CPU
        self._depth = 0  # of operations that are being looked up
        self._placing, self._moving = "", False  # where the tensors lie that an operation makes; it is a copy to there
        self.files = Files(asked.began)
        self.loaded: tuple[DataLoader, int] | None = None  # whose batch the step that counts took, and its bytes
        self.loading = False  # whether a DataLoader makes a batch
        self._chosen_from = 0  # elements, or rows, of what an operation from elsewhere chooses from
        self._zeros: set[int] = set()
        self.looked_up: list[torch.Tensor] = []  # by embeddings in the last step, where their numbers are known
        self._modules: weakref.WeakSet = weakref.WeakSet()
        self.idle: list[str] = []  # those that have made no step where others have, at the end of the last one
        self.optimizers = Optimizers(self)
        self.products = [0]  # of the backward pass of each of a script's steps, and of the one that has begun
        self.copied = WeakTensorKeyDictionary()  # parameters, which no module registers
        self._finalizers: list[weakref.finalize] = []  # of tensors that live on
        self._convolved, self._multiplied = 0, False
        self.cudnn_attends = False  # on a GPU that prefers its kernel
        self.noting = False  # whether the step that runs is one whose kernels are noted, on a GPU
        self.events: list[Event] = []  # of the last step, in their order
        self._scores = Scores()  # of attention in the last step
        self.loop = (drive.__code__,)  # the code that runs the steps: lines further out are not the step's
        self.compiled = 0  # how deep in code that would be compiled
        self._ends: list[int] = []  # of steps
        self._made: list[list[Block]] = [[]]  # by the forward pass of each step, and of the one that has begun
        self.kept: tuple[tuple[Site | None, int], ...] = ()  # bytes that each of the last two steps has added to
        self._alive: dict[Site | None, list[int]] = {}  # sizes of what was there at the end of the last step
        self._grew: set[Site | None] = set()  # where that was more than a step before

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: without PyTorch's wrapper, each of the many calls is cheaper."""
        return False

    def start(self) -> None:
        """The variant is built: count from here on."""
        self.name_owners()
        self.first, self._started, self._made, self._alive = self._events, True, [[]], {}
        self._alive, self._grew = self._find_more()[1], set()

    def device_of(self, fake: FakeTensor) -> torch.device:
        """Where the step finds a fake tensor, and where PyTorch finds it while an operation is looked up.

        Where the GPU is named, that is there, but for what was sent to the CPU: what does not say where it lies may
        meet the GPU's tensors later, and a checkpoint compares devices.
        """
        if not self.names_gpu or self._depth or fake.fake_mode.in_kernel_invocation:
            return device_while_looked_up(fake)
        block = self.block_of(fake)
        return device_while_looked_up(fake) if block is not None and block.place == HOST else FIRST_GPU

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in, if it has one."""
        return self._blocks.get(storage_key(tensor)) if tensor.layout is torch.strided else None

    def say(self, kind: str, text: str) -> None:
        """Something is taken for granted, or not known: one of the kinds of `facts`."""
        self.said[Fact(kind, text)] = None

    def note_capability(self) -> None:
        """The step has asked what the GPU is: another one may take another way."""
        self.holds_from = max(self.holds_from, self.capability or (0, 0))

    def note_name(self) -> None:
        """The step has asked for the GPU's name; nothing follows where it only shows it."""
        if not makes_a_statistic(find_reader()[1]):
            self.note_capability()
            self._note_own("what follows from a GPU's name is that")

    def note_memory(self) -> None:
        """The step has asked how much memory the GPU has: sizes may follow from it."""
        self.note_capability()
        self._note_own("sizes that follow from a GPU's memory are those")

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
        self._called = self._events

    def note_kernels(self) -> None:
        """Note the kernels of the step that follows, the last one."""
        self.noting, self.events, self.looked_up, self._scores = bool(self.capability), [], [], Scores()

    def end_step(self) -> None:
        """A step is over: say whose its storages are, and what it leaves behind more than the one before."""
        self.name_owners()
        self.idle = self.optimizers.idle()
        self._ends.append(self._events)
        self.guesses.end_step()
        self._name_what_stays()
        more, alive = self._find_more()
        if self._grew.intersection(site for site, _ in more) and gc.collect():  # that only awaited it
            more, alive = self._find_more()
        self.kept = tuple((site, size) for site, size in more if site in self._grew)  # not: what comes and goes
        self._alive, self._grew = alive, {site for site, _ in more}
        self._made.append([])

    @property
    def made(self) -> list[int]:
        """Bytes of activations that the forward pass of each step has made."""
        return [sum(block.size for block in blocks if block.owner == "activations") for blocks in self._made[:-1]]

    def accumulates(self) -> bool:
        """Whether autograd gives a weight its gradient at this moment."""
        return _name_node() == "torch::autograd::AccumulateGrad"

    def ran_more_before(self) -> bool:
        """Whether the step before the last ran a forward pass more, and no backward pass: its graph was not used."""
        *_, before, last, _ = map(len, self._made)
        return before > last and len(self.products) > 2 and self.products[-3] == self.products[-2]

    def _name_what_stays(self) -> None:
        """What a step has made, and a whole one after it leaves there, is no activation: another library's state."""
        for block in self.blocks if len(self._ends) > 1 else ():
            if block.owner == "activations" and block.died == math.inf and block.born <= self._ends[-2]:
                block.owner = "other"

    def _find_more(self) -> tuple[tuple[tuple[Site | None, int], ...], dict[Site | None, list[int]]]:
        """What is alive at the end of this step more than at the end of the one before, and the sizes of what is."""
        alive: dict[Site | None, list[int]] = {}
        for block in self.blocks:
            if block.died == math.inf and self.is_on_gpu(block) and block.owner not in _MADE_ONCE:
                alive.setdefault(block.site, []).append(block.size)
        sites = dict.fromkeys([*alive, *self._alive])
        now, before = ({site: sizes.get(site, []) for site in sites} for sizes in (alive, self._alive))
        more = Counter({site: sum(now[site]) - sum(before[site]) for site in sites})
        added = (site for site in more if len(now[site]) > len(before[site]))  # not: a larger batch in place of one
        grown = tuple((site, more[site]) for site in sorted(added, key=more.get, reverse=True) if more[site] > 0)
        return grown if more.total() > 0 else (), alive

    def owners_at_peak(self) -> tuple[tuple[Site | None, str, int], ...]:
        """The bytes at the peak by line and owner, the most first."""
        _, at = find_peak(self.on_gpu, self.first)
        owned: dict[tuple[Site | None, str], int] = {}
        for block in self.blocks:
            if self.is_on_gpu(block) and block.born <= at < block.died:
                key = block.site, block.owner
                owned[key] = owned.get(key, 0) + block.size
        return tuple((*key, size) for key, size in sorted(owned.items(), key=lambda item: -item[1]))

    def stop(self) -> None:
        """The step has run: let go of what lives on."""
        self.over = self.fakes.over = True
        for finalizer in self._finalizers:
            finalizer.detach()

    def workspaces(self) -> tuple[int, int]:
        """The least and the most bytes that cuBLAS and cuDNN take to work in, on any GPU.

        aten/src/ATen/cuda/CUDABlas.cpp and CublasHandlePool.cpp, parseChosenWorkspaceSize: 8,320 KiB for a handle, or
        32 MiB from compute capability 9.0 on; one handle for the forward thread, one for autograd's. cuDNN's
        heuristics choose a convolution's workspace, and no rule tells which: `convolution_workspace` gives a bound.
        """
        if not self.capability:
            return 0, 0
        least = int((32 if self.capability >= (9, 0) else 8.125) * MiB) * self._multiplied
        return least, 2 * 32 * MiB * self._multiplied + self._convolved

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.over:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
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
            self.wait()
            return self.guesses.take(False, _reader())
        if func.namespace == quantized.LIBRARY and (made := self._quantized(func)):
            with self:
                return made(*args, **kwargs)
        if made := experts.RULES.get(func._schema.name):
            return made(self, *args, **kwargs)
        if func.overloadpacket in by_values.RULES and (result := self._run_by_values(func, args, kwargs)) is not None:
            return result
        if func.namespace != "aten":
            self._chosen_from = next((t.shape[0] for t in args if isinstance(t, torch.Tensor) and t.dim()), 0)
        if _is_composite(func):
            return self._take_apart(func, args, kwargs)
        if (in_place := _IN_PLACE.get(func)) and _name_node() == in_place[0]:
            return self._dispatch(in_place[1], args, kwargs)
        if func is not aten.lift_fresh.default:  # which takes the real numbers that a tensor is made of
            for value in (*args, *kwargs.values()):
                self._see_real(value)
        place = self._meet(func, args, kwargs) if self.names_gpu else self._placing
        name = func._schema.name
        check_formats(func, args)
        result = shapes.run(self.fakes, func, args, kwargs)
        if name in STORED and self.capability:
            whole = torch.empty(max(result.numel(), STORED[name](*args)), dtype=result.dtype, device=CPU)
            result = whole.as_strided(result.shape, result.stride())
        self._see_placed(place, args, result)
        if func is aten.add.Tensor:
            self._note_sum(args[0], result)
        if name in TEMPORARY and self.capability:
            self._take_for_a_moment(TEMPORARY[name](*args, *kwargs.values()))
        self.values.follow(func, args, kwargs, result)
        if self.capability and not self._moving and not is_meta(result):
            elsewhere = self.names_gpu and self._is_not_the_gpus(func, args, kwargs)
            if not elsewhere:
                self.note_operation(func, args, kwargs, result)
        self._note_meaning(func, name.removeprefix("aten::"), args, result)
        return result

    def _see_placed(self, place: str, args: tuple, result: object) -> None:
        """Count what an operation made. Of a list, each lies where that lies which it was made of."""
        before, lists = self._placing, lists_of(args)
        pairs = zip(result, lists[0]) if isinstance(result, list) and lists else [(result, None)]
        for each, of in pairs:
            block = self.block_of(of) if of is not None else None
            self._placing = place if block is None else block.place
            self.see(each)
        self._placing = before

    def _run_by_values(self, func, args: tuple, kwargs: dict) -> object:
        """What an operation gives whose shape depends on values, by a rule of ours; it lies with its arguments."""
        place = self._meet(func, args, kwargs) if self.names_gpu else self._placing
        with self.placing(place, self._moving):
            return by_values.run(self, func, args, kwargs)

    def _note_meaning(self, func, name: str, args: tuple, result: object) -> None:
        """Note what an operation says of its result: a truth, zeros, a product, what was looked up."""
        self.counting.follow(name, args, result)
        if self.truths:
            self._follow_truths(func, name, args, result)
        if self.optimizers.keeps_direction(func, args):
            self.truths[result] = True
        elif name in _BELOW_INFINITY and not args[0].dim() and isinstance(args[1], float) and math.isinf(args[1]):
            self.truths[result] = _BELOW_INFINITY[name] == (args[1] > 0)
        elif name == "_amp_foreach_non_finite_check_and_unscale_":
            self._zeros.add(storage_key(args[1]))
        elif name in ("mm", "bmm", "addmm", "baddbmm"):
            self._multiplied = True
        elif name == "embedding" and self.noting and (known := self.values.of(args[1])) is not None:
            self.looked_up.append(known)
        elif name in ("convolution", "convolution_backward"):
            self._convolved = max(self._convolved, convolution_workspace(*args[name == "convolution_backward" :][:2]))

    def _follow_truths(self, func, name: str, args: tuple, result: object) -> None:
        """Note the truth of a result that follows from that of its arguments, and forget that of what is written."""
        known = [self.truths.get(arg) if isinstance(arg, FakeTensor) else None for arg in args[:2]]
        name = name.removesuffix("_") if func._schema.is_mutable else name
        truth = None
        if name in _KEEPS_TRUTH:
            truth = known[0]
        elif name in ("logical_not", "bitwise_not"):
            truth = None if known[0] is None else not known[0]
        elif name in _DECIDED_BY:
            truth = _DECIDED_BY[name] if _DECIDED_BY[name] in known else known[0] if known[0] == known[1] else None
        if func._schema.is_mutable and isinstance(args[0], FakeTensor) and args[0].dtype is torch.bool:
            for mask in [each for each in self.truths if storage_key(each) == storage_key(args[0])]:
                del self.truths[mask]
        if truth is not None and isinstance(result, torch.Tensor):
            self.truths[result] = truth

    def note_operation(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """Note the kernels of an operation, if it is in the step that counts."""
        if self.noting:
            self._note(func, args, kwargs, result)

    def _note(self, func, args, kwargs, result) -> None:
        """Note the kernels of an operation, with the calls that the CPU makes for it."""
        kernels = note(func, args, kwargs, result, bool(self.optimizers.working))
        if kernels and func.namespace != "aten":
            name = f"{func.namespace}::{func.overloadpacket.__name__}"
            if func.namespace == "torch_nn":  # PyTorch's own, in Python: linear_cross_entropy in chunks
                self.say(UNKNOWN, f"what {name} computes, and takes while it does")
            else:
                self.say(ASSUMED, f"{name} takes as long as reading its arguments and writing its results")
        if kernels and lacks_rule(func, args):
            name = f"{func.overloadpacket.__name__}{' of a sparse tensor' * has_sparse(args)}"
            self.say(UNTIMED, f"{name} computes: only what it reads and writes")
        if kernels and func.overloadpacket is aten.linalg_matrix_exp:  # powers of the matrix, the longer the more
            self.say(UNKNOWN, "what linalg_matrix_exp takes to work in, beside its result")
        for kernel in kernels:
            if kernel.product and kernel.format.startswith(FP8) and self.capability >= FP8_FROM:
                self.say(ASSUMED, "products in 8 bits take half as long as in fp16")
            elif kernel.product and kernel.format not in TIMED:
                self.say(UNTIMED, f"products in {kernel.format} take")
        if kernels and self.optimizers.working:
            self.optimizers.note_kernel()
        call = _CUDNN if any(kernel.kind == CONVOLUTION for kernel in kernels) else 1 if kernels else _VIEW
        reads_on = self._phase() == FORWARD and self._scores.read_on(func, args, kwargs, result)
        self._add_kernels(kernels, call + _LISTED * sum(map(len, lists_of(args))), reads_on)

    def _add_kernels(self, kernels: list[Kernel], calls: float, reads_on: bool = False) -> bool:
        """Note kernels, if they are in the step that counts, and return whether they are."""
        if self.noting:
            site = sites.find_site(outermost=True, until=self.loop) if kernels else None
            about = {"phase": self._phase(), "reads_on": reads_on, "optimizer": self.optimizers.at_work}
            self.events.append(Event(KERNEL, site, tuple(kernels), calls, **about))
        return self.noting

    def _phase(self) -> str:
        return UPDATE if self.optimizers.working else FORWARD if _current_graph_task_id() == -1 else BACKWARD

    def note_recurrent(self, kernels: Iterable[tuple[Kernel, int]]) -> None:
        """One call of cuDNN, which runs each of these kernels so often."""
        self._multiplied = True
        self._add_kernels([kernel for kernel, number in kernels for _ in range(number)], _CUDNN)

    def note_cell(self, kernel: Kernel) -> None:
        """One kernel of a cell's."""
        self._add_kernels([kernel], 1)

    def note_groups(self, kernel: Kernel, count: int, read: int | None) -> None:
        """So many equal products, after a read of so many bytes that say how they are cut; None: in one kernel."""
        self._multiplied = True
        if read is None:
            self._add_kernels([experts.joined(kernel, count)], 1)
        else:
            self.wait(read, own=True)
            self._add_kernels([kernel] * count, count * (1 + 3 * _VIEW))  # of two matrices and the result

    def note_custom(self, name: str, tensors: list[torch.Tensor]) -> None:
        """A kernel of Triton's with these arguments."""
        if self._add_kernels([touching(name, tensors)], 1):
            self.say(UNTIMED, f"the Triton kernel {name} computes: only what it reads and writes")

    def _quantized(self, func) -> Callable | None:
        """What an operation of bitsandbytes' is made of, if it is."""
        return quantized.parts(self._note_8_bits).get(func._schema.name)

    def _note_8_bits(self, kernel: Kernel) -> None:
        self._multiplied = True
        if self._add_kernels([kernel], 1):
            self.say(ASSUMED, "products in 8 bits take as long as in fp16")

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
            if self.capability and func is aten.scaled_dot_product_attention.default:
                return attention(self, *args, **kwargs)
            if self.capability and func is aten.dropout.default:
                return dropout(*args, **kwargs)
            if self.capability and (layers := recurrent_layers(self).get(func)):
                return layers(*args, **kwargs)
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
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._blocks:
            return
        size = storage.nbytes()
        if not size or is_meta(tensor):
            return
        self._events += 1
        is_forward = self._started and not self.optimizers.working and _current_graph_task_id() == -1
        owner = "activations" if is_forward else "other"
        block = Block(round_size(size) if self.capability or tensor.is_cuda else size, self._events, owner)
        block.node = -1 if is_forward else _number_node()
        block.place = self._placing
        if is_forward and torch.is_grad_enabled() and self.is_on_gpu(block) and current_thread() is main_thread():
            self._made[-1].append(block)
        block.site = sites.find_site()
        self.blocks.append(block)
        self._blocks[key] = block
        finalizer = weakref.finalize(storage, self._drop, key, block)
        if not isinstance(tensor, FakeTensor):
            self._finalizers.append(finalizer)

    def _note_sum(self, one: torch.Tensor, result: torch.Tensor) -> None:
        """Autograd adds a gradient to the one that it holds, which is in another node's result, by an operation."""
        block, made = self.block_of(one), self.block_of(result)
        if block and made and block.node not in (-1, _number_node()) and block.size == made.size:
            self._summed = block, made, storage_key(result)

    def _drop(self, key: int, block: Block) -> None:
        block = self._continued.pop(id(block), block)
        if self._blocks.get(key) is block:
            del self._blocks[key]
            self._zeros.discard(key)
            self.values.forget(key)
        if block is self._summed[0] and self._summed[1] is self.blocks[-1]:
            self._go_on(*self._summed)
        else:
            self._events += 1
            block.died = self._events

    def _go_on(self, block: Block, made: Block, key: int) -> None:
        """A sum takes the place of what nobody else holds. PyTorch only makes a new tensor as it sees us looking on.

        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        self.blocks.pop()
        self._blocks[key], self._summed = block, _NO_SUM
        self._continued[id(made)] = block

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

    def in_use(self) -> int:
        """Bytes on the GPU now."""
        return sum(block.size for block in self._blocks.values() if self.is_on_gpu(block))

    def most_in_use(self) -> int:
        """The most bytes on the GPU since `forget_most`."""
        return find_peak(self.on_gpu, self._most_from)[0]

    def forget_most(self) -> None:
        """What torch.cuda.reset_peak_memory_stats does."""
        self._most_from = self._events

    @property
    def on_gpu(self) -> list[Block]:
        """The blocks that lie on the GPU: all but those on the CPU, or those that are said to, if any tensor is."""
        return [block for block in self.blocks if self.is_on_gpu(block)]

    def is_on_gpu(self, block: Block) -> bool:
        """Whether a block takes memory of the GPU."""
        return block.place == GPU or (not block.place and not self.names_gpu)

    def is_on_host(self, fake: FakeTensor) -> bool:
        """Whether a script has made a fake tensor in the host's memory, or moved it there."""
        return False

    @property
    def paged(self) -> int:
        """The most bytes of what lies on the GPU only as far as there is room."""
        return find_peak([block for block in self.blocks if block.place == PAGED])[0]

    def _meet(self, func, args: tuple, kwargs: dict) -> str:
        """Where the results of an operation lie: on the GPU with what it takes, which brings all of that there."""
        given = [t for t in tensors_of((args, kwargs)) if not isinstance(t, FakeTensor) or t.constant is None]
        blocks = [(tensor, self.block_of(tensor)) for tensor in given]
        if not any(block is not None and block.place == GPU for _, block in blocks):
            return self._placing
        each_alone = func._schema.name.startswith("aten::_foreach_")  # where a list may have some of both
        if func.overloadpacket not in _CROSSES and not self._moving and not each_alone:
            for tensor, block in blocks:
                if block is not None and block.place not in (GPU, PAGED) and tensor.dim():
                    if block.place == HOST:  # copied there by a name that is not seen: tensor.to(other.device)
                        self._events += 1
                        block.born = self._events
                    block.place = GPU
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
        blocks = {id(tensor): self.block_of(tensor) for tensor in tensors_of((args, kwargs))}
        places = {block.place for block in blocks.values() if block is not None} - {PAGED}
        if func is aten.copy_.default and GPU in places and len(places) == 2:
            block = blocks[id(args[0])]
            inside = block.born > self._called  # by PyTorch in C++, for what it is given: pad_sequence
            block.place = block.place or (GPU if inside else HOST)
            if HOST in (block.place, blocks[id(args[1])].place):  # what is loaded has no place
                self._note_copy(args[0])
            return True
        if GPU in places or not (HOST in places or (places == {""} and self._is_work(func, args, kwargs))):
            return False
        if runs_kernel(func) and self.noting:
            self.say(UNTIMED, f"the CPU takes for what it computes itself, such as {func.overloadpacket}")
        return True

    def _is_work(self, func, args: tuple, kwargs: dict) -> bool:
        """Whether the CPU takes long for it, too: a product, or an update of weights that nothing has sent away."""
        updates = self.optimizers.working and any(tensor.dim() for tensor in tensors_of((args, kwargs)))
        return func.overloadpacket in flop_registry or bool(updates)

    def _note_copy(self, tensor: torch.Tensor, pinned: bool = True) -> None:
        """A copy over the bus is the GPU's work, in the same stream as its kernels."""
        if self._add_kernels([copy_over_bus(tensor, pinned)], 1) and pinned:
            text = "what is sent to the CPU, and fetched from there, lies in pinned memory behind PCI Express"
            self.say(ASSUMED, text)

    def move(self, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """The tensor's copy there; itself, if it lies there. What does not say where it lies, is not on the GPU."""
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or is_meta(tensor):
            return tensor
        block = self.block_of(tensor)
        if (block is not None and block.place == GPU) == (place == GPU):
            return tensor
        if block is not None and HOST in (place, block.place):  # what is loaded has no place: that takes no time here
            self._note_copy(tensor, pinned=place == GPU)
        with self.placing(place, moving=True):
            copy = tensor.clone()
        if copy.requires_grad:
            copy.register_hook(lambda gradient: self.move(gradient, HOST if place == GPU else GPU))
        return copy

    def send(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """A copy on the CPU, whatever the step says of the tensor."""
        self._note_copy(tensor, pinned)
        with self.placing(HOST, moving=True):
            return tensor.detach().clone()

    def fetch(self, tensor: torch.Tensor, pinned: bool) -> torch.Tensor:
        """A copy on the GPU of what was sent."""
        self._note_copy(tensor, pinned)
        with self.placing(GPU, moving=True):
            return tensor.clone()

    def _take_for_a_moment(self, size: int) -> None:
        self.blocks.append(Block(round_size(size), self._events + 1, died=self._events + 2, place=GPU))
        self._events += 2

    def _read(self, func, args, kwargs):
        """The number that a tensor is read as: no fake tensor has one, but for constants."""
        tensor = args[0]
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return func(*args, **kwargs)
        if not self.optimizers.working and not self.is_on_host(tensor):  # an optimizer's count of steps is on the CPU
            self.wait()
        if (known := self.values.of(tensor)) is None:
            return self._guess(tensor, None)
        with _disable_current_modes():
            number = known.item()
        return self._guess(tensor, number) if self.values.are_assumed(tensor) else number

    def _guess(self, tensor: torch.Tensor, counted: bool | int | float | None) -> bool | int | float:
        """What a tensor is read as whose number is not known, or follows from counts that are assumed."""
        where = _reader()
        if tensor.dtype is torch.bool:
            return self.truths[tensor] if tensor in self.truths else self.guesses.take(bool(counted), where)
        if counted is None and tensor.is_floating_point():
            return self.guesses.take(0.0 if storage_key(tensor) in self._zeros else 1.0, where)
        return self.guesses.take(1 if counted is None else counted, where, counted=counted is not None)

    def read_list(self, tensor: torch.Tensor) -> object:
        """What `tensor.tolist()` gives, after one wait: its numbers where they are known, else guesses."""
        if not tensor.dim():
            return tensor.item()
        if not self.is_on_host(tensor):
            self.wait(tensor.nbytes)
        known, assumed = self.values.of(tensor), self.values.are_assumed(tensor)
        with on_real_tensors():
            if (known is None or assumed) and tensor.numel():
                number = self._guess(tensor, known.flatten()[0].item() if assumed else None)
                known = torch.full(tensor.shape, number, dtype=tensor.dtype) if known is None else known
            return known.tolist() if known is not None else torch.empty(tensor.shape).tolist()

    def wait(self, size: int = 0, *, own: bool = False) -> None:
        """The CPU waits for the GPU, and for a copy of so many bytes. Nobody is to blame for a library's own reads."""
        if self.noting:
            site = None if own or sites.asked_by_torch(OWN_READS) else sites.find_site(until=self.loop)
            about = {"phase": self._phase(), "optimizer": self.optimizers.at_work}
            self.events.append(Event(READ if site else KERNEL, site, bytes=size, waits=True, **about))

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

    def numbers_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers of a tensor, on which a size depends; None if they are not known. Said if they are assumed."""
        if self.values.are_assumed(tensor) and (where := _reader()):
            self.say(ASSUMED, f"{where} reads counts, taken as equal")
        return self.values.of(tensor)

    def choose_from(self, number: int, known: int | None = None, share: float = HALF) -> int:
        """How many of so many elements an operation takes that depends on values, which is said if it is not known."""
        taken = self.asked.taken
        if known is not None and taken is None:
            return known
        share = share if taken is None else taken
        if where := _reader(inside=False):  # one line for all that a library chooses below it
            self.say(CHOSEN, f"{where} takes {100 * share:.3g}% of what it chooses from by value (taken={share:.3g})")
        return round(share * number)

    def choose_rows(self, *_: object, **__: object) -> int:
        """The size of a result that an operation from elsewhere leaves open: a share of its first argument's rows."""
        return self.choose_from(self._chosen_from)

    def read_array(self, tensor: torch.Tensor):
        """The NumPy array that a tensor is read as: its numbers where they are known, else zeros."""
        import numpy

        if (known := self.numbers_of(tensor)) is not None:
            with on_real_tensors():
                return known.numpy(force=True).copy()
        if where := _reader():
            self.say(CHOSEN, f"{where} reads an array, taken as zeros")
        return numpy.zeros(tuple(tensor.shape), numpy.dtype(str(tensor.dtype).removeprefix("torch.")))

    def note_module(self, module: torch.nn.Module, *_: object) -> None:
        """A hook for every parameter and buffer that a module registers."""
        self._modules.add(module)

    def trained_share(self) -> float:
        """The share of the modules' weights that the optimizers which have made a step train; 0 if it is not known."""
        held = (each for module in self._modules for each in module._parameters.values() if each is not None)
        weights = {id(each): each.numel() for each in held}
        groups = (group for one in self.optimizers.stepped for group in one.param_groups)
        given = {id(each): each for group in groups for each in group["params"]}
        known = sum(weights[name] for name, each in given.items() if name in weights and each.requires_grad)
        others = sum(each.numel() for name, each in given.items() if name not in weights)  # such as copies on the CPU
        return known / max(1, sum(weights.values())) if others < known else 0.0

    def name_owners(self) -> None:
        """Say of all storages alive whose they are."""
        for module in list(self._modules):
            parameters = [p for p in module._parameters.values() if p is not None]
            self.name(parameters, "weights")
            self.name((parameter.grad for parameter in parameters), "gradients")
        copied = list(self.copied)
        self.name(copied, "weights")
        self.name((parameter.grad for parameter in copied), "gradients")
        for optimizer in list(self.optimizers.stepped):
            self.optimizers.name_state(optimizer)

    def name(self, tensors: Iterable[object], owner: str) -> None:
        """Say of tensors whose they are, if nobody has."""
        for tensor in tensors:
            block = self.block_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if block is not None and block.owner in ("other", "activations"):
                block.owner = owner


def _name_node() -> str:
    """The name of autograd's node that is running, without a graph of its own; empty outside of a backward pass."""
    node = None if torch.is_grad_enabled() else _current_autograd_node()
    return node.name() if node is not None else ""


def _number_node() -> int:
    """Which node that is; -1 outside of a backward pass."""
    node = None if torch.is_grad_enabled() else _current_autograd_node()
    return node._sequence_nr() if node is not None else -1


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


def _reader(*, inside: bool = True) -> str | None:
    """The line that reads a value, with a library's that it called; None where PyTorch reads it for itself."""
    if sites.asked_by_torch(_READS_WITHOUT_EFFECT):
        return None
    site = sites.find_site()
    return (site.where if inside else site.place) if site else "the step"
