"""Tests of `effgpu doctor`: sick training scripts and a healthy one, replays, and what it leaves behind."""

import contextlib
import itertools
import multiprocessing
import re
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import patients
import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

import effgpu
from effgpu.__main__ import main
from effgpu.attaching.sites import Site
from effgpu.attaching.steps import drive
from effgpu.diagnosing import batches, turns
from effgpu.diagnosing import functions as module
from effgpu.diagnosing.batches import change_tensors, padding_shares, time_handing, time_loading
from effgpu.diagnosing.causes import (
    ANOMALY,
    ATTENTION,
    BLOCKING,
    CAUSES,
    CHECKPOINTS,
    COPYING,
    DOUBLE,
    EVALUATING,
    LAUNCHING,
    LOADING,
    OPTIMIZER,
    PRECISION,
    TF32,
    UNTRAINED,
    UPDATES,
    VALIDATION,
    WAITS,
)
from effgpu.diagnosing.diagnosis import Diagnosis, Finding
from effgpu.diagnosing.observed import Observed
from effgpu.diagnosing.observing import Observer
from effgpu.diagnosing.turns import emptied, in_16_bits
from effgpu.measuring.intervals import CONFIDENCE, divide_confidence, interval_of_blocks
from effgpu.predicting.gpus import find_gpu
from effgpu.predicting.kinds import OTHER, Kernel
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import MAY_NOT_FIT, Prediction
from effgpu.predicting.timeline import COPY, CPU, KERNEL, LOAD, NOTHING, OWN, READ, Event, Timeline
from effgpu.units import GiB, format_bytes, format_seconds

T4 = find_gpu("T4")
ignored = "User provided device_type", "'pin_memory' argument", "CUDA is not available"
pytestmark = pytest.mark.filterwarnings(*[f"ignore:{warning}" for warning in ignored])
ROWS = torch.ones(8, 64)


def training(width=64, optimizer=torch.optim.SGD, report=lambda loss: None):
    """A variant whose step takes a batch of rows."""

    def variant():
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        trained = optimizer(model.parameters(), lr=0.1)

        def step(rows):
            loss = model(rows.to("cuda" if torch.cuda.is_available() else "cpu")).square().mean()
            loss.backward()
            report(loss)
            trained.step()
            trained.zero_grad()

        return step

    return variant


def with_rows(variant, *shape):
    """The variant with its batch in it, so that its step takes nothing."""
    return lambda: partial(variant(), torch.ones(shape))


# --- the patients ---


@pytest.mark.parametrize("causal", [False, True])  # of a causal mask, a fused kernel computes half
@pytest.mark.parametrize(
    ("gpu", "kind", "width"),
    [
        ("A100", torch.bfloat16, 64),
        ("H100", torch.bfloat16, 128),
        ("T4", torch.float16, 64),
        ("RTX 4090", torch.float32, 128),
    ],
)
def test_a_fused_attention_saves_its_ceiling_or_a_little_less(causal, gpu, kind, width):
    def training(fused):
        q, k, v = torch.randn(3, 8, 12, 1024, width, dtype=kind, requires_grad=True)
        mask = torch.zeros(1024, 1024, dtype=torch.bool)

        def step():
            if fused:
                out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            else:
                scores = q @ k.mT / 8
                scores = scores.masked_fill(mask, -1e9) if causal else scores
                out = nn.functional.dropout(scores.softmax(-1), 0.1) @ v
            out.sum().backward()

        return step

    plain, fused = (predict(partial(training, each), gpu).timeline() for each in (False, True))
    without = CAUSES[ATTENTION].change(plain, Observed())
    saved = [plain.seconds() - other.seconds() for other in (without, fused)]
    assert saved[0] >= saved[1] > saved[0] - 0.03 * plain.seconds() > 0.15 * plain.seconds()
    assert CAUSES[ATTENTION].change(fused, Observed()) == fused
    assert ("is_causal=True" in CAUSES[ATTENTION].advice(Observed(plain.events))) == causal


@pytest.mark.parametrize(
    ("kind", "backends", "advice"),
    [
        (torch.bfloat16, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "fp16 in place of bf16"),
        (torch.float16, [SDPBackend.MATH], "no sdpa_kernel(SDPBackend.MATH)"),
        (torch.float64, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], "what a fused kernel takes"),
    ],
)
def test_where_the_script_asks_for_fused_attention_advice_says_why_there_is_none(kind, backends, advice):
    def step():
        q, k, v = torch.randn(3, 8, 12, 1024, 64, dtype=kind, requires_grad=True)
        with sdpa_kernel(backends):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    events = predict(lambda: step, "T4").timeline().events
    assert CAUSES[ATTENTION].advice(Observed(events)).startswith(advice)


def test_attention_that_is_kept_from_a_fused_kernel_also_multiplies_in_32_bits():
    def step(backend):
        q, k, v = torch.randn(3, 8, 12, 1024, 64, dtype=torch.float16, requires_grad=True)
        with sdpa_kernel(backend):
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    backends = SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION
    plain, fused = (predict(lambda each=each: partial(step, each), "T4").timeline() for each in backends)
    without = CAUSES[ATTENTION].change(plain, Observed())
    assert without.seconds() == pytest.approx(fused.seconds(), abs=0.02 * plain.seconds())
    assert fused.seconds() < 0.1 * plain.seconds()


@pytest.mark.parametrize(("mode", "graphed"), [("default", False), ("reduce-overhead", True), ("max-autotune", True)])
def test_a_prediction_says_that_compiled_code_is_replayed(mode, graphed):
    assert (
        predict(lambda: partial(torch.compile(nn.Linear(8, 8), mode=mode), torch.ones(2, 8)), "T4").graphed == graphed
    )


