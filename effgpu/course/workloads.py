"""The running example of the lessons: a model and one batch for it, on the device.

Each function returns `(model, inputs, labels)`, but for `qwen`. The same arguments give the same weights and the same
batch, and leave the caller's random state as it was. With no arguments, the sizes fit the device (`sizes.py`).
"""

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import nn

from effgpu.course import corpus
from effgpu.course.corpus import check_int
from effgpu.course.sizes import choose_sizes, make_resnet, seeded
from effgpu.course.transformer import Transformer
from effgpu.measuring.device import choose_16_bits as choose_16_bits  # lessons take it from here
from effgpu.measuring.device import find_device
from effgpu.measuring.timing import cap_seconds
from effgpu.predicting.models import checkpoint_activations

if TYPE_CHECKING:  # imported where it is used: it takes seconds
    from transformers import DistilBertForSequenceClassification, Qwen3ForCausalLM

# The sizes of two well-known models, for what a lesson predicts without running it: `compare(full_size=...)`.
DISTILBERT = {"length": 512, "layers": 6, "width": 768, "heads": 12, "vocabulary": 30_522}
GPT2_SMALL = {"length": 1024, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257}
TRAINING_SECONDS = 180  # what a lesson's trainings take together on a GPU
FEWEST_TEXTS, MOST_TEXTS = 160, 150_000


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
        return make_resnet(), images, torch.tensor(labels, device=device)


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
    checkpoint_activations(model)
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
