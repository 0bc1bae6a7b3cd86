"""`plot`: what is drawn of a result follows from its type."""

from collections.abc import Callable, Mapping

from matplotlib.figure import Figure

from effgpu import units
from effgpu.benching.seeds import Curves
from effgpu.comparison import Comparison
from effgpu.figures.bars import plot_comparison
from effgpu.figures.lines import Line, lines_of, plot_curves, plot_sweep
from effgpu.figures.timelines import plot_timelines
from effgpu.figures.traces import plot_traces
from effgpu.measuring import device_lock
from effgpu.measuring.memory import Trace
from effgpu.predicting.timeline import Timeline


@device_lock.free()
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
            return plot_comparison(result)
        case Curves() if result.by_label:
            return plot_curves(result)
        case Trace():
            return plot_traces({"": result})
        case Mapping() if result and all(isinstance(value, Trace) for value in result.values()):
            return plot_traces(result)
        case Timeline():
            return plot_timelines({"": result}, between)
        case Mapping() if result and all(isinstance(value, Timeline) for value in result.values()):
            return plot_timelines(result, between)
        case Mapping() if result and all(map(lines_of, result.values())):
            return plot_sweep(dict(zip(result, map(lines_of, result.values()))), xlabel, ylabel, log, format_value)
    expected = "a comparison, a trace, a timeline, or a mapping of labels to these or to mappings of numbers, not empty"
    raise TypeError(f"result: expected {expected}, got {str(result)[:100]}")
