"""The lessons' drawings: diagrams that explain, with no measured number in them.

`python images/draw.py` writes every picture beside itself. One unit is one pixel of a phone that shows the picture 360
wide, and y runs down. A drawing's docstring is its alternative text; the SVG carries it as its title.
"""

import math
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


def lanes(ax, y, copies, steps, copy, step):
    """A lane of copies above a lane of steps, each a numbered box at its start."""
    for down, words, starts, width, color in ((0, "copy", copies, copy, ORANGE), (30, "step", steps, step, BLUE)):
        text(ax, 18, y + down + 13, words, ha="left")
        for k, start in enumerate(starts):
            box(ax, 62 + start, y + down, width, 26, color, str(k + 1))


def pinned_memory():
    """Pageable host memory is copied twice: by the CPU into pinned memory, then by the copy engine to the GPU. A batch
    that is pinned already is copied once. In one stream copies and steps alternate; where the copies have a stream of
    their own, each runs beside the step before it, and more steps fit into the same time."""
    ax = card(440, "Copy while the step runs")
    copy, step = 34, 48
    heading(ax, 18, 60, "pageable: copied twice", False)
    heading(ax, 18, 146, "pinned: copied once", True)
    box(ax, 18, 76, 80, 30, PALE, "pageable", edge=GREY)
    arrow(ax, (100, 91), (134, 91), lw=2)
    text(ax, 116, 117, "CPU", color=GREY)
    for y in (76, 162):
        box(ax, 137, y, 72, 30, ORANGE, "pinned")
        arrow(ax, (211, y + 15), (278, y + 15), lw=2)
        text(ax, 244, y + 41, "copy engine", color=GREY)
        box(ax, 281, y, 61, 30, BLUE, "GPU")
    heading(ax, 18, 232, "one stream: in turns", False)
    turns = [k * (copy + step) for k in range(3)]
    lanes(ax, 246, turns, [start + copy for start in turns], copy, step)
    heading(ax, 18, 330, "a stream for the copies: at once", True)
    steps = [copy + k * step for k in range(5)]
    lanes(ax, 344, [0, *steps[:-1]], steps, copy, step)
    arrow(ax, (62, 412), (342, 412))
    text(ax, 202, 426, "time", color=GREY)
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


def alive(ax, floor, trace, right, words):
    """The bytes alive over four batches, as (batches done, height) points, with a heading above them."""
    heading(ax, 18, floor - 100 if max(y for _, y in trace) > 60 else floor - 46, words, right)
    for k in range(5):
        line(ax, (30 + 75 * k, 30 + 75 * k), (floor - 4, floor + 4), PALE)
    xs, ys = [30 + 75 * done for done, _ in trace], [floor - height for _, height in trace]
    ax.fill_between(xs, ys, floor, color="#CFE6F5", lw=0)
    line(ax, xs, ys, BLUE, 2)
    line(ax, (24, 336), (floor, floor), GREY, 1)


def no_grad_validation():
    """The memory of four validation batches, three ways, on one scale. In eval() with a running total of loss tensors,
    every batch's activations stay: a rising staircase. In eval() with the loss turned into a number, every batch rises
    and falls again. Under no_grad() nothing is kept: a low ripple."""
    ax = card(376, "What validation keeps")
    stairs = [(k + share, 20 * (k + rise)) for k in range(4) for share, rise in ((0, 0), (0.75, 1), (1, 1))]
    alive(ax, 162, [*stairs, (4, 0)], False, "eval(): total += loss")
    text(ax, 34, 96, "every batch's graph stays", color=GREY, ha="left")
    teeth = [(k + share, height) for k in range(4) for share, height in ((0, 0), (0.75, 20), (0.76, 0))]
    alive(ax, 236, [*teeth, (4, 0)], None, "eval(): total += loss.item()")
    ripple = [(k / 6, height) for k in range(24) for height in (3, 6)]
    alive(ax, 310, [*ripple, (4, 0)], True, "no_grad(): nothing is kept")
    for k in range(4):
        box(ax, 32 + 75 * k, 324, 71, 22, SKY, f"batch {k + 1}")
    text(ax, 180, 360, "one scale of memory for all three", color=GREY)
    return ax.figure


