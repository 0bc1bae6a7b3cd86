"""Which kernel attention takes on a GPU: aten/src/ATen/native/transformers/attention.cpp, cuda/sdp_utils.cpp and .h."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from effgpu.attaching.replacing import replaced
from effgpu.measuring.torch_internals import _get_sdp_priority_order
from effgpu.predicting.facts import ASSUMED
from effgpu.predicting.kernels import FORMATS
from effgpu.predicting.timeline import NO_BF16, NOT_TAKEN, SWITCHED_OFF

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

aten = torch.ops.aten
HALF_PRECISION = (torch.float16, torch.bfloat16)
MATH, FLASH, EFFICIENT, CUDNN = (
    int(kind.value)
    for kind in (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
)
# The lowest capabilities of the generations that these files tell apart.
_GENERATIONS = ((0, 0), (7, 0), (8, 0), (8, 6), (9, 0), (12, 0))
_D256 = ((9, 0), (10, 0), (10, 3))  # where cuDNN has heads of 256, from 9.23 on
# pytorch/pytorch#191085: before, memory-efficient attention took as many heads of keys as of queries only.
_EFFICIENT_SHARES = torch.__version__ >= (2, 14)
_TAKES_ONE_TEXT = torch.__version__ >= (2, 14)  # sdp_utils_cpp.h, normalize_unbatched_input


class _Asked(NamedTuple):
    """What attention is asked for; `trained` says whether its inputs need gradients."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    shares: bool
    trained: bool


