"""What a script reads and writes while it is predicted: weights are known by their shapes, and are written nowhere.

A file of safetensors says in its header which tensors it holds. What torch.load reads is real, as data may be in it,
but it is mapped into memory, so that weights which nobody looks at are not read.
"""

import contextlib
import functools
import io
import math
import os
import pickle
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

import torch

from effgpu.attaching.replacing import replaced
from effgpu.measuring.torch_internals import FakeTensor, storage_key, tree_map_only
from effgpu.predicting import imports
from effgpu.predicting.allocator import HOST
from effgpu.predicting.files import Files
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.recorder import LARGE, Recorder
from effgpu.predicting.translator import name_device, on_real_tensors

_WORD = 64  # bytes, of which the first ones tell what a file holds
_ZIP = b"PK\3\4"  # how a file of torch.save begins since PyTorch 1.6, whatever its name
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
_LIGHTNING = ("lightning.fabric.utilities.cloud_io", "lightning_fabric.utilities.cloud_io")
# transformers loads in other threads, unless told not to: fake tensors are of one thread
_SETTINGS = {"HF_DEACTIVATE_ASYNC_LOAD": "1", "SAFETENSORS_FAST_GPU": "0"}


@contextlib.contextmanager
def weights_without_values(recorder: Recorder) -> Iterator[None]:
    """Inside, fake tensors are not written, and large weights not read. `recorder.files` names what was left out.

    Of modules that have imported what saves and loads, before or inside, all use what stands in its place.
    """
    from_before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    found = [
        *_torch_files(recorder),
        *_pickles(recorder),
        *(_safetensors(recorder) if find_spec("safetensors") else ()),
    ]
    try:
        with imports.exchanged(_by_name(found)), replaced(found), imports.changed(_saving(recorder.files)):
            yield
    finally:
        for name, value in from_before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _by_name(found: list[tuple[object, str, object]]) -> dict[str, tuple[object, object]]:
    """(what modules have imported, what they get), by the names under which they have it."""
    those = {name: (vars(owner)[name], other) for owner, name, other in found if name in ("safe_open", "save_file")}
    return those | {f"safe_{name}": pair for name, pair in those.items()}


@contextlib.contextmanager
def weights_set_aside(files: Files) -> Iterator[None]:
    """Inside, weights that a script saves go where it alone finds them: those of a training that is thrown away."""
    save, load, save_compiled = torch.save, torch.load, torch.jit.RecursiveScriptModule.save

    @functools.wraps(save)
    def save_aside(obj, f, *args, **kwargs):
        save(obj, _aside(files, "torch.save", f), *args, **kwargs)

    @functools.wraps(load)
    def load_aside(f, *args, **kwargs):
        saved = files.find(f)
        return load(saved.source if saved else f, *args, **kwargs)

    @functools.wraps(save_compiled)
    def save_compiled_aside(module, f, *args, **kwargs):
        save_compiled(module, _aside(files, "torch.jit.save", f), *args, **kwargs)

    found = [(torch, "save", save_aside), (torch, "load", load_aside)]
    found.append((torch.jit.RecursiveScriptModule, "save", save_compiled_aside))
    if find_spec("safetensors"):
        import safetensors.torch

        save_tensors = safetensors.torch.save_file

        @functools.wraps(save_tensors)
        def save_tensors_aside(tensors, filename, metadata=None):
            with open(_aside(files, "safetensors' save_file", filename), "wb") as file:  # no other file beside it
                file.write(safetensors.torch.save(tensors, metadata))

        found.append((safetensors.torch, "save_file", save_tensors_aside))
    with files.kept(), imports.exchanged(_by_name(found)), replaced(found), imports.changed(_saving(files)):
        yield


def _aside(files: Files, how: str, file: object) -> object:
    """Where to save what was to go into a file; memory, or a pipe, stays what it is."""
    if not files.has_path(file):
        return file
    files.unwritten[f"{how} to {files.name(file)}"] = None
    return files.aside(file)


def _without_checkpoints(files: Files, module: ModuleType) -> contextlib.AbstractContextManager:
    """The Trainer writes no checkpoint: it would lack the weights, and be taken for one to go on from."""

    def save(trainer, *_, **__):
        files.unwritten[f"the Trainer's checkpoint in {trainer.args.output_dir}"] = None

    return replaced([(module.Trainer, "_save_checkpoint", save)])


