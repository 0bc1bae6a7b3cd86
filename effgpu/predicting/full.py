"""What a script does where the GPU is full: one that catches it goes on with less, such as half the batch."""

import ast
import functools
import linecache
import re
import sys

from effgpu.attaching.sites import LIBRARY, READER, Site, parse, whose

_NAMES_MEMORY = re.compile(r"memory|reduce_batch_size|\boom|_oom", re.IGNORECASE)  # in what handles the error


def find_catcher() -> Site | None:
    """The innermost `try` whose handlers speak of memory: it would catch running out of it now."""
    frame = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if whose(file) in (READER, LIBRARY):
            starts = [lines.start for lines in _guarded(file) if line in lines]
            if starts:
                return Site(file, max(starts))
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=64)
def _guarded(file: str) -> list[range]:
    """The lines of each such `try`, up to its handlers."""
    source = "".join(linecache.getlines(file))
    tries = (node for node in ast.walk(parse(file)) if isinstance(node, ast.Try))
    handled = lambda node: "".join(ast.get_source_segment(source, each) for each in node.handlers)
    return [range(node.lineno, node.body[-1].end_lineno + 1) for node in tries if _NAMES_MEMORY.search(handled(node))]
