"""Each private name of PyTorch that effgpu stands on is there and does what it did; and no module uses another one."""

import ast
import inspect
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from effgpu.measuring import torch_internals
from effgpu.measuring.torch_internals import CHECKED

PACKAGE = Path(torch_internals.__file__).parents[1]
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "torch_internals"]
OBJECTS = {  # of attributes that only an object has
    "torch._ops.OpOverload": torch.ops.aten.mm.default,
    "torch.autocast": torch.autocast("cpu"),
    "torch.nn.Module": torch.nn.Linear(1, 1),
    "torch.UntypedStorage": torch.zeros(1).untyped_storage(),
}


def takes(*names):
    return lambda function: list(inspect.signature(function).parameters)[: len(names)] == list(names)


WORKS = {  # what is not just something to call
    "torch.optim.optimizer._global_optimizer_post_hooks": lambda hooks: type(hooks) is OrderedDict,
    "torch.UntypedStorage._cdata": lambda key: isinstance(key, int),
    "torch._C.DispatchKey": lambda key: key.AutocastCPU,
    "torch._C._autograd": lambda module: "fail_if_non_empty" in module._saved_tensors_hooks_disable.__doc__,
    "torch.utils.data._utils.worker": lambda module: module._worker_info is None and callable(module.WorkerInfo),
    "torch._C._nn": lambda module: callable(module.binary_cross_entropy),
    "torch._C._current_graph_task_id": lambda ask: ask() == -1,
    "torch._dynamo.convert_frame.FRAME_COUNTER": lambda count: count >= 0,
    "torch._dynamo.callback.callback_handler": lambda handler: handler.start_callbacks is not handler.end_callbacks,
    "torch._dynamo.eval_frame": inspect.ismodule,
    "torch._dynamo.eval_frame._callback_from_stance": takes("callback"),
    "torch._dynamo.pgo._CODE_STATE": lambda state: state is None or hasattr(state, "keys"),
    "torch._dynamo.utils.counters": lambda counters: counters["stats"]["no such count"] == 0,
    "torch._functorch.config.activation_memory_budget": lambda budget: budget == 1,
    "torch._ops.OpOverload._schema": lambda schema: (
        schema.name == "aten::mm" and schema.arguments[0].alias_info is None
    ),
    "torch._subclasses.fake_tensor": lambda module: issubclass(module.DynamicOutputShapeException, RuntimeError),
    "torch._subclasses.fake_tensor.FakeTensor": lambda kind: issubclass(kind, torch.Tensor),
    "torch.autocast._cache_enabled": lambda on: on is True,
    "torch.autocast._enabled": lambda on: on is True,
    "torch.cuda.amp.common.amp_definitely_not_available": takes(),
    "torch.nn.Module._apply": takes("fn", "recurse"),
    "torch.nn.Module._buffers": lambda buffers: buffers == {},
    "torch.nn.Module._parameters": lambda parameters: list(parameters) == ["weight", "bias"],
    "torch.optim.optimizer._default_to_fused_or_foreach": takes("params", "differentiable", "use_fused"),
    "torch.overrides._len_torch_function_stack": lambda ask: ask() == 0,
    "torch.utils.data.DataLoader._get_iterator": takes("self"),
    "torch.utils.data.dataloader._BaseDataLoaderIter": lambda kind: (
        callable(kind._next_index)
        and iter(torch.utils.data.DataLoader([1, 2, 3], 2))._sampler_iter.__next__() == [0, 1]
    ),
}


@pytest.mark.parametrize("path", CHECKED)
def test_it_is_there_and_does_what_it_did(path):
    owner, _, name = path.rpartition(".")
    if name == "_cuda_clearCublasWorkspaces" and not torch.backends.cuda.is_built():
        pytest.skip("a PyTorch without CUDA")
    value = getattr(OBJECTS[owner], name) if owner in OBJECTS else getattr(torch_internals, name)
    assert WORKS.get(path, callable)(value), f"PyTorch {torch.__version__} has another {path}"


def test_one_that_is_gone_is_named(monkeypatch):
    monkeypatch.delattr(torch._subclasses.fake_tensor, "FakeTensor")
    with pytest.raises(
        ImportError, match=r"^PyTorch .* has no torch\._subclasses\.fake_tensor\.FakeTensor: expected it as "
    ):
        from effgpu.measuring.torch_internals import FakeTensor  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        from effgpu.measuring.torch_internals import no_such_name  # noqa: F401


def private_names(tree):
    """The dotted names of PyTorch's that a module names with a private part."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from (name for name in names if name.startswith("torch.") and "._" in name and "__" not in name)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_no_other_module_names_one(path):
    assert not list(private_names(ast.parse(path.read_text())))


def test_every_one_is_used():
    code = "\n".join(path.read_text() for path in [*MODULES, Path(torch_internals.__file__)])
    unused = [path for path in CHECKED if code.count(path.rpartition(".")[2]) < 2]
    assert not unused


def test_a_private_name_is_seen():
    seen = "import torch._dynamo\nfrom torch._C import a\nfrom torch.utils import _b\ntorch.c._d()\ntorch.e.f\n"
    assert len(list(private_names(ast.parse(seen)))) == 4
