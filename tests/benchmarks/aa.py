"""How exact a comparison is and how long it takes; how often it finds a difference where there is none, or misses one.

Usage: python tests/benchmarks/aa.py [PART ...] [--comparisons N] [--slower N]

The parts, all of them by default:
  coverage    simulated: how often the interval holds the truth, how wide it is, and how many blocks it takes
  intervals   for steps of 1.3, 16 and 100 ms, the interval's half width and the seconds of a comparison in all
  loaded      the same for 16 ms, beside a process that uses one core all the time
  quiet       A/A comparisons: how many verdicts of faster and slower
  bursts      the same, beside a process that loads one core in bursts
  slower      how often a step that is 3 % slower is found, on a quiet machine
  hidden      the same, beside the bursts

On one thread: two threads that wait for each other at every layer, with one core for both, measure the scheduler.
"""

import argparse
import contextlib
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from statistics import median

import torch

import effgpu
from effgpu.comparison import Comparison
from effgpu.measuring.intervals import interval_of_blocks
from effgpu.measuring.timing import time_for
from effgpu.measuring.turns import take_blocks
from effgpu.units import format_seconds

STEPS = {1.3: 2.5, 16: 2.5, 100: 2.5}  # milliseconds of a step, and the most seconds per variant
PARTS = 100  # of a step, so that one that is 3 % slower has 103
LAYERS = 8  # that the parts take in turn: two steps with one matrix differed by up to 1 %, by where it lies in memory
PRECISION = 0.01  # the half width that the comparisons below aim at
FALSE, FOUND, COVERED = 1 / 200, 99 / 100, 0.985  # false verdicts at most, slower steps found and coverage at least
BURSTS = """
import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + random.uniform(0.02, 0.3)
    while time.perf_counter() < end:
        pass
    time.sleep(random.uniform(0.02, 0.3))
"""
LOAD = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(100_000):
        pass
"""


def training(width: int, parts: int):
    """A variant whose step has so many equal parts, each a forward and a backward pass of a layer."""

    def variant():
        torch.manual_seed(0)
        device = effgpu.find_device()
        layers = [torch.nn.Linear(width, width).to(device) for _ in range(LAYERS)]
        x = torch.randn(32 if device.type == "cpu" else 2048, width, device=device)

        def step():
            for part in range(parts):
                layers[part % LAYERS](x).sum().backward()

        return step

    return variant


def step_of(milliseconds: float):
    """A variant whose step takes about so long, in parts of a tenth of a millisecond or so."""
    part = min(time_for(training(128, 1)(), 0.2))
    return training(128, max(1, round(milliseconds / 1000 / part)))


def width_of_a_part(milliseconds: float) -> int:
    """The width at which a step of all parts takes about so long."""
    for width in range(32, 2048, 32):
        if min(time_for(training(width, 1)(), 0.05)) * PARTS * 1000 >= milliseconds:
            return width
    return 2048


@contextlib.contextmanager
def load(code: str | None) -> Iterator[None]:
    """Beside what is inside, another process that runs this code; none with None."""
    other = subprocess.Popen([sys.executable, "-c", code]) if code else None
    try:
        yield
    finally:
        if other:
            other.kill()
            other.wait()


def half_width(result: Comparison) -> float:
    """The half width of the interval of B's ratio, as a share."""
    ratio = result.time_ratio("B")
    return math.sqrt(ratio.high / ratio.low) - 1


def show_intervals(steps: dict[float, float]) -> None:
    """Print half widths and seconds, the median of five comparisons each."""
    for milliseconds, seconds in steps.items():
        variant, widths, taken = step_of(milliseconds), [], []
        for _ in range(5):
            start = time.perf_counter()
            result = effgpu.compare({"A": variant, "B": variant}, seconds=seconds, precision=PRECISION, energy=False)
            taken.append(time.perf_counter() - start)
            widths.append(half_width(result))
        blocks = len(result["A"].turns)
        told = f"{format_seconds(result['A'].median)} per step, seconds={seconds}: ±{median(widths):.2%}"
        print(f"{told} (at worst ±{max(widths):.2%}) in {median(taken):.1f} s, {blocks} blocks", flush=True)


