"""Tests of doctor's ranking: what hides what, advice that fits the script, ceilings that hold no other gain."""

import re
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import effgpu
from effgpu.attaching.sites import Site
from effgpu.diagnosing import advice, ranking
from effgpu.diagnosing.agreement import check_walked, find_branches
from effgpu.diagnosing.causes import (
    CAUSES,
    COPYING,
    LAUNCHING,
    LOADING,
    OPTIMIZER,
    PADDING,
    PRECISION,
    UPDATES,
    VALIDATION,
    WAITS,
)
from effgpu.diagnosing.diagnosis import Diagnosis, Finding
from effgpu.diagnosing.doctor import diagnose_script, scripts
from effgpu.diagnosing.lists import Updates
from effgpu.diagnosing.observed import Observed
from effgpu.diagnosing.ranking import rank
from effgpu.predicting.facts import UNTIMED, Fact
from effgpu.predicting.gpus import find_gpu
from effgpu.predicting.kinds import OTHER, PRODUCT, Kernel
from effgpu.predicting.predict import predict
from effgpu.predicting.timeline import COPY, KERNEL, READ, UPDATE, Event

T4 = find_gpu("T4")
ROWS = torch.ones(8, 64)


def training(width, rows, optimizer=torch.optim.SGD):
    def variant():
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        trained, batch = optimizer(model.parameters()), torch.ones(rows, width)

        def step():
            model(batch).square().mean().backward()
            trained.step()
            trained.zero_grad()

        return step

    return variant


@pytest.fixture(scope="module")
def busy():
    """A step that keeps a T4 busy with products in fp32, and its events in 16 bits."""
    predicted = predict(training(2048, 512), "T4")
    halved = tuple(
        event._replace(kernels=tuple(kernel._replace(format="fp16") for kernel in event.kernels))
        for event in predicted.events
    )
    return predicted, halved


def test_two_that_take_as_long_hide_each_other_and_are_named_together(busy):
    predicted, halved = busy
    step = predicted.timeline().seconds()
    seen = Observed(halved=halved, has_loader=True, loading=(step, 0.99 * step, 1.01 * step), workers=1)
    found = rank(T4, seen, predicted)
    assert not {LOADING, PRECISION} & {one.name for one in found.findings}, "each alone saves nothing"
    (pair,) = found.hidden
    assert set(pair.name.split(" and ")) == {LOADING, PRECISION} and pair.seconds > 0.4 * found.seconds
    text = str(found)
    assert text.splitlines()[2].startswith(f"1. {pair.name}: could save ")
    assert text.splitlines()[3].startswith("   seen    each hides the other; alone could save: ")
    (small,) = (line for line in text.splitlines() if "below 5% each: " in line)
    assert not any(name in small for name in (LOADING, PRECISION)) and "nothing above" not in text
    for name in (LOADING, PRECISION):
        assert CAUSES[name].advice(seen) in pair.advice
    told = found.to_dict()
    assert told["hidden"][0]["share"] == pytest.approx(pair.seconds / found.seconds)
    fast = rank(T4, replace(seen, loading=(step / 9,) * 3), predicted)
    assert not fast.hidden and fast.findings[0].name == PRECISION


def test_a_pair_stands_in_the_ranking_in_place_of_its_two():
    """Each saves something alone, and the two much more."""
    ones = (
        Finding(OPTIMIZER, 0.02, 0.01, 0.03),
        Finding(COPYING, 0.01, 0.005, 0.02),
        Finding(WAITS, 0.001, 0.0, 0.002),
    )
    both = frozenset({COPYING, WAITS})
    result = Diagnosis("T4", 0.1, 0.1, 0.1, False, ones)
    pairs = {both: (0.03, 0.02, 0.04), frozenset({OPTIMIZER, COPYING}): (0.031, 0.02, 0.04)}
    hidden = ranking._hidden(result, pairs)
    shown = replace(result, hidden=hidden, together=ranking._together(result, pairs, hidden))
    lines = str(shown).splitlines()
    assert [line[3:].partition(":")[0] for line in lines if line[:1].isdigit()] == [f"{COPYING} and {WAITS}", OPTIMIZER]
    assert f"alone could save: {COPYING} 10.0 ms, {WAITS} 1.00 ms" in str(shown)
    assert shown.together is None and "together" not in str(shown), "it would tell of half of a pair"
    assert ranking._together(result, pairs, ()) is not None
    less = dict.fromkeys(pairs, (0.001, 0.0, 0.002))
    assert ranking._together(result, less, ()) is None, "either alone saves more"


