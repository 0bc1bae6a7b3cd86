"""The lessons' drawings: diagrams that explain, with no measured number in them.

`python images/draw.py` writes every picture beside itself. One unit is one pixel of a phone that shows the picture 360
wide, and y runs down. A drawing's docstring is its alternative text; the SVG carries it as its title.
"""

import json
import math
from pathlib import Path

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from effgpu.comparison import MIME_TYPE

# Okabe and Ito's palette, which colour-blind readers can tell apart
ORANGE, SKY, GREEN, BLUE, RED, PINK = "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7"
INK, GREY, PALE, WHITE = "#222222", "#6B7280", "#E4E7EB", "#FFFFFF"
COLORS = {"A": BLUE, "B": ORANGE}
WIDTH, UNITS_PER_INCH = 360, 80
TICK = 6.6  # width of one layer's forward
LESSONS = Path(__file__).parent.parent / "notebooks"
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


def anatomy():
    """The memory of one training step. Weights and optimizer state are a constant floor. Activations rise through the
    forward pass and fall through the backward pass, while gradients grow beneath them. At the peak there is hardly any
    gradient."""
    ax = card(240, "The memory of one step")
    xs, floor, turn = (24, 112, 262, 336), 196, 112  # forward ends at the turn
    owners = (  # heights at these places, and where the name stands
        ("weights", BLUE, (20, 20, 20, 20), (180, 186)),
        ("optimizer state", SKY, (34, 34, 34, 34), (180, 159)),
        ("gradients", GREEN, (0, 0, 20, 20), (290, 132)),
        ("activations", ORANGE, (0, 74, 0, 0), (154, 120)),
    )
    below = [floor] * 4
    for words, color, heights, place in owners:
        above = [base - height for base, height in zip(below, heights, strict=True)]
        ax.fill_between(xs, above, below, color=color, lw=0)
        text(ax, *place, words, color=WHITE if color in (BLUE, GREEN) else INK)
        below = above
    line(ax, (turn, turn), (52, 68), RED, dashed=True)
    dot(ax, turn, 69, 4, RED)
    text(ax, turn + 8, 56, "peak: hardly any gradient", ha="left")
    for left, right, words in zip(xs, xs[1:], ("forward", "backward", "optimizer"), strict=False):
        box(ax, left, floor + 5, right - left, 20, PALE, words)
    return ax.figure


def schedule(batches, load, step, workers, ahead):
    """When each load and each step starts, if the workers keep at most so many batches ahead of the loop."""
    loads, steps, free = [], [], [0] * workers
    for k in range(batches):
        loads.append(max(free[k % workers], steps[k - ahead] if k >= ahead else 0))
        free[k % workers] = loads[k] + load
        steps.append(max(free[k % workers], steps[-1] + step if steps else 0))
    return loads, steps


def dataloader():
    """Lanes over time. Without workers the loop loads a batch, takes a step, loads, takes a step: the GPU idles during
    every load. With two workers, each in a lane of its own, batches are loaded ahead: after the first load, the steps
    run back to back."""
    ax = card(360, "Load ahead of the steps")
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
    idle(ax, left, 280, load, 22, "idle")
    for k, start in enumerate(steps[:7]):
        box(ax, left + start, 248, step, 28, BLUE, str(k + 1))
        box(ax, left + start, 280, step, 22, BLUE)
    for y, words in zip(
        (90, 119, 195, 223, 262, 291), ("loop", "GPU", "worker 1", "worker 2", "loop", "GPU"), strict=True
    ):
        text(ax, 18, y, words, ha="left")
    arrow(ax, (left, 324), (342, 324))
    text(ax, 210, 339, "time", color=GREY)
    return ax.figure


def lane(ax, y, words, boxes):
    """A row of boxes over time, each with its start, its width, its colour and its words."""
    text(ax, 18, y + 13, words, ha="left")
    for start, width, color, inside in boxes:
        box(ax, 66 + start, y, width, 26, color, inside)


def pinned_memory():
    """A batch is copied twice: by the CPU into pinned memory, then to the GPU. From ordinary memory, every step waits
    for both copies. With pinning, a thread of the loader makes copy 1 during the step before, and a step waits for copy
    2 alone, so that more steps fit into the same time."""
    ax = card(350, "Wait for one copy, not for two")
    first, second, step = 28, 16, 46
    for x, words, color in ((18, "ordinary", PALE), (141, "pinned", ORANGE), (281, "GPU", BLUE)):
        box(ax, x, 54, 61 if words == "GPU" else 74, 30, color, words, edge=GREY if color == PALE else WHITE)
    for start, end, words in ((94, 139, "copy 1"), (217, 279, "copy 2")):
        arrow(ax, (start, 69), (end, 69), lw=2)
        text(ax, (start + end) / 2, 95, words, color=GREY)
    heading(ax, 18, 132, "ordinary memory", False)
    boxes = []
    for start in [k * (first + second + step) for k in range(3)]:
        boxes += [(start, first, ORANGE, "1"), (start + first, second, ORANGE, "2")]
        boxes += [(start + first + second, step, BLUE, "step")]
    lane(ax, 150, "loop", boxes)
    heading(ax, 18, 210, "pinned by the loader", True)
    turns = [first + k * (second + step) for k in range(4)]
    ahead = [0, *[start + second for start in turns[:-1]]]
    lane(ax, 228, "loader", [(start, first, ORANGE, "1") for start in ahead])
    boxes = []
    for start in turns:
        boxes += [(start, second, ORANGE, "2"), (start + second, step, BLUE, "step")]
    lane(ax, 258, "loop", boxes)
    arrow(ax, (66, 304), (342, 304))
    text(ax, 204, 322, "time", color=GREY)
    return ax.figure


def kept(ax, floor, every, trace, words):
    """Four blocks with the results inside that are kept, over the trace of a step, as (time, results held)."""
    heading(ax, 18, floor - 150, words)
    for block in range(4):
        x = 21 + 81 * block
        box(ax, x, floor - 132, 74, 36, WHITE, edge=GREY)
        text(ax, x + 37, floor - 87, f"block {block + 1}", size=9, color=GREY)
        for result in range(3):
            look = {"color": BLUE} if every or not result else {"color": WHITE, "edge": GREY, "ls": (0, (2.5, 2))}
            box(ax, x + 7 + 22 * result, floor - 122, 16, 16, **look)
    xs, ys = [21 + TICK * time for time, _ in trace], [floor - 5.5 * held for _, held in trace]
    ax.fill_between(xs, ys, floor, color="#CFE6F5", lw=0)
    line(ax, xs, ys, BLUE, 2)
    box(ax, 21, floor + 4, 12 * TICK, 20, SKY, "forward")


