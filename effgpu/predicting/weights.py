"""What a script reads and writes while it is predicted: weights are known by their shapes, and are written nowhere.

A file of safetensors says in its header which tensors it holds. What torch.load reads is real, as data may be in it,
but it is mapped into memory, so that weights which nobody looks at are not read.
"""

import contextlib
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import ModuleType

import torch

from effgpu.attaching.replacing import replaced
from effgpu.measuring.torch_internals import FakeTensor, storage_key, tree_map_only
from effgpu.predicting import imports, programs
from effgpu.predicting.calls import kept
from effgpu.predicting.elsewhere import past_python
from effgpu.predicting.files import FOLDER, WORD, Files
from effgpu.predicting.hardware import FIRST_GPU
from effgpu.predicting.opened import Opened
from effgpu.predicting.recorder import Recorder
from effgpu.predicting.stored import Stored, holds_fake, maps_to_gpu
from effgpu.predicting.translator import on_real_tensors

_ZIP = b"PK\3\4"  # how a file of torch.save begins since PyTorch 1.6, whatever its name
_SAVES, _LOADS = (
    [f"{library}.utilities.{name}" for library in ("lightning.fabric", "lightning_fabric")]
    for name in ("cloud_io", "load")
)
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
        with (
            kept(recorder.files),
            imports.exchanged(_by_name(found)),
            replaced(found),
            imports.changed(
                _saving(recorder.files) | programs.exported(recorder.files) | dict.fromkeys(_LOADS, _loading_mapped)
            ),
            past_python(recorder.files),
        ):
            yield
    finally:
        for name, value in from_before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _by_name(found: list[tuple[object, str, object]]) -> list[tuple[str, object, object]]:
    """The names under which modules have imported a function of a module's, what it is, and what they get."""
    those = [(name, vars(owner)[name], other) for owner, name, other in found if isinstance(owner, ModuleType)]
    return those + [(f"safe_{name}", real, other) for name, real, other in those]


@contextlib.contextmanager
def weights_set_aside(files: Files) -> Iterator[None]:
    """Inside, weights that a script saves go where it alone finds them: those of a training that is thrown away."""
    compiled = torch.jit.RecursiveScriptModule

    def saving(how: str, save: Callable) -> Callable:
        @functools.wraps(save)
        def save_aside(obj, f, *args, **kwargs):
            save(obj, _aside(files, how, f), *args, **kwargs)

        return save_aside

    def loading(load: Callable, named: str) -> Callable:
        @functools.wraps(load)
        def load_aside(*args, **kwargs):
            file, *others = args or [kwargs.pop(named)]
            saved = files.find(file)
            with files.as_they_are() if saved else contextlib.nullcontext():
                return load(saved.source if saved else file, *others, **kwargs)

        return load_aside

    found = [(torch, "save", saving("torch.save", torch.save)), (torch, "load", loading(torch.load, "f"))]
    found.append((compiled, "save", saving("torch.jit.save", compiled.save)))
    if find_spec("safetensors"):
        import safetensors.torch

        save_tensors = safetensors.torch.save_file

        @functools.wraps(save_tensors)
        def save_tensors_aside(tensors, filename, metadata=None):
            _write_tensors(_aside(files, "safetensors' save_file", filename), tensors, metadata, save_tensors)

        found.append((safetensors.torch, "save_file", save_tensors_aside))
        opening = loading(safetensors.safe_open, "filename")
        found += [(module, "safe_open", opening) for module in (safetensors, safetensors.torch)]
    with (
        kept(files),
        imports.exchanged(_by_name(found)),
        replaced(found),
        imports.changed(_saving(files)),
        past_python(files),
    ):
        yield


def _aside(files: Files, how: str, file: object) -> object:
    """Where to save what was to go into a file; memory, or a pipe, stays what it is."""
    if not files.has_path(file):
        return file
    files.unwritten[f"{how} to {files.name(file)}"] = None
    return files.aside(file)


def _write_tensors(file: object, tensors: dict[str, torch.Tensor], metadata: object, save: Callable) -> None:
    """Write a file of safetensors. What stands for another one is written here: `save` makes one beside it."""
    import safetensors.torch

    if not str(file).startswith(FOLDER):
        save(tensors, file, metadata)
        return
    with open(file, "wb") as opened:
        opened.write(safetensors.torch.save(tensors, metadata))


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
        if files.place(file := os.path.join(save_directory, "tokenizer.json")) is not file:
            return ()
        return save(tokenizer, save_directory, *args, **kwargs)

    return replaced([(module.PreTrainedTokenizerBase, "save_pretrained", save_new)])


