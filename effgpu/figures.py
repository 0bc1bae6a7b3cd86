"""Every plot: time and memory, the memory of a step, a sweep. The only import of matplotlib."""

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, groupby, pairwise
from pathlib import Path
from textwrap import fill

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from effgpu import units
from effgpu.benching.seeds import Curves
from effgpu.comparison import Comparison
from effgpu.measuring import gpu_lock
from effgpu.measuring.intervals import CONFIDENCE
from effgpu.measuring.measurement import Measurement
from effgpu.measuring.memory import Trace
from effgpu.predicting.full_size import REST
from effgpu.predicting.kernels import OPTIMIZER, PRODUCT
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS, MAY_NOT_FIT
from effgpu.predicting.timeline import CPU, GPU, WAIT, WORK, Timeline
from effgpu.results import stored
from effgpu.units import FORMATS

Line = Mapping[float, float]
# Okabe and Ito's colours, which colour-blind readers can tell apart, on an opaque ground that reads in light and dark.
GREY, BLUE, ORANGE, GREEN, RED, SKY, PINK = "#8A8F98", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
DIM = "#4B5563"
LINES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)
MOST_TICKS = 12  # at a sweep's points: more would run into each other
LONGEST_TICK = 7  # letters, and so would longer ones
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
    "text.parse_math": False,  # a name may have dollar signs
    "axes.labelcolor": "#222222",
    "axes.edgecolor": "#6B7280",
    "xtick.color": "#222222",
    "ytick.color": "#222222",
}
VERDICT_COLORS = {FITS: GREEN, DOES_NOT_FIT: RED, MAY_NOT_FIT: GREY}
WAITING = "waiting for the CPU"
PART_COLORS = {PRODUCT: BLUE, REST: GREY, OPTIMIZER: GREEN, WAITING: ORANGE}  # of a predicted time
WIDTH, WIDTH_BESIDE = 6.4, 4.1  # inches of a panel, with the names of its rows; of one beside it, without
FINE, MOST_PIXELS = 125, 1_600_000  # dots per inch of a picture, which is shown at 100; dots in all
LONGEST_LINE = 30  # letters of a variant's name
LONGEST_IN_LEGEND = 35  # letters of names of which each takes half of WIDTH
LONGEST_TITLE = 37  # letters of a narrow panel's title
MOST_IN_FREE = 8  # names of a legend in a free panel
NAME_HEIGHT = 0.19  # inches that a line of a name takes


@gpu_lock.free()
def plot(
    result: Comparison | Curves | Trace | Timeline | Mapping[str, Trace | Timeline | Line | list[Line]],
    *,
    between: tuple[float, float] | None = None,
    xlabel: str = "",
    ylabel: str = "",
    log: bool = False,
    format_value: Callable[[float], str] = units.format_count,
) -> Figure:
    """Draw a result. What is drawn follows from its type.

    - What `compare`, `ablate` or `bench` gave: bars of time, peak memory and, where measured, energy per step, with
      99 % intervals and verdicts. A diamond marks a prediction, yours or that for this GPU with its range, a dotted
      outline reserved memory. Faint triangles are the ratios that stored GPUs gave under the same name, times this
      baseline. Where `full_size` was given, panels show the predicted time on each GPU, with its range and where it
      goes, and the predicted memory, with all that the process may take; a CPU has no panel then, else its times are
      hatched, and named as such. An arrow in place of a range says that a time is the least: a part is not known.
    - The `curves` of what `bench` gave over seeds: losses against steps and against time, a thin line for each seed.
    - What `trace` gave, or a mapping of labels to such: bytes alive through forward, backward and optimizer, a panel
      each, on one scale. Allocations are evenly spaced within a phase, so the width of a phase is not its time.
    - The `timeline` of a prediction, or a mapping of labels to such: what CPU and GPU do in one step, a panel each, on
      one scale, in milliseconds since the GPU began. `between` takes the milliseconds to show, with the events' names.
    - A sweep, which maps a label to a mapping of numbers to numbers: a line for each label, over what was varied; or to
      several of them, such as one for each seed: lines of one colour. Only here the other options say something:
      `format_value` writes the numbers, and `log` makes the horizontal axis a power-of-two scale.

    Raises TypeError for anything else.
    """
    match result:
        case Comparison():
            return _plot_comparison(result)
        case Curves() if result.by_label:
            return _plot_curves(result)
        case Trace():
            return _plot_traces({"": result})
        case Mapping() if result and all(isinstance(value, Trace) for value in result.values()):
            return _plot_traces(result)
        case Timeline():
            return _plot_timelines({"": result}, between)
        case Mapping() if result and all(isinstance(value, Timeline) for value in result.values()):
            return _plot_timelines(result, between)
        case Mapping() if result and all(map(_lines, result.values())):
            return _plot_sweep(dict(zip(result, map(_lines, result.values()))), xlabel, ylabel, log, format_value)
    expected = "a comparison, a trace, a timeline, or a mapping of labels to these or to mappings of numbers, not empty"
    raise TypeError(f"result: expected {expected}, got {str(result)[:100]}")


