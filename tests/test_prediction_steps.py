"""The step that is predicted is the one that runs: what libraries, checks, compilers and copies do on real tensors."""

import copy
import importlib
import itertools
import linecache
import math
import operator
import os
import re
import runpy
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import ModuleType
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from effgpu.__main__ import main
from effgpu.measuring.ops import count_ops
from effgpu.measuring.torch_internals import FakeTensor
from effgpu.predicting import guesses, uses
from effgpu.predicting.allocator import round_size
from effgpu.predicting.gpus import Gpu, find_gpu
from effgpu.predicting.kinds import ATTENTION
from effgpu.predicting.predict import largest, predict
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS, LESS, MAY_NOT_FIT
from effgpu.predicting.statistic import Statistic
from effgpu.predicting.timeline import BACKWARD, FORWARD
from effgpu.units import KiB, MiB

T4 = find_gpu("T4")


def kernels(variant, gpu="A100 80 GB", **options):
    """The kernels of a step, each with its number."""
    return sum((segment.kernels for segment in predict(variant, gpu, **options).segments), Counter())


# --- libraries that ask whether a tensor is fake ---

BATCH, LENGTH, HEADS, WIDTH = 2, 64, 4, 32


def decoder(mask_of=None, tokens_of=lambda: torch.zeros(BATCH, LENGTH, dtype=torch.long)):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = dict(hidden_size=HEADS * WIDTH, intermediate_size=64, num_hidden_layers=1, vocab_size=100)
    heads = dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, sliding_window=None, use_cache=False)
    model = MistralForCausalLM._from_config(MistralConfig(**sizes, **heads), dtype=torch.bfloat16)
    tokens = tokens_of()
    mask = {} if mask_of is None else dict(attention_mask=mask_of(tokens))
    return lambda: model(input_ids=tokens, **mask).logits.float().mean().backward()


def encoder(mask_of):
    from transformers import BertConfig, BertModel

    sizes = dict(hidden_size=HEADS * WIDTH, intermediate_size=64, num_hidden_layers=1, vocab_size=100)
    model = BertModel(BertConfig(**sizes, num_attention_heads=HEADS)).to(torch.bfloat16)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return lambda: model(tokens, attention_mask=mask_of(tokens)).last_hidden_state.float().mean().backward()


def padded(tokens):
    mask = torch.ones_like(tokens)
    mask[0, LENGTH // 2 :] = 0
    return mask


OUTSIDE_MASK = torch.ones(BATCH, LENGTH, dtype=torch.long)
MASKS = {
    "none": None,
    "of ones": torch.ones_like,
    "of ones as numbers": lambda tokens: torch.ones(tokens.shape),
    "compared": lambda tokens: tokens != 3,
    "from outside": lambda tokens: OUTSIDE_MASK,
    "copied": lambda tokens: torch.empty_like(tokens).copy_(OUTSIDE_MASK),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_decoder_is_predicted_with_causal_flash_attention(name):
    attending = {k.name: k.flops for k in kernels(partial(decoder, MASKS[name])) if k.kind == ATTENTION}
    product = 2 * BATCH * HEADS * LENGTH**2 * WIDTH
    causal = {"_scaled_dot_product_flash_attention": product}  # half of two products
    assert attending == causal | {"_scaled_dot_product_flash_attention_backward": 5 * product // 2}


@pytest.mark.parametrize("model", [decoder, encoder])
def test_a_mask_that_masks_is_one(model):
    names = {kernel.name for kernel in kernels(partial(model, padded)) if kernel.kind == ATTENTION}
    assert names == {f"_scaled_dot_product_efficient_attention{end}" for end in ("", "_backward")}


def test_an_encoder_drops_a_mask_of_ones():
    names = {kernel.name for kernel in kernels(partial(encoder, torch.ones_like)) if kernel.kind == ATTENTION}
    assert names == {f"_scaled_dot_product_flash_attention{end}" for end in ("", "_backward")}


def a_library(monkeypatch):
    library = ModuleType("a_library")
    monkeypatch.setitem(sys.modules, "a_library", library)
    source = "import torch\nfrom torch._subclasses.fake_tensor import FakeTensor, is_fake\n"
    source += "def import_now():\n    global Late\n    from torch._subclasses import FakeTensor as Late\n"
    source += "    return Late\n"
    exec(compile(source, "/somewhere/a_library.py", "exec"), vars(library))
    return library


def test_no_library_finds_a_tensor_to_be_fake_inside_and_all_do_after(monkeypatch):
    library, found = a_library(monkeypatch), []

    def step():
        x = torch.ones(2)
        module = torch._subclasses
        found.extend(isinstance(x, kind) for kind in (library.FakeTensor, module.FakeTensor, library.import_now()))
        found.extend([isinstance(x, module.fake_tensor.FakeTensor), library.is_fake(x)])
        found.append(torch._guards.detect_fake_mode([x]) is not None)

    predict(lambda: step, "T4", steps=1)
    assert found == [False] * 6
    assert library.FakeTensor is torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor is FakeTensor
    assert library.import_now() is FakeTensor and type(torch._subclasses) is ModuleType


# --- values that are known all the same ---


def read(function):
    """What a step gets that reads a number."""
    seen = []

    def step():
        seen.append(function())

    predicted = predict(lambda: step, "T4", steps=1)
    return seen[0], predicted.assumptions + predicted.unknown


def written():
    x = torch.zeros(4, 4)
    x[1] = 2.0
    x.view(-1)[:2].add_(1)
    return x


@pytest.mark.parametrize(
    "function, value",
    [
        (lambda: (torch.arange(8).diff() == 1).all().item(), True),
        (lambda: torch.ones(3, 5, dtype=torch.long).sum().item(), 15),
        (lambda: written().sum().item(), 10.0),
        (lambda: torch.empty(8).fill_(3).max().item(), 3.0),
        (lambda: torch.full((4,), 2.5).to(torch.bfloat16).expand(3, 4)[0].min().item(), 2.5),
        (lambda: torch.tensor([3, 4]).max().item(), 4),
        (lambda: torch.randint(5, 6, (4,)).max().item(), 5),
        (lambda: torch.randperm(8).sum().item(), 28),
    ],
)
def test_what_is_made_of_constants_is_read_as_it_is(function, value):
    assert read(function) == (value, ())


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.zeros(4).uniform_().max().item(),
        lambda: torch.zeros(4).add_(torch.rand(4)).max().item(),
        lambda: torch.zeros(4).bernoulli(0.5).max().item(),
        lambda: written().mul_(torch.rand(4, 4)).sum().item(),
        lambda: torch.rand(4, out=torch.zeros(4)).sum().item(),
        lambda: torch.rand(4).mul(9).long().max().item(),
    ],
)
def test_what_random_fractions_are_in_is_not_known(function):
    value, told = read(function)
    assert value == 1 and "reads a" in told[0]


def test_a_batch_that_is_cut_out_at_drawn_offsets_has_its_length():
    data = np.arange(10_000) % 100

    def training(drawn):
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 100))

        def step():
            if drawn:
                starts = torch.randint(len(data) - 256, (16,))
                texts = torch.stack([torch.from_numpy(data[i : i + 256]) for i in starts])
            else:
                texts = torch.randint(100, (16, 256))
            model(texts).sum().backward()

        return step

    cut, same = (predict(partial(training, drawn), "T4") for drawn in (True, False))
    assert not cut.unknown and same.owners["activations"] > 16 * 256 * 64 * 4
    assert cut.owners["activations"] == pytest.approx(same.owners["activations"], abs=8192)  # the offsets


