"""Kernels of the simulated GPU: the CPU does each operation, on the bytes of the CUDA tensors, which are the host's.

`install()` puts a dispatch mode under everything else, so autograd, autocast, the caching allocator and its statistics
are those of a GPU. What only a GPU has (its attention, cuDNN's batch norm) is done with what a CPU has. torch.compile
leaves a function as it is, and the profiler sees no GPU. CUDA graphs and sparse tensors, which no lesson uses, fail.
"""

import contextlib
import ctypes
import functools

import torch
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch.autograd import profiler
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

aten = torch.ops.aten
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
# Where a GPU takes a CPU's tensor, too.
_MIXED = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_foreach_copy_"}
# What launches no kernel.
_WITHOUT_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_"}
_WITHOUT_KERNEL |= {"detach", "_unsafe_view", "record_stream", "_pin_memory", "is_pinned", "is_same_size"}
_WITHOUT_KERNEL |= {"sym_size", "sym_stride", "sym_numel", "sym_storage_offset", "_resize_output_", "lift_fresh"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}  # slow on a CPU in 16 bits


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU's tensor on the same bytes."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    bytes_ = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(bytes_, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_gpu(tensor: torch.Tensor, inputs: list[torch.Tensor] = ()) -> torch.Tensor:
    """A GPU's tensor with a CPU's values; on the bytes of an input if these are the CPU's, too."""
    address = tensor.untyped_storage().data_ptr()
    for given in inputs if address else ():
        if given.untyped_storage().data_ptr() == address:
            empty = torch.empty(0, dtype=tensor.dtype, device=CUDA)
            return empty.set_(given.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # a part, or with gaps
        tensor = tensor.contiguous()
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
    if tensor.numel():
        ctypes.memmove(result.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    return result


class Kernels(TorchDispatchMode):
    """The CPU in the place of the GPU."""

    supports_higher_order_operators = True  # FlexAttention

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(map(is_traceable_wrapper_subclass, tensors)):
            return NotImplemented  # the type does it itself, with operations that come here
        cuda = [tensor for tensor in tensors if tensor.is_cuda]
        if isinstance(operation, HigherOrderOperator):
            with self:  # PyTorch's form in plain operations
                return operation.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        device = kwargs.get("device")
        to_gpu = bool(cuda) if device is None else torch.device(device).type == "cuda"
        name = operation._schema.name.partition("::")[2]
        if not (cuda or to_gpu) or name in _WITHOUT_KERNEL:
            return operation(*args, **kwargs)
        if written := _written_in_python(operation, name):
            with self:
                return written(*args, **kwargs)
        if operation.is_view:
            return operation(*args, **kwargs)
        if cuda and device is None and name not in _MIXED and any(t.dim() and not t.is_cuda for t in tensors):
            raise RuntimeError(f"Expected all tensors to be on the same device: cuda:0 and cpu in {operation}")
        return self._compute(operation, name, args, kwargs, cuda, to_gpu)

    def _compute(self, operation, name, args, kwargs, cuda, to_gpu):
        stand_ins = {}

        def replace(value):
            if isinstance(value, torch.Tensor):
                stand_in = on_cpu(value) if value.is_cuda else value
                stand_ins[id(stand_in)] = stand_in, value
                return stand_in
            return CPU if isinstance(value, torch.device) and value.type == "cuda" else value

        def put_back(value):
            if id(value) in stand_ins:  # changed in place
                return stand_ins[id(value)][1]
            return on_gpu(value, cuda) if to_gpu else value

        inputs, options = tree_map(replace, (args, kwargs))
        options = {key: value for key, value in options.items() if key != "pin_memory"}
        launch = profiler.record_function("cudaLaunchKernel") if torch.autograd._profiler_enabled() else None
        with launch or contextlib.nullcontext():
            return tree_map_only(torch.Tensor, put_back, _run(operation, name, inputs, options))


@functools.cache
def _written_in_python(operation, name):
    """What an operation consists of, if PyTorch tells: operations that come here again."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd"):
        return operation.decompose
    custom = None if name in _GPU_ONLY else OPDEFS.get(operation._schema.name)
    return custom and custom._init_fn


def _run(operation, name, args, kwargs):
    if name in _GPU_ONLY:
        return _in_fp32(functools.partial(_GPU_ONLY[name], **kwargs), args, {})
    if name in _PRODUCTS:
        return _in_fp32(operation, args, kwargs)
    if name in ("_softmax", "_log_softmax"):
        tensor, dim, to_float = args
        return operation(tensor.float() if to_float else tensor, dim, False)
    if name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        gradient, output, dim, dtype = args
        return operation(gradient, output, dim, gradient.dtype).to(dtype)
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return _drawn(operation, args, kwargs)
    return operation(*args, **kwargs)


def _in_fp32(operation, args, kwargs):
    """A CPU's products in 16 bits are slow: widen what goes in, round what comes out."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    half = next((t.dtype for t in tensors if t.dtype in (torch.float16, torch.bfloat16)), None)

    def widen(tensor):
        return tensor.float() if tensor.dtype is half else tensor

    def narrow(tensor):
        stays = tensor.dtype is not torch.float32 or hasattr(tensor, "is_statistic")
        return tensor if half is None or stays else tensor.to(half)

    args, kwargs = tree_map_only(torch.Tensor, widen, (args, kwargs))
    return tree_map_only(torch.Tensor, narrow, operation(*args, **kwargs))


def _drawn(operation, args, kwargs):
    """Random numbers that depend on the state of CUDA's generator, and move it on."""
    generator = kwargs.get("generator") or torch.cuda.default_generators[0]
    place = generator.initial_seed(), generator.get_offset()
    generator.set_offset(place[1] + 4)
    state = torch.default_generator.get_state()
    try:
        torch.default_generator.manual_seed(hash(place) % 2**62)
        return operation(*args, **kwargs | ({"generator": None} if "generator" in kwargs else {}))
    finally:
        torch.default_generator.set_state(state)


def _statistic(tensor: torch.Tensor) -> torch.Tensor:
    tensor.is_statistic = True  # stays in 32 bits, as a GPU keeps it
    return tensor


def _nothing(dtype=torch.int64) -> torch.Tensor:
    return torch.zeros((), dtype=dtype)


def _attend(query, key, value, causal, scale, bias=None):
    """Attention without dropout, and the sums that a backward pass needs."""
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    output, sums = attend(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return output, _statistic(sums)


def _attend_backward(gradient, query, key, value, output, sums, causal, scale, bias=None):
    attend = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return attend(gradient, query, key, value, output, sums, 0.0, causal, attn_mask=bias, scale=scale)


def _flash(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
    state = torch.zeros(2, dtype=torch.uint64), _nothing(torch.uint64)
    sizes = None, None, query.shape[2], key.shape[2]
    return *_attend(query, key, value, causal, scale), *sizes, *state, torch.empty(0)


def _flash_backward(gradient, query, key, value, output, sums, *rest, scale=None):
    return _attend_backward(gradient, query, key, value, output, sums, rest[5], scale)


def _efficient(query, key, value, bias, wanted, dropout=0.0, causal=False, *, scale=None):
    return *_attend(query, key, value, causal, scale, bias), _nothing(), _nothing()


def _efficient_backward(gradient, query, key, value, bias, output, sums, *rest, scale=None):
    causal = rest[4] if len(rest) > 4 else False
    return *_attend_backward(gradient, query, key, value, output, sums, causal, scale, bias), None


def _cudnn(query, key, value, bias, wanted, dropout=0.0, causal=False, debug=False, *, scale=None):
    output, sums = _attend(query, key, value, causal, scale, bias)
    sizes = None, None, query.shape[2], key.shape[2]
    return output, _statistic(sums.unsqueeze(-1)), *sizes, _nothing(), _nothing(), torch.empty(0)


def _cudnn_backward(gradient, query, key, value, output, sums, seed, offset, bias, *rest, scale=None):
    return _attend_backward(gradient, query, key, value, output, sums.squeeze(-1), rest[5], scale, bias)


def _texts(ends, *tensors):
    """Each text of those that lie one after the other, [tokens, heads, width], as a batch of one."""
    for start, end in zip(ends.tolist(), ends.tolist()[1:]):
        yield [tensor[start:end].transpose(0, 1)[None] for tensor in tensors]


def _join(texts):
    return torch.cat([text[0].transpose(0, 1) for text in texts])


def _varlen(query, key, value, ends, ends_k, most, most_k, causal=False, scale=None, window_size=None, *_, **__):
    causal = _is_causal(causal, window_size)
    outputs = [_attend(*text, causal, scale)[0] for text in _texts(ends, query, key, value)]
    sums = _statistic(torch.zeros(query.shape[1], query.shape[0]))
    return _join(outputs), sums, torch.zeros(2, dtype=torch.uint64)


def _varlen_backward(gradient, query, key, value, output, sums, ends, *rest):
    scale, window_size = rest[5:7]
    causal, gradients = _is_causal(rest[3], window_size), []
    for outer, *text in _texts(ends, gradient, query, key, value):
        gradients.append(_attend_backward(outer, *text, *_attend(*text, causal, scale), causal, scale))
    return tuple(map(_join, zip(*gradients)))


def _is_causal(asked, window_size) -> bool:
    return asked or (window_size is not None and window_size[1] == 0)


def _batch_norm(inputs, weight, bias, mean, variance, training, momentum, epsilon):
    results = aten.native_batch_norm(inputs, weight, bias, mean, variance, training, momentum, epsilon)
    return results[0], *map(_statistic, results[1:]), torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(inputs, gradient, weight, mean, variance, saved_mean, saved_variance, epsilon, reserve):
    results = aten.native_batch_norm_backward(
        gradient, inputs, weight, mean, variance, saved_mean, saved_variance, True, epsilon, [True, True, True]
    )
    return results[0], *map(_statistic, results[1:])


_GPU_ONLY = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_varlen_attn": _varlen,
    "_varlen_attn_backward": _varlen_backward,
    "cudnn_batch_norm": _batch_norm,
    "cudnn_batch_norm_backward": _batch_norm_backward,
}


def _uncompiled(model=None, **options):
    if model is None:
        return functools.partial(_uncompiled, **options)
    if isinstance(model, torch.nn.Module):
        return model

    @functools.wraps(model)
    def run(*args, **kwargs):
        return model(*args, **kwargs)

    return run


def _without_gpu(start):
    """A start of the profiler that does not ask for a GPU's records."""

    def run(config, activities, *args, **kwargs):
        return start(config, set(activities) - {torch.profiler.ProfilerActivity.CUDA}, *args, **kwargs)

    return run


def _print(show):
    """What shows a tensor, for a GPU's too: PyTorch does it without any mode."""

    def run(tensor, **options):
        if not tensor.is_cuda:
            return show(tensor, **options)
        with torch.no_grad():
            return show(on_cpu(tensor).clone(), **options)[:-1] + ", device='cuda:0')"

    return run


def install() -> None:
    """Put the CPU in the place of the GPU, for the rest of the process."""
    torch.compile, torch.nn.Module.compile = _uncompiled, lambda module, *args, **kwargs: None
    profiler._prepare_profiler = _without_gpu(profiler._prepare_profiler)
    profiler._enable_profiler = _without_gpu(profiler._enable_profiler)
    torch._tensor_str._str = _print(torch._tensor_str._str)
    Kernels().__enter__()
