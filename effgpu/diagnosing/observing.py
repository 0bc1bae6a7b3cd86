"""What a real step does that its lines do not show: waits for the GPU, copies, graphs that no backward pass uses."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_stack
from types import CodeType

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching.replacing import replaced
from effgpu.attaching.sites import Site, asked_by_torch, find_site
from effgpu.attaching.steps import drive
from effgpu.diagnosing.observed import TRAINERS
from effgpu.measuring.ops import tensors_in, tensors_of
from effgpu.measuring.torch_internals import (
    DisableTorchFunction,
    TorchDispatchMode,
    _autograd,
    _current_graph_task_id,
    storage_key,
)
from effgpu.predicting.kernels import note
from effgpu.predicting.timeline import COPY, KERNEL, READ, Event, copy_waits, count_products, is_non_blocking
from effgpu.predicting.work import OWN_READS
from effgpu.units import format_bytes

# Operations whose result has a size that only the GPU knows: the CPU waits for it.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
_TO_HOST = ("cpu", "numpy", "__array__", "tolist")
_READING = {*_TO_HOST, "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique"}
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)

Note = Callable[[Event], object]


class Observer:
    """Notes the events of a real step, its optimizers, and what its embeddings look up: `with observer.looking(): ...`.

    `batch` are the tensors whose copies to the GPU count, `pinned` says that a loader pins them; with None, all copies
    from the host to the GPU count. On a machine without a GPU, every tensor but those of the batch counts as on the
    GPU. `loop` is the code that runs the steps: lines further out are not the step's.
    """

    def __init__(self, batch: tuple | None = (), *, pinned: bool = False, loop=(drive.__code__,)):
        self.events: list[Event] = []
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        self.tokens: list[torch.Tensor] = []
        self.graphs = Graphs(loop)
        self.optimizing = 0
        self.stepped = 0  # optimizers' steps
        self.time_first = False  # whether a module takes a tensor whose first dimension is time, and the batch's, too
        self._lengths = {len(tensor) for tensor in tensors_in(batch or ()) if tensor.dim()}
        self.multiplied = 0  # FLOPs of the forward pass's products
        self._find = functools.partial(find_site, until=loop)
        self._moves = Moves(batch, self.events.append, pinned=pinned, loop=loop)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Note what happens inside."""
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim import optimizer

        with contextlib.ExitStack() as stack:
            for register, act in (
                (optimizer.register_optimizer_step_pre_hook, self._begin_optimizing),
                (optimizer.register_optimizer_step_post_hook, self._end_optimizing),
            ):
                stack.callback(register(act).remove)
            stack.callback(register_module_forward_pre_hook(self._look_for_time).remove)
            for mode in (self._moves, self.graphs.looking(), _Operations(self)):
                stack.enter_context(mode)
            yield

    def read(self) -> None:
        """Note that the CPU reads a value of the GPU's. Nobody is to blame for what PyTorch reads for itself."""
        if not self.optimizing:  # what an optimizer reads is its count of steps, which is on the CPU
            site = None if asked_by_torch(OWN_READS) else self._find()
            self.events.append(Event(READ if site else KERNEL, site, waits=True))

    def _look_for_time(self, module: torch.nn.Module, args: tuple) -> None:
        if getattr(module, "batch_first", True) is False and args and isinstance(args[0], torch.Tensor):
            shape = args[0].shape
            self.time_first |= len(shape) == 3 and shape[0] in self._lengths and shape[1] not in self._lengths

    def _begin_optimizing(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.stepped += not self.optimizing  # a subclass may call its parent's step, which has the hooks, too
        self.optimizing += 1
        self.optimizers[optimizer] = None

    def _end_optimizing(self, *_: object) -> None:
        self.optimizing -= 1


class Graphs:
    """The graphs that a step builds, and those that no backward pass uses, by the line of the step.

    What a graph holds of tensors that `were_there` before the step lives on without it.
    """

    def __init__(
        self, loop: tuple[CodeType, ...], were_there: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        self._were_there = were_there
        self._kept: dict[Site, dict[int, int]] = {}  # bytes by storage
        self._unused: dict[Site, dict[int, int]] = {}
        self._find = functools.partial(find_site, outermost=True, until=loop)
        self._results = _Results(self._find)

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, look at what autograd keeps, but for what torch.func does, which refuses such hooks."""
        if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:  # a step that begins in there
            yield
            return
        disable = _autograd._saved_tensors_hooks_disable
        with (
            self._results,
            torch.autograd.graph.saved_tensors_hooks(self._keep, self._use),
            replaced([(_autograd, disable.__name__, functools.partial(disable, fail_if_non_empty=False))]),
        ):
            yield

    def unused(self) -> dict[Site, int]:
        """Bytes of the graphs that no backward pass has used, by the line of the step that built them.

        Not of a teacher's, and the like: what it gives is needed in each step.
        """
        return {site: size for site, size in self._never_used() if site not in self._results.needed}

    def tell(self) -> tuple[str, ...]:
        """A sentence for each line that builds one of those others."""
        return tuple(
            f"{format_bytes(size)} are kept at {site.place} for a backward pass that never comes: "
            "with torch.no_grad(): around it saves them"
            for site, size in self._never_used()
            if site in self._results.needed
        )

    def _never_used(self) -> list[tuple[Site, int]]:
        sizes = {site: sum(graph.values()) for site, graph in self._unused.items()}
        return [(site, size) for site, size in sizes.items() if size > 0.5 * sum(self._kept[site].values())]

    def _keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Site | None]:
        if tensor.layout is not torch.strided:  # it has several storages
            return tensor.detach(), None
        site, storage = self._find(), tensor.untyped_storage()
        root = tensor if tensor._base is None else tensor._base
        if site and not (root.is_leaf and root.requires_grad) and not self._were_there(tensor):
            for graphs in (self._kept, self._unused):
                graphs.setdefault(site, {})[storage_key(storage)] = storage.nbytes()
        return tensor.detach(), site  # the original could keep its own graph alive

    def _use(self, kept: tuple[torch.Tensor, Site | None]) -> torch.Tensor:
        tensor, site = kept
        if site in self._unused:
            self._unused[site].pop(storage_key(tensor), None)
        return tensor


class _Results(TorchFunctionMode):
    """Finds the lines whose results a step trains with, but not through: what a teacher gives, or labels made of it."""

    def __init__(self, find: Callable[[], Site | None]):
        super().__init__()
        self._find = find
        self._made_at = WeakTensorKeyDictionary()  # of a tensor: the lines of the graphs that it came from
        self.needed: set[Site] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        with DisableTorchFunction():
            if made := tensors_of(result):
                self._note(tensors_of((args, kwargs or {})), made)
        return result

    def _note(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        graphs = [each for each in made if each.requires_grad]
        if graphs and (site := self._find()):
            self.needed.update(*(self._made_at.get(each, ()) for each in given if not each.requires_grad))
            self._made_at.update((each, {site}) for each in graphs)
        elif not graphs and (sites := {site for each in given for site in self._made_at.get(each, ())}):
            self._made_at.update((each, sites) for each in made)


def goes_to(args: tuple, kwargs: dict) -> str | None:
    """The kind of device that a call of `Tensor.to` names; None for one that only changes the type."""
    for value in (kwargs.get("device"), *args[:1]):
        if isinstance(value, torch.Tensor):
            return value.device.type
        if isinstance(value, torch.device | str):
            return torch.device(value).type
        if isinstance(value, int):
            return "cuda"
    return None


class UntilRead(TorchFunctionMode):
    """Notes when the step first asks for a value of the GPU's: `at`, by this clock; None where it never does.

    It sees the names of functions only, which costs little. A mask as an index it does not see. What an optimizer reads
    is its count of steps, which is on the CPU.
    """

    def __init__(self, clock: Callable[[], float]):
        super().__init__()
        self.at: float | None = None
        self._clock = clock

    def __torch_function__(self, func, types, args=(), kwargs=None):
        asks = self.at is None and getattr(func, "__name__", "") in _READING
        if asks and not sys._getframe(1).f_code.co_filename.startswith(_OPTIMIZERS):
            self.at = self._clock()
        return func(*args, **kwargs or {})


class Moves(TorchFunctionMode):
    """Notes copies of a batch to the GPU, and of other tensors from it: see Observer."""

    def __init__(self, batch: tuple | None, note: Note, *, pinned: bool = False, loop=(drive.__code__,)):
        super().__init__()
        self._note, self._pinned, self._loop = note, pinned, loop
        self._batch = None if batch is None else {id(tensor): tensor for tensor in tensors_in(batch)}
        self._on_host = WeakTensorKeyDictionary()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        moves = name in ("to", "cuda", *_TO_HOST) and args and isinstance(args[0], torch.Tensor)
        if moves:
            self._note_move(name, args[0], args[1:], kwargs)
        result = func(*args, **kwargs)
        if moves and name == "cpu":
            self._on_host[result] = True
        return result

    def _note_move(self, name: str, tensor: torch.Tensor, args: tuple, kwargs: dict) -> None:
        size, where = tensor.nbytes, goes_to(args, kwargs)
        find = functools.partial(find_site, until=self._loop)
        if name in _TO_HOST or (tensor.is_cuda and where == "cpu"):
            if self._is_on_gpu(tensor) and (tensor.dim() or name != "tolist"):
                self._note(Event(READ, find(), bytes=size, waits=True))
        elif not tensor.is_cuda and (name == "cuda" or where) and self._is_copied(tensor, name, where):
            about = {"pinned": self._pinned or tensor.is_pinned(), "non_blocking": is_non_blocking(args, kwargs)}
            self._note(Event(COPY, find(), bytes=size, waits=copy_waits(size, **about), **about))

    def _is_on_gpu(self, tensor: torch.Tensor) -> bool:
        if self._batch is None:
            return tensor.is_cuda
        return id(tensor) not in self._batch and tensor not in self._on_host

    def _is_copied(self, tensor: torch.Tensor, name: str, goes_to: str | None) -> bool:
        return (name == "cuda" or goes_to == "cuda") if self._batch is None else id(tensor) in self._batch


class _Operations(TorchDispatchMode):
    """Tells an observer of values that are read, and of tokens that are looked up."""

    def __init__(self, observer: Observer):
        super().__init__()
        self._observer, self._on_gpu = observer, torch.cuda.is_initialized()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: without PyTorch's wrapper, each of the many calls is cheaper."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        reads = name == "_local_scalar_dense" and getattr(args[0], "constant", None) is None
        if reads or name in _SIZED_BY_VALUES or (name == "index" and _has_mask(args[1])):
            if args[0].is_cuda or not self._on_gpu:
                self._observer.read()
        elif name == "embedding":
            self._observer.tokens.append(args[1])
        result = func(*args, **kwargs or {})
        if name in ("mm", "addmm", "convolution") and _current_graph_task_id() == -1 and not self._observer.optimizing:
            self._observer.multiplied += count_products(note(func, args, kwargs or {}, result, False))
        return result


def _has_mask(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def find_trainer() -> str:
    """The library that makes the step which ends here, the first of `TRAINERS` whose code runs; "" if none does."""
    files = [Path(frame.f_code.co_filename).as_posix() for frame, _ in walk_stack(sys._getframe(1))]
    return next((name for name, parts in TRAINERS.items() if any(part in file for part in parts for file in files)), "")
