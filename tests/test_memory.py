"""Tests of effgpu.memory: the trace against torch's tracker, the allocator's statistics and arithmetic, by phase."""

import os
import subprocess
import sys
import traceback
import weakref
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint_sequential

from effgpu.measuring.device import find_device, memory_limit, release_memory
from effgpu.measuring.memory import Trace, peak_bytes, saved_bytes, trace
from effgpu.units import GiB, MiB


def train(model, batch):
    device = find_device()
    model, batch = model.to(device), batch.to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return train(nn.TransformerEncoder(layer, 2), torch.randn(8, 64, 64))


def convolutions():
    layers = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return train(nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16 * 16, 10)), torch.randn(16, 3, 32, 32))


def checkpointed():
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks)
    model.forward = lambda batch: checkpoint_sequential(blocks, 4, batch, use_reentrant=False)
    return train(model, torch.randn(2048, 64))


MODELS = [transformer, convolutions, checkpointed]


def track(variant):
    """The peak of one step by torch's own tracker, which follows tensors and not the allocator."""
    tracker = MemTracker()
    with tracker:
        step = variant()
        for _ in range(3):
            tracker.reset_mod_stats()
            step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def order(phases):
    """Each run of one phase."""
    return [phase for phase, _ in groupby(phases)]


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("variant", MODELS)
def test_trace_agrees_with_torchs_tracker_repeats_itself_and_goes_forward_backward_optimizer(variant):
    first = trace(variant)
    before = torch.ones(4 * MiB)  # what is alive before the variant is built does not count
    assert trace(variant) == first and before.sum() > 0
    assert first.peak == pytest.approx(track(variant), rel=0.01)
    assert order(first.phases) == ["forward", "backward", "optimizer"]
    assert len(first.phases) == len(first.bytes)
    assert (first.reserved, first.allocated_peak, first.difference) == (None, None, None)


def test_trace_starts_and_ends_with_parameters_optimizer_state_and_inputs():
    recorded = trace(lambda: train(nn.Linear(64, 64), torch.randn(16, 64)))
    parameters, counters = 64 * 64 + 64, 2  # AdamW keeps two moments of each, and counts the steps of each tensor
    expected = 4 * (3 * parameters + counters + 16 * 64)
    assert recorded.start == recorded.bytes[0] == recorded.bytes[-1] == min(recorded.bytes) == expected


def test_trace_of_one_allocation_is_exact():
    recorded = trace(lambda: lambda: torch.empty(1000, dtype=torch.uint8) is None)
    assert recorded == Trace((0, 1000, 0), ("forward",) * 3)
    assert repr(recorded) == "Trace(peak=1000 B, start=0 B, events=2)"
    assert trace(lambda: lambda: None) == Trace((0,), ("forward",))
    assert Trace((-8, -4), ("forward", "forward")).peak == 0  # it freed what was not its own


def test_the_peak_is_the_allocators_where_it_has_one_and_a_difference_is_shown():
    curve = (100, 1000, 100), ("forward",) * 3
    agreeing, near, off = (Trace(*curve, 2000, peak) for peak in (1000, 1009, 900))
    assert (agreeing.peak, agreeing.difference) == (1000, 0) and "difference" not in repr(agreeing)
    assert (near.peak, near.difference) == (1009, -9) and "difference" not in repr(near)
    assert (off.peak, off.difference) == (900, 100)
    assert repr(off) == "Trace(peak=900 B, start=100 B, events=2, difference=100 B)"


def test_what_is_built_before_the_step_and_freed_in_it_is_exact():
    """Build and warm-up are recorded in a session of their own, of which only the sum is kept."""

    def variant():
        built, warm = [torch.empty(3 * MiB, dtype=torch.uint8)], []

        def step():
            if warm:
                built.clear()
                torch.empty(100, dtype=torch.uint8)
                warm.clear()
            else:
                warm.append(torch.empty(2 * MiB, dtype=torch.uint8))

        return step

    assert trace(variant, warmup=1).bytes == (5 * MiB, 2 * MiB, 2 * MiB + 100, 2 * MiB, 0)


def test_garbage_is_collected_before_the_step_and_not_in_it():
    calls = []

    def step():
        calls.append(1)
        cycle = [torch.empty(MiB, dtype=torch.uint8)]
        cycle.append(cycle)
        del cycle
        if len(calls) == 3:
            [[] for _ in range(100_000)]  # so many that Python would collect

    assert trace(lambda: step).bytes == (0, MiB)


