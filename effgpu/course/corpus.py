"""Text and images to train on, without a download: Python's own source, and letters in the fonts of matplotlib.

Unlike random tensors, they are a task that can be learned. Texts differ in length and have a held-out split, and each
image is work for the CPU. Nothing here opens a network connection.
"""

import importlib.util
import math
import operator
import os
import random
import string
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # imported where they are used: they take seconds
    from datasets import Dataset
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

# The classes of the texts. Every CPython from 3.11 on ships the source of these packages.
PACKAGES = (
    *("asyncio", "concurrent", "email", "encodings", "html", "http", "importlib", "logging"),
    *("multiprocessing", "re", "unittest", "urllib", "xml", "xmlrpc"),
)
TRAIN_SHARE = 0.8  # of the lines of each file, from its top
LOG_LINES, SPREAD_LINES = math.log(7), 0.9  # mean and standard deviation of the logarithm of a window's lines
MOST_LINES = 120  # of a window

PADDING, UNKNOWN = 0, 1  # tokens
TOKEN = r"[A-Za-z]+|\d|\n|[^A-Za-z\d\s]"  # a word, a digit, the end of a line, or a sign
VOCABULARY_TEXTS = 5_000  # that a tokenizer is trained on

# Fonts that every matplotlib from 3.9 on ships. Its other fonts draw symbols, boxes or nothing.
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("cmb10", "cmr10", "cmss10", "cmtt10"),
)
SMALLEST_IMAGE = 16  # pixels a side


def load_text(count: int = 10_000, *, split: str = "train", seed: int = 0) -> "Dataset":
    """Return the texts of `draw_texts` as a `datasets.Dataset`, to tokenise with `map`.

    It has `count` rows with the columns "text" (str, never blank) and "label" (ClassLabel, named by PACKAGES).
    """
    from datasets import ClassLabel, Dataset, Features, Value

    texts, labels = draw_texts(count, split, seed)
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(PACKAGES))})
    return Dataset.from_dict({"text": texts, "label": labels}, features)


def draw_texts(count: int, split: str, seed: int) -> tuple[list[str], list[int]]:
    """Return `count` windows of the standard library's source, and for each the index in PACKAGES of where it is from.

    A window is a run of whole lines of one file. The package and the first line, which is not blank, are drawn
    uniformly. The number of lines is lognormal with median 7, and at most 120. So lengths spread as those of real texts
    do. "train" uses the first 80 % of the lines of each file and "test" the rest: no line of a file is in both.

    The same installed Python, split and seed give the same texts. A larger `count` appends to them. Of 10,000 texts 1 %
    occur more than once, of 150,000 texts 11 %. Raises TypeError or ValueError for a bad argument.
    """
    check_int("count", count, least=1)
    if split not in ("train", "test"):
        raise ValueError(f"split: expected 'train' or 'test', got {split!r}")
    check_int("seed", seed)
    parts = [_read_part(package, split) for package in PACKAGES]
    labels = random.Random(f"labels {split} {seed}").choices(range(len(parts)), k=count)
    draw = random.Random(f"windows {split} {seed}")
    return [_cut_window(*parts[label], draw) for label in labels], labels


