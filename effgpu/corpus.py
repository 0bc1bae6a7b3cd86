"""Text and images to train on, with nothing to download: Python's own source, and letters in the fonts of matplotlib.

Both have what random tensors lack: lengths that differ, a task that can be learned, a held-out split that means
something, and real work for the CPU per item. No call here opens a connection.
"""

import contextlib
import importlib.util
import math
import operator
import os
import random
import string
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # imported where they are used: each takes a second or more
    from datasets import Dataset
    from tokenizers import Tokenizer
    from torchvision.transforms.v2 import Transform
    from transformers import PreTrainedTokenizerFast

# The classes of load_text: every CPython from 3.11 on ships these packages with their source.
PACKAGES = (
    *("asyncio", "concurrent", "email", "encodings", "html", "http", "importlib", "logging"),
    *("multiprocessing", "re", "unittest", "urllib", "xml", "xmlrpc"),
)
TRAIN_SHARE = 0.8  # of the lines of each file, from its top
LOG_LINES, SPREAD_LINES = math.log(7), 0.9  # of the lines of a window: mean and deviation of their logarithm
MOST_LINES = 120

SPECIAL_TOKENS = {"pad_token": "<pad>", "cls_token": "<cls>", "eos_token": "<eos>", "mask_token": "<mask>"}
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)  # every byte has a token of its own
MOST_TOKENS = 512  # the positions of a BERT
TOKENIZER_TEXTS = 20_000  # windows a tokenizer is trained on: each line of the train split about twice

# The text fonts that every matplotlib from 3.9 on ships; the others draw symbols, boxes or nothing. The held-out fonts
# are a whole family, because a bold or slanted cut of a font seen in training would hardly be unseen.
FONTS = {
    "train": (
        *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
        *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
        *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
        *("cmb10", "cmr10", "cmss10", "cmtt10"),
    ),
    "test": ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
}
SMALLEST_IMAGE = 16  # pixels a side


def load_text(count: int = 10_000, *, split: str = "train", seed: int = 0) -> "Dataset":
    """Return `count` windows of the standard library's source, each labelled with the package it is from.

    A window is a run of whole lines of one file. The package is drawn uniformly, then the first line (one that is not
    blank), then the number of lines: lognormal with median 7, at most 120, and cut where the file's part ends. So the
    lengths spread as those of real texts do. As windows overlap, "train" is cut from the first 80 % of the lines of
    each file and "test" from the rest: no line of a file is in both.

    The same installed Python, split and seed give the same rows; a larger `count` appends to them. Texts repeat a
    little, as short runs of lines do in source: 1 % of 10,000, 11 % of 150,000.

    Returns a `datasets.Dataset` of `count` rows with the columns "text" (str, never blank) and "label" (ClassLabel,
    named by PACKAGES). Raises TypeError or ValueError for a bad argument, and FileNotFoundError where a package has no
    source on this machine.
    """
    _check_int("count", count, least=1)
    _check_split(split)
    _check_int("seed", seed)
    with _quiet_imports():
        import pyarrow
        from datasets import ClassLabel, Dataset, Features, Value

    texts, labels = _draw_texts(count, split, seed)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(PACKAGES))})
    return Dataset.from_dict({"text": pyarrow.array(texts), "label": pyarrow.array(labels)}, features)


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """In a notebook without ipywidgets, tqdm.auto warns of that when a library imports it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        yield


def _draw_texts(count: int, split: str, seed: int) -> tuple[list[str], list[int]]:
    parts = [_read_part(package, split) for package in PACKAGES]
    labels = random.Random(f"labels {split} {seed}").choices(range(len(parts)), k=count)
    draw = random.Random(f"windows {split} {seed}")
    return [_cut_window(*parts[label], draw) for label in labels], labels


def _cut_window(lines: list[str], ends: list[int], starts: list[int], draw: random.Random) -> str:
    """One text from the part of a package that `_read_part` returns."""
    start = draw.choice(starts)
    length = max(1, min(round(draw.lognormvariate(LOG_LINES, SPREAD_LINES)), MOST_LINES))
    return "\n".join(lines[start : min(start + length, ends[start])])


@cache
def _read_part(package: str, split: str) -> tuple[list[str], list[int], list[int]]:
    """A package's lines of one split, for each line where its file's part ends, and the indices of those not blank."""
    lines, ends = [], []
    for path in _find_sources(package):
        file = path.read_text(encoding="utf-8").splitlines()
        border = int(len(file) * TRAIN_SHARE)
        part = file[:border] if split == "train" else file[border:]
        lines += part
        ends += [len(lines)] * len(part)
    return lines, ends, [index for index, line in enumerate(lines) if line.strip()]


def _find_sources(package: str) -> list[Path]:
    """The source files of an installed package without its tests, in an order that is the same on every system."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    paths = {path.relative_to(folder).as_posix(): path for folder in folders for path in Path(folder).rglob("*.py")}
    names = [name for name in sorted(paths) if not {"test", "tests"} & set(name.split("/"))]
    if not names:
        raise FileNotFoundError(f"no source of the package {package!r}: load_text needs Python with its source files")
    return [paths[name] for name in names]


