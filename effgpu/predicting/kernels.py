"""The kernels that a GPU would run for a step: what each computes and moves, noted while the step is walked."""

import math

import torch
from torch.utils.flop_counter import flop_registry

from effgpu.measuring.ops import arguments_of, bytes_touched, lists_of, name_arguments, runs_kernel, tensors_of
from effgpu.predicting.kinds import (
    ATTENTION,
    CONVOLUTION,
    COPY,
    NARROW_HEAD,
    NORM,
    OPTIMIZER,
    OTHER,
    PRODUCT,
    TENSORS_A_LAUNCH,
    Kernel,
)

FORMATS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
FORMATS |= {torch.complex64: "fp32", torch.complex128: "fp64"}
TIMED = (*FORMATS.values(), "tf32")  # of which GPUs' rates are known

# Operations whose arithmetic counts, by the beginning of their name: a GPU runs them, but no rule tells their time.
_COMPUTES = tuple(
    [
        "linalg_",
        "_linalg_",
        "cholesky",
        "triangular_solve",
        "lu_",
        "geqrf",
        "ormqr",
        "orgqr",
        "_fft_",
        "_cdist",
        "cdist_",
        "deform_conv2d",
        "_deform_conv2d",
        "_pdist",
        "_trilinear",
        "_int_mm",
        "_scaled_grouped_mm",
        "_weight_int",
        "mkldnn_",
        "_cudnn_rnn",
        "_thnn_",
        "lstm",
        "gru",
        "rnn_",
        "quantized_",
        "_convolution",
        "_ctc_loss",
        "_transformer_encoder",
        "_native_multi_head",
    ]
)
_KNOWN_LINALG = ("linalg_vector_norm", "linalg_cross", "_linalg_check_errors")  # these read each element once
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "addbmm", "_scaled_mm")
# Passes over memory that a kernel makes beyond reading its arguments and writing its results once.
_SECOND_READ = {  # the arguments that are read twice
    "native_layer_norm_backward": (0, 1),  # once for the input's gradient, once for the weight's
    "_fused_rms_norm_backward": (0, 1),
    "native_batch_norm": (0,),  # statistics first, then the result
    "_native_batch_norm_legit": (0,),
    "cudnn_batch_norm": (0,),
    "native_batch_norm_backward": (0, 1),
    "cudnn_batch_norm_backward": (0, 1),
    "native_group_norm": (0,),
    "native_group_norm_backward": (0, 1),
}
_SOFTMAX = ("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data")
_NORMS = (*_SECOND_READ, *_SOFTMAX, "native_layer_norm", "_fused_rms_norm")
_SORTS = ("sort", "argsort", "_unique", "_unique2", "unique_dim")
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by the number of dimensions
SHORT_SORT = 4096  # elements of a row that one block of threads sorts: aten/src/ATen/native/cuda/Sort.cpp
FEW_INDICES = 3072  # of an embedding's, up to which they are not sorted: aten/src/ATen/native/cuda/Embedding.cu
INDEX_PUT = ("index_put_", "_index_put_impl_")
# TensorTopK.cu, should_use_multiblock: up to so many rows, rows of so many elements
_LONG_SELECTION = (20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800), (math.inf, 400)
_SHORT_ROW = 1024  # elements of a softmax's row that registers hold: PersistentSoftmax.cuh reads them once
_LONG_ROW = 24 * 1024  # elements that shared memory does not hold: SoftMax.cu reads them three times
_LAUNCHES = {  # kernels of an operation, where it is more than one; fills and copies within it are some, too
    "native_layer_norm_backward": 3,
    "_fused_rms_norm_backward": 2,
    "native_group_norm": 3,
    "native_batch_norm_backward": 2,
    "cudnn_batch_norm_backward": 2,
    "convolution_backward": 2,
    "_embedding_bag_backward": 18,  # the indices are sorted first
    "masked_scatter_": 4,
    "nonzero": 5,
    "bincount": 5,
    "histc": 2,
    "randperm": 18,
    "multinomial": 5,
    "_unique2": 25,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "nll_loss_backward": 2,
    "native_group_norm_backward": 3,
}
_CHUNK, _CHUNKS_A_LAUNCH = 65536, 320  # elements, and chunks of so many that one launch of a list's kernel takes


