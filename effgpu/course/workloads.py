"""The running example of the lessons: a model and one batch for it, on the device.

Each function returns `(model, inputs, labels)`, but for `qwen`. The same arguments give the same weights and the same
batch, and leave the caller's random state as it was. With no arguments, the sizes fit the device:

- On a CPU they are fixed (`CPU_SIZES`), because a CPU's speed varies too much to measure: lessons keep their output.
  A step takes 20 to 30 ms on two cores, and about 70 ms for images.
- On a GPU the model is fixed (`GPU_SIZES`). The batch is the power of two for which its forward and backward pass in
  16 bits come closest to 30 ms, and its step takes at most a third of the memory. It is measured once on a GPU and kept
  in `kept_batches()`: near the border, every process would choose anew.
  A model of other sizes gets the same batch, so that variants differ in what they say. `batch` overrides it.

With `width` but no `heads`, the heads are those of the default, or fewer if they do not divide the width.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from effgpu.course import corpus
from effgpu.course.corpus import check_int
from effgpu.measuring import gpu_lock
from effgpu.measuring.device import choose_16_bits as choose_16_bits  # lessons take it from here
from effgpu.measuring.device import describe, find_device, is_out_of_memory, release_memory
from effgpu.measuring.timing import cap_seconds, time_for, time_steps
from effgpu.predicting.hardware import as_it_is
from effgpu.storing import write_atomic

if TYPE_CHECKING:  # imported where it is used: it takes seconds
    from transformers import DistilBertForSequenceClassification, Qwen3ForCausalLM

CPU_SIZES = {
    "text_classifier": {"batch": 8, "length": 64, "layers": 4, "width": 128, "heads": 4, "vocabulary": 4096},
    "language_model": {"batch": 8, "length": 64, "layers": 2, "width": 128, "heads": 4, "vocabulary": 4096},
    "image_classifier": {"batch": 16, "size": 32},
}
GPU_SIZES = {
    "text_classifier": {"length": 256, "layers": 6, "width": 768, "heads": 12, "vocabulary": 16384},
    "language_model": {"length": 256, "layers": 6, "width": 768, "heads": 12, "vocabulary": 16384},
    "image_classifier": {"size": 96},
}
# The sizes of two well-known models, for what a lesson predicts without running it: `compare(full_size=...)`.
DISTILBERT = {"length": 512, "layers": 6, "width": 768, "heads": 12, "vocabulary": 30_522}
GPT2_SMALL = {"length": 1024, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257}
STEP_SECONDS = 0.03  # of the forward and backward pass on a GPU: what the optimizer takes does not grow with the batch
MEMORY_SHARE = 1 / 3  # of the GPU
TRAINING_SECONDS = 180  # what a lesson's trainings take together on a GPU
FEWEST_TEXTS, MOST_TEXTS = 160, 150_000
BATCHES = [2**power for power in range(1, 13)]  # 2 to 4096
TIMED_STEPS = 5
WARM_UP = 0.1  # seconds for each batch: the clock has risen by the time that the batch is large


class Transformer(nn.Module):
    """A pre-norm transformer. `model(texts)` is `embed`, then each of `blocks`, then `classify`.

    With `causal`, a token sees only the tokens before it, and `classify` gives logits for each token. Packed texts also
    give their `positions` [batch, length], and an `attention` that maps queries, keys and values, each [batch, heads,
    length, width / heads], to such a tensor.
    """

    def __init__(self, classes, vocabulary, length, layers, width, heads, dropout=0.1, causal=False):
        super().__init__()
        self.width = width
        self.embed = Embed(vocabulary, length, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal) for _ in range(layers))
        self.classify = Classify(width, classes, per_token=causal)

    def forward(self, texts, positions=None, *attention):  # texts: [batch, length]
        x = self.embed(texts, positions)  # [batch, length, width]
        for block in self.blocks:
            x = block(x, *attention)  # [batch, length, width]
        return self.classify(x)  # [batch, classes], or [batch, length, classes] if causal


class Embed(nn.Module):
    """The sum of a vector for the token and a vector for its position."""

    def __init__(self, vocabulary, length, width, dropout):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # as in GPT-2: learns faster than with PyTorch's std of 1

    def forward(self, texts, positions=None):  # texts: [batch, length]
        in_order = self.positions.weight[: texts.shape[1]]  # [length, width]
        vectors = in_order if positions is None else self.positions(positions)
        return self.dropout(self.tokens(texts) + vectors)  # [batch, length, width]


class Block(nn.Module):
    """Attention mixes the tokens of a text. The MLP works on each token alone."""

    def __init__(self, width, heads, dropout, causal):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *attention):  # x: [batch, length, width]
        x = x + self.dropout(self.attention(self.attention_norm(x), *attention))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, attention=None):  # x: [batch, length, width]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, length, 3, heads, width / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        x = attention(q, k, v) if attention else scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(x.transpose(1, 2).flatten(2))  # [batch, length, width]


class Classify(nn.Module):
    """Logits of a text, from the mean of its tokens, or of each token."""

    def __init__(self, width, classes, per_token):
        super().__init__()
        self.per_token = per_token
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, classes)

    def forward(self, x):  # x: [batch, length, width]
        x = self.norm(x)
        return self.logits(x if self.per_token else x.mean(1))


def text_classifier(
    batch: int | None = None,
    length: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    dropout: float = 0.1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    """Return a transformer that names the package a window of Python source is from, with texts and labels.

    texts: int64 [batch, length]; labels: int64 [batch]; the model gives logits [batch, 14]. Texts are those of
    `load_texts`. Raises TypeError or ValueError for a bad argument.

    >>> model, texts, labels = text_classifier()
    >>> loss = cross_entropy(model(texts), labels)
    """
    given = dict(batch=batch, length=length, layers=layers, width=width, heads=heads, vocabulary=vocabulary)
    device, sizes = choose_sizes("text_classifier", device, given, seed)
    batch = sizes.pop("batch")
    texts, labels = load_texts(batch, length=sizes["length"], vocabulary=sizes["vocabulary"], seed=seed, device=device)
    with seeded(seed, device):
        return Transformer(len(corpus.PACKAGES), **sizes, dropout=dropout), texts, labels


def language_model(
    batch: int | None = None,
    length: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    dropout: float = 0.1,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    """Return a causal transformer that predicts the next token of Python source, with texts and labels.

    texts and labels: int64 [batch, length]; the label of a token is the token after it. Windows of source follow each
    other without padding. The model gives logits [batch, length, vocabulary]. Raises TypeError or ValueError for a bad
    argument.

    >>> model, texts, labels = language_model()
    >>> loss = cross_entropy(model(texts).flatten(0, 1), labels.flatten())
    """
    given = dict(batch=batch, length=length, layers=layers, width=width, heads=heads, vocabulary=vocabulary)
    device, sizes = choose_sizes("language_model", device, given, seed)
    rows = _fill_rows(sizes.pop("batch"), sizes["length"] + 1, sizes["vocabulary"], seed)
    tokens = torch.tensor(rows, device=device)  # [batch, length + 1]
    with seeded(seed, device):
        model = Transformer(sizes["vocabulary"], **sizes, dropout=dropout, causal=True)
    return model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def image_classifier(
    batch: int | None = None, size: int | None = None, seed: int = 0, device: torch.device | str | None = None
) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return torchvision's ResNet-18, which names the character in an image, with images and labels.

    images: float32 [batch, 3, size, size], drawn by `corpus.Glyphs`, the same in all three channels; labels: int64
    [batch]; the model gives logits [batch, 62]. Raises TypeError or ValueError for a bad argument.

    >>> model, images, labels = image_classifier()
    >>> loss = cross_entropy(model(images), labels)
    """
    device, sizes = choose_sizes("image_classifier", device, dict(batch=batch, size=size), seed)
    pixels, labels = _draw_images(sizes["batch"], sizes["size"], seed)
    images = torch.tensor(pixels, device=device).unsqueeze(1).expand(-1, 3, -1, -1).contiguous() / 255
    with seeded(seed, device):
        return _resnet(), images, torch.tensor(labels, device=device)


