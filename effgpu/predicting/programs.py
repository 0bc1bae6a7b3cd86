"""Programs that a script saves, by torch.jit, torch.export or for ONNX: one with fake weights is not written."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from effgpu.attaching.replacing import replaced
from effgpu.measuring.torch_internals import FakeTensor
from effgpu.predicting import imports
from effgpu.predicting.files import Files


class _Program(NamedTuple):
    """A program that was not written. `size` are the bytes of its weights."""

    program: object
    size: int

    def load(self, map_location: object) -> object:
        return self.program


class _Unwritten:
    """What torch.onnx.export gives of a model without values: it can be saved, which writes nothing."""

    def __init__(self, save: Callable):
        self.save = save


def _weights(program: object) -> list[torch.Tensor]:
    state = program.state_dict
    return [each for each in (state() if callable(state) else state).values() if isinstance(each, torch.Tensor)]


def _is_fake(program: object) -> bool:
    return hasattr(program, "state_dict") and any(isinstance(each, FakeTensor) for each in _weights(program))


def _leave_out(files: Files, how: str, program: object, file: object) -> None:
    files.leave_out(how, _Program(program, sum(each.nbytes for each in _weights(program))), file)


def _saving(files: Files, how: str, save: Callable) -> Callable:
    @functools.wraps(save)
    def save_program(ep, f, *args, **kwargs):  # named as by torch.export.save
        if _is_fake(ep):
            _leave_out(files, how, ep, f)
        else:
            save(ep, files.place(f), *args, **kwargs)

    return save_program


def _loading(files: Files, load: Callable) -> Callable:
    @functools.wraps(load)
    def load_program(f, *args, **kwargs):
        saved = files.find_value(f)
        if saved and saved.value:
            return saved.value.load(None)
        return load(saved.source if saved else f, *args, **kwargs)

    return load_program


def of_jit(files: Files) -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there). A program of torch.jit is loaded again as it is."""

    def packing(pack: Callable) -> Callable:
        @functools.wraps(pack)
        def pack_program(program, *args, **kwargs):
            if not _is_fake(program):
                return pack(program, *args, **kwargs)
            _leave_out(files, "torch.jit.save", program, memory := io.BytesIO())
            return memory.getvalue()

        return pack_program

    save = torch.jit.save

    @functools.wraps(save)
    def save_any(m, f, *args, **kwargs):
        if isinstance(m, torch.jit.ScriptModule) or not _is_fake(m):
            save(m, f, *args, **kwargs)
        else:  # what was to be traced, and is as it was
            _leave_out(files, "torch.jit.save", m, f)

    yield torch.jit, "load", _loading(files, torch.jit.load)
    yield torch.jit, "save", save_any
    for kind in (torch.jit.ScriptModule, torch.jit.RecursiveScriptModule):
        yield kind, "save", _saving(files, "torch.jit.save", kind.save)
        yield kind, "save_to_buffer", packing(kind.save_to_buffer)


def exported(files: Files) -> dict[str, imports.Changes]:
    """What changes in the modules that export, by name."""
    return {
        "torch.export": functools.partial(_of_export, files),
        "torch.onnx": functools.partial(_for_onnx, files),
    }


def _of_export(files: Files, module: ModuleType) -> contextlib.AbstractContextManager:
    save = _saving(files, "torch.export.save", module.save)
    return replaced([(module, "save", save), (module, "load", _loading(files, module.load))])


def _for_onnx(files: Files, module: ModuleType) -> contextlib.AbstractContextManager:
    export = module.export

    @functools.wraps(export)
    def export_model(model, args=(), f=None, *others, **kwargs):
        if not _is_fake(model):
            return export(model, args, files.place(f), *others, **kwargs)
        leave_out = functools.partial(_leave_out, files, "torch.onnx.export", model)
        if f is not None:
            leave_out(f)
        return _Unwritten(lambda destination, **_: leave_out(destination)) if kwargs.get("dynamo", True) else None

    return replaced([(module, "export", export_model)])
