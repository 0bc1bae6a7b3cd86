"""Tests of `effgpu doctor` for scripts as they are: predicted, and measured in turns on a simulated GPU."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import patients
import psutil
import pynvml
import pytest
import torch
from test_attaching import forked, here, loop, server  # noqa: F401  fixtures
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import effgpu
from effgpu.__main__ import main
from effgpu.attaching.child import Again
from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import Marks
from effgpu.diagnosing import causes, turns
from effgpu.diagnosing.causes import ATTENTION, COPYING, LOADING, OPTIMIZER, PRECISION, UNTRAINED, VALIDATION, WAITS
from effgpu.diagnosing.loaders import Loading
from effgpu.diagnosing.scripts import measuring
from effgpu.measuring import power
from effgpu.predicting.gpus import find_gpu
from effgpu.units import GiB

T4 = find_gpu("T4")


@pytest.fixture
def run(here, forked, capfd):  # noqa: F811
    """A function that diagnoses a script for a T4: gives the exit code, the JSON and what was printed as errors."""

    def run(script, *options):
        (here / "train.py").write_text(textwrap.dedent(script))
        code = main(["doctor", "--gpu", "T4", "--json", "-", *options, "--", "python", "train.py"])
        out, err = capfd.readouterr()
        return code, json.loads(out), err

    return run


GAN = """
import contextlib, sys, torch
from torch import nn
maker, critic = (nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda() for _ in "ab")
ours, theirs = (torch.optim.Adam(network.parameters()) for network in (maker, critic))
half = contextlib.nullcontext() if len(sys.argv) == 1 else torch.autocast("cuda", torch.float16)
while True:
    with half:
        made = maker(torch.rand(2048, 1024, device="cuda"))
        theirs_loss = critic(made.detach()).mean()
    theirs.zero_grad()
    theirs_loss.backward()
    theirs.step()
    with half:
        our_loss = critic(made).mean()
    ours.zero_grad()
    our_loss.backward()
    ours.step()
"""


def test_the_time_beside_the_memory_is_that_of_the_step_which_predict_counts(run, capfd):
    """Steps follow, such as one in 16 bits: they are no part of it."""
    _, told, _ = run(GAN)
    assert main(["predict", "--gpu", "T4", "--json", "-", "--", "python", "train.py"]) == 0
    assert told["memory"]["gpus"] == json.loads(capfd.readouterr().out)["gpus"]


def test_16_bits_save_as_much_of_a_step_that_two_networks_share_as_writing_them_down_does(run):
    (_, told, _), (_, after, _) = run(GAN), run(GAN.replace("len(sys.argv) == 1", "False"))
    (precision,) = (each for each in told["findings"] if each["name"] == PRECISION)
    saved = told["seconds"] - after["seconds"]
    assert precision["seconds"] == pytest.approx(saved, rel=0.005)
    assert "validation" not in [each["name"] for each in told["findings"]], "the next step uses what this one built"


EACH_FOURTH = """
import torch
networks = [torch.nn.Linear(1024, 1024).cuda() for _ in "ab"]
ours, theirs = (torch.optim.Adam(network.parameters()) for network in networks)
for number in range(40):
    for network, optimizer in list(zip(networks, (ours, theirs)))[: 2 if number in (0, 1, 2) else 1]:
        network(torch.randn(64, 1024).cuda()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_precision_saves_is_not_known_where_no_step_in_16_bits_does_the_same_work(run):
    code, told, errors = run(EACH_FOURTH)
    assert code == 0, errors
    assert any(note.endswith("what precision saves is not known") for note in told["notes"])
    assert PRECISION not in [
        each["name"] for kind in ("findings", "perhaps", "examined") for each in told.get(kind, [])
    ]


IN_FULL = """
import torch
model = torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    kept = torch.zeros(32, 8, device="cuda")
    kept[torch.arange(16, device="cuda")] = model(torch.ones(16, 64, device="cuda"))
    kept.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_fails_in_16_bits_alone_is_no_failure(run):
    code, told, errors = run(IN_FULL)
    assert code == 0 and PRECISION not in [each["name"] for each in told["examined"]], errors
    (note,) = (note for note in told["notes"] if "in 16 bits the step fails" in note)
    assert "index_put_" in note and note.endswith("train.py:7)")
    code, told, errors = run(IN_FULL.replace("kept.sum()", "torch.ones(3).cuda() @ kept"))
    assert code == 1 and "16 bits" not in str(told) + errors, "an error of the script's own"


HEAD = """
import torch
body = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
head = torch.nn.Linear(1024, 8).cuda()
optimizer = torch.optim.SGD(head.parameters(), 0.1)
for number in range(40):
    head(body(torch.ones(2048, 1024, device="cuda"))).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_gradients_that_no_optimizer_uses_save_what_freezing_does(run):
    frozen = HEAD.replace("optimizer =", "body.requires_grad_(False)\noptimizer =")
    (code, told, errors), (_, cured, _) = run(HEAD), run(frozen)
    assert code == 0, errors
    (found,) = (each for each in told["findings"] if each["name"] == UNTRAINED)
    (precision,) = (each for each in cured["findings"] if each["name"] == PRECISION)
    assert found["note"].startswith("8 weights get gradients")
    assert found["seconds"] == pytest.approx(told["seconds"] - cured["seconds"], rel=0.02)
    left = cured["seconds"] - precision["seconds"]
    assert told["together"]["seconds"] == pytest.approx(told["seconds"] - left, rel=0.02), "frozen, and in 16 bits"
    assert UNTRAINED not in [each["name"] for each in cured["examined"]]


@pytest.mark.parametrize(
    "more",
    [
        "    with torch.no_grad():\n        [weight.sub_(weight.grad) for weight in body.parameters()]",
        "    other = other if number else torch.optim.SGD(body.parameters(), 0.1)",  # for each tenth step
        "    assert body[0].weight.grad is not None\n    body.zero_grad()",  # fails where it is frozen
    ],
)
def test_gradients_that_a_script_uses_otherwise_are_no_finding(more, run):
    code, told, errors = run(f"{HEAD}{more}\n")
    assert code == 0 and UNTRAINED not in [each["name"] for each in told["examined"]], errors


VALIDATED = """
import torch
inputs = torch.randn(2048, 4096, device="cuda")
model = torch.nn.Sequential(torch.nn.Linear(4096, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(40):
    model(inputs).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    checked = model(inputs)
"""
LINEAR = """
import torch
inputs = torch.randn(2048, 4096, device="cuda")
model = torch.nn.Linear(4096, 8).cuda()  # keeps its inputs alone
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(40):
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_line_may_keep_nothing_but_what_was_there(run):
    code, told, errors = run(LINEAR)
    assert code == 0 and VALIDATION not in [each["name"] for each in told["findings"]], errors


def test_what_a_graph_keeps_is_what_would_be_gone_without_it(run):
    _, told, errors = run(VALIDATED)
    (found,) = (each for each in told["findings"] if each["name"] == VALIDATION)
    assert found["note"].startswith("8.00 MiB are kept here for a backward pass"), (
        errors
    )  # of ReLU; the inputs are older


# Texts that are padded to the longest of their batch: the step in 16 bits, and the one before it, are of others.
VARIED = """
import torch
from torch import nn
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters())
for number in range(40):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.rand(8192, 1024, device="cuda")).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_step_of_another_size_tells_what_16_bits_save_in_the_one_that_counts(run):
    (_, told, errors), (_, alike, _) = run(VARIED.replace("8192", "8192 - 512 * (number > 2)")), run(VARIED)
    found, same = (next(each for each in one["examined"] if each["name"] == PRECISION) for one in (told, alike))
    assert told["seconds"] == alike["seconds"], errors
    assert found["seconds"] == pytest.approx(same["seconds"], abs=0.01 * told["seconds"])


