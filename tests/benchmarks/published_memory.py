"""Published peaks of training steps beside predicted ones: docs/predict.md shows them, `make predictions` runs them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import Prediction
from effgpu.units import GiB, MiB

HF22 = "transformers, performance guide of 2022"
R2 = "LLMs-from-scratch, ch05/10_llm-training-speed"
R1 = "pytorch-memory-optim, logs.md"
TT = "torchtune, README"
CARD = {HF22: "V100", R2: "A100 40 GB", R1: "A100 40 GB", TT: "A100 80 GB"}


@dataclass(frozen=True)
class Case:
    """A published peak in bytes, the variant that repeats the run, and what the publication leaves open.

    `allocates` says that the number is what the allocator gave, not what it held. `gpu` is that of the source, if one.
    """

    source: str
    name: str
    published: float
    variant: Callable
    unknown: str = ""
    gpu: str = ""
    allocates: bool = False
    rests: bool = False  # the number is what lies there before a step

    @property
    def card(self) -> str:
        return self.gpu or CARD[self.source]


class _KeptSoftmax(torch.autograd.Function):
    """Softmax as before PyTorch 1.11: its input is kept for the backward pass, too (pytorch/pytorch#65242)."""

    @staticmethod
    def forward(ctx, scores):
        result = scores.softmax(-1)
        ctx.save_for_backward(scores, result)
        return result

    @staticmethod
    def backward(ctx, grad):
        _, result = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, result, -1, grad.dtype)


def _attention_of_2022(module, query, key, value, attention_mask, scaling, dropout=0.0, **options):
    """BERT's attention as transformers had it in 2022: the mask is fp32, so the scores are from there on."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    scores = scores + torch.zeros(query.shape[0], 1, 1, key.shape[2])
    with torch.autocast("cpu", enabled=False):
        weights = _KeptSoftmax.apply(scores.float())
    weights = F.dropout(weights, dropout, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class _AdamW(torch.optim.Optimizer):
    """AdamW as transformers had it in 2022: a loop over the parameters, with temporaries for one at a time."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
            state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-8), value=-1e-3)