def _keeping_tokenizers(files: Files, module: ModuleType) -> contextlib.AbstractContextManager:
    """A tokenizer from before stays: its file is written in Rust, past all that is replaced in Python."""
    save = module.PreTrainedTokenizerBase.save_pretrained

    @functools.wraps(save)
    def save_new(tokenizer, save_directory, *args, **kwargs):
        if files.leave(os.path.join(save_directory, "tokenizer.json")):
            return ()
        return save(tokenizer, save_directory, *args, **kwargs)

    return replaced([(module.PreTrainedTokenizerBase, "save_pretrained", save_new)])


def _saving(files: Files) -> dict[str, imports.Changes]:
    """What changes in libraries that save checkpoints, by module."""
    trainer = {"transformers.trainer": functools.partial(_without_checkpoints, files)}
    trainer |= {"transformers.tokenization_utils_base": functools.partial(_keeping_tokenizers, files)}
    return trainer | dict.fromkeys(_LIGHTNING, _saving_at_once)


def _saving_at_once(module: ModuleType) -> contextlib.AbstractContextManager:
    """Lightning saves its checkpoints to a path, and not to memory first, whose bytes it would write."""
    return replaced([(module, "_atomic_save", lambda checkpoint, filepath: torch.save(checkpoint, filepath))])


def _leave_out(how: str, value: object, file: object, recorder: Recorder) -> None:
    """Remember a value that cannot be written, for whoever loads it from there."""
    stored = _Stored(value, recorder)
    if isinstance(file, io.BytesIO):
        recorder.files.unwritten[f"{how} into memory, of which no file can be loaded"] = None
        recorder.files.write_into_memory(file, stored)
    else:
        recorder.files.unwritten[f"{how} to {recorder.files.name(file)}"] = None
        recorder.files.save(file, stored)


def _begins(file: object) -> bytes:
    """The next bytes in memory that is read as a file; none of any other."""
    return file.getvalue()[file.tell() :][:_WORD] if isinstance(file, io.BytesIO) else b""


