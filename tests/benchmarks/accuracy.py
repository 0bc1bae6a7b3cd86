"""Whether `measure` agrees with torch.utils.benchmark, and what measuring adds to a 10 ms step.

Usage: python tests/benchmarks/accuracy.py
"""

import statistics
import time

import torch
from torch.utils.benchmark import Timer

import effgpu


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


def main() -> None:
    """Print both comparisons."""
    print(f"on {effgpu.describe().label}, {torch.get_num_threads()} threads")
    ratios = []
    for _ in range(5):
        timer = Timer("step()", globals={"step": network()}, num_threads=torch.get_num_threads())
        theirs = timer.blocked_autorange(min_run_time=2).median
        ours = effgpu.measure(network, seconds=2).median
        ratios.append(ours / theirs)
        print(f"measure {effgpu.format_seconds(ours)}, Timer {effgpu.format_seconds(theirs)}: {ratios[-1]:.4f}")
    print(f"measure / torch.utils.benchmark.Timer: median {statistics.median(ratios):.4f}")
    measured = effgpu.measure(busy, seconds=4).median
    print(f"a step of 10 ms is measured as {measured * 1000:.4f} ms: {measured / 0.010 - 1:.3%} more")


if __name__ == "__main__":
    main()
