"""Verdicts: whether a ratio and its interval show that something is faster, slower or the same."""

import math
from dataclasses import dataclass

from effgpu import units
from effgpu.measuring.intervals import bounded, find_interval, one_sided

FASTER, SLOWER, SAME, INCONCLUSIVE = "faster", "slower", "same", "inconclusive"
MIN_EFFECT = 0.01  # a smaller effect does not matter
NOISY = 100  # percent: a wider interval tells nothing by its width


@dataclass(frozen=True)
class Ratio:
    """A variant's value over the baseline's, and its interval; below 1 the variant takes less.

    `within` is the smallest share within which two one-sided tests, each at the interval's confidence, call the two the
    same (Schuirmann, 1987). It is by default that of the interval's ends, which is a little wider.
    """

    value: float
    low: float
    high: float
    within: float | None = None

    @classmethod
    def from_logs(cls, logs: list[float], confidence: float, builds: int = 1) -> "Ratio | None":
        """The ratio of which blocks, or so many builds or seeds, have these logarithms; None for too few of them."""
        if (interval := find_interval(logs, builds, confidence)) is None:
            return None
        _, low, high = find_interval(logs, builds, one_sided(confidence))
        return cls(*(math.exp(bounded(log)) for log in interval), within=math.expm1(bounded(max(high, -low))))

    def to_dict(self) -> dict[str, float]:
        """The ratio and its interval, for programs."""
        return {"ratio": self.value, "low": self.low, "high": self.high}

    def verdict(self, min_effect: float = MIN_EFFECT) -> str:
        """Same if the effect is within `min_effect`; faster or slower if the interval excludes 1 and it is beyond."""
        within = max(self.high, 1 / self.low) - 1 if self.within is None else self.within
        if 1 + within <= 1 + min_effect:  # rounded alike
            return SAME
        if max(self.value, 1 / self.value) > 1 + min_effect:
            if self.high < 1:
                return FASTER
            if self.low > 1:
                return SLOWER
        return INCONCLUSIVE

    def tell(self, min_effect: float = MIN_EFFECT) -> str:
        """In words: "1.86 × faster [1.71, 2.01]", "same (within 1 %)" or "inconclusive (±12 %)"."""
        verdict = self.verdict(min_effect)
        if verdict == SAME:
            return f"{SAME} (within {100 * min_effect:g} %)"
        if verdict == INCONCLUSIVE:
            width = 100 * (math.sqrt(self.high / self.low) - 1)
            if width >= NOISY:
                return f"{INCONCLUSIVE} (too noisy, above ±{NOISY} %)"
            return f"{INCONCLUSIVE} (±{width:.{0 if width >= 10 else 1}f} %)"
        return units.format_speed(self.value, self.low, self.high)

    def __str__(self) -> str:
        return self.tell()
