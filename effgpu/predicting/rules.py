"""What a GPU does where a CPU does something else: autocast, dropout, networks over time, workspaces.

Each rule names its source in PyTorch.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from effgpu.attaching.replacing import replaced
from effgpu.measuring.ops import tensors_of
from effgpu.measuring.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    _are_functorch_transforms_active,
    _ExcludeDispatchKeyGuard,
)
from effgpu.predicting import recurrent
from effgpu.predicting.attention import HALF_PRECISION, attention
from effgpu.predicting.kernels import (
    CHANNELS_LAST,
    FEW_INDICES,
    SHORT_SORT,
    copied_to_convolve,
    length_of_sorted,
    places_of,
    selects_in_blocks,
)
from effgpu.units import GiB

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

aten = torch.ops.aten

# at/autocast_mode.h, AT_FORALL_FP32, AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: what
# autocast runs in fp32 on a GPU, and not on a CPU.
_FP32 = """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
nuclear_norm.dim cosine_similarity dist pdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"""
# fp32 by their own argument: no copy of the input
_WITH_DTYPE = "sum sum.dim_IntList prod prod.dim_int linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord"
_APPENDED = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
# AT_FORALL_LOWER_PRECISION_FP, where the CPU's list lacks them
_HALVED = "_convolution convolution addmv addr chain_matmul einsum linalg_multi_dot mv"
# AT_FORALL_PROMOTE: to the widest of their arguments' types, which the CPU's list leaves out
_PROMOTED = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
# in the CPU's list only: a GPU leaves them to the types of their arguments
_LEFT = """avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d grid_sampler_2d grid_sampler_3d
cross_entropy_loss cat stack index_copy reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
replication_pad3d"""
_AUTOCAST, _AUTOGRAD = (DispatchKeySet(key) for key in (DispatchKey.AutocastCPU, DispatchKey.AutogradCPU))
# Made of others for a CPU, and of one kernel on a GPU.
AS_ONE = {aten._fused_rms_norm.default}
# Of several kernels, which fake tensors take for one, but which PyTorch has written in operations: ReduceOps.cpp,
# Loss.cpp, SoftMax.cpp, LinearAlgebra.cpp; TensorAdvancedIndexing.cpp, PadNd.cpp and TensorShape.cpp: a copy that is
# then written into.
_IN_PARTS = """logsumexp logsumexp.out binary_cross_entropy_with_logits soft_margin_loss_backward
soft_margin_loss_backward.grad_input linalg_pinv.atol_rtol_tensor _safe_softmax dist count_nonzero masked_fill.Scalar
masked_fill.Tensor index_fill.int_Scalar index_fill.int_Tensor index_put _unsafe_index_put masked_scatter put
constant_pad_nd slice_scatter select_scatter diagonal_scatter slice_backward select_backward diagonal_backward"""
# The same on a GPU alone: TensorAdvancedIndexing.cpp and cuda/Indexing.cu.
_COPIED_FIRST = """index_add index_copy index_reduce scatter.src scatter.value scatter.reduce scatter.value_reduce
scatter_add scatter_reduce.two"""


# The arguments of which a GPU's kernel takes a copy, where they are not contiguous: cuda/SoftMax.cu, host_softmax and
# host_softmax_backward; cuda/layer_norm_kernel.cu; group_norm.cpp, native_group_norm_backward.
_IN_ORDER = {
    aten._softmax.default: (0,),
    aten._log_softmax.default: (0,),
    aten._softmax_backward_data.default: (0,),
    aten._log_softmax_backward_data.default: (0,),
    aten.native_layer_norm.default: (0,),
    aten.native_layer_norm_backward.default: (1,),
    aten._fused_rms_norm.default: (0,),
    aten._fused_rms_norm_backward.default: (1,),
    aten.native_group_norm_backward.default: (0, 1),
}


def kernels(recorder: "Recorder") -> dict[tuple[str, str], Callable]:
    """(operation, dispatch key) -> what a GPU does."""
    kernels: dict[tuple[str, str], Callable] = {}
    for names, dtype in ((_FP32, torch.float32), (_HALVED, None)):
        for name in names.split():
            kernels[name, "AutocastCPU"] = functools.partial(_cast_call, _find(name), dtype)
    for name, with_dtype in _APPENDED.items():
        kernels[name, "AutocastCPU"] = functools.partial(_append_dtype, _find(name), _find(with_dtype))
    for name in _WITH_DTYPE.split():
        kernels[name, "AutocastCPU"] = functools.partial(_with_dtype, _find(name))
    for name in _PROMOTED.split():
        kernels[name, "AutocastCPU"] = functools.partial(_promote, _find(name))
    for name in _LEFT.split():
        kernels[name, "AutocastCPU"] = torch.library.fallthrough_kernel
    for func in (aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten.cumprod.default):
        kernels[_name(func), "AutocastCPU"] = functools.partial(_widen, func)
    kernels["binary_cross_entropy", "AutocastCPU"] = _refuse_in_autocast
    kernels |= {(_name(func), "AutogradCPU"): made for func, made in made_of_others(recorder).items()}
    return kernels


def made_of_others(recorder: "Recorder") -> dict:
    """What stands for operations that are made of others: on a GPU, of other ones than on a CPU."""
    return {
        aten.dropout.default: dropout,
        aten.batch_norm.default: batch_norm,
        aten.group_norm.default: group_norm,
        aten.softmax.int: functools.partial(_softmax, aten._softmax.default),
        aten.log_softmax.int: functools.partial(_softmax, aten._log_softmax.default),
        aten.scaled_dot_product_attention.default: functools.partial(attention, recorder),
        aten._fused_rms_norm.default: rms_norm,
        **_recurrent_layers(recorder),
    }


def _recurrent_layers(recorder: "Recorder") -> dict:
    """aten/src/ATen/native/RNN.cpp: which layers over time are one call of cuDNN, and which cells are one."""
    cells = {
        getattr(aten, f"{kind}_cell").default: functools.partial(recurrent.run_cell, recorder.work.note_cell, kind)
        for kind in recurrent.WORKSPACE
    }
    runs = ("input", recurrent.run_padded), ("data", recurrent.run_packed)
    layers = {
        getattr(getattr(aten, kind), overload): functools.partial(run, recorder.work.note_recurrent, kind)
        for kind in recurrent.GATES
        for overload, run in runs
    }
    return cells | {func: functools.partial(_by_cudnn, func, run) for func, run in layers.items()}


def _by_cudnn(func, run: Callable, *args, **kwargs) -> object:
    """A layer in one call of cuDNN, or cell by cell where that is switched off by now."""
    if torch.backends.cudnn.enabled:
        return run(*args, **kwargs)
    was, *_ = torch.backends.mkldnn.set_flags(False, _fp32_precision=None)  # a CPU's library for it
    try:
        return func.decompose(*args, **kwargs)
    finally:
        torch.backends.mkldnn.set_flags(was, _fp32_precision=None)


def _write_into_copy(name: str, tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    packet, dot, overload = name.partition(".")
    return _find(f"{packet}_{dot}{overload}")(tensor.clone(), *args, **kwargs)


def _count_nonzero(tensor: torch.Tensor, dim: list[int]) -> torch.Tensor:
    """aten/src/ATen/native/TensorAdvancedIndexing.cpp, count_nonzero_cuda."""
    return (tensor.clone() if tensor.dtype is torch.bool else tensor != 0).sum(dim)


def _median(tensor: torch.Tensor) -> torch.Tensor:
    """aten/src/ATen/native/cuda/Sorting.cpp, median_impl: of all numbers, which are sorted."""
    ordered = tensor.flatten().sort()[0]
    return torch.where(ordered[-1].isnan(), ordered[-1], ordered[(len(ordered) - 1) // 2])


def _roll(tensor: torch.Tensor, shifts: list[int], dims: list[int] = ()) -> torch.Tensor:
    """aten/src/ATen/native/TensorTransformations.h, roll_common: one dimension after the other."""
    for shift, dim in zip(shifts, dims):
        tensor = aten.roll.default(tensor, [shift], [dim])
    return tensor if dims else aten.roll.default(tensor.flatten(), shifts, [0]).view(tensor.shape)


def _multinomial(tensor: torch.Tensor, number: int, replacement: bool = False, *, generator=None) -> torch.Tensor:
    """aten/src/ATen/native/Distributions.cpp: the largest of what is divided by random numbers, after two checks."""
    (tensor.max() < math.inf).logical_and(tensor.min() >= 0)
    (tensor.sum(-1) == 0).any()
    drawn = torch.empty_like(tensor).exponential_()
    torch.div(tensor, drawn, out=drawn)
    return drawn.argmax(-1, keepdim=True) if number == 1 else drawn.topk(number, -1)[1]


def _name(func) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _find(name: str):
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _cast_call(func, dtype: torch.dtype | None, /, *args, **kwargs):
    """at/autocast_mode.cpp, cached_cast: floating-point arguments but doubles, to fp32 or the lower precision."""
    wanted = dtype or torch.get_autocast_dtype("cpu")

    def cast(value):
        if isinstance(value, torch.Tensor):
            castable = value.is_floating_point() and value.dtype not in (torch.float64, wanted)
            return value.to(wanted) if castable else value
        return type(value)(map(cast, value)) if isinstance(value, (list, tuple)) else value

    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return func(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def _promote(func, /, *args, **kwargs):
    """CastPolicy::promote: in fp32 if any argument is, else in the lower precision."""
    given = {tensor.dtype for tensor in tensors_of((args, kwargs))}
    return _cast_call(func, torch.float32 if torch.float32 in given else None, *args, **kwargs)


def _with_dtype(func, *args, dtype=None, **kwargs):
    """CastPolicy::fp32_set_opt_dtype: the kernel reads 16 bits and writes fp32."""
    if dtype is None and args[0].dtype in HALF_PRECISION:
        dtype = torch.float32
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return func(*args, dtype=dtype, **kwargs)


def _append_dtype(func, with_dtype, tensor: torch.Tensor, p: object = 2, *over: object):
    """CastPolicy::fp32_append_dtype: the same of a norm, which has another name with a type."""
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        if tensor.dtype not in HALF_PRECISION:
            return func(tensor, p, *over)
        return with_dtype(tensor, p, *over, *[False] * (len(over) == 1), dtype=torch.float32)


def _refuse_in_autocast(*_: object, **__: object) -> None:
    """aten/src/ATen/autocast_mode.cpp, binary_cross_entropy_banned."""
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: "
        "take binary_cross_entropy_with_logits or BCEWithLogitsLoss, without the sigmoid before"
    )


def _widen(func, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None):
    """CastPolicy::fp32_set_opt_dtype, where no type is asked for."""
    if dtype is None and tensor.is_floating_point() and tensor.dtype is not torch.float64:
        dtype = torch.float32
    with _ExcludeDispatchKeyGuard(_AUTOCAST):
        return func(tensor, dim, dtype=dtype)


def _softmax(func, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None):
    """aten/src/ATen/native/SoftMax.cpp: on a GPU, fp16 in and fp32 out is one kernel. All else is copied first."""
    to_float = tensor.dtype is torch.float16 and dtype is torch.float32
    return func(tensor if dtype is None or to_float else tensor.to(dtype), dim, to_float)


def dropout(tensor: torch.Tensor, p: float, train: bool):
    """aten/src/ATen/native/Dropout.cpp, is_fused_kernel_acceptable: a GPU keeps a mask of one byte an element."""
    return aten.native_dropout.default(tensor, p, True)[0] if train and p else tensor


def batch_norm(tensor, weight, bias, mean, variance, training, momentum, epsilon, cudnn_enabled):
    """aten/src/ATen/native/Normalization.cpp, _select_batch_norm_backend: cuDNN's keeps a copy in the channels' order.

    And it copies gradients that are not in that order. PyTorch's own kernel takes both as they lie.
    """
    statistics = (mean is None) == (variance is None) and (training or mean is not None)
    affine = weight is not None and bias is not None
    exact = tensor.dtype in (torch.float32, torch.float64) or (
        tensor.dtype is torch.float16 and affine and weight.dtype is torch.float32
    )
    if not (cudnn_enabled and tensor.dim() > 2 and tensor.numel() < 2**31 and statistics and affine and exact):
        given = tensor, weight, bias, mean, variance, training, momentum, epsilon, cudnn_enabled
        return aten._batch_norm_impl_index.default(*given)[0]
    last = tensor.dim() in CHANNELS_LAST and tensor.stride(1) == 1 and not tensor.is_contiguous()
    ordered = tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()] if last else torch.contiguous_format)
    return aten.cudnn_batch_norm.default(ordered, weight, bias, mean, variance, training, momentum, epsilon)[0]


def group_norm(tensor, groups, weight=None, bias=None, epsilon=1e-5, cudnn_enabled=True):
    """aten/src/ATen/native/group_norm.cpp: a GPU's kernel knows no channels_last. A copy in its order is kept."""
    samples, channels, *places = tensor.shape
    given = tensor.contiguous(), weight, bias, samples, channels, math.prod(places), groups, epsilon
    return aten.native_group_norm.default(*given)[0]


