"""Published runs of T4, L4 and other GPUs as variants, each with what its clock holds: the audit walks them."""

import math
from functools import partial

import torch
from benchmarks import published_memory
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# --- Stable Diffusion 1.4's U-Net, fine-tuned: two images a step for a batch of one, its own and one of the class ---


class _ResBlock(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs, 1e-5), nn.GroupNorm(32, outputs, 1e-5)
        self.conv1, self.conv2 = (nn.Conv2d(width, outputs, 3, padding=1) for width in (inputs, outputs))
        self.time = nn.Linear(1280, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, time):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class _Attending(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(context, width, bias=False) for _ in range(2))

    def forward(self, x, context):
        q, k, v = (
            linear(y).unflatten(-1, (8, -1)).transpose(1, 2)
            for linear, y in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _Transformer(nn.Module):
    """A self-attention, a cross-attention to the text and a gated MLP at every place of the image."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.GroupNorm(32, width, 1e-6)
        self.enter, self.leave = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attending, self.reading = _Attending(width, width), _Attending(width, 768)
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x, text):
        y = self.enter(self.norm(x)).flatten(2).transpose(1, 2)
        z = self.norms[0](y)
        y = y + self.attending(z, z)
        y = y + self.reading(self.norms[1](y), text)
        inner, gate = self.up(self.norms[2](y)).chunk(2, -1)
        y = y + self.down(inner * F.gelu(gate))
        return x + self.leave(y.transpose(1, 2).unflatten(2, x.shape[2:]))


class _UNet(nn.Module):
    def __init__(self, checkpoints):
        super().__init__()
        self.checkpoints = checkpoints
        self.time = nn.Sequential(nn.Linear(320, 1280), nn.SiLU(), nn.Linear(1280, 1280))
        self.enter = nn.Conv2d(4, 320, 3, padding=1)
        self.down, self.up, widths, width = nn.ModuleList(), nn.ModuleList(), [320], 320
        for level, outputs in enumerate((320, 640, 1280, 1280)):
            for _ in range(2):
                self.down.append(self._pair(width, outputs, attends=level < 3))
                width = outputs
                widths.append(width)
            if level < 3:
                self.down.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                widths.append(width)
        self.middle = nn.ModuleList([_ResBlock(1280, 1280), _Transformer(1280), _ResBlock(1280, 1280)])
        for level, outputs in enumerate((1280, 1280, 640, 320)):
            for _ in range(3):
                self.up.append(self._pair(width + widths.pop(), outputs, attends=level > 0))
                width = outputs
            if level < 3:
                self.up.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(32, 320, 1e-5), nn.Conv2d(320, 4, 3, padding=1)

    def _pair(self, inputs, outputs, attends):
        return nn.ModuleList([_ResBlock(inputs, outputs), *[_Transformer(outputs)] * attends])

    def _run(self, pair, x, time, text):
        for module in pair:
            given = (x, time) if isinstance(module, _ResBlock) else (x, text)
            x = checkpoint(module, *given, use_reentrant=False) if self.checkpoints else module(*given)
        return x

    def forward(self, x, times, text):
        angles = times[:, None].float() * torch.exp(-math.log(10000) * torch.arange(160) / 160)
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.enter(x)
        kept = [x]
        for module in self.down:
            x = module(x) if isinstance(module, nn.Conv2d) else self._run(module, x, time, text)
            kept.append(x)
        x = self._run(self.middle, x, time, text)
        for module in self.up:
            if isinstance(module, nn.Conv2d):
                x = module(F.interpolate(x, scale_factor=2.0))
            else:
                x = self._run(module, torch.cat([x, kept.pop()], 1), time, text)
        return self.leave(F.silu(self.norm(x)))


class _TimedAdam8bit(published_memory._Adam8bit):
    """Its kernel reads gradients, weights and states and writes the last two: so do these two operations."""

    @torch.no_grad()
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad)
            self.state[p]["state1"].add_(self.state[p]["state2"])


def unet(batch=1, fp16=True, accumulate=1, checkpoints=False, adam8bit=True):
    """ShivamShrirao's fork: latents and texts are prepared before."""
    model = _UNet(checkpoints).train()
    optimizer = (_TimedAdam8bit if adam8bit else partial(torch.optim.AdamW, foreach=False))(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=fp16)
    dtype = torch.float16 if fp16 else torch.float32

    def step():
        for _ in range(accumulate):
            latents, text = torch.randn(2 * batch, 4, 64, 64, dtype=dtype), torch.randn(2 * batch, 77, 768, dtype=dtype)
            with torch.autocast("cuda", torch.float16, enabled=fp16):
                noise = model(latents, torch.randint(0, 1000, (2 * batch,)), text)
            loss, class_loss = (F.mse_loss(*halves) for halves in zip(noise.float().chunk(2), latents.float().chunk(2)))
            scaler.scale((loss + class_loss) / accumulate).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


# --- Wide-ResNet 28x10 on CIFAR-10, by apex ---


class _WideBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, stride=stride, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride=stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        y = self.dropout(self.conv1(F.relu(self.norm1(x))))
        return self.conv2(F.relu(self.norm2(y))) + self.skip(x)


def wide_resnet(level="O0", batch=128, evaluated=0):
    """O1 is autocast; O2 casts the model but for its batch norms and keeps its weights in fp32 beside it."""
    widths = [16, 160, 320, 640]
    blocks = [
        _WideBlock(widths[stage + (number > 0)], widths[stage + 1], 2 if stage and not number else 1)
        for stage in range(3)
        for number in range(4)
    ]
    head = [nn.BatchNorm2d(640), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(640, 10)]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head).train()
    weights = list(model.parameters())
    if level == "O2":
        kept = [p.detach().clone().requires_grad_() for p in weights]
        for module in model.modules():
            if not isinstance(module, nn.BatchNorm2d):
                module._apply(lambda t: t.half() if t.is_floating_point() else t, recurse=False)
        weights = kept
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=5e-4, foreach=False)
    scaler = torch.amp.GradScaler("cuda", enabled=level != "O0")

    def loss(number):
        images = torch.randn(number, 3, 32, 32)
        with torch.autocast("cuda", torch.float16, enabled=level == "O1"):
            logits = model(images.half() if level == "O2" else images)
        return F.cross_entropy(logits.float(), torch.zeros(number, dtype=torch.long))

    def step():
        scaled = scaler.scale(loss(batch))
        scaled.backward()
        if level == "O2":
            for kept, p in zip(weights, model.parameters()):
                kept.grad = p.grad.float()
                p.grad = None
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(weights, 10.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        if level == "O2":
            with torch.no_grad():
                for kept, p in zip(weights, model.parameters()):
                    p.copy_(kept)
        optimizer.zero_grad()
        if evaluated:
            with torch.no_grad():
                model.eval()
                loss(evaluated)
                model.train()

    return step


# --- layers of transformers in fp16, forward and backward, one after the other ---


def _attention_of_the_time(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """Attention as transformers had it in 2022: GPT-2 masks by where()."""
    scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
    if getattr(module, "is_causal", False):
        lower = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = torch.where(lower, scores, torch.full((), torch.finfo(scores.dtype).min, dtype=scores.dtype))
    weights = F.dropout(scores.softmax(-1), dropout or 0.1, module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def layer(kind, batch, length):
    """One layer of BERT-large, GPT-2 medium or T5-large: its gradients are added to those of the call before."""
    from transformers import AttentionInterface, BertConfig, GPT2Config, T5Config
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    from transformers.models.t5.modeling_t5 import T5Block

    AttentionInterface.register("of the time", _attention_of_the_time)
    chosen, decodes = dict(attn_implementation="of the time"), kind == "T5 decoder"
    if kind == "BERT":
        sizes = dict(hidden_size=1024, num_attention_heads=16, intermediate_size=4096)
        built = BertLayer(BertConfig(**sizes, **chosen))
    elif kind == "GPT-2":
        built = GPT2Block(GPT2Config(n_embd=1024, n_head=16, **chosen), layer_idx=0)
    else:
        sizes = dict(d_model=1024, d_ff=4096, num_heads=16, d_kv=64, use_cache=False)
        config = T5Config(**sizes, is_decoder=decodes, is_encoder_decoder=False)
        config._attn_implementation = "eager"
        built = T5Block(config)
    built = built.half().train()
    given = torch.randn(batch, length, 1024).half()
    states = {"encoder_hidden_states": given} if decodes else {}
    for p in built.parameters():
        p.grad = torch.zeros_like(p)

    def step():
        output = built(given, **states)
        (output[0] if isinstance(output, tuple) else output).sum().backward()

    return step


def layer_flops(kind, batch, length):
    """What the source counts for a layer's forward and backward pass."""
    attention = 4 * batch * 1024 * length**2 + 8 * batch * length * 1024**2
    return 3 * (16 * batch * length * 1024**2 + attention * (2 if kind == "T5 decoder" else 1))


# --- language models and classifiers ---


def gpt2_of_the_lecture(rung):
    """A lecture's GPT-2: 16 texts of 1,024 tokens. The clock holds a step, with a wait before and after it."""
    vocabulary = 50304 if rung >= 5 else 50257
    model = published_memory._Gpt(vocabulary, native=True, fused=rung >= 4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.head.weight = model.tokens.weight
    if rung >= 3:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=rung >= 6)

    def step():
        inputs, labels = (torch.zeros(16, 1024, dtype=torch.long) for _ in range(2))
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=rung >= 2):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        if rung >= 6:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def modern_bert(dtype, batch=32, length=128):
    """ModernBERT-base that classifies short texts, under autocast."""
    from transformers import ModernBertConfig, ModernBertForSequenceClassification

    model = ModernBertForSequenceClassification(ModernBertConfig(attn_implementation="sdpa", num_labels=2)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

    def step():
        texts, labels = torch.zeros(batch, length, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
        with torch.autocast("cuda", dtype):
            loss = model(input_ids=texts, attention_mask=torch.ones_like(texts), labels=labels).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def instructed(size, writes=False):
    """A book's GPT-2, fine-tuned in fp32: 8 texts of 70 tokens, the mean of its batches; two batches are evaluated.

    With `writes` a token is written, too: a forward pass over one text.
    """
    width, layers, heads = {"small": (768, 12, 12), "medium": (1024, 24, 16)}[size]
    model = published_memory._Gpt(50257, width=width, layers=layers, heads=heads)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)

    def loss():
        inputs, labels = (torch.zeros(8, 70, dtype=torch.long) for _ in range(2))
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    def step():
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()
            for _ in range(2):
                loss().item()
            if writes:
                model(torch.zeros(1, 100, dtype=torch.long)).argmax().item()
            model.train()

    return step


def vit_huge(optimizer="fused", batch=8):
    """torchao's benchmark: a compiled ViT-H under autocast. 8-bit AdamW keeps a byte for each of its states."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = dict(hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120)
    config = ViTConfig(**sizes, patch_size=14, num_labels=45, attn_implementation="sdpa")
    model = torch.compile(ViTForImageClassification(config).train())
    fused = partial(torch.optim.AdamW, fused=True)
    trained = (fused if optimizer == "fused" else _TimedAdam8bit)(model.parameters())

    def step():
        images, labels = torch.randn(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images).logits, labels)
        loss.backward()
        trained.step()
        trained.zero_grad()

    return step
