"""What a script computes itself on the CPU, between its calls of PyTorch: NumPy, images, text, metrics."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from threading import get_ident
from time import thread_time
from types import CodeType, FrameType

from effgpu.attaching.sites import READER, Site, readers_frames, whose

# Seconds at once. Between two calls of a usual step, Python takes less, and that is part of what launching takes.
_LEAST = 0.001
_CALLS = 1000  # that are timed, to know what tracing them takes


class OwnWork:
    """Seconds of the script's own work in each step, by the line of its loop: what this thread uses of a CPU.

    The walk of a call of PyTorch's takes longer than the call does, so what is inside of one does not count.
    """

    def __init__(self, noted: Callable[[Site], None] = lambda site: None):
        self._noted = noted  # is told of each, when it is over
        self.counts = False  # whether the steps that follow are looked at
        self._steps: list[dict[Site, float]] = []
        self._loop: tuple[CodeType, ...] = ()
        self._thread, self._depth = get_ident(), 0
        self._line: Site | None = None  # that runs now
        self._since, self._calls = 0.0, 0  # of this thread's seconds; and calls of functions since then
        self._tracing = 0.0  # seconds that the trace of a call takes

    def next_step(self, loop: tuple[CodeType, ...]) -> None:
        """A step of this loop is over. Nothing is looked at under a debugger, which has its own trace."""
        self._line = None
        if not self.counts or sys.gettrace() not in (None, self._trace):
            return
        self._thread, self._loop = get_ident(), loop
        self._tracing = self._tracing or self._time_tracing()
        self._steps.append({})
        for frame in readers_frames():
            if frame.f_code in loop:
                frame.f_trace = self._trace
        sys.settrace(self._trace)

    def end(self) -> None:
        """Look at no more steps."""
        self.counts, self._line = False, None
        if sys.gettrace() == self._trace:
            sys.settrace(None)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """What is inside is no work of the loop's own."""
        self.enter("")
        try:
            yield
        finally:
            self.leave()

    def enter(self, caller: str, *, frees: bool = False) -> None:
        """PyTorch, or what frees a tensor, is called by code of this file: before, a library's may have run.

        Not where it `frees` what it computed: with it goes the graph, which takes the walk as long as work does.
        """
        if get_ident() == self._thread:
            if not self._depth and self._line and not frees and whose(caller) is READER:
                self._note()
            self._depth += 1

    def leave(self) -> None:
        """The call is over."""
        if get_ident() == self._thread:
            self._depth -= 1
            if self._line and not self._depth:
                self._since, self._calls = thread_time(), 0

    def in_each(self) -> dict[Site, float]:
        """What each of the last two whole steps took at least: once may be by chance, or for the first time."""
        before, last = [{}, {}, *self._steps[:-1]][-2:]
        return {line: min(before[line], seconds) for line, seconds in last.items() if line in before}

    def _note(self) -> None:
        if self._line and (took := thread_time() - self._since - self._calls * self._tracing) >= _LEAST:
            self._steps[-1][self._line] = self._steps[-1].get(self._line, 0.0) + took
            self._noted(self._line)

    def _trace(self, frame: FrameType, event: str, arg: object):
        if event == "call":
            self._calls += 1
            return self._trace if frame.f_code in self._loop else None
        if not self._depth:
            self._note()
            self._line = Site(frame.f_code.co_filename, frame.f_lineno) if event == "line" else None
            self._since, self._calls = thread_time(), 0
        return self._trace

    def _time_tracing(self) -> float:
        took: dict[object, list[float]] = {None: [], self._trace: []}
        for trace in [*took] * 3:
            sys.settrace(trace)
            began = thread_time()
            for _ in range(_CALLS):
                _do_nothing()
            took[trace].append(thread_time() - began)
        plain, traced = map(min, took.values())
        return max(0.0, traced - plain) / _CALLS


def _do_nothing() -> None: ...