def test_of_measured_pairs_those_are_named_that_save_more_than_both(busy):
    predicted, halved = busy
    one, other = frozenset({LOADING}), frozenset({PRECISION})
    saved = {one: (0.001, 0.0, 0.002), other: (0.002, 0.001, 0.003), one | other: (0.06, 0.05, 0.07)}
    seen = Observed(halved=halved, has_loader=True, workers=1, step=(0.1, 0.1, 0.1), saved=saved)
    (pair,) = rank(T4, seen, predicted).hidden
    assert pair.measured and pair.name == "precision and data loading" and pair.seconds == 0.06


def test_what_may_be_large_or_nothing_is_not_called_nothing():
    found = Diagnosis("T4", 0.1, 0.1, 0.1, False, (Finding(LAUNCHING, 0.067, 0.0, 0.08),))
    assert "nothing surely above 5% of the step" in str(found)
    assert "launching, perhaps: could save 67.0 ms" in str(found)
    assert "nothing above 5% of the step" in str(replace(found, examined=(Finding(LAUNCHING, 0.001, 0.0, 0.08),)))
    assert [one["name"] for one in found.to_dict()["perhaps"]] == [LAUNCHING]


def test_that_a_step_does_not_fit_is_said_before_its_time(busy):
    predicted, _ = busy
    tiny = replace(predicted, gpus=(replace(T4, memory=2**20),))
    found = Diagnosis("T4", 0.1, 0.1, 0.1, False, (), memory=tiny)
    first, second, *_ = str(found).splitlines()
    assert re.fullmatch(r"T4: does not fit: needs .+ – .+ of 1\.00 MiB \(predicted\)", first)
    assert second == "T4: 100 ms per step [100 ms, 100 ms] (predicted), if it had the room"
    assert "<p>T4: does not fit" in found._repr_html_()
    assert str(replace(found, memory=predicted)).startswith("T4: 100 ms per step")
    assert str(replace(found, measured=True)).startswith("T4: 100 ms per step")  # it ran


def test_of_a_step_of_which_a_part_is_not_timed_only_the_least_is_told(busy):
    predicted = replace(busy[0], said=(Fact(UNTIMED, "_ctc_loss computes"),))
    found = Diagnosis("T4", 0.1, 0.08, 0.13, False, (Finding(OPTIMIZER, 0.06, 0.05, 0.07),), memory=predicted)
    assert str(found).startswith("T4: at least 80.0 ms per step (predicted)\n")
    assert "optimizer: could save 60.0 ms [50.0 ms, 70.0 ms], at most 60% of the step" in str(found)
    told = found.to_dict()
    assert (told["seconds"], told["low"], told["high"]) == (None, 0.08, None)
    whole = replace(found, measured=True)
    assert str(whole).startswith("T4: 100 ms per step") and whole.to_dict()["seconds"] == 0.1
    assert ", 60% of the step" in str(replace(found, memory=busy[0]))


def test_on_a_gpu_a_loop_over_weights_is_predicted_beside_what_is_measured(busy, monkeypatch):
    predicted, _ = busy
    site = Site("train.py", 9)
    loop = Updates(site, range(8, 10), rounds=9, calls=9, names=("mul_",))
    scaled = Event(KERNEL, site, (Kernel("mul_", OTHER, "fp32", 0, 4),), inner=site, lasting="weights")
    predicted = replace(predicted, events=predicted.events + (scaled,) * 9)
    ran = {"predicting": (predicted, Observed(updates=(loop,))), "measuring": Observed(step=(0.001,) * 3, stepped=1)}
    monkeypatch.setattr(scripts, "run", lambda program, plans, **_: ran[plans.partition(":")[2]])
    (found,) = (each for each in diagnose_script(None, T4, measured=True).examined if each.name == UPDATES)
    assert not found.measured and found.seconds > 0 and found.lines == (site,)
    assert found.note == "9 calls in 9 rounds of the loop at train.py:9"
    ran["measuring"].compiled = True
    examined = diagnose_script(None, T4, measured=True).examined
    assert UPDATES not in {one.name for one in examined}, "its calls are no fifth, as those of compiled code"


