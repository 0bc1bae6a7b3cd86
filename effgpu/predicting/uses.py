"""What code does with a value that it reads: checks it, compares it, adds it up, or only tells it."""

import ast
import itertools
import sys
from collections import Counter
from collections.abc import Hashable, Iterable
from pathlib import Path
from types import FrameType

import torch

from effgpu.attaching.sites import called_name, once_a_file, parse

_TORCH = Path(torch.__file__).parent
# between the line that reads and the operation that is called for it
_INTERNAL = "_tensor.py", "_ops.py", "overrides.py", "utils"
_Spans = tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # where expressions begin and end: line and column
_BETWEEN = str(Path(__file__).parent), *(str(_TORCH / name) for name in _INTERNAL)


def makes_a_statistic(frame: FrameType) -> bool:
    """Whether what a frame reads is added to something (`correct += ...`), divided, or shown."""
    return _is_within(frame, _statistics(frame.f_code.co_filename))


def is_shown(frame: FrameType) -> bool:
    """Whether what a frame reads is only printed, logged, or made text."""
    return _is_within(frame, _shown(frame.f_code.co_filename))


def is_an_index(frame: FrameType) -> bool:
    """Whether what a frame reads is the place of a row, or how far `roll` moves: no size depends on it."""
    within, exactly = _indices(frame.f_code.co_filename)
    return _is_within(frame, within) or _position(frame) in exactly


def _is_within(frame: FrameType, spans: _Spans) -> bool:
    begin, end = _position(frame)
    return None not in (*begin, *end) and any(first <= begin and end <= last for first, last in spans)


def _position(frame: FrameType) -> tuple:
    """Where the expression begins and ends that a frame is at, as in _Spans."""
    line, end_line, column, end_column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    return (line, column), (end_line, end_column)


@once_a_file
def _statistics(file: str) -> _Spans:
    """Where such expressions begin and end. What is added to a name that is a size elsewhere, of a range, is none."""
    nodes, sizes = list(ast.walk(parse(file))), set()
    for node in nodes:
        if isinstance(node, ast.Slice) or called_name(node) == "range":
            sizes |= {ast.unparse(part) for part in ast.walk(node) if isinstance(part, _NAMES)}
    found = [node for node in nodes if _is_statistic(node) and ast.unparse(getattr(node, "target", node)) not in sizes]
    return _spans_of(found)


@once_a_file
def _shown(file: str) -> _Spans:
    return _spans_of(filter(_shows, ast.walk(parse(file))))


@once_a_file
def _indices(file: str) -> tuple[_Spans, _Spans]:
    """Places of rows in an array, and the expressions that take a tensor as one, as `x[:, i]` does.

    Not `x[i]`, which may be a list of layers or of sizes, and no slice with an end.
    """
    places, taking = [], []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
            slices = [part for part in node.slice.elts if isinstance(part, ast.Slice)]
            places += node.slice.elts * bool(slices)
            if slices and not any(each.lower or each.upper or each.step for each in slices):
                taking.append(node)
        elif isinstance(node, ast.Call) and called_name(node) == "roll":
            of_a_module = isinstance(node.func, ast.Name) or ast.unparse(node.func.value) in ("torch", "np", "numpy")
            places += node.args[of_a_module:]  # the first is what is rolled
    return _spans_of(filter(_is_plain, places)), _spans_of(taking)


def _is_plain(node: ast.expr) -> bool:
    """Whether it is a number that is read, or arithmetic of such: nothing in it makes a tensor or a list of a size."""
    parts = (part for part in ast.walk(node) if isinstance(part, ast.Call | ast.Slice | ast.List | ast.Tuple))
    return all(called_name(part) in ("int", "item", "round") for part in parts)


def _spans_of(nodes: Iterable[ast.expr]) -> _Spans:
    return tuple(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in nodes)


_NAMES = ast.Name | ast.Attribute | ast.Subscript


def _is_statistic(node: ast.AST) -> bool:
    adds = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return adds or divides or _shows(node)


def _shows(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and called_name(node) in _SHOW)


_SHOW = ("print", "debug", "info", "warning")