@pytest.mark.parametrize("sizes, differ", [((200, 900), True), ((500, 500), False)])
def test_steps_of_other_sizes_are_said_to_be(sizes, differ):
    """As where a step draws its size: it takes what it happens to draw."""

    def variant():
        model, drawn = nn.Linear(1024, 1024), itertools.cycle(sizes)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            model(torch.rand(next(drawn), 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    notes = [why for why in predict(variant, "T4").assumptions if why.startswith("steps differ in size")]
    assert len(notes) == differ and all(re.search(r"make [\d.]+ MiB and [\d.]+ MiB in", why) for why in notes)


def test_rows_that_are_repeated_have_the_length_that_was_said():
    """As where texts of known lengths are packed: each position gets its text's number."""

    def variant(lengths):
        layer = nn.Linear(256, 256)

        def step():
            numbers = torch.arange(4).repeat_interleave(lengths() if callable(lengths) else torch.tensor(lengths))
            layer(torch.rand(len(numbers), 256)).sum().backward()

        return step

    short, long = (predict(partial(variant, [rows] * 4), "T4").owners["activations"] for rows in (1024, 4096))
    assert long == pytest.approx(4 * short, rel=0.01)
    with pytest.raises(RuntimeError, match=r"depends on values, by aten\.repeat_interleave"):
        predict(partial(variant, lambda: torch.rand(4).mul(9).long()), "T4")


# --- attention of one's own ---


def attending(compiles=True, score_mod=None, flexible=True):
    from torch.nn.attention import flex_attention as flex

    def variant():
        layer, bias = nn.Linear(512, 3 * 512, dtype=torch.bfloat16), nn.Parameter(torch.zeros(8))
        attend = torch.compile(flex.flex_attention) if compiles else flex.flex_attention
        scored = score_mod and score_mod(bias)

        def step():
            texts = torch.rand(4, 1024, 512, dtype=torch.bfloat16)
            q, k, v = (each.view(4, 1024, 8, 64).transpose(1, 2) for each in layer(texts).chunk(3, -1))
            if flexible:
                mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024, device="cpu")
                out = attend(q, k, v, score_mod=scored, block_mask=mask)
            else:
                out = nn.functional.scaled_dot_product_attention(q, k, v)
            out.sum().backward()

        return step

    return variant


def test_flex_attention_is_one_kernel_in_compiled_code():
    flexible, flash = (predict(attending(flexible=flexible), "A100") for flexible in (True, False))
    assert flexible.owners["activations"] == pytest.approx(flash.owners["activations"], rel=0.02)
    attention = [predicted.time("A100").table["attention"] for predicted in (flexible, flash)]
    assert attention[0][1:] == pytest.approx(attention[1][1:], rel=0.01)
    assert flexible.unknown == ("how long FlexAttention takes, counted as if its mask left out no block",)
    assert flexible.verdict("A100") == "fits"


@pytest.mark.parametrize(
    "variant, why",
    [
        (attending(compiles=False), "in compiled code alone"),
        (attending(score_mod=lambda bias: lambda score, b, h, i, j: score + bias[h]), "weights of its own"),
    ],
)
def test_flex_attention_that_takes_another_way_is_refused(variant, why):
    with pytest.raises(RuntimeError, match=f"predict: FlexAttention .*{why}"):
        predict(variant, "A100")


# --- deep copies ---


def test_a_deep_copy_is_a_tensor_like_the_first_one():
    """PyTorch copies a fake tensor's mode, too, which corrupts memory: that is seen much later, or never."""
    size = 4 * 256 * 256
    found = []

    def variant(copies):
        model = nn.Linear(256, 256, bias=False)
        model.register_buffer("betas", torch.linspace(0, 1, 12, dtype=torch.float64).float())
        model.register_buffer("scale", torch.tensor(2.0))  # of which PyTorch keeps the value
        model.tied, model.weight.mine = model.weight, [1]
        model(torch.rand(2, 256)).sum().backward()
        slow = copy.deepcopy(model) if copies else model

        def step():
            slow.weight.data.lerp_(model.weight.data, 0.1)
            found.append((slow.scale.item(), slow.weight.mine, slow.tied is slow.weight, slow.weight.grad.shape))
            assert isinstance(slow.weight, nn.Parameter) and slow.weight.requires_grad and not slow.betas.requires_grad
            copies = slow.weight, slow.weight.grad, slow.betas, slow.scale, copy.deepcopy({"of": model.betas})["of"]
            assert {each.fake_mode for each in copies} == {model.weight.fake_mode}

        return step

    one, two = (predict(partial(variant, copies), "T4") for copies in (False, True))
    assert two.allocated - one.allocated == pytest.approx(2 * size, rel=0.01)  # with its gradient
    assert found == [(2.0, [1], True, (256, 256))] * 4


def test_a_deep_copy_of_what_is_computed_is_refused_as_pytorch_does():
    with pytest.raises(RuntimeError, match="graph leaves"):
        predict(lambda: lambda: copy.deepcopy(torch.rand(2, requires_grad=True) * 2), "T4")


def test_the_average_of_a_model_with_batch_norm_is_made_on_the_gpu():
    """Each step copies the buffers, of which one is a number."""

    def variant():
        model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda()
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step():
            model(torch.rand(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)

        return step

    assert not predict(variant, "T4").assumptions


# --- compiled code ---


def linear(width=1024, batch=4096, wrap=lambda model: model, optimizer=torch.optim.AdamW):
    model = nn.Linear(width, width, bias=False)
    compiled, trained, inputs = wrap(model), optimizer(model.parameters(), fused=True), torch.rand(batch, width)

    def step():
        compiled(inputs).relu().mean().backward()
        trained.step()
        trained.zero_grad()

    return step


def never_runs(model):
    @torch.compile(fullgraph=True)
    def unused(x):
        return x + 1

    torch.compile(nn.Linear(2, 2))
    torch.compile(mode="max-autotune")(model.forward)
    return model


def in_place(model):
    model.compile()
    return model


COMPILED_BEFORE = torch.compile(torch.relu)
COMPILING = {
    "a model": torch.compile,
    "with options": partial(torch.compile, dynamic=True),
    "a function": lambda model: torch.compile(lambda x: model(x)),
    "in place": in_place,
    "before": lambda model: lambda x: COMPILED_BEFORE(model(x)),
}


def test_what_is_decorated_and_never_runs_is_not_compiled():
    eager, decorated = (predict(partial(linear, wrap=wrap), "2 GiB") for wrap in (lambda model: model, never_runs))
    assert not decorated.compiled and repr(decorated) == repr(eager)
    assert decorated.verdict() == FITS


@pytest.mark.parametrize("name", COMPILING)
def test_compiled_code_that_runs_is_counted_as_eager_and_its_verdict_says_something(name):
    eager, compiled = predict(linear, "T4"), predict(partial(linear, wrap=COMPILING[name]), "T4")
    assert compiled.compiled and not compiled.unknown and "compiled code" in repr(compiled)
    assert compiled.owners["weights"] == eager.owners["weights"] == 4 * 1024 * 1024
    high = compiled.total().high
    assert high == pytest.approx(eager.total().high + 0.05 * compiled.reserved, rel=0.1)
    assert compiled.verdict(replace(T4, memory=high)) == FITS
    assert compiled.verdict(replace(T4, memory=high - 1)) == MAY_NOT_FIT
    low = compiled.total().low
    kept = compiled.resting + (compiled.allocated - compiled.resting) / 2  # the rest may be recomputed, or fused away
    assert low == pytest.approx((1 - LESS) * kept + compiled.workspaces.low + T4.context[0], abs=2)
    assert compiled.verdict(replace(T4, memory=low - 1)) == DOES_NOT_FIT


def test_a_compiled_model_is_the_wrapper_that_pytorch_makes():
    def variant():
        model = nn.Linear(4, 4)
        compiled = torch.compile(model)
        assert compiled._orig_mod is model and list(compiled.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]
        assert copy.deepcopy(compiled)(torch.rand(2, 4)).shape == (2, 4)
        return lambda: compiled.eval()(torch.rand(2, 4)).sum().backward()

    assert predict(variant, "T4").compiled


def vision_transformer(wrap, width=1024, depth=4, batch=8):
    """A quarter of ViT-g's depth: torchao's README has the compiled peak of the whole within 1 % of the eager one."""
    layers = (nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, "gelu", batch_first=True) for _ in range(depth))
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    optimizer, compiled = torch.optim.AdamW(model.parameters(), fused=True), wrap(model)

    def step():
        compiled(torch.zeros(batch, 257, width, device="cuda", dtype=torch.bfloat16)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_compiled_code_fits_a_gpu_with_a_quarter_of_its_memory_free():
    compiled = predict(partial(vision_transformer, torch.compile), "16376 MiB")
    enough = Gpu("enough", int(compiled.total().high / 0.77), (8, 9), compiled.gpus[0].context)
    assert compiled.verdict(enough) == FITS and compiled.total(enough).high < 16376 * MiB
    assert largest(lambda batch: partial(linear, batch=batch, wrap=torch.compile), "8 GiB", most=10**6).fits > 4096


# --- checks of values ---


def checking(check, *shape):
    """A variant whose step checks what a layer gives."""
    model = nn.Linear(16, 16)

    def step():
        out = model(torch.rand(*(shape or (8, 16))))
        check(out)
        out.mean().backward()

    return step


def unless(out):
    if not (out[:, 2:] >= out[:, :-2]).all():
        raise ValueError("boxes must be in corner format")


def if_any(out):
    if (out > 2).any() or (out < -2).any():
        raise ValueError("too large")


def mixed(out):
    if (out > 2).any() or not (out > -2).all():
        raise ValueError("too large")


def helped(out):
    if not is_good(out):
        raise ValueError("not good")


def is_good(out):
    good = (out > 0).all()
    return bool(good)


def ordered(out):
    assert out.min() >= 0 and not (out > 1).any(), "not a share"


def one_of_one(out):
    (800,)[int(torch.empty(1).uniform_(0, 1).item())]


def two_of_two(out):
    (1, 2)[out.argmax().item() - 1], (1,)[out.argmin().item()]


PASSES = [unless, if_any, mixed, helped, ordered, one_of_one, two_of_two]
PASSES += [lambda out: torch.distributions.Normal(out, out.exp(), validate_args=True).log_prob(out)]
PASSES += [lambda out: torch.distributions.Categorical(logits=out, validate_args=True).sample()]
PASSES += [lambda out: torch._assert((out > 0).all(), "not positive")]
PASSES += [lambda out: torch.testing.assert_close(out, out * 2)]


@pytest.mark.parametrize("check", [*PASSES, lambda out: require(torch.allclose(out, out.exp()))])
def test_a_check_that_cannot_be_decided_passes_and_is_named(check):
    plain, checked = predict(partial(checking, lambda out: None), "T4"), predict(partial(checking, check), "T4")
    assert checked.verdict() == FITS and checked.owners["weights"] == plain.owners["weights"]
    assert re.search(
        r"assumed: test_prediction_steps.py:\d+ (checks a value, taken as passed|reads a number)", repr(checked)
    )
    if check in (unless, if_any):  # is one check, and seen to be one
        assert not checked.unknown


@pytest.mark.parametrize("options", [{}, {"backend": "eager"}, {"disable": True}])
def test_a_process_that_compiles_validates_no_more_as_pytorch_has_it(options):
    variant = f"""def variant():
    model = torch.compile(torch.nn.Linear(8, 8), **{options}).to(device)
    return lambda: validates.append(torch.distributions.Distribution._validate_args)
"""
    really = f"import torch\nvalidates, device = [], 'cpu'\n{variant}variant()()\nprint(validates[0])"
    done = subprocess.run([sys.executable, "-c", really], capture_output=True, text=True, check=True)
    predicting = f"import torch, effgpu\nvalidates, device = [], 'cuda'\n{variant}effgpu.predict(variant, 'T4')\n"
    predicting += "print(validates[0], torch.distributions.Distribution._validate_args)"
    predicted = subprocess.run([sys.executable, "-c", predicting], capture_output=True, text=True, check=True)
    assert predicted.stdout.split() == [done.stdout.strip(), "True"]


def draws_from(covariance):
    return torch.distributions.MultivariateNormal(
        torch.zeros_like(covariance[0]), covariance, validate_args=True
    ).sample()


def grows(covariance):
    """As transformers does where a vocabulary grows: the new rows are drawn only if they can be."""
    if torch.distributions.constraints.positive_definite.check(covariance).all():
        return draws_from(covariance)
    return covariance[0]


RUN_BY_CHECKS = ("linalg_cholesky_ex", "all", "eq", "abs", "le", "_is_all_true", "normal_", "mm")


@pytest.mark.parametrize("draw", [draws_from, grows])
def test_what_a_distribution_checks_is_taken_as_met_and_all_of_it_runs(draw):
    def training(device):
        weight = nn.Parameter(torch.rand(16, 16, device=device) + 4 * torch.eye(16, device=device))
        return lambda: draw(weight @ weight.mT)

    predicted = predict(partial(training, "cuda"), "T4", steps=1)
    assert not [told for told in predicted.unknown if "decides" in told]
    assert "checks a value, taken as passed" in repr(predicted)
    runs = Counter(kernel.name for segment in predicted.segments for kernel in segment.kernels.elements())
    really = count_ops(training("cpu"))
    assert really["linalg_cholesky_ex"] > 1 and all(runs[name] == really[name] for name in RUN_BY_CHECKS)


def require(truth):
    assert truth


def test_a_check_of_what_is_known_is_decided():
    def fails(out):
        assert (torch.zeros(3) > 0).all(), "known to be wrong"

    with pytest.raises(AssertionError, match="known to be wrong"):
        predict(partial(checking, fails), "T4")


def goes_on(out):
    while not out.max() > 1:
        pass


def goes_on_by_rows(out):
    found = False
    while not found:
        for row in out:
            found = found or bool(row.max() > 1)


@pytest.mark.parametrize("goes_on", [goes_on, goes_on_by_rows])
def test_a_loop_that_ends_by_a_value_is_refused(goes_on, monkeypatch):
    monkeypatch.setattr(guesses, "_LONGEST", 0.1)
    told = r"test_prediction_steps.py:\d+ decides by a value .* times in a step: no loop ends by it"
    with pytest.raises(RuntimeError, match=told):
        predict(partial(checking, goes_on), "T4")


def looks_at_each(out):
    for row in out:
        if row.max() > 1:
            break


def looks_in_a_list(out):
    while True:
        counts_all(out)
        break


def counts_all(out):
    return len([row for row in out if row.max() > 1])


@pytest.mark.parametrize("looks", [looks_at_each, looks_in_a_list])
def test_a_loop_over_samples_that_reads_a_value_of_each_ends_by_itself(looks, monkeypatch):
    monkeypatch.setattr(guesses, "_LONGEST", 0.1)
    monkeypatch.setattr(guesses, "_PATIENCE", 1000)
    assert predict(partial(checking, looks, (2000, 16)), "T4").unknown


def test_what_all_numbers_of_a_tensor_are_takes_no_memory():
    took = []

    def training():
        weights = [torch.ones(1000, 1000) for _ in range(100)]

        def step():
            states = [torch.zeros_like(weight) for weight in weights]
            took.append(psutil.Process().memory_info().rss - before)
            assert all(weight[0, 0] == 1 for weight in weights) and not states[0].any()

        return step

    before = psutil.Process().memory_info().rss
    assert not predict(training, "T4").unknown and max(took) < 100 * MiB  # of 800 million bytes


def test_an_error_after_a_guess_says_which_line_read_what():
    def fails(out):
        size = 3 if out.sum() > 0 else 4
        raise IndexError(f"no place {size}")

    told = r"predict: IndexError: no place 4, after test_prediction_steps.py:\d+ read a value, taken as False"
    with pytest.raises(RuntimeError, match=told):
        predict(partial(checking, fails), "T4")


# --- shapes by value ---


def choosing(function):
    """A variant whose step keeps what a function chooses, of 4,096 rows of 256 numbers and as many labels."""

    def variant():
        model = nn.Linear(256, 256)

        def step():
            labels = torch.rand(4096).mul(1100).long() - 100
            return function(model(torch.rand(4096, 256)), labels)

        return lambda: step().sum().backward()

    return variant


CHOOSE = {
    "a mask": lambda out, labels: out[labels >= 0],
    "places": lambda out, labels: out[torch.where(labels >= 0)[0]],
    "nonzero": lambda out, labels: out[(labels >= 0).nonzero().flatten()],
    "argwhere": lambda out, labels: out[torch.argwhere(labels)[:, 0]],
    "a mask and places": lambda out, labels: out[labels >= 0, :4],
    "masked_select": lambda out, labels: out.masked_select(out.detach() > 0),
    "unique": lambda out, labels: out[labels.unique() * 0],
    "unique with places": lambda out, labels: out[labels.unique(return_inverse=True)[1]],
    "consecutive with places": lambda out, labels: out[labels.unique_consecutive(return_inverse=True)[1]],
}


@pytest.mark.parametrize("name", CHOOSE)
@pytest.mark.parametrize("options, share", [({}, 0.5), ({"taken": 0.25}, 0.25), ({"taken": 0}, 0), ({"taken": 1}, 1)])
def test_an_index_by_value_takes_the_share_that_is_said(name, options, share):
    shapes = []
    note = lambda *given: shapes.append((chosen := CHOOSE[name](*given)).shape) or chosen
    predicted = predict(choosing(note), "T4", steps=1, **options)
    number = 4096 if "with places" in name else 4096 * share * (256 if name == "masked_select" else 1)
    assert shapes[0][0] == number and not predicted.unknown
    assert any(f"takes {share:.0%} of what it chooses from by value" in told for told in predicted.assumptions)


DRAWN = {  # 4,096 truths, and how many of them are expected
    "below": (lambda: torch.rand(4096) < 0.15, 0.15),
    "not above": (lambda: ~(torch.rand(64, 64).view(4096) > 0.15), 0.15),
    "uniform": (lambda: torch.empty(4096).uniform_() >= 0.25, 0.75),
    "between others": (lambda: torch.empty(4096).uniform_(0, 2) < 0.25, 0.5),
    "changed": (lambda: torch.rand(4096).mul_(2) < 0.25, 0.5),
    "in place": (lambda: torch.empty(4096).bernoulli_(0.1).bool(), 0.1),
    "of shares": (lambda: torch.bernoulli(torch.full((4096,), 0.1)).bool(), 0.1),
    "of what is known": (lambda: (torch.rand(4096) < 0.25) & (torch.arange(4096) % 4 > 0), 3 / 16),
    "of either": (lambda: (torch.rand(4096) < 0.25) | (torch.rand(4096) < 0.2), 0.4),
    "another": (lambda: torch.rand(4096, 8).argmax(1) != 3, 7 / 8),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_mask_that_is_drawn_takes_what_is_expected(name):
    (draw, share), shapes = DRAWN[name], []
    note = lambda out, _: shapes.append((chosen := out[draw()]).shape) or chosen
    (told,) = predict(choosing(note), "T4", steps=1).assumptions
    assert shapes[0][0] == round(4096 * share) and told.endswith(f"(taken={share:.3g})")


MASKED = {  # the indices into 64 x 64 rows of 256 numbers, by a mask of them all, and by the places of one
    "rows": (lambda mask: (mask[..., 0],), lambda mask: mask[..., 0].nonzero(as_tuple=True)),
    "numbers": (lambda mask: (mask,), lambda mask: mask.nonzero(as_tuple=True)),
    "behind": (lambda mask: (slice(None), mask[0]), lambda mask: (slice(None), *mask[0].nonzero(as_tuple=True))),
    "apart": (
        lambda mask: (mask[0, :, 0], slice(None), torch.arange(32)),
        lambda mask: (*mask[0, :, 0].nonzero(as_tuple=True), slice(None), torch.arange(32)),
    ),
}


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("known", [True, False])
def test_what_a_mask_has_chosen_goes_back_to_its_places(name, known):
    """TensorAdvancedIndexing.cpp, index_backward: the mask becomes places once more, for which the CPU waits."""

    def choose(index, out, _):
        mask = torch.arange(64)[:, None].expand(64, 64, 256) % 2 == 0 if known else torch.rand(64, 64, 256) > 0.5
        return out.view(64, 64, 256)[index(mask)].square()

    masked, placed = (predict(choosing(partial(choose, index)), "T4") for index in MASKED[name])
    assert masked.allocated == pytest.approx(placed.allocated, rel=0.03)
    launched = [[kernel for event in each.events for kernel in event.kernels] for each in (masked, placed)]
    put, put_by_places = ([kernel for kernel in each if kernel.name == "index_put_"] for each in launched)
    assert put == put_by_places
    assert [[kernel.name for kernel in each].count("nonzero") for each in launched] == [2, 1]
    assert [sum(event.waits for event in each.events) for each in (masked, placed)] == [2, 1]
    assert masked.unknown == placed.unknown == () and len(masked.assumptions) == (not known)


def test_what_a_mask_overwrites_is_found_first_unless_one_number_fills_it():
    def overwrite(values, out, _):
        made = out.detach()
        made[torch.rand(4096) > 0.5] = values(made)
        return out

    launched = [
        Counter(
            kernel.name
            for event in predict(choosing(partial(overwrite, values)), "T4").events
            for kernel in event.kernels
        )
        for values in (lambda out: out[:2048], lambda out: out[0], lambda out: 0)
    ]
    assert [each["nonzero"] for each in launched] == [1, 1, 0]


def test_counts_of_numbers_are_as_many_as_asked_for_or_as_the_largest_known_number_asks_for():
    shapes = []

    def count(out, labels):
        known = torch.arange(10)
        for numbers, least in ((labels, 7), (known, 7), (known, 12), (known, 0)):
            shapes.append(torch.bincount(numbers, minlength=least).shape[0])
        return out

    predicted = predict(choosing(count), "T4", steps=1)
    assert shapes == [7, 10, 12, 10] and not predicted.unknown
    assert predicted.assumptions == ("the numbers that bincount gets are below its minlength",)


EIGHT = {  # of what each of eight experts gets
    "bincount": lambda chosen: torch.bincount(chosen, minlength=8),
    "bincount with weights of one": lambda chosen: torch.nn.functional.one_hot(chosen, 8).sum(0),
    "histc": lambda chosen: torch.histc(chosen.float(), bins=8, min=0, max=7).long(),
    "scattered": lambda chosen: torch.zeros(4096, 8).scatter_(1, chosen[:, None], 1).bool().sum(0),
    "masks": lambda chosen: torch.stack([(chosen == expert).sum() for expert in range(8)]),
    "nonzero elements": lambda chosen: torch.stack([(chosen == expert).count_nonzero() for expert in range(8)]),
    "differences of ends": lambda chosen: (
        torch.bincount(chosen, minlength=8).cumsum(0).diff(prepend=torch.zeros(1).long())
    ),
}


@pytest.mark.parametrize("name", EIGHT)
def test_counts_are_taken_as_equal(name):
    """Experts get their tokens so, by sizes."""
    shapes = []

    def send(out, labels):
        counts = EIGHT[name](out[:, :8].argmax(1))
        parts = out.split(counts.tolist())
        shapes.extend(part.shape[0] for part in parts)
        shapes.append(int(counts.max()))
        shapes.append(out.repeat_interleave(counts.numpy()[0], 0).shape[0] // 4096)
        return torch.cat(parts)

    predicted = predict(choosing(send), "T4", steps=1)
    assert shapes == [512] * 10 and not predicted.unknown
    assert any("reads a count, taken as 512" in told for told in predicted.assumptions)
    assert any("reads counts, taken as equal" in told for told in predicted.assumptions)


@pytest.mark.parametrize(
    "masks",
    [
        lambda chosen: [chosen == expert for expert in range(8)],
        lambda chosen: torch.nn.functional.one_hot(chosen, 8).permute(2, 0, 1).bool(),
    ],
)
def test_of_an_expert_that_gets_its_share_of_many_tokens_it_is_known_that_it_gets_any(masks):
    shapes = []

    def send(out, labels):
        parts = [out[mask.any(1)] for mask in masks(out[:, :8].topk(2).indices) if mask.any()]
        shapes.extend(part.shape[0] for part in parts)
        return out

    assert not predict(choosing(send), "T4", steps=1).unknown and shapes == [1024] * 8
    few = lambda out, labels: out * 2 if (out[:2, :8].argmax(1) == 0).any() else out
    assert predict(choosing(few), "T4", steps=1).unknown


def test_what_is_counted_in_a_mask_is_what_an_index_takes():
    shapes = []

    def choose(out, labels):
        mask = labels >= 0
        shapes.append((mask.sum().item(), out[mask].shape[0], int(torch.isnan(out).sum())))
        return out

    for options in ({}, {"taken": 0.25}):
        assert not predict(choosing(choose), "T4", steps=1, **options).unknown
    assert shapes == [(2048, 2048, 0), (1024, 1024, 0)]


def test_a_list_of_tensors_may_be_multiplied_by_a_count():
    def scale(out, labels):
        torch._foreach_mul_([labels], (labels > 0).sum())
        return out

    assert not predict(choosing(scale), "T4", steps=1).unknown


def test_one_operand_may_decide_alone():
    """transformers' `generate` ends so: one of its criteria is true for all texts."""
    read = []

    def decide(out, labels):
        done = (labels > 5) | torch.full((4096,), True)
        read.extend(
            (done.all().item(), ((labels > 0) & ~done).max().item(), (labels * torch.zeros(4096).long()).max().item())
        )
        return out

    assert not predict(choosing(decide), "T4", steps=1).unknown and set(read) == {True, False}
    unsure = lambda out, labels: out if ((labels > 5) | torch.full((4096,), False)).all() else out * 2
    assert predict(choosing(unsure), "T4", steps=1).unknown


def test_a_test_whose_names_nothing_else_reads_only_tells():
    def variant(body, after):
        names = {"nn": nn, "torch": torch}
        code = f"def step():\n    text = ''\n    if rows.sum() > 0:\n        {body}\n    {after}\n"
        code = f"layer, rows = nn.Linear(4, 4), torch.rand(8, 4)\n{code}    layer(rows).sum().backward()\n"
        file = f"{len(body)}{len(after)}.py"
        linecache.cache[file] = len(code), None, code.splitlines(True), file
        exec(compile(code, file, "exec"), names)
        return names["step"]

    tells = "text = 'much'\n        if text: text += '.'\n        print(text)"
    assert not predict(partial(variant, tells, "pass"), "T4").unknown
    assert predict(partial(variant, tells, "text.upper()"), "T4").unknown


def test_what_follows_from_a_count_decides_nothing_unsaid():
    def decide(out, labels):
        return out if (labels >= 0).sum() > 5000 else out * 2

    (unknown,) = predict(choosing(decide), "T4", steps=1).unknown
    assert unknown.endswith("decides by a value, taken as False")


def test_what_a_known_mask_reaches_is_a_known_size():
    """sentence-transformers trims the padding of a batch so."""
    shapes = []

    def trim(out, labels):
        mask = torch.zeros(4, 64, dtype=torch.bool)
        mask[:, :48] = True
        shapes.append(out[: int(mask.any(0).nonzero().max().item()) + 1].shape[0])
        return out

    assert not predict(choosing(trim), "T4", steps=1).unknown and shapes == [48]


def test_rows_are_repeated_in_inference_mode_as_outside_of_it():
    shapes = []

    def repeat(out, labels):
        with torch.inference_mode():
            often = torch.tensor([2] * 4096)
            sizes = ({}, {"output_size": 8192})
            shapes.extend(given.repeat_interleave(often, 0, **size).shape for size in sizes for given in (out, labels))
        return out

    assert not predict(choosing(repeat), "T4", steps=1).unknown
    assert shapes == [(8192, 256), (8192,)] * 2


def test_the_memory_follows_the_share():
    wide = choosing(lambda out, labels: out[labels >= 0].repeat(1, 64).exp())
    quarter, half = (predict(wide, "T4", taken=share).owners["activations"] for share in (0.25, 0.5))
    assert half - quarter == pytest.approx(2 * 4 * 1024 * 256 * 64, rel=0.05)  # of repeat, and of exp


def test_a_number_that_is_changed_in_place_is_changed_once():
    read = []

    def change(out, labels):
        one, five, three = torch.tensor(1.0), torch.tensor(5), torch.tensor(9)
        one.add_(1)
        five.add_(1).mul_(2)
        three.fill_(3).add_(torch.ones((), dtype=torch.long))
        read.extend([one.item(), five.item(), three.item()])
        return out

    assert not predict(choosing(change), "T4", steps=1).unknown
    assert read == [2.0, 12, 4]


def test_equal_numbers_that_are_scaled_together_stay_known_and_their_source_as_it_is():
    read = []

    def scale(out, labels):
        two, equal, others = torch.tensor(2.0), torch.zeros(3), torch.ones(4, dtype=torch.long)
        equal.fill_(two).mul_(5)
        others[:2].mul_(3)
        torch._foreach_add_([equal, others], 1)
        equal[1:].sub_(4)
        read.extend([two.tolist(), equal.tolist(), others.tolist()])
        return out

    assert not predict(choosing(scale), "T4", steps=1).unknown
    assert read == [2.0, [11.0, 7.0, 7.0], [4, 4, 2, 2]]


def test_what_is_known_is_taken_as_it_is_unless_a_share_is_said():
    shapes = []

    def choose(out, labels):
        mask = torch.arange(4096) < 1000
        shapes.append(out[mask].shape[0])
        return out

    assert not predict(choosing(choose), "T4", steps=1).assumptions
    assert "takes 10%" in predict(choosing(choose), "T4", steps=1, taken=0.1).assumptions[0]
    assert shapes == [1000, 410]


def test_a_list_is_read_at_once():
    read = []
    tell = lambda out, labels: read.extend((out[0, :2].tolist(), torch.arange(4).view(2, 2).tolist())) or out
    assert len(predict(choosing(tell), "T4").segments) == 3
    assert read[:2] == [[1.0, 1.0], [[0, 1], [2, 3]]]


def test_the_cpu_waits_for_what_is_counted():
    segments = lambda function: len(predict(choosing(function), "T4").segments)
    assert segments(lambda out, labels: out) == 1 < segments(CHOOSE["a mask"])


def test_an_operation_from_elsewhere_takes_the_share_of_its_rows():
    import torchvision

    kept = []

    def choose(out, labels):
        kept.append(torchvision.ops.nms(out[:, :4].detach(), out[:, 4].detach(), 0.5).shape[0])
        return out

    predict(choosing(choose), "T4", steps=1, taken=0.25)
    assert kept == [1024]


@pytest.mark.parametrize("taken", [-0.1, 1.1, "half"])
def test_a_share_that_is_none_is_refused(taken):
    with pytest.raises(ValueError, match="taken: expected a share from 0 to 1"):
        predict(linear, "T4", taken=taken)


def test_the_share_is_said_on_the_command_line(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import torch\n\ndef variant():\n    return lambda: (x := torch.rand(8))[x > 0.5].sum()\n")
    assert main(["predict", f"{script}:variant", "--gpu", "T4", "--taken", "0.25"]) == 0
    assert "script.py:4 takes 25% of what it chooses from by value" in capsys.readouterr().out


# --- what is not on the GPU ---

LAYERS, SIDE = 4, 1024
LAYER = SIDE * SIDE * 2  # bytes in bfloat16


def layers(**options):
    return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, **options) for _ in range(LAYERS)))


def from_meta():
    model = layers(device="meta", dtype=torch.bfloat16)
    for number in range(LAYERS):
        model[number] = nn.Linear(SIDE, SIDE, bias=False, device="cuda", dtype=torch.bfloat16)
    return model


def in_a_context():
    with torch.device("meta"):
        x = torch.ones(SIDE, SIDE) @ torch.ones(SIDE, SIDE)
        assert x.device.type == "meta"
    with torch.device("cuda"):
        return layers(dtype=torch.bfloat16)


def loaded():
    model = layers()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    return model.bfloat16().cuda()


BUILT = {
    "cast on the CPU": lambda: layers().to(torch.bfloat16).to("cuda"),
    "moved as it is cast": lambda: layers().to("cuda", torch.bfloat16),
    "cuda": lambda: layers(dtype=torch.bfloat16).cuda(),
    "loaded": loaded,
    "from meta": from_meta,
    "in a context": in_a_context,
    "a copy kept": lambda: KEPT.append(model := layers(dtype=torch.bfloat16)) or copy.deepcopy(model).to("cuda"),
}
KEPT = []


def built(build):
    model = build()
    x = torch.zeros(8, SIDE, device="cuda", dtype=torch.bfloat16)
    return lambda: model(x).mean().backward()


@pytest.mark.parametrize("name", BUILT)
def test_what_is_built_elsewhere_takes_nothing_of_the_gpu(name):
    straight = predict(partial(built, lambda: layers(device="cuda", dtype=torch.bfloat16)), "T4")
    predicted = predict(partial(built, BUILT[name]), "T4")
    KEPT.clear()
    assert predicted.owners == straight.owners and straight.owners["weights"] == LAYERS * LAYER
    assert predicted.allocated <= predicted.reserved == straight.reserved
    assert predicted.time().expected == straight.time().expected


def test_of_data_on_the_cpu_only_the_batch_is_on_the_gpu():
    def variant():
        data = torch.zeros(64, 1024, 1024)
        return lambda: data[:2].to("cuda").exp_().sum()

    assert predict(variant, "T4").allocated == pytest.approx(2 * 4 * 1024**2, rel=0.01)


def chained(device, keep):
    x = torch.ones(1024, 1024, device=device, requires_grad=True)

    def step():
        with keep():
            y = x
            for _ in range(8):
                y = y.exp()
        y.sum().backward()

    return step


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("pinned", [False, True])
def test_what_is_saved_on_the_cpu_is_not_on_the_gpu(device, pinned):
    save = partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    plain, saved = (predict(partial(chained, device, keep), "T4").allocated for keep in (nullcontext, save))
    size = 4 * 1024**2
    assert plain == pytest.approx(12 * size, rel=0.01)  # x and its gradient, eight results, two gradients of them
    assert 4 * size < saved < 6.1 * size


@pytest.mark.parametrize("move", [lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: x.detach().to(device="cpu")])
def test_what_is_offloaded_by_hand_is_not_on_the_gpu(move):
    def variant(move):
        held = [torch.ones(1024, 1024, device="cuda") for _ in range(8)]

        def step():
            kept = [move(held.pop()) for _ in range(8)]
            torch.empty(8 * 1024, 1024, device="cuda")
            held.extend(each.to("cuda") for each in kept)

        return step

    stays, moved = (predict(partial(variant, way), "T4").allocated for way in (lambda x: x, move))
    assert (stays, moved) == (16 * 4 * 1024**2, 8 * 4 * 1024**2)


def test_what_hooks_of_saved_tensors_send_to_the_cpu_is_not_on_the_gpu():
    """PyTorch calls them within a call of its own, where it lets no mode see what they do."""
    keep = partial(torch.autograd.graph.saved_tensors_hooks, lambda x: x.cpu(), lambda x: x.to("cuda"))
    by_hand, saved = (
        predict(partial(chained, "cuda", each), "T4") for each in (keep, torch.autograd.graph.save_on_cpu)
    )
    assert by_hand.allocated == saved.allocated
    assert by_hand.time().table.keys() == saved.time().table.keys()


def attending_by(backend, dtype=torch.float16):
    from torch.nn.attention import sdpa_kernel

    def variant():
        rows = torch.randn(2, 4, 512, 64, device="cuda", dtype=dtype, requires_grad=True)

        def step():
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).sum().backward()

        return step

    return variant


BACKENDS = torch.nn.attention.SDPBackend


@pytest.mark.parametrize(("gpu", "dtype"), [("T4", torch.float16), ("A100", torch.float32)])
def test_attention_that_a_gpu_has_no_kernel_for_fails_as_there(gpu, dtype):
    with pytest.raises(RuntimeError, match=r"No available kernel\. Aborting execution\."):
        predict(attending_by(BACKENDS.FLASH_ATTENTION, dtype), gpu)


def test_attention_by_cudnn_alone_counts_as_flash_attention_and_says_so():
    named = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "MATH")
    by_cudnn, flash, plain = (predict(attending_by(getattr(BACKENDS, name)), "A100") for name in named)
    assert by_cudnn.allocated == flash.allocated < plain.allocated and by_cudnn.time() == flash.time()
    assert by_cudnn.assumptions == ("cuDNN's attention takes as much and as long as flash attention",)


