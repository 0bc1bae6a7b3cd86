"""README and the course's map hold what the committed notebooks hold. As a script: write both, and README's picture."""

import base64
import html
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import nbformat
import pytest
from conftest import predicted_sizes

from effgpu.comparison import Comparison
from effgpu.course.runner import Outcome, read_lessons
from effgpu.diagnosing.doctor import doctor
from effgpu.results import stored
from effgpu.units import NOT_MEASURED, GiB, format_bytes

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
LESSONS = re.compile(r"(?<=from the committed notebooks -->\n).*?(?=<!-- /lessons -->)", re.DOTALL)
SHOWN = re.compile(r"(?<=by `make readme` from lesson 07 -->\n).*?(?=<!-- /picture -->)", re.DOTALL)
PICTURE = ROOT / "images" / "result.png"
ALT = "Memory of one training step: a tall mountain of activations, and with checkpointing a row of small teeth."
QUESTIONS = {
    "My GPU idles": ("00", "02", "03", "12"),
    "It does not fit": ("01", "06", "07", "09", "11", "22", "23"),
    "It is slow": ("25", "04", "05", "08", "10", "13", "14", "16", "17", "21", "24"),
    "Is the result still right?": ("15",),
    "After training": ("18", "19"),
    "More than one GPU": ("20",),
}
MAP = ROOT / "notebooks" / "README.md"  # which GitHub shows first
SYMPTOMS = {
    "The GPU's utilisation jumps between 0 and 100 %": ("02", "03", "12"),
    "It is near 100 %, and training is still slow": ("08", "04", "14", "13"),
    "Small steps take as long as large ones": ("05", "14", "12"),
    "CUDA out of memory in training": ("22", "08", "06", "07", "09"),
    "Out of memory only in validation": ("11",),
    "Memory is full before the first batch": ("23", "09", "20"),
    "The first steps take a minute": ("14", "13"),
    "Half of my batch is padding": ("04", "17"),
    "The loss is NaN in 16 bits": ("08", "12"),
    "The loss stops falling, or explodes at the start": ("15", "06"),
    "Blog posts contradict each other": ("00", "16", "24"),
    "The trained model answers too slowly": ("19", "18"),
}
NEEDS_A_GPU = ("03", "20")  # what a CPU measures says nothing of these techniques
BADGE = "[![Colab][colab]]"


FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

