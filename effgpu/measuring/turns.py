"""The scheduler of `compare` and of `bench`: who has its turn when, how long one is, and how many blocks it takes."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from effgpu.measuring.intervals import BUILDS, CONFIDENCE, FEWEST_BLOCKS, MOST_BLOCKS, count_blocks

_NO_LONG_WAIT = 10.0  # seconds of each one that 15 blocks may take, whatever was asked for


class Length(NamedTuple):
    """Seconds, by the kind of device: what a turn takes at least, and what of its start does not count.

    A GPU's clock needs that long to settle, and begins as it was in the turn before.
    """

    shortest: dict[str, float]
    lead: dict[str, float]


OF_VARIANTS = Length({"cpu": 0.005, "cuda": 0.05}, {"cpu": 0.0, "cuda": 0.025})  # all in this process
OF_SCRIPTS = Length({"cpu": 0.05, "cuda": 0.1}, {"cpu": 0.0, "cuda": 0.05})  # whose loops wait for each other's turns
Turn = Callable[[str], object]  # take a turn of the one with this label
Alive = Callable[[], list[str]]  # the labels of those that can still take turns
Say = Callable[[int, int, float | None], object]  # turns done, turns in all, and the seconds left where they are known


def take_blocks(
    alive: Alive,
    take_turn: Turn,
    ratios: Callable[[], list[list[float]]],
    *,
    target: float,
    seconds: float,
    blocks: int | None = None,
    capped: bool = False,
    fewest: int = FEWEST_BLOCKS,
    confidence: float = CONFIDENCE,
    say: Say = lambda done, total, left: None,
) -> None:
    """Take turns in blocks: each one has a turn in a random order, and another in the reverse order.

    So drift cancels within a block, and no one always comes after the same other. One block is one observation.
    `ratios` gives, for each comparison, the logarithms of the blocks' ratios so far. The first 15 blocks tell how many
    are needed for intervals of ±`target`, a share, with this `confidence`. There are at most 80, and no more than take
    `seconds` of each one's time. Where 15 would take much more than that, there are `fewest` (`choose_blocks`).
    `blocks` sets their number. `capped` takes no more than fit into `seconds`, even if they are too few for an
    interval. `say` gets, before each turn, how far it is.
    """
    fewest = 1 if capped else fewest
    wanted, done, began = blocks or fewest, 0, time.perf_counter()
    while done < wanted and (order := alive()):
        turns = 2 * len(order)
        for number, label in enumerate(_draw(order)):
            each = (time.perf_counter() - began) / (turns * done + number) if done + number else None
            left = each and each * (turns * (wanted - done) - number)
            say(turns * done + number, turns * wanted, left)
            take_turn(label)
        done += 1
        if blocks or done not in (fewest, FEWEST_BLOCKS) or not (order := alive()):
            continue
        fit = seconds * done * len(order) / max(time.perf_counter() - began, 1e-9)  # blocks within each one's seconds
        if capped:
            wanted = int(max(fewest, min(FEWEST_BLOCKS, fit)))
        elif done < FEWEST_BLOCKS:
            wanted = choose_blocks(fit, seconds, fewest)
        else:
            needed = max((count_blocks(logs, target, confidence) for logs in ratios()), default=done)
            wanted = int(max(done, min(needed, MOST_BLOCKS, fit)))


def log_ratios(turns: Iterable[Sequence[float]]) -> list[list[float]]:
    """The logarithms of each block's ratio of every one to the first, of the seconds of their turns; of one alone, its.

    A block has two turns of each.
    """
    first, *others = [[math.log(max(a + b, 1e-9)) for a, b in zip(each[::2], each[1::2])] for each in turns]
    return [[ours - theirs for ours, theirs in zip(other, first)] for other in others] or [first]


def choose_blocks(fit: float, seconds: float, fewest: int) -> int:
    """How many blocks come first where so many fit into `seconds`.

    They are the `fewest` where 15 would take more than one and a half times as long, and more than 10 s of each one.
    """
    return FEWEST_BLOCKS if seconds * FEWEST_BLOCKS <= fit * max(1.5 * seconds, _NO_LONG_WAIT) else fewest


def orders(those: list, blocks: int) -> Iterator[list]:
    """Who has its turn when, in so many blocks, each a list of those: for a plan, which takes the turns itself."""
    return (_draw(those) for _ in range(blocks))


def _draw(those: list) -> list:
    drawn = list(those)
    random.SystemRandom().shuffle(drawn)  # leaves the reader's own generator alone
    return [*drawn, *reversed(drawn)]


def take_builds(alive: Alive, take_turn: Turn, say: Say = lambda done, total, left: None) -> None:
    """Let each one be built and take its turn in four rounds, in a random order: for those that cannot live together.

    One build is one observation, as two builds of the same may differ more than two turns.
    """
    done, began = 0, time.perf_counter()
    for number in range(BUILDS):
        order: Sequence[str] = alive()
        random.SystemRandom().shuffle(order)
        for place, label in enumerate(order):
            each = (time.perf_counter() - began) / done if done else None
            rest = len(order) * (BUILDS - number) - place
            say(done, done + rest, each and each * rest)
            take_turn(label)
            done += 1
