"""Work that comes only in some steps, which the one that is counted may lack: `if step % 10 == 0` in the code."""

import ast
from collections.abc import Iterator
from types import CodeType
from typing import NamedTuple

from effgpu.attaching.sites import Site, called_name, once_a_file, parse

_PASSES = ("backward", "grad")
_COPIES = ("deepcopy", "AveragedModel")  # of a model, as for a moving average or the best one
_CAPTURES = ("CUDAGraph", "make_graphed_callables")
_COUNTS = ("range", "enumerate")


class _Rare(NamedTuple):
    """A test of a step's number: whether it asks for a remainder, and what depends on it."""

    test: ast.expr
    remainder: bool
    passes: bool
    copies: bool


def find_remainders(code: CodeType) -> list[Site]:
    """The lines where this code asks for a remainder, to do something in every tenth call."""
    return [_site(code, rare) for rare in _asked(code) if rare.remainder]


def find_passes(code: CodeType) -> list[Site]:
    """The lines where a step's number decides whether there is a backward pass, or one more."""
    return [_site(code, rare) for rare in _asked(code) if rare.passes]


def find_copies(code: CodeType) -> list[Site]:
    """The lines where a step's number decides whether a model is copied."""
    return [_site(code, rare) for rare in _asked(code) if rare.copies]


def find_captures(code: CodeType) -> list[Site]:
    """The lines of this code's file that make a CUDA graph, which is replayed in place of the step that is seen."""
    return [Site(code.co_filename, line) for line in _captures(code.co_filename)]


@once_a_file
def _captures(file: str) -> list[int]:
    return [node.lineno for node in ast.walk(parse(file)) if called_name(node) in _CAPTURES]


def _site(code: CodeType, rare: _Rare) -> Site:
    return Site(code.co_filename, rare.test.lineno)


def _asked(code: CodeType) -> Iterator[_Rare]:
    lines = [line for *_, line in code.co_lines() if line]
    return (rare for rare in _tests(code.co_filename) if min(lines) <= rare.test.lineno <= max(lines))


@once_a_file
def _tests(file: str) -> list[_Rare]:
    """The tests of a file that ask for a remainder, or compare what counts the rounds of a loop, by their lines."""
    nodes = [*ast.walk(parse(file))]
    counters = {name for node in nodes for name in _counted(node)}
    found = []
    for node in nodes:
        if isinstance(node, ast.If | ast.IfExp):
            parts = [*ast.walk(node.test)]
            remainder = any(isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod) for part in parts)
            later = {True, False} if remainder else {truth for part in parts for truth in _later(part, counters)}
            if later:
                found.append(_Rare(node.test, remainder, *(_comes(node, later, names) for names in (_PASSES, _COPIES))))
    return sorted(found, key=lambda rare: rare.test.lineno)


def _comes(node: ast.If | ast.IfExp, later: set[bool], names: tuple[str, ...]) -> bool:
    """Whether what is done in later steps calls one of these, and what is done else does not."""
    if isinstance(node, ast.IfExp):
        return False
    if_true, if_false = _calls(node.body, names), _calls(node.orelse, names)
    return if_true != if_false and if_true in later


def _counted(node: ast.AST) -> Iterator[str]:
    """The name that a loop counts its rounds in."""
    if isinstance(node, ast.For) and called_name(node.iter) in _COUNTS:
        target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        target = node.target
    else:
        return
    if isinstance(target, ast.Name):
        yield target.id


def _later(node: ast.AST, counters: set[str]) -> set[bool]:
    """What a comparison of a counter becomes in later steps: true, false, or now this, now that."""
    if not isinstance(node, ast.Compare):
        return set()
    left, right = (isinstance(side, ast.Name) and side.id in counters for side in (node.left, node.comparators[0]))
    if left == right:
        return set()
    if isinstance(node.ops[0], ast.Gt | ast.GtE):
        return {left}
    return {right} if isinstance(node.ops[0], ast.Lt | ast.LtE) else {True, False}


def _calls(statements: list[ast.stmt], names: tuple[str, ...]) -> bool:
    return any(called_name(node) in names for each in statements for node in ast.walk(each))
