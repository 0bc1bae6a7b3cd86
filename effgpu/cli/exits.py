"""How a command ends: its exit code, and what is wrong in one line. `main` says what each code means."""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

SUCCEEDED, FAILED, REFUSED, EXCEEDED, UNCLEAR, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141


class Exit(Exception):
    """The end of a command: the exit code, and in one line what is wrong."""


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Turn such an error inside into a refusal: an Exit that says the same in one line, with the error's notes."""
    try:
        yield
    except errors as error:
        lines = "; ".join([str(error), *getattr(error, "__notes__", ())])
        raise Exit(REFUSED, " ".join(lines.split())) from error


def check_installed(what: str, *libraries: str) -> None:
    """Refuse, naming what installs them, where libraries are missing that `what` is said to need."""
    if missing := [name for name in libraries if not find_spec(name)]:
        raise Exit(REFUSED, f"{what} needs more: pip install {' '.join(missing)}")
