"""What PyTorch refuses and fake tensors let pass: tensors of several devices, or numbers of several formats."""

from collections.abc import Callable

import torch

from effgpu.measuring.ops import tensors_of

aten = torch.ops.aten
_ONE_FORMAT = {  # operations whose fractions are all of one dtype
    *(aten.mm.default, aten.addmm.default, aten.addmv.default, aten.mv.default, aten.cdist.default),
    *(aten._cdist_forward.default, aten.grid_sampler_2d.default, aten.grid_sampler_3d.default),
    *(aten.index_put.default, aten.index_put_.default, aten.index_add.default, aten.index_add_.default),
    *(aten.index_copy.default, aten.index_copy_.default),
}
_LABELS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
_TAKES_INDICES = {  # of the CPU's or of their own device's
    *(aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put),
}
_ARITHMETIC = {aten.add, aten.add_, aten.sub, aten.sub_, aten.mul, aten.mul_, aten.div, aten.div_}
_MIXES = {  # devices: some copy, and some want lengths and the like on the CPU
    *(aten.copy_, aten._to_copy, aten._foreach_copy_, aten._foreach_copy, aten.set_, aten.lift_fresh, aten._copy_from),
    *(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter),
    *(aten._pack_padded_sequence, aten._pad_packed_sequence, aten.tensor_split, aten.is_same_size),
    *(aten._ctc_loss, aten._use_cudnn_ctc_loss, aten._cudnn_ctc_loss, aten.ctc_loss, aten.segment_reduce),
}

# torch.use_deterministic_algorithms: operations of a GPU's that have no such algorithm. Losses of images, but for those
# that are not reduced, and averages over parts of an image are asked apart.
_BACKWARD = """avg_pool3d adaptive_max_pool2d fractional_max_pool2d fractional_max_pool3d reflection_pad1d
reflection_pad3d grid_sampler_2d grid_sampler_3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
upsample_trilinear3d _adaptive_avg_pool2d _adaptive_avg_pool3d _ctc_loss"""
_AT_RANDOM = {getattr(aten, f"{name}_backward") for name in _BACKWARD.split()}
_AT_RANDOM |= {aten.max_unpool2d, aten.max_unpool3d, aten.histc, aten.put_}


def check_determinism(func, args: tuple) -> None:
    """Raise RuntimeError, as PyTorch does, where only algorithms are allowed whose results are the same each time."""
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        return
    packet = func.overloadpacket
    reduces = packet is aten.nll_loss2d_forward and args[3] != 0
    if reduces or packet in _AT_RANDOM:
        text = "does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'"
        raise RuntimeError(f"{packet.__name__} {text}, without warn_only=True")


def check_formats(func, args: tuple) -> None:
    """Raise RuntimeError, as PyTorch does, where an operation has numbers of several formats that it does not mix."""
    if func in _ONE_FORMAT and not (func.overloadpacket in _TAKES_INDICES and args[2].numel() == 1):  # which fills
        given = [tensor for tensor in tensors_of(args) if tensor.is_floating_point()]
        if len(kinds := dict.fromkeys(tensor.dtype for tensor in given)) > 1:
            name = func.overloadpacket.__name__
            found = " and ".join(str(kind).removeprefix("torch.") for kind in kinds)
            raise RuntimeError(f"{name}: expected all of its tensors to have the same dtype, but got {found}")
    elif func in _LABELS and args[1].dtype not in (torch.int64, torch.uint8):
        kind = str(args[1].dtype).removeprefix("torch.")
        raise RuntimeError(f"expected labels of dtype int64 for the loss, but got {kind}")


def check_devices(
    func, args: tuple, given: list[torch.Tensor], is_on_gpu: Callable[[torch.Tensor], bool | None]
) -> None:
    """Raise RuntimeError, as PyTorch does, where an operation has tensors of the CPU and of the GPU.

    Numbers, of no dimension, may be on the CPU, if nothing is written into them, and indices, too. `is_on_gpu` gives
    None for what is not known.
    """
    packet = func.overloadpacket
    if func.namespace != "aten" or packet in _MIXES:
        return
    adds = packet in _ARITHMETIC
    placed = [(each, is_on_gpu(each)) for each in given if (each.dim() or adds) and each.numel()]
    if packet in _TAKES_INDICES:
        chosen_from = next((on_gpu for tensor, on_gpu in placed if tensor is args[0]), None)
        indices = {id(each) for each in args[1]}
        if chosen_from is False and any(on_gpu for tensor, on_gpu in placed if id(tensor) in indices):
            text = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            raise RuntimeError(text)
        placed = [(tensor, on_gpu) for tensor, on_gpu in placed if id(tensor) not in indices]
    written = args[0] if adds and packet.__name__.endswith("_") else None
    on_cpu = [tensor for tensor, on_gpu in placed if on_gpu is False and (tensor.dim() or tensor is written)]
    if on_cpu and any(on_gpu for _, on_gpu in placed):
        shape = tuple(on_cpu[0].shape)
        text = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        raise RuntimeError(f"{text} On the CPU is one of shape {shape}")


def check_array(name: str, kwargs: dict) -> None:
    """Raise TypeError, as PyTorch does, where a tensor on the GPU is read as an array without `force`."""
    if name == "__array__" or not kwargs.get("force", False):
        text = "can't convert cuda:0 device type tensor to numpy. "
        raise TypeError(f"{text}Use Tensor.cpu() to copy the tensor to host memory first.")


def tell_sparse(layout: object) -> str:
    """What is wrong with a sparse tensor that is not COO."""
    format = str(layout).removeprefix("torch.sparse_").upper()
    return f"a sparse tensor of the format {format} cannot be predicted: take COO, tensor.to_sparse()"