PAGES = [README, MAP, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "tests" / "README.md"]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def address() -> str:
    return re.search(r'^Repository = "https://github.com/(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]


@cache
def lessons() -> list[Outcome]:
    return read_lessons(ROOT / "notebooks")


def lists() -> str:
    """A list for each question, with a line for each lesson: the badge, what it does, and its headline."""
    found = {lesson.name[:2]: lesson for lesson in lessons()}
    parts = []
    for question, numbers in QUESTIONS.items():
        lines = "\n".join(line(found[number]) for number in numbers if number in found)
        parts.append(f"**{question}**\n\n{lines}\n")
    return "\n".join([*parts, f"CPU: {cpus()}\n"])


def line(lesson: Outcome) -> str:
    page = f"https://colab.research.google.com/github/{address()}/blob/main/notebooks/{lesson.name}.ipynb"
    title, _, subtitle = lesson.title.partition(":")
    about = lesson.about or f"{subtitle.strip()[:1].upper()}{subtitle.strip()[1:]}."
    told = re.sub(r" (?=%|×|GiB|MiB)|(?<=×) ", "\N{NO-BREAK SPACE}", headline(lesson))
    return f"- {BADGE}({page}) [{title}](notebooks/{lesson.name}.ipynb): {about}{f' *{told}*' * bool(told)}"


def headline(lesson: Outcome) -> str:
    """The headline in words with its device: a GPU's where one is stored, else the notebook's, if a CPU can tell.

    In place of what a small model takes on a CPU stands what the lesson predicts for a GPU, at full size.
    """
    stored_outcomes = [replace(lesson, comparisons=(comparison,)) for comparison in stored(lesson.name)]
    told = [outcome.headline for outcome in (lesson, *stored_outcomes) if outcome.headline]
    told.sort(key=lambda each: each.comparison.device.kind != "cuda")
    if lesson.name[:2] in NEEDS_A_GPU and not any(each.comparison.device.kind == "cuda" for each in told):
        return "Needs a GPU."
    if not told:
        return ""
    best = told[0]
    device = best.comparison.device
    where = f"on {device.label if device.kind == 'cuda' else 'a CPU'}"
    measured = re.sub(r" \[[^]]*\]| \(±[^)]*\)", "", best.tell())  # without the interval
    told = best.full_size if device.kind == "cpu" and best.full_size else f"{measured} {where}"
    return f"{best.label}: {told}"


def cpus() -> str:
    """The CPUs that the committed notebooks were executed on."""
    devices = [comparison.device for lesson in lessons() for comparison in lesson.comparisons]
    return " and ".join(sorted({f"{d.name}, {d.cores} cores" for d in devices if d.kind == "cpu"})) or "none"


def map_of_the_course() -> str:
    """notebooks/README.md: a lesson for each symptom, and what is predicted to pay on which GPU."""
    found = {lesson.name[:2]: lesson for lesson in lessons()}
    link = lambda lesson: f"[{lesson.name[:2]} {lesson.title.partition(':')[0]}]({lesson.name}.ipynb)"
    symptoms = [
        f"| {symptom} | {', '.join(link(found[number]) for number in numbers if number in found)} |"
        for symptom, numbers in SYMPTOMS.items()
    ]
    sized = [lesson for lesson in lessons() if lesson.headline and lesson.headline.full_size]
    gpus = list(dict.fromkeys(gpu for lesson in sized for gpu in lesson.main.full_size_gpus))
    rows = [
        f"| {link(lesson)}: {lesson.headline.label} | {' | '.join(on_each(lesson, gpus))} | {peaks(lesson)} |"
        for lesson in sized
    ]
    rest = ", ".join(link(lesson) for lesson in lessons() if lesson not in sized)
    lines = [
        "# Map of the course",
        "",
        "<!-- made by `make readme` from the committed notebooks -->",
        "Start with [00](00_measuring.ipynb) if you want to trust a number, or with what you see:",
        "",
        "| what you see | lessons, the most likely first |",
        "|---|---|",
        *symptoms,
        "",
        "## What pays on which GPU",
        "",
        "Each lesson's technique against the same step without it, at the size of real training. **Predicted**, not",
        "measured: 9 of 10 published times of transformers lay in such ranges ([audit](../docs/predict.md)). The",
        "lesson says what is compared, and at which size. Techniques do not add up: see [16](16_ladder.ipynb).",
        "",
        f"| technique | {' | '.join(gpus)} | peak memory |",
        f"|---|{'---|' * len(gpus)}---|",
        *rows,
        "",
        f"Of these lessons nothing is predicted: {rest}.",
    ]
    return "\n".join(lines) + "\n"


def on_each(lesson: Outcome, gpus: list[str]) -> list[str]:
    """The predicted time of a lesson's headline on each GPU, with its range, against the lesson's baseline."""
    of = {each.gpu: each for each in lesson.main.full_size[lesson.headline.label]}
    return [of[gpu].tell_time() if gpu in of else NOT_MEASURED for gpu in gpus]


def peaks(lesson: Outcome) -> str:
    """The predicted peak without and with a lesson's technique."""
    labels = lesson.main.baseline.label, lesson.headline.label
    return " → ".join(format_bytes(lesson.main.full_size[label][0].allocated) for label in labels)


def picture() -> tuple[bytes, str]:
    """The memory of a step with and without checkpointing, from lesson 07, and README's lines that show it."""
    notebook = nbformat.read(ROOT / "notebooks" / "07_gradient_checkpointing.ipynb", as_version=4)
    (cell,) = (cell for cell in notebook.cells if cell.source.startswith('effgpu.plot({"plain": before, '))
    png = next(output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    image = f'<img src="{PICTURE.relative_to(ROOT).as_posix()}" width="560" alt="{html.escape(ALT)}">'
    return base64.b64decode(png), f'<p align="center">{image}</p>\n'


def test_lines_on_the_lessons_are_what_the_notebooks_hold():
    assert LESSONS.search(README.read_text())[0] == lists(), "make readme brings it up to date"


def test_every_lesson_answers_one_question():
    asked = [number for numbers in QUESTIONS.values() for number in numbers]
    assert len(set(asked)) == len(asked) and {lesson.name[:2] for lesson in lessons()} <= set(asked)


def test_the_map_is_what_the_notebooks_hold():
    assert MAP.read_text() == map_of_the_course(), "make readme brings it up to date"
    told = {number for numbers in SYMPTOMS.values() for number in numbers}
    assert told <= {lesson.name[:2] for lesson in lessons()}
    table = MAP.read_text().partition("## What pays")[2]
    predicted = [lesson for lesson in lessons() if lesson.main and lesson.main.full_size]
    assert len(predicted) >= 5 and all(f"]({lesson.name}.ipynb): " in table for lesson in predicted)


@pytest.fixture
def make_lesson(make_measurement, cpu, make_gpu, monkeypatch):
    """A function that makes a lesson of two variants: the second takes twice the time and half the memory."""
    monkeypatch.setattr(sys.modules[__name__], "stored", lambda name: [])

    def make(name, gpu=False, **fields):
        device = make_gpu() if gpu else cpu
        plain = make_measurement("plain", 1.0, device=device)
        measured = plain, make_measurement("new", 2.0, peak_allocated=500, device=device)
        return Outcome(name, "Title: of a lesson", (Comparison(name, measured, **fields),))

    return make


def test_a_headline_names_its_device_and_says_what_is_predicted(make_lesson, monkeypatch):
    assert headline(make_lesson("07_some")) == "new: −50 % memory, 2.00 × slower on a CPU"
    full_size = predicted_sizes(20 * GiB, 5 * GiB, labels=("plain", "new"))
    told = "new: 4.00 × faster, 20.0 → 5.00 GiB on a T4, so that it fits (predicted)"
    assert headline(make_lesson("07_some", full_size=full_size)) == told
    on_gpu = "new: −50 % memory, 2.00 × slower on NVIDIA Test"
    assert headline(make_lesson("07_some", gpu=True, full_size=full_size)) == on_gpu
    assert headline(Outcome("22_some", "Compares nothing")) == ""
    assert headline(Outcome("03_some", "Pinned")) == headline(make_lesson("20_some")) == "Needs a GPU."
    monkeypatch.setattr(sys.modules[__name__], "stored", lambda name: [make_lesson(name, gpu=True).main])
    assert headline(make_lesson("20_some")) == on_gpu


def test_picture_is_the_notebooks():
    png, lines = picture()
    assert PICTURE.read_bytes() == png, "make readme brings it up to date"
    assert SHOWN.search(README.read_text())[0] == lines


def test_numbers_on_published_runs_are_those_of_the_page():
    numbers = r"(\d+)\s+published\s+runs\W+median\s+error\s+([\d.]+)\s?%\W+worst\s+([\d.]+)\s?%"
    told, page = (re.search(numbers, path.read_text()) for path in (README, ROOT / "docs" / "predict.md"))
    assert told.groups() == page.groups()
    assert ("no false" in README.read_text()) == ("There is none." in (ROOT / "docs" / "predict.md").read_text())


@pytest.mark.parametrize("group", ["transformers", "convolutional networks"])
def test_numbers_on_published_times_are_those_of_the_page(group):
    page = re.search(rf"\| {group} \| (\d+) \| ([\d.]+)% \|", (ROOT / "docs" / "predict.md").read_text())
    told = re.search(rf"([\d.]+)\s%\s+in\s+(\d+)\s+(published\s+runs\s+)?of\s+{group}", README.read_text())
    assert (told[2], told[1]) == page.groups()


@each_page
def test_every_link_and_picture_exists(page):
    targets = re.findall(r"\]\(([^):]+)\)", page.read_text()) + re.findall(r'src="([^":]+)"', page.read_text())
    for target in targets:
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), target
    assert targets or page != README


def anchors(text: str) -> list[str]:
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)", FENCED.sub("", text), re.MULTILINE)
    shown = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return [re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in shown]


def test_the_examples_run(no_collecting):
    """The examples of README and docs/measuring.md, with a model of one layer on the CPU for the reader's own."""
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

    names = {"create": build, "build": lambda: build()[:2], "device": "cpu", "load": lambda checkpoint: build()[::2]}
    results = []
    text = README.read_text() + (ROOT / "docs" / "measuring.md").read_text()
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(example.replace('"samples"', '"samples", seconds=0.01'), names)
        if "variant" in names:
            assert doctor(names.pop("variant"), [torch.randn(32, 8)]).findings[0].name == "launching"
            dtypes.clear()
            continue
        results.append(names["result"])
        assert set(dtypes) == {torch.float32, torch.bfloat16}, "bf16 was never on"
        dtypes.clear()
    compared, ablation = results
    assert [m.label for m in compared] == ["fp32", "bf16"]
    assert len(ablation) == 8 and ablation["bf16 + fused + checkpoint"].items == ablation["none"].items == 32


if __name__ == "__main__":
    png, lines = picture()
    PICTURE.write_bytes(png)
    MAP.write_text(map_of_the_course())
    README.write_text(SHOWN.sub(lambda _: lines, LESSONS.sub(lambda _: lists(), README.read_text())))
