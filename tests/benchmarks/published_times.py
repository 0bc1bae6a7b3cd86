"""Published times of training steps beside predicted ones: docs/predict.md shows them, `make predictions` runs them."""

import csv
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from benchmarks import published_cards, published_lora, published_memory, published_peaks, published_runs
from torch.nn import functional as F

from effgpu.measuring.device import multiplying_as
from effgpu.predicting.audited import family
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.time import Time, time_ratio
from effgpu.predicting.translator import on_real_tensors
from effgpu.units import format_seconds

TABLE, CARDS = map(Path(__file__).with_name, ("published_times.csv", "published_cards.csv"))
HF22, R2, TT = published_memory.HF22, published_memory.R2, published_memory.TT
TIMM, RYU = "timm, results/benchmark-train-amp", "pytorch-gpu-benchmark, results/dgx-a100"
U39 = "deep-learning-benchmark, README"
SKB = "pytorch_experiments, torchvision_exp"
SHI, CES = published_peaks.SHI, "apex_pytorch_cifar_experiment, README"
MLI, NGPT = "transformers-benchmarks, README", "Let's reproduce GPT-2 (124M), chapters"
EAR, QWEN = "applied-deep-learning, bf16 on a T4", "Qwen, README"
CH07 = "LLMs-from-scratch, ch07"
LAMBDA, INSIGHTS = "Lambda's benchmark, logs", "GPU-Insights, compiled"
WORKERS_START = 0.225, 0.15, 0.3  # seconds for two loaders of four workers: expected, least, most; not published
SOURCES = {"timm": TIMM, "pytorch-gpu-benchmark": RYU, "deep-learning-benchmark": U39, "pytorch_experiments": SKB}
# Data sheets: TFLOP/s in fp32, TF32 and 16 bits (tensor cores, fp32 accumulation), and GB/s.
DATA_SHEETS = {
    "T4": (8.1, 8.1, 65, 320),
    "L4": (30.3, 60, 121, 300),
    "P100": (9.3, 9.3, 18.7, 732),
    "V100": (15.7, 15.7, 125, 900),
    "V100 32 GB": (15.7, 15.7, 125, 900),
    "RTX 2080 Ti": (13.4, 13.4, 53.8, 616),
    "RTX 3090": (35.6, 35.6, 71, 936),
    "RTX 3090 Ti": (40, 40, 80, 1008),
    "RTX 4070 Ti Super": (44.1, 44.1, 88.2, 672),
    "RTX 4090": (82.6, 82.6, 165, 1008),
    "RTX A6000": (38.7, 77.4, 155, 768),
    "A100 40 GB": (19.5, 156, 312, 1555),
    "A100 80 GB": (19.5, 156, 312, 2039),
    "A10": (31.2, 62.5, 125, 600),
    "RTX 4080": (48.7, 48.7, 97.5, 717),
    "L40S": (91.6, 183, 362, 864),
    "RTX PRO 6000": (120, 252, 504, 1792),
    "H100": (67, 495, 989, 3350),
    "H100 PCIe": (51, 378, 756, 2000),
    "GH200": (67, 495, 989, 4000),
    "H200": (67, 495, 989, 4800),
    "B200": (75, 1100, 2250, 8000),
}


@dataclass(frozen=True)
class Case:
    """A published time in seconds per step, the variant that repeats the run, and the GPU that it ran on."""

    source: str
    name: str
    published: float
    variant: Callable
    gpu: str
    format: str
    convolutional: bool = False
    calibrates: bool = False
    matmul: str = "ieee"
    besides: tuple[Callable, float] | None = None  # a variant with more in a step, and how often a step has it
    idle: tuple[float, float, float] = (0.0, 0.0, 0.0)  # seconds of a step that its clock holds, too: expected, ends

    @property
    def group(self) -> str:
        """What the audit sums up."""
        if self.source == RYU and self.gpu.startswith("A100"):
            return "convolutional networks, 12 images: bound by the CPU"
        format = "16 bits" if self.format in ("fp16", "bf16") else self.format
        return "convolutional networks" if self.convolutional else f"transformers, {format}"