def _pickles(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    """Fake tensors in pickles: what Python's own module gets, it gives again."""
    dump, dumps, load, loads = pickle.dump, pickle.dumps, pickle.load, pickle.loads

    def dump_values(obj, file, *args, **kwargs):
        if _holds_fake(obj):
            _leave_out("pickle.dump", obj, file, recorder)
        else:
            dump(obj, file, *args, **kwargs)

    def dumps_values(obj, *args, **kwargs):
        if not _holds_fake(obj):
            return dumps(obj, *args, **kwargs)
        _leave_out("pickle.dumps", obj, memory := io.BytesIO(), recorder)
        return memory.getvalue()

    def load_values(file, **kwargs):
        found = recorder.files.find(file) or recorder.files.recall(_begins(file))
        return found.value.load(None) if found and isinstance(found.value, _Stored) else load(file, **kwargs)

    def loads_values(data, **kwargs):
        found = recorder.files.recall(bytes(data[:_WORD]))
        return found.value.load(None) if found else loads(data, **kwargs)

    made = {"dump": dump_values, "dumps": dumps_values, "load": load_values, "loads": loads_values}
    yield from ((pickle, name, functools.wraps(getattr(pickle, name))(made[name])) for name in made)


def _torch_files(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    save, load, generator = torch.save, torch.load, torch.Generator
    save_compiled, address = torch.jit.RecursiveScriptModule.save, torch.UntypedStorage.data_ptr

    @functools.wraps(save)
    def save_values(obj, f, *args, **kwargs):
        if _holds_fake(obj):
            _leave_out("torch.save", obj, f, recorder)
        elif not recorder.files.keep(f, obj):
            save(obj, f, *args, **kwargs)

    @functools.wraps(load)
    def load_mapped(f, map_location=None, *args, mmap=None, **kwargs):
        saved = recorder.files.find(f)
        f = saved.source if saved and saved.source else f
        if not saved and isinstance(f, io.BytesIO):
            saved = recorder.files.recall(_begins(f))
        elif isinstance(f, (str, os.PathLike)) and not (saved and not saved.source):
            with open(f, "rb") as file:
                begins = file.read(_WORD)
            mmap = mmap if mmap is not None else begins.startswith(_ZIP) or None
            saved = recorder.files.recall(begins)
        if saved and not saved.source:
            return saved.value.load(map_location) if isinstance(saved.value, _Stored) else saved.value
        to_gpu = _maps_to_gpu(map_location)
        with on_real_tensors():  # else PyTorch gives fake tensors here
            loaded = load(f, "cpu" if map_location is None or to_gpu else map_location, *args, mmap=mmap, **kwargs)
        loaded = tree_map_only(torch.Tensor, recorder.take_in, loaded)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(FIRST_GPU), loaded) if to_gpu else loaded

    class Generator(generator):
        """Random numbers of a GPU are as good as any: none of them is looked at."""

        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu")

    def tell_storages_apart(storage):
        """The address of a storage that has none: some number of its own, by which libraries find shared tensors."""
        return address(storage) if storage.device.type != "meta" else storage_key(storage)

    @functools.wraps(save_compiled)
    def save_compiled_values(module, f, *args, **kwargs):
        if any(isinstance(each, FakeTensor) for each in (*module.parameters(), *module.buffers())):
            recorder.files.unwritten[f"torch.jit.save to {recorder.files.name(f)}"] = None
        elif not recorder.files.keep(f, module):
            save_compiled(module, f, *args, **kwargs)

    yield torch.jit.RecursiveScriptModule, "save", save_compiled_values
    yield torch, "save", save_values
    yield torch, "load", load_mapped
    yield torch, "Generator", Generator
    yield torch.UntypedStorage, "data_ptr", tell_storages_apart


def _maps_to_gpu(map_location: object, was_on_gpu: bool = True, otherwise: bool = False) -> bool:
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


def _holds_fake(value: object) -> bool:
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


class _Stored:
    """What torch.save would have written: a copy of an object. Of its fake tensors it has the outlines."""

    def __init__(self, value: object, recorder: Recorder):
        self._recorder, self._pickled = recorder, io.BytesIO()
        self._outlines: list[tuple[torch.Tensor, bool, bool]] = []  # with: on the GPU, a parameter
        numbers: dict[tuple, int] = {}

        class Writer(pickle.Pickler):
            def persistent_id(writer, one: object) -> int | None:
                if not isinstance(one, torch.Tensor) or one.layout is not torch.strided:
                    return None
                place = storage_key(one), one.storage_offset(), one.dtype
                key = *place, one.shape, one.stride()  # so that a tied weight is stored once
                if key not in numbers:
                    numbers[key] = len(self._outlines)
                    on_gpu = isinstance(one, FakeTensor) and recorder.device_of(one) == FIRST_GPU
                    self._outlines.append((self._outline(one), on_gpu, isinstance(one, torch.nn.Parameter)))
                return numbers[key]

        Writer(self._pickled).dump(value)

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
        return Reader(self._pickled).load()

    def _make(self, outline: torch.Tensor, on_gpu: bool, parameter: bool, map_location: object) -> torch.Tensor:
        to_gpu = _maps_to_gpu(map_location, on_gpu, otherwise=on_gpu)
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
        with self.recorder.placed(on_host=True):
            return torch.empty(shape, dtype=dtype).contiguous()[key]


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


class _Opened:
    """What safetensors.safe_open gives, whose large tensors have no values. Each prediction has a class of its own."""

    recorder: Recorder
    opened: Callable  # the library's

    def __init__(self, filename, framework="pt", device="cpu", **options):
        saved = self.recorder.files.find(filename)
        if saved and not saved.source:
            tensors, metadata = saved.value.load("cpu") if isinstance(saved.value, _Stored) else saved.value
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


def _safetensors(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    import safetensors.torch

    save = safetensors.torch.save_file
    values = {"recorder": recorder, "opened": staticmethod(safetensors.safe_open)}
    safe_open = type("safe_open", (_Opened,), values)  # a class: a library may write safe_open | None

    @functools.wraps(save)
    def save_values(tensors, filename, metadata=None):
        if any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            recorder.files.unwritten[f"safetensors' save_file to {recorder.files.name(filename)}"] = None
            recorder.files.save(filename, _Stored((dict(tensors), metadata), recorder))
        elif not recorder.files.keep(filename, (dict(tensors), metadata)):
            save(tensors, filename, metadata)

    yield safetensors, "safe_open", safe_open
    yield safetensors.torch, "safe_open", safe_open
    yield safetensors.torch, "save_file", save_values
