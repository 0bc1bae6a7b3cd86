import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from benchmarks import published_memory
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer
from torch.utils.checkpoint import checkpoint

from effgpu import memory_limit, peak_bytes
from effgpu.measuring.device import find_device, gc_frozen
from effgpu.measuring.torch_internals import _pop_mode_temporarily
from effgpu.predicting import fake_gpu, prediction
from effgpu.predicting.allocator import Block, Pool, count_reserved, find_peak, round_size, segment_size
from effgpu.predicting.full_size import predict_full_size
from effgpu.predicting.gpus import known_gpus
from effgpu.predicting.prediction import (
    DOES_NOT_FIT,
    FITS,
    MAY_NOT_FIT,
    MORE,
    Gpu,
    Prediction,
    Range,
    find_gpu,
    largest,
    predict,
    walk,
)
from effgpu.units import GiB, KiB, MiB

GPUS = known_gpus()


@pytest.fixture(autouse=True, scope="module")
def _fast_collecting():
    with gc_frozen():
        yield


# --- the caching allocator ---


@given(st.integers(1, 2**36))
def test_sizes_are_rounded_as_the_allocator_does(size):
    rounded = round_size(size)
    assert rounded % 512 == 0 and 0 <= rounded - size < 512
    assert segment_size(rounded) >= rounded and segment_size(rounded) % (2 * MiB) == 0


def test_segments_have_the_sizes_of_pytorchs_source():
    sizes = [1, MiB, MiB + 1, 10 * MiB - 512, 10 * MiB, 11 * MiB, 100 * MiB + 1]
    segments = [count_reserved([Block(round_size(size), 0)]) // MiB for size in sizes]
    assert segments == [2, 2, 20, 20, 10, 12, 102]


def test_pieces_of_a_segment_are_handed_out_and_joined_again():
    pool = Pool()
    first, second, third = (pool.allocate(4 * MiB) for _ in range(3))
    assert pool.reserved == 20 * MiB
    pool.free(first)
    pool.free(third)
    assert pool.allocate(12 * MiB - 512).size == 12 * MiB  # third's place, joined with the rest
    assert pool.reserved == 20 * MiB
    pool.free(second)
    assert pool.allocate(8 * MiB).address == 0 and pool.reserved == 20 * MiB


def test_a_large_block_keeps_a_rest_of_one_mebibyte():
    pool = Pool()
    pool.free(pool.allocate(12 * MiB))
    assert pool.allocate(11 * MiB).size == 12 * MiB  # a rest of 1 MiB is not split off
    assert pool.reserved == 12 * MiB


@st.composite
def streams(draw):
    """Blocks that are born and die in some order."""
    blocks, alive, event = [], [], 0
    for size in draw(st.lists(st.integers(1, 40 * MiB), min_size=1, max_size=60)):
        event += 1
        blocks.append(Block(round_size(size), event))
        alive.append(blocks[-1])
        while alive and draw(st.booleans()):
            event += 1
            alive.pop(draw(st.integers(0, len(alive) - 1))).died = event
    return blocks


@given(streams())
def test_reserved_memory_holds_the_peak_and_nothing_overlaps(blocks):
    peak, at = find_peak(blocks)
    assert peak == sum(block.size for block in blocks if block.born <= at < block.died)
    assert peak == max(sum(b.size for b in blocks if b.born <= event < b.died) for event in range(2 * len(blocks) + 1))
    assert count_reserved(blocks) >= peak and count_reserved(blocks) % (2 * MiB) == 0
    pool, held = Pool(), []
    for block in blocks:
        piece = pool.allocate(block.size)
        held.append((piece.address, piece.address + piece.size))
        assert piece.size >= block.size
    held.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(held))


@given(st.lists(st.integers(1, 40 * MiB), min_size=1, max_size=40))
def test_the_same_requests_again_need_no_more_memory(sizes):
    pool = Pool()
    for piece in [pool.allocate(size) for size in sizes]:
        pool.free(piece)
    once = pool.reserved
    for piece in [pool.allocate(size) for size in sorted(sizes, reverse=True)]:
        pool.free(piece)
    assert pool.reserved <= 2 * once
    free = sorted((address, size) for pieces in pool._free.values() for size, address in pieces)
    assert sum(size for _, size in free) == pool.reserved  # all of it is free, and joined into whole segments
    assert len(free) == len(pool._at)