def gradient_checkpointing():
    """Four blocks, twice. Above, every result inside the blocks is kept: the activations rise through forward and fall
    through backward, one tall triangle. Below, only the input of each block is kept. Backward computes one block at a
    time again: the activations stay lower, with a small tooth for each block, and the step takes longer."""
    ax = card(484, "Keep less, compute twice")
    back = 21 + 12 * TICK
    kept(ax, 212, True, [(0, 0), (12, 12), (36, 0)], "without: keep every result")
    text(ax, 21, 150, "activations", color=GREY, ha="left")
    box(ax, back, 216, 24 * TICK, 20, BLUE, "backward")
    trace = [(0, 0), *((3 * block + after, block + 1) for block in range(4) for after in (0, 3))]
    for block in range(4):  # to compute it again brings two more than its input, then backward frees all three
        trace += [(15 + 9 * block, 6 - block), (21 + 9 * block, 3 - block)]
        box(ax, back + 9 * block * TICK, 426, 3 * TICK, 20, ORANGE)
        box(ax, back + (9 * block + 3) * TICK, 426, 6 * TICK, 20, BLUE)
    kept(ax, 422, False, trace, "with: keep the input of each block")
    line(ax, (21, 338), (356, 356), dashed=True)
    arrow(ax, (21 + 15 * TICK, 357), (21 + 15 * TICK, 388), GREEN, "<|-|>", 2)
    text(ax, 130, 371, "memory saved", ha="left")
    box(ax, 21, 453, 16, 16, ORANGE)
    text(ax, 42, 461, "computed again", ha="left")
    text(ax, 250, 461, "time added", ha="right")
    arrow(ax, (21 + 36 * TICK, 461), (21 + 48 * TICK, 461), RED, "<|-|>", 2)
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
    """The memory of four validation batches, four ways, on one scale. In eval() with a running total of loss tensors,
    every batch's activations stay: a rising staircase. In eval() with the loss turned into a number, every batch rises
    and falls again. Under no_grad() nothing is kept: a low ripple. Under no_grad() with the logits of every batch in a
    list, the ripple climbs."""
    ax = card(450, "What validation keeps")
    stairs = [(k + share, 20 * (k + rise)) for k in range(4) for share, rise in ((0, 0), (0.75, 1), (1, 1))]
    alive(ax, 162, [*stairs, (4, 0)], False, "eval(): total += loss")
    text(ax, 34, 96, "every batch's graph stays", color=GREY, ha="left")
    teeth = [(k + share, height) for k in range(4) for share, height in ((0, 0), (0.75, 20), (0.76, 0))]
    alive(ax, 236, [*teeth, (4, 0)], None, "eval(): total += loss.item()")
    ripple = [(k / 6, height) for k in range(24) for height in (3, 6)]
    alive(ax, 310, [*ripple, (4, 0)], True, "no_grad(): nothing is kept")
    climb = [(done, height + 5 * int(done)) for done, height in ripple]
    alive(ax, 384, [*climb, (4, 20), (4, 0)], False, "no_grad(): all.append(logits)")
    for k in range(4):
        box(ax, 32 + 75 * k, 398, 71, 22, SKY, f"batch {k + 1}")
    text(ax, 180, 434, "one scale of memory for all four", color=GREY)
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
    """The learning rate over a run, for four schedules with one peak: warm-up with linear, a short straight rise and a
    long straight fall; warm-up with cosine; one cycle, a longer rise and a fall; WSD, a short rise, a long flat part
    and a short fall. Below, one cycle that is stepped once per epoch instead of once per update: it stays near zero."""
    ax = card(414, "One peak, four schedules")
    rate(ax, 20, 136, [(0, 0.1), (0.1, 1), (1, 0)], "warm-up + linear")
    rate(ax, 190, 136, [(0, 0.1), (0.1, 1), *fall(0.1)], "warm-up + cosine")
    rise = [(0.3 * (1 - x), y) for x, y in reversed(fall(0))]
    rate(ax, 20, 246, [*rise, *fall(0.3)], "one cycle")
    rate(ax, 190, 246, [(0, 0.1), (0.1, 1), (0.7, 1), (1, 0)], "WSD")
    heading(ax, 18, 282, "one cycle, stepped once per epoch", False)
    line(ax, (20, 340), (302, 302), PALE, dashed=True)
    text(ax, 340, 315, "the peak, never reached", color=GREY, ha="right")
    line(ax, (20, 340), (374, 374), GREY, 1)
    for k in range(5):
        low, high = 371 - 0.3 * k**2, 371 - 0.3 * (k + 1) ** 2
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


def zero_grad():
    """The memory of the gradients over two training steps. Filled with zeros, they keep their full size through the
    forward pass, and each parameter costs a write to fill and two reads and a write to add. Set to None, they are gone
    until the backward pass brings new ones, and nothing is moved."""
    ax = card(374, "Drop gradients, do not fill them")
    held(ax, 152, [(0, 1), (318, 1)], "zeros: gradients stay all the time")
    for x in (50, 209):
        text(ax, x, 121, "zeros")
    text(ax, 180, 192, "extra work: 1 write to fill, 2 reads and 1 write to add", size=10)
    once = [(0, 0), (58, 0), (126, 1), (159, 1), (159, 0)]
    held(ax, 316, [*once, *((159 + time, share) for time, share in once)], "None: gradients only when needed")
    for x in (50, 209):
        text(ax, x, 285, "free", color=GREY)
    text(ax, 180, 356, "extra work: none", size=10)
    return ax.figure


def gradient_accumulation():
    """One batch, twice. Above, all at once: its activations rise through forward and fall through backward in one tall
    triangle, then the optimizer steps. Below, in four pieces: four small triangles on top of one thin layer of
    gradients that each adds to, then one optimizer step. The peak is far lower, the time about the same."""
    ax = card(372, "The same batch in four pieces")
    left, width, high = 24, 272, 104
    for floor, pieces, words in ((184, 1, "all at once"), (334, 4, "in four pieces")):
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
    text(ax, left, 96, "memory", color=GREY, ha="left")
    line(ax, (left, 340), (334 - high, 334 - high), dashed=True)
    arrow(ax, (150, 335 - high), (150, 290), GREEN, "<|-|>", 2)
    text(ax, 158, 262, "memory saved", ha="left")
    box(ax, left, 347, 16, 12, GREEN, radius=2)
    text(ax, left + 22, 353, "gradients, added up", ha="left")
    return ax.figure


