"""The worker processes of variants that take turns, such as a DataLoader's: frozen while others have their turn."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator

CAN_FREEZE = hasattr(signal, "SIGSTOP")  # not on Windows


class Workers:
    """Which processes each variant has started, by label.

    A worker that went on would load the next batches during the turns of others: its own next turn would be too fast,
    and theirs too slow.
    """

    def __init__(self):
        self._elsewhere = _find_children()  # the reader's own
        self._of: dict[str, set[int]] = {}

    def __getitem__(self, label: str) -> int:
        """How many worker processes a variant has."""
        return len(self._of.get(label, ()))

    @contextlib.contextmanager
    def awake(self, label: str) -> Iterator[None]:
        """Inside, the workers of this variant run. Those that it starts are its own."""
        self._signal(label, "SIGCONT")
        try:
            yield
        finally:
            others = self._elsewhere.union(*(pids for other, pids in self._of.items() if other != label))
            self._of[label] = _find_children() - others
            self._signal(label, "SIGSTOP")

    def release(self) -> None:
        """Let all of them run, so that they can end."""
        for label in self._of:
            self._signal(label, "SIGCONT")
        self._of.clear()

    def _signal(self, label: str, name: str) -> None:
        for pid in self._of.get(label, ()) if CAN_FREEZE else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))


def _find_children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children()}
