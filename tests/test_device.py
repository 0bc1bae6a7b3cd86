"""Tests of effgpu.device: the same questions answered on a CPU, on a T4 and on an H200, and limits that come undone."""

import gc
import json
import math
import os
from dataclasses import asdict

import psutil
import pynvml
import pytest
import torch

from effgpu.benching.processes import shows_out_of_memory
from effgpu.measuring import device, power
from effgpu.measuring.device import Device, current_limit, describe, free_memory, is_out_of_memory, memory_limit
from effgpu.units import GiB, MiB


def test_a_gpu_of_which_a_part_may_be_taken_is_as_large_as_that_part(simulate_gpu):
    """As with PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.125, whatever a limit does meanwhile."""
    gpu = simulate_gpu(memory=128 * GiB)
    gpu.fraction = 0.125
    for limit in (64 * GiB, 2 * GiB):
        with memory_limit(limit):
            assert gpu.fraction == min(limit / (128 * GiB), 0.125)
            assert (describe().name, describe().memory) == ("NVIDIA H200, 16.0 GiB of it", 16 * GiB)
        assert gpu.fraction == 0.125
    assert describe().slug == "nvidia-h200-16-0-gib-of-it"


def test_a_fraction_above_one_is_the_whole_gpu(simulate_gpu):
    """As cudaMallocAsync gives it, whose limit starts at 2**64 bytes."""
    gpu = simulate_gpu(memory=16 * GiB)
    gpu.fraction = 2**64 / gpu.properties.total_memory
    assert describe().memory == free_memory() == 16 * GiB and describe().name == "NVIDIA H200"
    with memory_limit(64 * GiB):
        assert gpu.fraction == 1.0


def test_describe_on_a_cpu():
    here = describe()
    assert here.kind == "cpu" and here.name.strip()
    assert here.cores >= 1 and here.memory > 64 * MiB
    assert (here.multiprocessors, here.capability, here.driver, here.supports) == (None, None, None, {})
    assert {"python", "effgpu", "torch"} <= set(here.versions) and here.versions["torch"] in torch.__version__
    assert json.loads(json.dumps(asdict(here))) == asdict(here)


def test_describe_on_a_t4_says_that_bf16_is_emulated_and_what_is_missing(simulate_gpu, monkeypatch):
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlSystemGetDriverVersion", lambda: "580.1")
    simulate_gpu("Tesla T4", capability=(7, 5), memory=15 * GiB)
    here = describe()
    assert (here.name, here.kind, here.memory) == ("Tesla T4", "cuda", 15 * GiB)
    assert (here.multiprocessors, here.capability, here.driver, here.variables) == (132, (7, 5), "580.1", {})
    assert list(here.supports.values()) == ["emulated", "yes", "yes", "no", "no", "no", "no"]
    assert list(here.supports)[:4] == ["bf16", "fp16 tensor cores", "torch.compile", "TF32"]
    assert "cuda" in here.versions
    simulate_gpu(capability=(8, 9))
    assert set(describe().supports.values()) == {"yes"}


def test_describe_says_what_changes_what_is_measured_and_goes_without_nvml(simulate_gpu, monkeypatch):
    def refuse():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    simulate_gpu()
    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("EFFGPU_AT_ONCE", "4")
    assert (describe().driver, describe().variables) == (None, {"CUDA_LAUNCH_BLOCKING": "1", "EFFGPU_AT_ONCE": "4"})
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    assert describe().variables == {"EFFGPU_AT_ONCE": "4"}, "which lets things overlap"


def test_amds_numbers_are_not_taken_for_cudas(simulate_gpu, monkeypatch):
    """An RX 6800 is gfx 10.3: as a compute capability, it would have all there is."""
    simulate_gpu(capability=(10, 3))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (describe().capability, describe().supports) == (None, {"bf16": "yes"})


def test_names_of_devices(cpu, make_gpu):
    assert cpu.label == "Test CPU (CPU, 2 cores)" and cpu.slug == "cpu-test-cpu-2-cores"
    assert make_gpu("NVIDIA H200").label == "NVIDIA H200" and make_gpu("NVIDIA H200").slug == "nvidia-h200"
    assert Device("NVIDIA A100-SXM4 (80GB)/x", "cuda", None, 1).slug == "nvidia-a100-sxm4-80gb-x"


def test_the_tightest_limit_holds_and_each_comes_undone(simulate_gpu):
    gpu = simulate_gpu(memory=16 * GiB)
    found = lambda: (current_limit(), gpu.fraction)
    with pytest.raises(KeyboardInterrupt), memory_limit(8 * GiB):
        with memory_limit(4 * GiB):
            assert found() == (4 * GiB, 0.25)
            with memory_limit(12 * GiB):
                assert found() == (4 * GiB, 0.25)
        assert found() == (8 * GiB, 0.5)
        raise KeyboardInterrupt
    assert found() == (None, 1.0)


def test_a_limit_is_for_what_comes_on_top_of_what_is_held(simulate_gpu, monkeypatch):
    gpu = simulate_gpu(memory=16 * GiB)
    gpu.reserved = 6 * GiB  # of which the cache gives back two
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(gpu, "reserved", 4 * GiB))
    with memory_limit(4 * GiB):
        assert (current_limit(), gpu.fraction) == (4 * GiB, 0.5)
        gpu.reserved = 6 * GiB
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        with memory_limit(3 * GiB):
            assert (current_limit(), gpu.fraction) == (3 * GiB, 0.5), "the outer cap holds as well"


