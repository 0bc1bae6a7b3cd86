"""Refusals: errors of effgpu's own where it also runs the reader's code, so that a caller can tell the two apart.

Each says in one sentence what was expected. Checks before anything runs may raise a plain TypeError or ValueError.
"""


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