def show_verdicts(title: str, results: list[Comparison], seconds: float, limit: str) -> None:
    """Print how often each verdict came out, and the widths of the intervals."""
    verdicts = Counter(result.verdict("B") for result in results)
    width = median(map(half_width, results))
    print(f"{title}: {dict(verdicts)} of {len(results)}, wanted: {limit}; median ±{width:.2%}, {seconds:.1f} s each")


def run(count: int, slower: bool, bursts: bool) -> tuple[list[Comparison], float]:
    """So many comparisons of a step of about 16 ms with itself, or with one that is 3 % slower; the seconds of each."""
    width = width_of_a_part(16)
    variants = {"A": training(width, PARTS), "B": training(width, PARTS + 3 * slower)}
    options = {"seconds": 2.5, "precision": PRECISION, "energy": False}
    with load(BURSTS if bursts else None):
        start = time.perf_counter()
        results = [effgpu.compare(variants, **options) for _ in range(count)]
        return results, (time.perf_counter() - start) / count


class SimulatedBlocks:
    """Turns of A and B that take no time, and the log ratio of each block: noise around 0.

    Each ratio resembles the one before (ρ). An outlier is a block that was held up, by 10 to 40 %.
    """

    def __init__(self, generator: random.Random, spread: float, rho: float, outliers: float):
        self.generator, self.spread, self.rho, self.outliers = generator, spread, rho, outliers
        self.turns, self.logs, self.noise = 0, [], generator.gauss(0, spread)

    def take_turn(self, label: str) -> None:
        self.turns += 1
        if self.turns % 4 == 0:  # the block is over
            held_up = self.generator.choice([-1, 1]) * self.generator.uniform(0.1, 0.4)
            self.logs.append(self.noise + held_up * (self.generator.random() < self.outliers))
            self.noise *= self.rho
            self.noise += math.sqrt(1 - self.rho**2) * self.generator.gauss(0, self.spread)


def show_coverage(count: int, target: float = 0.03) -> None:
    """Print how often the interval of simulated blocks holds the truth, at the numbers of blocks that really occur."""
    for noise in [(0.03, 0.2, 0), (0.05, 0, 0), (0.05, 0.2, 0), (0.05, 0, 0.05), (0.05, 0.2, 0.05), (0.2, 0.2, 0)]:
        generator, covered, widths, counts = random.Random(str(noise)), 0, [], []
        for _ in range(count):
            blocks = SimulatedBlocks(generator, *noise)
            take_blocks(
                lambda: ["A", "B"], blocks.take_turn, lambda of=blocks: [of.logs], target=target, seconds=math.inf
            )
            _, low, high = interval_of_blocks(blocks.logs)
            covered += low <= 0 <= high
            widths.append(math.expm1((high - low) / 2))
            counts.append(len(blocks.logs))
        told = "spread {:.0%}, ρ {}, outliers {:.0%}".format(*noise)
        told += f": covers {covered / count:.4f}, wanted {COVERED}; ±{median(widths):.2%}, {median(counts):.0f} blocks"
        print(told, flush=True)


def main() -> None:
    """Run the parts that are asked for."""
    parts = ["coverage", "intervals", "loaded", "quiet", "bursts", "slower", "hidden"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--comparisons", type=int, default=200, help="of a step with itself, in each part")
    parser.add_argument("--slower", type=int, default=100, help="comparisons with a slower step, in each part")
    parser.add_argument("--simulated", type=int, default=2000, help="comparisons of each kind of simulated noise")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"expected parts out of {parts}, got {sorted(unknown)}")
    torch.set_num_threads(1)
    print(f"on {effgpu.describe().label}, one thread", flush=True)
    for part in args.parts or parts:
        if part == "coverage":
            show_coverage(args.simulated)
        elif part in ("intervals", "loaded"):
            with load(LOAD if part == "loaded" else None):
                show_intervals(STEPS if part == "intervals" else {16: STEPS[16]})
        elif part in ("quiet", "bursts"):
            limit = f"at most {FALSE * args.comparisons:g} faster or slower"
            show_verdicts(part, *run(args.comparisons, slower=False, bursts=part == "bursts"), limit)
        else:
            limit = f"at least {FOUND * args.slower:g} slower"
            show_verdicts(part, *run(args.slower, slower=True, bursts=part == "hidden"), limit)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
