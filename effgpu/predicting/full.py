"""What a script does where the GPU is full: one that catches it goes on with less, such as half the batch."""

import ast
import linecache
import re
import sys
from dataclasses import dataclass, field
from math import inf
from traceback import walk_stack

import torch

from effgpu.attaching.sites import LIBRARY, READER, Site, find_site, once_a_file, parse, whose
from effgpu.units import format_bytes

_NAMES_MEMORY = re.compile(r"memory|reduce_batch_size|\boom|_oom", re.IGNORECASE)  # in what handles the error


@dataclass
class Room:
    """What a script has on its GPU, and where it would catch that no more fits.

    `size` are the bytes that fit on the GPU, or the smallest of several. With `raises`, what does not fit raises an
    error where the script catches it. `caught` has the line of each such `try`, with the line that runs out first.
    """

    size: float = inf
    raises: bool = False
    caught: dict[Site, Site] = field(default_factory=dict)
    taken: int = 0
    ran_out: bool = False  # since the last tensor that fitted

    def run_out(self, size: int) -> None:
        """So many bytes do not fit. Raises torch.OutOfMemoryError where the script catches that, with `raises`."""
        if (catcher := _find_catcher()) is None:
            return
        self.caught.setdefault(catcher, find_site() or catcher)
        if self.raises:
            self.ran_out = True
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {format_bytes(size)} (predicted).")


def _find_catcher() -> Site | None:
    """The innermost `try` whose handlers speak of memory: it would catch running out of it now."""
    for frame, line in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if whose(file) in (READER, LIBRARY) and (starts := [each.start for each in _guarded(file) if line in each]):
            return Site(file, max(starts))
    return None


@once_a_file
def _guarded(file: str) -> list[range]:
    """The lines of each such `try`, up to its handlers."""
    source = "".join(linecache.getlines(file))
    tries = (node for node in ast.walk(parse(file)) if isinstance(node, ast.Try))
    handled = lambda node: "".join(ast.get_source_segment(source, each) for each in node.handlers)
    return [range(node.lineno, node.body[-1].end_lineno + 1) for node in tries if _NAMES_MEMORY.search(handled(node))]