def train_tokenizer(*, vocab_size: int = 8192, seed: int = 0) -> "PreTrainedTokenizerFast":
    """Return a byte-level BPE tokenizer of `vocab_size` tokens, trained on windows of the train split in seconds.

    It puts <cls> before a text and <eos> after it, pads with <pad> (id 0) and has <mask>; no token is unknown, since
    every byte has one, and decoding with `skip_special_tokens=True` gives back the very text, unless it spells one of
    these four. `model_max_length` is 512. It returns input_ids and attention_mask and no token types, so that
    `model(**tokenizer(texts, padding="longest", truncation=True, return_tensors="pt"))` fits DistilBERT and GPT-2.

    Raises TypeError or ValueError for a bad argument: below 260 tokens, or above the 26,000 or so that the texts hold.
    Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes as in GPT-2.
    """
    _check_int("vocab_size", vocab_size, least=SMALLEST_VOCABULARY)
    _check_int("seed", seed)
    with _quiet_imports():
        from transformers import PreTrainedTokenizerFast

    bpe = _train_bpe(_draw_texts(TOKENIZER_TEXTS, "train", seed)[0], vocab_size)
    if bpe.get_vocab_size() < vocab_size:
        raise ValueError(f"vocab_size: expected at most {bpe.get_vocab_size()}, all the texts hold, got {vocab_size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        model_max_length=MOST_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        **SPECIAL_TOKENS,
    )


def _train_bpe(texts: list[str], vocab_size: int) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    ends = [(token, bpe.token_to_id(token)) for token in ("<cls>", "<eos>")]
    bpe.post_processor = processors.TemplateProcessing(single="<cls> $A <eos>", special_tokens=ends)
    return bpe