@dataclass(frozen=True)
class Judged:
    """What is `expected`, from `low` to `high`, and what the `data_sheet` says, beside what was `published`."""

    published: float
    expected: float
    low: float
    high: float
    data_sheet: float

    @property
    def error(self) -> float:
        return self.expected / self.published - 1

    @property
    def is_inside(self) -> bool:
        return self.low <= self.published <= self.high

    @property
    def width(self) -> float:
        """Half the range's width, as a share."""
        return math.sqrt(self.high / self.low) - 1


@dataclass(frozen=True)
class Outcome(Judged):
    """A case and its prediction, in seconds."""

    case: Case
    time: Time


@dataclass(frozen=True)
class Pair(Judged):
    """Two cases on one GPU, and the ratio of their times. A constant for a GPU cancels in that of the data sheet."""

    ours: Case
    theirs: Case


def _regnet(kind: str, name: str):
    """A RegNet of torchvision. It reads its sizes from tensors, so these are real ones."""
    from torchvision.models import regnet

    with on_real_tensors(), patch.object(regnet, "_regnet", lambda params, *_, **__: params):
        return partial(regnet.RegNet, getattr(regnet, f"regnet_{kind}_{name}")())


_VIT = {"tiny": (192, 12, 3), "small": (384, 12, 6), "base": (768, 12, 12), "large": (1024, 24, 16)}
_VIT |= {"huge": (1280, 32, 16), "giant": (1408, 40, 16)}
_SWIN = {"tiny": (96, 6, 3), "small": (96, 18, 3), "base": (128, 18, 4), "large": (192, 18, 6)}
_REGNET = {"004": "400mf", "008": "800mf", "016": "1_6gf", "032": "3_2gf", "080": "8gf", "160": "16gf", "320": "32gf"}
_MNASNET = {"050": "0_5", "075": "0_75", "100": "1_0"}


def _vit(size: str, patch: int, pixels: int):
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, heads = _VIT[size]
    inner = 6144 if size == "giant" else 4 * width
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner)
    config = ViTConfig(**sizes, patch_size=patch, image_size=pixels, num_labels=1000, attn_implementation="eager")
    return ViTForImageClassification(config)


def _swin(size: str, window: int):
    from torchvision.models.swin_transformer import SwinTransformer

    width, middle, heads = _SWIN[size]
    all_heads = [heads * 2**stage for stage in range(4)]
    return SwinTransformer([4, 4], width, [2, 2, middle, 2], all_heads, [window, window], stochastic_depth_prob=0.0)


def _find_model(name: str, pixels: int) -> Callable:
    """The function that builds a model that timm or torchvision calls so."""
    from torchvision import models

    if found := re.fullmatch(r"vit_(\w+)_patch(\d+)_\d+", name):
        return partial(_vit, found[1], int(found[2]), pixels)
    if found := re.fullmatch(r"swin_(\w+)_patch4_window(\d+)_\d+", name):
        return partial(_swin, found[1], int(found[2]))
    if found := re.fullmatch(r"regnet([xy])_(\d+)", name):
        return _regnet(found[1], _REGNET[found[2]])
    if name == "resnext101_32x4d":
        bottleneck = models.resnet.Bottleneck
        return partial(models.resnet.ResNet, bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    if name == "inception_v3":
        return partial(models.inception_v3, aux_logits=False, init_weights=False)
    undropped = {}
    if name.startswith(("efficientnet", "convnext")):
        name, undropped = name.replace("netv2_", "net_v2_"), {"stochastic_depth_prob": 0.0}
    name = re.sub(r"mobilenet(v\d)(_?\w*)_100", r"mobilenet_\1\2", name)
    name = re.sub(r"mnasnet_(\d+)", lambda found: f"mnasnet{_MNASNET[found[1]]}", name)
    return partial(getattr(models, name), **undropped)


def images(model: str, batch: int, size: int, layout: str, format: str, optimized: bool):
    """A step of an image classifier: with `optimized` as timm's benchmark, else without an update of the weights."""
    net, pixels = _find_model(model, size)().train(), torch.randn(batch, 3, size, size)
    if layout == "nhwc":
        net.to(memory_format=torch.channels_last)
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    if format == "fp16":
        net, pixels = net.half(), pixels.half()
    labels = torch.zeros(batch, dtype=torch.long)
    sgd = optimized and torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=False)

    def step():
        (sgd or net).zero_grad(set_to_none=optimized)
        with torch.autocast("cuda", torch.float16, enabled="autocast" in format):
            output = net(pixels)
            F.cross_entropy(getattr(output, "logits", output), labels).backward()
        if optimized:
            sgd.step()

    return step