def test_nothing_of_a_freed_compiled_variant_stays():
    """With one that was compiled before, the second would run its graph, and hold what that holds."""
    held = []

    def backend(graph, _):
        constant = torch.ones(MiB)
        held.append(weakref.ref(constant))
        return lambda *inputs: (constant, graph(*inputs))[1]

    def variant():
        compiled, x = torch.compile(lambda x: x * 2 + 1, backend=backend), torch.ones(256)
        return lambda: compiled(x)

    first, second = trace(variant), trace(variant)
    assert [ref() for ref in held] == [None, None]
    assert first == second and first.start == 4 * MiB + 1024


def test_what_comes_after_the_last_backward_pass_is_the_optimizers_and_clearing_gradients_no_phase_of_its_own():
    def variant():
        model, batch = nn.Linear(64, 64), torch.randn(16, 64)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu")

        def step():
            for _ in range(2):
                loss = scaler.scale(model(batch).square().mean())
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
            return (torch.ones(1) + 1).item()

        return step

    assert order(trace(variant).phases) == ["forward", "backward", "forward", "backward", "optimizer"]


def test_a_limit_on_a_cpu_is_out_of_memory():
    variant = lambda: lambda: torch.ones(1000)
    with memory_limit(4000):
        assert peak_bytes(variant) == 4000
    with memory_limit(3999):
        assert peak_bytes(variant) is None
        with pytest.raises(torch.OutOfMemoryError, match="out of memory: the step needs"):
            trace(variant)


def test_a_library_that_is_out_of_memory_is_out_of_memory():
    def variant():
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    with pytest.raises(torch.OutOfMemoryError, match="CUBLAS_STATUS_ALLOC_FAILED") as raised:
        trace(variant)
    assert "in variant" in "".join(traceback.format_exception(raised.value)), "where it came from is lost"


def test_a_profiler_in_the_step_or_around_it_is_an_error_that_says_so():
    def step():
        with torch.profiler.profile():
            pass

    told = pytest.raises(RuntimeError, match="Profiler is already enabled")
    with told:
        trace(lambda: step)
    with torch.autograd.profiler_legacy.profile(), told:
        trace(lambda: lambda: None)
    assert trace(lambda: lambda: torch.ones(4)).peak == 16


def test_a_trace_leaves_torchs_profiler_alone(monkeypatch):
    """On a GPU it would attach CUPTI to the process, and all that is timed afterwards would be slower."""
    monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", None)
    monkeypatch.setattr(torch.autograd.profiler, "_enable_profiler", None)
    with pytest.raises(TypeError), torch.profiler.profile():
        pass
    assert trace(lambda: lambda: torch.ones(4)).peak == 16


def test_where_the_allocator_counts_nothing_there_is_no_trace(simulate_gpu, monkeypatch):
    simulate_gpu()
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(RuntimeError, match="with PYTORCH_NO_CUDA_MEMORY_CACHING, PyTorch counts no memory"):
        trace(lambda: lambda: None)


@pytest.mark.parametrize(("here", "told"), [(0, r"GPU 1.*torch.cuda.set_device\(1\)"), (1, "GPUs 0, 1")])
def test_a_step_on_another_gpu_than_the_measured_one_is_refused(here, told, simulate_gpu):
    gpu = simulate_gpu()
    gpu.asked = [5, 7]

    def step():
        gpu.asked = [gpu.asked[0] + here, gpu.asked[1] + 1]

    with pytest.raises(ValueError, match=told):
        trace(lambda: step)


@pytest.mark.parametrize("has_snapshot", [True, False])
def test_the_peak_on_a_gpu_is_the_allocators_and_starts_above_what_was_there(has_snapshot, simulate_gpu, monkeypatch):
    """Also where the allocator cannot say what CUDA graphs hold."""

    def refuse():
        raise RuntimeError("cudaMallocAsync does not yet support snapshot")

    def variant():
        gpu.allocated += 3 * MiB
        return step

    def step():
        gpu.most_allocated = max(gpu.most_allocated, gpu.allocated + 40 * MiB)
        gpu.most_reserved = max(gpu.most_reserved, 4 * GiB)

    gpu = simulate_gpu()
    gpu.allocated, gpu.most_allocated = 5 * MiB, 900 * MiB  # an earlier variant's peak
    gpu.reserved, gpu.most_reserved = 2 * GiB, 50 * GiB
    if not has_snapshot:
        monkeypatch.setattr(torch.cuda, "memory_snapshot", refuse)
    recorded = trace(variant)
    assert recorded.reserved == 2 * GiB
    assert (recorded.start, recorded.peak, recorded.bytes) == (3 * MiB, 43 * MiB, (3 * MiB,))
    assert recorded.difference == -40 * MiB, "no allocation of a simulated GPU is recorded"