def test_a_fused_attention_copies_no_heads():
    def training(fused):
        qkv = torch.randn(8, 1024, 3, 12, 64, dtype=torch.bfloat16, requires_grad=True)

        def step():
            q, k, v = (each.transpose(1, 2) for each in qkv.unbind(2))
            out = nn.functional.scaled_dot_product_attention(q, k, v) if fused else (q @ k.mT).softmax(-1) @ v
            out.transpose(1, 2).reshape(8, 1024, 768).sum().backward()

        return step

    plain, fused = (predict(partial(training, each), "A100").timeline() for each in (False, True))
    without = CAUSES[ATTENTION].change(plain, Observed())
    clones = [sum(k.name == "clone" for e in each.events for k in e.kernels) for each in (plain, without, fused)]
    assert clones[0] >= 4 and clones[1:] == [0, 0]
    assert without.seconds() < fused.seconds() < 1.2 * without.seconds()


@pytest.mark.parametrize("goes_on", ["", "to the next layer", "into the loss"])
@pytest.mark.parametrize("layer", [nn.Linear, nn.MultiheadAttention])
def test_attention_whose_scores_go_on_cannot_be_fused(layer, goes_on):
    def training():
        layers = [layer(64, 64, batch_first=True) if layer is nn.MultiheadAttention else layer(64, 64) for _ in "12"]

        def step():
            x, before, total = torch.randn(4, 256, 64, requires_grad=True), 0.0, 0.0
            for each in layers:
                if layer is nn.MultiheadAttention:  # which averages its weights, whether anybody reads them or not
                    out, weights = each(x + before, x, x)
                    before = weights.mean() if goes_on == "to the next layer" else 0.0
                else:
                    scores = x @ x.mT + before
                    weights = scores.softmax(-1)
                    out, before = each(weights @ x), scores if goes_on == "to the next layer" else 0.0
                x = x + out
                total = total + (weights.square().mean() if goes_on == "into the loss" else 0.0)
            (x.square().mean() + total).backward()

        return step

    events = predict(training, "A100").events
    softmaxes = sum(CAUSES[ATTENTION].concerns(event, Observed(events=list(events))) for event in events)
    assert softmaxes == (0 if goes_on else 2 * len("12"))


@pytest.mark.parametrize("loss", [nn.BCELoss, nn.BCEWithLogitsLoss])
def test_a_loss_that_autocast_refuses_is_no_obstacle_and_named(loss):
    """On a GPU, PyTorch raises an error where a step with nn.BCELoss runs under autocast."""

    def variant(autocast=False):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.Sigmoid()).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(rows):
            with torch.autocast(device, torch.float16, enabled=autocast):
                value = loss()(model(rows.to(device)), torch.zeros(2048, 1024, device=device))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    refused = loss is nn.BCELoss
    found = {each.name: each for each in effgpu.doctor(variant, [torch.ones(2048, 1024)], gpu="T4").findings}
    assert found["precision"].seconds > 0 and found["precision"].advice.endswith("BCEWithLogitsLoss") == refused
    with pytest.raises(RuntimeError, match="unsafe to autocast") if refused else contextlib.nullcontext():
        predict(lambda: partial(variant(True), torch.ones(2048, 1024)), "T4")


def test_a_softmax_of_what_a_layer_gave_is_no_attention_with_scores():
    """Linear attention, as in many diffusion models: its products have no scores, and no fused kernel does them."""

    def training(scored):
        layer = nn.Linear(64, 3 * 64, dtype=torch.bfloat16)

        def step():
            q, k, v = layer(torch.rand(8, 4, 4096, 64, dtype=torch.bfloat16)).chunk(3, dim=-1)
            first = q @ k.mT if scored else k.softmax(-2).mT @ v
            (first.softmax(-1) @ v if scored else q.softmax(-1) @ first).sum().backward()

        return step

    plain, linear = (predict(partial(training, scored), "A100") for scored in (True, False))
    for predicted, softmaxes in ((plain, 2), (linear, 0)):
        seen = Observed(events=list(predicted.events))
        assert sum(CAUSES[ATTENTION].concerns(event, seen) for event in predicted.events) == softmaxes
    assert CAUSES[ATTENTION].change(plain.timeline(), Observed()).seconds() < 0.5 * plain.timeline().seconds()
    assert CAUSES[ATTENTION].change(linear.timeline(), Observed()) == linear.timeline()


def test_memory_that_grows_is_told_above_all():
    def training(kept):
        model = nn.Linear(256, 256)

        def step():
            kept.append(model(torch.ones(1024, 256)))
            kept[-1].sum().backward()

        return step

    found = effgpu.doctor(partial(training, []), gpu="T4")
    (told,) = found.warnings
    assert re.fullmatch(r"memory grows by 1.00 MiB in the step .*, the T4 is full after 14,\d\d\d steps: .*", told)
    assert told.endswith("kept.append(model(torch.ones(1024, 256)))") and found.to_dict()["warnings"] == [told]
    assert str(found).splitlines()[1] == told and told[:40] in found._repr_html_()


def test_a_batch_that_is_held_beside_a_smaller_one_is_no_growth():
    """The last batch of an epoch is smaller, and a loader may hold the next one already."""

    def variant():
        model = nn.Linear(1024, 1024)
        batches = iter([torch.rand(rows, 1024) for rows in (2048, 2048, 1024, 2048, 2048)])
        held = [next(batches)]

        def step():
            batch = held.pop()
            held.append(next(batches) * 1)
            model(batch).sum().backward()

        return step

    assert not predict(variant, "T4", steps=3).kept


