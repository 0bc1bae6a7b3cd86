"""Loops over weights, gradients or buffers, and what PyTorch's foreach functions, which take lists, would run."""

from collections.abc import Iterable
from typing import NamedTuple

from effgpu.attaching.sites import Site
from effgpu.predicting.kinds import TENSORS_A_LAUNCH
from effgpu.predicting.timeline import FORWARD, KERNEL, LISTED, Event

_NORM = "linalg_vector_norm"
_NAMES = {_NORM: ("norm",), "clamp_": ("clamp_min_", "clamp_max_"), "clamp": ("clamp_min", "clamp_max")}
_SCALED, _ADDED = {"mul", "mul_"}, {"add", "add_", "sub", "sub_"}
_PLAIN, _LERP = "torch._foreach_{}", "torch._foreach_lerp_(averages, weights, 1 - decay)"


class Updates(NamedTuple):
    """A loop that does the same with each of several weights, gradients or buffers.

    `site` is the line from which the CPU calls most, `lines` are the loop's. `calls` and `rounds` are those of a step.
    `names` are its operations that take lists, too, `averages` says that they come to means of two weights each.
    """

    site: Site
    lines: range
    rounds: int = 0
    calls: int = 0
    names: tuple[str, ...] = ()
    averages: bool = False

    def find(self, event: Event) -> Site | None:
        """The line of the loop that runs kernels, itself and by no library."""
        if event.phase != FORWARD or not event.kernels or (event.inner and event.inner.inside):
            return None
        sites = (event.inner, event.site)
        return next((at for at in sites if at and at.file == self.site.file and at.line in self.lines), None)

    def split(self, events: Iterable[Event]) -> list[tuple[bool, list[Event]]]:
        """The events in their order, in parts: whether they are the loop's, and those in a row, with views before."""
        parts: list[tuple[bool, list[Event]]] = [(False, [])]
        views: list[Event] = []
        for event in events:
            if event.kind == KERNEL and event.phase == FORWARD and not (event.kernels or event.waits):
                views.append(event)
                continue
            if (inside := self.find(event) is not None) != parts[-1][0]:
                parts.append((inside, []))
            parts[-1][1].extend([*views, event])
            views = []
        parts[-1][1].extend(views)
        return parts

    def needed(self) -> list[str]:
        """The operations that lists need: they take a factor with what is added, and a mean in one call."""
        in_place = not {"add_", "sub_"}.isdisjoint(self.names)
        spared = {"mul"} if in_place else set()
        if self.averages:
            spared = _SCALED if in_place else _SCALED | {"copy_"}
        return [name for name in self.names if name not in spared]

    def instead(self) -> list[str]:
        """The functions that take lists."""
        if _NORM in self.names:
            return ["torch.nn.utils.clip_grad_norm_, which gives the norm, too"]
        names = self.needed()
        added = _LERP if self.averages else "torch._foreach_{}(..., alpha=...)" if "mul" in self.names else _PLAIN
        calls = [(added if name in _ADDED else _PLAIN, name) for name in names]
        return [text.format(each) for text, name in calls for each in _NAMES.get(name, (name,))]


def foreach_names(name: str) -> list[str]:
    """The functions that do with lists what an operation of this name does, if there are such."""
    return [f"_foreach_{each}" for each in _NAMES.get(name, (name,))]


def is_average(names: set[str]) -> bool:
    """Whether operations on weights alone come to means of two each."""
    return names <= _SCALED | _ADDED | {"copy_"} and bool(names & _SCALED) and bool(names & _ADDED)


def in_lists(events: Iterable[Event], loops: Iterable[Updates]) -> tuple[Event, ...]:
    """The events, with those of the loops as calls that take lists; what no such function does stays."""
    for loop in loops:
        parts = loop.split(events)
        events = [event for inside, part in parts for event in (_join(part, loop) if inside else part)]
    return tuple(events)


def _join(run: list[Event], loop: Updates) -> list[Event]:
    kept: list[Event] = []
    by_name: dict[str, list[Event]] = {name: [] for name in loop.names}
    for event in run:
        if len(event.kernels) == 1 and event.kernels[0].name in by_name:
            by_name[event.kernels[0].name].append(event)
        elif event.kernels:
            kept.append(event)
    return kept + [_as_list(by_name[name]) for name in loop.needed() if by_name[name]]


def _as_list(events: list[Event]) -> Event:
    """Events of one operation as a call that takes lists."""
    first = events[0].kernels[0]
    kernel = first._replace(
        name=f"_foreach_{first.name}",
        bytes=sum(event.kernels[0].bytes for event in events),
        launches=-(-len(events) // TENSORS_A_LAUNCH[1]),  # the fewest
        even=True,
    )
    calls = 1 + LISTED * sum(bool(event.lasting) for event in events)
    return events[0]._replace(kernels=(kernel,), calls=calls)
