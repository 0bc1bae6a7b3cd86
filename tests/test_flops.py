"""Tests of effgpu.measuring.flops: FLOPs by arithmetic."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from effgpu.measuring.flops import count_flops


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
