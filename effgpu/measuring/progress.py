"""How far a measurement is: a bar, for a terminal or a notebook that somebody looks at."""

import io
import sys

from tqdm import tqdm

from effgpu import units


class Progress:
    """A plain bar, which wipes itself out when it is done.

    It promises no seconds before it knows them. In a notebook it is written to stdout, so that what is printed next
    takes the wiped line.
    """

    def __init__(self):
        notebook = "ipykernel" in sys.modules
        self._file = (sys.stdout if notebook else sys.stderr) or io.StringIO()  # as of a service, which has none
        off = False if notebook else None  # for tqdm, None is: where it is no terminal
        self._bar = tqdm(leave=False, file=self._file, disable=off, bar_format="{desc} |{bar:30}|", miniters=0)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def show(self, what: str, done: int, total: int, left: float | None = None) -> None:
        """Say what is under way, how much of it is done, and the seconds that are left where they are known."""
        about = "" if left is None else f", about {units.format_seconds(max(left, 0.1))} left"
        self._bar.total, self._bar.n = total, done
        self._bar.set_description_str(what + about, refresh=done == 0)
        self._bar.update(0)

    def announce(self, text: str) -> None:
        """Print a line above the bar, also where nobody looks at the bar."""
        self._bar.write(text, file=self._file)
