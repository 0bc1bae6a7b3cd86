"""Results as files: save and load comparisons as JSON, and the stored results of the GPUs that ran the course."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from effgpu.ablation import Ablation
from effgpu.comparison import Comparison

FORMAT = {"format": "effgpu results", "version": 1}
STORED = Path(__file__).parent / "reference"


def save(comparisons: Iterable[Comparison], path: str | Path) -> Path:
    """Write comparisons of one machine to a JSON file, all of it or nothing. Returns the path."""
    if isinstance(comparisons, Comparison):
        raise TypeError("comparisons: expected a list of comparisons, got one: pass [comparison]")
    rows = [comparison.to_dict() for comparison in comparisons]
    return write_whole(path, json.dumps(FORMAT | {"comparisons": rows}, indent=1) + "\n")


def load(path: str | Path) -> list[Comparison]:
    """Read what `save` wrote, ablations as such. Raises ValueError, naming the file, for anything else."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a results file that can be read ({error})") from error
    if not isinstance(stored, dict) or {key: stored.get(key) for key in FORMAT} != FORMAT:
        raise ValueError(f"{path}: expected a results file of effgpu ({FORMAT}), got something else")
    try:
        return [_revive(row) for row in stored["comparisons"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected comparisons as effgpu writes them ({type(error).__name__}: {error})"
        ) from error


def stored(name: str) -> list[Comparison]:
    """What the GPUs in effgpu/reference/ gave for the comparison of this name, one entry a GPU, by its name."""
    found = [c for path in sorted(STORED.glob("*.json")) for c in _load_once(path) if c.name == name]
    return [comparison for comparison in found if comparison.device.kind == "cuda"]


def write_whole(path: str | Path, text: str) -> Path:
    """Write a text file by way of a temporary one beside it, so that nobody ever finds half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _revive(row: dict) -> Comparison:
    """An ablation where the measurements are those of one, else a comparison."""
    comparison = Comparison.from_dict(row)
    with contextlib.suppress(ValueError):
        return Ablation(comparison.name, comparison.measurements)
    return comparison


@cache
def _load_once(path: Path) -> list[Comparison]:
    return load(path)
