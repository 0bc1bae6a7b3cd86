"""Pretrained weights and public data, for the lessons' switch `real`: all that needs a network, in one place.

A name is one of the Hugging Face Hub, such as those below, or a folder: a model or tokenizer of `save_pretrained`, a
dataset of `save_to_disk`, or a folder of images with one folder for each class. The first use of a name on the Hub
downloads it, with a progress bar, into the Hub's cache (`HF_HOME`), from which later uses read it without a network.
Every function raises ConnectionError, in one sentence, if neither has it.

Where a lesson says None for a name, it gets what works without a network: the texts of `corpus` and their tokenizer.
"""

import contextlib
import errno
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from effgpu.course import corpus, workloads
from effgpu.course.sizes import choose_sizes, seeded
from effgpu.course.transformer import Classify, Transformer
from effgpu.measuring.device import find_device

if TYPE_CHECKING:  # imported where they are used: they take seconds
    from datasets import DatasetDict
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

YELP = "Yelp/yelp_review_full"  # 650,000 reviews with 1 to 5 stars, and 50,000 held out: 0.3 GB
CIFAR = "uoft-cs/cifar10"  # 50,000 images of 32 × 32 pixels in 10 classes, and 10,000 held out: 0.15 GB
DISTILBERT = "distilbert/distilbert-base-uncased"  # 66 million weights: 0.3 GB
DISTILGPT2 = "distilbert/distilgpt2"  # 82 million weights, 6 blocks: 0.4 GB
QWEN = "Qwen/Qwen3-0.6B"  # 596 million weights, a vocabulary of 151,936: 1.5 GB


def load_texts(name: str | None, train: int, test: int, seed: int = 0) -> "DatasetDict":
    """Return texts to learn from and others to test with, in random order: "train" and "test".

    Each has the columns "text" (str) and "label" (ClassLabel), and as many rows as asked for, or all. Raises
    ConnectionError, and ValueError for data without these splits and columns.
    """
    from datasets import DatasetDict

    counts = _check_counts(train, test)
    if name is not None:
        return _draw_splits(name, "text", counts, seed)
    _show_progress(False)
    return DatasetDict({split: corpus.load_text(count, split=split, seed=seed) for split, count in counts.items()})


def load_images(name: str, train: int, test: int, seed: int = 0) -> "DatasetDict":
    """Return images to learn from and others to test with, in random order: "train" and "test".

    Each has the columns "image" (a PIL image) and "label" (ClassLabel). Raises as `load_texts`.
    """
    return _draw_splits(name, "image", _check_counts(train, test), seed)


def load_tokenizer(name: str | None) -> "PreTrainedTokenizerBase":
    """Return the tokenizer of a model, or for None the one that is trained on `corpus`. Raises ConnectionError."""
    from transformers import AutoTokenizer

    if name is None:
        return corpus.load_tokenizer()
    with _reaching(name):
        return AutoTokenizer.from_pretrained(name)


def load_classifier(name: str, classes: int) -> "PreTrainedModel":
    """Return a pretrained model with a new last layer for so many classes, ready to train. Raises ConnectionError."""
    from transformers import AutoModelForSequenceClassification

    with _reaching(name):
        return AutoModelForSequenceClassification.from_pretrained(name, num_labels=classes).train()


def load_language_model(name: str) -> "PreTrainedModel":
    """Return a pretrained causal language model, its weights in fp32, ready to train. Raises ConnectionError."""
    from transformers import AutoModelForCausalLM

    with _reaching(name):
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).train()


def load_resnet(classes: int) -> nn.Module:
    """Return torchvision's ResNet-18, trained on ImageNet, with a new last layer. Raises ConnectionError."""
    from torchvision.models import ResNet18_Weights, resnet18

    with _reaching("ResNet-18"):
        model = resnet18(weights=ResNet18_Weights.DEFAULT)
    model.fc = nn.Linear(model.fc.in_features, classes)
    return model


