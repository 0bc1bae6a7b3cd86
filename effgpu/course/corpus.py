"""Text and images to train on, without a download: Python's own source, and letters in the fonts of matplotlib.

Unlike random tensors, they have items of different lengths, a task that can be learned, a held-out split, and real
work for the CPU per item. Nothing here opens a network connection.
"""

import importlib.util
import math
import operator
import os
import random
import string
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # imported where they are used: each takes a second or more
    from datasets import Dataset
    from torchvision.transforms.v2 import Transform

# The classes of load_text. Every CPython from 3.11 on ships the source of these packages.
PACKAGES = (
    *("asyncio", "concurrent", "email", "encodings", "html", "http", "importlib", "logging"),
    *("multiprocessing", "re", "unittest", "urllib", "xml", "xmlrpc"),
)
TRAIN_SHARE = 0.8  # of the lines of each file, from its top
LOG_LINES, SPREAD_LINES = math.log(7), 0.9  # mean and standard deviation of the logarithm of a window's lines
MOST_LINES = 120  # of a window

# The text fonts that every matplotlib from 3.9 on ships. Its other fonts draw symbols, boxes or nothing. A whole family
# is held out, because the bold or italic cut of a font seen in training is too similar to it.
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

    A window is a run of whole lines of one file. The package and the first line, which is not blank, are drawn
    uniformly. The number of lines is lognormal with median 7, and at most 120. So lengths spread as those of real texts
    do. "train" uses the first 80 % of the lines of each file and "test" the rest: no line of a file is in both.

    The same installed Python, split and seed give the same rows. A larger `count` appends to them. Of 10,000 texts 1 %
    occur more than once, of 150,000 texts 11 %.

    Returns a `datasets.Dataset` of `count` rows with the columns "text" (str, never blank) and "label" (ClassLabel,
    named by PACKAGES). Raises TypeError or ValueError for a bad argument, and FileNotFoundError if the source of a
    package is not installed.
    """
    check_int("count", count, least=1)
    check_split(split)
    check_int("seed", seed)
    import pyarrow
    from datasets import ClassLabel, Dataset, Features, Value

    texts, labels = draw_texts(count, split, seed)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(PACKAGES))})
    return Dataset.from_dict({"text": pyarrow.array(texts), "label": pyarrow.array(labels)}, features)


def draw_texts(count: int, split: str, seed: int) -> tuple[list[str], list[int]]:
    """Return the texts and labels of `load_text` as lists, without importing datasets."""
    parts = [_read_part(package, split) for package in PACKAGES]
    labels = random.Random(f"labels {split} {seed}").choices(range(len(parts)), k=count)
    draw = random.Random(f"windows {split} {seed}")
    return [_cut_window(*parts[label], draw) for label in labels], labels


def _cut_window(lines: list[str], ends: list[int], starts: list[int], draw: random.Random) -> str:
    """Cut one window from what `_read_part` returns."""
    start = draw.choice(starts)
    length = max(1, min(round(draw.lognormvariate(LOG_LINES, SPREAD_LINES)), MOST_LINES))
    return "\n".join(lines[start : min(start + length, ends[start])])


@cache
def _read_part(package: str, split: str) -> tuple[list[str], list[int], list[int]]:
    """Return a package's lines of one split, the end of its file for each line, and the indices of non-blank lines."""
    lines, ends = [], []
    for path in _find_sources(package):
        file = path.read_text(encoding="utf-8").splitlines()
        border = int(len(file) * TRAIN_SHARE)
        part = file[:border] if split == "train" else file[border:]
        lines += part
        ends += [len(lines)] * len(part)
    return lines, ends, [index for index, line in enumerate(lines) if line.strip()]


def _find_sources(package: str) -> list[Path]:
    """Return the source files of a package, without its tests, in the same order on every system."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    paths = {path.relative_to(folder).as_posix(): path for folder in folders for path in Path(folder).rglob("*.py")}
    names = [name for name in sorted(paths) if not {"test", "tests"} & set(name.split("/"))]
    if not names:
        raise FileNotFoundError(f"no source of the package {package!r}: load_text needs Python with its source files")
    return [paths[name] for name in names]


class Glyphs(torch.utils.data.Dataset):
    """A dataset of `count` images of letters and digits in many fonts. Each is drawn when it is accessed.

    Item i is (image, label). The image is a float32 tensor [1, size, size]: 0 is background, 1 is ink. The label is the
    index into `Glyphs.classes`, an int from 0 to 61. Character, font, height (0.70 to 0.80 of `size`) and position
    (within 0.04 of `size`) depend only on split, seed and i, so an item is the same at every access and in every worker
    process. "test" uses a font family that "train" never shows. `transform`, if given, is applied to the image. See
    `augment`.

    Drawing takes about 0.25 ms on one core. Instances can be pickled, so DataLoader workers can use them with any start
    method. Raises TypeError or ValueError for a bad argument, FileNotFoundError if matplotlib's fonts are missing, and
    IndexError past the last item.
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
        check_int("count", count, least=1)
        check_split(split)
        check_int("size", size, least=SMALLEST_IMAGE)
        check_int("seed", seed)
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
    """Return the file of one of matplotlib's fonts, without the slow import of matplotlib."""
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
    """Return a float32 image [1, size, size]. Height and shifts from the centre are shares of `size`."""
    from PIL import Image, ImageDraw, ImageFont

    face = ImageFont.truetype(font, height * size, layout_engine=ImageFont.Layout.BASIC)
    image = Image.new("L", (size, size))
    place = (0.5 + across) * size, (0.73 + down) * size  # of the middle of the baseline
    ImageDraw.Draw(image).text(place, character, fill=255, font=face, anchor="ms")
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, size, size) / 255


def augment(size: int = 48) -> "Transform":
    """Return a random augmentation for images of `size` pixels a side, as a torchvision v2 transform.

    It rotates, shifts, scales, shears, tilts, warps and blurs an image, and adds noise. This takes 3 to 4 ms on one
    core at 48 pixels, enough for DataLoader workers to matter. Input and output are float32 tensors [..., size, size]
    with values from 0 to 1. Random numbers come from torch's global generator, so `torch.manual_seed` repeats them. A
    DataLoader seeds each of its workers differently. Raises TypeError or ValueError for a bad `size`.
    """
    check_int("size", size, least=SMALLEST_IMAGE)
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

    An image takes about 0.25 ms and, at 48 pixels, 9 KiB. Arguments and errors are those of `Glyphs`.
    """
    images, labels = zip(*Glyphs(count, split=split, size=size, seed=seed))
    return torch.stack(images), torch.tensor(labels)


def worker_ids(samples: Sequence) -> tuple[int, int]:
    """A collate function that returns (process id, worker id) instead of a batch.

    It is not in a notebook, because spawned DataLoader workers cannot import from one.
    """
    return os.getpid(), torch.utils.data.get_worker_info().id


def check_int(name: str, value: int, least: int | None = None) -> None:
    """Raise TypeError unless `value` is an int, and ValueError if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def check_split(split: str) -> None:
    """Raise ValueError unless `split` is "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
