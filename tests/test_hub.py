"""Pretrained weights and public data: what a network would give, from what these tests save, and no network."""

import errno
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import stand_ins
import torch
from torch.testing import assert_close

from effgpu.course import corpus, hub, workloads

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    stand_ins.save(folder)
    return folder


@pytest.fixture(name="stand_ins")
def _stand_ins(saved, monkeypatch):
    """The names of the course lead to folders."""
    for name, folder in stand_ins.NAMES.items():
        monkeypatch.setattr(hub, name, str(saved / folder))
    hub._read_reviews.cache_clear()
    yield
    hub._read_reviews.cache_clear()


def test_without_a_name_the_texts_and_their_tokenizer_are_the_offline_ones():
    data, tokenizer = hub.load_texts(None, train=20, test=5, seed=1), hub.load_tokenizer(None)
    assert (data["train"]["text"][:], data["train"]["label"][:]) == corpus.draw_texts(20, "train", 1)
    assert (data["test"]["text"][:], data["test"]["label"][:]) == corpus.draw_texts(5, "test", 1)
    mapped = data.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns="text")
    assert mapped["train"].column_names == ["label", *tokenizer.model_input_names]
    start = tokenizer.cls_token_id
    for tokens, text in zip(mapped["train"]["input_ids"], data["train"]["text"]):
        assert tokens == [start, *corpus.train_tokenizer(4095).encode(text).ids][:512]


def test_a_tokenizer_cuts_pads_and_is_saved_as_any_other(tmp_path):
    tokenizer = corpus.load_tokenizer(500)
    assert len(tokenizer) == 500 and tokenizer.pad_token_id == corpus.PADDING and tokenizer.cls_token_id == 499
    long, short = tokenizer(["x = 1\n" * 400, "import os"], truncation=True, padding=True)["input_ids"]
    assert len(long) == len(short) == 512 and short[:1] == [499] and set(short[3:]) == {corpus.PADDING}
    tokenizer.save_pretrained(tmp_path)
    assert hub.load_tokenizer(str(tmp_path))("import os")["input_ids"] == tokenizer("import os")["input_ids"]


def test_texts_of_a_folder_come_in_random_order_and_only_those_asked_for(saved):
    data = hub.load_texts(str(saved / "texts"), train=10, test=9000)
    assert data.num_rows == {"train": 10, "test": 2000}
    texts = corpus.draw_texts(4000, "train", 0)[0]
    assert set(data["train"]["text"]) <= set(texts) and data["train"]["text"][:] != texts[:10]
    assert hub.load_texts(str(saved / "texts"), 10, 5)["train"]["text"][:] == data["train"]["text"][:]
    assert hub.load_texts(str(saved / "texts"), 10, 5, seed=1)["train"]["text"][:] != data["train"]["text"][:]


def test_images_of_a_folder_have_a_class_for_each_folder(saved):
    data = hub.load_images(str(saved / "images"), train=100, test=2)
    assert data.num_rows == {"train": 5, "test": 2} and data["train"].features["label"].names == ["0", "1"]
    assert data["train"][0]["image"].size == (16, 16)


def test_cifars_column_is_called_image(saved, tmp_path):
    data = hub.load_images(str(saved / "images"), 5, 3).rename_column("image", "img")
    data.save_to_disk(tmp_path / "cifar")
    assert {*hub.load_images(str(tmp_path / "cifar"), 5, 3)["test"].column_names} == {"image", "label"}


def test_a_classifier_has_the_saved_weights_and_trains(saved):
    model = hub.load_classifier(str(saved / "bert"), classes=3)
    masked = transformers.DistilBertForMaskedLM.from_pretrained(saved / "bert")
    for name, weight in masked.distilbert.state_dict().items():
        assert torch.equal(model.distilbert.state_dict()[name], weight), name
    assert model.training and model(torch.tensor([[1, 2]])).logits.shape == (1, 3)


def test_a_language_model_has_the_saved_weights_in_32_bits(saved):
    model = hub.load_language_model(str(saved / "qwen"))
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(saved / "qwen")
    assert model.training and model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 1000)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert ours.dtype is torch.float32 and other.dtype is torch.bfloat16 and torch.equal(ours, other.float())


def test_tokens_of_reviews_follow_each_other(stand_ins):
    tokens = hub.read_tokens(hub.QWEN, 3, 500)
    texts = hub.load_texts(hub.YELP, train=24, test=1)["train"]["text"][:]
    tokenizer = hub.load_tokenizer(hub.QWEN)
    expected = [token for text in texts for token in tokenizer(text)["input_ids"]]
    assert tokens.shape == (3, 500) and tokens.dtype is torch.int64
    assert tokens.flatten().tolist()[: len(expected)] == expected[:1500]
    with pytest.raises(ValueError, match="batch: expected at least 1"):
        hub.read_tokens(hub.QWEN, 0, 5)
    with pytest.raises(ValueError, match=r"expected 1000000000 tokens, found \d+ in all"):
        hub.read_tokens(hub.QWEN, 1000, 1_000_000)


def test_the_courses_transformer_computes_what_gpt_2_does(stand_ins):
    theirs = transformers.GPT2LMHeadModel.from_pretrained(hub.DISTILGPT2).eval()
    model, texts, labels = hub.language_model(batch=3, length=10, device="cpu")
    assert torch.equal(texts[:, 1:], labels[:, :-1])
    with torch.no_grad():
        expected = theirs(texts).logits
        assert expected.std() > 0.5
        assert_close(model.eval()(texts), expected, rtol=1e-5, atol=1e-4)


