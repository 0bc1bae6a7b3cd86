"""Every plot: time and memory, the memory of a step, a prediction, a sweep. The only import of matplotlib."""

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle, pairwise
from numbers import Real
from textwrap import fill

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from effgpu import units
from effgpu.comparison import Comparison
from effgpu.measuring.measurement import Measurement
from effgpu.measuring.memory import Trace
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS, MAY_NOT_FIT, OWNERS, Prediction
from effgpu.results import stored
from effgpu.units import FORMATS

# Okabe and Ito's colours, which colour-blind readers can tell apart, on an opaque ground that reads in light and dark.
GREY, BLUE, ORANGE, GREEN, RED, SKY, PINK = "#8A8F98", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
PALE, DIM = "#C9CED6", "#4B5563"
LINES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)
MOST_TICKS = 12  # at a sweep's points: more would run into each other
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
OWNER_COLORS = dict(zip(OWNERS, (BLUE, SKY, ORANGE, GREEN, PALE)))
VERDICT_COLORS = {FITS: GREEN, DOES_NOT_FIT: RED, MAY_NOT_FIT: GREY}
PARTS = ("matrix products", "everything else", "waiting for the CPU")  # of a predicted time
PART_COLORS = (BLUE, GREY, ORANGE)
WIDTH = 6.4
LONGEST_LINE = 30  # letters of a variant's name
LONGEST_IN_LEGEND = 35  # letters of names that stand in two columns
NAME_HEIGHT = 0.19  # inches that a line of a name takes


def plot(
    result: Comparison | Prediction | Trace | Mapping[str, Trace] | Mapping[str, Mapping],
    *,
    xlabel: str = "",
    ylabel: str = "",
    log: bool = False,
    format_value: Callable[[float], str] | None = None,
) -> Figure:
    """Draw a result. What is drawn follows from its type.

    - What `compare`, `ablate` or `bench` gave: bars of time, peak memory and, where measured, energy per step, with
      99 % intervals and verdicts. A diamond marks a prediction, a dotted outline reserved memory. Faint triangles are
      the ratios that stored GPUs gave under the same name, times this baseline. Where `full_size` was given, panels
      show the predicted time on each GPU, with its range and where it goes, and the predicted memory.
    - What `trace` gave, or a mapping of labels to such: bytes alive through forward, backward and optimizer, a panel
      each, on one scale. Allocations are evenly spaced within a phase, so the width of a phase is not its time.
    - What `predict` gave: the predicted peak by owners, above each GPU's memory (bar, in the colour of the verdict)
      and the range that the step needs on it (line).
    - A sweep, which maps a label to a mapping of numbers to values: a line for each label, over what was varied. A
      Measurement stands for its throughput, or its seconds per step where it has no items, with the 99 % interval. A
      number, or a tensor of one, stands for itself, written by `format_value`. None and a failed Measurement are marked
      as out of memory. `log` makes the horizontal axis a power-of-two scale.

    A CPU's times are hatched or dashed, and said to be a CPU's. Raises TypeError or ValueError for anything else, and
    for the options of a sweep with another result.
    """
    is_sweep = isinstance(result, Mapping) and _is_sweep(result)
    if not is_sweep and (xlabel or ylabel or log or format_value):
        options = "xlabel, ylabel, log and format_value"
        raise TypeError(f"{options}: expected only with a sweep, not with what is a {type(result).__name__}")
    match result:
        case Comparison():
            return _plot_comparison(result)
        case Prediction():
            return _plot_prediction(result)
        case Trace():
            return _plot_traces({"": result})
        case Mapping():
            return _plot_sweep(result, xlabel, ylabel, log, format_value) if is_sweep else _plot_traces(result)
    expected = "a comparison, a prediction, a trace, or a mapping of labels to traces or series"
    raise TypeError(f"result: expected {expected}, got {type(result).__name__}")


