"""What stands in libraries in place of what they ask, from the moment when they are imported, and no longer."""

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

from effgpu.attaching.sites import LIBRARY, OTHER, TORCH, whose
from effgpu.predicting.hardware import as_it_is

Changes = Callable[[ModuleType], contextlib.AbstractContextManager]


class _Found(NamedTuple):
    """Of all modules, what stands in those that have some names, and in those without, with how much that was."""

    modules: list[ModuleType]
    having: list[dict[str, object]]
    without: list[tuple[dict[str, object], int]]


_found: dict[frozenset[str], _Found] = {}  # by the names


class _Finder(MetaPathFinder):
    """Finds as the others do, and calls `found` with a module of these names as soon as it is loaded."""

    def __init__(self, names: list[str], found: Callable[[ModuleType], None]):
        self._names, self._found = names, found

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another one of us, too, which must not ask this one
        found = (finder.find_spec(name, path, target) for finder in later if hasattr(finder, "find_spec"))
        spec = next(filter(None, found), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_tell(module: ModuleType) -> None:
                with as_it_is():  # a library loads the binaries of the machine that is here
                    load(module)
                self._found(module)

            spec.loader.exec_module = load_and_tell
        return spec


@contextlib.contextmanager
def changed(changes: dict[str, Changes]) -> Iterator[None]:
    """Inside, each of these modules is within its context manager, as soon as it is imported."""
    with contextlib.ExitStack() as stack:
        finder = _Finder(list(changes), lambda module: stack.enter_context(changes[module.__name__](module)))
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        for name in changes:
            if name in sys.modules:
                stack.enter_context(changes[name](sys.modules[name]))
        yield


@functools.cache
def is_insider(file: str) -> bool:
    """Whether a file is PyTorch's, effgpu's or Python's own: neither a reader's nor a library's."""
    return whose(file) in (TORCH, OTHER)


@contextlib.contextmanager
def exchanged(those: Sequence[tuple[str, object, object]]) -> Iterator[None]:
    """Inside, modules have another object where they have imported one under this name: (name, it, the other).

    PyTorch's own are left alone. Afterwards also modules that were imported inside have the first again.
    """
    _exchange(those)
    try:
        yield
    finally:
        _exchange([(name, other, real) for name, real, other in those])


def _exchange(those: Sequence[tuple[str, object, object]]) -> None:
    by_name: dict[str, list[tuple[object, object]]] = {}
    for name, real, other in those:
        by_name.setdefault(name, []).append((real, other))
    for names in _having(frozenset(by_name)):
        for name in by_name.keys() & names.keys():
            for real, other in by_name[name]:
                if names[name] is real:
                    names[name] = other


def _having(wanted: frozenset[str]) -> list[dict[str, object]]:
    """What stands in the modules that have one of these names, or may get one; of thousands, mostly as last time."""
    modules, last = list(sys.modules.values()), _found.get(wanted)
    if last is None or len(modules) != len(last.modules) or not all(map(operator.is_, modules, last.modules)):
        last = _found[wanted] = _Found(modules, [], [])
        for module in modules:
            names = getattr(module, "__dict__", {})
            file = names.get("__file__") or ""
            if not isinstance(module, ModuleType) or is_insider(file):
                continue
            if whose(file) is LIBRARY and wanted.isdisjoint(names):  # not a reader's, which may get one for another
                last.without.append((names, len(names)))
            else:
                last.having.append(names)
    grown = [names for names, size in last.without if len(names) != size]
    return last.having + grown