def _plot_comparison(comparison: Comparison) -> Figure:
    others = [other for other in stored(comparison.name) if other.device.name != comparison.device.name]
    quantities = ["time"]
    if any(m.peak_allocated is not None or m.failed for m in comparison):
        quantities.append("memory")
    if any(m.joules for m in comparison):
        quantities.append("energy")
    gpus = range(len(comparison.full_size_gpus))
    if gpus and comparison.device.kind == "cpu":
        quantities = []  # what a CPU takes for a smaller model often says the opposite of what a GPU does
    draw = partial(_draw_quantity, comparison=comparison, others=others)
    times = [partial(draw, quantity=quantity) for quantity in quantities[:1]]
    times += [partial(_draw_time_at_full_size, comparison=comparison, place=place) for place in gpus]
    rest = [partial(draw, quantity=quantity) for quantity in quantities[1:]]
    rest[1:1] = [partial(_draw_memory_at_full_size, comparison=comparison)] if gpus else []
    times += [rest.pop() for _ in range(len(rest) - len(times))]  # the left column names the rows
    return _plot_rows(comparison, times, rest)


def _plot_traces(traces: Mapping[str, Trace]) -> Figure:
    with _figure(len(traces), height=1.75, sharey=True) as (figure, axes):
        for ax, (label, trace) in zip(axes, traces.items()):
            _draw_trace(ax, trace)
            ax.set_title(f"{label}: peak {units.format_bytes(trace.peak)}".removeprefix(": "))
        top = max(trace.peak for trace in traces.values())
        axes[0].set_ylim(0, (top or 1) * 1.12)
        _value_axis(axes[0].yaxis, units.format_bytes)
        _draw_legend(figure, axes)
        figure.supxlabel("allocations in their order: the width of a phase is not its time", fontsize=8, color=DIM)
    return figure


def _plot_timelines(timelines: Mapping[str, Timeline], between: tuple[float, float] | None) -> Figure:
    with _figure(len(timelines), height=1.25) as (figure, axes):
        for ax, (label, timeline) in zip(axes, timelines.items()):
            _draw_timeline(ax, timeline, between)
            if label:
                ax.set_title(label)
        lows, highs = zip(*(ax.get_xlim() for ax in axes))
        for ax in axes:
            ax.set_xlim(between or (min(lows), max(highs)))
        _draw_legend(figure, axes)
        names = ", ".join(dict.fromkeys(timeline.gpu.name for timeline in timelines.values()))
        figure.supxlabel(f"milliseconds since the GPU began, predicted for {names}", fontsize=8, color=DIM)
    return figure


