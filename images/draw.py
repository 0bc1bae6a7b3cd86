"""The lessons' drawings: diagrams that explain, with no measured number in them.

`python images/draw.py` writes every picture beside itself. One unit is one pixel of a phone that shows the picture 360
wide, and y runs down. A drawing's docstring is its alternative text; the SVG carries it as its title.
"""

from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

# Okabe and Ito's palette, which colour-blind readers can tell apart
ORANGE, SKY, GREEN, BLUE, RED = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00"
INK, GREY, PALE, WHITE = "#222222", "#6B7280", "#E4E7EB", "#FFFFFF"
COLORS = {"A": BLUE, "B": ORANGE}
WIDTH, UNITS_PER_INCH = 360, 80
TICK = 6.6  # width of one layer's forward
SETTINGS = {"svg.fonttype": "path", "svg.hashsalt": "effgpu", "font.family": "DejaVu Sans", "hatch.linewidth": 1.2}


def card(height, title):
    """Axes over an opaque white card with round corners, which reads on light pages and on dark ones."""
    figure = Figure(figsize=(WIDTH / UNITS_PER_INCH, height / UNITS_PER_INCH), facecolor="none")
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    ax.axis("off")
    box(ax, 1, 1, WIDTH - 2, height - 2, WHITE, edge=PALE, radius=14)
    text(ax, WIDTH / 2, 28, title, size=13.5, weight="bold")
    return ax


def text(ax, x, y, words, size=11, color=INK, ha="center", **style):
    """Words centred on their height; sizes are points, of which 11 is the least that a phone shows well."""
    ax.text(x, y, words, size=size, color=color, ha=ha, va="center_baseline", **style)


def heading(ax, x, y, words, right=None):
    """A panel's heading, marked as the right or the wrong way where it is either."""
    if right is not None:
        text(ax, x, y, "✓" if right else "✗", size=14, color=GREEN if right else RED, ha="left", weight="bold")
        x += 18
    text(ax, x, y, words, ha="left", weight="bold")


def box(ax, x, y, width, height, color, words="", edge=WHITE, radius=4, **style):
    """A round-cornered box from its upper left corner; its words are white on dark colours and dark on light ones."""
    shape = f"round,pad=0,rounding_size={min(radius, width / 2, height / 2)}"
    ax.add_patch(FancyBboxPatch((x, y), width, height, shape, fc=color, ec=edge, **{"lw": 1.2, **style}))
    text(ax, x + width / 2, y + height / 2, words, color=WHITE if color in (BLUE, GREEN) else INK)


def idle(ax, x, y, width, height, words):
    """A hatched stretch in which nothing is done."""
    box(ax, x + 1, y + 1, width - 2, height - 2, WHITE, edge="#B4B9C0", hatch="////")
    box(ax, x + width / 2 - 15, y + height / 2 - 8, 30, 16, WHITE, words, lw=0)


def arrow(ax, start, end, color=GREY, style="-|>", lw=1.4):
    """An arrow from start to end, both (x, y); "<|-|>" measures a stretch."""
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, color=color, lw=lw, mutation_scale=11, shrinkA=0, shrinkB=0)
    )


def line(ax, xs, ys, color=GREY, lw=1.6, dashed=False, **style):
    """A line through the points, or dashes along them."""
    ax.plot(xs, ys, color=color, lw=lw, ls=(0, (4, 3)) if dashed else "-", solid_capstyle="round", **style)


def dot(ax, x, y, radius, color):
    """A filled circle."""
    ax.add_patch(Circle((x, y), radius, fc=color, ec="none"))


def stopwatch(ax, x, y, color, r=12):
    """A stopwatch around (x, y)."""
    line(ax, (x, x), (y - r, y - r - 4), color, 3)
    line(ax, (x + r * 0.75, x + r * 0.95), (y - r * 0.75, y - r * 0.95), color, 2.5)
    ax.add_patch(Circle((x, y), r, fc=WHITE, ec=color, lw=2.5))
    line(ax, (x, x, x + r * 0.4), (y - r * 0.55, y, y + r * 0.25), color, 2)


def timed(ax, y, start, end, right, words):
    """A stopwatch and the stretch that it times, from its start to the moment that it was stopped."""
    color = GREEN if right else RED
    line(ax, (end, end), (50, y + 8), color, dashed=True)
    line(ax, (start, start), (y - 8, y + 8), color)
    arrow(ax, (start, y), (end, y), color, "<|-|>", 2)
    stopwatch(ax, 34, y + 8, color)
    heading(ax, start, y + 23, words, right)


