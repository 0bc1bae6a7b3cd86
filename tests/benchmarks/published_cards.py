"""What two collections timed on many GPUs: published_cards.csv has their rows.

Lambda: lambdal/deeplearning-benchmark@aa5addb, pytorch/results and results_v2, with the models of
NVIDIA/DeepLearningExamples (BERT on SQuAD, a ResNet-50 on images that stay on the GPU). GPU-Insights:
xiaoran007/GPU-Insights@f4f228e, docs-src/public/data/benchmark-data.json and benchmark/models.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

LENGTH, WORDS = 384, 30528
SIZES = {"base": (768, 12), "large": (1024, 24)}  # width and layers; heads of 64


class _Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.heads = width // 64
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x, mask):
        """x [length, batch, width]; attention is not fused."""
        length, batch, width = x.shape
        split = length, batch * self.heads, 64
        query, value = (part(x).view(split).transpose(0, 1) for part in (self.query, self.value))
        scores = torch.bmm(query, self.key(x).view(split).permute(1, 2, 0))
        scores = scores.view(batch, self.heads, length, length) / math.sqrt(64) + mask
        shares = F.dropout(F.softmax(scores, dim=-1), 0.1).view(-1, length, length)
        mixed = torch.bmm(shares, value).transpose(0, 1).contiguous().view(length, batch, width)
        x = self.norms[0](F.dropout(self.dense(mixed), 0.1) + x)
        inner = F.gelu(self.up(x), approximate="tanh")
        return self.norms[1](F.dropout(self.down(inner), 0.1) + x)


class _Squad(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(rows, width) for rows in (WORDS, 512, 2))
        self.norm, self.layers = nn.LayerNorm(width), nn.ModuleList(_Layer(width) for _ in range(layers))
        self.output = nn.Linear(width, 2)

    def forward(self, words, kinds, mask):
        """Scores of the first and the last word of the answer, [batch, length] each."""
        places = torch.arange(words.shape[1]).unsqueeze(0).expand_as(words)
        given = zip(self.embeddings, (words, places, kinds))
        x = F.dropout(self.norm(sum(embed(each) for embed, each in given)), 0.1).transpose(0, 1)
        mask = (1.0 - mask[:, None, None].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, mask)
        return [part.squeeze(-1) for part in self.output(x.transpose(0, 1).contiguous()).split(1, dim=-1)]


class _BertAdam:
    """optimization.py: one weight after the other, each gradient clipped once more."""

    def __init__(self, weights: list[torch.Tensor]):
        self.weights = weights
        self.state = [(torch.zeros_like(weight), torch.zeros_like(weight)) for weight in weights]

    def step(self) -> None:
        for weight, (mean, square) in zip(self.weights, self.state):
            nn.utils.clip_grad_norm_(weight, 1.0, foreach=False)
            mean.mul_(0.9).add_(weight.grad, alpha=0.1)
            square.mul_(0.999).addcmul_(weight.grad, weight.grad, value=0.001)
            update = mean / (square.sqrt() + 1e-6)
            update += 0.01 * weight.data
            weight.data.add_(-(1e-5 * update))


def squad(size: str, batch: int, in_16_bits: bool = False) -> Callable[[], None]:
    """A step of BERT: in fp32 with BertAdam, or by apex's O2 with its FusedAdam, whose weights in fp32 stand beside."""
    model = _Squad(*SIZES[size]).train()
    weights = list(model.parameters())
    if in_16_bits:
        kept = [weight.detach().clone() for weight in weights]
        for weight in kept:
            weight.grad = torch.empty_like(weight)
        model.half()
        adam = torch.optim.AdamW(kept, 1e-5, fused=True)
    else:
        adam = _BertAdam(weights)
    words = torch.zeros(batch, LENGTH, dtype=torch.long)

    def step():
        first, last = model(words, torch.zeros_like(words), torch.ones_like(words))
        loss = (F.cross_entropy(first, words[:, 0]) + F.cross_entropy(last, words[:, 0])) / 2
        if not in_16_bits:
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()
            torch._foreach_zero_([weight.grad for weight in weights])
        else:
            (loss.float() * 1024).backward()
            torch._foreach_copy_([weight.grad for weight in kept], [weight.grad for weight in weights])
            torch.zeros(()).item()  # whether one of them overflowed
            nn.utils.clip_grad_norm_(kept, 1.0)
            adam.step()
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
            model.zero_grad(set_to_none=True)
        loss.item()

    return step


def resnet(batch: int, in_16_bits: bool = False) -> Callable[[], None]:
    """A step of ResNet-50, channels first."""
    from torchvision.models import resnet50

    model, images = resnet50().train(), torch.randn(batch, 3, 224, 224)
    labels = torch.zeros(batch, dtype=torch.long)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=in_16_bits)

    def step():
        with torch.autocast("cuda", torch.float16, enabled=in_16_bits):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        sgd.zero_grad()

    return step


class _VitBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 12, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        """x [batch, patches, width]."""
        inner = self.norms[0](x)
        x = x + self.attention(inner, inner, inner, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class _ViT(nn.Module):
    """ViT-B/16 for ten classes."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, 768))
        self.places = nn.Parameter(torch.zeros(1, 197, 768))
        self.blocks = nn.Sequential(*(_VitBlock(768) for _ in range(12)), nn.LayerNorm(768))
        self.head = nn.Linear(768, 10)

    def forward(self, images):
        """Scores [batch, 10] for images [batch, 3, 224, 224]."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
    return nn.Sequential(*layers)


class _UNet(nn.Module):
    """The classic one, with batch norm: 21 classes for each pixel."""

    def __init__(self):
        super().__init__()
        widths = (64, 128, 256, 512, 1024)
        self.down = nn.ModuleList(_twice(*pair) for pair in zip((3, *widths), widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1]))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(deep, flat, 2, stride=2) for deep, flat in pairs)
        self.up = nn.ModuleList(_twice(deep, flat) for deep, flat in pairs)
        self.head = nn.Conv2d(64, 21, 1)

    def forward(self, x):
        """Scores [batch, 21, 256, 256] for images [batch, 3, 256, 256]."""
        kept = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for wider, block, beside in zip(self.wider, self.up, kept[-2::-1]):
            x = block(torch.cat([wider(x), beside], 1))
        return self.head(x)


def compiled(kind: str, batch: int, dtype: torch.dtype | None = None) -> Callable[[], None]:
    """A step of "vit" or "unet", compiled, with SGD without momentum; under autocast where a format is given."""
    pixels = 224 if kind == "vit" else 256
    images = torch.randn(batch, 3, pixels, pixels)
    model, labels = _ViT().train(), torch.zeros(batch, dtype=torch.long)
    if kind == "unet":
        model, labels = _UNet().train(), torch.zeros(batch, pixels, pixels, dtype=torch.long)
        model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    fast = torch.compile(model, mode="reduce-overhead")
    sgd = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)

    def step():
        sgd.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            loss = F.cross_entropy(fast(images), labels)
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()

    return step