def _is_sweep(result: Mapping) -> bool:
    """Whether a mapping holds series, or else traces. Raises TypeError or ValueError for a mapping of anything else."""
    if not result:
        raise ValueError("result: expected at least one labelled trace or series, got an empty mapping")
    kind = Trace if isinstance(next(iter(result.values())), Trace) else Mapping
    expected = "a trace, as the first value is" if kind is Trace else "a trace, or a mapping of x to a value"
    for label, value in result.items():
        if not isinstance(value, kind):
            raise TypeError(f"result[{label!r}]: expected {expected}, got {type(value).__name__}")
    return kind is Mapping


def _plot_comparison(comparison: Comparison) -> Figure:
    others, quantities = _elsewhere(comparison), _measured(comparison)
    large = [
        partial(_draw_time_at_full_size, comparison=comparison, place=place)
        for place, _ in enumerate(comparison.full_size_gpus)
    ]
    if large:
        large.append(partial(_draw_memory_at_full_size, comparison=comparison))
    if large and comparison.device.kind == "cpu":
        quantities = ["time"]  # the memory of a small model is nobody's question
    panels = [partial(_draw_quantity, comparison=comparison, others=others, quantity=q) for q in quantities]
    panels = [*panels, *large] if comparison.device.kind == "cuda" else [*large, *panels]
    return _plot_rows(comparison, panels)


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


def _plot_sweep(
    series: Mapping[str, Mapping[float, Measurement | float | None]],
    xlabel: str,
    ylabel: str,
    log: bool,
    format_value: Callable[[float], str] | None,
) -> Figure:
    for label, points in series.items():
        _check_points(f"result[{label!r}]", points, log)
    measured = [m for points in series.values() for m in points.values() if isinstance(m, Measurement)]
    if len(quantities := {_name_measured([m]) for m in measured if m.turns}) > 1:
        raise ValueError(f"result: expected measurements of one quantity, got {' and '.join(sorted(quantities))}")
    with _figure(1, height=3.4) as (figure, (ax,)):
        for color, (label, points) in zip(cycle(LINES), series.items()):
            _draw_line(ax, label, points, color)
        ax.set_xscale("log" if log else "linear", **{"base": 2} if log else {})
        xs = sorted({x for points in series.values() for x in points})
        if len(xs) <= MOST_TICKS:
            ax.set_xticks(xs, [f"{x:.12g}" for x in xs])
        low, high = ax.dataLim.intervaly  # infinite where nothing was drawn
        ax.set_ylim(min(0, 1.06 * low), max(0, 1.06 * high) or 1) if low <= high else ax.set_ylim(0, 1)
        _value_axis(ax.yaxis, format_value or _format_measured(measured))
        ax.set(xlabel=xlabel, ylabel=ylabel or _name_measured(measured))
        if len(series) > 1:
            _draw_legend(figure, [ax])  # not among the lines, where it would hide a piece of them
        _write_devices(figure, measured)
    return figure


def _plot_prediction(prediction: Prediction) -> Figure:
    gpus, largest = prediction.gpus, max(gpu.memory for gpu in prediction.gpus)
    with _figure(2, height=0.9 + 0.2 * len(gpus)) as (figure, (peak, cards)):
        _draw_owners(peak, prediction)
        for row, gpu in enumerate(gpus):
            needed, verdict = prediction.total(gpu), prediction.verdict(gpu)
            cards.barh(row, gpu.memory, height=0.62, color=VERDICT_COLORS[verdict], alpha=0.35)
            cards.plot([needed.low, needed.high], [row, row], color=DIM, linewidth=4, solid_capstyle="butt")
            end = max(gpu.memory, needed.high) if needed.high < largest else gpu.memory
            cards.text(end, row, f" {verdict}", va="center", fontsize=8)
        cards.set_yticks(range(len(gpus)), [gpu.name for gpu in gpus])
        cards.set_ylim(len(gpus) - 0.4, -0.6)
        cards.set_xlim(0, 1.25 * max(largest, min(prediction.total(gpu).high for gpu in gpus)))
        cards.set_title("GPU's memory (bar) and what the step needs on it (line)")
        for ax in (peak, cards):
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
            _value_axis(ax.xaxis, units.format_bytes)
        figure.supxlabel("predicted, not measured", fontsize=8, x=0.01, ha="left", color=DIM)
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


