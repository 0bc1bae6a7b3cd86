"""The report of a run: one HTML file that loads nothing else, for phone and desktop, light and dark."""

import base64
import html
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from effgpu import results, units
from effgpu.ablation import Ablation
from effgpu.comparison import INCONCLUSIVE, SAME, Comparison
from effgpu.course import runner
from effgpu.course.runner import COSTS, NO_DIFFERENCE, PAYS, TRADE, UNCLEAR, Headline, Outcome, Picture
from effgpu.measuring.device import Device

STYLE = Path(__file__).with_name("report.css")
MOST_ROWS = 12  # of a table that is not folded
_GROUPS = {  # of the headlines, in their order: heading, explanation, sign and class of the style sheet
    PAYS: ("Pays", "less time or less memory, and more of neither", "✓", "faster"),
    TRADE: ("A trade", "less of one, more of the other", "⇄", "trade"),
    NO_DIFFERENCE: ("No difference", "the same time, the same memory", "=", "same"),
    UNCLEAR: ("Cannot tell", "memory is the same, and the time is inconclusive", "?", "same"),
    COSTS: ("Does not pay", "more time or more memory, and less of neither", "✕", "slower"),
}


@dataclass(frozen=True)
class Section:
    """A machine and the outcomes of its lessons."""

    device: Device
    outcomes: tuple[Outcome, ...]


def from_results(comparisons: Sequence[Comparison]) -> Section:
    """Return a section for the stored results of one machine. Their plots are drawn again.

    Comparisons whose names start with the number of a lesson, as "02_" in "02_tokenise", are results of that lesson.
    """
    lessons = {
        lesson.name[:3]: Outcome(lesson.name, lesson.title, about=lesson.about)
        for lesson in runner.read_lessons(runner.LESSONS)
    }
    groups: dict[Outcome, list[Comparison]] = {}
    for comparison in comparisons:
        lesson = lessons.get(comparison.name[:3], Outcome(comparison.name, comparison.name))
        groups.setdefault(lesson, []).append(comparison)
    outcomes = [
        replace(lesson, comparisons=tuple(group), pictures=tuple(map(_draw, group))) for lesson, group in groups.items()
    ]
    return Section(comparisons[0].device, tuple(outcomes))


def write(path: str | Path, sections: Iterable[Section]) -> Path:
    """Write the page and return its path. Raises OSError if it cannot be written; then nothing is written."""
    return results.write_atomic(path, _page(list(sections)))