@cache
def train_tokenizer(vocabulary: int) -> "Tokenizer":
    """Train a tokenizer of the library `tokenizers` on texts of the train split. It knows so many tokens.

    A token is a word, a digit, the end of a line or a sign: the most frequent have the lowest numbers. Token 0 is
    padding, token 1 stands for what is not known. Raises TypeError or ValueError for a bad argument.
    """
    from tokenizers import Regex, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from tokenizers.trainers import WordLevelTrainer

    check_int("vocabulary", vocabulary, least=3)
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(TOKEN), behavior="removed", invert=True)  # what is between the tokens goes
    trainer = WordLevelTrainer(vocab_size=vocabulary, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(draw_texts(VOCABULARY_TEXTS, "train", 0)[0], trainer)
    return tokenizer


def load_tokenizer(vocabulary: int = 4096) -> "PreTrainedTokenizerFast":
    """Return `train_tokenizer` as transformers has it, for texts of at most 512 tokens.

    It puts the token [CLS] before each text, which DistilBERT answers from. `len` of it is `vocabulary`.

    >>> load_tokenizer()("import os", truncation=True)["input_ids"]
    """
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    check_int("vocabulary", vocabulary, least=4)
    tokenizer = Tokenizer.from_str(train_tokenizer(vocabulary - 1).to_str())
    tokenizer.add_special_tokens(["[CLS]"])
    start = [("[CLS]", tokenizer.token_to_id("[CLS]"))]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A", special_tokens=start)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    inputs = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, model_input_names=inputs, **names)


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
    folder = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    return [folder / name for name in names if not {"test", "tests"} & set(name.split("/"))]


class Glyphs(torch.utils.data.Dataset):
    """A dataset of `count` images of letters and digits in many fonts. Each is drawn when it is accessed.

    Item i is (image, label). The image is a float32 tensor [1, size, size]: 0 is background, 1 is ink. The label is the
    index into `Glyphs.classes`, an int from 0 to 61. Character, font, height (0.70 to 0.80 of `size`) and position
    (within 0.04 of `size`) depend only on seed and i, so an item is the same at every access and in every worker
    process.

    Drawing takes about 0.25 ms on one core. Instances can be pickled, so DataLoader workers can use them with any start
    method. Raises TypeError or ValueError for a bad argument, and IndexError past the last item.
    """

    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)

    def __init__(self, count: int = 10_000, *, size: int = 48, seed: int = 0) -> None:
        check_int("count", count, least=1)
        check_int("size", size, least=SMALLEST_IMAGE)
        check_int("seed", seed)
        self.count, self.size, self.seed = count, size, seed
        matplotlib = importlib.util.find_spec("matplotlib").submodule_search_locations[0]  # whose import is slow
        self.fonts = [str(Path(matplotlib, "mpl-data", "fonts", "ttf", f"{name}.ttf")) for name in FONTS]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        from PIL import Image, ImageDraw, ImageFont

        index = range(self.count)[operator.index(index)]  # no slices
        draw = random.Random(f"glyph train {self.seed} {index}")
        label, font = draw.randrange(len(self.classes)), draw.choice(self.fonts)
        height, across, down = draw.uniform(0.70, 0.80), draw.uniform(-0.04, 0.04), draw.uniform(-0.04, 0.04)
        face = ImageFont.truetype(font, height * self.size, layout_engine=ImageFont.Layout.BASIC)
        image = Image.new("L", (self.size, self.size))
        place = (0.5 + across) * self.size, (0.73 + down) * self.size  # of the middle of the baseline
        ImageDraw.Draw(image).text(place, self.classes[label], fill=255, font=face, anchor="ms")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(1, self.size, self.size) / 255, label


def worker_ids(samples: Sequence) -> tuple[int, int]:
    """A collate function that returns (process id, worker id) instead of a batch.

    It is not in a notebook, because spawned DataLoader workers cannot import from one.
    """
    return os.getpid(), torch.utils.data.get_worker_info().id


def show_rows(rows: Sequence[Sequence[int]], every: int = 1) -> int:
    """Print the last of `every` so many rows of a batch: a block for 8 tokens of a text, a dot for 8 of padding.

    A row holds the lengths of its texts, in tokens, which two shades of blocks tell apart. Returns the slots of the
    batch: its rows times the longest of them.
    """
    width = max(map(sum, rows))
    for row in rows[every - 1 :: every]:
        blocks = ("█▒"[place % 2] * (length // 8) for place, length in enumerate(row))
        print("".join(blocks).ljust(width // 8, "·"))
    return width * len(rows)


def check_int(name: str, value: int, least: int | None = None) -> None:
    """Raise TypeError unless `value` is an int, and ValueError if it is below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
