"""Training scripts for the doctor: a healthy one, and others that differ in a few lines, each with a disease."""

HEALTHY = """
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH = 64, 64


class Texts(Dataset):
    texts = torch.arange(LENGTH) * torch.arange(7, 200 * BATCH + 7)[:, None] % 999 + 1

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index], index % 10


class Classifier(nn.Module):
    def __init__(self, width=256, layers=2):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        block = partial(nn.TransformerEncoderLayer, width, 8, 4 * width, batch_first=True, norm_first=True)
        self.blocks = nn.Sequential(*(block() for _ in range(layers)))
        self.logits = nn.Linear(width, 10)

    def forward(self, texts):
        return self.logits(self.blocks(self.embed(texts)).mean(1))


def variant():
    model = Classifier().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler(device)

    def step(batch):
        texts, labels = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast("cuda", torch.float16):
            loss = cross_entropy(model(texts), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


loader = DataLoader(Texts(), BATCH, shuffle=True, num_workers=1, pin_memory=True, persistent_workers=True)
"""
LOADER = HEALTHY.splitlines()[-1]

FILLING = {"width": 768, "batch": 256}  # sizes that keep an H100 busy: with those of a T4, it waits for the CPU
# What each disease changes: the name that doctor gives it, and each passage with what stands there instead.
SICK = {
    "slow loader": (
        "data loading",
        (
            "        return self.texts",
            "        import time\n\n        time.sleep(0.02 / BATCH)\n        return self.texts",
        ),
        ("num_workers=1, pin_memory=True, persistent_workers=True", "pin_memory=True"),
    ),
    "item in the loop": (
        "hidden waits",
        (
            "        scaler.step",
            "        norm = sum(p.grad.norm().item() for p in model.parameters())\n        scaler.step",
        ),
    ),
    "unpinned copies": (
        "copies to the GPU",
        ("texts, labels = (tensor.to(device, non_blocking=True)", "texts, features, labels = (tensor.to(device)"),
        ("cross_entropy(model(texts), labels)", "cross_entropy(model(texts) + features.mean(), labels)"),
        (LOADER, "loader = [(torch.ones(BATCH, LENGTH).long(), torch.ones(BATCH, 2**16), torch.ones(BATCH).long())]"),
    ),
    "padding to 512": (
        "padding",
        ("return self.texts[index]", "return nn.functional.pad(self.texts[index], (0, 448))"),
        ("LENGTH, BATCH = 64, 64", "LENGTH, BATCH = 64, 32"),
    ),
    "unfused AdamW on many small tensors": (
        "optimizer",
        ("fused=True", "foreach=False"),
        (
            "self.logits =",
            "self.scales = nn.ParameterList(torch.ones(width) for _ in range(99))\n        self.logits =",
        ),
        (".mean(1))", ".mean(1) * torch.stack(list(self.scales)).prod(0))"),
    ),
    "attention that writes its scores": (
        "plain attention",
        (
            "class Classifier",
            "class Block(nn.TransformerEncoderLayer):\n    def _sa_block(self, x, *_, **__):\n"
            "        return self.dropout1(self.self_attn(x, x, x)[0])\n\n\nclass Classifier",
        ),
        ("partial(nn.TransformerEncoderLayer,", "partial(Block,"),
        ("LENGTH, BATCH = 64, 64", "LENGTH, BATCH = 512, 8"),
    ),
    "fp32 on tensor cores": ("precision", ('torch.autocast("cuda", torch.float16)', "torch.enable_grad()")),
    "tiny batch": ("launching", ("LENGTH, BATCH = 64, 64", "LENGTH, BATCH = 64, 1")),
    "logging each step": (
        "hidden waits",
        (
            "        optimizer.",
            "        log = [p.detach().cpu().numpy() for p in model.parameters()]\n        optimizer.",
        ),
    ),
    "recompiling shapes": (
        "recompiling",
        ("layers=2", "layers=0"),  # each takes a second to compile for each shape, and shows nothing more
        (
            "Classifier().to(device)",
            "torch.compile(Classifier().to(device), backend=lambda graph, _: graph, dynamic=False)",
        ),
        (LOADER, "loader = [(torch.arange(64 * n).view(64, n) % 999, torch.ones(64).long()) for n in range(32, 48)]"),
    ),
    "validation with grad": (
        "validation",
        ("        optimizer.zero", "        validation = cross_entropy(model(texts), labels)\n        optimizer.zero"),
    ),
}


def script(disease: str | None = None, *, width: int = 256, batch: int = 64) -> str:
    """The text of the healthy script, or of the one with the disease, for a GPU that these sizes keep busy.

    They are those of a T4. Longer texts come in smaller batches.
    """
    text = HEALTHY
    for old, new in SICK[disease][1:] if disease else ():
        text = _put(text, old, new)
    text = _put(text, "width=256", f"width={width}")
    for share in (1, 2):
        text = text.replace(f"LENGTH, BATCH = 64, {64 // share}\n", f"LENGTH, BATCH = 64, {batch // share}\n")
    return text


def _put(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
    return text.replace(old, new)