READS = Event(READ, Site("train.py", 3), waits=True)
FILTERS = Event(READ, Site("/x/transformers/trainer.py", 9), waits=True)
MASKS = READS._replace(site=Site("train.py", 3, "transformers/masking_utils.py:354"))
CHOSEN = Event(KERNEL, None, (Kernel("nonzero", OTHER, "fp32", 0, 0),))
MASKED = READS._replace(site=Site("train.py", 4))
COPIED = Event(COPY, None, bytes=1 << 20, waits=True)
ASKS = COPIED._replace(non_blocking=True)
BY_LIBRARY = COPIED._replace(pinned=True, site=Site("train.py", 3, "accelerate/utils/operations.py:160"))
MULTIPLIED = Event(KERNEL, None, (Kernel("mm", PRODUCT, "fp32", 0, 0),))
HALVED = Event(KERNEL, None, (Kernel("mm", PRODUCT, "fp16", 2, 0, product=(1, 1, 1, 1)),))
UPDATED = Event(KERNEL, None, phase=UPDATE)


@pytest.mark.parametrize(
    ("name", "seen", "advice"),
    [
        (LOADING, {"has_loader": True}, "DataLoader(..., num_workers=2, persistent_workers=True)"),
        (LOADING, {"has_loader": True, "workers": 2, "persistent": True}, "DataLoader(..., num_workers=4)"),
        (LOADING, {"has_loader": True, "workers": 8}, "less work per sample"),
        (LOADING, {"has_loader": True, "handing": 0.001}, "whole batches of what is in memory: tensors[rows]"),
        (LOADING, {"has_loader": True, "handing": 0.001, "workers": 2}, "fewer bytes, such as uint8, to hand over"),
        (LOADING, {"has_loader": True, "handing": 0.6, "loading": (1.0,) * 3}, f"{advice._AT_ONCE}; where each sample"),
        (LOADING, {"has_loader": True, "trainer": "transformers"}, "TrainingArguments(dataloader_num_workers=2"),
        (LOADING, {"working": {READS.site: 1.0}}, "what train.py:3 computes, less often; or in a DataLoader's workers"),
        (
            LOADING,
            {"has_loader": True, "working": {READS.site: 1.0}},
            "what train.py:3 computes, less often; or in the DataLoader's workers",
        ),
        (LOADING, {"working": {READS.site: 1.0}, "events": (READS,)}, "what train.py:3 computes, every 100 steps"),
        (PRECISION, {"trainer": "transformers", "halved": (HALVED,)}, "TrainingArguments(fp16=True)"),
        (PRECISION, {"trainer": "lightning", "halved": (HALVED,)}, 'Trainer(precision="16-mixed")'),
        (PRECISION, {"trainer": "accelerate", "halved": (HALVED,)}, 'Accelerator(mixed_precision="fp16")'),
        (PRECISION, {"halved": (HALVED,)}, "with torch.autocast(...)"),
        (OPTIMIZER, {"optimizers": (("SGD", False),)}, "SGD(..., fused=True)"),
        (OPTIMIZER, {"optimizers": (("AdamW", True),)}, "fewer updates"),
        (OPTIMIZER, {"optimizers": (("Lion", None),)}, "fewer updates: accumulate gradients over larger batches; or"),
        (OPTIMIZER, {"optimizers": (("Lion", None), ("AdamW", False))}, "fewer updates"),
        (LAUNCHING, {"events": (UPDATED, UPDATED, COPIED), "optimizers": (("SGD", False),)}, "SGD(..., fused=True)"),
        (LAUNCHING, {"events": (UPDATED, COPIED, COPIED), "optimizers": (("SGD", False),)}, "a larger batch"),
        (COPYING, {"events": (COPIED,), "has_loader": True}, "DataLoader(..., pin_memory=True) and .to(device, non"),
        (
            COPYING,
            {"events": (COPIED,)},
            "all data on the GPU before the loop, if it fits; or DataLoader(..., pin_memory",
        ),
        (COPYING, {"events": (ASKS,), "pinned": True}, "what the script makes of the loader's batch, made on the GPU"),
        (
            COPYING,
            {"events": (ASKS._replace(evaluating=True),), "pinned": True},
            "DataLoader(..., pin_memory=True), of",
        ),
        (COPYING, {"events": (MULTIPLIED, *[COPIED] * 16)}, "one copy of the whole batch"),
        (COPYING, {"events": (MULTIPLIED, COPIED) * 16}, "all data on the GPU before the loop, if it fits; or"),
        (COPYING, {"events": (COPIED._replace(pinned=True),)}, ".to(device, non_blocking=True)"),
        (COPYING, {"events": (BY_LIBRARY,), "trainer": "transformers"}, "TrainingArguments(accelerator_config={"),
        (COPYING, {"events": (BY_LIBRARY,), "trainer": "accelerate"}, "Accelerator(dataloader_config=DataLoaderConfig"),
        (COPYING, {"events": (BY_LIBRARY, COPIED._replace(pinned=True)), "trainer": "accelerate"}, ".to(device, non"),
        (COPYING, {"events": (COPIED._replace(pinned=True, waits=False),)}, "fewer bytes"),
        (WAITS, {"events": (READS, FILTERS)}, "keep the value on the GPU"),
        (WAITS, {"events": (MASKS, FILTERS)}, "TrainingArguments(logging_nan_inf_filter=False)"),
        (WAITS, {"events": (FILTERS,)}, "TrainingArguments(logging_nan_inf_filter=False)"),
        (WAITS, {"events": (MASKS,)}, "the library reads there"),
        (WAITS, {"events": (MASKS, READS)}, "keep the value on the GPU"),
        (WAITS, {"events": (CHOSEN, MASKED)}, "torch.where(mask, tensor, 0) in place of tensor[mask]"),
        (WAITS, {"events": (CHOSEN, MASKED, READS)}, f"{advice._KEEP}; torch.where"),
        (WAITS, {"events": (CHOSEN, MASKED, CHOSEN, MASKED, READS)}, f"{advice._CHOOSE}; keep the value"),
        (WAITS, {}, "keep the value on the GPU"),
        (VALIDATION, {}, "with torch.no_grad(): around what is not trained there, which saves memory above all"),
        (LAUNCHING, {"compiled": True}, 'a larger batch, or torch.compile(model, mode="reduce-overhead")'),
        (LAUNCHING, {"compiled": True, "graphed": True}, "a larger batch"),
    ],
)
def test_no_advice_is_given_that_the_script_follows(name, seen, advice, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert CAUSES[name].advice(Observed(**seen)).startswith(advice)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("SparseAdam", "over larger batches"),  # torch.compile takes none of these two
        ("LBFGS", "over larger batches"),
        ("NAdam", "torch.compile the step of NAdam"),  # whose weights are in lists already
        ("MyMuon", "or let it take weights of equal shape in one batch"),
    ],
)
def test_what_no_optimizer_can_is_not_advised(name, ends):
    assert CAUSES[OPTIMIZER].advice(Observed(optimizers=((name, None),))).endswith(ends)