class _Adam8bit(_AdamW):
    """bitsandbytes' 8-bit Adam: a byte for each of two states, and an fp32 scale for every 2,048 of them.

    Tensors of fewer than 4,096 elements keep fp32 states. The kernel works in place.
    """

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state, small = self.state[p], p.numel() < 4096
            if state:
                continue
            for number in (1, 2):
                state[f"state{number}"] = torch.zeros_like(p, dtype=None if small else torch.uint8)
                if not small:
                    state[f"absmax{number}"] = torch.zeros(-(-p.numel() // 2048))


def _adafactor(parameters):
    from transformers import Adafactor

    return Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


def bert_large(batch=4, accumulate=1, checkpoint=False, fp16=False, optimizer=_AdamW):
    from transformers import AttentionInterface, BertConfig, BertForSequenceClassification

    AttentionInterface.register("of 2022", _attention_of_2022)
    sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    model = BertForSequenceClassification(BertConfig(**sizes, attn_implementation="of 2022")).train()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": True})
    trained = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    def step():
        for _ in range(accumulate):
            inputs, labels = torch.zeros(batch, 512, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
            with torch.autocast("cpu", torch.float16, enabled=fp16):
                loss = model(input_ids=inputs, labels=labels).loss / accumulate
            scaler.scale(loss).backward()
        if fp16:
            scaler.unscale_(trained)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(trained)
        scaler.update()
        trained.zero_grad(set_to_none=False)

    return step


class _Norm(nn.Module):
    """Layer normalisation from elementary operations."""

    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class _Gelu(nn.Module):
    """GELU from elementary operations."""

    def forward(self, x):
        inner = torch.sqrt(torch.tensor(2.0 / torch.pi)) * (x + 0.044715 * torch.pow(x, 3))
        return 0.5 * x * (1 + torch.tanh(inner))


class _Attention(nn.Module):
    def __init__(self, width, heads, length, stored_mask, fused):
        super().__init__()
        self.heads, self.fused = heads, fused
        widths = [3 * width] if fused else [width] * 3
        self.qkv = nn.ModuleList(nn.Linear(width, each, bias=False) for each in widths)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.ones(length, length), diagonal=1) if stored_mask else None)

    def forward(self, x):
        batch, length, width = x.shape
        if self.fused:
            q, k, v = self.qkv[0](x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout.p * self.training, is_causal=True)
            return self.out(x.transpose(1, 2).contiguous().view(batch, length, width))
        q, k, v = (linear(x).view(batch, length, self.heads, -1).transpose(1, 2) for linear in self.qkv)
        scores = q @ k.transpose(2, 3)
        mask = torch.triu(torch.ones(length, length).bool(), diagonal=1) if self.mask is None else self.mask.bool()
        scores.masked_fill_(mask, -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class _Block(nn.Module):
    def __init__(self, width, native, **options):
        super().__init__()
        norm, gelu = (nn.LayerNorm, nn.GELU(approximate="tanh")) if native else (_Norm, _Gelu())
        self.attention = _Attention(width, **options)
        self.norm1, self.norm2, self.dropout = norm(width), norm(width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x):
        x = self.dropout(self.attention(self.norm1(x))) + x
        return self.dropout(self.mlp(self.norm2(x))) + x


class _Gpt(nn.Module):
    def __init__(
        self, vocabulary, native=False, stored_mask=False, fused=False, width=768, length=1024, layers=12, heads=12
    ):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(0.1)
        options = dict(heads=heads, length=length, stored_mask=stored_mask, fused=fused)
        self.blocks = nn.Sequential(*(_Block(width, native, **options) for _ in range(layers)))
        self.norm = (nn.LayerNorm if native else _Norm)(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        return self.head(self.norm(self.blocks(x)))


def gpt2(batch=8, vocabulary=50257, foreach=False, bf16=False, compiled=False, evaluated=True, **options):
    model = _Gpt(vocabulary, **options)
    if compiled:
        model = torch.compile(model)
    if bf16:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=None if foreach else True)

    def loss():
        inputs, labels = (torch.zeros(batch, 1024, dtype=torch.long) for _ in range(2))
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        if evaluated:
            model.eval()
            with torch.no_grad():
                loss()
                loss()
            model.train()

    return step


def vit(batch=64, fp16=False, bf16=False, accumulate=1):
    from torchvision.models import vit_l_16

    model = vit_l_16()
    model.heads.head = nn.Linear(1024, 10)
    if bf16:
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)
    kept = {}  # the loop's variables live on into the next step

    def step():
        for number in range(accumulate):
            kept["inputs"] = torch.zeros(batch, 3, 224, 224)
            labels = torch.zeros(batch, dtype=torch.long)
            inputs = kept["inputs"].to(torch.bfloat16) if bf16 else kept["inputs"]
            with torch.autocast("cpu", torch.float16, enabled=fp16):
                logits = model(inputs)
            loss = F.cross_entropy(logits.float(), labels) / accumulate
            if accumulate == 1:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            if number == 0:  # as published: the optimizer steps after the first of the micro-batches
                scaler.step(optimizer)
                scaler.update()
                if accumulate > 1:
                    optimizer.zero_grad()

    return step


class _RmsNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.scale


class _LlamaBlock(nn.Module):
    def __init__(self, width, heads, key_heads, inner):
        super().__init__()
        self.repeat, self.head_width = heads // key_heads, width // heads
        linear = partial(nn.Linear, bias=False)
        self.q, self.out = linear(width, width), linear(width, width)
        self.k, self.v = (linear(width, key_heads * self.head_width) for _ in range(2))
        self.gate, self.up, self.down = linear(width, inner), linear(width, inner), linear(inner, width)
        self.norm1, self.norm2 = _RmsNorm(width), _RmsNorm(width)

    def forward(self, x, angles):
        y = self.norm1(x)
        q, k, v = (linear(y).unflatten(-1, (-1, self.head_width)) for linear in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (_rotate(q, angles), _rotate(k, angles), v))
        k, v = (t.unsqueeze(2).expand(-1, -1, self.repeat, -1, -1).flatten(1, 2) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(y.transpose(1, 2).contiguous().flatten(2)) + x
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotate(x, angles):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    cos, sin = angles.view(1, x.shape[1], 1, -1, 2).unbind(-1)
    turned = [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin]
    return torch.stack(turned, -1).flatten(3).type_as(x)


class _Llama(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, key_heads, inner):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(_LlamaBlock(width, heads, key_heads, inner) for _ in range(layers))
        self.norm = _RmsNorm(width)
        self.register_buffer("angles", torch.zeros(131072, width // heads))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.angles[: x.shape[1]])
        return F.linear(self.norm(x), self.tokens.weight).float()


def llama_3b(batch=2, length=4096):
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = _Llama(128256, 3072, 28, 24, 8, 8192)
    torch.set_default_dtype(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step():
        inputs, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
        loss = F.cross_entropy(model(inputs).reshape(-1, 128256), labels.reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


_NVML = "PyTorch's and CUDA's versions; what CUDA's context took at the end"
_V100 = 1343  # MiB that CUDA's context took before training, as published


def _hf(name: str, megabytes: int, **options) -> Case:
    published = (megabytes - _V100) * MiB
    return Case(HF22, f"BERT-large, {name}", published, partial(bert_large, **options), _NVML)


def _gpt(name: str, gigabytes: float, **options) -> Case:
    unknown = "predicted as without torch.compile" if options.get("compiled") else ""
    return Case(R2, f"GPT-2, {name}", gigabytes * GiB, partial(gpt2, **options), unknown)


def _vit(name: str, gigabytes: float, **options) -> Case:
    unknown = "the GPU; the choice of cuDNN for the patches' convolution; a nightly build of PyTorch 2.1"
    return Case(R1, f"ViT-L/16, {name}", gigabytes * 1e9, partial(vit, **options), unknown)


_ALL = dict(batch=1, accumulate=4, checkpoint=True, fp16=True)
_FAST = dict(bf16=True, native=True, fused=True)
_COMPILED = dict(**_FAST, compiled=True)
CASES = [
    _hf("plain", 14949),
    _hf("accumulation 4 × 1", 8681, batch=1, accumulate=4),
    _hf("accumulation, checkpointing", 6775, batch=1, accumulate=4, checkpoint=True),
    _hf("fp16", 13939, fp16=True),
    _hf("accumulation, checkpointing, fp16", 7275, **_ALL),
    _hf("Adafactor", 12295, optimizer=_adafactor),
    _hf("all with Adafactor", 4847, **_ALL, optimizer=_adafactor),
    _hf("8-bit Adam", 13085, optimizer=_Adam8bit),
    _hf("all with 8-bit Adam", 5363, **_ALL, optimizer=_Adam8bit),
    _gpt("baseline", 26.2617, stored_mask=True, foreach=True),
    _gpt("mask on the fly, TF32", 26.2422, foreach=True),
    _gpt("fused AdamW", 26.2422),
    _gpt("bf16", 13.7871, bf16=True),
    _gpt("native layers", 11.5645, bf16=True, native=True),
    _gpt("fused attention", 5.9004, **_FAST),
    _gpt("compiled", 6.1875, **_COMPILED),
    _gpt("vocabulary of 50,304", 5.8906, **_COMPILED, vocabulary=50304),
    _gpt("batch 32", 22.5078, **_COMPILED, vocabulary=50304, batch=32),
    _vit("fp32", 26.79),
    _vit("mixed fp16", 18.21, fp16=True),
    _vit("bf16", 13.82, bf16=True),
    _vit("bf16, batch 16", 5.69, batch=16, bf16=True),
    _vit("bf16, accumulation 4 × 4", 3.91, batch=4, bf16=True, accumulate=4),
    Case(
        TT,
        "Llama-3.2-3B, packed",
        60.0 * GiB,
        llama_3b,
        "the kernel of attention; the optimizer's settings",
        allocates=True,
    ),
]


@dataclass(frozen=True)
class Outcome:
    """A case and its prediction: `size` is what answers to the published number, with `error` as a share of that."""

    case: Case
    prediction: Prediction
    size: int

    @property
    def error(self) -> float:
        return self.size / self.case.published - 1

    @property
    def is_false_fit(self) -> bool:
        """Whether a GPU on which the prediction surely fits could not have held the published run."""
        return (
            not self.case.rests
            and self.case.published > self.prediction.total().high - self.prediction.gpus[0].context[1]
        )


def run(case: Case) -> Outcome:
    """Predict a case."""
    return judge(case, predict(case.variant, case.card))


def judge(case: Case, predicted: Prediction) -> Outcome:
    """Reserved memory, or what was allocated where that is published, with cuBLAS's workspace."""
    peak = predicted.allocated if case.allocates else predicted.reserved_range.high
    return Outcome(case, predicted, peak + predicted.workspaces.low)


def numbers(outcomes: list[Outcome]) -> dict[str, str]:
    """Sentences of docs/predict.md, by a pattern of the old ones."""
    steps = [o for o in outcomes if not o.case.rests]
    errors = [abs(o.error) for o in steps]
    exact = [abs(o.error) for o in steps if not o.case.unknown]
    told = f"{len(errors)} published steps: median error {median(errors):.1%}, worst {max(errors):.1%}; "
    told += f"{sum(error <= 0.05 for error in errors)} are met within 5 %. "
    told += f"The {len(exact)} that are fully specified: {median(exact):.1%} and {max(exact):.1%}."
    worst = "at least one: see the table." if any(o.is_false_fit for o in outcomes) else "none."
    return {r"\d+ published steps: .*": told, "There is .*": f"There is {worst}"}


def tables(outcomes: list[Outcome]) -> dict[str, list[str]]:
    """Rows of docs/audit.md, by the headings above them."""
    rows: dict[str, list[str]] = {}
    for o in outcomes:
        sizes = f"{o.case.published / GiB:.2f} GiB | {o.size / GiB:.2f} GiB"
        error = tell_error(o.error) + " **false fits**" * o.is_false_fit
        row = f"| {o.case.name} | {sizes} | {error} | {o.case.unknown} |"
        rows.setdefault(f"### [{o.case.source}]", []).append(row)
    return rows


def tell_error(error: float) -> str:
    return f"{error:+.1%}".replace("-", "−")
