"""How near the peak of a step that is traced on a CPU comes to the same step's on this machine's GPU.

Usage: python tests/benchmarks/peaks.py

Without a GPU it prints the CPU's peaks alone, in bytes, as JSON.
"""

import json
import os
import subprocess
import sys
from functools import partial

import torch
from torch import nn

import effgpu


def training(make_model, *shape):
    """An fp32 training step with AdamW on random data of a shape."""
    with effgpu.find_device():
        model, x = make_model(), torch.randn(shape)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer(width, layers):
    """Encoder blocks without dropout, whose mask is of another type on a GPU."""
    shape = dict(nhead=8, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(*[nn.TransformerEncoderLayer(width, **shape) for _ in range(layers)])


def convolutions(channels, layers):
    """Convolutions, whose libraries take room to work in."""
    layer = partial(nn.Conv2d, channels, channels, 3, padding=1)
    return nn.Sequential(*[nn.Sequential(layer(), nn.ReLU()) for _ in range(layers)])


VARIANTS = {
    "transformer, 128 wide": partial(training, partial(transformer, 128, 4), 8, 64, 128),
    "transformer, 512 wide": partial(training, partial(transformer, 512, 4), 8, 128, 512),
    "convolutions, 32 pixels": partial(training, partial(convolutions, 64, 8), 8, 64, 32, 32),
    "convolutions, 96 pixels": partial(training, partial(convolutions, 64, 8), 8, 64, 96, 96),
}


def main() -> None:
    """Print the peaks of both devices, and how much larger the GPU's is."""
    peaks = {name: effgpu.peak_bytes(variant) for name, variant in VARIANTS.items()}
    if effgpu.find_device().type == "cpu":
        print(json.dumps(peaks))
        return
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run([sys.executable, __file__], env=without, capture_output=True, check=True, text=True).stdout
    print(f"on {effgpu.describe().label}")
    for name, on_cpu in json.loads(told).items():
        here, there = effgpu.format_bytes(peaks[name]), effgpu.format_bytes(on_cpu)
        print(f"{name:26}CPU {there:10} GPU {here:10} {peaks[name] / on_cpu - 1:+.2%}")


if __name__ == "__main__":
    main()
