"""Bring docs/predict.md up to date: published peaks and times of training steps beside predicted ones. Five minutes.

PYTHONPATH=tests python -m benchmarks.predictions

The page's text is written by hand, with what the publications leave open and why some runs are missed: this replaces
its numbers and the rows of its tables.
"""

import re
import sys
import warnings
from pathlib import Path

import torch
from benchmarks import published_memory, published_times

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


def main() -> int:
    """Run both audits and update the page. Returns 1 for a false "fits"."""
    warnings.simplefilter("ignore")
    memory = [published_memory.run(case) for case in published_memory.CASES]
    times = [published_times.run(case) for case in published_times.CASES]
    about_time, title, about_memory = PAGE.read_text(encoding="utf-8").partition("\n## Memory\n")
    version = {r"with PyTorch \S+\. ": f"with PyTorch {torch.__version__.partition('+')[0]}. "}
    about_time = replace(about_time, version | published_times.numbers(times), published_times.tables(times))
    about_memory = replace(about_memory, published_memory.numbers(memory), published_memory.tables(memory))
    PAGE.write_text(about_time + title + about_memory, encoding="utf-8")
    return int(any(outcome.is_false_fit for outcome in memory))


if __name__ == "__main__":
    sys.exit(main())
