"""Evaluations that do not count: of many equal calls of a module, the first two are walked, and tell all.

A script that evaluates before its first step, or after it, may call its model hundreds of times, with tensors of the
same shapes.
"""

import functools
import random
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from effgpu.measuring.torch_internals import (
    FakeTensor,
    TreeSpec,
    _has_any_global_hook,
    tree_flatten,
    tree_unflatten,
)
from effgpu.predicting.storages import Life
from effgpu.predicting.translator import on_real_tensors

if TYPE_CHECKING:
    from effgpu.predicting.placing import ScriptRecorder

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


class _Tensor(NamedTuple):
    """What is to be known of a tensor that is given, or to be made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class _Tree(NamedTuple):
    """What a call gets or gives: the leaves of a tree."""

    leaves: list[Hashable]
    form: TreeSpec

    def make(self) -> object:
        """What is like it."""
        return tree_unflatten(
            [_make(each) if isinstance(each, _Tensor) else each[1] for each in self.leaves], self.form
        )


class _Known(NamedTuple):
    """What the last of equal calls found and gave, its products, and what it made.

    `sure` says that the next one is known by it.
    """

    state: list[tuple]
    gave: _Tree | None
    passes: int = 0
    lives: Sequence[Life] = ()
    sure: bool = False


class Repeated:
    """What modules give without gradients between two steps, by how they were called.

    A call is left out where two in a row got and gave the same, new tensors on the GPU alone, and found and left the
    module and all in it, and what was drawn at random, as they are now; never in a step that counts. What a module
    leaves elsewhere, as in a global list, is not seen.
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
        if got is None or _has_hooks(module):
            return call(*args, **kwargs)
        modes = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.get_default_dtype()
        key = (*got.leaves, str(got.form), *modes, torch.is_inference_mode_enabled())
        recorder, storages, state = self._recorder, self._recorder.storages, _state(module)
        before = self._known.setdefault(module, {}).get(key)
        same = before is not None and before.state == state
        if same and before.sure:
            recorder.passes[-1] += before.passes
            recorder.passes_before += before.passes
            storages.repeat(before.lives)
            return before.gave.make()
        drawn, passed, began = _drawn(), recorder.passes[-1], storages.now
        result = call(*args, **kwargs)
        gave = _describe(result) if self._is_new(result, began) and _describe((args, kwargs)) == got else None
        sure = same and gave is not None and gave == before.gave and state == _state(module) and drawn == _drawn()
        lives = storages.lives_since(began) if sure else ()
        self._known[module][key] = _Known(state, gave, recorder.passes[-1] - passed, lives, sure)
        return result

    def _is_new(self, result: object, began: int) -> bool:
        """Whether each tensor of a result has a storage of its own, which was not there when the call began."""
        tensors = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, FakeTensor)]
        blocks = [self._recorder.storages.of(tensor) for tensor in tensors]
        whole = all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)
        return (
            whole and len({*map(id, blocks)}) == len(blocks) and all(block and block.born > began for block in blocks)
        )


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call runs anything that was registered with it."""
    return _has_any_global_hook() or any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())


def _describe(tree: object) -> _Tree | None:
    """What a call gets or gives; None where a part of it is neither a plain value nor a fake tensor on the GPU."""
    leaves, form = tree_flatten(tree)
    if not all(isinstance(leaf, _PLAIN) or (type(leaf) is FakeTensor and leaf.is_cuda) for leaf in leaves):
        return None
    return _Tree([_describe_leaf(leaf) for leaf in leaves], form)


def _describe_leaf(leaf: object) -> Hashable:
    if isinstance(leaf, FakeTensor):
        return _Tensor(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device)
    return type(leaf), leaf  # as 1 and True are equal


def _make(like: _Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=like.device)


def _state(module: torch.nn.Module) -> list[tuple]:
    """What changes where a module, or one in it, is changed or keeps something of a call."""
    found: list[tuple] = []
    for each in module.modules():
        found += ((name, id(value), _size(value)) for name, value in vars(each).items())
        found += ((id(one), 0 if one.is_inference() else one._version) for one in each.buffers(recurse=False))
    return found


def _size(value: object) -> int:
    return len(value) if isinstance(value, Sized) and not isinstance(value, torch.Tensor) else 0


def _drawn() -> tuple:
    """The states of what draws at random on the CPU."""
    with on_real_tensors():
        torchs = torch.default_generator.get_state().numpy().tobytes()
    _, numbers, place, *_ = np.random.get_state()
    return random.getstate(), torchs, numbers.tobytes(), place
