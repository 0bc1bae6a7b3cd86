"""Work that comes only in some steps, which the step that is counted may lack: "if step % 10 == 0"."""

import ast
import functools
import sys
from types import CodeType

from torch.optim import optimizer

from effgpu.attaching.sites import LIBRARY, READER, Site, parse, whose

_OPTIMIZERS = optimizer.__file__  # whose wrapper calls every optimizer's step


def updating() -> list[CodeType]:
    """The code of the optimizer's that is running now, a reader's or a library's."""
    frame, seen, found = sys._getframe(1), [], []
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _OPTIMIZERS:
            found = list(seen)  # what is further out is the training loop
        elif whose(file) in (READER, LIBRARY):
            seen.append(frame.f_code)
        frame = frame.f_back
    return found


def find_conditions(code: CodeType) -> list[Site]:
    """The lines where this code asks for a remainder, to do something in every tenth call."""
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    return [
        Site(code.co_filename, line) for line in _conditions(code.co_filename) if code.co_firstlineno <= line <= last
    ]


@functools.lru_cache(maxsize=64)
def _conditions(file: str) -> list[int]:
    tests = (node.test for node in ast.walk(parse(file)) if isinstance(node, (ast.If, ast.IfExp)))
    remainders = (node for test in tests for node in ast.walk(test) if isinstance(node, ast.BinOp))
    return sorted({node.lineno for node in remainders if isinstance(node.op, ast.Mod)})
