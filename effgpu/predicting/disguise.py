"""Fake tensors that libraries take for real ones.

Libraries ask whether a tensor is fake, to take the path by which they are traced or exported: transformers then builds
a mask where it would have let attention be causal. The step that is predicted is the one on real tensors.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from effgpu.measuring.torch_internals import FakeTensor, detect_fake_mode, fake_tensor, is_fake

_INSIDERS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


class _NoTensor(torch.Tensor):
    """What a library gets for FakeTensor: no tensor is one."""


def _is_not_fake(tensor: object) -> bool:
    return False


def _finds_no_mode(inputs: object = None) -> None:
    return None


_THEIRS = {"FakeTensor": (FakeTensor, _NoTensor), "is_fake": (is_fake, _is_not_fake)}
_THEIRS |= {"detect_fake_mode": (detect_fake_mode, _finds_no_mode)}
_MODULES = ("torch._subclasses", fake_tensor.__name__, detect_fake_mode.__module__)


def _for_whom_asks(name: str) -> property:
    real, other = _THEIRS[name]
    return property(lambda module: real if _is_insider(sys._getframe(1).f_code.co_filename) else other)


def _is_insider(file: str) -> bool:
    return file.startswith(_INSIDERS) and "course" not in Path(file).parts


@contextlib.contextmanager
def disguised() -> Iterator[None]:
    """Inside, nothing outside of PyTorch and effgpu finds a tensor to be fake. Afterwards all is as before."""
    modules = [sys.modules[name] for name in _MODULES]
    for module in modules:
        names = {name: _for_whom_asks(name) for name in _THEIRS if name in vars(module)}
        module.__class__ = type("TwoFaced", (ModuleType,), names)
    _exchange(dict(_THEIRS.values()))
    try:
        yield
    finally:
        _exchange({other: real for real, other in _THEIRS.values()})  # also in what was imported meanwhile
        for module in modules:
            module.__class__ = ModuleType


def _exchange(others: dict[object, object]) -> None:
    """Give modules that have imported a name something else for it."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        if isinstance(module, ModuleType) and not _is_insider(names.get("__file__") or ""):
            for name in _THEIRS:
                if (value := names.get(name)) is not None and (other := _look_up(others, value)) is not None:
                    names[name] = other


def _look_up(others: dict[object, object], value: object) -> object | None:
    return next((other for known, other in others.items() if known is value), None)
