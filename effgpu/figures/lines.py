"""Lines: a sweep over what was varied, and the losses of trainings over seeds."""

import math
from collections.abc import Callable, Mapping
from itertools import cycle

from matplotlib.figure import Figure

from effgpu import units
from effgpu.benching.seeds import Curves
from effgpu.figures.panels import DIM, LINES, draw_legend, format_axis, new_figure

Line = Mapping[float, float]
MOST_TICKS = 12  # at a sweep's points: more would run into each other
LONGEST_TICK = 7  # letters, and so would longer ones


def plot_sweep(
    series: Mapping[str, list[Line]],
    xlabel: str,
    ylabel: str,
    log: bool,
    format_value: Callable[[float], str],
) -> Figure:
    """A line for each mapping of what was varied to a value, those of one label in one colour."""
    with new_figure(1, height=3.4) as (figure, (ax,)):
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
        format_axis(ax.yaxis, format_value)
        ax.set(xlabel=xlabel, ylabel=ylabel)
        if len(series) > 1:
            draw_legend(figure, [ax])  # not among the lines, where it would hide a piece of them
    return figure


def lines_of(value: object) -> list[Line]:
    """The lines of one label; none for what is no line, has no points, or holds anything else."""
    lines = [value] if isinstance(value, Mapping) else value
    return list(lines) if isinstance(lines, list) and all(isinstance(each, Mapping) and each for each in lines) else []


def plot_curves(curves: Curves) -> Figure:
    """Losses against steps, and against time; a thin line for each seed."""
    with new_figure(2, height=2.6) as (figure, axes):
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
            format_axis(ax.xaxis, units.format_seconds if place else units.format_count)
        draw_legend(figure, axes)
        figure.supxlabel(f"a line for each seed; {curves.device}", fontsize=8, color=DIM)
    return figure