@pytest.fixture
def diagnose(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_largest_batch", lambda *arguments: None)  # not looked at, and half of the time
    path = tmp_path / "train.py"

    def diagnose(disease=None, gpu="T4", **sizes):
        path.write_text(patients.script(disease, **sizes))
        names = runpy.run_path(str(path))
        if gpu and disease not in (None, "slow loader"):  # which a busy machine's loader would hide
            monkeypatch.setattr(batches.Batches, "time", lambda batches: (1e-4, 1e-4, 1e-4))
        return effgpu.doctor(names["variant"], names["loader"], gpu), path

    return diagnose


TELLING = ("slow loader", "item in the loop", "recompiling shapes", "validation with grad")  # the others are slow


@pytest.mark.parametrize(
    "disease", [pytest.param(name, marks=[pytest.mark.slow] * (name not in TELLING)) for name in patients.SICK]
)
def test_it_names_the_disease_first_and_the_line(diagnose, disease):
    found, path = diagnose(disease)
    expected = patients.SICK[disease][0]
    first = found.findings[0]
    assert first.name == expected, found
    assert first.seconds >= 0.1 * found.seconds, "a disease, not a trifle"
    assert 0 <= first.low <= first.seconds <= first.high
    assert first.lesson in str(found) and first.advice in str(found)
    launching = LAUNCHING in {one.name for one in found.findings}
    assert launching == (expected in (LAUNCHING, OPTIMIZER)), "to blame where nothing else makes the CPU late"
    assert bool(first.lines) == (expected in (ATTENTION, COPYING, OPTIMIZER, VALIDATION, WAITS))
    for file, line, _ in first.lines[:1]:
        code = path.read_text().splitlines()[line - 1]
        assert file == str(path)
        assert code.strip() == {OPTIMIZER: "scaler.step(optimizer)"}.get(expected, code.strip())
        assert expected == OPTIMIZER or code not in patients.HEALTHY
        assert f"{path.name}:{line}: " in str(found)


def test_it_finds_nothing_in_a_healthy_script(diagnose):
    found, _ = diagnose()
    assert not found.findings
    known = {one.name for one in found.examined}
    # a T4 has none; no such numbers, modes and loop; of a script alone it is known; all weights are trained
    unseen = {TF32, DOUBLE, ANOMALY, BLOCKING, CHECKPOINTS, EVALUATING, UPDATES, UNTRAINED}
    assert known == set(CAUSES) - unseen == {name for name, *_ in patients.SICK.values()}
    assert re.search("nothing (surely )?above 5% of the step", str(found)), "a busy machine loads unevenly"
    assert "below 5% each: " in str(found)


def test_a_script_takes_the_sizes_that_keep_a_gpu_busy():
    texts = [patients.script(name, **patients.FILLING) for name in (None, "padding to 512", "tiny batch")]
    assert [re.search("BATCH = 64, (.*)", text)[1] for text in texts] == ["256", "128", "1"]
    assert all("width=768" in text for text in texts)


@pytest.mark.gpu
@pytest.mark.parametrize("disease", [None, *patients.SICK])
def test_on_this_gpu_it_names_the_disease_first_and_nothing_in_a_healthy_script(diagnose, monkeypatch, disease):
    if "Simulated" in torch.cuda.get_device_name():
        pytest.skip("its times mean nothing")
    monkeypatch.setenv("EFFGPU_SECONDS", "0.5")  # about 10 s in all
    large = torch.cuda.get_device_capability() >= (8, 0)
    found, _ = diagnose(disease, None, **patients.FILLING if large else {})
    print(found)
    assert found.measured
    names = [one.name for one in found.findings]
    expected = patients.SICK[disease][0] if disease else None
    assert names[:1] == [expected] * bool(disease), found
    if expected not in (LAUNCHING, OPTIMIZER):
        assert LAUNCHING not in names, found


# --- replays ---


def seconds(*events, **about):
    return Timeline(tuple(events), T4, launch=1e-5, **about).seconds()


def of(duration):
    """A kernel that takes so many seconds on a T4."""
    bytes_moved = int(duration * T4.bandwidth * 0.95)
    assert bytes_moved > T4.cache, "or the cache makes it faster"
    return Event(KERNEL, None, (Kernel("add", OTHER, "fp32", 0, bytes_moved),))


def test_without_waits_loading_hides_behind_the_gpu_and_with_one_it_does_not():
    work, wait, load = of(1e-3), Event(READ, None, waits=True), (5e-4, 5e-4, 5e-4)
    assert seconds(work, load=load) == pytest.approx(1e-3, rel=1e-3)
    assert seconds(work, wait, load=load) == pytest.approx(1.5e-3 + 2e-5 + T4.kernel, rel=1e-2)
    assert seconds(work, wait, load=(3e-3,) * 3, workers=2) == pytest.approx(3e-3, rel=0.02), "workers load meanwhile"


def test_a_batch_and_work_after_a_steps_last_wait_find_the_gpu_idle():
    work, wait, batch, own = of(1e-3), Event(READ, None, waits=True), Event(LOAD, None, calls=0.0), Site("a.py", 1)
    drawing, line = Event(OWN, own, calls=0.0), {own: 5e-4}
    for kept, about in ((batch, {"load": (5e-4,) * 3}), (drawing, {"working": line})):
        assert seconds(kept, wait, work, **about) == pytest.approx(1e-3, rel=0.05), "while the last step's work runs"
        assert seconds(wait, kept, work, **about) == pytest.approx(1.5e-3, rel=0.05)
    twice = seconds(wait, batch, work, batch, work, load=(5e-4,) * 3)
    assert twice == pytest.approx(2.25e-3, rel=0.05), "the second half is loaded while the GPU works"
    assert seconds(wait, batch, work, load=(5e-4,) * 3, workers=2) == pytest.approx(1e-3, rel=0.05)

    timeline = Timeline((wait, batch, drawing, work), T4, load=(5e-4,) * 3, working=line, launch=1e-6)
    names = [span.name for span in timeline.spans() if span.track == CPU]
    assert names == ["read a value", "wait for the value", "load", "work of the script's own", "add"]


def test_a_copy_from_ordinary_memory_makes_the_cpu_wait_and_takes_longer():
    size = 12_000_000
    pinned = seconds(Event(COPY, None, bytes=size, pinned=True), of(1e-3))
    assert pinned == pytest.approx(1e-3 + size / 11e9, rel=1e-2)
    ordinary = seconds(Event(COPY, None, bytes=size, waits=True), of(1e-3))
    assert ordinary == pytest.approx(1e-3 + size / 3.7e9, rel=1e-2)


@pytest.mark.parametrize("width", [64, 2048])  # bound by the CPU, and by the GPU
def test_a_replay_takes_as_long_as_predicted_without_waits_and_with_many(width):
    def waiting(read=torch.Tensor.item):
        weights = [torch.randn(width, width) for _ in range(20)]
        return lambda: [read((weight @ weight).norm()) for weight in weights]

    for variant, tolerance in ((with_rows(training(width, torch.optim.AdamW), 256, width), 0.02), (waiting, 0.05)):
        replayed, predicted = predict(variant, T4).timeline().range(), predict(variant, "T4").time()
        assert replayed == pytest.approx((predicted.expected, predicted.low, predicted.high), rel=tolerance)
    reads = partial(waiting, torch.Tensor.item), partial(waiting, torch.Tensor.detach)
    one, two = (predict(variant, T4).timeline().off for variant in reads)
    assert one == pytest.approx(two), "the GPU's work is as uncertain with waits as without"


# --- what is observed ---


def observe(function, batch=(), **options):
    observer = Observer(batch, **options)

    def plan():
        with observer.looking():
            yield 1

    drive(plan(), partial(function, *batch))
    return observer


@pytest.mark.parametrize(
    "function",
    [
        lambda: torch.ones(2).sum().item(),
        lambda: bool(torch.ones(1) > 0),
        lambda: torch.ones(2).tolist(),
        lambda: torch.ones(2).cpu().numpy(),
        lambda: torch.ones(2).numpy(),
        lambda: torch.ones(3).nonzero(),
        lambda: torch.ones(3)[torch.ones(3) > 0],
    ],
)
def test_a_wait_is_seen_once_with_its_line(function):
    (event,) = observe(function).events
    assert (event.kind, event.waits) == (READ, True)
    assert (event.site.file, event.site.line) == (__file__, function.__code__.co_firstlineno)


def test_what_neither_waits_nor_copies_the_batch_is_no_event():
    def step(rows):
        return rows[1:], rows[torch.tensor([0])], rows.to(torch.float64), torch.ones(3).to("cpu")  # not of the batch

    assert not observe(step, (ROWS,)).events


def test_what_optimizers_and_scalers_read_is_nobodys_wait():
    parameter = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([parameter], foreach=False), torch.amp.GradScaler("cpu")

    def step():
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    found = observe(step)
    assert [(event.kind, event.waits) for event in found.events] == [(KERNEL, True)], "the scaler's takes its time"
    assert list(found.optimizers) == [optimizer]


@pytest.mark.parametrize(
    ("move", "pinned", "rows", "waits"),
    [
        (lambda rows: rows.to("cpu", non_blocking=True), True, 8192, False),
        (lambda rows: rows.to("cpu"), True, 8192, True),
        (lambda rows: rows.to("cpu", non_blocking=True), False, 8192, True),
        (lambda rows: rows.to("cpu", non_blocking=True), False, 8, False),
        (lambda rows: rows.to(device="cpu"), False, 8, True),
        (lambda rows: rows.to("cpu", torch.float32, False, True), True, 8192, True),
        (lambda rows: rows.to("cpu", torch.float32, True, False), True, 8192, False),
    ],
)
def test_a_copy_waits_unless_it_asks_for_none_and_is_pinned_or_small(move, pinned, rows, waits):
    (event,) = observe(move, (torch.ones(rows, 4),), pinned=pinned).events
    assert (event.kind, event.bytes, event.waits) == (COPY, rows * 16, waits)


def test_a_graph_is_unused_until_a_backward_pass_uses_it():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def validate():
        return model(ROWS).square().mean()

    assert not observe(lambda: validate().backward()).graphs.unused()
    ((site, size),) = observe(validate).graphs.unused().items()
    assert site.line == validate.__code__.co_firstlineno + 1
    assert 4 * ROWS.numel() <= size < 4 * 64 * 64, "weights are there anyway"
    with torch.no_grad():
        assert not observe(validate).graphs.unused()


@pytest.mark.parametrize(
    "lose",
    [
        lambda taught, gave: (taught - gave.detach()).square().mean(),
        lambda taught, gave: nn.functional.cross_entropy(taught, gave.argmax(1)),
        lambda taught, gave: nn.functional.kl_div(taught, gave.detach().softmax(1)),
    ],
    ids=["detached", "labels", "computed on"],
)
def test_what_a_teacher_gives_is_needed_in_each_step_and_its_graph_takes_memory_alone(lose):
    teacher, model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), nn.Linear(64, 64)

    def distil():
        gave = teacher(ROWS)
        lose(model(ROWS), gave).backward()

    graphs = observe(distil).graphs
    assert not graphs.unused()
    (told,) = graphs.tell()
    assert f":{distil.__code__.co_firstlineno + 1} for a backward pass that never comes" in told


