"""The private names of PyTorch that effgpu stands on: all of them, and the version that each was last checked with.

There is no public way to what they do. `from effgpu.measuring.torch_internals import FakeTensor` finds one by the last
part of its name. A new PyTorch may change any: tests/test_torch_internals.py tries them one by one, and `make floor`
does so on the oldest PyTorch that `pyproject.toml` admits.
"""

import functools
import pkgutil
import sys

import torch

CHECKED = {
    # to measure: cuBLAS's workspaces, the recorder of allocations, the calls of operations, compiled shapes
    "torch._C._cuda_clearCublasWorkspaces": "2.14.1",  # pytorch/pytorch#184084
    "torch._C._profiler._ExperimentalConfig": "2.14.1",
    "torch.autograd._enable_profiler_legacy": "2.14.1",
    "torch.autograd._disable_profiler_legacy": "2.14.1",
    "torch.utils._python_dispatch.TorchDispatchMode": "2.14.1",
    "torch._ops.OpOverload._schema": "2.14.1",
    "torch._dynamo.pgo._CODE_STATE": "2.14.1",
    "torch._dynamo.utils.counters": "2.14.1",
    "torch._dynamo.convert_frame.FRAME_COUNTER": "2.14.1",
    # to let lessons take turns on a GPU
    "torch._dynamo.callback.callback_handler": "2.14.1",
    "torch.cuda._lazy_call": "2.14.1",
    # to run a step in 16 bits
    "torch._C._nn": "2.14.1",
    # to see a script's steps
    "torch.amp.GradScaler._maybe_opt_step": "2.14.1",
    "torch.utils.data.dataloader._BaseDataLoaderIter": "2.14.1",  # its _sampler_iter and _next_index
    # to predict: fake tensors, and what cannot run on them
    "torch._subclasses.fake_tensor": "2.14.1",
    "torch._subclasses.fake_tensor.FakeTensor": "2.14.1",
    "torch._subclasses.fake_tensor.FakeTensorMode": "2.14.1",
    "torch._subclasses.fake_tensor.is_fake": "2.14.1",
    "torch._guards.detect_fake_mode": "2.14.1",
    "torch._subclasses.fake_tensor.in_kernel_invocation_manager": "2.14.1",
    "torch.utils._python_dispatch._disable_current_modes": "2.14.1",
    "torch.overrides._len_torch_function_stack": "2.14.1",
    "torch.overrides._pop_mode_temporarily": "2.14.1",
    "torch.overrides._get_current_function_mode_stack": "2.14.1",
    "torch.utils._device.DeviceContext": "2.14.1",
    "torch._GLOBAL_DEVICE_CONTEXT": "2.14.1",
    "torch.utils._device._device_constructors": "2.14.1",
    "torch.utils._pytree.tree_map_only": "2.14.1",
    "torch.nn.modules.module._has_any_global_hook": "2.14.1",
    "torch.nn.parameter.UninitializedTensorMixin._allowed_methods": "2.14.1",
    "torch.utils._pytree.TreeSpec": "2.14.1",
    "torch.utils._pytree.tree_flatten": "2.14.1",
    "torch.utils._pytree.tree_unflatten": "2.14.1",
    "torch.nn.Module._forward_hooks": "2.14.1",
    "torch.nn.Module._forward_pre_hooks": "2.14.1",
    "torch._C.DisableTorchFunction": "2.14.1",
    "torch._C.DispatchKey": "2.14.1",
    "torch._C.DispatchKeySet": "2.14.1",
    "torch._C._ExcludeDispatchKeyGuard": "2.14.1",
    "torch._library.fake_impl.FakeImplCtx": "2.14.1",
    "torch.Tensor._make_subclass": "2.14.1",
    "torch.Tensor._base": "2.14.1",
    "torch.Tensor._coalesced_": "2.14.1",
    "torch.Tensor._indices": "2.14.1",
    "torch.Tensor._values": "2.14.1",
    "torch.autograd.graph.Node._sequence_nr": "2.14.1",
    "torch._C._FunctionBase._set_sequence_nr": "2.14.1",  # of each Node
    "torch._C._autograd._get_sequence_nr": "2.14.1",
    "torch.cuda.memory._set_allocator_settings": "2.14.1",
    "torch.UntypedStorage._cdata": "2.14.1",
    "torch._C._are_functorch_transforms_active": "2.14.1",
    "torch._C._functorch.get_unwrapped": "2.14.1",
    "torch._C._functorch.is_functorch_wrapped_tensor": "2.14.1",
    "torch._C._get_sdp_priority_order": "2.14.1",
    "torch._C._current_graph_task_id": "2.14.1",
    "torch._C._current_autograd_node": "2.14.1",
    "torch._functorch.config.activation_memory_budget": "2.14.1",
    "torch._dynamo.eval_frame": "2.14.1",
    "torch._dynamo.eval_frame._callback_from_stance": "2.14.1",
    "torch._dynamo.eval_frame._stance": "2.14.1",
    "torch._dynamo.eval_frame.TorchPatcher.patch": "2.14.1",
    "torch.distributions.Distribution._validate_args": "2.14.1",
    "torch._dynamo.eval_frame.OptimizedModule": "2.14.1",  # and _torchdynamo_disable of what is not to be compiled
    "torch.autograd._engine_run_backward": "2.14.1",
    "torch.autocast._enabled": "2.14.1",
    "torch.autocast._cache_enabled": "2.14.1",
    "torch.cuda.amp.common.amp_definitely_not_available": "2.14.1",
    "torch.library.Library._destroy": "2.14.1",
    "torch._C._nn._parse_to": "2.14.1",
    "torch.nn.attention.flex_attention._validate_device": "2.14.1",
    "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": "2.14.1",
    "torch.nn.Module._apply": "2.14.1",
    "torch.nn.Module._buffers": "2.14.1",
    "torch.nn.Module._parameters": "2.14.1",
    "torch.optim.optimizer._global_optimizer_post_hooks": "2.14.1",
    "torch.optim.optimizer._default_to_fused_or_foreach": "2.14.1",
    "torch.optim.optimizer._group_tensors_by_device_and_dtype": "2.14.1",
    "torch.utils._foreach_utils": "2.14.1",  # its _foreach_supported_types
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": "2.14.1",
    "torch.utils.data.DataLoader._get_iterator": "2.14.1",
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter": "2.14.1",  # _next_data, _next_index, _dataset_fetcher
    "torch.utils.data._utils.worker": "2.14.1",  # its _worker_info
    # to diagnose: the hooks that see what autograd keeps
    "torch._C._autograd": "2.14.1",  # its _saved_tensors_hooks_disable, _saved_tensors_hooks_get_disabled_error_message
}
_PATHS = {path.rpartition(".")[2]: path for path in CHECKED}


