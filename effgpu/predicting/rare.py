"""Work that comes only in some steps, which the one that is counted may lack: `if step % 10 == 0` in the code."""

import ast
from collections.abc import Iterator
from types import CodeType

from effgpu.attaching.sites import Site, called_name, once_a_file, parse

_PASSES = ("backward", "grad")


def find_remainders(code: CodeType) -> list[Site]:
    """The lines where this code asks for a remainder, to do something in every tenth call."""
    return [Site(code.co_filename, test.lineno) for test, _ in _asked(code)]


def find_passes(code: CodeType) -> list[Site]:
    """Those of them that decide whether there is a backward pass, or one more."""
    return [Site(code.co_filename, test.lineno) for test, rare in _asked(code) if rare]


def _asked(code: CodeType) -> Iterator[tuple[ast.expr, bool]]:
    lines = [line for *_, line in code.co_lines() if line]
    return ((test, rare) for test, rare in _remainders(code.co_filename) if min(lines) <= test.lineno <= max(lines))


@once_a_file
def _remainders(file: str) -> list[tuple[ast.expr, bool]]:
    """Such tests, in the order of their lines, and whether a pass depends on each."""
    found = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.If | ast.IfExp) and any(map(_is_remainder, ast.walk(node.test))):
            rare = isinstance(node, ast.If) and _has_pass(node.body) != _has_pass(node.orelse)
            found.append((node.test, rare))
    return sorted(found, key=lambda each: each[0].lineno)


def _is_remainder(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)


def _has_pass(statements: list[ast.stmt]) -> bool:
    return any(called_name(node) in _PASSES for each in statements for node in ast.walk(each))