def test_the_share_of_padding_is_that_of_all_texts_but_those_alone_or_all_alike():
    left, right = [[5, 6, 0, 0], [7, 0, 0, 0]], [[0, 0, 5, 6], [0, 0, 0, 7]]
    types, positions = [[0, 0, 0, 0], [0, 1, 0, 0]], [[0, 1, 2, 3], [0, 1, 2, 3]]
    distances = [[0, 1, 2, 2], [3, 0, 1, 2], [4, 3, 0, 1]]
    alone = [[5, 6, 7, 0]]  # one text has no padding
    for texts in (left, right):
        looked_up = [torch.tensor(each) for each in (texts, types, positions, distances, alone)]
        assert padding_shares(looked_up) == (5 / 8, 1 - (2**2 + 1) / (2 * 4**2))  # of tokens, and of a text's pairs


def test_no_padding_is_what_only_looks_like_it():
    texts = torch.randint(100, 1000, (64, 32), generator=torch.Generator().manual_seed(0))
    types = (torch.arange(32) >= torch.arange(8, 24).repeat(4)[:, None]).long()  # of a text's first and second part
    buckets = (torch.arange(32) - torch.arange(32)[:, None]).clamp(-8, 8) + 8  # of T5's relative positions
    assert padding_shares([texts, types, buckets]) == (0, 0)
    columns = torch.stack([torch.randint(each, (64,)) + 10 * number for number, each in enumerate((1, 2, 3, 9))], 1)
    board = torch.nn.functional.pad(torch.randint(1, 9, (64, 5, 5)), (1, 1, 1, 1)).flatten(1)  # with walls around it
    for tokens in (columns, board):
        assert padding_shares([tokens]) == (0, 0)
    positions = 5000 + torch.arange(32).expand(64, -1)
    texts[:, 16:] = 0
    assert padding_shares([texts, positions, types, buckets]) == (1 / 2, 3 / 4)


