"""Grouped products, as in a mixture of experts: shapes as PyTorch gives them, and what a GPU runs for them."""

import pytest
import torch

from effgpu.predicting.kinds import PRODUCT
from effgpu.predicting.predict import predict

grouped_mm = getattr(torch.nn.functional, "grouped_mm", torch._grouped_mm)
TOKENS, EXPERTS, WIDTH, HIDDEN = 64, 4, 32, 48
ENDS = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (TOKENS // EXPERTS)


def experts(dtype):
    """Both passes of a layer whose tokens are sorted by their expert."""

    def variant():
        weight = torch.nn.Parameter(torch.rand(EXPERTS, WIDTH, HIDDEN, dtype=dtype))
        rows, ends = torch.rand(TOKENS, WIDTH, dtype=dtype, requires_grad=True), ENDS.clone()
        return lambda: grouped_mm(rows, weight, offs=ends).sum().backward()

    return variant


def one_by_one(dtype):
    """The same, with a product for each expert."""

    def variant():
        weight = torch.nn.Parameter(torch.rand(EXPERTS, WIDTH, HIDDEN, dtype=dtype))
        rows = torch.rand(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
        return lambda: torch.cat([part @ each for part, each in zip(rows.chunk(EXPERTS), weight)]).sum().backward()

    return variant


def look(variant, gpu):
    """The FLOPs of its products, how many there are, and how often the CPU waits."""
    events = predict(variant, gpu).events
    products = [kernel for event in events for kernel in event.kernels if kernel.kind == PRODUCT]
    return sum(kernel.flops for kernel in products), len(products), sum(event.waits for event in events)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gpu", ["T4", "A100 80 GB", "H100", "RTX 5090"])
def test_experts_are_multiplied_one_by_one_after_a_wait_or_in_one_kernel(gpu, dtype):
    flops, products, waits = look(experts(dtype), gpu)
    expected, singly, _ = look(one_by_one(dtype), gpu)
    at_once = gpu == "H100" and dtype is torch.bfloat16
    assert flops == expected == 3 * 2 * TOKENS * WIDTH * HIDDEN
    assert (products, waits) == ((3, 0) if at_once else (singly, 3)) and singly == 3 * EXPERTS


def test_an_older_gpu_beside_one_that_has_the_kernel_gets_its_own_way():
    predicted = predict(experts(torch.bfloat16), ["A100 80 GB", "H100"])
    alone = [predict(experts(torch.bfloat16), gpu).time().expected for gpu in ("A100 80 GB", "H100")]
    assert [predicted.time(gpu).expected for gpu in ("A100 80 GB", "H100")] == pytest.approx(alone)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((TOKENS, WIDTH), (EXPERTS, WIDTH, HIDDEN)),
        ((EXPERTS, WIDTH, HIDDEN), (HIDDEN, TOKENS)),
        ((WIDTH, TOKENS), (TOKENS, HIDDEN)),
        ((EXPERTS, TOKENS, WIDTH), (EXPERTS, WIDTH, HIDDEN)),
    ],
)
def test_shapes_are_those_that_pytorch_gives(one, other):
    seen = []

    def variant():
        one_is, other_is = (torch.rand(shape, dtype=torch.bfloat16) for shape in (one, other))
        ends = None if len(one) == len(other) == 3 else ENDS.clone()
        return lambda: seen.append(grouped_mm(one_is, other_is, offs=ends))

    variant()()
    predict(variant, "H100")
    assert len({(made.shape, made.dtype) for made in seen}) == 1 and len(seen) > 1


def test_a_mixture_of_experts_of_transformers_is_predicted_in_each_format():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, vocab_size=100, num_local_experts=4)
    heads = dict(num_attention_heads=2, num_key_value_heads=2, use_cache=False)

    def variant(dtype):
        model = MixtralForCausalLM._from_config(MixtralConfig(**sizes, **heads), dtype=dtype)
        tokens = torch.zeros(2, 16, dtype=torch.long)
        return lambda: model(input_ids=tokens, labels=tokens).loss.backward()

    whole, half = (predict(lambda dtype=dtype: variant(dtype), "T4") for dtype in (torch.float32, torch.float16))
    assert 1.8 < whole.allocated / half.allocated < 2.2
    assert any("the tokens of an expert" in what for what in whole.assumptions) and not whole.unknown
