"""Where a bench is, on stderr."""

import io
import sys
import time

from effgpu.units import format_seconds

_EVERY = 15.0  # seconds between lines, where nobody overwrites them
_WIDEST = 110


class Progress:
    """One line that the next one overwrites; where stderr is no terminal, a line now and then."""

    def __init__(self):
        self._file = sys.stderr or io.StringIO()  # as of a service, which has none
        self._terminal = self._file.isatty()
        self._text, self._since = "", time.monotonic()
        self._printed = self._since

    def show(self, text: str) -> None:
        """Say what is under way."""
        if text != self._text:
            self._text, self._since = text, time.monotonic()
        self.refresh()

    def refresh(self) -> None:
        """Show the same again, with how long it has taken: called now and then while nothing else happens."""
        now = time.monotonic()
        waited = f" ({format_seconds(now - self._since)})" if now - self._since > 2 else ""
        if self._terminal:
            print(f"\r\x1b[K{(self._text + waited)[:_WIDEST]}", end="", file=self._file, flush=True)
        elif self._text and now - self._printed > _EVERY:
            print(f"effgpu: {self._text}{waited}", file=self._file, flush=True)
            self._printed = now

    def announce(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(f"effgpu: {text}", file=self._file, flush=True)
        self._printed = time.monotonic()

    def clear(self) -> None:
        """Take away the line."""
        if self._terminal and self._text:
            print("\r\x1b[K", end="", file=self._file, flush=True)
        self._text = ""
