"""The report of a run: one HTML file that loads nothing else, for phone and desktop, light and dark."""

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from effgpu import units
from effgpu.comparison import Comparison
from effgpu.course.lessons import LESSONS
from effgpu.course.outcomes import Outcome, Picture, read_lessons
from effgpu.measuring.device import Device
from effgpu.storing import write_atomic

STYLE = Path(__file__).with_name("report.css")
OVERVIEW = ("lesson", "variant against baseline", "time", "peak memory", "at full size")


@dataclass(frozen=True)
class Section:
    """A machine and the outcomes of its lessons."""

    device: Device
    outcomes: tuple[Outcome, ...]


def from_results(comparisons: Sequence[Comparison]) -> Section:
    """Return a section for the stored results of one machine. Their plots are drawn again.

    Comparisons whose names start with the number of a lesson, as "02_" in "02_tokenise", are results of that lesson.
    """
    known = read_lessons(LESSONS)
    lessons = {each.name[:3]: Outcome(each.name, each.title, about=each.about) for each in known}
    groups: dict[Outcome, list[Comparison]] = {}
    for comparison in comparisons:
        lesson = lessons.get(comparison.name[:3], Outcome(comparison.name, comparison.name))
        groups.setdefault(lesson, []).append(comparison)
    outcomes = (replace(each, comparisons=tuple(own), pictures=tuple(map(_draw, own))) for each, own in groups.items())
    return Section(comparisons[0].device, tuple(outcomes))


def write(path: str | Path, sections: Iterable[Section]) -> Path:
    """Write the page and return its path. Raises OSError if it cannot be written; then nothing is written."""
    return write_atomic(path, _page(sections))


def _page(sections: Iterable[Section]) -> str:
    title = "What each technique did to time and memory"
    body = "".join(_section(section, f"m{number}-") for number, section in enumerate(sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>effgpu: {title.lower()}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<h1>{title}</h1>
<p>One variant of each lesson against the lesson’s baseline. They took turns while they were measured.
“2&nbsp;×&nbsp;slower” takes twice as long; brackets hold the 99&nbsp;% interval. “Same” means that any difference is
too small to matter, “inconclusive” that the measurements do not show which is faster.</p>
{body}</body>
</html>
"""


def _section(section: Section, prefix: str) -> str:
    """A machine, what failed on it, an overview, and the lessons. `prefix` makes its anchors differ from others'."""
    device, outcomes = section.device, sorted(section.outcomes, key=lambda each: each.name)
    versions = ", ".join(f"{name} {version}" for name, version in device.versions.items())
    note = "<p><strong>All times are this CPU’s, not a GPU’s.</strong></p>\n" if device.kind == "cpu" else ""
    head = f"<h2>{escape(device.label)}</h2>\n<p>{escape(versions)}</p>\n{note}"
    lessons = "".join(_lesson(each, prefix) for each in outcomes)
    return f"<section>\n{head}{_failures(outcomes)}{_overview(outcomes, prefix)}{lessons}</section>\n"


def _failures(outcomes: Iterable[Outcome]) -> str:
    failed = [outcome for outcome in outcomes if outcome.failure]
    rows = "".join(f"<li><strong>{escape(each.name)}</strong>: {escape(each.failure)}</li>\n" for each in failed)
    return f"<h3>Lessons that failed</h3>\n<ul>\n{rows}</ul>\n" if failed else ""


def _overview(outcomes: Iterable[Outcome], prefix: str) -> str:
    head = "".join(f'<th scope="col">{heading}</th>' for heading in OVERVIEW)
    rows = "".join(_row(each, prefix) for each in outcomes)
    return _scrolling("Overview", f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody>")


def _row(outcome: Outcome, prefix: str) -> str:
    """A lesson's line of the overview: its headline, or why it has none."""
    cells = [outcome.tell(), "", "", ""]
    if headline := outcome.headline:
        against = f"{headline.label} against {headline.comparison.baseline.label}"
        cells = [against, headline.time, headline.comparison.tell(headline.label, "memory"), headline.full_size]
    title = _title(outcome).partition(":")[0]
    link = f'<th scope="row"><a href="#{escape(prefix + outcome.name)}">{escape(title)}</a></th>'
    return f"<tr>{link}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _title(outcome: Outcome) -> str:
    """A lesson's title behind its number; of other results their name."""
    number = outcome.name.partition("_")[0]
    return f"{number} {outcome.title}" if number.isdecimal() and outcome.title != outcome.name else outcome.title


def _lesson(outcome: Outcome, prefix: str) -> str:
    about = f"<p>{escape(outcome.about)}</p>\n" if outcome.about else ""
    tables = "".join(
        f"<h4>{escape(each.name)}</h4>\n"
        + "".join(_scrolling(each.name, units.html_table(*one[:2])) for one in each.tables())
        for each in outcome.comparisons
    )
    source = "data:image/png;base64,"
    images = "".join(f'<img alt="{escape(each.alt)}" src="{source}{each.png}">\n' for each in outcome.pictures)
    head = f'<article id="{escape(prefix + outcome.name)}">\n<h3>{escape(_title(outcome))}</h3>\n'
    return f"{head}{about}{tables}{images}</article>\n"


def _scrolling(label: str, table: str) -> str:
    """A table in a box of its own, which scrolls where it is too wide, also by the keyboard."""
    box = f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(label)}">'
    return f"{box}\n<table>\n{table}\n</table>\n</div>\n"


def _draw(comparison: Comparison) -> Picture:
    from effgpu.figures.panels import to_png
    from effgpu.figures.plot import plot

    png = to_png(plot(comparison))
    return Picture(base64.b64encode(png).decode(), comparison.alt_text())
