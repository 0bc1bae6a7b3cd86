"""The running example: its parts, its batch, and that it learns and fits the device."""

import json
import math
import re
from collections import Counter
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import effgpu
from effgpu.course import corpus, workloads
from effgpu.course.sizes import (
    BATCHES,
    CPU_SIZES,
    GPU_SIZES,
    MEMORY_SHARE,
    STEP_SECONDS,
    _measure_batch,
    _measure_step,
    choose_batch,
    kept_batches,
)

SMALL = dict(batch=3, length=10, layers=2, width=16, heads=2, vocabulary=100)
each_workload = pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (workloads.text_classifier, SMALL),
        (workloads.language_model, SMALL),
        (workloads.image_classifier, dict(batch=2, size=16)),
    ],
)


def test_a_language_model_gives_logits_for_the_next_token_and_does_not_see_it():
    model, texts, labels = workloads.language_model(**SMALL, dropout=0.0)
    assert texts.shape == labels.shape == (3, 10) and texts.is_contiguous() and labels.is_contiguous()
    assert torch.equal(texts[:, 1:], labels[:, :-1])
    changed = texts.clone()
    changed[:, 6:] = 7
    before, after = model(texts), model(changed)
    assert before.shape == (3, 10, 100)
    assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


def test_an_image_classifier_is_a_resnet_on_glyphs():
    model, images, labels = workloads.image_classifier(batch=2, size=20)
    assert images.shape == (2, 3, 20, 20) and images.dtype == torch.float32
    assert model(images).shape == (2, 62) and type(model).__name__ == "ResNet"
    drawn, expected = zip(*corpus.Glyphs(2, size=20))
    assert_close(images, torch.stack(drawn).expand(-1, 3, -1, -1), atol=1 / 255, rtol=0)
    assert labels.tolist() == list(expected)


def test_distilbert_has_the_shape_of_the_published_model_and_is_small_where_asked_for():
    small, whole = workloads.distilbert(3, 100), workloads.distilbert(3, 30_522, small=False)
    assert sum(weight.numel() for weight in whole.distilbert.parameters()) == 66_362_880  # as published
    ids = torch.ones(2, 5, dtype=torch.int64)
    assert (
        small(ids, labels=torch.tensor([0, 2])).logits.shape == (2, 3) and len(small.distilbert.transformer.layer) == 1
    )
    assert small.training and torch.equal(small(ids).logits, small(ids).logits), "no dropout"


def test_qwen_has_the_shape_of_the_published_model_and_recomputes_its_blocks():
    with torch.device("meta"):  # which the device that is asked for overrides
        model, texts = workloads.qwen(batch=2, length=9, layers=2, width=128, vocabulary=50, device="cpu")
    assert texts.shape == (2, 9) and int(texts.max()) < 50 and model(texts).logits.shape == (2, 9, 50)
    whole, _ = workloads.qwen(device="meta")
    assert sum(weight.numel() for weight in whole.parameters()) == 596_049_920  # as published
    runs = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append("mlp"))
    model(texts, labels=texts).loss.backward()
    assert len(runs) == 2


@pytest.mark.parametrize("name", CPU_SIZES)
def test_on_a_cpu_the_default_sizes_are_fixed(name, monkeypatch):
    monkeypatch.setattr("effgpu.course.sizes._measure_batch", lambda *_: pytest.fail("measured a CPU"))
    sizes = CPU_SIZES[name]
    _, inputs, _ = getattr(workloads, name)()
    assert len(inputs) == sizes["batch"] and inputs.shape[-1] == sizes.get("length", sizes.get("size"))


def test_the_parts_one_after_the_other_are_the_model():
    model, texts, _ = workloads.language_model(**SMALL, dropout=0)
    x = torch.nn.Sequential(model.embed, *model.blocks)(texts)
    assert x.shape == (3, 10, model.width) and torch.equal(model.classify(x), model(texts))
    assert [name for name, _ in model.named_children()] == ["embed", "blocks", "classify"]