def rate(ax, left, floor, points, words):
    """A learning rate over a run of 150 by 60, from points between (0, 0) and (1, 1), under a dashed peak."""
    text(ax, left, floor - 80, words, ha="left", weight="bold")
    line(ax, (left, left + 150), (floor - 60, floor - 60), PALE, dashed=True)
    line(ax, (left, left + 150), (floor, floor), GREY, 1)
    line(ax, [left + 150 * x for x, _ in points], [floor - 60 * y for _, y in points], BLUE, 2.4)


def fall(start, end=1.0):
    """The points of half a cosine from 1 down to 0."""
    return [(start + (end - start) * k / 20, (1 + math.cos(math.pi * k / 20)) / 2) for k in range(21)]


def lr_schedules():
    """The learning rate over a run, for four schedules with one peak: constant; cyclic, up and down in straight lines;
    one cycle, a rise and a long fall to nothing; warm-up with cosine, a short straight rise and a long fall. Below, one
    cycle that is stepped once an epoch instead of once a batch: it stays low and never reaches its peak."""
    ax = card(414, "One peak, four schedules")
    rate(ax, 20, 136, [(0, 1), (1, 1)], "constant")
    rate(ax, 190, 136, [(k / 8, 0.1 + 0.9 * (k % 2)) for k in range(9)], "cyclic")
    rise = [(0.3 * (1 - x), y) for x, y in reversed(fall(0))]
    rate(ax, 20, 246, [*rise, *fall(0.3)], "one cycle")
    rate(ax, 190, 246, [(0, 0), (0.1, 1), *fall(0.1)], "warm-up + cosine")
    heading(ax, 18, 282, "one cycle, stepped once an epoch", False)
    line(ax, (20, 340), (302, 302), PALE, dashed=True)
    text(ax, 340, 315, "the peak, never reached", color=GREY, ha="right")
    line(ax, (20, 340), (374, 374), GREY, 1)
    for k in range(5):
        low, high = 371 - 2 * k * k * 0.4, 371 - 2 * (k + 1) ** 2 * 0.4
        line(ax, (20 + 64 * k, 84 + 64 * k), (low, low), RED, 2.4)
        if k < 4:
            line(ax, (84 + 64 * k, 84 + 64 * k), (low, high), RED, 2.4)
        text(ax, 52 + 64 * k, 390, f"epoch {k + 1}", color=GREY)
    return ax.figure


def held(ax, floor, trace, words):
    """What the gradients hold over two training steps, as (time, share of their size), above the steps' phases."""
    heading(ax, 18, floor - 92, words)
    xs, ys = [21 + time for time, _ in trace], [floor - 62 * share for _, share in trace]
    ax.fill_between(xs, ys, floor, color="#CFE6F5", lw=0)
    line(ax, xs, ys, BLUE, 2)
    for start in (21, 180):
        box(ax, start, floor + 4, 58, 20, SKY, "forward")
        box(ax, start + 58, floor + 4, 68, 20, BLUE, "backward")
        box(ax, start + 126, floor + 4, 33, 20, ORANGE, "step")
    text(ax, 21, floor + 40, "to clear and to add:", ha="left")


def zero_grad():
    """The memory of the gradients over two training steps. Filled with zeros, they keep their full size through the
    forward pass, and each parameter costs a write to fill and two reads and a write to add. Set to None, they are gone
    until the backward pass brings new ones, and nothing is moved."""
    ax = card(374, "Drop gradients, do not fill them")
    held(ax, 152, [(0, 1), (318, 1)], "zeros: gradients stay all the time")
    for x in (50, 209):
        text(ax, x, 121, "zeros")
    for k, words in enumerate(("write", "read", "read", "write")):
        box(ax, 160 + 45 * k, 181, 44, 22, PALE, words, edge=GREY)
    once = [(0, 0), (58, 0), (126, 1), (159, 1), (159, 0)]
    held(ax, 316, [*once, *((159 + time, share) for time, share in once)], "None: gradients only when needed")
    for x in (50, 209):
        text(ax, x, 285, "free", color=GREY)
    text(ax, 160, 356, "nothing", ha="left", weight="bold")
    return ax.figure


