"""The terminal that a script finds, whose output goes elsewhere and to which nobody types."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

_COLUMNS, _LINES = 80, 24
_END = b"\x04" * 64  # each is the end of the input, for whatever reads


@contextlib.contextmanager
def empty_input() -> Iterator[int]:
    """Yields the standard input for a process: a terminal of a usual size, at its end. It is gone after the block.

    Progress bars ask a terminal for its width, by `stty size` or the like. Where the system has none, it is DEVNULL.
    """
    if os.name != "posix":
        yield subprocess.DEVNULL
        return
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
        os.write(ours, _END)
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def give_size() -> None:
    """Let `os.get_terminal_size`, which asks the standard output, give a usual size where that is no terminal."""
    asked = os.get_terminal_size

    def get_terminal_size(*place: int) -> os.terminal_size:
        try:
            return asked(*place)
        except OSError:
            return os.terminal_size((_COLUMNS, _LINES))

    os.get_terminal_size = get_terminal_size
