"""Pictures as lessons store them: light, and the same to the eye."""

import base64
import io

import numpy as np
from matplotlib.patches import Rectangle
from PIL import Image, ImageColor

from effgpu.comparison import Comparison
from effgpu.course.pictures import lighten
from effgpu.figures.panels import to_png
from effgpu.figures.plot import plot


def test_pictures_are_stored_light_and_look_the_same(make_measurement):
    """Areas keep their colours. Small ones, as in a legend, keep their hue."""
    figure = plot(Comparison("some", tuple(map(make_measurement, ("old", "new")))))
    sides = {"#eef7fc": 0.1, "#e5f1f8": 0.1, "#8cbedc": 0.02, "#8dd3c1": 0.02}
    for place, (color, side) in enumerate(sides.items()):
        figure.add_artist(Rectangle((0.2 * place, 0), side, side, color=color))
    png = to_png(figure)
    light = base64.b64decode(lighten(base64.b64encode(png).decode()))
    before, after = (np.asarray(Image.open(io.BytesIO(each)).convert("RGB"), dtype=int) for each in (png, light))
    assert len(light) < 0.45 * len(png) and before.shape == after.shape
    assert np.abs(before - after).mean() < 0.5 and np.abs(before - after).max() < 60
    apart = [np.abs(after - ImageColor.getrgb(color)).max(axis=-1).min() for color in sides]
    assert apart[:2] == [0, 0] and max(apart) < 24
    assert lighten(base64.b64encode(light).decode()) == base64.b64encode(light).decode()


def test_what_is_no_plot_is_stored_as_it_is():
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "png")
    photograph = base64.b64encode(file.getvalue()).decode()
    others = [photograph, "aGVsbG8=", photograph[:400]]  # the last one ends in the midst
    assert [lighten(each) for each in others] == others