def test_autocast_is_tried_also_where_the_step_switches_it_off_and_is_what_it_was():
    def variant():
        step = training(2048)()
        return lambda rows: torch.autocast("cuda", torch.bfloat16, enabled=False)(step)(rows)

    methods = torch.autocast.__enter__, torch.autocast.__exit__
    found = effgpu.doctor(variant, [torch.ones(256, 2048)])
    assert found.findings[0].name == PRECISION
    with pytest.raises(RuntimeError, match="a fault"), in_16_bits(T4):
        raise RuntimeError("a fault")
    assert (torch.autocast.__enter__, torch.autocast.__exit__) == methods


@pytest.mark.parametrize("on", ["a GPU", "none"])
def test_a_step_that_fails_in_16_bits_alone_is_no_failure(on, request):
    def check(loss):
        assert not torch.is_autocast_enabled("cuda"), "expected fp32"

    if on == "none":
        found = effgpu.doctor(training(report=check), [ROWS])
    else:
        variant, loader, _ = request.getfixturevalue("on_gpu")

        def checked():
            step = variant()
            return lambda rows: step(rows) or check(None)

        found = effgpu.doctor(checked, loader)
        assert OPTIMIZER in measured(found)
    assert PRECISION not in [one.name for one in found.examined]
    (note,) = (note for note in found.notes if "in 16 bits the step fails" in note)
    assert "AssertionError: expected fp32 (" in note and "test_doctor.py:" in note


def test_anomaly_mode_is_named_and_saves_what_switching_it_off_does():
    def step_of(on):
        step = training(1024)()

        def run(rows):
            with torch.autograd.set_detect_anomaly(on):
                step(rows)

        return run

    before, after = (effgpu.doctor(partial(step_of, on), [torch.ones(1024, 1024)]) for on in (True, False))
    (found,) = (one for one in before.findings if one.name == ANOMALY)
    assert found.seconds == pytest.approx(before.seconds - after.seconds, rel=0.02)
    assert found.lines[0].code == "step(rows)" and re.search(r"of \d+ operations .* \d+ gradients", found.note)
    waits, none = ([one.note for one in each.examined if one.name == WAITS] for each in (before, after))
    assert waits == none, "they are no hidden waits"
    assert ANOMALY not in [one.name for one in after.examined]
    assert not any("decides by a value" in note for note in before.notes)


@pytest.mark.parametrize(("dtype", "scales"), [("float16", False), ("float16", True), ("bfloat16", False)])
def test_fp16_without_a_scaler_is_warned_of(dtype, scales):
    def variant():
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = nn.Linear(64, 64, device=device)
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler(device, enabled=scales)

        def step(rows):
            with torch.autocast(device, getattr(torch, dtype)):
                loss = model(rows.to(device)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    found = effgpu.doctor(variant, [torch.ones(64, 64)])
    assert ("fp16 without a GradScaler" in str(found)) is (dtype == "float16" and not scales)


def test_launches_that_block_are_named_and_save_what_a_launch_ahead_does(monkeypatch):
    data = [torch.ones(64, 256)]
    after = effgpu.doctor(training(256), data)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    before = effgpu.doctor(training(256), data)
    (found,) = (one for one in before.findings if one.name == BLOCKING)
    assert found.seconds == pytest.approx(before.seconds - after.seconds, rel=0.02) and found.seconds > 0
    assert not found.lines and BLOCKING not in [one.name for one in after.examined]
    assert "assumed: the CPU waits for each kernel, as CUDA_LAUNCH_BLOCKING=1 asks for" in str(before)


@pytest.mark.parametrize("gpu, named", [("T4", True), ("A100 80 GB", False)])
def test_it_says_where_no_published_time_checks_the_step(gpu, named):
    def variant():
        query = torch.ones(2, 4, 64, 32, requires_grad=True)
        return lambda: nn.functional.scaled_dot_product_attention(query, query, query).mean().backward()

    found, predicted = effgpu.doctor(variant, gpu=gpu), predict(variant, gpu)
    said = ["no published time to check this by: transformers in fp32 on T4"] * named
    assert [line for line in found.notes if line.startswith("no published")] == said
    assert [line for line in repr(predicted).splitlines() if line.startswith("no published")] == said


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_that_memory_has_no_need_of_is_named_and_saves_what_leaving_it_out_does(reentrant, monkeypatch):
    def training(is_checkpointed):
        layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(4))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)

        def step():
            out = torch.ones(2048, 512, requires_grad=True)
            for layer in layers:
                out = checkpoint(layer, out, use_reentrant=reentrant) if is_checkpointed else layer(out)
            out.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    before, after = (effgpu.doctor(partial(training, each), gpu="T4") for each in (True, False))
    (found,) = (one for one in before.findings if one.name == CHECKPOINTS)
    assert found.seconds == pytest.approx(before.seconds - after.seconds, rel=0.05)
    assert found.note == f"{4 * (2 + reentrant)} operations run twice", "the other kind stops after what is kept"
    assert CHECKPOINTS not in [one.name for one in after.examined]
    monkeypatch.setattr(Prediction, "verdict", lambda *_: MAY_NOT_FIT)
    full = effgpu.doctor(partial(training, True), gpu="T4")
    assert CHECKPOINTS not in [one.name for one in full.examined]


@pytest.mark.parametrize("gpu", ["T4", "A100"])
def test_numbers_in_64_bits_come_first_and_those_in_32_save_what_is_promised(gpu):
    def training(kind):
        def variant():
            model = nn.Sequential(nn.Linear(256, 2048), nn.LayerNorm(2048), nn.Linear(2048, 256)).to(kind)
            optimizer = torch.optim.Adam(model.parameters())

            def step():
                optimizer.zero_grad()
                model(torch.ones(8192, 256, dtype=kind)).square().mean().backward()
                optimizer.step()

            return step

        return variant

    before, after = (effgpu.doctor(training(kind), gpu=gpu) for kind in (torch.float64, torch.float32))
    first = before.findings[0]
    assert first.name == DOUBLE and first.lines[0].code.startswith("model(torch.ones(")
    assert first.seconds == pytest.approx(before.seconds - after.seconds, rel=0.02)
    assert DOUBLE not in [one.name for one in after.examined]


