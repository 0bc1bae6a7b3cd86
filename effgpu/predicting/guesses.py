"""What a step on fake tensors reads of values that nobody knows: a check passes, anything else is guessed and named."""

import ast
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch

from effgpu.attaching.sites import called_name, once_a_file, parse
from effgpu.errors import CannotPredict
from effgpu.predicting.facts import ASSUMED, CHOSEN, NOT_KNOWN, UNKNOWN, tell

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_TORCH = Path(torch.__file__).parent
# between the line that reads and the operation that is called for it
_INTERNAL = "_tensor.py", "_ops.py", "overrides.py", "utils"
_BETWEEN = str(Path(__file__).parent), *(str(_TORCH / name) for name in _INTERNAL)
_MOST_GUESSES, _LONGEST = 1000, 20.0  # at one place in a step, in so many seconds
_MOST_TRIES = 8  # walks, until no guess is left that could have led to an error


class Guess(NamedTuple):
    """A value that was read: the place in the code, the line of the reader's, and what it was taken as."""

    site: Hashable
    where: str
    value: bool | int | float

    @property
    def other(self) -> bool | int | float:
        """What to take instead, if an error follows."""
        return not self.value if isinstance(self.value, bool) else type(self.value)(0)


class Statistic(int):
    """A whole number that nobody knows and that is added up, divided or shown, such as that of right answers.

    Whoever compares it, makes an int of it, or gives it to PyTorch, depends on it: `depend` is called then.
    """

    def __new__(cls, value: int, depend: Callable[[], object]) -> "Statistic":
        """The number that is taken, and what to call."""
        made = super().__new__(cls, value)
        made.depend = depend
        return made

    def __reduce__(self) -> tuple:
        return int, (int.__pos__(self),)

    def __hash__(self) -> int:
        return int.__hash__(self)


def _stays(name: str) -> Callable:
    """An operation whose result with a number is a statistic again; a list that it repeats depends on it."""
    known = getattr(int, name)

    def calculate(self: Statistic, *others: object) -> object:
        result = known(self, *others)
        if result is NotImplemented and not all(isinstance(other, float | complex) for other in others):
            self.depend()
        return Statistic(result, self.depend) if type(result) is int else result

    return calculate


def _depends(name: str) -> Callable:
    known = getattr(int, name)

    def decide(self: Statistic, *others: object) -> object:
        self.depend()
        return known(self, *others)

    return decide


_STAY = "add radd sub rsub mul rmul neg pos floordiv rfloordiv mod rmod pow rpow abs round ceil floor"
_DEPEND = "eq ne lt le gt ge bool int index trunc invert divmod rdivmod"
_DEPEND += " and or xor lshift rshift rand ror rxor rlshift rrshift"
for _name in _STAY.split():
    setattr(Statistic, f"__{_name}__", _stays(f"__{_name}__"))
for _name in _DEPEND.split():
    setattr(Statistic, f"__{_name}__", _depends(f"__{_name}__"))


def notice_statistics(values: Iterable[object]) -> None:
    """What depends on statistics among arguments of PyTorch's, also in slices and lists, is not known."""
    for value in values:
        if type(value) is Statistic:
            value.depend()
        elif type(value) is slice:
            notice_statistics((value.start, value.stop, value.step))
        elif type(value) in (tuple, list):
            notice_statistics(value)


def makes_a_statistic(frame: FrameType) -> bool:
    """Whether what a frame reads is added to something (`correct += ...`), divided, or shown."""
    line, end_line, column, end_column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    if None in (line, end_line, column, end_column):
        return False
    spans = _statistics(frame.f_code.co_filename)
    return any(first <= (line, column) and (end_line, end_column) <= last for first, last in spans)


@once_a_file
def _statistics(file: str) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
    """Where such expressions begin and end. What is added to a name that is a size elsewhere, of a range, is none."""
    nodes, sizes = list(ast.walk(parse(file))), set()
    for node in nodes:
        if isinstance(node, ast.Slice) or called_name(node) == "range":
            sizes |= {ast.unparse(part) for part in ast.walk(node) if isinstance(part, _NAMES)}
    found = [node for node in nodes if _is_statistic(node) and ast.unparse(getattr(node, "target", node)) not in sizes]
    return tuple(((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)) for node in found)


_NAMES = ast.Name | ast.Attribute | ast.Subscript


def _is_statistic(node: ast.AST) -> bool:
    adds = isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add)
    divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
    return adds or divides or called_name(node) == "print" or isinstance(node, ast.JoinedStr)


