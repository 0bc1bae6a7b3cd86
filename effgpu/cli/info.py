"""`effgpu info`: this machine, and what it supports."""

import argparse

from effgpu.cli.exits import SUCCEEDED

_WITHOUT_GPU = """
No GPU that CUDA can use. Every lesson still runs on this CPU. Saved bytes and FLOPs are the same on all CPUs. Memory is
counted, with what this CPU's kernels take. Times are this CPU's, and stored results of GPUs are drawn beside them.
Missing: energy, tensor cores, TF32, fp8 and a GPU's fused kernels."""


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("info", help="show this machine and what it supports")
    parser.set_defaults(command=run)


def run(chosen: argparse.Namespace) -> int:
    """Print the facts; returns the exit code."""
    from effgpu.measuring.device import describe
    from effgpu.units import format_bytes

    device = describe()
    facts = {"device": device.label, "memory": format_bytes(device.memory), "CPU cores": device.cores}
    if device.kind == "cuda":
        facts["compute capability"] = ".".join(map(str, device.capability or ["unknown"]))
        facts["multiprocessors"] = device.multiprocessors
        facts["driver"] = device.driver or "unknown: NVML does not answer"
    for title, rows in {"": facts, "supports": device.supports, "versions": device.versions}.items():
        if title and rows:
            print(f"\n{title}")
        for name, value in rows.items():
            print(f"{name:20}{value}")
    if device.kind == "cpu":
        print(_WITHOUT_GPU)
    return SUCCEEDED
