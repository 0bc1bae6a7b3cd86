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
from itertools import islice
from statistics import median

import torch

import effgpu
from effgpu.comparison import Comparison
from effgpu.measuring.intervals import (
    FEWEST_BLOCKS,
    count_blocks,
    count_fewest,
    divide_confidence,
    interval_of_blocks,
)
from effgpu.measuring.timing import time_for
from effgpu.units import format_seconds

OPTIONS = {"seconds": 2.5, "precision": 0.01, "energy": False}  # of every comparison
PARTS = 100  # of a step, so that one that is 3 % slower has 103
LAYERS = 8  # that the parts take in turn: two steps with one matrix differed by up to 1 %, by where it lies in memory
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
LOAD = BURSTS.replace("time.sleep", "")  # all the time


def training(width: int, parts: int):
    """A variant whose step has so many equal parts, each a forward and a backward pass of a layer."""

    def variant():
        torch.manual_seed(0)
        with effgpu.find_device() as device:
            layers = [torch.nn.Linear(width, width) for _ in range(LAYERS)]
            x = torch.randn(32 if device.type == "cpu" else 2048, width)

        def step():
            for part in range(parts):
                layers[part % LAYERS](x).sum().backward()

        return step

    return variant


def width_of_a_part(milliseconds: float) -> int:
    """The width at which a step of all parts takes about so long."""
    for width in range(32, 2048, 32):
        if min(time_for(training(width, 1)(), 0.05)) * PARTS * 1000 >= milliseconds:
            return width
    return 2048


@contextlib.contextmanager
def beside(code: str):
    """Inside, another process runs this code."""
    with subprocess.Popen([sys.executable, "-c", code]) as other:
        try:
            yield
        finally:
            other.kill()


def half_width(result: Comparison) -> float:
    """The half width of the interval of B's ratio, as a share."""
    ratio = result.time_ratio("B")
    return math.sqrt(ratio.high / ratio.low) - 1


def show_intervals(steps: list[float]) -> None:
    """Print half widths and seconds for steps of about so many milliseconds, the median of five comparisons each."""
    for milliseconds in steps:
        parts = max(1, round(milliseconds / 1000 / min(time_for(training(128, 1)(), 0.2))))
        variant, widths, taken = training(128, parts), [], []
        for _ in range(5):
            start = time.perf_counter()
            result = effgpu.compare({"A": variant, "B": variant}, **OPTIONS)
            taken.append(time.perf_counter() - start)
            widths.append(half_width(result))
        told = f"{format_seconds(result['A'].median)} per step, seconds={OPTIONS['seconds']}: ±{median(widths):.2%}"
        blocks = len(result["A"].turns)
        print(f"{told} (at worst ±{max(widths):.2%}) in {median(taken):.1f} s, {blocks} blocks", flush=True)


def show_verdicts(part: str, count: int, slower: bool) -> None:
    """Print the verdicts and widths for a step of about 16 ms beside itself, or beside one that is 3 % slower."""
    width = width_of_a_part(16)
    variants = {"A": training(width, PARTS), "B": training(width, PARTS + 3 * slower)}
    with beside(BURSTS if part in ("bursts", "hidden") else ""):
        start, results = time.perf_counter(), []
        for number in range(1, count + 1):
            results.append(result := effgpu.compare(variants, **OPTIONS))
            seconds = (time.perf_counter() - start) / number
            told = f"{format_seconds(result['A'].median)} per step, {len(result['A'].turns)} blocks"
            print(f"{part} {number}: {result.verdict('B')}, ±{half_width(result):.2%}, {told}", flush=True)
    verdicts = dict(Counter(result.verdict("B") for result in results))
    limit = f"at least {FOUND * count:g} slower" if slower else f"at most {FALSE * count:g} faster or slower"
    told = f"median ±{median(map(half_width, results)):.2%}, {seconds:.1f} s each"
    print(f"{part}: {verdicts} of {count}, wanted: {limit}; {told}", flush=True)


def simulate_ratios(generator: random.Random, spread: float, rho: float, outliers: float):
    """The log ratio of one block after the other: noise around 0, where each resembles the one before (ρ).

    An outlier is a block that was held up, by 10 to 40 %.
    """
    noise = generator.gauss(0, spread)
    while True:
        held_up = generator.choice([-1, 1]) * generator.uniform(0.1, 0.4)
        ratio = noise + held_up * (generator.random() < outliers)
        noise = rho * noise + math.sqrt(1 - rho**2) * generator.gauss(0, spread)
        yield ratio


def show_coverage(count: int, target: float = 0.03) -> None:
    """Print how often the interval of simulated blocks holds the truth, at the numbers of blocks that really occur."""
    for noise in [(0.03, 0.2, 0), (0.05, 0, 0), (0.05, 0.2, 0), (0.05, 0, 0.05), (0.05, 0.2, 0.05), (0.2, 0.2, 0)]:
        generator, covered, widths, counts = random.Random(str(noise)), 0, [], []
        for _ in range(count):
            ratios = simulate_ratios(generator, *noise)
            logs = list(islice(ratios, FEWEST_BLOCKS))
            logs += islice(ratios, count_blocks(logs, target) - FEWEST_BLOCKS)
            _, low, high = interval_of_blocks(logs)
            covered += low <= 0 <= high
            widths.append(math.expm1((high - low) / 2))
            counts.append(len(logs))
        told = "spread {:.0%}, ρ {}, outliers {:.0%}".format(*noise)
        told += f": covers {covered / count:.4f}, wanted {COVERED}; ±{median(widths):.2%}, {median(counts):.0f} blocks"
        print(told, flush=True)
    for blocks, comparisons in [
        (count_fewest(), 1),
        (FEWEST_BLOCKS, 9),
        (FEWEST_BLOCKS, 31),
    ]:  # long steps, many variants
        generator, confidence, missed = random.Random(blocks), divide_confidence(comparisons), 0
        for _ in range(count):
            logs = [list(islice(simulate_ratios(generator, 0.05, 0.2, 0), blocks)) for _ in range(comparisons)]
            ends = (interval_of_blocks(each, confidence)[1:] for each in logs)
            missed += any(low > 0 or high < 0 for low, high in ends)
        told = f"{blocks} blocks, ρ 0.2, {comparisons} comparisons: all hold in {1 - missed / count:.4f}"
        print(f"{told}, wanted {COVERED}", flush=True)


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
            with beside(LOAD if part == "loaded" else ""):
                show_intervals([1.3, 16, 100] if part == "intervals" else [16])
        elif part in ("quiet", "bursts"):
            show_verdicts(part, args.comparisons, slower=False)
        else:
            show_verdicts(part, args.slower, slower=True)


if __name__ == "__main__":
    main()