TWO = """
import torch
from torch import nn
maker, critic = (nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda() for _ in "ab")
ours, theirs = (torch.optim.Adam(network.parameters()) for network in (maker, critic))
for number in range(40):
    made = maker(torch.rand(2048, 1024, device="cuda"))
    theirs.zero_grad()
    critic(made).mean().backward(retain_graph=True)  # not detached
    theirs.step()
    ours.zero_grad()
    critic(made).square().mean().backward()
    ours.step()
"""
CURED = (
    TWO.replace("critic(made).mean().backward(retain_graph=True)", "critic(made.detach()).mean().backward()")
    .replace("    ours.zero_grad()", "    ours.zero_grad()\n    critic.requires_grad_(False)")
    .replace("    ours.step()", "    ours.step()\n    critic.requires_grad_(True)")
)


AHEAD = "critic(maker(torch.rand(8, 1024, device='cuda'))).mean().backward()\nours.step()\n"  # whose steps then count


@pytest.mark.parametrize("first", ["theirs", "ours"])  # whose gradients are dropped in the same step, or in the next
def test_gradients_that_are_dropped_save_what_leaving_them_out_does(first, run):
    turned = lambda script: script if first == "theirs" else script.replace("for number", f"{AHEAD}for number")
    (code, told, errors), (_, cured, _) = run(turned(TWO)), run(turned(CURED))
    assert code == 0, errors
    (found,) = (each for each in told["findings"] if each["name"] == UNTRAINED)
    assert found["note"].startswith("8 gradients are dropped before an optimizer uses them: train.py:")
    assert found["seconds"] == pytest.approx(told["seconds"] - cured["seconds"], rel=0.02)
    assert "not to be trained" in found["advice"] and "no optimizer has" not in found["advice"]
    assert PRECISION in [each["name"] for each in told["findings"]]
    assert UNTRAINED not in [each["name"] for each in cured["examined"]]


@pytest.mark.parametrize("script", [HEAD, TWO])
@pytest.mark.parametrize("steps", [6, 7, 8])
def test_a_script_may_end_before_steps_without_unused_gradients_or_in_16_bits(script, steps, run):
    code, told, errors = run(script.replace("40", str(steps)))
    ended = any("precision saves was not looked at, as the script ended" in note for note in told["notes"])
    assert code == 0 and ended == (PRECISION not in [each["name"] for each in told["examined"]]) == (steps < 8), errors


@pytest.mark.parametrize(
    "use",
    [
        "kept = [weight.grad for weight in critic.parameters()]",
        "for weight, given in zip(other.parameters(), critic.parameters()): weight.grad = given.grad",
        "print(*[weight.grad.add(1).mean() for weight in critic.parameters()])",
        "third.step()",
    ],
)
def test_gradients_that_somebody_holds_or_uses_are_not_dropped(use, run):
    more = "import copy\nother = copy.deepcopy(critic)\nthird = torch.optim.SGD(critic.parameters(), 1e-3)\n"
    used = TWO.replace("critic(made).mean().backward(retain_graph=True)", "critic(made.detach()).mean().backward()")
    code, told, errors = run(
        used.replace("for number", f"{more}for number").replace("    ours.step()", f"    {use}\n    ours.step()")
    )
    assert code == 0 and UNTRAINED not in [each["name"] for each in told["examined"]], errors


ENDLESS = """

open("built", "a").write("once ")
step = variant()
while True:
    for batch in loader:
        step(batch)
"""


@pytest.mark.parametrize(
    "disease",
    ["slow loader", "item in the loop"]
    + [
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("unpinned copies", "padding to 512", "fp32 on tensor cores", "validation with grad")
    ],
)
def test_of_an_unchanged_script_it_names_the_disease_first_and_the_line(disease, run, here):  # noqa: F811
    code, told, errors = run(patients.script(disease) + ENDLESS)
    assert code == 0, errors
    first = told["findings"][0]
    assert first["name"] == patients.SICK[disease][0], told
    assert Path("built").read_text() == "once ", "the script is built once"
    if disease in ("item in the loop", "validation with grad"):
        line = Path("train.py").read_text().splitlines()[first["lines"][0]["line"] - 1]
        assert line not in patients.HEALTHY.splitlines()
        assert disease == "item in the loop" or first["share"] < 0.7, "the step's own passes are no part of it"
    if disease == "slow loader":
        assert first["seconds"] > 0.018 and "num_workers=0" in first["note"], "more on a busy machine"