def _measured(comparison: Comparison) -> list[str]:
    """The quantities that get a panel: memory and energy where there is any."""
    remembered = any(m.peak_allocated is not None or m.failed for m in comparison)
    return ["time"] + ["memory"] * remembered + ["energy"] * any(m.joules for m in comparison)


def _elsewhere(comparison: Comparison) -> list[Comparison]:
    """What other GPUs gave under the same name; nothing, where there is no baseline to lay it on."""
    if comparison.baseline.failed:
        return []
    return [other for other in stored(comparison.name) if other.device.name != comparison.device.name]


def _plot_rows(comparison: Comparison, panels: Sequence[Callable]) -> Figure:
    """A figure of panels above one another in which each variant has a row, the first on top."""
    labels = ["\n".join(fill(line, LONGEST_LINE) for line in m.label.split("\n")) for m in comparison]
    row_height = max(0.42, NAME_HEIGHT * max(label.count("\n") + 1 for label in labels))
    with _figure(len(panels), height=0.75 + row_height * len(labels)) as (figure, axes):
        for draw, ax in zip(panels, axes):
            draw(ax)
            ax.set_yticks(range(len(labels)), labels)
            ax.set_ylim(len(labels) - 0.4, -0.6)
            ax.grid(axis="y", visible=False)
            ax.tick_params(axis="y", length=0)
        _draw_legend(figure, axes)
        _write_devices(figure, comparison.measurements)
        _fit_texts(figure, axes)
    return figure


def _draw_legend(figure: Figure, axes: Iterable) -> None:
    """One legend for all panels, above them in rows of its own."""
    named = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels())}
    if named:
        columns = 2 if max(map(len, named)) <= LONGEST_IN_LEGEND else 1
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
    for row, m in enumerate(comparison):
        level = _level(comparison, m, quantity)
        middle, low, high = level or (0.0, 0.0, 0.0)
        color = DIM if comparison.full_size else BLUE if row else GREY  # beside panels where blue and grey are parts
        look = {"color": color, "hatch": _hatch(comparison, quantity)}
        ax.barh(row, middle, height=0.62, **look)
        _draw_interval(ax, row, middle, low, high)
        reserved = (m.peak_reserved or 0) if quantity == "memory" else 0
        if reserved:
            ax.barh(row, reserved, height=0.62, facecolor="none", edgecolor="#6B7280", linewidth=1, linestyle=":")
        predicted = comparison.predicted.get(m.label, {}).get(quantity, 0.0) * (unit or 0.0)
        if predicted:
            label = "" if "predicted" in ax.get_legend_handles_labels()[1] else "predicted"
            ax.plot(predicted, row, "D", markersize=6, color=ORANGE, markeredgecolor="#222222", label=label, zorder=4)
        end = max(high, reserved, predicted)
        words = comparison.tell(m.label, quantity).replace(units.NOT_MEASURED, "") if row or not level else ""
        text = f"{FORMATS[quantity](middle)}  {words}".strip() if level else m.failed or words or units.NOT_MEASURED
        _write(ax, end, row, text)
        farthest = max(farthest, end)
    ax.set_xlim(0, (farthest or 1) * 1.15)
    _value_axis(ax.xaxis, FORMATS[quantity])
    _draw_stored(ax, comparison, others, quantity)
    outlined = quantity == "memory" and any(m.peak_reserved for m in comparison)
    ax.set_title(_title(comparison, quantity) + " (dotted: reserved)" * outlined)


