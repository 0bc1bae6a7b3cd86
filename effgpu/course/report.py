"""The report of a run: one HTML file that loads nothing else, for phone and desktop, light and dark."""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from effgpu import results, units
from effgpu.comparison import BASELINE, FASTER, INCONCLUSIVE, SAME, SLOWER, Comparison
from effgpu.course.runner import Outcome, Picture
from effgpu.device import Device
from effgpu.measurement import Measurement

STYLE = Path(__file__).with_name("report.css")
_MARKS = {  # of a verdict: a sign and a class of the style sheet
    FASTER: ("↓", "faster"),
    SLOWER: ("↑", "slower"),
    SAME: ("=", "same"),
    INCONCLUSIVE: ("?", "same"),
    BASELINE: ("·", "same"),
}
_ICON = (
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath fill='%230072b2' d='M2 14V2h3v12zm5 0V8h3v6zm5 0v-3h2v3z'/%3E%3C/svg%3E"
)


@dataclass(frozen=True)
class Section:
    """A machine and the outcomes of its lessons."""

    device: Device
    outcomes: tuple[Outcome, ...]


def from_results(comparisons: Sequence[Comparison]) -> Section:
    """Return a section for the stored results of one machine. Their plots are drawn again."""
    from effgpu import figures

    outcomes = []
    for comparison in comparisons:
        png = base64.b64encode(figures.to_png(figures.plot(comparison))).decode()
        picture = Picture(png, comparison.alt_text())
        outcomes.append(Outcome(comparison.name, comparison.name, (comparison,), (picture,)))
    return Section(comparisons[0].device, tuple(outcomes))


