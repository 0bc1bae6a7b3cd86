"""Convolutional networks of MMSegmentation, whose training memory is published: published_memory.py audits them."""

import torch
from torch import nn
from torch.nn import functional as F

CLASSES = 19  # of Cityscapes
BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _unit(inputs, outputs, size=3, stride=1, dilation=1, active=True):
    """A convolution, a batch norm and a ReLU."""
    padding = dilation * (size // 2)
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding, dilation, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), *[nn.ReLU(inplace=True)] * active)


class _Block(nn.Module):
    """A residual block: of two convolutions, or of three with a narrow middle."""

    def __init__(self, inputs, width, stride, dilation, narrow):
        super().__init__()
        outputs = 4 * width if narrow else width
        middle = dict(stride=stride, dilation=dilation)
        if narrow:
            units = [_unit(inputs, width, 1), _unit(width, width, **middle), _unit(width, outputs, 1, active=False)]
        else:
            units = [_unit(inputs, width, **middle), _unit(width, outputs, active=False)]
        self.units, self.relu = nn.Sequential(*units), nn.ReLU(inplace=True)
        changes = stride > 1 or inputs != outputs
        self.skip = _unit(inputs, outputs, 1, stride, active=False) if changes else nn.Identity()

    def forward(self, x):
        return self.relu(self.units(x) + self.skip(x))


class _ResNet(nn.Module):
    """A ResNet whose last two stages dilate in place of striding, so that it ends at an eighth of the image's size.

    `deep` has three convolutions of 3 × 3 at its entrance in place of one of 7 × 7 (ResNetV1c).
    """

    def __init__(self, layers, deep):
        super().__init__()
        narrow = layers >= 50
        stem = [_unit(3, 32, stride=2), _unit(32, 32), _unit(32, 64)] if deep else [_unit(3, 64, 7, 2)]
        self.stem, self.pool = nn.Sequential(*stem), nn.MaxPool2d(3, 2, 1)
        self.stages, inputs = nn.ModuleList(), 64
        settings = zip(BLOCKS[layers], (64, 128, 256, 512), (1, 2, 1, 1), (1, 1, 2, 4))
        for number, width, stride, dilation in settings:
            blocks = []
            for block in range(number):
                blocks.append(_Block(inputs, width, stride if block == 0 else 1, dilation, narrow))
                inputs = 4 * width if narrow else width
            self.stages.append(nn.Sequential(*blocks))

    def forward(self, x):
        x, kept = self.pool(self.stem(x)), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        return kept[-2:]


class _Fcn(nn.Module):
    """Convolutions of 3 × 3, the last over their result and what came in, and a score for each class."""

    def __init__(self, inputs, width, number, concatenates):
        super().__init__()
        self.units = nn.Sequential(*(_unit(width if place else inputs, width) for place in range(number)))
        self.merge = _unit(inputs + width, width) if concatenates else None
        self.dropout, self.score = nn.Dropout2d(0.1), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        y = self.units(x)
        if self.merge:
            y = self.merge(torch.cat([x, y], 1))
        return self.score(self.dropout(y))


class _Psp(nn.Module):
    """What is averaged over the image in four resolutions beside it, a convolution, and a score for each class."""

    def __init__(self, inputs, width):
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), _unit(inputs, width, 1)) for size in (1, 2, 3, 6)
        )
        self.merge = _unit(inputs + 4 * width, width)
        self.dropout, self.score = nn.Dropout2d(0.1), nn.Conv2d(width, CLASSES, 1)

    def forward(self, x):
        size = x.shape[2:]
        pooled = [F.interpolate(pool(x), size, mode="bilinear", align_corners=False) for pool in self.pools]
        return self.score(self.dropout(self.merge(torch.cat([x, *pooled], 1))))


def segmentation(head="FCN", layers=50, height=512, width=1024, deep=True, fp16=False):
    """A step with two images, on one of four GPUs: gradients are also in the buckets that are sent to the others.

    SyncBN keeps what a batch norm keeps. In fp16 the model and its activations are cast, batch norms are not, and
    weights in fp32 lie beside it.
    """
    narrow = 1 if layers >= 50 else 4
    backbone, inputs = _ResNet(layers, deep), 2048 // narrow
    main = _Psp(inputs, 512 // narrow) if head == "PSPNet" else _Fcn(inputs, 512 // narrow, 2, True)
    model = nn.ModuleList([backbone, main, _Fcn(inputs // 2, 256 // narrow, 1, False)]).train()
    weights = list(model.parameters())
    if fp16:
        weights = [p.detach().clone().requires_grad_() for p in weights]
        for module in model.modules():
            if not isinstance(module, nn.BatchNorm2d):
                module._apply(lambda t: t.half() if t.is_floating_point() else t, recurse=False)
    buckets = [torch.empty_like(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(weights, 0.01, momentum=0.9, weight_decay=5e-4, foreach=False)

    def step():
        images = torch.randn(2, 3, height, width)
        labels = torch.zeros(2, height, width, dtype=torch.long)
        inner, last = backbone(images.half() if fp16 else images)
        losses = []
        for part, x in ((model[1], last), (model[2], inner)):
            scores = F.interpolate(part(x).float(), labels.shape[1:], mode="bilinear", align_corners=False)
            losses.append(F.cross_entropy(scores, labels, reduction="none").mean())
        optimizer.zero_grad(set_to_none=False)
        (losses[0] + 0.4 * losses[1]).backward()
        if fp16:
            for kept, p in zip(weights, model.parameters()):
                kept.grad = p.grad.float()
        optimizer.step()
        return buckets

    return step