# --- variants ---


def train(model_of, *shape, loss=None, optimizer=torch.optim.AdamW, autocast=None, **options):
    def variant():
        model = model_of().train()
        trained = optimizer([p for p in model.parameters() if p.requires_grad], **options)
        inputs = torch.randint(0, 100, shape) if len(shape) == 2 and loss is None else torch.randn(shape)

        def step():
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                out = model(inputs)
                (loss(out) if loss else out.float().square().mean()).backward()
            trained.step()
            trained.zero_grad()

        return step

    return variant


def linear(width=256, batch=64, **options):
    return train(lambda: nn.Linear(width, width, bias=False), batch, width, loss=torch.sum, **options)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 4), nn.Linear(4, base.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def language(name, config, checkpointed=False, lora=False):
    def build():
        import transformers

        sizes = dict(vocab_size=1000, **config)
        model = getattr(transformers, name[0])(getattr(transformers, name[1])(**sizes))
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            model.requires_grad_(False)
            for layer in model.model.layers:
                layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        return Loss(model)

    return build


class Loss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        labels = tokens if "Class" not in type(self.model).__name__ else tokens[:, 0] % 2
        return self.model(input_ids=tokens, labels=labels).loss


def vision(name, classes=10, **options):
    def build():
        import torchvision

        build = getattr(torchvision.models, name, None) or getattr(torchvision.models.segmentation, name)
        return build(num_classes=classes, **options)

    return build


def as_a_cpu_counts(variant):
    """The prediction without a GPU's rules: what `trace` records on a CPU, but for what oneDNN's convolutions copy."""
    return walk(variant, (GPUS["T4"],), fake_gpu.Recorder(None))


GPT2 = ("GPT2LMHeadModel", "GPT2Config"), dict(n_embd=128, n_layer=2, n_head=4, use_cache=False)
LLAMA = (
    ("LlamaForCausalLM", "LlamaConfig"),
    dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
)
BERT = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)
T5 = dict(d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0)
VIT = dict(image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=128, mlp_dim=256)
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MODELS = {
    "GPT-2": train(language(*GPT2), 4, 64, foreach=True),
    "GPT-2, checkpointing, autocast": train(language(*GPT2, checkpointed=True), 4, 64, autocast=torch.bfloat16),
    "ResNet-18": train(vision("resnet18"), 2, 3, 64, 64, loss=lambda out: out.square().mean(), optimizer=sgd),
    "FCN-ResNet-50": train(
        vision("fcn_resnet50", weights=None, weights_backbone=None),
        *(1, 3, 64, 64),
        loss=lambda out: out["out"].square().mean(),
        optimizer=sgd,
    ),
    "ViT": train(vision("VisionTransformer", **VIT), 16, 3, 64, 64, loss=lambda out: out.square().mean()),
    "BERT": train(language(("BertForSequenceClassification", "BertConfig"), BERT), 4, 64),
    "T5": train(language(("T5ForConditionalGeneration", "T5Config"), T5), 4, 64),
    "LoRA": train(language(*LLAMA, lora=True), 4, 64),
}


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", MODELS)
def test_with_a_cpus_rules_the_count_is_what_the_trace_records(name):
    predicted = as_a_cpu_counts(MODELS[name])
    assert predicted.allocated == pytest.approx(peak_bytes(MODELS[name], warmup=1), rel=0.01)
    assert not predicted.unknown and sum(predicted.owners.values()) == predicted.allocated


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("name", ["ResNet-18", "LoRA"])
def test_owners_are_measured_where_the_step_can_run(name):
    counted, both = as_a_cpu_counts(MODELS[name]), predict(MODELS[name], "T4", measured=True)
    assert sum(both.measured.values()) == pytest.approx(peak_bytes(MODELS[name], warmup=1), rel=0.01)
    for owner, size in counted.owners.items():
        assert both.measured[owner] == pytest.approx(size, rel=0.02, abs=0.01 * counted.allocated)
    assert "  weights" in repr(both) and "(measured here: " in repr(both)


