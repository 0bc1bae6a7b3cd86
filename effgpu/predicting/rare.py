"""What a step's code says that one walk does not show.

Work that comes only in some steps, which the one that is counted may lack: `if step % 10 == 0`. And questions that
fake tensors answer otherwise: `type(x) is torch.Tensor`.
"""

import ast
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from types import CodeType
from typing import NamedTuple

from effgpu.attaching.sites import Site, called_name, once_a_file, parse

_PASSES = ("backward", "grad")
_COPIES = ("deepcopy", "AveragedModel")  # of a model, as for a moving average or the best one
_CAPTURES = ("CUDAGraph", "make_graphed_callables")
_COUNTS = ("range", "enumerate")
_RANGES = ("range", "arange")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DRAWS = ("random", "rand", "uniform", "random_sample")
_SIZED = (  # whose arguments are sizes
    *("rand", "randn", "randint", "zeros", "ones", "empty", "full", "arange", "range", "reshape", "view", "expand"),
    *("repeat", "interpolate", "resize", "Resize", "RandomResizedCrop", "CenterCrop", "FakeData", "DataLoader"),
)
_SIZES = ("size", "batch_size", "max_length", "length", "seq_len")  # arguments that are sizes, whoever takes them


class _Rare(NamedTuple):
    """A test of a step's number, and the lines that it decides on which do this.

    `remainder` says that it asks for a remainder, and of what is not the round of a loop around it.
    """

    test: ast.expr
    remainder: bool
    passes: range
    copies: range
    trains_more: range


class Found(NamedTuple):
    """A line that decides what only some steps do, and the lines that do it, if these are known."""

    site: Site
    lines: range = range(0)


def find_remainders(code: CodeType) -> list[Site]:
    """The lines where this code asks for a remainder, to do something in every tenth call, not in each tenth round."""
    return [Site(code.co_filename, rare.test.lineno) for rare in _asked(code) if rare.remainder]


def find_rare(code: CodeType, what: str) -> list[Found]:
    """Where a step's number decides whether there is a backward pass, or one more, or of more ("passes"), whether a
    model is copied ("copies"), or that more weights are trained ("trains_more").
    """
    return [_found(code, rare.test, lines) for rare in _asked(code) if (lines := getattr(rare, what))]


def find_sizes(code: CodeType) -> list[Found]:
    """Where a step's number decides a size, or a loop changes one, as in a curriculum of longer and longer texts."""
    changed = {line for name, line in _changed_sizes(code.co_filename) if name == code.co_name}
    lines = sorted({*_sizes(code.co_filename), *changed})
    return [Found(Site(code.co_filename, line)) for line in lines if _is_within(code, line)]


def find_captures(code: CodeType) -> list[Found]:
    """Where this code's file makes a CUDA graph, which is replayed in place of the step that is seen."""
    return [Found(Site(code.co_filename, line)) for line in _captures(code.co_filename)]


def find_types(code: CodeType) -> list[Found]:
    """Where this code compares a tensor's exact type, which is another one on fake tensors."""
    return [Found(Site(code.co_filename, line)) for line in _types(code.co_filename) if _is_within(code, line)]


def find_chances(code: CodeType) -> list[Found]:
    """Where chance decides whether something is sent to the GPU, as of a policy that explores."""
    return [_found(code, test, lines) for test, lines in _chances(code.co_filename) if _is_within(code, test.lineno)]


@once_a_file
def _chances(file: str) -> list[tuple[ast.expr, range]]:
    """Tests of random numbers, with the lines that send something, where those of the other case do not."""
    found = []
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.If) and any(map(_draws, ast.walk(node.test))):
            cases = [each for each in (node.body, node.orelse) if any(map(_sends, _inside(each)))]
            found += [(node.test, range(each[0].lineno, each[-1].end_lineno + 1)) for each in cases if len(cases) == 1]
    return found


