"""Language models with adapters (LoRA), in 16 and in 4 bits, as published runs had them: the audit walks them."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

BLOCK, OUTER = 64, 256  # weights with one absmax, and absmax with one of their own (double quantization)


# --- weights in 4 bits, as bitsandbytes stores them ---


class _Dequantized(torch.autograd.Function):
    """A product with weights in 4 bits: they are made 16 bits wide for it, and again in the backward pass."""

    @staticmethod
    def forward(ctx, x, weight, shape):
        ctx.shape = shape
        return x @ torch.empty(shape, dtype=x.dtype).t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ torch.empty(ctx.shape, dtype=grad.dtype), None, None


class Linear4bit(nn.Module):
    """A frozen linear layer in nf4: half a byte a weight, and an absmax for each 64 of them, in 32 bits or in 8."""

    def __init__(self, inputs, outputs, double=True):
        super().__init__()
        number = inputs * outputs
        self.shape = outputs, inputs
        sizes = {"weight": (number // 2, torch.uint8), "code": (16, torch.float32)}
        blocks = -(-number // BLOCK)
        sizes["absmax"] = (blocks, torch.uint8 if double else torch.float32)
        if double:
            sizes |= {"outer": (-(-blocks // OUTER), torch.float32), "outer_code": (256, torch.float32)}
        for name, (size, dtype) in sizes.items():
            self.register_buffer(name, torch.empty(size, dtype=dtype))

    def forward(self, x):
        return _Dequantized.apply(x, self.weight, self.shape)


def _linear(inputs, outputs, quantized, bias=False):
    if quantized:
        return Linear4bit(inputs, outputs, quantized == "nf4-dq")
    layer = nn.Linear(inputs, outputs, bias=bias)
    return layer.requires_grad_(False)


# --- LitGPT's models with adapters on queries and values ---


@dataclass(frozen=True)
class Sizes:
    """A model of LitGPT: `llama` has RMS norms and a gated MLP, others run attention and MLP beside each other."""

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    llama: bool = True
    rotary: float = 1.0
    shared_norm: bool = False
    bias: bool = False


LITGPT = {
    "phi-1.5": Sizes(24, 2048, 32, 8192, 51200, False, 0.5, True, True),
    "StableLM Alpha 3B": Sizes(16, 4096, 32, 16384, 50688, False, 0.25, False, True),
    "Llama 2 7B": Sizes(32, 4096, 32, 11008, 32000),
    "Llama 2 13B": Sizes(40, 5120, 40, 13824, 32000),
}


class _Norm(nn.Module):
    """LitGPT's RMS norm: in 32 bits."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x):
        wide = x.float()
        normed = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * normed).to(x.dtype)


class _Merged(nn.Module):
    """Queries, keys and values in one product, with adapters of rank 8 on the first and the last."""

    def __init__(self, sizes, quantized):
        super().__init__()
        width = sizes.width
        self.width, self.base = width, _linear(width, 3 * width, quantized, sizes.bias)
        self.dropout = nn.Dropout(0.05)
        self.down, self.up = (nn.Parameter(torch.zeros(*shape)) for shape in ((16, width), (2 * width, 8)))

    def forward(self, x):
        merged = self.base(x)
        low = F.linear(self.dropout(x), self.down)
        added = F.conv1d(low.transpose(-2, -1), self.up[..., None], groups=2).transpose(-2, -1)
        padded = added.new_zeros(*x.shape[:-1], 3 * self.width)
        padded = torch.cat([added[..., : self.width], padded[..., : self.width], added[..., self.width :]], -1)
        return merged + padded * 2.0


class _LitBlock(nn.Module):
    def __init__(self, sizes, quantized):
        super().__init__()
        self.sizes, linear = sizes, partial(_linear, quantized=quantized, bias=sizes.bias)
        norm = _Norm if sizes.llama else lambda width: nn.LayerNorm(width).requires_grad_(False)
        self.norm1 = norm(sizes.width)
        self.norm2 = None if sizes.shared_norm else norm(sizes.width)
        self.qkv, self.out = _Merged(sizes, quantized), linear(sizes.width, sizes.width)
        self.up = nn.ModuleList(linear(sizes.width, sizes.inner) for _ in range(1 + sizes.llama))
        self.down = linear(sizes.inner, sizes.width)

    def _attend(self, x, cos, sin):
        q, k, v = self.qkv(x).unflatten(-1, (self.sizes.heads, 3, -1)).permute(0, 2, 3, 1, 4).unbind(2)
        q, k = (self._rotate(t, cos, sin) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))

    def _rotate(self, x, cos, sin):
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        left, right = turned.chunk(2, -1)
        return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, rest], -1)

    def _mlp(self, x):
        if self.sizes.llama:
            return self.down(F.silu(self.up[0](x)) * self.up[1](x))
        return self.down(F.gelu(self.up[0](x)))

    def forward(self, x, cos, sin):
        normed = self.norm1(x)
        attended = self._attend(normed, cos, sin)
        if self.sizes.llama:
            x = attended + x
            return self._mlp(self.norm2(x)) + x
        return self._mlp(self.norm2(x) if self.norm2 else normed) + attended + x


