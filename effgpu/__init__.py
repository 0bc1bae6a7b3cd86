"""effgpu: what a training technique does to time, memory and energy, measured on your own GPU."""

import importlib
import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's log lines, unless set before torch starts

_HOME = {  # where each public name lives; loaded on first use, so that importing effgpu costs next to nothing
    "KiB": "units",
    "MiB": "units",
    "GiB": "units",
    "format_bytes": "units",
    "format_count": "units",
    "format_joules": "units",
    "format_ratio": "units",
    "format_seconds": "units",
    "by_tier": "device",
    "describe": "device",
    "find_device": "device",
    "memory_limit": "device",
    "time_fastest": "timing",
    "time_for": "timing",
    "time_steps": "timing",
    "trace": "memory",
    "peak_bytes": "memory",
    "saved_bytes": "memory",
    "measure_energy": "power",
    "sample": "power",
    "count_flops": "flops",
    "matmul_peak": "flops",
    "mfu": "flops",
    "Measurement": "measurement",
    "measure": "measurement",
    "rank_interval": "measurement",
    "Comparison": "comparison",
    "compare": "comparison",
    "Ablation": "ablation",
    "ablate": "ablation",
    "plot": "figures",
    "plot_ladder": "figures",
    "plot_memory": "figures",
    "plot_pareto": "figures",
    "plot_sweep": "figures",
    "plot_switches": "figures",
}
_ROOMS = {"corpus", "course", "reference", "report", *_HOME.values()}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(importlib.import_module(f"effgpu.{_HOME[name]}"), name)
    if name in _ROOMS:
        return importlib.import_module(f"effgpu.{name}")
    raise AttributeError(f"module 'effgpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_ROOMS})