def test_the_pretrained_example_has_reviews_their_labels_and_dropout(stand_ins):
    model, texts, labels = hub.text_classifier(batch=6, length=12, device="cpu")
    rows = hub.load_texts(hub.YELP, train=6, test=1)["train"]
    tokenizer = hub.load_tokenizer(hub.DISTILGPT2)
    for tokens, text in zip(texts.tolist(), rows["text"]):
        found = tokenizer(text)["input_ids"]
        assert tokens == (found + [tokenizer.eos_token_id] * 12)[:12]
    assert labels.tolist() == rows["label"][:] and model(texts).shape == (6, 14)
    assert model.training and not torch.equal(model(texts), model(texts))
    again, _, _ = hub.text_classifier(batch=6, length=12, device="cpu")
    assert torch.equal(model.classify.logits.weight, again.classify.logits.weight)
    tokens, answers = hub.read_texts(6, length=12, device="cpu", vocabulary=7)
    assert torch.equal(tokens, texts) and torch.equal(answers, labels)


def test_with_a_size_of_the_model_the_weights_are_random_and_nothing_is_read(monkeypatch):
    monkeypatch.setattr(hub, "DISTILGPT2", "/nowhere")
    monkeypatch.setattr(hub, "YELP", "/nowhere")
    for name in ("text_classifier", "language_model"):
        size = {"batch": 2, "length": 8, "layers": 1, "width": 16, "heads": 2, "vocabulary": 100}
        ours, *batch = getattr(hub, name)(**size, dropout=0, seed=3)
        theirs, *same = getattr(workloads, name)(**size, dropout=0, seed=3)
        assert all(map(torch.equal, [*ours.state_dict().values(), *batch], [*theirs.state_dict().values(), *same]))


CALLS = {
    "hub.load_texts(hub.YELP, 1, 1)": hub.YELP,
    "hub.load_images(hub.CIFAR, 1, 1)": hub.CIFAR,
    "hub.load_tokenizer(hub.DISTILBERT)": hub.DISTILBERT,
    "hub.load_classifier(hub.DISTILBERT, 2)": hub.DISTILBERT,
    "hub.load_language_model(hub.QWEN)": hub.QWEN,
    "hub.text_classifier(batch=1, device='cpu')": hub.YELP,
}


def test_without_a_network_one_sentence_says_what_to_do_and_nothing_is_written(tmp_path):
    calls = "\n".join(f"try: {call}\nexcept ConnectionError as error: print(error)" for call in CALLS)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "TQDM_DISABLE": "1"}
    code = f"from effgpu.course import hub\n{calls}"
    options = {"capture_output": True, "text": True, "cwd": Path(hub.__file__).parents[2], "timeout": 100}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, **options)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    for line, name in zip(told, CALLS.values(), strict=True):
        assert line.startswith(f"{name}: ") and line.endswith("or set real = False"), line
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]


def test_resnets_weights_without_a_network(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network in this test")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ConnectionError, match=r"^ResNet-18: .*or set real = False$"):
        hub.load_resnet(10)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_full_disk_is_not_blamed_on_the_network(monkeypatch):
    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fill)
    with pytest.raises(OSError, match="No space left on device"):
        hub.load_tokenizer(hub.QWEN)


def test_resnets_weights_are_read_from_the_cache(monkeypatch, saved):
    """A checkpoint of torchvision's name in its cache is what a download leaves there."""
    monkeypatch.setenv("TORCH_HOME", str(saved))
    (file,) = (saved / "hub" / "checkpoints").iterdir()
    weights = torch.load(file)
    model = hub.load_resnet(10)
    assert torch.equal(model.conv1.weight, weights["conv1.weight"]) and model.fc.out_features == 10


@pytest.mark.parametrize(
    ("call", "error", "told"),
    [
        (lambda saved: hub.load_texts(None, train=0, test=1), ValueError, "train: expected at least 1"),
        (lambda saved: hub.load_texts(None, train=1, test="1"), TypeError, "test: expected an int"),
        (lambda saved: hub.load_texts(str(saved / "images"), 1, 1), ValueError, "expected the columns 'text' and"),
        (lambda saved: hub.load_images(str(saved / "texts"), 1, 1), ValueError, "expected the columns 'image' and"),
        (
            lambda saved: hub.load_tokenizer(str(saved / "images")),
            ValueError,
            "images: expected a folder of save_pretrained",
        ),
    ],
)
def test_what_is_wrong_is_named(saved, call, error, told):
    with pytest.raises(error, match=told):
        call(saved)


@pytest.mark.real
def test_the_real_names_lead_to_what_the_lessons_expect():
    data = hub.load_texts(hub.YELP, train=100, test=50)
    assert data.num_rows == {"train": 100, "test": 50} and data["train"].features["label"].num_classes == 5
    images = hub.load_images(hub.CIFAR, train=10, test=10)
    assert images["train"][0]["image"].size == (32, 32) and images["train"].features["label"].num_classes == 10
    tokenizer = hub.load_tokenizer(hub.DISTILBERT)
    batch = tokenizer(["good", "bad and long"], padding=True, return_tensors="pt")
    assert hub.load_classifier(hub.DISTILBERT, 5)(**batch).logits.shape == (2, 5)
    qwen = hub.load_language_model(hub.QWEN)
    assert qwen.config.vocab_size == 151_936 and hub.read_tokens(hub.QWEN, 2, 100).shape == (2, 100)
    assert hub.load_resnet(10)(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(hub.DISTILGPT2).eval()
    model, texts, _ = hub.language_model(batch=2, length=32, device="cpu")
    with torch.no_grad():
        assert_close(model.eval()(texts), theirs(texts).logits, rtol=1e-3, atol=1e-2)
