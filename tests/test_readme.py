"""README holds what the committed notebooks hold: its lines on the lessons and its picture. As a script: write them."""

import base64
import html
import re
from pathlib import Path

import nbformat
import pytest

from effgpu.ablation import Ablation
from effgpu.comparison import BASELINE_FAILED, Comparison
from effgpu.course.runner import Outcome, read_lessons
from effgpu.results import STORED, load, save
from effgpu.units import NOT_MEASURED

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
LESSONS = re.compile(r"(?<=from the committed notebooks -->\n).*?(?=<!-- /lessons -->)", re.DOTALL)
SHOWN = re.compile(r"(?<=by `make readme` from lesson 07 -->\n).*?(?=<!-- /picture -->)", re.DOTALL)
PICTURE = ROOT / "images" / "result.png"
ALT = "Memory of one training step: a tall mountain of activations, and with checkpointing a row of small teeth."
QUESTIONS = {
    "My GPU idles": ("00", "02", "03", "12"),
    "It does not fit": ("01", "06", "07", "09", "11"),
    "It is slow": ("04", "05", "08", "10", "13", "14", "16", "17"),
    "Is the result still right?": ("15",),
    "After training": ("18", "19"),
    "More than one GPU": ("20",),
}


def address() -> str:
    return re.search(r'^Repository = "https://github.com/(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


def lessons() -> list[Outcome]:
    return read_lessons(ROOT / "notebooks")


def tables() -> str:
    """A table for each question, with a row for each lesson: what it does, its headline, and the badge."""
    found = {lesson.name[:2]: lesson for lesson in lessons()}
    parts = []
    for question, numbers in QUESTIONS.items():
        rows = "\n".join(row(found[number]) for number in numbers)
        parts.append(f"**{question}**\n\n| | | |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def row(lesson: Outcome) -> str:
    badge = f"https://colab.research.google.com/github/{address()}/blob/main/notebooks/{lesson.name}.ipynb"
    image = "https://colab.research.google.com/assets/colab-badge.svg"
    title, _, about = lesson.title.partition(":")
    link = f"[{lesson.name[:2]} {title}](notebooks/{lesson.name}.ipynb)"
    return f"| {link}{': ' * bool(about)}{about.strip()} | {headline(lesson)} | [![Open in Colab]({image})]({badge}) |"


def headline(lesson: Outcome) -> str:
    """What the first variant after the baseline gave, in words; empty where nothing was compared."""
    main = next((comparison for comparison in lesson.comparisons if comparison.name == lesson.name), None)
    if main is None or main.baseline.failed:
        return "needs a GPU"
    label = main.measurements[1].label
    told = [main.tell(label)]
    memory = main.tell(label, "memory")
    told += [f"{memory} memory"] * (memory not in (NOT_MEASURED, "0 %", BASELINE_FAILED))
    return f"*{label}*: {', '.join(told)}<br><sub>{main.device.label}</sub>"


def picture() -> tuple[bytes, str]:
    """The memory of a step with and without checkpointing, from lesson 07, and README's lines that show it."""
    notebook = nbformat.read(ROOT / "notebooks" / "07_gradient_checkpointing.ipynb", as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.source.startswith('effgpu.plot_memory({"plain": before, '))
    png = next(output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    image = f'<img src="{PICTURE.relative_to(ROOT).as_posix()}" width="560" alt="{html.escape(ALT)}">'
    return base64.b64decode(png), f'<p align="center">{image}</p>\n'


def of_another_run(lessons: list[Outcome], folder: Path) -> list[str]:
    """The names of the results in a folder that are of a lesson's device, and not what the lesson holds."""
    held = {comparison.name: comparison for lesson in lessons for comparison in lesson.comparisons}
    paths = {folder / f"{comparison.device.slug}.json" for comparison in held.values()}
    stored = [comparison for path in paths if path.exists() for comparison in load(path)]
    return [comparison.name for comparison in stored if comparison != held.get(comparison.name)]


def test_lines_on_the_lessons_are_what_the_notebooks_hold():
    assert LESSONS.search(README.read_text())[0] == tables(), "make readme brings it up to date"


def test_every_lesson_answers_one_question():
    assert sorted(number for numbers in QUESTIONS.values() for number in numbers) == [m.name[:2] for m in lessons()]


def test_picture_is_the_notebooks():
    png, lines = picture()
    assert PICTURE.read_bytes() == png, "make readme brings it up to date"
    assert SHOWN.search(README.read_text())[0] == lines


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 150


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


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/measuring.md"])
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
    png, lines = picture()
    PICTURE.write_bytes(png)
    README.write_text(SHOWN.sub(lambda _: lines, LESSONS.sub(lambda _: tables(), README.read_text())))
