"""The worker processes of variants that take turns, such as a DataLoader's: frozen while others have their turn."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

CAN_FREEZE = hasattr(signal, "SIGSTOP")  # not on Windows
# Wakes frozen workers if this process is killed: they see that it is gone, and end. Ctrl-C reaches it, too.
_GUARD = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
while os.getppid() == int(sys.argv[1]):
    time.sleep(0.2)
os.killpg(0, signal.SIGCONT)
"""


class Workers:
    """Which processes each variant has started, by label.

    A worker that went on would load the next batches during the turns of others: its own next turn would be too fast,
    and theirs too slow.
    """

    def __init__(self):
        self._elsewhere = _find_children()  # the reader's own
        self._of: dict[str, set[int]] = {}
        self._guard: subprocess.Popen | None = None

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
            if self._of[label] and CAN_FREEZE and not self._guard:
                self._guard = subprocess.Popen(
                    [sys.executable, "-c", _GUARD, str(os.getpid())], stdin=subprocess.DEVNULL
                )
            self._signal(label, "SIGSTOP")

    def release(self) -> None:
        """Let all of them run, so that they can end."""
        for label in self._of:
            self._signal(label, "SIGCONT")
        self._of.clear()
        if self._guard:
            self._guard.kill()
            self._guard.wait()
            self._guard = None

    def _signal(self, label: str, name: str) -> None:
        for pid in self._of.get(label, ()) if CAN_FREEZE else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, getattr(signal, name))


def _find_children() -> set[int]:
    return {child.pid for child in multiprocessing.active_children()}
