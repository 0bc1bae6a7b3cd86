"""Training scripts for the doctor: a healthy one, and ten that differ from it in a few lines, each with a disease."""

HEALTHY = """
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

device = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, BATCH = 64, 64


class Texts(Dataset):
    texts = torch.arange(LENGTH) * torch.arange(7, 20 * BATCH + 7)[:, None] % 999 + 1

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        text = self.texts[index]
        return text, index % 10


class Classifier(nn.Module):
    def __init__(self, width=256, layers=2):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.logits = nn.Linear(width, 10)

    def forward(self, texts):
        x = self.embed(texts)
        for block in self.blocks:
            x = block(x)
        return self.logits(x.mean(1))


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

# What each disease changes: the name that doctor gives it, and each passage with what stands there instead.
SICK = {
    "slow loader": (
        "data loading",
        ("        text = self", "        time.sleep(0.001)\n        text = self"),
        ("import torch\n", "import time\n\nimport torch\n"),
        ("num_workers=1, pin_memory=True, persistent_workers=True", "pin_memory=True"),
    ),
    "item in the loop": (
        "hidden waits",
        (
            "        scaler.step(optimizer)",
            "        norm = sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5\n"
            "        scaler.step(optimizer)",
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
        ("return text, index % 10", "return nn.functional.pad(text, (0, 448)), index % 10"),
        ("LENGTH, BATCH = 64, 64", "LENGTH, BATCH = 64, 8"),
    ),
    "unfused AdamW on many small tensors": (
        "optimizer",
        ("fused=True", "foreach=False"),
        (
            "        self.logits =",
            "        self.scales = nn.ParameterList(torch.ones(width) for _ in range(100))\n        self.logits =",
        ),
        ("return self.logits(x.mean(1))", "return self.logits(x.mean(1) * torch.stack(list(self.scales)).prod(0))"),
    ),
    "fp32 on tensor cores": ("precision", ('torch.autocast("cuda", torch.float16)', "torch.enable_grad()")),
    "tiny batch": ("launching", ("LENGTH, BATCH = 64, 64", "LENGTH, BATCH = 64, 1")),
    "logging each step": (
        "hidden waits",
        (
            "        optimizer.zero_grad()",
            "        for name, parameter in model.named_parameters():\n"
            "            log[name] = parameter.detach().cpu().numpy().std()\n"
            "        optimizer.zero_grad()",
        ),
        ("    scaler =", "    log = {}\n    scaler ="),
    ),
    "recompiling shapes": (
        "recompiling",
        ("layers=2", "layers=0"),  # each takes a second to compile for each shape, and shows nothing more
        ("Classifier().to(device)", 'torch.compile(Classifier().to(device), backend="eager", dynamic=False)'),
        (LOADER, "loader = [(torch.arange(64 * n).view(64, n) % 999, torch.ones(64).long()) for n in range(32, 48)]"),
    ),
    "validation with grad": (
        "validation",
        (
            "        optimizer.zero_grad()",
            "        optimizer.zero_grad()\n        validation = cross_entropy(model(texts), labels)",
        ),
    ),
}


def script(disease: str | None = None) -> str:
    """The text of the healthy script, or of the one with the disease."""
    text = HEALTHY
    for old, new in SICK[disease][1:] if disease else ():
        assert text.count(old) == 1, f"{disease}: {old!r} stands there {text.count(old)} times"
        text = text.replace(old, new)
    return text
