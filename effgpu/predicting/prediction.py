"""Will a training step fit a GPU? Counted on fake tensors: no GPU, no memory, a few seconds.

The variant's step runs as it is, but no kernel does: PyTorch's FakeTensorMode knows each result's shape and dtype. A
dispatch mode adds up the storages. The tensors say that they are on the CPU, which works on every machine; where a GPU
keeps something else than a CPU, the rules in effgpu/fake_gpu.py answer as the GPU would.
"""

import html
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Literal

from effgpu.measuring.device import gc_frozen, random_states_kept
from effgpu.measuring.memory import trace
from effgpu.measuring.torch_internals import fake_tensor
from effgpu.measuring.variants import Step, Variant, check_worked, run_variant
from effgpu.predicting.allocator import count_reserved, find_peak
from effgpu.predicting.fake_gpu import Recorder, as_gpu, observed_by
from effgpu.units import GiB, MiB, align, check_positive, format_bytes, html_table, with_article

FITS, DOES_NOT_FIT, TOO_CLOSE = "fits", "does not fit", "too close to tell"
OWNERS = ("weights", "gradients", "optimizer state", "activations", "other")
STEPS = 2  # the first creates the optimizer's state, the second is like all that follow
_TRUST = "predicted, not measured: docs/predict.md says how far published runs differ"
# How much less, and more, a run may need than predicted: with workspaces, no case of docs/predict.md needs more.
LESS, MORE = 0.06, 0.08


@dataclass(frozen=True)
class Gpu:
    """A GPU's memory in bytes, its compute capability, and the range of bytes that a CUDA context takes on it.

    `memory` is what PyTorch's messages call the total capacity. Cards of one name differ by drivers and ECC by up to
    2 %: this is the least that public error reports show. A context's size depends on the driver, the CUDA version and
    the kernels that a step loads.
    """

    name: str
    memory: int
    capability: tuple[int, int]
    context: tuple[int, int]


def _gpu(name: str, memory: float, capability: tuple[int, int], context: tuple[int, int]) -> Gpu:
    return Gpu(name, int(memory * GiB), capability, (context[0] * MiB, context[1] * MiB))


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("T4", 14.56, (7, 5), (100, 450)),
        _gpu("L4", 21.95, (8, 9), (150, 600)),
        _gpu("RTX 3090", 23.57, (8, 6), (200, 600)),
        _gpu("RTX 4090", 23.51, (8, 9), (300, 700)),
        _gpu("RTX 5090", 31.34, (12, 0), (400, 900)),
        _gpu("V100", 15.77, (7, 0), (250, 700)),
        _gpu("A100 40 GB", 39.38, (8, 0), (350, 750)),
        _gpu("A100 80 GB", 79.14, (8, 0), (350, 750)),
        _gpu("H100", 79.09, (9, 0), (400, 900)),
        _gpu("H200", 139.70, (9, 0), (400, 900)),
    )
}
_UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT = (8, 0), (100 * MiB, 900 * MiB)


@dataclass(frozen=True)
class Range:
    """From `low` to `high` bytes."""

    low: int
    high: int

    def __str__(self) -> str:
        return (
            format_bytes(self.low) if self.low == self.high else f"{format_bytes(self.low)} – {format_bytes(self.high)}"
        )


