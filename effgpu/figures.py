"""Every plot: time beside memory, the saw-tooth of a step, a line over a sweep. The only import of matplotlib."""

import io
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from effgpu import units
from effgpu.comparison import Comparison, rank_interval
from effgpu.measurement import FEWEST_ROUNDS, Measurement
from effgpu.memory import Trace
from effgpu.reference import stored

# Okabe and Ito's colours, which colour-blind readers can tell apart, on an opaque ground that reads in light and dark.
GREY, BLUE, ORANGE, GREEN, RED, SKY, PINK = "#8A8F98", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
LINES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)
PHASES = {"forward": SKY, "backward": BLUE, "optimizer": ORANGE}
PHASE_WIDTH = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
STYLE = {
    "axes.facecolor": "white",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#E5E7EB",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "hatch.color": "white",
    "hatch.linewidth": 1.0,
    "legend.frameon": False,
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#6B7280",
    "xtick.color": "#222222",
    "ytick.color": "#222222",
}
WIDTH = 6.4


def plot(comparison: Comparison) -> Figure:
    """Time, peak memory and, where measured, energy per step of every variant, with 95 % intervals and verdicts.

    Reserved memory is outlined over allocated. Diamonds show the ratios that stored GPUs gave under the same name,
    times this baseline. A CPU's times are hatched and said to be a CPU's.
    """
    others = [other for other in stored(comparison.name) if other.device.name != comparison.device.name]
    others = [] if comparison.baseline.failed else others
    panels = [_plot_time, _plot_memory_bars] + [_plot_energy] * any(m.energies for m in comparison)
    rows = len(comparison.measurements)
    with _figure(len(panels), height=0.75 + 0.42 * rows) as (figure, axes):
        for draw, ax in zip(panels, axes):
            draw(ax, comparison, others)
            ax.set_yticks(range(rows), [m.label for m in comparison])
            ax.set_ylim(rows - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        if axes[0].get_legend_handles_labels()[0]:
            axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize=8, borderpad=0)
        _say_where(figure, comparison.measurements)
    return figure


def plot_memory(traces: Mapping[str, Trace]) -> Figure:
    """The saw-tooth: bytes alive through forward, backward and optimizer, a panel for each labelled trace, one scale.

    Across a phase the allocator's events stand evenly spaced, so that the same phases lie below one another.
    """
    if not traces:
        raise ValueError("traces: expected at least one labelled trace, got none")
    with _figure(len(traces), height=1.75, sharey=True) as (_, axes):
        for ax, (label, trace) in zip(axes, traces.items()):
            _draw_trace(ax, trace)
            ax.set_title(f"{label}: peak {units.format_bytes(trace.peak)}")
        top = max(trace.peak for trace in traces.values())
        axes[0].set_ylim(0, (top or 1) * 1.12)
        _value_axis(axes[0].yaxis, units.format_bytes)
    return axes[0].figure


def plot_sweep(
    series: Mapping[str, Mapping[float, Measurement | float | None]],
    *,
    xlabel: str,
    ylabel: str | None = None,
    log: bool = False,
    format_value: Callable[[float], str] | None = None,
) -> Figure:
    """A line for each labelled series over what was varied: workers, batch sizes, layers.

    A Measurement stands for its throughput (its seconds per step, where it has no items) with the 95 % interval; a
    number for itself, written by `format_value`; what ran out of memory (None, or a failed Measurement) is marked so.
    `log` makes the horizontal axis a power-of-two scale.
    """
    if not series or not all(series.values()):
        raise ValueError("series: expected at least one labelled mapping of x to a value, each with an entry")
    measured = [m for points in series.values() for m in points.values() if isinstance(m, Measurement)]
    with _figure(1, height=3.4) as (figure, (ax,)):
        for color, (label, points) in zip(LINES, series.items()):
            _draw_line(ax, label, points, color)
        ax.set_xscale("log" if log else "linear", **{"base": 2} if log else {})
        ax.set_xticks(xs := sorted({x for points in series.values() for x in points}), [f"{x:g}" for x in xs])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        _value_axis(ax.yaxis, format_value or _format_measured(measured))
        ax.set(xlabel=xlabel, ylabel=ylabel or _name_measured(measured))
        if len(series) > 1:
            ax.legend(frameon=True, framealpha=0.85, edgecolor="none")
        _say_where(figure, measured)
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG, at twice the resolution that it is shown at."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200)
    return file.getvalue()


class _Shown(Figure):
    """A figure that a notebook shows once: as a cell's value, or at the cell's end, whichever comes first."""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        plt.close(self)
        width, height = (round(inches * 100) for inches in self.get_size_inches())
        size = {"width": width, "height": height}
        display({"image/png": to_png(self), "text/plain": "Figure"}, metadata={"image/png": size}, raw=True)


