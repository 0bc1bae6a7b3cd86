"""The DataLoaders of a script: which give a step's batches, and how long these take, with workers as the script's."""

import contextlib
import functools
import multiprocessing.connection
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NoReturn

import torch
from torch.utils.data import DataLoader

from effgpu.attaching.replacing import replaced
from effgpu.diagnosing.batches import change_tensors, time_handing, time_loading
from effgpu.measuring.ops import tensors_in
from effgpu.measuring.torch_internals import FakeTensor, _BaseDataLoaderIter
from effgpu.predicting.hardware import as_it_is
from effgpu.predicting.placing import ScriptRecorder
from effgpu.predicting.timeline import LOAD, NOTHING, Event, Range
from effgpu.predicting.translator import on_real_tensors

_HANGING = "its workers gave no batch in {:.0f} s, as where they wait for a thread or a lock from before their start"
_HANGS = 60.0  # seconds for a batch, after which workers are given up; ten times the longest here, if that is more
_ASIDES = 8  # processes that are kept, of as many loaders
_start_thread = threading.Thread.start  # which a walk replaces


class Loading:
    """Which DataLoaders give the script's batches, and how many in a step."""

    def __init__(self):
        self._loaders: dict[int, DataLoader] = {}  # by iterator
        self._batches: dict[DataLoader, object] = {}  # the last one of each
        self._used_up: set[DataLoader] = set()
        self._same = False
        self._taking: list[tuple[DataLoader, int]] = []  # with the events before, in the step
        self._ended: tuple[DataLoader, int] | None = None  # in the step, at this event, and gave none in it
        self._counted_ahead: set[tuple] = set()  # of what loaders are made whose next batch has been counted
        self.taken: list[DataLoader] = []  # in the last step, one for each batch
        self.evaluated: list[DataLoader] = []  # the same, of those that an evaluation takes
        self.recorder: ScriptRecorder | None = None  # of a step that is walked
        self._longest: dict[DataLoader, float] = {}  # seconds of a batch
        self._asides: dict[DataLoader, Aside] = {}
        self._took: dict[DataLoader, Range] = {}  # seconds for a batch
        self._make = DataLoader._get_iterator

    @property
    def _events(self) -> Sequence[Event]:
        return self.recorder.work.events if self.recorder else ()

    def _apart(self) -> AbstractContextManager:
        """Inside, nothing is work of the loop's own."""
        return self.recorder.own.apart() if self.recorder else contextlib.nullcontext()

    def next_step(self) -> None:
        """A step is over. Where batches are taken one ahead, as by accelerate, an epoch's last step takes none."""
        events = self._events
        if self._ended and not self._taking:
            loader, at = self._ended
            self._taking.append(self._ended)
            self._counted_ahead.add(_made_of(loader))
            if self.recorder and self.recorder.work.counts:
                self.recorder.work.events.insert(at, Event(LOAD, None, calls=0.0, beside=True))
        self._ended = None
        self.evaluated = [loader for loader, at in self._taking if at < len(events) and events[at].evaluating]
        self.taken, self._taking = [loader for loader, _ in self._taking], []

    def same(self) -> AbstractContextManager:
        """Inside, loaders give their last batch again, and load nothing."""
        return replaced([(self, "_same", True)])

    def replacing(self, started: Callable[[], None] = lambda: None) -> Iterator[tuple[type, str, Callable]]:
        """(class, name, what stands there), to see which loader gives a batch. Each iterator calls `started`."""
        give, prepare = _BaseDataLoaderIter.__next__, _BaseDataLoaderIter.__init__

        @functools.wraps(prepare)
        def prepare_noted(iterator, loader):
            prepare(iterator, loader)
            self._loaders[id(iterator)] = loader
            started()

        @functools.wraps(give)
        def give_noted(iterator):
            loader = self._loaders[id(iterator)]
            if not (self._same and loader in self._batches):
                began = time.perf_counter()
                try:
                    with self._apart():
                        self._batches[loader] = give(iterator)
                except StopIteration:
                    self._note_end(loader)
                    raise
                self._longest[loader] = max(self._longest.get(loader, 0.0), time.perf_counter() - began)
            if (made_of := _made_of(loader)) in self._counted_ahead:
                self._counted_ahead.remove(made_of)
            else:
                self._taking.append((loader, len(self._events)))
                if self.recorder:
                    self.recorder.work.note_host(LOAD)
            return change_tensors(self._batches[loader], lambda tensor: tensor)  # a script may take it apart

        yield _BaseDataLoaderIter, "__init__", prepare_noted
        yield _BaseDataLoaderIter, "__next__", give_noted

    def _note_end(self, loader: DataLoader) -> None:
        self._used_up.add(loader)
        if loader in self._batches:
            self._ended = loader, len(self._events)

    def keeping_aside(self) -> Iterator[tuple[type, str, Callable]]:
        """(class, name, what stands there), to keep a fork of this process, from before it loads batches itself.

        There, a loader's workers are what they would be for the script.
        """
        begin = DataLoader.__iter__

        @functools.wraps(begin)
        def begin_aside(loader):
            with self._apart():
                if loader not in self._asides and _forks_workers(loader):
                    if len(self._asides) == _ASIDES:
                        self._asides.pop(next(iter(self._asides))).end()
                    with contextlib.suppress(OSError):  # of a system that forks no more
                        self._asides[loader] = Aside(functools.partial(self._time_alone, loader))
                return begin(loader)

        yield DataLoader, "__iter__", begin_aside

    def end(self) -> None:
        """End the processes that were kept."""
        for aside in self._asides.values():
            aside.end()

    def time(self, taken: list[DataLoader]) -> tuple[Range, DataLoader | None]:
        """Seconds that loading takes for a step's batches, by the loaders' own workers, and the loader of most.

        The workers of several loaders work at once, if there is a core for each.
        """
        total, beside, longest, slowest = NOTHING, NOTHING, -1.0, None
        at_once = sum(loader.num_workers for loader in set(taken)) <= (os.cpu_count() or 1)
        for loader in dict.fromkeys(taken):
            aside, limit = self._asides.get(loader), max(_HANGS, 10 * self._longest[loader])
            if loader not in self._took:
                self._took[loader] = aside.ask(limit) if aside else self._time(loader, limit)
            one = [taken.count(loader) * seconds for seconds in self._took[loader]]
            if loader.num_workers and at_once:
                beside = tuple(map(max, beside, one))
            else:
                total = tuple(map(sum, zip(total, one)))
            if one[0] > longest:
                longest, slowest = one[0], loader
        return tuple(map(sum, zip(total, beside))), slowest

    def is_remade(self, loader: DataLoader | None) -> bool:
        """Whether a loader takes the place of one with workers that is used up, as where each epoch makes its own."""
        before = (_made_of(each) for each in self._used_up if each.num_workers and each is not loader)
        return loader is not None and _made_of(loader) in before

    def _time_alone(self, loader: DataLoader, limit: float) -> Range:
        self._asides = dict.fromkeys(self._asides)  # which are not this process's
        with on_this_machine():
            return self._time(loader, limit)

    def _time(self, loader: DataLoader, limit: float) -> Range:
        """Seconds that a loader takes for a batch. Raises RuntimeError where its workers take longer than the limit."""
        batches = iter(())

        def take():
            nonlocal batches
            for _ in range(2):
                for batch in batches:
                    return batch
                batches = self._make(loader)
            raise RuntimeError("loader: expected batches, got none")

        waits = [(loader, "timeout", loader.timeout or limit)] if loader.num_workers else []
        with replaced(waits):
            try:
                return time_loading(take, loader)
            except RuntimeError as error:
                if "timed out after" not in str(error):
                    raise
                raise RuntimeError(_HANGING.format(loader.timeout)) from error

    def gives_fakes(self, loader: DataLoader) -> bool:
        """Whether a loader's batches have no values: what their making takes is not what a script's takes."""
        return any(isinstance(tensor, FakeTensor) for tensor in tensors_in(self._batches[loader]))

    def time_handing(self, taken: list[DataLoader], took: Range) -> float:
        """What `time_handing` tells of a step's batches, which take so long to load."""
        return time_handing((self._batches[loader] for loader in taken), took)