def write(path: str | Path, sections: Iterable[Section]) -> Path:
    """Write the page and return its path. Raises OSError if it cannot be written; then nothing is written."""
    body = "\n".join(_section(section) for section in sections)
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>effgpu: what each technique did</title>
<link rel="icon" href="data:image/svg+xml,{_ICON}">
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
<h1>What each technique did</h1>
<p class="lead">Each variant against the first one, the baseline. They take turns while they are measured.
“2&nbsp;×&nbsp;slower” takes twice as long; brackets hold the 99&nbsp;% interval. “Same” means that any difference is
too small to matter, “inconclusive” that the measurements do not show which is faster.</p>
{body}
</main>
</body>
</html>
"""
    return results.write_atomic(path, page)


def _section(section: Section) -> str:
    section = replace(section, outcomes=tuple(sorted(section.outcomes, key=lambda outcome: not outcome.leads)))
    plots = "".join(map(_plots, section.outcomes))
    parts = [_machine(section), _failures(section.outcomes), _table(section), f'<div class="plots">\n{plots}</div>\n']
    return f"<section>\n{''.join(parts)}</section>"


def _machine(section: Section) -> str:
    device = section.device
    facts = {
        "Memory": units.format_bytes(device.memory) + (" of the host" if device.kind == "cpu" else ""),
        "Compute capability": ".".join(map(str, device.capability or ())),
        "Driver": device.driver,
        "CPU cores": str(device.cores),
        "Versions": ", ".join(f"{name} {version}" for name, version in _versions(section).items()),
    }
    rows = "".join(f"<div><dt>{name}</dt><dd>{html.escape(fact)}</dd></div>\n" for name, fact in facts.items() if fact)
    note = '<p class="note">All times are this CPU’s, not a GPU’s.</p>\n' * (device.kind == "cpu")
    return f"<h2>{html.escape(device.label)}</h2>\n<dl>\n{rows}</dl>\n{note}"


def _versions(section: Section) -> dict[str, str]:
    """The versions of all comparisons. Merged results can come from several versions of a library."""
    devices = [comparison.device for outcome in section.outcomes for comparison in outcome.comparisons]
    seen: dict[str, dict[str, None]] = {}
    for device in devices or [section.device]:
        for name, version in device.versions.items():
            seen.setdefault(name, {})[version] = None
    return {name: " and ".join(versions) for name, versions in seen.items()}


def _failures(outcomes: Iterable[Outcome]) -> str:
    rows = "".join(
        f"<li><strong>{html.escape(outcome.name)}</strong> <code>{html.escape(outcome.failure)}</code></li>\n"
        for outcome in outcomes
        if outcome.failure
    )
    return f'<div class="failed">\n<h3>Lessons that failed</h3>\n<ul>\n{rows}</ul>\n</div>\n' if rows else ""


def _table(section: Section) -> str:
    comparisons = [(outcome, comparison) for outcome in section.outcomes for comparison in outcome.comparisons]
    if not comparisons:
        return "<p>There are no comparisons.</p>\n"
    columns = {"time": "Time" if section.device.kind == "cuda" else "Time on this CPU", "memory": "Peak memory"}
    if any(measurement.joules is not None for _, comparison in comparisons for measurement in comparison):
        columns["energy"] = "Energy"
    head = "".join(f'<th scope="col">{name}</th>' for name in ["Lesson and variant", *columns.values()])
    bodies = "".join(_rows(outcome, comparison, list(columns)) for outcome, comparison in comparisons)
    label = html.escape(section.device.label)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Results on {label}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n{bodies}</table>\n</div>\n"
    )


def _rows(outcome: Outcome, comparison: Comparison, quantities: Sequence[str]) -> str:
    lesson = html.escape(outcome.name)
    if comparison.name != outcome.name:
        lesson += f" <small>{html.escape(comparison.name)}</small>"
    if order := ", ".join(comparison.order_effects()):
        lesson += f" <small>the time depends on which variant ran before: {html.escape(order)}</small>"
    lines = [f'<tr><th scope="rowgroup" colspan="{1 + len(quantities)}">{lesson}</th></tr>\n']
    for measurement in comparison:
        label = html.escape(measurement.label)
        if measurement.label in comparison.other_training:
            label += " <small>not the same training</small>"
        cells = "".join(f"<td>{_cell(comparison, measurement, quantity)}</td>" for quantity in quantities)
        lines.append(f'<tr><th scope="row">{label}</th>{cells}</tr>\n')
    return f"<tbody>\n{''.join(lines)}</tbody>\n"


def _cell(comparison: Comparison, measurement: Measurement, quantity: str) -> str:
    """The value of the baseline; of another variant the change, with what was predicted and guessed."""
    label = measurement.label
    if label == comparison.baseline.label and not measurement.failed:
        units_of = {"time": units.format_seconds, "memory": units.format_bytes, "energy": units.format_joules}
        value = units_of[quantity](comparison.value(label, quantity))
        return f"{value} <small>baseline</small>" if quantity == "time" else value
    value, _, interval = html.escape(comparison.tell(label, quantity)).partition(" [")
    cell = f"<b>{value}</b>" + (f" <small>[{interval}</small>" if interval else "")
    if quantity == "time":
        mark, kind = _MARKS.get(comparison.verdict(label), ("✕", "broken"))
        cell = f'<span class="{kind}"><span aria-hidden="true">{mark}</span> {cell}</span>'
    return cell + _expected(comparison, label, quantity)


def _expected(comparison: Comparison, label: str, quantity: str) -> str:
    """What the lesson predicted and what the reader guessed, in small print."""
    ratios = {"predicted": comparison.predicted, "guess": comparison.guess}
    given = {name: of[label][quantity] for name, of in ratios.items() if quantity in of.get(label, {})}
    text = ", ".join(f"{name} {html.escape(comparison.tell_ratio(ratio, quantity))}" for name, ratio in given.items())
    return f' <small class="expected">{text}</small>' if text else ""


def _plots(outcome: Outcome) -> str:
    if not outcome.pictures:
        return ""
    images = "".join(
        f'<img alt="{html.escape(picture.alt)}" src="data:image/png;base64,{picture.png}">\n'
        for picture in outcome.pictures
    )
    name = f"<small>{html.escape(outcome.name)}</small>" if outcome.name != outcome.title else ""
    return f"<article>\n<h3>{html.escape(outcome.title)} {name}</h3>\n{images}</article>\n"
