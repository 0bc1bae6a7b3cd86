"""What the tests share: one thread, the skip of `gpu` tests, a simulated GPU, results made by hand."""

import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two torch processes on two cores are 40 times slower
if isa := os.environ.get("ATEN_CPU_CAPABILITY"):  # torch.compile would reuse code for other instructions, and crash
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"torchinductor_{isa}"))

import effgpu  # isort: skip  # noqa: F401  before torch: it sets KINETO_LOG_LEVEL

import gc
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pynvml
import pytest
import torch

from effgpu.measuring import device, timing
from effgpu.measuring.device import Device
from effgpu.measuring.intervals import FEWEST_BLOCKS
from effgpu.measuring.measurement import OUT_OF_MEMORY, Measurement
from effgpu.predicting.full_size import FullSize
from effgpu.units import GiB

hypothesis.settings.register_profile("effgpu", deadline=None, max_examples=60)  # no test depends on the machine's speed
hypothesis.settings.load_profile("effgpu")

HAS_GPU = torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    """What runs a lesson, or is slow, comes first, then the file with the most tests."""
    in_file = Counter(item.path for item in items)

    def place(item):
        is_long = item.path.suffix == ".ipynb" or item.get_closest_marker("slow")
        return 0 if is_long else 1, -in_file[item.path]

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
        if item.get_closest_marker("real") and not os.environ.get("EFFGPU_REAL"):
            item.add_marker(pytest.mark.skip(reason="downloads; left to `make test-real`"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Under xdist a notebook's cells stay together, as a file's tests do; what runs a whole lesson may go anywhere.

    The order of the collection stays: the longest first, so that no process is left alone with one of them at the end.
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            whole = nodeid.startswith(("tests/test_lessons.py", "tests/test_lesson_runs.py"))
            return nodeid if whole else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _same_everywhere(request, monkeypatch):
    """Measurements are as long as they say, and every test that is not marked `gpu` sees a machine without one."""
    monkeypatch.delenv("EFFGPU_SECONDS", raising=False)
    if not request.node.get_closest_marker("gpu"):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def _short_collections(monkeypatch):
    """What was there before a test, a million objects of libraries, need not be looked at in every collection of it."""
    gc.collect()
    gc.freeze()
    monkeypatch.setattr(device, "_frozen", True)


class SimulatedGpu:
    """The face of a GPU: it says what it is, and logs what it is asked for. Its clock is moved by the tests' steps."""

    def __init__(self, name, capability, memory):
        uuid = "01234567-89ab-cdef-0123-456789abcdef"
        self.properties = SimpleNamespace(name=name, total_memory=memory, multi_processor_count=132, uuid=uuid)
        self.properties.major, self.properties.minor = capability
        self.log = []
        self.clock = 0.0  # seconds
        self.reserved, self.allocated, self.most_reserved, self.most_allocated = 0, 0, 0, 0
        self.elsewhere = 0  # bytes of the card outside of PyTorch's allocator: CUDA's context, other processes
        self.asked = [0]  # how often the allocator of each GPU in the machine was asked for memory
        self.segments = []  # as torch.cuda.memory_snapshot tells them
        self.fraction = 1.0
        self.retries = 0  # of the allocator, after it has given its cached blocks back

    def reset_peaks(self):
        self.most_reserved, self.most_allocated = self.reserved, self.allocated

    def step(self, seconds=0.01):
        self.log.append("step")
        self.clock += seconds


@pytest.fixture
def simulate_gpu(monkeypatch):
    """A function that puts a simulated GPU in place of torch.cuda's."""

    def simulate(name="NVIDIA H200", capability=(9, 0), memory=140 * GiB):
        gpu = SimulatedGpu(name, capability, memory)

        class Event:
            def __init__(self, enable_timing=False):
                self.timing = enable_timing

            def record(self):
                gpu.log.append("record")
                self.at = gpu.clock

            def synchronize(self):
                gpu.log.append("wait for event")

            def elapsed_time(self, later):
                assert self.timing and later.timing, "elapsed_time needs enable_timing=True"
                assert gpu.log[-1] == "wait", "elapsed_time needs a finished event"
                return (later.at - self.at) * 1000

        replaced = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "device_count": lambda: len(gpu.asked),
            "get_rng_state": lambda device=None: gpu.log.append("state kept") or "the state",
            "set_rng_state": lambda state, device=None: gpu.log.append("state given back"),
            "get_device_properties": lambda device=None: gpu.properties,
            "is_bf16_supported": lambda including_emulation=True: including_emulation or capability >= (8, 0),
            "memory_reserved": lambda device=None: gpu.reserved,
            "memory_allocated": lambda device=None: gpu.allocated,
            "max_memory_reserved": lambda device=None: gpu.most_reserved,
            "max_memory_allocated": lambda device=None: max(gpu.most_allocated, gpu.allocated),
            "reset_peak_memory_stats": lambda device=None: gpu.reset_peaks(),
            "mem_get_info": lambda device=None: (memory - gpu.reserved - gpu.elsewhere, memory),
            "get_per_process_memory_fraction": lambda device=None: gpu.fraction,
            "set_per_process_memory_fraction": lambda fraction, device=None: setattr(gpu, "fraction", fraction),
            "memory_stats": lambda device=0: {
                "num_alloc_retries": gpu.retries,
                "allocation.all.allocated": gpu.asked[device],
            },
            "memory_snapshot": lambda: gpu.segments,
            "empty_cache": lambda: gpu.log.append("empty cache"),
            "synchronize": lambda device=None: gpu.log.append("wait"),
            "Event": Event,
        }
        for attribute, value in replaced.items():
            monkeypatch.setattr(torch.cuda, attribute, value)
        clear = lambda: gpu.log.append("clear workspaces")
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
        return gpu

    return simulate


@pytest.fixture
def without_onednn(monkeypatch):
    """Convolutions that take the same memory on every CPU: oneDNN copies weights into the order that the CPU likes."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)


@pytest.fixture
def energy_counter():
    """Skips where NVML itself, and not effgpu, has no counter of energy."""
    try:
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties().uuid).removeprefix("GPU-")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except pynvml.NVMLError as error:
        pytest.skip(f"NVML: {error}")


@pytest.fixture
def cpu():
    """A CPU that results were measured on."""
    return Device("Test CPU", "cpu", 8 * GiB, 2, versions={"python": "3.11.0", "torch": "2.15.0"})


@pytest.fixture
def make_gpu():
    """A function that describes a GPU that results were measured on."""

    def make(name="NVIDIA Test"):
        versions = {"torch": "2.15.0", "cuda": "13.0"}
        return Device(name, "cuda", 80 * GiB, 16, 132, (9, 0), "580.1", {"bf16": "yes"}, versions)

    return make


@pytest.fixture
def make_measurement(cpu):
    """A function that makes a measurement by hand: `make_measurement("fp32", 0.02)` took 20 ms in each of 15 blocks."""

    def make(label, seconds=0.02, *, blocks=FEWEST_BLOCKS, device=cpu, failed=False, **fields):
        if failed:
            return Measurement(label, (), device, failed=OUT_OF_MEMORY, **fields)
        wobble = [1 + 0.002 * (number - (blocks - 1) / 2) for number in range(blocks)]
        fields = {"peak_allocated": 1000} | fields
        return Measurement(label, tuple((seconds * w, seconds * w) for w in wobble), device, **fields)

    return make


PARTS = ("matrix products", "everything else", "optimizer")


def predicted_sizes(old, new, verdicts=("does not fit", "fits"), labels=("old", "new")):
    """What two variants are predicted to take on a T4, where the first needs 4 s and the second a quarter of it."""
    times = (
        {"seconds": (4.0, 3.0, 5.0), "parts": dict(zip(PARTS, (3.0, 0.5, 0.5)))},
        {"seconds": (1.0, 0.8, 1.3), "parts": dict(zip(PARTS, (0.5, 0.25, 0.0))), "ratio": (0.25, 0.2, 0.3)},
    )
    return {
        label: (FullSize("T4", 15 * GiB, size, verdict, (size, size + 2 * GiB), "matrix products", **time),)
        for label, size, verdict, time in zip(labels, (old, new), verdicts, times)
    }


def tiny_variant(width=8):
    """The smallest training that there is: a linear layer and SGD."""
    model = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(4, width)

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.fixture
def tiny():
    """The variant `tiny_variant`."""
    return tiny_variant


def variant_file(width=8):
    """The text of a Python file with a function, `variant`, that builds a step of a linear layer of this width."""
    return f"""
import torch

def variant():
    model = torch.nn.Linear({width}, {width})

    def step():
        model(torch.ones(4, {width})).sum().backward()

    return step
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder to run commands in: in this process, or in one of its own with this package and no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(timing.CAP, "inf")
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)