def test_a_step_that_fails_on_this_device_leaves_nothing_behind():
    def variant():
        model = nn.Linear(4, 4)

        def step():
            model(torch.ones(2, 4)).sum().backward()
            if type(model.weight) is nn.Parameter and model.weight.sum().item() != 1.0:  # fake tensors read 1
                raise KeyError("only for real")

        return step

    before = len(optimizer._global_optimizer_pre_hooks)
    with pytest.raises(KeyError, match="only for real"):
        predict(variant, measured=True)
    assert len(optimizer._global_optimizer_pre_hooks) == before


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


def test_bfloat16_has_no_fused_attention_on_a_t4():
    on = {gpu: saved(attend, 2, 4, 512, 64, dtype=torch.bfloat16, gpu=gpu) for gpu in ("T4", "L4")}
    assert on["T4"] > 10 * on["L4"]


def attending():
    x = torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, requires_grad=True)
    return lambda: attend(x).sum().backward()


def test_older_gpus_get_a_walk_of_their_own():
    predicted = predict(attending)
    assert predicted.verdict("T4") == predicted.verdict("L4") == FITS
    assert "on T4 and V100 the step takes other kernels or formats" in repr(predicted)
    alone = predict(attending, "T4")
    assert alone.verdict() == FITS and alone.total() == predicted.total("T4") != predicted.total("L4")
    assert alone.time().expected == predicted.time("T4").expected
    told = predict_full_size({"here": attending}, {"here": attending}, ["T4", "L4"])["here"]
    assert [one.allocated for one in told] == [alone.allocated, predicted.allocated]
    assert predict(linear()).verdict("T4") == FITS
    assert "compute capability 8.0 or higher" in predict(attending, "16 GiB").assumptions[0]
    assert not predict(linear(), "16 GiB").assumptions and not predict(attending, "L4").assumptions


def test_a_gpu_that_prefers_cudnns_attention_is_said_to():
    assert "on H100 and H100 PCIe and H200, cuDNN's attention takes no more" in predict(attending).assumptions[0]
    assert not predict(attending, "RTX 4090").assumptions
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert not predict(attending, "H100").assumptions


@pytest.mark.parametrize("width", [33, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_computes_the_right_shapes_for_odd_heads_and_masks(width, dtype):
    def variant(options):
        x = torch.randn(2, 4, 30, width, dtype=dtype, requires_grad=True)

        def step():
            out = attend(x, **options)
            assert out.shape == x.shape
            out.sum().backward()
            assert x.grad.shape == x.shape

        return step

    mask = torch.ones(1, 1, 30, 30, dtype=torch.bool)
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"dropout_p": 0.1}):
        assert predict(partial(variant, options), "L4").allocated > 0


def test_autocast_has_a_gpus_list_of_operations():
    seen = {}

    def variant():
        x, weight = torch.randn(8, 8), nn.Linear(8, 8)

        def step():
            with torch.autocast("cpu", torch.float16):
                half = weight(x)
                seen.update(linear=half, softmax=half.softmax(-1), norm=F.layer_norm(half, (8,)), gelu=F.gelu(half))
                seen.update(exp=half.exp(), sum=half.sum(), cat=torch.cat([half, half]), pow=half**2, mv=x.mv(x[0]))
                seen.update(
                    loss=F.cross_entropy(half, torch.zeros(8, dtype=torch.long)), einsum=torch.einsum("ij,jk", x, x)
                )
                with torch.autocast("cpu", enabled=False):
                    seen.update(off=x @ x)
            seen.update({name: tensor.dtype for name, tensor in seen.items()})

        return step

    predict(variant, steps=1)
    half = {name for name, dtype in seen.items() if dtype is torch.float16}
    assert half == {"linear", "gelu", "cat", "einsum", "mv"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_that_is_named_is_predicted_with_its_autocast_and_scaler(device):
    def variant():
        model = nn.Linear(64, 64).to(device)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.amp.GradScaler(device)

        def step():
            with torch.autocast(device, torch.float16):
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


def test_a_gpu_may_have_a_number():
    def variant():
        device = torch.device("cuda", 0)
        with device:
            model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64).to("cuda:0"))

        def step():
            model(torch.randn(8, 64, device=device) + torch.randn(64, device=torch.device("cuda:0"))).sum().backward()

        return step

    assert predict(variant, "T4").verdict() == FITS