class Aside:
    """A fork of this process as it is now, which waits until it is asked what `act` gives there.

    So a loader's workers are what they would be for the script: none of the threads that loading starts was there when
    they were forked.
    """

    def __init__(self, act: Callable[..., object]):
        self._ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, as loaders make them
            self._process = os.fork()
        if not self._process:
            self._ours.close()
            self._wait(theirs, act)
        theirs.close()

    def _wait(self, asked: multiprocessing.connection.Connection, act: Callable[..., object]) -> NoReturn:
        try:
            given = asked.recv()
            torch.set_num_threads(1)  # the threads of the process that was forked are not here
            try:
                answer = act(*given), ""
            except Exception as error:
                answer = None, str(error) or type(error).__name__
            asked.send(answer)
        finally:
            os._exit(0)

    def ask(self, *given: object) -> object:
        """What `act` gives of this. Raises RuntimeError for its error, and where the process was killed."""
        answer, error = None, "the process that loads was killed"
        with contextlib.suppress(EOFError, OSError):
            self._ours.send(given)
            answer, error = self._ours.recv()
        if error:
            raise RuntimeError(error)
        return answer

    def end(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # as a script may wait for all of its own
            os.kill(self._process, signal.SIGKILL)
            os.waitpid(self._process, 0)


def _made_of(loader: DataLoader) -> tuple[int, type]:
    """What two loaders share of which an epoch's takes the place of the one before."""
    return id(loader.dataset), type(loader.sampler)


def _forks_workers(loader: DataLoader) -> bool:
    """Whether a loader's workers are forks of this process."""
    how = loader.multiprocessing_context or multiprocessing
    method = how.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]  # the default
    return loader.num_workers > 0 and method == "fork"


@contextlib.contextmanager
def on_this_machine() -> Iterator[None]:
    """Inside, tensors are real, also in threads that start, and PyTorch says what is true of this machine."""
    with on_real_tensors(), as_it_is(), replaced([(threading.Thread, "start", _start_thread)]):
        yield
