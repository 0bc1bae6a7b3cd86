"""Every Python process that a simulated GPU is made for begins with this. Lessons take a CPU's sizes on it, nearly.

SIMULATED_GPU_LAYERS=6 gives their transformers as many layers as on a GPU.
"""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
    from dataclasses import replace

    from kernels import install
    from torchvision.transforms import v2

    from effgpu.course import sizes as of_devices
    from effgpu.course import workloads
    from effgpu.measuring import measurement, turns
    from effgpu.predicting import gpus

    class SmallCrop(v2.RandomResizedCrop):
        """As small as on a CPU."""

        def __init__(self, size, *others, **named):
            super().__init__(min(size, 32), *others, **named)

    def image_classifier(batch=None, size=None, **named):
        """Not larger than a checked cell asks for: more takes minutes."""
        return large(batch and min(batch, 16), size and min(size, 64), **named)

    install()
    v2.RandomResizedCrop = SmallCrop
    large, workloads.image_classifier = workloads.image_classifier, image_classifier
    given = {"width": 96, "heads": 12}  # as many heads as on a GPU: what fits a CPU's 4 only shows itself
    if layers := os.environ.get("SIMULATED_GPU_LAYERS"):
        given["layers"] = int(layers)
    of_devices.GPU_SIZES = {
        name: sizes | given if "heads" in sizes else sizes for name, sizes in of_devices.CPU_SIZES.items()
    }
    real = gpus.find_gpu(os.environ["SIMULATED_GPU"])  # the table gets its line: what needs a known GPU runs, too
    table = gpus._shipped() | {f"Simulated {real.name}": replace(real, name=f"Simulated {real.name}")}
    gpus._shipped = lambda: table
    measurement._LOAD["cuda"] = 0.01
    for seconds in turns.OF_VARIANTS:
        seconds["cuda"] = seconds["cpu"]