def test_attention_is_the_textbooks():
    model, _, _ = workloads.text_classifier(**SMALL)
    attention, x = model.blocks[0].attention, torch.randn(2, 5, 16)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    mixed = (q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v
    assert_close(attention(x), attention.out(mixed.transpose(1, 2).reshape(2, 5, 16)))


@each_workload
def test_the_same_arguments_give_the_same_weights_and_batch(make, sizes):
    (one, *batch), (two, *again) = make(**sizes), make(**sizes)
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    assert all(map(torch.equal, batch, again))
    assert batch[0].data_ptr() != again[0].data_ptr(), "a lesson that changes its batch would change the next one's"


@each_workload
def test_the_callers_random_state_and_default_device_stay(make, sizes):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make(**sizes)
    assert torch.equal(torch.rand(3), expected)
    with torch.device("meta"):
        model, inputs, _ = make(**sizes, device="cpu")
        assert torch.empty(0).device.type == "meta"
    assert {inputs.device.type, *(p.device.type for p in model.parameters())} == {"cpu"}


def test_a_text_is_its_words_as_tokens_cut_or_padded_and_a_larger_count_appends():
    words = Counter(
        chain.from_iterable(re.findall(corpus.TOKEN, text) for text in corpus.draw_texts(5000, "train", 0)[0])
    )
    known = [word for word, _ in words.most_common(6)]
    assert "\n" in known and words["self"] >= words.most_common(20)[-1][1]
    texts, labels = workloads.load_texts(40, length=100, vocabulary=8)
    drawn, expected = corpus.draw_texts(40, "train", 0)
    assert labels.tolist() == expected
    for tokens, text in zip(texts.tolist(), drawn):
        found = re.findall(corpus.TOKEN, text)
        found = [known.index(word) + 2 if word in known else corpus.UNKNOWN for word in found]
        assert tokens == (found + [corpus.PADDING] * 100)[:100]
    assert torch.equal(workloads.load_texts(60, length=5, vocabulary=8)[0][:40], texts[:, :5])
    assert (workloads.load_texts(500)[0] == corpus.UNKNOWN).float().mean() < 0.05


def test_held_out_texts_are_named_far_better_than_by_chance():
    """Chance is 1 in 14."""
    model, _, _ = workloads.text_classifier(layers=1, length=32, dropout=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for texts, labels in zip(*(each.split(16) for each in workloads.load_texts(60 * 16, length=32))):
        cross_entropy(model(texts), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    texts, labels = workloads.load_texts(500, split="test", length=32)
    assert (model(texts).argmax(1) == labels).float().mean() > 2 / 14


@pytest.mark.parametrize(
    ("milliseconds_per_item", "expected"), [(10, 4), (1, 32), (0.02, 2048), (0.022, 1024), (1e-4, 4096), (100, 2)]
)
def test_the_batch_fills_thirty_milliseconds(milliseconds_per_item, expected):
    asked = []

    def measure(batch):
        asked.append(batch)
        return milliseconds_per_item / 1000 * batch, batch

    assert choose_batch(measure, memory=1e12) == expected
    assert asked == [2**power for power in range(1, int(math.log2(expected)) + 1)]


def test_the_batch_takes_at_most_a_third_of_the_memory():
    measure = lambda batch: (1e-5 * batch, 1000 * batch)
    assert [choose_batch(measure, memory=3 * most) for most in (64_000, 63_999)] == [64, 32]


def test_running_out_of_memory_ends_the_growth_and_another_error_is_raised():
    def measure(batch):
        if batch > 16:
            raise error
        return 1e-4, 0

    error = torch.OutOfMemoryError("CUDA out of memory")
    assert choose_batch(measure, memory=1e12) == 16
    error = RuntimeError("an illegal instruction")
    with pytest.raises(RuntimeError, match="illegal"):
        choose_batch(measure, memory=1e12)


@pytest.fixture
def own_batches(tmp_path, monkeypatch):
    """No batch has been kept on this machine, or remembered in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("effgpu.course.sizes._measure_batch", cache(_measure_batch.__wrapped__))
    monkeypatch.setattr("effgpu.course.sizes.seeded", lambda seed, device: nullcontext())


def test_without_a_home_a_batch_is_measured_and_not_kept(simulate_gpu, own_batches, monkeypatch):
    """As of a container's user that has no name."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    simulate_gpu()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("effgpu.course.sizes.Path.home", fail)
    monkeypatch.setattr("effgpu.course.sizes._measure_step", lambda name, batch: (0.03, 1))
    assert _measure_batch.__wrapped__("text_classifier") == 2


def test_near_a_border_every_process_has_the_batch_that_the_first_one_chose(simulate_gpu, own_batches, monkeypatch):
    """One process finds 64 texts nearer to 30 ms, the next one 128: a report would hold results of both."""
    simulate_gpu()
    chosen = []
    for share in (0.99, 1.01):
        border = STEP_SECONDS / math.sqrt(2) / 64 * share
        monkeypatch.setattr("effgpu.course.sizes._measure_step", lambda name, batch: (border * batch, 1))  # noqa: B023
        for _ in range(2):  # in another process, nothing is remembered
            chosen.append(_measure_batch.__wrapped__("text_classifier"))
            chosen.append(_measure_batch.__wrapped__("language_model"))
    assert set(chosen) == {128}
    kept_batches().write_text("{")
    assert _measure_batch.__wrapped__("text_classifier") == 64, "a broken file counts as none"
    assert json.loads(kept_batches().read_text()).popitem()[1] == 64
    simulate_gpu("NVIDIA H100")
    monkeypatch.setattr("effgpu.course.sizes._measure_step", lambda name, batch: (0.03, 1))
    assert _measure_batch.__wrapped__("text_classifier") == 2, "another GPU has its own"


def test_a_prediction_where_there_is_a_gpu_takes_the_gpus_sizes_and_measures_no_fake_tensors(
    simulate_gpu, own_batches, monkeypatch
):
    def measure_step(name, batch):
        modes.append((torch._C._len_torch_dispatch_stack(), torch.overrides._len_torch_function_stack()))
        return 0.03, 1

    def variant(sizes):
        model, texts, _ = workloads.text_classifier(**sizes)
        return lambda: built.append((len(texts), model.width, len(model.blocks)))

    simulate_gpu()
    monkeypatch.setattr("effgpu.course.sizes._measure_step", measure_step)
    modes, built = [], []
    for sizes in ({}, {"layers": 2}, {"batch": 5}):
        effgpu.predict(partial(variant, sizes), "T4", steps=1)
    assert built == [(2, 768, 6), (2, 768, 2), (5, 768, 6)] and modes == [(0, 0)], "measured once, for the default"
    (kept,) = json.loads(kept_batches().read_text())
    assert "NVIDIA H200" in kept, "kept for the GPU, though a prediction is under way"


@pytest.mark.parametrize(("width", "heads"), [(64, 4), (6, 2), (7, 1)])
def test_heads_that_are_not_given_divide_the_width(width, heads):
    model, _, _ = workloads.text_classifier(batch=1, width=width)
    assert model.blocks[0].attention.heads == heads


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_SIZES)
def test_a_default_step_fills_a_gpu_and_fits(name):
    make = getattr(workloads, name)
    state = torch.cuda.get_rng_state()
    _, inputs, _ = make()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert len(make()[1]) == len(inputs) and math.log2(len(inputs)).is_integer()
    with torch.device("cuda"):
        seconds, peak = _measure_step(name, len(inputs))
    share = peak / torch.cuda.get_device_properties().total_memory
    assert seconds < 2 * STEP_SECONDS and share < MEMORY_SHARE * 1.1
    full = share > MEMORY_SHARE / 2.2 or len(inputs) == BATCHES[-1]
    assert seconds > STEP_SECONDS / 2 or full


@pytest.mark.parametrize(
    ("make", "arguments", "error"),
    [
        (workloads.text_classifier, {"batch": 0}, ValueError),
        (workloads.text_classifier, {"width": 8.0}, TypeError),
        (workloads.text_classifier, {"heads": 3, "width": 16}, ValueError),
        (workloads.language_model, {"vocabulary": 2}, ValueError),
        (workloads.image_classifier, {"size": 15}, ValueError),
        (workloads.image_classifier, {"seed": "0"}, TypeError),
        (workloads.load_texts, {"count": 0}, ValueError),
        (workloads.qwen, {"width": 100}, ValueError),
    ],
)
def test_a_bad_argument_is_named(make, arguments, error):
    with pytest.raises(error, match=f"^{next(iter(arguments))}: expected"):
        make(**arguments)


@pytest.mark.parametrize(
    "supported, fast, format",
    [(False, False, torch.bfloat16), (True, False, torch.float16), (True, True, torch.bfloat16)],
)
def test_the_16_bits_are_those_that_a_gpu_does_not_emulate(monkeypatch, supported, fast, format):
    answers = {True: supported, False: fast}
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: answers[including_emulation])
    assert workloads.choose_16_bits() == format


@pytest.mark.parametrize(
    "device, cap, each, count",
    [
        *[("cpu", None, 0.01, 2000), ("cpu", "2", 0.01, 160), ("cuda", None, 0.01, 18_000), ("cuda", "2", 0.01, 200)],
        *[("cuda", "0.1", 0.01, 160), ("cuda", None, 0.001, 150_000)],
    ],
)
def test_a_training_takes_as_many_texts_as_the_time_allows(monkeypatch, device, cap, each, count):
    monkeypatch.setattr(workloads, "find_device", lambda: torch.device(device))
    if cap:
        monkeypatch.setenv("EFFGPU_SECONDS", cap)
    assert workloads.choose_count(each, on_cpu=2000) == count
