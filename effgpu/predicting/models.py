"""A model by its name: the step that fine-tunes it, from its config alone, for `effgpu predict --model`.

The config comes from the Hugging Face Hub, its cache, or a folder with a config.json. No weights are downloaded: what a
step takes depends on their shapes.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.functional import linear

from effgpu.measuring.device import choose_16_bits, find_device
from effgpu.predicting import choices
from effgpu.predicting.gpus import GpuLike
from effgpu.predicting.predict import Largest, largest, predict
from effgpu.predicting.prediction import Prediction
from effgpu.units import NOT_MEASURED, align, check_positive

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

GROUP = 64  # weights of 4 bits that share a scale, as in QLoRA
BYTES_FOR_SCALES = 1 / GROUP + 4 / (256 * GROUP)  # for each weight: scales in 8 bits, which share scales of 4 bytes
_OPTIMIZERS = {  # by the names of `choices`
    "adamw": partial(torch.optim.AdamW, fused=True),
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adafactor": torch.optim.Adafactor,
}


@dataclass(frozen=True, repr=False)
class ModelPrediction:
    """What it takes to fine-tune a model. Shows itself as a table.

    `predicted` is the prediction of one step with `batch` texts, `largest` the largest batch that fits each GPU, by its
    name; empty where no GPU was named. With `samples`, `epochs` has the seconds of an epoch on each GPU whose speed is
    known: expected, low, high. `price` is that of an hour, in any currency.
    """

    predicted: Prediction
    batch: int
    largest: Mapping[str, Largest]
    samples: int | None = None
    price: float | None = None

    @property
    def epochs(self) -> dict[str, tuple[float, float, float]]:
        """The seconds of an epoch on each GPU: expected, low, high."""
        if self.samples is None:
            return {}
        steps, times = self._steps, {gpu.name: self.predicted.time(gpu) for gpu in self.predicted.gpus if gpu.bandwidth}
        return {name: (steps * time.expected, steps * time.low, steps * time.high) for name, time in times.items()}

    @property
    def _steps(self) -> int:
        return math.ceil(self.samples / self.batch)

    def cost(self, gpu: str) -> tuple[float, float, float]:
        """The price of an epoch on a GPU: expected, low, high."""
        return tuple(self.price * seconds / 3600 for seconds in self.epochs[gpu])

    def to_dict(self) -> dict:
        """All of it for a program to read: that of `predicted`, and for each GPU its largest batch, epoch and cost."""
        fields = self.predicted.to_dict()
        for gpu in fields["gpus"]:
            name, keys = gpu["name"], ("expected", "low", "high")
            if found := self.largest.get(name):
                gpu["largest_batch"] = {"fits": found.fits, "may_fit": found.may_fit}
            if name in self.epochs:
                at_least = {key: None for key in keys if gpu["time"][key] is None}
                gpu["epoch"] = dict(zip(keys, self.epochs[name])) | at_least
                gpu |= {"cost": dict(zip(keys, self.cost(name))) | at_least} if self.price else {}
        return fields | {"batch": self.batch, "samples": self.samples}

    def _rows(self) -> list[list[str]]:
        headings = ["GPU", "largest batch that fits"] if self.largest else ["GPU"]
        headings += [f"an epoch of {self.samples:,} texts"] if self.samples else []
        headings += ["its cost"] if self.samples and self.price else []
        rows = [headings] if len(headings) > 1 else []
        for gpu in self.predicted.gpus if rows else ():
            row = [gpu.name]
            if self.largest:
                found = self.largest[gpu.name]
                row.append(f"{found.fits}" + (f", up to {found.may_fit} may" if found.may_fit > found.fits else ""))
            if self.samples:
                row.append(self.predicted.tell_time(gpu, self._steps) if gpu.bandwidth else NOT_MEASURED)
            if self.samples and self.price:
                words = "at least {1:.2f}" if self.predicted.untimed(gpu) else "{:.2f} [{:.2f}, {:.2f}]"
                row.append(words.format(*self.cost(gpu.name)) if gpu.bandwidth else NOT_MEASURED)
            rows.append(row)
        return rows

    def __repr__(self) -> str:
        return "\n".join([*align(self._rows()), *([""] if self._rows() else []), repr(self.predicted)])


def predict_model(
    model: str,
    batch: int,
    length: int | None = None,
    gpu: GpuLike | Iterable[GpuLike] | None = None,
    *,
    samples: int | None = None,
    price: float | None = None,
    **how: object,
) -> ModelPrediction:
    """Predict what it takes to fine-tune a model on a GPU: memory, time, the largest batch that fits, and a price.

    Model, batch, length and `how` (`lora`, `four_bits`, `checkpointing`, `optimizer`, `precision`) are those of
    `fine_tuning`; `gpu` is that of `predict`. `samples` are the texts of an epoch, `price` that of an hour of the GPU.
    Raises what both raise.

    >>> effgpu.predict_model("distilbert-base-uncased", batch=32, gpu="T4", samples=150_000, price=0.35)
    """
    given = {name: value for name, value in (("samples", samples), ("price", price)) if value is not None}
    check_positive(**given)
    if price is not None and samples is None:
        raise ValueError("price: expected samples, too: an epoch is what has a price")
    variant_of = partial(fine_tuning, read_config(model), length=length, **how)
    predicted = predict(variant_of(batch), gpu)
    fitting = {each.name: largest(variant_of, each) for each in predicted.gpus} if gpu is not None else {}
    return ModelPrediction(predicted, batch, fitting, samples, price)


def fine_tuning(
    model: "str | PreTrainedConfig",
    batch: int,
    length: int | None = None,
    *,
    lora: int | None = None,
    four_bits: bool = False,
    checkpointing: bool = False,
    optimizer: str = "adamw",
    precision: str = "mixed",
) -> Callable[[], Callable[[], None]]:
    """Return the variant that fine-tunes a model of transformers, for `predict`, `largest` or `compare`.

    `model` is a name on the Hugging Face Hub, a folder with a config.json, or a config. An encoder learns to classify
    texts into two classes, every other model to predict the next token. A batch has `batch` texts of exactly `length`
    tokens, 512 or as many as the model takes. Optimizers are adamw, sgd, momentum and adafactor. Precisions are mixed
    (weights in 32 bits, or in 16 where they are frozen, and autocast), pure (all in 16 bits), tf32 and fp32. `lora` is
    the rank of adapters beside every linear layer but the last: then only they, and a new classifier, are trained.
    `four_bits` stores the frozen weights of these layers as QLoRA does, 0.52 bytes each. The weights are random, and
    those of 4 bits have no meaning: the step is for what it takes, not for what it learns.

    Raises ConnectionError for a name that cannot be reached, and ValueError or TypeError for all else that is wrong.

    >>> effgpu.predict(effgpu.fine_tuning("distilbert-base-uncased", batch=32, length=512), "T4")
    """
    choices.check(batch, length, lora, four_bits, optimizer, precision)
    config = read_config(model) if isinstance(model, str) else model
    longest = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    length = min(512, longest) if length is None else length
    if length > longest:
        raise ValueError(
            f"length: expected at most {longest} tokens, for which {config.name_or_path} has positions, got {length}"
        )
    kind = _choose_kind(config)

    def variant() -> Callable[[], None]:
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        in_16_bits = precision == "pure" or (precision == "mixed" and lora is not None)
        network = kind.from_config(config, dtype=choose_16_bits() if in_16_bits else torch.float32)
        if lora is not None:
            _add_adapters(network, lora, four_bits, choose_16_bits() if precision == "pure" else torch.float32)
        network.to(find_device()).train()
        if checkpointing:
            checkpoint_activations(network)
        return _step(network, config, batch, length, _OPTIMIZERS[optimizer], precision == "mixed")

    return variant


def checkpoint_activations(network: "PreTrainedModel") -> None:
    """Let a model of transformers recompute its blocks' activations, by the name that its version has for that."""
    if hasattr(network, "activation_checkpointing_enable"):
        network.activation_checkpointing_enable({"use_reentrant": False})
    else:  # transformers before 5.23
        network.gradient_checkpointing_enable({"use_reentrant": False})