def fold(x, _):
    return torch.nn.functional.fold(x[None], (10, 10), 8)  # [64, 64] -> one channel, each number of which was 64


LARGER = ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy", "l1_loss", "huber_loss", fold]


@pytest.mark.parametrize("name", LARGER)
@pytest.mark.parametrize("keeps", [False, True])
def test_a_result_holds_the_storage_that_it_was_made_in(name, keeps):
    """Also while nothing but the loss itself is kept."""
    function = getattr(torch.nn.functional, name) if isinstance(name, str) else name
    rows = 9 if name is fold else 64
    real = function(*torch.rand(2, 64, rows)).untyped_storage().nbytes()

    def variant():
        given, kept = torch.rand(2, 64, rows, device="cuda"), []

        def step():
            result = function(*given)
            assert result.untyped_storage().nbytes() == real
            kept.append(result.detach() if keeps else None)

        return step

    predicted = predict(variant, "T4")
    assert sum(size for _, size in predicted.kept) == keeps * round_size(real)


def with_a_false(mask):
    mask[0] = False
    return mask.all()


MIXED = [  # what is asked of x, and whether a healthy step decides it
    (lambda x: (torch.isnan(x) | (x > 3)).any(), False),
    (lambda x: (torch.isfinite(x) & (x > 3)).all(), False),
    (lambda x: torch.isfinite(x).logical_and_(x > 3).all(), False),
    (lambda x: with_a_false(torch.isfinite(x)), False),
    (lambda x: (torch.isfinite(x) | (x > 3)).all(), True),
    (lambda x: (torch.isnan(x) & (x > 3)).any(), True),
    (lambda x: (~torch.isnan(x)).all(), True),
]


