"""README's table and picture are what the committed notebooks hold; run as a script, this file writes them there."""

import base64
import html
import re
from pathlib import Path

import pytest

from effgpu import units
from effgpu.ablation import Ablation
from effgpu.comparison import FASTER, SLOWER, Comparison
from effgpu.course import Outcome, read_lessons
from effgpu.reference import STORED, load, save

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TABLE = re.compile(r"(?<=committed notebooks carry -->\n).*?(?=<!-- /lessons -->)", re.DOTALL)
RESULT = re.compile(r"(?<=from lesson 17's results -->\n).*?(?=<!-- /result -->)", re.DOTALL)
PICTURE = ROOT / "images" / "result.png"


def address() -> str:
    return re.search(r'^Repository = "https://github.com/(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def lessons() -> list[Outcome]:
    return read_lessons(ROOT / "notebooks")


def table() -> str:
    """A row a lesson: its name, what its main comparison gave and on which device, and the badge."""
    rows = ["| lesson | what it gave | Colab |", "|---|---|---|", *map(row, lessons())]
    return "\n".join(rows) + "\n"


def result() -> tuple[bytes, str]:
    """The first plot of lesson 17, and README's lines that show it."""
    (shown,) = (lesson.pictures[0] for lesson in lessons() if lesson.name.startswith("17"))
    source = PICTURE.relative_to(ROOT).as_posix()
    image = f'<img src="{source}" width="560" alt="{html.escape(shown.alt)}">'
    return base64.b64decode(shown.png), f'<p align="center">{image}</p>\n'


def row(lesson: Outcome) -> str:
    main = next(comparison for comparison in lesson.comparisons if comparison.name == lesson.name)
    effects = "<br>".join(effect(main, m.label) for m in main.measurements[1:])
    badge = f"https://colab.research.google.com/github/{address()}/blob/main/notebooks/{lesson.name}.ipynb"
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    told = f"{effects}<br><sub>against *{main.baseline.label}*, on {main.device.label}</sub>"
    link = f"[{lesson.name[:2]}](notebooks/{lesson.name}.ipynb)"
    return f"| {link} {lesson.title} | {told} | [![Open in Colab]({image})]({badge}) |"


def effect(comparison: Comparison, label: str) -> str:
    """A variant's ratios: of time where it is outside the noise, of memory where it is not the baseline's."""
    verdict, memory = comparison.verdict(label), comparison.memory_ratio(label)
    time = f"{comparison.time_ratio(label)} ({verdict})" if verdict in (FASTER, SLOWER) else verdict
    counted = units.format_ratio(memory.value if memory else 1)
    return f"*{label}*: time {time}" + f", memory {counted}" * (counted != units.format_ratio(1))


def of_another_run(lessons: list[Outcome], folder: Path) -> list[str]:
    """The names of the results in a folder that are of a lesson's device, and not what the lesson holds."""
    held = {comparison.name: comparison for lesson in lessons for comparison in lesson.comparisons}
    paths = {folder / f"{comparison.device.slug}.json" for comparison in held.values()}
    stored = [comparison for path in paths if path.exists() for comparison in load(path)]
    return [comparison.name for comparison in stored if comparison != held.get(comparison.name)]


def test_table_is_what_the_notebooks_hold():
    assert TABLE.search(README.read_text())[0] == table(), "make readme brings it up to date"


def test_picture_is_the_notebooks():
    png, lines = result()
    assert PICTURE.read_bytes() == png, "make readme brings it up to date"
    assert RESULT.search(README.read_text())[0] == lines


def test_lessons_and_stored_results_of_their_device_are_of_one_run(make_measurement, make_gpu, tmp_path):
    first, second = (
        Comparison(name, tuple(make_measurement(label, device=make_gpu()) for label in "ab"))
        for name in ("first", "second")
    )
    save([first, second], tmp_path / "nvidia-test.json")
    assert of_another_run([Outcome("00", "00", (first, second))], tmp_path) == []
    changed = Comparison("first", second.measurements[::-1])
    assert of_another_run([Outcome("00", "00", (changed,))], tmp_path) == ["first", "second"]
    assert of_another_run(lessons(), STORED) == []


def test_every_link_and_picture_exists():
    text = README.read_text()
    targets = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r'src="([^":]+)"', text)
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_named_exists(name):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make ([a-z]+)", (ROOT / name).read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_examples_run(no_collecting):
    """The README's examples, with a model of one layer on the CPU for the reader's own."""
    import torch

    dtypes = []

    class Model(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            dtypes.append(y.dtype)
            return type("Output", (), {"loss": y.float().square().mean()})

    def build():
        model = Model(8, 8)
        return model, torch.optim.SGD(model.parameters()), {"x": torch.randn(32, 8)}

    names = {"create": build, "load": lambda checkpoint: build()[::2]}
    results = []
    for example in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL):
        exec(example.replace('"samples"', '"samples", seconds=0.01'), names)
        results.append(names["result"])
        assert set(dtypes) == {torch.float32, torch.bfloat16}, "bf16 was never on"
        dtypes.clear()
    compared, ablation = results
    assert isinstance(compared, Comparison) and isinstance(ablation, Ablation)
    assert [m.label for m in compared] == ["fp32", "bf16"]
    assert ablation.switches == ("bf16", "fused", "checkpoint") and ablation["none"].items == 32


if __name__ == "__main__":
    png, lines = result()
    PICTURE.write_bytes(png)
    README.write_text(RESULT.sub(lambda _: lines, TABLE.sub(lambda _: table(), README.read_text())))
