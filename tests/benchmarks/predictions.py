"""Bring docs/predict.md and docs/audit.md up to date: peaks and times beside predicted ones. Some minutes.

PYTHONPATH=tests python -m benchmarks.predictions

The text of the pages is written by hand, with what the publications leave open and why some runs are missed: this
replaces numbers and the rows of tables. It also counts what checks a GPU: effgpu/predicting/audited.csv.
"""

import re
import sys
import warnings
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from benchmarks import measured, published_memory, published_peaks, published_times, ranges

from effgpu import results
from effgpu.predicting import audited, spreads

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predict.md"
EVERY = PAGE.with_name("audit.md")


def replace(text: str, numbers: dict[str, str], tables: dict[str, list[str]]) -> str:
    """A part of the page with new sentences, by a pattern of the old ones, and new rows below headings."""
    for pattern, sentence in numbers.items():
        text, places = re.subn(pattern, sentence, text)
        if places != 1:
            raise ValueError(f"{PAGE}: expected one place as {pattern}, found {places}")
    for heading, rows in tables.items():
        start = text.index("|\n", text.index("\n|---", text.index(f"\n{heading}"))) + 2
        text = text[:start] + "\n".join(rows) + re.sub(r"\A(?:\|.*(?:\n|\Z))*", "\n", text[start:])
    return text


def replace_part(text: str, name: str, part: str) -> str:
    """The page with another part between the comments that begin and end it."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (begun and ended):
        raise ValueError(f"{PAGE}: expected {begin} and then {end}, found them not")
    return f"{before}{begin}\n\n{part}\n\n{end}{after}"


_WALKS = [partial(published_memory.run, case) for case in published_peaks.CASES]
_WALKS += [partial(published_times.walk, case) for case in published_times.CASES]


def _walk(number: int) -> object:
    return _WALKS[number]()


def main() -> int:
    """Run the audits and update both pages and the package's table. Returns 1 for a false "fits"."""
    warnings.simplefilter("ignore")
    with get_context("fork").Pool() as pool:  # a process for each core, with what this one has imported
        found = pool.map(_walk, range(len(_WALKS)), chunksize=1)
    memory = found[: len(published_peaks.CASES)]
    walked = dict(zip(published_times.CASES, found[len(memory) :]))
    ours = measured.audit(sorted(results.STORED.glob("*.json")))
    judge_all = lambda: [published_times.judge(case, *found) for case, found in walked.items()]
    counted = ranges.cells([o for o in judge_all() if not o.case.calibrates], measured.by_cell(ours))
    audited.TABLE.write_text(ranges.as_csv(counted), encoding="utf-8")
    audited._counted.cache_clear()  # the ranges depend on it
    times = judge_all()
    chosen = [o for o in times if not o.case.calibrates]
    fitted = ranges.fit([o for o in chosen if not o.time.compiled])
    print(f"{spreads.__name__}: asked for are {fitted}, set are {spreads.SPREAD_OF_SOURCES}, {spreads.EXTRAPOLATED}")
    print(f"ratios: asked for are {ranges.fit_ratios(times)}, set are {spreads.SPREAD_OF_RATIOS}")

    about_time, title, about_memory = PAGE.read_text(encoding="utf-8").partition("\n## Memory\n")
    version = {r"with PyTorch \S+\. ": f"with PyTorch {torch.__version__.partition('+')[0]}. "}
    rows = published_times.summaries(times)
    rows |= {"### By GPU and format": ranges.as_table(counted), "### By source": ranges.by_source(chosen)}
    about_time = replace(about_time, version | published_times.numbers(times), rows)
    about_time = replace_part(about_time, "measured by us", measured.section(ours))
    summary = {"## Memory": published_peaks.summarize(memory)}
    about_memory = replace(title + about_memory, published_memory.numbers(memory), summary)
    PAGE.write_text(about_time + about_memory, encoding="utf-8")

    about_time, title, about_memory = EVERY.read_text(encoding="utf-8").partition("\n## Memory\n")
    about_time = replace(about_time, {}, published_times.tables(times))
    about_memory = replace(about_memory, {}, published_memory.tables(memory))
    EVERY.write_text(about_time + title + about_memory, encoding="utf-8")
    return int(any(outcome.is_false_fit for outcome in memory))


if __name__ == "__main__":
    sys.exit(main())