IN_MEMORY = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(8192, 256), torch.randint(10, (8192,)))
loader = DataLoader(data, 64, shuffle=True)
model = torch.nn.Linear(256, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for inputs, labels in loader:
    torch.nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_no_workers_are_advised_for_data_in_memory_and_the_advice_helps(run, here):  # noqa: F811
    code, told, errors = run(IN_MEMORY)
    assert code == 0, errors
    (loading,) = (each for each in told["findings"] if each["name"] == "data loading")
    assert "a worker takes" in loading["note"], told
    assert "num_workers" not in loading["advice"] and "torch.randperm(len(tensors)).split(size)" in loading["advice"]
    cured = IN_MEMORY.replace("in loader", "in map(data.__getitem__, torch.randperm(len(data)).split(64))")
    _, better, _ = run(cured)
    assert better["seconds"] < told["seconds"] - 0.8 * loading["low"]
    assert any("what the script takes to make its batches was not looked at" in note for note in better["notes"])


def test_how_long_data_without_values_load_is_not_known(run, here):  # noqa: F811
    on_gpu = IN_MEMORY.replace("torch.randn(8192, 256)", "torch.randn(8192, 256).cuda().cpu()")
    code, told, errors = run(on_gpu)
    assert code == 0 and "data loading" not in [each["name"] for each in told["examined"]], errors
    assert any("what loading takes is not known" in note and "came from there" in note for note in told["notes"])


COPIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4096, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(9):
    for (rows,) in DataLoader(TensorDataset(torch.ones(256, 4096)), 32, pin_memory=True):
        model(COPIED).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("copied", "advice", "note"),
    [
        ("torch.stack([row.cuda() for row in rows])", "one copy of the whole batch", "pinned memory, 32 copies"),
        (
            "(rows * 2).to('cuda', non_blocking=True)",
            "what the script makes of the loader's",
            "pageable memory, 1 copy",
        ),
    ],
)
def test_how_a_batch_is_copied_decides_the_advice(copied, advice, note, run):
    code, told, errors = run(COPIES.replace("COPIED", copied))
    (copies,) = (each for each in told["examined"] if each["name"] == COPYING)
    assert code == 0 and copies["advice"].startswith(advice) and copies["note"] == f"512 KiB from {note}", errors


@pytest.mark.parametrize(
    ("more", "note"), [(", non_blocking=True", "512 KiB from pinned memory"), ("", "256 KiB from pageable memory")]
)
def test_a_batch_that_becomes_another_dtype_is_sent_as_it_is_unless_the_cpu_waits(more, note, run):
    code, told, errors = run(COPIES.replace("COPIED", f"rows.to('cuda', torch.bfloat16{more}).float()"))
    (copies,) = (each for each in told["examined"] if each["name"] == COPYING)
    assert code == 0 and copies["note"] == f"{note}, 1 copy", errors


def test_the_line_that_copies_most_comes_first_and_not_the_one_that_copies_most_often(run):
    small = "        small = sum(torch.ones(1).cuda() for _ in range(9))\n        model(small * rows.cuda())"
    code, told, errors = run(COPIES.replace("        model(COPIED)", small))
    (copies,) = (each for each in told["examined"] if each["name"] == COPYING)
    assert code == 0 and [line["line"] for line in copies["lines"]] == [9, 8], errors


@pytest.mark.parametrize("more, waits", [("", True), (", non_blocking=True", False)])
def test_a_copy_into_memory_of_the_cpu_is_a_hidden_wait_unless_it_asks_for_none(more, waits, run):
    kept = COPIES.replace("for epoch", "kept = torch.zeros(8, 4096)\nfor epoch").replace("COPIED", "rows.cuda()")
    code, told, errors = run(f"{kept}        kept.copy_(model.weight.detach(){more})\n")
    (found,) = (each for each in told["examined"] if each["name"] == WAITS)
    lines = [kept.count("\n") + 1] * waits
    assert code == 0 and [line["line"] for line in found["lines"]] == lines, errors


def test_clipping_gradients_is_no_hidden_wait_unless_its_norm_is_read(run):
    script = COPIES.replace("COPIED", "rows.cuda()").replace(
        "        optimizer.step()",
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()",
    )
    for text, waits in ((script, 0), (script.replace("1.0)", "1.0).item()"), 1)):
        code, told, errors = run(text)
        (found,) = (each for each in told["examined"] if each["name"] == WAITS)
        assert code == 0 and found["note"].endswith(f": {waits}"), errors


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        ("torch.cuda.synchronize()", "no synchronize() in the loop"),
        ("torch.accelerator.synchronize()", "no synchronize() in the loop"),
        ("torch.cuda.current_stream().synchronize()", "no synchronize() in the loop"),
        ("end = torch.cuda.Event(); end.record(); end.synchronize()", "no synchronize() in the loop"),
        ("torch.cuda.empty_cache()", "no empty_cache() in the loop"),
        ("print(model.weight.norm().item()); torch.cuda.synchronize()", "no synchronize() in the loop"),
        ("print(model.weight.norm().item())\n        torch.cuda.synchronize()", "keep the value on the GPU"),
    ],
)
def test_a_call_that_waits_for_the_gpu_is_a_hidden_wait_with_its_own_advice(call, advice, run):
    script = COPIES.replace("COPIED", "rows.cuda()")
    code, told, errors = run(script + f"        {call}\n")
    (found,) = (each for each in told["examined"] if each["name"] == WAITS)
    (line, *_) = found["lines"]
    assert code == 0 and line["line"] == script.count("\n") + 1 and found["advice"].startswith(advice), errors
    assert found["note"].endswith(f": {1 + ('item' in call)}")
    assert any("empty_cache() in the step" in note for note in told["notes"]) == ("empty_cache" in call)


def test_work_on_the_cpu_in_the_loop_counts_as_loading(run):
    enlarged = "torch.nn.functional.interpolate(rows[None], 16 * 4096).squeeze(0)[:, :4096].cuda()"
    code, told, errors = run(COPIES.replace("COPIED", enlarged))
    first = told["findings"][0]
    assert code == 0 and first["name"] == LOADING and first["share"] > 0.5, errors
    assert "the script's own work on the CPU takes" in first["note"] and [line["line"] for line in first["lines"]] == [
        8
    ]
    assert first["advice"].startswith("what train.py:8 computes, less often; or in the DataLoader's workers")


IN_NUMPY = """
import numpy, torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(256, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
numbers = numpy.random.rand(300_000)
def collate(rows):
    numpy.sort(numbers)
    return torch.stack([row for row, in rows])
def train(rows):
    model(rows.cuda()).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ranked = numpy.sort(numbers) if WORKS else None
for epoch in range(9):
    for rows in DataLoader(TensorDataset(torch.ones(256, 256)), 32, collate_fn=collate):
        train(rows)
"""