def _images(row: dict[str, str]) -> Case:
    source, name, layout, format = SOURCES[row["source"]], row["model"], row["layout"], row["format"].split()[0]
    batch, size = int(row["batch"]), int(row["size"])
    return Case(
        source,
        f"{name}, {layout.upper()}, {batch} × {size}²",
        float(row["milliseconds"]) / 1000,
        partial(images, name, batch, size, layout, row["format"], source in (TIMM, SKB)),
        row["gpu"],
        format,
        convolutional=not name.startswith(("vit", "swin")),
        calibrates=row["role"] == "calibrate",
        matmul="tf32" if format == "TF32" else "ieee",
    )


def _card(row: dict[str, str]) -> Case:
    """A row of a collection that timed the same models on many GPUs."""
    kind, format, batch = row["model"], row["format"], int(row["batch"])
    names = {"bert_large": f"BERT-large, {batch} × 384", "resnet50": f"ResNet-50, {batch} × 224²"}
    names |= {"vit": f"ViT-B/16, {batch} × 224²", "unet": f"U-Net, {batch} × 256²"}
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(format)
    variant = {
        "bert_large": partial(published_cards.squad, "large", batch, dtype is not None),
        "resnet50": partial(published_cards.resnet, batch, dtype is not None),
    }.get(kind, partial(published_cards.compiled, kind, batch, dtype))
    return Case(
        LAMBDA if row["source"] == "lambda" else INSIGHTS,
        names[kind],
        float(row["milliseconds"]) / 1000,
        variant,
        row["gpu"],
        format,
        convolutional=kind in ("resnet50", "unet"),
        matmul="tf32" if format == "TF32" else "ieee",
    )


def _rows(table: Path) -> Iterable[dict[str, str]]:
    return csv.DictReader(table.read_text(encoding="utf-8").splitlines())


def _hf(name: str, samples_per_second: float, **options) -> Case:
    format = "fp16" if options.get("fp16") else "fp32"
    variant = partial(published_memory.bert_large, **options)
    return Case(HF22, f"BERT-large, {name}", 4 / samples_per_second, variant, "V100", format)


def _gpt(name: str, tokens_per_second: float, tf32: bool = True, **options) -> Case:
    """A rung of the ladder. Its clock starts before the evaluation: 15 steps, two evaluated batches, two loaders.

    train() records t_start, and then calls evaluate_model: two loaders start four workers each. The last script's
    windows have 10 steps.
    """
    steps = 10 if options.get("batch") == 32 else 15
    format = "bf16" if options.get("bf16") else "TF32" if tf32 else "fp32"
    variant = partial(published_memory.gpt2, **options, evaluated=False)
    seconds = options.get("batch", 8) * 1024 / tokens_per_second
    besides = partial(published_memory.gpt2, **options), 1 / steps
    idle = tuple(start / steps for start in WORKERS_START)
    options = dict(matmul="tf32" if tf32 else "ieee", besides=besides, idle=idle)
    return Case(R2, f"GPT-2, {name}", seconds, variant, "A100 40 GB", format, **options)


def _unet(seconds: float, **options) -> Case:
    """A row of the fork's table."""
    told = ["fp16" if options.get("fp16", True) else "fp32", f"batch {options.get('batch', 1)}"]
    told += ["checkpointed"] * ("checkpoints" in options) + ["AdamW"] * ("adam8bit" in options)
    variant = partial(published_runs.unet, **options)
    return Case(SHI, f"U-Net of SD 1.4, {', '.join(told)}", seconds, variant, "T4", told[0], True)


