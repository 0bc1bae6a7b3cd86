import copy
import re
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from math import inf
from unittest.mock import patch

import pytest
import torch
from benchmarks import published_lora, published_memory, published_peaks
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

from effgpu import memory_limit, peak_bytes
from effgpu.measuring.device import find_device
from effgpu.measuring.torch_internals import FakeTensor, _disable_current_modes, _pop_mode_temporarily
from effgpu.predicting import prediction, recorder
from effgpu.predicting.allocator import Block, Pool, count_reserved, find_peak, round_size
from effgpu.predicting.asked import Asked
from effgpu.predicting.facts import UNKNOWN, Fact
from effgpu.predicting.full_size import predict_full_size
from effgpu.predicting.gpus import Gpu, find_gpu, known_gpus
from effgpu.predicting.hardware import as_it_is, driver_name
from effgpu.predicting.kinds import PRODUCT
from effgpu.predicting.predict import _bisect, largest, predict
from effgpu.predicting.prediction import (
    DOES_NOT_FIT,
    FITS,
    MAY_NOT_FIT,
    MORE,
    ByteRange,
    Prediction,
)
from effgpu.predicting.rules import made_of_others
from effgpu.predicting.walking import walk
from effgpu.units import GiB, KiB, MiB, join_names

GPUS = known_gpus()


# --- the caching allocator ---


def test_sizes_of_blocks_and_segments_are_those_of_pytorchs_source():
    sizes = [1, MiB, MiB + 1, 10 * MiB - 512, 10 * MiB, 11 * MiB, 100 * MiB + 1]
    assert [count_reserved([Block(round_size(size), 0)]) // MiB for size in sizes] == [2, 2, 20, 20, 10, 12, 102]
    assert [round_size(size) for size in (1, 512, 513, MiB + 1)] == [512, 512, 1024, MiB + 512]


def test_pieces_of_a_segment_are_handed_out_and_joined_again():
    pool = Pool()
    first, second, third = (pool.allocate(4 * MiB) for _ in range(3))
    assert pool.reserved == 20 * MiB
    pool.free(first)
    pool.free(third)
    assert pool.allocate(12 * MiB - 512).size == 12 * MiB  # third's place, joined with the rest
    pool.free(second)
    assert pool.allocate(8 * MiB).address == 0 and pool.reserved == 20 * MiB


def test_a_large_block_keeps_a_rest_of_one_mebibyte():
    pool = Pool()
    pool.free(pool.allocate(12 * MiB))
    assert pool.allocate(11 * MiB).size == pool.reserved == 12 * MiB


LIVES = st.tuples(st.integers(1, 40 * MiB), st.integers(1, 60) | st.just(inf))  # sizes, and how many more are born


@given(st.lists(LIVES, min_size=1, max_size=60))
def test_reserved_memory_holds_the_peak_and_nothing_overlaps(lives):
    blocks = [Block(round_size(size), 2 * n, died=2 * (n + more) - 1) for n, (size, more) in enumerate(lives)]
    alive = lambda event: sum(block.size for block in blocks if block.born <= event < block.died)
    peak, at = find_peak(blocks)
    assert peak == alive(at) == max(map(alive, range(2 * len(blocks))))
    assert count_reserved(blocks) >= peak and count_reserved(blocks) % (2 * MiB) == 0
    pool = Pool()
    pieces = [pool.allocate(block.size) for block in blocks]
    assert all(piece.size >= block.size for piece, block in zip(pieces, blocks))
    in_order = sorted(pieces, key=lambda piece: piece.address)
    assert all(one.address + one.size <= next_one.address for one, next_one in pairwise(in_order))
    for piece in pieces:
        pool.free(piece)
    free = [size for sizes in pool._free.values() for size, _ in sizes]
    assert sum(free) == pool.reserved and len(free) == len(pool._at), "joined into whole segments"
    assert peak <= count_reserved(blocks, peak) and count_reserved(blocks, inf) == count_reserved(blocks)


def test_an_allocator_that_lacks_room_gives_back_what_is_free():
    """Blocks that grow, such as a list of outputs that is joined anew for each: two of them live at once."""
    blocks = [Block(size * 20 * MiB, 2 * size, died=2 * size + 3) for size in range(1, 11)]
    assert find_peak(blocks)[0] == (9 + 10) * 20 * MiB
    assert count_reserved(blocks) > 2 * 19 * 20 * MiB
    assert count_reserved(blocks, 19 * 20 * MiB) == 19 * 20 * MiB
    pool = Pool(30 * MiB)
    first, second = pool.allocate(20 * MiB), pool.allocate(2 * MiB)
    pool.free(first)
    assert pool.allocate(30 * MiB).size == 30 * MiB and (pool.reserved, pool.most) == (50 * MiB, 50 * MiB)
    assert pool._at[second.address] is second, "what is in use stays"


# --- variants ---


def train(model_of, *shape, forward=lambda model, x: model(x).sum(), optimizer=torch.optim.AdamW, **options):
    def variant():
        model = model_of().train()
        trained = optimizer([p for p in model.parameters() if p.requires_grad], **options)
        inputs = torch.randn(shape)

        def step():
            forward(model, inputs).backward()
            trained.step()
            trained.zero_grad()

        return step

    return variant


def linear(width=256, batch=64, **options):
    return train(lambda: nn.Linear(width, width, bias=False), batch, width, **options)


def partly_frozen(width):
    return nn.Sequential(*(nn.Linear(width, width).requires_grad_(trained) for trained in (True, False, True)))


def gpt2():
    """With checkpointing and autocast."""
    import transformers

    config = transformers.GPT2Config(vocab_size=1000, n_embd=128, n_layer=2, n_head=4, use_cache=False)
    model = transformers.GPT2LMHeadModel(config)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    return model


def resnet():
    import torchvision

    return torchvision.models.resnet18(num_classes=10)


def language_loss(model, x):
    return model(input_ids=x.long().abs(), labels=x.long().abs()).loss


def as_a_cpu_counts(variant):
    """The prediction without a GPU's rules: what `trace` records on a CPU, but for what oneDNN's convolutions copy."""
    return walk(lambda _: variant, Asked((GPUS["T4"],), None))


MODELS = {
    "GPT-2": train(gpt2, 4, 64, forward=language_loss),
    "ResNet-18": train(resnet, 2, 3, 64, 64, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "partly frozen": train(partial(partly_frozen, 256), 512, 256, forward=lambda model, x: model(x).square().sum()),
}


def backward(widths, loss_of, rows=2048):
    """Gradients of linear layers, by a loss that is a function of what these give, each of the first one's result."""

    def variant():
        first, *others = (
            nn.Linear(a, b, bias=False) for a, b in zip([widths[0], *[widths[1]] * len(widths)], widths[1:])
        )
        inputs = torch.randn(rows, widths[0])

        def step():
            hidden = first(inputs)
            loss_of(*(layer(hidden) for layer in others) if others else (hidden,)).backward()
            for layer in (first, *others):
                layer.zero_grad()

        return step

    return variant


PLACES = torch.arange(0, 2048, 7)
# Gradients that PyTorch adds up, or puts into zeros, in place: not where it sees a mode or a tensor of ours.
MODELS |= {
    "several readers": backward((256, 512, 64, 64, 64), lambda q, k, v: (q + k + v).mean()),
    "rows by places": backward((256, 512), lambda hidden: hidden[PLACES].square().sum()),
    "rows by a mask": backward((256, 512), lambda hidden: hidden[torch.arange(2048) % 7 == 0].square().sum()),
    "numbers by a mask": backward((256, 64), lambda hidden: hidden[torch.ones(2048, 64).tril() == 1].square().sum()),
    "selected": backward((256, 512), lambda hidden: hidden.index_select(0, PLACES).square().sum()),
    "gathered": backward((64, 2000), lambda hidden: hidden.gather(1, PLACES[:1].expand(2048, 1)).square().sum()),
}


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", MODELS)
def test_with_a_cpus_rules_the_count_is_what_the_trace_records(name):
    predicted = as_a_cpu_counts(MODELS[name])
    assert predicted.allocated == pytest.approx(peak_bytes(MODELS[name], warmup=1), rel=0.01)
    assert not predicted.unknown and sum(predicted.owners.values()) == predicted.allocated


# --- a GPU's rules ---


def saved(function, *shape, dtype=torch.float32, gpu="T4"):
    """Bytes of activations at the peak of a step that is all `function`, beyond those of a step without it."""

    def variant(function):
        inputs = torch.randn(shape, dtype=dtype, requires_grad=True)
        return lambda: function(inputs).sum().backward()

    activations = [predict(partial(variant, f), gpu).owners["activations"] for f in (function, lambda x: x * 1)]
    return activations[0] - activations[1]


def test_a_dropout_mask_is_one_byte_an_element_on_a_gpu():
    elements = 256 * KiB
    assert saved(F.dropout, elements) == elements
    assert saved(nn.Dropout().eval(), elements) <= 0


def attend(x, **options):
    return F.scaled_dot_product_attention(x, x, x, **options)


@pytest.mark.parametrize("gpu", ["T4", "A100 80 GB"])
def test_fused_attention_keeps_no_scores_but_a_mathematical_one_does(gpu):
    batch, heads, length, _ = shape = 2, 4, 512, 64
    scores = batch * heads * length**2
    fused = saved(attend, *shape, dtype=torch.float16, gpu=gpu)
    output, sums = 2 * batch * heads * length * 64, 4 * batch * heads * length  # and the log-sum-exp of each row
    assert output + sums <= fused < output + sums + 8 * KiB
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert saved(attend, *shape, dtype=torch.float16, gpu=gpu) >= 2 * scores


def attending():
    x = torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    return lambda: attend(x).sum().backward()


def autocast_loss(model, x):
    """In bfloat16 where the GPU has it, else in fp32."""
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_bf16_supported(including_emulation=False)):
        return model(x).square().mean()


LINEARS = train(lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), 4096, 256, forward=autocast_loss)