def test_without_a_loader_tf32_saves_less_than_16_bits_and_they_are_no_pair():
    found = effgpu.doctor(with_rows(training(2048), 1024, 2048), gpu="A100")
    assert "data loading and copies were not looked at: give the loader" in str(found)
    assert not {LOADING, COPYING} & {one.name for one in found.examined}
    assert [one.name for one in found.findings[:2]] == [PRECISION, TF32]
    assert found.together is None, "16 bits leave nothing to TF32"


# --- what is told ---


@pytest.fixture(scope="module")
def found():
    """What doctor finds on a predicted T4 in a small model with a large batch."""
    return effgpu.doctor(training(), [torch.ones(4096, 64)])


def test_each_finding_says_its_ceiling_its_range_where_it_is_and_what_to_change(found):
    lines, first = str(found).splitlines(), found.findings[0]
    assert lines[0].startswith(f"T4: {format_seconds(found.seconds)} per step [") and lines[0].endswith("(predicted)")
    saves = f"could save {format_seconds(first.seconds)} [{format_seconds(first.low)}, {format_seconds(first.high)}]"
    assert lines[2] == f"1. {first.name}: {saves}, {first.seconds / found.seconds:.0%} of the step"
    assert re.search(rf"^   change  {re.escape(first.advice)} \(lessons? {first.lesson}\)$", str(found), re.MULTILINE)
    assert "memory, predicted: " in str(found)
    assert first.advice in found._repr_html_() and found._repr_html_().count("<li>") == len(found.findings)


def test_two_that_were_tried_together_save_less_than_their_sum():
    found = effgpu.doctor(training(optimizer=partial(torch.optim.Adam, foreach=False)), [ROWS])
    first, second = found.findings[:2]
    assert max(first.seconds, second.seconds) <= found.together.seconds < first.seconds + second.seconds
    assert f"{first.name} and {second.name}, together: could save " in str(found)


def test_what_may_be_large_or_nothing_is_no_finding():
    maybe = Finding(LAUNCHING, 0.03, 0.0, 0.05, lesson="05 and 14", advice="a larger batch")
    found = Diagnosis("T4", 0.1, 0.1, 0.1, False, (maybe,))
    told = "launching, perhaps: could save 30.0 ms [0 s, 50.0 ms], 30% of the step; to try: a larger batch (lessons 05"
    assert not found.findings and told in str(found)


def test_the_largest_batch_is_that_of_the_step_with_so_many_samples(found):
    expected = effgpu.largest(lambda times: with_rows(training(), 4096 * times, 64), "T4")
    told = f": fits; a batch {expected.fits} times as large fits, too, and {expected.may_fit} times as large may"
    assert found.batches.fits == expected.fits and told in str(found)


def test_of_a_step_that_takes_one_size_the_largest_batch_is_not_known():
    def variant():
        step = training()()
        return lambda rows: step(rows.view(8, 64))

    assert effgpu.doctor(variant, [ROWS]).batches is None


def test_a_batch_stays_what_it_is_when_its_tensors_change():
    from transformers import BatchEncoding

    batch = ({"rows": ROWS, "name": "a"}, [ROWS], BatchEncoding({"rows": ROWS}), Event(KERNEL, None, bytes=ROWS))
    changed = change_tensors(batch, torch.neg)
    assert [type(item) for item in changed] == [dict, list, BatchEncoding, Event]
    assert changed[0]["name"] == "a" and torch.equal(batch[2]["rows"], ROWS), "the batch itself is left as it is"
    for rows in (changed[0]["rows"], changed[1][0], changed[2]["rows"], changed[3].bytes):
        assert torch.equal(rows, -ROWS)


def test_a_slow_loader_with_many_workers_is_let_go_while_it_is_warmed_up_too(monkeypatch):
    taken = []
    monkeypatch.setattr(batches, "time", SimpleNamespace(perf_counter=lambda: 4.0 * len(taken)))
    assert time_loading(lambda: taken.append(1), SimpleNamespace(num_workers=10)) == (4.0, 4.0, 4.0)
    assert len(taken) == 3 + 3 * 10, "three batches for more than 10 s, and three turns of ten"


def test_how_long_a_worker_hands_a_batch_over_is_measured_and_told_where_loading_takes_no_longer():
    small, large = {"texts": torch.ones(64, 64), "labels": torch.ones(64)}, [torch.ones(1 << 24)]
    took = time_handing([small], NOTHING)
    assert 1e-5 < took < 0.1
    assert time_handing([large], NOTHING) > (1 << 26) / 100e9, "in memory of its own each time"
    assert time_handing([small], (10.0, 9.0, 11.0)) == 0.0
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "batch", [(), ([1, 2],), {"rows": ROWS, "of": lambda: 0}], ids=["none", "no tensors", "a function"]
)
def test_what_no_worker_hands_over_is_not_known(batch):
    assert time_handing([{"rows": ROWS}, batch], NOTHING) == 0.0


