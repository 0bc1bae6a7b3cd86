"""Operations whose results have shapes that depend on values: from those that are known, else by a share that is said.

A rule gets the recorder and the operation's arguments. It gives the result, or None, where the operation itself, with
what the rule has prepared, gives one.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from effgpu.measuring.ops import name_arguments
from effgpu.measuring.torch_internals import _disable_current_modes
from effgpu.predicting.facts import ASSUMED

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

aten = torch.ops.aten
_MAX = 2  # the mode of an EmbeddingBag that takes the largest


def run(recorder: "Recorder", func, args: tuple, kwargs: dict) -> Any:
    """The result of one of `RULES`' operations; None where its own rule for fake tensors serves."""
    return RULES[func.overloadpacket](recorder, func, name_arguments(func, args, kwargs))


def _index(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """By masks: the places that they choose become numbers."""
    if not any(map(_is_mask, given["indices"])):
        return None
    places = _as_places(recorder, given["indices"])
    with recorder:
        return func(given["self"], places)


def _index_put(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """By masks, as the backward pass of an index does: they become places once more, as many as there are values.

    One number fills, without them: aten/src/ATen/native/TensorAdvancedIndexing.cpp, canDispatchToMaskedFill.
    """
    tensor, indices, values = given["self"], given["indices"], given["values"]
    fills = values.numel() == 1 and not given.get("accumulate")
    if fills or not any(map(_is_mask, indices)):
        return None
    named = [index for index in indices if index is not None]
    kept = tensor.dim() - sum(index.dim() if _is_mask(index) else 1 for index in named)  # behind the places,
    first = next(n for n, index in enumerate(indices) if index is not None)
    if all(index is not None for index in indices[first : first + len(named)]):
        kept -= first  # but for those before them
    count = values.shape[-kept - 1] if values.dim() > kept else 1
    places = _as_places(recorder, indices, None if count == 1 else count)  # 1 may be spread
    others = {name: given[name] for name in ("accumulate", "unsafe") if name in given}
    with recorder:
        return func(tensor, places, values, **others)


def _is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _as_places(recorder: "Recorder", indices: list, count: int | None = None) -> list[torch.Tensor | None]:
    """Indices with the places that each mask chooses; `count`, if it is known how many these are."""
    parts = [_find(recorder, index, count).unbind(1) if _is_mask(index) else (index,) for index in indices]
    return [index for part in parts for index in part]


def _masked_select(recorder: "Recorder", func, given: dict) -> torch.Tensor:
    tensor, mask = torch.broadcast_tensors(given["self"], given["mask"])
    found = _find(recorder, mask)
    with recorder:
        return aten.index.Tensor(tensor, list(found.unbind(1)))


def _nonzero(recorder: "Recorder", func, given: dict) -> torch.Tensor:
    return _find(recorder, given["self"])


def _find(recorder: "Recorder", tensor: torch.Tensor, chosen: int | None = None) -> torch.Tensor:
    """The places of a tensor's elements that are not zero: the GPU counts them, and the CPU waits for it.

    `chosen` says how many there are, where it is known otherwise.
    """
    known = recorder.reading.numbers_of(tensor)
    with _disable_current_modes():
        count = None if known is None else int(known.count_nonzero())
    if chosen is None:
        chosen = recorder.reading.choose_from(tensor.numel(), count, recorder.counting.share_of(tensor))
    found = _empty(recorder, (chosen, tensor.dim()), torch.int64)
    if chosen == count:
        recorder.values.keep(found, known.nonzero)
    recorder.note_operation(aten.nonzero.default, (tensor,), {}, found)
    recorder.work.wait()
    return found


def _unique(recorder: "Recorder", func, given: dict) -> tuple[torch.Tensor, ...] | None:
    """Distinct elements; the place of each among them, and how often it stands there, where these are asked for."""
    if given.get("dim") is not None:
        return None
    recorder.work.wait()
    tensor, known = given["self"], recorder.reading.numbers_of(given["self"])
    if known is not None and recorder.asked.taken is None:
        with _disable_current_modes():
            found = func(*(known if value is tensor else value for value in given.values()))
        made = [_empty(recorder, tuple(each.shape), each.dtype) for each in found]
        for fake, each in zip(made, found):
            recorder.values.keep(fake, lambda each=each: each)
        return tuple(made)
    most = 2 if tensor.dtype is torch.bool else recorder.counting.range_of(tensor)
    count = recorder.reading.choose_from(min(tensor.numel(), most))
    made = [_empty(recorder, (count,), tensor.dtype)]
    for name, shape in {"return_inverse": tensor.shape, "return_counts": (count,)}.items():
        made.append(_empty(recorder, shape if given.get(name) else (0,), torch.int64))
    recorder.counting.spread(made[-1], tensor.numel())
    recorder.note_operation(func, (tensor,), {}, made[0])
    if recorder.capability:  # cuda/UniqueCub.cu: what is sorted, and CUB's; with places, where these are asked for
        taken = 2 * tensor.element_size() + (3 * 8 if given.get("return_inverse") else 0)
        recorder.storages.take_for_a_moment(tensor.numel() * taken)
    return tuple(made[: len(func._schema.returns)])


def _bincount(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """As many counts as the largest number asks for, or `minlength`, if that is larger, or the number not known."""
    known, least, weights = recorder.reading.numbers_of(given["self"]), given.get("minlength", 0), given.get("weights")
    if known is None and not least:
        return None
    with _disable_current_modes():
        count = least if known is None or not known.numel() else max(least, int(known.max()) + 1)
    if known is None:
        recorder.say(ASSUMED, "the numbers that bincount gets are below its minlength")
    dtype = torch.int64 if weights is None else weights.dtype if weights.dtype is torch.float32 else torch.float64
    made = _empty(recorder, (count,), dtype)
    if weights is None:
        recorder.counting.spread(made, given["self"].numel())
    recorder.note_operation(func, (given["self"],), {}, made)
    recorder.work.wait()  # for the largest number
    return made


def _repeat(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """How often each row is taken, as indices; None where nobody knows how many these are."""
    if "repeats" not in given or "self" in given:
        return None
    repeats, size = given["repeats"], given.get("output_size")
    known = recorder.reading.numbers_of(repeats)
    if size is None and known is None:
        return None
    if size is None:
        recorder.work.wait()
        with _disable_current_modes():
            size = int(known.sum())
    made = _empty(recorder, (size,), repeats.dtype)
    recorder.values.follow(func, (repeats,), {}, made)
    recorder.note_operation(func, (repeats,), {}, made)
    return made


def _ctc_loss(recorder: "Recorder", func, given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """aten/src/ATen/native/cuda/LossCTC.cu: the losses, and log_alpha, which is kept, by the longest target.

    Of targets in one row, without their lengths, each counts as long as the mean.
    """
    scores, targets = given["log_probs"], given["targets"]
    steps, batch, _ = scores.shape
    longest = targets.shape[1] if targets.dim() > 1 else math.ceil(targets.numel() / batch)
    made = tuple(_empty(recorder, shape, scores.dtype) for shape in [(batch,), (batch, steps, 2 * longest + 1)])
    recorder.note_operation(func, (scores, targets), {}, made)
    return made


def _pack(recorder: "Recorder", func, given: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of a padded batch, step after step, by lengths that are on the CPU, and the rows of each step."""
    padded, known = given["input"], recorder.reading.numbers_of(given["lengths"])
    batch, steps = padded.shape[:2] if given["batch_first"] else (padded.shape[1], padded.shape[0])
    chosen = recorder.reading.choose_from(steps) if known is None else 0
    with _disable_current_modes():
        known = torch.full((batch,), max(1, chosen)) if known is None else known
        rows = (known[None] > torch.arange(int(known.max()))[:, None]).sum(1)
        total = int(rows.sum())
    return _copied(recorder, padded, (total, *padded.shape[2:])), recorder.of_host(rows)


def _unpack_gradient(recorder: "Recorder", func, given: dict) -> torch.Tensor:
    return _copied(recorder, given["grad"], tuple(given["input_size"]))


def _copied(recorder: "Recorder", tensor: torch.Tensor, shape: tuple) -> torch.Tensor:
    made = _empty(recorder, shape, tensor.dtype)
    recorder.note_operation(aten.clone.default, (made,), {}, made)
    return made


def _copy_sparse(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """A copy. Where equal places are added up, nobody knows how many are equal: as few as must be.

    A gradient that becomes a weight's is copied only as it sees us holding it: accumulate_grad.h, accumulateGrad.
    """
    tensor, adds_up = given["self"], func is aten._coalesce.default
    if tensor.layout is not torch.sparse_coo:
        return None
    with recorder:
        indices, values = tensor._indices(), tensor._values()
        most = math.prod(tensor.shape[: len(indices)]) if adds_up else len(values)
        parts = indices[:, :most], values[:most]
        if not (recorder.accumulates() and indices.is_contiguous() and values.is_contiguous()):
            parts = tuple(part.clone() for part in parts)
        made = torch.sparse_coo_tensor(*parts, tensor.shape, check_invariants=False)
        return made._coalesced_(adds_up or tensor.is_coalesced())


def _add_sparse(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """Rows are added, as an update does: aten/src/ATen/native/sparse/cuda/SparseCUDATensorMath.cu."""
    dense, other = given["self"], given["other"]
    if not isinstance(other, torch.Tensor) or (dense.layout, other.layout) != (torch.strided, torch.sparse_coo):
        return None
    if len(other._indices()) != 1:
        return None
    with recorder:
        return dense.index_add_(0, other._indices()[0], other._values(), alpha=given.get("alpha", 1))


def _bags(recorder: "Recorder", func, given: dict) -> tuple | None:
    """A GPU always notes the bag of each index: aten/src/ATen/native/cuda/EmbeddingBag.cu, _embedding_bag_cuda."""
    weight, indices, offsets = (given[name] for name in ("weight", "indices", "offsets"))
    if not recorder.capability:
        return None
    bags, width = len(offsets) - given.get("include_last_offset", False), weight.shape[1]
    shapes = [(bags, width), indices.shape, (bags,), (bags, width) if given.get("mode") == _MAX else (0,)]
    result = tuple(_empty(recorder, shape, (indices if n else weight).dtype) for n, shape in enumerate(shapes))
    others = {name: value for name, value in given.items() if name not in ("weight", "indices", "offsets")}
    recorder.note_operation(func, (weight, indices, offsets), others, result)
    return result


def _lstsq(recorder: "Recorder", func, given: dict) -> tuple[torch.Tensor, ...]:
    """aten/src/ATen/native/BatchLinearAlgebra.cpp, linalg_lstsq_out: matrices of full rank, all that a GPU takes.

    Residuals are there where there are more equations than unknowns. The matrix and the right side are copied first.
    """
    matrix, right = given["self"], given["b"]
    (rows, columns), is_vector = matrix.shape[-2:], right.shape == matrix.shape[:-1] and matrix.dim() > right.dim()
    sides = right[..., None].shape if is_vector else right.shape
    batch = torch.broadcast_shapes(matrix.shape[:-2], sides[:-2])
    solution, residuals = (*batch, columns, sides[-1]), (*batch, sides[-1]) if rows > columns else (0,)
    solution = solution[:-1] if is_vector else solution
    recorder.storages.take_for_a_moment((matrix.numel() + right.numel()) * matrix.element_size())
    places = _empty(recorder, (0,), torch.int64)
    made = [_empty(recorder, shape, matrix.dtype) for shape in (solution, residuals)]
    result = *made, places, _empty(recorder, (0,), matrix.dtype.to_real())
    recorder.note_operation(func, (matrix, right), {}, result)
    return result


def _log_sigmoid(recorder: "Recorder", func, given: dict) -> tuple[torch.Tensor, torch.Tensor] | None:
    """aten/src/ATen/native/cuda/ActivationLogSigmoidKernel.cu: the buffer for a backward pass is a CPU's alone."""
    if not recorder.capability:
        return None
    tensor = given["self"]
    made = _empty(recorder, tensor.shape, tensor.dtype), _empty(recorder, (0,), tensor.dtype)
    recorder.note_operation(func, (tensor,), {}, made)
    return made


def _masked_by_sparse(recorder: "Recorder", func, given: dict) -> torch.Tensor | None:
    """What a dense tensor has where a sparse one has numbers."""
    mask = given["mask"]
    if mask.layout is not torch.sparse_coo or given["self"].layout is not torch.strided:
        return None
    with recorder:
        values = given["self"][tuple(mask._indices().unbind())]
        made = torch.sparse_coo_tensor(mask._indices(), values, mask.shape, check_invariants=False)
        return made._coalesced_(mask.is_coalesced())


def _empty(recorder: "Recorder", shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    made = aten.empty.memory_format(shape, dtype=dtype, device="cpu")
    recorder.see(made)
    return made


RULES: dict[Any, Callable] = {
    aten.index: _index,
    **dict.fromkeys((aten.index_put, aten.index_put_, aten._index_put_impl_), _index_put),
    aten.masked_select: _masked_select,
    aten.nonzero: _nonzero,
    aten.bincount: _bincount,
    aten.repeat_interleave: _repeat,
    **dict.fromkeys((aten._unique, aten._unique2, aten.unique_consecutive), _unique),
    aten._ctc_loss: _ctc_loss,
    **dict.fromkeys((aten.clone, aten._coalesce), _copy_sparse),
    aten._nnz: lambda recorder, func, given: len(given["self"]._values()),  # fake tensors remember another one's
    aten.add_: _add_sparse,
    **dict.fromkeys((aten._embedding_bag, aten._embedding_bag_forward_only), _bags),
    aten.sparse_mask: _masked_by_sparse,
    aten.log_sigmoid_forward: _log_sigmoid,
    aten.linalg_lstsq: _lstsq,
    aten._pack_padded_sequence: _pack,
    aten._pack_padded_sequence_backward: _unpack_gradient,
}
