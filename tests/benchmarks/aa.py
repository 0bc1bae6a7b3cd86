"""How often an A/A comparison cries "different", and how often a step made 10 % slower is called slower.

Usage: python tests/benchmarks/aa.py [COMPARISONS] [--load] [--slower]

On one thread: two threads that wait for each other at every layer, with one core for both, measure the scheduler.
"""

import argparse
import subprocess
import sys
from collections import Counter

import torch

import effgpu

LOAD = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def variant(parts: int = 10):
    """A training step of so many equal parts, each a forward and a backward pass."""
    torch.manual_seed(0)
    device = effgpu.find_device()
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(2)]).to(device)
    x = torch.randn(32, 256, device=device)

    def step():
        for _ in range(parts):
            model(x).sum().backward()

    return step


def main() -> None:
    """Run the comparisons and print how often each verdict came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comparisons", type=int, nargs="?", default=200)
    parser.add_argument("--load", action="store_true", help="while another process keeps one core busy")
    parser.add_argument("--slower", action="store_true", help="the second variant has eleven parts for ten")
    parser.add_argument("--seconds", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    other = subprocess.Popen([sys.executable, "-c", LOAD]) if args.load else None
    try:
        variants = {"A": variant, "B": (lambda: variant(11)) if args.slower else variant}
        results = [effgpu.compare(variants, seconds=args.seconds) for _ in range(args.comparisons)]
    finally:
        if other:
            other.kill()
    print(dict(Counter(result.verdict("B") for result in results)), "on", results[0].device.label)
    ratios = torch.tensor([result.time_ratio("B").value for result in results])
    print("ratio of times, quantiles 0/5/50/95/100 %:", ratios.quantile(torch.tensor([0, 0.05, 0.5, 0.95, 1.0])))


if __name__ == "__main__":
    main()