def _saving(files: Files) -> dict[str, imports.Changes]:
    """What changes in libraries that save checkpoints, by module."""
    trainer = {"transformers.trainer": functools.partial(_without_checkpoints, files)}
    trainer |= {"transformers.tokenization_utils_base": functools.partial(_keeping_tokenizers, files)}
    return trainer | dict.fromkeys(_SAVES, _saving_at_once)


def _saving_at_once(module: ModuleType) -> contextlib.AbstractContextManager:
    """Lightning saves its checkpoints to a path, and not to memory first, whose bytes it would write."""
    return replaced([(module, "_atomic_save", lambda checkpoint, filepath: torch.save(checkpoint, filepath))])


def _loading_mapped(module: ModuleType) -> contextlib.AbstractContextManager:
    """What Lightning loads where it is used, as LitGPT's weights, is mapped: it would be put into fake tensors."""
    return replaced([(module, "_lazy_load", lambda filename: torch.load(filename, "cpu", weights_only=False))])


def _pickles(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    """Fake tensors in pickles: what Python's own module gets, it gives again."""
    dump, dumps, load, loads = pickle.dump, pickle.dumps, pickle.load, pickle.loads

    def dump_values(obj, file, *args, **kwargs):
        if holds_fake(obj):
            recorder.files.leave_out("pickle.dump", Stored(obj, recorder), file)
        else:
            dump(obj, file, *args, **kwargs)

    def dumps_values(obj, *args, **kwargs):
        if not holds_fake(obj):
            return dumps(obj, *args, **kwargs)
        recorder.files.leave_out("pickle.dumps", Stored(obj, recorder), memory := io.BytesIO())
        return memory.getvalue()

    def load_values(file, **kwargs):
        found = recorder.files.find_value(file)
        return found.value.load(None) if found and found.value else load(file, **kwargs)

    def loads_values(data, **kwargs):
        found = recorder.files.recall(bytes(data[:WORD]))
        return found.value.load(None) if found else loads(data, **kwargs)

    made = {"dump": dump_values, "dumps": dumps_values, "load": load_values, "loads": loads_values}
    yield from ((pickle, name, functools.wraps(getattr(pickle, name))(made[name])) for name in made)


def _torch_files(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    save, load, generator = torch.save, torch.load, torch.Generator
    address = torch.UntypedStorage.data_ptr

    @functools.wraps(save)
    def save_values(obj, f, *args, **kwargs):
        if holds_fake(obj):
            recorder.files.leave_out("torch.save", Stored(obj, recorder), f)
        else:
            save(obj, recorder.files.place(f), *args, **kwargs)

    @functools.wraps(load)
    def load_mapped(f, map_location=None, *args, mmap=None, **kwargs):
        saved = recorder.files.find_value(f)
        if saved and saved.value:
            return saved.value.load(map_location)
        f = saved.source if saved else f
        to_gpu = maps_to_gpu(map_location)
        as_it_is = recorder.files.as_they_are() if saved else contextlib.nullcontext()
        with as_it_is, on_real_tensors():  # else PyTorch gives fake tensors here
            if isinstance(f, (str, os.PathLike)) and mmap is None:
                with open(f, "rb") as file:
                    mmap = file.read(len(_ZIP)) == _ZIP or None
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

    yield from programs.of_jit(recorder.files)
    yield torch, "save", save_values
    yield torch, "load", load_mapped
    yield torch, "Generator", Generator
    yield torch.UntypedStorage, "data_ptr", tell_storages_apart


def _safetensors(recorder: Recorder) -> Iterator[tuple[object, str, object]]:
    import safetensors.torch

    save = safetensors.torch.save_file
    values = {"recorder": recorder, "opened": staticmethod(safetensors.safe_open)}
    safe_open = type("safe_open", (Opened,), values)  # a class: a library may write safe_open | None

    @functools.wraps(save)
    def save_values(tensors, filename, metadata=None):
        if any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):
            recorder.files.leave_out("safetensors' save_file", Stored((dict(tensors), metadata), recorder), filename)
        else:
            _write_tensors(recorder.files.place(filename), tensors, metadata, save)

    yield safetensors, "safe_open", safe_open
    yield safetensors.torch, "safe_open", safe_open
    yield safetensors.torch, "save_file", save_values