def read_config(model: str) -> "PreTrainedConfig":
    """The config of a model, by its name on the Hub or its folder. Raises ConnectionError or ValueError."""
    from transformers import AutoConfig

    expected = f"{model}: expected a name on the Hugging Face Hub or a folder with config.json"
    if Path(model).is_dir() and not Path(model, "config.json").exists():  # or a name of the folder's may choose one
        raise ValueError(f"{expected}: it has none")
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        unreachable = isinstance(error, OSError) and "connect" in str(error)  # rather than that there is no such model
        if Path(model).is_dir() or not unreachable:
            raise ValueError(f"{expected}: {why}") from error
        raise ConnectionError(
            f"{model}: its config is not in the cache and cannot be downloaded: connect this machine to the internet, "
            "or give a folder with its config.json"
        ) from error
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if getattr(config, "quantization_config", None):
        raise ValueError(f"{model}: expected weights of 16 or 32 bits, these are stored quantized")
    return config


def _choose_kind(config: "PreTrainedConfig") -> type:
    """The class of transformers that makes the model for its task."""
    import transformers
    from transformers.models.auto import modeling_auto as known

    architecture = next(iter(config.architectures or ()), "")
    if type(config) in known.MODEL_FOR_CAUSAL_LM_MAPPING and (
        architecture.endswith(("ForCausalLM", "LMHeadModel"))
        or type(config) not in known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    ):
        return transformers.AutoModelForCausalLM
    if config.is_encoder_decoder and type(config) in known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForSeq2SeqLM
    if type(config) in known.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForSequenceClassification
    raise ValueError(f"{config.name_or_path}: expected a model of texts, got one of the type {config.model_type!r}")


