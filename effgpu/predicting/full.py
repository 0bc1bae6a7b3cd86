"""What a script does where the GPU is full: one that catches it goes on with less, such as half the batch."""

import ast
import functools
import linecache
import re
import sys

from effgpu.attaching.sites import LIBRARY, READER, Site, whose

_NAMES_MEMORY = re.compile(r"memory|reduce_batch_size|\boom|_oom", re.IGNORECASE)  # in what handles the error
_FUNCTION = ast.FunctionDef, ast.AsyncFunctionDef


def find_catcher() -> Site | None:
    """The `try` that would catch running out of memory now: the innermost whose handlers speak of memory."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if whose(code.co_filename) in (READER, LIBRARY):
            for function, lines, start in _catchers(code.co_filename):
                if function in (code.co_firstlineno, code.co_name) and frame.f_lineno in lines:
                    return Site(code.co_filename, start)
        frame = frame.f_back
    return None


@functools.cache
def _catchers(file: str) -> list[tuple[int | str, range, int]]:
    """For each such `try`: where its function begins, or "<module>"; the lines that it guards; its own line."""
    source = "".join(linecache.getlines(file))
    found: list[tuple[int | str, range, int]] = []

    def look(node: ast.AST, function: int | str) -> None:
        if isinstance(node, _FUNCTION):
            function = min(each.lineno for each in (node, *node.decorator_list))
        if isinstance(node, ast.Try):
            handlers = (ast.get_source_segment(source, handler) or "" for handler in node.handlers)
            if any(map(_NAMES_MEMORY.search, handlers)):
                found.append((function, range(node.lineno, node.body[-1].end_lineno + 1), node.lineno))
        for child in ast.iter_child_nodes(node):
            look(child, function)

    try:
        look(ast.parse(source), "<module>")
    except (SyntaxError, ValueError):
        return []
    return found[::-1]  # the innermost first
