"""Parameters whose data is fake: of a library's own class, such as bitsandbytes' Params4bit, and by their class."""

import functools
from collections.abc import Callable

import torch

from effgpu.measuring.torch_internals import FakeTensor, FakeTensorMode, in_kernel_invocation_manager


@functools.cache
def _fake_kind(kind: type) -> type:
    """A class whose tensors are of the library's class and fake."""
    return kind if issubclass(kind, FakeTensor) else type(kind.__name__, (kind, FakeTensor), {})


def making_fakes(find_mode: Callable[[], FakeTensorMode], make: Callable) -> Callable:
    """torch.Tensor._make_subclass, `make`, also for fake data: PyTorch's own takes no tensor that has a class."""

    @functools.wraps(make)
    def make_subclass(kind, data, requires_grad=False, **options):
        if not isinstance(data, FakeTensor):
            return make(kind, data, requires_grad, **options)
        mode = find_mode()
        with in_kernel_invocation_manager(mode):
            outline = data.detach()
        return FakeTensor.__new__(_fake_kind(kind), mode, outline, data.fake_device).requires_grad_(requires_grad)

    return make_subclass


def making_parameters(make: Callable) -> Callable:
    """FakeTensor.__new__, `make`, which is the class of a parameter here: `type(parameter)(data)` gives another one."""

    @functools.wraps(make)
    def make_either(kind, *given, **options):
        if given and isinstance(given[0], torch.Tensor):
            named = {"requires_grad": options["requires_grad"]} if "requires_grad" in options else {}
            return torch.nn.Parameter(*given, **named)  # accelerate adds what else a parameter holds: here, our own
        return make(kind, *given, **options)

    return make_either