def qwen(
    batch: int = 8,
    length: int = 2048,
    layers: int = 28,
    width: int = 1024,
    vocabulary: int = 151_936,
    device: torch.device | str | None = None,
) -> tuple["Qwen3ForCausalLM", torch.Tensor]:
    """Return transformers' Qwen3, by default of Qwen3-0.6B's shape, with random weights, and random texts.

    texts: int64 [batch, length], to be given as labels, too: transformers takes the token after each as its label. The
    model recomputes the activations of its blocks. Raises ValueError if `width` is no multiple of 128.

    >>> model, texts = qwen(batch=1, length=64, layers=1, width=128, vocabulary=1000)
    >>> loss = model(texts, labels=texts).loss
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if width % 128:
        raise ValueError(f"width: expected a multiple of 128, got {width}")
    config = Qwen3Config(
        vocab_size=vocabulary,
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=3 * width,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        tie_word_embeddings=True,
        use_cache=False,
    )
    device = torch.device(device or find_device())
    with seeded(0, device):
        model = Qwen3ForCausalLM(config).train()
        texts = torch.randint(vocabulary, (batch, length))
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable()
    else:  # transformers before 5.23
        model.gradient_checkpointing_enable()
    return model, texts


def distilbert(classes: int, vocabulary: int, small: bool | None = None) -> "DistilBertForSequenceClassification":
    """Return transformers' DistilBERT with random weights, ready to train; by default a small one on a CPU.

    A small one has one layer, and no dropout. The model takes input_ids and attention_mask, int64 [batch, length], and
    labels, int64 [batch]; it gives a loss and logits [batch, classes].
    """
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    device = find_device()
    sizes: dict[str, float] = {"vocab_size": vocabulary, "num_labels": classes}
    if small or (small is None and device.type == "cpu"):
        sizes |= {"n_layers": 1, "dim": 64, "hidden_dim": 256, "n_heads": 2, "initializer_range": 0.1}
        sizes |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    with device:
        return DistilBertForSequenceClassification(DistilBertConfig(**sizes)).train()


def autocast() -> torch.autocast:
    """Return a context for the forward pass, as people train on a GPU: in 16 bits. Without a GPU it changes nothing.

    The format is that of `choose_16_bits`. With float16, a real training also needs the gradient scaler of lesson 08.

    >>> with autocast():
    >>>     loss = cross_entropy(model(texts), labels)
    """
    on = torch.cuda.is_bf16_supported()  # without a GPU only where `predict` predicts for one
    return torch.autocast(find_device().type, choose_16_bits(), enabled=on)


def load_texts(
    count: int,
    *,
    split: str = "train",
    length: int = 64,
    vocabulary: int = 4096,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts as tokens, int64 [count, length], and the package each is from, int64 [count], on the device.

    The texts are those of `corpus.draw_texts`, the tokens those of `corpus.train_tokenizer`, cut or padded with 0 at
    the end. Raises TypeError or ValueError for a bad argument.
    """
    check_int("length", length, 1)
    check_int("vocabulary", vocabulary, 3)
    device = find_device() if device is None else torch.device(device)
    texts, labels = _tokenise(count, split, vocabulary, seed)
    rows = [text[:length] + [corpus.PADDING] * (length - len(text)) for text in texts]
    return torch.tensor(rows, device=device), torch.tensor(labels, device=device)