def _page(sections: Sequence[Section]) -> str:
    title = "What pays on this machine" if len(sections) == 1 else "What pays on these machines"
    body = "\n".join(itertools.starmap(_section, enumerate(sections)))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>effgpu: {title.lower()}</title>
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">One variant of each lesson against the lesson’s baseline. They took turns while they were measured.
“2&nbsp;×&nbsp;slower” takes twice as long; brackets hold the 99&nbsp;% interval. “Same” means that any difference is
too small to matter, “inconclusive” that the measurements do not show which is faster.</p>
{body}
</main>
</body>
</html>
"""


def _section(number: int, section: Section) -> str:
    anchors = {outcome.name: f"m{number}-{outcome.name}" for outcome in section.outcomes}
    lessons = "".join(_lesson(outcome, anchors[outcome.name]) for outcome in section.outcomes)
    parts = [_machine(section), _failures(section.outcomes), _overview(section, anchors), lessons]
    return f'<section class="machine">\n{"".join(parts)}</section>'


def _machine(section: Section) -> str:
    device = section.device
    facts = {
        "Memory": units.format_bytes(device.memory) + (" of the host" if device.kind == "cpu" else ""),
        "Compute capability": ".".join(map(str, device.capability or ())),
        "Driver": device.driver,
        "CPU cores": str(device.cores),
        "Versions": ", ".join(f"{name} {version}" for name, version in device.versions.items()),
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{html.escape(fact)}</dd></div>\n" for name, fact in facts.items() if fact)
    note = '<p class="note">All times are this CPU’s, not a GPU’s.</p>\n' * (device.kind == "cpu")
    folded = f"<details>\n<summary>About this machine</summary>\n<dl>\n{rows}</dl>\n</details>\n"
    return f"<h2>{html.escape(device.label)}</h2>\n{note}{folded}"


def _failures(outcomes: Iterable[Outcome]) -> str:
    rows = "".join(
        f"<li><strong>{html.escape(outcome.name)}</strong> <code>{html.escape(outcome.failure)}</code></li>\n"
        for outcome in outcomes
        if outcome.failure
    )
    return f'<div class="failed">\n<h3>Lessons that failed</h3>\n<ul>\n{rows}</ul>\n</div>\n' if rows else ""


# The overview: a line and its bars for each lesson


def _overview(section: Section, anchors: dict[str, str]) -> str:
    headlines = [(outcome, outcome.headline) for outcome in section.outcomes if outcome.headline]
    groups = [
        _group(verdict, sorted((pair for pair in headlines if pair[1].verdict == verdict), key=_rank), anchors)
        for verdict in _GROUPS
    ]
    silent = [outcome for outcome in section.outcomes if not outcome.headline and not outcome.failure]
    why = "They need a GPU, or compare nothing." if section.device.kind == "cpu" else "They compare nothing here."
    links = ", ".join(_link(outcome, anchors) for outcome in silent)
    rest = f'<p class="silent">Without a result: {links}. {why}</p>\n' if silent else ""
    return (_legend(headlines) + "".join(groups) if headlines else "<p>There are no comparisons.</p>\n") + rest


def _legend(headlines: Sequence[tuple[Outcome, Headline]]) -> str:
    given = [headline.comparison for _, headline in headlines]
    marks = '<span><i class="predicted"></i> predicted</span>' * any(comparison.predicted for comparison in given)
    return (
        '<p class="legend">The line in the middle of a bar is the baseline. To its left the variant takes less, '
        f"to its right more, at most twice as much. {marks}</p>\n"
    )


def _rank(pair: tuple[Outcome, Headline]) -> float:
    """The smallest of the ratios first; among those that only cost, the largest last."""
    headline = pair[1]
    ratios = [headline.comparison.ratio(headline.label, quantity) or 1 for quantity in ("time", "memory")]
    return max(ratios) if headline.verdict == COSTS else min(ratios)


def _group(verdict: str, headlines: Sequence[tuple[Outcome, Headline]], anchors: dict[str, str]) -> str:
    if not headlines:
        return ""
    name, explained, sign, kind = _GROUPS[verdict]
    lines = "".join(_line(outcome, headline, anchors) for outcome, headline in headlines)
    mark = f'<span class="{kind}" aria-hidden="true">{sign}</span>'
    columns = '<div class="columns" aria-hidden="true"><span></span><span>Time</span><span>Peak memory</span></div>\n'
    heading = f'<h3 class="verdict">{mark} {name} <small>{explained}</small></h3>\n'
    return f'{heading}{columns}<ul class="overview">\n{lines}</ul>\n'


def _line(outcome: Outcome, headline: Headline, anchors: dict[str, str]) -> str:
    comparison, label = headline.comparison, headline.label
    variant = f"{html.escape(label)} <small>against {html.escape(comparison.baseline.label)}</small>"
    cells = "".join(_measure(headline, quantity) for quantity in ("time", "memory"))
    return f'<li><div class="what">{_link(outcome, anchors)}<br>{variant}</div>{cells}</li>\n'


def _link(outcome: Outcome, anchors: dict[str, str]) -> str:
    return f'<a href="#{html.escape(anchors[outcome.name])}">{html.escape(_title(outcome))}</a>'


def _title(outcome: Outcome) -> str:
    """The lesson's number and its title without what follows a colon; for other results their name."""
    number = outcome.name[:2] if outcome.name[:2].isdecimal() else ""
    return f"{number} {outcome.title.partition(':')[0]}".strip() if outcome.title != outcome.name else outcome.name


def _measure(headline: Headline, quantity: str) -> str:
    """A bar and the result in words, with what was predicted."""
    comparison, label = headline.comparison, headline.label
    name = {"time": "Time", "memory": "Peak memory"}[quantity]
    words = headline.time if quantity == "time" else comparison.tell(label, "memory")
    words = "not measured" if words == units.NOT_MEASURED else words
    value, _, interval = html.escape(words).partition(" [")
    text = f"<b>{value}</b>" + (f" <small>[{interval}</small>" if interval else "")
    text += _expected(comparison, label, quantity)
    if quantity == "memory" and headline.full_size:
        text += f' <small class="expected">{html.escape(headline.full_size)}</small>'
    bar = _bar(comparison, label, quantity)
    return f'<div class="measure"><span class="name">{name}</span>{bar}<p>{text}</p></div>'


