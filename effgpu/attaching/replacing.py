"""Attributes of PyTorch's, of libraries and of Python that are others for a while."""

import contextlib
from collections.abc import Iterable, Iterator


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
                continue
            setattr(owner, name, value)
        yield