@pytest.mark.parametrize(("asks", "known"), MIXED)
def test_a_mask_of_which_a_part_is_known_is_known_only_where_that_decides(asks, known):
    def variant():
        x = torch.randn(64, 64, device="cuda")

        def step():
            if asks(x):
                x.add_(1)

        return step

    assert ("decides by a value" in str(predict(variant, "T4").unknown)) != known


@pytest.mark.parametrize("way", [{}, {"non_blocking": True}])
@pytest.mark.parametrize("named", ["cuda", None])
def test_the_cpu_waits_for_what_it_fetches(way, named):
    size = 16 * MiB

    def variant():
        held = torch.ones(size // 4, device=named)
        return lambda: held.to("cpu", **way) if named else held.cpu()

    predicted = predict(variant, "T4")
    waits = [event for event in predicted.events if event.waits]
    assert len(waits) == (named is None or not way)
    rate = 11e9 if way and named else 3.7e9  # PyTorch pins what it does not wait for
    assert predicted.timeline().seconds() == pytest.approx(size / rate, rel=0.02), "once"
    assert not waits or waits[0].site.where.startswith("test_prediction_steps.py:")


def test_an_optimizer_that_asks_for_the_gpu_says_what_to_do():
    def variant():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.Adam(model.parameters(), capturable=True)
        return lambda: (model(torch.ones(8, 8)).sum().backward(), optimizer.step())

    with pytest.raises(RuntimeError, match=r"capturable=True asks for weights on the GPU: build the model there"):
        predict(variant, "T4")


def test_what_a_thread_does_is_part_of_the_step_and_it_computes_as_ever_afterwards():
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:

        def variant(run):
            model = nn.Linear(1024, 1024)

            def work():
                model(torch.ones(512, 1024)).sum().backward()

            return lambda: run(work)

        by_pool = partial(variant, lambda work: pool.submit(work).result())
        here, there = (predict(each, "T4") for each in (partial(variant, lambda work: work()), by_pool))
        assert (there.allocated, there.time()) == (here.allocated, here.time())
        made = pool.submit(lambda: torch.ones(2) + 1).result()
        assert not isinstance(made, FakeTensor) and made.tolist() == [2, 2]
        again = predict(by_pool, "T4")
        assert (again.allocated, again.time()) == (here.allocated, here.time()), "the pool is from before"


def test_a_thread_from_before_that_is_no_pools_is_refused():
    from queue import Queue
    from threading import Thread

    given, done = Queue(), Queue()

    def serve():
        for work in iter(given.get, None):
            try:
                done.put(work())
            except RuntimeError as error:
                done.put(error)

    def raise_it(error):
        if isinstance(error, Exception):
            raise error

    Thread(target=serve).start()

    def variant():
        model = nn.Linear(8, 8)
        return lambda: (given.put(lambda: model(torch.ones(8, 8)).sum().item()), raise_it(done.get()))

    with pytest.raises(RuntimeError, match="a thread from before works on the step's tensors: let the variant"):
        predict(variant, "T4")
    given.put(None)


LIKE = [lambda x: torch.empty_like(x, device="cpu"), lambda x: x.new_empty(x.shape, device="cpu")]


@pytest.mark.parametrize("make", LIKE)
def test_what_is_made_on_the_cpu_like_something_on_the_gpu_is_not_on_the_gpu(make):
    """As torchao's CPUOffloadOptimizer makes its copy of each weight."""

    def variant(make):
        weight = torch.ones(1024, 1024, device="cuda")
        held = make(weight)
        held.copy_(weight, non_blocking=True)

        def step():
            weight.copy_(held, non_blocking=True)

        return step

    there, here = predict(partial(variant, torch.empty_like), "T4"), predict(partial(variant, make), "T4")
    assert (there.allocated, here.allocated) == (2 * SQUARE, SQUARE)
    assert here.time().table["copies to the CPU and back"].bytes == SQUARE


SQUARE = 4 * 1024**2  # bytes


@pytest.mark.parametrize(("pinned", "rates"), [(True, (11e9, 24e9, 54e9)), (False, (3.7e9, 5.7e9, 7.8e9))])
def test_what_is_saved_on_the_cpu_goes_over_the_bus_and_back(pinned, rates):
    save = partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    plain, saved = (predict(partial(chained, "cuda", keep), ["T4", "A100", "H100"]) for keep in (nullcontext, save))
    for gpu, rate in zip(saved.gpus, rates, strict=True):
        assert plain.time(gpu).table.keys() == {"other operations"}
        copies = saved.time(gpu).table["copies to the CPU and back"]
        assert copies.bytes == copies.number * SQUARE and copies.number >= 2 * 8
        assert copies.seconds == pytest.approx(copies.bytes / rate)
        assert saved.time(gpu).bound == "PCI Express"


def test_state_that_waits_on_the_cpu_goes_over_the_bus_and_data_that_is_loaded_does_not():
    def variant(way):
        batch, state = torch.ones(1024, 1024), torch.ones(1024, 1024, device="cuda")
        host = torch.empty(state.shape, pin_memory=True)

        def step():
            moved = host.to("cuda") if way == "state" else batch.to("cuda")
            state.add_(moved)
            if way == "state":
                host.copy_(state, non_blocking=True)

        return step

    state, data = (predict(partial(variant, way), "T4").time().table for way in ("state", "data"))
    assert state["copies to the CPU and back"].bytes == 2 * SQUARE
    assert "copies to the CPU and back" not in data


def test_what_an_optimizer_computes_on_the_cpu_is_not_the_gpus_work():
    def variant(where):
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        held = weight.detach().to(where).requires_grad_()
        optimizer = torch.optim.AdamW([held], fused=True)

        def step():
            held.grad = weight.detach().to(where)
            optimizer.step()

        return step

    there, here = predict(partial(variant, "cuda"), "T4"), predict(partial(variant, "cpu"), "T4")
    assert "optimizer" in there.time().table and not there.unknown
    assert "optimizer" not in here.time().table and "the CPU takes for what it computes itself" in here.unknown[0]
    assert here.verdict() == "fits", "only its time is not known"


def test_a_budget_of_compiled_code_is_not_known():
    def variant():
        layer = torch.nn.Linear(64, 64)
        layer.compile()
        return lambda: layer(torch.ones(8, 64)).sum().backward()

    assert not predict(variant, "T4").unknown
    with importlib.import_module("torch._functorch.config").patch(activation_memory_budget=0.5):
        predicted = predict(variant, "T4")
    assert "activation_memory_budget=0.5" in predicted.unknown[0]
    assert predicted.total().low < 100 * 2**20 + predicted.resting + predicted.workspaces.low + 1


def test_what_a_loss_in_chunks_of_pytorchs_own_takes_is_not_known():
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions

    def variant(options):
        hidden, weight = (torch.ones(size, 64, requires_grad=True) for size in (512, 8192))
        labels = torch.zeros(512, dtype=torch.int64)
        return lambda: torch.nn.functional.linear_cross_entropy(hidden, weight, labels, options=options).backward()

    assert not predict(partial(variant, None), "T4").unknown
    (told,) = predict(partial(variant, options()), "T4").unknown
    assert "linear_cross_entropy" in told


def test_what_meets_a_tensor_on_the_gpu_is_there_too():
    def variant():
        x = torch.ones(1024, 1024, device="cuda")
        positions = torch.arange(1024.0, device=x.device).repeat(1024, 1)  # a fake tensor's device says CPU
        return lambda: (x + positions).sum()

    assert predict(variant, "T4").allocated == pytest.approx(3 * 4 * 1024**2, rel=0.01)


# --- operations that a GPU does in one call ---

TIME, ROWS, WIDE = 16, 4, 256
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(kind="LSTM", trained=True, **options):
    model = getattr(nn, kind)(WIDE, WIDE, **options)
    inputs = torch.zeros(TIME, ROWS, WIDE).transpose(0, 1 if options.get("batch_first") else 0)

    def step():
        with torch.set_grad_enabled(trained):
            loss = model(inputs)[0].mean()
        if trained:
            loss.backward()

    return step


def flops(variant):
    return sum(kernel.flops * number for kernel, number in kernels(variant).items())


@pytest.mark.parametrize("kind", GATES)
def test_a_network_over_time_runs_cell_by_cell_where_the_step_switches_cudnn_off(kind):
    def without():
        run = recurrent(kind)

        def step():
            with torch.backends.cudnn.flags(enabled=False):
                run()

        return step

    by_cudnn, by_cells = (kernels(each).total() for each in (partial(recurrent, kind), without))
    assert by_cells > by_cudnn + TIME


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bias": False}, {"num_layers": 3, "dropout": 0.1}])
def test_a_network_over_time_counts_its_products(kind, options):
    forward = TIME * ROWS * 2 * GATES[kind] * 2 * WIDE * WIDE * options.get("num_layers", 1)
    assert flops(partial(recurrent, kind, trained=False, **options)) == forward
    assert flops(partial(recurrent, kind, **options)) == 3 * forward


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_network_over_time_puts_the_steps_of_time_in_order(batch_first):
    """cudnn/RNN.cpp: input.contiguous() forward, and in both calls backward, and so the gradient of what comes out."""
    size = 4 * 32 * 16 * 256

    def variant():
        model, inputs = nn.LSTM(256, 256, batch_first=batch_first), torch.zeros(32, 16, 256)

        def step():
            made = model(inputs)[0]
            assert made.is_contiguous() is not batch_first
            made.backward(torch.zeros(32, 16, 256))

        return step

    assert copies(predict(variant, "T4"), size) == [2 * size] * 4 * batch_first


def test_directions_and_projections_count_too():
    token = TIME * ROWS * 2 * 4 * WIDE
    assert flops(partial(recurrent, trained=False, bidirectional=True)) == 2 * token * 2 * WIDE
    projected = token * (WIDE + 64) + TIME * ROWS * 2 * 64 * WIDE
    assert flops(partial(recurrent, trained=False, proj_size=64)) == projected
    assert flops(partial(recurrent, proj_size=64)) == 3 * projected


def test_a_network_over_time_is_one_call_and_keeps_its_gates():
    predicted = predict(partial(recurrent, num_layers=2), "T4")
    cells = predict(partial(recurrent, "GRU", num_layers=2), "T4")
    assert all(segment.calls < 60 for one in (predicted, cells) for segment in one.segments)
    number = 4 * TIME * ROWS * WIDE
    assert 2 * 4 * number < predicted.owners["activations"] < 2 * 9 * number
    assert not predicted.unknown and not predicted.assumptions
    untrained = predict(partial(recurrent, trained=False, num_layers=2), "T4")
    assert untrained.owners["activations"] < 3 * number


def test_what_a_network_over_time_keeps_is_freed_by_the_backward_pass_although_its_loss_lives_on():
    """A loop's `loss` lives until the next one is there, and its graph with it."""

    def variant(lives_on):
        model, inputs, losses = nn.LSTM(WIDE, WIDE), torch.zeros(TIME, 16 * ROWS, WIDE), []

        def step():
            loss = model(inputs)[0].mean()
            loss.backward()
            losses[:] = [loss] * lives_on

        return step

    kept, freed = (predict(partial(variant, lives_on), "T4").allocated for lives_on in (True, False))
    assert kept == pytest.approx(freed, rel=0.01)


def test_autocast_and_inference_mode_reach_a_network_over_time():
    def variant():
        model, inputs = nn.GRU(WIDE, WIDE), torch.zeros(TIME, ROWS, WIDE)

        def step():
            with torch.autocast("cuda", torch.float16):
                assert model(inputs)[0].dtype is torch.float16
            with torch.inference_mode():
                assert model(inputs)[0].shape == inputs.shape

        return step

    found = {(kernel.name, kernel.format) for kernel in kernels(variant) if kernel.flops}
    assert found == {(f"gru ({part})", format) for part in ("inputs", "step") for format in ("fp16", "tf32")}


def unruled(function):
    return lambda: lambda: function(torch.rand(2, 16, 16))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.svd(x),
        lambda x: torch.linalg.cholesky(x),
        lambda x: torch.fft.fft(x),
        lambda x: torch.cdist(x, x, p=1),
    ],
)
def test_an_operation_whose_arithmetic_no_rule_knows_is_named_as_not_known(function):
    predicted = predict(unruled(function), "T4")
    assert "not known: how long" in repr(predicted) and predicted.time().expected > 0
    assert predicted.verdict(replace(T4, memory=predicted.total().high)) == FITS, "its memory is known"


@pytest.mark.parametrize("given", [((8, 16, 4), (8, 16, 3)), ((16, 4), (16,)), ((4, 4), (4, 2)), ((4, 16), (4, 2))])
def test_least_squares_have_the_shapes_that_they_have(given):
    """And gradients, by the pseudoinverse. How long they take is not known."""
    solved = torch.linalg.lstsq(*map(torch.rand, given), driver="gels")

    def variant():
        matrix, right = (torch.rand(shape, requires_grad=True) for shape in given)

        def step():
            found = torch.linalg.lstsq(matrix, right)
            assert [each.shape for each in found] == [each.shape for each in solved]
            found.solution.sum().backward()
            assert matrix.grad.shape == matrix.shape and right.grad.shape == right.shape

        return step

    assert any("linalg_lstsq computes" in what for what in predict(variant, "T4", steps=1).unknown)


def test_an_operation_that_could_be_taken_apart_and_has_a_kernel_is_one():
    """PyTorch's `silu_backward` is made of six others only on devices that have no kernel for it."""

    def variant():
        x = torch.randn(64, 64, requires_grad=True)
        return lambda: torch.nn.functional.silu(x).sum().backward()

    kinds = {kernel.name for segment in predict(variant, "T4").segments for kernel in segment.kernels}
    assert "silu_backward" in kinds and "sigmoid" not in kinds


# --- where a step finds its tensors ---


def test_what_a_step_on_the_gpu_makes_on_the_device_of_another_tensor_is_there_too():
    """A library that asks a tensor for its device takes the GPU's path: torchvision's nms, transformers' experts."""
    seen = []

    def variant(of_model):
        model = nn.Linear(64, 64).cuda()
        rows = torch.rand(32, 64).cuda()

        def step():
            place = next(model.parameters()).device if of_model else "cuda"
            seen.append((rows.device, rows.is_cuda, rows.get_device(), str(place)))
            made = torch.zeros(1024, 64, device=place)
            made[:32] = model(rows)
            made.sum().backward()

        return step

    by_tensor, by_name = (predict(partial(variant, each), "T4") for each in (True, False))
    assert {each[:3] for each in seen} == {(torch.device("cuda", 0), True, 0)} and seen[0][3] == "cuda:0"
    assert by_tensor.allocated == by_name.allocated and by_tensor.time().expected == by_name.time().expected
    assert not by_tensor.unknown and not by_tensor.assumptions


def test_a_step_that_names_no_gpu_finds_its_tensors_on_the_cpu_that_stands_for_one():
    seen = []

    def variant():
        model = nn.Linear(8, 8)
        return lambda: seen.append(model.weight.device) or model(torch.rand(4, 8)).sum().backward()

    predict(variant, "T4")
    assert set(seen) == {torch.device("cpu")}