@pytest.mark.parametrize("variant, times", [(attending, 10), (LINEARS, 1.25)])
def test_older_gpus_get_a_walk_of_their_own(variant, times):
    predicted, alone = predict(variant), predict(variant, "T4")
    assert alone.verdict() == predicted.verdict("T4") == predicted.verdict("L4") == FITS
    older = join_names([name for name, gpu in GPUS.items() if gpu.capability < (8, 0)])
    assert f"on {older}, the step takes other kernels, formats or sizes" in repr(predicted) and "T4" in older
    assert alone.owners["activations"] > times * predicted.owners["activations"]
    assert alone.total() == predicted.total("T4") and alone.time().expected == predicted.time("T4").expected
    told = predict_full_size({"here": variant}, {"here": variant}, ["T4", "L4"])["here"]
    assert [one.allocated for one in told] == [alone.allocated, predicted.allocated]
    assert "compute capability 8.0 or higher" in predict(variant, "16 GiB").assumptions[0]
    assert not predict(linear(), "16 GiB").assumptions and not predict(variant, "L4").assumptions


def test_where_no_gpu_is_named_each_gets_the_step_that_its_capability_chooses():
    def variant():
        major, minor = torch.cuda.get_device_capability()
        layer = nn.Linear(256, 256 * (10 * major + minor))
        return lambda: layer(torch.randn(8, 256)).sum().backward()

    predicted = predict(variant)
    for name in ("T4", "A100 80 GB", "RTX 4090", "H100", "B200", "RTX 5090"):
        alone = predict(variant, name)
        assert predicted.for_gpu(name)[0].allocated == alone.allocated, name
        assert predicted.time(name).expected == alone.time().expected, name


