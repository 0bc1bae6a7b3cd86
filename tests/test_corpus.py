"""The data has correct labels and clean splits, is the same each time, and needs no network."""

import collections
import functools
import itertools
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from effgpu.course import corpus

SEEDS = st.integers(-(2**70), 2**70)
FILES = {"__init__": 1, "long": 400, "sub/short": 9, "tests/test_long": 50}


@functools.cache
def read_sources(package):
    files = [path.read_text(encoding="utf-8") for path in corpus._find_sources(package)]
    return "\0".join("\n".join(file.splitlines()) for file in files)


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 40), split=st.sampled_from(["train", "test"]), seed=SEEDS)
def test_texts_are_windows_of_the_package_they_are_labelled_with_and_a_larger_count_appends(count, split, seed):
    texts, labels = corpus.draw_texts(count, split, seed)
    assert len(texts) == len(labels) == count
    for text, label in zip(texts, labels):
        assert text.split("\n")[0].strip() and len(text.split("\n")) <= 120
        assert text in read_sources(corpus.PACKAGES[label])
    assert [each[:count] for each in corpus.draw_texts(count + 5, split, seed)] == [texts, labels]


def test_load_text_gives_the_same_texts_as_a_dataset():
    rows = corpus.load_text(20, split="test", seed=1)
    assert (rows["text"][:], rows["label"][:]) == corpus.draw_texts(20, "test", 1)
    assert rows.column_names == ["text", "label"] and rows.features["label"].names == list(corpus.PACKAGES)


def test_data_is_the_same_in_another_process_and_no_import_but_torch_is_slow():
    code = """if True:
        import sys
        from types import SimpleNamespace as Stub
        sys.modules["torch"] = Stub(Tensor=object, utils=Stub(data=Stub(Dataset=object)))  # two seconds less
        from effgpu.course import corpus
        print(corpus.draw_texts(9, "test", 3), corpus.Glyphs(9).fonts)
        slow = {"matplotlib", "numpy", "torchvision", "transformers"}
        assert not slow & set(sys.modules), slow & set(sys.modules)"""
    root = Path(corpus.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{corpus.draw_texts(9, 'test', 3)} {corpus.Glyphs(9).fonts}"


def test_splits_share_no_line_and_windows_stay_within_a_file(tmp_path, monkeypatch):
    """Of two packages in which every line says where it stands: "package file number"."""
    expected = {"train": set(), "test": set()}
    for package, (file, size) in itertools.product(("corpus_a", "corpus_b"), FILES.items()):
        path = tmp_path / package / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{package} {file} {number}" for number in range(size)]
        path.write_text("\n".join(lines))
        if "tests" not in file:
            expected["train"].update(lines[: size * 8 // 10])
            expected["test"].update(lines[size * 8 // 10 :])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(corpus, "PACKAGES", ("corpus_a", "corpus_b"))
    for split, lines in expected.items():
        windows = [text.split("\n") for text in corpus.draw_texts(3000, split, 0)[0]]
        for window in windows:
            file, first = window[0].rsplit(" ", 1)
            assert window == [f"{file} {int(first) + line}" for line in range(len(window))], "runs into the next file"
        assert {line for window in windows for line in window} == lines


def test_packages_are_balanced_and_lengths_spread():
    texts, labels = corpus.draw_texts(7000, "train", 0)
    counts = collections.Counter(labels)
    assert len(counts) == len(corpus.PACKAGES)
    assert all(abs(count - 500) < 5 * math.sqrt(500) for count in counts.values()), counts
    lengths = sorted(text.count("\n") + 1 for text in texts)
    low, middle, high = (lengths[int(share * len(lengths))] for share in (0.1, 0.5, 0.9))
    assert low <= 3 and 5 <= middle <= 8 and high >= 16 and 60 < lengths[-1] <= 120
    assert len(set(texts)) > 0.95 * len(texts)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(16, 96), seed=SEEDS, data=st.data())
def test_a_glyph_depends_on_seed_and_index_alone(size, seed, data):
    count = data.draw(st.integers(1, 10**9))
    index = data.draw(st.integers(0, count - 1))
    glyphs = corpus.Glyphs(count, size=size, seed=seed)
    image, label = glyphs[index]
    assert image.shape == (1, size, size) and image.dtype == torch.float32
    assert image.min() == 0 and 0.4 < image.max() <= 1 and type(label) is int and 0 <= label < 62
    again, fewer = pickle.loads(pickle.dumps(glyphs)), corpus.Glyphs(index + 1, size=size, seed=seed)
    for same, same_label in (again[index - count], fewer[index]):
        assert torch.equal(same, image) and same_label == label
    for wrong, error in ((len(glyphs), IndexError), (slice(2), TypeError)):
        with pytest.raises(error):
            glyphs[wrong]


def test_an_image_shows_what_its_label_says_and_hardly_ever_repeats():
    """The nearest mean of 2,000 images names most of 500 others, in whatever font; guessing gives 1 in 62."""
    images, labels = zip(*corpus.Glyphs(2500))
    images, labels = torch.stack(images).flatten(1), torch.tensor(labels)
    counts = labels.bincount(minlength=62)
    assert len(counts) == 62 and counts.min() >= 15 and counts.max() <= 75  # 40 expected, deviation 6.3
    assert len({image.numpy().tobytes() for image in images}) > 0.98 * len(images)
    means = torch.stack([images[:2000][labels[:2000] == label].mean(0) for label in range(62)])
    assert (torch.cdist(images[2000:], means).argmin(-1) == labels[2000:]).float().mean() > 0.5
    assert [corpus.Glyphs(100, seed=1)[i][1] for i in range(100)] != labels[:100].tolist()


@pytest.mark.parametrize(
    ("make", "arguments", "error"),
    [
        (corpus.draw_texts, {"count": 2.0, "split": "train", "seed": 0}, TypeError),
        (corpus.draw_texts, {"split": "validation", "count": 1, "seed": 0}, ValueError),
        (corpus.Glyphs, {"count": 0}, ValueError),
        (corpus.Glyphs, {"seed": None}, TypeError),
        (corpus.Glyphs, {"size": 15}, ValueError),
    ],
)
def test_a_bad_argument_is_named(make, arguments, error):
    with pytest.raises(error, match=f"^{next(iter(arguments))}: expected"):
        make(**arguments)


def test_worker_ids_names_the_worker_that_made_a_batch():
    options = {"num_workers": 2, "collate_fn": corpus.worker_ids, "multiprocessing_context": "fork"}
    batches = list(torch.utils.data.DataLoader(range(6), 2, **options))
    assert [worker for _, worker in batches] == [0, 1, 0]
    assert len({*batches}) == 2 and os.getpid() not in {process for process, _ in batches}
    assert pickle.loads(pickle.dumps(corpus.worker_ids)) is corpus.worker_ids, "a spawned worker needs it"


def test_a_batch_is_shown_with_its_texts_and_its_padding(capsys):
    assert corpus.show_rows([[32], [8, 16], [16]]) == 96
    assert corpus.show_rows([[8], [16, 8]], every=2) == 48
    assert capsys.readouterr().out == "████\n█▒▒·\n██··\n██▒\n"