def counting_the_right(use):
    """A step that adds up how many answers are right, as most training loops do, and does something with the sum."""

    def variant():
        model, rows, kept = nn.Linear(8, 2), torch.randn(16, 8), {"right": 0}

        def step():
            scores = model(rows)
            scores.sum().backward()
            kept["right"] += (scores.argmax(1) == 0).sum().item()
            use(kept["right"], rows)

        return step

    return variant


SHOWN = {
    "printed": lambda right, rows: f"{100.0 * right / 16:.1f} {right:d}",
    "divided": lambda right, rows: right / len(rows) + 1.0,
    "more": lambda right, rows: 1 + 2 * right - 1,
    "copied": lambda right, rows: copy.deepcopy({"right": right}),
}
MATTERS = {
    "a slice": lambda right, rows: rows[:right],
    "a slice of two": lambda right, rows: rows[0, 1:right],
    "a size": lambda right, rows: torch.zeros(right),
    "sizes": lambda right, rows: torch.zeros((2, 3 * right + 1)),
    "a branch": lambda right, rows: rows.sum() if right > 3 else None,
    "a truth": lambda right, rows: rows.sum() if right else None,
    "a list": lambda right, rows: [0] * right,
    "an int": lambda right, rows: torch.zeros(int(right)),
    "a square": lambda right, rows: torch.zeros(right**2),
}


@pytest.mark.parametrize("use", [*SHOWN, *MATTERS])
def test_how_many_answers_are_right_is_not_known_only_where_something_depends_on_it(use):
    unknown = predict(counting_the_right((SHOWN | MATTERS)[use]), "T4").unknown
    assert any("reads a whole number" in why for why in unknown) == (use in MATTERS), unknown


@pytest.mark.parametrize(
    "line, is_certain",
    [
        ("after", True),
        ("before", False),
        ("only once, and earlier", False),
        ("an operation that takes more", True),
    ],
)
def test_what_came_before_a_value_that_decides_is_certain_to_be_needed(line, is_certain):
    """As of clipping after a backward pass: no guess of its own can have changed the peak."""

    def variant():
        model, rows, steps = nn.Linear(1024, 4096), torch.randn(4096, 1024), itertools.count()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def decides(where):
            if where == line and model.weight.sum() > 1:
                rows.add_(1)

        def step():
            decides("before")
            if not next(steps):
                decides("only once, and earlier")
            model(rows).square().mean().backward()
            decides("after")
            if line == "an operation that takes more":
                torch.linalg.matrix_exp(model.weight[:64, :64])
            optimizer.step()
            optimizer.zero_grad()

        return step

    predicted = predict(variant, "T4")
    low = predicted.total().low - predicted.workspaces.low - find_gpu("T4").context[0]
    assert predicted.unknown and low >= int((1 - LESS) * predicted.resting)
    whole = pytest.approx((1 - LESS) * predicted.allocated, rel=0.01)
    assert low == whole if is_certain else low < 0.3 * predicted.allocated


@pytest.mark.parametrize(
    "use, matters",
    [
        ("rows[:, best]", False),
        ("rows[:, best.item() + 1]", False),
        ("rows[int(best)]", True),  # as of a list
        ("rows[[2, 4, 8, 16][int(best)] :]", True),
        ("torch.zeros([2, 4, 8, 16][best])", True),
        ("torch.roll(rows, -int(best), -1)", False),
        ("rows.roll(int(best), 0)", False),
        ("rows[: int(best)]", True),
        ("rows[0, int(best) :]", True),
        ("rows[[0] * int(best)]", True),
        ("torch.zeros(int(best))[0]", True),
        ("torch.roll(torch.zeros(int(best)), 1)", True),
    ],
)
def test_no_size_depends_on_a_value_that_is_the_place_of_a_row(use, matters, tmp_path):
    (tmp_path / "train.py").write_text(
        f"""
import torch
def variant():
    model, rows = torch.nn.Linear(8, 4), torch.randn(16, 8)
    def step():
        scores = model(rows)
        scores.sum().backward()
        best = scores.mean(0).argmax()
        {use}
    return step
"""
    )
    unknown = predict(runpy.run_path(str(tmp_path / "train.py"))["variant"], "T4").unknown
    assert any("reads a whole number" in why for why in unknown) == matters, unknown


def test_a_count_that_is_no_statistic_of_its_line_is_not_known():
    def variant(read):
        model, rows = nn.Linear(8, 2), torch.randn(16, 8)
        return lambda: read(model(rows).argmax(1)[0]) or model(rows).sum().backward()

    statistics = lambda right: print(f"{right.item()} of 16") or right.item() / 16 < 0
    others = lambda right: (right.item(), 1 / 16) is None
    assert not predict(partial(variant, statistics), "T4").unknown and predict(partial(variant, others), "T4").unknown


@given(st.integers(-9, 9), st.integers(-9, 9))
def test_a_statistic_is_the_number_that_it_stands_for(a, b):
    depended = []
    statistic = Statistic(a, lambda: depended.append(1))
    for name in ("add", "sub", "mul", "floordiv", "mod", "truediv"):
        calculate = getattr(operator, name)
        if b or name not in ("floordiv", "mod", "truediv"):
            assert repr(calculate(statistic, b)) == repr(calculate(a, b))
        if a or name not in ("floordiv", "mod", "truediv"):
            assert repr(calculate(b, statistic)) == repr(calculate(b, a))
    for change in (round, math.ceil, math.floor, operator.pos, operator.neg, abs):
        assert type(change(statistic)) is Statistic and change(statistic) == change(a)
        depended.clear()
    assert f"{statistic}, {-statistic:d}, {0.5 * statistic}" == f"{a}, {-a:d}, {0.5 * a}" and not depended
    assert (statistic < b) == (a < b) and (statistic == b) == (a == b) and bool(statistic) == bool(a)
    assert len(depended) == 3


@pytest.mark.parametrize(
    "use", [lambda c: divmod(c, 1), lambda c: ~c, lambda c: 1 << c, lambda c: 3 | c, lambda c: 5 & c]
)
def test_what_makes_another_number_of_a_statistic_depends_on_it(use):
    depended = []
    assert use(Statistic(3, lambda: depended.append(1))) == use(3) and depended


@pytest.mark.parametrize("heads", [8, 2])
def test_attentions_backward_pass_adds_up_beside_its_gradients(heads):
    """flash_api.cpp: dq_accum and softmax_d in fp32 and, where fewer heads have keys, dk and dv for each of queries."""
    q, k = (2, 8, 1024, 128), (2, heads, 1024, 128)

    def variant():
        query, key, value = (torch.rand(shape, dtype=torch.bfloat16, requires_grad=True) for shape in (q, k, k))

        def step():
            made = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            made.backward(torch.ones_like(made))
            query.grad = key.grad = value.grad = None

        return step

    queries, keys = (2 * math.prod(shape) for shape in (q, k))
    softmax = 4 * 2 * 8 * 1024
    summed = 4 * math.prod(q) + softmax + (2 * queries if heads < 8 else 0)
    expected = 2 * (queries + 2 * keys) + 2 * queries + softmax + summed  # q, k, v and their gradients; out and its own
    assert predict(variant, "A100 80 GB").allocated == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    "dtype, weights, copies",
    [
        (torch.float32, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.float16, torch.float16, False),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_cudnns_batch_norm_copies_what_is_not_in_the_order_of_its_channels(dtype, weights, copies):
    """Normalization.cpp, _select_batch_norm_backend. The copy is kept; gradients are copied for a moment."""

    def variant():
        norm, texts = nn.BatchNorm1d(256).to(weights), torch.rand(16, 512, 256, dtype=dtype, requires_grad=True)

        def step():
            made = norm(texts.transpose(1, 2))
            made.backward(torch.ones_like(made).transpose(1, 2).contiguous().transpose(1, 2))
            texts.grad = norm.weight.grad = norm.bias.grad = None

        return step

    size = 16 * 512 * 256 * dtype.itemsize
    expected = (6 if copies else 4) * size  # input, result and their gradients; copies of input and of gradient
    assert predict(variant, "A100").allocated == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("turned", [True, False])
def test_a_convolution_copies_texts_whose_channels_are_last(turned):
    """Convolution.cpp: input.contiguous(), also for its weight's gradient. Conv1d knows no channels_last."""
    size = 4 * 16 * 256 * 2048

    def variant():
        net, texts = nn.Conv1d(256, 8, 3, padding=1), torch.rand(16, 2048, 256) if turned else torch.rand(16, 256, 2048)
        return lambda: (net(texts.transpose(1, 2) if turned else texts).sum().backward(), net.zero_grad())

    predicted = predict(variant, "T4")
    assert copies(predicted, size) == [2 * size, 2 * size] * turned
    assert predicted.allocated == pytest.approx((1 + turned) * size, rel=0.08)  # what comes out is small


def copies(predicted, least):
    return [k.bytes for event in predicted.events for k in event.kernels if k.name == "clone" and k.bytes > least]


NORMS = {
    "softmax": (partial(nn.functional.softmax, dim=-1), 1),  # and how often: the result is kept, or the input
    "log_softmax": (partial(nn.functional.log_softmax, dim=-1), 1),
    "layer_norm": (partial(nn.functional.layer_norm, normalized_shape=(512,)), 2),
    "rms_norm": (partial(nn.functional.rms_norm, normalized_shape=(512,)), 2),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("turned", [True, False])
def test_what_reads_row_by_row_takes_a_copy_of_rows_that_are_apart(name, turned):
    """SoftMax.cu, host_softmax: input.contiguous(). layer_norm_kernel.cu: input.expect_contiguous(), backward, too."""
    function, times = NORMS[name]
    size = 4 * 64 * 256 * 512

    def variant():
        rows = torch.rand(64, 512, 256) if turned else torch.rand(64, 256, 512)
        rows.requires_grad_()
        seen = torch.rand(64, 256, 512)

        def step():
            made = function(rows.transpose(1, 2) if turned else rows)
            made.backward(seen)
            rows.grad = None

        return step

    assert copies(predict(variant, "T4"), size) == [2 * size] * times * turned


@pytest.mark.parametrize("turned", [True, False])
def test_the_copy_of_rows_that_are_apart_counts_beside_what_it_is_made_of(turned):
    size = 4 * 64 * 256 * 512

    def variant():
        rows = torch.rand(64, 512, 256) if turned else torch.rand(64, 256, 512)
        return lambda: (rows.transpose(1, 2) if turned else rows).log_softmax(-1)

    assert predict(variant, "T4").allocated == pytest.approx((2 + turned) * size, rel=0.01)


def test_a_group_norm_and_a_convolution_change_the_order_of_channels_back_and_forth():
    """group_norm.cpp: input.contiguous(). A convolution copies images as its weight lies."""
    size = 4 * 8 * 64 * 64 * 64

    def variant():
        layers = nn.Sequential(nn.Conv2d(64, 64, 1), nn.GroupNorm(8, 64), nn.Conv2d(64, 64, 3, padding=1))
        layers.to(memory_format=torch.channels_last)
        images = torch.rand(8, 64, 64, 64).to(memory_format=torch.channels_last)
        return lambda: (layers(images).sum().backward(), layers.zero_grad())

    predicted = predict(variant, "T4")
    # for the norm, for the second convolution; backward: its gradient, its image, for the norm, for the first one
    assert copies(predicted, size) == [2 * size] * 6


FLASH, EFFICIENT, MATH = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "bmm"
CUDNN = "_scaled_dot_product_cudnn_attention"


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="memory-efficient attention shares no heads")
@pytest.mark.parametrize(
    "gpu, dtype, shapes, options, kernel",
    [
        ("T4", torch.float16, ((8, 64, 64), (2, 64, 64)), {"enable_gqa": True}, EFFICIENT),
        ("T4", torch.bfloat16, ((8, 64, 64), (2, 64, 64)), {"enable_gqa": True}, MATH),
        ("A100", torch.float32, ((8, 64, 64), (2, 64, 64)), {"enable_gqa": True}, EFFICIENT),
        ("A100", torch.bfloat16, ((8, 64, 64), (2, 64, 64)), {"enable_gqa": True}, FLASH),
        ("A100", torch.bfloat16, ((8, 64, 64), (2, 64, 64)), {"enable_gqa": True, "masked": True}, EFFICIENT),
        ("A100", torch.bfloat16, ((8, 64, 64), (1, 64, 64)), {}, FLASH),
        ("A100", torch.float32, ((8, 64, 64), (1, 64, 64)), {}, EFFICIENT),
        ("A100", torch.bfloat16, ((8, 64, 64), (8, 128, 64)), {"is_causal": True}, EFFICIENT),
        ("T4", torch.float32, ((8, 64, 33), (8, 64, 33)), {}, EFFICIENT),
        ("A100", torch.float32, ((8, 64, 33), (8, 64, 33)), {}, MATH),
        ("A100", torch.bfloat16, ((8, 64, 200), (8, 64, 200)), {}, FLASH),
        ("RTX 4090", torch.bfloat16, ((8, 64, 192), (8, 64, 192)), {}, FLASH),
        ("RTX 4090", torch.bfloat16, ((8, 64, 200), (8, 64, 200)), {}, EFFICIENT),
        ("RTX 4090", torch.bfloat16, ((8, 64, 200), (8, 64, 200)), {"trained": False}, FLASH),
        ("RTX 4090", torch.bfloat16, ((8, 64, 256), (8, 64, 256)), {}, FLASH),
        ("RTX 4090", torch.bfloat16, ((8, 64, 256), (8, 64, 256)), {"dropout_p": 0.1}, EFFICIENT),
        ("RTX 5090", torch.bfloat16, ((8, 64, 200), (8, 64, 200)), {}, EFFICIENT),
        ("A100", torch.float64, ((8, 64, 64), (8, 64, 64)), {}, MATH),
        ("A100", torch.bfloat16, ((8, 64, 64), (8, 64, 64)), {"order": "EFFICIENT_ATTENTION"}, EFFICIENT),
        ("A100", torch.bfloat16, ((8, 64, 64), (8, 64, 64)), {"order": "MATH"}, MATH),
        ("A100", torch.bfloat16, ((8, 64, 64), (8, 64, 64)), {"order": "CUDNN_ATTENTION", "masked": True}, CUDNN),
        ("A100", torch.bfloat16, ((8, 64, 64), (8, 64, 64)), {"turned": True}, MATH),
        ("A100", torch.bfloat16, ((64, 64), (64, 64)), {}, FLASH),
    ],
)
def test_attention_is_the_kernel_that_pytorch_chooses_for_the_gpu(gpu, dtype, shapes, options, kernel):
    """What torch._fused_sdp_choice gave for CUDA tensors on a simulated GPU of each kind."""
    given = dict(options)
    masked, trained, turned = given.pop("masked", False), given.pop("trained", True), given.pop("turned", False)
    first = given.pop("order", None)
    order = [getattr(BACKENDS, name) for name in (first, "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH") if name]

    def variant():
        query, key = (torch.rand(2, *shape, dtype=dtype, requires_grad=trained) for shape in shapes)
        value = key.transpose(-2, -1) if turned else key
        mask = torch.zeros(64, 64, dtype=dtype) if masked else None

        def step():
            with torch.nn.attention.sdpa_kernel(order, set_priority=True) if first else nullcontext():
                return nn.functional.scaled_dot_product_attention(query, key, value, mask, **given)

        return step

    found = {kernel.name for event in predict(variant, gpu).events for kernel in event.kernels}
    assert found & {FLASH, EFFICIENT, MATH, CUDNN} == {kernel}


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="memory-efficient attention shares no heads")
def test_heads_that_share_keys_have_no_scores_where_memory_efficient_attention_takes_them():
    """Only the gradients of keys and values are there for each of the query's heads, for a moment."""
    q, k = 4 * 2 * 8 * 1024 * 64, 4 * 2 * 2 * 1024 * 64

    def variant():
        query, key, value = (torch.rand(2, heads, 1024, 64, requires_grad=True) for heads in (8, 2, 2))

        def step():
            made = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            made.backward(torch.ones_like(made))
            query.grad = key.grad = value.grad = None

        return step

    sums = 2 * 4 * 2 * 8 * 1024  # of the exponentials, and delta
    assert predict(variant, "T4").allocated == pytest.approx(2 * (q + 2 * k) + 2 * q + sums + 2 * q, rel=0.01)


