"""How often `effgpu bench --seeds` finds a difference of losses where there is none, and how often one that is there.

Usage: python tests/benchmarks/seeds.py [--trainings N] [--tables N]
       python tests/benchmarks/seeds.py train --seed S [--bf16] [--rate R]

The first trains a small network on the characters of docs/ with many seeds: as it is, and in bf16. Pairs have the same
seed, or two seeds, as of variants that draw other weights and batches. Tables are then drawn from these pairs of
losses, with their mean difference taken away, so that the truth is known, and with a known difference put in
its place. The second is one such training, to be benched.
"""

import argparse
import functools
import math
import random
import statistics
import sys
from pathlib import Path

import torch
from torch import nn

from effgpu.benching.losses import HIGHER, LOWER, at_the_end, count_seeds, find_change
from effgpu.verdicts import SAME

STEPS, BATCH, LENGTH, WIDTH = 300, 64, 8, 128
SEEDS, DIFFERENCES = (3, 5, 10, 20), (0.01, 0.02, 0.03, 0.05, 0.1)
FALSE = 1 / 100  # wanted at most
DOCS = Path(__file__).parents[2] / "docs"


@functools.cache
def read() -> torch.Tensor:
    """The characters of docs/, as numbers."""
    text = "".join(path.read_text() for path in sorted(DOCS.glob("*.md")))
    codes = {letter: code for code, letter in enumerate(sorted(set(text)))}
    return torch.tensor([codes[letter] for letter in text])


def train(seed: int, bf16: bool = False, rate: float = 2e-3) -> list[float]:
    """The losses of one training: the next character after eight others, by two layers (Bengio and others, 2003)."""
    torch.manual_seed(seed)
    codes, losses = read(), []
    letters = int(codes.max()) + 1
    embed = nn.Sequential(nn.Embedding(letters, 16), nn.Flatten())
    model = nn.Sequential(embed, nn.Linear(16 * LENGTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, letters))
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for _ in range(STEPS):
        batch = codes[torch.randint(len(codes) - LENGTH, (BATCH, 1)) + torch.arange(LENGTH + 1)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            predicted = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(predicted.float(), batch[:, -1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ends(seeds, **options) -> list[float]:
    """The loss at the end of the training with each seed."""
    found = []
    for seed in seeds:
        losses = train(seed, **options)
        found.append(at_the_end(dict(enumerate(losses, 1)), STEPS))
        print(f"\r\x1b[K{len(found)} of {len(seeds)}", end="", file=sys.stderr)
    print("\r\x1b[K", end="", file=sys.stderr)
    return found


def show_tables(name: str, ours: list[float], theirs: list[float], tables: int) -> None:
    """Print, for each number of seeds, how often a table is wrong, and how often it finds each difference."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs)]
    center, spread = statistics.fmean(logs), statistics.stdev(logs)
    print(f"{name}: pairs differ by {100 * center:+.2f} %, spread {100 * spread:.2f} %", flush=True)
    needed = ", ".join(f"{100 * difference:g} %: {count_seeds(spread, difference)}" for difference in DIFFERENCES)
    print(f"  seeds that the spread asks for, by difference: {needed}")
    generator = random.Random(name)
    for seeds in SEEDS:
        told = []
        for truth in (0.0, *DIFFERENCES):
            verdicts = []
            for _ in range(tables):
                drawn = generator.choices(logs, k=seeds)
                change = find_change([math.exp(log - center - truth) for log in drawn], [1.0] * seeds)
                verdicts.append(change.verdict)
            found = sum(verdict in ((LOWER, HIGHER) if truth == 0 else (LOWER,)) for verdict in verdicts) / tables
            what = f"wrong {found:.4f} (wanted {FALSE:g} at most)" if truth == 0 else f"{100 * truth:g} %: {found:.2f}"
            same = f", same {verdicts.count(SAME) / tables:.2f}" if truth == 0 else ""
            told.append(what + same)
        print(f"  {seeds} seeds: {', '.join(told)}", flush=True)


def main() -> None:
    """Run the script, or what it is the subject of."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["train"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--trainings", type=int, default=24)
    parser.add_argument("--tables", type=int, default=10_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what:
        print(train(args.seed, args.bf16, args.rate)[-1])
        return
    seeds = range(args.trainings)
    plain, half = ends(seeds), ends(seeds, bf16=True)
    print(
        f"loss at the end: {statistics.fmean(plain):.3f}, spread over seeds {statistics.stdev(plain):.3f}", flush=True
    )
    show_tables("bf16, the same seeds", half, plain, args.tables)
    show_tables("the same, other seeds", [*plain[1:], plain[0]], plain, args.tables)


if __name__ == "__main__":
    main()
