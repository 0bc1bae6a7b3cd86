"""Threads that a step starts, such as one that fetches batches ahead: they find its GPU and its tensors, too."""

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder


def started_inside(recorder: "Recorder") -> list[tuple[object, str, object]]:
    """What lets a thread run in the modes of the walk that starts it: PyTorch keeps them for each thread apart."""
    start = threading.Thread.start

    def start_inside(thread: threading.Thread) -> None:
        run = thread.run

        def run_inside() -> None:
            recorder.fakes.threads.add(threading.get_ident())
            with recorder.fakes, recorder, recorder.translator():
                run()

        thread.run = run_inside
        start(thread)

    return [(threading.Thread, "start", start_inside)]
