"""What a rank of a distributed step reports: the bytes that it holds and sends, and times of steps that take turns."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from effgpu.ops import count_ops
from effgpu.timing import time_steps

ROUNDS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}  # of a ring: reduce, then gather


def bytes_sent(step: Callable[[], object]) -> float:
    """Bytes that this rank sends in one `step`, from the collective operations that it calls.

    One round over a tensor of S bytes sends S · (n - 1) / n from each of n ranks. This is counted, not read from the
    network: which operations, how often, and how large their largest tensor is.
    """

    def key(name, tensors):
        for kind in ROUNDS:
            if name.startswith("c10d::") and kind in name:
                return kind, max(t.nbytes for t in tensors)

    ranks, calls = dist.get_world_size(), count_ops(step, key=key)
    return sum(count * ROUNDS[kind] * size * (ranks - 1) / ranks for (kind, size), count in calls.items())


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Bytes of this rank's weights, gradients and optimizer state. Of a sharded tensor, only its slice counts."""
    weights = list(model.parameters())
    state = [t for values in optimizer.state.values() for t in values.values() if t.numel() > 1]
    owners = weights, [p.grad for p in weights], state
    return [sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in owner) for owner in owners]


def take_turns(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each step in each of `rounds`, forwards and backwards through the steps, after one round of warm-up.

    All ranks call this together: they wait for each other before each step.
    """
    turns = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name in [*steps, *reversed(steps)]:
            dist.barrier()
            turns[name] += time_steps(steps[name], 1)
    return {name: [*zip(seen[2::2], seen[3::2])] for name, seen in turns.items()}