def choose_batch(measure: Callable[[int], tuple[float, int]], memory: float) -> int:
    """Return the batch, a power of two from 2 on, whose seconds come closest to STEP_SECONDS.

    `measure(batch)` returns seconds and peak bytes. The peak stays within MEMORY_SHARE of `memory`
    bytes. Running out of memory ends the search. The result is 2 even where that takes too much.
    """
    chosen = BATCHES[0]
    for batch in BATCHES:
        try:
            seconds, peak = measure(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            break
        if seconds > STEP_SECONDS * math.sqrt(2) or peak > MEMORY_SHARE * memory:
            break
        chosen = batch
        if seconds >= STEP_SECONDS / math.sqrt(2):  # twice the batch would be farther off
            break
    return chosen


def choose_count(seconds_each: float, on_cpu: int) -> int:
    """Return how many texts to train on: as many as TRAINING_SECONDS allow on a GPU, where a text takes `seconds_each`.

    A CPU's speed varies too much to measure: it gets `on_cpu` texts. The result is MOST_TEXTS at most, FEWEST_TEXTS
    at least, and the latter on a CPU where the environment variable EFFGPU_SECONDS cuts measurements short.
    """
    seconds = cap_seconds(TRAINING_SECONDS)
    if find_device().type == "cuda":
        count = int(seconds / seconds_each)
    else:
        count = on_cpu if seconds == TRAINING_SECONDS else 0
    return min(max(count, FEWEST_TEXTS), MOST_TEXTS)


def choose_sizes(name: str, device, given: dict, seed: int) -> tuple[torch.device, dict[str, int]]:
    """The device, and the sizes as given or, where they are None, as they fit it. Raises TypeError or ValueError."""
    check_int("seed", seed)
    for size, value in given.items():
        if value is not None:
            check_int(size, value, {"vocabulary": 3, "size": corpus.SMALLEST_IMAGE}.get(size, 1))
    with as_it_is():  # for `effgpu.predict`, PyTorch answers as the GPU that is named, but the sizes fit the one here
        on_gpu = torch.cuda.is_available() if device is None else str(device).startswith("cuda")
    fitting = (GPU_SIZES if on_gpu else CPU_SIZES)[name]
    device = find_device() if device is None else torch.device(device)
    sizes = {size: fitting.get(size) if value is None else value for size, value in given.items()}
    if "heads" in sizes:
        if given["heads"] is None:
            sizes["heads"] = math.gcd(sizes["heads"], sizes["width"])
        if sizes["width"] % sizes["heads"]:
            raise ValueError(f"heads: expected a divisor of width ({sizes['width']}), got {sizes['heads']}")
    if sizes["batch"] is None:
        sizes["batch"] = _measure_batch(name)
    return device, sizes


def kept_batches() -> Path:
    """Where the batches that fit this machine's GPUs are kept. Without the file they are measured anew."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "effgpu" / "batches.json"


@cache
def _measure_batch(name: str) -> int:
    """The batch that fits the current GPU."""
    from effgpu.predicting.translator import on_real_tensors

    with gpu_lock.taken(), on_real_tensors(), as_it_is():
        device, kept = describe(), _read_batches()
        key = f"{name} {GPU_SIZES[name]} on {device.name} with torch {device.versions['torch']}"
        if key in kept:
            return kept[key]
        try:
            with seeded(0, find_device()):
                chosen = choose_batch(lambda batch: _measure_step(name, batch), device.memory)
        finally:
            release_memory()
        with contextlib.suppress(OSError):  # no home, or a full disk: then the next process measures, too
            write_atomic(kept_batches(), json.dumps(kept | {key: chosen}, indent=0))
        return chosen


def _read_batches() -> dict[str, int]:
    """The kept batches; none where the file is not there or is no JSON."""
    with contextlib.suppress(OSError, ValueError):
        return dict(json.loads(kept_batches().read_text()))
    return {}


def _measure_step(name: str, batch: int) -> tuple[float, int]:
    """Seconds of forward and backward pass in 16 bits, and peak bytes of a training step, on the current GPU."""
    before, sizes = torch.cuda.memory_allocated(), GPU_SIZES[name]
    if name == "image_classifier":
        model, inputs = _resnet(), torch.rand(batch, 3, sizes["size"], sizes["size"])
    else:
        causal = name == "language_model"
        model = Transformer(sizes["vocabulary"] if causal else len(corpus.PACKAGES), **sizes, causal=causal)
        inputs = torch.randint(sizes["vocabulary"], (batch, sizes["length"]))
    dtype = choose_16_bits()
    optimizer = torch.optim.AdamW(model.parameters())

    def passes():
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            logits = model(inputs).flatten(0, -2)
            loss = cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))
        loss.backward()

    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):  # the optimizer's state is there from the second step on
        passes()
        optimizer.step()
    peak = torch.cuda.max_memory_allocated() - before
    time_for(passes, WARM_UP)
    return median(time_steps(passes, TIMED_STEPS)), peak


def _resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=len(corpus.Glyphs.classes))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Make tensors on `device`, from random generators that start at `seed`, and put the generators back."""
    gpus = []
    if device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with torch.random.fork_rng(gpus), device:
        for generator in (torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)):
            generator.manual_seed(seed)  # torch.manual_seed would seed every other GPU, too
        yield


@cache
def _tokenise(count: int, split: str, vocabulary: int, seed: int) -> tuple[list[list[int]], list[int]]:
    texts, labels = corpus.draw_texts(count, split, seed)
    return [each.ids for each in corpus.train_tokenizer(vocabulary).encode_batch(texts)], labels


@cache
def _fill_rows(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """`count` rows of `length` tokens, cut from texts that follow each other, with a 0 between two of them."""
    texts = count * length // 50 + 1  # a text has about 95 tokens
    stream: list[int] = []
    while len(stream) < count * length:
        stream = [token for text in _tokenise(texts, "train", vocabulary, seed)[0] for token in [*text, corpus.PADDING]]
        texts *= 2
    return [stream[start : start + length] for start in range(0, count * length, length)]


@cache
def _draw_images(count: int, size: int, seed: int) -> tuple:
    """Images as uint8 [count, size, size] in a NumPy array, and their labels."""
    images, labels = zip(*corpus.Glyphs(count, size=size, seed=seed))
    return (torch.cat(images) * 255).round().byte().numpy(), labels