def test_work_of_numpy_in_the_loop_counts_as_loading_and_what_the_loader_does_counts_once(run):
    (code, told, errors), (_, idle, _) = (run(IN_NUMPY.replace("WORKS", works)) for works in ("True", "False"))
    first, *_ = told["findings"]
    assert code == 0 and first["name"] == LOADING and [line["line"] for line in first["lines"]] == [14], errors
    assert "the script's own work on the CPU takes" in first["note"]
    assert told["seconds"] > 1.4 * idle["seconds"], "one sort is the loader's, the other one the loop's"
    (loading,) = (each for each in idle["examined"] if each["name"] == LOADING)
    assert not loading["lines"] and "own work" not in loading["note"]


DROPPED = """
import torch
weights = torch.nn.Parameter(torch.ones(64, device="cuda"))
optimizer = torch.optim.SGD([weights], 0.1)
def teach(rows):
    for _ in range(400):
        rows = (rows * weights).square()
    return rows
for _ in range(9):
    taught = teach(torch.ones(8, 64, device="cuda"))
    (weights * 2).sum().backward()
    optimizer.step()
"""


ASKED = DROPPED.replace('device="cuda"))\n    (', 'device="cuda"))\n    torch.cuda.max_memory_allocated()\n    (')


@pytest.mark.parametrize("script", [DROPPED, ASKED], ids=["lets go of a graph", "tells of memory"])
def test_what_the_walk_does_is_no_work_of_the_scripts(script, run):
    code, told, errors = run(script)
    assert code == 0 and LOADING not in [each["name"] for each in told["examined"]], errors


ENDING = """
import torch
from torch.utils.data import DataLoader


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        import time

        time.sleep(0.002)
        return torch.zeros(256)


model = torch.nn.Linear(256, 2**16).cuda()
optimizer = torch.optim.SGD(model.parameters())
total = 0.0
for batch in DataLoader(Images(), 16):
    optimizer.zero_grad()
    loss = sum(model(batch.cuda().repeat(512, 1)).square().mean() for _ in range(2))
    loss.backward()
    optimizer.step()
    total += loss.item()
"""


def test_loading_hides_behind_nothing_where_the_loss_is_read_after_the_update(run):
    for script, hidden in ((ENDING, False), (ENDING.replace("+= loss.item()", "+= loss.detach()"), True)):
        code, found, _ = run(script)
        (loading,) = (one for one in found["examined"] if one["name"] == LOADING)
        assert code == 0
        took = float(re.search(r"loading takes ([\d.]+) ms", loading["note"])[1]) / 1000
        assert (loading["seconds"] < took * 0.95) == hidden


def test_what_a_healthy_script_has_is_a_stable_json_and_a_trace(run, here):  # noqa: F811
    code, told, errors = run(patients.script() + ENDLESS, "--trace", "step.json")
    assert code == 0 and not told["findings"], errors
    keys = "gpu measured seconds low high findings hidden perhaps examined together batches memory notes warnings"
    assert set(told) == set(keys.split())
    one = "name seconds low high measured note lesson advice share lines"
    assert all(set(each) == set(one.split()) for each in told["examined"])
    assert not any("workers do not run" in note for note in told["notes"])
    lines = [each["args"].get("line", "") for each in json.loads(Path("step.json").read_text())["traceEvents"]]
    assert any(line.startswith("train.py:") and "cross_entropy(model(texts)" in line for line in lines)
    assert not any("step(batch)" in line for line in lines), "which is the line of all of them"


ATTENDING = """
import torch
from torch import nn
attention, out = nn.MultiheadAttention(256, 4, batch_first=True).cuda(), nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD([*attention.parameters(), *out.parameters()], 0.1)
for number in range(20):
    x = torch.randn(4, 2048, 256).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = out(attention(x, x, x, need_weights=False)[0]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_on_an_older_gpu_16_bits_are_looked_at_where_they_bring_another_attention(run):
    code, told, errors = run(ATTENDING)
    advice = {each["name"]: each["advice"] for each in told["findings"][:2]}  # which save the same, by the same change
    assert code == 0 and {*advice} == {ATTENTION, PRECISION} and all("fp16" in each for each in advice.values()), errors


def test_attention_that_is_asked_for_at_once_and_is_not_fused_is_not_told_to_be_asked_for_at_once(run):
    odd = ATTENDING.replace("256, 4", "264, 4").replace("256", "264")  # heads of 66, which no kernel in fp16 takes
    for script, advice in ((ATTENDING, "fp16 in place of bf16"), (odd.replace("bfloat16", "float16"), "EFFICIENT")):
        code, told, errors = run(script)
        attention = next(one for one in told["examined"] if one["name"] == ATTENTION)
        assert code == 0 and advice in attention["advice"] and "need_weights" not in attention["advice"], errors


TEACHER = """
import torch
teacher, model = torch.nn.Linear(256, 256).cuda(), torch.nn.Linear(256, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for number in range(20):
    x = torch.randn(32, 256, 1024).cuda()
    with torch.no_grad():
        x = teacher(x.transpose(1, 2))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_teachers_graph_is_told_as_memory_and_promises_no_time(run):
    script = TEACHER.replace(
        "    with torch.no_grad():\n        x = teacher(x.transpose(1, 2))", "    y = teacher(x.transpose(1, 2))"
    )
    code, told, errors = run(script.replace("model(x)", "model(y.detach())"))
    assert code == 0 and VALIDATION not in [each["name"] for each in told["findings"]], errors
    told_of = "are kept at train.py:7 for a backward pass that never comes"
    assert any(told_of in note for note in told["notes"]), told["notes"]


def test_a_layer_that_is_a_batched_product_in_16_bits_alone_is_the_same_work(run):
    code, told, errors = run(TEACHER)
    assert code == 0 and PRECISION in [one["name"] for one in told["examined"]], errors


IN_BACKWARD = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).cuda()
optimizers = {weight: torch.optim.Adam([weight]) for weight in model.parameters()}
for weight in model.parameters(): weight.register_post_accumulate_grad_hook(lambda w: optimizers[w].step())
for number in range(20):
    model(torch.randn(64, 512).cuda()).mean().backward()
    model.zero_grad()