def _layers() -> Iterable[Case]:
    """The source gives the FLOP/s of the best shape: the largest batch, on the GPU whose table it shows."""
    shapes = {"BERT": (128, 128), "GPT-2": (64, 512), "T5 encoder": (64, 512), "T5 decoder": (64, 512)}
    reached = {"A100 80 GB": (136, 53, 56, 47), "RTX A6000": (70, 38, 41, 34), "V100 32 GB": (64, 36, 38, 32)}
    reached |= {"RTX 3090 Ti": (61.8, 39.4, 41.2, 36.0), "RTX 4090": (109, 54, 55, 45)}
    for gpu, rates in reached.items():
        for (kind, shape), rate in zip(shapes.items(), rates):
            name = f"{kind} layer, {shape[0]} × {shape[1]}"
            seconds = published_runs.layer_flops(kind, *shape) / rate / 1e12
            yield Case(MLI, name, seconds, partial(published_runs.layer, kind, *shape), gpu, "fp16")


def _lecture() -> Iterable[Case]:
    """The chapters name the step's milliseconds after each change."""
    rungs = {"fp32": 1000, "TF32": 333, "bf16": 300, "compiled": 130, "fused attention": 96, "vocabulary of 50,304": 93}
    for number, (name, milliseconds) in enumerate((rungs | {"fused AdamW": 90}).items()):
        format, matmul = ("fp32", "TF32", "bf16")[min(number, 2)], "tf32" if number else "ieee"
        variant = partial(published_runs.gpt2_of_the_lecture, number)
        yield Case(NGPT, f"GPT-2, {name}", milliseconds / 1000, variant, "A100 80 GB", format, matmul=matmul)


def _qwen() -> Iterable[Case]:
    """Seconds of an iteration: eight micro-batches and an update."""
    told = {"1.8B": {2048: 1.7, 4096: 3.3, 8192: 6.8}, "7B": {1024: 2.8, 2048: 5.2, 4096: 10.1, 8192: 21.3}}
    told |= {"14B": {2048: 8.4}}
    for size, rows in told.items():
        for length, seconds in rows.items():
            variant = partial(published_lora.qwen, size, length)
            besides = partial(variant, updates=True), 1 / 8
            name = f"Qwen {size}, LoRA, {length:,} tokens"
            yield Case(QWEN, name, seconds / 8, variant, "A100 80 GB", "bf16", besides=besides)


def _instructed(size: str, minutes: float, gpu: str) -> Case:
    """232 steps. Ten batches are evaluated after every fifth, and 100 tokens are written in all, one at a time."""
    variant = partial(published_runs.instructed, size)
    besides = partial(variant, writes=True), 100 / 232
    return Case(CH07, f"GPT-2 {size}, instructions", 60 * minutes / 232, variant, gpu, "fp32", besides=besides)


_ALL, _FAST, _COMPILED = published_memory._ALL, published_memory._FAST, published_memory._COMPILED
_ADAFACTOR = published_memory._adafactor
CASES = [
    _hf("plain", 8.86),
    _hf("accumulation 4 × 1", 7.75, batch=1, accumulate=4),
    _hf("accumulation, checkpointing", 5.99, batch=1, accumulate=4, checkpoint=True),
    _hf("fp16", 18.64, fp16=True),
    _hf("accumulation, checkpointing, fp16", 10.09, **_ALL),
    _hf("Adafactor", 7.96, optimizer=_ADAFACTOR),
    _hf("all with Adafactor", 9.06, **_ALL, optimizer=_ADAFACTOR),
    _gpt("baseline", 12525, tf32=False, stored_mask=True, foreach=True),
    _gpt("mask on the fly", 12526, tf32=False, foreach=True),
    _gpt("TF32", 27648, foreach=True),
    _gpt("fused AdamW", 28399),
    _gpt("bf16", 45486, bf16=True),
    _gpt("native layers", 55256, bf16=True, native=True),
    _gpt("fused attention", 91901, **_FAST),
    _gpt("compiled", 112046, **_COMPILED),
    _gpt("vocabulary of 50,304", 127345, **_COMPILED, vocabulary=50304),
    _gpt("batch 32", 142156, **_COMPILED, vocabulary=50304, batch=32),
    Case(TT, "Llama-3.2-3B, packed", 2 * 4096 / 7075, published_memory.llama_3b, "A100 80 GB", "bf16"),
    _unet(1 / 0.93, checkpoints=True),
    _unet(1 / 0.42, fp16=False, checkpoints=True),
    _unet(1 / 0.66, batch=2, checkpoints=True),
    _unet(1 / 1.14),
    _unet(1 / 0.49, fp16=False),
    _unet(1 / 0.82, batch=2),
    _unet(1 / 0.77, checkpoints=True, adam8bit=False),
    Case(CES, "Wide-ResNet 28x10, O0", 0.8308, published_runs.wide_resnet, "T4", "fp32", True),
    Case(CES, "Wide-ResNet 28x10, O1", 0.4538, partial(published_runs.wide_resnet, "O1"), "T4", "fp16", True),
    Case(CES, "Wide-ResNet 28x10, O2", 0.4308, partial(published_runs.wide_resnet, "O2"), "T4", "fp16", True),
    Case(
        CES,
        "Wide-ResNet 28x10, O0",
        2821 / 3900,
        published_runs.wide_resnet,
        "P100",
        "fp32",
        True,
        besides=(partial(published_runs.wide_resnet, evaluated=256), 40 / 390),
    ),
    *_layers(),
    *_lecture(),
    Case(EAR, "ModernBERT-base, fp16", 0.30, partial(published_runs.modern_bert, torch.float16), "T4", "fp16"),
    Case(EAR, "ModernBERT-base, bf16", 1.29, partial(published_runs.modern_bert, torch.bfloat16), "T4", "bf16"),
    *_qwen(),
    _instructed("medium", 1.83, "L4"),
    _instructed("medium", 0.86, "A100 40 GB"),
    _instructed("small", 0.69, "L4"),
    _instructed("small", 0.39, "A100 40 GB"),
    Case(published_peaks.AO, "ViT-H, fused AdamW", 8 / 41.9, published_runs.vit_huge, "RTX 4070 Ti Super", "bf16"),
    *map(_card, _rows(CARDS)),
    *map(_images, _rows(TABLE)),
]


