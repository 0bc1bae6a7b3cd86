"""Comparison: variants against the first of them, with predictions, intervals and a verdict that the data bear out."""

import html
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from effgpu import units
from effgpu.measuring.device import CHANGING, Device, describe, find_device
from effgpu.measuring.intervals import BUILDS, CONFIDENCE, divide_confidence
from effgpu.measuring.measurement import Measurement, measure_all
from effgpu.measuring.variants import Step, Variant, check_variants, is_function
from effgpu.predicting.audited import list_unchecked
from effgpu.predicting.full_size import GPUS, FullSize, predict_full_size, predict_here
from effgpu.predicting.gpus import GpuLike, find_gpu
from effgpu.storing import read_fields
from effgpu.verdicts import INCONCLUSIVE, MIN_EFFECT, Ratio

BASELINE, BASELINE_FAILED = "baseline", "baseline failed"
CONTROL = "control (the baseline again)"
BESIDE_PREDICTION = 0.5  # seconds that a CPU times a variant that is predicted for a GPU
QUANTITIES = tuple(units.FORMATS)
MIME_TYPE = "application/vnd.effgpu.comparison+json"
_STEADY = 1.02  # of a clock: it may change by so much without a word
Column = tuple[str, Callable[[Measurement], str]]  # a heading, and what gives a variant's cell
Table = tuple[list[str], list[list[str]]]  # headings and rows