def test_a_gpu_that_prefers_cudnns_attention_is_said_to():
    both = predict(attending, ["H100", "RTX 4090", "B200"])
    assert "on H100 and B200, cuDNN's attention takes no more" in both.assumptions[0]
    assert not predict(attending, "RTX 4090").assumptions
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert not predict(attending, "H100").assumptions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_computes_the_right_shapes_for_odd_heads_and_masks(dtype):
    def variant(width):
        x = torch.randn(2, 4, 30, width, dtype=dtype, requires_grad=True)
        mask = torch.ones(1, 1, 30, 30, dtype=torch.bool)

        def step():
            for options in ({"is_causal": True}, {"attn_mask": mask}, {"dropout_p": 0.1}):
                out = attend(x, **options)
                out.sum().backward()
                assert out.shape == x.grad.shape == x.shape

        return step

    assert all(predict(partial(variant, width), "L4").allocated > 0 for width in (33, 64))


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_autocast_has_a_gpus_list_of_operations(lower):
    dtypes = {}

    def step(x, layer):
        with torch.autocast("cpu", lower):
            half = layer(x)
            seen = dict(
                linear=half,
                softmax=half.softmax(-1),
                logs=half.log_softmax(-1),
                norm=F.layer_norm(half, (8,)),
                gelu=F.gelu(half),
            )
            seen |= dict(exp=half.exp(), sum=half.sum(), cat=torch.cat([half, half]), pow=half**2, mv=x.mv(x[0]))
            seen |= dict(loss=F.cross_entropy(half, torch.zeros(8).long()), einsum=torch.einsum("ij,jk", x, x))
            with torch.autocast("cpu", enabled=False):
                seen["off"] = x @ x
        seen["logs"].sum().backward()
        dtypes.update({name: tensor.dtype for name, tensor in seen.items()})

    predict(lambda: partial(step, torch.randn(8, 8), nn.Linear(8, 8)), steps=1)
    half = {name for name, dtype in dtypes.items() if dtype is lower}
    assert half == {"linear", "gelu", "cat", "einsum", "mv"}


