"""The machine: its name, what it supports, how much memory it has and how much of it is free."""

import contextlib
import gc
import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch

from effgpu.errors import BadArgument, CannotRun
from effgpu.measuring.torch_internals import clear_workspaces
from effgpu.units import MiB, check_positive, format_bytes

_CAPABILITY_OF = {
    "fp16 tensor cores": (7, 0),
    "torch.compile": (7, 0),
    "TF32": (8, 0),
    "flash attention": (8, 0),
    "2:4 sparsity": (8, 0),
    "fp8": (8, 9),
}
OUT_OF_MEMORY_PHRASES = (  # what messages of PyTorch and of NVIDIA's libraries say
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",
    "_ALLOCATION_FAILED",
)
# Of a full GPU, where a library makes its handle; but also of a GPU that has failed, as at a device-side assert.
FULL_OR_FAILED = "CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED"
_HANDLE = 512 * MiB  # more than cuBLAS or cuDNN takes for a handle and its kernels: a guess
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"  # with it, PyTorch's allocator counts nothing
AT_ONCE = "EFFGPU_AT_ONCE"  # how many lessons share a machine with a GPU
CHANGING = {  # the variables that change what is measured, and what they do to it
    "CUDA_LAUNCH_BLOCKING": "CUDA_LAUNCH_BLOCKING={} was set, so nothing overlaps.",
    AT_ONCE: "{} lessons ran at once, so waits for the CPU may be longer.",
}
_CGROUP = Path("/sys/fs/cgroup")
_VERSIONED = ("effgpu", "torch", "torchvision", "transformers", "datasets")

_limit: int | None = None  # the bytes that a step may allocate
_unlimited_share: float | None = None  # of the GPU, that this process may use where a limit allows less
_frozen = False


@dataclass(frozen=True)
class Device:
    """The machine that a result was measured on. What does not apply to a CPU is None.

    `memory` is in bytes. If the process may use only a part of the GPU, as with
    `PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.1`, `memory` is that part and the name says so. `variables`
    has those of `CHANGING` that are set.
    """

    name: str
    kind: Literal["cuda", "cpu"]
    memory: int | None
    cores: int
    multiprocessors: int | None = None
    capability: tuple[int, int] | None = None
    driver: str | None = None
    supports: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name as results show it. A CPU is always marked as one."""
        return self.name if self.kind == "cuda" else f"{self.name} (CPU, {self.cores} cores)"

    @property
    def slug(self) -> str:
        """The name as a file name: `nvidia-h200`, `cpu-amd-epyc-2-cores`."""
        name = self.name if self.kind == "cuda" else f"cpu {self.name} {self.cores} cores"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def choose_16_bits() -> torch.dtype:
    """Return the 16-bit format that this GPU is fast in: bfloat16, or float16 on one that only emulates bfloat16.

    A T4 is such a GPU. Without a GPU it is bfloat16. Lesson 08 writes it out.

    >>> with torch.autocast(device.type, choose_16_bits()):
    >>>     loss = cross_entropy(model(texts), labels)
    """
    emulated = torch.cuda.is_bf16_supported() and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if emulated else torch.bfloat16


def find_device() -> torch.device:
    """The device that effgpu measures: the current GPU, or the CPU if there is no GPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def check_accelerator() -> None:
    """Raise RuntimeError if this process uses an accelerator that effgpu cannot wait for, such as Apple's MPS.

    Its steps would be timed as a CPU's, without a wait: only the time that it takes to ask for them.
    """
    if torch.cuda.is_available() or (found := torch.accelerator.current_accelerator(True)) is None:
        return
    kind = found.type
    backend = getattr(torch, kind, None)
    count = getattr(backend, "current_allocated_memory", None) or getattr(backend, "memory_allocated", None)
    if count is None or count():
        text = f"effgpu measures CUDA's GPUs and CPUs, and cannot wait for the accelerator {kind!r}"
        raise CannotRun(f"{text}: move the model and the batches to the CPU, or use a machine with a CUDA GPU")