@pytest.mark.parametrize(("name", "call"), [(LOADING, "gc.collect"), (WAITS, "torch.cuda.empty_cache")])
def test_what_a_loop_can_do_without_is_not_moved_elsewhere(tmp_path, name, call):
    (tmp_path / "train.py").write_text(f"{call}()\n")
    site = Site(str(tmp_path / "train.py"), 1)
    seen = {"working": {site: 1.0}} if name == LOADING else {"events": (READS._replace(site=site),)}
    assert CAUSES[name].advice(Observed(**seen)).startswith(f"no {call.removeprefix('torch.cuda.')}() in the loop: ")


class Own(torch.optim.Optimizer):
    """Many small products for each weight."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for weight in self.param_groups[0]["params"]:
            for _ in range(5):
                weight.copy_(weight @ weight.mT @ weight)


@pytest.mark.parametrize("torchs", [1, 4])
def test_the_advice_is_for_the_optimizer_that_takes_longest(torchs):
    """Four layers' weights are updated by AdamW, or three of them by a loop of the script's own."""

    def variant():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        weights = [*model.parameters()]
        own = [Own(weights[torchs:])] if torchs < 4 else []
        optimizers = [torch.optim.AdamW(weights[:torchs], foreach=False), *own]

        def step(rows):
            model(rows).sum().backward()
            for each in optimizers:
                each.step()

        return step

    update, launching = (
        {one.name: one for one in effgpu.doctor(variant, [ROWS]).examined}[name] for name in (OPTIMIZER, LAUNCHING)
    )
    assert update.advice == launching.advice
    assert ("AdamW(..., fused=True)" in update.advice) == (torchs == 4) == ("the step of Own" not in update.advice)
    assert update.note == ("" if torchs == 4 else "the step of Own takes longest")
    assert "of the CPU's calls are in the optimizer's step" in launching.note


def test_in_16_bits_the_advice_is_not_to_use_16_bits(busy):
    predicted, halved = busy
    assert CAUSES[PRECISION].advice(Observed(events=predicted.events)).startswith("with torch.autocast")
    assert CAUSES[PRECISION].advice(Observed(events=halved)).startswith("the rest of it, too")
    emulated = tuple(
        event._replace(kernels=tuple(kernel._replace(format="bf16") for kernel in event.kernels)) for event in halved
    )
    assert CAUSES[PRECISION].advice(Observed(events=emulated, halved=halved)).startswith("fp16 with a GradScaler")


def test_padding_saves_the_gpus_work_and_no_launch_and_no_update(busy):
    small = predict(training(32, 8), "T4").timeline()
    seen = Observed(padding=0.9)
    assert CAUSES[PADDING].change(small, seen).seconds() == pytest.approx(small.seconds(), rel=0.02)
    line = busy[0].timeline()
    packed = CAUSES[PADDING].change(line, replace(seen, padding=0.5))
    update = sum(line._gpu_seconds(event)[1] for event in line.events if event.optimizing)
    assert packed.seconds() == pytest.approx((line.seconds() + update) / 2, rel=0.05)


def test_packing_saves_nothing_of_what_is_packed():
    def variant():
        layer, lengths = nn.LSTM(512, 512, batch_first=True), torch.tensor([64, 32] * 16)

        def step(rows):
            packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            layer(packed)[0].data.sum().backward()

        return partial(step, torch.ones(32, 64, 512))

    line = predict(variant, "T4").timeline()
    saved = line.seconds() - CAUSES[PADDING].change(line, Observed(padding=0.25)).seconds()
    assert 0 < saved < 0.02 * line.seconds()


@pytest.mark.parametrize("fused", [False, True])
def test_without_padding_attention_has_fewer_pairs_of_tokens(fused):
    def training(tokens):
        q, k, v = (torch.randn(4, 8, tokens, 64, requires_grad=True) for _ in range(3))

        def step():
            out = nn.functional.scaled_dot_product_attention(q, k, v) if fused else (q @ k.mT / 8).softmax(-1) @ v
            out.sum().backward()

        return step

    padded, short = (predict(partial(training, tokens), "T4").timeline() for tokens in (1024, 256))
    packed = CAUSES[PADDING].change(padded, Observed(padding=3 / 4, padding_pairs=15 / 16))
    assert packed.seconds() == pytest.approx(short.seconds(), rel=0.1)
    assert packed.seconds() < 0.1 * padded.seconds()


def test_a_batch_whose_first_dimension_is_time_is_not_so_many_times_as_large():
    def variant(batch_first=False):
        model = nn.LSTM(64, 64, batch_first=batch_first)
        return lambda rows: model(rows)[0].sum().backward()

    found = effgpu.doctor(variant, [torch.ones(35, 4, 64)])
    assert found.batches is None and "first dimension is time" in str(found)
    assert effgpu.doctor(partial(variant, True), [torch.ones(4, 35, 64)]).batches.fits > 1


# --- the step that is predicted is the one that runs ---


def test_a_step_whose_walk_takes_other_sizes_is_refused():
    data = torch.rand(1000, 1)

    def variant():
        model = nn.Linear(1, 64)

        def step():
            rows = int(torch.rand(()) + 900)  # read as 1 in the walk
            model(data[:rows]).sum().backward()

        return step

    with pytest.raises(RuntimeError, match=r"walked multiplies .* in its forward pass, and the one that ran .*FLOP"):
        effgpu.doctor(variant)


def test_an_optimizer_that_steps_in_one_of_the_two_alone_is_refused():
    predicted = predict(training(64, 8), "T4")
    with pytest.raises(RuntimeError, match="in the call that was walked and not in the one that ran"):
        check_walked(Observed(stepped=0), predicted)
    without = replace(predicted, events=tuple(event for event in predicted.events if event.phase != UPDATE))
    with pytest.raises(RuntimeError, match="ran and not in the one that was walked"):
        check_walked(Observed(stepped=1), without)


def test_a_step_that_accumulates_says_that_no_optimizer_stepped():
    def variant():
        model, calls = nn.Linear(64, 64), []
        optimizer = torch.optim.AdamW(model.parameters())

        def step(rows):
            calls.append(1)
            model(rows).sum().backward()
            if len(calls) % 4 == 0:
                optimizer.step()

        return step

    assert "no optimizer made a step in the calls that were looked at" in str(effgpu.doctor(variant, [ROWS]))


BRANCHES = """
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
other = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
batch = 256 if torch.cuda.is_available() else 64