def test_who_owns_the_peak_is_told_with_the_line(found):
    site, size = next((site, size) for site, owner, size in found.memory.peak if owner == "activations")
    assert "loss = model(rows.to(" in str(site) and size >= 2 * 4096 * 64 * 4
    assert sum(size for *_, size in found.memory.peak) == found.memory.allocated
    freed = format_bytes(found.memory.owners["activations"])
    assert "to free" not in str(found) and "CUDA's own" not in str(found), "it fits"
    crowded = str(replace(found, memory=replace(found.memory, gpus=(replace(T4, memory=GiB // 2),))))
    assert "  100 MiB – 450 MiB of it are CUDA's own" in crowded
    assert f"to free at most: {freed} by checkpointing (lesson 07) or accumulating (06), " in crowded


# --- on a GPU ---


@pytest.fixture
def on_gpu(simulate_gpu, monkeypatch):
    """A variant and a loader on a simulated T4: 100 ms a step, 40 of them to load, 20 to copy, 30 to optimize."""
    gpu = simulate_gpu("Tesla T4", (7, 5), 15 * GiB)
    resident, calls = torch.ones(8, 64), []
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: gpu.clock))  # the CPU is never ahead
    monkeypatch.setattr(module, "change_tensors", lambda batch, change: (resident,))
    monkeypatch.setattr(module, "_largest_batch", lambda *arguments: None)

    class Costly(torch.optim.SGD):
        def step(self):
            gpu.clock += 0.03
            super().step()

    def variant():
        model = nn.Linear(64, 64)
        optimizer = Costly(model.parameters(), lr=0.1)

        def step(rows):
            calls.append(1)
            gpu.clock += 0.0 if rows is resident else 0.02
            gpu.clock += 0.004 if torch.is_autocast_enabled("cuda") else 0.01
            gpu.clock -= 0.003 if torch.backends.cuda.matmul.fp32_precision == "tf32" else 0.0
            model(rows.to("cpu")).sum().backward()
            optimizer.step()

        return step

    def loader():
        while True:
            gpu.clock += 0.04
            yield ROWS

    return variant, loader, calls


def measured(found):
    return {one.name: one.seconds for one in found.examined if one.measured}


def test_on_a_gpu_each_change_is_measured_in_turns_and_the_best_two_together(on_gpu):
    variant, loader, calls = on_gpu
    found = effgpu.doctor(variant, loader)
    assert found.measured
    assert (found.seconds, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    assert re.search(r"^1\. data loading: could save .* 40% of the step \(measured\)$", str(found), re.MULTILINE)
    assert measured(found) == pytest.approx({LOADING: 0.04, OPTIMIZER: 0.03, COPYING: 0.02, PRECISION: 0.006})
    assert [one.name for one in found.findings if one.measured] == [LOADING, OPTIMIZER, COPYING, PRECISION]
    assert (found.together.name, found.together.measured) == ("data loading and optimizer", True)
    assert found.together.seconds == pytest.approx(0.07)
    assert len(calls) < 600, "steps of 100 ms take less than 60 s, with the walks"
    # launching: the measured time of a step that has its batch, less the predicted work
    (launching,) = (one for one in found.examined if one.name == LAUNCHING)
    work = sum(max(row.seconds, row.number * T4.kernel) for row in found.memory.time().table.values())
    assert launching.seconds == pytest.approx(0.04 - work, rel=0.01)
    assert not launching.measured, "a predicted part makes it predicted"
    assert launching.low < launching.seconds < launching.high <= 0.04


def test_the_intervals_of_all_changes_hold_together(on_gpu, monkeypatch):
    """Four changes, loading and copying at once, and pairs."""
    variant, loader, _ = on_gpu
    asked = []

    def interval(blocks, confidence=CONFIDENCE):
        asked.append(confidence)
        return interval_of_blocks(blocks, confidence)

    monkeypatch.setattr(turns, "interval_of_blocks", interval)
    effgpu.doctor(variant, loader)
    number = round((1 - CONFIDENCE) / (1 - asked[-1]))
    assert number > 5 and asked[-number:] == [divide_confidence(number)] * number


def test_on_a_gpu_no_workers_are_advised_where_these_take_longer(on_gpu, monkeypatch):
    variant, loader, _ = on_gpu
    monkeypatch.setattr(batches, "_time_handing", lambda batch: 0.03)
    (loading,) = [one for one in effgpu.doctor(variant, loader).findings if one.name == LOADING]
    assert loading.note == "a worker takes 30.0 ms to hand a batch over" and "num_workers" not in loading.advice


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize(("calling", "blamed"), [(0.5, False), (1.0, True)])
def test_launching_is_blamed_only_where_the_cpu_is_as_slow_as_the_gpu(
    simulate_gpu, monkeypatch, reads, calling, blamed
):
    """A step takes 1.3 times its prediction: the GPU is that slow, or it waits for the CPU's calls."""
    gpu, cpu = simulate_gpu("Tesla T4", (7, 5), 15 * GiB), SimpleNamespace(clock=0.0)
    monkeypatch.setattr(turns, "time", SimpleNamespace(perf_counter=lambda: cpu.clock))
    monkeypatch.setenv("EFFGPU_SECONDS", "0.001")
    rows, took = torch.ones(2**20), 0.0

    def step():
        for number in range(8):
            rows.neg()
            cpu.clock += calling * took / 8
            if reads and number == 5:
                rows[0].item()
                cpu.clock += took  # it waits
        gpu.clock += took

    replayed = predict(lambda: step, T4).timeline()
    took = 1.3 * replayed.seconds()
    found = effgpu.doctor(lambda: step)
    assert found.seconds == pytest.approx(took)
    (launching,) = (one for one in found.examined if one.name == LAUNCHING)
    assert launching.seconds == pytest.approx(0.3 * replayed.seconds() if blamed else 0.0, rel=0.1)


def test_a_turn_leads_in_for_50_ms(simulate_gpu):
    gpu = simulate_gpu("Tesla T4", (7, 5), 15 * GiB)
    effgpu.doctor(lambda: gpu.step)  # 10 ms
    short = {"step": "s", "record": "r", "wait": "w"}
    turns = re.findall("w(s+)r(s+)r", "".join(short.get(asked, "") for asked in gpu.log))
    assert len(turns) > 60 and set(turns[-60:]) == {(5 * "s", 10 * "s")}


def test_tf32_is_measured_where_a_gpu_has_it_and_switched_back(on_gpu, monkeypatch):
    variant, loader, _ = on_gpu
    monkeypatch.setattr(torch.cuda.get_device_properties(), "name", "NVIDIA A100-SXM4-80GB")
    before = torch.backends.cuda.matmul.fp32_precision
    assert measured(effgpu.doctor(variant, loader))[TF32] == pytest.approx(0.003)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_measurements_on_a_gpu_can_be_cut_short(simulate_gpu, monkeypatch):
    gpu, calls = simulate_gpu("Tesla T4", (7, 5), 15 * GiB), []
    for seconds in ("3", "0.1"):
        monkeypatch.setenv("EFFGPU_SECONDS", seconds)
        gpu.log.clear()
        effgpu.doctor(lambda: gpu.step)
        calls.append(gpu.log.count("step"))
    assert calls[1] < calls[0] / 3


def test_what_workers_load_while_the_same_batch_is_used_is_not_counted_as_fast_loading(on_gpu):
    variant, loader, _ = on_gpu
    slow, ahead, taken = loader(), [], []

    class Workers:
        """Two workers, which load ahead while the step runs on without them: what lies there costs nothing."""

        num_workers = 2

        def __iter__(self):
            while True:
                taken.append(1)
                yield ahead.pop() if ahead else next(slow)

    def working_ahead():
        step = variant()

        def run(rows):
            if not taken:
                ahead[:] = [ROWS] * 4
            taken.clear()
            step(rows)

        return run

    assert measured(effgpu.doctor(working_ahead, Workers()))[LOADING] == pytest.approx(0.04)


def test_on_a_gpu_that_is_not_in_the_table_what_is_measured_is_told(on_gpu, monkeypatch):
    variant, loader, _ = on_gpu
    monkeypatch.setattr(torch.cuda.get_device_properties(), "name", "Voodoo 2")
    found = effgpu.doctor(variant, loader)
    assert len(measured(found)) == len(found.examined) == 4
    assert "nothing is predicted: Voodoo 2 is not in the table of GPUs" in str(found)


def test_a_gpu_that_is_named_is_predicted_also_on_a_gpu(on_gpu):
    variant, loader, calls = on_gpu
    found = effgpu.doctor(variant, loader, "A100")
    assert not found.measured and not any(one.measured for one in found.examined)
    assert len(calls) == 6, "two that are watched, and two in each walk"


# --- the command line ---

TINY = """
import torch

def variant():
    model = torch.nn.Linear(64, 64)
    return lambda rows: model(rows).sum().backward()

loader, number = [torch.ones(8, 64)], 3
"""


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        (["--loader", "loader", "--gpu", "A100"], 0, r"A100 40 GB: .*\n\n1. launching: "),
        (["--loader", "nothing"], 2, "effgpu: error: .*: expected a loader called nothing"),
        (["--loader", "number"], 2, "effgpu: error: loader: expected batches that can be iterated over, got int"),
        (["--gpu", "Voodoo 2"], 2, "effgpu: error: gpu: expected one of"),
        ([], 2, "effgpu: error: step: expected one that takes nothing, as there is no loader"),
    ],
)
def test_the_command_prints_the_table_or_what_it_expected(options, code, told, tmp_path, capsys):
    (tmp_path / "train_tiny.py").write_text(TINY)
    assert main(["doctor", f"{tmp_path}/train_tiny.py:variant", *options]) == code
    assert re.match(told, "".join(capsys.readouterr()))


@pytest.mark.slow
def test_the_trainer_as_the_docs_show_it(tmp_path):
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    text = torch.arange(32)
    data = [{"input_ids": text, "labels": text[label]} for label in (0, 1) * 40]
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}

    def make_trainer():
        arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=8, report_to=[])
        model = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
        return Trainer(model, arguments, train_dataset=data)

    names = {"make_trainer": make_trainer}
    page = Path(__file__).parent.parent / "docs" / "doctor.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, names)
    found = effgpu.doctor(names["variant"], names["loader"])
    assert found.findings[0].name == LAUNCHING
    assert {LOADING, COPYING, OPTIMIZER} <= {one.name for one in found.examined}