def find_reader() -> tuple[Hashable, FrameType]:
    """The place in the code that reads a value, in PyTorch or outside of it, and its frame."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti), frame


def passing(frame: FrameType) -> bool | None:
    """The value with which the check passes that a frame is at; None where it is at none that can be read as one.

    A check is an assertion, or an `if` whose body ends in an error: `if not (a >= b).all(): raise ValueError`, or
    `ok = bool((a >= b).all())` before one.
    """
    test, passes = _checks(frame.f_code.co_filename).get(frame.f_lineno, (None, None))
    return None if test is None else _asked(test, passes)


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
    if isinstance(test, ast.Name):
        return [test.id]
    parts = test.values if isinstance(test, ast.BoolOp) else [test.operand] if isinstance(test, ast.UnaryOp) else []
    return [name for part in parts for name in _names(part)]


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


def _asked(test: ast.expr, wanted: bool) -> bool | None:
    """What each part of a test has to be; None where parts differ, or numbers are compared."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _asked(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        parts = {_asked(part, wanted) for part in test.values}
        return parts.pop() if len(parts) == 1 else None
    return wanted


class Guesses:
    """What a step has read of values that nobody knows, and what was taken for them. The recorder says which."""

    def __init__(self, recorder: "Recorder", answers: Mapping[Hashable, bool | int | float]):
        self.made: list[Guess] = []
        self.answers = dict(answers)  # what to take in place of a guess, by the place in code
        self.statistics = False  # whether a guess is one, such as that of right answers
        self._recorder = recorder
        self._asked: dict[Hashable, tuple[int, float]] = {}  # how often a place has decided by a guess, and since when
        self._counting: str | None = None  # inside of `tensor.item()`: why what is read is not known, if it is one

    def end_step(self) -> None:
        """A step is over: no loop of it goes on."""
        self._asked.clear()

    def take(self, value: bool | int | float, where: str | None, *, counted: bool = False) -> bool | int | float:
        """The value that is taken for one that nobody knows, which is said if it has an effect on the reader's code.

        If it is `counted`, sizes may depend on it.
        """
        site, frame = find_reader()
        if (
            where is None or self._recorder.optimizers.working
        ):  # whose learning rate may depend on it, not what it keeps
            return value
        passes = passing(frame) if isinstance(value, bool) else None
        if site in self.answers or passes is not None:
            value = self.answers.get(site, passes)
            checked = "checks a value, taken as passed"
            text = checked if isinstance(value, bool) else f"reads a number, taken as {value:g}"
            self._recorder.say(ASSUMED, f"{where} {text}")
            self.made.append(Guess(site, where, value))
            return value
        decides = isinstance(value, bool) or (isinstance(value, int) and is_compared(frame) and not counted)
        truth = value is True  # what a test is taken as: that two numbers are equal is none
        if decides and only_tells(frame):
            return False if isinstance(value, bool) else value
        if decides and type(value) is int:
            value = -1 - len(self.made)  # which equals nothing that is counted, nor another guess
        self.made.append(Guess(site, where, value))
        if decides:
            self._check_ends(site, where)
            self._recorder.say(UNKNOWN, f"{where} decides by a value, taken as {truth}")
        elif isinstance(value, float):
            self._recorder.say(ASSUMED, f"{where} reads a number, taken as {value:g}")
        else:
            why = f"{where} reads a whole number, taken as {value}: no size may depend on it"
            if self._counting is not None and makes_a_statistic(frame):
                self._recorder.say(ASSUMED, f"{where} reads a number, taken as {value}")
                self._counting = why
            elif counted:
                self._recorder.say(ASSUMED, f"{where} reads a count, taken as {value}")
            else:
                self._recorder.say(UNKNOWN, why)
        return value

    def _check_ends(self, site: Hashable, where: str) -> None:
        """Raise RuntimeError where a guess that is always the same does not let a loop end."""
        times, began = self._asked.get(site, (0, monotonic()))
        self._asked[site] = times + 1, began
        if times > _MOST_GUESSES and monotonic() - began > _LONGEST:
            text = f"{where} decides by a value that is not known here, and has done so {times:,} times in a step"
            raise CannotPredict(f"{text}: no loop ends by it, so give that one, or its library, a number of rounds")

    def read_item(self, read: Callable[[], object]) -> object:
        """What `tensor.item()` gives: a guess that is a statistic says itself who depends on it."""
        self._counting = ""
        try:
            value, why = read(), self._counting
        finally:
            self._counting = None
        if not why:
            return value
        self.statistics = True
        return Statistic(value, lambda: self._recorder.say(UNKNOWN, why))

    def answer_otherwise(self, kind: type = object) -> bool:
        """After an error: take the last guess of this kind the other way round in the next walk. False if all were."""
        made = (guess for guess in self.made if isinstance(guess.value, kind))
        left = [guess for guess in made if guess.site not in self.answers and guess.value != guess.other]
        if not left or len(self.answers) == _MOST_TRIES:
            return False
        self.answers[left[-1].site] = left[-1].other
        return True

    def tell(self) -> str:
        """The last things that were guessed, or are not known, for an error that may come of them; empty if none is."""
        said = self._recorder.said
        read = [f"{guess.where} reads a value, taken as {guess.value}" for guess in self.made[-2:]]
        return ", ".join(dict.fromkeys([*tell(said, CHOSEN)[-2:], *read, *tell(said, *NOT_KNOWN)[-1:]]))
