"""The line of the table of GPUs for the GPU that is here: what it reaches, measured in under a minute."""

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from torch import nn

from effgpu.measuring.device import describe, find_device, multiplying_as
from effgpu.measuring.timing import time_for
from effgpu.predicting.gpus import RATE_COLUMNS, TABLE, Gpu, gpu_here, own_table, read_table
from effgpu.predicting.predict import predict
from effgpu.storing import write_atomic
from effgpu.units import GiB, MiB

SECONDS = 4.0  # of each measurement: a GPU that gets hot slows down
SIZE = 8192  # rows of the products
_TINY = 1000  # kernels in the queue
_SPREAD = 0.05  # of a rate that was measured here


def calibrate() -> Gpu:
    """Measure the current GPU: rates of products, bandwidth, the least time of a kernel, the cost of a launch.

    The name is that of the table's GPU where there is one. Raises RuntimeError without a GPU that CUDA can use.
    """
    if find_device().type != "cuda":
        raise RuntimeError("calibrate: expected a GPU that CUDA can use, found none")
    device, properties = describe(), torch.cuda.get_device_properties()
    formats = {"fp16": torch.float16, "bf16": torch.bfloat16}
    rates = {name: _measure_products(dtype) for name, dtype in formats.items()}
    for name, precision in {"fp32": "ieee", "tf32": "tf32"}.items():
        if name == "fp32" or device.capability >= (8, 0):
            with multiplying_as(precision):
                rates[name] = _measure_products(torch.float32)
    return replace(
        gpu_here(properties.name, properties.total_memory, device.capability),
        memory=properties.total_memory,
        capability=device.capability,
        multiprocessors=properties.multi_processor_count,
        rates=tuple((format, rates[format]) for format in RATE_COLUMNS if format in rates),
        bandwidth=_measure_bandwidth(),
        cache=getattr(properties, "L2_cache_size", 0),
        kernel=_measure_kernel(),
        launch=_measure_launch(),
        spread=_SPREAD,
    )


def store(gpu: Gpu) -> str:
    """Keep a measured GPU in the reader's own table, in place of an earlier line. Returns the file's path."""
    path = own_table()
    gpus = (read_table(path) if path.is_file() else {}) | {gpu.name: gpu}
    with TABLE.open(encoding="utf-8", newline="") as file:
        columns = csv.DictReader(file).fieldnames
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="effgpu calibrate")
    writer.writeheader()
    writer.writerows(map(_row, gpus.values()))
    return str(write_atomic(path, text.getvalue()))


def _row(gpu: Gpu) -> dict[str, object]:
    """A line of the table, but for the sources."""
    rates = dict(gpu.rates)
    return {
        "name": gpu.name,
        "memory_GiB": f"{gpu.memory / GiB:.6f}",
        "capability": ".".join(map(str, gpu.capability)),
        "context_MiB": "-".join(str(size // MiB) for size in gpu.context),
        "multiprocessors": gpu.multiprocessors,
        **{column: f"{rates[name] / 1e12:.4g}" if name in rates else "" for name, column in RATE_COLUMNS.items()},
        "products_spread": f"{gpu.spread:g}",
        "bandwidth_GBps": f"{gpu.bandwidth / 1e9:.4g}",
        "l2_MiB": f"{gpu.cache / MiB:g}",
        "kernel_us": f"{gpu.kernel * 1e6:.3g}",
        "launch_us": f"{gpu.launch * 1e6:.3g}",
    }


def _time(step: Callable[[], object]) -> float:
    """The median second of a step that has run for a while: with a warm GPU, as a training loop finds it."""
    return median(time_for(step, SECONDS)[-100:])


def _measure_products(dtype: torch.dtype) -> float:
    a, b = _draw(dtype), _draw(dtype)
    out = torch.empty_like(a)
    return 2 * SIZE**3 / _time(lambda: torch.mm(a, b, out=out))


def _draw(dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator(find_device()).manual_seed(0)  # leaves the global generator as it is
    return torch.randn(SIZE, SIZE, device=find_device(), generator=draw).to(dtype)


def _measure_bandwidth() -> float:
    source = torch.zeros(GiB // 4, device=find_device())
    target = torch.empty_like(source)
    return 2 * GiB / _time(lambda: target.copy_(source))


def _measure_kernel() -> float:
    """Seconds of a kernel that does nothing much, in a queue that the CPU filled while the GPU was busy."""
    a, tiny = torch.zeros(SIZE, SIZE, device=find_device()), torch.zeros(1, device=find_device())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(3):
        torch.mm(a, a)  # 50 ms and more: the queue is full before it ends
        begin.record()
        for _ in range(_TINY):
            tiny.add_(1)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 1000 / _TINY)
    return min(found)


def _measure_launch() -> float:
    """Seconds of the CPU for an operation: a step so small that the GPU waits, over the calls that a walk counts."""
    return _time(_small()) / sum(segment.calls for segment in predict(_small, "A100 80 GB").segments)


def _small() -> Callable[[], None]:
    """A step of a transformer on one short text."""
    device = find_device()
    blocks = [nn.TransformerEncoderLayer(64, 2, 128, 0.0, batch_first=True, device=device) for _ in range(4)]
    model = nn.Sequential(*blocks)
    optimizer, inputs = torch.optim.AdamW(model.parameters()), torch.zeros(1, 8, 64, device=device)

    def step() -> None:
        model(inputs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
