"""`effgpu calibrate`: how fast this GPU is, for all predictions of it from now on."""

import argparse

from effgpu.cli.exits import SUCCEEDED, refusing


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command."""
    parser = commands.add_parser("calibrate", help="measure this GPU, for predictions of its times from now on")
    parser.set_defaults(command=run)


def run(chosen: argparse.Namespace) -> int:
    """Measure and keep; returns the exit code. Refuses where there is no GPU."""
    from effgpu.predicting import calibration, gpus

    with refusing(RuntimeError, OSError, ValueError):
        gpu = calibration.calibrate()
        path = calibration.store(gpu)
    print("\n".join(gpus.tell(gpu)))
    print(f"kept in {path}: predictions for {gpu.name} use it from now on")
    return SUCCEEDED