def _sends(node: ast.AST) -> bool:
    return called_name(node) in ("to", "cuda")


def _draws(node: ast.AST) -> bool:
    return called_name(node) in _DRAWS


@once_a_file
def _types(file: str) -> list[int]:
    compared = [node for node in ast.walk(parse(file)) if isinstance(node, ast.Compare)]
    sides = {node: (node.left, *node.comparators) for node in compared}
    asked = [node for node in compared if any(called_name(side) == "type" for side in sides[node])]
    return [node.lineno for node in asked if any(map(_names_tensor, sides[node]))]


def _names_tensor(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("Tensor", "Parameter")


@once_a_file
def _captures(file: str) -> list[int]:
    return [node.lineno for node in ast.walk(parse(file)) if called_name(node) in _CAPTURES]


def _found(code: CodeType, test: ast.expr, lines: range) -> Found:
    return Found(Site(code.co_filename, test.lineno), lines)


def _asked(code: CodeType) -> Iterator[_Rare]:
    return (rare for rare in _tests(code.co_filename) if _is_within(code, rare.test.lineno))


def _is_within(code: CodeType, line: int) -> bool:
    lines = [line for *_, line in code.co_lines() if line]
    return min(lines) <= line <= max(lines)


@once_a_file
def _tests(file: str) -> list[_Rare]:
    """The tests of a file that ask for a remainder, or compare what counts the rounds of a loop, by their lines."""
    found = []
    nodes = _read(file)
    losses = {name for node, _ in nodes if called_name(node) == "backward" for name in _names(node)}
    passes = partial(_passes, losses=losses)
    loops = [node for node, _ in nodes if isinstance(node, ast.For)]
    rounds = [(range(node.lineno, node.end_lineno + 1), {*_counted(node)}) for node in loops]
    for node, counters in nodes:
        if isinstance(node, ast.If | ast.IfExp):
            parts = [*ast.walk(node.test)]
            asked = [part.left for part in parts if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]
            later = {True, False} if asked else {truth for part in parts for truth in _later(part, counters)}
            if later:
                around = {name for lines, names in rounds if node.lineno in lines for name in names}
                remainder = any(not around & _in_arithmetic(each) for each in asked)
                comes = (_comes(node, later, does) for does in (passes, _copies, _unfreezes))
                found.append(_Rare(node.test, remainder, *comes))
    return sorted(found, key=lambda rare: rare.test.lineno)


def _read(file: str) -> list[tuple[ast.AST, set[str]]]:
    """The nodes of a file's code, each with the names there that count the rounds of a loop."""
    shared: set[str] = set()  # by all functions: what is an object's, or declared to be global
    scopes = [*_scopes(parse(file), set(), shared)]
    return [(node, counters | shared) for nodes, counters in scopes for node in nodes]


def _scopes(scope: ast.AST, outer: set[str], shared: set[str]) -> Iterator[tuple[list[ast.AST], set[str]]]:
    """The nodes of the own code of a file or a function, with the names that count in it; then of the functions in it.

    `outer` are the names that count around it, which a function may give to something of its own.
    """
    nodes = [*_own(scope)]
    bars = {name for node in nodes for name in _enumerated(node)}
    counted = {name for node in nodes for name in _counted(node, bars)}
    declared = {name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names}
    shared |= {name for name in counted if name in declared or name.startswith(".")}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    counters = counted | (outer - (bound - declared))
    counters |= {name for node in nodes for name in _counted_on(node, counters)}
    yield nodes, counters
    for node in nodes:
        if isinstance(node, _FUNCTIONS):
            yield from _scopes(node, counters, shared)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """What is in it, and not in a function that it holds; that function itself, too."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _FUNCTIONS):
            yield from _own(node)


def _comes(node: ast.If | ast.IfExp, later: set[bool], does: Callable[[ast.AST], bool]) -> range:
    """The lines of what is done in later steps, if it does this more often than what is done else."""
    if isinstance(node, ast.IfExp):
        return range(0)
    if_true, if_false = (_count(statements, does) for statements in (node.body, node.orelse))
    if if_true == if_false or (if_true > if_false) not in later:
        return range(0)
    statements = node.body if if_true > if_false else node.orelse
    return range(statements[0].lineno, statements[-1].end_lineno + 1)


def _count(nodes: Iterable[ast.AST], does: Callable[[ast.AST], bool]) -> int:
    """How many of these nodes, and of those in them, do this at most: of an `if`, either what follows or what else."""
    found = 0
    for node in nodes:
        found += does(node)
        if isinstance(node, ast.If):
            found += max(_count(node.body, does), _count(node.orelse, does))
        elif not isinstance(node, ast.Expr) or not does(node):  # whose call would count twice
            found += _count(ast.iter_child_nodes(node), does)
    return found


def _inside(statements: list[ast.stmt]) -> Iterator[ast.AST]:
    return (node for each in statements for node in ast.walk(each))


def _passes(node: ast.AST, losses: set[str]) -> bool:
    """Whether it is a backward pass, or adds to what one begins at, such as a loss that comes later."""
    added = _added(node)
    adds = added and _name(added[0]) in losses and not isinstance(added[1], ast.Constant)
    return called_name(node) in _PASSES or bool(adds)


def _copies(node: ast.AST) -> bool:
    return called_name(node) in _COPIES


def _unfreezes(node: ast.AST) -> bool:
    """Whether it sets `requires_grad` to True, or calls what is named like that."""
    if isinstance(node, ast.Assign):
        is_true = isinstance(node.value, ast.Constant) and node.value.value is True
        return is_true and any(
            isinstance(each, ast.Attribute) and each.attr == "requires_grad" for each in node.targets
        )
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(each.value for each in node.keywords)]
    freezes = any(isinstance(each, ast.Constant) and not each.value for each in given)
    return called_name(node).startswith("unfreeze") or (called_name(node) == "requires_grad_" and not freezes)


@once_a_file
def _sizes(file: str) -> list[int]:
    """The lines that give a name what a step's number decides, where that name is used as a size."""
    nodes = _read(file)
    functions = {node.name for node, _ in nodes if isinstance(node, ast.FunctionDef)}
    uses = [(node, sizes) for node, counters in nodes if (sizes := _sizes_in(node)) and not counters & sizes]
    uses += [(node, sizes) for node, counters in nodes if (sizes := _accumulated(node, counters))]
    found = []
    for node, counters in nodes:
        if isinstance(node, ast.If) and any(_later(part, counters) for part in ast.walk(node.test)):
            given = [each for each in _inside(node.body) if isinstance(each, ast.Assign) and _is_number(each.value)]
            within = {id(part) for each in node.body for part in ast.walk(each)}  # as where a text is sampled
        else:
            within = set()
            given = [node] if isinstance(node, ast.Assign) and _follows(node.value, counters, functions) else []
        names = {target.id for each in given for target in each.targets if isinstance(target, ast.Name)}
        names -= {_indexed(each.value) for each in given}  # rows in another order
        names -= counters
        if names and any(names & sizes for use, sizes in uses if id(use) not in within):
            found.append(node.lineno)
    return sorted(found)


@once_a_file
def _changed_sizes(file: str) -> list[tuple[str, int]]:
    """The lines by which a loop that trains makes a size of itself, as rows *= 2 does; with the name of their code."""
    tree = parse(file)
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)}
    calls = {name: {*map(called_name, ast.walk(node))} for name, node in functions.items()}
    trainers = more = {"step", "backward"}
    while more:
        more = {name for name, called in calls.items() if called & more} - trainers
        trainers = trainers | more
    found, places = [], {name for node in ast.walk(tree) for name in _places(node)}
    for scope in (tree, *functions.values()):
        loops = [node for node in _own(scope) if isinstance(node, ast.For | ast.While)]
        for loop in loops:
            inside = [*_own(loop)]
            if trainers.isdisjoint(map(called_name, inside)):
                continue
            sizes = {name for node in inside for name in _sizes_given(node, functions)}
            lines = [node.lineno for node in inside if _changes(node, places) in sizes]
            found += [(getattr(scope, "name", "<module>"), line) for line in lines]
    return found


