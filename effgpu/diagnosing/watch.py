"""What a step does that its lines do not show: waits for the GPU, copies, graphs that no backward pass uses."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from effgpu.attaching.sites import Site, asked_by_torch, find_site
from effgpu.measuring.torch_internals import TorchDispatchMode
from effgpu.predicting.kernels import Kernel

KERNEL, READ, COPY = "kernel", "read", "copy"
# Operations whose result has a size that only the GPU knows: the CPU waits for it.
_SIZED_BY_VALUES = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
_TO_HOST = ("cpu", "numpy", "__array__", "tolist")
_READING = {*_TO_HOST, "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique"}
_SMALL_COPY = 64 * 1024  # bytes that CUDA takes from ordinary memory without a wait (CUDA C++ Programming Guide)
_OPTIMIZERS = str(Path(torch.optim.__file__).parent)
_OWN_READS = ("/amp/", "/optim/", "/utils/data/")  # PyTorch's, which a reader cannot leave out


def tensors_in(batch: object) -> list[torch.Tensor]:
    """The tensors of a batch: in mappings, such as transformers' BatchEncoding, too."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []


class Event(NamedTuple):
    """What the CPU asks of the GPU: kernels, a value that it reads, or a copy of a batch.

    `calls` is what the CPU does for it, in calls of an operation. `waits` says that the CPU goes on only when the GPU
    has done it. `scale` is the share of it that is left in a replay. `site` is, of a kernel, the line of the step
    itself; of a read or a copy, the line that asks for it.
    """

    kind: str
    site: Site | None
    kernels: tuple[Kernel, ...] = ()
    calls: float = 1.0
    bytes: int = 0
    optimizing: bool = False
    waits: bool = False
    pinned: bool = False
    scale: float = 1.0


def call(step, batch: tuple) -> object:
    """Run the step on its batch: a tuple of one, or an empty one. Lines beyond this one are not the reader's step."""
    return step(*batch)


_find = functools.partial(find_site, until=call.__code__)


class Watch:
    """Notes the events of a step, its optimizers, and what its embeddings look up: `with watch.looking(): ...`.

    `batch` are the arguments of the step, `pinned` says that a loader pins them. On a machine without a GPU, every
    tensor but those of the batch counts as on the GPU.
    """

    def __init__(self, batch: tuple = (), *, pinned: bool = False):
        self.events: list[Event] = []
        self.optimizers: dict[torch.optim.Optimizer, None] = {}
        self.tokens: list[torch.Tensor] = []
        self.kept: dict[Site, dict[int, int]] = {}  # bytes by storage, of graphs by their line
        self.unused: dict[Site, dict[int, int]] = {}  # and of those that no backward pass has used
        self.optimizing = 0
        self._pinned, self._batch = pinned, {id(tensor): tensor for tensor in tensors_in(batch)}
        self._on_host = WeakTensorKeyDictionary()

    @contextlib.contextmanager
    def looking(self, *, walked: bool = False) -> Iterator[None]:
        """Note what happens inside. A step that is `walked` has a recorder, which says what is read, and no graphs."""
        from torch.optim import optimizer

        with contextlib.ExitStack() as stack:
            for register, act in (
                (optimizer.register_optimizer_step_pre_hook, self._begin_optimizing),
                (optimizer.register_optimizer_step_post_hook, self._end_optimizing),
            ):
                stack.callback(register(act).remove)
            stack.enter_context(_Moves(self))
            if not walked:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, self._use))
                stack.enter_context(_Reads(self))
            yield

    def unused_graphs(self) -> dict[Site, int]:
        """Bytes of the graphs that no backward pass has used, by the line of the step that built them."""
        sizes = {site: sum(graph.values()) for site, graph in self.unused.items()}
        return {site: size for site, size in sizes.items() if size > 0.5 * sum(self.kept[site].values())}

    def read(self) -> None:
        """Note that the CPU reads a value of the GPU's. Nobody is to blame for what PyTorch reads for itself."""
        if not self.optimizing:  # what an optimizer reads is its count of steps, which is on the CPU
            site = None if asked_by_torch(_OWN_READS) else _find()
            self.events.append(Event(READ if site else KERNEL, site, waits=True))

    def move(self, name: str, tensor: torch.Tensor, args: tuple, kwargs: dict) -> None:
        """Note a copy of a tensor of the batch to the GPU, or of another one from it."""
        size = tensor.numel() * tensor.element_size()
        if name in _TO_HOST or (tensor.is_cuda and _goes_to(args, kwargs) == "cpu"):
            if id(tensor) not in self._batch and tensor not in self._on_host and (tensor.dim() or name != "tolist"):
                self.events.append(Event(READ, _find(), bytes=size, waits=True))
        elif id(tensor) in self._batch and not tensor.is_cuda and (name == "cuda" or _goes_to(args, kwargs)):
            pinned = self._pinned or tensor.is_pinned()
            waits = not (pinned and (kwargs.get("non_blocking") or True in args)) and (pinned or size > _SMALL_COPY)
            self.events.append(Event(COPY, _find(), bytes=size, waits=waits, pinned=pinned))

    def _begin_optimizing(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.optimizing += 1
        self.optimizers[optimizer] = None

    def _end_optimizing(self, *_: object) -> None:
        self.optimizing -= 1

    def _keep(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Site | None]:
        site, storage = _find(outermost=True), tensor.untyped_storage()
        root = tensor if tensor._base is None else tensor._base
        if site and not (root.is_leaf and root.requires_grad):
            for graphs in (self.kept, self.unused):
                graphs.setdefault(site, {})[storage.data_ptr()] = storage.nbytes()
        return tensor.detach(), site  # the original could keep its own graph alive

    def _use(self, kept: tuple[torch.Tensor, Site | None]) -> torch.Tensor:
        tensor, site = kept
        self.unused.get(site, {}).pop(tensor.untyped_storage().data_ptr(), None)
        return tensor


def _goes_to(args: tuple, kwargs: dict) -> str | None:
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


class _Moves(TorchFunctionMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        moves = name in ("to", "cuda", *_TO_HOST) and args and isinstance(args[0], torch.Tensor)
        if moves:
            self._watch.move(name, args[0], args[1:], kwargs)
        result = func(*args, **kwargs)
        if moves and name == "cpu":
            self._watch._on_host[result] = True
        return result


class _Reads(TorchDispatchMode):
    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside: without PyTorch's wrapper, each of the many calls is cheaper."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        reads = name == "_local_scalar_dense" and getattr(args[0], "constant", None) is None
        if reads or name in _SIZED_BY_VALUES or (name == "index" and _has_mask(args[1])):
            self._watch.read()
        elif name == "embedding":
            self._watch.tokens.append(args[1])
        return func(*args, **kwargs or {})


def _has_mask(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