def variant():
    model = torch.nn.Linear(batch, batch).to(device)
    use = torch.cuda.is_available()
    return lambda: model(torch.ones(2, batch)).sum().backward() if device == "cuda" or use else None
"""


def test_a_branch_that_was_taken_as_no_gpu_is_here_is_named(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(BRANCHES)
    names = {}
    exec(compile(BRANCHES, str(path), "exec"), names)
    lines = [line.partition(": a GPU may")[0] for line in find_branches(names["variant"])]
    assert [line.partition(": ")[0] for line in lines] == ["train.py:5", "train.py:10"]
    assert "batch = 256" in lines[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not find_branches(names["variant"])


# --- the timeline ---


def test_a_trace_has_two_tracks_names_waits_and_gives_lines(tmp_path):
    def variant():
        model, rows = nn.Linear(512, 512), torch.ones(64, 512)

        def step():
            loss = model(rows).sum()
            loss.backward()
            loss.item()

        return step

    predicted = predict(variant, "T4")
    timeline = replace(predicted.timeline(), load=(0.001,) * 3)
    trace = timeline.trace()
    slices = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert {each["tid"] for each in slices} == {1, 2}
    named = [each["args"]["name"] for each in trace["traceEvents"] if each["name"] == "thread_name"]
    assert named == ["CPU: calls and waits", "T4: kernels and copies"]
    lines = {each["args"].get("line", "") for each in slices}
    assert any("loss = model(rows).sum()" in line for line in lines)
    (wait,) = (each for each in slices if each["name"] == "wait for the value")
    assert "loss.item()" in wait["args"]["line"]
    assert slices[0]["name"] == "load" and slices[0]["dur"] == pytest.approx(1000)
    for track in (1, 2):  # one thing after the other
        mine = [each for each in slices if each["tid"] == track]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(mine))
    ends = max(each["ts"] + each["dur"] for each in slices)
    assert ends == pytest.approx(1e6 * timeline.seconds(), rel=0.05)
    assert {each["cat"] for each in slices} >= {"forward", "backward"}
    timeline.save(tmp_path / "step.json")
    assert (tmp_path / "step.json").stat().st_size > 1000
    assert any(event.kind == READ for event in predicted.events)
