"""effgpu: what a training technique does to time, memory and energy, measured on your own GPU."""

import importlib
import os
from typing import TYPE_CHECKING

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's log lines, unless set before torch starts

_MODULES = {  # of each public name; loaded on first use, so that importing effgpu costs next to nothing
    **dict.fromkeys(("KiB", "MiB", "GiB", "format_bytes", "format_count", "format_joules"), "units"),
    **dict.fromkeys(("format_change", "format_seconds", "format_speed"), "units"),
    **dict.fromkeys(("describe", "find_device", "memory_limit", "pick_sizes"), "measuring.device"),
    **dict.fromkeys(("time_fastest", "time_for", "time_steps"), "measuring.timing"),
    **dict.fromkeys(("peak_bytes", "saved_bytes", "trace"), "measuring.memory"),
    "measure_energy": "measuring.power",
    **dict.fromkeys(("count_flops", "matmul_peak", "mfu"), "measuring.flops"),
    "count_ops": "measuring.ops",
    **dict.fromkeys(("largest", "predict"), "predicting.prediction"),
    **dict.fromkeys(("Measurement", "hodges_lehmann_interval", "measure"), "measuring.measurement"),
    **dict.fromkeys(("Comparison", "compare"), "comparison"),
    **dict.fromkeys(("Bench", "bench"), "benching.bench"),
    **dict.fromkeys(("Ablation", "ablate"), "ablation"),
    **dict.fromkeys(("load", "save"), "results"),
    "plot": "figures",
    "tick": "benching.ticking",
    "TickCallback": "benching.callbacks",
}

__all__ = sorted(_MODULES)

if TYPE_CHECKING:  # what editors and type checkers see
    from effgpu.ablation import Ablation, ablate
    from effgpu.benching.bench import Bench, bench
    from effgpu.benching.callbacks import TickCallback
    from effgpu.benching.ticking import tick
    from effgpu.comparison import Comparison, compare
    from effgpu.figures import plot
    from effgpu.measuring.device import describe, find_device, memory_limit, pick_sizes
    from effgpu.measuring.flops import count_flops, matmul_peak, mfu
    from effgpu.measuring.measurement import Measurement, hodges_lehmann_interval, measure
    from effgpu.measuring.memory import peak_bytes, saved_bytes, trace
    from effgpu.measuring.ops import count_ops
    from effgpu.measuring.power import measure_energy
    from effgpu.measuring.timing import time_fastest, time_for, time_steps
    from effgpu.predicting.prediction import largest, predict
    from effgpu.results import load, save
    from effgpu.units import (
        GiB,
        KiB,
        MiB,
        format_bytes,
        format_change,
        format_count,
        format_joules,
        format_seconds,
        format_speed,
    )


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'effgpu' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"effgpu.{_MODULES[name]}"), name)
    if name == "tick":  # called once per step: from now on found without this function
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
