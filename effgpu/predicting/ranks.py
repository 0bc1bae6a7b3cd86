"""A script's process is the only rank: what spreads its training has nothing to do, and more ranks are refused."""

import contextlib
import functools
import inspect
import operator
import os
from collections.abc import Callable, Iterable, Iterator
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
        if (size := world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)) > 1:
            raise CannotPredict(_TOO_MANY.format(size))
        start("gloo", store=distributed.HashStore(), rank=0, world_size=1)

    yield distributed, "init_process_group", start_alone
    for name, do in _ON_ONE_RANK.items():
        yield distributed, name, _at_once(getattr(distributed, name), do)
    yield distributed, "batch_isend_irecv", lambda ops: [_Done(each.tensor) for each in ops]
    yield distributed_nn, "all_gather", lambda tensor, *_, **__: (tensor.clone(),)
    yield distributed_nn, "all_reduce", lambda tensor, *_, **__: tensor.clone()


def imported(spread: Iterable[tuple[object, str, object]]) -> list[tuple[str, object, object]]:
    """(name, what modules have imported under it, what they get) of what `alone` replaces."""
    found = {}
    for owner, name, other in spread:
        if isinstance(owner, ModuleType):
            found.setdefault(name, (vars(owner)[name], other))
    found["DDP"] = found["DistributedDataParallel"]
    return [(name, *pair) for name, pair in found.items()]


_ON_ONE_RANK = {  # what a collective operation does with its first arguments
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier"), lambda *_: None),
    "broadcast_object_list": lambda *_: None,
    "all_gather": lambda results, tensor, *_: results[0].copy_(tensor),
    "all_gather_into_tensor": lambda result, tensor, *_: result.copy_(tensor),
    "reduce_scatter_tensor": lambda result, tensor, *_: result.copy_(tensor),
    "reduce_scatter": lambda result, tensors, *_: result.copy_(tensors[0]),
    "gather": lambda tensor, results, *_: results[0].copy_(tensor),
    "scatter": lambda result, tensors, *_: result.copy_(tensors[0]),
    "all_to_all": lambda results, tensors, *_: results[0].copy_(tensors[0]),
    "all_to_all_single": lambda result, tensor, *_: result.copy_(tensor),
    "all_gather_object": lambda results, one, *_: operator.setitem(results, 0, one),
    "gather_object": lambda one, results, *_: operator.setitem(results, 0, one),
    "scatter_object_list": lambda results, ones, *_: operator.setitem(results, 0, ones[0]),
}


def _at_once(real: Callable, do: Callable) -> Callable:
    """What stands for a collective operation: where it is to run in the background, it is done already."""
    signature = inspect.signature(real)

    @functools.wraps(real)
    def run(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        first = next(iter(given.arguments.values()))
        do(*given.arguments.values())
        return _Done(first) if given.arguments.get("async_op") else None

    return run


class _Done(getattr(distributed, "Work", object)):
    """What a collective operation in the background gives: it is over."""

    def __init__(self, result: object):
        super().__init__()
        self._result = [result] if isinstance(result, torch.Tensor) else result

    def wait(self, *_: object, **__: object) -> bool:
        """Nothing to wait for."""
        return True

    is_completed = is_success = wait

    def result(self) -> object:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future:
        """One that has its value."""
        future = torch.futures.Future()
        future.set_result(self._result)
        return future


def refusing_shards(fsdp: ModuleType) -> contextlib.AbstractContextManager:
    """Inside, `fully_shard` is refused: its tensors have no fake ones. One rank trains the same without it."""

    def refuse(*_: object, **__: object) -> None:
        raise CannotPredict("fully_shard cannot be predicted: leave it out, for one rank")

    return replaced([(fsdp, "fully_shard", refuse)])


def _spawn_here(function: Callable, args: tuple = (), nprocs: int = 1, *_: object, **__: object) -> None:
    if nprocs > 1:
        raise CannotPredict(_TOO_MANY.format(nprocs))
    function(0, *args)


def _on_one_gpu(self: torch.nn.DataParallel, *inputs: object, **options: object) -> object:
    move = lambda value: torch.Tensor.to(value, FIRST_GPU) if isinstance(value, torch.Tensor) else value
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
