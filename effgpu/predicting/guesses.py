"""What a step on fake tensors reads of values that nobody knows: a check passes, anything else is guessed and named."""

from collections.abc import Callable, Hashable, Mapping
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from effgpu.errors import CannotPredict
from effgpu.predicting.facts import ASSUMED, CHOSEN, UNKNOWN, tell
from effgpu.predicting.statistic import Statistic
from effgpu.predicting.uses import (
    find_reader,
    is_an_index,
    is_compared,
    is_in_while,
    makes_a_statistic,
    only_tells,
    passing,
)

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_MOST_GUESSES, _LONGEST = 1000, 20.0  # at one place in a step, in so many seconds
_PATIENCE = 30  # so many times as long for a loop that ends by itself, as one over the samples of an evaluation
_MOST_TRIES = 8  # walks, until no guess is left that could have led to an error
PASSED = "checks a value, taken as passed"


class Filled(int):
    """What all of an array is taken as: zeros, or ones, as sizes are divided by an array of numbers."""

    def __str__(self) -> str:
        return "ones" if self else "zeros"

    __format__ = object.__format__


class Guess(NamedTuple):
    """A value that was read: the place in the code, the line of the reader's, and what it was taken as."""

    site: Hashable
    where: str
    value: bool | int | float

    @property
    def other(self) -> bool | int | float:
        """What to take instead, if an error follows."""
        if isinstance(self.value, bool | Filled):
            return type(self.value)(not self.value)
        return type(self.value)(0)


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
        if where is None or self._recorder.optimizers.working:  # its learning rate may depend on it, not what it keeps
            return value
        passes = passing(frame) if isinstance(value, bool) else None
        if site in self.answers or passes is not None:
            value = self.answers.get(site, passes)
            text = PASSED if isinstance(value, bool) else f"reads a number, taken as {value:g}"
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
            self._check_ends(site, where, frame)
            self._say_unknown(f"{where} decides by a value, taken as {truth}")
        elif isinstance(value, float):
            self._recorder.say(ASSUMED, f"{where} reads a number, taken as {value:g}")
        else:
            why = f"{where} reads a whole number, taken as {value}: no size may depend on it"
            if self._counting is not None and makes_a_statistic(frame):
                self._recorder.say(ASSUMED, f"{where} reads a number, taken as {value}")
                self._counting = why
            elif counted:
                self._recorder.say(ASSUMED, f"{where} reads a count, taken as {value}")
            elif is_an_index(frame):
                self._recorder.say(ASSUMED, f"{where} reads a number, taken as {value}")
            else:
                self._say_unknown(why)
        return value

    def _say_unknown(self, why: str) -> None:
        """From here on, what the step takes is not known."""
        self._recorder.say(UNKNOWN, why, until=self._recorder.storages.now)

    def fill(self, where: str | None, *, whole: bool) -> int:
        """What an array is filled with that nobody knows: with zeros, and after an error with ones.

        An error by zeros tells that the code divides by them. If they are `whole` numbers, those may be sizes.
        """
        site, _ = find_reader()
        value = Filled(self.answers.get(site, 0))
        if where is not None:
            if value and whole:
                self._say_unknown(f"{where} reads whole numbers, taken as {value}: no size may depend on them")
            else:
                self._recorder.say(CHOSEN, f"{where} reads an array, taken as {value}")
            self.made.append(Guess(site, where, value))
        return int(value)

    def _check_ends(self, site: Hashable, where: str, frame: FrameType) -> None:
        """Raise RuntimeError where a guess that is always the same does not let a loop end."""
        times, began = self._asked.get(site, (0, monotonic()))
        self._asked[site] = times + 1, began
        longest = _LONGEST * (1 if is_in_while(frame) else _PATIENCE)
        if times > _MOST_GUESSES and monotonic() - began > longest:
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
        return Statistic(value, lambda: self._say_unknown(why))

    def answer_otherwise(self, *kinds: type) -> bool:
        """After an error: take the last guess of the first kind that has one left the other way round in the next walk.

        False if all were.
        """
        left = [guess for guess in self.made if guess.site not in self.answers and guess.value != guess.other]
        of_kind = ([guess for guess in left if isinstance(guess.value, kind)] for kind in kinds)
        found = next(filter(None, of_kind), [])
        if not found or len(self.answers) == _MOST_TRIES:
            return False
        self.answers[found[-1].site] = found[-1].other
        return True

    def tell(self) -> str:
        """The last things that were guessed, or are not known, for an error that may come of them; empty if none is."""
        said = self._recorder.said
        numbers = [guess for guess in self.made if not isinstance(guess.value, Filled)]
        read = [f"{guess.where} reads a value, taken as {guess.value}" for guess in numbers[-2:]]
        return ", ".join(dict.fromkeys([*tell(said, CHOSEN)[-2:], *read, *tell(said, UNKNOWN)[-1:]]))
