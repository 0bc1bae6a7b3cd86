"""The GPU that a step names is the CPU that stands for it.

The fake tensors are on the CPU, because autograd's engine asks for a real CUDA context where they are on a GPU
(pytorch/pytorch#92627).
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.overrides import TorchFunctionMode

from effgpu.attaching.sites import READER, whose
from effgpu.measuring.torch_internals import (
    DeviceContext,
    FakeTensor,
    _device_constructors,
    _disable_current_modes,
    _get_current_function_mode_stack,
    _len_torch_function_stack,
    _pop_mode_temporarily,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from effgpu.predicting import recurrent, tensor_types
from effgpu.predicting.allocator import GPU, HOST
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.parameters import check_lazy
from effgpu.predicting.statistic import notice_statistics
from effgpu.predicting.timeline import is_non_blocking

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

FACTORIES = frozenset(_device_constructors())  # what makes tensors
CPU = tensor_types.CPU
_WITH_GRADIENT = "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."  # PyTorch's
_PREDICATES = {"isfinite": True, "isnan": False, "isinf": False}


class Translator(TorchFunctionMode):
    """A GPU that is named is the CPU that stands for it."""

    def __init__(self, recorder: "Recorder"):
        super().__init__()
        self._recorder = recorder
        self._names_cpu_by_device = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self._recorder.over:  # for a thread that lives on
            return func(*args, **(kwargs or {}))
        with self._recorder.one_at_a_time:
            asker = sys._getframe(1)
            check_lazy(func, types, asker.f_back if asker.f_code.co_name == "__torch_function__" else asker)
            return self._run(func, args, kwargs or {}, getattr(func, "__name__", ""))

    def _run(self, func, args: tuple, kwargs: dict, name: str) -> object:
        """What a call of the step's gives."""
        if name == "__get__":  # most calls ask for a tensor's shape, type or the like
            return self._describe(func, args)
        if self._recorder.guesses.statistics:
            notice_statistics((*args, *kwargs.values()))
        if name == "__set__" and args[1] is None and getattr(func, "__self__", None) is torch.Tensor.grad:
            self._recorder.optimizers.note_dropped(args[0])
        if name == "get_device" and args and isinstance(args[0], FakeTensor):
            return 0 if self._recorder.device_of(args[0]) == FIRST_GPU else -1
        if name == "data_ptr" and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage().data_ptr() + args[0].storage_offset() * args[0].element_size()
        if name == "pin_memory" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return self._to_gpu(args[0])
        if name == "type" and (kind := tensor_types.read(kwargs.get("dtype", args[-1]))):
            with self:
                return args[0].to(device=kind[1], dtype=kind[0])
        if name == "type" and len(args) == 1 and isinstance(args[0], FakeTensor) and not kwargs:
            place = "torch.cuda." if self._recorder.device_of(args[0]) == FIRST_GPU else "torch."
            return place + func(*args).rpartition(".")[2]
        if name == "_parse_to":  # Module.to asks: it then moves each of its tensors
            device, *others = func(*args, **kwargs)
            return ("cpu" if self._names_cpu(*args, *kwargs.values()) else device), *others
        if name == "is_pinned":
            return False
        if name == "record_stream":
            return None
        if name == "item":
            return self._recorder.guesses.read_item(lambda: self._call(func, name, args, kwargs))
        if name == "__format__" and args[1] and not args[0].dim():
            return format(args[0].item(), args[1])
        if name == "__deepcopy__" and isinstance(args[0], FakeTensor):
            block = self._recorder.storages.of(args[0])
            with self._recorder.placing(block.place if block else ""):  # a number, too, lies where the first one does
                copied = copy_deeply(*args)
            if isinstance(copied, torch.nn.Parameter):
                self._recorder.copied[copied] = True
            return copied
        if name in ("tensor", "as_tensor") and args and isinstance(args[0], (list, tuple)):
            args, kwargs = with_numbers(*args, **kwargs)
        if name == "ctc_loss":  # PyTorch writes a list of lengths into a tensor of its own: a fake one has no memory
            args = tuple(map(_as_tensor, args))
            kwargs = {key: _as_tensor(value) for key, value in kwargs.items()}
        if name == "_pad_packed_sequence":
            with self:
                return recurrent.pad_packed(*args)
        if name in ("numpy", "__array__") and isinstance(args[0], FakeTensor):
            if args[0].requires_grad and not kwargs.get("force"):
                raise RuntimeError(_WITH_GRADIENT)
            return self._recorder.reading.array(args[0])
        if func is torch.device:
            device = func(*args, **kwargs)
            self._names_cpu_by_device |= device == CPU and whose(sys._getframe(2).f_code.co_filename) is READER
            return device
        if func in FACTORIES and kwargs.get("device") is None and (default := default_device()):
            kwargs = kwargs | {"device": default}
        result = self._call(func, name, args, {key: value for key, value in kwargs.items() if key != "pin_memory"})
        if name in _PREDICATES and isinstance(result, torch.Tensor):
            self._recorder.counting.truths[result] = _PREDICATES[name]
        return result

    def _describe(self, func: Callable, args: tuple) -> object:
        """What a tensor is asked for: a fake one says where it would be."""
        asked = getattr(func, "__self__", None)
        if asked in (torch.Tensor.is_cuda, torch.Tensor.is_cpu) and isinstance(fake := innermost(args[0]), FakeTensor):
            return (asked is torch.Tensor.is_cuda) == (self._recorder.device_of(fake) == FIRST_GPU)
        return func(*args)

    def _to_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        self._recorder.storages.names_gpu = True
        return self._recorder.move(tensor, GPU)

    def _names_cpu(self, *given: object) -> bool:
        """Whether the step names the CPU: by its name, or by a device that it has made itself.

        Another device is a notebook's, which has found no GPU here, or PyTorch's, whose fake tensors are on the CPU.
        """
        return "cpu" in given or (self._names_cpu_by_device and CPU in given)

    def _leaves_gpu(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether a call makes a tensor on the CPU that is like one on the GPU."""
        if not (name.endswith("_like") or name.startswith("new_")) or not isinstance(args[0], FakeTensor):
            return False
        return self._recorder.device_of(args[0]) == FIRST_GPU and self._names_cpu(kwargs.get("device"))

    def _call(self, func, name: str, args: tuple, kwargs: dict) -> object:
        """The call on the CPU, where fake tensors are. What names the GPU puts its result there, as far as is known."""
        args, kwargs = name_by_number(name, args, kwargs)
        if FIRST_GPU in map(name_device, (*args, *kwargs.values())):
            self._recorder.storages.names_gpu = True
            args, kwargs = all_on_cpu(args, kwargs)
            moves = name == "to" and isinstance(args[0], torch.Tensor)
            if moves and converts_there(args, kwargs, FIRST_GPU):
                args = self._recorder.move(args[0], GPU), *args[1:]
            with contextlib.nullcontext() if moves else self._recorder.placing(GPU):
                result = func(*args, **kwargs)
            return self._recorder.move(result, GPU) if moves else result
        self._recorder.note_call()
        moves = name == "cpu" or (name == "to" and self._names_cpu(*args[1:2], kwargs.get("device")))
        if moves and converts_there(args, kwargs, CPU):
            args = self._to_cpu(args[0], name, non_blocking=False), *args[1:]
        with self._recorder.placing(HOST) if self._leaves_gpu(name, args, kwargs) else contextlib.nullcontext():
            result = func(*args, **kwargs)
        if moves:
            return self._to_cpu(result, name, is_non_blocking(args, kwargs))
        return result

    def _to_cpu(self, tensor: torch.Tensor, name: str, non_blocking: bool) -> torch.Tensor:
        """The tensor's copy there, for which the CPU waits; itself, if it is there."""
        moved = self._recorder.move(tensor, HOST, pinned=non_blocking)
        is_read = name == "cpu" and not self._recorder.storages.names_gpu and isinstance(tensor, FakeTensor)
        if (moved is not tensor or is_read) and not non_blocking:
            self._recorder.work.wait(tensor.nbytes * is_read)
        return moved


def _as_tensor(value: object) -> object:
    """A list of numbers as a tensor on the CPU; anything else as it is."""
    if not isinstance(value, (list, tuple)):
        return value
    with on_real_tensors():
        return torch.tensor(value)


def with_numbers(data: object, **options: object) -> tuple[tuple, dict]:
    """The arguments of torch.tensor, with numbers in place of fake tensors in a list, which PyTorch cannot read."""
    dtypes = []

    def read(value: object) -> object:
        if isinstance(value, (list, tuple)):
            return [read(each) for each in value]
        if isinstance(value, FakeTensor):
            dtypes.append(value.dtype)
            return value.tolist()
        return value

    if not isinstance(data, (list, tuple)):
        return (data,), options
    data = read(data)
    return (data,), ({"dtype": dtypes[0]} if dtypes else {}) | options


def innermost(value: object) -> object:
    """A tensor without what torch.func has put around it; anything else as it is."""
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def default_device() -> torch.device | None:
    """The device of a `with torch.device(...)` or of torch.set_default_device: a mode further out adds it too late."""
    modes = reversed(_get_current_function_mode_stack())
    return next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)