def measuring():
    """Two time lines. The CPU launches four kernels one after the other and is free at once, while the GPU still works
    on them. A stopwatch stopped without a wait has timed only the launches, which is wrong; one that waits for the
    GPU's last kernel has timed the work, which is right."""
    ax = card(290, "The CPU only launches the work")
    left, launched, done = 62, 134, 336
    heading(ax, 18, 70, "CPU")
    heading(ax, 18, 132, "GPU")
    idle(ax, launched, 54, done - launched, 32, "free")
    for k in range(4):
        launch, kernel = left + 18 * k, 82 + 63.5 * k
        box(ax, launch, 54, 18, 32, ORANGE, str(k + 1))
        box(ax, kernel, 116, 63.5, 32, BLUE, str(k + 1))
        arrow(ax, (launch + 9, 88), (kernel + 8, 115))
    timed(ax, 184, left, launched, False, "no wait: times the launches")
    timed(ax, 240, left, done, True, "waits for the GPU: times the work")
    return ax.figure


def drifting(ax, floor, order, gaps, right, words):
    """Bars of one and the same step's time under a drift, in the order measured, and the means that come out."""
    heading(ax, 18, floor - 116, words, right)
    xs = [20 + 28 * k + gap for k, gap in enumerate(gaps)]
    times = [25 + x / 4 for x in xs]
    for x, time, name in zip(xs, times, order, strict=True):
        box(ax, x, floor - time, 26, time, COLORS[name], name)
    line(ax, [x + 13 for x in xs], [floor - time - 9 for time in times], dashed=True)
    text(ax, 78, floor - 70, "slow drift", color=GREY)
    text(ax, 309, floor - 12, "mean time")
    for x, name in ((292, "A"), (326, "B")):
        mean = sum(time for time, this in zip(times, order, strict=True) if this == name) / 4
        line(ax, (x - 13, x + 13), (floor - mean, floor - mean), COLORS[name], 4)
        text(ax, x, floor - mean - 14, name, weight="bold")


def rounds():
    """The same step is timed as A and as B while the machine slowly drifts. Back to back, A A A A B B B B, the drift
    falls on B, and B looks slower. In alternating rounds, A B, B A, A B, B A, it falls on both alike, and their means
    agree."""
    ax = card(352, "A and B are the same step")
    drifting(ax, 176, "AAAABBBB", (0, 0, 0, 0, 18, 18, 18, 18), False, "back to back: B looks slower")
    drifting(ax, 334, "ABBAABBA", (0, 0, 6, 6, 12, 12, 18, 18), True, "alternating: no difference")
    return ax.figure


def schedule(batches, load, step, workers, ahead):
    """When each load and each step starts, if the workers keep at most so many batches ahead of the loop."""
    loads, steps, free = [], [], [0] * workers
    for k in range(batches):
        loads.append(max(free[k % workers], steps[k - ahead] if k >= ahead else 0))
        free[k % workers] = loads[k] + load
        steps.append(max(free[k % workers], steps[-1] + step if steps else 0))
    return loads, steps


def queue(ax, x, y, waits):
    """The batches that wait, each from loaded to taken, in the first of the rows that is free."""
    rows = [0, 0, 0]
    for k, (loaded, taken) in enumerate(waits):
        if taken > loaded:
            row = next(row for row, free in enumerate(rows) if free <= loaded)
            rows[row] = taken
            box(ax, x + loaded, y + 16 * row, taken - loaded, 16, GREEN, str(k + 1), radius=3)


def dataloader():
    """Lanes over time. Without workers the loop loads a batch, takes a step, loads, takes a step: the GPU idles during
    every load. With two workers, batches are loaded ahead in two lanes of their own and wait in a short queue; after
    the first load, the steps run back to back."""
    ax = card(412, "Load ahead of the steps")
    left, load, step, end = 78, 38, 32, 262
    heading(ax, 18, 60, "no workers: the GPU waits", False)
    for x in range(left, left + end - load, load + step):
        box(ax, x, 76, load, 28, ORANGE, "load")
        idle(ax, x, 108, load, 22, "idle")
        if x + load + step < left + end:
            box(ax, x + load, 76, step, 28, BLUE, "step")
            box(ax, x + load, 108, step, 22, BLUE)
    heading(ax, 18, 166, "two workers: steps back to back", True)
    loads, steps = schedule(10, load, step, workers=2, ahead=4)
    for k, start in enumerate(loads):
        box(ax, left + start, 182 + 28 * (k % 2), load, 26, ORANGE, str(k + 1))
    queue(ax, left, 244, [(start + load, min(taken, end)) for start, taken in zip(loads, steps, strict=True)])
    idle(ax, left, 332, load, 22, "idle")
    for k, start in enumerate(steps[:7]):
        box(ax, left + start, 300, step, 28, BLUE, str(k + 1))
        box(ax, left + start, 332, step, 22, BLUE)
    for y, words in zip(
        (90, 119, 195, 223, 268, 314, 343), ("loop", "GPU", "worker 1", "worker 2", "queue", "loop", "GPU"), strict=True
    ):
        text(ax, 18, y, words, ha="left")
    arrow(ax, (left, 376), (342, 376))
    text(ax, 210, 391, "time", color=GREY)
    return ax.figure


