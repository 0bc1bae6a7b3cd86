"""Language models with adapters (LoRA), in 16 and in 4 bits, as published runs had them: the audit walks them."""

from dataclasses import dataclass

import torch
from torch import nn

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
