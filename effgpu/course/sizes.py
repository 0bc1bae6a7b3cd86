"""The sizes of the running example that fit the device, the batch too.

- On a CPU they are fixed (`CPU_SIZES`), because a CPU's speed varies too much to measure: lessons keep their output.
  A step takes 20 to 30 ms on two cores, and about 70 ms for images.
- On a GPU the model is fixed (`GPU_SIZES`). The batch is the power of two for which its forward and backward pass in
  16 bits come closest to 30 ms, and its step takes at most a third of the memory. It is measured once on a GPU and kept
  in `kept_batches()`: near the border, every process would choose anew.
  A model of other sizes gets the same batch, so that variants differ in what they say. `batch` overrides it.

With `width` but no `heads`, the heads are those of the default, or fewer if they do not divide the width.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from effgpu.course import corpus
from effgpu.course.corpus import check_int
from effgpu.course.transformer import Transformer
from effgpu.measuring import device_lock
from effgpu.measuring.device import choose_16_bits, describe, find_device, is_out_of_memory, release_memory
from effgpu.measuring.timing import time_for, time_steps
from effgpu.predicting.hardware import as_it_is
from effgpu.storing import write_atomic

CPU_SIZES = {
    "text_classifier": {"batch": 8, "length": 64, "layers": 4, "width": 128, "heads": 4, "vocabulary": 4096},
    "language_model": {"batch": 8, "length": 64, "layers": 2, "width": 128, "heads": 4, "vocabulary": 4096},
    "image_classifier": {"batch": 16, "size": 32},
}
GPU_SIZES = {
    "text_classifier": {"length": 256, "layers": 6, "width": 768, "heads": 12, "vocabulary": 16384},
    "language_model": {"length": 256, "layers": 6, "width": 768, "heads": 12, "vocabulary": 16384},
    "image_classifier": {"size": 96},
}
STEP_SECONDS = 0.03  # of the forward and backward pass on a GPU: what the optimizer takes does not grow with the batch
MEMORY_SHARE = 1 / 3  # of the GPU
BATCHES = [2**power for power in range(1, 13)]  # 2 to 4096
TIMED_STEPS = 5
_NO_PLACE = OSError, RuntimeError  # a full disk, or no home, as of a container's user without a name
WARM_UP = 0.1  # seconds for each batch: the clock has risen by the time that the batch is large


def choose_sizes(name: str, device, given: dict, seed: int) -> tuple[torch.device, dict[str, int]]:
    """The device, and the sizes as given or, where they are None, as they fit it. Raises TypeError or ValueError."""
    check_int("seed", seed)
    for size, value in given.items():
        if value is not None:
            check_int(size, value, {"vocabulary": 3, "size": corpus.SMALLEST_IMAGE}.get(size, 1))
    with as_it_is():  # for `effgpu.predict`, PyTorch answers as the GPU that is named, but the sizes fit the one here
        on_gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    fitting = (GPU_SIZES if on_gpu else CPU_SIZES)[name]
    device = find_device() if device is None else torch.device(device)
    sizes = {size: fitting.get(size) if value is None else value for size, value in given.items()}
    if "heads" in sizes:
        if given["heads"] is None:
            sizes["heads"] = math.gcd(sizes["heads"], sizes["width"])
        if sizes["width"] % sizes["heads"]:
            raise ValueError(f"heads: expected a divisor of width ({sizes['width']}), got {sizes['heads']}")
    if sizes["batch"] is None:
        sizes["batch"] = _measure_batch(name)
    return device, sizes


def choose_batch(measure: Callable[[int], tuple[float, int]], memory: float) -> int:
    """Return the batch, a power of two from 2 on, whose seconds come closest to STEP_SECONDS.

    `measure(batch)` returns seconds and peak bytes. The peak stays within MEMORY_SHARE of `memory`
    bytes. Running out of memory ends the search. The result is 2 even where that takes too much.
    """
    chosen = BATCHES[0]
    for batch in BATCHES:
        try:
            seconds, peak = measure(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        if seconds > STEP_SECONDS * math.sqrt(2) or peak > MEMORY_SHARE * memory:
            break
        chosen = batch
        if seconds >= STEP_SECONDS / math.sqrt(2):  # twice the batch would be farther off
            break
    return chosen


def kept_batches() -> Path:
    """Where the batches that fit this machine's GPUs are kept. Without the file they are measured anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effgpu" / "batches.json"


@cache
def _measure_batch(name: str) -> int:
    """The batch that fits the current GPU."""
    from effgpu.predicting.translator import on_real_tensors

    with device_lock.taken(), on_real_tensors(), as_it_is():
        device, kept = describe(), _read_batches()
        key = f"{name} {GPU_SIZES[name]} on {device.name} with torch {device.versions['torch']}"
        if key in kept:
            return kept[key]
        try:
            with seeded(0, find_device()):
                chosen = choose_batch(lambda batch: _measure_step(name, batch), device.memory)
        finally:
            release_memory()
        with contextlib.suppress(*_NO_PLACE):  # then the next process measures, too
            write_atomic(kept_batches(), json.dumps(kept | {key: chosen}, indent=0))
        return chosen


def _read_batches() -> dict[str, int]:
    """The kept batches; none where the file is not there or is no JSON."""
    with contextlib.suppress(*_NO_PLACE, ValueError):
        return dict(json.loads(kept_batches().read_text()))
    return {}


def _measure_step(name: str, batch: int) -> tuple[float, int]:
    """Seconds of forward and backward pass in 16 bits, and peak bytes of a training step, on the current GPU."""
    before, sizes = torch.cuda.memory_allocated(), GPU_SIZES[name]
    if name == "image_classifier":
        model, inputs = make_resnet(), torch.rand(batch, 3, sizes["size"], sizes["size"])
    else:
        causal = name == "language_model"
        model = Transformer(sizes["vocabulary"] if causal else len(corpus.PACKAGES), **sizes, causal=causal)
        inputs = torch.randint(sizes["vocabulary"], (batch, sizes["length"]))
    dtype = choose_16_bits()
    optimizer = torch.optim.AdamW(model.parameters())

    def passes():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            logits = model(inputs).flatten(0, -2)
            loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
        loss.backward()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the optimizer's state is there from the second step on
        passes()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    time_for(passes, WARM_UP)
    return median(time_steps(passes, TIMED_STEPS)), peak


def make_resnet() -> nn.Module:
    """torchvision's ResNet-18 with a class for each character of `corpus.Glyphs`, and random weights."""
    from torchvision.models import resnet18

    return resnet18(num_classes=len(corpus.Glyphs.classes))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Make tensors on `device`, from random generators that start at `seed`, and put the generators back."""
    gpus = []
    if device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(gpus), device:
        for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)):
            generator.manual_seed(seed)  # torch.manual_seed would seed every other GPU, too
        yield
