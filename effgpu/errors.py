"""Refusals: errors of effgpu's own where it also runs the reader's code, so that a caller can tell the two apart.

Each says in one sentence what was expected. Checks before anything runs may raise a plain TypeError or ValueError.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class Refusal(Exception):
    """Why effgpu does not go on. Raised as one of the built-in errors, too: those below."""


class BadArgument(Refusal, ValueError):
    """An argument of the wrong value, or code that works where effgpu does not look."""


class BadType(Refusal, TypeError):
    """An argument of the wrong kind."""


class CannotRun(Refusal, RuntimeError):
    """A step that cannot be measured."""


class CannotPredict(CannotRun):
    """A step that has no prediction; its argument says why."""

    def __str__(self) -> str:
        return f"predict: {self.args[0]}"


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """A question for the name that is closest to what was given: "did you mean --gpu?"; empty where none is close."""
    bare = {name.strip("-"): name for name in names}
    close = get_close_matches(given.strip("-"), bare, n=1, cutoff=0.75)
    return f"did you mean {bare[close[0]]}?" if close else ""