@contextmanager
def _figure(rows: int, *, height: float, sharey: bool = False):
    """A figure of panels above one another, handed to pyplot only where a notebook will show it.

    Made outside of rc_context, which would undo the interactive mode that pyplot's first figure switches on.
    """
    look = {"figsize": (WIDTH, height * rows), "facecolor": "white", "layout": "constrained"}
    figure = plt.figure(FigureClass=_Shown, **look) if "ipykernel" in sys.modules else Figure(**look)
    with plt.rc_context(STYLE):
        yield figure, figure.subplots(rows, 1, squeeze=False, sharey=sharey)[:, 0]


def _plot_time(ax, comparison: Comparison, others: Iterable[Comparison]) -> None:
    values = {m.label: [t / _share(comparison, m) for t in m.times] for m in comparison}
    told = {m.label: _tell(comparison, m, comparison.time_ratio, comparison.verdict(m.label)) for m in comparison}
    _draw_bars(ax, comparison, values, told, units.format_seconds)
    _draw_stored(ax, comparison, others, lambda c, label: c.time_ratio(label))
    ax.set_title(f"time per {_whole(comparison)}")


def _plot_memory_bars(ax, comparison: Comparison, others: Iterable[Comparison]) -> None:
    values = {m.label: [m.peak_allocated] if m.peak_allocated is not None else [] for m in comparison}
    told = {m.label: _tell(comparison, m, comparison.memory_ratio) for m in comparison}
    _draw_bars(ax, comparison, values, told, units.format_bytes, exact=True)
    for row, m in enumerate(comparison):
        if m.peak_reserved:
            ax.barh(
                row, m.peak_reserved, height=0.62, facecolor="none", edgecolor="#6B7280", linewidth=1, linestyle=":"
            )
            _make_room(ax, m.peak_reserved)
    _draw_stored(ax, comparison, others, lambda c, label: c.memory_ratio(label))
    ax.set_title("peak memory" + (" (dotted: reserved)" if any(m.peak_reserved for m in comparison) else ""))


def _plot_energy(ax, comparison: Comparison, others: Iterable[Comparison]) -> None:
    values = {m.label: [joules / _share(comparison, m) for joules in m.energies] for m in comparison}
    told = {m.label: _tell(comparison, m, comparison.energy_ratio) for m in comparison}
    _draw_bars(ax, comparison, values, told, units.format_joules)
    _draw_stored(ax, comparison, others, lambda c, label: c.energy_ratio(label))
    ax.set_title(f"energy per {_whole(comparison)}")


def _share(comparison: Comparison, measurement: Measurement) -> float:
    """What a step's value is divided by: its items, where the variants' steps differ in them."""
    return measurement.items if len({m.items for m in comparison}) > 1 else 1


def _whole(comparison: Comparison) -> str:
    """What values are per: a step, or an item where the variants' steps differ in items."""
    return comparison.baseline.unit.removesuffix("s") if len({m.items for m in comparison}) > 1 else "step"