def text_classifier(
    batch: int | None = None,
    length: int | None = None,
    dropout: float = 0.1,
    seed: int = 0,
    device: torch.device | str | None = None,
    **size: int,
) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    """Return `workloads.text_classifier` with the weights of DISTILGPT2, and the first tokens of reviews of YELP.

    texts: int64 [batch, length]; labels: int64 [batch], the stars less one; the model gives logits [batch, 5]. A token
    sees only those before it. With a `size` of the model, such as `layers`, it is that of `workloads`: random
    weights of that size. Raises ConnectionError, and TypeError or ValueError for a bad argument.
    """
    if size:
        return workloads.text_classifier(batch, length, dropout=dropout, seed=seed, device=device, **size)
    device, sizes = choose_sizes("text_classifier", device, dict(batch=batch, length=length), seed)
    tokens, labels, classes = _read_reviews("train", sizes["batch"], sizes["length"], seed)
    with seeded(seed, device):
        model = _with_weights_of(DISTILGPT2, dropout)
        model.classify = Classify(model.width, classes, per_token=False)
    return model, torch.tensor(tokens, device=device), torch.tensor(labels, device=device)


def language_model(
    batch: int | None = None,
    length: int | None = None,
    dropout: float = 0.1,
    seed: int = 0,
    device: torch.device | str | None = None,
    **size: int,
) -> tuple[Transformer, torch.Tensor, torch.Tensor]:
    """Return `workloads.language_model` with the weights of DISTILGPT2, and reviews of YELP with their next tokens.

    texts and labels: int64 [batch, length]; the model gives logits [batch, length, 50257]. With a `size` of the
    model it is that of `workloads`. Raises as `text_classifier`.
    """
    if size:
        return workloads.language_model(batch, length, dropout=dropout, seed=seed, device=device, **size)
    device, sizes = choose_sizes("language_model", device, dict(batch=batch, length=length), seed)
    tokens, _, _ = _read_reviews("train", sizes["batch"], sizes["length"] + 1, seed)
    with seeded(seed, device):
        model = _with_weights_of(DISTILGPT2, dropout)
    texts = torch.tensor(tokens, device=device)  # [batch, length + 1]
    return model, texts[:, :-1].contiguous(), texts[:, 1:].contiguous()


