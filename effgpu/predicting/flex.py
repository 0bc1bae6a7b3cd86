"""FlexAttention as in compiled code on a GPU: one kernel, which keeps what flash attention keeps."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

from effgpu.attaching.replacing import replaced
from effgpu.errors import CannotPredict
from effgpu.predicting.attention import HALF_PRECISION
from effgpu.predicting.facts import UNTIMED
from effgpu.predicting.recorder import Recorder

MODULE = "torch.nn.attention.flex_attention"

aten = torch.ops.aten


@contextlib.contextmanager
def in_one_kernel(recorder: Recorder, module: ModuleType) -> Iterator[None]:
    """Inside, the module's function is one kernel, for all blocks: which of them a mask leaves out is not known."""

    def attend(query, key, value, score_mod, block_mask, scale, options):
        if not recorder.compiled.has(sys._getframe(1)):
            raise CannotPredict(
                "FlexAttention is predicted in compiled code alone, as in torch.compile(flex_attention): "
                "elsewhere it writes all scores to memory"
            )
        if any(tensor.requires_grad for tensor in _captured(score_mod)):
            raise CannotPredict("FlexAttention whose score_mod has weights of its own cannot be predicted")
        recorder.say(UNTIMED, "FlexAttention takes, counted as if its mask left out no block")
        if key.shape[1] < query.shape[1] or (query.dtype in HALF_PRECISION and recorder.capability >= (8, 0)):
            recorder.note_capability()
            made = aten._scaled_dot_product_flash_attention.default(query, key, value, scale=scale)
        else:
            made = aten._scaled_dot_product_efficient_attention.default(query, key, value, None, True, scale=scale)
        out, sums = made[:2]
        return out, sums, sums

    changes = [
        (module, "flex_attention_hop", attend),
        (module, "_validate_device", lambda *tensors: None),  # a CPU has no backward pass of it
        (module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # else it compiles itself, and fuses nothing
    ]
    with replaced(changes):
        yield


def _captured(function) -> list[torch.Tensor]:
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return [value for value in cells if isinstance(value, torch.Tensor)]
