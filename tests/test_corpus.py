"""The data has correct labels and clean splits, is the same each time, and needs no network."""

import collections
import functools
import math
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effgpu.course import corpus

SPLITS = st.sampled_from(["train", "test"])


@pytest.fixture
def sizes(tmp_path, monkeypatch):
    """The number of lines of each file of two packages in which every line is unique: "<package> <file> <number>"."""
    sizes = {}
    for package in ("corpus_a", "corpus_b"):
        for file, size in {"__init__": 1, "long": 400, "sub/short": 9, "tests/test_long": 50}.items():
            path = tmp_path / package / f"{file}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(f"{package} {file} {line}" for line in range(size)))
            sizes[package, file] = size
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(corpus, "PACKAGES", ("corpus_a", "corpus_b"))
    return sizes


@functools.cache
def read_sources(package):
    files = [path.read_text(encoding="utf-8") for path in corpus._find_sources(package)]
    return "\0".join("\n".join(file.splitlines()) for file in files)


# Text


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), split=SPLITS, seed=st.integers(-(2**70), 2**70))
def test_text_rows_are_windows_of_the_package_they_are_labelled_with(count, split, seed):
    rows = corpus.load_text(count, split=split, seed=seed)
    assert rows.num_rows == count and rows.column_names == ["text", "label"]
    assert rows.features["label"].names == list(corpus.PACKAGES)
    for row in rows:
        assert row["text"].split("\n")[0].strip() and len(row["text"].split("\n")) <= 120
        assert row["text"] in read_sources(corpus.PACKAGES[row["label"]])


def test_text_is_the_same_again_and_a_larger_count_appends():
    assert corpus.load_text(50)[:] == corpus.load_text(80)[:50]