def gradient_accumulation():
    """One batch, twice. Above, all at once: its activations rise through forward and fall through backward in one tall
    triangle, then the optimizer steps. Below, in four micro-batches: four small triangles on top of one thin layer of
    gradients that each adds to, then one optimizer step. The peak is far lower, the time about the same."""
    ax = card(372, "The same batch in four pieces")
    left, width, high = 24, 272, 104
    for floor, pieces, words in ((184, 1, "all at once"), (334, 4, "in four micro-batches")):
        each = width / pieces
        heading(ax, 18, floor - high - 26, words)
        if pieces > 1:
            box(ax, left + each, floor - 12, width - each, 12, GREEN, radius=2)
        for k in range(pieces):
            base = floor - 12 * (k > 0)
            xs, top = (left + k * each, left + (k + 1 / 3) * each, left + (k + 1) * each), base - high / pieces
            ax.fill_between(xs, (base, top, base), base, color="#CFE6F5", lw=0)
            line(ax, xs, (base, top, base), BLUE, 2)
            text(ax, left + (k + 0.38) * each, base - high / pieces / 3, str(k + 1) if pieces > 1 else "1 2 3 4")
        box(ax, left + width + 4, floor - 34, 40, 34, ORANGE, "step")
    line(ax, (left, 340), (334 - high, 334 - high), dashed=True)
    arrow(ax, (150, 335 - high), (150, 290), GREEN, "<|-|>", 2)
    text(ax, 158, 262, "memory saved", ha="left")
    box(ax, left, 347, 16, 12, GREEN, radius=2)
    text(ax, left + 22, 353, "gradients, added up", ha="left")
    return ax.figure


def mixed_precision():
    """The bits of four number formats, to scale. fp32: a sign, 8 bits of range, 23 of digits. TF32, as tensor cores
    round to it: 8 and 10, while the number still takes 32 bits of memory. bf16: 8 and 7. fp16: 5 and 10. bf16 has the
    range of fp32, fp16 has more digits and less range."""
    ax = card(322, "Where the bits go")
    left, bit, name = 66, 8.6, 18
    rows = (("fp32", 8, 23, ""), ("TF32", 8, 10, "rounded away"), ("bf16", 8, 7, ""), ("fp16", 5, 10, ""))
    told = ("largest 3·10³⁸, about 7 digits", "only inside a product: 3 digits", "range of fp32, 2 to 3 digits")
    for k, (words, reach, digits, rest) in enumerate(rows):
        y = 52 + 56 * k
        heading(ax, name, y + 13, words)
        box(ax, left, y, bit, 26, GREY, radius=2)
        box(ax, left + bit, y, reach * bit, 26, ORANGE, str(reach))
        box(ax, left + (1 + reach) * bit, y, digits * bit, 26, BLUE, str(digits))
        if rest:
            free = left + (1 + reach + digits) * bit
            box(ax, free, y, left + 32 * bit - free, 26, WHITE, rest, edge=GREY, ls=(0, (2.5, 2)))
        text(ax, left, y + 38, (*told, "largest 65,504: small ones vanish")[k], ha="left", color=GREY)
    for x, color, words in ((left, GREY, "sign"), (left + 66, ORANGE, "range"), (left + 144, BLUE, "digits")):
        box(ax, x, 286, 16, 16, color)
        text(ax, x + 22, 294, words, ha="left")
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
    for drawing in (
        measuring,
        rounds,
        dataloader,
        pinned_memory,
        zero_grad,
        gradient_accumulation,
        gradient_checkpointing,
        mixed_precision,
        no_grad_validation,
        lr_schedules,
        course,
    ):
        about = {"Title": " ".join(drawing.__doc__.split()), "Date": None, "Creator": None}
        with matplotlib.style.context(["default", SETTINGS]):
            drawing().savefig(Path(folder) / f"{drawing.__name__}.svg", metadata=about)


if __name__ == "__main__":
    main()
