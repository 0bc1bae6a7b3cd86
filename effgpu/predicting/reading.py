"""What a step reads of tensors without values: numbers, lists and arrays where they are known, else what is taken."""

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributions import constraints

from effgpu.attaching import sites
from effgpu.measuring.torch_internals import FakeTensor, _disable_current_modes, storage_key
from effgpu.predicting.counting import HALF
from effgpu.predicting.facts import ASSUMED, CHOSEN
from effgpu.predicting.guesses import PASSED
from effgpu.predicting.translator import on_real_tensors
from effgpu.predicting.work import OWN_READS

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_WITHOUT_EFFECT = (*OWN_READS, "/nn/utils/clip_grad.py", "/nn/init.py", "/_tensor_str.py")


class Reading:
    """Every read of a value, which waits for the GPU, and gives what is known or guessed."""

    def __init__(self, recorder: "Recorder"):
        self.chosen_from = 0  # elements, or rows, of what an operation from elsewhere chooses from
        self.zeros: set[int] = set()  # storages of numbers that are zero in a healthy step
        self._chose: dict[str, int] = {}  # by line, the last step in which it chose by value
        self._recorder = recorder

    def number(self, func, args: tuple, kwargs: dict) -> bool | int | float:
        """The number that a tensor is read as: no fake tensor has one, but for constants."""
        tensor, recorder = args[0], self._recorder
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return func(*args, **kwargs)
        if not recorder.optimizers.working and not recorder.is_on_host(tensor):  # an optimizer counts on the CPU
            recorder.work.wait()
        if (known := recorder.values.of(tensor)) is None:
            return self._guess(tensor, None)
        with _disable_current_modes():
            number = known.item()
        return self._guess(tensor, number) if recorder.values.are_assumed(tensor) else number

    def _guess(self, tensor: torch.Tensor, counted: bool | int | float | None) -> bool | int | float:
        """What a tensor is read as whose number is not known, or follows from counts that are assumed."""
        where, truths, guesses = reader(), self._recorder.counting.truths, self._recorder.guesses
        if tensor.dtype is torch.bool:
            return truths[tensor] if tensor in truths else guesses.take(bool(counted), where)
        if counted is None and tensor.is_floating_point():
            return guesses.take(0.0 if storage_key(tensor) in self.zeros else 1.0, where)
        return guesses.take(1 if counted is None else counted, where, counted=counted is not None)

    def list(self, tensor: torch.Tensor) -> object:
        """What `tensor.tolist()` gives, after one wait: its numbers where they are known, else guesses."""
        if not tensor.dim():
            return tensor.item()
        if not self._recorder.is_on_host(tensor):
            self._recorder.work.wait(tensor.nbytes)
        values = self._recorder.values
        known, assumed = values.of(tensor), values.are_assumed(tensor)
        with on_real_tensors():
            if (known is None or assumed) and tensor.numel():
                number = self._guess(tensor, known.flatten()[0].item() if assumed else None)
                known = torch.full(tensor.shape, number, dtype=tensor.dtype) if known is None else known
            return known.tolist() if known is not None else torch.empty(tensor.shape).tolist()

    def array(self, tensor: torch.Tensor):
        """The NumPy array that a tensor is read as: its numbers where they are known, else a guess."""
        import numpy

        if (known := self.numbers_of(tensor)) is not None:
            with on_real_tensors():
                return known.numpy(force=True).copy()
        dtype = numpy.dtype(str(tensor.dtype).removeprefix("torch."))
        whole = dtype.kind in "iu"
        return numpy.full(tuple(tensor.shape), self._recorder.guesses.fill(reader(), whole=whole), dtype)

    def numbers_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The numbers of a tensor, on which a size depends; None if they are not known. Said if they are assumed."""
        if self._recorder.values.are_assumed(tensor) and (where := reader()):
            self._recorder.say(ASSUMED, f"{where} reads counts, taken as equal")
        return self._recorder.values.of(tensor)

    def constraints(self) -> Iterator[tuple[type, str, Callable]]:
        """(class, name, what stands there), so that what a distribution checks of its arguments is taken as passed."""
        for constraint in vars(constraints).values():
            if isinstance(constraint, type) and "check" in vars(constraint):
                yield constraint, "check", self._taken_as_met(constraint.check)

    def _taken_as_met(self, check: Callable) -> Callable:
        @functools.wraps(check)
        def check_met(constraint: object, value: torch.Tensor) -> torch.Tensor:
            met, values = check(constraint, value), self._recorder.values
            if isinstance(met, FakeTensor) and values.of(met) is None:
                values.fill(met, True)
                if where := reader():
                    self._recorder.say(ASSUMED, f"{where} {PASSED}")
            return met

        return check_met

    def choose_from(self, number: int, known: int | None = None, share: float = HALF) -> int:
        """How many of so many elements an operation takes that depends on values, which is said if it is not known."""
        taken = self._recorder.asked.taken
        if known is not None and taken is None:
            return known
        share = share if taken is None else taken
        if where := reader(inside=False):  # one line for all that a library chooses below it
            said, step = self._recorder.said, len(self._recorder.products)
            if self._chose.setdefault(where, step) != step:  # an earlier step's share may be another batch's
                for fact in [each for each in said if each.text.startswith(f"{where} takes ")]:
                    del said[fact]
            self._chose[where] = step
            text = f"{where} takes {100 * share:.3g}% of what it chooses from by value (taken={share:.3g})"
            self._recorder.say(CHOSEN, text)
        return round(share * number)

    def choose_rows(self, *_: object, **__: object) -> int:
        """The size of a result that an operation from elsewhere leaves open: a share of its first argument's rows."""
        return self.choose_from(self.chosen_from)


def reader(*, inside: bool = True) -> str | None:
    """The line that reads a value, with a library's that it called; None where PyTorch reads it for itself."""
    if sites.asked_by_torch(_WITHOUT_EFFECT):
        return None
    site = sites.find_site()
    return (site.where if inside else site.place) if site else "the step"