def _changes(node: ast.AST, places: set[str]) -> str | None:
    """The name to which a statement gives arithmetic of itself; None, also where it adds a number to a place."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.FloorDiv):
        return _name(node.target)
    if added := _added(node):
        target, value = added
        if isinstance(value, ast.Constant):
            return name if (name := _name(target)) not in places else None
    elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Name):
        target, value = node.targets[0], node.value
    else:
        return None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod):  # it begins again
        return None
    return name if (name := _name(target)) in _in_arithmetic(value) else None


def _places(node: ast.AST) -> set[str]:
    """The names that a slice or a range begins at, as of a place in the data."""
    if isinstance(node, ast.Slice):
        return _in_arithmetic(node.lower)
    return _in_arithmetic(node.args[0]) if called_name(node) in _RANGES and len(node.args) > 1 else set()


def _sizes_given(node: ast.AST, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The names that a call, or a slice, takes as sizes, also by a function of the file's that takes them as such."""
    if isinstance(node, ast.Slice):
        return _in_arithmetic(node.upper) - _places(node)
    if not isinstance(node, ast.Call):
        return set()
    sizes = _taken_as_sizes(node)
    if function := functions.get(called_name(node)):
        names = [each.arg for each in function.args.args]
        taken = {each for part in ast.walk(function) for each in _sizes_given(part, {})}
        given = [*zip(names[names[:1] == ["self"] :], node.args), *((each.arg, each.value) for each in node.keywords)]
        sizes += [value for parameter, value in given if parameter in taken]
    return {each for size in sizes for each in _in_arithmetic(size)} - _places(node)