def _draw_time_at_full_size(ax, comparison: Comparison, place: int) -> None:
    """A dashed bar for each variant's predicted time on a GPU, in parts: the GPU's work, and its wait for the CPU."""
    for row, m in enumerate(comparison):
        needed = comparison.full_size[m.label][place] if m.label in comparison.full_size else None
        if needed is None or needed.seconds is None:
            continue
        expected, low, high = needed.seconds
        others = min(needed.others, expected - needed.products)  # of compiled code, the parts are those before fusion
        waiting = max(0.0, expected - needed.products - others)
        left = 0.0
        for name, part, color in zip(PARTS, (needed.products, others, waiting), PART_COLORS):
            seen = part > 0.005 * expected and name not in ax.get_legend_handles_labels()[1]
            ax.barh(row, part, left=left, height=0.62, color=color, alpha=0.45, label=name if seen else "")
            left += part
        ax.barh(row, expected, height=0.62, facecolor="none", edgecolor=DIM, linestyle="--", linewidth=1.2)
        _draw_interval(ax, row, expected, low, high)
        seconds = "" if needed.ratio is None else f"{units.format_seconds(expected)}  "
        _write(ax, high, row, seconds + needed.tell_time())
    _value_axis(ax.xaxis, units.format_seconds)
    ax.set_xlim(left=0)
    gpu = units.with_article(comparison.full_size_gpus[place])
    ax.set_title(f"time per step on {gpu} (predicted)")


def _draw_memory_at_full_size(ax, comparison: Comparison) -> None:
    """A dashed outline for each variant's predicted peak on the first GPU, in the colour of its verdict."""
    needed = next(iter(comparison.full_size.values()))[0]
    for row, m in enumerate(comparison):
        if m.label in comparison.full_size:
            needed = comparison.full_size[m.label][0]
            look = {
                "facecolor": "none",
                "edgecolor": VERDICT_COLORS[needed.verdict],
                "linestyle": "--",
                "linewidth": 1.5,
            }
            ax.barh(row, needed.allocated, height=0.62, **look)
            _write(ax, needed.allocated, row, f"{units.format_bytes(needed.allocated)}, {needed.verdict}")
    gpu = units.with_article(comparison.full_size_gpus[0])
    ax.axvline(needed.memory, color=PINK, linewidth=1.3, label=f"memory of {gpu}: {units.format_bytes(needed.memory)}")
    _value_axis(ax.xaxis, units.format_bytes)
    ax.set_xlim(left=0)
    ax.set_title(f"peak memory on {gpu} (predicted)")


def _title(comparison: Comparison, quantity: str) -> str:
    title = comparison.memory_name if quantity == "memory" else f"{quantity} per {comparison.per}"
    where = "this GPU" if comparison.device.kind == "cuda" else "this CPU"
    return f"{title}, measured on {where}" if comparison.full_size else title


def _hatch(comparison: Comparison, quantity: str) -> str | None:
    return "////" if comparison.device.kind == "cpu" and quantity != "memory" else None


def _draw_interval(ax, row: float, middle: float, low: float, high: float) -> None:
    if high > low:
        ax.errorbar(middle, row, xerr=[[middle - low], [high - middle]], color="#222222", capsize=3, linewidth=1.2)


def _write(ax, x: float, row: float, text: str) -> None:
    """A text behind the end of a bar."""
    ax.annotate(text, (x, row), xytext=(8, 0), textcoords="offset points", va="center", fontsize=9)


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
            _make_room(ax, max(points)[0])


def _make_room(ax, x: float) -> None:
    """Widen a panel of bars so that `x` lies in it."""
    ax.set_xlim(right=max(ax.get_xlim()[1], 1.05 * x))


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
    for first, last, phase in _runs(trace.phases):
        starts.append((left, phase))
        xs += [left + PHASE_WIDTH[phase] * (i - first) / (last - first) for i in range(first, last)]
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