def autocast():
    """What mixed precision does with a weight. The weights stay in 32 bits. Tensor cores multiply a copy of them in 16
    bits with activations in 16 bits. The gradients of the weights are in 32 bits again, and the optimizer updates the
    32-bit weights with them. 32-bit boxes are twice as tall as 16-bit boxes."""
    ax = card(282, "Multiply in 16 bits, keep 32")
    box(ax, 18, 58, 90, 52, BLUE, "weights")
    box(ax, 135, 71, 70, 26, SKY, "copy")
    box(ax, 135, 121, 90, 26, SKY, "activations")
    box(ax, 252, 71, 90, 76, ORANGE, "tensor\ncores")
    box(ax, 252, 190, 90, 52, BLUE, "gradients")
    box(ax, 135, 203, 90, 26, PALE, "optimizer")
    arrow(ax, (109, 84), (134, 84))
    arrow(ax, (206, 84), (251, 84))
    arrow(ax, (226, 134), (251, 134))
    arrow(ax, (297, 148), (297, 189))
    arrow(ax, (251, 216), (226, 216))
    line(ax, (134, 63), (216, 216), GREY, 1.4)
    arrow(ax, (63, 216), (63, 111))
    for x, color, words in ((18, BLUE, "32 bits"), (100, SKY, "16 bits")):
        box(ax, x, 254, 16, 16, color)
        text(ax, x + 22, 262, words, ha="left")
    return ax.figure


def mixed_precision():
    """The bits of four number formats, to scale. fp32: a sign, 8 bits of range, 23 of precision. TF32, as tensor cores
    round to it: 8 and 10, while the number still takes 32 bits of memory. bf16: 8 and 7. fp16: 5 and 10. bf16 has the
    range of fp32, fp16 has more precision and less range."""
    ax = card(322, "Where the bits go")
    left, bit, name = 66, 8.6, 18
    rows = (("fp32", 8, 23, ""), ("TF32", 8, 10, "rounded away"), ("bf16", 8, 7, ""), ("fp16", 5, 10, ""))
    told = (
        "up to 3·10³⁸, in 7 decimal digits",
        "only inside of a product: 3 decimal digits",
        "up to 3·10³⁸, in 2 to 3 decimal digits",
        "up to 65,504, in 3 decimal digits",
    )
    for k, (words, reach, digits, rest) in enumerate(rows):
        y = 52 + 56 * k
        heading(ax, name, y + 13, words)
        box(ax, left, y, bit, 26, GREY, radius=2)
        box(ax, left + bit, y, reach * bit, 26, ORANGE, str(reach))
        box(ax, left + (1 + reach) * bit, y, digits * bit, 26, BLUE, str(digits))
        if rest:
            free = left + (1 + reach + digits) * bit
            box(ax, free, y, left + 32 * bit - free, 26, WHITE, rest, edge=GREY, ls=(0, (2.5, 2)))
        text(ax, left, y + 38, told[k], ha="left", color=GREY)
    for x, color, words in ((left, GREY, "sign"), (left + 66, ORANGE, "range"), (left + 144, BLUE, "precision")):
        box(ax, x, 286, 16, 16, color)
        text(ax, x + 22, 294, words, ha="left")
    return ax.figure


def text_rows(ax, x, y, rows, wide):
    """Rows of numbered texts, a token 13 wide; what is left of each row's `wide` tokens is padding."""
    lengths, colors = (4, 11, 3, 7, 2, 5), (BLUE, ORANGE, GREEN, SKY, RED, PINK)
    for down, row in enumerate(rows):
        left = x
        for number in row:
            across = 13 * lengths[number]
            box(ax, left, y + 18 * down, across, 17, colors[number], str(number + 1), radius=3)
            left += across
        if left < x + 13 * wide:
            box(ax, left + 1, y + 18 * down + 1, x + 13 * wide - left - 2, 15, WHITE, edge="#B4B9C0", hatch="////")


def mask(ax, x, y, texts, cell=9):
    """Which tokens (down) may look at which (across), for a row of texts, each (length, color)."""
    start, total = 0, sum(length for length, _ in texts)
    box(ax, x, y, total * cell, total * cell, WHITE, edge=GREY, radius=0)
    for length, color in texts:
        for k in range(length):
            at = (start + k) * cell
            box(ax, x + start * cell, y + at, (k + 1) * cell, cell, color, radius=0, lw=0.5)
        start += length


def padding_and_packing():
    """Six texts of different lengths, laid out in three ways. Padded to the longest: one wide rectangle, about half of
    it hatched padding. Grouped by length: two rectangles, one of them narrow, with less padding. Packed: three rows,
    nearly full. Below, the mask of a packed row: one triangle for each of its texts is right; a single large
    triangle, in which texts see each other, is wrong."""
    ax = card(434, "Fill the rectangle with text")
    heading(ax, 18, 58, "to the longest")
    text_rows(ax, 18, 72, [[0], [1], [2], [3], [4], [5]], 11)
    heading(ax, 195, 58, "grouped by length")
    text_rows(ax, 195, 72, [[4], [2], [0]], 4)
    text_rows(ax, 195, 130, [[5], [3], [1]], 11)
    heading(ax, 18, 208, "packed")
    text_rows(ax, 18, 222, [[1], [3, 0], [5, 2, 4]], 11)
    box(ax, 195, 222, 16, 16, WHITE, edge="#B4B9C0", hatch="////")
    text(ax, 217, 230, "padding:", ha="left")
    text(ax, 195, 248, "costs as much as text", ha="left")
    heading(ax, 18, 300, "sees its own text", True)
    mask(ax, 36, 316, [(5, PINK), (3, GREEN), (2, RED)])
    heading(ax, 195, 300, "sees other texts", False)
    mask(ax, 213, 316, [(10, ORANGE)])
    text(ax, 18, 419, "mask of the last row: a bar is what one token sees", color=GREY, ha="left")
    return ax.figure


def optimizers():
    """Bytes for each parameter in fp32, as stacked bars. AdamW: 4 of weight, 4 of gradient, 8 of state, and another 4
    while it updates. Fused: 16. In the backward pass: little more than 12, as nearly all gradients are gone again. SGD
    with momentum: 12. AdamW with 8-bit state: 10. With 4-bit state: 9. Adafactor: little more than 8."""
    ax = card(376, "Bytes for each parameter")
    byte, left, held = 10.9, 122, ((BLUE, 4), (SKY, 4))
    rows = {
        "AdamW": (*held, (ORANGE, 4), (GREEN, 4), (WHITE, 4)),
        "… fused": (*held, (ORANGE, 4), (GREEN, 4)),
        "… in backward": ((BLUE, 4), (SKY, 0.4), (ORANGE, 4), (GREEN, 4)),
        "SGD, momentum": (*held, (ORANGE, 4)),
        "8-bit AdamW": (*held, (ORANGE, 1), (GREEN, 1)),
        "4-bit AdamW": (*held, (ORANGE, 0.5), (GREEN, 0.5)),
        "Adafactor": (*held, (GREEN, 0.25)),
    }
    for k in range(6):
        line(ax, (left + 4 * k * byte,) * 2, (52, 298), PALE, 1, zorder=1)
        text(ax, left + 4 * k * byte, 308, str(4 * k), color=GREY)
    for row, (name, parts) in enumerate(rows.items()):
        x, y = left, 56 + 34 * row
        text(ax, 14, y + 13, name, ha="left")
        for color, count in parts:
            style = {"edge": "#B4B9C0", "hatch": "////"} if color == WHITE else {"lw": 0.8}
            box(ax, x, y, count * byte, 26, color, radius=3, **style)
            x += count * byte
    keys = ((BLUE, "weight"), (SKY, "gradient"), (ORANGE, "mean gradient"), (GREEN, "mean square"))
    keys += ((WHITE, "while it updates"),)
    for x, y, (color, words) in zip((18, 104, 204, 18, 150), (326, 326, 326, 350, 350), keys, strict=True):
        style = {"edge": "#B4B9C0", "hatch": "////"} if color == WHITE else {}
        box(ax, x, y, 16, 16, color, **style)
        text(ax, x + 22, y + 8, words, ha="left")
    return ax.figure


