"""Every Python process that a simulated GPU is made for begins with this. Lessons take a CPU's sizes on it, nearly."""

import os

if os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1"):
    from kernels import install

    from effgpu.course import workloads
    from effgpu.measuring import measurement

    install()
    heads = {"width": 96, "heads": 12}  # as many as on a GPU: what fits a CPU's 4 heads only shows itself
    workloads.GPU_SIZES = {
        name: sizes | heads if "heads" in sizes else sizes for name, sizes in workloads.CPU_SIZES.items()
    }
    measurement._TURN["cuda"], measurement._LOAD["cuda"], measurement._LEAD = measurement._TURN["cpu"], 0.01, 0.0