def rms_norm(tensor, shape, weight, epsilon):
    """aten/src/ATen/native/layer_norm.cpp, rms_norm_symint: a GPU has a kernel, where a CPU takes several."""
    if _are_functorch_transforms_active():
        return aten._fused_rms_norm.default.decompose(tensor, shape, weight, epsilon)
    return _FusedRmsNorm.apply(tensor, shape, weight, epsilon)


class _FusedRmsNorm(torch.autograd.Function):
    """What the kernel gives, and keeps for its backward pass."""

    @staticmethod
    def forward(ctx, tensor, shape, weight, epsilon):
        with _ExcludeDispatchKeyGuard(_AUTOGRAD):
            out, deviation = aten._fused_rms_norm.default(tensor, shape, weight, epsilon)
        ctx.shape = shape
        ctx.save_for_backward(tensor, weight, deviation)
        ctx.mark_non_differentiable(deviation)
        ctx.set_materialize_grads(False)
        return out, deviation

    @staticmethod
    def backward(ctx, gradient, _):
        tensor, weight, deviation = ctx.saved_tensors
        if torch.is_grad_enabled():  # a graph of the gradient: infinitely_differentiable_native_rms_norm_backward
            dims = tuple(range(-len(ctx.shape), 0))
            normal, scaled = tensor * deviation, gradient if weight is None else gradient * weight
            ours = (scaled - normal * (scaled * normal).mean(dims, keepdim=True)) * deviation
            return ours, None, None if weight is None else (gradient * normal).sum_to_size(weight.shape), None
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        given = gradient, tensor, ctx.shape, deviation, weight, wanted
        ours, of_weight = aten._fused_rms_norm_backward.default(*given)
        return ours if wanted[0] else None, None, of_weight if wanted[1] else None, None


