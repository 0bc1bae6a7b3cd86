"""Results as files: save and load comparisons as JSON, and look up the stored results of GPUs."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from effgpu.benching.result import Bench
from effgpu.benching.seeds import SeedBench
from effgpu.comparison import Comparison
from effgpu.storing import write_atomic

FORMAT = {"format": "effgpu results", "version": 4}
STORED = Path(__file__).parent / "reference"


def save(comparisons: Iterable[Comparison], path: str | Path) -> Path:
    """Write comparisons of one machine to a JSON file, all of it or nothing. Returns the path."""
    if isinstance(comparisons, Comparison):
        raise TypeError("comparisons: expected a list of comparisons, got one: pass [comparison]")
    comparisons = _of_one_machine(comparisons)
    rows = [comparison.to_dict() for comparison in comparisons]
    return write_atomic(path, json.dumps(FORMAT | {"comparisons": rows}, indent=1) + "\n")


def load(path: str | Path) -> list[Comparison]:
    """Read what `save` wrote, benches as such. Raises ValueError, naming the file, for anything else."""
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a results file that can be read ({error})") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT["format"]:
        raise ValueError(f"{path}: expected a results file of effgpu ({FORMAT}), got something else")
    if (version := stored.get("version")) != FORMAT["version"]:
        known = f"expected version {FORMAT['version']} of the results format, got {version}"
        raise ValueError(f"{path}: {known}: another edition of effgpu wrote it, so measure again")
    try:
        return _of_one_machine(map(comparison_from_dict, stored["comparisons"]))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ValueError(
            f"{path}: expected comparisons as effgpu writes them ({type(error).__name__}: {error})"
        ) from error


def comparison_from_dict(row: dict) -> Comparison:
    """A comparison from what its `to_dict` gave, or a bench, where that says that it is one."""
    found = {"bench": Bench, "seeds": SeedBench}.get(row.get("kind"), Comparison).from_dict(row)
    repr(found)  # a value that cannot be shown is refused here, and not where it is drawn
    return found


def stored(name: str) -> list[Comparison]:
    """The comparisons of this name that GPUs stored in effgpu/reference/, one for each GPU."""
    found = [c for path in sorted(STORED.glob("*.json")) for c in _load_once(path) if c.name == name]
    return [comparison for comparison in found if comparison.device.kind == "cuda"]


def _of_one_machine(comparisons: Iterable[Comparison]) -> list[Comparison]:
    comparisons = list(comparisons)
    machines = dict.fromkeys(comparison.device.label for comparison in comparisons)
    if len(machines) > 1:
        raise ValueError(f"comparisons: expected those of one machine, got {' and '.join(machines)}")
    return comparisons


_load_once = cache(load)
