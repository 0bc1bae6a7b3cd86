"""Bars of a comparison: time, memory and energy of each variant, beside what is predicted and what other GPUs gave."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from textwrap import fill

from matplotlib.figure import Figure

from effgpu import units
from effgpu.comparison import Comparison
from effgpu.figures.panels import (
    BLUE,
    DIM,
    GREEN,
    GREY,
    LINES,
    NAME_HEIGHT,
    ORANGE,
    PINK,
    RED,
    SLATE,
    STYLE,
    WIDTH,
    draw_legend,
    format_axis,
    new_figure,
)
from effgpu.measuring.intervals import CONFIDENCE
from effgpu.measuring.measurement import Measurement
from effgpu.predicting.full_size import REST
from effgpu.predicting.kinds import OPTIMIZER, PRODUCT
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS, MAY_NOT_FIT
from effgpu.results import stored
from effgpu.units import FORMATS

VERDICT_COLORS = {FITS: GREEN, DOES_NOT_FIT: RED, MAY_NOT_FIT: GREY}
WAITING = "waiting for the CPU"
PART_COLORS = {PRODUCT: BLUE, REST: GREY, OPTIMIZER: GREEN, WAITING: ORANGE}  # of a predicted time
WIDTH_BESIDE = 4.1  # inches of a panel that stands beside one of WIDTH, without the names of its rows
MOST_FOR_AN_INTERVAL = 4  # times the longest bar: one of two seeds may leave the panel, and would hide the bars
LONGEST_LINE = 30  # letters of a variant's name
LONGEST_TITLE = 37  # letters of a narrow panel's title


def plot_comparison(comparison: Comparison) -> Figure:
    """Panels of what was measured and, what is predicted at full size; a row for each variant."""
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


def _plot_rows(comparison: Comparison, times: Sequence[Callable], rest: Sequence[Callable]) -> Figure:
    """A figure of panels in which each variant has a row, the first on top: times, and beside them all else."""
    labels = ["\n".join(fill(line, LONGEST_LINE) for line in m.label.split("\n")) for m in comparison]
    row_height = max(0.42, NAME_HEIGHT * max(label.count("\n") + 1 for label in labels))
    columns = [each for each in (times, rest) if each]
    rows, widths = max(map(len, columns)), (WIDTH, WIDTH_BESIDE)[: len(columns)]
    with new_figure(rows, height=0.75 + row_height * len(labels), widths=widths) as (figure, axes):
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
        draw_legend(figure, axes, *free[:1])
        devices = {m.device.label: m.device.kind for m in comparison}  # of a bench, there may be two
        notes = [label + " – a CPU's times, not a GPU's" * (kind == "cpu") for label, kind in devices.items()]
        if not (comparison.full_size and comparison.device.kind == "cpu"):
            figure.supxlabel(f"measured on {'; '.join(notes)}", fontsize=8, x=0.01, ha="left", color=DIM)
        _fit_texts(figure, axes)
    return figure


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
    levels = [_level(comparison, m, quantity) for m in comparison]
    edge = MOST_FOR_AN_INTERVAL * max((level[0] for level in levels if level), default=0.0)
    for row, (m, level) in enumerate(zip(comparison, levels)):
        middle, low, high = level or (0.0, 0.0, 0.0)
        color = SLATE if comparison.full_size else BLUE if row else GREY  # beside panels where blue and grey are parts
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
        end = max(min(high, edge), reserved, predicted, _draw_here(ax, row, comparison, m.label, quantity))
        told = comparison.tell(m.label, quantity)
        words = f"  {told}" if row and told != units.NOT_MEASURED else ""
        _write(ax, end, row, FORMATS[quantity](middle) + words if level else m.failed or told)
        farthest = max(farthest, end)
    ax.set_xlim(0, (farthest or 1) * 1.15)
    format_axis(ax.xaxis, FORMATS[quantity])
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
    if needed is None or quantity not in ("time", "memory") or comparison.per_item:
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
    format_axis(ax.xaxis, units.format_seconds)
    ax.set_xlim(left=0)
    gpu = units.with_article(comparison.full_size_gpus[place])
    ax.set_title(f"time per step on {gpu} (predicted)")


def _draw_memory_at_full_size(ax, comparison: Comparison) -> None:
    """A dashed outline for each variant's predicted peak on the first GPU, in the colour of its verdict.

    A dotted line goes on to the most that the whole process may take: by it, a step fits.
    """
    for row, m in enumerate(comparison):
        if m.label in comparison.full_size:
            needed = comparison.full_size[m.label][0]
            most, color = max(needed.allocated, needed.total[1]), VERDICT_COLORS[needed.verdict]
            look = {"height": 0.62, "facecolor": "none", "edgecolor": color, "linestyle": "--", "linewidth": 1.5}
            ax.barh(row, needed.allocated, **look, label="predicted peak of the tensors")
            look = {"color": DIM, "linewidth": 1.5, "markersize": 10, "markevery": [1]}
            ax.plot([needed.allocated, most], [row, row], ":|", **look, label="the whole process, at most")
            _write(ax, most, row, f"{units.format_bytes(needed.allocated)}, {needed.verdict}")
    first = next(iter(comparison.full_size.values()))[0]
    gpu = units.with_article(first.gpu)
    ax.axvline(first.memory, color=PINK, linewidth=1.3, label=f"memory of {gpu}: {units.format_bytes(first.memory)}")
    format_axis(ax.xaxis, units.format_bytes)
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