def in_parts(func, args: tuple) -> Callable | None:
    """What stands for an operation that is several kernels, and has a name of its own; None for any other one."""
    if func is aten.multinomial.default and len(args) > 2 and args[2] and args[1] > 1:
        return None
    if func is aten.roll.default and len(args) > 2 and len(args[2]) == 1:
        return None
    if not all(args[place].is_contiguous() for place in _IN_ORDER.get(func, ())):
        return functools.partial(_put_in_order, func)
    return IN_PARTS.get(func)


def _put_in_order(func, *args, **kwargs):
    """The kernel reads row by row: what lies in another order is copied first."""
    places = _IN_ORDER[func]
    return func(*(each.contiguous() if place in places else each for place, each in enumerate(args)), **kwargs)


def boxes_at_once(module: ModuleType) -> contextlib.AbstractContextManager:
    """torchvision/ops/boxes.py, batched_nms: a GPU takes the boxes of all classes at once, up to 100,000 numbers."""
    one_by_one = module._batched_nms_vanilla

    def choose(boxes: torch.Tensor, *others: object) -> torch.Tensor:
        return (one_by_one if boxes.numel() > 100_000 else module._batched_nms_coordinate_trick)(boxes, *others)

    return replaced([(module, "_batched_nms_vanilla", choose)])