def _draw_bars(
    ax, comparison: Comparison, values: Mapping, told: Mapping, format_value, *, exact: bool = False
) -> None:
    """A bar for each variant's median, its 95 % interval, and at its end the value and what is told about it."""
    hatch = "////" if comparison.device.kind == "cpu" and not exact else None
    ends = [0.0]
    for row, (label, samples) in enumerate(values.items()):
        color = GREY if label == comparison.baseline.label else BLUE
        middle, low, high = _interval(samples) if samples else (0, 0, 0)
        ax.barh(row, middle, height=0.62, color=color, hatch=hatch)
        if high > low:
            ax.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="#222222", capsize=3, linewidth=1.2)
        text = f"{format_value(middle)}  {told[label]}".strip() if samples else told[label]
        ax.annotate(text, (high, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=9)
        ends.append(high)
    ax.set_xlim(0, (max(ends) or 1) * 1.9)
    _value_axis(ax.xaxis, format_value)


def _draw_stored(ax, comparison: Comparison, others: Iterable[Comparison], ratio_of: Callable) -> None:
    """What other GPUs gave: their ratios, laid on this baseline, since their sizes and speeds are their own."""
    unit = ax.patches[0].get_width() if ax.patches else 0
    rows = {m.label: row for row, m in enumerate(comparison)}
    for other, color in zip(others, LINES[1:]):
        found = {m.label: ratio_of(other, m.label) for m in other if m.label in rows and m is not other.baseline}
        points = [(ratio.value * unit, rows[label] + 0.42) for label, ratio in found.items() if ratio and unit]
        if points:
            name = f"{other.device.name} (its ratio)"
            ax.plot(*zip(*points), "D", color=color, markersize=5, alpha=0.55, clip_on=False, label=name)
            _make_room(ax, max(points)[0])


def _make_room(ax, x: float) -> None:
    """Widen a panel of bars so that `x` lies in it."""
    ax.set_xlim(right=max(ax.get_xlim()[1], 1.05 * x))


def _tell(comparison: Comparison, measurement: Measurement, ratio_of: Callable, verdict: str = "") -> str:
    """What stands behind a bar: the ratio to the baseline and the verdict, or why there is none."""
    ratio = ratio_of(measurement.label)
    if measurement is comparison.baseline or ratio is None:
        return measurement.failed or verdict
    return f"{units.format_ratio(ratio.value)}  {verdict}"


def _draw_trace(ax, trace: Trace) -> None:
    """The level after each event, over its phases; a run of one phase has the same width in every panel."""
    xs, starts, left = [], [], 0.0
    for first, last, phase in _runs(trace.phases):
        starts.append((left, phase))
        xs += [left + PHASE_WIDTH[phase] * (i - first) / (last - first) for i in range(first, last)]
        left += PHASE_WIDTH[phase]
    for (start, phase), (end, _) in pairwise([*starts, (left, "")]):
        ax.axvspan(start, end, color=PHASES[phase], alpha=0.10, linewidth=0)
        size = 9 if len(starts) < 4 else 7
        ax.text(
            (start + end) / 2, -0.09, phase, transform=ax.get_xaxis_transform(), ha="center", va="center", size=size
        )
    ax.fill_between([*xs, left], [*trace.bytes, trace.bytes[-1]], step="post", color=BLUE, alpha=0.25, linewidth=0)
    ax.step([*xs, left], [*trace.bytes, trace.bytes[-1]], where="post", color=BLUE, linewidth=1.3)
    ax.axhline(trace.peak, color=RED, linewidth=1, linestyle="--")
    ax.set_xlim(0, left)
    ax.set_xticks([])


def _runs(phases: tuple[str, ...]) -> list[tuple[int, int, str]]:
    """(first, one past the last, phase) for each run of one phase."""
    edges = [0, *(i for i in range(1, len(phases)) if phases[i] != phases[i - 1]), len(phases)]
    return [(first, last, phases[first]) for first, last in pairwise(edges)]


def _draw_line(ax, label: str, points: Mapping[float, Measurement | float | None], color: str) -> None:
    known = {x: interval for x, value in sorted(points.items()) if (interval := _interval_of(value))}
    if known:
        middles, lows, highs = zip(*known.values())
        errors = [[m - low for m, low in zip(middles, lows)], [high - m for m, high in zip(middles, highs)]]
        cpu = any(isinstance(v, Measurement) and v.device.kind == "cpu" for v in points.values())
        look = {"color": color, "marker": "o", "capsize": 3, "linestyle": "--" if cpu else "-"}
        ax.errorbar(list(known), middles, errors if any(map(any, errors)) else None, label=label, **look)
    for x in points.keys() - known.keys():
        ax.plot(x, 0.03, "X", color=color, markersize=9, transform=ax.get_xaxis_transform(), clip_on=False)
        ax.annotate("out of memory", (x, 0.07), xycoords=ax.get_xaxis_transform(), fontsize=8, ha="center")


def _interval(samples: Sequence[float]) -> tuple[float, float, float]:
    """Their median and the ends of their 95 % interval, which are the median itself where the samples are too few."""
    middle = statistics.median(samples)
    _, low, high = rank_interval(samples) if len(samples) >= FEWEST_ROUNDS else (middle,) * 3
    return middle, min(low, middle), max(high, middle)


def _interval_of(value: Measurement | float | None) -> tuple[float, float, float] | None:
    """Middle, low and high end of what is drawn for a value of a sweep; None for what ran out of memory."""
    if not isinstance(value, Measurement):
        return None if value is None else (value, value, value)
    if not value.times:
        return None
    middle, low, high = _interval(value.times)
    return (value.items / middle, value.items / high, value.items / low) if value.items else (middle, low, high)


def _format_measured(measured: list[Measurement]) -> Callable[[float], str]:
    return units.format_seconds if measured and not measured[0].items else units.format_count


def _name_measured(measured: list[Measurement]) -> str:
    if not measured:
        return ""
    return f"{measured[0].unit} per second" if measured[0].items else "time per step"


class _BinaryLocator(MaxNLocator):
    """Ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float):
        """The ticks between two numbers of bytes."""
        unit = max(scale for scale in (1, units.KiB, units.MiB, units.GiB) if scale == 1 or vmax >= 2 * scale)
        return super().tick_values(vmin / unit, vmax / unit) * unit


def _value_axis(axis, format_value: Callable[[float], str]) -> None:
    """A few round ticks, written as the values are but without trailing zeros."""
    axis.set_major_locator((_BinaryLocator if format_value is units.format_bytes else MaxNLocator)(4))
    axis.set_major_formatter(
        FuncFormatter(lambda value, _: re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", format_value(value)))
    )


def _say_where(figure: Figure, measured: Iterable[Measurement]) -> None:
    """One line at the foot: the device, and whose times these are."""
    devices = {m.device.label: m.device.kind for m in measured}
    told = [label + ("" if kind == "cuda" else " – a CPU's times, not a GPU's") for label, kind in devices.items()]
    if told:
        figure.supxlabel(f"measured on {'; '.join(told)}", fontsize=8, x=0.01, ha="left", color="#4B5563")
