"""Tests of effgpu.measuring.ops: operations by name, and the bytes that they touch by arithmetic."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from effgpu.measuring.ops import bytes_touched, count_ops


def test_forward_backward_and_optimizer_count():
    model, batch = nn.Linear(8, 8, bias=False), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    counted = count_ops(lambda: (model(batch).sum().backward(), optimizer.step()))
    assert counted == {"mm": 2, "sum": 1, "ones_like": 1, "add_": 1}
    assert isinstance(counted, Counter)


def test_an_optimizer_calls_one_operation_for_all_tensors_or_one_each():
    model = make_layers()
    model(torch.ones(4, 8)).sum().backward()
    each, together = (torch.optim.SGD(model.parameters(), foreach=foreach) for foreach in (False, True))
    assert count_ops(each.step) == {"add_": 6}
    assert count_ops(together.step) == {"_foreach_add_": 1}


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


TWO = torch.tensor([1, 7])  # 16 bytes


@pytest.mark.parametrize(
    ("name", "arguments", "touched"),
    [  # of tensors with a size of 4,000 bytes
        ("add.Tensor", lambda x, y: (x, y), 3),
        ("add_.Tensor", lambda x, y: (x, y), 3),
        ("zero_.default", lambda x, y: (x,), 1),
        ("copy_.default", lambda x, y: (x, y), 2),
        ("add.Tensor", lambda x, y: (x, torch.ones(1).expand(10, 100)), 2.001),
        ("add.out", lambda x, y: (x, x), 3),
        ("_foreach_add_.Scalar", lambda x, y: ([x, y], 1.0), 4),
        ("mm.default", lambda x, y: (x, y.t()), 2.1),
        ("embedding.default", lambda x, y: (x, TWO), 0.4 + 0.004),
        ("index_select.default", lambda x, y: (x, 0, TWO), 0.4 + 0.004),
        ("index.Tensor", lambda x, y: (x, [torch.arange(10).repeat(20)]), 1 + 20 + 0.4),
        ("index_put_.default", lambda x, y: (x, [TWO], y[:2]), 0.6 + 0.004),
        ("index_add_.default", lambda x, y: (x, 0, TWO, y[:2]), 0.6 + 0.004),
        ("add_.Tensor", lambda x, y: (x, torch.sparse_coo_tensor(TWO[None], y[:2], (10, 100))), 0.6 + 3 * 0.004),
    ],
)
def test_bytes_are_those_read_and_written(name, arguments, touched):
    packet, overload = name.split(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload)
    x, y = torch.ones(10, 100), torch.ones(10, 100)
    args, kwargs = arguments(x, y), {"out": y} if overload == "out" else {}
    assert bytes_touched(operation, packet, args, kwargs, operation(*args, **kwargs)) == 4000 * touched


def test_a_key_groups_and_selects():
    model, batch = make_layers(), torch.ones(4, 8)
    step = lambda: model(batch).sum().backward()
    shapes = count_ops(step, key=lambda name, tensors: (name, tensors[-1].shape) if "mm" in name else None)
    assert shapes[("addmm", (8, 8))] == 3
    assert {name for name, _ in shapes} == {"addmm", "mm"}
    assert count_ops(step, key=lambda name, tensors: "all").total() == count_ops(step).total()
    assert count_ops(step, key=lambda name, tensors: None) == {}


def test_an_operation_of_another_library_has_its_namespace_in_its_name():
    assert count_ops(lambda: torch.ops.prims.neg(torch.ones(10)))["prims::neg"] == 1


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
        count_ops(lambda: lambda: None)