def note(func, args: tuple, kwargs: dict, result: object, optimizing: bool) -> list[Kernel]:
    """The kernels that a GPU runs for a call of an operation; none for views, empty tensors and a CPU's scalars."""
    if not runs_kernel(func):
        return []
    results, given = tensors_of(result), tensors_of((args, kwargs))
    tensors = results + given
    name = func.overloadpacket.__name__
    if not any(tensor.numel() for tensor in results or given) or name in ("_local_scalar_dense", "lift_fresh"):
        return []
    if optimizing and not any(tensor.dim() for tensor in tensors):  # an optimizer's counts of steps are on the CPU
        return []
    moved = bytes_touched(func, name, args, kwargs, result)
    named = name_arguments(func, args, kwargs)
    args = tuple(named.get(argument.name) for argument in arguments_of(func))  # all of them, in their order
    if name in _PRODUCTS and not has_sparse(args):
        return [_multiply(name, args, moved)]
    if name in ("convolution", "convolution_backward"):
        return _convolve(name, args, results)
    if "scaled_dot_product" in name or "attention_forward" in name or "attention_backward" in name:
        return [_attend(name, func, args, named, result, moved)]
    if name == "_euclidean_dist":  # aten/src/ATen/native/Distance.cpp: a product, whose result two passes change
        return [_measure_distances(name, args, results[0]), Kernel(name, OTHER, "fp32", 0, 4 * _size(results[0]), 2)]
    moved += sum(map(_size, (args[i] for i in _SECOND_READ.get(name, ()))))
    if name in _SORTS:
        tensor = args[0]
        row = max(tensor.numel(), SHORT_SORT + 1) if "unique" in name else length_of_sorted(tensor, args[1:])
        moved += _sort_again(tensor, row)
    if name == "topk" and selects_in_blocks(args[0], args[2]):
        moved += args[0].element_size() * _size(args[0])  # for each byte of a number, and once for the places
    if name in INDEX_PUT and args[3]:
        moved += _sort_places(args[0], args[1])
    if name in _SOFTMAX:
        moved += _read_again(name, args)
    kind = NORM if name in _NORMS else OPTIMIZER if optimizing else OTHER
    layout = _layout(given) if "batch_norm" in name or "pool" in name else ""
    launches, before = _count_launches(name, args), []
    if name == "_softmax_backward_data":  # SoftMax.cu, softmax_backward_cuda_out: of the gradient times the softmax
        before = [Kernel("mul", OTHER, _format(tensors), 0, 2 * _size(args[0]) + _size(args[1]))]
    return [*before, Kernel(name, kind, _format(tensors), 0, moved, launches, None, _is_even(tensors), layout)]


def _measure_distances(name: str, args: tuple, result: torch.Tensor) -> Kernel:
    """All distances, squared, as one product of the rows with their squares beside them."""
    (rows, depth), columns = args[0].shape[-2:], args[1].shape[-2]
    product = result.numel() // max(1, rows * columns), rows, columns, depth + 2
    moved = _size(result) + _size(args[0]) + _size(args[1])
    format = _multiplied_as(result.dtype, torch.backends.cuda.matmul)
    return Kernel(name, PRODUCT, format, 2 * math.prod(product), moved, 1, product)


def length_of_sorted(tensor: torch.Tensor, how: tuple) -> int:
    """How many elements are sorted together: along the dimension that is named, or the last one."""
    dims = [value for value in how if type(value) is int]
    return tensor.shape[dims[0] if dims else -1] if tensor.dim() else 1


def _sort_again(tensor: torch.Tensor, row: int) -> int:
    """The bytes of a radix sort's passes, one for each byte of a number, over numbers and places.

    Several long rows are sorted by number first, and then by row. Short ones are copied, with their places, and then
    sorted where they lie: aten/src/ATen/native/cuda/Sort.cpp.
    """
    if row <= SHORT_SORT:
        return 4 * _size(tensor) + 16 * tensor.numel()
    passes = tensor.element_size() * (2 if row < tensor.numel() else 1)
    return passes * 2 * (_size(tensor) + 8 * tensor.numel())


