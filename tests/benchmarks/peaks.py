"""Compare the peak of a step on the CPU with the peak of the same step on this machine's GPU.

Usage: python tests/benchmarks/peaks.py

On a GPU it also prints how far the recorded curve is from the allocator's statistic, which should be 0. Without a GPU
it prints the peaks on the CPU alone, in bytes, as JSON.
"""

import json
import os
import subprocess
import sys
from functools import partial

import torch
from torch import nn

from effgpu.measuring.device import describe, find_device
from effgpu.measuring.memory import trace
from effgpu.units import format_bytes


def training(make_model, *shape):
    """An fp32 training step with AdamW on random data of a shape."""
    with find_device():
        model, x = make_model(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer(width):
    """Four encoder blocks. No dropout: its mask has another type on a GPU."""
    shape = dict(nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*[nn.TransformerEncoderLayer(width, **shape) for _ in range(4)])


def convolutions():
    """Eight convolutions, whose libraries use workspaces."""
    return nn.Sequential(*[nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()) for _ in range(8)])


VARIANTS = {
    "transformer, 128 wide": partial(training, partial(transformer, 128), 8, 64, 128),
    "transformer, 512 wide": partial(training, partial(transformer, 512), 8, 128, 512),
    "convolutions, 32 pixels": partial(training, convolutions, 8, 64, 32, 32),
    "convolutions, 96 pixels": partial(training, convolutions, 8, 64, 96, 96),
}


def main() -> None:
    """Print the peaks on both devices, and by how much the GPU's is larger."""
    traces = {name: trace(variant) for name, variant in VARIANTS.items()}
    if find_device().type == "cpu":
        print(json.dumps({name: recorded.peak for name, recorded in traces.items()}))
        return
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.check_output([sys.executable, __file__], env=without)
    print(f"on {describe().label}")
    for name, on_cpu in json.loads(told).items():
        here, there = format_bytes(traces[name].peak), format_bytes(on_cpu)
        change, difference = traces[name].peak / on_cpu - 1, traces[name].difference
        print(f"{name:26}CPU {there:10} GPU {here:10} {change:+.2%}   curve - allocator: {difference} B")


if __name__ == "__main__":
    main()
