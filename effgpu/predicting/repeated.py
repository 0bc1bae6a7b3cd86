"""Evaluations that do not count: of many equal calls of a module, the first two are walked, and tell all.

A script that evaluates before its first step, or after it, may call its model hundreds of times, with tensors of the
same shapes.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from effgpu.measuring.torch_internals import FakeTensor, TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from effgpu.predicting.placing import ScriptRecorder

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_HOLDS = (list, dict, set)


class _Tensor(NamedTuple):
    """What is to be known of a tensor that is given, or to be made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Result(NamedTuple):
    """What a call gets or gives: the leaves of a tree."""

    leaves: list[Hashable]
    form: TreeSpec

    def make(self) -> object:
        """What is like it."""
        return tree_unflatten(
            [_make(each) if isinstance(each, _Tensor) else each[1] for each in self.leaves], self.form
        )


class Repeated:
    """What modules give without gradients between two steps, by how they were called.

    A call is left out where two got and gave the same, tensors on the GPU alone, and the second left the module and all
    in it as they were; never in a step that counts.
    """

    def __init__(self, recorder: "ScriptRecorder"):
        self._recorder = recorder
        self._known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # of each module, by what it gets
        self._inside = False

    def forget(self) -> None:
        """A step is over: there may be more on the GPU than at the calls before."""
        self._known.clear()

    def replacing(self) -> Iterator[tuple[type, str, Callable]]:
        """(class, name, what stands there)."""
        call = torch.nn.Module.__call__

        @functools.wraps(call)
        def call_once(module, *args, **kwargs):
            looks = not (self._inside or torch.is_grad_enabled() or self._recorder.work.counts)
            if not looks or threading.current_thread() is not threading.main_thread():
                return call(module, *args, **kwargs)
            self._inside = True
            try:
                return self._call(functools.partial(call, module), module, args, kwargs)
            finally:
                self._inside = False

        yield torch.nn.Module, "__call__", call_once

    def _call(self, call: Callable, module: torch.nn.Module, args: tuple, kwargs: dict) -> object:
        got = _describe((args, kwargs))
        if got is None or any(each._forward_hooks or each._forward_pre_hooks for each in module.modules()):
            return call(*args, **kwargs)
        known = self._known.setdefault(module, {})
        modes = module.training, torch.is_autocast_enabled("cuda"), torch.is_inference_mode_enabled()
        key = (*got.leaves, str(got.form), *modes)
        gave, took = known.get(key, (None, None))
        passes = self._recorder.passes
        if took is not None:
            passes[-1] += took
            return gave.make()
        before, passed = _state(module), passes[-1]
        result = call(*args, **kwargs)
        gives = _describe(result)
        is_sure = gives is not None and gives == gave and before == _state(module)
        known[key] = gives, passes[-1] - passed if is_sure else None
        return result


def _describe(tree: object) -> _Result | None:
    """What a call gets or gives; None where a part of it is neither a plain value nor a fake tensor on the GPU."""
    leaves, form = tree_flatten(tree)
    if not all(isinstance(leaf, _PLAIN) or (type(leaf) is FakeTensor and leaf.is_cuda) for leaf in leaves):
        return None
    return _Result([_describe_leaf(leaf) for leaf in leaves], form)


def _describe_leaf(leaf: object) -> Hashable:
    if isinstance(leaf, FakeTensor):
        return _Tensor(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
    return type(leaf), leaf  # as 1 and True are equal


def _make(like: _Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)


def _state(module: torch.nn.Module) -> list[tuple]:
    """What changes where a module, or one in it, keeps something of a call."""
    found: list[tuple] = []
    for each in module.modules():
        sized = ((name, value, len(value) if isinstance(value, _HOLDS) else 0) for name, value in vars(each).items())
        found += ((name, id(value), size) for name, value, size in sized)
        found += ((id(one), 0 if one.is_inference() else one._version) for one in each.buffers(recurse=False))
    return found
