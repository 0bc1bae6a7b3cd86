"""All published peaks of the audit: those of published_memory.py, of convolutional networks, adapters and 4 bits."""

import math
from collections.abc import Iterable
from functools import partial
from statistics import median

from benchmarks import published_lora, published_memory, published_runs, published_segmentation
from benchmarks.published_memory import Case, Outcome

from effgpu.units import GiB, MiB

AO, MMSEG = "torchao, optim", "MMSegmentation, model zoo"
SHI = "diffusers of ShivamShrirao, examples/dreambooth"
UNSLOTH = "unsloth's notebooks"
CONTEXT = 275 * MiB  # of a T4's CUDA, between the ends that gpus.csv gives it
GROUPS = {MMSEG: "convolutional networks", SHI: "convolutional networks", UNSLOTH: "models, once loaded"}


def _segmentation() -> Iterable[Case]:
    """Maxima of max_memory_allocated, in thousands of MiB; \"b\" is the usual entrance of 7 × 7."""
    wide, square = dict(height=512, width=1024), dict(height=769, width=769)
    peaks = {
        "FCN": {(18, 1): (1.7, 1.9), (50, 1): (5.7, 6.5), (101, 1): (9.2, 10.4)}
        | {(18, 0): (1.6, 1.7), (50, 0): (5.6, 6.3), (101, 0): (9.1, 10.3)},
        "PSPNet": {(18, 1): (1.7, 1.9), (50, 1): (6.1, 6.9), (101, 1): (9.6, 10.9)}
        | {(18, 0): (1.5, 1.7), (50, 0): (6.0, 6.8), (101, 0): (9.5, 10.8)},
    }
    half = {"FCN": 5.37, "PSPNet": 5.34}
    for head, rows in peaks.items():
        for (layers, deep), published in rows.items():
            for thousands, size in zip(published, (wide, square)):
                options = dict(head=head, layers=layers, deep=bool(deep), **size)
                name = f"{head}, R-{layers}{'' if deep else 'b'}, {size['height']} × {size['width']}"
                yield _segmented(name, thousands, options)
        yield _segmented(f"{head}, R-101, 512 × 1024, fp16", half[head], dict(head=head, layers=101, fp16=True))


def _segmented(name: str, thousands: float, options: dict) -> Case:
    variant = partial(published_segmentation.segmentation, **options)
    unknown = "whether its GB are 1,000 or 1,024 MiB; cuDNN's workspaces"
    return Case(MMSEG, name, 1000 * thousands * MiB, variant, unknown, "V100 32 GB", allocates=True)


def _unet(gigabytes: float, **options) -> Case:
    told = ["fp16" if options.get("fp16", True) else "fp32", f"batch {options.get('batch', 1)}"]
    told += ["2 micro-batches"] * ("accumulate" in options) + ["checkpointed"] * ("checkpoints" in options)
    told += ["AdamW"] * ("adam8bit" in options)
    variant = partial(published_runs.unet, **options)
    unknown = "how it was read: taken as NVML's, in 10⁹ bytes, less 275 MiB for CUDA's context; xformers of 2022"
    return Case(SHI, f"U-Net of SD 1.4, {', '.join(told)}", gigabytes * 1e9 - CONTEXT, variant, unknown, "T4")


def _loaded(name: str, gigabytes: float, gpu: str = "T4", rank: int = 16, as_called: str = "") -> Case:
    variant = partial(published_lora.loaded, name, rank)
    return Case(UNSLOTH, as_called or name, gigabytes * GiB, variant, "what loading took for a while", gpu, True, True)


def _embeds(name: str, rank: int, gigabytes: float) -> Case:
    variant = partial(published_lora.loaded_encoder, name, rank)
    unknown = "which layers have adapters: taken as all linear ones"
    return Case(UNSLOTH, f"{name}, 16 bits", gigabytes * GiB, variant, unknown, "T4", True, True)


CASES = [
    *published_memory.CASES,
    *_segmentation(),
    _unet(9.92, checkpoints=True),
    _unet(10.08, fp16=False, checkpoints=True),
    _unet(10.4, batch=2, checkpoints=True),
    _unet(11.17),
    _unet(11.17, fp16=False),
    _unet(11.56, accumulate=2, checkpoints=True),
    _unet(13.67, batch=2),
    _unet(13.7, accumulate=2),
    _unet(15.79, checkpoints=True, adam8bit=False),
    _embeds("gte-modernbert-base", 64, 0.348),
    _embeds("bge-m3", 32, 1.152),
    _loaded("Phi-3.5 mini", 2.285),
    _loaded("Llama 3 8B", 5.613, as_called="Llama 3 8B, Ollama"),
    _loaded("Llama 3 8B", 5.594, as_called="Llama 3 8B, conversational"),
    _loaded("Llama 3 8B", 5.984, as_called="Llama 3.1 8B"),
    _loaded("CodeGemma 7B", 5.967),
    _loaded("Qwen2 7B", 7.072),
    _loaded("Mistral Nemo 12B", 8.588),
    _loaded("Qwen2.5 Coder 14B", 10.287),
    _loaded("Mistral Small 22B", 12.486),
    _loaded("Qwen2.5 Coder 7B", 5.393, "A100 40 GB"),
    _loaded("Llama 3.3 70B", 39.221, "A100 80 GB"),
    Case(AO, "ViT-H, fused AdamW", 12.23e9, published_runs.vit_huge, "compiled", "RTX 4070 Ti Super", True),
    Case(
        AO,
        "ViT-H, 8-bit AdamW",
        8.32e9,
        partial(published_runs.vit_huge, "8 bits"),
        "compiled",
        "RTX 4070 Ti Super",
        True,
    ),
]


def summarize(outcomes: list[Outcome]) -> list[str]:
    """The audit of memory by groups, as rows of a table."""
    groups: dict[str, list[Outcome]] = {}
    for o in outcomes:
        group = GROUPS.get(o.case.source, "transformers")
        groups.setdefault(f"{group}, on a T4" if o.case.card == "T4" else group, []).append(o)
    lines = []
    for name, chosen in sorted(groups.items(), key=lambda item: -len(item[1])):
        errors = sorted(abs(o.error) for o in chosen)
        told = f"{median(errors):.1%} | {errors[math.ceil(0.9 * len(errors)) - 1]:.1%}"
        close = f"{sum(error <= 0.05 for error in errors)} of {len(errors)}"
        false = "–" if chosen[0].case.rests else sum(o.is_false_fit for o in chosen)
        lines.append(f"| {name} | {len(chosen)} | {told} | {close} | {false} |")
    return lines
