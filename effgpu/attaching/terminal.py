"""The terminal that a script finds, whose output goes elsewhere and to which nobody types; what is shown of it."""

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator

_COLUMNS, _LINES = 80, 24
_LONGEST = 300  # characters of a line that are shown
_END = b"\x04" * 64  # each is the end of the input, for whatever reads
_AGAIN = 0.1  # seconds: who asks for a password drops what was typed before


@contextlib.contextmanager
def empty_input() -> Iterator[int]:
    """Yields the standard input for a process: a terminal of a usual size, at its end. It is gone after the block.

    So whoever asks gets an EOFError, and no script waits for an answer that nobody types. Progress bars ask a terminal
    for its width, by `stty size` or the like. Where the system has none, it is DEVNULL.
    """
    if os.name != "posix":
        yield subprocess.DEVNULL
        return
    import fcntl
    import struct
    import termios

    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
    os.set_blocking(ours, False)
    over = threading.Event()
    typing = threading.Thread(target=_type_end, args=(ours, over), daemon=True)
    typing.start()
    try:
        yield theirs
    finally:
        over.set()
        typing.join()
        os.close(theirs)
        os.close(ours)


def _type_end(terminal: int, over: threading.Event) -> None:
    """Keep typing the end of the input until this is over."""
    while True:
        with contextlib.suppress(BlockingIOError):  # as nobody reads
            os.write(terminal, _END)
        if over.wait(_AGAIN):
            return


def give_size() -> None:
    """Let `os.get_terminal_size`, which asks the standard output, give a usual size where that is no terminal."""
    asked = os.get_terminal_size

    def get_terminal_size(*place: int) -> os.terminal_size:
        try:
            return asked(*place)
        except OSError:
            return os.terminal_size((_COLUMNS, _LINES))

    os.get_terminal_size = get_terminal_size


def cut(line: str) -> str:
    """A line that a script wrote, or of a long one, as of a whole batch, its beginning."""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