class _LitModel(nn.Module):
    def __init__(self, sizes, quantized, length):
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width).requires_grad_(False)
        self.blocks = nn.ModuleList(_LitBlock(sizes, quantized) for _ in range(sizes.layers))
        norm = _Norm if sizes.llama else lambda width: nn.LayerNorm(width).requires_grad_(False)
        self.norm = norm(sizes.width)
        self.head = _linear(sizes.width, sizes.vocabulary, quantized, sizes.bias and sizes.shared_norm)
        turned = int(sizes.rotary * sizes.width // sizes.heads)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.zeros(length, turned))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return [self.head(part) for part in self.norm(x).split(128, dim=1)]


def litgpt(name, length, batch=1, quantized=""):
    """A micro-batch of LitGPT's LoRA script, in bfloat16, with the longest text, and an update. The loss is chunked."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    model = _LitModel(LITGPT[name], quantized, length).train()
    torch.set_default_dtype(dtype)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    def step():
        tokens, labels = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))
        parts = [part.flatten(0, 1) for part in model(tokens)]
        losses = map(partial(F.cross_entropy, reduction="none"), parts, (t.flatten() for t in labels.split(128, dim=1)))
        torch.cat(list(losses)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


# --- Qwen with adapters on all its linear layers ---

QWEN = {"1.8B": (2048, 24, 16, 5504), "7B": (4096, 32, 32, 11008), "14B": (5120, 40, 40, 13696)}


class _Lora(nn.Module):
    """peft's adapter: a dropout and two narrow layers beside a frozen one."""

    def __init__(self, base, rank=64):
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(0.05)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x):
        return self.base(x) + self.up(self.down(self.dropout(x))) * 0.25


def qwen(size, length, updates=False):
    """A micro-batch of Qwen's script: one text, every layer checkpointed, under autocast; with the update or not."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    width, layers, heads, inner = QWEN[size]
    sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner)
    config = Qwen2Config(**sizes, num_key_value_heads=heads, vocab_size=151936, use_cache=False, dtype="bfloat16")
    model = Qwen2ForCausalLM(config).to(torch.bfloat16).train().requires_grad_(False)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, _Lora(child))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained) if updates else None

    def step():
        texts = torch.zeros(1, length, dtype=torch.long)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=texts, labels=texts).loss / 8
        loss.backward()
        if updates:
            nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


# --- what a model takes once it is loaded, for unsloth's notebooks ---


@dataclass(frozen=True)
class Loaded:
    """A decoder by its sizes: width, layers, heads, heads of keys, their width, that of the MLP, and the vocabulary."""

    width: int
    layers: int
    heads: int
    key_heads: int
    head_width: int
    inner: int
    vocabulary: int
    tied: bool = False


LOADED = {
    "Llama 3 8B": Loaded(4096, 32, 32, 8, 128, 14336, 128256),
    "Llama 3.2 3B": Loaded(3072, 28, 24, 8, 128, 8192, 128256, True),
    "Llama 3.3 70B": Loaded(8192, 80, 64, 8, 128, 28672, 128256),
    "Qwen2 7B": Loaded(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5 Coder 7B": Loaded(3584, 28, 28, 4, 128, 18944, 152064),
    "Qwen2.5 Coder 14B": Loaded(5120, 48, 40, 8, 128, 13824, 152064),
    "Qwen3 14B": Loaded(5120, 40, 40, 8, 128, 17408, 151936),
    "Mistral Nemo 12B": Loaded(5120, 40, 32, 8, 128, 14336, 131072),
    "Mistral Small 22B": Loaded(6144, 56, 48, 8, 128, 16384, 32768),
    "Phi-3.5 mini": Loaded(3072, 32, 32, 32, 96, 8192, 32064),
    "CodeGemma 7B": Loaded(3072, 28, 16, 16, 256, 24576, 256000, True),
}


def loaded(name, rank):
    """A model in 4 bits with adapters in 32 bits on its seven linear layers, as it lies there before a step."""
    sizes = LOADED[name]
    q, k = sizes.heads * sizes.head_width, sizes.key_heads * sizes.head_width
    shapes = [(sizes.width, q), (sizes.width, k), (sizes.width, k), (q, sizes.width)]
    shapes += [(sizes.width, sizes.inner)] * 2 + [(sizes.inner, sizes.width)]
    kept = [torch.empty(sizes.vocabulary, sizes.width, dtype=torch.float16) for _ in range(2 - sizes.tied)]
    for _ in range(sizes.layers):
        kept += [Linear4bit(*shape) for shape in shapes]
        kept += [torch.empty(rank, size) for shape in shapes for size in shape]

    def step():
        return kept

    return step


def loaded_encoder(name, rank):
    """A text encoder in 16 bits with adapters in 32 bits on the linear layers of its blocks, before a step."""
    from transformers import ModernBertConfig, ModernBertModel, XLMRobertaConfig, XLMRobertaModel

    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    if name == "bge-m3":
        sizes = dict(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
        model = XLMRobertaModel(XLMRobertaConfig(vocab_size=250002, max_position_embeddings=8194, **sizes))
        blocks = model.encoder
    else:
        model = ModernBertModel(ModernBertConfig())
        blocks = model.layers
    torch.set_default_dtype(dtype)
    linears = [module for module in blocks.modules() if isinstance(module, nn.Linear)]
    kept = [torch.empty(rank, size) for each in linears for size in (each.in_features, each.out_features)]

    def step():
        return model, kept

    return step