@dataclass(frozen=True, repr=False)
class Comparison:
    """Measurements that took turns; the first one is the baseline. Shows itself as a table.

    `predicted` holds ratios to the baseline, by label and then by "time", "memory" or "energy". An effect on time below
    `min_effect` counts as none. `full_size` holds, by label, what the same variants are predicted to take at the size
    of real training, for each of some GPUs; `here` what they are predicted to take on the GPU that measured them, as
    they were. `confidence` is that of each interval: what 99 % leave is divided among the variants, so that all
    verdicts of a table hold in 99 % of all tables. Results that were stored before this was so have 99 % in each.
    """

    name: str
    measurements: tuple[Measurement, ...]
    predicted: dict[str, dict[str, float]] = field(default_factory=dict)
    min_effect: float = MIN_EFFECT
    full_size: dict[str, tuple[FullSize, ...]] = field(default_factory=dict)
    here: dict[str, FullSize] = field(default_factory=dict)
    confidence: float = CONFIDENCE

    together = "all of them"  # whose intervals hold in 99 % of all tables

    @property
    def baseline(self) -> Measurement:
        """The variant that the others are compared with."""
        return self.measurements[0]

    @property
    def device(self) -> Device:
        """The device, with the versions, that all of it ran on."""
        return self.baseline.device

    @property
    def per_item(self) -> bool:
        """Whether times and energies are per item: where the variants' steps differ in items."""
        return len({m.items for m in self if not m.failed}) > 1

    @property
    def per(self) -> str:
        """What times and energies are per, in words."""
        return units.singular(self.baseline.unit) if self.per_item else "step"

    @property
    def memory_name(self) -> str:
        """The heading of the memory's column."""
        return "peak memory"

    def __getitem__(self, label: str) -> Measurement:
        for measurement in self.measurements:
            if measurement.label == label:
                return measurement
        raise KeyError(f"no variant {label!r} in {self.name!r}, only {[m.label for m in self.measurements]}")

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.measurements)

    def __len__(self) -> int:
        return len(self.measurements)

    def __contains__(self, label: str) -> bool:
        return any(measurement.label == label for measurement in self)

    def time_ratio(self, label: str) -> Ratio | None:
        """Time per item (per step without items) over the baseline's, block by block; None where either has none."""
        ours, theirs = self[label], self.baseline
        scale = (theirs.items or 1) / (ours.items or 1)
        logs = [math.log(a / b * scale) for a, b in zip(ours.times, theirs.times) if a > 0 < b]
        return Ratio.from_logs(logs, self.confidence, ours.builds)

    def ratio(self, label: str, quantity: str) -> float | None:
        """The ratio of "time", "memory" or "energy" to the baseline's; None where either was not measured.

        Time and energy are per item (per step without items), memory is the peak. The baseline itself has no ratio.
        """
        if quantity not in QUANTITIES:
            raise ValueError(f"quantity: expected one of {list(QUANTITIES)}, got {quantity!r}")
        ours, theirs = self[label], self.baseline
        if ours is theirs:
            return None
        if quantity == "time":
            return (ratio := self.time_ratio(label)) and ratio.value
        if quantity == "memory":
            ours, theirs = ours.peak_allocated, theirs.peak_allocated
            return ours / theirs if ours is not None and theirs else None
        scale = (theirs.items or 1) / (ours.items or 1)
        return ours.joules / theirs.joules * scale if ours.joules and theirs.joules else None

    def value(self, label: str, quantity: str) -> float | None:
        """What is shown: seconds or joules per step (per item where items differ), or bytes.

        The time of a variant is the baseline's times their ratio, so that a table never contradicts itself.
        """
        m, ratio = self[label], self.ratio(label, quantity)
        if quantity == "memory":
            return m.peak_allocated
        of = self.baseline if quantity == "time" and ratio else m
        own = of.median if quantity == "time" else of.joules
        own = own and own / (of.items or 1 if self.per_item else 1)
        return own and own * ratio if of is not m else own

    def verdict(self, label: str) -> str:
        """ "faster", "slower", "same" or "inconclusive"; "baseline"; or why there is none, as "out of memory"."""
        if self[label].failed or label == self.baseline.label:
            return self[label].failed or BASELINE
        if self.baseline.failed:
            return BASELINE_FAILED
        ratio = self.time_ratio(label)
        return ratio.verdict(self.min_effect) if ratio else INCONCLUSIVE

    def tell(self, label: str, quantity: str = "time", *, gpu: GpuLike | None = None) -> str:
        """A variant against the baseline, in words: "1.44 × slower [1.42, 1.47]" or, of memory and energy, "−52 %".

        With a GPU of `full_size`, what is predicted there: its time in the same words, or its memory, "9.35 GiB".
        Raises ValueError for another GPU, and for a quantity that is not predicted.
        """
        if gpu is not None:
            return self._tell_predicted(label, quantity, find_gpu(gpu).name)
        if quantity == "time":
            ratio = self.time_ratio(label) if label != self.baseline.label else None
            return ratio.tell(self.min_effect) if ratio else self.verdict(label)
        return self.tell_ratio(self.ratio(label, quantity), quantity)

    def _tell_predicted(self, label: str, quantity: str, gpu: str) -> str:
        predicted = {one.gpu: one for one in self.full_size.get(label, ())}
        if gpu not in predicted:
            raise ValueError(f"gpu: expected one that {label!r} is predicted for, {list(predicted)}, got {gpu!r}")
        told = {"time": predicted[gpu].tell_time, "memory": predicted[gpu].tell_memory}
        if quantity not in told:
            raise ValueError(f"quantity: expected one of {list(told)} for a GPU, got {quantity!r}")
        return told[quantity]()

    @staticmethod
    def tell_ratio(ratio: float | None, quantity: str) -> str:
        """A plain ratio, such as a prediction, in the same words: "1.33 × slower", "−54 %"."""
        return units.format_speed(ratio) if quantity == "time" else units.format_change(ratio)

    def tables(self) -> list[tuple[list[str], list[list[str]], str]]:
        """What is shown, as headings, rows of strings and a caption: what was measured, and what is predicted.

        Beside a prediction for full size, what a CPU measured of a small model is one sentence of the caption.
        """
        measured = [(*self.table(), self.caption())]
        if not self.full_size:
            return measured
        columns = [("predicted", lambda m: m.label), *self._full_size_columns()]
        lines = ["Predicted, at full size. Brackets hold about 9 of 10 published times (docs/predict.md)."]
        lines += [*self._tell_unchecked(), *self._tell_untimed()]
        if self.device.kind == "cuda":
            return [*measured, (*self._fill(columns), " ".join(lines))]
        return [(*self._fill(columns), " ".join([*lines, self._tell_small(), *self._tell_variables()]))]

    def table(self) -> Table:
        """Headings and a row of strings for each variant, of what was measured."""
        return self._fill(self._columns())

    def _fill(self, columns: Iterable[Column]) -> Table:
        filled = [(name, [cell(m) for m in self]) for name, cell in columns]
        filled = [(name, cells) for name, cells in filled if set(cells) != {units.NOT_MEASURED}]
        return [name for name, _ in filled], [list(row) for row in zip(*(cells for _, cells in filled))]

    def _columns(self, *others: Column) -> list[Column]:
        """The heading of each column of what was measured, and what gives its cell; others behind the speed."""

        def predicted(quantity: str) -> Column:
            ratio = lambda m: self.predicted.get(m.label, {}).get(quantity)
            return "predicted", lambda m: self.tell_ratio(ratio(m), quantity)

        def throughput(m: Measurement) -> str:
            seconds = self.value(m.label, "time")
            items = 1 if self.per_item else m.items
            return units.format_count(items / seconds if items and seconds else None, f"{m.unit}/s")

        return [
            ("measured" if self.full_size else "variant", lambda m: m.label),
            (f"time per {self.per}", lambda m: self._show(m, "time")),
            ("throughput", throughput),
            ("against the baseline", lambda m: self.tell(m.label)),
            *others,
            predicted("time"),
            (
                "predicted for this GPU",
                lambda m: self.here[m.label].tell_time() if m.label in self.here else units.NOT_MEASURED,
            ),
            (self.memory_name, lambda m: self._show(m, "memory")),
            predicted("memory"),
            (f"energy per {self.per}", lambda m: self._show(m, "energy")),
            predicted("energy"),
        ]

    def _show(self, m: Measurement, quantity: str) -> str:
        """A value with its unit; of memory and energy also the change against the baseline: "3.94 GiB (−34 %)"."""
        change = units.NOT_MEASURED if quantity == "time" else self.tell(m.label, quantity)
        shown = units.FORMATS[quantity](self.value(m.label, quantity))
        return shown + f" ({change})" * (change != units.NOT_MEASURED)

    def _full_size_columns(self) -> list[Column]:
        """A column of times for each GPU, and one of memory, for what is predicted at full size."""

        def at(m: Measurement, place: int, tell: Callable[[FullSize], str]) -> str:
            return tell(self.full_size[m.label][place]) if m.label in self.full_size else units.NOT_MEASURED

        columns = [
            (gpu, lambda m, place=place: at(m, place, FullSize.tell_time))
            for place, gpu in enumerate(self.full_size_gpus)
        ]
        heading = f"peak memory on {units.with_article(self.full_size_gpus[0])}"
        return [*columns, (heading, lambda m: at(m, 0, FullSize.tell_memory))]

    @property
    def full_size_gpus(self) -> list[str]:
        """The names of the GPUs that `full_size` is predicted for."""
        return [each.gpu for each in next(iter(self.full_size.values()), ())]

    def caption(self) -> str:
        """The device and the versions, how to read the table, how far off predictions were, and what disturbed."""
        shown = (name for name in ("torch", "cuda") if name in self.device.versions)
        versions = " ".join(f"{name} {self.device.versions[name]}" for name in shown)
        whose = "" if self.device.kind == "cuda" else "; a CPU's times, not a GPU's"
        lines = [f"{', '.join(filter(None, [self.device.label, versions]))}{whose}."]
        if len(self) > 1:
            lines.append("“2 × faster” takes half the time, “2 × slower” twice.")
            together = f", for {self.together} together" if self.confidence > CONFIDENCE else ""
            lines.append(f"Brackets: the {100 * CONFIDENCE:g} % interval{together}.")
            if CONTROL in self:
                lines.append("The control shows the noise of this machine.")
        if off := self._tell_how_far_off():
            lines.append(f"Against the prediction: {off}.")
        clocks = [m.sm_clock for m in self if m.sm_clock]
        reasons = ", ".join(sorted({reason for m in self for reason in m.throttled}))
        if clocks and (reasons or max(clocks) > _STEADY * min(clocks)):
            lines.append(
                f"SM clock {' to '.join(dict.fromkeys(map(str, (min(clocks), max(clocks)))))} MHz"
                + f", at times held down by {reasons}" * bool(reasons)
                + "."
            )
        lines += self._tell_variables()
        lines += filter(None, [self.how_timed()])
        return " ".join(lines)

    def _tell_small(self) -> str:
        """What a CPU measured, in one sentence: times alone, as their ratios would be taken for a GPU's."""
        times = "; ".join(f"{m.label} {m.failed or self._show(m, 'time')}" for m in self)
        return f"A small model on {self.device.label}, which tells nothing of a GPU's time: {times}."

    def _tell_variables(self) -> list[str]:
        variables = self.device.variables
        return [told.format(variables[name]) for name, told in CHANGING.items() if name in variables]

    def how_timed(self) -> str:
        """What is unusual about the turns, in one sentence; empty where nothing is."""
        if all(m.builds == 1 for m in self):
            return ""
        return f"The variants could not be kept together: each was built {BUILDS} times."

    def _tell_unchecked(self) -> list[str]:
        """On which GPUs no run stands beside the predicted times."""
        found = [(one.gpu, one.unchecked) for predicted in self.full_size.values() for one in predicted]
        missing = list_unchecked(found)
        return [f"Checked by no published time: {'; '.join(missing)}."] * bool(missing)

    def _tell_untimed(self) -> list[str]:
        """Of which variants a part of the time is not known."""
        reasons = {label: {one.untimed: None for one in gpus if one.untimed} for label, gpus in self.full_size.items()}
        return [f"Not known of {label}: {'; '.join(those)}." for label, those in reasons.items() if those]

    def _tell_how_far_off(self) -> str:
        """What was measured over what was predicted: +8 % is more than predicted."""
        lines = []
        for label, predicted in self.predicted.items():
            measured = {quantity: self.ratio(label, quantity) for quantity in predicted}
            off = [f"{q} {units.format_change(ratio / predicted[q])}" for q, ratio in measured.items() if ratio]
            lines += [f"{label} {', '.join(off)}"] if off else []
        return "; ".join(lines)

    def alt_text(self) -> str:
        """The verdicts in one line, for those who cannot see the plot."""
        verdicts = ", ".join(f"{m.label}: {self.tell(m.label)}" for m in self)
        return f"Plot of {self.name} on {self.device.label}. {verdicts}"

    def to_dict(self) -> dict:
        """The comparison in JSON's types; `from_dict` reads it back."""
        rows = [{key: value for key, value in asdict(m).items() if key != "device"} for m in self]
        shared = {name: getattr(self, name) for name in ("name", "predicted", "min_effect", "confidence")}
        full_size = {label: list(map(asdict, gpus)) for label, gpus in self.full_size.items()}
        here = {label: asdict(needed) for label, needed in self.here.items()}
        predictions = {"full_size": full_size, "here": here}
        return shared | predictions | {"device": asdict(self.device), "measurements": rows}

    @classmethod
    def from_dict(cls, stored: Mapping) -> "Comparison":
        """A comparison from what `to_dict` gave; `results.comparison_from_dict` also sees that it can be shown."""
        device = Device(**read_fields(Device, stored["device"]))
        rows = [read_fields(Measurement, row) for row in stored["measurements"]]
        measurements = tuple(Measurement(device=device, **row) for row in rows)
        read = lambda needed: FullSize(**read_fields(FullSize, needed))
        full_size = {label: tuple(map(read, gpus)) for label, gpus in stored.get("full_size", {}).items()}
        here = {label: read(needed) for label, needed in stored.get("here", {}).items()}
        given = stored.get("predicted", {}), stored.get("min_effect", MIN_EFFECT)
        confidence = stored.get("confidence", CONFIDENCE)
        return cls(check_name(stored["name"]), measurements, *given, full_size, here, confidence)

    def __repr__(self) -> str:
        tables = ("\n".join([*units.align([headings, *rows]), caption]) for headings, rows, caption in self.tables())
        return "\n\n".join(tables)

    def _repr_html_(self) -> str:
        side = "caption-side: bottom; text-align: left"
        return "".join(
            f'<table><caption style="{side}">{html.escape(caption)}</caption>{units.html_table(headings, rows)}</table>'
            for headings, rows, caption in self.tables()
        )

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        """Beside the table its data, so that an executed notebook carries its own evidence."""
        return {"text/plain": repr(self), "text/html": self._repr_html_(), MIME_TYPE: self.to_dict()}


