"""What effgpu writes to files and reads back: whole files, and dataclasses as JSON has them."""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path


def write_atomic(path: str | Path, text: str) -> Path:
    """Write a text file through a temporary one beside it, so that nobody ever finds half of it. Makes its folder.

    A link stays one. What is no file, such as /dev/null, or lies where no other can be made, is written as it is.
    Raises OSError, naming the file, if it cannot be written.
    """
    path = Path(path)
    place = Path(os.path.realpath(path))
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        if path.exists() and not (path.is_file() and os.access(place.parent, os.W_OK)):
            path.write_text(text, encoding="utf-8")
            return path
        place.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, place)
    except OSError as error:
        raise OSError(f"{path}: expected a file that can be written ({error})") from error
    finally:
        with contextlib.suppress(OSError):  # it is gone where all went well
            temporary.unlink()
    return path


def read_fields(kind: type, stored: Mapping) -> dict:
    """The stored fields of a dataclass, with tuples for JSON's lists. Those of another edition are left out."""
    return {own.name: _tuples(stored[own.name]) for own in fields(kind) if own.name in stored}


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
