"""Fake tensors of other classes: a library's, such as Params4bit or tv_tensors.Image, and parameters by their class."""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch
from torch.nn.parameter import UninitializedTensorMixin

from effgpu.attaching.sites import OTHER, TORCH, whose
from effgpu.measuring.torch_internals import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)


@functools.cache
def _fake_kind(kind: type) -> type:
    """A class whose tensors are of the library's class and fake."""
    if issubclass(kind, FakeTensor):
        return kind
    made = type(kind.__name__, (kind, FakeTensor), {})
    is_lazy = issubclass(kind, UninitializedTensorMixin)  # which answers almost nothing, and gets another class later
    owner = torch.Tensor if is_lazy else kind
    made.__torch_function__ = inspect.getattr_static(owner, "__torch_function__")  # PyTorch has put FakeTensor's there
    if is_lazy:
        made.shape, made.cls_to_become = property(_shape_of_lazy), FakeTensor
    return made


def _shape_of_lazy(tensor: torch.Tensor) -> torch.Size:
    """The shape of a lazy module's parameter, for PyTorch's fake tensors and for us alone."""
    if whose(sys._getframe(1).f_code.co_filename) not in (OTHER, TORCH):
        return UninitializedTensorMixin.shape.fget(tensor)  # which raises
    return torch.Tensor.shape.__get__(tensor)


def check_lazy(func: Callable, types: Iterable[type], asker: FrameType) -> None:
    """Raise PyTorch's ValueError where a call on a lazy module's parameter is none that it allows; we may ask."""
    lazy = next((kind for kind in types if issubclass(kind, UninitializedTensorMixin)), None)
    if lazy is None or func in lazy._allowed_methods or type(func).__name__ == "method-wrapper":
        return
    if whose(asker.f_code.co_filename) is not OTHER:
        UninitializedTensorMixin.__torch_function__.__func__(lazy, func, types)


@contextlib.contextmanager
def plain(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, fake tensors have no class of a library's, whose methods PyTorch's Python code would call."""
    kinds = [(tensor, type(tensor)) for tensor in tensors if isinstance(tensor, FakeTensor)]
    kinds = [(tensor, kind) for tensor, kind in kinds if kind is not FakeTensor]
    for tensor, _ in kinds:
        tensor.__class__ = FakeTensor
    try:
        yield
    finally:
        for tensor, kind in kinds:
            tensor.__class__ = kind


def has_kinds() -> bool:
    """Whether there has been any fake tensor of a library's class."""
    return _fake_kind.cache_info().currsize > 0


def building_of_class(build: Callable) -> Callable:
    """torch.Tensor.__new__, `build`, also of a tensor: `Noise(torch.randn(2))`, which PyTorch refuses within a mode."""

    @functools.wraps(build)
    def build_of_class(kind, *args, **options):
        if len(args) != 1 or not isinstance(args[0], torch.Tensor) or kind is torch.Tensor:
            return build(kind, *args, **options)
        return args[0].as_subclass(kind)

    return build_of_class


def making_fakes(find_mode: Callable[[], FakeTensorMode], make: Callable) -> Callable:
    """torch.Tensor._make_subclass, `make`, also for fake data: PyTorch's own takes no tensor that has a class."""

    @functools.wraps(make)
    def make_subclass(kind, data, requires_grad=False, **options):
        if not isinstance(data, FakeTensor):
            return make(kind, data, requires_grad, **options)
        mode = find_mode()
        with in_kernel_invocation_manager(mode):
            outline = data.detach()
        made = FakeTensor.__new__(_fake_kind(kind), mode, outline, data.fake_device).requires_grad_(requires_grad)
        made._is_param = issubclass(kind, torch.nn.Parameter)
        return made

    return make_subclass


def is_plain(kind: type) -> bool:
    """Whether a class adds to tensors only what it does in Python, before PyTorch gets a call: fastai's, tv_tensors."""
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def changing_classes(change: Callable) -> Callable:
    """torch.Tensor.as_subclass, `change`, also for fake tensors, which stay fake."""

    @functools.wraps(change)
    def as_subclass(tensor, kind):
        if not isinstance(tensor, FakeTensor) or not is_plain(kind):
            return change(tensor, kind)
        with DisableTorchFunction():
            other = tensor.view_as(tensor)
        other.__class__ = FakeTensor if kind is torch.Tensor else _fake_kind(kind)
        return other

    return as_subclass


def making_parameters(make: Callable) -> Callable:
    """FakeTensor.__new__, `make`, which is the class of a parameter here: `type(parameter)(data)` gives another one."""

    @functools.wraps(make)
    def make_either(kind, *given, **options):
        if given and isinstance(given[0], torch.Tensor):
            named = {"requires_grad": options["requires_grad"]} if "requires_grad" in options else {}
            return torch.nn.Parameter(*given, **named)  # accelerate adds what else a parameter holds: here, our own
        return make(kind, *given, **options)

    return make_either