def compare(
    variants: Mapping[str, Variant] | Callable[..., Step],
    settings: Mapping[str, Mapping[str, object]] | None = None,
    *,
    name: str = "comparison",
    items: float | Mapping[str, float] | None = None,
    unit: str = "items",
    seconds: float | None = None,
    precision: float | None = None,
    warmup: int = 2,
    energy: bool = True,
    min_effect: float = MIN_EFFECT,
    predicted: Mapping[str, Mapping[str, object]] | None = None,
    full_size: Mapping[str, object] | None = None,
    gpus: Iterable[str | float] = GPUS,
    control: bool = False,
) -> Comparison:
    """Measure variants side by side; the first one is the baseline.

    A variant is a function that builds its own state and returns one training step. Give a mapping of labels to such
    functions, or one function and, by label, the keywords to call it with. What a variant takes from outside (a model
    of the notebook) is not counted as its memory; what it sets in PyTorch for the whole process (TF32, threads, ...) is
    in force in its own turns only. Each variant compiles anew: what torch.compile has compiled before in this process
    is dropped (`torch.compiler.reset`), and compiles again at its next call. `name` is what the result is stored under.

    `items` (a number, or one for each label), named by `unit`, are the samples, tokens, ... of a step. A comparison
    aims at an interval of ±`precision` (0.03 on a CPU, 0.01 on a GPU) and times each variant for at most `seconds` (2
    and 5; 0.5 on a CPU beside a prediction for a GPU, where its time is a line of the caption), but for 15 blocks at
    least and 80 at most. `warmup` is the fewest steps of a warm-up. `energy` adds a window of a second on a GPU.

    A ratio of times within `min_effect` of 1 counts as the same. `predicted` gives ratios to the baseline, by label and
    quantity ("time", "memory", "energy"; any of them), as numbers or in the words of a result:
    `{"bf16": {"time": 0.5, "memory": "-40 %"}}`. `full_size` gives keywords with which all variants are as large as in
    real training, such as `{"batch": 96, "width": 768}`, or by label such variants. They are not run: `effgpu.predict`
    says what they take on each of `gpus`. Where this device is a GPU that `predict` knows, it also says what the
    variants take here, as they are. `control` adds a row: the baseline against its own copy, which shows the noise of
    this machine. Each interval is as wide as it takes for all of them to hold in 99 % of such comparisons.

    Raises TypeError or ValueError for bad arguments, before anything is measured.

    >>> result = compare({"fp32": fp32, "bf16": bf16}, name="mixed_precision", items=batch_size)
    >>> result = compare(training, {"fp32": {}, "bf16": {"autocast": True}}, items=batch_size)
    """
    check_name(name)
    variants = _apply(variants, settings)
    labels = list(variants)
    predicted = check_predicted(predicted, labels)
    units.check_positive(min_effect=min_effect)
    if min_effect >= 1:
        raise ValueError(f"min_effect: expected a share below 1, such as 0.01 for 1 %, got {min_effect}")
    large, on_gpu = predict_full_size(variants, full_size, gpus), find_device().type == "cuda"
    here = predict_here(variants, describe().name) if large and on_gpu else {}
    if large and not on_gpu and seconds is None:
        seconds = BESIDE_PREDICTION
    if control:
        variants = add_control(variants)
        items = {**items, CONTROL: items[labels[0]]} if isinstance(items, Mapping) and labels[0] in items else items
    measurements = measure_all(
        variants,
        items=items,
        unit=unit,
        seconds=seconds,
        precision=precision,
        warmup=warmup,
        energy=energy,
    )
    confidence = divide_confidence(len(measurements) - 1)
    return Comparison(name, tuple(measurements), predicted, min_effect, large, here, confidence)