def attention(
    recorder: "Recorder",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What stands for torch.nn.functional.scaled_dot_product_attention: the kernel that a GPU would choose."""
    if _TAKES_ONE_TEXT and query.dim() == key.dim() == value.dim() == 3:
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[None]
        given = query[None], key[None], value[None], attn_mask, dropout_p, is_causal
        return attention(recorder, *given, scale=scale, enable_gqa=enable_gqa)[0]
    trained = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    asked = _Asked(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, trained)
    chosen = _choose(asked, recorder.capability)
    recorder.holds_from = max(recorder.holds_from, _holds_from(asked, chosen, recorder.capability))
    recorder.cudnn_attends |= torch.backends.cuda.cudnn_sdp_enabled() and _takes_cudnn(asked, (9, 0))
    if chosen is None:
        raise RuntimeError("No available kernel. Aborting execution.")  # as PyTorch says it
    if chosen == CUDNN:
        recorder.say(ASSUMED, "cuDNN's attention takes as much and as long as flash attention")
    if chosen == FLASH or (chosen == CUDNN and attn_mask is None):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if chosen == MATH:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        given = query, key, value, attn_mask, dropout_p, is_causal, None
        formula = _why_none_is_fused(asked, recorder.capability), FORMATS.get(query.dtype, "")
        with replaced([(recorder.work, "formula", formula)]):
            return aten._scaled_dot_product_attention_math.default(*given, **options)[0]
    with recorder.values.leaving_out():
        bias = _bias(attn_mask, query)
    if chosen == CUDNN:
        given = query, key, value, bias, trained, dropout_p, is_causal, False
        return aten._scaled_dot_product_cudnn_attention.default(*given, scale=scale)[0]
    given = query, key, value, _padded(bias, query, key), trained, dropout_p, is_causal
    return aten._scaled_dot_product_efficient_attention.default(*given, scale=scale)[0]


def _why_none_is_fused(asked: _Asked, capability: tuple[int, int]) -> str:
    """What keeps attention from a fused kernel: by one of the names in `timeline`."""
    switches = torch.backends.cuda
    fused = {FLASH: switches.flash_sdp_enabled, EFFICIENT: switches.mem_efficient_sdp_enabled}
    fused[CUDNN] = switches.cudnn_sdp_enabled
    if not any(kind in fused and fused[kind]() for kind in _get_sdp_priority_order()):
        return SWITCHED_OFF
    return NO_BF16 if asked.query.dtype is torch.bfloat16 and capability < (8, 0) else NOT_TAKEN


def _choose(asked: _Asked, capability: tuple[int, int]) -> int | None:
    """select_sdp_backend: the first kernel in PyTorch's order that is switched on and takes what is given, or None.

    Where nobody has said otherwise, Hopper and the B200 begin with cuDNN's; that counts as the next one in the order.
    """
    switches = torch.backends.cuda
    takes = {
        FLASH: (switches.flash_sdp_enabled, _takes_flash),
        EFFICIENT: (switches.mem_efficient_sdp_enabled, _takes_efficient),
        MATH: (switches.math_sdp_enabled, lambda *_: True),
        CUDNN: (switches.cudnn_sdp_enabled, _takes_cudnn),
    }
    for kind in _get_sdp_priority_order():
        enabled, able = takes.get(kind, (lambda: False, None))
        if enabled() and able(asked, capability):
            return kind
    return None


def _holds_from(asked: _Asked, chosen: int | None, capability: tuple[int, int]) -> tuple[int, int]:
    """The lowest capability from which on, up to this one, a GPU chooses the same kernel; (0, 0) where all do."""
    holds = next(each for each in _GENERATIONS[::-1] if each <= capability)
    for older in (each for each in _GENERATIONS[::-1] if each < holds):
        if _choose(asked, older) != chosen:
            return holds
        holds = older
    return (0, 0)


def _takes_flash(asked: _Asked, capability: tuple[int, int]) -> bool:
    query, width = asked.query, asked.query.shape[-1]
    if not (asked.mask is None and capability >= (8, 0) and _is_half(asked, capability) and _fit_together(asked)):
        return False
    if not width == asked.key.shape[-1] == asked.value.shape[-1] <= 256:
        return False
    narrow_shared = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)  # memory of a multiprocessor
    if asked.trained and narrow_shared and width > 192 and (asked.dropout or width <= 224):
        return False
    if asked.causal and query.shape[-2] != asked.key.shape[-2]:
        return False
    return _in_order(asked) or width == 1


def _takes_efficient(asked: _Asked, capability: tuple[int, int]) -> bool:
    query, value = asked.query, asked.value
    if query.dtype not in (*HALF_PRECISION, torch.float32) or not _same_dtype(asked):
        return False
    if query.dtype is torch.bfloat16 and capability < (8, 0):
        return False
    if not (_fit_together(asked, _EFFICIENT_SHARES) and query.shape[-1] == asked.key.shape[-1]):
        return False
    step = _alignment(query, capability)
    if query.shape[-1] % step or value.shape[-1] % step or not _in_order(asked):
        return False
    given = query, asked.key, value
    return capability < (8, 0) or all(tensor.storage_offset() % step == 0 for tensor in given)


def _alignment(query: torch.Tensor, capability: tuple[int, int]) -> int:
    """minimum_gemm_alignment: the numbers that tensor cores load at a time, where there are some."""
    half = query.dtype in HALF_PRECISION
    return 16 // query.element_size() if capability >= ((7, 0) if half else (8, 0)) else 1


def _takes_cudnn(asked: _Asked, capability: tuple[int, int]) -> bool:
    query, key, mask = asked.query, asked.key, asked.mask
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not (capability >= (8, 0) and _is_half(asked, capability) and _fit_together(asked, mixed=True)):
        return False
    if mask is not None and (mask.requires_grad or not _masks(mask, query, key)):
        return False
    widths = query.shape[-1], asked.value.shape[-1]
    if any(width % 8 or width > (256 if capability in _D256 else 128) for width in widths):
        return False
    if asked.trained and max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        return False
    drops = asked.dropout and (asked.dropout * 16 % 1 or query.shape[-2] == 1)
    return not drops and key.shape[-2] != 1 and (_in_order(asked) or query.shape[-1] == 1)


def _is_half(asked: _Asked, capability: tuple[int, int]) -> bool:
    dtypes = HALF_PRECISION if capability >= (8, 0) else HALF_PRECISION[:1]
    return asked.query.dtype in dtypes and _same_dtype(asked)


def _same_dtype(asked: _Asked) -> bool:
    return asked.query.dtype is asked.key.dtype is asked.value.dtype


def _fit_together(asked: _Asked, may_share: bool = True, mixed: bool = False) -> bool:
    """Whether all have four dimensions, as many texts, and heads that fit or may share keys; and no length is 0.

    `mixed` says that values may be shared by other heads than keys.
    """
    query, key, value = given = asked.query, asked.key, asked.value
    if any(each.dim() != 4 for each in given) or not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if not (query.shape[-2] and key.shape[-2]):
        return False
    heads, *of_keys = (each.shape[1] for each in given)
    if len({heads, *of_keys}) == 1:
        return True
    if asked.shares:
        return may_share and not any(heads % each for each in of_keys) and (mixed or of_keys[0] == of_keys[1])
    return may_share and _EFFICIENT_SHARES and of_keys == [1, 1]


def _in_order(asked: _Asked) -> bool:
    """Whether the numbers of each head, and of the mask's rows, lie side by side."""
    given = asked.query, asked.key, asked.value, *([] if asked.mask is None else [asked.mask])
    return all(each.stride(-1) == 1 for each in given)


def _masks(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """check_attn_mask_shape: of two dimensions or of four, each of which is 1 or the scores'."""
    scores = (*query.shape[:3], key.shape[2])
    fits = all(size in (1, whole) for size, whole in zip(mask.shape[::-1], scores[::-1]))
    return mask.dim() in (2, 4) and fits


def _flash(query, key, value, dropout: float, causal: bool, scale: float | None) -> torch.Tensor:
    """pad_last_dim: heads become multiples of 8."""
    width = query.shape[-1]
    if pad := -width % 8:
        scale = scale or width**-0.5
        query, key, value = (torch.nn.functional.pad(each, (0, pad)) for each in (query, key, value))
    given = query, key, value, dropout, causal, False
    out = aten._scaled_dot_product_flash_attention.default(*given, scale=scale)[0]
    return out[..., :width] if pad else out


def _bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """convert_boolean_attn_mask."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))


def _padded(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """preprocess_mask and pad_bias: rows begin at multiples of 16."""
    if bias is None:
        return None
    if pad := -bias.shape[-1] % 16:
        length = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, pad))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
