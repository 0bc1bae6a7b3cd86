"""What the variants of a comparison are predicted to take on GPUs that are not there, at the size of real training."""

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Literal

from effgpu import units
from effgpu.measuring.variants import Variant, check_variants, is_function
from effgpu.predicting.gpus import Gpu, GpuLike, find_gpu, find_gpus
from effgpu.predicting.kinds import ATTENTION, CONVOLUTION, OPTIMIZER, PRODUCT
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import DOES_NOT_FIT, MAY_NOT_FIT, Prediction
from effgpu.predicting.time import Time, time_ratio
from effgpu.predicting.timeline import Range

GPUS = ("T4", "A100 80 GB")
REST = "everything else"  # than matrix products and the optimizer


@dataclass(frozen=True)
class FullSize:
    """What one variant is predicted to take on one GPU.

    `allocated` is the peak in bytes, `memory` that of the GPU, `verdict` whether the step fits. `total` is the least
    and the most that the whole process may take. `seconds` is the time of a step, and `parts` says what the GPU
    computes for how many seconds of it: "matrix products" (with convolutions and attention), "everything else",
    "optimizer"; in the rest it waits for the CPU. `ratio` is the time over the baseline's on the same GPU. Seconds and
    ratio are (expected, low, high): 9 of 10 published transformers lie between low and high. They are None for a GPU
    whose speed is not known. `unchecked` is the kind of network and the format of which no run was compared there.
    `untimed` is what is not known of the time: then the step takes at least so long, and there is no ratio.
    """

    gpu: str
    memory: int
    allocated: int
    verdict: Literal["fits", "does not fit", "may not fit"]
    total: tuple[int, int]
    bound: str = ""
    seconds: Range | None = None
    parts: dict[str, float] = field(default_factory=dict)
    ratio: Range | None = None
    unchecked: str = ""
    untimed: str = ""

    def tell_time(self, *, brief: bool = False) -> str:
        """In words: "5.40 × faster [4.30, 6.80]", or the seconds of a baseline; and that the step does not fit.

        Brief, as for a plot, a range that crosses 1 is told as "perhaps 1.77 × faster".
        """
        if self.seconds is None:
            text = units.NOT_MEASURED
        elif self.untimed:
            text = f"at least {units.format_seconds(self.seconds[1])}"
        elif self.ratio is None:
            text = units.format_seconds(self.seconds[0])
        elif brief and self.ratio[1] < 1 < self.ratio[2]:
            text = f"{'' if units.is_same(self.ratio[0]) else 'perhaps '}{tell_range(self.ratio, brackets=False)}"
        else:
            text = tell_range(self.ratio)
        return f"{text}, {DOES_NOT_FIT}" if self.verdict == DOES_NOT_FIT else text

    def tell_memory(self) -> str:
        """In words: "9.35 GiB"; and that the step may not fit."""
        text = units.format_bytes(self.allocated)
        return f"{text}, {self.verdict}" if self.verdict == MAY_NOT_FIT else text


def tell_range(ratio: Range, *, brackets: bool = True) -> str:
    """A predicted ratio of times in words, with its range: "1.65 × faster [1.03 × slower, 2.09 × faster]".

    "about the same" and its range are of two steps that differ, "same" of two that run the same kernels.
    """
    value, low, high = ratio
    if low == high == 1:
        return "same"
    same = units.is_same(value)
    text = "about the same" if same else units.format_speed(value)
    return f"{text} {units.format_ends(low, high, slower=value > 1 and not same)}" if brackets else text


def predict_full_size(
    variants: Mapping[str, Variant], full_size: Mapping | None, gpus: GpuLike | Iterable[GpuLike]
) -> dict[str, tuple[FullSize, ...]]:
    """What each variant is predicted to take on each GPU, by label; the first variant is the baseline.

    `full_size` gives keywords for all variants, such as a batch and a width, or by label the variants at that size.
    Raises TypeError or ValueError for what is neither, for unknown labels or GPUs, and what `predict` raises.
    """
    gpus = find_gpus(gpus)
    if full_size is None:
        return {}
    return _predict(_enlarge(variants, full_size), next(iter(variants)), gpus)


def _enlarge(variants: Mapping[str, Variant], full_size: Mapping) -> dict[str, Variant]:
    if not isinstance(full_size, Mapping):
        raise TypeError(f"full_size: expected a mapping of keywords, or of labels to variants, got {full_size!r}")
    if full_size and not any(map(is_function, full_size.values())):
        return {label: partial(variant, **full_size) for label, variant in variants.items()}
    large = check_variants(full_size, "full_size")
    if unknown := [label for label in large if label not in variants]:
        raise ValueError(f"full_size: expected labels out of {list(variants)}, got {unknown[0]!r}")
    return large


def predict_here(variants: Mapping[str, Variant], name: str) -> dict[str, FullSize]:
    """What the variants are predicted to take on the GPU of this name, as they are; empty for one without a line."""
    try:
        gpu = find_gpu(name)
    except ValueError:
        return {}
    return {label: predicted for label, (predicted,) in _predict(variants, next(iter(variants)), (gpu,)).items()}


def _predict(variants: Mapping[str, Variant], baseline: str, gpus: tuple[Gpu, ...]) -> dict[str, tuple[FullSize, ...]]:
    predictions = {label: predict(variant, gpus) for label, variant in variants.items()}
    return {
        label: tuple(_sum_up(prediction, predictions.get(baseline), gpu) for gpu in gpus)
        for label, prediction in predictions.items()
    }


def _sum_up(prediction: Prediction, baseline: Prediction | None, gpu: Gpu) -> FullSize:
    memory = prediction.for_gpu(gpu)[0].allocated, prediction.verdict(gpu), astuple(prediction.total(gpu))
    if gpu.bandwidth is None:
        return FullSize(gpu.name, gpu.memory, *memory)
    time = prediction.time(gpu)
    is_baseline = baseline is None or baseline is prediction
    untimed = prediction.untimed(gpu)
    has_ratio = not (is_baseline or untimed or baseline.untimed(gpu))
    ratio = _against(time, baseline.time(gpu)) if has_ratio else None
    work = {kind: row.seconds for kind, row in time.table.items()}
    products = sum(work.get(kind, 0.0) for kind in (PRODUCT, CONVOLUTION, ATTENTION))
    update, total = work.get(OPTIMIZER, 0.0), sum(work.values())
    saved = max(0.0, total - time.expected) if time.compiled else 0.0  # by fusing what is no product
    parts = {PRODUCT: products, REST: max(0.0, total - products - update - saved), OPTIMIZER: update}
    seconds = time.expected, time.low, time.high
    return FullSize(gpu.name, gpu.memory, *memory, time.bound, seconds, parts, ratio, time.tell_unchecked(), untimed)


def _against(time: Time, baseline: Time) -> Range:
    the_same = all(getattr(time, what) == getattr(baseline, what) for what in ("sources", "between_waits", "compiled"))
    return (1.0, 1.0, 1.0) if the_same else time_ratio(time, baseline)