def _taken_as_sizes(call: ast.Call) -> list[ast.expr]:
    """What a call takes as sizes: not what it fills them with."""
    name, arguments = called_name(call), call.args
    if name == "full":
        arguments = arguments[:1]
    elif name in _RANGES:
        arguments = arguments[len(arguments) > 1 :][:1]  # where it ends, not where it begins
    elif name == "randint":
        arguments = [each for each in arguments if isinstance(each, ast.Tuple | ast.List | ast.Starred)]
    elif name not in _SIZED:
        arguments = []
    return [*arguments, *(each.value for each in call.keywords if each.arg in _SIZES or name in _SIZED)]


def _in_arithmetic(node: ast.AST | None) -> set[str]:
    """The names that a number is made of: none whose shape, or whose part, it is."""
    if isinstance(node, ast.BinOp):
        return _in_arithmetic(node.left) | _in_arithmetic(node.right)
    if isinstance(node, ast.Tuple | ast.List):
        return {name for each in node.elts for name in _in_arithmetic(each)}
    if called_name(node) in ("min", "max", "int", "round") if node else False:
        return {name for each in node.args for name in _in_arithmetic(each)}
    return {name} if node and (name := _name(node)) else set()


def _follows(value: ast.expr, counters: set[str], functions: set[str]) -> bool:
    """Whether a counter decides it, by a condition, a bound or a function of the file's: arithmetic gives a place."""
    if any(isinstance(part, ast.comprehension) for part in ast.walk(value)):  # which counts something of its own
        return False
    for part in ast.walk(value):
        if isinstance(part, ast.IfExp) and counters & _names(part.test):
            return True
        if called_name(part) in {"min", "max", *functions} and counters & _names(part):
            return True
    return False


def _indexed(value: ast.expr) -> str:
    """The name that a value is a part of, such as `rows` of `rows[order]`."""
    return value.value.id if isinstance(value, ast.Subscript) and isinstance(value.value, ast.Name) else ""