def test_text_is_the_same_in_another_process_and_no_import_but_torch_is_slow():
    code = """if True:
        import sys
        from types import SimpleNamespace as Stub
        sys.modules["torch"] = Stub(Tensor=object, utils=Stub(data=Stub(Dataset=object)))  # two seconds less
        from effgpu.course import corpus
        print(corpus.draw_texts(9, "test", 3), corpus.Glyphs(9).fonts)
        slow = {"datasets", "matplotlib", "numpy", "pyarrow", "tokenizers", "torchvision", "transformers"}
        assert not slow & set(sys.modules), slow & set(sys.modules)"""
    root = Path(corpus.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{corpus.draw_texts(9, 'test', 3)} {corpus.Glyphs(9).fonts}"


def test_text_splits_share_no_line_and_windows_stay_within_a_file(sizes):
    lines = {"train": set(), "test": set()}
    for split, seen in lines.items():
        for text in corpus.load_text(3000, split=split)[:]["text"]:
            window = [line.rsplit(" ", 1) for line in text.split("\n")]
            assert len({file for file, _ in window}) == 1, "a window runs into the next file"
            numbers = [int(number) for _, number in window]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            seen.update(text.split("\n"))
    assert not lines["train"] & lines["test"]
    kept = {name: size for name, size in sizes.items() if "tests" not in name[1]}
    first = {f"{package} {file} {line}" for (package, file), size in kept.items() for line in range(size * 8 // 10)}
    every = {f"{package} {file} {line}" for (package, file), size in kept.items() for line in range(size)}
    assert lines["train"] == first and lines["test"] == every - first


def test_text_labels_are_balanced_and_lengths_spread():
    rows = corpus.load_text(7000)[:]
    counts = collections.Counter(rows["label"])
    assert len(counts) == len(corpus.PACKAGES)
    assert all(abs(count - 500) < 5 * math.sqrt(500) for count in counts.values()), counts
    lengths = sorted(text.count("\n") + 1 for text in rows["text"])
    low, middle, high = (lengths[int(share * len(lengths))] for share in (0.1, 0.5, 0.9))
    assert low <= 3 and 5 <= middle <= 8 and high >= 16 and 60 < lengths[-1] <= 120
    assert len(set(rows["text"])) > 0.95 * len(rows["text"])


def test_text_labels_can_be_learned():
    """Naive Bayes on words, trained on one split, beats chance on the other by far; guessing gives 1 in 14."""
    words = [collections.Counter() for _ in corpus.PACKAGES]
    for text, label in zip(*corpus.load_text(5000)[:].values()):
        words[label].update(set(re.findall(r"\w+", text)))

    totals = [seen.total() for seen in words]

    def guess(text):
        found = set(re.findall(r"\w+", text))
        scores = [sum(math.log((seen[w] + 0.1) / (total + 1)) for w in found) for seen, total in zip(words, totals)]
        return scores.index(max(scores))

    texts, labels = corpus.load_text(400, split="test")[:].values()
    assert sum(guess(text) == label for text, label in zip(texts, labels)) > 0.4 * len(texts)


# Images


@settings(max_examples=40, deadline=None)
@given(split=SPLITS, size=st.integers(16, 96), seed=st.integers(-(2**70), 2**70), data=st.data())
def test_a_glyph_depends_on_split_seed_and_index_alone(split, size, seed, data):
    count = data.draw(st.integers(1, 10**9))
    index = data.draw(st.integers(0, count - 1))
    glyphs = corpus.Glyphs(count, split=split, size=size, seed=seed)
    image, label = glyphs[index]
    assert image.shape == (1, size, size) and image.dtype == torch.float32
    assert image.min() == 0 and 0.4 < image.max() <= 1
    assert type(label) is int and 0 <= label < 62
    for other, at in ((glyphs, index - count), (corpus.Glyphs(index + 1, split=split, size=size, seed=seed), index)):
        assert torch.equal(other[at][0], image) and other[at][1] == label
    assert len(glyphs) == count
    with pytest.raises(IndexError):
        glyphs[count]
    with pytest.raises(TypeError):
        glyphs[:2]


def test_glyph_labels_are_balanced_and_images_hardly_ever_repeat():
    images, labels = corpus.load_images(1240)
    assert images.shape == (1240, 1, 48, 48) and images.dtype == torch.float32
    counts = labels.bincount(minlength=62)
    assert labels.dtype == torch.int64 and len(counts) == 62
    assert counts.min() >= 4 and counts.max() <= 45  # 20 expected, deviation 4.4
    assert len({image.numpy().tobytes() for image in images}) > 0.99 * len(images)
    other = corpus.load_images(100, seed=1)
    assert not torch.equal(other[1], labels[:100])
    assert torch.equal(images[7], corpus.Glyphs(8)[7][0]) and labels[7] == corpus.Glyphs(8)[7][1]


def test_the_unseen_fonts_draw_what_their_labels_say():
    """The nearest mean of the training fonts names most characters of the test fonts; symbols would leave 1 in 62."""

    def draw(split):
        fonts = [corpus._find_font(name) for name in corpus.FONTS[split]]
        rows = [[corpus._draw_glyph(c, font, 48).flatten() for c in corpus.Glyphs.classes] for font in fonts]
        return torch.stack([torch.stack(row) for row in rows])  # [fonts, 62, pixels]

    means, unseen = draw("train").mean(0), draw("test")
    right = torch.cdist(unseen, means).argmin(-1) == torch.arange(62)
    assert (right.float().mean(1) > 0.4).all(), right.float().mean(1)


def test_no_font_and_no_family_is_in_both_splits():
    fonts = {split: set(corpus.Glyphs(1, split=split).fonts) for split in ("train", "test")}
    assert len(fonts["train"]) == 16 and len(fonts["test"]) == 4
    assert not fonts["train"] & fonts["test"]
    contents = {split: {Path(font).read_bytes() for font in names} for split, names in fonts.items()}
    assert not contents["train"] & contents["test"]
    families = {split: {Path(font).name[:4] for font in names} for split, names in fonts.items()}
    assert not families["train"] & families["test"]


@pytest.mark.parametrize("size", [16, 48, 80])
def test_augmentation_changes_the_image_at_random_and_keeps_its_form(size):
    plain, augmented = corpus.Glyphs(3, size=size), corpus.Glyphs(3, size=size, transform=corpus.augment(size))
    torch.manual_seed(0)
    first, second = augmented[0][0], augmented[0][0]
    torch.manual_seed(0)
    again = pickle.loads(pickle.dumps(augmented))[0][0]
    assert first.shape == (1, size, size) and first.dtype == torch.float32 and 0 <= first.min() < first.max() <= 1
    assert not torch.equal(first, plain[0][0]) and not torch.equal(first, second)
    assert torch.equal(first, again)
    assert augmented[0][1] == plain[0][1]


def test_a_spawned_worker_draws_the_same_glyphs():
    glyphs = corpus.Glyphs(7, split="test", seed=2)
    loader = torch.utils.data.DataLoader(glyphs, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    images, labels = zip(*loader)
    assert [len(batch) for batch in images] == [4, 3]
    expected = corpus.load_images(7, split="test", seed=2)
    assert torch.equal(torch.cat(images), expected[0]) and torch.equal(torch.cat(labels), expected[1])


# All of it


@pytest.mark.parametrize(
    ("make", "arguments", "error"),
    [
        (corpus.load_text, {"count": 0}, ValueError),
        (corpus.load_text, {"count": 2.0}, TypeError),
        (corpus.load_text, {"split": "validation"}, ValueError),
        (corpus.Glyphs, {"seed": None}, TypeError),
        (corpus.Glyphs, {"transform": 3}, TypeError),
        (corpus.load_images, {"size": 15}, ValueError),
        (corpus.augment, {"size": (48, 48)}, TypeError),
    ],
)
def test_a_bad_argument_is_named(make, arguments, error):
    with pytest.raises(error, match=f"^{next(iter(arguments))}: expected"):
        make(**arguments)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_worker_ids_names_the_worker_that_made_a_batch(start):
    loader = torch.utils.data.DataLoader(
        range(6), 2, num_workers=2, collate_fn=corpus.worker_ids, multiprocessing_context=start
    )
    batches = list(loader)
    assert [worker for _, worker in batches] == [0, 1, 0]
    assert len({*batches}) == 2 and os.getpid() not in {process for process, _ in batches}