class Glyphs(torch.utils.data.Dataset):
    """Letters and digits in many fonts: `count` images, each drawn when it is asked for, as a photograph is decoded.

    Item i is (image, label): a float32 tensor of shape [1, size, size], where 0 is ground and 1 ink, and the index into
    `Glyphs.classes`, an int from 0 to 61. Character, font, height (0.70 to 0.80 of `size`) and place (within 0.04 of
    `size`) follow from split, seed and i alone, so an item is the same at every access and in every worker process.
    "test" uses a family of fonts that "train" never shows. `transform`, if given, is called on the image: `augment`
    makes one.

    Drawing takes about a quarter of a millisecond of one core. Instances can be pickled, so DataLoader workers can use
    them under any start method. Raises TypeError or ValueError for a bad argument, FileNotFoundError where matplotlib's
    fonts are missing, and IndexError past the last item.
    """

    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)

    def __init__(
        self,
        count: int = 10_000,
        *,
        split: str = "train",
        size: int = 48,
        seed: int = 0,
        transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        _check_int("count", count, least=1)
        _check_split(split)
        _check_int("size", size, least=SMALLEST_IMAGE)
        _check_int("seed", seed)
        if transform is not None and not callable(transform):
            raise TypeError(f"transform: expected None or a function of an image, got {transform!r}")
        self.count, self.split, self.size, self.seed, self.transform = count, split, size, seed, transform
        self.fonts = [_find_font(name) for name in FONTS[split]]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = range(self.count)[operator.index(index)]  # no slices
        draw = random.Random(f"glyph {self.split} {self.seed} {index}")
        label, font = draw.randrange(len(self.classes)), draw.choice(self.fonts)
        height, across, down = draw.uniform(0.70, 0.80), draw.uniform(-0.04, 0.04), draw.uniform(-0.04, 0.04)
        image = _draw_glyph(self.classes[label], font, self.size, height, across, down)
        return (self.transform(image) if self.transform else image), label


def _find_font(name: str) -> str:
    """The file of one of matplotlib's fonts, found without importing matplotlib: that is for figures.py alone."""
    spec = importlib.util.find_spec("matplotlib")
    if not spec or not spec.submodule_search_locations:
        raise FileNotFoundError("no matplotlib: Glyphs draws with the fonts that it installs")
    path = Path(spec.submodule_search_locations[0], "mpl-data", "fonts", "ttf", f"{name}.ttf")
    if not path.is_file():
        raise FileNotFoundError(f"no font {path}: Glyphs draws with the fonts that matplotlib installs")
    return str(path)


def _draw_glyph(
    character: str, font: str, size: int, height: float = 0.75, across: float = 0.0, down: float = 0.0
) -> torch.Tensor:
    """A float32 image [1, size, size]; the font's height and the shifts from the middle are shares of `size`."""
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(font, height * size, layout_engine=ImageFont.Layout.BASIC)
    image = Image.new("L", (size, size))
    place = (0.5 + across) * size, (0.73 + down) * size  # of the middle of the baseline
    ImageDraw.Draw(image).text(place, character, fill=255, font=face, anchor="ms")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, size, size) / 255


def augment(size: int = 48) -> "Transform":
    """Return a training-time augmentation of images of `size` pixels a side: a random transform, new at every call.

    It turns, shifts, scales, shears, tilts, warps, blurs and adds noise, in three to four milliseconds of one core at
    48 pixels, growing with their number: enough for DataLoader workers to matter. A torchvision v2 transform
    from a float32 tensor [..., size, size] with values from 0 to 1 to one of the same shape and range. It draws from
    torch's global generator, so `torch.manual_seed` repeats it; a DataLoader seeds each of its workers differently.
    Raises TypeError or ValueError for a bad `size`.
    """
    _check_int("size", size, least=SMALLEST_IMAGE)
    from torchvision.transforms import v2

    smooth = v2.InterpolationMode.BILINEAR
    return v2.Compose(
        [
            v2.RandomAffine(12, translate=(0.06, 0.06), scale=(0.85, 1.1), shear=10, interpolation=smooth),
            v2.RandomPerspective(0.25, p=1.0, interpolation=smooth),
            v2.ElasticTransform(alpha=float(size), sigma=min(4.0, size / 12), interpolation=smooth),
            v2.GaussianBlur(5, sigma=(0.1, 1.5)),
            v2.GaussianNoise(sigma=0.1),
        ]
    )


def load_images(
    count: int = 10_000, *, split: str = "train", size: int = 48, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the items of `Glyphs` in memory: images, float32 [count, 1, size, size], and labels, int64 [count].

    About a quarter of a millisecond and, at 48 pixels, 9 KiB an image. Arguments and errors are those of `Glyphs`.
    """
    images, labels = zip(*Glyphs(count, split=split, size=size, seed=seed))
    return torch.stack(images), torch.tensor(labels)


def sign(samples: Sequence) -> tuple[int, int]:
    """Who put a batch together, in place of it: the process's number and the worker's, as a DataLoader's collate_fn.

    It stands here and not in a notebook because workers that are spawned can import it.
    """
    return os.getpid(), torch.utils.data.get_worker_info().id


def _check_int(name: str, value: int, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _check_split(split: str) -> None:
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