def test_free_memory_of_a_gpu_counts_the_cache_and_its_caps(simulate_gpu):
    gpu = simulate_gpu(memory=16 * GiB)
    gpu.reserved, gpu.allocated, gpu.elsewhere = 6 * GiB, 5 * GiB, 1 * GiB
    assert free_memory() == 9 * GiB + 1 * GiB
    gpu.fraction = 0.5
    assert free_memory() == 8 * GiB - 5 * GiB
    with memory_limit(1 * GiB):  # above the 6 GiB that are reserved, of which 1 GiB is unused
        assert free_memory() == 2 * GiB
    gpu.fraction = 0.25
    assert free_memory() == 0


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "4000000\n", "memory.stat": "anon 1000000\nfile 2500000\n"}, 3_000_000),
        ({"memory.max": "max\n", "memory.stat": "anon 1000000\n"}, 3 * GiB),
        (
            {"memory/memory.limit_in_bytes": "4000000\n", "memory/memory.stat": "total_rss 1500000\n"},
            2_500_000,
        ),
        ({}, 3 * GiB),
    ],
)
def test_free_memory_of_a_container_is_what_its_limit_leaves(files, free, tmp_path, monkeypatch):
    """Else variants that do not fit together are built together, and the system kills the process."""
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    told = psutil.virtual_memory()._replace(available=3 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: told)
    assert free_memory() == free


def test_free_memory_of_a_cpu_is_what_is_available(monkeypatch):
    assert 0 < free_memory() <= describe().memory
    monkeypatch.setattr(device, "_left_in_container", lambda: math.inf)
    told = psutil.virtual_memory()._replace(available=3 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: told)
    assert free_memory() == 3 * GiB
    with memory_limit(1 * GiB):
        assert free_memory() == 1 * GiB


@pytest.mark.parametrize("limit", [0, math.inf, "1 GiB"])
def test_a_limit_is_a_positive_number(limit):
    with pytest.raises(ValueError, match=r"^limit: expected a positive number, got"), memory_limit(limit):
        pass
    assert current_limit() is None


def test_what_is_there_before_a_measurement_is_not_looked_at_in_its_collections(monkeypatch):
    """Also not where one begins within another; afterwards all is collected as before."""
    monkeypatch.setattr(device, "_frozen", False)
    gc.unfreeze()
    before = [object, []]
    is_seen = lambda: any(each is before for each in gc.get_objects())
    assert is_seen()
    with device.gc_frozen():
        with device.gc_frozen():
            assert not is_seen()
        assert not is_seen()
    assert is_seen()


def test_release_memory_empties_the_allocators_cache_after_all_that_holds_it(simulate_gpu):
    gpu = simulate_gpu()
    device.release_memory()
    assert gpu.log == ["clear workspaces", "empty cache"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError('NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() ... "CUDACachingAllocator.cpp":1135'), True),
        (RuntimeError('NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() ... "PeerToPeerAccess.cpp":78'), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected
    if expected:
        assert shows_out_of_memory(f"Traceback ...\n{type(error).__name__}: {error}\n")


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_a_library_that_makes_no_handle_is_out_of_memory_where_little_is_free(simulate_gpu, monkeypatch, library):
    text = f"CUDA error: {library}_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    assert not is_out_of_memory(RuntimeError(text)), "without a GPU"
    gpu, error = simulate_gpu(memory=16 * GiB), RuntimeError(text)
    assert not is_out_of_memory(error)
    gpu.elsewhere = 16 * GiB - 100 * MiB
    full = RuntimeError(text)
    assert is_out_of_memory(full)
    gpu.elsewhere = 0
    assert is_out_of_memory(full) and not is_out_of_memory(error), "as it was when it was caught"

    def fail(device=None):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    assert not is_out_of_memory(RuntimeError(text))
    assert shows_out_of_memory(text)
    assert not shows_out_of_memory(f"Indexing.cu:1: block: [0], thread: [1] Assertion `i < size` failed.\n{text}")


def test_cudnn_that_finds_no_engine_is_out_of_memory_under_a_limit_only(simulate_gpu):
    error = RuntimeError("GET was unable to find an engine to execute this computation")
    assert not is_out_of_memory(error)
    with memory_limit(GiB):
        assert is_out_of_memory(error)
    gpu = simulate_gpu()
    assert not is_out_of_memory(error)
    gpu.fraction = 0.1  # as PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:0.1 makes it
    assert is_out_of_memory(error)


@pytest.mark.gpu
def test_describe_on_this_gpu():
    here, properties = describe(), torch.cuda.get_device_properties()
    assert (here.name, here.kind, here.memory) == (properties.name, "cuda", properties.total_memory)
    assert here.capability == torch.cuda.get_device_capability()
    assert here.multiprocessors > 0 and here.cores == len(os.sched_getaffinity(0))
    assert here.driver or power.find_board() is None  # without NVML, as in some containers
    assert here.supports["bf16"] == "yes" or here.capability < (8, 0)
    assert json.loads(json.dumps(asdict(here)))["name"] == here.name


@pytest.mark.gpu
def test_a_limit_on_this_gpu_holds_and_comes_undone():
    take = lambda size: torch.empty(size, dtype=torch.uint8, device="cuda")
    device.release_memory()
    held = take(64 * MiB)  # is beside the limit
    take(512 * MiB)  # is in the cache, and not to be had from there
    with memory_limit(256 * MiB):
        take(240 * MiB)
        with pytest.raises(RuntimeError) as caught:
            take(272 * MiB)
        assert is_out_of_memory(caught.value)
    take(512 * MiB)
    del held
    device.release_memory()