def read_texts(
    count: int,
    *,
    split: str = "train",
    length: int = 64,
    vocabulary: int | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `count` reviews as tokens, int64 [count, length], and their labels, as `workloads.load_texts` does.

    The tokens are those of DISTILGPT2, whatever `vocabulary` says. Raises as `text_classifier`.
    """
    device = find_device() if device is None else torch.device(device)
    tokens, labels, _ = _read_reviews(split, count, length, seed)
    return torch.tensor(tokens, device=device), torch.tensor(labels, device=device)


def read_tokens(name: str, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return reviews of YELP as tokens of a model's tokenizer, one behind the other: int64 [batch, length], on the CPU.

    Raises ConnectionError, and TypeError or ValueError for a bad argument.
    """
    corpus.check_int("batch", batch, least=1)
    corpus.check_int("length", length, least=1)
    count, tokens, tokenizer = 0, [], load_tokenizer(name)
    while len(tokens) < batch * length:
        count += batch * length // 64 + 1  # a review has about 180 tokens
        texts = load_texts(YELP, train=count, test=1, seed=seed)["train"]["text"][:]
        tokens = [token for one in tokenizer(texts)["input_ids"] for token in one]
        if len(tokens) < batch * length and len(texts) < count:
            raise ValueError(f"{YELP}: expected {batch * length} tokens, found {len(tokens)} in all")
    return torch.tensor(tokens[: batch * length]).view(batch, length)


def _with_weights_of(name: str, dropout: float) -> Transformer:
    """The course's transformer with the weights of a GPT-2, on the default device. It computes the same logits."""
    from transformers import GPT2LMHeadModel

    with _reaching(name), torch.device("cpu"):
        theirs = GPT2LMHeadModel.from_pretrained(name)
    config = theirs.config
    sizes = {"vocabulary": config.vocab_size, "length": config.n_positions, "width": config.n_embd}
    ours = Transformer(
        config.vocab_size, **sizes, layers=config.n_layer, heads=config.n_head, dropout=dropout, causal=True
    )
    body = theirs.transformer
    pairs = [(ours.embed.tokens, body.wte), (ours.embed.positions, body.wpe), (ours.classify.norm, body.ln_f)]
    for block, other in zip(ours.blocks, body.h):
        block.mlp[1] = nn.GELU("tanh")  # GPT-2's
        pairs += [(block.attention_norm, other.ln_1), (block.mlp_norm, other.ln_2)]
        pairs += [(block.attention.qkv, other.attn.c_attn), (block.attention.out, other.attn.c_proj)]
        pairs += [(block.mlp[0], other.mlp.c_fc), (block.mlp[2], other.mlp.c_proj)]
    with torch.no_grad():
        for layer, other in pairs:
            transposed = isinstance(layer, nn.Linear)  # theirs stores [inputs, outputs]
            layer.weight.copy_(other.weight.T if transposed else other.weight)
            if getattr(layer, "bias", None) is not None:
                layer.bias.copy_(other.bias)
        ours.classify.logits.weight.copy_(theirs.lm_head.weight)  # without a bias
        ours.classify.logits.bias.zero_()
    return ours


@cache
def _read_reviews(split: str, count: int, length: int, seed: int) -> tuple[list[list[int]], list[int], int]:
    """Tokens of reviews, cut or padded at the end; their labels; and how many classes there are."""
    rows = load_texts(YELP, **{"train": 1, "test": 1} | {split: count}, seed=seed)[split]
    tokenizer = load_tokenizer(DISTILGPT2)
    tokenizer.pad_token = tokenizer.eos_token
    tokens = tokenizer(rows["text"][:], truncation=True, padding="max_length", max_length=length)["input_ids"]
    return tokens, rows["label"][:], rows.features["label"].num_classes


def _check_counts(train: int, test: int) -> dict[str, int]:
    counts = {"train": train, "test": test}
    for split, count in counts.items():
        corpus.check_int(split, count, least=1)
    return counts


def _draw_splits(name: str, column: str, counts: dict[str, int], seed: int) -> "DatasetDict":
    """So many rows of each split, in random order, or all where it has fewer."""
    from datasets import DatasetDict

    _show_progress(True)
    data = _load_data(name, column, counts)
    shuffled = {split: data[split].shuffle(seed=seed) for split in counts}
    return DatasetDict({split: rows.select(range(min(counts[split], len(rows)))) for split, rows in shuffled.items()})


def _load_data(name: str, column: str, counts: dict[str, int]) -> "DatasetDict":
    """The dataset of a name or folder. Raises ConnectionError or ValueError."""
    from datasets import load_dataset, load_from_disk

    folder = Path(name)
    with _reaching(name):
        if (folder / "dataset_dict.json").is_file():
            data = load_from_disk(name)
        elif folder.is_dir():
            data = load_dataset("imagefolder", data_dir=name)
        else:
            data = load_dataset(name)
    for split in counts:
        if split in data and "img" in data[split].column_names:  # as CIFAR calls it
            data[split] = data[split].rename_column("img", "image")
        found = data[split].column_names if split in data else []
        if not {column, "label"} <= {*found}:
            raise ValueError(f"{name}: expected the columns {column!r} and 'label' in the split {split!r}, got {found}")
    return data


def _show_progress(wanted: bool) -> None:
    from datasets import disable_progress_bars, enable_progress_bars

    (enable_progress_bars if wanted else disable_progress_bars)()


@contextlib.contextmanager
def _reaching(name: str) -> Iterator[None]:
    """Say in one sentence what to do where `name` can be reached neither on the Hub nor in its cache."""
    try:
        yield
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
            raise  # of the disk, and not of the network
        if Path(name).is_dir():
            first = str(error).splitlines()[0]
            raise ValueError(
                f"{name}: expected a folder of save_pretrained, save_to_disk or images: {first}"
            ) from error
        raise ConnectionError(
            f"{name}: it is neither in the cache nor can it be downloaded: connect this machine to the internet and "
            "run the cell again, or set real = False"
        ) from error
