"""A whole number that nobody knows, and that tells as soon as something depends on it."""

from collections.abc import Callable, Iterable


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
