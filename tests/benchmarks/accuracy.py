"""Whether `measure` agrees with torch.utils.benchmark, and what measuring adds to a 10 ms step.

Usage: python tests/benchmarks/accuracy.py
"""

import math
import time

import torch
from torch.utils.benchmark import Timer

import effgpu
from effgpu.comparison import rank_interval


def network():
    """A training step of some 10 ms on one core."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    x = torch.randn(256, 256)

    def step():
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return step


def busy():
    """A step that spins for exactly 10 ms, so that whatever is above that is the measuring's."""

    def step():
        end = time.perf_counter() + 0.010
        while time.perf_counter() < end:
            pass

    return step


CLOCKS = {
    "Timer": lambda: Timer("step()", globals={"step": network()}).blocked_autorange(min_run_time=0.5).median,
    "measure": lambda: effgpu.measure(network, seconds=0.5).median,
}


def main() -> None:
    """Print both comparisons."""
    torch.set_num_threads(1)  # as Timer does
    print(f"on {effgpu.describe().label}, one thread")
    ratios = []
    for turn in range(40):
        took = {}
        for name in ("Timer", "measure")[:: -1 if turn % 2 else 1]:
            took[name] = CLOCKS[name]()
        ratios.append(math.log(took["measure"] / took["Timer"]))
    middle, low, high = (math.exp(end) for end in rank_interval(ratios))
    print(f"measure / torch.utils.benchmark.Timer: {middle:.4f} [{low:.4f}, {high:.4f}], 40 pairs in turns")
    measured = effgpu.measure(busy, seconds=4).median
    print(f"a step of 10 ms is measured as {measured * 1000:.4f} ms: {measured / 0.010 - 1:.3%} more")


if __name__ == "__main__":
    main()