def test_a_sparse_gradient_has_the_rows_that_were_looked_up():
    def variant():
        table = nn.Embedding(10_000, 64, sparse=True)
        optimizer, places = torch.optim.SparseAdam(list(table.parameters())), torch.randint(0, 10_000, (8, 128))

        def step():
            table(places).sum().backward()
            assert table.weight.grad._nnz() == table.weight.grad.coalesce()._nnz() == 1024
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert predict(variant, "T4").owners["optimizer state"] == 2 * 4 * 64 * 10_000


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_the_gradient_of_a_bag_has_a_row_for_each_index_and_none_is_kept_twice(mode):
    rows, width, indices = 5000, 64, 64 * 1024

    def variant():
        table = nn.EmbeddingBag(rows, width, sparse=True, mode=mode)
        optimizer, places = torch.optim.SGD(table.parameters(), 0.1), torch.randint(0, rows, (64, indices // 64))

        def step():
            table(places).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    expected = 4 * width * (rows + indices) + 8 * 2 * indices  # weights, their gradient; indices, and of which bags
    assert predict(variant, "T4").allocated == pytest.approx(expected, rel=0.03)


def test_of_rows_that_are_added_up_there_are_no_more_than_the_table_has():
    def variant():
        table = nn.Embedding(100, 64, sparse=True)
        optimizer, places = torch.optim.SparseAdam(list(table.parameters())), torch.randint(0, 100, (8, 128))

        def step():
            table(places).sum().backward()
            assert (table.weight.grad._nnz(), table.weight.grad.coalesce()._nnz()) == (1024, 100)
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert predict(variant, "T4").owners["optimizer state"] == 2 * 4 * 64 * 100


def test_boxes_of_all_classes_are_taken_at_once_as_on_a_gpu():
    """Also where the step never names it: a CPU takes one class after the other from 1,000 boxes on."""
    from torchvision.ops import batched_nms

    def variant():
        layer, boxes, classes = nn.Linear(4, 4), torch.rand(2000, 4), torch.randint(0, 90, (2000,))
        return lambda: layer(boxes[batched_nms(boxes, boxes[:, 0], classes, 0.5)]).sum().backward()

    kernels = Counter(kernel.name for segment in predict(variant, "T4").segments for kernel in segment.kernels)
    assert kernels["nms"] == 1


@pytest.mark.parametrize("number, rows", [(65_536, 100_000), (65_536, 100), (3072, 100_000)])
@pytest.mark.parametrize("bags", [False, True])
def test_what_an_embedding_adds_up_takes_sums_of_ten_rows_beside_the_gradient(number, rows, bags):
    """EmbeddingBackwardKernel.cu. Embedding.cu adds few lookups up where they belong, those of a bag it never does."""
    width = 64

    def variant():
        kind = partial(nn.EmbeddingBag, mode="sum") if bags else nn.Embedding
        table, places = kind(rows, width), torch.randint(0, rows, (number, 1))
        gradient = torch.rand(number, width).view(number, *[1][bags:], width)
        return lambda: (table(places).backward(gradient), table.zero_grad())

    distinct = min(number, rows)
    sums = number // 10 + distinct
    taken = 4 * width * sums + 8 * (2 * number + 3 * distinct + sums) if number > 3072 or bags else 0
    given = 8 * number * (1 + 3 * bags)  # of bags: where each begins, how large it is, and whose each place is
    expected = 4 * width * (2 * rows + 2 * number) + given + taken  # table, result, and their gradients
    assert predict(variant, "T4").allocated == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("function", [nn.functional.softmax, nn.functional.log_softmax])
@pytest.mark.parametrize("in_autocast", [False, True])
@pytest.mark.parametrize("dtype, copies", [(torch.float16, False), (torch.bfloat16, True)])
def test_a_softmax_that_widens_copies_all_but_fp16_first(function, in_autocast, dtype, copies):
    """SoftMax.cpp: with half_to_float, which is for fp16 alone, neither the scores nor their gradient are in fp32."""
    elements, asked = 1024 * 2048, {} if in_autocast else {"dtype": torch.float32}

    def variant():
        scores, gradient = torch.rand(1024, 2048, dtype=dtype, requires_grad=True), torch.rand(1024, 2048)

        def step():
            with torch.autocast("cuda", dtype, enabled=in_autocast):
                made = function(scores, dim=-1, **asked)
            made.backward(gradient)
            scores.grad = None

        return step

    kept = (2 + 4 + 4) * elements  # scores, what they become, and its gradient
    own = 4 + 2 if copies else 2  # the scores' gradient, and what it is a copy of
    if function is nn.functional.softmax:  # the gradient times the softmax, which is gone when the copy is made
        own = 4 + 4 if copies else 4 + 2
    assert predict(variant, "A100").allocated == pytest.approx(kept + own * elements, rel=0.01)


def test_autocast_leaves_a_cumulative_sum_the_type_that_it_is_asked_for():
    def step():
        with torch.autocast("cuda", torch.float16):
            counts = torch.ones(8, 8, dtype=torch.bool, device="cuda").cumsum(1, dtype=torch.float64)
        assert counts.dtype is torch.float64

    assert not predict(lambda: step, "T4").unknown


@pytest.mark.parametrize(
    "measure",
    [
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: nn.functional.normalize(x, dim=1)[:, :1].clone(),
        lambda x: torch.ops.aten.norm.ScalarOpt_dim(x, 2, [1]),
        lambda x: torch.ops.aten.norm.Scalar(x, 2),
    ],
)
def test_autocast_asks_norms_for_fp32_and_copies_nothing(measure):
    """autocast_mode.h, fp32_set_opt_dtype and fp32_append_dtype: what is kept is in 16 bits, but for the ratio."""
    size = 2 * 1024 * 4096

    def variant():
        texts = torch.rand(1024, 4096, dtype=torch.float16, requires_grad=True)

        def step():
            with torch.autocast("cuda", torch.float16):
                kept.append(torch.cuda.memory_allocated())
                made = measure(texts.to("cuda"))
                kept.append(torch.cuda.memory_allocated())
            return made

        return step

    kept = []
    predict(variant, "A100")
    before, after = kept[-2:]
    assert after - before < 1.01 * size, "a copy in fp32 would take twice as much"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_autocast", [False, True])
def test_an_rms_norm_is_one_kernel_that_keeps_its_input(dtype, in_autocast):
    """layer_norm.cpp, rms_norm_symint: also in autocast, which widens it. Not where the weight has another dtype."""
    width = 4 if in_autocast else dtype.itemsize

    def variant():
        norm, rows = nn.RMSNorm(1024, dtype=dtype), torch.rand(4096, 1024, dtype=dtype, requires_grad=True)
        gradient = torch.rand(4096, 1024, dtype=torch.float32 if in_autocast else dtype)

        def step():
            with torch.autocast("cuda", torch.bfloat16, enabled=in_autocast):
                made = norm(rows)
            made.backward(gradient)
            norm.zero_grad()
            rows.grad = None

        return step

    predicted = predict(variant, "A100")
    names = {kernel.name for event in predicted.events for kernel in event.kernels}
    assert names - {"_to_copy"} == {"_fused_rms_norm", "_fused_rms_norm_backward"}
    given = dtype.itemsize if width > dtype.itemsize else 0  # beside its copy in fp32
    assert predicted.allocated == pytest.approx(4096 * 1024 * (given + 4 * width), rel=0.01)


def squared_gradient(rows, weight):
    (gradient,) = torch.autograd.grad(nn.functional.rms_norm(rows, (64,), weight).sum(), rows, create_graph=True)
    return gradient.square().sum().backward()


@pytest.mark.parametrize(
    "use",
    [
        squared_gradient,
        lambda rows, weight: torch.func.grad(lambda w: nn.functional.rms_norm(rows, (64,), w).sum())(weight),
        lambda rows, weight: torch.func.vmap(lambda row: nn.functional.rms_norm(row, (64,), weight))(rows),
    ],
)
def test_an_rms_norm_has_a_gradients_gradient_and_is_mapped(use):
    variant = lambda: partial(use, torch.rand(32, 64, requires_grad=True), torch.rand(64, requires_grad=True))
    assert predict(variant, "T4").allocated > 0


@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod])
def test_autocast_adds_up_in_fp32_without_a_copy(function):
    """autocast_mode.h, AT_FORALL_FP32_SET_OPT_DTYPE."""

    def variant():
        rows, gradient = torch.rand(4096, 1024, dtype=torch.float16), torch.rand(4096, 1024)

        def step():
            with torch.autocast("cuda", torch.float16):
                assert function(rows, -1).dtype is torch.float32
            return gradient

        return step

    assert predict(variant, "A100").allocated == pytest.approx(4096 * 1024 * (2 + 4 + 4), rel=0.01)


@pytest.mark.parametrize(
    "function, passes, made",
    [
        (lambda x: x.logsumexp(-1), 2 + 3 + 1, 1),  # the largest, less it, its powers, their sum
        (lambda x: nn.functional.binary_cross_entropy_with_logits(x, x), 13, 2),
        (lambda x: torch.dist(x, x), 4, 1),
    ],
)
def test_an_operation_of_several_kernels_is_these_with_what_lies_between_them(function, passes, made):
    """ReduceOps.cpp, logsumexp_out_impl; Loss.cpp; LinearAlgebra.cpp, dist: each is made of other operations."""
    size = 4 * 4096 * 1024
    predicted = predict(lambda: partial(function, torch.rand(4096, 1024)), "T4")
    moved = sum(kernel.bytes for event in predicted.events for kernel in event.kernels)
    assert predicted.allocated == pytest.approx((1 + made) * size, rel=0.01)
    assert moved == pytest.approx(passes * size, rel=0.1)


@pytest.mark.parametrize(
    "gpu, reduce, shape, dtype, taken",
    [  # bytes that a thread adds up in, results, blocks that share one, columns of threads, numbers read at once
        ("A100", lambda x: x.sum(0), (16384, 3072), torch.bfloat16, 4 * 3072 * 72 * 32 * 4),
        ("T4", lambda x: x.sum(0), (16384, 3072), torch.bfloat16, 4 * 3072 * 16 * 32 * 4),  # at most 256 for a thread
        ("T4", lambda x: x.sum(0), (4096, 1024), torch.float32, 4 * 1024 * 40 * 32 * 4),
        ("A100", lambda x: x.sum(0), (4096, 1024), torch.int32, 8 * 1024 * 64 * 32 * 4 + 8 * 4096 * 1024),  # a copy
        ("A100", lambda x: x.var(0), (4096, 1024), torch.float32, 16 * 1024 * 64 * 32 * 4),
        ("A100", lambda x: x.argmax(0), (4096, 1024), torch.float32, 16 * 1024 * 64 * 32 * 4),
        ("A100", lambda x: x.amax(0), (4096, 1024), torch.bfloat16, 2 * 1024 * 64 * 32 * 4),
        ("A100", lambda x: x[:, 1:].sum(0), (4096, 1025), torch.float32, 4 * 1024 * 14 * 32),  # not side by side
        ("A100", lambda x: x.sum(1), (4096, 1024), torch.float32, 0),  # along the rows
        ("A100", lambda x: x.sum(0), (100, 8192), torch.float32, 0),  # too few for several blocks
        ("A100", lambda x: x.sum((0, 2, 3)), (16, 64, 64, 64), torch.float32, 0),
    ],
)
def test_a_sum_of_rows_takes_what_its_blocks_of_threads_leave_to_the_last(gpu, reduce, shape, dtype, taken):
    """Reduce.cuh, global_memory_size: what PyTorch's allocator gave for it on a simulated GPU."""
    rows = predict(lambda: partial(reduce, torch.ones(shape, dtype=dtype)), gpu)
    size = math.prod(shape) * dtype.itemsize
    assert rows.allocated - size == pytest.approx(taken, rel=0.02, abs=64 * KiB)


def test_of_several_gpus_a_sum_of_rows_is_that_of_the_first():
    def variant():
        return partial(torch.ones(16384, 1024).sum, 0)

    t4, a100 = (predict(variant, gpu).allocated for gpu in ("T4", "A100"))
    assert t4 < a100 and predict(variant, ["T4", "A100"]).allocated == t4, "its peak is what a table shows"


ROWS = 4096