@pytest.mark.parametrize("device", ["cuda", "cpu", "cuda:0", torch.device("cuda", 0)])
def test_a_gpu_that_is_named_is_predicted_with_its_autocast_and_scaler(device):
    kind = torch.device(device).type

    def variant():
        with torch.device(device):
            model = nn.Linear(64, 64).to(device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler(kind)

        def step():
            with torch.autocast(kind, torch.float16):
                loss = model(torch.randn(8, 64, device=device)).sum()
            assert loss.dtype is torch.float32
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    predicted = predict(variant, "T4")
    assert predicted.verdict() == FITS and not predicted.assumptions
    assert predicted.owners["weights"] == 64 * 64 * 4 + 512
    assert predicted.owners["optimizer state"] == predicted.owners["weights"]  # the scaler skips no step


@pytest.mark.parametrize(
    "switch_on",
    [
        lambda: (torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", torch.bfloat16)),
        lambda: (torch.set_autocast_enabled(True), torch.set_autocast_gpu_dtype(torch.bfloat16)),
        lambda: (
            torch.set_autocast_enabled(enabled=True),
            torch.set_autocast_dtype(dtype=torch.bfloat16, device_type="cuda"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_autocast_that_is_switched_on_without_a_context_holds_too(switch_on):
    def variant():
        model = nn.Linear(64, 64, device="cuda")

        def step():
            switch_on()
            made = model(torch.randn(8, 64, device="cuda"))
            assert made.dtype is torch.bfloat16
            torch.set_autocast_enabled("cuda", False)
            assert model(torch.randn(8, 64, device="cuda")).dtype is torch.float32
            made.sum().backward()

        return step

    predict(variant, "A100")
    assert not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("backend:cudaMallocAsync", ["backend:cudaMallocAsync"]),
        ("garbage_collection_threshold:0.8 , expandable_segments:False", ["garbage_collection_threshold:0.8"]),
        ("expandable_segments:False,backend:native,pinned_use_cuda_host_register:True", []),
    ],
)
def test_the_environments_settings_of_the_allocator_are_named(monkeypatch, given, named):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    told = [f"memory as without {each}, which PYTORCH_CUDA_ALLOC_CONF asks for" for each in named]
    assert list(predict(linear(), "T4").assumptions) == told


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "not known: how long it takes to ask for all memory anew in each step"),
        ("CUDA_VISIBLE_DEVICES", "", "assumed: a GPU is seen, though CUDA_VISIBLE_DEVICES hides all"),
        ("CUDA_VISIBLE_DEVICES", "-1", "assumed: a GPU is seen, though CUDA_VISIBLE_DEVICES hides all"),
    ],
)
def test_what_the_environment_changes_is_named(monkeypatch, name, given, told):
    monkeypatch.delenv(name, raising=False)
    assert told not in str(predict(linear(), "T4"))
    monkeypatch.setenv(name, given)
    assert told in str(predict(linear(), "T4"))


def test_what_stands_for_operations_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(recorder, "made_of_others", lambda *given: made.append(made_of_others(*given)) or made[-1])

    def step():
        with torch.inference_mode():
            for _ in range(3):
                F.dropout(torch.ones(8))

    predict(lambda: step, "T4")
    assert len(made) == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_on_the_gpu_too(reentrant):
    def variant(device):
        layer = nn.Linear(64, 64).to(device)

        def block(x):
            x = layer(x + torch.ones(64, device=device)).relu()
            assert x.dtype is torch.float16
            return x

        def step():
            x = torch.randn(1024, 64, device=device, requires_grad=True)
            with torch.autocast(device, torch.float16):
                for _ in range(4):
                    x = checkpoint(block, x, use_reentrant=reentrant)
            x.float().sum().backward()

        return step

    assert predict(partial(variant, "cuda"), "T4").allocated == predict(partial(variant, "cpu"), "T4").allocated


def of_layers(kind=torch.optim.AdamW, **options):
    layers = lambda: nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    return predict(train(layers, 2, 256, optimizer=kind, **options))


def test_foreach_is_a_gpus_default_and_takes_temporaries():
    size = 8 * 256 * 256 * 4
    default, single, fused = of_layers(), of_layers(foreach=False), of_layers(fused=True)
    assert default.allocated - fused.allocated == pytest.approx(size, rel=0.05)
    assert single.allocated - fused.allocated == pytest.approx(3 * size / 8, rel=0.05)  # three of one layer
    assert of_layers(type("Own", (torch.optim.AdamW,), {})).allocated == default.allocated


def test_adafactor_takes_no_foreach_unless_asked():
    own = type("Own", (torch.optim.Adafactor,), {})
    kinds = (torch.optim.Adafactor, {}), (own, {}), (torch.optim.Adafactor, {"foreach": False})
    (default,) = {of_layers(kind, **options).allocated for kind, options in kinds}
    assert of_layers(torch.optim.Adafactor, foreach=True).allocated - default > 8 * 256 * 256 * 4 / 2


def test_owners_are_told_apart():
    predicted = predict(linear(1024, 4096))
    weights = 1024 * 1024 * 4
    assert predicted.owners["weights"] == weights
    assert predicted.owners["optimizer state"] == pytest.approx(2 * weights, rel=0.001)
    assert list(predicted.owners) == list(prediction.OWNERS)
    frozen, layer = predict(train(partial(partly_frozen, 512), 4, 512)).owners, (512 + 1) * 512 * 4
    assert frozen["weights"] == 3 * layer and frozen["optimizer state"] == pytest.approx(4 * layer, rel=0.001)
    backward = predict(lambda: partial(lambda x: x.sin().sin().sum().backward(), torch.randn(MiB, requires_grad=True)))
    assert backward.owners["activations"] < 1.1 * 4 * MiB < backward.owners["other"], "temporaries are no activations"


def test_gradients_that_a_step_drops_before_its_end_are_gradients():
    """As those of the first of two passes for an update, which move the weights to where the second one looks."""

    def variant():
        model = nn.Linear(1024, 1024, bias=False)
        optimizer = torch.optim.SGD(model.parameters())

        def step():
            model(torch.randn(4, 1024)).sum().backward()
            moved = [weight.grad.norm() * weight.grad * weight.detach() for weight in model.parameters()]
            optimizer.zero_grad()
            model(torch.randn(4, 1024)).sum().backward()
            torch._foreach_sub_([weight.data for weight in model.parameters()], moved)
            optimizer.step()
            optimizer.zero_grad()

        return step

    owners = predict(variant).owners
    assert owners["weights"] == owners["gradients"] == 1024 * 1024 * 4


def test_convolutions_and_products_take_workspaces():
    assert predict(linear(), "T4").workspaces.low == 8.125 * MiB
    assert predict(linear(), "H100").workspaces.low == 32 * MiB
    convolution = predict(train(lambda: nn.Conv2d(3, 8, 3), 2, 3, 32, 32))
    assert convolution.workspaces.high > convolution.workspaces.low == 0


# --- what a step reads ---


def reading(read):
    def forward(model, x):
        out = model(x)
        read(out)
        return out.sum()

    return linear(16, 4, forward=forward, optimizer=torch.optim.SGD, lr=0.1)


def require(truth):
    assert truth


@pytest.mark.parametrize("every", [1, 2, 4, 6])
def test_a_step_that_accumulates_is_walked_until_its_update(every):
    def training(every=1):
        model = nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(model.parameters())
        calls = 0

        def step():
            nonlocal calls
            calls += 1
            (model(torch.ones(8, 512)).sum() / every).backward()
            if calls % every == 0:
                optimizer.step()
                optimizer.zero_grad()

        return step

    usual, predicted = (predict(partial(training, each), "T4") for each in (1, every))
    assert predicted.owners["optimizer state"] == usual.owners["optimizer state"] > 2 * 512 * 512 * 4
    assert 0 <= predicted.allocated - usual.allocated <= 2**16 and predicted.verdict() == "fits"
    updates = sum(event.optimizing for event in predicted.events)
    assert updates == sum(event.optimizing for event in usual.events) > 0
    assert any(f"every {every} calls' last" in told for told in predicted.assumptions) == (every > 1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_an_optimizers_step_that_fails_is_over(kind):
    def training(fails):
        model = nn.Linear(8, 8)
        tried, optimizer = kind(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
        if fails:
            with pytest.raises(ZeroDivisionError):
                tried.step(lambda: 1 / 0)
        assert tried.param_groups[0].get("tolerance_grad") == tried.defaults.get("tolerance_grad")

        def step():
            model(torch.ones(8, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    failed, usual = (predict(partial(training, fails), "T4") for fails in (True, False))
    assert failed.owners == usual.owners
    assert [event.phase for event in failed.events] == [event.phase for event in usual.events]


def test_an_optimizer_that_makes_no_step_is_not_known():
    def training(built):
        model = nn.Linear(8, 8)
        optimizer = built and torch.optim.AdamW(model.parameters())
        return lambda: (optimizer, model(torch.ones(8, 8)).sum().backward())

    predicted, usual = (predict(partial(training, built), "T4") for built in (True, False))
    assert "the optimizer takes, which made no step in 64 calls" in str(predicted.unknown) and not usual.unknown
    assert predicted.segments == usual.segments != (), "of one call"
    assert len(predicted.events) == len(usual.events)


def test_older_gpus_that_take_as_much_are_not_said_to_take_other_kernels():
    def variant():
        assert torch.cuda.get_device_properties(0).major
        return linear()()

    both = predict(variant, ["T4", "A100"])
    assert both.older and "other kernels" not in str(both)


def test_each_gpu_has_the_step_that_it_takes_itself():
    """Of three generations, where the step asks which it is; and none has another's."""

    def variant():
        sizes = {(9, 0): 512, (8, 0): 1024, (7, 5): 2048}
        size = sizes[torch.cuda.get_device_capability()]
        return lambda: torch.mm(*torch.ones(2, size, size, device="cuda"))

    several = predict(variant, ["T4", "H100", "A100"])
    for gpu in ("H100", "A100", "T4"):
        alone = predict(variant, gpu)
        assert several.time(gpu) == alone.time() and several.total(gpu) == alone.total()
    with pytest.raises(ValueError, match=r"below compute capability 9.0 take other kernels or formats: predict for it"):
        predict(variant, "H100").time("T4")


def test_what_follows_from_a_gpus_name_is_that_gpus_alone():
    def variant(of_properties=False):
        name = torch.cuda.get_device_properties(0).name if of_properties else torch.cuda.get_device_name()
        size = 2048 if "T4" in name else 1024
        return lambda: torch.mm(*torch.ones(2, size, size, device="cuda"))

    for way in (variant, partial(variant, of_properties=True)):
        several = predict(way, ["A100", "T4"])
        assert several.time("T4") == predict(way, "T4").time() and not several.assumptions
        (told,) = predict(way, ["A100 40 GB", "A100 80 GB"]).assumptions
        assert told.startswith("what follows from a GPU's name is that of the A100 40 GB, which test_prediction.py:")


def test_a_name_that_is_only_shown_decides_nothing():
    def variant():
        asked = torch.cuda.get_device_properties(0)
        print(f"runs on {torch.cuda.get_device_name()}, {asked.name}: {asked.total_memory / 2**30:.1f} GiB")
        return linear()()

    shown = predict(variant, ["A100 40 GB", "A100 80 GB", "T4"])
    assert shown.older is None and not shown.assumptions


def test_one_gpu_that_is_compared_with_itself_decides_nothing():
    def variant():
        parallel = nn.DataParallel(nn.Linear(8, 8).to("cuda"))
        return lambda: parallel(torch.ones(4, 8, device="cuda")).sum().backward()

    assert predict(variant, ["A100", "T4"]).older is None


def copying():
    model, copies = nn.Linear(1024, 1024), []

    def step():
        model(torch.rand(8, 1024)).mean().backward()
        copies.append(copy.deepcopy(model).requires_grad_(False))

    return step


def test_one_of_several_optimizers_that_makes_no_step_is_not_known():
    def training(second):
        model, other = nn.Linear(8, 8), nn.Linear(8, 8)
        optimizer, idle = torch.optim.SGD(model.parameters()), second and torch.optim.AdamW(other.parameters())
        return lambda: (idle, model(torch.ones(8, 8)).sum().backward(), optimizer.step())

    with_idle, alone = (predict(partial(training, second), "T4").unknown for second in (True, False))
    assert not alone and len(with_idle) == 1
    assert re.fullmatch(r"what the AdamW of test_prediction.py:\d+ takes, which made no step in .*", *with_idle)


def every_second_step():
    """Two networks, one of which is updated in every second step: what its optimizer keeps is no leak."""
    critic, actor = nn.Linear(512, 512), nn.Linear(512, 512)
    optimizers, done = [torch.optim.Adam(network.parameters()) for network in (critic, actor)], []

    def step():
        done.append(None)
        for each in optimizers[: 2 - len(done) % 2]:
            each.zero_grad()
            critic(actor(torch.rand(16, 512))).mean().backward()
            each.step()

    return step


def test_what_a_step_leaves_behind_is_found_and_garbage_is_not():
    def training(leaves):
        model = nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters())

        def step():
            output = model(torch.ones(4096, 64))
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            leaves(output)

        return step

    def kept(leaves):
        return predict(partial(training, leaves), "T4")

    def in_a_cycle(output):
        cycle = [output]
        cycle.append(cycle)

    losses, outputs = [], []
    assert kept(lambda output: None).kept == () == kept(in_a_cycle).kept
    assert predict(every_second_step, "T4").kept == ()
    assert sum(size for *_, size in predict(copying, "T4").kept) == 1024 * 1024 * 4 + 1024 * 4, "copies of the weights"
    growing = kept(outputs.append)
    assert sum(size for *_, size in growing.kept) == 2**20 and growing.kept[0][0].file == __file__
    assert "memory grows by 1.00 MiB in the step" in str(growing)
    few = kept(lambda output: losses.append(output.sum().detach()))
    assert sum(size for *_, size in few.kept) == 512 and "grows" not in str(few), "a GPU is full after 30 million steps"


@pytest.mark.parametrize(
    "read, said",
    [
        (lambda out: require(torch.isfinite(out).all()), ""),
        (lambda out: require(not torch.isnan(out.sum())), ""),
        (lambda out: nn.utils.get_total_norm([out.detach()], error_if_nonfinite=True), ""),
        (lambda out: repr(out), ""),
        (lambda out: out.sum().item(), "assumed: "),
        (lambda out: f"{out.sum():.3f}", "assumed: "),
        (lambda out: out.detach().numpy() + 1, "assumed: "),
        (lambda out: bool(out.sum() > 0), "not known: "),
        (lambda out: out.argmax().item(), "not known: "),
    ],
)
def test_a_number_that_is_read_is_said_with_its_line_unless_every_healthy_step_has_it(read, said):
    predicted = predict(reading(read), "T4")
    assert predicted.verdict() == FITS
    lines = re.findall(r"(.*)test_prediction.py:\d+ ", repr(predicted))
    assert lines == [said] * bool(said) and len(predicted.assumptions + predicted.unknown) == len(lines)


def test_a_tensor_on_the_gpu_from_outside_is_refused_with_what_to_do(monkeypatch):
    # PyTorch 2.9 makes a tensor on the GPU before the first fake one
    monkeypatch.setattr("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None, raising=False)

    def variant():
        model = nn.Linear(4, 4)
        fake = torch.empty(4, 4)
        with _disable_current_modes(), _pop_mode_temporarily():  # as one from outside, which names the GPU nowhere
            rows = type(fake)(fake.fake_mode, torch.empty(4, 4, device="meta"), torch.device("cuda"))
        return lambda: model(rows).sum().backward()

    with pytest.raises(RuntimeError, match=r"outside of the variant: keep those on the CPU, and .* \.to\(device\)"):
        predict(variant, "T4")


@pytest.mark.parametrize(
    "read, why",
    [
        (lambda out: out.long().flatten().bincount(), "the shape of a result depends on values, by aten.bincount"),
        (lambda out: OUTSIDE(out), "parameters from outside of the variant"),
        (lambda out: torch.cuda.current_blas_handle(), "calls torch.cuda itself"),
    ],
)
def test_a_step_that_cannot_be_predicted_is_refused_with_the_reason(read, why):
    with pytest.raises(RuntimeError, match=why):
        predict(reading(read))


OUTSIDE = nn.Linear(16, 16)


@pytest.mark.filterwarnings("error")
def test_a_module_that_copies_its_layers_is_walked_without_a_warning():
    def variant():
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        return lambda: layers(torch.zeros(2, 4, 8)).sum().backward()

    assert predict(variant, "T4").allocated > 0


def test_data_are_loaded_without_workers():
    def variant():
        model, data = nn.Linear(16, 4), torch.utils.data.TensorDataset(torch.ones(64, 16), torch.zeros(64).long())
        loader = torch.utils.data.DataLoader(data, 8, shuffle=True, num_workers=2, pin_memory=True)

        def step():
            for inputs, labels in loader:
                F.cross_entropy(model(inputs.to("cuda", non_blocking=True)), labels.cuda()).backward()

        return step

    predicted = predict(variant, "T4")
    assert predicted.verdict() == FITS and "workers do not run" in predicted.assumptions[0]


# --- nothing global stays changed ---


CHANGED = [torch, torch.Tensor, FakeTensor, torch.UntypedStorage, torch.autograd, torch.cuda, torch.backends.cudnn]
CHANGED += [torch.nn.Module, torch.autocast, torch.amp.GradScaler, torch.utils.data.DataLoader, optimizer.Optimizer]


def state():
    return (
        torch.get_rng_state().tolist(),
        torch.get_device_module("cuda"),
        torch.compile,
        nn.Module._apply,
        torch.utils.data.DataLoader._get_iterator,
        torch.cuda.amp.common.amp_definitely_not_available,
        torch.overrides._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
        len(optimizer._global_optimizer_pre_hooks),
        len(nn.modules.module._global_parameter_registration_hooks),
        torch.is_autocast_enabled("cpu"),
        torch.empty(0).device,
        type(nn.Linear(2, 2).weight),
        F.dropout(torch.ones(10_000), 0.5).count_nonzero().item() not in (0, 10_000),
        torch.ops.aten.dropout.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.AutocastCPU),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_global_stays_changed(fails):
    def variant():
        torch.manual_seed(1)
        x = torch.randn(4, requires_grad=True)

        def step():
            F.dropout(x).sum().backward()
            torch.get_device_module("cuda")  # PyTorch remembers what it was
            if fails:
                raise ValueError("the step's own")

        return step

    torch.manual_seed(0)
    before, attributes = state(), [dict(vars(owner)) for owner in CHANGED]
    torch.get_device_module.cache_clear()
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="the step's own") if fails else nullcontext():
        predict(variant)
    assert state() == before and [dict(vars(owner)) for owner in CHANGED] == attributes
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2).bfloat16().softmax(0).dtype is torch.bfloat16  # the CPU's own list again


# --- verdicts ---


def made(allocated, reserved=None, unknown=(), resting=0):
    owners = dict.fromkeys(prediction.OWNERS, 0) | {"activations": allocated}
    said = tuple(Fact(UNKNOWN, what) for what in unknown)
    return Prediction(allocated, owners, reserved or allocated, ByteRange(0, 0), tuple(GPUS.values()), said, resting)


@given(st.integers(0, 200 * GiB), st.integers(0, 8 * GiB), st.sampled_from(list(GPUS)))
def test_fits_leaves_room_for_the_error_and_the_context_and_twice_that_for_what_is_unknown(allocated, more, name):
    gpu, predicted = GPUS[name], made(allocated, allocated + more)
    needed, verdict = predicted.total(name), predicted.verdict(name)
    assert needed.low <= needed.high == int((allocated + more) * (1 + MORE)) + gpu.context[1]
    assert (verdict == FITS) == (needed.high <= gpu.memory)
    assert (verdict == DOES_NOT_FIT) == (needed.low > gpu.memory)
    if verdict == FITS:
        rough = made(allocated, allocated + more, ("something",))
        assert rough.verdict(name) == (FITS if 2 * needed.high <= gpu.memory else MAY_NOT_FIT)


def test_what_rests_decides_where_something_is_unknown():
    assert made(100 * GiB, unknown=("compiled",), resting=GiB).verdict("T4") == MAY_NOT_FIT
    assert made(100 * GiB, unknown=("compiled",), resting=20 * GiB).verdict("T4") == DOES_NOT_FIT


@pytest.mark.parametrize(
    "name, texts",
    {
        "T4": ["t4", "Tesla T4"],
        "RTX 4090": ["4090"],
        "RTX 3090": ["NVIDIA GeForce RTX 3090"],
        "A100 40 GB": ["A100", "A100 40", "NVIDIA A100-PCIE-40GB"],
        "A100 80 GB": ["a100-80gb", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
        "V100": ["v100", "Tesla V100-SXM2-16GB"],
        "L4": ["L4", "L4 24 GB"],
        "H100": ["NVIDIA H100 80GB HBM3"],
        "H100 PCIe": ["NVIDIA H100 PCIe"],
        "V100 32 GB": ["V100 32 GB", "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-32GB"],
        "A10": ["A10", "NVIDIA A10", "a10 24gb"],
        "A10G": ["NVIDIA A10G"],
        "P100": ["Tesla P100-PCIE-16GB"],
        "RTX 2080 Ti": ["NVIDIA GeForce RTX 2080 Ti", "2080ti"],
        "RTX 3060": ["NVIDIA GeForce RTX 3060", "RTX 3060 12GB"],
        "RTX 3090 Ti": ["3090 Ti"],
        "RTX A6000": ["NVIDIA RTX A6000", "a6000"],
        "RTX 4070 Ti Super": ["NVIDIA GeForce RTX 4070 Ti SUPER"],
        "RTX 4080": ["NVIDIA GeForce RTX 4080"],
        "L40S": ["NVIDIA L40S"],
        "GH200": ["GH200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"],
        "B200": ["NVIDIA B200"],
        "RTX PRO 6000": ["NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"],
    }.items(),
)
def test_a_gpu_is_found_by_its_names(name, texts):
    assert {find_gpu(text).name for text in texts} == {name}


@pytest.mark.parametrize("gpu", known_gpus().values(), ids=known_gpus())
def test_a_script_sees_what_the_driver_calls_a_gpu(gpu):
    assert find_gpu(driver_name(gpu)) == gpu


@pytest.mark.parametrize(
    ("gpu", "name", "threads", "shared"),
    [
        ("V100", "Tesla V100-SXM2-16GB", 2048, 96),
        ("T4", "Tesla T4", 1024, 64),
        ("A100 80 GB", "NVIDIA A100-SXM4-80GB", 2048, 163),
        ("RTX 3090", "NVIDIA GeForce RTX 3090", 1536, 99),
        ("L4", "NVIDIA L4", 1536, 99),
        ("H100", "NVIDIA H100 80GB HBM3", 2048, 227),
        ("B200", "NVIDIA B200", 2048, 227),
        ("RTX 5090", "NVIDIA GeForce RTX 5090", 1536, 99),
        (Gpu("Tesla M40", 12 * GiB, (5, 2), (MiB, MiB)), "Tesla M40", 2048, 48),
    ],
)
def test_a_script_sees_the_properties_of_the_gpu(gpu, name, threads, shared):
    def variant():
        told = torch.cuda.get_device_properties(0)
        assert torch.cuda.get_device_name() == told.name == name
        assert told.max_threads_per_multi_processor == threads
        assert told.shared_memory_per_block_optin == shared * 1024
        return linear()()

    predict(variant, gpu)


@pytest.mark.parametrize(
    "text, size", [("16 GiB", 16 * GiB), ("16gb", 16e9), ("1.5 GiB", 1.5 * GiB), (2 * GiB, 2 * GiB)]
)
def test_a_size_stands_for_a_gpu(text, size):
    assert find_gpu(text).memory == size


def test_where_no_time_is_shown_no_note_tells_of_times():
    def variant():
        model = torch.nn.Linear(8, 8)
        return lambda: model(torch.zeros(2, 8)).sum().backward()

    assert "times: in brackets" in str(predict(variant, ["T4", "16 GiB"]))
    assert "times:" not in str(predict(variant, "16 GiB"))


OTHERS = ["Tesla P100-PCIE-12GB", "NVIDIA H100 NVL", "NVIDIA L40", "NVIDIA GB200", "RTX 3060 Ti", "A100 64GB"]
OTHERS += ["NVIDIA GeForce RTX 4080 Laptop GPU", "RTX 4080 SUPER", "NVIDIA GH200 144G HBM3e", "RTX 6000"]


@pytest.mark.parametrize(
    "given, meant",
    [
        ("RTX4090 Ti", "RTX 4090"),
        ("NVIDIA A100 64GB", "A100 40 GB"),
        ("RTX 2080", "RTX 2080 Ti"),
        ("Tesla V-100S", "V100"),
        ("RTX 3070 Ti", None),  # another card than the 3090 Ti
        ("H800", None),
        ("Voodoo", None),
    ],
)
def test_a_gpu_that_is_not_known_is_refused_with_the_card_of_the_same_number(given, meant):
    with pytest.raises(
        ValueError, match=f"^gpu: did you mean {meant}[?] expected" if meant else "^gpu: expected one of"
    ):
        find_gpu(given)


@pytest.mark.parametrize("gpu", ["A1", "T", "", "0 GiB", 0, -1, None, True, "16", *OTHERS])
def test_an_unknown_gpu_is_refused(gpu):
    with pytest.raises(ValueError, match=r"gpu: (did you mean .*\? )?expected"):
        find_gpu(gpu)


@pytest.mark.parametrize(
    "ask, error",
    [
        (lambda: predict(linear(), steps=0), ValueError),
        (lambda: largest(linear, "T4", most=0), ValueError),
        (lambda: predict(lambda: None), TypeError),
        (lambda: predict(nn.Linear(1, 1)), TypeError),
        (lambda: predict(3), TypeError),
    ],
)
def test_bad_arguments_are_refused(ask, error):
    with pytest.raises(error, match="expected"):
        ask()


def test_a_fit_shows_itself_as_a_table():
    predicted = predict(linear(), "T4")
    assert "T4" in repr(predicted) and "fits" in repr(predicted) and "optimizer state" in repr(predicted)
    assert predicted._repr_html_().count("<table>") == 3
    assert "&lt;script&gt;" in made(1, unknown=("<script>",))._repr_html_()


# --- the largest size ---


@given(st.integers(1, 10**6), st.integers(-(10**6), 10**9), st.floats(1, 3), st.integers(1, 10**5))
def test_bisection_finds_the_largest_size(slope, room, power, most):
    surplus = lambda size: int(slope * size**power) - room
    calls = []
    found = _bisect(lambda size: calls.append(size) or surplus(size), most)
    assert 0 <= found <= most
    assert found == 0 or surplus(found) <= 0
    assert found == most or surplus(found + 1) > 0
    assert len(set(calls)) == len(calls) and all(0 <= size <= most for size in calls) and calls[:1] != [0]
    assert len(calls) <= 3 * most.bit_length() + 6


def test_the_largest_batch_fits_and_the_next_may_not():
    variant_of = partial(linear, 4096)
    result = largest(variant_of, "2 GiB", most=10**6)
    assert 0 < result.fits <= result.may_fit and len(result.tried) < 20 and 0 not in result.tried
    assert result.tried[result.fits].verdict() == FITS
    assert predict(variant_of(result.fits + 1), "2 GiB").verdict() != FITS
    assert predict(variant_of(result.may_fit + 1), "2 GiB").verdict() == DOES_NOT_FIT
    assert f"{result.fits} fits a 2 GiB" in repr(result)
    assert repr(largest(variant_of, "100 MiB")) == "nothing fits a 100 MiB"


# --- against what was published ---


def test_a_published_peak_is_met_and_another_one_only_with_the_margin(monkeypatch):
    names = ("GPT-2, fused attention", "GPT-2, compiled")
    met, compiled = (published_memory.run(case) for case in published_memory.CASES if case.name in names)
    assert abs(met.error) < 0.01 and not met.is_false_fit and not compiled.is_false_fit
    for margin in ("MORE", "COMPILED_MORE"):
        monkeypatch.setattr(prediction, margin, 0.0)
    assert compiled.is_false_fit


@pytest.mark.slow
@pytest.mark.parametrize("case", published_peaks.CASES[::3], ids=lambda case: case.name)  # all: `make predictions`
def test_no_published_run_is_a_false_fit(case):
    outcome = published_memory.run(case)
    assert not outcome.is_false_fit and abs(outcome.error) < (0.3 if case.rests else 0.2)


def test_weights_in_4_bits_take_half_a_byte_and_their_scales():
    """QLoRA (arXiv 2305.14314): 0.5 bits a weight for the scales of 64, 0.127 with scales of 8 bits and their own."""
    weights = 1024 * 4096
    for double, bits in ((False, 4.5), (True, 4.127)):
        stored = published_lora.Linear4bit(1024, 4096, double).state_dict().values()
        assert sum(t.nbytes for t in stored) == pytest.approx(weights * bits / 8, rel=0.001)


def test_what_a_loaded_model_takes_is_its_stored_weights():
    sizes = published_lora.Loaded(256, 2, 4, 2, 64, 512, 1000)
    with patch.dict(published_lora.LOADED, {"tiny": sizes}):
        predicted = predict(partial(published_lora.loaded, "tiny", 8), "T4")
    linear = 2 * (256 * 256 * 2 + 256 * 128 * 2 + 256 * 512 * 3)
    adapters = 2 * 4 * 8 * sum((256 + 256, 256 + 128, 256 + 128, 256 + 256, 768, 768, 768))
    expected = linear * 4.127 / 8 + adapters + 2 * 2 * 1000 * 256
    assert expected <= predicted.allocated < expected + 120 * KiB  # blocks of 512 bytes


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_what_is_predicted_is_what_a_gpu_needs(autocast):
    def forward(model, x):
        with torch.autocast(x.device.type, autocast, enabled=autocast is not None):
            return model(x).float().square().mean()

    def variant():
        layers = lambda: nn.Sequential(*(nn.TransformerEncoderLayer(512, 8, batch_first=True) for _ in range(6)))
        with find_device():
            return train(layers, 64, 256, 512, forward=forward)()

    properties = torch.cuda.get_device_properties()
    here = Gpu("here", properties.total_memory, (properties.major, properties.minor), (0, 0))
    predicted = predict(variant, here)
    measured = peak_bytes(variant)
    assert predicted.allocated + predicted.workspaces.low == pytest.approx(measured, rel=0.05)
    with memory_limit(predicted.total().high):
        assert peak_bytes(variant) is not None
    with memory_limit(0.8 * predicted.allocated):
        assert peak_bytes(variant) is None


# --- what PyTorch says of the hardware ---


def where_available():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert torch.accelerator.current_accelerator().type == "cuda" and torch.cuda.device_count() == 1
    assert torch.cuda.get_device_properties(0).total_memory == GPUS["T4"].memory
    assert torch.cuda.get_device_capability() == (7, 5) and not torch.cuda.is_bf16_supported(including_emulation=False)
    model = nn.Linear(512, 512).to(device)
    scaler = torch.amp.GradScaler(device.type, enabled=torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")

    def step():
        with torch.autocast(device.type, torch.float16, enabled=torch.cuda.is_available()):
            loss = model(torch.randn(64, 512).to(device)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.cuda.synchronize()
        torch.randn(8, device=device).record_stream(torch.cuda.Stream())
        with as_it_is():
            assert not torch.cuda.is_available(), "here is none"

    return step


def test_pytorch_answers_for_the_gpu_that_is_named_and_for_itself_afterwards():
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    before |= {("accelerator", name): getattr(torch.accelerator, name) for name in dir(torch.accelerator)}
    predicted = predict(where_available, "T4")
    products = {kernel.format for part in predicted.segments for kernel in part.kernels if kernel.kind == PRODUCT}
    assert products == {"fp16"}
    after = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    after |= {("accelerator", name): getattr(torch.accelerator, name) for name in dir(torch.accelerator)}
    assert all(after[name] is was for name, was in before.items())


def test_a_profiler_records_nothing_in_a_variant_and_all_afterwards():
    def variant():
        layer = torch.nn.Linear(64, 64).to("cuda")

        def step():
            with torch.profiler.profile() as profiler:
                layer(torch.randn(4, 64, device="cuda")).sum().backward()
            assert not profiler.events() and not profiler.key_averages()

        return step

    assert predict(variant, "T4").allocated and predict(variant).allocated
    with torch.profiler.profile() as profiler:
        torch.ones(3).sum()
    assert profiler.events()
