"""Tests of effgpu.flops: FLOPs by arithmetic, the matmul peak from the times, and the share of it that is used."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from effgpu.measuring import flops
from effgpu.measuring.flops import count_flops, matmul_peak, mfu


@given(rows=st.integers(1, 16), width=st.integers(1, 16), out=st.integers(1, 16), gradient=st.booleans())
def test_flops_of_a_linear_layer_by_arithmetic(rows, width, out, gradient):
    model = torch.nn.Linear(width, out)
    batch = torch.randn(rows, width, requires_grad=gradient)
    product = 2 * rows * width * out  # one for the output, one for the weight's gradient, one for the batch's
    assert count_flops(lambda: model(batch)) == product
    assert count_flops(lambda: model(batch).sum().backward()) == (3 if gradient else 2) * product


def test_what_a_checkpoint_computes_twice_counts_twice():
    model, batch = torch.nn.Linear(8, 8), torch.randn(4, 8)
    step = lambda: checkpoint(lambda x: model(x).tanh(), batch, use_reentrant=False).sum().backward()
    assert count_flops(step) == 3 * 2 * 4 * 8 * 8


def test_attention_is_two_products_and_five_in_its_backward_pass():
    q, k, v = (torch.randn(2, 3, 16, 8, requires_grad=True) for _ in range(3))  # [batch, heads, length, width]
    product = 2 * 2 * 3 * 16 * 16 * 8
    attention = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert count_flops(attention) == 2 * product
    assert count_flops(lambda: attention().sum().backward()) == (2 + 5) * product, "the scores are computed again"


def test_a_compiled_function_counts_as_what_it_is_compiled_from_and_stays_compiled():
    graphs, batch = [], torch.ones(4, 8)
    compiled = torch.compile(torch.nn.Linear(8, 8), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    assert count_flops(lambda: compiled(batch)) == 2 * 4 * 8 * 8
    compiled(batch)
    assert len(graphs) == 1, "PyTorch 2.9 does not compile what it met under a dispatch mode"


def test_a_variant_in_place_of_its_step_is_refused():
    with pytest.raises(TypeError, match="expected a training step that does its work when called, got a function"):
        count_flops(lambda: lambda: None)
    with pytest.raises(TypeError, match=r"^step: expected a function that is called without arguments, got int$"):
        count_flops(3)


def test_matmul_peak_is_the_flops_over_the_best_time(monkeypatch):
    monkeypatch.setattr(flops, "time_fastest", lambda step, seconds: 0.25)
    assert matmul_peak(size=8) == 2 * 8**3 / 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_of_products_of_the_dtype_asked_for(dtype, monkeypatch):
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b, out: seen.append((a.dtype, b.dtype, out.dtype, a.shape)))
    matmul_peak(dtype, size=8, seconds=0.001)
    assert set(seen) == {(dtype, dtype, dtype, (8, 8))}


@pytest.mark.parametrize("argument", ["flops", "seconds", "peak"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), None, "1"])
def test_mfu_needs_positive_numbers(argument, value):
    with pytest.raises(ValueError, match=f"^{argument}: expected a positive number, got"):
        mfu(**{"flops": 1e9, "seconds": 1, "peak": 1e12} | {argument: value})


@pytest.mark.gpu
def test_matmul_peak_is_higher_in_bf16_where_the_gpu_has_it():
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bf16")
    assert matmul_peak(torch.bfloat16) > 1.5 * matmul_peak(torch.float32) > 1e12