def written_into(name):
    """An operation that gives a copy with some of its numbers changed: half of its rows, or by a mask."""
    calls = {
        "masked_fill": lambda x, rows, half, mask: x.masked_fill(mask, 0),
        "index_fill": lambda x, rows, half, mask: x.index_fill(0, rows, 0.0),
        "index_put": lambda x, rows, half, mask: x.index_put((rows,), half),
        "index_copy": lambda x, rows, half, mask: x.index_copy(0, rows, half),
        "index_add": lambda x, rows, half, mask: x.index_add(0, rows, half),
        "scatter": lambda x, rows, half, mask: x.scatter(0, rows[:, None].expand(-1, 1024), half),
        "scatter_add": lambda x, rows, half, mask: x.scatter_add(0, rows[:, None].expand(-1, 1024), half),
        "slice_scatter": lambda x, rows, half, mask: x.slice_scatter(half, 0, 0, ROWS // 2),
        "constant_pad_nd": lambda x, rows, half, mask: nn.functional.pad(x, (0, 0, 0, ROWS // 2)),
    }

    def variant():
        x, half = torch.rand(ROWS, 1024), torch.rand(ROWS // 2, 1024)
        rows, mask = torch.arange(ROWS // 2), torch.zeros(ROWS, 1024, dtype=torch.bool)
        return lambda: calls[name](x, rows, half, mask)

    return variant


@pytest.mark.parametrize(
    "name, moved",
    [  # of 4 bytes for each number: a copy, and what is written into it
        ("masked_fill", 2 + 2 + 0.25),
        ("index_fill", 2 + 2),
        ("index_put", 2 + 3 * 0.5),
        ("index_copy", 2 + 3 * 0.5),
        ("index_add", 2 + 3 * 0.5),
        ("scatter", 2 + 3 * 0.5),
        ("scatter_add", 2 + 3 * 0.5),
        ("slice_scatter", 2 + 2 * 0.5),
        ("constant_pad_nd", 1.5 + 2),  # one and a half times as many rows are filled
    ],
)
def test_what_gives_a_changed_copy_copies_first(name, moved):
    """TensorAdvancedIndexing.cpp, cuda/Indexing.cu and PadNd.cpp: two kernels."""
    launched = [kernel for event in predict(written_into(name), "A100").events for kernel in event.kernels]
    assert len(launched) == 2 and sum(k.bytes for k in launched) == pytest.approx(moved * 4 * ROWS * 1024, rel=0.02)


@pytest.mark.parametrize(
    "function, shape, taken",
    [  # bytes for each number, or for each index
        (lambda x: x.index_put_((torch.arange(100000),), torch.rand(100000), True), (2**20,), 100000 * (48 + 8 + 4)),
        (lambda x: x.topk(8), (4096, 1024), 4096 * 6 * 256 + 4096 * 8 * 12),
        (lambda x: torch.randperm(1_000_000), (8,), 1_000_000 * (8 + 40)),
        (lambda x: torch.randperm(10_000), (8,), 10_000 * (8 + 28)),
        (lambda x: torch.multinomial(x, 1), (4096, 1024), 4 * 4096 * 1024),
        (lambda x: torch.multinomial(x, 2, True), (4096, 1024), 3 * 4 * 4096 * 1024 + 4096 * 16),
        (lambda x: x.median(), (4096, 1024), (12 + 8 + 8 + 4) * 4096 * 1024),  # of all numbers, which are sorted
        (lambda x: x.roll((1, 2), (0, 1)), (4096, 1024), 2 * 4 * 4096 * 1024),
        (
            lambda x: x.count_nonzero(0),
            (4096, 1024),
            (1 + 8) * 4096 * 1024 + 8 * 1024 * 64 * 32 * 4,
        ),  # and blocks' sums
    ],
)
def test_what_a_gpu_sorts_and_draws_takes_what_its_kernels_take(function, shape, taken):
    """What PyTorch's allocator gave on a simulated GPU, for the code of its CUDA kernels, and their results."""
    allocated = predict(lambda: partial(function, torch.rand(shape)), "A100").allocated
    assert allocated - 4 * math.prod(shape) == pytest.approx(taken, rel=0.03)


@pytest.mark.parametrize("function", [lambda x: x.softmax(-1), lambda x: x.log_softmax(-1), lambda x: x.max(-1)[0]])
def test_a_backward_pass_takes_what_it_takes_on_a_gpu(function):
    """SoftMax.cu: a softmax's gradient times its result, first. value_selecting_reduction_backward writes in place."""
    size, is_softmax = 4 * 4096 * 1024, function(torch.rand(2, 2)).dim() == 2

    def variant():
        rows = torch.rand(4096, 1024, requires_grad=True)
        gradient = torch.rand(4096, 1024) if is_softmax else torch.rand(4096)

        def step():
            function(rows).backward(gradient)
            rows.grad = None

        return step

    predicted = predict(variant, "T4")
    times = [kernel for event in predicted.events for kernel in event.kernels if kernel.name == "mul"]
    kept = (4 if is_softmax else 2) + len(times)  # the rows, their gradient, and of a softmax what it gives and gets
    assert len(times) == (function(torch.zeros(1, 2)).sum() == 1)
    assert predicted.allocated == pytest.approx(kept * size, rel=0.01)


def test_the_sigmoids_logarithm_keeps_no_buffer_on_a_gpu():
    """ActivationLogSigmoidKernel.cu."""
    size = 4 * 4096 * 1024

    def variant():
        rows, gradient = torch.rand(4096, 1024, requires_grad=True), torch.rand(4096, 1024)
        return lambda: (nn.functional.logsigmoid(rows).backward(gradient), setattr(rows, "grad", None))

    assert predict(variant, "T4").allocated == pytest.approx(4 * size, rel=0.01)


def test_what_a_mask_scatters_is_counted_up_to_each_place():
    """IndexKernel.cpp, masked_scatter__cuda: eight bytes for each element, and the mask as a whole."""

    def variant():
        texts, images = torch.rand(8, 512, 256), torch.rand(8, 64, 256)
        mask = (torch.arange(512) < 64).expand(8, 512)[..., None].expand_as(texts)
        return lambda: texts.masked_scatter(mask, images)

    elements = 8 * 512 * 256
    assert predict(variant, "T4").allocated == pytest.approx((4 + 4 + 9) * elements + 4 * elements / 8, rel=0.01)


def test_the_real_numbers_of_a_spectrum_are_made_of_a_copy():
    """SpectralOps.cpp, _fft_c2r_cufft: cuFFT writes over what it reads."""
    variant = lambda: partial(torch.fft.irfft, torch.rand(256, 4097, dtype=torch.complex64))
    assert predict(variant, "T4").allocated == pytest.approx(256 * (2 * 8 * 4097 + 4 * 8192), rel=0.01)


@pytest.mark.parametrize(
    ("changed", "takes"),
    [
        ({}, True),
        ({"inputs": 512}, False),
        ({"size": 1}, False),
        ({"stride": 2}, False),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
        ({"dtype": torch.float16}, False),
    ],
    ids=lambda given: str(given) if isinstance(given, dict) else "",
)
def test_a_convolution_of_many_channels_takes_the_tiles_of_winograd_without_tf32(changed, takes):
    """Of 2,048 channels and 512, for two images of 64 × 96 numbers, in 16 × 24 tiles of 36 numbers."""
    settings = {"inputs": 2048, "size": 3, "stride": 1, "dilation": 1, "groups": 1, "dtype": torch.float32} | changed
    inputs, size, dtype = (settings.pop(name) for name in ("inputs", "size", "dtype"))

    def variant():
        convolution = nn.Conv2d(inputs, 512, size, padding=size // 2, dtype=dtype, **settings)
        images = torch.zeros(2, inputs, 64, 96, dtype=dtype, requires_grad=True)
        return lambda: convolution(images).sum().backward()

    predicted = predict(variant, ["T4", "A100 80 GB"])
    t4, a100 = (predicted.for_gpu(gpu)[0].allocated for gpu in ("T4", "A100 80 GB"))
    assert t4 - a100 == takes * 4 * 36 * 2 * 16 * 24 * (2048 + 512)
    assert any("Winograd" in what for what in predicted.assumptions) == takes


def test_a_convolution_of_many_channels_takes_them_on_every_gpu_where_tf32_is_off():
    def variant():
        convolution, images = nn.Conv2d(2048, 512, 3, padding=1), torch.zeros(2, 2048, 64, 96, requires_grad=True)
        return lambda: convolution(images).sum().backward()

    switch = torch.backends.cudnn.conv
    before, switch.fp32_precision = switch.fp32_precision, "ieee"
    try:
        predicted = predict(variant, ["T4", "A100 80 GB"])
    finally:
        switch.fp32_precision = before
    assert len({predicted.for_gpu(gpu)[0].allocated for gpu in ("T4", "A100 80 GB")}) == 1


def test_a_deformable_convolution_takes_what_its_taps_see():
    from torchvision.ops import deform_conv2d

    def variant(size):
        weight = nn.Parameter(torch.rand(64, 64, size, size))
        images, offset = torch.rand(8, 64, 32, 32), torch.rand(8, 2 * size**2, 32, 32)
        return lambda: deform_conv2d(images, offset, weight, padding=size // 2).sum().backward()

    small, large = (predict(partial(variant, size), "T4") for size in (1, 3))
    assert large.allocated - small.allocated > 8 * (4 * 8 * 64 * 32**2), "nine taps, not one"
    assert any("deform_conv2d computes" in what for what in large.unknown)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_a_cell_is_two_products_and_a_kernel(kind, bias):
    """aten/src/ATen/native/cuda/RNN.cu. Each keeps 6 of its state: 4 gates, cell and state, or a GRU's 5 and state."""

    def variant(steps):
        cell, rows = kind(64, 1024, bias=bias), torch.rand(256, 64)

        def step():
            state = None
            for _ in range(steps):
                state = cell(rows, state)
            (state[0] if kind is nn.LSTMCell else state).sum().backward()
            assert all(weight.grad is not None and weight.grad.shape == weight.shape for weight in cell.parameters())

        return step

    few, more = (predict(partial(variant, steps), "T4") for steps in (10, 20))
    count = lambda predicted, name: sum(
        number for segment in predicted.segments for kernel, number in segment.kernels.items() if name in kernel.name
    )
    assert count(more, "(gates)") == 40 and count(more, "mm") - count(few, "mm") == 10 * (2 + 3)
    assert (more.allocated - few.allocated) / (10 * 4 * 256 * 1024) == pytest.approx(6, abs=0.2)


def test_what_a_step_asks_of_the_gpu_counts_however_its_attention_runs():
    """An A100 has a walk of its own where a step asks whether it is an H100."""

    def variant():
        layer = nn.Linear(64, 64).cuda()
        size = 2**26 if torch.cuda.get_device_capability() < (9, 0) else 1

        def step():
            x = layer(torch.ones(2, 4, 8, 64, device="cuda")).bfloat16()
            attended = nn.functional.scaled_dot_product_attention(x, x, x)
            (attended.sum() + torch.ones(size, device="cuda").sum()).backward()

        return step

    both, alone = predict(variant, ["H100", "A100 80 GB"]), predict(variant, "A100 80 GB")
    assert both.total("A100 80 GB") == alone.total() and alone.allocated - both.allocated > 2**27


def test_an_operation_that_only_a_gpu_has_for_whole_numbers_is_predicted(capfd):
    def variant():
        weight = nn.Parameter(torch.rand(4, 8).cuda())
        chosen = torch.randint(4, (16,)).cuda()
        return lambda: (weight.sum(1) * torch.histc(chosen.int(), 4, 0, 3)).sum().backward()

    assert not predict(variant, "T4").unknown
    assert "histogram" not in capfd.readouterr().err, "PyTorch tells of an error that we catch"


def test_the_memory_that_a_matrix_exponential_works_in_is_not_known():
    """aten/src/ATen/native/LinearAlgebra.cpp, mexp_impl: powers of the matrix, in the backward pass of a larger one."""

    def variant():
        weight = nn.Parameter(torch.rand(64, 64))
        return lambda: torch.matrix_exp(weight).sum().backward()

    assert any("what linalg_matrix_exp takes" in why for why in predict(variant, "T4").unknown)


def test_a_sparse_matrix_is_multiplied_and_its_arithmetic_is_not_known():
    def variant(sparse):
        model = nn.Linear(16, 16).cuda()
        places, values = torch.randint(100, (2, 400)), torch.rand(400)
        adjacent = torch.sparse_coo_tensor(places, values, (100, 100), check_invariants=False).cuda()
        rows = torch.rand(100, 16).cuda()
        dense = torch.rand(100, 100).cuda()
        return lambda: ((adjacent if sparse else dense) @ model(rows)).sum().backward()

    sparse, dense = (predict(partial(variant, each), "T4") for each in (True, False))
    assert any("sparse" in what for what in sparse.unknown) and not dense.unknown
    assert sparse.time().expected < dense.time().expected * 2


def test_lengths_that_the_step_makes_and_sorts_are_known():
    def variant(lengths):
        layer = nn.LSTM(16, 32, batch_first=True)
        rows = torch.rand(4, 20, 16)

        def step():
            packed = nn.utils.rnn.pack_padded_sequence(rows, torch.tensor(lengths), True, enforce_sorted=False)
            layer(packed)[1][0].sum().backward()

        return step

    short, long = (predict(partial(variant, lengths), "T4") for lengths in ([2, 1, 1, 2], [20, 10, 5, 3]))
    assert short.allocated < long.allocated
    assert not any("chooses from" in what for what in (*short.assumptions, *long.assumptions))


def test_a_model_that_is_spread_over_gpus_runs_on_the_one_that_is_there():
    def variant(spread):
        model = nn.Linear(16, 16).cuda()
        model = nn.DataParallel(model) if spread else model
        rows = torch.rand(8, 16).cuda()
        return lambda: model(rows).sum().backward()

    spread, alone = (predict(partial(variant, each), "T4") for each in (True, False))
    assert spread.allocated == alone.allocated


def test_checkpointing_finds_weights_that_say_no_place_where_it_found_them_before():
    """A notebook's own parameter beside a model that names the GPU: it meets the GPU's tensors in the first pass."""

    def variant():
        model, own = nn.Linear(16, 16).cuda(), nn.Parameter(torch.rand(16, 16))
        rows = torch.rand(8, 16).cuda().requires_grad_()

        def run(x):
            with torch.autocast("cuda", torch.float16):
                made = model(x) @ own.t()
            return made.float() @ own

        return lambda: checkpoint(run, rows, use_reentrant=False).sum().backward()

    assert predict(variant, "T4").allocated > 0


def test_what_is_checked_by_a_name_is_a_truth(tmp_path):
    lines = """fine = bool(values.all())
kept = [each for each in values if each > 0]
least = values.min() > 0
if not fine or not least: raise ValueError
if not kept: raise ValueError
if least: print()
size = (values > 0).sum().item()
assert size > 3
fine = values.any()
"""
    file = tmp_path / "train.py"
    file.write_text(lines)
    assert sorted(uses._checks(str(file))) == [1, 3, 4, 5, 8]


# --- where tensors lie that a function's step makes, moves and trains ---


def wider(layer, **where):
    """A layer with more outputs, in place of one that is on the GPU."""
    wide = nn.Linear(1024, 4096, bias=False, **where)
    with torch.no_grad():
        wide.weight[:1000] = layer.weight
    return lambda x: wide(x), wide.weight


def scaled(layer, **where):
    """A layer whose weight is made anew in each step."""
    weight, gain = (nn.Parameter(torch.ones(size, 1024, **where)) for size in (4096, 1))
    return lambda x: layer(x).sum() + nn.functional.linear(x, weight * gain), weight


@pytest.mark.parametrize("make", [wider, scaled])
@pytest.mark.parametrize("in_16_bits", [True, False])
def test_a_weight_lies_where_what_is_made_of_it_meets_the_gpus(make, in_16_bits):
    def variant(**where):
        layer = nn.Linear(1024, 1000, bias=False).to("cuda")
        apply, weight = make(layer, **where)
        optimizer = torch.optim.AdamW([weight])

        def step():
            with torch.autocast("cuda", torch.bfloat16, enabled=in_16_bits):
                loss = apply(torch.randn(64, 1024, device="cuda")).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    said, not_said = predict(partial(variant, device="cuda"), "A100"), predict(variant, "A100")
    assert not_said.allocated == said.allocated > 3 * 4 * 4096 * 1024 and not not_said.unknown
    assert not_said.owners == said.owners and not_said.time().expected == said.time().expected


def on_gpu(model, *inputs_of, lr=0.1):
    """A step on the GPU that trains a model of what each of `inputs_of` makes there."""
    model = model.to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step():
        model(*(make() for make in inputs_of)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Recurrent(nn.Module):
    def __init__(self, packs):
        super().__init__()
        self.packs, self.layers, self.head = packs, nn.LSTM(512, 512, 2, batch_first=True), nn.Linear(512, 512)

    def forward(self, rows):
        if not self.packs:
            return self.head(self.layers(rows)[0])
        packed = nn.utils.rnn.pack_padded_sequence(rows, torch.full((len(rows),), rows.shape[1]), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0])


def test_what_a_packed_lstm_keeps_lies_on_the_gpu():
    """Its reserve, 7 numbers for each token, layer and hidden one, and the sequence once more, packed."""
    packed, padded = (
        predict(lambda packs=packs: on_gpu(Recurrent(packs), lambda: torch.randn(16, 64, 512, device="cuda")), "T4")
        for packs in (True, False)
    )
    kept = 16 * 64 * 2 * 7 * 512 * 4
    assert padded.allocated > kept and 0.9 < packed.allocated / padded.allocated < 1.25
    assert packed.time().expected == pytest.approx(padded.time().expected, rel=0.1)
    assert packed.unknown == () and packed.assumptions == ()


def test_what_pytorch_pads_of_tensors_on_the_gpu_lies_there():
    def rows(join):
        return lambda: join([torch.randn(64, 256, device="cuda") for _ in range(8)])

    class Attends(nn.Linear):
        def forward(self, x):
            return super().forward(x) @ x.transpose(1, 2)

    padded, stacked = (
        predict(lambda join=join: on_gpu(Attends(256, 256), rows(join)), "T4")
        for join in (partial(nn.utils.rnn.pad_sequence, batch_first=True), torch.stack)
    )
    assert padded.allocated == stacked.allocated and padded.unknown == () and padded.assumptions == ()


@pytest.mark.parametrize("key", [torch.Tensor.data_ptr, id], ids=["address", "identity"])
def test_weights_are_told_apart_by_their_addresses(key):
    def variant():
        layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4)).to("cuda")
        optimizer = torch.optim.SGD(list({key(weight): weight for weight in layers.parameters()}.values()), 0.1, 0.9)

        def step():
            sum(layer(torch.randn(8, 256, device="cuda")).mean() for layer in layers).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    assert predict(variant, "T4").owners["optimizer state"] == 4 * 256 * 256 * 4


@pytest.mark.parametrize(
    "back", [lambda layer: layer.cpu(), lambda layer: layer.to("cpu"), lambda layer: layer.to(torch.device("cpu"))]
)
def test_a_module_that_goes_back_to_the_cpu_leaves_the_gpu(back):
    def variant():
        layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(8)).requires_grad_(False)
        head = nn.Linear(1024, 10).to("cuda")

        def step():
            x = torch.randn(8, 1024, device="cuda")
            for layer in layers:
                x = layer.to("cuda")(x)
                back(layer)
            head(x).mean().backward()

        return step

    predicted = predict(variant, "T4")
    assert predicted.allocated < 3 * 1024 * 1024 * 4 < 8 * 1024 * 1024 * 4
    assert sum(row.bytes for kind, row in predicted.time().table.items() if "back" in kind) == 2 * 8 * 4 * 1024 * 1024


def test_what_is_trained_on_the_cpu_takes_none_of_the_gpus_memory_and_time_that_nobody_knows():
    def variant():
        table, head = nn.Embedding(100_000, 256), nn.Linear(256, 256).to("cuda")
        optimizer = torch.optim.AdamW([*table.parameters(), *head.parameters()])

        def step():
            head(table(torch.randint(100_000, (64,))).to("cuda")).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    predicted = predict(variant, "T4")
    assert predicted.allocated < 100_000 * 256 * 4 / 20
    assert any(what.startswith("how long the CPU takes for what it computes itself") for what in predicted.unknown)


def test_layers_that_lie_on_the_cpu_are_the_cpus_work():
    def variant():
        tower, head = nn.Linear(1024, 1024), nn.Linear(1024, 8).to("cuda")
        return lambda: head(tower(torch.randn(64, 1024)).to("cuda")).mean().backward()

    predicted = predict(variant, "T4")
    assert predicted.allocated < 1024 * 1024 and any("aten.addmm" in what for what in predicted.unknown)


def test_what_is_joined_to_what_lies_on_the_gpu_lies_there_too():
    def variant():
        says_nothing, rows = torch.randn(1 << 20), torch.randn(1 << 20, device="cuda", requires_grad=True)
        return lambda: torch.cat([rows, says_nothing]).sum().backward()

    assert predict(variant, "T4").allocated >= 4 * 4 * (1 << 20)  # both, what they are joined to, and a gradient


def test_a_module_of_meta_tensors_gets_its_memory_on_the_gpu():
    def variant(device):
        with torch.device(device):
            model = nn.Linear(512, 512)
        return on_gpu(model.to_empty(device="cuda"), lambda: torch.randn(8, 512, device="cuda"))

    meta, built = (predict(partial(variant, device), "T4") for device in ("meta", "cuda"))
    assert meta.allocated == built.allocated


@pytest.fixture
def deterministic():
    """Algorithms whose results are the same each time; what has none only warns if it is asked to."""
    yield partial(torch.use_deterministic_algorithms, True)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("names", [True, False])
def test_deterministic_algorithms_enlarge_images_as_on_the_gpu_that_is_named(deterministic, names):
    """torch.nn.functional.interpolate asks within itself where an image lies, and then takes it apart by indices."""

    def variant():
        image = torch.rand(2, 16, 32, 32, requires_grad=True)

        def step():
            moved = image.to("cuda") if names else image
            nn.functional.interpolate(moved, scale_factor=2, mode="bilinear").sum().backward()
            image.grad = None

        return step

    deterministic(warn_only=True)
    events = predict(variant, "T4").events
    assert ("_unsafe_index" in {kernel.name for event in events for kernel in event.kernels}) == names


@pytest.mark.parametrize("reduction, refused", [("mean", True), ("none", False)])
def test_what_no_deterministic_algorithm_computes_is_refused_as_pytorch_does(deterministic, reduction, refused):
    def variant():
        scores, labels = torch.rand(2, 4, 8, 8, requires_grad=True), torch.zeros(2, 8, 8, dtype=torch.int64)
        return lambda: nn.functional.cross_entropy(scores, labels, reduction=reduction).sum().backward()

    deterministic(warn_only=True)
    predict(variant, "T4")
    deterministic()
    with pytest.raises(RuntimeError, match="deterministic") if refused else nullcontext():
        predict(variant, "T4")


def test_another_sparse_format_than_coo_is_refused_by_its_name():
    def variant():
        graph, layer = torch.eye(8, device="cuda").to_sparse_csr(), nn.Linear(8, 8).to("cuda")
        return lambda: (graph @ layer(torch.randn(8, 8, device="cuda"))).mean().backward()

    with pytest.raises(RuntimeError, match=r"format CSR cannot be predicted: take COO, tensor.to_sparse\(\)"):
        predict(variant, "T4")


LAZY = lambda: nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(10))
NOT_LAZY = lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))


@pytest.mark.parametrize(
    "place",
    [
        lambda model: model.cuda(),
        lambda model: model.to("cuda", torch.float16),
        lambda model: model[:-1].append(copy.deepcopy(model[-1])).cuda(),
        lambda model: model,
    ],
    ids=["moved", "moved and cast", "copied", "moved later"],
)
def test_a_lazy_layer_is_one_whose_sizes_are_given(place):
    def variant(build):
        model = place(build())
        weights = [*model.parameters()]
        device, dtype = ("cuda", weights[0].dtype) if weights[0].is_cuda else (None, None)
        model(torch.zeros(2, 3, 16, 16, device=device, dtype=dtype))
        assert weights == [*model.parameters()] and all(isinstance(weight, nn.Parameter) for weight in weights)
        optimizer = torch.optim.AdamW(model.cuda().parameters())

        def step():
            model(torch.randn(32, 3, 16, 16, device="cuda", dtype=dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    lazy, given = (predict(partial(variant, build), "T4") for build in (LAZY, NOT_LAZY))
    assert (lazy.owners, lazy.reserved, lazy.time().expected) == (given.owners, given.reserved, given.time().expected)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: sum(weight.numel() for weight in model.parameters()),
        lambda model: model[0].weight.shape,
        lambda model: nn.init.xavier_uniform_(model[0].weight),
        copy.deepcopy,  # of a buffer
    ],
    ids=["number", "shape", "initialised", "copied"],
)
def test_what_pytorch_refuses_of_a_lazy_layer_is_refused(ask):
    def variant():
        model = LAZY().cuda()
        ask(model)
        return lambda: None

    with pytest.raises((ValueError, RuntimeError)) as theirs:
        ask(LAZY())
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value)[:40])):
        predict(variant, "T4")


