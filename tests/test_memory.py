"""Tests of effgpu.memory: the trace against torch's own tracker and against arithmetic, phase by phase."""

import gc
import subprocess
import sys
import weakref
from contextlib import nullcontext
from itertools import groupby

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

from effgpu.device import find_device, memory_limit, release_memory
from effgpu.memory import Trace, peak_bytes, saved_bytes, trace
from effgpu.units import GiB, MiB


def train(model, batch, compute_loss=lambda model, batch: model(batch).float().square().mean()):
    device = find_device()
    model, batch = model.to(device), batch.to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        compute_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_mlp(blocks=1):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(blocks))
    )


def transformer():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return train(nn.TransformerEncoder(layer, 2), torch.randn(8, 64, 64))


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 500, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="eager"))
    ids = torch.randint(500, (4, 64))
    return train(
        model, ids, lambda model, ids: nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten())
    )


def resnet():
    from torchvision.models import resnet18

    return train(resnet18(num_classes=10), torch.randn(2, 3, 64, 64))


def checkpointed():
    def compute_loss(model, batch):
        for block in model:
            batch = checkpoint(block, batch, use_reentrant=False)
        return batch.square().mean()

    return train(make_mlp(4), torch.randn(2048, 64), compute_loss)


def autocast():
    def compute_loss(model, batch):
        with torch.autocast(find_device().type, dtype=torch.bfloat16):
            return model(batch).float().square().mean()

    return train(make_mlp(), torch.randn(4096, 64), compute_loss)


MODELS = [transformer, gpt2, resnet, checkpointed, autocast]


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


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize("variant", MODELS)
def test_trace_agrees_with_torchs_tracker_repeats_itself_and_goes_forward_backward_optimizer(variant):
    first, second = trace(variant), trace(variant)
    assert first.peak == second.peak and first.bytes[0] == second.bytes[0]
    assert first.peak == pytest.approx(track(variant), rel=0.01)
    assert order(first.phases) == ["forward", "backward", "optimizer"]
    assert len(first.phases) == len(first.bytes) and first.reserved is None


def test_trace_starts_with_parameters_optimizer_state_and_inputs():
    sizes = []

    def variant():
        model, batch = make_mlp(), torch.randn(16, 64)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            state = [v for values in optimizer.state.values() for v in values.values()]
            sizes.append(sum(tensor.nbytes for tensor in [*model.parameters(), batch, *state]))
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    recorded = trace(variant)
    assert recorded.bytes[0] == recorded.bytes[-1] == sizes[-1] > sizes[0]
    assert min(recorded.bytes) >= sizes[-1]


def test_trace_of_one_allocation_is_exact():
    def variant():
        return lambda: torch.empty(1000, dtype=torch.uint8) is None

    recorded = trace(variant)
    assert recorded.bytes == (0, 1000, 0)
    assert recorded.phases == ("forward",) * 3
    assert repr(recorded) == "Trace(peak=1000 B, start=0 B, events=2)"
    assert Trace((-8, -4), ("forward", "forward")).peak == 0  # it freed what was not its own


def test_trace_of_a_step_that_allocates_nothing():
    assert trace(lambda: lambda: None) == Trace((0,), ("forward",))


@pytest.mark.filterwarnings("error")
def test_a_trace_warns_of_nothing():
    assert trace(lambda: lambda: torch.ones(4)).peak > 0


@pytest.mark.parametrize("warmup", [0, -1, 1.5])
def test_a_warm_up_that_is_none_is_refused(warmup):
    with pytest.raises(ValueError, match="warmup: expected a positive whole number, got"):
        trace(transformer, warmup=warmup)


def test_what_was_alive_before_the_variant_was_built_is_not_counted():
    alone = trace(transformer)
    before = torch.ones(4 * MiB)
    beside = trace(transformer)
    assert (beside.peak, beside.bytes[0]) == (alone.peak, alone.bytes[0])
    assert before.sum() > 0


def test_what_the_warm_up_holds_counts_but_what_it_frees_does_not():
    def variant():
        kept = []

        def step():
            kept[:] = [torch.empty(MiB, dtype=torch.uint8)]
            torch.empty(8 * MiB if len(calls) == 0 else MiB, dtype=torch.uint8)
            calls.append(1)

        return step

    calls = []
    recorded = trace(variant, warmup=1)
    assert len(calls) == 2
    assert (recorded.bytes[0], recorded.peak) == (MiB, 2 * MiB)


def test_backward_in_a_checkpoint_is_backward():
    phases = order(trace(checkpointed).phases)
    assert phases == ["forward", "backward", "optimizer"], "recomputing the forward pass belongs to backward"


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_clearing_the_gradients_is_no_phase_of_its_own(late, set_to_none):
    def variant():
        model = make_mlp()
        optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(16, 64)

        def step():
            loss = model(batch).square().mean()
            optimizer.zero_grad(set_to_none) if late else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none) if not late else None

        return step

    assert order(trace(variant).phases) == ["forward", "backward", "optimizer"]


