"""Plots as a lesson stores them: PNGs in a palette, light enough that whoever clones downloads every version of all."""

import base64
import io

import numpy as np
from PIL import Image

AREA = 0.001  # of a picture: what keeps its colour
NEAR = 12  # of 255: colours that look the same at an edge


def lighten(png: str) -> str:
    """A PNG in base64 in a palette, if that is smaller; as it is if it is no whole PNG, or has too many colours.

    Areas keep their colours. Shades at the edges of lines and letters become the nearest colour that is kept.
    """
    try:
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), int)
    except (OSError, ValueError):  # also one of which a part is missing
        return png
    packed, where, counts = np.unique(picture @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True)
    colors = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    kept: list[int] = []
    for index in counts.argsort()[::-1]:
        if counts[index] > AREA * where.size or (_difference(colors[kept], colors[index]) >= NEAR).all():
            kept.append(index)
            if len(kept) > 256:
                return png
    palette = colors[sorted(kept)]
    nearest = _difference(colors[:, None], palette).argmin(axis=1).astype(np.uint8)
    light = Image.fromarray(nearest[where].reshape(picture.shape[:2]))
    light.putpalette(palette.astype(np.uint8).tobytes())
    file = io.BytesIO()
    light.save(file, "png", optimize=True)
    return min(base64.b64encode(file.getvalue()).decode(), "".join(png.split()), key=len)


def _difference(some, others):
    """How different colours look, 0 to 255, in arrays (..., 3). A change of hue counts twice one of brightness."""
    apart = some - others
    brightness = apart.mean(axis=-1, keepdims=True)
    return np.maximum(abs(brightness[..., 0]) / 2, abs(apart - brightness).max(axis=-1))