def _step(network: "PreTrainedModel", config, batch: int, length: int, optimizer, autocast: bool) -> Callable[[], None]:
    """One training step on random tokens."""
    device = next(network.parameters()).device
    tokens = torch.randint(config.get_text_config().vocab_size, (batch, length), device=device)
    inputs = {"input_ids": tokens, "labels": tokens}
    if type(network).__name__.endswith("ForSequenceClassification"):
        inputs |= {"labels": torch.randint(2, (batch,), device=device), "attention_mask": torch.ones_like(tokens)}
    else:
        inputs["use_cache"] = False
    dtype = choose_16_bits()
    trained = optimizer([parameter for parameter in network.parameters() if parameter.requires_grad], lr=1e-5)
    scaler = torch.amp.GradScaler(device.type, enabled=autocast and dtype == torch.float16)

    def step() -> None:
        with torch.autocast(device.type, dtype, enabled=autocast):
            loss = network(**inputs).loss
        scaler.scale(loss).backward()
        scaler.step(trained)
        scaler.update()
        trained.zero_grad()

    return step


def _add_adapters(network: "PreTrainedModel", rank: int, four_bits: bool, dtype: torch.dtype) -> None:
    """Freeze the network but for a new classifier, and put an adapter beside every linear layer but the last.

    What is trained is of this type: a GradScaler takes no gradients of 16 bits.
    """
    from transformers.pytorch_utils import Conv1D

    body = network.base_model
    body.requires_grad_(False)
    if output := network.get_output_embeddings():
        output.requires_grad_(False)
    for module in list(body.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, (nn.Linear, Conv1D)):
                setattr(module, name, _Adapter(child, rank, four_bits, dtype))
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


class _Adapter(nn.Module):
    """A frozen linear layer, and beside it two thin matrices that are trained: lesson 23."""

    def __init__(self, frozen: nn.Module, rank: int, four_bits: bool, dtype: torch.dtype) -> None:
        super().__init__()
        outputs, inputs = frozen.weight.shape if isinstance(frozen, nn.Linear) else frozen.weight.shape[::-1]
        self.frozen = _FourBits(frozen, inputs, outputs) if four_bits else frozen
        self.down = nn.Parameter(torch.zeros(rank, inputs, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype))

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, of which some models read the type."""
        return self.frozen.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What `frozen` gives for x [..., inputs], and what the adapter adds."""
        return self.frozen(x) + linear(linear(x.to(self.down.dtype), self.down), self.up)


class _FourBits(nn.Module):
    """A linear layer whose weights take 4 bits and the share of a scale, and are unpacked for each product."""

    def __init__(self, layer: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shape, self.dtype, self.bias = (outputs, inputs), choose_16_bits(), layer.bias
        count = inputs * outputs
        self.register_buffer("weight", torch.empty(0, dtype=self.dtype), persistent=False)  # its type is asked for
        self.register_buffer("packed", torch.zeros(count // 2, dtype=torch.uint8))
        self.register_buffer("scales", torch.zeros(round(count * BYTES_FOR_SCALES), dtype=torch.uint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product for x [..., inputs]."""
        return _FourBitProduct.apply(x.to(self.dtype), self.packed, self.shape, self.bias)


class _FourBitProduct(torch.autograd.Function):
    """A product whose backward pass unpacks the weights again, as bitsandbytes' does, and does not keep them."""

    @staticmethod
    def forward(ctx, x, packed, shape, bias):
        """x [..., inputs] gives [..., outputs]."""
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return linear(x, _unpack(packed, x.dtype, shape), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, gradient):
        """The gradient of x; weights and bias are frozen."""
        (packed,) = ctx.saved_tensors
        return gradient @ _unpack(packed, gradient.dtype, ctx.shape), None, None, None


def _unpack(packed: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> torch.Tensor:
    """One kernel that reads half a byte for each weight and writes it whole, as NF4's does. Its values mean nothing."""
    return packed[:, None].expand(-1, 2).to(dtype).view(shape)
