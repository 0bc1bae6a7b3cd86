"""Two ranks: start a script on them; the bytes that a rank sends; times of its steps, which take turns."""

import os
import subprocess
import sys
from collections.abc import Callable

import torch.distributed as dist

from effgpu.measuring.device import describe
from effgpu.measuring.ops import count_ops
from effgpu.measuring.timing import time_steps

# The C++ library's words for a thread that was left behind. Seen once, on a busy CPU; the same run was then well.
_ABORTS = "terminate called without an active exception"
ROUNDS = {"allreduce": 2, "allgather": 1, "reduce_scatter": 1}  # of a ring: reduce, then gather


def torchrun(*script: str, cpu: bool = False) -> str:
    """Run a script with its arguments on two ranks of this machine, and return what they print.

    Each rank gets half of the CPU's cores. With `cpu` they see no GPU. Raises RuntimeError, with the end of their
    errors, if one fails.
    """
    settings = {"OMP_NUM_THREADS": str(max(1, describe().cores // 2))}
    if cpu:
        settings["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "win32":
        settings["USE_LIBUV"] = "0"
    else:  # the host's own name may not lead back to it
        settings["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1", "--nproc-per-node=2", *script]
    for _ in range(2):
        done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
        if not (done.returncode and _ABORTS in done.stderr):
            break
    if done.returncode:
        raise RuntimeError(f"torchrun {' '.join(script)}: expected both ranks to end well, got:\n{done.stderr[-3000:]}")
    return done.stdout


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