def _sort_places(tensor: torch.Tensor, indices: list) -> int:
    """The bytes of what index_put_with_sort_kernel does with places: it makes them, and sorts them by as few bits."""
    last = tensor.numel() // max(1, math.prod(tensor.shape[len(indices) :]))
    passes = -(-last.bit_length() // 8)
    return places_of(indices) * (12 * 8 + passes * 2 * 16)


def touching(name: str, tensors: list[torch.Tensor]) -> Kernel:
    """A kernel of which only its arguments are known: each is read or written once."""
    return Kernel(name, OTHER, _format(tensors), 0, sum(map(_size, tensors)))


def copy_over_bus(tensor: torch.Tensor, pinned: bool) -> Kernel:
    """The copy of a tensor to the CPU, or back: like a kernel, it waits its turn in the stream."""
    return Kernel("copy", COPY, _name(tensor.dtype), 0, _size(tensor), layout="pinned" if pinned else "ordinary")


def lacks_rule(func, args: tuple) -> bool:
    """Whether an operation of PyTorch's computes more than it reads and writes, and no rule here knows how much."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS and has_sparse(args):
        return True
    if func.overloadpacket in flop_registry or name.startswith(_COMPUTES):
        attends = "scaled_dot_product" in name or "attention_forward" in name or "attention_backward" in name
        return not (attends or name in (*_PRODUCTS, "convolution", "convolution_backward", *_KNOWN_LINALG))
    return False


def has_sparse(args: tuple) -> bool:
    """Whether a tensor among the arguments is sparse."""
    return any(isinstance(arg, torch.Tensor) and arg.layout is not torch.strided for arg in args)


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _read_again(name: str, args: tuple) -> int:
    """The bytes of the passes that a softmax makes beyond the first, by the length of its rows."""
    backward = name.endswith("backward_data")
    row = args[0].shape[args[2 if backward else 1]] if args[0].dim() else 1
    if backward:
        return 0 if row <= _SHORT_ROW else _size(args[0]) * (1 if name.startswith("_log") else 2)
    return 2 * _size(args[0]) if row > _LONG_ROW else 0


def _layout(tensors: list[torch.Tensor]) -> str:
    """Where the channels of images lie: "nhwc" if they are last."""
    images = [tensor for tensor in tensors if tensor.dim() == 4]
    last = [not t.is_contiguous() and t.is_contiguous(memory_format=torch.channels_last) for t in images]
    return "nhwc" if any(last) else "nchw"


def _format(tensors: list[torch.Tensor]) -> str:
    return _name(tensors[0].dtype) if tensors else "fp32"


def _name(dtype: torch.dtype) -> str:
    return FORMATS.get(dtype, str(dtype).removeprefix("torch."))


def _is_even(tensors: list[torch.Tensor]) -> bool:
    """Whether TensorIterator's vectorised kernel can walk over all tensors; else a slower one does."""
    large = max(tensor.numel() for tensor in tensors)
    walked = [tensor for tensor in tensors if tensor.dim() and tensor.numel() > large // 64]
    if len({tensor.dtype for tensor in walked if tensor.dtype is not torch.bool}) > 1:
        return False
    return all(tensor.numel() == walked[0].numel() and _is_dense(tensor) for tensor in walked)


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return True
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def _count_launches(name: str, args: tuple) -> int:
    lists = lists_of(args)
    if lists and name.startswith(("_foreach", "_fused", "_amp_foreach")):
        chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
        tensors = TENSORS_A_LAUNCH[min(len(lists) + (name.startswith("_foreach") and not name.endswith("_")), 5)]
        return max(math.ceil(len(lists[0]) / tensors), math.ceil(chunks / _CHUNKS_A_LAUNCH))
    if name == "embedding_dense_backward":
        return 2 if args[1].numel() <= FEW_INDICES and not args[4] else 18
    if name in INDEX_PUT and args[3]:
        return 12
    if name == "topk":
        return 22 if selects_in_blocks(args[0], args[2]) else 2
    if name in ("sort", "argsort"):
        return 5 if length_of_sorted(args[0], args[1:]) <= SHORT_SORT else 14
    return _LAUNCHES.get(name, 1)


def selects_in_blocks(tensor: torch.Tensor, dim: int | None) -> bool:
    """aten/src/ATen/native/cuda/TensorTopK.cu, should_use_multiblock: several blocks of threads for a row."""
    row = tensor.shape[-1 if dim is None else dim] if tensor.dim() else 1
    rows = tensor.numel() // max(1, row)
    return row >= next(least for most, least in _LONG_SELECTION if rows <= most)


def places_of(indices: list) -> int:
    """How many places an index names, each of which may be a row."""
    return math.prod(torch.broadcast_shapes(*(each.shape for each in indices if each is not None)))


def format_of_recurrent(tensor: torch.Tensor) -> str:
    """The format in which cuDNN multiplies in a network over time, by torch's switch at this moment."""
    return _multiplied_as(tensor.dtype, torch.backends.cudnn.rnn)


def _multiplied_as(dtype: torch.dtype, switch) -> str:
    """The format in which a product of these numbers is computed, by torch's switch at this moment."""
    name = _name(dtype)
    return "tf32" if name == "fp32" and switch.fp32_precision == "tf32" else name


def _multiply(name: str, args: tuple, moved: int) -> Kernel:
    matrices = [arg for arg in args if isinstance(arg, torch.Tensor)]
    a, b = matrices[:2] if name in ("mm", "bmm", "mv", "_scaled_mm") else matrices[1:3]
    batch = a.shape[0] if a.dim() == 3 else 1
    rows, depth = a.shape[-2:]
    columns = b.shape[-1] if b.dim() > 1 else 1
    kind = _multiplied_as(a.dtype, torch.backends.cuda.matmul)
    # Tensor cores load 16 bytes at a time, where the rows of both matrices and of the result begin at such steps.
    lengths = [_length(tensor) for tensor in (a, b)] + [columns]
    even = all(length * a.element_size() % 16 == 0 for length in lengths)
    depth *= 4 if a.is_complex() else 1  # real products
    flops = 2 * batch * rows * columns * depth
    across = (_step(a, -1) > 1) + (_step(b, -2 if b.dim() > 1 else -1) > 1)
    return Kernel(name, PRODUCT, kind, flops, moved, 1, (batch, rows, columns, depth), even, across=across)


def _step(matrix: torch.Tensor, dim: int) -> int:
    """The elements from one number to the next along a dimension; 1 where that is not known, or there is but one."""
    return matrix.stride(dim) if matrix.layout is torch.strided and matrix.shape[dim] > 1 else 1


def _length(matrix: torch.Tensor) -> int:
    """The elements from one row of a matrix to the next, or from one column to the next, where columns are in order."""
    strides = matrix.stride()[-2:] if matrix.layout is torch.strided else ()
    return max(strides) if len(strides) == 2 else 8


def _attend(name: str, func, args: tuple, named: dict, result, moved: int) -> Kernel:
    backward = "backward" in name
    if "scaled_dot_product" in name:  # also where fewer heads have keys, which PyTorch's formula refuses
        query, key, value = args[1:4] if backward else args[:3]
        batch, heads, length, width = query.shape
        flops = 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1]) * (5 if backward else 2) // 2
    else:
        query = next(arg for arg in args if isinstance(arg, torch.Tensor))
        flops = flop_registry[func.overloadpacket](*args, out_val=result) if func.overloadpacket in flop_registry else 0
    if named.get("is_causal"):
        flops //= 2  # the blocks above the diagonal are left out
    layout = "flash" if "flash" in name or "cudnn" in name else "efficient"
    layout += " narrow" * (layout == "flash" and query.shape[-1] <= NARROW_HEAD) + " backward" * backward
    # fp32 is multiplied in three parts of TF32, whatever TF32's switch says: mem_eff_attention/gemm_kernel_utils.h
    return Kernel(name, ATTENTION, _name(query.dtype), flops, moved, _LAUNCHES.get(name, 1), None, True, layout)


