"""Tests of the loops in a step that call the same again and again."""

import pytest

from effgpu.attaching.sites import Site
from effgpu.diagnosing.loops import _count_rounds, find_loop
from effgpu.predicting.kinds import OTHER, Kernel
from effgpu.predicting.timeline import BACKWARD, KERNEL, Event

LOOPS = """
for x in loader:
    for row in x:
        loss = loss + row.softmax(0).log()
    for layer in layers:
        x = layer(x)
    for number in range(9):
        x = layers[number](x)
    heads = [head.forward(x) for head in heads]
    losses = [model(row) for row in x]
    for part in x.chunk(9):
        model(part).backward()
    x = model(x)
"""


@pytest.mark.parametrize(
    "done, rounds",
    [
        ("ab" * 9, 9),
        ("x" + "ab" * 9, 10),
        ("cab" + "ab" * 8, 10),
        ("abcdefgh", 2),
        ("abababab" + "cdefghijkl", 2),
    ],
)
def test_rounds_are_counted_where_half_of_what_is_done_repeats(done, rounds):
    assert _count_rounds(done) == rounds


@pytest.mark.parametrize("line", range(1, len(LOOPS.splitlines())))
def test_a_loop_is_found_by_its_line_unless_it_trains_or_calls_what_it_goes_through(line, tmp_path):
    (tmp_path / "train.py").write_text(LOOPS)
    site = Site(str(tmp_path / "train.py"), line + 1)
    kernels = [(Kernel(name, OTHER, "fp32", 0, 1),) for name in ("softmax", "log")]
    once = [Event(KERNEL, site, each, inner=site._replace(inside="lib.py:1")) for each in kernels]
    loop = find_loop(once * 16)
    assert (loop is not None) == ("row" in LOOPS.splitlines()[line]), LOOPS.splitlines()[line]
    assert loop is None or (loop.rounds, loop.share) == (16, 1.0)
    assert find_loop(once * 4) is None, "a few rounds are no loop over samples"
    other = [Event(KERNEL, None, kernels[0])] * 40
    assert find_loop(once * 16 + other) is None, "most calls are elsewhere"
    assert find_loop([event._replace(phase=BACKWARD) for event in once * 16]) is None