def walk(case: Case) -> tuple[Prediction, Prediction | None]:
    """Predict a case, and the variant beside it."""
    with multiplying_as(case.matmul):
        return predict(case.variant, case.gpu), predict(case.besides[0], case.gpu) if case.besides else None


def run(case: Case) -> Outcome:
    """Predict a case."""
    return judge(case, *walk(case))


def judge(case: Case, predicted: Prediction, more: Prediction | None) -> Outcome:
    """What was predicted for a case beside what was published."""
    with multiplying_as(case.matmul):
        time, sheet = predicted.time(), _data_sheet(predicted.segments, case.gpu)
        expected = time.expected
        if more:
            expected += case.besides[1] * (more.time().expected - time.expected)
            sheet += case.besides[1] * (_data_sheet(more.segments, case.gpu) - sheet)
    ends = [end * expected / time.expected for end in (time.low, time.high)]
    expected, low, high = (seconds + idle for seconds, idle in zip((expected, *ends), case.idle))
    return Outcome(case.published, expected, low, high, sheet + case.idle[0], case, time)


def _data_sheet(segments: Iterable, gpu: str) -> float:
    """The first baseline: for each kernel the larger of its FLOPs and bytes, at the rates of the data sheet."""
    fp32, tf32, half, bandwidth = DATA_SHEETS[gpu]
    rates = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half}
    return sum(
        number * max(kernel.flops / rates.get(kernel.format, fp32) / 1e12, kernel.bytes / bandwidth / 1e9)
        for segment in segments
        for kernel, number in segment.kernels.items()
    )


def find_pairs(outcomes: list[Outcome]) -> list[Pair]:
    """The ratios of the audit: each rung to the one before, runs of a table to its first, layouts, formats."""
    pairs, others = [], {}
    for o in outcomes:
        case, key = o.case, o.case.source
        if case.source in (TIMM, U39, SKB) and case.convolutional:  # for transformers the layout is next to nothing
            key = case.name.replace("NHWC", "NCHW"), case.source if case.source == U39 else case.format, case.source
        elif case.source in (SHI, CES, NGPT):
            key = case.source, case.gpu
        elif case.source not in (R2, HF22):
            continue
        if key in others:
            pairs.append(_compare(o, others[key]))
        if case.source not in (HF22, SHI, CES) or key not in others:
            others[key] = o
    return pairs


def _compare(ours: Outcome, theirs: Outcome) -> Pair:
    published, expected, sheet = (
        getattr(ours, what) / getattr(theirs, what) for what in ("published", "expected", "data_sheet")
    )
    value, *ends = time_ratio(ours.time, theirs.time)
    return Pair(published, expected, *(expected * end / value for end in ends), sheet, ours.case, theirs.case)