def _flash_backward(_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *__: object) -> int:
    """aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: dq_accum and softmax_d in fp32.

    Where fewer heads have keys, also dk_expanded and dv_expanded.
    """
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    wide = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    expanded = 2 * batch * heads * key.shape[2] * width * (heads > key.shape[1])
    return 4 * batch * heads * rounded * (wide + 1) + query.element_size() * expanded


def _efficient_backward(_: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *__: object) -> int:
    """aten/src/ATen/native/transformers/cuda/attention_backward.cu: delta in fp32, and for 16 bits a sum in fp32.

    Where fewer heads have keys, also the gradients of keys and values for each of the query's heads.
    """
    batch, heads, length, width = query.shape
    accumulated = width if query.dtype in HALF_PRECISION and width > 64 else 0
    expanded = 2 * batch * heads * key.shape[2] * width * (heads > key.shape[1])
    return 4 * batch * heads * length * (1 + accumulated) + query.element_size() * expanded


def _cdist_backward(_: torch.Tensor, one: torch.Tensor, other: torch.Tensor, *__: object) -> int:
    """aten/src/ATen/native/cuda/DistanceKernel.cu, cdist_backward_kernel_impl: a number for each pair and column."""
    return one.numel() * other.shape[-2] * one.element_size()


def _pdist_backward(_: torch.Tensor, rows: torch.Tensor, *__: object) -> int:
    """The same file, pdist_backward_kernel_impl."""
    return rows.numel() * max(0, len(rows) - 1) * rows.element_size()