def test_pytorch_does_not_remember_the_cpu_for_the_gpu():
    torch.get_device_module.cache_clear()
    predict(lambda: lambda: torch.get_device_module("cuda"), "T4", steps=1)
    assert torch.get_device_module("cuda") is torch.cuda


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_on_the_gpu_too(reentrant):
    def variant(device):
        model = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).to(device)
        seen = set()

        def block(layer, x):
            x = layer(x + torch.ones(64, device=device)).relu()
            seen.add(x.dtype)
            return x

        def step():
            x = torch.randn(1024, 64, device=device, requires_grad=True)
            with torch.autocast(device, torch.float16):
                for layer in model:
                    x = checkpoint(block, layer, x, use_reentrant=reentrant)
            x.float().sum().backward()
            assert seen == {torch.float16}

        return step

    assert predict(partial(variant, "cuda"), "T4").allocated == predict(partial(variant, "cpu"), "T4").allocated


def layers():
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


def test_foreach_is_a_gpus_default_and_takes_temporaries():
    size = 8 * 256 * 256 * 4
    of = lambda **options: predict(train(layers, 2, 256, loss=torch.sum, **options))
    default, single, fused = of(), of(foreach=False), of(fused=True)
    assert default.allocated - fused.allocated == pytest.approx(size, rel=0.05)
    assert single.allocated - fused.allocated == pytest.approx(3 * size / 8, rel=0.05)  # three of one layer
    assert default.owners["optimizer state"] == pytest.approx(2 * size, rel=0.01)


def test_adafactor_takes_no_foreach_unless_asked():
    size = 8 * 256 * 256 * 4
    of = lambda kind, **options: predict(train(layers, 2, 256, loss=torch.sum, optimizer=kind, **options)).allocated
    own = type("Own", (torch.optim.Adafactor,), {})
    assert of(torch.optim.Adafactor) == of(own) == of(torch.optim.Adafactor, foreach=False)
    assert of(torch.optim.Adafactor, foreach=True) - of(torch.optim.Adafactor) > size / 2
    assert of(type("Own", (torch.optim.AdamW,), {})) == of(torch.optim.AdamW)


def test_owners_are_told_apart():
    predicted = predict(linear(1024, 4096))
    weights = 1024 * 1024 * 4
    assert predicted.owners["weights"] == weights
    assert predicted.owners["optimizer state"] == pytest.approx(2 * weights, rel=0.001)
    assert list(predicted.owners) == list(prediction.OWNERS)
    frozen = predict(train(lambda: Lora(nn.Linear(512, 512)), 4, 512, loss=torch.sum))
    assert frozen.owners["weights"] > 512 * 512 * 4
    backward = predict(lambda: partial(lambda x: x.sin().sin().sum().backward(), torch.randn(MiB, requires_grad=True)))
    assert backward.owners["activations"] < 1.1 * 4 * MiB < backward.owners["other"], "temporaries are no activations"


def test_zeroed_gradients_are_kept_and_none_are_not():
    def variant(set_to_none):
        model = nn.Linear(512, 512, bias=False)
        optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8192, 512)

        def step():
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

        return step

    kept, freed = (predict(partial(variant, none)) for none in (False, True))
    assert kept.allocated - freed.allocated >= 512 * 512 * 4


