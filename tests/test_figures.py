"""Tests of `plot` through what is drawn: whose times these are, what did not fit, what other GPUs gave."""

import itertools
import os
import re
import sys
from dataclasses import replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from conftest import predicted_sizes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from nbclient import NotebookClient

from effgpu.comparison import Comparison
from effgpu.figures.panels import GREEN, RED
from effgpu.figures.plot import plot
from effgpu.measuring.measurement import Measurement
from effgpu.measuring.memory import Trace
from effgpu.predicting.gpus import find_gpu
from effgpu.predicting.timeline import COPY, Event, Timeline
from effgpu.units import GiB, MiB

GPU_FIELDS = {"peak_allocated": 64 * MiB, "peak_reserved": 640 * MiB, "joules": 2.0}


@pytest.fixture(autouse=True)
def _outside_a_notebook_with_nothing_stored(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr("effgpu.figures.bars.stored", lambda name: [])


@pytest.fixture
def on_cpu(make_measurement):
    return Comparison("synthetic", tuple(make_measurement(label, peak_allocated=3 * MiB) for label in "ab"))


@pytest.fixture
def on_gpu(make_measurement, make_gpu):
    times = {"fp32": 0.02, "bf16": 0.01, "fp8": 0.021}
    fields = GPU_FIELDS | {"device": make_gpu()}
    return Comparison("synthetic", tuple(make_measurement(label, s, **fields) for label, s in times.items()))


def texts(ax):
    return [text.get_text() for text in ax.texts]


def ticks(axis):
    axis.figure.canvas.draw()
    return [label.get_text() for label in axis.get_ticklabels()]


def read_ticks(axis, unit, scale):
    """The values that the labels of the ticks tell; each must be its tick's, plainly written, in the unit."""
    values = []
    for place, text in zip(axis.get_ticklocs(), ticks(axis)):
        assert re.fullmatch(rf"0 \w+|(0|[1-9]\d*)(\.\d*[1-9])? {unit}", text), text
        values.append(float(text.split()[0]) * scale)
        assert values[-1] == pytest.approx(place, rel=0.005)
    return values


def marks(ax, marker):
    """The places of all triangles ("^") or diamonds ("D") in a panel."""
    return [point for line in ax.lines if line.get_marker() == marker for point in zip(*line.get_data())]


def legend(figure):
    """The names in the figure's legend, or in that of a panel which is left free for it."""
    found = [*figure.legends, *(ax.get_legend() for ax in figure.axes if not ax.axison and ax.get_legend())]
    return [text.get_text() for each in found for text in each.get_texts()]


def assert_readable(figure):
    """No text is cut off at the edge of the figure, and none lies on another one."""
    figure.draw_without_rendering()
    hidden = set()  # labels of ticks beyond the ends of an axis
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    written = {text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()} - hidden
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in written]
    for text, box in boxes:
        inside = min(box.x0, box.y0) >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1
        assert inside, f"{text!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(wide, high) <= 1, f"{one!r} lies on {other!r}"


def bars(ax):
    """The bars of a panel, without the dotted outlines."""
    return [patch for patch in ax.patches if patch.get_linestyle() in ("-", "solid")]


def widths(bars):
    return [bar.get_width() for bar in bars]


def panels(figure):
    """Row by row, without what is left free for the legend."""
    return [ax for ax in figure.axes if ax.axison]


def titles(figure):
    return [ax.get_title(loc="left") for ax in panels(figure)]


def test_a_cpus_times_are_hatched_and_said_to_be_a_cpus_and_nothing_else_is(on_cpu, on_gpu):
    here, gpu = plot(on_cpu), plot(on_gpu)
    hatched = [{bool(bar.get_hatch()) for bar in ax.patches} for ax in (*panels(here), *panels(gpu))]
    assert hatched == [{True}, *[{False}] * 4], "time and memory of the CPU, all three of the GPU"
    assert here.get_supxlabel() == "measured on Test CPU (CPU, 2 cores) – a CPU's times, not a GPU's"
    assert gpu.get_supxlabel() == "measured on NVIDIA Test"


