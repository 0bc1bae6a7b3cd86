"""What a walk takes for granted, and what it does not know: each is a fact of one kind, which is told in words."""

from collections.abc import Iterable
from typing import NamedTuple

ASSUMED, CHOSEN = "assumed", "chosen"  # the latter in place of values that nobody knows: an error may come of it
UNKNOWN, UNTIMED = "unknown", "untimed"  # the latter: only how long it takes is not known
RARE = "rare"  # what other steps take beside what the one takes that is counted
ASSUMPTIONS, NOT_KNOWN = (ASSUMED, CHOSEN), (UNKNOWN, RARE, UNTIMED)


class Fact(NamedTuple):
    """One of these kinds, with what there is to say."""

    kind: str
    text: str

    def __str__(self) -> str:
        return "how long " * (self.kind == UNTIMED) + self.text


COMPILED = Fact(
    ASSUMED, "compiled code takes the memory that it takes without torch.compile, or a little more, or less"
)
GRAPHED = Fact(ASSUMED, "the CUDA graphs of torch.compile take the memory and the time of compiled code without them")
WORKERS_IDLE = Fact(ASSUMED, "a DataLoader's workers do not run: batches are loaded by the step itself")


def tell(facts: Iterable[Fact], *kinds: str) -> tuple[str, ...]:
    """Those of these kinds, in words."""
    return tuple(str(fact) for fact in facts if fact.kind in kinds)


def memory_is_known(facts: Iterable[Fact]) -> bool:
    """Whether nothing is unknown that the memory of the step depends on which is counted."""
    return all(fact.kind != UNKNOWN for fact in facts)


def others_take_more(facts: Iterable[Fact]) -> bool:
    """Whether other steps may take more memory and time, nobody knows how much."""
    return any(fact.kind == RARE for fact in facts)