def _sort(tensor: torch.Tensor, *how: object) -> int:
    """aten/src/ATen/native/cuda/Sort.cpp: places and the second buffers of CUB; of several rows, pairs of both."""
    row = length_of_sorted(tensor, how)
    places = 8 * tensor.numel()
    if row <= SHORT_SORT:
        return 0
    return 4 * places if row < tensor.numel() else 2 * places + tensor.numel() * tensor.element_size()


def _convolve(name: str, *args: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in copied_to_convolve(name, args))


def _deform(images: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, *_: object) -> int:
    """torchvision/csrc/ops/cuda/deform_conv2d_kernel.cu: what a kernel's taps see, of up to 32 images at a time."""
    at_once = max(number for number in range(1, 33) if images.shape[0] % number == 0)
    taps, points = math.prod(weight.shape[2:]), math.prod(offset.shape[2:])
    return images.element_size() * at_once * images.shape[1] * taps * points


_ROWS_A_SUM = 10


def _embedding_backward(gradient: torch.Tensor, indices: torch.Tensor, rows: int, *how: object) -> int:
    """aten/src/ATen/native/cuda/Embedding.cu: up to 3,072 indices are added up where they belong, more are sorted."""
    sorts = indices.numel() > FEW_INDICES or how[-1]
    return _sums_of_rows(gradient, indices, rows) if sorts else 0