def test_convolutions_and_products_take_workspaces():
    assert predict(linear(), "T4").workspaces.low == 8.125 * MiB
    assert predict(linear(), "H100").workspaces.low == 32 * MiB
    convolution = predict(train(lambda: nn.Conv2d(3, 8, 3), 2, 3, 32, 32, loss=torch.sum))
    assert convolution.workspaces.high > convolution.workspaces.low == 0


# --- what a step reads ---


def reading(read):
    def variant():
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(4, 16)

        def step():
            out = model(inputs)
            read(out)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return variant


def require(truth):
    assert truth


@pytest.mark.parametrize(
    "read",
    [
        lambda out: require(torch.isfinite(out).all()),
        lambda out: require(not torch.isnan(out.sum())),
        lambda out: nn.utils.get_total_norm([out.detach()], error_if_nonfinite=True),
        lambda out: repr(out),
    ],
)
def test_what_holds_for_every_healthy_step_is_not_mentioned(read):
    predicted = predict(reading(read), "T4")
    assert predicted.verdict() == FITS and not predicted.assumptions


@pytest.mark.parametrize(
    "read", [lambda out: out.sum().item(), lambda out: f"{out.sum():.3f}", lambda out: out.detach().numpy() + 1]
)
def test_a_number_that_is_read_is_said_with_its_line(read):
    predicted = predict(reading(read), "T4")
    assert predicted.verdict() == FITS
    assert len(predicted.assumptions) == 1 and re.match(r"test_prediction.py:\d+ reads", predicted.assumptions[0])
    assert "assumed: test_prediction.py:" in repr(predicted)


def test_a_tensor_on_the_gpu_from_outside_is_refused_with_what_to_do():
    def variant():
        model = nn.Linear(4, 4)
        with _pop_mode_temporarily():  # below what takes a GPU's name for the CPU's, as a tensor from outside is
            rows = torch.empty(4, 4, device="cuda")
        return lambda: model(rows).sum().backward()

    with pytest.raises(RuntimeError, match=r"outside of the variant: keep those on the CPU, and .* \.to\(device\)"):
        predict(variant, "T4")


@pytest.mark.parametrize("read", [lambda out: bool(out.sum() > 0), lambda out: out.argmax().item()])
def test_where_sizes_may_depend_on_a_value_the_line_is_named(read):
    predicted = predict(reading(read), "T4")
    assert predicted.unknown[0].startswith("test_prediction.py:")


@pytest.mark.parametrize(
    "read, why",
    [
        (lambda out: out[out > 0], "the shape of a result depends on values, by aten.nonzero"),
        (lambda out: out.unique(), "the shape of a result depends on values"),
        (lambda out: OUTSIDE(out), "parameters from outside of the variant"),
        (lambda out: torch.cuda.synchronize(), "calls torch.cuda itself"),
    ],
)
def test_a_step_that_cannot_be_predicted_is_refused_with_the_reason(read, why):
    with pytest.raises(RuntimeError, match=why):
        predict(reading(read))


OUTSIDE = nn.Linear(16, 16)
COMPILED = torch.compile(torch.relu)


@pytest.mark.parametrize("read", [lambda out: torch.compile(torch.relu)(out), lambda out: COMPILED(out)])
def test_compiled_code_is_counted_as_eager_and_said(read):
    predicted = predict(reading(read), "T4")
    assert predicted.unknown == (fake_gpu.COMPILED,) and predicted.verdict() == FITS
    high = predicted.total("T4").high
    assert predicted.verdict(replace(GPUS["T4"], memory=2 * high)) == FITS
    assert predicted.verdict(replace(GPUS["T4"], memory=2 * high - 1)) == MAY_NOT_FIT


@pytest.mark.filterwarnings("error")
def test_a_module_that_copies_its_layers_is_walked_without_a_warning():
    def variant():
        layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
        return lambda: layers(torch.zeros(2, 4, 8)).sum().backward()

    assert predict(variant, "T4").allocated > 0