def _plot_curves(curves: Curves) -> Figure:
    with _figure(2, height=2.6) as (figure, axes):
        for ax, place, what in zip(axes, (0, 1), ("steps", "time from the command's start")):
            highest = []
            for color, (label, runs) in zip(cycle(LINES), curves.by_label.items()):
                for run in runs:
                    losses = [point[2] for point in run]
                    ax.plot([point[place] for point in run], losses, color=color, linewidth=0.8, alpha=0.7, label=label)
                    highest += [loss for loss in losses[len(losses) // 20 :] if math.isfinite(loss)]
            ax.set_title(f"loss against {what}")
            ax.set_xlim(left=0)
            if highest and max(highest) > min(highest):  # the first steps may lie above
                room = 0.05 * (max(highest) - min(highest))
                ax.set_ylim(min(highest) - room, max(highest) + room)
            _value_axis(ax.xaxis, units.format_seconds if place else units.format_count)
        _draw_legend(figure, axes)
        figure.supxlabel(f"a line for each seed; {curves.device}", fontsize=8, color=DIM)
    return figure


def _lines(value: object) -> list[Line]:
    """The lines of one label; none for what is no line, has no points, or holds anything else."""
    lines = [value] if isinstance(value, Mapping) else value
    return list(lines) if isinstance(lines, list) and all(isinstance(each, Mapping) and each for each in lines) else []


def _plot_sweep(
    series: Mapping[str, list[Line]],
    xlabel: str,
    ylabel: str,
    log: bool,
    format_value: Callable[[float], str],
) -> Figure:
    with _figure(1, height=3.4) as (figure, (ax,)):
        for color, (label, lines) in zip(cycle(LINES), series.items()):
            for points in lines:
                xs = sorted(points)
                ax.plot(xs, [points[x] for x in xs], color=color, marker="o", label=label)
        if log:
            ax.set_xscale("log", base=2)
        xs = sorted({x for lines in series.values() for points in lines for x in points})
        names = [f"{x:.12g}" for x in xs]
        if len(xs) <= MOST_TICKS and max(map(len, names)) <= LONGEST_TICK:
            ax.set_xticks(xs, names)
        low, high = ax.dataLim.intervaly
        ax.set_ylim(min(0, 1.06 * low), max(0, 1.06 * high) or 1)
        _value_axis(ax.yaxis, format_value)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        if len(series) > 1:
            _draw_legend(figure, [ax])  # not among the lines, where it would hide a piece of them
    return figure


def can_save(file: Path) -> bool:
    """Whether the name of a file ends in that of a format that a figure can be saved in."""
    return file.suffix[1:].lower() in Figure().canvas.get_supported_filetypes()


def to_png(figure: Figure) -> bytes:
    """The figure as a PNG, a little finer than it is shown; a large one has no more than MOST_PIXELS."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=min(FINE, math.sqrt(MOST_PIXELS / math.prod(figure.get_size_inches()))))
    return file.getvalue()


def shown_size(figure: Figure) -> dict[str, int]:
    """The pixels at which a notebook shows the figure's PNG, as the metadata of its output have them."""
    return dict(zip(("width", "height"), (round(inches * 100) for inches in figure.get_size_inches())))


class _Shown(Figure):
    """A figure that a notebook shows once: as a cell's value, or at the cell's end, whichever comes first."""

    def _ipython_display_(self) -> None:
        from IPython.display import display

        plt.close(self)
        size = {"image/png": shown_size(self)}
        display({"image/png": to_png(self), "text/plain": "Figure"}, metadata=size, raw=True)


@contextmanager
def _figure(rows: int, *, height: float, widths: Sequence[float] = (WIDTH,), sharey: bool = False):
    """A figure of panels, by column, handed to pyplot only where a notebook will show it.

    Made outside of rc_context, which would undo the interactive mode that pyplot's first figure switches on.
    """
    look = {"figsize": (sum(widths), height * rows), "facecolor": "white", "layout": "constrained"}
    figure = plt.figure(FigureClass=_Shown, **look) if "ipykernel" in sys.modules else Figure(**look)
    try:
        with plt.rc_context(STYLE):
            grid = figure.subplots(rows, len(widths), squeeze=False, sharey=sharey, width_ratios=widths)
            yield figure, grid.T.ravel()
    except BaseException:
        plt.close(figure)  # a notebook would show it, half drawn
        raise


def _plot_rows(comparison: Comparison, times: Sequence[Callable], rest: Sequence[Callable]) -> Figure:
    """A figure of panels in which each variant has a row, the first on top: times, and beside them all else."""
    labels = ["\n".join(fill(line, LONGEST_LINE) for line in m.label.split("\n")) for m in comparison]
    row_height = max(0.42, NAME_HEIGHT * max(label.count("\n") + 1 for label in labels))
    columns = [each for each in (times, rest) if each]
    rows, widths = max(map(len, columns)), (WIDTH, WIDTH_BESIDE)[: len(columns)]
    with _figure(rows, height=0.75 + row_height * len(labels), widths=widths) as (figure, axes):
        drawn = [(draw, column * rows + row) for column, each in enumerate(columns) for row, draw in enumerate(each)]
        free = [axes[place] for place in range(len(axes)) if place not in [place for _, place in drawn]]
        for ax in free:
            ax.set_axis_off()
        for draw, place in drawn:
            draw(ax := axes[place])
            ax.set_yticks(range(len(labels)), labels if place < rows else [""] * len(labels))
            ax.set_ylim(len(labels) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        axes = [axes[place] for _, place in drawn]
        _draw_legend(figure, axes, *free[:1])
        devices = {m.device.label: m.device.kind for m in comparison}  # of a bench, there may be two
        notes = [label + " – a CPU's times, not a GPU's" * (kind == "cpu") for label, kind in devices.items()]
        if not (comparison.full_size and comparison.device.kind == "cpu"):
            figure.supxlabel(f"measured on {'; '.join(notes)}", fontsize=8, x=0.01, ha="left", color=DIM)
        _fit_texts(figure, axes)
    return figure


def _draw_legend(figure: Figure, axes: Iterable, free=None) -> None:
    """One legend for all panels, where one is free, else above them in rows of its own. Marks of one name are one."""
    named = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels())}
    if free and 0 < len(named) <= MOST_IN_FREE:
        free.legend(named.values(), named, loc="upper left", fontsize=8, labelspacing=0.35)
    elif named:
        columns = int(2 * figure.get_figwidth() / WIDTH) if max(map(len, named)) <= LONGEST_IN_LEGEND else 1
        figure.set_figheight(figure.get_figheight() + NAME_HEIGHT * math.ceil(len(named) / columns))
        figure.legend(named.values(), named, loc="outside upper right", ncols=columns, fontsize=8, borderpad=0)


def _fit_texts(figure: Figure, axes: Iterable) -> None:
    """Widen panels of bars until the texts behind the bars end within the panel."""
    for ax in axes:
        for text in ax.texts:
            text.set_in_layout(False)  # else the panel would shrink for a text that is too long
    figure.draw_without_rendering()
    for ax in axes:
        high, width = ax.get_xlim()[1], ax.get_window_extent().width
        for text in ax.texts:
            room = width - (text.get_window_extent().x1 - ax.transData.transform(text.xy)[0])
            high = max(high, text.xy[0] * width / max(room, 0.1 * width))
        ax.set_xlim(right=high)


def _draw_quantity(ax, comparison: Comparison, others: Iterable[Comparison], quantity: str) -> None:
    """A bar for each variant with its interval and its prediction, and behind them the result in words."""
    unit, farthest = comparison.value(comparison.baseline.label, quantity), 0.0
    on_cpu = comparison.device.kind == "cpu"
    for row, m in enumerate(comparison):
        level = _level(comparison, m, quantity)
        middle, low, high = level or (0.0, 0.0, 0.0)
        color = DIM if comparison.full_size else BLUE if row else GREY  # beside panels where blue and grey are parts
        ax.barh(row, middle, height=0.62, color=color, hatch="////" if on_cpu and quantity != "memory" else None)
        named = bool(comparison.full_size)  # beside marks of predictions
        _draw_interval(ax, row, middle, low, high, f"{100 * CONFIDENCE:g} % interval of a measured time" * named)
        reserved = (m.peak_reserved or 0) if quantity == "memory" else 0
        if reserved:
            look = {"facecolor": "none", "edgecolor": "#6B7280", "linewidth": 1, "linestyle": ":"}
            ax.barh(row, reserved, height=0.62, **look, label="reserved by PyTorch (measured)" * named)
        predicted = comparison.predicted.get(m.label, {}).get(quantity, 0.0) * (unit or 0.0)
        if predicted:
            look = {"markersize": 6, "color": ORANGE, "markeredgecolor": "#222222"}
            ax.plot(predicted, row, "D", **look, label="predicted", zorder=4)
        end = max(high, reserved, predicted, _draw_here(ax, row, comparison, m.label, quantity))
        told = comparison.tell(m.label, quantity)
        words = f"  {told}" if row and told != units.NOT_MEASURED else ""
        _write(ax, end, row, FORMATS[quantity](middle) + words if level else m.failed or told)
        farthest = max(farthest, end)
    ax.set_xlim(0, (farthest or 1) * 1.15)
    _value_axis(ax.xaxis, FORMATS[quantity])
    _draw_stored(ax, comparison, others, quantity)
    title = comparison.memory_name if quantity == "memory" else f"{quantity} per {comparison.per}"
    if comparison.full_size:
        title += " on this GPU" + " (measured)" * (quantity != "energy")  # which is not predicted
    elif quantity == "memory" and any(m.peak_reserved for m in comparison):
        title += " (dots: reserved)"
    ax.set_title(title)


def _draw_here(ax, row: int, comparison: Comparison, label: str, quantity: str) -> float:
    """A diamond, with its range, where a variant was predicted for the GPU that measured it. Returns its right end."""
    needed = comparison.here.get(label)
    if needed is None or quantity not in ("time", "memory") or comparison.per != "step":
        return 0.0
    middle, low, high = (needed.allocated,) * 3 if quantity == "memory" else needed.seconds or (0.0, 0.0, 0.0)
    if quantity == "time" and needed.untimed and middle:
        _draw_least(ax, row, low)
        return low
    if middle:
        look = {"markersize": 5, "color": ORANGE, "markeredgecolor": "#222222", "linewidth": 1.6, "markevery": [1]}
        ax.plot([low, middle, high], [row] * 3, "D-", **look, label="predicted for this GPU, with range", zorder=4)
    return high


def _draw_time_at_full_size(ax, comparison: Comparison, place: int) -> None:
    """A dashed bar for each variant's predicted time on a GPU, in parts: the GPU's work, and its wait for the CPU.

    Where the time of a part is not known, the bar is the least, and open at its end.
    """
    for row, m in enumerate(comparison):
        needed = comparison.full_size[m.label][place] if m.label in comparison.full_size else None
        if needed is None or needed.seconds is None:
            continue
        expected, low, high = (needed.seconds[1],) * 3 if needed.untimed else needed.seconds
        left = 0.0
        parts = needed.parts | {WAITING: expected}
        for name in (name for name in PART_COLORS if name in parts):  # in one order: JSON has the parts in its own
            part = min(parts[name], expected - left)  # of what is open at its end, the parts may be more
            label = name if part > 0.01 * expected else ""
            ax.barh(row, part, left=left, height=0.62, color=PART_COLORS[name], alpha=0.45, label=label)
            left += part
        if needed.untimed:
            _draw_least(ax, row, low)
        else:
            ax.barh(row, expected, height=0.62, facecolor="none", edgecolor=DIM, linestyle="--", linewidth=1.2)
            _draw_interval(ax, row, expected, low, high, "range of a predicted time")
        seconds = "" if needed.ratio is None else f"{units.format_seconds(expected)}  "
        _write(ax, high, row, seconds + needed.tell_time(brief=True))
    _value_axis(ax.xaxis, units.format_seconds)
    ax.set_xlim(left=0)
    gpu = units.with_article(comparison.full_size_gpus[place])
    ax.set_title(f"time per step on {gpu} (predicted)")


def _draw_memory_at_full_size(ax, comparison: Comparison) -> None:
    """A dashed outline for each variant's predicted peak on the first GPU, in the colour of its verdict.

    A dotted outline goes to the most that the whole process may take: by it, a step fits.
    """
    for row, m in enumerate(comparison):
        if m.label in comparison.full_size:
            needed = comparison.full_size[m.label][0]
            most, look = max(needed.allocated, needed.total[1]), {"height": 0.62, "facecolor": "none"}
            look |= {"linestyle": "--", "linewidth": 1.5, "edgecolor": VERDICT_COLORS[needed.verdict]}
            ax.barh(row, needed.allocated, **look, label="predicted peak of the tensors")
            look |= {"linestyle": ":", "linewidth": 1.0, "edgecolor": DIM}
            ax.barh(row, most, **look, label="the whole process, at most")
            _write(ax, most, row, f"{units.format_bytes(needed.allocated)}, {needed.verdict}")
    first = next(iter(comparison.full_size.values()))[0]
    gpu = units.with_article(first.gpu)
    ax.axvline(first.memory, color=PINK, linewidth=1.3, label=f"memory of {gpu}: {units.format_bytes(first.memory)}")
    _value_axis(ax.xaxis, units.format_bytes)
    ax.set_xlim(left=0)
    title = f"peak memory on {gpu} (predicted)"
    ax.set_title(title, fontsize=STYLE["axes.titlesize"] * min(1, LONGEST_TITLE / len(title)))


def _draw_interval(ax, row: float, middle: float, low: float, high: float, label: str) -> None:
    if high > low:
        look = {"fmt": "none", "ecolor": "#222222", "capsize": 3, "elinewidth": 1.2, "label": label}
        ax.errorbar(middle, row, xerr=[[middle - low], [high - middle]], **look)


def _draw_least(ax, row: float, low: float) -> None:
    """An arrow at the end of a time that is longer, nobody knows how much."""
    look = {"markersize": 8, "color": ORANGE, "markeredgecolor": "#222222"}
    ax.plot(low, row, ">", **look, label="at least: a part is not known", zorder=4)


def _write(ax, x: float, row: float, text: str) -> None:
    """A text behind the end of a bar."""
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no line runs through it
    ax.annotate(text, (x, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9, bbox=ground)


def _draw_stored(ax, comparison: Comparison, others: Iterable[Comparison], quantity: str) -> None:
    """What other GPUs gave: their ratios, laid on this baseline, since their sizes and speeds are their own."""
    unit = comparison.value(comparison.baseline.label, quantity)
    rows = {m.label: row for row, m in enumerate(comparison)}
    for other, color in zip(others, cycle(LINES[1:])):
        ratios = {m.label: other.ratio(m.label, quantity) for m in other if m.label in rows}
        points = [(ratio * unit, rows[label] + 0.42) for label, ratio in ratios.items() if ratio and unit]
        if points:
            name = f"{other.device.name} (its ratio)"
            ax.plot(*zip(*points), "^", color=color, markersize=6, alpha=0.55, clip_on=False, label=name)
            ax.set_xlim(right=max(ax.get_xlim()[1], 1.05 * max(points)[0]))


def _level(comparison: Comparison, m: Measurement, quantity: str) -> tuple[float, float, float] | None:
    """What is drawn of a measurement, and the ends of its interval; None where there is nothing."""
    value = comparison.value(m.label, quantity)
    if value is None or quantity != "time":
        return value and (value, value, value)
    ratio = comparison.time_ratio(m.label) if m is not comparison.baseline else None
    middle, (low, high) = (ratio.value, (ratio.low, ratio.high)) if ratio else (m.median, m.interval or (m.median,) * 2)
    return value, value * min(low / middle, 1), value * max(high / middle, 1)  # rounding may put an end inside


def _draw_trace(ax, trace: Trace) -> None:
    """The level after each event, over its phases; a run of one phase has the same width in every panel.

    Names of phases that would overlap stand in the legend instead.
    """
    xs, starts, left = [], [], 0.0
    for phase, run in groupby(trace.phases):
        count = len(list(run))
        starts.append((left, phase))
        xs += [left + PHASE_WIDTH[phase] * i / count for i in range(count)]
        left += PHASE_WIDTH[phase]
    for (start, phase), (end, _) in pairwise([*starts, (left, "")]):
        ax.axvspan(start, end, color=PHASES[phase], alpha=0.10, linewidth=0)
        look = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "center"}
        if len(starts) < 4 or (end - start) / left > 0.01 * len(phase):
            ax.text((start + end) / 2, -0.09, phase, size=9 if len(starts) < 4 else 7, **look)
        else:
            ax.plot([], [], "s", color=PHASES[phase], alpha=0.35, label=phase)
    ax.fill_between([*xs, left], [*trace.bytes, trace.bytes[-1]], step="post", color=BLUE, alpha=0.25, linewidth=0)
    ax.step([*xs, left], [*trace.bytes, trace.bytes[-1]], where="post", color=BLUE, linewidth=1.3)
    ax.axhline(trace.peak, color=RED, linewidth=1, linestyle="--")
    ax.set_xlim(0, left)
    ax.set_xticks([])


def _draw_timeline(ax, timeline: Timeline, between: tuple[float, float] | None) -> None:
    """A row of what the CPU does, and below it one of the GPU; with the names of what is between, inside or beside."""
    spans = timeline.spans()
    start = min((span.begin for span in spans if span.track == GPU), default=0.0)
    spans = [span._replace(begin=1e3 * (span.begin - start), end=1e3 * (span.end - start)) for span in spans]
    edges = {"edgecolor": "white", "linewidth": 0.8 if between else 0.0}
    for label, row, color, *what in (
        ("the CPU works", 1, ORANGE, CPU, WORK),
        ("the CPU waits", 1, "#D1D5DB", CPU, WAIT),
        ("the GPU runs", 0, BLUE, GPU, WORK),
    ):
        some = [(span.begin, span.end - span.begin) for span in spans if [span.track, span.doing] == what]
        bars = some if between else list(_join(some))
        ax.broken_barh(bars, (row - 0.4, 0.8), label=label, facecolor=color, snap=False, **edges)
    ax.set_yticks((1, 0), ("CPU", "GPU"))
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    if between is None:
        return
    letters = 12 * WIDTH / (between[1] - between[0])  # of size 7, in a millisecond
    for row, track, color in ((1, CPU, ORANGE), (0, GPU, BLUE)):
        own = [span for span in spans if span.track == track]
        begins = sorted(span.begin for span in own)
        for _, _, name, begin, end, _ in own:
            words = re.sub("[ _]+", "\n", name)
            width = max(map(len, words.split())) / letters
            free = next((after for after in begins if after >= end), math.inf) - end
            if begin < between[0] or end > between[1]:
                continue
            if width < end - begin:
                ax.text((begin + end) / 2, row, words, ha="center", va="center", size=6.5, clip_on=True)
            elif width < min(free, between[1] - end):  # beside it, in its colour: it does not name the gap
                ax.text(end, row, words, color=color, ha="left", va="center", size=6.5, clip_on=True)


def _join(spans: Iterable[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Spans that touch as one, of begins and lengths: between them, a seam would show."""
    begin = end = None
    for start, length in spans:
        if end is None or start - end > 1e-6:
            if end is not None:
                yield begin, end - begin
            begin = start
        end = start + length
    if end is not None:
        yield begin, end - begin


class _BinaryLocator(MaxNLocator):
    """Ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float):
        """The ticks between two numbers of bytes."""
        unit = _byte_unit(vmax)
        return super().tick_values(vmin / unit, vmax / unit) * unit


def _byte_unit(top: float) -> int:
    return max((unit for unit in (units.KiB, units.MiB, units.GiB) if top >= 2 * unit), default=1)


def _value_axis(axis, format_value: Callable[[float], str]) -> None:
    """A few round ticks, written as the values are but without trailing zeros; bytes all in one unit."""
    is_bytes = format_value is units.format_bytes

    def tell(value: float, _) -> str:
        if is_bytes and value:
            unit = _byte_unit(axis.get_view_interval()[1])
            return f"{value / unit:g} {units.format_bytes(unit).partition(' ')[2]}"
        return re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", format_value(value))

    axis.set_major_locator((_BinaryLocator if is_bytes else MaxNLocator)(4))
    axis.set_major_formatter(FuncFormatter(tell))