@functools.cache
def _find_owner(path: str) -> object:
    return pkgutil.resolve_name(path)


def __getattr__(name: str) -> object:
    if name not in _PATHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path = _PATHS[name]
    try:
        owner, _, last = path.rpartition(".")
        return getattr(_find_owner(owner), last)
    except AttributeError as error:
        checked = f"expected it as in PyTorch {CHECKED[path]}, with which effgpu was checked"
        raise ImportError(f"PyTorch {torch.__version__} has no {path}: {checked}") from error


def storage_key(of: torch.Tensor | torch.UntypedStorage) -> int:
    """What tells a storage, or that of a tensor, from all others that are alive."""
    return (of.untyped_storage() if isinstance(of, torch.Tensor) else of)._cdata


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to the GPU's allocator. A PyTorch without CUDA has none."""
    getattr(torch._C, "_cuda_clearCublasWorkspaces", int)()


def has_compiled() -> bool:
    """Whether torch.compile has met any code since it was loaded or reset."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and getattr(frames, "FRAME_COUNTER", 1) > 0


def exchange_compiled_shapes(shapes: object) -> object:
    """Give torch.compile what it knew of a variant's shapes, and return what it knew before.

    It turns a size dynamic once it has seen two values of it in one piece of code: the batch of another variant must
    not count (torch/_dynamo/pgo.py).
    """
    pgo = sys.modules.get("torch._dynamo.pgo")
    if not hasattr(pgo, "_CODE_STATE"):
        return None
    before, pgo._CODE_STATE = pgo._CODE_STATE, shapes
    return before
