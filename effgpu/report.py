"""The page of what a run found: one file that asks nothing of the network, for phone and desktop, light and dark."""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from effgpu import reference, units
from effgpu.comparison import BASELINE, FASTER, SLOWER, WITHIN_NOISE, Comparison, Ratio
from effgpu.course import Outcome, Picture
from effgpu.device import Device
from effgpu.measurement import Measurement

STYLE = Path(__file__).with_name("report.css")
_MARKS = {FASTER: ("↓", "faster"), SLOWER: ("↑", "slower"), WITHIN_NOISE: ("≈", "noise"), BASELINE: ("·", "baseline")}
_ICON = (
    "%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath fill='%230072b2' d='M2 14V2h3v12zm5 0V8h3v6zm5 0v-3h2v3z'/%3E%3C/svg%3E"
)


@dataclass(frozen=True)
class Section:
    """A machine, and what its lessons gave."""

    device: Device
    outcomes: tuple[Outcome, ...]


def from_results(comparisons: Sequence[Comparison]) -> Section:
    """A section from the stored results of one machine, its plots drawn anew."""
    from effgpu import figures

    outcomes = []
    for comparison in comparisons:
        png = base64.b64encode(figures.to_png(figures.plot(comparison))).decode()
        picture = Picture(png, comparison.alt_text())
        outcomes.append(Outcome(comparison.name, comparison.name, (comparison,), (picture,)))
    return Section(comparisons[0].device, tuple(outcomes))


def write(path: str | Path, sections: Iterable[Section]) -> Path:
    """Write the page, all of it or nothing. Returns the path; raises OSError where it cannot be written."""
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
<p class="lead">Every variant against its baseline, measured in alternating rounds. A ratio below 1 is less than the
baseline took; in brackets its 99&nbsp;% interval. A difference that lies within the noise is called that.</p>
{body}
</main>
</body>
</html>
"""
    return reference.write_whole(path, page)


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
    rows = "".join(f"<div><dt>{name}</dt><dd>{html.escape(told)}</dd></div>\n" for name, told in facts.items() if told)
    note = '<p class="note">There was no GPU: every time is this CPU’s, not a GPU’s.</p>\n' * (device.kind == "cpu")
    return f"<h2>{html.escape(device.label)}</h2>\n<dl>\n{rows}</dl>\n{note}"


def _versions(section: Section) -> dict[str, str]:
    """What the comparisons were measured with: results that were merged may come from several versions."""
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
        return "<p>No lesson gave a comparison.</p>\n"
    energy = any(measurement.energies for _, comparison in comparisons for measurement in comparison)
    time = "Time" if section.device.kind == "cuda" else "Time on this CPU"
    names = ["Lesson and variant", time, "Verdict on time", "Peak memory", *["Energy"] * energy]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    bodies = "".join(_rows(outcome, comparison, energy) for outcome, comparison in comparisons)
    label = html.escape(section.device.label)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="Results on {label}">\n'
        f"<table>\n<thead><tr>{head}</tr></thead>\n{bodies}</table>\n</div>\n"
    )


def _rows(outcome: Outcome, comparison: Comparison, energy: bool) -> str:
    lesson = html.escape(outcome.name)
    if comparison.name != outcome.name:
        lesson += f" <small>{html.escape(comparison.name)}</small>"
    if disturbed := ", ".join(comparison.disturbed()):
        lesson += f" <small>disturbed by what ran just before: {html.escape(disturbed)}</small>"
    lines = [f'<tr><th scope="rowgroup" colspan="{4 + energy}">{lesson}</th></tr>\n']
    for measurement in comparison:
        cells = "".join(f"<td>{cell}</td>" for cell in _cells(comparison, measurement, energy))
        lines.append(f'<tr><th scope="row">{html.escape(measurement.label)}</th>{cells}</tr>\n')
    return f"<tbody>\n{''.join(lines)}</tbody>\n"


def _cells(comparison: Comparison, measurement: Measurement, energy: bool) -> list[str]:
    """The baseline's own values, the others' ratios to it."""
    if measurement is comparison.baseline:
        time, memory = units.format_seconds(measurement.median), units.format_bytes(measurement.peak_allocated)
        joules = units.format_joules(measurement.joules)
    else:
        ratios = (comparison.ratio(measurement.label, quantity) for quantity in ("time", "memory", "energy"))
        time, memory, joules = map(_ratio, ratios)
    return [time, _verdict(comparison.verdict(measurement.label)), memory, *[joules] * energy]


def _verdict(verdict: str) -> str:
    mark, kind = _MARKS.get(verdict, ("✕", "broken"))
    return f'<span class="{kind}"><span aria-hidden="true">{mark}</span> {html.escape(verdict)}</span>'


def _ratio(ratio: Ratio | None) -> str:
    value, _, interval = units.told(ratio).partition(" [")
    return f"<b>{value}</b> <small>[{interval}</small>" if interval else f"<b>{value}</b>"


def _plots(outcome: Outcome) -> str:
    if not outcome.pictures:
        return ""
    images = "".join(
        f'<img alt="{html.escape(picture.alt)}" src="data:image/png;base64,{picture.png}">\n'
        for picture in outcome.pictures
    )
    name = f"<small>{html.escape(outcome.name)}</small>" if outcome.name != outcome.title else ""
    return f"<article>\n<h3>{html.escape(outcome.title)} {name}</h3>\n{images}</article>\n"