"""


def test_a_script_that_steps_in_its_backward_pass_is_diagnosed_but_for_16_bits(run):
    code, told, errors = run(IN_BACKWARD)
    assert code == 0 and "the optimizer steps in the backward pass" in str(told), errors


SPARSE = """
import torch
links = torch.sparse_coo_tensor(torch.randint(0, 300, (2, 900)), torch.ones(900), (300, 300)).cuda()
x, layer = torch.rand(300, 32).cuda(), torch.nn.Linear(32, 4).cuda()
optimizer = torch.optim.Adam(layer.parameters())
for number in range(20):
    torch.spmm(links, layer(x)).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_of_sparse_tensors_and_of_batches_that_are_known_nothing_is_kept_in_vain(run):
    code, told, errors = run(SPARSE)
    assert code == 0 and VALIDATION not in [finding["name"] for finding in told["findings"]], errors


def test_a_data_set_that_holds_a_module_is_no_error_of_the_script(run):
    build = """
    import torch
    class Data(torch.utils.data.Dataset):
        def __init__(self): self.blur = torch.nn.Conv2d(3, 3, 5, padding=2)
        def __len__(self): return 400
        @torch.no_grad()
        def __getitem__(self, place): return self.blur(torch.rand(1, 3, 8, 8))[0].numpy()
    model = torch.nn.Conv2d(3, 8, 3).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for number in range(9):
        for images in torch.utils.data.DataLoader(Data(), 16):
            model(images.cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
    """
    code, told, errors = run(build)
    assert code == 0 and "what loading takes is not known" in str(told), errors


EVALUATING = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.nn.functional import cross_entropy
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ours, theirs = (DataLoader(TensorDataset(torch.ones(size, 1024)), 512) for size in (2**13, 2**12))
for number, (rows,) in enumerate(ours):
    model(rows.cuda()).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    if number % EVERY == 1 % EVERY:
        model.eval()
        with torch.no_grad(): right = sum(model(rows.cuda()).mean() for rows, in theirs)
        model.train()
"""


def test_an_evaluation_in_each_step_comes_first_and_saves_what_leaving_it_out_does(run):
    (code, told, errors), (_, without, _) = run(EVALUATING.replace("EVERY", "1")), run(EVALUATING.split("    if")[0])
    first = told["findings"][0]
    assert code == 0 and first["name"] == causes.EVALUATING and "evaluate once" in first["advice"], errors
    lines = EVALUATING.splitlines()
    assert {line["line"] for line in first["lines"]} == {lines.index(line) + 1 for line in lines if "no_grad" in line}
    loading = {each["name"]: each["seconds"] for each in told["examined"]}[LOADING]
    assert first["high"] > first["seconds"] > 0.7 * loading, "what its batches take is part of it"
    predicted = [each["memory"]["gpus"][0]["time"]["expected"] for each in (told, without)]
    assert predicted[0] - predicted[1] < 1.01 * first["seconds"] < told["seconds"]
    assert not told["warnings"]


def test_the_batch_after_an_evaluation_is_the_trainings_where_it_is_taken_before_the_model_is_set_to_train(run):
    train, evaluate = "    model(rows", "    model.eval(); model(torch.ones(9, 1024).cuda())\n"
    training = EVALUATING.split("    if")[0].replace("512) for", "512, collate_fn=load) for")
    training = f"import time\ndef load(rows): time.sleep(0.02); return [torch.ones(512, 1024)]\n{training}"
    code, told, errors = run(training.replace(train, f"    model.train(){train.replace('    ', '; ')}") + evaluate)
    found = {each["name"]: each for each in told["examined"]}
    assert code == 0 and found[causes.EVALUATING]["seconds"] < 0.5 * found[LOADING]["seconds"], errors
    assert {line["line"] for line in found[causes.EVALUATING]["lines"]} == {len(training.splitlines()) + 1}


def test_an_evaluation_in_some_steps_is_told_above_what_the_others_hold(run):
    code, told, errors = run(EVALUATING.replace("EVERY", "2"))
    assert code == 0 and causes.EVALUATING not in [each["name"] for each in told["examined"]], errors
    (said,) = told["warnings"]
    assert said.startswith("an evaluation ran in ") and "as long as" in said


def test_a_teacher_and_attacks_by_gradients_are_no_evaluation(run):
    teaches = EVALUATING.replace("if number % EVERY == 1 % EVERY", "if True").replace("model.train()", "pass")
    attacks = EVALUATING.replace("if number % EVERY == 1 % EVERY", "if True")
    attacks = attacks.replace("with torch.no_grad(): right", "right").replace(
        "        model.train", "        right.backward(); model.train"
    )
    for script in (teaches, attacks):
        code, told, errors = run(script)
        assert code == 0 and causes.EVALUATING not in [each["name"] for each in told["examined"]], errors


def test_what_is_trained_on_comes_of_no_evaluation(run):
    labels = EVALUATING.replace("if number % EVERY == 1 % EVERY", "if True").replace(
        "    model(rows.cuda()).square().mean().backward(); optimizer", "    optimizer"
    )
    labels += "        (model(rows.cuda()) - right.softmax(-1)).square().mean().backward()\n"
    labels = labels.replace("right = sum(model(rows.cuda()).mean() for rows, in theirs)", "right = model(rows.cuda())")
    code, told, errors = run(labels)
    assert code == 0 and causes.EVALUATING not in [each["name"] for each in told["examined"]], errors
    assert not any("evaluation" in note for note in [*told["notes"], *told["warnings"]])


ONE_BY_ONE = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)), torch.nn.Linear(64, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def tell(rows, labels):
    loss = 0
    for row, label in zip(rows, labels):
        loss = loss + torch.nn.functional.cross_entropy(model(row), label)
    return loss / len(rows)
for _ in range(20):
    tell(torch.randn(32, 64).cuda(), torch.zeros(32).long().cuda()).backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_a_loop_over_samples_is_named_where_it_makes_the_cpu_late(run):
    code, told, errors = run(ONE_BY_ONE)
    first = told["findings"][0]
    assert code == 0 and first["name"] == causes.LAUNCHING and [line["line"] for line in first["lines"]] == [8], errors
    assert first["advice"].startswith("one call for all 32 rounds of the loop at train.py:8, if"), first
    at_once = "    return torch.nn.functional.cross_entropy(model(rows), labels)\nfor _ in"
    code, one_call, errors = run(re.sub(r"    loss = 0\n.*\nfor _ in", at_once, ONE_BY_ONE, flags=re.DOTALL))
    assert code == 0 and told["seconds"] - one_call["seconds"] < 1.01 * first["seconds"], errors


AVERAGED = """
import copy, torch
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(12))).cuda()
averaged = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
weights, averages = list(model.parameters()), list(averaged.parameters())
@torch.no_grad()
def average():
    for average, weight in zip(averages, weights):
        average.mul_(0.99).add_(weight, alpha=0.01)