def chain(x):
    for _ in range(20):
        x = torch.sin(x) * 1.01
    return x.mean()


def in_eager_mode(x):
    with torch.compiler.set_stance("force_eager"):
        return torch.compile(chain)(x)


def of_dynamo_switched_off(x):
    with torch._dynamo.config.patch(disable=True):
        return torch.compile(chain)(x)


def where_a_variable_says_so():
    with patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"):
        return torch.compile(chain)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: torch.compile(chain, disable=True),
        lambda: torch.compile(chain, backend="eager"),
        lambda: torch.compile(torch.compiler.disable(chain)),
        lambda: in_eager_mode,
        lambda: of_dynamo_switched_off,
        where_a_variable_says_so,
    ],
    ids=["disabled", "eager backend", "of a disabled one", "stance", "dynamo switched off", "variable"],
)
def test_what_torch_compile_gets_and_does_not_compile_runs_as_it_is(wrap):
    def variant(wrap):
        run, weight = wrap(), nn.Parameter(torch.empty(1024, 1024))  # whose numbers nobody follows
        return lambda: run(weight).backward()

    without, compiled = predict(partial(variant, lambda: chain), "T4"), predict(partial(variant, wrap), "T4")
    assert compiled.time().expected == without.time().expected and compiled.assumptions == ()
    assert predict(partial(variant, lambda: torch.compile(chain)), "T4").time().expected < without.time().expected


def ask(x):
    return (x.sin() if torch.compiler.is_compiling() else x.cos()).exp()


def ask_checkpointed(x):
    return checkpoint(ask, x, use_reentrant=False)


@torch.compile
def ask_before(x):
    return ask(x)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        (lambda x: ask(x), False),
        (lambda x: torch.compile(ask)(x), True),
        (lambda x: torch.compile(torch.compiler.disable(ask))(x), False),
        (lambda x: torch.compile(lambda x: torch.compiler.disable(ask)(x) + 1)(x), False),
        (lambda x: ask(torch.compile(torch.relu)(x)), False),
        (ask_before, True),
        (lambda x: torch.compile(ask_checkpointed)(x), True),
        (lambda x: ask_checkpointed(torch.compile(torch.relu)(x)), False),
    ],
    ids=["eager", "compiled", "disabled", "inside", "beside", "before", "checkpointed", "eager_checkpointed"],
)
def test_code_that_would_be_compiled_is_told_so(run, told):
    def variant():
        weight = nn.Parameter(torch.ones(1024, 1024))
        return lambda: run(weight).sum().backward()

    events = predict(variant, "T4").events
    names = {phase: [k.name for e in events if e.phase == phase for k in e.kernels] for phase in (FORWARD, BACKWARD)}
    took, other = ("sin", "cos") if told else ("cos", "sin")
    assert took in names[FORWARD] and other not in names[FORWARD]
    assert other in names[BACKWARD] and (took in names[BACKWARD]) == ("ask_checkpointed" in run.__code__.co_names)


@pytest.mark.parametrize(("compiles", "kind"), [(False, "flash"), (True, "efficient")])
def test_a_compiled_decoder_that_gets_a_mask_uses_it_as_its_values_are_not_read_there(compiles, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}

    def variant():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=100, use_cache=False, **sizes))
        run, texts = (torch.compile(model) if compiles else model), torch.ones(2, 64, dtype=torch.int64)

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                run(input_ids=texts, attention_mask=torch.ones_like(texts), labels=texts).loss.backward()

        return step

    names = {kernel.name for event in predict(variant, "A100").events for kernel in event.kernels}
    assert {name for name in names if "attention" in name and "backward" not in name} == {
        f"_scaled_dot_product_{kind}_attention"
    }


def test_what_transformers_switches_on_is_on_in_the_second_prediction_too():
    from transformers.utils.import_utils import enable_tf32

    def variant():
        enable_tf32(True)
        return on_gpu(nn.Linear(64, 64), lambda: torch.randn(64, 64, device="cuda"))

    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    switches = torch.backends, cuda.matmul, cudnn, cudnn.conv, cudnn.rnn  # it sets them all
    before = [switch.fp32_precision for switch in switches]
    try:
        for _ in range(2):
            assert {kernel.format for kernel in kernels(variant) if kernel.product} == {"tf32"}
    finally:
        for switch, precision in zip(switches, before):
            switch.fp32_precision = precision


def rarely(kind):
    model, calls = nn.Linear(64, 64).to("cuda"), 0

    def step():
        nonlocal calls
        calls += 1
        model(torch.randn(8, 64, device="cuda")).mean().backward()
        if calls % 16 == 0:
            model(torch.randn(1 << 20, 64, device="cuda")).mean().backward()

    def plain():
        model(torch.randn(8, 64, device="cuda")).mean().backward()

    return {"rarely": step, "always": plain}[kind]


@pytest.mark.parametrize("kind", ["rarely", "always"])
def test_what_a_functions_step_does_only_now_and_then_is_named(kind):
    predicted = predict(partial(rarely, kind), "T4")
    assert predicted.verdict() == (MAY_NOT_FIT if kind == "rarely" else FITS)
    named = ["comes only in some steps" in what and "calls % 16" in what for what in predicted.unknown]
    assert named == [True] * (kind == "rarely")


def asking(otherwise):
    def step():
        made = layer(torch.randn(8, 64, device="cuda"))
        if type(made) is not torch.Tensor:
            made = otherwise(made)
        made.mean().backward()

    layer = nn.Linear(64, 64).to("cuda")
    return step


def test_a_line_that_asks_for_the_exact_type_of_a_tensor_is_named():
    predicted = predict(partial(asking, lambda made: made.repeat(100, 1)), "T4")
    (why,) = predicted.unknown
    assert "exact type" in why and "if type(made) is not torch.Tensor" in why
    with pytest.raises(RuntimeError, match=r"has no attribute 'logits'.*ask isinstance"):
        predict(partial(asking, lambda made: made.logits), "T4")


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("by", ["grad", "backward"])
def test_what_a_pass_on_the_gpu_makes_waits_for_what_a_forward_pass_has_made(by):
    ran = []

    def step():
        x = torch.ones(8, requires_grad=True)
        made = x
        for _ in range(9):  # more than the pass makes
            made = made.exp()
        made.register_hook(lambda _: ran.append("forward"))
        total = x.square().sum()
        if by == "grad":
            (gradient,) = torch.autograd.grad(total, x, create_graph=True)
        else:
            total.backward(create_graph=True)
            gradient, x.grad = x.grad, None
        gradient.register_hook(lambda _: ran.append("penalty"))
        (made.sum() + gradient.square().sum()).backward()

    predict(lambda: step, "T4")
    assert ran[:2] == ["forward", "penalty"]
    ran.clear()
    step()
    assert ran == ["penalty", "forward"]  # as the CPU does
