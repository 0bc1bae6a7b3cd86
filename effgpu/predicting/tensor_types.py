"""torch.cuda.FloatTensor and its like, by which older scripts make tensors on a GPU, and move them there and back."""

from collections.abc import Iterator

import torch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_SUFFIX = "Tensor"


class _Kind(type):
    """The type of the stand-ins: what is an instance of one, is on the GPU, and of its dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch.Tensor) and value.is_cuda and value.dtype is cls.dtype


def on_gpu() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there): for each of PyTorch's types on a GPU, and for what makes one the default.

    Theirs ask for a driver.
    """
    for name in dir(torch.cuda):
        if name.endswith(_SUFFIX) and (there := getattr(torch, name, None)):
            names = {"dtype": there.dtype, "is_cuda": True, "__new__": _make, "__module__": "torch.cuda"}
            yield torch.cuda, name, _Kind(name, (), names)
    yield from _defaults()


def _make(kind: _Kind, *given: object, device: object = None) -> torch.Tensor:
    return _make_on_gpu(kind.dtype, *given)


def _make_on_gpu(dtype: torch.dtype, *given: object) -> torch.Tensor:
    """What `torch.cuda.FloatTensor(2, 3)`, or `(a shape)`, `([1.0])`, `(an array)`, `(a tensor)` gives."""
    if all(isinstance(each, int) for each in given) or isinstance(given[0], torch.Size):
        return torch.empty(*given or (0,), dtype=dtype, device=GPU)
    return torch.as_tensor(given[0], dtype=dtype, device=GPU)


def read(asked: object) -> tuple[torch.dtype, torch.device] | None:
    """What a type such as torch.cuda.FloatTensor, or its name, says; None for anything else, such as a dtype."""
    if isinstance(asked, str):
        place, _, name = asked.rpartition(".")
        found = getattr(torch, name, None) if place in ("torch", "torch.cuda") and name.endswith(_SUFFIX) else None
        return found and (found.dtype, GPU if place == "torch.cuda" else CPU)
    if isinstance(asked, type) and hasattr(asked, "is_cuda") and isinstance(getattr(asked, "dtype", None), torch.dtype):
        return asked.dtype, GPU if asked.is_cuda else CPU
    return None


def _defaults() -> Iterator[tuple[object, str, object]]:
    """torch.set_default_tensor_type in the words of today, and torch.Tensor(2, 3), which asks for it alone."""
    make, on_gpu = torch.Tensor.__new__, False

    def set_default(asked: object) -> None:
        nonlocal on_gpu
        if (kind := read(asked)) is None:
            raise TypeError(f"set_default_tensor_type: expected a type such as torch.cuda.FloatTensor, got {asked!r}")
        torch.set_default_dtype(kind[0])
        torch.set_default_device(kind[1])
        on_gpu = kind[1] == GPU

    def make_by_default(kind: type, *given: object, **options: object) -> torch.Tensor:
        if on_gpu and kind is torch.Tensor and not options:
            return _make_on_gpu(torch.get_default_dtype(), *given)
        return make(kind, *given, **options)

    yield torch, "set_default_tensor_type", set_default
    yield torch.Tensor, "__new__", staticmethod(make_by_default)
