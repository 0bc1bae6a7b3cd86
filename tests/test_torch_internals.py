"""Each private name of PyTorch that effgpu stands on is there and does what it did; and no module uses another one."""

import ast
import inspect
import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from effgpu.attaching import replacing
from effgpu.measuring import torch_internals
from effgpu.measuring.torch_internals import CHECKED
from effgpu.predicting.predict import predict

PACKAGE = Path(torch_internals.__file__).parents[1]
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "torch_internals"]
OBJECTS = {  # of attributes that only an object has
    "torch._ops.OpOverload": torch.ops.aten.mm.default,
    "torch.Tensor": torch.ones(2)[:1],
    "torch.autocast": torch.autocast("cpu"),
    "torch.autograd.graph.Node": torch.ones(1, requires_grad=True).sum().grad_fn,
    "torch.nn.Module": torch.nn.Linear(1, 1),
    "torch.UntypedStorage": torch.zeros(1).untyped_storage(),
}

ELSEWHERE = {  # of Python and of other libraries
    *("_SubParsersAction", "_current_frames", "_exit", "_fields", "_getframe", "_option_string_actions", "_replace"),
    *("_atomic_save", "_batched_nms_coordinate_trick", "_batched_nms_vanilla", "_file_openers", "_functions"),
    *("_TemporaryFileWrapper", "_lazy_load", "_run_exitfuncs", "_save_checkpoint", "_target", "_worker"),
}
OF_OTHER_VERSIONS = {
    *("profile.events", "profile.export_memory_timeline"),
    *("torch.profiler.itt.range_end", "torch.profiler.itt.range_start"),
}


def takes(*names):
    return lambda function: list(inspect.signature(function).parameters)[: len(names)] == list(names)


def source(cached):
    return inspect.getsource(cached.__wrapped__)


WORKS = {  # what is not just something to call
    "torch.optim.optimizer._global_optimizer_post_hooks": lambda hooks: type(hooks) is OrderedDict,
    "torch.Tensor._base": lambda base: base.shape == (2,),
    "torch.UntypedStorage._cdata": lambda key: isinstance(key, int),
    "torch._C.DispatchKey": lambda key: key.AutocastCPU,
    "torch._C._autograd": lambda module: (
        "fail_if_non_empty" in module._saved_tensors_hooks_disable.__doc__
        and module._saved_tensors_hooks_get_disabled_error_message() is None
    ),
    "torch.utils._foreach_utils": lambda module: torch.Tensor in module._foreach_supported_types,
    "torch.utils.data._utils.worker": lambda module: module._worker_info is None and callable(module.WorkerInfo),
    "torch._C._nn": lambda module: callable(module.binary_cross_entropy),
    "torch._C._current_graph_task_id": lambda ask: ask() == -1,
    "torch._dynamo.convert_frame.FRAME_COUNTER": lambda count: count >= 0,
    "torch._dynamo.callback.callback_handler": lambda handler: handler.start_callbacks is not handler.end_callbacks,
    "torch._dynamo.eval_frame": inspect.ismodule,
    "torch._dynamo.eval_frame._callback_from_stance": takes("callback"),
    "torch._dynamo.eval_frame._stance": lambda stance: stance.stance == "default",
    "torch._dynamo.eval_frame.TorchPatcher.patch": lambda patch: "set_default_validate_args(False)" in source(patch),
    "torch.distributions.Distribution._validate_args": lambda validates: validates in (True, False),
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
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": lambda on: on is False,
    "torch.nn.Module._apply": takes("fn", "recurse"),
    "torch.nn.Module._buffers": lambda buffers: buffers == {},
    "torch.nn.Module._forward_hooks": lambda hooks: hooks == {},
    "torch.nn.Module._forward_pre_hooks": lambda hooks: hooks == {},
    "torch.nn.parameter.UninitializedTensorMixin._allowed_methods": lambda methods: torch.Tensor.cuda in methods,
    "torch.nn.Module._parameters": lambda parameters: list(parameters) == ["weight", "bias"],
    "torch.optim.optimizer._default_to_fused_or_foreach": takes("params", "differentiable", "use_fused"),
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": lambda group: (
        list(group([[torch.ones(2)]])) == [(torch.device("cpu"), torch.float32)]
    ),
    "torch._GLOBAL_DEVICE_CONTEXT": lambda held: isinstance(vars(held), dict),
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


def defined(tree):
    """The names that a module gives."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg


def asked_of_objects(tree):
    """The private names that a module asks objects for, as attributes or as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not ast.unparse(node).startswith("aten."):
            yield node.attr
        strings = ()
        if (
            isinstance(node, ast.Tuple) and len(node.elts) == 3 and not isinstance(node.elts[0], ast.Constant)
        ):  # owner, name, what stands there
            strings = node.elts[1:2]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            strings = node.args[1:2]
        elif isinstance(node, ast.Compare) and ast.unparse(node.left) == "name":
            strings = node.comparators
        yield from (each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str))


def foreign_names(*trees, own=frozenset()):
    """Private names that are asked of objects and given by no module."""
    private = {name for tree in trees for name in asked_of_objects(tree) if re.fullmatch("_[a-zA-Z]\\w*", name)}
    return private.difference(own, *map(defined, trees))


def test_what_is_asked_of_pytorchs_objects_is_named():
    named = re.findall(r"\w+", Path(torch_internals.__file__).read_text())
    found = foreign_names(*(ast.parse(path.read_text()) for path in MODULES), own=ELSEWHERE)
    assert {name for name in found.difference(named) if not hasattr(torch.ops.aten, name)} == set()


def test_a_private_name_of_an_object_is_seen():
    code = "a._b.c(getattr(d, '_e'))\nyield f, '_g', h\nname == '_i'\nself._own = self._own\nx._x()\nprint('_y')"
    assert foreign_names(ast.parse(code), own={"_x"}) == {"_b", "_e", "_g", "_i"}


@pytest.mark.skipif(torch.__version__.startswith(("2.9.", "2.10.", "2.11.", "2.12.", "2.13.")), reason="an older one")
def test_all_that_is_replaced_in_pytorch_is_there(monkeypatch):
    """But for what other versions have: a rename would leave a replacement out, and nobody would notice."""
    monkeypatch.setattr(replacing, "left_out", set())
    predict(lambda: lambda: torch.ones(2, device="cuda").sum(), "T4")
    assert replacing.left_out <= OF_OTHER_VERSIONS
    with replacing.replaced([(torch.cuda, "no_such_name", None)]):
        assert "torch.cuda.no_such_name" in replacing.left_out and not hasattr(torch.cuda, "no_such_name")


def test_every_one_is_used():
    code = "\n".join(path.read_text() for path in [*MODULES, Path(torch_internals.__file__)])
    unused = [path for path in CHECKED if code.count(path.rpartition(".")[2]) < 2]
    assert not unused


def test_a_private_name_is_seen():
    seen = "import torch._dynamo\nfrom torch._C import a\nfrom torch.utils import _b\ntorch.c._d()\ntorch.e.f\n"
    assert len(list(private_names(ast.parse(seen)))) == 4
