"""What all figures share: colours, panels, axes with round values, one legend, and how a figure becomes a PNG."""

import io
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from effgpu import units

# Okabe and Ito's colours, which colour-blind readers can tell apart, on an opaque ground that reads in light and dark.
GREY, BLUE, ORANGE, GREEN, RED, SKY, PINK = "#8A8F98", "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
DIM, SLATE = "#4B5563", "#A3ABB8"  # of lines, and of bars on which they can be seen
LINES = (BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY)
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
WIDTH = 6.4  # inches of a panel
FINE, MOST_PIXELS = 125, 1_600_000  # dots per inch of a picture, which is shown at 100; dots in all
LONGEST_IN_LEGEND = 35  # letters of names of which each takes half of WIDTH
MOST_IN_FREE = 8  # names of a legend in a free panel
NAME_HEIGHT = 0.19  # inches that a line of a name takes


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
def new_figure(
    rows: int, *, height: float, widths: Sequence[float] = (WIDTH,), sharey: bool = False
) -> Iterator[tuple[Figure, Sequence]]:
    """A figure of panels, and these by column; heights and widths in inches.

    It is handed to pyplot only where a notebook will show it.
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


def draw_legend(figure: Figure, axes: Iterable, free=None) -> None:
    """One legend for all panels, where one is free, else above them in rows of its own. Marks of one name are one."""
    named = {name: handle for ax in axes for handle, name in zip(*ax.get_legend_handles_labels())}
    if free and 0 < len(named) <= MOST_IN_FREE:
        free.legend(named.values(), named, loc="upper left", fontsize=8, labelspacing=0.35)
    elif named:
        columns = int(2 * figure.get_figwidth() / WIDTH) if max(map(len, named)) <= LONGEST_IN_LEGEND else 1
        figure.set_figheight(figure.get_figheight() + NAME_HEIGHT * math.ceil(len(named) / columns))
        figure.legend(named.values(), named, loc="outside upper right", ncols=columns, fontsize=8, borderpad=0)


def format_axis(axis, format_value: Callable[[float], str]) -> None:
    """A few round ticks, written as the values are but without trailing zeros; bytes all in one unit."""
    is_bytes = format_value is units.format_bytes

    def tell(value: float, _) -> str:
        if is_bytes and value:
            unit = _byte_unit(axis.get_view_interval()[1])
            return f"{value / unit:g} {units.format_bytes(unit).partition(' ')[2]}"
        return re.sub(r"\.0+(?!\d)|(\.\d*?)0+(?!\d)", r"\1", format_value(value))

    axis.set_major_locator((_BinaryLocator if is_bytes else MaxNLocator)(4))
    axis.set_major_formatter(FuncFormatter(tell))


class _BinaryLocator(MaxNLocator):
    """Ticks at round numbers of KiB, MiB or GiB."""

    def tick_values(self, vmin: float, vmax: float):
        """The ticks between two numbers of bytes."""
        unit = _byte_unit(vmax)
        return super().tick_values(vmin / unit, vmax / unit) * unit


def _byte_unit(top: float) -> int:
    return max((unit for unit in (units.KiB, units.MiB, units.GiB) if top >= 2 * unit), default=1)