def _bag_backward(gradient: torch.Tensor, indices: torch.Tensor, *others: object) -> int:
    """aten/src/ATen/native/cuda/EmbeddingBag.cu, embedding_bag_backward_cuda_sum_avg: always sorted."""
    *_, rows, _, mode, sparse = others[:8]
    return _sums_of_rows(gradient, indices, rows) if mode < 2 and not sparse else 0


def _sums_of_rows(gradient: torch.Tensor, indices: torch.Tensor, rows: int) -> int:
    """aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu: of each ten rows of an index, a sum in fp32; and places."""
    number, distinct = indices.numel(), min(indices.numel(), rows)
    sums = number // _ROWS_A_SUM + distinct
    places = 2 * number + 3 * distinct + sums
    copied = 0 if gradient.is_contiguous() else gradient.numel() * gradient.element_size()
    return copied + sums * gradient.shape[-1] * max(4, gradient.element_size()) + places * indices.element_size()


def _index_put(tensor: torch.Tensor, indices: list, values: torch.Tensor, accumulate: bool = False, *_: object) -> int:
    """aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel: places, as they come and in order, and CUB's.

    And a copy of values that are spread, or not in their order.
    """
    if not accumulate:
        return 0
    places = places_of(indices)
    kept = [size for n, size in enumerate(tensor.shape) if n >= len(indices) or indices[n] is None]
    whole = places * math.prod(kept)
    copied = whole * values.element_size() * (values.numel() < whole or not values.is_contiguous())
    return 6 * 8 * places + copied


