"""The batches of a step: where they come from, how long they take, what is in them."""

import contextlib
import copy
import multiprocessing.connection
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler

import torch
from torch.utils.data import DataLoader, IterableDataset

from effgpu.errors import BadType, CannotRun
from effgpu.measuring.intervals import FEWEST_BLOCKS, interval_of_blocks
from effgpu.measuring.ops import tensors_in
from effgpu.measuring.variants import is_function
from effgpu.predicting.timeline import NOTHING, Range

_PATIENCE, _FEWEST = 10.0, 3  # seconds that the loader is timed, and times that are taken however long they take
_TEXT = 4  # times as large, at most, are the numbers of one text as those of another in the same step
_AHEAD = 2  # batches that each worker of a DataLoader loads ahead, where prefetch_factor does not say
# Times that a batch is handed over, the seconds in which that ends, and those in which a worker has to start.
_HANDED, _HANDING, _STARTING = 100, 1.0, 10.0
_start = DataLoader._get_iterator  # which a walk replaces


def change_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """A batch with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = copy.copy(value)  # a BatchEncoding stays one
        for key, item in value.items():
            changed[key] = change_tensors(item, change)
        return changed
    if isinstance(value, tuple | list):
        items = [change_tensors(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def padding_shares(looked_up: list[torch.Tensor]) -> tuple[float, float]:
    """The share of the tokens that the step looks up that are padding, and of the pairs of a text's that hold some.

    Padding is the token that most texts end or begin with, as often as it stands there in a row, if it stands there
    more often than elsewhere. Numbers of a much smaller range than others, such as the types of tokens, are no text.
    """
    tokens_kept = pairs_kept = total = total_pairs = 0
    texts = [each for each in looked_up if each.dim() == 2 and len(each) > 1 and not _are_no_texts(each)]
    largest = max((int(tokens.max()) for tokens in texts), default=0)
    for tokens in texts:
        if _TEXT * int(tokens.max()) < largest:
            continue
        runs = [_count_run(row) for row in (tokens, tokens.flip(1))]
        number, length = tokens.shape
        kept = length - max(runs, key=lambda run: int(run.sum()))
        tokens_kept, pairs_kept = tokens_kept + int(kept.sum()), pairs_kept + int(kept.square().sum())
        total, total_pairs = total + number * length, total_pairs + number * length**2
    return (1 - tokens_kept / total, 1 - pairs_kept / total_pairs) if total else (0.0, 0.0)


def _are_no_texts(tokens: torch.Tensor) -> bool:
    """Whether they are types of tokens, such as first and second, their positions, or distances between these."""
    distances = tokens[1:, 1:] == tokens[:-1, :-1]
    return len(tokens.unique()) < 3 or bool((tokens.diff() == 1).all() or distances.all())


def _count_run(tokens: torch.Tensor) -> torch.Tensor:
    """How often each text begins with what most begin with; 0 where it stands elsewhere more often, or once at most."""
    same = tokens == tokens[:, 0].mode().values
    run = same.cumprod(1).sum(1)
    return run * bool(2 * run.sum() > same.sum() and run.max() > 1)


def describe_loader(loader: object) -> dict[str, object]:
    """What `Observed` has of a loader, by its names; None is no loader."""
    return {
        "has_loader": loader is not None,
        "workers": getattr(loader, "num_workers", 0),
        "pinned": bool(getattr(loader, "pin_memory", False)),
        "persistent": bool(getattr(loader, "persistent_workers", False)),
        "streams": isinstance(getattr(loader, "dataset", None), IterableDataset),
    }


def count_ahead(loader: object) -> int:
    """How many batches the workers of a loader have made, or are making, before they are asked for."""
    ahead = getattr(loader, "prefetch_factor", None) or _AHEAD
    return getattr(loader, "num_workers", 0) * (ahead + 1)


def time_loading(take: Callable[[], object], loader: object) -> Range:
    """Seconds that `take` takes for a batch of the loader, with a 99 % interval.

    After 10 s, a slow loader is let go: then the range is that of the times so far.
    """
    workers, first = max(1, getattr(loader, "num_workers", 0)), time.perf_counter()
    for _ in range(1 + count_ahead(loader)):  # the first one waits for workers to start
        take()
        if time.perf_counter() - first > _PATIENCE:  # where this waits so long, nothing lies there any more
            break
    seconds, first = [], time.perf_counter()
    while len(seconds) < FEWEST_BLOCKS:
        began = time.perf_counter()
        for _ in range(workers):
            take()
        seconds.append((time.perf_counter() - began) / workers)
        if len(seconds) >= _FEWEST and time.perf_counter() - first > _PATIENCE:
            return statistics.median(seconds), min(seconds), max(seconds)
    middle, low, high = interval_of_blocks(seconds)
    return middle, max(0.0, low), high


def time_handing(batches: Iterable[object], loading: Range) -> float:
    """Seconds in which a worker of a DataLoader hands these batches over, if it has nothing else to do.

    0 where that is less than half of what `loading` them takes, and where it is not known.
    """
    took = list(map(_time_handing, batches))
    total = 0.0 if None in took else sum(took)
    return total if total > loading[0] / 2 else 0.0


def _time_handing(batch: object) -> float | None:
    """None where it is not known: without tensors on the CPU, or where processes cannot fork."""
    tensors = tensors_in(batch)
    if (
        not tensors
        or any(tensor.is_cuda for tensor in tensors)
        or "fork" not in multiprocessing.get_all_start_methods()
    ):
        return None
    options = {"batch_size": None, "collate_fn": _as_it_is, "num_workers": 1, "multiprocessing_context": "fork"}
    seconds, first, least = [], time.perf_counter(), 1 + _AHEAD + _FEWEST
    with contextlib.suppress(Exception):  # of what cannot be sent to another process
        ForkingPickler.dumps(change_tensors(batch, torch.clone))  # a worker that cannot would say nothing
        handed = _start(DataLoader(_Again(batch), timeout=_STARTING, **options))
        while len(seconds) < least or (len(seconds) < _HANDED and time.perf_counter() - first < _HANDING):
            began = time.perf_counter()
            next(handed)
            seconds.append(time.perf_counter() - began)
    # the first ones wait for the worker to start, or were made meanwhile
    return statistics.fmean(seconds[1 + _AHEAD :]) if len(seconds) >= least else None


class _Again(IterableDataset):
    """The same batch without end, each time in memory of its own, as a worker makes it."""

    def __init__(self, batch: object):
        self._batch = batch

    def __iter__(self) -> Iterator:
        while True:
            yield change_tensors(self._batch, torch.clone)


def _as_it_is(batch: object) -> object:
    return batch


class Batches:
    """The batches of a function's step, as its arguments: a tuple of one batch, or an empty one without a loader.

    `batch` is the first of them. Raises TypeError for a loader that is none, RuntimeError for one that ends and does
    not start anew.
    """

    def __init__(self, loader: object):
        self._make = loader if is_function(loader) and not isinstance(loader, Iterable) else lambda: loader
        self._batches: Iterator | None = None
        self._served = 0
        self.loader = self._make()
        if self.loader is not None and not isinstance(self.loader, Iterable):
            raise BadType(f"loader: expected batches that can be iterated over, got {type(self.loader).__name__}")
        self.pinned = bool(getattr(self.loader, "pin_memory", False))
        self.batch = self.next()

    def next(self) -> tuple:
        """The next batch. The loader starts anew where it ends."""
        if self.loader is None:
            return ()
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self.loader)
            for batch in self._batches:
                self._served += 1
                return (batch,)
            self.loader, self._batches = self._make(), None
        ended = f"loader: it ended after {self._served} batches and does not start anew, and a diagnosis takes many"
        raise CannotRun(f"{ended}: give a DataLoader, a list, or a function that returns a new iterator")

    def drain(self) -> None:
        """Take what workers have loaded ahead while nobody waited."""
        for _ in range(count_ahead(self.loader)):
            self.next()

    def time(self) -> Range:
        """Seconds that the loader takes for a batch, with a 99 % interval."""
        return time_loading(self.next, self.loader) if self.loader is not None else NOTHING
