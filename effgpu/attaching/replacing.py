"""Attributes of PyTorch's, of libraries and of Python that are others for a while."""

import contextlib
from collections.abc import Iterable, Iterator

left_out: set[str] = set()  # what was to be replaced and was not there, for a test to look at


@contextlib.contextmanager
def replaced(values: Iterable[tuple[object, str, object]]) -> Iterator[None]:
    """Inside, the attributes of these names have these values; those that are not there are left out."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in values:
            if name in vars(owner):
                stack.callback(setattr, owner, name, vars(owner)[name])  # a static method as one
            elif hasattr(owner, name):
                stack.callback(delattr, owner, name)  # it is inherited
            else:
                left_out.add(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")
                continue
            setattr(owner, name, value)
        yield