def matrix(ax, x, y, rows, columns, color, gone=(), cell=12):
    """A matrix of small cells; those that `gone` names, as (row, column), are empty."""
    for row in range(rows):
        for column in range(columns):
            empty = (row, column) in gone
            left, top = x + cell * column, y + cell * row
            box(ax, left, top, cell, cell, WHITE if empty else color, edge=PALE if empty else WHITE, radius=2)


def pruning():
    """Above, a matrix of weights loses most of its cells to a mask: it keeps its shape, and every cell is
    still stored and multiplied. Below, two matrices in a row lose two of their shared neurons: two rows of the first,
    two columns of the second. What remains are two smaller matrices."""
    ax = card(392, "Zeros, or smaller matrices?")
    heading(ax, 18, 60, "zeros: same shape, same work", False)
    holes = {(r, c) for r in range(6) for c in range(8) if (3 * r + 5 * c + r * c) % 4}
    matrix(ax, 34, 78, 6, 8, BLUE)
    arrow(ax, (142, 114), (192, 114), lw=2)
    matrix(ax, 206, 78, 6, 8, BLUE, holes)
    text(ax, 254, 166, "every 0 is multiplied", color=GREY)
    heading(ax, 18, 204, "neurons taken out: less work", True)
    lost = (1, 4)
    matrix(ax, 34, 226, 6, 8, BLUE)
    text(ax, 82, 219, "first matrix", color=GREY, size=10)
    text(ax, 82, 309, "second matrix", color=GREY, size=10)
    matrix(ax, 34, 316, 4, 6, SKY)
    for row in lost:
        matrix(ax, 34, 226 + 12 * row, 1, 8, ORANGE)
    for column in lost:
        matrix(ax, 34 + 12 * column, 316, 4, 1, ORANGE)
    arrow(ax, (142, 290), (192, 290), lw=2)
    matrix(ax, 206, 238, 4, 8, BLUE)
    matrix(ax, 206, 316, 4, 4, SKY)
    text(ax, 308, 262, "fewer", ha="left")
    text(ax, 308, 276, "rows", ha="left")
    text(ax, 262, 333, "fewer", ha="left")
    text(ax, 262, 347, "columns", ha="left")
    return ax.figure


def inference():
    """Two stacks of memory. In training: weights, gradients, optimizer state, and a tall block of activations of all
    layers. For answers: weights of half the size, and the activations of one layer."""
    ax = card(346, "What an answer no longer needs")
    floor = 318
    for x, words in ((98, "in training"), (262, "for answers")):
        text(ax, x, 56, words, weight="bold")
    y = floor
    for height, color, words in (
        (36, BLUE, "weights"),
        (36, ORANGE, "gradients"),
        (72, GREEN, "optimizer state"),
        (96, SKY, "activations"),
    ):
        y -= height
        box(ax, 24, y, 148, height, color, words)
    text(ax, 98, y + 64, "of all layers")
    box(ax, 188, floor - 22, 148, 22, BLUE, "weights, 16 bits")
    box(ax, 188, floor - 44, 148, 22, SKY, "one layer")
    text(ax, 262, 150, "no gradients", color=GREY)
    text(ax, 262, 168, "no optimizer", color=GREY)
    text(ax, 262, 186, "half of the bits", color=GREY)
    arrow(ax, (262, 204), (262, floor - 56))
    line(ax, (18, 342), (floor + 4, floor + 4), INK, 1.2)
    return ax.figure


def trips(ax, floor, fused):
    """Four operations above the memory that they read from and write to: each by itself, or all in one kernel."""
    names, left, step = ("+", "×", "norm", "gelu"), 18, 84
    box(ax, left, floor, 324, 22, PALE, "memory", edge=GREY)
    if fused:
        box(ax, left, floor - 72, 324, 34, WHITE, edge=BLUE, lw=1.8)
        arrow(ax, (left + 16, floor), (left + 16, floor - 38), ORANGE, lw=2)
        arrow(ax, (left + 308, floor - 38), (left + 308, floor), ORANGE, lw=2)
    for k, name in enumerate(names):
        x = left + step * k
        box(ax, x + 8, floor - 66, 56, 22, BLUE, name)
        if fused and k:
            arrow(ax, (x - 18, floor - 55), (x + 6, floor - 55), lw=1.8)
        if not fused:
            arrow(ax, (x + 22, floor), (x + 22, floor - 43), ORANGE, lw=2)
            arrow(ax, (x + 50, floor - 43), (x + 50, floor), ORANGE, lw=2)


def compiling():
    """Four operations, twice. One by one, each reads its input from memory and writes its output back. In one fused
    kernel there is a single read and a single write. Below, steps over time: the compiled run begins with a long
    stretch of compiling, then its steps are shorter, and after ten of them it has caught up."""
    ax = card(404, "One trip to memory, not four")
    heading(ax, 18, 58, "eager: each operation to memory and back", False)
    trips(ax, 142, fused=False)
    heading(ax, 18, 192, "compiled: one kernel", True)
    trips(ax, 284, fused=True)
    left, eager, fast, compiling_takes = 78, 20, 11, 90
    for y, words in ((331, "eager"), (363, "compiled")):
        text(ax, 18, y + 11, words, ha="left")
    for k in range(13):
        box(ax, left + eager * k, 331, eager, 22, BLUE, radius=3)
    box(ax, left, 363, compiling_takes, 22, ORANGE, "compile")
    for k in range(15):
        box(ax, left + compiling_takes + fast * k, 363, fast, 22, BLUE, radius=3)
    line(ax, (left + 10 * eager,) * 2, (327, 391), RED, 2, dashed=True)
    text(ax, left + 10 * eager, 318, "caught up", color=RED)
    return ax.figure


