"""How exact a comparison is and how long it takes; how often it finds a difference where there is none, or misses one.

Usage: python tests/benchmarks/aa.py [PART ...] [--comparisons N] [--slower N]

The parts, all of them by default:
  intervals   for steps of 1.3, 16 and 100 ms, the interval's half width and the seconds of a comparison in all
  quiet       A/A comparisons: how many verdicts of faster and slower
  bursts      the same, beside a process that loads one core in bursts
  simulated   the same, with simulated noise that leans on the block before (AR(1), 0.6) and no real clock
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
from effgpu.measuring.device import pick_sizes
from effgpu.measuring.measurement import Measurement
from effgpu.measuring.timing import time_fastest
from effgpu.units import format_seconds

STEPS = {1.3: 1.2, 16: 1.5, 100: 2.0}  # milliseconds of a step, and seconds per variant
PARTS = 100  # of a step, so that one that is 3 % slower has 103
RHO, SPREAD, BLOCKS = 0.6, 0.03, 60  # of the simulated noise
LIMITS = {"quiet": 1 / 200, "bursts": 2 / 200, "simulated": 4 / 200}  # verdicts of faster or slower, at most
FOUND = 0.95  # of the steps that are 3 % slower, at least
BURSTS = """
import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + random.uniform(0.02, 0.3)
    while time.perf_counter() < end:
        pass
    time.sleep(random.uniform(0.02, 0.3))
"""


def training(width: int, parts: int):
    """A variant whose step has so many equal parts, each a forward and a backward pass."""

    def variant():
        torch.manual_seed(0)
        device = effgpu.find_device()
        model = torch.nn.Linear(width, width).to(device)
        x = torch.randn(pick_sizes(cpu=32, small=2048, large=8192), width, device=device)

        def step():
            for _ in range(parts):
                model(x).sum().backward()

        return step

    return variant


def step_of(milliseconds: float):
    """A variant whose step takes about so long, in parts of a tenth of a millisecond or so."""
    part = time_fastest(training(128, 1)(), 0.2)
    return training(128, max(1, round(milliseconds / 1000 / part)))


def width_of_a_part(milliseconds: float) -> int:
    """The width at which a step of all parts takes about so long."""
    for width in range(32, 2048, 32):
        if time_fastest(training(width, 1)(), 0.05) * PARTS * 1000 >= milliseconds:
            return width
    return 2048


@contextlib.contextmanager
def load_in_bursts(wanted: bool) -> Iterator[None]:
    """Another process that keeps one core busy for a while, and then not, for a while."""
    other = subprocess.Popen([sys.executable, "-c", BURSTS]) if wanted else None
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


def show_intervals() -> None:
    """Print half widths and seconds, the median of five comparisons each."""
    for milliseconds, seconds in STEPS.items():
        variant, widths, taken = step_of(milliseconds), [], []
        for _ in range(5):
            start = time.perf_counter()
            result = effgpu.compare({"A": variant, "B": variant}, seconds=seconds, energy=False)
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
    with load_in_bursts(bursts):
        start = time.perf_counter()
        results = [effgpu.compare(variants, seconds=1.7, energy=False) for _ in range(count)]
        return results, (time.perf_counter() - start) / count


def simulate(count: int) -> list[Comparison]:
    """Comparisons of which each block's ratio leans on the one before, though both variants are the same."""
    generator, device = random.Random(0), effgpu.describe()

    def compare() -> Comparison:
        noise = generator.gauss(0, SPREAD)
        turns = []
        for _ in range(BLOCKS):
            turns.append((0.016 * math.exp(noise),) * 2)
            noise = RHO * noise + math.sqrt(1 - RHO**2) * generator.gauss(0, SPREAD)
        plain = Measurement("A", ((0.016, 0.016),) * BLOCKS, device)
        return Comparison("simulated", (plain, Measurement("B", tuple(turns), device)))

    return [compare() for _ in range(count)]


def main() -> None:
    """Run the parts that are asked for."""
    parts = ["intervals", "quiet", "bursts", "simulated", "slower", "hidden"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--comparisons", type=int, default=200, help="of a step with itself, in each part")
    parser.add_argument("--slower", type=int, default=100, help="comparisons with a slower step, in each part")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(parts):
        parser.error(f"expected parts out of {parts}, got {sorted(unknown)}")
    torch.set_num_threads(1)
    print(f"on {effgpu.describe().label}, one thread", flush=True)
    for part in args.parts or parts:
        if part == "intervals":
            show_intervals()
        elif part == "simulated":
            start = time.perf_counter()
            results = simulate(args.comparisons)
            limit = f"at most {LIMITS[part] * args.comparisons:g} faster or slower"
            show_verdicts(part, results, (time.perf_counter() - start) / args.comparisons, limit)
        elif part in LIMITS:
            limit = f"at most {LIMITS[part] * args.comparisons:g} faster or slower"
            show_verdicts(part, *run(args.comparisons, slower=False, bursts=part == "bursts"), limit)
        else:
            limit = f"at least {FOUND * args.slower:g} slower"
            show_verdicts(part, *run(args.slower, slower=True, bursts=part == "hidden"), limit)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
