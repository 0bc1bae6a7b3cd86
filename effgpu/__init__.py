"""effgpu: what a training technique does to time, memory and energy, measured on your own GPU."""

import importlib
import os
from typing import TYPE_CHECKING

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's log lines, unless set before torch starts

_MODULES = {  # of each public name; loaded on first use, so that importing effgpu costs next to nothing
    **dict.fromkeys(("KiB", "MiB", "GiB", "format_bytes", "format_count", "format_joules"), "units"),
    **dict.fromkeys(("format_change", "format_seconds", "format_speed"), "units"),
    **dict.fromkeys(("describe", "find_device", "memory_limit", "pick_sizes"), "device"),
    **dict.fromkeys(("time_fastest", "time_for", "time_steps"), "timing"),
    **dict.fromkeys(("peak_bytes", "saved_bytes", "trace"), "memory"),
    "measure_energy": "power",
    **dict.fromkeys(("count_flops", "matmul_peak", "mfu"), "flops"),
    "count_ops": "ops",
    **dict.fromkeys(("fit", "largest"), "prediction"),
    **dict.fromkeys(("Measurement", "hodges_lehmann_interval", "measure"), "measurement"),
    **dict.fromkeys(("Comparison", "compare"), "comparison"),
    **dict.fromkeys(("Bench", "bench"), "commands"),
    **dict.fromkeys(("Ablation", "ablate"), "ablation"),
    **dict.fromkeys(("load", "save"), "results"),
    **dict.fromkeys(("plot", "plot_fit", "plot_ladder", "plot_memory"), "figures"),
    **dict.fromkeys(("plot_sweep", "plot_switches"), "figures"),
    "tick": "ticking",
    "TickCallback": "callbacks",
}

__all__ = sorted(_MODULES)

if TYPE_CHECKING:  # what editors and type checkers see
    from effgpu.ablation import Ablation as Ablation
    from effgpu.ablation import ablate as ablate
    from effgpu.callbacks import TickCallback as TickCallback
    from effgpu.commands import Bench as Bench
    from effgpu.commands import bench as bench
    from effgpu.comparison import Comparison as Comparison
    from effgpu.comparison import compare as compare
    from effgpu.device import describe as describe
    from effgpu.device import find_device as find_device
    from effgpu.device import memory_limit as memory_limit
    from effgpu.device import pick_sizes as pick_sizes
    from effgpu.figures import plot as plot
    from effgpu.figures import plot_fit as plot_fit
    from effgpu.figures import plot_ladder as plot_ladder
    from effgpu.figures import plot_memory as plot_memory
    from effgpu.figures import plot_sweep as plot_sweep
    from effgpu.figures import plot_switches as plot_switches
    from effgpu.flops import count_flops as count_flops
    from effgpu.flops import matmul_peak as matmul_peak
    from effgpu.flops import mfu as mfu
    from effgpu.measurement import Measurement as Measurement
    from effgpu.measurement import hodges_lehmann_interval as hodges_lehmann_interval
    from effgpu.measurement import measure as measure
    from effgpu.memory import peak_bytes as peak_bytes
    from effgpu.memory import saved_bytes as saved_bytes
    from effgpu.memory import trace as trace
    from effgpu.ops import count_ops as count_ops
    from effgpu.power import measure_energy as measure_energy
    from effgpu.prediction import fit as fit
    from effgpu.prediction import largest as largest
    from effgpu.results import load as load
    from effgpu.results import save as save
    from effgpu.ticking import tick as tick
    from effgpu.timing import time_fastest as time_fastest
    from effgpu.timing import time_for as time_for
    from effgpu.timing import time_steps as time_steps
    from effgpu.units import GiB as GiB
    from effgpu.units import KiB as KiB
    from effgpu.units import MiB as MiB
    from effgpu.units import format_bytes as format_bytes
    from effgpu.units import format_change as format_change
    from effgpu.units import format_count as format_count
    from effgpu.units import format_joules as format_joules
    from effgpu.units import format_seconds as format_seconds
    from effgpu.units import format_speed as format_speed


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'effgpu' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"effgpu.{_MODULES[name]}"), name)
    if name == "tick":  # called once per step: from now on found without this function
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