def _is_number(value: ast.expr) -> bool:
    """Whether it may be a number: arithmetic, with no other call than one that rounds."""
    return all(called_name(part) in ("int", "round") for part in ast.walk(value) if isinstance(part, ast.Call))


def _sizes_in(node: ast.AST) -> set[str]:
    """The names in what a call or a slice takes as sizes."""
    if isinstance(node, ast.Slice):
        return _names(node)
    if not isinstance(node, ast.Call):
        return set()
    return {name for each in _taken_as_sizes(node) for name in _names(each)}


def _accumulated(node: ast.AST, counters: set[str]) -> set[str]:
    """The names that decide with a counter when an optimizer steps: after how many batches."""
    if not isinstance(node, ast.If) or "step" not in map(called_name, _inside(node.body)):
        return set()
    counted = (part for part in ast.walk(node.test) if isinstance(part, ast.BinOp) and counters & _names(part.left))
    return _names(node.test) - counters if any(isinstance(part.op, ast.Mod | ast.Sub) for part in counted) else set()


def _names(node: ast.AST) -> set[str]:
    return {name for each in ast.walk(node) if (name := _name(each))}


def _name(node: ast.AST) -> str:
    """What a name, or an attribute of whatever object, is called; nothing of all else."""
    return node.id if isinstance(node, ast.Name) else f".{node.attr}" if isinstance(node, ast.Attribute) else ""


def _enumerated(node: ast.AST) -> Iterator[str]:
    """The name that is given what counts, such as a bar of progress: bar = tqdm(enumerate(loader))."""
    if isinstance(node, ast.Assign) and any(called_name(part) == "enumerate" for part in ast.walk(node.value)):
        yield from filter(None, map(_name, node.targets))


def _counted(node: ast.AST, bars: Collection[str] = ()) -> Iterator[str]:
    """The name that a loop counts its rounds in. An object's counts one by one: it may add up a loss."""
    added = _added(node)
    if isinstance(node, ast.For) and (called_name(node.iter) in _COUNTS or _name(node.iter) in bars):
        target = node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target
    elif added and (isinstance(node, ast.AugAssign) or isinstance(added[1], ast.Constant)):  # else: of tensors
        target = added[0]
    else:
        return
    ones = added and isinstance(added[1], ast.Constant) and added[1].value == 1
    if isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and ones):
        yield _name(target)


def _counted_on(node: ast.AST, counters: set[str]) -> Iterator[str]:
    """The name that is given a counter and something more, as in number = round + rounds * epoch."""
    added = node.value if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp) else None
    if added and isinstance(added.op, ast.Add) and {_name(added.left), _name(added.right)} & counters:
        yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def _added(node: ast.AST) -> tuple[ast.expr, ast.expr] | None:
    """What a statement adds something to, and what it adds: a += b, a = a + b, a = b + a."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target, node.value
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return None
    target, value = node.targets[0], node.value
    if not isinstance(value.op, ast.Add) or not (name := _name(target)):
        return None
    sides = (value.left, value.right), (value.right, value.left)
    return next(((target, added) for same, added in sides if _name(same) == name), None)


def _later(node: ast.AST, counters: set[str]) -> set[bool]:
    """What a comparison of a counter becomes in later steps: true, false, or now this, now that."""
    if not isinstance(node, ast.Compare):
        return set()
    left, right = (_name(side) in counters for side in (node.left, node.comparators[0]))
    if left == right:
        return set()
    if isinstance(node.ops[0], ast.Gt | ast.GtE):
        return {left}
    if isinstance(node.ops[0], ast.Lt | ast.LtE):
        return {right}
    first = any(isinstance(side, ast.Constant) and side.value == 0 for side in (node.left, node.comparators[0]))
    return {isinstance(node.ops[0], ast.NotEq)} if first else {True, False}  # the first step is over
