"""Fake tensors that libraries take for real ones.

Libraries ask whether a tensor is fake, to take the path by which they are traced or exported: transformers then builds
a mask where it would have let attention be causal. The step that is predicted is the one on real tensors.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from effgpu.measuring.torch_internals import FakeTensor, detect_fake_mode, fake_tensor, is_fake
from effgpu.predicting.imports import exchanged, is_insider


class _NoTensor(torch.Tensor):
    """What a library gets for FakeTensor: no tensor is one."""


_THEIRS = {"FakeTensor": (FakeTensor, _NoTensor), "is_fake": (is_fake, lambda tensor: False)}
_THEIRS |= {"detect_fake_mode": (detect_fake_mode, lambda inputs=None: None)}
_MODULES = ("torch._subclasses", fake_tensor.__name__, detect_fake_mode.__module__)


def _for_whom_asks(name: str) -> property:
    real, other = _THEIRS[name]
    return property(lambda module: real if is_insider(sys._getframe(1).f_code.co_filename) else other)


@contextlib.contextmanager
def disguised() -> Iterator[None]:
    """Inside, nothing outside of PyTorch and effgpu finds a tensor to be fake. Afterwards all is as before."""
    modules = [sys.modules[name] for name in _MODULES]
    for module in modules:
        names = {name: _for_whom_asks(name) for name in _THEIRS if name in vars(module)}
        module.__class__ = type("TwoFaced", (ModuleType,), names)
    try:
        with exchanged([(name, *pair) for name, pair in _THEIRS.items()]):
            yield
    finally:
        for module in modules:
            module.__class__ = ModuleType
