"""How many runs, published or ours, check a predicted time: by GPU, kind of network and format.

`make predictions` counts them into audited.csv.
"""

import csv
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("audited.csv")
TRANSFORMERS, CONVOLUTIONAL = "transformers", "convolutional networks"
OTHERS = "steps without attention"  # such as those of an LSTM: no run of one was compared
COLUMNS = ("gpu", "kind", "format", "runs", "sources", "median_error", "error_of_nine_in_ten")


def family(gpu: str) -> str:
    """A GPU's name without the size of its memory: "A100" for "A100 80 GB"."""
    return re.sub(r" \d+ GB$", "", gpu)


@cache
def _counted() -> dict[tuple[str, str, str], int]:
    rows = csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())
    return {(row["gpu"], row["kind"], row["format"]): int(row["runs"]) for row in rows}


def audited_runs(gpu: str, kind: str, format: str) -> int:
    """How many runs of such networks in this format were compared on such a GPU."""
    return _counted().get((family(gpu), kind, format), 0)


def list_unchecked(found: Iterable[tuple[str, str]]) -> list[str]:
    """Of GPUs' names and what `Time.tell_unchecked` says there: "transformers in fp16 on T4, L4"."""
    names: dict[str, dict[str, None]] = {}
    for gpu, missing in found:
        if missing:
            names.setdefault(missing, {})[gpu] = None
    return [f"{missing} on {', '.join(those)}" for missing, those in names.items()]