def find_reader() -> tuple[Hashable, FrameType]:
    """The place in the code that reads a value, in PyTorch or outside of it, and its frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti), frame


def is_in_while(frame: FrameType) -> bool:
    """Whether the nearest function that has a loop around what a frame reads has a `while` there, or no code to read.

    One without, such as `for sample in batch`, ends by itself.
    """
    caller: FrameType | None = frame
    while caller is not None:
        loops = _loops(caller.f_code.co_filename)
        if around := [is_while for lines, is_while in loops if (caller.f_lineno or 0) in lines]:
            return any(around)
        caller = caller.f_back if caller.f_code.co_name != "<module>" else None
    return True


_LOOPS = ast.For | ast.AsyncFor | ast.While | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@once_a_file
def _loops(file: str) -> list[tuple[range, bool]]:
    """The lines of each loop, and whether it is a `while`."""
    loops = (node for node in ast.walk(parse(file)) if isinstance(node, _LOOPS))
    return [(range(node.lineno, (node.end_lineno or node.lineno) + 1), isinstance(node, ast.While)) for node in loops]


def passing(frame: FrameType) -> bool | None:
    """The value with which the check passes that a frame is at; None where it is at none that can be read as one.

    A check is an assertion, or an `if` whose body ends in an error: `if not (a >= b).all(): raise ValueError`, or
    `ok = bool((a >= b).all())` before one. So is what a function returns of which one asks: `assert is_close(a, b)`.
    """
    test, passes = _checks(frame.f_code.co_filename).get(frame.f_lineno, (None, None))
    if test is None:
        return _passing_where_returned(frame)
    parts = {asked for _, asked in _parts(test, passes)}
    return parts.pop() if len(parts) == 1 else None


def _passing_where_returned(frame: FrameType) -> bool | None:
    """The same, of what a function returns to a check."""
    returned, caller = _returned(frame.f_code.co_filename).get(frame.f_lineno), frame.f_back
    if returned is None or caller is None:
        return None
    test, passes = _checks(caller.f_code.co_filename).get(caller.f_lineno, (None, None))
    wanted = _passing_where_returned(caller) if test is None else _find_part(caller, test, passes)
    return None if wanted is None else _find_part(frame, returned, wanted)


def _find_part(frame: FrameType, test: ast.expr, wanted: bool) -> bool | None:
    """What the part of a test has to be that a frame runs; None where it runs none as a whole."""
    spans = (_position(frame),)
    return next((asked for part, asked in _parts(test, wanted) if _spans_of([part]) == spans), None)


def _parts(test: ast.expr, wanted: bool) -> list[tuple[ast.expr, bool]]:
    """What a test asks the truth of, and what that has to be."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _parts(test.operand, not wanted)
    values = test.values if isinstance(test, ast.BoolOp) else []
    return [part for value in values for part in _parts(value, wanted)] or [(test, wanted)]


@once_a_file
def _returned(file: str) -> dict[int, ast.expr]:
    """By line: what a function returns there."""
    nodes = (node for node in ast.walk(parse(file)) if isinstance(node, ast.Return) and node.value)
    return {line: node.value for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


@once_a_file
def _checks(file: str) -> dict[int, tuple[ast.expr, bool]]:
    """By line: the test of the innermost check that has it, and whether it passes if the test is true."""
    found, named = {}, {}
    nodes = sorted((node for node in ast.walk(parse(file)) if isinstance(node, ast.stmt)), key=lambda node: node.lineno)
    for node in nodes[::-1]:  # so that a name stands for the first check of it that follows
        if isinstance(node, ast.Assert) or (isinstance(node, ast.If) and _fails(node.body[-1])):
            check = node.test, isinstance(node, ast.Assert)
            found |= dict.fromkeys(range(node.test.lineno, node.test.end_lineno + 1), check)
            named |= dict.fromkeys(_names(node.test), check)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            check = named.pop(node.targets[0].id, None)
            if check and _is_truth(node.value):
                found |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), check)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named.clear()
    return found


def _names(test: ast.expr) -> list[str]:
    """The names of which the truth alone is asked."""
    return [part.id for part, _ in _parts(test, True) if isinstance(part, ast.Name)]


def _is_truth(value: ast.expr) -> bool:
    asked = isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp)
    return asked or called_name(value) in ("bool", "all", "any", "item")


def only_tells(frame: FrameType) -> bool:
    """Whether a frame is at a test on which nothing depends but what is printed or logged."""
    return frame.f_lineno in _tellings(frame.f_code.co_filename)


@once_a_file
def _tellings(file: str) -> frozenset[int]:
    """The lines of such tests. What they tell may be put together in names that nothing else reads."""
    nodes = list(ast.walk(parse(file)))
    reads = _count_reads(nodes)
    tests = [node for node in nodes if isinstance(node, ast.If)]
    telling = [node.test for node in tests if all(_tells(each, node, reads) for each in _under(node))]
    return frozenset(line for test in telling for line in range(test.lineno, test.end_lineno + 1))


def _under(node: ast.If) -> list[ast.stmt]:
    return [*node.body, *node.orelse]


def _count_reads(nodes: Iterable[ast.AST]) -> Counter:
    return Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _tells(statement: ast.stmt, within: ast.If, reads: Counter) -> bool:
    if isinstance(statement, ast.If):
        return all(_tells(each, within, reads) for each in _under(statement))
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        here = _count_reads(ast.walk(within))
        return all(isinstance(target, ast.Name) and reads[target.id] == here[target.id] for target in targets)
    return called_name(statement) in _TELL


_TELL = ("print", "debug", "info", "warning", "warning_once", "warn", "error")


def _fails(last: ast.stmt) -> bool:
    return isinstance(last, ast.Raise | ast.Assert) or called_name(last) in ("_assert", "fail", "exit")


def is_compared(frame: FrameType) -> bool:
    """Whether a frame is at a test by `==` alone, such as `if token.item() == end:`."""
    return frame.f_lineno in _equalities(frame.f_code.co_filename)


@once_a_file
def _equalities(file: str) -> frozenset[int]:
    """The lines of such tests."""
    tests = [node.test for node in ast.walk(parse(file)) if isinstance(node, (ast.If, ast.While))]
    equal = [test for test in tests if isinstance(test, ast.Compare) and [*map(type, test.ops)] == [ast.Eq]]
    return frozenset(line for test in equal for line in range(test.lineno, test.end_lineno + 1))
