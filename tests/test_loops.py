"""Tests of the loops in a step that call the same again and again."""

import pytest

from effgpu.attaching.sites import Site
from effgpu.diagnosing.lists import in_lists
from effgpu.diagnosing.loops import _count_rounds, find_loop, find_updates
from effgpu.predicting.gpus import find_gpu
from effgpu.predicting.kinds import OTHER, Kernel
from effgpu.predicting.predict import predict
from effgpu.predicting.timeline import BACKWARD, KERNEL, UPDATE, Event, Timeline

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
    branches = [event for number in range(48) for event in once[: 1 + (number**2 % 7 < 4)]]
    of_branches = find_loop(branches)
    assert (of_branches is not None) == (loop is not None), "what a round does depends on its sample"
    assert of_branches is None or of_branches.rounds == 48
    other = [Event(KERNEL, None, kernels[0])] * 40
    assert find_loop(once * 16 + other) is None, "most calls are elsewhere"
    assert find_loop([event._replace(phase=BACKWARD) for event in once * 16]) is None


STEP = """
import copy, torch
from torch import nn

def compiled(function):
    return torch.compile(function)

def variant():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(LAYERS)))
    ema, batch = copy.deepcopy(model).requires_grad_(False), torch.ones(8, 64)
    weights, averages = list(model.parameters()), list(ema.parameters())
    kept, buffers = [weight.detach().clone() for weight in weights], list(zip(ema.buffers(), model.buffers()))
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(weights, foreach=False)

    def step():
        model(batch).square().mean().backward()
        {}
        optimizer.step()
        optimizer.zero_grad()

    return step
"""
PLAIN = "for p, q in zip(weights, averages): q.data.mul_(0.9).add_(p.data, alpha=0.1)"
LERP = "torch._foreach_lerp_(averages, weights, 1 - decay)"
IN_LISTS = "torch._foreach_lerp_(averages, [weight.detach() for weight in weights], 0.1)"


def walk(line, path, layers=6):
    """The events of a step with this line in it, whose code lies in a file."""
    path.write_text(STEP.replace("{}", line.replace("\n", "\n        ")).replace("LAYERS", str(layers)))
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return predict(names["variant"], "T4").events


def seconds(events):
    return Timeline(tuple(events), find_gpu("T4"), launch=20e-6).seconds()


@pytest.mark.parametrize(
    "line, calls, instead, lists",
    [
        (PLAIN, 2, [LERP], "torch._foreach_lerp_(averages, held, 0.1)"),
        ("for p, q in zip(weights, averages):\n    q.data.copy_(q.data * 0.9 + p.data * 0.1)", 4, [LERP], IN_LISTS),
        ("for n, p in enumerate(weights): kept[n] = 0.9 * kept[n] + 0.1 * p.detach()", 3, [LERP], IN_LISTS),
        (
            "for p in weights: p.data.clamp_(-1, 1)",
            1,
            ["torch._foreach_clamp_min_", "torch._foreach_clamp_max_"],
            "torch._foreach_clamp_min_(held, -1); torch._foreach_clamp_max_(held, 1)",
        ),
        ("for p in weights: p.grad /= 4", 1, ["torch._foreach_div_"], "torch._foreach_div_(grads, 4)"),
        (
            "for p in weights: p.grad += 0.1 * p.data",
            2,
            ["torch._foreach_add_(..., alpha=...)"],
            "torch._foreach_add_(grads, held, alpha=0.1)",
        ),
        (
            "norm = sum(p.grad.norm() ** 2 for p in weights)",
            3,
            ["torch.nn.utils.clip_grad_norm_, which gives the norm, too"],
            "torch.stack(torch._foreach_norm(grads)).norm()",
        ),
    ],
)
def test_lists_save_about_what_is_promised_of_a_loop_over_weights_and_never_more(line, calls, instead, lists, tmp_path):
    before = walk(line, tmp_path / "train.py")
    (found,) = find_updates(before)
    assert (found.calls, found.rounds, found.instead()) == (24 * calls, 24, instead)
    assert found.site.line == 18 + line.count("\n"), "the loop's own"
    grads = "grads = [weight.grad for weight in weights]; " * ("grads" in lists)
    after = walk(grads + lists.replace("held", "kept"), tmp_path / "train.py")
    saved = seconds(before) - seconds(after)
    promised = seconds(before) - seconds(in_lists(before, (found,)))
    assert 0.75 * promised <= saved <= promised * 1.000001


@pytest.mark.parametrize(
    "line",
    [
        "",
        IN_LISTS,
        "torch.nn.utils.clip_grad_norm_(weights, 1.0)",
        "for each in (weights[:12], weights[12:]): torch.nn.utils.clip_grad_norm_(each, 1.0)",
        "for _ in range(8): average.update_parameters(model)",
        "for _ in range(2): ema.load_state_dict(model.state_dict())",
        "norm = sum(p.grad.norm().item() for p in weights)",
        "penalty = sum(p.square().sum() for p in weights)",
        "x = batch\nfor layer in ema: x = layer(x)",
        "with torch.no_grad():\n    x = batch\n    for p in kept[::4]: x = x @ p",
        "for row in batch: row.mul_(2)",
        "for p, q in zip(weights[:3], averages): q.data.lerp_(p.data, 0.1)",
        "compiled(lambda: [q.data.lerp_(p.data, 0.1) for p, q in zip(weights, averages)])()",
    ],
)
def test_no_loop_is_named_that_lists_would_not_help(line, tmp_path):
    assert find_updates(walk(line, tmp_path / "train.py")) == ()


def test_two_products_with_weights_are_one_round(tmp_path):
    line = "for n, p in enumerate(weights): kept[n] = p.data * 0.1 + averages[n].data * 0.9"
    (found,) = find_updates(walk(line, tmp_path / "train.py"))
    assert (found.calls, found.rounds, found.instead()) == (3 * 24, 24, [LERP])
    assert find_updates(walk(line, tmp_path / "train.py", layers=1)) == (), "eight products in four rounds"


def test_a_loop_over_weights_is_no_loop_of_the_forward_pass(tmp_path):
    events = walk(PLAIN, tmp_path / "train.py")
    assert find_loop(events) is None and any(event.lasting for event in events)
    assert not any(event.lasting for event in events if event.phase in (BACKWARD, UPDATE))
    assert find_updates(events)[0].site.place == "train.py:18"


def test_buffers_of_another_kind_are_copied_in_a_list_of_their_own(tmp_path):
    line = """for q, p in zip(ema.state_dict().values(), model.state_dict().values()):
    if q.is_floating_point():
        q.mul_(0.9)
        q.add_(0.1 * p)
    else:
        q.copy_(p)"""
    (found,) = find_updates(walk(line, tmp_path / "train.py"))
    assert found.instead() == [LERP, "torch._foreach_copy_"] and found.rounds == 36
