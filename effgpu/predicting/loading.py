"""DataLoaders while a step is walked: batches are loaded by the step itself. Which ones are larger than its own."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from effgpu.attaching.replacing import replaced
from effgpu.measuring.ops import tensors_in
from effgpu.measuring.torch_internals import _SingleProcessDataLoaderIter, worker
from effgpu.predicting.facts import WORKERS_IDLE
from effgpu.predicting.translator import on_real_tensors

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

_DRAWING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
_MOST = 20_000  # batches of an epoch that are counted through, to find the last ones


def loading_here(recorder: "Recorder") -> Iterator[tuple[object, str, object]]:
    """(class, name, what stands there). A DataLoader loads in this process: its workers cannot run on fake tensors."""

    def load_here(loader):
        workers = loader.num_workers
        with replaced([(loader, "num_workers", 0), (loader, "timeout", 0)]):  # which is of workers alone
            made = _SingleProcessDataLoaderIter(loader)
        if workers:
            recorder.say(*WORKERS_IDLE)
            _be_first_worker(made, loader)
        load, choose = made._next_data, made._next_index

        def choose_noted():
            rows = choose()
            recorder.cut_short = _is_cut_short(loader, rows)
            return rows

        def load_noted():
            with replaced([(recorder, "loading", True)]):
                batch = load()
            if recorder.work.counts:
                recorder.loaded = loader, _count_bytes(batch)
            return batch

        made._next_data, made._next_index = load_noted, choose_noted
        return made

    yield DataLoader, "_get_iterator", load_here


def _is_cut_short(loader: DataLoader, rows: object) -> bool:
    """Whether a batch is the last of several, and has fewer samples than the others."""
    sampler = loader.batch_sampler  # whose size counts: a loader that is given one has none
    with contextlib.suppress(TypeError, NotImplementedError):  # a sampler without a length
        return type(sampler) is BatchSampler and len(rows) < sampler.batch_size and len(loader) > 1
    return False


def compare_last(loader: DataLoader, size: int) -> float:
    """How many times as large as one of so many bytes the last batches of an epoch are; 1 where that is by chance.

    As where texts are sorted by length: a loader that shuffles by itself has no last one. Nor are those looked at that
    would be gone then, of an iterator.
    """
    sampler = loader.batch_sampler
    if sampler is None or isinstance(sampler, Iterator) or not size:
        return 1.0
    with on_real_tensors(), contextlib.suppress(Exception):  # of the script's own data set
        if _is_by_chance(sampler):
            return 1.0
        *_, before, last = itertools.islice(sampler, _MOST)  # of which the latter may be cut short
        batches = (loader.collate_fn([loader.dataset[row] for row in rows]) for rows in (before, last))
        return max(map(_count_bytes, batches)) / size
    return 1.0


def _is_by_chance(sampler: Sampler) -> bool:
    """Whether batches are drawn, also where accelerate shares them among ranks or skips the first.

    A sampler of the script's own may sort what is drawn: then the last batch is the same each time.
    """
    while hasattr(sampler, "batch_sampler"):
        sampler = sampler.batch_sampler
    rows = getattr(sampler, "sampler", None)
    drawn = isinstance(rows, _DRAWING) or (type(rows) is DistributedSampler and rows.shuffle)
    if not drawn or type(sampler) is BatchSampler:
        return drawn
    first, again = ([*itertools.islice(sampler, _MOST)] for _ in range(2))
    return first[-1:] != again[-1:]


def _count_bytes(batch: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _be_first_worker(batches: Iterator, loader: DataLoader) -> None:
    """Let an iterator load what the first worker of a loader would, but collate as without: not in shared memory."""
    info = worker.WorkerInfo(id=0, num_workers=loader.num_workers, seed=0, dataset=loader.dataset)
    load, collate = batches._next_data, batches._dataset_fetcher.collate_fn
    prepare = [loader.worker_init_fn] if loader.worker_init_fn else []

    def load_as_worker():
        with replaced([(worker, "_worker_info", info)]):
            while prepare:
                prepare.pop()(0)
            return load()

    def collate_here(rows):
        with replaced([(worker, "_worker_info", None)]):
            return collate(rows)

    batches._next_data, batches._dataset_fetcher.collate_fn = load_as_worker, collate_here
