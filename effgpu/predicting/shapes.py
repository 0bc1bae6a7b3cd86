"""What operations give on fake tensors, made faster than FakeTensorMode makes it: a network repeats itself.

FakeTensorMode remembers results, too, but takes longer to look one up than it takes to make it anew.
"""

import contextlib
import functools
import re
from typing import NamedTuple

import torch

from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
    storage_key,
    tree_map_only,
)
from effgpu.predicting import parameters

aten = torch.ops.aten
_PURE, _VIEW, _LISTED, _IN_PLACE = "pure", "view", "listed", "in place"
_VIEWS = """view _unsafe_view t transpose.int permute expand detach alias unsqueeze squeeze.dim slice.Tensor select.int
split.Tensor unbind.int"""
_REFUSED = re.compile(r'"\w*cpu\w*" not implemented for \'([\w.]+)\'')
_NAMES = {"Half": "float16", "BFloat16": "bfloat16", "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32"}
_NAMES |= {"Long": "int64", "Bool": "bool"}
_BY_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


class _Outline(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_known: dict[tuple, object] = {}  # outlines of results, by the operation and the outlines of its arguments
_MOST = 50_000  # of them: a walk adds about a hundred


def run(mode: FakeTensorMode, func, args: tuple, kwargs: dict):
    """What `func(*args, **kwargs)` gives on the mode's fake tensors."""
    if func is aten._log_softmax.default and args[2] and args[0].dtype is torch.bfloat16:
        args = torch.empty_like(args[0], dtype=torch.float16), *args[1:]  # PyTorch's rule has forgotten bf16
    try:
        if not parameters.has_kinds():
            return _run(mode, func, args, kwargs)
        with parameters.plain(tensors_of((args, kwargs))):
            return _run(mode, func, args, kwargs)
    except RuntimeError as error:
        found = None if func._schema.is_mutable else _REFUSED.match(str(error))
        if found and (dtype := _named(found[1])):
            return _as_floats(func, args, kwargs, dtype)
        raise


def _as_floats(func, args: tuple, kwargs: dict, dtype: torch.dtype) -> object:
    """What an operation gives that a CPU, which stands for the GPU, does not have for this type of numbers."""

    def change(value: object, old: torch.dtype, new: torch.dtype) -> object:
        return tree_map_only(torch.Tensor, lambda each: each.to(new) if each.dtype is old else each, value)

    return change(func(*change(args, dtype, torch.float32), **kwargs), torch.float32, dtype)


def _named(name: str) -> torch.dtype | None:
    """The dtype of this name, "torch.int32" or "Half"."""
    found = getattr(torch, _NAMES.get(name, name.removeprefix("torch.")), None)
    return found if isinstance(found, torch.dtype) else None


def _run(mode: FakeTensorMode, func, args: tuple, kwargs: dict):
    if (kind := _kind(func)) is None:
        return func(*args, **kwargs)
    try:
        key = func, torch.get_default_dtype(), _outline(args, mode), _outline(tuple(kwargs.items()), mode)
    except (TypeError, RuntimeError):
        return func(*args, **kwargs)
    if kind == _LISTED:
        return None
    if kind == _IN_PLACE:
        if key not in _known:
            result = func(*args, **kwargs)
            if result is args[0] and _outline(args, mode) == key[2]:
                _remember(key, None)
            return result
        return args[0]
    if kind == _PURE and key not in _known:
        result = func(*args, **kwargs)
        with contextlib.suppress(TypeError, RuntimeError):
            _remember(key, _outline_of_new(result, mode, {storage_key(t) for t in tensors_of(args)}))
        return result
    with in_kernel_invocation_manager(mode):
        if kind == _PURE:
            return _make(_known[key], mode)
        made, wrap = func(*args, **kwargs), functools.partial(FakeTensor, mode, device=args[0].fake_device)
        return list(map(wrap, made)) if isinstance(made, list) else wrap(made)


def _remember(key: tuple, outline: object) -> None:
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = outline


@functools.cache
def _kind(func) -> str | None:
    """How an operation's result can be made; None for one that depends on values, or writes into several."""
    name, arguments, results = func._schema.name, func._schema.arguments, func._schema.returns
    if func.namespace != "aten" or _BY_VALUES & set(func.tags):
        return None
    if name.startswith("aten::_foreach_") and name.endswith("_"):
        return _LISTED  # it changes a list of tensors in place, and gives nothing
    if func in _views():
        return _VIEW
    written = [each.name for each in arguments if each.alias_info]
    if written == ["self"] == [arguments[0].name] and arguments[0].alias_info.is_write:
        return _IN_PLACE if len(results) == 1 and torch.Tag.inplace_view not in func.tags else None
    return None if written or any(each.alias_info for each in results) else _PURE


@functools.cache
def _views() -> frozenset:
    named = (name.partition(".") for name in _VIEWS.split())
    return frozenset(getattr(getattr(aten, packet), overload or "default") for packet, _, overload in named)


def _outline(value: object, mode: FakeTensorMode) -> object:
    """What a result depends on. Raises TypeError or RuntimeError for a tensor that has more: values, another layout."""
    if isinstance(value, torch.Tensor):
        if not isinstance(value, FakeTensor) or value.fake_mode is not mode or value.constant is not None:
            raise TypeError
        return _Outline(value.shape, value.stride(), value.dtype, value.fake_device)
    if isinstance(value, (list, tuple)):
        return tuple(_outline(each, mode) for each in value)
    hash(value)
    return type(value), value  # 1, 1.0 and True are equal


def _outline_of_new(result: object, mode: FakeTensorMode, taken: set[int]) -> object:
    """The outline of a result whose storages are its own, and no larger than it. Raises TypeError for another one."""
    if isinstance(result, (list, tuple)):
        return type(result)(_outline_of_new(each, mode, taken) for each in result)
    if not isinstance(result, torch.Tensor):
        return result
    outline, storage = _outline(result, mode), result.untyped_storage()
    last = sum((size - 1) * step for size, step in zip(outline.shape, outline.stride)) if result.numel() else -1
    if storage_key(storage) in taken or storage.nbytes() != (last + 1) * result.element_size():
        raise TypeError
    taken.add(storage_key(storage))
    return outline


def _make(outline: object, mode: FakeTensorMode) -> object:
    if isinstance(outline, _Outline):
        made = torch.empty_strided(outline.shape, outline.stride, dtype=outline.dtype, device="meta")
        return FakeTensor(mode, made, outline.device)
    if isinstance(outline, (list, tuple)):
        return type(outline)(_make(each, mode) for each in outline)
    return outline
