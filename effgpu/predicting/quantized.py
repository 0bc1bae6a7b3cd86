"""bitsandbytes as on a GPU: weights in 4 and 8 bits, their products, and optimizer states that may move to the host.

It registers fake kernels for its operations. What it does otherwise on a CPU is replaced here, as it is imported; what
its CUDA kernels take beside their results follows bitsandbytes/backends/cuda/ops.py and backends/default/ops.py.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from effgpu.attaching.replacing import replaced
from effgpu.measuring.torch_internals import FakeTensor
from effgpu.predicting.kinds import PRODUCT, Kernel

LIBRARY = "bitsandbytes"
_LEAST_PAGED = 100_000  # elements: Optimizer8bit.get_state_buffer keeps smaller states on the GPU
_NESTED = 256  # numbers of a block whose scale is itself in 8 bits


@contextlib.contextmanager
def as_on_gpu(module: ModuleType, page: Callable[[torch.Size, torch.dtype], torch.Tensor]) -> Iterator[None]:
    """Inside, the library takes the way of a GPU; `page` makes an optimizer's state that may move to the host."""
    functions, optimizer = module.autograd._functions, module.optim.optimizer.Optimizer8bit

    def multiply(A, B, out=None, state=None, threshold=0.0, bias=None):
        state = state or functions.MatmulLtState()
        state.threshold = threshold or state.threshold
        return functions.MatMul8bitLt.apply(A, B, out, bias, state)

    def make_state(self, p, dtype=torch.float32):
        if self.is_paged and p.numel() >= _LEAST_PAGED:
            return page(p.shape, dtype)
        return torch.zeros_like(p, dtype=dtype, device=p.device)

    changes = [
        (module, "matmul", multiply),
        (functions, "matmul", multiply),
        (optimizer, "get_state_buffer", make_state),
        (module.nn.modules, "has_avx512bf16", lambda: False),  # a layout of a CPU's
    ]
    try:
        with replaced(changes):
            yield
    finally:  # it keeps a table that it has made
        tables = module.functional.name2qmap
        for name in [name for name, table in tables.items() if isinstance(table, FakeTensor)]:
            del tables[name]


def parts(note: Callable[[Kernel], None]) -> dict[str, Callable]:
    """By name, operations of the library's that are made of others. `note` gets the products in 8 bits."""
    ops = torch.ops.bitsandbytes

    def gemm_4bit(
        A, B, shapeB, absmax, blocksize, kind, bias=None, absmax_8bit=None, absmax_code=None, absmax_offset=None
    ):
        if absmax_8bit is not None:
            scales = ops.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, _NESTED, torch.float32)
            absmax = scales + absmax_offset
        weight = ops.dequantize_4bit.default(B, absmax, blocksize, kind, shapeB, A.dtype)
        return torch.nn.functional.linear(A, weight, bias)

    def int8_linear_matmul(A, B):
        rows, depth, columns = math.prod(A.shape[:-1]), A.shape[-1], B.shape[0]
        moved = rows * depth + columns * depth + 4 * rows * columns
        product = 1, rows, columns, depth
        note(Kernel("int8_linear_matmul", PRODUCT, "fp16", 2 * rows * columns * depth, moved, 1, product))
        return A.new_empty((*A.shape[:-1], columns), dtype=torch.int32)

    def int8_scaled_mm(A, B, row_stats, col_stats, bias=None, dtype=None):
        product = int8_linear_matmul(A, B)
        return ops.int8_mm_dequant.default(product, row_stats, col_stats, dtype=dtype or torch.float16, bias=bias)

    def int8_mixed_scaled_mm(A, CA, CB, SCA, SCB, outlier_cols=None, bias=None):
        return int8_scaled_mm(CA, CB, SCA, SCB, bias, A.dtype), A.new_empty((0,))

    made = gemm_4bit, int8_linear_matmul, int8_scaled_mm, int8_mixed_scaled_mm
    return {f"{LIBRARY}::{each.__name__}": each for each in made}