def test_data_are_loaded_without_workers():
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, number):
            return torch.full((16,), float(number)), number % 4

    def variant():
        model = nn.Linear(16, 4)
        loader = torch.utils.data.DataLoader(Data(), 8, shuffle=True, num_workers=2, pin_memory=True)

        def step():
            for inputs, labels in loader:
                F.cross_entropy(model(inputs.to("cuda", non_blocking=True)), labels.cuda()).backward()

        return step

    predicted = predict(variant, "T4")
    assert predicted.verdict() == FITS and "workers do not run" in predicted.assumptions[0]


@pytest.mark.parametrize("name", ["text_classifier", "language_model", "image_classifier"])
def test_the_workloads_of_the_course_are_predicted(name):
    from effgpu.course import workloads

    def variant():
        model, inputs, labels = getattr(workloads, name)()
        return lambda: F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten()).backward()

    predicted = predict(variant, "T4")
    assert predicted.verdict() == FITS and predicted.owners["weights"] > 0


def test_the_course_trains_in_bfloat16_where_the_gpu_has_it():
    """On layers without attention, which would ask for a GPU by name in any case."""
    from effgpu.course import workloads

    def variant():
        x, model = torch.randn(4096, 256), nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))

        def step():
            with workloads.autocast():
                loss = model(x).square().mean()
            loss.backward()

        return step

    on = {gpu: predict(variant, gpu).owners["activations"] for gpu in ("T4", "L4")}
    assert on["L4"] < 0.8 * on["T4"]
    anywhere = predict(variant)
    assert anywhere.owners["activations"] == on["L4"]
    assert anywhere.verdict("T4") == anywhere.verdict("L4") == FITS
    assert anywhere.older.owners["activations"] == on["T4"]


# --- nothing global stays changed ---