def state(ax, x, y, half, words):
    """What one GPU holds, under its texts: all of them, or their half number 1 or 2."""
    text(ax, x + 46, y, words, weight="bold")
    box(
        ax, x + (46 * (half - 1) if half else 0), y + 12, 46 if half else 92, 18, GREEN, "half" if half else "all texts"
    )
    top = y + 34
    for height, color, name in ((24, BLUE, "weights"), (24, ORANGE, "gradients"), (44, SKY, "optimizer")):
        box(ax, x, top, 92, height, color, name)
        top += height


def multi_gpu():
    """What each GPU holds. One GPU: all texts, weights, gradients and the optimizer's state. DDP on two: half of the
    texts each, but weights, gradients and state in full on both; the gradients are averaged between them."""
    ax = card(362, "Split the texts, average the gradients")
    heading(ax, 18, 62, "one GPU")
    state(ax, 134, 62, 0, "GPU 1")
    heading(ax, 18, 202, "DDP: two GPUs")
    for k in (0, 1):
        state(ax, 24 + 220 * k, 224, k + 1, f"GPU {k + 1}")
    arrow(ax, (120, 294), (240, 294), RED, "<|-|>", 2)
    text(ax, 180, 307, "average")
    return ax.figure


def debug_apis():
    """Two time lines of a training loop, in which the GPU computes longer than the CPU launches. With loss.item() in
    every step, the CPU waits for each loss, and the GPU idles for a moment until the next step is on its way. With a
    look at every fourth step, the CPU launches ahead, the GPU works without a gap, and is done a little sooner."""
    ax = card(350, "A look at the loss is a wait")
    left, launch, work, gap = 62, 26, 54, 9
    heading(ax, 18, 62, "loss.item() in every step", False)
    heading(ax, 18, 202, "loss.item() in every fourth step", True)
    last = left + 4 * (gap + work)
    for y, each in ((76, True), (216, False)):
        text(ax, 18, y + 15, "CPU", ha="left")
        text(ax, 18, y + 53, "GPU", ha="left")
        for k in range(4):
            begin = left + k * (gap + work if each else launch)
            ready = begin + gap if each else left + gap + k * work
            box(ax, begin, y, launch, 30, ORANGE, str(k + 1))
            box(ax, ready, y + 38, work, 30, BLUE, str(k + 1))
            if each:
                idle(ax, begin + launch, y, gap + work - launch, 30, "wait")
            if each and k:
                arrow(ax, (begin + gap / 2, y + 86), (begin + gap / 2, y + 71), RED)
        if each:
            text(ax, left + gap + work, y + 96, "the GPU idles for a moment", ha="left", color=RED)
        else:
            end = left + gap + 4 * work
            idle(ax, left + 4 * launch, y, end - left - 4 * launch, 30, "wait")
            line(ax, (end, end), (y - 6, y + 76), GREEN, dashed=True)
            line(ax, (last, last), (y - 6, y + 76), RED, dashed=True)
            text(ax, end, y + 88, "a little sooner", ha="center", color=GREEN)
    arrow(ax, (left, 334), (342, 334))
    text(ax, 40, 334, "time", color=GREY)
    return ax.figure


def batch_size():
    """Above, the time of a step over the texts of its batch: a band of constant height, which is paid once for each
    update, and on it a wedge that grows with the texts. At the knee both are equally high. Below, texts per second: a
    curve that rises steeply up to the knee, where it reaches half of the best speed, and then levels off."""
    ax = card(398, "The knee")
    left, right, knee, constant = 30, 330, 75, 24
    heading(ax, 18, 60, "time of a step")
    floor = 210
    ax.fill([left, right, right, left], [floor, floor, floor - constant, floor - constant], color=ORANGE, lw=0)
    ax.fill([left, right, right], [floor - constant] * 2 + [floor - constant * (1 + 300 / knee)], color=BLUE, lw=0)
    text(ax, right - 8, floor - constant / 2, "once per update", ha="right")
    text(ax, right - 8, floor - constant - 22, "for each text", color=WHITE, ha="right")
    text(ax, left + knee + 6, 106, "knee: equal times", ha="left")
    heading(ax, 18, 242, "texts per second")
    base, best = 370, 100
    line(ax, (left, right), (base - best, base - best), dashed=True)
    text(ax, left + 4, base - best - 10, "best speed", color=GREY, ha="left")
    xs = [left + x for x in range(0, 301, 3)]
    line(ax, xs, [base - best * (x - left) / (knee + x - left) for x in xs], BLUE, 2.6)
    for knees, words in ((1, "half of the best speed"), (3, "3/4 of it")):
        x, y = left + knees * knee, base - best * knees / (knees + 1)
        dot(ax, x, y, 5, ORANGE)
        text(ax, x + 8, y + 14, words, ha="left", weight="bold")
    for top, bottom in ((98, floor), (256, base)):
        line(ax, (left + knee,) * 2, (top, bottom), dashed=True)
        arrow(ax, (left, bottom), (right + 8, bottom))
    text(ax, 180, 384, "texts in the batch", color=GREY)
    return ax.figure


