"""The memory of a step over its course, as `trace` recorded it."""

from collections.abc import Mapping
from itertools import groupby, pairwise

from matplotlib.figure import Figure

from effgpu import units
from effgpu.figures.panels import BLUE, DIM, ORANGE, RED, SKY, draw_legend, format_axis, new_figure
from effgpu.measuring.memory import Trace

PHASES = {"forward": SKY, "backward": BLUE, "optimizer": ORANGE}
PHASE_WIDTH = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}


def plot_traces(traces: Mapping[str, Trace]) -> Figure:
    """A panel for each trace, all on one scale of bytes."""
    with new_figure(len(traces), height=1.75, sharey=True) as (figure, axes):
        for ax, (label, trace) in zip(axes, traces.items()):
            _draw_trace(ax, trace)
            ax.set_title(f"{label}: peak {units.format_bytes(trace.peak)}".removeprefix(": "))
        top = max(trace.peak for trace in traces.values())
        axes[0].set_ylim(0, (top or 1) * 1.12)
        format_axis(axes[0].yaxis, units.format_bytes)
        draw_legend(figure, axes)
        figure.supxlabel("allocations in their order: the width of a phase is not its time", fontsize=8, color=DIM)
    return figure


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