# --- bad input, and what is left behind ---


def test_emptied_optimizers_are_what_they_were_also_after_an_error():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    plain, scheduled = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    wrapped = vars(scheduled)["step"]
    with pytest.raises(RuntimeError, match="a fault"), emptied([plain, scheduled]):
        plain.step()
        scheduled.step()
        assert plain.step(lambda: 3) == 3, "a closure is called"
        raise RuntimeError("a fault")
    assert torch.equal(weight, torch.ones(2))
    assert "step" not in vars(plain) and vars(scheduled)["step"] is wrapped


failures = (ZeroDivisionError, 2, "failed in call 2"), (torch.OutOfMemoryError, 1, "ran out of memory in call 1")


@pytest.mark.parametrize(("error", "failing", "told"), failures)
def test_a_step_that_fails_says_in_which_call_and_leaves_nothing_behind(error, failing, told):
    calls, hooks = itertools.count(1), len(_global_optimizer_pre_hooks)

    def report(loss):
        if next(calls) == failing:
            raise error("a fault")

    with pytest.raises(error, match="a fault") as caught:
        effgpu.doctor(training(report=report), [ROWS])
    assert caught.value.__notes__[0] == f"doctor: the step {told}. A diagnosis calls it often."
    assert len(_global_optimizer_pre_hooks) == hooks


@pytest.mark.parametrize(
    ("variant", "loader", "gpu", "told"),
    [
        (lambda: lambda: None, [ROWS], None, "step: expected one that takes one batch, as there is a loader"),
        (training(), iter([ROWS] * 5), None, "loader: it ended after 5 batches and does not start anew"),
        (training(), [ROWS], "16 GiB", "gpu: expected a GPU whose speed is known"),
    ],
)
def test_bad_input_says_what_was_expected(variant, loader, gpu, told):  # and the command refuses more
    with pytest.raises((TypeError, ValueError, RuntimeError), match=told):
        effgpu.doctor(variant, loader, gpu)


def test_a_step_that_cannot_be_predicted_still_tells_what_was_measured():
    with pytest.raises(RuntimeError, match="predict: the shape of a result") as caught:
        effgpu.doctor(training(report=lambda loss: loss.item() and loss.reshape(1).long().bincount()), [ROWS])
    (note,) = caught.value.__notes__
    assert "the loader takes " in note and "the CPU waits at test_doctor.py:" in note


def test_a_function_may_make_the_loader_anew_and_the_random_state_is_the_readers():
    before, made = torch.get_rng_state(), []
    assert effgpu.doctor(training(), lambda: made.append(torch.randn(8, 64)) or iter(made[-1:] * 5)).findings
    assert len(made) > 3 and torch.equal(torch.get_rng_state(), before)
