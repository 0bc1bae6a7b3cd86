"""What lessons showed: their comparisons, plots and headlines, read from the outputs of executed notebooks."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from effgpu import results, units
from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.course.lessons import code_cells
from effgpu.predicting.full_size import tell_range
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS
from effgpu.verdicts import FASTER, INCONCLUSIVE, SAME

INTERRUPTED = "interrupted"  # as a failure
OUT_OF_TIME = "the time was over"


@dataclass(frozen=True)
class Picture:
    """A plot of a lesson: the PNG in base64, and its alternative text."""

    png: str
    alt: str


@dataclass(frozen=True)
class Headline:
    """The main result of a lesson in one line: one variant against the baseline, in time and memory."""

    comparison: Comparison
    label: str

    @property
    def time(self) -> str:
        """The time in words: "1.44 × slower [1.42, 1.47]", "same time (within 1 %)" or why there is none."""
        measured, baseline = self.comparison[self.label], self.comparison.baseline
        if baseline.failed and not measured.failed:
            return f"runs where {baseline.label} does not ({baseline.failed})"
        text = self.comparison.tell(self.label)
        return text.replace(SAME, f"{SAME} time", 1) if self.comparison.verdict(self.label) == SAME else text

    @property
    def memory(self) -> str:
        """The change of the peak memory in words, "−45 % memory"; empty below `min_effect`, or not measured."""
        ratio = self.comparison.ratio(self.label, "memory") or 1
        changed = max(ratio, 1 / ratio) >= 1 + self.comparison.min_effect
        return f"{self.comparison.tell(self.label, 'memory')} memory" if changed else ""

    @property
    def full_size(self) -> str:
        """What the lesson predicts for a GPU, "5.40 × faster, 25.4 → 15.0 GiB on a T4 (predicted)"; else empty.

        The GPU is the first of the prediction; the second where its memory is too small for the variant.
        """
        before, after = (self.comparison.full_size.get(m) for m in (self.comparison.baseline.label, self.label))
        if not (before and after):
            return ""
        place = next((place for place, each in enumerate(after) if each.verdict != DOES_NOT_FIT), 0)
        old, new = before[place], after[place]
        low, high = new.ratio[1:] if new.ratio else (1, 1)
        time = tell_range(new.ratio, brackets=False) if new.ratio else ""
        time = "no clear difference in time" if low < 1 < high else time
        lines = [time, _tell_change(old.allocated, new.allocated)]
        rescued = ", so that it fits" if [old.verdict, new.verdict] == [DOES_NOT_FIT, FITS] else ""
        return f"{', '.join(filter(None, lines))} on {units.with_article(new.gpu)}{rescued} (predicted)"

    def tell(self) -> str:
        """Time and memory in words, what is gained first. An inconclusive time gives way to a change in memory."""
        verdict = self.comparison.verdict(self.label)
        time = "" if verdict == INCONCLUSIVE and self.memory else self.time
        return ", ".join(filter(None, [time, self.memory] if verdict == FASTER else [self.memory, time]))


def _tell_change(before: float, after: float) -> str:
    """Two numbers of bytes, "25.4 → 15.0 GiB"; empty where they differ by less than a per cent."""
    if abs(after / before - 1) < 0.01:
        return ""
    (number, unit), text = units.format_bytes(before).split(), units.format_bytes(after)
    return f"{number if text.endswith(unit) else f'{number} {unit}'} → {text}"


@dataclass(frozen=True)
class Outcome:
    """The results of a lesson. `name` is its file name without .ipynb, `title` its heading.

    `about` is the bold sentence that it begins with. `failure` says in one line why it failed. `seconds` is what it
    took, where it has just run.
    """

    name: str
    title: str
    comparisons: tuple[Comparison, ...] = ()
    pictures: tuple[Picture, ...] = ()
    failure: str | None = None
    about: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def main(self) -> Comparison | None:
        """The comparison that is named like the lesson."""
        return next((comparison for comparison in self.comparisons if comparison.name == self.name), None)

    @property
    def headline(self) -> Headline | None:
        """The variant that README, the report and `effgpu run` tell of; None without a main comparison.

        It is the last variant with a prediction, else the last.
        """
        if self.main is None or len(self.main) < 2:
            return None
        expected = self.main.predicted or self.main
        return Headline(self.main, [m.label for m in self.main if m.label in expected][-1])

    def tell(self) -> str:
        """What the lesson showed, in one line: its headline, that it failed, or that it compared nothing."""
        if self.failure:
            return self.failure if self.failure in (INTERRUPTED, OUT_OF_TIME) else "failed"
        if headline := self.headline:
            return f"{headline.label}: {headline.tell()}"
        return "nothing to compare on this machine"


def read_lessons(folder: Path) -> list[Outcome]:
    """Return the outcomes of the executed lessons in a folder. Files that are not notebooks are skipped."""
    outcomes = []
    for path in sorted(folder.glob("*.ipynb")):
        import nbformat  # where there are no lessons, a report needs no nbformat

        try:
            outcomes.append(read_outcome(path.stem, nbformat.read(path, as_version=4)))
        except Exception:  # nbformat raises errors of many types
            continue
    return outcomes


def read_outcome(name: str, notebook) -> Outcome:
    """The outcome of an executed notebook, by nbformat, of a lesson with this name."""
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = _title(prose) or name
    comparisons: dict[str, Comparison] = {}
    pictures = []
    for cell in code_cells(notebook.cells):
        data = [output.data for output in cell.outputs if "data" in output]
        shown = [results.comparison_from_dict(bundle[MIME_TYPE]) for bundle in data if MIME_TYPE in bundle]
        for comparison in shown:
            free = _free_name(comparison, comparisons)
            comparisons[free] = replace(comparison, name=free)
        if "effgpu.plot(result)" in cell.source:  # of the template: shown in this cell, or in the last one that shows
            shown = list(comparisons.values())[-1:]
        alt = "; ".join(comparison.alt_text() for comparison in shown) or f"Plot of the lesson {title}"
        images = ["".join(bundle["image/png"].split()) for bundle in data if "image/png" in bundle]
        pictures += [Picture(png, alt) for png in images]
    return Outcome(name, title, tuple(comparisons.values()), tuple(pictures), _failure(notebook), _about(prose))


def _title(prose: str) -> str:
    heading = re.search(r"^# +(.+)", prose, re.MULTILINE)
    return heading[1].strip() if heading else ""


def _about(prose: str) -> str:
    """The bold sentence above the table of what a technique buys and costs, as plain text; empty without that table."""
    opening, table, _ = prose.partition("| **Buys** |")
    bold = re.search(r"^\*\*(.+?)\*\*", opening, re.MULTILINE) if table else None
    return re.sub(r"[*`]", "", bold[1]) if bold else ""


def _free_name(comparison: Comparison, taken: Mapping[str, Comparison]) -> str:
    """Return the comparison's name, with a number if another comparison of the lesson has that name."""
    names = itertools.chain([comparison.name], (f"{comparison.name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken or taken[name].measurements == comparison.measurements)


def _failure(notebook) -> str | None:
    for number, cell in enumerate(code_cells(notebook.cells), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                return f"cell [{number}] {first_line(cell.source)!r}: {output.ename}: {first_line(output.evalue)}"
    return None


def first_line(text: object) -> str:
    """The first line of a text that is not blank."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