def copied_to_convolve(name: str, args: tuple) -> list[torch.Tensor]:
    """What a convolution makes contiguous first: aten/src/ATen/native/Convolution.cpp.

    With channels last, where its image or its weight has them: ConvUtils.h, cudnn_conv_suggest_memory_format.
    """
    backward = name == "convolution_backward"
    image, weight = args[1:3] if backward else args[:2]
    wanted = args[10] if backward else (True, True)
    given = [*args[: int(backward)], *[image] * wanted[1], *[weight] * wanted[0]]
    last = any(t.dim() in CHANNELS_LAST and t.stride(1) == 1 < t.stride(-1) for t in (image, weight))
    order = CHANNELS_LAST[image.dim()] if last else torch.contiguous_format
    return [tensor for tensor in given if not tensor.is_contiguous(memory_format=order)]


def _convolve(name: str, args: tuple, results: list[torch.Tensor]) -> list[Kernel]:
    """A convolution as the matrix products that it comes to: forward, for its input's and for its weight's gradient."""
    backward = name == "convolution_backward"
    grad, image, weight = args[:3] if backward else (None, *args[:2])
    groups, transposed = (args[9], args[7]) if backward else (args[8], args[6])
    out = made = grad if backward else results[0]
    if transposed:
        image, out = out, image
    outputs, inputs = out.shape[1] // groups, image.shape[1] // groups
    taps, points, pixels = math.prod(weight.shape[2:]), out.shape[0] * math.prod(out.shape[2:]), _size(image)
    dtype = _multiplied_as(weight.dtype, torch.backends.cudnn.conv)
    shape = "depthwise " if groups > 1 and inputs == 1 else "grouped " if groups > 1 else "wide " if taps > 1 else ""
    layout = shape + _layout([image, out])
    flops = 2 * points * groups * outputs * inputs * taps
    moved = pixels + _size(out) + _size(weight)
    even = (inputs * weight.element_size()) % 16 == 0 and (outputs * weight.element_size()) % 16 == 0
    shapes = {
        "": (groups, points, outputs, inputs * taps),
        " (input)": (groups, points, inputs, outputs * taps),  # with a stride, too: zeros between are left out
        " (weight)": (groups, outputs, inputs * taps, points),
    }
    wanted = [""] if not backward else [part for part, asked in zip((" (input)", " (weight)"), args[10]) if asked]
    kernels = [Kernel(name + part, CONVOLUTION, dtype, flops, moved, 1, shapes[part], even, layout) for part in wanted]
    bias = args[10][2] if backward else args[2] is not None
    if bias:  # a kernel of its own: added in place, or summed
        kernels.append(Kernel(name + " (bias)", OTHER, dtype, 0, _size(made) * (1 if backward else 2)))
    copied = (Kernel("clone", OTHER, dtype, 0, 2 * _size(each), even=False) for each in copied_to_convolve(name, args))
    return [*copied, *kernels]