def _top(tensor: torch.Tensor, number: int, dim: int = -1, *_: object) -> int:
    """aten/src/ATen/native/cuda/TensorTopK.cu, mbtopk::launch: counts of 256 digits, of a row and of its block."""
    return 6 * 256 * (tensor.numel() // tensor.shape[dim]) if selects_in_blocks(tensor, dim) else 0


def _permutation(number: int, *_: object) -> int:
    """aten/src/ATen/native/cuda/Randperm.cu: numbers, random keys of as many bits as make them differ, and CUB's."""
    bits = math.log2(number + (6 * number**2 + 1) / (-12 * math.log(0.9))) if number > 1 else 0
    return (40 if bits > 32 else 28) * number


def _draw_again(tensor: torch.Tensor, number: int, replacement: bool = False, *_: object) -> int:
    """aten/src/ATen/native/cuda/MultinomialKernel.cu: shares of one, as they are made, and added up."""
    return 3 * tensor.numel() * tensor.element_size() * (replacement and number > 1)


def _masked_scatter(tensor: torch.Tensor, mask: torch.Tensor, *_: object) -> int:
    """aten/src/ATen/native/cuda/IndexKernel.cpp and .cu: how many are taken up to each place, and the whole mask."""
    whole = mask.is_contiguous() and mask.shape == tensor.shape
    return (8 if whole else 9) * tensor.numel()


def _reduced(input: torch.Tensor, target: torch.Tensor, reduction: int = 1, *_: object) -> int:
    """aten/src/ATen/native/Loss.cpp, smooth_l1_loss_out: what each element adds, before it is reduced."""
    return torch.broadcast_shapes(input.shape, target.shape).numel() * input.element_size() * bool(reduction)


def _of_each(input: torch.Tensor, target: torch.Tensor, *_: object) -> int:
    return torch.broadcast_shapes(input.shape, target.shape).numel()


IN_PARTS = {
    **{
        _find(name): functools.partial(_find(name).redispatch, DispatchKeySet(DispatchKey.CPU))
        for name in _IN_PARTS.split()
    },
    **{_find(name): functools.partial(_write_into_copy, name) for name in _COPIED_FIRST.split()},
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.median.default: _median,
    aten.roll.default: _roll,
    aten.multinomial.default: _multinomial,
}
# Elements of a result's storage, where that was made for something larger: resize_ never shrinks it. Loss.cpp,
# TORCH_META_FUNC(smooth_l1_loss) and soft_margin_loss_out; cuda/Loss.cu, binary_cross_entropy_out_cuda; cuda/Col2Im.cu.
STORED = {f"aten::{name}": _of_each for name in ("mse_loss", "smooth_l1_loss", "soft_margin_loss")}
STORED |= {f"aten::{name}": lambda given, *_: given.numel() for name in ("binary_cross_entropy", "col2im")}
TEMPORARY = {  # bytes that a kernel takes while it runs
    "aten::mse_loss": _reduced,
    "aten::smooth_l1_loss": _reduced,
    **{f"aten::{name}": functools.partial(_convolve, name) for name in ("convolution", "convolution_backward")},
    "aten::embedding_dense_backward": _embedding_backward,
    "aten::_embedding_bag_backward": _bag_backward,
    "aten::masked_scatter": _masked_scatter,
    "aten::masked_scatter_": _masked_scatter,
    "aten::_fft_c2r": lambda given, *_: given.numel() * given.element_size(),  # a copy, as cuFFT writes over it
    "aten::_cdist_backward": _cdist_backward,
    "aten::_pdist_backward": _pdist_backward,
    "aten::sort": _sort,
    "aten::index_put_": _index_put,
    "aten::_index_put_impl_": _index_put,
    "aten::topk": _top,
    "aten::randperm": _permutation,
    "aten::multinomial": _draw_again,
    # SoftMax.cu, softmax_backward_cuda_out: the gradient times the softmax
    "aten::_softmax_backward_data": lambda gradient, *_: gradient.numel() * gradient.element_size(),
    "torchvision::deform_conv2d": _deform,
    "torchvision::_deform_conv2d_backward": lambda _, *given: _deform(*given),
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
}


_TILED_FROM, _TILE = 1024, 4  # channels; results along each side of a tile


def tiles_of_winograd(name: str, args: tuple) -> int:
    """Bytes that Winograd's algorithm takes for a convolution; 0 where cuDNN is not known to take it.

    It keeps what it reads and what it makes in tiles of 4 × 4 results, as 6 × 6 numbers each (Lavin and Gray, 2015). By
    the peaks that MMSegmentation published (docs/audit.md), cuDNN does so in fp32 for 3 × 3, from 1,024 channels on.
    """
    backward = name == "convolution_backward"
    image, weight = args[backward:][:2]
    stride, padding, dilation, transposed, _, groups = args[3 + backward : 9 + backward]
    plain = weight.shape[2:] == (3, 3) and {*stride, *dilation, groups} == {1} and not transposed
    if not plain or weight.dtype != torch.float32 or max(weight.shape[:2]) < _TILED_FROM:
        return 0
    sides = [math.ceil((size + 2 * each - 2) / _TILE) for size, each in zip(image.shape[2:], padding)]
    tiles = image.shape[0] * math.prod(sides)
    return 4 * (_TILE + 2) ** 2 * tiles * (image.shape[1] + weight.shape[0])


def convolution_workspace(image: torch.Tensor, weight: torch.Tensor) -> int:
    """The most that a convolution may take: the spectra of an FFT, cuDNN's largest way, and not above 1 GiB."""
    planes = image.shape[0] * image.shape[1] + image.shape[0] * weight.shape[0] + weight.shape[0] * weight.shape[1]
    points = math.prod(size + kernel for size, kernel in zip(image.shape[2:], weight.shape[2:]))
    return min(4 * planes * points, GiB)


def defaults_to_foreach(optimizer: torch.optim.Optimizer) -> bool:
    """Whether PyTorch takes foreach on a GPU where nothing is said: Adafactor does not, as that takes memory.

    Its optimizers ask a function of torch/optim/optimizer.py, which they import.
    """
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not torch.optim.Optimizer]
    return any(hasattr(sys.modules.get(kind.__module__), "_default_to_fused_or_foreach") for kind in kinds)