def name_by_number(name: str, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments of a call, with the GPU as a device where they have its number."""
    if name == "to" and len(args) > 1 and type(args[1]) is int:
        args = (args[0], FIRST_GPU, *args[2:])
    if type(kwargs.get("device")) is int:
        kwargs = kwargs | {"device": FIRST_GPU}
    return args, kwargs


def name_device(value: object) -> torch.device | None:
    """The device that a value names: the CPU, "meta", or the GPU, whatever its number; None for anything else."""
    if isinstance(value, str):
        if value != "cpu" and value.partition(":")[0] not in ("cuda", "meta"):
            return None
        value = value.partition(":")[0]
        return {"cuda": FIRST_GPU, "cpu": CPU}.get(value) or torch.device(value)
    if isinstance(value, torch.device):
        return FIRST_GPU if value.type == "cuda" else CPU if value.type == "cpu" else value
    return None


def converts_there(args: tuple, kwargs: dict, where: torch.device) -> bool:
    """Whether `Tensor.to` sends a tensor there as it is, to become another dtype: on the GPU, unless the CPU waits.

    Numbers are put into another order on the GPU in either case (aten/src/ATen/native/cuda/Copy.cu).
    """
    asked = (value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype))
    converts = next(asked, args[0].dtype) != args[0].dtype
    order = kwargs.get("memory_format", torch.preserve_format)
    if not converts and where == FIRST_GPU and order in (torch.channels_last, torch.channels_last_3d):
        return not args[0].is_contiguous(memory_format=order)
    return converts and where in (FIRST_GPU, CPU) and is_non_blocking(args, kwargs) == (where == FIRST_GPU)


def on_cpu(value: object) -> object:
    """The CPU where a value names the GPU; anything else as it is."""
    names_gpu = name_device(value) == FIRST_GPU
    return (CPU if isinstance(value, torch.device) else "cpu") if names_gpu else value


def all_on_cpu(args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments, with the CPU in place of the GPU."""
    return tuple(map(on_cpu, args)), {key: on_cpu(value) for key, value in kwargs.items()}


def copy_deeply(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    """torch.Tensor.__deepcopy__, which fails where a fake tensor has a constant."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol")
    memo[id(tensor)] = copied = tensor.detach().clone()
    copied.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = copy_deeply(tensor.grad, memo)
    own = {name: value for name, value in vars(tensor).items() if name not in vars(copied)}
    vars(copied).update(copy.deepcopy(own, memo))
    return copied


@contextlib.contextmanager
def on_real_tensors() -> Iterator[None]:
    """Inside, tensors are real and a GPU is the GPU, also within `as_gpu`."""
    with _disable_current_modes(), contextlib.ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        yield
