"""How far a predicted time may be off: standard deviations of what is not known, fitted so that 9 of 10 lie inside.

Every constant has its source beside it; `tests/benchmarks/ranges.py` fits those of sources and of ratios.
"""

import math
from collections import Counter

from effgpu.predicting.audited import CONVOLUTIONAL, OTHERS, TRANSFORMERS, audited_runs
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.kinds import ATTENTION, CONVOLUTION, COPY, NORM, OPTIMIZER, OTHER, PRODUCT
from effgpu.predicting.rates import counted_as

# Standard deviations of what is not known, as shares: fitted on calibration rows, so that 9 of 10 lie in the range.
# Of products on tensor cores, what sources of the GPU's rate differ by counts where it is more.
SPREAD = {PRODUCT: 0.08, ATTENTION: 0.15, CONVOLUTION: 0.22, "groups": 0.5}
SPREAD |= {NORM: 0.12, OPTIMIZER: 0.1, OTHER: 0.1, "launch": 0.3}
SPREAD[COPY] = 0.3  # an A100 copied 12 to 26 GB/s from pinned memory, 3.3 to 10 from ordinary
# What a source that was not seen is off by, beyond that, and what is added where no run of a kind and format was
# compared on a GPU: fitted on all published times (tests/benchmarks/ranges.py), with least widths for transformers and
# for what nothing checks.
SPREAD_OF_SOURCES = {TRANSFORMERS: 0.08, CONVOLUTIONAL: 0.19}
SPREAD_OF_SOURCES[OTHERS] = SPREAD_OF_SOURCES[TRANSFORMERS]
EXTRAPOLATED = 0.1
# The same for ratios of times, where the steps have less than 1 − DIFFER of the longer one's time in common, and the
# least where they have all. Fitted on published ratios; convolutional networks would ask for more: docs/predict.md.
SPREAD_OF_RATIOS = {TRANSFORMERS: 0.1, CONVOLUTIONAL: 0.14}
SPREAD_OF_RATIOS[OTHERS] = SPREAD_OF_RATIOS[TRANSFORMERS]
DIFFER, LEAST_OF_RATIOS = 0.25, 0.04
OF_LAYOUTS = 0.25  # of the variance of a kind and format: what its layouts do not share
NINE_OF_TEN = 1.645  # standard deviations of a normal distribution on each side
LAUNCH_RANGE = 0.4, 2.6  # times the usual launch cost: 6 to 40 µs for an operation


# seconds of a step by what they are uncertain for: the kind of operation, its format, its layout
Sources = dict[tuple[str, str, str], float]
Network = tuple[str, str]  # the kind of a network, and its format


def spread_of_time(sources: Sources, network: Network | None, gpu: Gpu) -> float:
    """The standard deviation of a step's time on a GPU, as a share of it."""
    apart = SPREAD_OF_SOURCES[network[0]] if network else EXTRAPOLATED
    unseen = EXTRAPOLATED if network and not audited_runs(gpu.name, *network) else 0.0
    return math.hypot(apart, unseen, *spreads_of_kinds(sources, gpu))


def spreads_of_kinds(sources: Sources, gpu: Gpu) -> list[float]:
    """What the kinds of operation add to the standard deviation of a step's time, as shares of it."""
    total = sum(sources.values()) or 1.0
    return [_spread(source, gpu) * seconds / total for source, seconds in _group(sources, 2).items()]


def spread_of_ratio(ours: Sources, theirs: Sources, network: Network | None, gpu: Gpu) -> float:
    """The standard deviation of the ratio of two steps' times on the same GPU, as a share of it.

    What is wrong in both cancels, the more so the more the steps have in common.
    """
    totals = [sum(sources.values()) for sources in (ours, theirs)]
    mine, others = (_group(sources, 2) for sources in (ours, theirs))
    differ = 1 - (mine & others).total() / max(totals)
    apart = SPREAD_OF_RATIOS[network[0] if network else TRANSFORMERS] * min(1.0, differ / DIFFER)
    differences = []
    for parts, part in ((2, 1 - OF_LAYOUTS), (3, OF_LAYOUTS)):
        mine, others = (_group(sources, parts) for sources in (ours, theirs))
        for source in mine | others:
            share = mine[source] / totals[0] - others[source] / totals[1]
            differences.append(_spread(source, gpu) * share * math.sqrt(part))
    return math.hypot(LEAST_OF_RATIOS, apart, *differences)


def widen(spread: float) -> float:
    """How many times as much as expected the high end of a range is, for such a standard deviation of the logarithm."""
    return math.exp(NINE_OF_TEN * spread)


def _group(sources: Sources, parts: int) -> Counter:
    """Seconds by the first parts of what they are uncertain for: the kind of operation, its format, its layout."""
    grouped = Counter()
    for source, seconds in sources.items():
        grouped[source[:parts]] += seconds
    return grouped


def _spread(source: tuple, gpu: Gpu) -> float:
    """The standard deviation of the seconds of a kind of operation in a format, as a share."""
    kind, format = source[:2]
    by_tensor_cores = kind == PRODUCT and counted_as(format, gpu) != "fp32"
    return max(SPREAD[kind], gpu.spread) if by_tensor_cores else SPREAD[kind]
