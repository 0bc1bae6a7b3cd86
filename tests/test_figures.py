"""Tests of `plot` through what is drawn: whose times these are, what did not fit, what other GPUs gave."""

import itertools
import os
import re
import sys
from dataclasses import replace

import matplotlib as mpl
import matplotlib.pyplot as plt
import nbformat
import pytest
from conftest import predicted_sizes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from nbclient import NotebookClient

from effgpu import figures
from effgpu.comparison import Comparison
from effgpu.figures import GREEN, RED, plot
from effgpu.measuring.measurement import Measurement
from effgpu.measuring.memory import Trace
from effgpu.units import GiB, MiB

GPU_FIELDS = {"peak_allocated": 64 * MiB, "peak_reserved": 96 * MiB, "joules": 2.0}


@pytest.fixture(autouse=True)
def _outside_a_notebook(monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(figures, "stored", lambda name: [])


@pytest.fixture
def on_cpu(make_measurement):
    fields = {"peak_allocated": 3 * MiB}
    return Comparison(
        "synthetic", tuple(make_measurement(label, s, **fields) for label, s in {"a": 0.02, "b": 0.01}.items())
    )


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
    return [text.get_text() for found in figure.legends for text in found.get_texts()]


def boxes_of_texts(figure):
    """The boxes of all that is written, by its text, once the figure is laid out."""
    figure.draw_without_rendering()
    hidden = set()  # labels of ticks beyond the ends of an axis
    for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
        low, high = sorted(axis.get_view_interval())
        hidden |= {tick.label1 for tick in axis.get_major_ticks() if not low <= tick.get_loc() <= high}
    written = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    written = [text for text in written if text not in hidden]
    return [(text.get_text(), Text.get_window_extent(text)) for text in written]


def assert_readable(figure):
    """No text is cut off at the edge of the figure, and none lies on another one."""
    found = boxes_of_texts(figure)
    for text, box in found:
        assert box.x0 >= -1 and box.y0 >= -1, f"{text!r} is cut off"
        assert box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, f"{text!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(found, 2):
        wide, high = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert min(wide, high) <= 1, f"{one!r} lies on {other!r}"


def bars(ax):
    return [patch for patch in ax.patches if patch.get_linestyle() == "-" or patch.get_linestyle() == "solid"]


# plot


def test_a_cpus_times_are_hatched_and_said_to_be_a_cpus_and_nothing_else_is(on_cpu, on_gpu):
    figure = plot(on_cpu)
    time, memory = figure.axes
    assert all(bar.get_hatch() for bar in time.patches) and not any(bar.get_hatch() for bar in memory.patches)
    assert figure.get_supxlabel() == "measured on Test CPU (CPU, 2 cores) – a CPU's times, not a GPU's"
    figure = plot(on_gpu)
    assert not any(bar.get_hatch() for ax in figure.axes for bar in ax.patches)
    assert figure.get_supxlabel() == "measured on NVIDIA Test"


def test_bars_stand_in_their_order_from_the_top(on_gpu):
    time, memory, energy = plot(on_gpu).axes
    assert [bar.get_width() for bar in time.patches] == pytest.approx([0.02, 0.01, 0.021])
    assert [bar.get_width() for bar in bars(memory)] == [64 * MiB] * 3
    assert [bar.get_width() for bar in energy.patches] == [2.0] * 3
    titles = ["time per step", "peak memory (dotted: reserved)", "energy per step"]
    assert [ax.get_title(loc="left") for ax in (time, memory, energy)] == titles
    for ax in (time, memory, energy):
        assert ticks(ax.yaxis) == ["fp32", "bf16", "fp8"]
        assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first variant belongs on top"


def test_bars_carry_the_interval_of_their_ratio_and_tell_the_result(on_gpu):
    time, memory, energy = plot(on_gpu).axes
    assert texts(time) == ["20.0 ms", "10.0 ms  2.00 × faster [2.00, 2.00]", "21.0 ms  1.05 × slower [1.05, 1.05]"]
    assert texts(memory) == ["64.0 MiB", "64.0 MiB  0 %", "64.0 MiB  0 %"]
    assert texts(energy) == ["2.00 J", "2.00 J  0 %", "2.00 J  0 %"]
    noisy = replace(
        on_gpu["bf16"], turns=tuple((t * (1 + 0.1 * (-1) ** n),) * 2 for n, (t, _) in enumerate(on_gpu["bf16"].turns))
    )
    result = Comparison("noisy", (on_gpu["fp32"], noisy))
    (time, *_), ratio = plot(result).axes, result.time_ratio("bf16")
    (segment,) = time.containers[3].lines[2][0].get_segments()
    assert segment[:, 0] == pytest.approx([0.02 * ratio.low, 0.02 * ratio.high], rel=1e-3)
    assert time.patches[1].get_width() == pytest.approx(0.02 * ratio.value, rel=1e-3)


def test_reserved_memory_is_outlined_over_allocated_and_lies_in_the_panel(on_gpu):
    wide = replace(on_gpu["bf16"], peak_reserved=640 * MiB)
    memory = plot(Comparison("synthetic", (on_gpu["fp32"], wide))).axes[1]
    outlines = [patch for patch in memory.patches if patch not in bars(memory)]
    assert [patch.get_width() for patch in outlines] == [96 * MiB, 640 * MiB]
    assert all(patch.get_facecolor()[3] == 0 for patch in outlines)
    assert memory.get_xlim()[1] > 640 * MiB


def test_units_stand_on_the_ticks(on_gpu, on_cpu):
    for ax, unit, scale in zip(plot(on_gpu).axes, ("ms", "MiB"), (1e-3, MiB)):
        assert 3 <= len(read_ticks(ax.xaxis, unit, scale)) <= 6
    assert 3 <= len(read_ticks(plot(on_cpu).axes[1].xaxis, "MiB", MiB)) <= 6


def test_a_diamond_marks_the_prediction(on_gpu):
    """Beyond the bars, and of what ran out of memory, too."""
    rows = (*on_gpu, Measurement("fp4", (), on_gpu.device, failed="out of memory"))
    predicted = {"bf16": {"time": 1.5, "memory": 0.5}, "fp8": {"energy": 3.0}, "fp4": {"time": 0.25, "memory": 0.125}}
    figure = plot(Comparison("synthetic", rows, predicted))
    expected = [(0.03, 1), (0.005, 3)], [(32 * MiB, 1), (8 * MiB, 3)], [(6.0, 2)]
    for ax, diamonds in zip(figure.axes, expected):
        for drawn, told in zip(marks(ax, "D"), diamonds, strict=True):
            assert drawn == pytest.approx(told) and drawn[0] < ax.get_xlim()[1]
    assert legend(figure) == ["predicted"]


def test_a_phase_whose_name_does_not_fit_stands_in_the_legend():
    def steps(count):
        phases = ("forward",) * 4 + ("backward",) * 4 + ("optimizer",) * 4
        return Trace((MiB,) * 12 * count, phases * count)

    few, many = plot({"few": steps(1)}), plot({"many": steps(8)})
    assert legend(few) == [] and {text.get_text() for text in few.axes[0].texts} == {"forward", "backward", "optimizer"}
    assert legend(many) == ["forward", "backward", "optimizer"]


def test_full_size_has_a_panel_of_times_by_what_they_go_to_and_one_of_memory(on_gpu):
    figure = plot(replace(on_gpu, full_size=predicted_sizes(20 * GiB, 10 * GiB, labels=("fp32", "bf16"))))
    time, memory = figure.axes[-2:]
    assert time.get_title(loc="left") == "time per step on a T4 (predicted)"
    assert [bar.get_width() for bar in time.patches] == [3.5, 0.5, 0, 4.0, 0.5, 0.25, 0.25, 1.0], "parts, then all"
    assert [text.get_text() for text in time.texts] == ["4.00 s, does not fit", "1.00 s  4.00 × faster [3.33, 5.00]"]
    assert memory.get_title(loc="left").startswith("peak memory on a T4 (predicted)")
    assert [bar.get_width() for bar in memory.patches] == [20 * GiB, 10 * GiB]
    assert [to_hex(bar.get_edgecolor()) for bar in memory.patches] == [RED.lower(), GREEN.lower()]
    assert [text.get_text() for text in memory.texts] == ["20.0 GiB, does not fit", "10.0 GiB, fits"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"matrix products", "everything else", "waiting for the CPU", "memory of a T4: 15.0 GiB"} <= set(names)
    assert_readable(figure)


def test_on_a_cpu_the_prediction_comes_first_and_the_memory_of_the_small_model_not_at_all(make_measurement):
    both = make_measurement("old"), make_measurement("new", 0.01)
    figure = plot(Comparison("some", both, full_size=predicted_sizes(20 * GiB, 10 * GiB)))
    titles = [re.split(r", | \(", ax.get_title(loc="left"))[0] for ax in figure.axes]
    assert titles == ["time per step on a T4", "peak memory on a T4", "time per step"] and len(figure.axes) == 3
    assert_readable(figure)


@pytest.mark.parametrize("failing", [0, 1])
def test_out_of_memory_is_written_where_its_bar_would_be(make_measurement, make_gpu, failing):
    fields = {"device": make_gpu(), "peak_allocated": MiB}
    both = [make_measurement("a", **fields), make_measurement("b", **fields)]
    both[failing] = make_measurement("ab"[failing], failed=True, device=make_gpu())
    for ax in plot(Comparison("synthetic", tuple(both))).axes:
        place = ax.texts[failing]
        assert place.get_text() == "out of memory" and place.xy == (0, failing)
        assert ax.patches[failing].get_width() == 0 < ax.patches[1 - failing].get_width()
        assert "out of memory" not in ax.texts[1 - failing].get_text()


@pytest.fixture
def others(make_measurement, make_gpu):
    """What two GPUs gave under the same name, the second with a variant of its own and one out of memory."""

    def make(name, seconds, **failed):
        fields = {"device": make_gpu(name), "joules": 1.0}
        found = [make_measurement(label, s, peak_allocated=int(s * 1000), **fields) for label, s in seconds.items()]
        found += [make_measurement(label, failed=True, device=make_gpu(name)) for label in failed]
        return Comparison("synthetic", tuple(found))

    return [
        make("GPU one", {"fp32": 1.0, "bf16": 0.25}),
        make("GPU two", {"fp32": 4.0, "new": 1.0, "bf16": 12.0}, fp8=True),
    ]


def test_triangles_are_the_others_ratios_times_this_baseline(on_gpu, others, monkeypatch):
    asked = []
    monkeypatch.setattr(figures, "stored", lambda name: asked.append(name) or others)
    time, memory, energy = plot(on_gpu).axes
    assert asked == ["synthetic"]
    for ax, baseline, ratios in ((time, 0.02, [0.25, 3]), (memory, 64 * MiB, [0.25, 3]), (energy, 2.0, [1, 1])):
        places = marks(ax, "^")
        assert [x for x, _ in places] == pytest.approx([ratio * baseline for ratio in ratios])
        assert all(0.5 < y < 1.5 for _, y in places), "in the row of bf16"
        assert ax.get_xlim()[1] > max(x for x, _ in places), "in the panel"
    assert legend(time.figure) == ["GPU one (its ratio)", "GPU two (its ratio)"]


def test_triangles_are_not_drawn_for_this_very_gpu_nor_on_a_baseline_that_failed(
    on_gpu, others, monkeypatch, make_measurement
):
    monkeypatch.setattr(figures, "stored", lambda name: [on_gpu])
    assert not any(marks(ax, "^") for ax in plot(on_gpu).axes)
    monkeypatch.setattr(figures, "stored", lambda name: others)
    failed = make_measurement("fp32", failed=True, device=on_gpu.device)
    figure = plot(Comparison("synthetic", (failed, on_gpu["bf16"])))
    assert not any(marks(ax, "^") for ax in figure.axes) and legend(figure) == []


def test_values_are_per_item_where_the_items_differ(make_measurement, make_gpu, monkeypatch):
    fields = {"device": make_gpu(), "unit": "samples", "joules": 8.0}
    both = (make_measurement("a", 0.08, items=8, **fields), make_measurement("b", 0.08, items=32, **fields))
    result = Comparison("synthetic", both)
    elsewhere = Comparison("synthetic", tuple(replace(m, device=make_gpu("GPU two")) for m in both))
    monkeypatch.setattr(figures, "stored", lambda name: [elsewhere])
    time, _, energy = plot(result).axes
    assert [bar.get_width() for bar in time.patches] == pytest.approx([0.01, 0.0025])
    assert [bar.get_width() for bar in energy.patches] == pytest.approx([1.0, 0.25])
    assert (time.get_title(loc="left"), energy.get_title(loc="left")) == ("time per sample", "energy per sample")
    for ax in (time, energy):
        assert marks(ax, "^")[0][0] == pytest.approx(ax.patches[1].get_width())


# Traces

TRACES = {
    "plain": Trace((10, 40, 90, 60, 20, 30, 10), ("forward",) * 3 + ("backward",) * 2 + ("optimizer",) * 2),
    "checkpointed": Trace((10, 20, 50, 45, 20, 25, 10), ("forward",) * 2 + ("backward",) * 3 + ("optimizer",) * 2),
}


def test_saw_teeth_have_a_panel_each_on_one_scale_with_their_phases_and_peaks():
    figure = plot({label: replace(t, bytes=tuple(b * MiB for b in t.bytes)) for label, t in TRACES.items()})
    assert "is not its time" in figure.get_supxlabel()
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["plain: peak 90.0 MiB", "checkpointed: peak 50.0 MiB"]
    assert len({ax.get_ylim() for ax in figure.axes}) == 1 and figure.axes[0].get_ylim()[1] > 90 * MiB
    for ax, trace in zip(figure.axes, TRACES.values()):
        level, peak = ax.lines
        assert list(level.get_ydata())[:-1] == [b * MiB for b in trace.bytes]
        assert set(peak.get_ydata()) == {trace.peak * MiB}
        assert texts(ax) == ["forward", "backward", "optimizer"]
        assert [text.get_position()[0] for text in ax.texts] == pytest.approx([0.5, 2.0, 3.25])
    assert max(read_ticks(figure.axes[0].yaxis, "MiB", MiB)) >= 80 * MiB
    (ax,) = plot(Trace((0,), ("forward",))).axes
    assert ax.get_title(loc="left") == "peak 0 B", "without a label, of a step that allocates nothing"


# Sweeps


def test_a_sweep_draws_a_line_for_each_label_over_what_was_varied():
    points = {"A100": {4: 1.0, 1: 2.5, 16: 0.5}, "T4": {1: 1.0, 16: 1.0}}
    figure = plot(points, xlabel="batch size", ylabel="share", log=True, format_value="{:.0%}".format)
    (ax,) = figure.axes
    assert [list(zip(*line.get_data())) for line in ax.lines] == [sorted(of.items()) for of in points.values()]
    assert ax.get_xscale() == "log" and ticks(ax.xaxis) == ["1", "4", "16"]
    assert ticks(ax.yaxis)[:3] == ["0%", "80%", "160%"] and ax.get_ylim()[0] == 0
    assert (ax.get_xlabel(), ax.get_ylabel(), legend(figure)) == ("batch size", "share", ["A100", "T4"])
    assert_readable(figure)


def test_the_ticks_of_many_points_do_not_run_into_each_other():
    figure = plot({"loss": {step: 3 - step / 50 for step in range(1, 61)}}, xlabel="step")
    assert len([text for text in ticks(figure.axes[0].xaxis) if text]) > 3
    assert_readable(figure)


@pytest.mark.parametrize("wrong", [None, {}, {"a": [1, 2]}, {"a": {1: 1.0}, "b": {}}, TRACES | {"b": {1: 1.0}}])
def test_what_cannot_be_drawn_is_refused(wrong):
    with pytest.raises(TypeError, match=r"^result: expected a comparison, a trace, or a mapping of labels to "):
        plot(wrong)


LONG = "bf16 + fused optimizer + channels_last + compiled blocks"
GPU_NAMES = ["NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", "NVIDIA A100-SXM4-80GB"]


@pytest.mark.parametrize(("labels", "stored"), [("ab", 1), (["fp32", LONG, *"cdefgh"], 3)])
def test_a_plot_is_readable_whatever_stands_in_it(labels, stored, make_measurement, make_gpu, monkeypatch):
    def rows(device, seconds):
        fields = GPU_FIELDS | {"device": device}
        return [make_measurement(label, seconds * (1 + n), **fields) for n, label in enumerate(labels)]

    others = [Comparison("x", tuple(rows(make_gpu(name), 0.5))) for name in GPU_NAMES[:stored]]
    monkeypatch.setattr(figures, "stored", lambda name: others)
    here, predicted = rows(make_gpu("here"), 0.02), {labels[1]: {"time": 8.0, "memory": 0.1, "energy": 4.0}}
    if len(here) > 2:
        here[3] = make_measurement("d", failed=True, device=here[0].device)
    assert_readable(plot(Comparison("x", tuple(here), predicted)))


# All of them


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
import torch, effgpu
from effgpu.comparison import Comparison
from effgpu.measuring.measurement import Measurement
cpu = effgpu.describe()
turns = tuple((1 + 0.001 * i,) * 2 for i in range(15))
both = tuple(Measurement(label, turns, cpu, peak_allocated=1) for label in "ab")
result = Comparison("nothing_is_stored_of_this", both)
---
effgpu.plot(result)
---
figure = effgpu.plot(result)
x = 1
---
figure
---
effgpu.plot(result)
effgpu.plot({"a": {1: 1.0, 2: 3.0}}, xlabel="x")
---
import matplotlib.pyplot as plt
print(plt.get_fignums())
---
def broken():
    model = torch.nn.Linear(4, 4)
    def step():
        return model(torch.ones(1, 5))
    return step
effgpu.compare({"broken": broken})
---
import sys
last = sys.last_value.__traceback__
while last and last.tb_frame.f_code.co_name != "step":
    last = last.tb_next
print(last.tb_frame.f_locals["model"])
"""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell of a small notebook put out."""
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in CELLS.split("---\n")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    folder = str(tmp_path_factory.mktemp("notebook"))
    NotebookClient(
        notebook, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": folder}}
    ).execute(env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    return [cell.outputs for cell in notebook.cells]


def count_images(outputs):
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_a_notebook_shows_each_plot_exactly_once(outputs):
    assert [count_images(of_cell) for of_cell in outputs[:6]] == [0, 1, 1, 1, 2, 0]
    assert not any(output.output_type in ("error", "stream") for of_cell in outputs[:5] for output in of_cell)
    assert outputs[1][0].metadata["image/png"]["width"] == 640
    assert outputs[5][0].text == "[]\n", "a figure was left open"


def test_a_notebook_shows_the_line_of_a_step_that_failed_and_can_debug_it(outputs):
    error = outputs[6][-1]
    assert error.output_type == "error" and error.ename == "RuntimeError"
    text = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    assert "model(torch.ones(1, 5))" in text and "while measuring the variant 'broken'" in text
    assert "".join(output.text for output in outputs[7]) == "Linear(in_features=4, out_features=4, bias=True)\n"