def check_gpus(used: list[int], what: str = "the step") -> None:
    """Raise ValueError if any of the GPUs that are used, by number, is not the current one."""
    here = torch.cuda.current_device() if used else None
    if len(used) > 1:
        raise BadArgument(f"{what} works on GPUs {', '.join(map(str, used))}, and effgpu times one: use one GPU")
    if used and used[0] != here:
        text = f"{what} works on GPU {used[0]}, and only the current one ({here}) is measured"
        raise BadArgument(f"{text}: call torch.cuda.set_device({used[0]}) first, or set CUDA_VISIBLE_DEVICES")


def describe() -> Device:
    """Describe this machine. Results are stored with this description."""
    versions = {"python": platform.python_version()} | {name: v for name in _VERSIONED if (v := _version(name))}
    if find_device().type == "cpu":
        return describe_cpu(versions)
    properties = torch.cuda.get_device_properties()
    memory = int((_unlimited_share or _share()) * properties.total_memory)
    part = "" if memory == properties.total_memory else f", {format_bytes(memory)} of it"
    capability = None if torch.version.hip else (properties.major, properties.minor)  # AMD's numbers are not CUDA's
    supports = {name: "yes" if capability >= least else "no" for name, least in _CAPABILITY_OF.items() if capability}
    return Device(
        properties.name + part,
        "cuda",
        memory,
        _count_cores(),
        properties.multi_processor_count,
        capability,
        _driver(),
        {"bf16": _bf16()} | supports,
        versions | {"cuda": torch.version.cuda},
        {name: os.environ[name] for name in CHANGING if os.environ.get(name, "0") not in ("", "0")},
    )


def describe_cpu(versions: dict[str, str]) -> Device:
    """Describe this machine's CPU, whether or not there is a GPU, for results with these versions of the libraries."""
    return Device(_cpu_name(), "cpu", psutil.virtual_memory().total, _count_cores(), versions=versions)


def free_memory() -> float:
    """Bytes that can be allocated now. A `memory_limit` counts.

    On a GPU: free memory, plus the unused blocks in the allocator's cache, up to the process's own share of the GPU.
    On a CPU: the memory that the operating system calls available, up to what a container's limit leaves.
    """
    if find_device().type == "cuda":
        free, total = torch.cuda.mem_get_info()
        allocated = torch.cuda.memory_allocated()
        own = int(_share() * total) - allocated
        return max(0, min(free + torch.cuda.memory_reserved() - allocated, own))
    available = min(psutil.virtual_memory().available, _left_in_container())
    return available if _limit is None else min(available, _limit)


def _left_in_container() -> float:
    """Bytes that Linux's control group leaves, without what it can take back of files; infinite without a limit."""
    for limit, taken in (("memory.max", "anon"), ("memory/memory.limit_in_bytes", "total_rss")):
        path = _CGROUP / limit
        with contextlib.suppress(OSError, ValueError):
            held = re.search(rf"^{taken} (\d+)", path.with_name("memory.stat").read_text(), re.MULTILINE)
            return int(path.read_text()) - int(held[1] if held else 0)
    return math.inf


@contextlib.contextmanager
def memory_limit(limit: float) -> Iterator[None]:
    """Limit the memory of what is built and run inside to `limit` bytes, as on a smaller card.

    A step is out of memory if its peak of allocated bytes is above the limit, on a CPU and on a GPU alike. What was
    allocated before does not count, and neither does the CUDA context. On a GPU the caching allocator is capped at the
    limit, too, so the allocation itself fails. As the cap counts reserved memory, fragmentation can make a step fail
    slightly below the limit. Limits nest: the tightest one holds.
    """
    check_positive(limit=limit)
    global _limit, _unlimited_share
    before, gpu = (_limit, _unlimited_share), torch.cuda.is_available()
    release_memory()  # the allocator would hand out cached blocks without checking the cap
    _limit = int(limit) if _limit is None else min(int(limit), _limit)
    if gpu:
        share = _share()
        _unlimited_share = _unlimited_share or share
        cap = (int(limit) + torch.cuda.memory_reserved()) / torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(share, cap))
    try:
        yield
    finally:
        _limit, _unlimited_share = before
        if gpu:
            torch.cuda.set_per_process_memory_fraction(share)


