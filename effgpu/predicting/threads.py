"""Threads that a step starts, such as one that fetches batches ahead: they find its GPU and its tensors, too."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder


def started_inside(recorder: "Recorder") -> list[tuple[object, str, object]]:
    """What lets a thread run in the modes of the walk that starts it: PyTorch keeps them for each thread apart.

    A thread of a pool has them for each task, as the pool may be from before, and live on.
    """
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def inside(run: Callable) -> Callable:
        @functools.wraps(run)
        def run_inside(*args, **kwargs):
            here = threading.get_ident()
            if recorder.over or here in recorder.threads:
                return run(*args, **kwargs)
            recorder.threads.add(here)
            try:
                with recorder.fakes, recorder, recorder.translator():
                    return run(*args, **kwargs)
            finally:
                recorder.threads.discard(here)

        return run_inside

    def start_inside(started: threading.Thread) -> None:
        if getattr(started, "_target", None) is not thread._worker:
            started.run = inside(started.run)
        start(started)

    def submit_inside(pool: ThreadPoolExecutor, task: Callable, /, *args, **kwargs):
        return submit(pool, inside(task) if threading.get_ident() in recorder.threads else task, *args, **kwargs)

    return [(threading.Thread, "start", start_inside), (ThreadPoolExecutor, "submit", submit_inside)]
