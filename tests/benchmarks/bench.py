"""How often `effgpu bench` finds a difference where there is none, or misses one, and what `tick` costs.

Usage: python tests/benchmarks/bench.py [PART ...] [--itself N] [--slower N] [--seconds S]

The parts, all of them by default:
  itself   a training script against itself: how many verdicts of faster and slower
  slower   the script against one whose step is 5 % longer: how often it is found, and the seconds of a run
  tick     nanoseconds of a call outside of a bench, and microseconds inside a turn, in a step of about 10 ms

On one thread. The script trains a linear layer in plain PyTorch, 100 parts a step, or 105.
"""

import argparse
import math
import os
import sys
import tempfile
import time
import timeit
from collections import Counter
from pathlib import Path
from statistics import median

import effgpu
from effgpu.units import format_seconds

SCRIPT = """
import statistics, sys, time
import effgpu, torch

torch.manual_seed(0)
torch.set_num_threads(1)
device, width = ("cuda", 1024) if torch.cuda.is_available() else ("cpu", 128)
model, x = torch.nn.Linear(width, width, device=device), torch.randn(96, width, device=device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
ticks = []
while True:
    for _ in range(int(sys.argv[1])):
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.perf_counter()  # after a step even the clock's own code is no longer in the caches
    began = time.perf_counter()
    effgpu.tick(items=96, loss=loss)
    ticks.append(time.perf_counter() - began)
    if len(ticks) % 50 == 0:
        with_loss = ticks[9::10]  # those that keep the loss; medians, because some ticks begin or end a turn
        without = [seconds for number, seconds in enumerate(ticks[50:], 1) if number % 10]
        print(without and 0.1 * statistics.median(with_loss) + 0.9 * statistics.median(without), flush=True)
"""
WANTED = {"itself": "2% faster or slower, at most", "slower": "90% slower, at least"}


def run(parts: int, seconds: float):
    """Compare the script of 100 parts with one of so many: the result, and what A printed last."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        commands = {label: [sys.executable, str(script), str(n)] for label, n in {"A": 100, "B": parts}.items()}
        result = effgpu.bench(commands, seconds=seconds, logs=folder)
        return result, Path(result.logs["A"]).read_text().split()[-1]


def show_verdicts(part: str, count: int, seconds: float) -> None:
    """Print each verdict as it comes, then how often each came out, the widths of the intervals and the seconds."""
    results, taken = [], []
    for number in range(count):
        began = time.perf_counter()
        result, _ = run(105 if part == "slower" else 100, seconds)
        results.append(result)
        taken.append(time.perf_counter() - began)
        blocks = len(result["A"].turns)
        print(f"{part} {number + 1}: {result.tell('B')}, {blocks} blocks, {taken[-1]:.1f} s", flush=True)
    width = median(math.sqrt(ratio.high / ratio.low) - 1 for each in results if (ratio := each.time_ratio("B")))
    told = f"{dict(Counter(result.verdict('B') for result in results))} of {count}, wanted: {WANTED[part]}"
    print(f"{part}: {told}; median ±{width:.2%}, {median(taken):.1f} s each", flush=True)


def show_tick(seconds: float) -> None:
    """Print what a call costs."""
    call = min(timeit.repeat("tick(items=1, loss=1.0)", number=100_000, globals={"tick": effgpu.tick})) / 100_000
    print(f"tick outside of a bench: {call * 1e9:.0f} ns, wanted: below 1000")
    result, printed = run(100, seconds)
    inside, step = float(printed), result["A"].median
    print(f"tick in a turn: {inside * 1e6:.1f} µs, {inside / step:.3%} of a step of {format_seconds(step)}")
    print(f"  of a step of 10 ms: {inside / 0.01:.3%}, wanted: at most 0.1%")


def main() -> None:
    """Run the parts that are asked for."""
    parts = ["itself", "slower", "tick"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--itself", type=int, default=50, help="runs of the script against itself")
    parser.add_argument("--slower", type=int, default=20, help="runs against a slower one")
    parser.add_argument("--seconds", type=float, default=5.0, help="per command")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"expected parts out of {parts}, got {sorted(unknown)}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"on {effgpu.describe().label}, one thread", flush=True)
    for part in args.parts or parts:
        if part == "tick":
            show_tick(args.seconds)
        else:
            show_verdicts(part, getattr(args, part), args.seconds)


if __name__ == "__main__":
    main()