def current_limit() -> int | None:
    """The bytes that `memory_limit` allows a step at present, or None without a limit."""
    return _limit


def count_retries() -> int:
    """How often the GPU's allocator ran out, gave its cached blocks back and asked again: slow, but no error."""
    return torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0


def tell_spilled() -> list[str]:
    """One sentence where PyTorch holds more than the current GPU has, as Windows' drivers allow; none elsewhere.

    What is more lies in the host's memory, and each access crosses PCI Express. Lesson 22 says how to forbid it.
    """
    held, memory = torch.cuda.max_memory_reserved(), torch.cuda.get_device_properties().total_memory
    if held <= memory:
        return []
    text = f"PyTorch holds {format_bytes(held)} and the GPU has {format_bytes(memory)}"
    return [f"{text}: the driver keeps the rest in the host's memory, which is slow (lesson 22)"]


def release_memory() -> None:
    """Collect garbage and return the allocator's cached blocks to the GPU, with cuBLAS's workspaces."""
    gc.collect()
    if torch.cuda.is_available():
        clear_workspaces()  # without this, only the first model of a process would pay for them
        torch.cuda.empty_cache()


@contextlib.contextmanager
def random_states_kept() -> Iterator[None]:
    """At the end of the `with` block set the random generators back: the CPU's and, once in use, the current GPU's."""
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            with contextlib.suppress(RuntimeError):  # a GPU that has failed fails at this, too: the first error counts
                torch.cuda.set_rng_state(gpu)


@contextlib.contextmanager
def multiplying_as(precision: str) -> Iterator[None]:
    """Inside, a GPU multiplies fp32 tensors in this precision, "ieee" or "tf32", unless the code says otherwise."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Freeze existing objects so that gc.collect() stays fast, after a collection.

    On a CPU, that is one of young objects: torch.compile's own take 0.15 s, and old garbage fills no scarce memory.
    """
    global _frozen
    if _frozen:  # gc.get_freeze_count() does not say: Python 3.12 and later freeze objects of their own
        yield
        return
    if torch.cuda.is_available():
        release_memory()
    else:
        gc.collect(1)
    gc.freeze()
    _frozen = True
    try:
        yield
    finally:
        _frozen = False
        gc.unfreeze()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory: by its type, or by its message if a library raised a plain RuntimeError."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    if "NVML_SUCCESS ==" in text:  # the allocator ran out, then failed to ask NVML: pytorch/pytorch#112377
        return "CUDACachingAllocator.cpp" in text
    if "unable to find an engine" in text:  # cuDNN, also if no algorithm fits into the memory that is left
        return _limit is not None or (torch.cuda.is_available() and _share() < 1)
    if any(words in text for words in FULL_OR_FAILED):
        return vars(error).setdefault("_effgpu_full", _is_full())  # as it was at first: later, its memory is free
    return any(words in text for words in OUT_OF_MEMORY_PHRASES)


def _is_full() -> bool:
    """Whether the GPU has too little left for a library's handle."""
    with contextlib.suppress(RuntimeError):  # a GPU that has failed does not say
        return torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < _HANDLE
    return False


def _share() -> float:
    """The share of the GPU that this process may use."""
    return min(1.0, torch.cuda.get_per_process_memory_fraction())  # cudaMallocAsync's begins far above 1


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _bf16() -> str:
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "yes"
    return "emulated" if torch.cuda.is_bf16_supported() else "no"


def _driver() -> str | None:
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()
