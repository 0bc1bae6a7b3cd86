"""What a reduction over rows takes beside its result, as a bias's gradient does: ATen/native/cuda/Reduce.cuh."""

import math

import torch

from effgpu.measuring.ops import name_arguments
from effgpu.predicting.gpus import Gpu

# By what a thread adds up: numbers, a variance's WelfordData, a number and its place, one of the tensor's own numbers.
_SUMS = ("sum", "mean", "nansum", "prod", "linalg_vector_norm", "norm")
_VARIANCES = ("var", "std", "var_mean", "std_mean")
_PLACES = ("argmax", "argmin", "max", "min")
_EXTREMES = ("amax", "amin", "any", "all")
_REDUCTIONS = {*_SUMS, *_VARIANCES, *_PLACES, *_EXTREMES}
_WARP, _MOST_THREADS, _MOST_VALUES, _LEAST_VALUES = 32, 512, 256, 16
_ADDRESSED = 2**31  # bytes that a kernel takes at a time: with_32bit_indexing
# CUDA C++ Programming Guide, technical specifications per compute capability: threads of a multiprocessor.
_THREADS, _THREADS_ELSEWHERE = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}, 2048


def reduction_buffer(func, args: tuple, kwargs: dict, gpu: Gpu) -> int:
    """The bytes for what the blocks of threads that share a sum leave to the last of them.

    There is a number for each result, block, column of threads and number that a thread reads at once: PyTorch takes
    as much, and uses a part. Only what is reduced across rows counts: along a row there are a few results.
    """
    if (name := func.overloadpacket.__name__) not in _REDUCTIONS:
        return 0
    given = name_arguments(func, args, kwargs)
    tensor, dims = given.get("self"), given.get("dim")
    size = _accumulated(name, tensor)
    if not size or not tensor.numel() or not tensor.dim():
        return 0
    copied = 8 * tensor.numel() * (_is_widened(name, tensor) and tensor.element_size() < 8)
    dims = range(tensor.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    reduced = {dim % tensor.dim() for dim in dims}
    inputs = math.prod(tensor.shape[dim] for dim in reduced)
    ordered = sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=tensor.stride)
    if not ordered or ordered[0] in reduced:
        return copied
    outputs, at_once = tensor.numel() // inputs, _vector(tensor, ordered, reduced)
    while inputs * outputs * tensor.element_size() > _ADDRESSED:
        inputs = -(-inputs // 2)
    return copied + _shared(size, outputs, inputs, at_once, gpu)


def _accumulated(name: str, tensor: object) -> int:
    """The bytes that a thread adds up in; 0 for what is no reduction of a tensor's."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return 0
    number = 8 if _is_widened(name, tensor) else max(4, tensor.element_size())
    sizes = {_SUMS: number, _VARIANCES: 4 * number, _PLACES: number + 12, _EXTREMES: tensor.element_size()}
    return next((size for names, size in sizes.items() if name in names), 0)


def _is_widened(name: str, tensor: torch.Tensor) -> bool:
    """ReduceOps.cpp, make_reduction_from_out_ty: sums of whole numbers are of copies in int64."""
    return name in ("sum", "prod") and not (tensor.is_floating_point() or tensor.is_complex())


def _vector(tensor: torch.Tensor, ordered: list[int], reduced: set[int]) -> int:
    """get_output_vec_size: how many numbers side by side a thread reads at once, of a row of results."""
    if tensor.stride(ordered[0]) != 1:
        return 1
    row, others = 1, []
    for dim in ordered:
        if not others and dim not in reduced and tensor.stride(dim) == row:
            row *= tensor.shape[dim]
        else:
            others.append(tensor.stride(dim))
    return math.gcd(4, row, tensor.storage_offset(), *others)


def _shared(size: int, outputs: int, inputs: int, at_once: int, gpu: Gpu) -> int:
    """setReduceConfig and global_memory_size."""
    most = _MOST_THREADS // at_once
    wide, tall = (min(most, _power(count)) for count in (outputs // at_once, inputs))
    height = min(tall, most // min(wide, _WARP))
    width = min(wide, most // height)
    if inputs < min(16 * height, _MOST_VALUES):
        return 0
    values, columns = -(-inputs // height), -(-(outputs // at_once) // width)
    at_a_time = _THREADS.get(gpu.capability, _THREADS_ELSEWHERE) // (width * height) * (gpu.multiprocessors or 0)
    if values < _MOST_VALUES or columns > at_a_time:
        return 0
    blocks = max(min(-(-at_a_time // columns), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return size * outputs * blocks * width * at_once if blocks > 1 else 0


def _power(count: int) -> int:
    """The largest power of two that is not larger."""
    return 1 << (max(1, count).bit_length() - 1)