def _runs(phases: tuple[str, ...]) -> list[tuple[int, int, str]]:
    """(first, one past the last, phase) for each run of one phase."""
    edges = [0, *(i for i in range(1, len(phases)) if phases[i] != phases[i - 1]), len(phases)]
    return [(first, last, phases[first]) for first, last in pairwise(edges)]


def _draw_owners(ax, prediction: Prediction) -> None:
    left = 0
    for owner, size in prediction.owners.items():
        if size:
            ax.barh(
                0, size, left=left, height=0.5, color=OWNER_COLORS[owner], label=f"{owner} {units.format_bytes(size)}"
            )
            left += size
    if prediction.reserved > left:
        ax.barh(0, prediction.reserved, height=0.5, facecolor="none", edgecolor=PINK, linestyle=":", label="reserved")
    ax.set_yticks([])
    ax.set_ylim(1.0, -0.4)
    ax.set_title(f"predicted peak: {units.format_bytes(prediction.allocated)}")
    ax.legend(loc="lower left", ncols=3, fontsize=8, borderpad=0)


def _check_points(name: str, points: Mapping, log: bool) -> None:
    """Raises TypeError or ValueError for a series that cannot be drawn."""
    if not points:
        raise ValueError(f"{name}: expected at least one x with a value, got an empty mapping")
    for x, value in points.items():
        if not isinstance(x, Real) or not math.isfinite(x) or (log and x <= 0):
            raise ValueError(f"{name}: expected every x to be a {'positive ' * log}number, got {x!r}")
        is_number = isinstance(value, Real) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        if not (is_number or value is None or isinstance(value, Measurement)):
            raise TypeError(f"{name}[{x!r}]: expected a Measurement, a number or None, got {type(value).__name__}")


def _draw_line(ax, label: str, points: Mapping[float, Measurement | float | None], color: str) -> None:
    drawn = {x: _interval_of(value) for x, value in sorted(points.items())}
    known = {x: interval for x, interval in drawn.items() if interval and all(map(math.isfinite, interval))}
    if known:
        middles, lows, highs = zip(*known.values())
        errors = [[m - low for m, low in zip(middles, lows)], [high - m for m, high in zip(middles, highs)]]
        cpu = any(isinstance(v, Measurement) and v.device.kind == "cpu" for v in points.values())
        look = {"color": color, "marker": "o", "capsize": 3, "linestyle": "--" if cpu else "-"}
        look["label"] = re.sub("^_", " _", str(label))  # matplotlib hides what begins with an underscore
        ax.errorbar(list(known), middles, errors if any(map(any, errors)) else None, **look)
    for x in drawn.keys() - known.keys():
        ax.plot(x, 0.97, "X", color=color, markersize=9, transform=ax.get_xaxis_transform(), clip_on=False)
        why = "not finite" if drawn[x] else "out of memory"
        ax.annotate(why, (x, 0.93), xycoords=ax.get_xaxis_transform(), fontsize=8, ha="center", va="top")


def _interval_of(value: Measurement | float | None) -> tuple[float, float, float] | None:
    """Middle, low and high end of what is drawn for a value of a sweep; None for what ran out of memory."""
    if not isinstance(value, Measurement):
        return None if value is None else (value.item() if isinstance(value, torch.Tensor) else value,) * 3
    if not value.turns:
        return None
    middle = value.median
    low, high = value.interval or (middle, middle)
    low, high = min(low, middle), max(high, middle)
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


def _write_devices(figure: Figure, measured: Iterable[Measurement]) -> None:
    """One line at the foot: the device, and whose times these are."""
    devices = {m.device.label: m.device.kind for m in measured}
    notes = [label + ("" if kind == "cuda" else " – a CPU's times, not a GPU's") for label, kind in devices.items()]
    if notes:
        figure.supxlabel(f"measured on {'; '.join(notes)}", fontsize=8, x=0.01, ha="left", color=DIM)