def test_bars_stand_in_their_order_from_the_top_and_tell_the_result(on_gpu):
    figure = plot(on_gpu)
    time, memory, energy = panels(figure)
    assert widths(time.patches) == pytest.approx([0.02, 0.01, 0.021])
    assert widths(bars(memory)) == [64 * MiB] * 3
    outlines = [patch for patch in memory.patches if patch not in bars(memory)]
    assert widths(outlines) == [640 * MiB] * 3 and memory.get_xlim()[1] > 640 * MiB
    assert all(patch.get_facecolor()[3] == 0 for patch in outlines)
    assert widths(energy.patches) == [2.0] * 3
    assert titles(figure) == ["time per step", "peak memory (dots: reserved)", "energy per step"]
    for ax, unit, scale in ((time, "ms", 1e-3), (memory, "MiB", MiB)):
        assert 3 <= len(read_ticks(ax.xaxis, unit, scale)) <= 6
    for ax, names in ((time, ["fp32", "bf16", "fp8"]), (memory, [""] * 3), (energy, ["fp32", "bf16", "fp8"])):
        assert ticks(ax.yaxis) == names
        assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first variant belongs on top"
    assert texts(time) == ["20.0 ms", "10.0 ms  2.00 × faster [2.00, 2.00]", "21.0 ms  1.05 × slower [1.05, 1.05]"]
    assert texts(memory) == ["64.0 MiB", "64.0 MiB  0 %", "64.0 MiB  0 %"]
    assert texts(energy) == ["2.00 J", "2.00 J  0 %", "2.00 J  0 %"]


def test_bars_carry_the_interval_of_their_ratio(on_gpu):
    noisy = tuple((t * (1 + 0.1 * (-1) ** n),) * 2 for n, (t, _) in enumerate(on_gpu["bf16"].turns))
    result = Comparison("noisy", (on_gpu["fp32"], replace(on_gpu["bf16"], turns=noisy)))
    (time, *_), ratio = panels(plot(result)), result.time_ratio("bf16")
    (segment,) = time.containers[3].lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([0.02 * ratio.low, 0.02 * ratio.high], rel=1e-3)
    assert time.patches[1].get_width() == pytest.approx(0.02 * ratio.value, rel=1e-3)


def test_an_interval_that_tells_nothing_hides_no_bars(on_gpu):
    first, second, _ = on_gpu
    noisy = replace(second, turns=((0.01, 0.01), (0.04, 0.04)), builds=2)
    ax = plot(replace(on_gpu, measurements=(replace(first, builds=2), noisy))).axes[0]
    assert "too noisy" in texts(ax)[1] and ax.texts[1].xy[0] < ax.get_xlim()[1] < 0.3


def test_a_diamond_marks_the_prediction(on_gpu):
    """Beyond the bars, and of what ran out of memory, too."""
    rows = (*on_gpu, Measurement("fp4", (), on_gpu.device, failed="out of memory"))
    predicted = {"bf16": {"time": 1.5, "memory": 0.5}, "fp8": {"energy": 3.0}, "fp4": {"time": 0.25, "memory": 0.125}}
    figure = plot(Comparison("synthetic", rows, predicted))
    expected = [(0.03, 1), (0.005, 3)], [(32 * MiB, 1), (8 * MiB, 3)], [(6.0, 2)]
    for ax, diamonds in zip(panels(figure), expected):
        for drawn, told in zip(marks(ax, "D"), diamonds, strict=True):
            assert drawn == pytest.approx(told) and drawn[0] < ax.get_xlim()[1]
    assert legend(figure) == ["predicted"]


def test_what_was_predicted_for_the_gpu_that_measured_stands_in_its_bars(on_gpu):
    sizes = predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16"))
    here = {label: needed for label, (needed,) in sizes.items()}
    time, memory = panels(plot(replace(on_gpu, full_size=sizes, here=here)))[:2]
    drawn = [[list(line.get_xdata()) for line in ax.lines if line.get_marker() == "D"] for ax in (time, memory)]
    assert drawn == [[[3.0, 4.0, 5.0], [0.8, 1.0, 1.3]], [[20 * GiB] * 3, [10 * GiB] * 3]], "with the range of a time"


