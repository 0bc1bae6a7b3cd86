"""What CPU and GPU do in a predicted step, on one scale of time."""

import math
import re
from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from effgpu.figures.panels import BLUE, DIM, ORANGE, WIDTH, draw_legend, new_figure
from effgpu.predicting.timeline import CPU, GPU, WAIT, WORK, Timeline


def plot_timelines(timelines: Mapping[str, Timeline], between: tuple[float, float] | None) -> Figure:
    """A panel for each timeline, of all of it or of these milliseconds, with the events' names then."""
    with new_figure(len(timelines), height=1.25) as (figure, axes):
        for ax, (label, timeline) in zip(axes, timelines.items()):
            _draw_timeline(ax, timeline, between)
            if label:
                ax.set_title(label)
        lows, highs = zip(*(ax.get_xlim() for ax in axes))
        for ax in axes:
            ax.set_xlim(between or (min(lows), max(highs)))
        draw_legend(figure, axes)
        names = ", ".join(dict.fromkeys(timeline.gpu.name for timeline in timelines.values()))
        figure.supxlabel(f"milliseconds since the GPU began, predicted for {names}", fontsize=8, color=DIM)
    return figure


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