def test_what_a_cuda_graph_keeps_for_its_replays_counts(simulate_gpu):
    gpu = simulate_gpu()

    def segment(pool, total, allocated=0, device=0):
        sizes = {"total_size": total, "allocated_size": allocated}
        return {"segment_pool_id": (0, pool), "device": device} | sizes

    gpu.segments = [segment(0, 32 * MiB), segment(7, 64 * MiB)]  # the ordinary pool, and an earlier graph's

    def variant():
        gpu.segments = [*gpu.segments, segment(8, 8 * MiB, 3 * MiB), segment(8, 16 * MiB, device=1)]
        return lambda: None

    recorded = trace(variant)
    assert (recorded.bytes, recorded.peak) == ((5 * MiB,), 5 * MiB)


# What autograd saves


def test_saved_bytes_of_a_chain_by_arithmetic():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    batch = torch.randn(32, 16)
    inputs_of_each = 32 * (16 + 64 + 64)  # of the linear, the GELU and the linear
    assert saved_bytes(lambda: model(batch).sum()) == 4 * inputs_of_each
    assert saved_bytes(lambda: model.double()(batch.double()).sum()) == 8 * inputs_of_each


def test_parameters_are_not_saved_bytes_not_even_seen_through_a_view():
    weight = nn.Parameter(torch.randn(64, 64))
    batch = torch.randn(8, 64, requires_grad=True) * 1
    assert saved_bytes(lambda: batch @ weight) == batch.nbytes
    assert saved_bytes(lambda: batch @ weight.t()) == batch.nbytes
    weight.requires_grad_(False)  # as under a LoRA: the input's gradient needs the weight, which is there anyway
    assert saved_bytes(lambda: batch @ weight) == 0
    leaf = torch.ones(64, requires_grad=True)  # as a weight is that is no parameter
    assert saved_bytes(lambda: leaf * leaf) == 0


def test_a_graph_that_is_dropped_on_the_way_counts_only_while_it_is_there():
    x = torch.ones(1024, requires_grad=True)
    assert saved_bytes(lambda: [(x * 2).exp().sum().item() for _ in range(4)]) == 4096
    assert saved_bytes(lambda: [(x * 2).exp().sum() for _ in range(4)]) == 4 * 4096
    assert saved_bytes(lambda: [x[:n].exp().sum().item() for n in (4, 1024, 4)]) == 4096


def test_a_storage_saved_more_than_once_counts_once():
    start = torch.randn(100, requires_grad=True)

    def forward():
        x = start * 1
        return (x[:50].sin() * x[50:].cos()).sum()  # keeps x's storage for both, and both results

    assert saved_bytes(forward) == start.nbytes + 2 * 50 * 4


@pytest.mark.gpu
@pytest.mark.parametrize("variant", MODELS)
def test_trace_agrees_with_the_allocators_own_statistics(variant):
    release_memory()
    before = torch.cuda.memory_allocated()
    recorded = trace(variant)
    assert recorded.difference == 0
    assert recorded.reserved >= recorded.peak > recorded.start > 0
    assert order(recorded.phases) == ["forward", "backward", "optimizer"]
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
@pytest.mark.parametrize("config", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_trace_works_with_every_allocator(config):
    alone = """
import torch, effgpu
weights = torch.ones(2**20, device="cuda")
step = lambda: (torch.ones(2**20, device="cuda") + weights).sum().item()
print(effgpu.trace(lambda: step).peak)
"""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": config}
    told = subprocess.check_output([sys.executable, "-c", alone], env=environment)
    assert 8 * MiB <= int(told) < 9 * MiB


@pytest.mark.gpu
def test_the_memory_of_a_cuda_graph_is_not_nothing():
    def variant():
        batch, graph = torch.randn(MiB, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = [batch.sin() for _ in range(8)]  # 4 MiB each, alive at once
            out = torch.stack(held).sum()
            held.clear()

        def step():
            graph.replay()
            return out

        return step

    assert trace(variant).peak >= 9 * 4 * MiB
    release_memory()
