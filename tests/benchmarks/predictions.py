"""Bring docs/predict.md up to date: published and measured peaks and times beside predicted ones. Some minutes.

PYTHONPATH=tests python -m benchmarks.predictions

The page's text is written by hand, with what the publications leave open and why some runs are missed: this replaces
its numbers and the rows of its tables.
"""

import re
import sys
import warnings
from pathlib import Path

import torch
from benchmarks import measured, published_memory, published_times

from effgpu import results

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"


def replace(text: str, numbers: dict[str, str], tables: dict[str, list[str]]) -> str:
    """A part of the page with new sentences, by a pattern of the old ones, and new rows below headings."""
    for pattern, sentence in numbers.items():
        text, places = re.subn(pattern, sentence, text)
        if places != 1:
            raise ValueError(f"{PAGE}: expected one place as {pattern}, found {places}")
    for heading, rows in tables.items():
        start = text.index("|\n", text.index("\n|---", text.index(f"\n{heading}"))) + 2
        text = text[:start] + "\n".join(rows) + text[text.index("\n\n", start) :]
    return text


def replace_part(text: str, name: str, part: str) -> str:
    """The page with another part between the comments that begin and end it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"{PAGE}: expected {begin} and then {end}, found them not")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


def main() -> int:
    """Run the audits and update the page. Returns 1 for a false "fits"."""
    warnings.simplefilter("ignore")
    memory = [published_memory.run(case) for case in published_memory.CASES]
    times = [published_times.run(case) for case in published_times.CASES]
    about_time, title, about_memory = PAGE.read_text(encoding="utf-8").partition("\n## Memory\n")
    version = {r"with PyTorch \S+\. ": f"with PyTorch {torch.__version__.partition('+')[0]}. "}
    about_time = replace(about_time, version | published_times.numbers(times), published_times.tables(times))
    about_memory = replace(about_memory, published_memory.numbers(memory), published_memory.tables(memory))
    ours = measured.section(measured.audit(sorted(results.STORED.glob("*.json"))))
    about_time = replace_part(about_time, "measured by us", ours)
    PAGE.write_text(about_time + title + about_memory, encoding="utf-8")
    return int(any(outcome.is_false_fit for outcome in memory))


if __name__ == "__main__":
    sys.exit(main())