def test_what_comes_between_the_last_backward_pass_and_the_optimizer_or_after_it_is_the_optimizers():
    def variant():
        model, batch = make_mlp(), torch.randn(16, 64)
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=True)

        def step():
            for _ in range(2):
                loss = model(batch).square().mean()
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return (loss + 1).item()

        return step

    assert order(trace(variant).phases) == ["forward", "backward"] * 2 + ["optimizer"]


def test_a_limit_on_a_cpu_is_out_of_memory():
    peak = trace(transformer).peak
    with memory_limit(peak):
        assert trace(transformer).peak == peak
    with memory_limit(peak - 1), pytest.raises(torch.OutOfMemoryError, match="out of memory: the step needs"):
        trace(transformer)


def test_peak_bytes_are_the_traces_peak_or_none():
    peak = trace(transformer).peak
    assert peak_bytes(transformer) == peak
    with memory_limit(peak - 1):
        assert peak_bytes(transformer) is None
    with pytest.raises(TypeError, match="expected it to return its training step"):
        peak_bytes(lambda: None)


def test_a_library_that_is_out_of_memory_is_out_of_memory():
    def variant():
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    with pytest.raises(torch.OutOfMemoryError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        trace(variant)


def test_a_profiler_in_the_step_or_around_it_is_an_error_that_says_so():
    def step():
        with torch.profiler.profile():
            pass

    with pytest.raises(RuntimeError, match="trace: another profiler runs"):
        trace(lambda: step)
    with torch.autograd.profiler_legacy.profile(), pytest.raises(RuntimeError, match="trace: another profiler runs"):
        trace(transformer)
    assert trace(lambda: lambda: torch.ones(4)).peak == 16


def test_a_trace_leaves_torchs_profiler_alone(monkeypatch):
    """On a GPU it would attach CUPTI to the process, and all that is timed afterwards would be slower."""
    monkeypatch.setattr(torch.autograd.profiler, "_prepare_profiler", None)
    monkeypatch.setattr(torch.autograd.profiler, "_enable_profiler", None)
    with pytest.raises(TypeError), torch.profiler.profile():
        pass
    assert trace(lambda: lambda: torch.ones(4)).peak == 16


@pytest.mark.parametrize(("here", "there", "refused"), [(1, 0, False), (0, 1, True), (1, 1, False), (0, 0, False)])
def test_a_step_on_another_gpu_than_the_measured_one_is_refused(here, there, refused, simulate_gpu):
    gpu = simulate_gpu()
    gpu.allocated, gpu.others = 5 * MiB, [7 * MiB]

    def variant():
        gpu.allocated, gpu.others = gpu.allocated + here, [gpu.others[0] + there]
        return lambda: None

    with pytest.raises(ValueError, match=r"GPU 1.*torch.cuda.set_device\(1\)") if refused else nullcontext():
        trace(variant)


def test_reserved_is_the_steps_own_whatever_was_reserved_before(simulate_gpu):
    gpu = simulate_gpu()
    gpu.allocated, gpu.reserved, gpu.most_reserved = 1 * GiB, 2 * GiB, 50 * GiB  # an earlier variant's peak

    def variant():
        def step():
            gpu.most_reserved = max(gpu.most_reserved, 4 * GiB)

        return step

    assert trace(variant).reserved == 2 * GiB


def test_what_a_cuda_graph_keeps_for_its_replays_counts(simulate_gpu):
    gpu = simulate_gpu()

    def segment(pool, total, allocated=0, device=0):
        sizes = {"total_size": total, "allocated_size": allocated}
        return {"segment_pool_id": (0, pool), "device": device} | sizes

    gpu.segments = [segment(0, 32 * MiB), segment(7, 64 * MiB)]  # the ordinary pool, and an earlier graph's

    def variant():
        gpu.segments = [*gpu.segments, segment(8, 8 * MiB, 3 * MiB), segment(8, 16 * MiB, device=1)]
        return lambda: None

    assert trace(variant).bytes == (5 * MiB,)


# What autograd saves


def test_saved_bytes_of_a_chain_by_arithmetic():
    rows, width, hidden = 32, 16, 64
    model = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
    batch = torch.randn(rows, width)
    inputs_of_each = rows * width + rows * hidden + rows * hidden  # of the linear, the GELU and the linear
    assert saved_bytes(lambda: model(batch).sum()) == 4 * inputs_of_each
    assert saved_bytes(lambda: model.double()(batch.double()).sum()) == 8 * inputs_of_each


def test_parameters_are_not_saved_bytes_not_even_seen_through_a_view():
    weight = nn.Parameter(torch.randn(64, 64))
    batch = torch.randn(8, 64, requires_grad=True) * 1
    assert saved_bytes(lambda: batch @ weight) == batch.nbytes
    assert saved_bytes(lambda: batch @ weight.t()) == batch.nbytes


def test_frozen_weights_are_no_saved_bytes_either():
    """As under a LoRA: the input's gradient needs the weight, which is there anyway."""
    frozen, x = nn.Linear(64, 64, bias=False).requires_grad_(False), torch.ones(4, 64, requires_grad=True)
    assert saved_bytes(lambda: frozen(x)) == 0


def test_a_graph_that_is_dropped_on_the_way_counts_only_while_it_is_there():
    x = torch.ones(1024, requires_grad=True)
    assert saved_bytes(lambda: [(x * 2).exp().sum().item() for _ in range(4)]) == 4096
    assert saved_bytes(lambda: [(x * 2).exp().sum() for _ in range(4)]) == 4 * 4096


def test_a_storage_saved_more_than_once_counts_once():
    start = torch.randn(100, requires_grad=True)

    def forward():
        x = start * 1
        return (x[:50].sin() * x[50:].cos()).sum()  # keeps x's storage for both, and both results

    assert saved_bytes(forward) == start.nbytes + 2 * 50 * 4


def test_counting_what_is_saved_keeps_nothing_alive():
    outputs = []

    def forward():
        output = (torch.randn(8, requires_grad=True) * 1).exp()  # saves its own output
        outputs.append(weakref.ref(output))
        return output.sum()

    saved_bytes(forward)
    gc.collect()
    assert outputs[0]() is None


def test_what_is_no_forward_is_refused():
    with pytest.raises(TypeError, match=r"^forward: expected a function that is called without arguments, got Tensor$"):
        saved_bytes(make_mlp()(torch.randn(8, 64)))


def test_nothing_is_saved_without_gradients():
    model = make_mlp()
    with torch.no_grad():
        assert saved_bytes(lambda: model(torch.randn(8, 64))) == 0


def test_checkpoints_save_their_inputs_only():
    model, batch = make_mlp(4), torch.randn(32, 64)

    def forward():
        x = batch
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()

    assert saved_bytes(forward) == 4 * batch.nbytes
    assert saved_bytes(lambda: model(batch).sum()) > 4 * saved_bytes(forward)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("variant", MODELS)
def test_trace_agrees_with_the_allocators_own_statistics(variant, monkeypatch):
    release_memory()
    before, told, most_reserved = torch.cuda.memory_allocated(), [], torch.cuda.max_memory_reserved

    def at_the_end_of_the_step():
        told.append(torch.cuda.max_memory_allocated() - before)
        return most_reserved()

    monkeypatch.setattr(torch.cuda, "max_memory_reserved", at_the_end_of_the_step)
    recorded = trace(variant)
    assert told == [recorded.peak]
    assert recorded.reserved >= recorded.peak > recorded.bytes[0] > 0
    assert order(recorded.phases) == ["forward", "backward", "optimizer"]
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.gpu
def test_launches_take_no_longer_after_a_trace_than_before_it():
    """A profiler that attaches to the process would slow them for good. Needs a process of its own."""
    alone = """
import time, torch, effgpu

def launching(x=torch.ones(1, device="cuda")):
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(500):
        x.add_(1)
    torch.cuda.synchronize()
    return time.perf_counter() - begun

def often():
    return min(launching() for _ in range(101))

often()
before = min(often() for _ in range(3))
effgpu.trace(lambda: launching)
print(min(often() for _ in range(3)) / before)
"""
    told = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=True).stdout
    assert float(told) < 1.1


@pytest.mark.gpu
def test_what_came_before_changes_neither_peak_nor_reserved_on_a_gpu():
    trace(lambda: lambda: torch.empty(GiB, dtype=torch.uint8, device="cuda").zero_())  # leaves a high peak behind
    first = trace(transformer)
    beside = torch.empty(100 * MiB, dtype=torch.uint8, device="cuda")
    second = trace(transformer)
    assert first.peak == pytest.approx(second.peak, rel=0.01)
    assert second.reserved >= second.peak > 0
    assert abs(first.reserved - second.reserved) <= 40 * MiB  # two of the allocator's segments
    del beside


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


@pytest.mark.gpu
def test_saved_bytes_are_a_cpus_where_the_kernels_keep_the_same():
    model, batch = make_mlp(), torch.randn(32, 64)
    on_cpu = saved_bytes(lambda: model(batch).sum())
    model, batch = model.cuda(), batch.cuda()
    assert saved_bytes(lambda: model(batch).sum()) == on_cpu