def kept(ax, floor, every, trace, words):
    """A chain of twelve layers with one in `every` kept, over its trace of (time, activations held)."""
    heading(ax, 18, floor - 140, words)
    line(ax, (24, 334), (floor - 114, floor - 114), PALE, 3, zorder=1)
    for x, layer in zip(range(21, 345, 27), range(12), strict=True):
        if layer % every:
            box(ax, x + 1, floor - 123, 18, 18, WHITE, edge=GREY, ls=(0, (2.5, 2)))
        else:
            box(ax, x, floor - 124, 20, 20, BLUE)
    xs, ys = [21 + TICK * time for time, _ in trace], [floor - 7 * held for _, held in trace]
    ax.fill_between(xs, ys, floor, color="#CFE6F5", lw=0)
    line(ax, xs, ys, BLUE, 2)
    box(ax, 21, floor + 4, 12 * TICK, 20, SKY, "forward")


def gradient_checkpointing():
    """A chain of twelve layers, twice. Above, every activation is kept: memory rises through forward and falls through
    backward, one tall triangle. Below, every third is kept, the others are dropped and recomputed during backward:
    memory stays far lower, with a small tooth for each stretch recomputed, and the step takes longer."""
    ax = card(464, "Keep less, recompute the rest")
    back = 21 + 12 * TICK
    kept(ax, 202, 1, [(0, 0), (12, 12), (36, 0)], "keep every activation")
    text(ax, 21, 122, "memory", color=GREY, ha="left")
    box(ax, back, 206, 24 * TICK, 20, BLUE, "backward")
    trace = [(time, -(-time // 3)) for time in range(13)]
    for k in range(4):  # a stretch recomputed brings two more than its boundary; then all three are let go
        trace += [(15 + 9 * k, 6 - k), (21 + 9 * k, 3 - k)]
        box(ax, back + 9 * k * TICK, 406, 3 * TICK, 20, ORANGE)
        box(ax, back + (9 * k + 3) * TICK, 406, 6 * TICK, 20, BLUE)
    kept(ax, 402, 3, trace, "keep the boundaries, drop the rest")
    line(ax, (21, 338), (318, 318), dashed=True)
    arrow(ax, (21 + 15 * TICK, 319), (21 + 15 * TICK, 358), GREEN, "<|-|>", 2)
    text(ax, 130, 335, "memory saved", ha="left")
    box(ax, 21, 431, 16, 16, ORANGE)
    text(ax, 42, 439, "recompute", ha="left")
    text(ax, 250, 439, "time added", ha="right")
    arrow(ax, (21 + 36 * TICK, 439), (21 + 48 * TICK, 439), RED, "<|-|>", 2)
    return ax.figure


def course():
    """The road of every claim: predict the gain, prove that the technique is active, prove that the result is the same,
    measure both in alternating rounds; then the verdict against the baseline: faster, slower or within noise."""
    ax = card(330, "Every claim, put to the test")
    asked = (("predict", "the gain"), ("is it", "active?"), ("same", "result?"), ("measure", "in turns"))
    for x, color, words in zip((54, 138, 222, 306), (ORANGE, SKY, GREEN, BLUE), asked, strict=True):
        dot(ax, x, 84, 28, color)
        text(ax, x, 127, words[0])
        text(ax, x, 144, words[1])
    for x in (86, 170, 254):
        arrow(ax, (x, 84), (x + 20, 84), lw=2)
    text(ax, 54, 84, "?", size=24, weight="bold")
    box(ax, 119, 73, 38, 22, WHITE, radius=11)
    dot(ax, 146, 84, 8, BLUE)
    text(ax, 222, 83, "=", size=28, color=WHITE, weight="bold")
    for k, name in enumerate("ABBA"):
        box(ax, 290 + 16 * (k % 2), 68 + 16 * (k // 2), 16, 16, WHITE if name == "A" else PALE, name, BLUE, radius=3)
    arrow(ax, (306, 158), (306, 185), lw=2)
    box(ax, 18, 190, 324, 122, "#F6F7F9", edge=PALE, radius=10)
    line(ax, (120, 120), (202, 284), dashed=True)
    text(ax, 120, 297, "baseline", color=GREY)
    for y, x, color, words in ((216, 66, GREEN, "faster"), (243, 174, RED, "slower"), (270, 124, GREY, "within noise")):
        line(ax, (x - 22, x + 22), (y, y), color, 3)
        dot(ax, x, y, 5.5, color)
        text(ax, 226, y, words, ha="left", weight="bold")
    return ax.figure


def main(folder=Path(__file__).parent):
    """Write every drawing into a folder: the same bytes every time."""
    for drawing in (measuring, rounds, dataloader, gradient_checkpointing, course):
        about = {"Title": " ".join(drawing.__doc__.split()), "Date": None, "Creator": None}
        with matplotlib.style.context(["default", SETTINGS]):
            drawing().savefig(Path(folder) / f"{drawing.__name__}.svg", metadata=about)


if __name__ == "__main__":
    main()
