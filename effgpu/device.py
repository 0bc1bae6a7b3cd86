"""What this machine is, what it supports, and how much memory there is to use."""

import contextlib
import gc
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from effgpu.units import GiB, check_positive, format_bytes

LARGE_GPU = 36 * GiB  # the line between a gaming card or a T4 and a data-centre card
_CAPABILITY_OF = {
    "fp16 tensor cores": (7, 0),
    "torch.compile": (7, 0),
    "TF32": (8, 0),
    "flash attention": (8, 0),
    "2:4 sparsity": (8, 0),
    "fp8": (8, 9),
}
_VERSIONED = ("effgpu", "torch", "torchvision", "transformers", "datasets")

_limit: int | None = None
_fraction_before_limits = 1.0
_sparing = False


@dataclass(frozen=True)
class Device:
    """What a result was measured on. `memory` in bytes; what does not apply to a CPU is None.

    A GPU of which the process may take a part only (`PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.1`) has that
    part as its memory, and its name says so.
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

    @property
    def label(self) -> str:
        """The name as results carry it: a CPU is always called one."""
        return self.name if self.kind == "cuda" else f"{self.name} (CPU, {self.cores} cores)"

    @property
    def slug(self) -> str:
        """The name as a file name: `nvidia-h200`, `cpu-amd-epyc-2-cores`."""
        name = self.name if self.kind == "cuda" else f"cpu {self.name} {self.cores} cores"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def find_device() -> torch.device:
    """The device that everything here measures: the current GPU, or the CPU where there is none."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def describe() -> Device:
    """This machine, as a value that results are stored with."""
    versions = {"python": platform.python_version()} | {name: v for name in _VERSIONED if (v := _version(name))}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if find_device().type == "cpu":
        return Device(_cpu_name(), "cpu", _total_host_memory(), cores, versions=versions)
    properties = torch.cuda.get_device_properties()
    capability, memory = (properties.major, properties.minor), _gpu_memory()
    part = "" if memory == properties.total_memory else f", {format_bytes(memory)} of it"
    return Device(
        properties.name + part,
        "cuda",
        memory,
        cores,
        properties.multi_processor_count,
        capability,
        _driver(),
        {"bf16": _bf16()} | {name: "yes" if capability >= least else "no" for name, least in _CAPABILITY_OF.items()},
        versions | {"cuda": torch.version.cuda or "rocm"},
    )


def by_tier(*, cpu, small, large):
    """The sizes that fit this machine: `cpu`, `small` (a GPU under 36 GiB: T4, gaming cards) or `large`.

    >>> batch, seq = by_tier(cpu=(8, 64), small=(32, 128), large=(128, 128))
    """
    if find_device().type == "cpu":
        return cpu
    return large if _gpu_memory() >= LARGE_GPU else small


@contextlib.contextmanager
def memory_limit(limit: float) -> Iterator[None]:
    """Let what is built inside take at most `limit` bytes, so that "does not fit" happens here as on a smaller card.

    On a GPU the caching allocator is capped (`torch.cuda.set_per_process_memory_fraction`) at so many bytes more than
    it has in use. On a CPU a step whose recorded peak is above the limit counts as out of memory. Limits nest; the
    tightest one holds.
    """
    check_positive(limit=limit)
    global _limit, _fraction_before_limits
    before, gpu = _limit, torch.cuda.is_available()
    if gpu and before is None:
        _fraction_before_limits = torch.cuda.get_per_process_memory_fraction()
    release_memory()  # blocks in the cache would be handed out without a look at the limit
    total = int(limit) + (torch.cuda.memory_reserved() if gpu else 0)
    _limit = total if before is None else min(total, before)
    _cap_allocator()
    try:
        yield
    finally:
        _limit = before
        _cap_allocator()


def current_limit() -> int | None:
    """The bytes that `memory_limit` lets the process hold at present, or None."""
    return _limit


def release_memory() -> None:
    """Collect what nothing refers to any more, and give the allocator's cached blocks back to the device.

    Among them cuBLAS's workspaces, or only the first model in a process would seem to need them.
    """
    gc.collect()
    if torch.cuda.is_available():
        getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()  # there is no public way: pytorch/pytorch#184084
        torch.cuda.empty_cache()


@contextlib.contextmanager
def older_objects_spared() -> Iterator[None]:
    """Let the garbage collector pass over all that is older than the measuring: with a few libraries loaded, each
    collection would take tenths of a second.
    """
    global _sparing
    if _sparing:  # gc.get_freeze_count() does not tell: Python 3.12 and later keep objects of their own there
        yield
        return
    release_memory()
    gc.freeze()
    _sparing = True
    try:
        yield
    finally:
        _sparing = False
        gc.unfreeze()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: PyTorch's own type, or one of the messages that have none."""
    told = ("out of memory", "can't allocate memory", "not enough memory", "_STATUS_ALLOC_FAILED", "_ALLOCATION_FAILED")
    told += ("unable to find an engine",) * _is_limited()  # of cuDNN, where no algorithm has room to work in
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if "NVML_SUCCESS ==" in str(error):  # the allocator, out of memory, found NVML out of order: pytorch/pytorch#112377
        return "CUDACachingAllocator.cpp" in str(error)
    return isinstance(error, RuntimeError) and any(text in str(error) for text in told)


def _cap_allocator() -> None:
    if torch.cuda.is_available():
        wanted = 1.0 if _limit is None else _limit / torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(_fraction_before_limits, wanted))


def _is_limited() -> bool:
    """Whether memory is cut short, by `memory_limit` or for the whole process."""
    return _limit is not None or (torch.cuda.is_available() and torch.cuda.get_per_process_memory_fraction() < 1)


def _gpu_memory() -> int:
    """Bytes of the current GPU that this process may take, whatever `memory_limit` holds at present."""
    fraction = torch.cuda.get_per_process_memory_fraction() if _limit is None else _fraction_before_limits
    return int(fraction * torch.cuda.get_device_properties().total_memory)


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


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _total_host_memory() -> int | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
