"""The operations that a step calls, and the bytes that they touch."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch

from effgpu.measuring.timing import check_step
from effgpu.measuring.torch_internals import TorchDispatchMode
from effgpu.measuring.variants import check_worked, uncompiled

Key = Callable[[str, list[torch.Tensor]], Hashable | None]

_NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size"}
# Of their first tensor, they read as much as they give, or read and write as much as the tensor that they put into it.
_READ_ROWS = {"embedding", "index", "index_select", "gather", "take"}
_WRITE_ROWS = {
    "index_put_",
    "_index_put_impl_",
    "index_add_",
    "index_copy_",
    "scatter_",
    "scatter_add_",
    "scatter_reduce_",
}
_OVERWRITE = {"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"}  # these do not read what they change


def count_ops(step: Callable[[], object], *, key: Key | None = None) -> Counter:
    """How often one call of `step` calls each operation: `count_ops(step)["mm"]`, forward, backward and optimizer.

    Operations have PyTorch's names without overload: "mm", "add_", "native_layer_norm_backward". Those from outside of
    PyTorch's own library have their namespace in front: "c10d::allreduce_". Operations that run no kernel do not
    count: views, such as a transpose, and empty tensors. On a GPU one operation may launch several kernels.

    `key` groups or selects: it gets the name and the tensors among the arguments, and returns what to count under,
    or None to leave the call out.

    >>> count_ops(step, key=lambda name, tensors: (name, tensors[0].shape) if name == "mm" else None)

    A function compiled by torch.compile runs uncompiled while its operations are counted.

    Raises TypeError if `step` is a variant.
    """
    check_step(step=step)
    counting = _Counting(key or (lambda name, tensors: name))
    with uncompiled(), counting:
        result = step()
    check_worked(result)
    return counting.counts


class _Counting(TorchDispatchMode):
    def __init__(self, key: Key):
        super().__init__()
        self.key, self.counts = key, Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if runs_kernel(operation):
            name = operation.overloadpacket.__name__
            name = name if operation.namespace == "aten" else f"{operation.namespace}::{name}"
            if (kind := self.key(name, tensors_of((args, kwargs)))) is not None:
                self.counts[kind] += 1
        return result


@functools.cache
def runs_kernel(operation) -> bool:
    """Whether an operation runs a kernel: views, empty tensors and notes to the profiler do not."""
    name = operation.overloadpacket.__name__
    return operation.namespace not in ("profiler", "prim") and not operation.is_view and name not in _NO_KERNEL


def bytes_touched(operation, name: str, args: tuple, kwargs: dict, result: object) -> int:
    """Bytes that a call reads and writes, without caches. An argument that it changes in place counts as both."""
    touched, most = 0, _rows(name, args, result)
    given = name_arguments(operation, args, kwargs)
    for argument in arguments_of(operation):
        reads = not (argument.is_out or (argument.is_written and name in _OVERWRITE))
        size = sum(map(_size, tensors_of(given.get(argument.name))))
        touched += (reads + argument.is_written) * (size if most is None else min(size, most))
        most = None
    inputs = {id(tensor) for tensor in tensors_of((args, kwargs))}
    return touched + sum(_size(tensor) for tensor in tensors_of(result) if id(tensor) not in inputs)


def _rows(name: str, args: tuple, result: object) -> int | None:
    """The most bytes that a call reads, or writes, of its first argument; None for all of them."""
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):
        return args[1].numel() * args[0].shape[1] * args[0].element_size()
    if name in _READ_ROWS:
        return sum(map(_size, tensors_of(result)))
    first, *others = args or (None,)
    if not isinstance(first, torch.Tensor) or first.layout is not torch.strided:
        return None
    if any(isinstance(other, torch.Tensor) and other.layout is torch.sparse_coo for other in others):
        return sum(map(_size, tensors_of(others)))
    values = [_size(other) for other in tensors_of(others) if other.dtype is first.dtype]
    return max(values, default=None) if name in _WRITE_ROWS else None


class Argument(NamedTuple):
    """One of an operation's: its name, whether the operation writes into it, and whether it is there only for that."""

    name: str
    is_written: bool
    is_out: bool


@functools.cache
def arguments_of(operation) -> tuple[Argument, ...]:
    """The arguments of an operation. PyTorch makes those of a schema anew each time that it is asked for them."""
    return tuple(
        Argument(each.name, each.alias_info is not None and each.alias_info.is_write, each.is_out)
        for each in operation._schema.arguments
    )


@functools.cache
def _names_of(operation) -> tuple[str, ...]:
    return tuple(argument.name for argument in arguments_of(operation))


def name_arguments(operation, args: tuple, kwargs: dict) -> dict:
    """What an operation is called with, by the names of its arguments."""
    return dict(zip(_names_of(operation), args)) | kwargs


def lists_of(args: tuple) -> list:
    """The lists of tensors among arguments, as foreach operations have them."""
    return [arg for arg in args if isinstance(arg, (list, tuple)) and arg and isinstance(arg[0], torch.Tensor)]


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors among arguments or results, in lists, tuples and dictionaries; of a sparse one, its two parts."""
    found = []
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else (tree,):
        if isinstance(branch, torch.Tensor):
            found += [branch._indices(), branch._values()] if branch.layout is torch.sparse_coo else [branch]
        elif isinstance(branch, (list, tuple, dict)):
            found += tensors_of(branch)
    return found


def tensors_in(batch: object) -> list[torch.Tensor]:
    """The tensors of a batch: in mappings that are no dictionaries, such as transformers' BatchEncoding, too."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return [tensor for item in batch for tensor in tensors_in(item)]
    return [batch] if isinstance(batch, torch.Tensor) else []


def _size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's numbers. Those of an expanded tensor are in memory once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size