def state():
    return (
        torch.get_rng_state().tolist(),
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
            if fails:
                raise ValueError("the step's own")

        return step

    torch.manual_seed(0)
    before = state()
    torch.manual_seed(0)
    if fails:
        with pytest.raises(ValueError, match="the step's own"):
            predict(variant)
    else:
        predict(variant)
    assert state() == before
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.ones(2).bfloat16().softmax(0).dtype is torch.bfloat16  # the CPU's own list again


# --- verdicts ---


def made(allocated, reserved=None, unknown=(), resting=0):
    owners = dict.fromkeys(prediction.OWNERS, 0) | {"activations": allocated}
    return Prediction(allocated, owners, reserved or allocated, Range(0, 0), tuple(GPUS.values()), (), unknown, resting)


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


NAMES = {
    "T4": ["t4", "Tesla T4"],
    "RTX 4090": ["4090"],
    "RTX 3090": ["NVIDIA GeForce RTX 3090"],
    "A100 40 GB": ["A100", "A100 40", "NVIDIA A100-PCIE-40GB"],
    "A100 80 GB": ["a100-80gb", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"],
    "V100": ["v100", "Tesla V100-SXM2-16GB"],
    "L4": ["L4", "L4 24 GB"],
    "H100": ["NVIDIA H100 80GB HBM3"],
    "H100 PCIe": ["NVIDIA H100 PCIe"],
    "H200": ["h200"],
}


def test_gpus_are_found_by_their_names():
    assert {text: find_gpu(text).name for texts in NAMES.values() for text in texts} == {
        text: name for name, texts in NAMES.items() for text in texts
    }


@pytest.mark.parametrize(
    "text, size", [("16 GiB", 16 * GiB), ("16gb", 16e9), ("1.5 GiB", 1.5 * GiB), (2 * GiB, 2 * GiB)]
)
def test_a_size_stands_for_a_gpu(text, size):
    assert find_gpu(text).memory == size


OTHERS = ["Tesla V100-SXM2-32GB", "NVIDIA H100 NVL", "NVIDIA L40", "NVIDIA GB200", "RTX 3090 Ti", "A100 64GB"]


@pytest.mark.parametrize("gpu", ["A1", "T", "", "0 GiB", 0, -1, None, True, "16", *OTHERS])
def test_an_unknown_gpu_is_refused(gpu):
    with pytest.raises(ValueError, match="gpu: expected"):
        find_gpu(gpu)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="steps: expected"):
        predict(linear(), steps=0)
    with pytest.raises(ValueError, match="most: expected"):
        largest(linear, "T4", most=0)


@pytest.mark.parametrize("variant", [lambda: None, nn.Linear(1, 1), 3])
def test_what_is_no_variant_is_refused(variant):
    with pytest.raises(TypeError, match="expected"):
        predict(variant)


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
    found = prediction._bisect(lambda size: calls.append(size) or surplus(size), most)
    assert 0 <= found <= most
    assert found == 0 or surplus(found) <= 0
    assert found == most or surplus(found + 1) > 0
    assert len(set(calls)) == len(calls) and all(1 <= size <= most for size in calls)
    assert len(calls) <= 3 * most.bit_length() + 6


def test_the_largest_batch_fits_and_the_next_may_not():
    result = largest(lambda batch: linear(4096, batch), "2 GiB", most=10**6)
    assert 0 < result.fits <= result.may_fit
    assert result.tried[result.fits].verdict() == FITS
    assert predict(linear(4096, result.fits + 1), "2 GiB").verdict() != FITS
    assert predict(linear(4096, result.may_fit + 1), "2 GiB").verdict() == DOES_NOT_FIT
    assert len(result.tried) < 16
    assert f"{result.fits} fits a 2 GiB" in repr(result)


def test_of_steps_with_something_unknown_the_largest_is_the_largest_that_fits():
    def variant_of(batch):
        def variant():
            torch.compile(torch.relu)
            return linear(4096, batch)()

        return variant

    result = largest(variant_of, "8 GiB", most=10**5)
    assert result.tried[result.fits].unknown and result.tried[result.fits].verdict() == FITS
    assert predict(variant_of(result.fits + 1), "8 GiB").verdict() == MAY_NOT_FIT


def test_nothing_may_fit():
    assert repr(largest(lambda batch: linear(4096, batch), "100 MiB")) == "nothing fits a 100 MiB"


# --- against what was published ---


def test_a_published_peak_is_met():
    (case,) = (case for case in published_memory.CASES if case.name == "GPT-2, fused attention")
    outcome = published_memory.run(case)
    assert abs(outcome.error) < 0.01 and not outcome.is_false_fit


def test_a_published_run_would_be_a_false_fit_without_the_margin(monkeypatch):
    (case,) = (case for case in published_memory.CASES if case.name == "GPT-2, compiled")
    outcome = published_memory.run(case)
    assert not outcome.is_false_fit
    monkeypatch.setattr(prediction, "MORE", 0.0)
    assert outcome.is_false_fit


@pytest.mark.slow
@pytest.mark.parametrize("case", published_memory.CASES, ids=lambda case: case.name)
def test_no_published_run_is_a_false_fit(case):
    outcome = published_memory.run(case)
    assert not outcome.is_false_fit and abs(outcome.error) < 0.15


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [None, torch.float16])
def test_what_is_predicted_is_what_a_gpu_needs(autocast):
    def variant():
        device = find_device()
        layer = partial(nn.TransformerEncoderLayer, 512, 8, 2048, batch_first=True, device=device)
        model = nn.Sequential(*(layer() for _ in range(6))).train()
        optimizer, inputs = torch.optim.AdamW(model.parameters()), torch.randn(64, 256, 512, device=device)

        def step():
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                loss = model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    properties = torch.cuda.get_device_properties()
    here = Gpu("here", properties.total_memory, (properties.major, properties.minor), (0, 0))
    predicted = predict(variant, here)
    measured = peak_bytes(variant)
    assert predicted.allocated + predicted.workspaces.low == pytest.approx(measured, rel=0.05)
    owners = predict(variant, here, measured=True).measured
    for owner in ("weights", "gradients", "optimizer state", "activations"):
        assert owners[owner] == pytest.approx(predicted.owners[owner], rel=0.05, abs=MiB)
    with memory_limit(predicted.total().high):
        assert peak_bytes(variant) is not None
    with memory_limit(0.8 * predicted.allocated):
        assert peak_bytes(variant) is None