def add_control(by_label: Mapping) -> dict:
    """The variants with the baseline's copy after it, named CONTROL."""
    (label, first), *others = by_label.items()
    return {label: first, CONTROL: first} | dict(others)


def _apply(variants: object, settings: Mapping[str, Mapping[str, object]] | None) -> dict[str, Variant]:
    """The variants by label: as they are given, or one function with the keywords of each label."""
    if settings is None:
        return check_variants(variants)
    if not is_function(variants):
        text = f"expected one function, to be called with the keywords of each label, got {type(variants).__name__}"
        raise TypeError(f"variants: {text}")
    if not isinstance(settings, Mapping) or not all(isinstance(given, Mapping) for given in settings.values()):
        raise TypeError(f"settings: expected a mapping such as {{'bf16': {{'autocast': True}}}}, got {settings!r}")
    return check_variants({label: partial(variants, **keywords) for label, keywords in settings.items()}, "settings")


def check_predicted(given: Mapping | None, labels: Sequence[str]) -> dict[str, dict[str, float]]:
    """Predictions as ratios. Raises TypeError or ValueError for unknown labels, quantities or no ratio."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise TypeError(f"predicted: expected a mapping of labels to quantities, got {type(given).__name__}")
    for label, ratios in given.items():
        if label not in labels[1:]:
            text = f"labels out of {labels[1:]}, the variants but the baseline"
            raise ValueError(f"predicted: expected {text}, got {label!r}")
        if not isinstance(ratios, Mapping):
            raise TypeError(f"predicted[{label!r}]: expected a mapping such as dict(time=0.5), got {ratios!r}")
        if unknown := [quantity for quantity in ratios if quantity not in QUANTITIES]:
            raise ValueError(f"predicted[{label!r}]: expected quantities out of {list(QUANTITIES)}, got {unknown[0]!r}")
    return {
        label: {quantity: units.read_ratio(f"predicted[{label!r}][{quantity!r}]", r) for quantity, r in ratios.items()}
        for label, ratios in given.items()
    }


def check_name(name: str) -> str:
    """The name, if it can be a file's on every system. Raises TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ValueError(f"name: expected letters, digits, '_', '-' and '.' only, as in a file name, got {name!r}")
    return name