for _ in range(20):
    model(torch.randn(64, 256, device="cuda")).mean().backward()
    optimizer.step(); optimizer.zero_grad()
    average()
"""


SCALED = """
import torch
model = torch.nn.Linear(256, 256).to("cuda")
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
while True:
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(64, 256).to("cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


def test_the_scale_of_a_scaler_in_64_bits_is_nothing_to_look_at(run):
    _, told, _ = run(SCALED)
    assert causes.DOUBLE not in [each["name"] for each in told["examined"]]


def test_a_loop_over_weights_is_named_and_lists_save_what_it_promises(run):
    code, told, errors = run(AVERAGED)
    (loop,) = (each for each in told["findings"] if each["name"] == causes.UPDATES)
    assert code == 0 and [line["line"] for line in loop["lines"]] == [10] and not loop["measured"], errors
    assert loop["note"] == "48 calls in 24 rounds of the loop at train.py:10"
    assert loop["advice"].startswith("torch._foreach_lerp_(averages, weights, 1 - decay): lists in place of the loop")
    lists = "    torch._foreach_lerp_(averages, weights, 0.01)\nfor _ in"
    code, after, errors = run(re.sub(r"    for average.*\n.*\nfor _ in", lists, AVERAGED))
    saved = told["seconds"] - after["seconds"]
    assert code == 0 and 0.85 * loop["seconds"] < saved <= 1.0001 * loop["seconds"], errors
    assert causes.UPDATES not in [each["name"] for each in after["examined"]]


OF_TWO = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
class Stream(IterableDataset):
    def __iter__(self):
        while True: yield (torch.ones(256),)
model = torch.nn.Linear(256, 10).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = TensorDataset(torch.ones(128, 256))
for epoch in range(9):
    for batch in LOADER:
        model(torch.cat(list(batch)).cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("for_a_look", [False, True])
def test_a_loader_that_is_made_anew_is_told_to_stay(run, for_a_look):
    """But not one that has given only its first batch, for a look at what training gets."""
    made = "DataLoader(data, 64, num_workers=1)"
    script = OF_TWO.replace("for epoch", f"next(iter({made}))\nloader = {made}\nfor epoch") if for_a_look else OF_TWO
    _, told, errors = run(script.replace("LOADER", "loader" if for_a_look else made))
    (loading,) = (each for each in told["examined"] if each["name"] == LOADING)
    remade = loading["advice"].startswith("one DataLoader for all epochs, with persistent_workers=True")
    assert remade is not for_a_look, errors


SHARDS = """
import time, torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
class Slow(Dataset):
    def __len__(self): return 16
    def __getitem__(self, number): time.sleep(0.005); return torch.ones(64)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
empty = DataLoader(TensorDataset(torch.ones(5, 64)), 8, drop_last=True)
for shard in range(9):
    data = Slow()
    for rows in DataLoader(data, 8):
        model(rows.cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
        for _ in empty: pass
"""


def test_a_loader_that_ends_gives_no_batch_where_another_one_follows(run):
    _, told, errors = run(SHARDS)
    (loading,) = (each for each in told["examined"] if each["name"] == LOADING)
    assert 0.04 <= loading["seconds"] < 0.07, errors  # a batch of eight
    assert not any("not known, as it cannot be timed" in note for note in told["notes"])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_is_told_to_give_whole_batches(workers):
    seen = causes.Observed(has_loader=True, handing=0.01, workers=workers)
    advice = [causes.CAUSES[LOADING].advice(replace(seen, streams=streams)) for streams in (True, False)]
    assert ["batch_size=None" in each for each in advice] == [True, False]
    assert ["tensors[rows]" in each for each in advice] == [False, True]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_of_a_scripts_is_seen_as_one(workers, run):
    _, told, errors = run(OF_TWO.replace("LOADER", f"DataLoader(Stream(), 64, num_workers={workers})"))
    (loading,) = (each for each in told["examined"] if each["name"] == LOADING)
    assert "tensors[rows]" not in loading["advice"], errors


def test_workers_of_two_loaders_load_at_once(run):
    slow = "import time\ndef collate(rows): time.sleep(0.03); return torch.stack([row for row, in rows])\n"
    loaders = ("DataLoader(data, 64, num_workers=1, persistent_workers=True, collate_fn=collate)",) * 2
    with_two = f"ours, theirs = {', '.join(loaders)}\nfor epoch"
    script = slow + OF_TWO.replace("for epoch", with_two).replace("LOADER", "zip(ours, theirs)").replace("128", "6400")
    code, told, errors = run(script)
    (loading,) = (each for each in told["findings"] if each["name"] == LOADING)
    assert code == 0 and (loading["seconds"] > 0.055) == ((os.cpu_count() or 1) < 2), errors


POOL = """
import sys, torch
from concurrent.futures import ThreadPoolExecutor
class Data(torch.utils.data.Dataset):
    def __init__(self): self.pool = ThreadPoolExecutor(2)
    def __len__(self): return 6400
    def __getitem__(self, place): return self.pool.submit(torch.zeros, 64).result()
data, model = Data(), torch.nn.Linear(64, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
USED
for rows in torch.utils.data.DataLoader(data, 32, num_workers=2):
    model(rows.cuda()).mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_workers_of_a_data_set_with_threads_are_measured_as_the_script_would_start_them(run):
    code, told, errors = run(POOL.replace("USED", ""))
    (loading,) = (each for each in told["examined"] if each["name"] == LOADING)
    assert code == 0 and "num_workers=2" in loading["note"] and "cannot be timed" not in str(told), errors


def test_workers_that_wait_for_ever_are_given_up(run):
    used = "data[0]; sys.modules['effgpu.diagnosing.loaders']._HANGS = 1.0  # whose threads no worker has"
    code, told, errors = run(POOL.replace("USED", used))
    assert code == 0 and LOADING not in [each["name"] for each in told["examined"]], errors
    assert any("its workers gave no batch in 1 s" in note for note in told["notes"]), told["notes"]


def test_compiling_for_other_shapes_is_not_said_to_take_nothing(run):
    script = IN_MEMORY.replace("torch.nn.Linear(256, 10).cuda()", "torch.compile(torch.nn.Linear(256, 10).cuda())")
    for text, compiled in ((script, True), (IN_MEMORY, False)):
        code, told, errors = run(text)
        assert code == 0 and ("recompiling" in [one["name"] for one in told["examined"]]) != compiled, errors
        assert any("compiling again" in note for note in told["notes"]) == compiled


TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
sizes = dict(hidden_size=256, num_hidden_layers=1, num_attention_heads=4, intermediate_size=1024, vocab_size=999)
rows = [{"input_ids": torch.arange(128), "labels": 1}] * 640
arguments = TrainingArguments("out", per_device_train_batch_size=64, report_to=[])
Trainer(BertForSequenceClassification(BertConfig(**sizes)), arguments, train_dataset=rows).train()
"""


def test_what_is_advised_for_a_trainer_are_its_arguments(run):
    code, told, errors = run(TRAINER)
    advice = {one["name"]: one["advice"] for one in told["examined"]}
    assert code == 0 and advice[PRECISION] == "TrainingArguments(fp16=True)", errors
    assert advice[WAITS].startswith("TrainingArguments(logging_nan_inf_filter=False)")


ACCELERATOR = """
import torch
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(1024, 1024)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
while True:
    accelerator.backward(model(torch.ones(64, 1024, device=accelerator.device)).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_is_advised_for_an_accelerator_is_its_argument(run):
    code, told, errors = run(ACCELERATOR)
    advice = {one["name"]: one["advice"] for one in told["examined"]}
    assert code == 0 and advice[PRECISION] == 'Accelerator(mixed_precision="fp16")', errors


def test_one_that_ends_early_is_refused(run):
    code, told, errors = run(loop(steps=4))
    assert (code, list(told)) == (2, ["failed"]) and "ended after 4 steps, and 6 are needed" in errors


def test_a_loader_is_none_of_a_scripts_arguments():
    with pytest.raises(ValueError, match="loader: expected none for a script"):
        effgpu.doctor(__file__, [1], "T4")


# --- on a GPU ---


class Done(Exception):
    """The plan is over."""


def end(result):
    raise Done(result)


@pytest.fixture
def measure(simulate_gpu, monkeypatch):
    """A function that pushes the plan of a GPU by a loop of this process, on a simulated T4 with its own clock."""
    gpu = simulate_gpu("Tesla T4", (7, 5), 15 * GiB)
    monkeypatch.setattr(turns, "time", gpu and type("Clock", (), {"perf_counter": lambda: gpu.clock}))

    patched = lambda: (torch.Tensor.to, torch.Tensor.backward, nn.Module.train, torch.save, torch.autocast.__enter__)

    def measure(script, **again):
        marks, before = Marks(end), patched()
        try:
            with pytest.raises(Done) as done, measuring(marks, T4, time.time(), **again) as plan, marks.pushing(plan):
                script(gpu)
        finally:
            marks._plan.close()  # which a process that ends needs not
            assert patched() == before
        return done.value.args[0]

    return measure


class Slow(TensorDataset):
    """40 ms a batch, on the simulated clock."""

    def __init__(self, gpu):
        super().__init__(torch.ones(4096, 8))
        self.gpu = gpu

    def __getitems__(self, places):
        self.gpu.clock += 0.04
        return [self.tensors[0][place] for place in places]


class Costly(torch.optim.SGD):
    """30 ms a step."""

    gpu = None

    def step(self, closure=None):
        self.gpu.clock += 0.03
        return super().step(closure)


def train(gpu, *, optimizer=Costly, epochs=10_000, each=lambda number, model: None, scaler=None, batches=None):
    model = nn.Linear(8, 8)
    Costly.gpu = gpu
    optimizer = optimizer and optimizer(model.parameters(), lr=0.1)
    loader, number = DataLoader(Slow(gpu), 8) if batches is None else batches, 0
    for _ in range(epochs):
        for rows in loader:
            gpu.clock += 0.004 if torch.is_autocast_enabled("cuda") else 0.01
            loss = model(rows).sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            elif optimizer:
                optimizer.step()
            model.zero_grad()
            number += 1
            each(number, model)


def alone(seen):
    return {name: round(saving[0], 4) for names, saving in seen.saved.items() if len(names) == 1 for name in names}


def test_a_scripts_own_loop_goes_on_with_one_thing_changed_in_turns(measure):
    seen = measure(train)
    assert seen.step[0] == pytest.approx(0.08)
    assert alone(seen) == {PRECISION: 0.006, OPTIMIZER: 0.03, LOADING: 0.04}
    assert seen.saved[frozenset({LOADING, OPTIMIZER})][0] == pytest.approx(0.07)
    assert (seen.optimizers, seen.stepped, seen.has_loader) == ((("Costly", None),), 1, True)


@pytest.mark.parametrize(
    ("clock", "reasons", "told"),
    [
        (1980, (), None),
        (1900, ("thermal",), None),
        (1700, ("power cap",), None),
        (1180, ("power cap",), "1,180 of 1,980 MHz, held down by: power cap: a step may take up to 1.7 ×"),
        (1700, ("thermal",), "1,700 of 1,980 MHz, held down by: thermal: a step may take up to 1.2 ×"),
    ],
)
def test_a_clock_that_is_held_down_is_told(clock, reasons, told, measure, monkeypatch):
    monkeypatch.setattr(power, "find_board", lambda: "board")
    monkeypatch.setattr(power, "read_clock", lambda: (clock, reasons))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMaxClockInfo", lambda board, kind: 1980)
    warnings = measure(train).warnings
    assert (told in warnings[0] and len(warnings) == 1) if told else not warnings


def test_memory_beyond_the_gpus_own_is_told(measure):
    def script(gpu):
        gpu.most_reserved = 17 * GiB
        train(gpu)

    (told,) = measure(script).warnings
    assert told.startswith("PyTorch holds 17.0 GiB and the GPU has 15.0 GiB")


def test_steps_that_a_scaler_skips_count(measure):
    def overflowing(gpu):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3, growth_factor=2.0**60)
        train(gpu, scaler=scaler)

    assert alone(measure(overflowing))[LOADING] == pytest.approx(0.04, rel=0.2)


def test_an_autocast_that_is_open_at_the_end_of_a_step_is_left_alone(measure):
    def script(gpu):
        with torch.autocast("cuda", torch.float16):
            train(gpu)

    seen = measure(script)
    assert set(alone(seen)) == {OPTIMIZER, LOADING} and "autocast is on where the optimizer steps" in seen.notes[0]
    assert not torch.is_autocast_enabled("cuda")


def test_on_a_gpu_a_script_that_fails_in_16_bits_alone_runs_again_without(measure):
    def script(gpu):
        train(gpu, each=lambda number, model: 1 / (not torch.is_autocast_enabled("cuda")))

    with pytest.raises(Again) as again:
        measure(script)
    assert again.value.options["refused"].startswith("in 16 bits the step fails")
    seen = measure(script, **again.value.options)
    assert set(alone(seen)) == {OPTIMIZER, LOADING} and again.value.options["refused"] in seen.notes
    with pytest.raises(ZeroDivisionError):
        measure(lambda gpu: train(gpu, each=lambda number, model: 1 / (number < 3)))


def test_without_a_data_loader_what_moves_is_looked_at(measure, monkeypatch):
    moved, resident = [], torch.ones(8, 8)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: moved.append(1) or resident)

    def script(gpu):
        class Batches:
            def __iter__(self):
                gpu.clock += 0.04
                before = len(moved)
                yield torch.ones(8, 8).to("cuda")
                gpu.clock += 0.02 * (len(moved) - before)

        train(gpu, batches=Batches())

    monkeypatch.setattr(turns, "Observer", type("Copies", (turns.Observer,), {"looking": _with_a_copy}))
    seen = measure(script)
    assert set(alone(seen)) == {PRECISION, OPTIMIZER, COPYING} and "no DataLoader" in seen.notes[0]
    assert alone(seen)[COPYING] == pytest.approx(0.02)


def _with_a_copy(observer):
    from effgpu.predicting.timeline import COPY, Event

    observer.events.append(Event(COPY, None, bytes=256))
    return _looking(observer)


_looking = turns.Observer.looking


def _one_ahead(loader):
    """Its batches, as accelerate takes them: it knows the last one before it gives it."""
    batches = iter(loader)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch


@pytest.mark.parametrize("take", [iter, _one_ahead])
@pytest.mark.parametrize("batches", [1, 2, 3])
def test_a_step_takes_one_batch_also_where_an_epoch_ends(batches, take):
    loading, loader, taken = Loading(), DataLoader(range(2 * batches), 2), []
    with replaced(loading.replacing()):
        for _ in range(3):
            for _ in take(loader):
                loading.next_step()
                taken.append(loading.taken)
    assert taken[1:] == [[loader]] * (3 * batches - 1)


def test_without_an_optimizer_a_backward_pass_is_the_end_of_a_step(measure):
    seen = measure(lambda gpu: train(gpu, optimizer=None))
    assert set(alone(seen)) == {PRECISION, LOADING} and seen.step[0] == pytest.approx(0.05)


def test_turns_with_an_evaluation_are_taken_again(measure, monkeypatch):
    monkeypatch.setenv("EFFGPU_SECONDS", "0.1")

    def script(gpu, often):
        def evaluate(number, model):
            if number % often == 0:
                model.eval()
                gpu.clock += 10
                model.train()

        train(gpu, each=evaluate)

    seen = measure(lambda gpu: script(gpu, 7))
    assert seen.step == pytest.approx((0.08,) * 3) and not seen.notes
    seen = measure(lambda gpu: script(gpu, 1))
    assert seen.step[0] > 10 and "each turn holds an evaluation" in seen.notes[0]


@pytest.mark.slow
def test_a_script_on_the_simulated_gpu_from_the_command_line(tmp_path):
    (tmp_path / "train.py").write_text(ON_GPU)
    for name in ("best.pt", "best.safetensors", "best.json", "best.ts"):
        (tmp_path / name).write_text(name)
    simulated = [sys.executable, str(Path(__file__).parent / "simulated_gpu"), "T4"]
    command = [*simulated, sys.executable, "-m", "effgpu", "doctor", "--json", "-", "--", "python", "train.py"]
    variables = {"EFFGPU_SECONDS": "0.1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "The weights that it trains are thrown away" in done.stderr.splitlines()[0]
    told = json.loads(done.stdout)
    assert told["measured"] and told["memory"]
    measured = {one["name"] for one in told["examined"] if one["measured"]}
    assert measured == {LOADING, COPYING, OPTIMIZER, PRECISION}
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.name != "train.py"}
    assert left == {name: name for name in ("best.pt", "best.safetensors", "best.json", "best.ts")}
    thrown = ("torch.save to best.pt", "torch.save to part.pt", "safetensors' save_file to best.safetensors")
    assert {f"not written, as its weights are thrown away: {what}" for what in thrown} <= {*told["notes"]}
    assert "left as it is, a file from before: best.json" in told["notes"]


ON_GPU = """
import io, json, os, safetensors.torch, torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(640, 64), torch.zeros(640, dtype=torch.long))
loader = DataLoader(data, 32, shuffle=True, pin_memory=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
for epoch in range(200):
    for rows, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(rows.to("cuda")), labels.to("cuda", non_blocking=True))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss.item()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(8, 64, device="cuda"))
    model.train()
    torch.save(model.state_dict(), "best.pt")
    torch.save({"epoch": epoch}, "part.pt")
    os.replace("part.pt", "last.pt")
    assert torch.load("last.pt")["epoch"] == epoch and "0.weight" in torch.load("best.pt")
    safetensors.torch.save_file({"weight": torch.ones(3)}, "best.safetensors")
    torch.save(epoch, memory := io.BytesIO())
    assert memory.getvalue()
    json.dump({"loss": loss.item()}, open("best.json", "w"))
    torch.jit.script(torch.nn.Linear(2, 2)).save("best.ts")
"""


# --- a process of its own ---

WAITING = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open("pids", "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGHUP"])
def test_the_script_ends_with_the_command_that_started_it(signal_name, here):  # noqa: F811
    Path("train.py").write_text(WAITING)
    command = [sys.executable, "-m", "effgpu", "predict", "--", "python", "train.py"]
    heard = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # even if these tests run under nohup
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, preexec_fn=heard)
    deadline = time.monotonic() + 60
    while not (here / "pids").exists() or not (here / "pids").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(getattr(signal, signal_name))
    process.wait(30)
    pids = list(map(int, (here / "pids").read_text().split()))
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