def shapes():
    """Three rows of a matrix in memory, which a GPU loads 8 numbers at a time: one line is one load. With 15 numbers in
    a row, the second and the third row begin inside of a load. With one number of padding after each row, every row
    begins with a load."""
    ax = card(258, "A GPU loads 8 numbers at once")
    colors = (BLUE, ORANGE, GREEN)
    for left, padding, right, words in ((14, 0, False, "15 columns"), (194, 1, True, "15 + 1 columns")):
        heading(ax, left, 60, words, right)
        row_size = 15 + padding
        for place in range(3 * row_size):
            row, column = divmod(place, row_size)
            x, y = left + 19 * (place % 8), 76 + 23 * (place // 8)
            if column == 15:
                box(ax, x, y, 18, 21, WHITE, edge=GREY, radius=2, ls=(0, (2.5, 2)))
            else:
                box(ax, x, y, 18, 21, colors[row], str(row + 1) if column == 0 else "", radius=2)
        text(ax, left, 228, ("every row begins a load" if right else "rows begin inside a load"), color=GREY, ha="left")
    return ax.figure


def cudnn_benchmark():
    """The same numbers in two orders of memory: the usual order has plane after plane of red, green and blue;
    channels_last has pixel after pixel, its three channels side by side. Below, cudnn.benchmark over time. With one
    shape there is one search, then fast steps. With a new shape in every step there is a search in every step."""
    ax = card(392, "Two switches for convolutions")
    shades = (("R", RED), ("G", GREEN), ("B", BLUE))
    orders = ((60, "usual order: plane after plane", False), (130, "channels_last: pixel after pixel", True))
    for y, words, last in orders:
        heading(ax, 18, y, words)
        for k in range(12):
            channel, pixel = (k % 3, k // 3) if last else (k // 4, k % 4)
            name, shade = shades[channel]
            box(ax, 18 + 27 * k, y + 14, 27, 26, shade)
            text(ax, 31.5 + 27 * k, y + 27, f"{name}{pixel + 1}", color=WHITE)
    text(ax, 18, 189, "one image of four pixels, in memory", color=GREY, ha="left")
    heading(ax, 18, 232, "cudnn.benchmark, one shape: one search", True)
    box(ax, 18, 247, 70, 28, ORANGE, "search")
    for k in range(8):
        box(ax, 88 + 31.5 * k, 247, 31.5, 28, BLUE, "step")
    heading(ax, 18, 302, "new shapes: a search in every step", False)
    for k in range(3):
        box(ax, 18 + 101.5 * k, 317, 70, 28, ORANGE, "search")
        box(ax, 88 + 101.5 * k, 317, 31.5, 28, BLUE, "step")
    arrow(ax, (18, 358), (340, 358))
    text(ax, 180, 371, "time", color=GREY)
    return ax.figure


def epoch_area(ax, left, floor, wide, high, share):
    """An epoch's time as an area, up from the floor: its text, and hatched its padding."""
    real = wide * share
    box(ax, left, floor - high, real, high, BLUE, radius=2, lw=0)
    if share < 1:
        box(ax, left + real, floor - high, wide - real, high, WHITE, edge="#B4B9C0", hatch="////", radius=2)


def distilbert_150k():
    """The time of an epoch as an area: how many slots it has, wide, times the time of a slot, high. The naive
    epoch is a large rectangle, most of it hatched padding. The usual epoch, in 16 bits and padded to the longest text
    of each batch, is much lower and a little less wide. The efficient epoch is as low, and narrow."""
    ax = card(334, "Time is an area (to scale, for a T4)")
    heading(ax, 36, 62, "naive")
    epoch_area(ax, 36, 190, 190, 112, 0.19)
    arrow(ax, (22, 190), (22, 78), style="<|-|>")
    text(ax, 11, 102, "time of a slot", color=GREY, rotation=90)
    arrow(ax, (36, 202), (226, 202), style="<|-|>")
    text(ax, 131, 216, "slots: text and padding", color=GREY)
    heading(ax, 36, 252, "usual")
    epoch_area(ax, 36, 284, 157, 20, 0.23)
    text(ax, 36, 302, "16 bits, a bit less padding", ha="left")
    heading(ax, 240, 252, "efficient")
    epoch_area(ax, 240, 284, 41, 22, 0.88)
    text(ax, 240, 302, "hardly any", ha="left")
    return ax.figure


def ladder():
    """Seven bars of speed, from naive to compiled. Each rung adds one technique, and each bar is at least
    as long as the one below it. TF32, 16 bits and attention bring most."""
    ax = card(320, "One technique more at each rung")
    names = ("naive", "+ TF32", "+ AdamW", "+ 16 bits", "+ attention", "+ vocabulary", "+ compile")
    seconds = predicted_seconds("16_ladder", "A100 80 GB")
    for k, (name, took) in enumerate(zip(names, seconds, strict=True)):
        y = 254 - 32 * k
        text(ax, 18, y + 12, name, ha="left")
        box(ax, 108, y, 232 * seconds[-1] / took, 24, BLUE if k else GREY)
    text(ax, 108, 296, "speed on an A100 (predicted)", ha="left", color=GREY)
    return ax.figure


def predicted_seconds(lesson, gpu):
    """The predicted time of a step on a GPU, for each variant of a lesson's comparison in its order, as stored."""
    cells = json.loads((LESSONS / f"{lesson}.ipynb").read_text())["cells"]
    shown = (output.get("data", {}) for cell in cells for output in cell.get("outputs", ()))
    stored = next(data[MIME_TYPE] for data in shown if MIME_TYPE in data)
    labels = [measurement["label"] for measurement in stored["measurements"]]
    sizes = ({each["gpu"]: each["seconds"] for each in stored["full_size"][label]} for label in labels)
    return [seconds[gpu][0] for seconds in sizes]


def under_limit(ax, floor, levels, words, goes_on=False):
    """Memory over the moments of a run, as heights, under the dashed line of what the GPU has, until the run fails."""
    heading(ax, 18, floor - 71, words)
    xs = [18 + 324 * k / (len(levels) - 1) for k in range(len(levels))]
    failed = next(k for k, level in enumerate(levels) if level > 46)
    if not goes_on:
        xs, levels = xs[: failed + 1], levels[: failed + 1]
    ax.fill_between(xs, [floor - level for level in levels], floor, color="#CFE6F5", lw=0)
    line(ax, xs, [floor - level for level in levels], BLUE, 2)
    line(ax, (18, 342), (floor - 46, floor - 46), RED, 1.2, dashed=True)
    line(ax, (18, 342), (floor, floor), GREY, 1)
    crossed = [k for k, level in enumerate(levels) if level > 46]
    for k in (k for k in crossed if not {k - 1, k - 2} & {*crossed}):
        text(ax, min(xs[k] + 14, 334), floor - 58, "✗", size=14, color=RED, weight="bold")


def out_of_memory():
    """Memory over time, under the dashed line of what the GPU has, until each run fails. A single step that is too
    large reaches the line in its own forward pass. Over many steps: one long batch is a single spike, a leak is a
    staircase, and logits that pile up climb once validation begins. In fragmented memory, the free holes together are
    large enough for a new tensor, but no single hole is. After an error that keeps the failed step alive, the floor,
    drawn as a line, stays high, and smaller steps fail as well."""
    ax = card(644, "When does it fail?")
    tooth = (0, 12, 24, 12)
    under_limit(ax, 120, [6, 14, 22, 30, 38, 50, 50], "one step: too large")
    spike = [6 + height for height in tooth * 5] + [6, 30, 52, 30] + [6 + h for h in tooth] + [6]
    under_limit(ax, 218, spike, "many steps: one long batch")
    under_limit(ax, 316, [6 + 6 * (k // 4) + tooth[k % 4] for k in range(17)], "many steps: a leak")
    train = [6 + height for height in tooth * 3]
    logits = [*train, *(6 + 4 * (k // 2) + 5 * (k % 2) for k in range(22))]
    under_limit(ax, 414, logits, "validation: logits pile up")
    heading(ax, 18, 446, "fragmentation: holes that are too small")
    for k in range(9):
        box(
            ax,
            18 + 36 * k,
            460,
            36,
            24,
            WHITE if k % 2 else BLUE,
            edge=GREY,
            radius=2,
            **({"ls": (0, (2.5, 2))} if k % 2 else {}),
        )
    box(ax, 148, 492, 64, 24, ORANGE, "new", radius=2)
    text(ax, 230, 504, "✗", size=14, color=RED, weight="bold")
    level = [6, 18, 36, 52, 30]
    again = [30 + height for height in (0, 12, 20, 0, 0, 12, 20, 0)]
    under_limit(ax, 602, [*level, *again], "after an error: small steps fail, too", goes_on=True)
    line(ax, (18 + 324 * 4 / 12, 342), (602 - 30, 602 - 30), ORANGE, 2)
    text(ax, 246, 587, "tensors kept by the error", color=INK)
    text(ax, 180, 622, "dashes: what the GPU has", color=GREY)
    return ax.figure


def logits(ax, y, filled, color):
    """Tables as large as the logits, each a column of slices, of which the first `filled` are there."""
    for copy, words in enumerate(("log_softmax", "its gradient", "logits' gradient")):
        x = 46 + 104 * copy
        box(ax, x, y, 92, 96, WHITE, edge=GREY, radius=2, ls=(0, (2.5, 2)))
        for part in range(filled):
            box(ax, x, y + 12 * part, 92, 12, color, radius=1, lw=0.6)
        text(ax, x + 46, y + 110, words)


def large_vocabulary():
    """The logits of a batch are a table with a row for each token and a column for each word of the vocabulary. The
    plain loss holds three such tables at its peak, when the backward pass begins: the result of log_softmax, its
    gradient, and the gradient of the logits. In chunks, only a slice of each table is there at a time, and the next
    chunk takes its place."""
    ax = card(392, "Never hold all logits at once")
    heading(ax, 18, 62, "plain: three tables of all tokens", False)
    arrow(ax, (28, 80), (28, 176), style="<|-|>")
    text(ax, 14, 128, "tokens", color=GREY, rotation=90)
    arrow(ax, (46, 206), (138, 206), style="<|-|>")
    text(ax, 92, 220, "vocabulary", color=GREY)
    logits(ax, 80, 8, ORANGE)
    heading(ax, 18, 246, "in chunks: some tokens at a time", True)
    logits(ax, 264, 1, BLUE)
    arrow(ax, (28, 268), (28, 358), BLUE)
    return ax.figure


def away():
    """Three ways to treat a result that the backward pass needs. Keep it in the GPU's memory: it takes memory, and no
    time. Recompute it: it takes no memory until the backward pass, and the time of the forward pass again. Send it away
    to the CPU's memory over PCI Express, and fetch it later: no memory of the GPU, but time on a slow bus."""
    ax = card(352, "A result waits for the backward pass")
    for x, words in ((96, "forward"), (250, "backward")):
        text(ax, x, 58, words, color=GREY)
    for y, words in ((96, "keep"), (168, "recompute"), (252, "send away")):
        text(ax, 14, y, words, ha="left", weight="bold", size=10)
        box(ax, 88, y - 13, 26, 26, BLUE, radius=3)
        box(ax, 316, y - 13, 26, 26, BLUE, radius=3)
    box(ax, 116, 84, 198, 24, SKY, "memory of the GPU")
    box(ax, 116, 156, 118, 24, WHITE, "nothing", edge=PALE)
    box(ax, 236, 156, 78, 24, ORANGE, "time")
    text(ax, 14, 252 + 17, "over PCIe", ha="left", color=GREY, size=10)
    box(ax, 150, 288, 130, 26, GREEN, "memory of the CPU")
    arrow(ax, (108, 268), (150, 296), ORANGE, lw=2.4)
    arrow(ax, (280, 296), (322, 268), ORANGE, lw=2.4)
    text(ax, 215, 252, "slow bus: time, twice")
    text(ax, 180, 334, "blue: one result", color=GREY)
    return ax.figure


def table_of_2022():
    """What of a published number holds, as a table of ticks and crosses. Peak memory: on another GPU yes, with newer
    code no. The time lost by checkpointing: yes and yes. The time won by 16 bits: no and no."""
    ax = card(286, "Does a published number hold?")
    for x, words in ((226, ("another", "GPU")), (308, ("newer", "code"))):
        text(ax, x, 62, words[0], weight="bold")
        text(ax, x, 78, words[1], weight="bold")
    rows = (
        ("peak memory", "of a training step", True, False),
        ("time lost", "by less memory", True, True),
        ("time won", "by 16 bits", False, False),
    )
    for k, (name, example, *answers) in enumerate(rows):
        y = 100 + 60 * k
        line(ax, (18, 342), (y, y), PALE)
        text(ax, 18, y + 21, name, ha="left", weight="bold")
        text(ax, 18, y + 40, example, ha="left", color=GREY)
        for x, holds in zip((226, 308), answers, strict=True):
            color = GREEN if holds else RED
            text(ax, x, y + 30, "✓" if holds else "✗", size=22, color=color, weight="bold")
    return ax.figure


def lora():
    """Above, a layer: the input goes through the large frozen matrix W, and beside it through two thin matrices A and
    B, which are trained. Both outputs are added. Below, memory at its peak by owner as stacked bars. Full fine-tuning:
    weights, gradients, optimizer state, few activations. LoRA: half the bytes of weights, thin slices of gradients and
    state, more activations. QLoRA: a short bar of weights, the same thin slices and activations."""
    ax = card(446, "Freeze the large, train the thin")
    text(ax, 30, 136, "x", size=14, weight="bold")
    for y in (104, 192):
        arrow(ax, (42, 136), (86, y), lw=2)
    box(ax, 96, 60, 88, 88, BLUE, "W")
    text(ax, 192, 74, "frozen", color=GREY, ha="left")
    box(ax, 96, 181, 88, 22, ORANGE, "A")
    arrow(ax, (188, 192), (206, 192), lw=2)
    box(ax, 212, 148, 22, 88, ORANGE, "B")
    text(ax, 140, 218, "trained", color=GREY)
    text(ax, 288, 136, "+", size=20, weight="bold")
    arrow(ax, (186, 112), (276, 134), lw=2)
    arrow(ax, (238, 186), (278, 146), lw=2)
    arrow(ax, (300, 136), (338, 136), lw=2)
    line(ax, (14, 346), (248, 248), PALE)
    heading(ax, 14, 266, "memory at the peak")
    kinds = (BLUE, "weights"), (SKY, "gradients"), (GREY, "optimizer state"), (GREEN, "activations")
    rows = {"full": (66, 66, 132, 7), "LoRA": (35, 2, 3, 23), "QLoRA": (12, 2, 3, 25)}
    for row, (name, parts) in enumerate(rows.items()):
        x, y = 62, 280 + 34 * row
        text(ax, 14, y + 13, name, ha="left")
        for (color, _), wide in zip(kinds, parts, strict=True):
            box(ax, x, y, wide, 26, color, radius=3, lw=0.8 if wide > 10 else 0.3)
            x += wide
    for x, y, (color, words) in zip((18, 130, 18, 180), (390, 390, 414, 414), kinds, strict=True):
        box(ax, x, y, 16, 16, color)
        text(ax, x + 22, y + 8, words, ha="left")
    return ax.figure


def without(ax, y, words, parts, whole=None):
    """One step as a bar of its parts; what it lacks of the whole is marked as saved."""
    heading(ax, 18, y - 16, words)
    x = 18
    for name, wide, color in parts:
        box(ax, x, y, wide, 26, color, name)
        x += wide
    if whole:
        line(ax, (whole, whole), (y - 2, y + 28), dashed=True)
        arrow(ax, (x + 2, y + 13), (whole - 1, y + 13), GREEN, "<|-|>", 2)
        text(ax, whole, y - 16, "saved at most", color=GREEN, ha="right", weight="bold")


def doctor():
    """One training step as a bar of three parts: loading, waiting, computing. Below it the same step three times, each
    time with one part left out or shorter. What is missing at the right end is what that change saves at most."""
    ax = card(312, "Leave one thing out, and see")
    load, wait, compute = ("loading", 76, PALE), ("waits", 48, ORANGE), ("computing", 200, BLUE)
    without(ax, 70, "the step as it is", (load, wait, compute))
    without(ax, 134, "the same batch again", (wait, compute), 342)
    without(ax, 198, "nothing is read from the GPU", (load, compute), 342)
    without(ax, 262, "in 16 bits", (load, wait, ("", 70, BLUE)), 342)
    return ax.figure


def profile():
    """Two rows over time. Above, the CPU launches three operations, then waits for a value. Below, the GPU runs them,
    and is idle until the CPU launches again. Under it the same step without the wait: the GPU has no gap, and the step
    ends sooner."""
    ax = card(316, "Find the gap, then look above it")
    launch, kernel, left = 22, 38, 62
    for y in (76, 208):
        text(ax, 18, y + 13, "CPU", ha="left")
        text(ax, 18, y + 43, "GPU", ha="left")
    heading(ax, 18, 60, "a value is read in the step", False)
    free = left + launch + 3 * kernel  # when the value is there
    for begin in (left, free):
        for k in range(3):
            box(ax, begin + launch * k, 76, launch, 26, ORANGE)
            box(ax, begin + launch + kernel * k, 106, kernel, 26, BLUE)
    box(ax, left + 3 * launch, 76, free - left - 3 * launch, 26, WHITE, "waits", edge=GREY)
    box(ax, free, 107, launch, 24, WHITE, edge="#B4B9C0", hatch="////")
    text(ax, free + launch / 2, 146, "gap")
    heading(ax, 18, 192, "the value stays on the GPU", True)
    for k in range(6):
        box(ax, left + launch * k, 208, launch, 26, ORANGE)
        box(ax, left + launch + kernel * k, 238, kernel, 26, BLUE)
    arrow(ax, (62, 280), (346, 280))
    text(ax, 204, 296, "time", color=GREY)
    return ax.figure


def roofline():
    """The rate that an operation can reach, over its FLOPs per byte. Up to the balance it rises along a slope: bytes
    decide, and additions and norms lie there. From the balance on it is flat: FLOPs decide, and large products lie just
    below this roof. Under it, the time of a step in four parts: the limit, slow products, bytes, and waits for the
    CPU."""
    ax = card(356, "Two limits, and a step")
    left, balance, right, roof, floor = 30, 190, 338, 78, 214
    ax.fill_between((left, balance), (floor - 6, roof), floor, color="#FBEBCB", lw=0)
    ax.fill_between((balance, right), (roof, roof), floor, color="#CFE6F5", lw=0)
    line(ax, (left, balance, right), (floor - 6, roof, roof), INK, 2.4)
    line(ax, (balance, balance), (roof, floor), dashed=True)
    arrow(ax, (left, floor), (right + 8, floor))
    arrow(ax, (left, floor), (left, 56))
    text(ax, left + 8, 60, "FLOP/s reached", ha="left", color=GREY)
    text(ax, balance, floor + 14, "FLOPs per byte", color=GREY)
    text(ax, balance, 62, "balance")
    text(ax, 136, floor - 14, "bytes decide")
    text(ax, 264, floor - 14, "FLOPs decide")
    for x, y, color, words in ((60, 192, ORANGE, "add"), (104, 160, ORANGE, "norm")):
        dot(ax, x, y, 5, color)
        text(ax, x + 10, y, words, ha="left")
    dot(ax, 286, 90, 5, BLUE)
    text(ax, 286, 108, "large product")
    heading(ax, 18, 258, "the time of a step")
    x = 18
    for wide, color, words in ((88, GREEN, "limit"), (56, BLUE, "slow"), (120, ORANGE, "bytes"), (60, PALE, "waits")):
        box(ax, x, 272, wide, 30, color, words)
        x += wide
    text(ax, 18, 322, "MFU = the limit's share of the whole", ha="left")
    return ax.figure


def course():
    """The road of every claim: predict the gain, prove that the technique is active, prove that the result is the same,
    measure both in turns; then the verdict against the baseline: faster, slower, same or inconclusive."""
    ax = card(350, "Every claim, put to the test")
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
    box(ax, 18, 190, 324, 144, "#F6F7F9", edge=PALE, radius=10)
    line(ax, (120, 120), (202, 306), dashed=True)
    text(ax, 120, 319, "baseline", color=GREY)
    verdicts = (216, 66, 22, GREEN, "faster"), (241, 174, 22, RED, "slower")
    for y, x, wide, color, words in (*verdicts, (266, 122, 7, BLUE, "same"), (291, 134, 46, GREY, "inconclusive")):
        line(ax, (x - wide, x + wide), (y, y), color, 3)
        dot(ax, x, y, 5.5, color)
        text(ax, 226, y, words, ha="left", weight="bold")
    return ax.figure


def main(folder=Path(__file__).parent):
    """Write every drawing into a folder: the same bytes every time."""
    for drawing in (
        measuring,
        rounds,
        anatomy,
        dataloader,
        pinned_memory,
        zero_grad,
        gradient_accumulation,
        gradient_checkpointing,
        autocast,
        mixed_precision,
        no_grad_validation,
        debug_apis,
        lr_schedules,
        padding_and_packing,
        optimizers,
        pruning,
        inference,
        compiling,
        multi_gpu,
        batch_size,
        shapes,
        cudnn_benchmark,
        ladder,
        distilbert_150k,
        out_of_memory,
        table_of_2022,
        lora,
        doctor,
        profile,
        roofline,
        large_vocabulary,
        away,
        course,
    ):
        about = {"Title": " ".join(drawing.__doc__.split()), "Date": None, "Creator": None}
        with matplotlib.style.context(["default", SETTINGS]):
            drawing().savefig(Path(folder) / f"{drawing.__name__}.svg", metadata=about)


if __name__ == "__main__":
    main()
