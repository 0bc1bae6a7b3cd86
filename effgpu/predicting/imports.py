"""What stands in a library in place of what it asks of a GPU, from the moment when it is imported, and no longer."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from effgpu.predicting.hardware import as_it_is, replaced

Changes = Callable[[ModuleType], contextlib.AbstractContextManager]


class _Finder(MetaPathFinder):
    """Finds as the others do, and calls `found` with a module of these names as soon as it is loaded."""

    def __init__(self, names: list[str], found: Callable[[ModuleType], None]):
        self._names, self._found = names, found

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._names:
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
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


def replaced_in(module: ModuleType, **values: object) -> contextlib.AbstractContextManager:
    """Inside, the module's attributes of these names have these values."""
    return replaced((module, name, value) for name, value in values.items())