def with_constants(outcomes: list[Outcome]) -> list[float]:
    """The second baseline, in seconds: the data sheet's times a constant for each GPU.

    The constant is the median over the other runs of the same kind on that GPU: it was fitted on the audit itself.
    """
    kinds = [(family(o.case.gpu), o.case.group.partition(",")[0]) for o in outcomes]
    found = []
    for number, o in enumerate(outcomes):
        others = [n for n, kind in enumerate(kinds) if kind == kinds[number] and n != number] or [number]
        found.append(o.data_sheet * median(outcomes[n].published / outcomes[n].data_sheet for n in others))
    return found


def _sum_up(name: str, judged: list[Judged], baselines: list[list[float]]) -> str:
    """A line of the summary: errors of the prediction, its range, and errors of the two baselines."""
    number, width = len(judged), median(o.width for o in judged)
    inside = f"{sum(o.is_inside for o in judged)} of {number} | ±{width:.0%}"
    published = [o.published for o in judged]

    def tell(values: list[float]) -> str:
        errors = sorted(abs(value / truth - 1) for value, truth in zip(values, published))
        return f"{median(errors):.1%} | {errors[math.ceil(0.9 * number) - 1]:.1%}"

    sheet, constant = map(tell, baselines)
    return f"| {name} | {number} | {tell([o.expected for o in judged])} | {inside} | {sheet} | {constant} |"


def _summarize(outcomes: list[Outcome]) -> list[str]:
    """The audit by groups, as rows of a table."""
    groups: dict[str, list[tuple[Outcome, float]]] = {}
    for told in zip(outcomes, with_constants(outcomes)):
        group = told[0].case.group
        if group.startswith("transformers"):
            groups.setdefault("transformers", []).append(told)
        groups.setdefault(group, []).append(told)
    titles = "group", "runs", "median error", "90 %", "in range", "range", "median", "90 %", "median", "90 %"
    lines = [f"| {' | '.join(f'**{title}**' for title in titles)} |"]
    for name, told in groups.items():
        chosen, constants = zip(*told)
        lines.append(_sum_up(name, chosen, [[o.data_sheet for o in chosen], constants]))
    for name, wanted in {"ratios, transformers": False, "ratios, convolutional networks": True}.items():
        pairs = [pair for pair in find_pairs(outcomes) if pair.ours.convolutional == wanted]
        lines.append(_sum_up(name, pairs, [[pair.data_sheet for pair in pairs]] * 2))
    return lines


def numbers(outcomes: list[Outcome]) -> dict[str, str]:
    """Sentences of docs/predict.md, by a pattern of the old ones."""
    inside = [o.is_inside for o in outcomes if o.case.calibrates]
    share = f"of which {sum(inside) / len(inside):.0%} lie"
    return {r"audit's: \d+ rows": f"audit's: {len(inside)} rows", r"of which \d+% lie": share}


def summaries(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """Rows of docs/predict.md, by the headings above them."""
    return {"## Time": _summarize([o for o in outcomes if not o.case.calibrates])}


def tables(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """Rows of docs/audit.md, by the headings above them."""
    outcomes = [o for o in outcomes if not o.case.calibrates]
    rows: dict[str, list[str]] = {"### Ratios": []}
    for o in outcomes:
        published, expected, low, high = map(format_seconds, (o.published, o.expected, o.low, o.high))
        times = f"{published} | {expected} | {low} – {high} | {_tell_error(o)}"
        row = f"| {o.case.name} | {o.case.gpu} | {o.case.format} | {times} | {o.time.bound} |"
        rows.setdefault(f"### [{o.case.source}]", []).append(row)
    for pair in find_pairs(outcomes):
        names = " | ".join(f"{case.name}, {case.format}" for case in (pair.ours, pair.theirs))
        ratio = f"{pair.published:.2f} | {pair.expected:.2f} | {pair.low:.2f} – {pair.high:.2f}"
        rows["### Ratios"].append(f"| {names} | {ratio} | {_tell_error(pair)} |")
    return rows


def _tell_error(judged: Judged) -> str:
    return published_memory.tell_error(judged.error) + ", outside" * (not judged.is_inside)
