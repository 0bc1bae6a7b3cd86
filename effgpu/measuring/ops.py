"""The operations that a step calls, the bytes that they touch, and the kernels that it launches."""

import re
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from effgpu.measuring.device import find_device
from effgpu.measuring.timing import check_step
from effgpu.measuring.variants import check_worked, uncompiled

Key = Callable[[str, list[torch.Tensor]], Hashable | None]

_LAUNCH = re.compile(r"(cuda|cu|hip)(Ext)?(Module)?(Launch(Cooperative)?Kernel|GraphLaunch)")
_RUNTIME = re.compile(r"(cuda|cu|hip)[A-Z]")  # a call of the driver: the wait at the end is one
_NO_KERNEL = {"_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size"}
_OVERWRITE = {"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"}  # these do not read what they change


class Ops(Counter):
    """How often a step calls each operation: `count_ops(step)["mm"]`.

    `bytes` is a Counter of the bytes that the calls of each operation read and write. `launches` is the number of
    kernel launches in one step on a GPU, if they were counted, else None. A difference of two is a plain Counter.
    """

    launches: int | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bytes: Counter = Counter()


def count_ops(step: Callable[[], object], *, key: Key | None = None, launches: bool = False) -> Ops:
    """Count the operations in one call of `step`: forward, backward and optimizer.

    Operations have PyTorch's names without overload: "mm", "add_", "native_layer_norm_backward". Those from outside of
    PyTorch's own library have their namespace in front: "c10d::allreduce_". Operations that run no kernel do not
    count: views, such as a transpose, and empty tensors. On a GPU one operation may launch several kernels.

    `key` groups or selects: it gets the name and the tensors among the arguments, and returns what to count under,
    or None to leave the call out.

    >>> count_ops(step, key=lambda name, tensors: (name, tensors[0].shape) if name == "mm" else None)

    With `launches`, a second call of the step is profiled on a GPU. The launch of a CUDA graph counts as one. Where the
    profiler sees nothing of the GPU (its library, CUPTI, cannot work there), `launches` stays None. The profiler can
    slow later launches in the same process (pytorch/pytorch#144455), so measure times first.

    A function compiled by torch.compile runs uncompiled while its operations are counted. Its launches are those of the
    compiled code. Bytes ignore caches, and count each argument as read or written once.

    Raises TypeError if `step` is a variant.
    """
    check_step(step=step)
    counting = _Counting(key or (lambda name, tensors: name))
    with uncompiled(), counting:
        result = step()
    check_worked(result)
    if launches and find_device().type == "cuda":
        counting.ops.launches = _count_launches(step)
    return counting.ops


class _Counting(TorchDispatchMode):
    def __init__(self, key: Key):
        super().__init__()
        self.key, self.ops = key, Ops()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if runs_kernel(operation):
            name = operation.overloadpacket.__name__
            name = name if operation.namespace == "aten" else f"{operation.namespace}::{name}"
            if (kind := self.key(name, tensors_of((args, kwargs)))) is not None:
                self.ops[kind] += 1
                self.ops.bytes[kind] += bytes_touched(operation, name, args, kwargs, result)
        return result


def runs_kernel(operation) -> bool:
    """Whether an operation runs a kernel: views, empty tensors and notes to the profiler do not."""
    name = operation.overloadpacket.__name__
    return operation.namespace not in ("profiler", "prim") and not operation.is_view and name not in _NO_KERNEL


def bytes_touched(operation, name: str, args: tuple, kwargs: dict, result: object) -> int:
    """Bytes that a call reads and writes. An argument that it changes in place counts as both."""
    touched = 0
    given = dict(zip((argument.name for argument in operation._schema.arguments), args)) | kwargs
    for argument in operation._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        reads = not (argument.is_out or (writes and name in _OVERWRITE))
        touched += (reads + writes) * sum(map(_size, tensors_of(given.get(argument.name))))
    inputs = {id(tensor) for tensor in tensors_of((args, kwargs))}
    return touched + sum(_size(tensor) for tensor in tensors_of(result) if id(tensor) not in inputs)


def tensors_of(tree: object) -> list[torch.Tensor]:
    """The tensors among arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _size(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's numbers. Those of an expanded tensor are in memory once."""
    size = tensor.numel() * tensor.element_size()
    return min(size, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else size


def _count_launches(step: Callable[[], object]) -> int | None:
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
        torch.cuda.synchronize()
    events = profile.key_averages()
    if not any(_RUNTIME.match(event.key) for event in events):
        return None
    return sum(event.count for event in events if _LAUNCH.match(event.key))
