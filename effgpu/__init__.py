"""effgpu: what a training technique does to time, memory and energy, measured on your own GPU."""

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.4.0"  # which pyproject.toml reads

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler's log lines, unless set before torch starts

_OPTIONAL = ("matplotlib", "transformers")  # installed where they are used: see pyproject.toml
_MODULES = {  # of each public name; loaded on first use, so that importing effgpu costs next to nothing
    "compare": "comparison",
    "ablate": "ablation",
    "measure": "measuring.measurement",
    **dict.fromkeys(("peak_bytes", "saved_bytes", "trace"), "measuring.memory"),
    "count_flops": "measuring.flops",
    "count_ops": "measuring.ops",
    **dict.fromkeys(("describe", "find_device", "memory_limit"), "measuring.device"),
    **dict.fromkeys(("largest", "predict"), "predicting.predict"),
    **dict.fromkeys(("fine_tuning", "predict_model"), "predicting.models"),
    "doctor": "diagnosing.doctor",
    "bench": "benching.bench",
    "tick": "attaching.ticking",
    "TickCallback": "benching.callbacks",
    "plot": "figures.plot",
    **dict.fromkeys(("load", "save"), "results"),
    "GiB": "units",
}

__all__ = sorted(_MODULES)

if TYPE_CHECKING:  # what editors and type checkers see
    from effgpu.ablation import ablate
    from effgpu.attaching.ticking import tick
    from effgpu.benching.bench import bench
    from effgpu.benching.callbacks import TickCallback
    from effgpu.comparison import compare
    from effgpu.diagnosing.doctor import doctor
    from effgpu.figures.plot import plot
    from effgpu.measuring.device import describe, find_device, memory_limit
    from effgpu.measuring.flops import count_flops
    from effgpu.measuring.measurement import measure
    from effgpu.measuring.memory import peak_bytes, saved_bytes, trace
    from effgpu.measuring.ops import count_ops
    from effgpu.predicting.models import fine_tuning, predict_model
    from effgpu.predicting.predict import largest, predict
    from effgpu.results import load, save
    from effgpu.units import GiB


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module 'effgpu' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"effgpu.{_MODULES[name]}"), name)
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _OPTIONAL:
            raise
        text = f"effgpu.{name} needs {library}: pip install {library}"
        raise ModuleNotFoundError(text, name=error.name) from error
    if name == "tick":  # called once per step: from now on read without this function
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
