"""The committed drawings are those that images/draw.py draws, and say in words what they show."""

import re
import runpy
from pathlib import Path

import pytest

IMAGES = Path(__file__).parent.parent / "images"
DRAWINGS = sorted(IMAGES.glob("*.svg"))


def test_every_drawing_is_committed_and_no_other(tmp_path):
    runpy.run_path(str(IMAGES / "draw.py"))["main"](tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("*.svg"))] == [path.name for path in DRAWINGS]


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_drawing_is_used_and_titled(path):
    root = IMAGES.parent
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md")), *sorted((root / "notebooks").glob("*.ipynb"))]
    assert any(f"images/{path.name}" in page.read_text() for page in pages)
    assert len(re.search(r"<title>(.*?)</title>", path.read_text(), re.DOTALL)[1]) > 40
