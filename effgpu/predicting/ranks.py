"""A script's process is the only rank: what spreads its training has nothing to do, and more ranks are refused."""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import distributed

from effgpu.attaching.replacing import replaced
from effgpu.errors import CannotPredict
from effgpu.predicting.hardware import FIRST_GPU

_TOO_MANY = "asks for {} ranks, and one process is predicted: start it with one"


def alone() -> Iterator[tuple[object, str, object]]:
    """(owner, name, what stands there) for torch.distributed, and for the modules that spread a model over GPUs."""
    yield torch.nn.DataParallel, "forward", _on_one_gpu
    yield torch.nn.parallel, "DistributedDataParallel", Distributed
    yield torch.nn.parallel.distributed, "DistributedDataParallel", Distributed
    yield torch.multiprocessing, "spawn", _spawn_here
    if not distributed.is_available():
        return
    from torch.distributed import nn as distributed_nn

    start = distributed.init_process_group

    def start_alone(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, *_, **__):
        if (size := world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", 1))) > 1:
            raise CannotPredict(_TOO_MANY.format(size))
        start("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    yield distributed, "init_process_group", start_alone
    for name in ("all_reduce", "reduce", "broadcast", "barrier", "broadcast_object_list"):
        yield distributed, name, lambda *_, **__: None
    for name in ("all_gather_object", "gather_object"):
        yield distributed, name, _gather_object
    yield distributed_nn, "all_gather", lambda tensor, *_, **__: (tensor.clone(),)
    yield distributed_nn, "all_reduce", lambda tensor, *_, **__: tensor.clone()
    yield distributed, "all_gather", lambda tensors, tensor, *_, **__: _copy(tensor, tensors[0])
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        yield distributed, name, lambda result, tensor, *_, **__: _copy(tensor, result)


def refusing_shards(fsdp: ModuleType) -> contextlib.AbstractContextManager:
    """Inside, `fully_shard` is refused: its tensors have no fake ones. One rank trains the same without it."""

    def refuse(*_: object, **__: object) -> None:
        raise CannotPredict("fully_shard cannot be predicted: leave it out, for one rank")

    return replaced([(fsdp, "fully_shard", refuse)])


def _spawn_here(function: Callable, args: tuple = (), nprocs: int = 1, *_: object, **__: object) -> None:
    if nprocs > 1:
        raise CannotPredict(_TOO_MANY.format(nprocs))
    function(0, *args)


def _gather_object(*given: object, **__: object) -> None:
    """Both take a list and an object, in another order."""
    found = next((one for one in given[:2] if isinstance(one, list) and one and one[0] is None), None)
    if found is not None:
        found[0] = next(one for one in given[:2] if one is not found)


def _copy(tensor: torch.Tensor, result: torch.Tensor) -> None:
    result.copy_(tensor)


def _on_one_gpu(self: torch.nn.DataParallel, *inputs: object, **options: object) -> object:
    move = lambda value: value.to(FIRST_GPU) if isinstance(value, torch.Tensor) else value
    return self.module(*map(move, inputs), **{name: move(value) for name, value in options.items()})


class Distributed(torch.nn.Module):
    """What stands for DistributedDataParallel: the module, and its buckets, which take as much as the gradients."""

    def __init__(self, module: torch.nn.Module, *_: object, gradient_as_bucket_view: bool = False, **__: object):
        super().__init__()
        self.module = module
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._buckets = [] if gradient_as_bucket_view else [torch.empty_like(parameter) for parameter in trained]
        self.require_backward_grad_sync = True

    def forward(self, *inputs: object, **options: object) -> object:
        """What the module gives."""
        return self.module(*inputs, **options)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """There is nobody to wait for."""
        yield
