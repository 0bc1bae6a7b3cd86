"""Tests of effgpu.ops: operations by name, the bytes that they touch by arithmetic, and launches."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from effgpu.measuring.ops import Ops, count_ops


def training(optimizer=torch.optim.SGD, **options):
    """A linear layer on four rows of eight numbers, and the optimizer."""
    model, batch = nn.Linear(8, 8, bias=False), torch.ones(4, 8)
    update = optimizer(model.parameters(), lr=0.1, **options)

    def step():
        model(batch).sum().backward()
        update.step()
        update.zero_grad()

    return step


def test_forward_backward_and_optimizer_count():
    counted = count_ops(training(foreach=False))
    assert counted == {"mm": 2, "sum": 1, "ones_like": 1, "add_": 1}
    assert isinstance(counted, Counter) and isinstance(counted, Ops) and counted.launches is None
    assert repr(counted).startswith("Ops({'mm': 2")


def test_an_optimizer_calls_one_operation_for_all_tensors_or_one_each():
    model = make_layers()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    each, together = (torch.optim.SGD(model.parameters(), foreach=foreach) for foreach in (False, True))
    assert count_ops(each.step) == {"add_": 6}
    assert count_ops(together.step) == {"_foreach_add_": 1}
    assert count_ops(each.step) - count_ops(together.step) == {"add_": 6}


def make_layers():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def test_what_a_checkpoint_computes_twice_counts_twice():
    model, batch = make_layers(), torch.ones(4, 8)
    assert count_ops(lambda: model(batch).sum().backward())["addmm"] == 3
    again = lambda: checkpoint(model, batch, use_reentrant=False).sum().backward()
    assert count_ops(again)["addmm"] == 3 + 2  # it stops before the last layer, whose output nothing saves


def test_what_runs_no_kernel_does_not_count():
    x = torch.ones(4, 8)
    assert count_ops(lambda: x.t().view(2, 16)[0].detach() if x.t().is_contiguous() else x.view(32).detach()) == {}
    assert count_ops(lambda: (torch.empty(3), torch.empty_like(x), x.new_empty(2))) == {}
    with torch.profiler.record_function("a name"):
        assert count_ops(lambda: torch.profiler.record_function("a name").__enter__()) == {}


def test_bytes_are_those_read_and_written():
    x, y, size = torch.ones(10, 100), torch.ones(10, 100), 4000
    expected = [
        (lambda: x + y, "add", 3 * size),
        (lambda: x.add_(y), "add_", 3 * size),
        (lambda: x.exp(), "exp", 2 * size),
        (lambda: x.zero_(), "zero_", size),
        (lambda: x.copy_(y), "copy_", 2 * size),
        (lambda: torch.add(x, y, out=y), "add", 3 * size),
        (lambda: x + y[0, 0].expand(10, 100), "add", 2 * size + size),
        (lambda: torch.ones(1).expand(10, 100).add(y), "add", 2 * size + 4),
        (lambda: x.double(), "_to_copy", 3 * size),
        (lambda: torch._foreach_add_([x, y], 1.0), "_foreach_add_", 4 * size),
        (lambda: x @ y.t(), "mm", 2 * size + 400),
    ]
    for step, name, touched in expected:
        assert count_ops(step).bytes[name] == touched, name


def test_a_key_groups_and_selects():
    model, batch = make_layers(), torch.ones(4, 8)
    step = lambda: model(batch).sum().backward()
    shapes = count_ops(step, key=lambda name, tensors: (name, tensors[-1].shape) if "mm" in name else None)
    assert shapes[("addmm", (8, 8))] == 3 and set(shapes) == set(shapes.bytes)
    assert {name for name, _ in shapes} == {"addmm", "mm"}
    assert count_ops(step, key=lambda name, tensors: "all").total() == count_ops(step).total()
    assert count_ops(step, key=lambda name, tensors: None) == {}


def test_an_operation_of_another_library_has_its_namespace_in_its_name():
    @torch.library.custom_op("effgpu_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(10)
    counted = count_ops(lambda: twice(x))
    assert counted["effgpu_tests::twice"] == 1 and counted.bytes["effgpu_tests::twice"] == 80


def test_a_compiled_function_counts_as_what_it_is_compiled_from_and_stays_compiled():
    graphs = []
    compiled = torch.compile(make_layers(), backend=lambda graph, _: graphs.append(graph) or (lambda *_: [batch.sin()]))
    batch = torch.ones(4, 8)
    for _ in range(2):  # before and after it is compiled
        assert count_ops(lambda: compiled(batch)) == {"addmm": 3}
        compiled(batch)
    assert len(graphs) == 1


def test_what_is_no_step_is_refused():
    with pytest.raises(TypeError, match=r"^step: expected a function that is called without arguments, got Linear$"):
        count_ops(nn.Linear(8, 8))
    with pytest.raises(TypeError, match="expected a training step that does its work when called, got a function"):
        count_ops(training)


def test_launches_are_those_of_kernels_and_of_graphs(simulate_gpu, monkeypatch):
    keys = {"cudaLaunchKernel": 5, "cudaLaunchKernelExC": 3, "cuLaunchKernelEx": 2, "cudaGraphLaunch": 1}
    keys |= {"hipExtModuleLaunchKernel": 10, "cudaLaunchCooperativeKernel": 100}
    others = {"cudaLaunchHostFunc": 1000, "aten::mm": 1000, "cudaMemcpyAsync": 1000, "cudaStreamSynchronize": 1000}
    calls = []

    @contextmanager
    def profile(activities):
        yield SimpleNamespace(
            key_averages=lambda: [SimpleNamespace(key=key, count=count) for key, count in (keys | others).items()]
        )

    monkeypatch.setattr(torch.profiler, "profile", profile)
    assert count_ops(lambda: calls.append(1), launches=True).launches is None, "on a CPU"
    simulate_gpu()
    assert count_ops(lambda: calls.append(1)).launches is None and len(calls) == 2
    assert count_ops(lambda: calls.append(1), launches=True).launches == 121 and len(calls) == 4
    keys.clear()
    assert count_ops(lambda: calls.append(1), launches=True).launches == 0
    others = {"aten::mm": 1000}
    assert count_ops(lambda: calls.append(1), launches=True).launches is None, "the profiler sees nothing of the GPU"


@pytest.mark.gpu
def test_launches_on_this_gpu():
    x = torch.ones(1000, device="cuda")
    counted = count_ops(lambda: [x.add_(1) for _ in range(7)], launches=True)
    assert counted == {"add_": 7} and counted.launches == 7
