"""Files of safetensors, whose header says which tensors they hold: large ones have no values, and are not read."""

import contextlib
import math
from collections.abc import Callable

import torch

from effgpu.predicting.recorder import LARGE, Recorder
from effgpu.predicting.translator import on_real_tensors

_DTYPES = {  # safetensors/src/tensor.rs, Dtype, by PyTorch's names
    **{f"F{bits}": getattr(torch, f"float{bits}") for bits in (16, 32, 64)},
    **{f"I{bits}": getattr(torch, f"int{bits}") for bits in (8, 16, 32, 64)},
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}


class _Slice:
    """One tensor of a file: its shape and type, and what is read of it."""

    def __init__(self, real, recorder: Recorder):
        self._real, self.get_shape, self.get_dtype = real, real.get_shape, real.get_dtype
        self.recorder = recorder

    def __getitem__(self, key):
        shape, dtype = tuple(self.get_shape()), _DTYPES.get(self.get_dtype())
        if math.prod(shape) <= LARGE or dtype is None:
            with on_real_tensors():
                small = self._real[key]
            return self.recorder.take_in(small)
        with on_real_tensors():
            outline = torch.empty(shape, dtype=dtype, device="meta")[key]
        return self.recorder.imitate(outline, True, 0)


class _Unwritten(contextlib.nullcontext):
    """What safetensors.safe_open gives of a file that was not written."""

    def __init__(self, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None):
        super().__init__(self)
        self._tensors, self.metadata, self.keys = tensors, lambda: metadata, lambda: [*tensors]
        self.offset_keys = self.keys

    def get_slice(self, name: str) -> "_UnwrittenSlice":
        return _UnwrittenSlice(self._tensors[name])


class _UnwrittenSlice:
    """One tensor of such a file."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return [*self._tensor.shape]

    def get_dtype(self) -> str:
        return next((name for name, dtype in _DTYPES.items() if dtype is self._tensor.dtype), "")

    def __getitem__(self, key: object) -> torch.Tensor:
        with torch.no_grad():
            return self._tensor[key]


class Opened:
    """What safetensors.safe_open gives, whose large tensors have no values. Each prediction has a class of its own."""

    recorder: Recorder
    opened: Callable  # the library's

    def __init__(self, filename, framework="pt", device="cpu", **options):
        saved = self.recorder.files.find(filename)
        if saved and saved.value:
            tensors, metadata = saved.value.load("cpu")
            self._real = _Unwritten(tensors, metadata)
        else:
            file = saved.source if saved else filename
            self._real = self.opened(file, framework=framework, device="cpu", **options)
        self._device = device

    def __getattr__(self, name):
        return getattr(self._real, name)

    def __enter__(self):
        self._real.__enter__()
        return self

    def __exit__(self, *error):
        return self._real.__exit__(*error)

    def get_slice(self, name):
        """A tensor that is not read yet."""
        return _Slice(self._real.get_slice(name), self.recorder)

    def get_tensor(self, name):
        """A tensor, where it was asked for."""
        return self.get_slice(name)[...].to(self._device)

    def get_tensors(self):
        """All of them, by name."""
        return {name: self.get_tensor(name) for name in self.keys()}
