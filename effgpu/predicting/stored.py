"""What torch.save, and pickle, would have written of fake tensors: their shapes, and what is real among them."""

import contextlib
import io
import pickle

import torch

from effgpu.measuring.torch_internals import FakeTensor, storage_key
from effgpu.predicting.allocator import HOST
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.recorder import LARGE, Recorder
from effgpu.predicting.translator import name_device, on_real_tensors


def maps_to_gpu(map_location: object, was_on_gpu: bool = True, otherwise: bool = False) -> bool:
    """Whether torch.load is told to put something on the GPU, which it was on: by a device, a dictionary or a function.

    `otherwise` where it is not told.
    """

    class Storage:
        def cuda(self, *_, **__):
            return FIRST_GPU

    names = ("cuda:0", "cuda") if was_on_gpu else ("cpu",)
    if isinstance(map_location, dict):
        map_location = next((map_location[name] for name in names if name in map_location), None)
    elif callable(map_location):
        with contextlib.suppress(Exception):
            moved = map_location(Storage(), names[0])
            return otherwise if moved is None else moved == FIRST_GPU
    return otherwise if map_location is None else name_device(map_location) == FIRST_GPU


def holds_fake(value: object) -> bool:
    """Whether there is a fake tensor in what would be pickled. What cannot be pickled holds none."""

    class Found(Exception): ...

    class Search(pickle.Pickler):
        def persistent_id(self, one):
            if isinstance(one, FakeTensor):
                raise Found
            return "" if isinstance(one, torch.Tensor) else None

    try:
        Search(io.BytesIO()).dump(value)
    except Found:
        return True
    except Exception:
        return False
    return False


class Stored:
    """What torch.save would have written: a copy of an object. Of its fake tensors it has the outlines.

    `size` are the bytes of its storages, and of all else as it is pickled.
    """

    def __init__(self, value: object, recorder: Recorder):
        self._recorder, self._pickled = recorder, io.BytesIO()
        self._outlines: list[tuple[torch.Tensor, bool, bool]] = []  # with: on the GPU, a parameter
        numbers: dict[tuple, int] = {}
        storages: dict[int, int] = {}  # their bytes

        class Writer(pickle.Pickler):
            def persistent_id(writer, one: object) -> int | None:
                if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
                    return None
                storages[storage_key(one)] = one.untyped_storage().nbytes()
                place = storage_key(one), one.storage_offset(), one.dtype
                key = *place, one.shape, one.stride()  # so that a tied weight is stored once
                if key not in numbers:
                    numbers[key] = len(self._outlines)
                    on_gpu = isinstance(one, FakeTensor) and recorder.device_of(one) == FIRST_GPU
                    self._outlines.append((self._outline(one), on_gpu, isinstance(one, torch.nn.Parameter)))
                return numbers[key]

        Writer(self._pickled).dump(value)
        self.size = len(self._pickled.getbuffer()) + sum(storages.values())

    def _outline(self, tensor: torch.Tensor) -> torch.Tensor:
        known = self._recorder.values.of(tensor) if isinstance(tensor, FakeTensor) else tensor
        with on_real_tensors():
            if known is None or (isinstance(tensor, FakeTensor) and known.numel() > LARGE):
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            else:
                made = known.detach().clone()
            return made.requires_grad_(tensor.requires_grad)

    def load(self, map_location: object) -> object:
        """What torch.load would give: tensors of its own, where their likes were, or where it is told to put them."""
        made: dict[int, torch.Tensor] = {}
        stored = self

        class Reader(pickle.Unpickler):
            def persistent_load(self, number: int) -> torch.Tensor:
                if number not in made:
                    made[number] = stored._make(*stored._outlines[number], map_location)
                return made[number]

        self._pickled.seek(0)
        loaded = Reader(self._pickled).load()
        made.clear()  # a class lives until the garbage is collected, and all that its methods hold
        return loaded

    def _make(self, outline: torch.Tensor, on_gpu: bool, parameter: bool, map_location: object) -> torch.Tensor:
        to_gpu = maps_to_gpu(map_location, on_gpu, otherwise=on_gpu)
        if outline.device.type == "meta":
            with self._recorder.placing(HOST) if on_gpu and not to_gpu else contextlib.nullcontext():
                made = self._recorder.imitate(outline, True, 0)
        else:
            with on_real_tensors():
                real = outline.detach().clone().requires_grad_(outline.requires_grad)
            made = self._recorder.take_in(real)
        if to_gpu:
            made = made.detach().to(FIRST_GPU).requires_grad_(made.requires_grad)
        return torch.nn.Parameter(made.detach(), made.requires_grad) if parameter else made
