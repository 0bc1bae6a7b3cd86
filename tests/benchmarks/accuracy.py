"""Whether `measure` agrees with other clocks, and what measuring adds to a 10 ms step.

The others are torch.utils.benchmark and, on a GPU, triton.testing.do_bench without its flushing of the cache, which a
training loop has not either.

Usage: python tests/benchmarks/accuracy.py [TURNS]

An interval needs 15 turns. Those of a large GPU take about a minute.
"""

import math
import sys
import time
from unittest.mock import patch

import torch
from torch.utils.benchmark import Timer

import effgpu
from effgpu.measuring.intervals import FEWEST_BLOCKS, interval_of_blocks
from effgpu.units import format_seconds

TURNS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
if TURNS < FEWEST_BLOCKS:
    sys.exit(f"TURNS: expected at least {FEWEST_BLOCKS}, got {TURNS}")
device = effgpu.find_device()
width = 256 if device.type == "cpu" else 2048
BLOCKS = None if device.type == "cpu" else 4  # of a measurement: those of a GPU are 0.3 s long, and 15 by themselves


def network():
    """A compute-bound training step: some 10 ms on one core or an H100."""
    torch.manual_seed(0)
    with device:
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
        x = torch.randn(width, width)

    def step():
        model.zero_grad()
        model(x).sum().backward()

    return step


def spin() -> None:
    """A step that spins for exactly 10 ms, so that whatever is above that is the measuring's."""
    end = time.perf_counter() + 0.010
    while time.perf_counter() < end:
        pass


def by_do_bench() -> float:
    """Seconds per step by Triton's clock."""
    import triton

    with patch.object(triton.runtime.driver.active, "clear_cache", lambda cache: None):
        return triton.testing.do_bench(network(), warmup=100, rep=500, return_mode="median") / 1000


CLOCKS = {
    "measure": lambda: effgpu.measure(network, seconds=0.5, blocks=BLOCKS, energy=False).median,
    "Timer": lambda: Timer("step()", globals={"step": network()}).blocked_autorange(min_run_time=0.5).median,
}
if device.type == "cuda":
    CLOCKS["do_bench"] = by_do_bench


def main() -> None:
    """Print each comparison."""
    torch.set_num_threads(1)  # as Timer does
    print(f"on {effgpu.describe().label}, one thread", flush=True)
    clocks = dict(CLOCKS)
    if "do_bench" in clocks:
        try:
            by_do_bench()
        except Exception as error:  # Triton has to find the driver and a C compiler
            print(f"without do_bench: {type(error).__name__}: {error}", flush=True)
            del clocks["do_bench"]
    taken = {name: [] for name in clocks}
    for turn in range(TURNS):
        for name in list(clocks)[:: -1 if turn % 2 else 1]:
            taken[name].append(clocks[name]())
        told = ", ".join(f"{name} {format_seconds(seconds[-1])}" for name, seconds in taken.items())
        print(f"turn {turn + 1} of {TURNS}: {told}", flush=True)
    for name in list(clocks)[1:]:
        ratios = [math.log(ours / theirs) for ours, theirs in zip(taken["measure"], taken[name])]
        middle, low, high = (math.exp(end) for end in interval_of_blocks(ratios))
        print(f"measure / {name}: {middle:.4f} [{low:.4f}, {high:.4f}], {TURNS} pairs in turns", flush=True)
    if device.type == "cpu":
        measured = effgpu.measure(lambda: spin, seconds=4).median
        print(f"a step of 10 ms is measured as {measured * 1000:.4f} ms: {measured / 0.010 - 1:.3%} more")


if __name__ == "__main__":
    main()