@pytest.mark.parametrize("gpus", [1, 3])
def test_the_legend_names_every_mark_once_and_hides_nothing(on_gpu, gpus):
    """Where three GPUs leave a panel free, which is too small for so many names, it stands above, too."""
    sizes = {label: of * gpus for label, of in predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16")).items()}
    noisy = tuple((t * (1 + 0.1 * (-1) ** n),) * 2 for n, (t, _) in enumerate(on_gpu["bf16"].turns))
    rows = (on_gpu["fp32"], replace(on_gpu["bf16"], turns=noisy))
    here = {label: needed for label, (needed, *_) in sizes.items()}
    figure = plot(Comparison("noisy", rows, full_size=sizes, here=here))
    measured = {"99 % interval of a measured time", "reserved by PyTorch (measured)"}
    predicted = {"predicted for this GPU, with range", "range of a predicted time"}
    memory = {"predicted peak of the tensors", "the whole process, at most", "memory of a T4: 15.0 GiB"}
    parts = {"matrix products", "everything else", "optimizer", "waiting for the CPU"}
    assert sorted(legend(figure)) == sorted(measured | predicted | memory | parts)
    assert titles(figure)[:2] == ["time per step on this GPU (measured)", "peak memory on this GPU (measured)"]
    assert_readable(figure)


def test_parts_have_one_order_also_where_json_has_sorted_them(on_gpu):
    sizes = predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16"))
    mixed = {label: (replace(needed, parts=dict(sorted(needed.parts.items()))),) for label, (needed,) in sizes.items()}
    drawn = [widths(panels(plot(replace(on_gpu, full_size=each)))[2].patches) for each in (sizes, mixed)]
    assert drawn[0] == drawn[1]


def test_full_size_has_a_panel_of_times_by_what_they_go_to_and_one_of_memory(on_gpu):
    figure = plot(replace(on_gpu, full_size=predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16"))))
    time, memory = panels(figure)[2:4]
    assert titles(figure)[2:4] == ["time per step on a T4 (predicted)", "peak memory on a T4 (predicted)"]
    assert widths(time.patches) == [3.0, 0.5, 0.5, 0, 4.0, 0.5, 0.25, 0, 0.25, 1.0], "parts, then all"
    assert texts(time) == ["4.00 s, does not fit", "1.00 s  4.00 × faster [3.33, 5.00]"]
    assert widths(memory.patches) == [20 * GiB, 10 * GiB], "the tensors' peak"
    assert [list(line.get_xdata()) for line in memory.lines[:2]] == [[20 * GiB, 22 * GiB], [10 * GiB, 12 * GiB]]
    assert [to_hex(bar.get_edgecolor()) for bar in memory.patches] == [RED.lower(), GREEN.lower()]
    assert texts(memory) == ["20.0 GiB, does not fit", "10.0 GiB, fits"]
    parts = {"matrix products", "everything else", "optimizer", "waiting for the CPU"}
    assert parts | {"memory of a T4: 15.0 GiB"} <= set(legend(figure))
    assert_readable(figure)


def test_a_time_of_which_a_part_is_not_known_is_drawn_as_the_least_with_an_arrow(on_gpu):
    sizes = predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16"))
    sizes["bf16"] = (replace(sizes["bf16"][0], untimed="what a kernel takes", ratio=None),)
    here = {label: needed for label, (needed,) in sizes.items()}
    figure = plot(replace(on_gpu, full_size=sizes, here=here))
    measured, _, time, _ = panels(figure)[:4]
    assert widths(time.patches)[5:] == pytest.approx([0.5, 0.25, 0, 0.05]), "parts up to the least, and no outline"
    assert texts(time)[1] == "at least 800 ms"
    assert marks(time, ">") == [(0.8, 1)] and marks(measured, ">") == [(0.8, 1)], "for the GPU that measured, too"
    assert marks(measured, "D") == [(3.0, 0), (4.0, 0), (5.0, 0)]
    ends = [segment[:, 0].tolist() for line in time.collections for segment in line.get_segments()]
    assert ends == [[3.0, 5.0]], "a range only where it is known"
    assert "at least: a part is not known" in legend(figure)
    assert_readable(figure)


def test_a_prediction_of_other_variants_leaves_its_panels_empty(on_gpu):
    figure = plot(replace(on_gpu, full_size=predicted_sizes(20 * GiB, 10 * GiB, labels="ab")))
    time, memory = panels(figure)[2:4]
    assert not [*time.patches, *texts(time), *memory.patches, *texts(memory)]
    assert "memory of a T4: 15.0 GiB" in legend(figure)


def test_beside_a_prediction_a_cpus_times_are_a_line_and_no_panel(on_cpu):
    figure = plot(replace(on_cpu, full_size=predicted_sizes(20 * GiB, 10 * GiB, labels="ab")))
    found = [re.split(r", | \(", title)[0] for title in titles(figure)]
    assert found == ["time per step on a T4", "peak memory on a T4"]
    assert figure.get_supxlabel() == "" and len(legend(figure)) == 8
    assert_readable(figure)


@pytest.mark.parametrize("failing", [0, 1])
def test_out_of_memory_is_written_where_its_bar_would_be(make_measurement, make_gpu, failing):
    fields = {"device": make_gpu(), "peak_allocated": MiB}
    both = [make_measurement("a", **fields), make_measurement("b", **fields)]
    both[failing] = make_measurement("ab"[failing], failed=True, device=make_gpu())
    for ax in panels(plot(Comparison("synthetic", tuple(both)))):
        place = ax.texts[failing]
        assert place.get_text() == "out of memory" and place.xy == (0, failing)
        assert ax.patches[failing].get_width() == 0 < ax.patches[1 - failing].get_width()
        assert "out of memory" not in ax.texts[1 - failing].get_text()


@pytest.fixture
def others(make_measurement, make_gpu, monkeypatch):
    """What two GPUs gave under the same name, the second with a variant of its own and one out of memory."""

    def make(name, seconds, *failed):
        fields = {"device": make_gpu(name), "joules": 1.0}
        found = [make_measurement(label, s, peak_allocated=int(s * 1000), **fields) for label, s in seconds.items()]
        found += [make_measurement(label, failed=True, device=make_gpu(name)) for label in failed]
        return Comparison(name, tuple(found))

    two = make("GPU two", {"fp32": 4.0, "new": 1.0, "bf16": 12.0}, "fp8")
    found = {"synthetic": [make("GPU one", {"fp32": 1.0, "bf16": 0.25}), two]}
    monkeypatch.setattr("effgpu.figures.bars.stored", found.__getitem__)
    return found


def test_triangles_are_the_others_ratios_times_this_baseline(on_gpu, others):
    figure = plot(on_gpu)
    for ax, baseline, ratios in zip(panels(figure), (0.02, 64 * MiB, 2.0), ([0.25, 3], [0.25, 3], [1, 1])):
        places = marks(ax, "^")
        assert [x for x, _ in places] == pytest.approx([ratio * baseline for ratio in ratios])
        assert all(0.5 < y < 1.5 for _, y in places), "in the row of bf16"
        assert ax.get_xlim()[1] > max(x for x, _ in places), "in the panel"
    assert legend(figure) == ["GPU one (its ratio)", "GPU two (its ratio)"]


def test_triangles_are_not_drawn_for_this_very_gpu_nor_on_a_baseline_that_failed(on_gpu, others, make_measurement):
    failed = make_measurement("fp32", failed=True, device=on_gpu.device)
    figure = plot(Comparison("synthetic", (failed, on_gpu["bf16"])))
    assert not any(marks(ax, "^") for ax in panels(figure)) and legend(figure) == []
    others["synthetic"] = [on_gpu]
    assert not any(marks(ax, "^") for ax in panels(plot(on_gpu)))


def test_values_are_per_item_where_the_items_differ(make_measurement, make_gpu, others):
    fields = {"device": make_gpu(), "unit": "samples", "joules": 8.0}
    both = (make_measurement("a", 0.08, items=8, **fields), make_measurement("b", 0.08, items=32, **fields))
    others["some"] = [Comparison("some", tuple(replace(m, device=make_gpu("GPU two")) for m in both))]
    figure = plot(Comparison("some", both))
    time, _, energy = panels(figure)
    assert widths(time.patches) == pytest.approx([0.01, 0.0025])
    assert widths(energy.patches) == pytest.approx([1.0, 0.25])
    assert titles(figure)[::2] == ["time per sample", "energy per sample"]
    for ax in (time, energy):
        assert marks(ax, "^")[0][0] == pytest.approx(ax.patches[1].get_width())


def trace(levels, *counts):
    """The memory of a step in MiB, and how many of its levels belong to each phase."""
    phases = [phase for phase, count in zip(("forward", "backward", "optimizer"), counts) for _ in range(count)]
    return Trace(tuple(level * MiB for level in levels), tuple(phases))


TRACES = {
    "plain": trace((10, 40, 90, 60, 20, 30, 10), 3, 2, 2),
    "checkpointed": trace((10, 20, 50, 45, 20, 25, 10), 2, 3, 2),
}


def test_saw_teeth_have_a_panel_each_on_one_scale_with_their_phases_and_peaks():
    figure = plot(TRACES)
    assert "is not its time" in figure.get_supxlabel()
    assert titles(figure) == ["plain: peak 90.0 MiB", "checkpointed: peak 50.0 MiB"]
    assert len({ax.get_ylim() for ax in figure.axes}) == 1 and figure.axes[0].get_ylim()[1] > 90 * MiB
    for ax, drawn in zip(figure.axes, TRACES.values()):
        level, peak = ax.lines
        assert tuple(level.get_ydata())[:-1] == drawn.bytes and set(peak.get_ydata()) == {drawn.peak}
        assert texts(ax) == ["forward", "backward", "optimizer"]
        assert [text.get_position()[0] for text in ax.texts] == pytest.approx([0.5, 2.0, 3.25])
    assert max(read_ticks(figure.axes[0].yaxis, "MiB", MiB)) >= 80 * MiB
    assert titles(plot(Trace((0,), ("forward",)))) == ["peak 0 B"], "without a label, of a step that allocates nothing"


def test_a_phase_whose_name_does_not_fit_stands_in_the_legend():
    few = trace([1] * 12, 4, 4, 4)
    many = Trace(few.bytes * 8, few.phases * 8)
    assert legend(plot({"few": few})) == [] and legend(plot(many)) == ["forward", "backward", "optimizer"]


def timeline(waits):
    """Two copies to an A100 of 10 ms, called in 1 ms each; the CPU may wait for the first."""
    copies = (Event(COPY, None, bytes=240_000_000, pinned=True, waits=wait) for wait in (waits, False))
    return Timeline(tuple(copies), find_gpu("A100 80 GB"), launch=1e-3)


def test_a_timeline_has_a_row_of_the_cpu_and_one_of_the_gpu_and_names_what_is_enlarged():
    figure = plot({"waits": timeline(True), "runs ahead": timeline(False)})
    assert titles(figure) == ["waits", "runs ahead"] and "predicted for A100 80 GB" in figure.get_supxlabel()
    assert legend(figure) == ["the CPU works", "the CPU waits", "the GPU runs"]
    assert len({ax.get_xlim() for ax in figure.axes}) == 1
    # the CPU waits 10 ms for its copy, and 9 for that of the step before; bars that touch are one
    for ax, expected in zip(figure.axes, ([[1, 1], [19], [10, 10]], [[2], [], [20]])):
        drawn = [[np.ptp(bar.vertices[:, 0]) for bar in bars.get_paths()] for bars in ax.collections]
        assert drawn == [pytest.approx(each) for each in expected]
        assert ticks(ax.yaxis) == ["CPU", "GPU"] and not texts(ax)
    assert titles(plot(timeline(True))) == [""]
    (enlarged,) = plot(timeline(True), between=(-11.0, 10.5)).axes
    assert enlarged.get_xlim() == (-11.0, 10.5)
    assert texts(enlarged) == ["wait\nfor\nthe\ncopy", "copy\nto\nthe\nGPU"]
    assert_readable(figure)


def test_of_a_narrow_bar_the_name_stands_beside_it_where_it_does_not_run_into_the_next():
    """The GPU copies from 0 to 10 ms and from 11 to 21; the CPU calls the first copy before 0, the second until 11."""

    def beside(between):
        (ax,) = plot(timeline(True), between=between).axes
        return [(text.get_position(), text.get_text()) for text in ax.texts if text.get_ha() == "left"]

    assert beside((-11.0, 10.5)) == []
    second_call, second_copy = beside((-150.0, 150.0))
    assert second_call == ((pytest.approx(11), 1), "copy\nto\nthe\nGPU")
    assert second_copy == ((pytest.approx(21), 0), "copy\nto\nthe\nGPU")


def test_a_sweep_draws_a_line_for_each_label_over_what_was_varied():
    points = {"A100": {4: 1.0, 1: 2.5, 16: 0.5}, "T4": {1: 1.0, 16: 1.0}}
    figure = plot(points, xlabel="batch size", ylabel="share", log=True, format_value="{:.0%}".format)
    (ax,) = figure.axes
    assert [list(zip(*line.get_data())) for line in ax.lines] == [sorted(of.items()) for of in points.values()]
    assert ax.get_xscale() == "log" and ticks(ax.xaxis) == ["1", "4", "16"]
    assert ticks(ax.yaxis)[:3] == ["0%", "80%", "160%"] and ax.get_ylim()[0] == 0
    assert (ax.get_xlabel(), ax.get_ylabel(), legend(figure)) == ("batch size", "share", ["A100", "T4"])
    assert_readable(figure)


def test_lines_of_one_label_have_one_colour_and_one_name():
    (ax,) = plot({"usual": [{1: 2.0}, {1: 3.0, 2: 1.0}], "efficient": {1: 4.0}}).axes
    assert [list(line.get_xdata()) for line in ax.lines] == [[1], [1, 2], [1]]
    first, second, other = [line.get_color() for line in ax.lines]
    assert first == second != other and legend(ax.figure) == ["usual", "efficient"]


@pytest.mark.parametrize("xs", [range(1, 61), [0, 0.054322864, 0.108322864, 0.111129319]])
def test_the_ticks_of_many_points_do_not_run_into_each_other(xs):
    figure = plot({"loss": {x: 3 - x / 50 for x in xs}}, xlabel="step")
    assert len([text for text in ticks(figure.axes[0].xaxis) if text]) > 3
    assert_readable(figure)


@pytest.mark.parametrize("wrong", [None, {}, {"a": [1, 2]}, {"a": {1: 1.0}, "b": {}}, TRACES | {"b": {1: 1.0}}])
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^result: expected a comparison, a trace, a timeline, or a mapping "):
        plot(wrong)


def test_a_plot_is_readable_whatever_stands_in_it(make_measurement, make_gpu, others):
    labels = ["fp32", "a fused optimizer, and " * 3, *"cdefgh"]

    def rows(device, seconds):
        fields = GPU_FIELDS | {"device": device}
        return [make_measurement(label, seconds * (1 + n), **fields) for n, label in enumerate(labels)]

    names = ["NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", "NVIDIA A100-SXM4-80GB"]
    others["x"] = [Comparison("x", tuple(rows(make_gpu(name), 0.5))) for name in names]
    here, predicted = rows(make_gpu("here"), 0.02), {labels[1]: {"time": 8.0, "memory": 0.1, "energy": 4.0}}
    here[3] = make_measurement("d", failed=True, device=here[0].device)
    assert_readable(plot(Comparison("x", tuple(here), predicted)))


def test_plots_leave_pyplot_as_it_was(on_gpu):
    with mpl.rc_context():
        mpl.rcdefaults()
        before = dict(mpl.rcParams), plt.get_fignums()
        drawn = [plot(on_gpu), plot(TRACES), plot({"a": {1: 1.0}}, xlabel="x")]
        with pytest.raises(KeyError):
            plot({"a": Trace((0,), ("no phase",))})
        assert (dict(mpl.rcParams), plt.get_fignums()) == before
    assert all(isinstance(figure, Figure) for figure in drawn)


CELLS = """
import effgpu
sweep = {"a": {1: 1.0, 2: 3.0}}
---
effgpu.plot(sweep)
---
figure = effgpu.plot(sweep)
x = 1
---
figure
---
effgpu.plot(sweep)
effgpu.plot(sweep, xlabel="x")
---
import matplotlib.pyplot as plt
print(plt.get_fignums())
"""


def test_a_notebook_shows_each_plot_exactly_once():
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.split("---\n")]
    client = NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=120, kernel_name="python3")
    client.execute(env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    outputs = [cell.outputs for cell in cells]
    images = [["image/png" in output.get("data", {}) for output in of_cell] for of_cell in outputs]
    assert [sum(found) for found in images] == [0, 1, 1, 1, 2, 0]
    assert not any(output.output_type == "stream" for of_cell in outputs[:5] for output in of_cell)
    assert outputs[1][0].metadata["image/png"]["width"] == 640
    assert outputs[5][0].text == "[]\n", "a figure was left open"