@dataclass(frozen=True, repr=False)
class Prediction:
    """What a step is predicted to need, in bytes. Shows itself as a table; `verdict` answers for one GPU.

    `allocated` is the peak of allocated memory and `owners` divides it. `reserved` is what PyTorch's caching allocator
    would hold for it. `workspaces` is what cuBLAS and cuDNN take beside it. `gpus` are the GPUs of the table.
    `assumptions` says what was taken for granted, such as the values that the step read. `unknown` says what could not
    be predicted; where it is not empty, no verdict is "fits". `resting` is the part of the peak that stays from step to
    step: weights, gradients, optimizer state. `holds_from` is the lowest compute capability that the prediction is for.
    `measured` divides the peak that was measured on this device in the same way, if that was asked for.
    """

    allocated: int
    owners: Mapping[str, int]
    reserved: int
    workspaces: Range
    gpus: tuple[Gpu, ...]
    assumptions: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    resting: int = 0
    holds_from: tuple[int, int] = (0, 0)
    measured: Mapping[str, int] | None = None

    def total(self, gpu: "str | float | Gpu | None" = None) -> Range:
        """All bytes that the process takes on the GPU: the step, workspaces and CUDA's context.

        `gpu` is as in `predict`, with sizes in bytes; None is the first of `gpus`.
        """
        gpu = self.gpus[0] if gpu is None else find_gpu(gpu)
        certain = self.allocated if self._is_known(gpu) else self.resting
        low = int(certain * (1 - LESS)) + self.workspaces.low + gpu.context[0]
        high = int(max(self.reserved, self.allocated) * (1 + MORE)) + self.workspaces.high + gpu.context[1]
        return Range(low, high)

    def verdict(self, gpu: "str | float | Gpu | None" = None) -> str:
        """Return "fits", "does not fit" or "too close to tell". "fits" means that the high end of `total` fits.

        `gpu` is as in `predict`, with sizes in bytes; None is the first of `gpus`, not all of them.
        """
        gpu = self.gpus[0] if gpu is None else find_gpu(gpu)
        total = self.total(gpu)
        if total.low > gpu.memory:
            return DOES_NOT_FIT
        return FITS if self._is_known(gpu) and total.high <= gpu.memory else TOO_CLOSE

    def _is_known(self, gpu: Gpu) -> bool:
        return not self.unknown and gpu.capability >= self.holds_from

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and a row of strings for each GPU."""
        rows = [[gpu.name, format_bytes(gpu.memory), str(self.total(gpu)), self.verdict(gpu)] for gpu in self.gpus]
        return ["GPU", "memory", "needed", "verdict"], rows

    def _summary(self) -> list[tuple[str, str]]:
        measured = self.measured or {}

        def tell(size: int, found: int | None) -> str:
            return format_bytes(size) + (f" (measured here: {format_bytes(found)})" if measured else "")

        owners = [
            (f"  {name}", tell(size, measured.get(name, 0)))
            for name, size in self.owners.items()
            if size or measured.get(name)
        ]
        return [
            ("predicted peak, allocated", tell(self.allocated, sum(measured.values()))),
            *owners,
            ("predicted reserved", str(self.reserved_range)),
            ("workspaces of cuBLAS and cuDNN", str(self.workspaces)),
        ]

    @property
    def reserved_range(self) -> Range:
        """From the allocated peak to what the allocator holds if it never has to give anything back."""
        return Range(self.allocated, max(self.allocated, self.reserved))

    def _notes(self) -> list[str]:
        older = [gpu.name for gpu in self.gpus if gpu.capability < self.holds_from]
        another = f"the step takes other kernels or formats on {' and '.join(older)}: ask for that GPU by name"
        return [f"not known: {why}" for why in (*self.unknown, *[another] * bool(older))] + [
            f"assumed: {what}" for what in self.assumptions
        ]

    def __repr__(self) -> str:
        headings, rows = self.table()
        return "\n".join([*align(self._summary()), "", *align([headings, *rows]), "", *self._notes(), _TRUST])

    def _repr_html_(self) -> str:
        summary = html_table([], [(name.replace("  ", "– ", 1), value) for name, value in self._summary()])
        notes = "".join(f"<br>{html.escape(note)}" for note in self._notes())
        verdicts = html_table(*self.table())
        return f"<table>{summary}</table><table>{verdicts}</table><small>{_TRUST}{notes}</small>"


def predict(
    variant: Variant,
    gpu: "str | float | Gpu | None" = None,
    *,
    steps: int = STEPS,
    rules: Literal["gpu", "cpu"] = "gpu",
    measured: bool = False,
) -> Prediction:
    """Predict the memory that a variant's training step needs on a GPU, and whether a GPU has it.

    `variant` is what `compare` takes. `gpu` is a name ("T4", "A100 80 GB"), a size ("16 GiB"; bytes) or None for all
    known GPUs. `steps` steps are counted after building. They run on fake tensors, without values. Everything that the
    variant builds or uses counts as on the GPU. `rules="cpu"` predicts what `trace` records on a CPU, where kernels
    keep other things (not what oneDNN's convolutions copy): with it, any machine can check the counting. `measured`
    also runs the variant on this device and says who owned its peak, which takes the memory and the time that the
    prediction saves.

    Raises ValueError for an unknown GPU. Raises RuntimeError, with the reason, for a step that cannot run without
    values: a result's shape depends on them, or an operation is not known to fake tensors.
    """
    check_positive(Integral, steps=steps)
    gpus = tuple(GPUS.values()) if gpu is None else (find_gpu(gpu),)
    capability = _UNKNOWN_CAPABILITY if gpu is None else gpus[0].capability
    if rules not in ("gpu", "cpu"):
        raise ValueError(f'rules: expected "gpu" or "cpu", got {rules!r}')
    recorder = Recorder(capability if rules == "gpu" else None)
    try:
        with gc_frozen(), random_states_kept(), as_gpu(recorder):
            run_variant(variant, partial(_run, recorder=recorder, steps=steps))
    except Exception as error:
        if why := _explain(error):
            raise RuntimeError(f"predict: {why}") from error
        raise
    if recorder.cudnn_attends and (those := [gpu.name for gpu in gpus if gpu.capability[0] in (9, 10)]):
        # sdp_utils.cpp, check_prefer_cudnn_attention; what cuDNN's kernel takes beside its results is not known
        recorder.assumptions[f"on {' and '.join(those)}, cuDNN's attention takes no more than PyTorch's own"] = None
    if recorder.holds_from > (0, 0) and gpu is not None and gpus[0].context == _UNKNOWN_CONTEXT:  # given as a size
        least = ".".join(map(str, recorder.holds_from))
        told = f"a GPU of compute capability {least} or higher: an older one takes other kernels or formats"
        recorder.assumptions[told] = None
    peak, owners, resting = _divide(recorder)
    return Prediction(
        peak,
        owners,
        count_reserved(recorder.blocks),
        Range(*recorder.workspaces()),
        gpus,
        tuple(recorder.assumptions),
        tuple(recorder.unknown),
        resting,
        recorder.holds_from,
        _measure_owners(variant, steps) if measured else None,
    )


def _divide(recorder: Recorder) -> tuple[int, dict[str, int], int]:
    """The recorded peak, its bytes by owner, and how much of it stays from step to step."""
    peak, at = find_peak(recorder.blocks, recorder.first)
    owners = dict.fromkeys(OWNERS, 0)
    for block in recorder.blocks:
        if block.born <= at < block.died:
            owners[block.owner] += block.size
    return peak, owners, sum(owners[name] for name in OWNERS[:3])


def _measure_owners(variant: Variant, steps: int) -> dict[str, int]:
    """The measured peak by owner. The recorder sees results of operations; what kernels take inside is "other"."""
    recorder = Recorder(None, real=True)
    with gc_frozen(), random_states_kept(), observed_by(recorder):
        run_variant(variant, partial(_run, recorder=recorder, steps=steps))
    seen, owners, _ = _divide(recorder)
    return owners | {"other": owners["other"] + max(0, trace(variant).peak - seen)}


@dataclass(frozen=True, repr=False)
class Largest:
    """The largest size whose step fits `gpu`, and the largest that may: between them it is too close to tell.

    0 means that no size does. `tried` holds the prediction for each size that was looked at.
    """

    gpu: Gpu
    fits: int
    may_fit: int
    tried: Mapping[int, Prediction]

    def __repr__(self) -> str:
        if not self.may_fit:
            return f"nothing fits {with_article(self.gpu.name)}"
        size = self.fits if self.fits else "no size surely"
        sure = f"{size} fits {with_article(self.gpu.name)}"
        return sure + (f", up to {self.may_fit} may" if self.may_fit > self.fits else "") + " (predicted)"


def largest(variant_of: Callable[[int], Variant], gpu: "str | float | Gpu", *, most: int = 65536) -> Largest:
    """The largest batch, or length, that fits a GPU: `largest(lambda batch: partial(training, batch), "T4")`.

    `variant_of` returns the variant for a size. Sizes from 1 to `most` are tried by bisection, guided by the sizes seen
    so far. Raises what `predict` raises.
    """
    check_positive(Integral, most=most)
    gpu, tried = find_gpu(gpu), {}

    def surplus(size: int, end: str) -> int:
        if size not in tried:
            tried[size] = predict(variant_of(size), gpu)
        if end == "high" and tried[size].unknown:
            return 1
        return getattr(tried[size].total(gpu), end) - gpu.memory

    with gc_frozen():
        fits = _bisect(partial(surplus, end="high"), most)
        may_fit = _bisect(partial(surplus, end="low"), most, tuple(tried))
    return Largest(gpu, fits, may_fit, dict(sorted(tried.items())))


def find_gpu(gpu: "str | float | Gpu") -> Gpu:
    """The GPU of a name or a size: "T4", "a100-80", "16 GiB", 16 * GiB. Raises ValueError for any other."""
    if isinstance(gpu, Gpu):
        return gpu
    if isinstance(gpu, Real):
        check_positive(gpu=gpu)
        return Gpu(format_bytes(gpu), int(gpu), _UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT)
    if isinstance(gpu, str):
        if size := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)\s*", gpu, re.IGNORECASE):
            unit = {"gib": GiB, "gb": 10**9, "mib": MiB, "mb": 10**6}[size[2].lower()]
            memory = float(size[1]) * unit
            check_positive(gpu=memory)
            return Gpu(gpu.strip(), int(memory), _UNKNOWN_CAPABILITY, _UNKNOWN_CONTEXT)
        wanted = _simplify(gpu)
        for known in GPUS.values():
            name = _simplify(known.name)
            if wanted == name or (wanted.startswith(name) and _is_of_size(known, wanted.removeprefix(name))):
                return known
    raise ValueError(f'gpu: expected one of {", ".join(GPUS)} or a size as "16 GiB", got {gpu!r}')


def _is_of_size(gpu: Gpu, size: str) -> bool:
    """Whether a GPU is sold with so many GB. What PyTorch calls its capacity is up to a tenth less."""
    return size.isdecimal() and 0.9 * int(size) <= gpu.memory / GiB <= int(size)


def _simplify(name: str) -> str:
    return re.sub(r"(?<=\d)\s*gb|nvidia|geforce|tesla|rtx|sxm\d?|pcie|hbm\d?|[^a-z0-9]", "", name.lower())


def _run(step: Step, recorder: Recorder, steps: int) -> None:
    recorder.start()
    for _ in range(steps):
        check_worked(step())
        recorder.name_owners()


def _bisect(surplus: Callable[[int], int], most: int, seen: Iterable[int] = ()) -> int:
    """The largest size from 0 to `most` whose surplus is not positive, by bisection from the sizes seen before.

    Memory grows with the size, nearly as a line: where two sizes are known, the next one is where the line says.
    """
    known = {size: surplus(size) for size in seen}
    low = max((size for size, more in known.items() if more <= 0), default=0)
    high = min((size for size, more in known.items() if more > 0), default=most + 1)
    turn = 0
    while high - low > 1:
        below, above = known.get(low), known.get(high)
        earlier = max((size for size in known if size < low), default=None)
        if below is not None and above is not None and turn % 3 < 2:
            size = low + int((high - low) * -below / (above - below))
        elif above is None and earlier is not None and known[low] > known[earlier]:
            size = low + 1 + int(-below * (low - earlier) / (below - known[earlier]))
        else:
            size = (low + high) // 2 if above is not None else 8 * low or 1
        size = min(max(size, low + 1), high - 1)
        known[size] = surplus(size)
        low, high, turn = (size, high, turn + 1) if known[size] <= 0 else (low, size, turn + 1)
    return low


def _explain(error: BaseException) -> str | None:
    """What an error of fake tensors means for the step; None for any other error."""
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return f"the shape of a result depends on values, by {error.func}: such a step cannot be predicted"
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return f"the step reads values, by {error.func}: such a step cannot be predicted"
    unsupported = fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException
    if isinstance(error, unsupported) or (isinstance(error, NotImplementedError) and "fake" in str(error).lower()):
        return f"an operation has no fake implementation, so its result is unknown: {error}"
    if "Found no NVIDIA driver" in str(error) or "Torch not compiled with CUDA" in str(error):
        return "the step calls torch.cuda itself, and there is no GPU here: leave such calls out where there is none"
    return None
