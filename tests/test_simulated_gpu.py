"""The package on a simulated GPU: PyTorch's own CUDA allocator counts, and what is predicted has to agree with it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from effgpu.predicting.gpus import find_gpu

HERE = Path(__file__).parent
SCRIPT = """
import json
from functools import partial

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import effgpu
from effgpu.course import workloads
from effgpu.predicting.gpus import find_gpu

sizes = {"batch": 8, "width": 128, "heads": 4}


def training(optimizer=torch.optim.AdamW, half=False, causal=False, checkpointed=False):
    def variant():
        model, texts, labels = (workloads.language_model if causal else workloads.text_classifier)(**sizes)
        update = optimizer(model.parameters())
        for block in model.blocks if checkpointed else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

        def step():
            with torch.autocast("cuda", torch.float16, enabled=half):
                loss = cross_entropy(model(texts).flatten(0, -2), labels.flatten())
            loss.backward()
            update.step()
            update.zero_grad()

        return step

    return variant


variants = {
    "AdamW": training(),
    "fused": training(partial(torch.optim.AdamW, fused=True)),
    "one by one": training(partial(torch.optim.AdamW, foreach=False)),
    "momentum": training(partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "Adafactor": training(torch.optim.Adafactor),
    "16 bits": training(half=True),
    "16 bits, checkpointed": training(half=True, checkpointed=True),
    "language model": training(causal=True),
}
found = {}
for name, variant in variants.items():
    predicted, trace = effgpu.predict(variant, "T4"), effgpu.trace(variant)
    found[name] = [predicted.allocated, trace.peak, predicted.reserved, trace.reserved]


def copied_ahead():
    torch.manual_seed(1)
    x, copies = torch.randn(8, device="cuda"), torch.cuda.Stream()
    return lambda: x.record_stream(copies) or x.sum().item()


before = torch.cuda.get_rng_state()
effgpu.predict(copied_ahead, "T4")
random_state = torch.equal(torch.cuda.get_rng_state(), before)

inputs, weight = torch.randn(4, 8, device="cuda"), torch.randn(3, 8, device="cuda", requires_grad=True)
torch.nn.functional.linear(inputs, weight).square().sum().backward()
expected = torch.autograd.grad((inputs.cpu() @ weight.cpu().t()).square().sum(), weight)[0]
gradients = torch.allclose(weight.grad, expected) and weight.grad.is_cuda
try:
    inputs + torch.ones(8)
except RuntimeError as error:
    mixed = str(error)
device = effgpu.describe()
gpu = [device.label, device.memory, *torch.cuda.get_device_capability(), find_gpu(device.name).bandwidth]
layers = len(workloads.text_classifier()[0].blocks)
told = {"random": random_state, "gradients": gradients, "mixed": mixed, "gpu": gpu, "layers": layers}
print(json.dumps({"memory": found} | told))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler"),
    pytest.mark.skipif(not (torch.version.cuda or "").startswith("13"), reason="not a PyTorch for CUDA 13"),
]


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, str(HERE / "simulated_gpu"), "T4", sys.executable, "-c", SCRIPT]
    layers = os.environ | {"SIMULATED_GPU_LAYERS": "6"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=layers)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_memory_is_predicted_as_pytorchs_own_allocator_counts_it(found):
    assert len(found["memory"]) == 8
    for name, (predicted, peak, predicted_reserved, reserved) in found["memory"].items():
        assert predicted == pytest.approx(peak, rel=0.005) and predicted_reserved == reserved, name


def test_the_cpu_does_the_work_and_a_prediction_leaves_the_random_state(found):
    assert found["gradients"] and "same device" in found["mixed"] and found["random"]


def test_results_say_that_it_is_simulated_and_its_speed_is_that_of_the_real_one(found):
    assert found["gpu"] == ["Simulated T4", find_gpu("T4").memory, 7, 5, find_gpu("T4").bandwidth]


def test_lessons_take_as_many_layers_as_it_is_told(found):
    assert found["layers"] == 6