def _bar(comparison: Comparison, label: str, quantity: str) -> str:
    """From the baseline in the middle to the left (less) or to the right (more), with interval and prediction.

    It ends at nothing on the left and at twice the baseline on the right.
    """
    ratio, marks = comparison.ratio(label, quantity), ""
    if ratio:
        interval = comparison.time_ratio(label) if quantity == "time" else None
        unclear = quantity == "time" and comparison.verdict(label) in (SAME, INCONCLUSIVE)
        kind = "unclear" if unclear else "less" if ratio < 1 else "more"
        marks += _span(f"fill {kind}", min(ratio, 1), max(ratio, 1))
        if interval:
            marks += _span("interval", interval.low, interval.high)
        marks += '<i class="beyond"></i>' * (ratio > 2)
    if predicted := comparison.predicted.get(label, {}).get(quantity):
        marks += f'<i class="predicted" style="left:{_place(predicted):.1f}%"></i>'
    return f'<div class="bar" aria-hidden="true">{marks}</div>'


def _span(kind: str, low: float, high: float) -> str:
    return f'<i class="{kind}" style="left:{_place(low):.1f}%;right:{100 - _place(high):.1f}%"></i>'


def _place(ratio: float) -> float:
    """Where a ratio to the baseline is drawn, in per cent of a bar's width."""
    return min(50 * ratio, 100)


# The lessons


def _lesson(outcome: Outcome, anchor: str) -> str:
    if not outcome.comparisons and not outcome.pictures:
        return ""
    own = [picture for picture in outcome.pictures if outcome.main and picture.shows == outcome.main.name]
    others = [picture for picture in outcome.pictures if picture not in own[:1]]
    main = [_comparison(outcome.main)] if outcome.main else []
    rest = [
        f"<h4>{html.escape(comparison.name)}</h4>\n{_comparison(comparison)}"
        for comparison in outcome.comparisons
        if comparison is not outcome.main
    ]
    about = f'<p class="about">{html.escape(outcome.about)}</p>\n' if outcome.about else ""
    name = f" <small>{html.escape(outcome.name)}</small>" if outcome.name != outcome.title else ""
    title = f"<h3>{html.escape(outcome.title)}{name}</h3>\n"
    parts = [title, about, *main, *map(_image, own[:1]), *rest, _fold_plots(others, bool(own))]
    return f'<article id="{html.escape(anchor)}">\n{"".join(parts)}</article>\n'


def _comparison(comparison: Comparison) -> str:
    """Its table as the lesson shows it; a long one is folded. An ablation's has a row for each switch above it."""
    switches = ""
    if isinstance(comparison, Ablation):
        switches = _table(f"Switches of {comparison.name}", *comparison.table())
    table = _table(f"Results of {comparison.name}", *Comparison.table(comparison))
    if len(comparison) > MOST_ROWS:
        table = f"<details>\n<summary>All {len(comparison)} variants</summary>\n{table}</details>\n"
    return switches + table


def _table(label: str, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in a box of its own, which scrolls where it is too wide."""
    box = f'<div class="scroll" role="region" tabindex="0" aria-label="{html.escape(label)}">'
    return f"{box}\n<table>\n{units.html_table(headings, rows)}</table>\n</div>\n"


def _expected(comparison: Comparison, label: str, quantity: str) -> str:
    """What the lesson predicted, in small print."""
    ratio = comparison.predicted.get(label, {}).get(quantity)
    told = html.escape(comparison.tell_ratio(ratio, quantity))
    return f' <small class="expected">predicted {told}</small>' if ratio else ""


# The plots


def _fold_plots(pictures: Sequence[Picture], more: bool) -> str:
    if not pictures:
        return ""
    count = f"{len(pictures)}{' more' * more} plot{'s' * (len(pictures) > 1)}"
    images = "".join(map(_image, pictures))
    return f'<details>\n<summary>{count}</summary>\n<div class="plots">\n{images}</div>\n</details>\n'


def _image(picture: Picture) -> str:
    return f'<img alt="{html.escape(picture.alt)}" src="data:image/png;base64,{picture.png}">\n'


def _draw(comparison: Comparison) -> Picture:
    from effgpu import figures

    png = base64.b64encode(figures.to_png(figures.plot(comparison))).decode()
    return Picture(png, comparison.alt_text(), comparison.name)
