"""README and the course's map hold what the committed notebooks hold. As a script: write both, and README's picture."""

import base64
import html
import linecache
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache

import nbformat
import pytest
import torch
from test_lessons import ADDRESS, ROOT

from effgpu.attaching import scripts
from effgpu.attaching.commands import read_program
from effgpu.course.outcomes import Outcome, read_lessons
from effgpu.diagnosing.ranking import rank
from effgpu.predicting.asked import Asked
from effgpu.predicting.gpus import find_gpu
from effgpu.predicting.timeline import NOTHING
from effgpu.results import stored
from effgpu.units import NOT_MEASURED, format_bytes, with_article

README = ROOT / "README.md"
LESSONS = re.compile(r"(?<=from the committed notebooks -->\n).*?(?=<!-- /lessons -->)", re.DOTALL)
SITE = ROOT / "mkdocs.yml"
NAVIGATION = re.compile(r"(?<=by `make readme`\n).*?(?=  - Tools:)", re.DOTALL)
SHOWN = re.compile(r"(?<=by `make readme` from lesson 07 -->\n).*?(?=<!-- /picture -->)", re.DOTALL)
PICTURE = ROOT / "images" / "result.png"
ALT = "Memory of one training step: a tall mountain of activations, and with checkpointing a row of small teeth."
QUESTIONS = {
    "My GPU idles": ("00", "28", "02", "03", "12"),
    "It does not fit": ("01", "06", "07", "26", "27", "09", "11", "22", "23"),
    "It is slow": ("25", "29", "04", "05", "08", "10", "13", "14", "16", "17", "21", "24"),
    "Is the result still right?": ("15",),
    "After training": ("18", "19"),
    "More than one GPU": ("20",),
}
MAP = ROOT / "notebooks" / "README.md"  # which GitHub shows first
SYMPTOMS = {
    "The GPU's utilisation jumps between 0 and 100 %": ("02", "03", "12", "28"),
    "It is near 100 %, and training is still slow": ("08", "04", "14", "13"),
    "I want to know how much faster it could be, and where the time goes": ("29", "28", "25"),
    "Small steps take as long as large ones": ("05", "14", "12"),
    "CUDA out of memory in training": ("22", "08", "26", "06", "07", "27", "09"),
    "Out of memory only in validation": ("11",),
    "Memory is full before the first batch": ("23", "09", "27", "20"),
    "The first steps take a minute": ("14", "13"),
    "Half of my batch is padding": ("04", "17"),
    "The loss is NaN in 16 bits": ("08", "12"),
    "The loss stops falling, or explodes at the start": ("15", "06"),
    "Blog posts contradict each other": ("00", "16", "24"),
    "The trained model answers too slowly": ("19", "18"),
}
NEEDS = {"03": "Needs a GPU.", "20": "Needs two GPUs."}  # elsewhere it only predicts
BADGE = "[![Colab][colab]]"
PAGES = [
    README,
    MAP,
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "tests" / "README.md",
]


@cache
def lessons() -> dict[str, Outcome]:
    """The lessons by their numbers."""
    return {lesson.name[:2]: lesson for lesson in read_lessons(ROOT / "notebooks")}


def lists() -> str:
    """A list for each question, with a line for each lesson: the badge, and what it does."""
    each = [[f"**{question}**\n", *map(line, numbers), ""] for question, numbers in QUESTIONS.items()]
    return "\n".join("\n".join(lines) for lines in each)


def line(number: str) -> str:
    lesson = lessons()[number]
    page = f"https://colab.research.google.com/github/{ADDRESS[2]}/blob/main/notebooks/{lesson.name}.ipynb"
    title, _, subtitle = lesson.title.partition(":")
    about = lesson.about or f"{subtitle.strip()[:1].upper()}{subtitle.strip()[1:]}."
    needs = f" *{NEEDS[number]}*" if number in NEEDS else ""
    return f"- {BADGE}({page}) [{title}](notebooks/{lesson.name}.ipynb): {about}{needs}"


def navigation() -> str:
    """The same lists for the site's navigation, in mkdocs.yml."""
    entry = lambda number: f'          - "{number} {title(number)}": notebooks/{lessons()[number].name}.ipynb\n'
    return "".join(f'      - "{question}":\n{"".join(map(entry, numbers))}' for question, numbers in QUESTIONS.items())


def title(number: str) -> str:
    return lessons()[number].title.partition(":")[0]


def short(name: str) -> str:
    """A GPU's name as `effgpu predict` knows it, "H100" for "NVIDIA H100 80GB HBM3"."""
    try:
        return find_gpu(name).name
    except ValueError:
        return name


def map_of_the_course() -> str:
    """notebooks/README.md: a lesson for each symptom, and what is predicted to pay on which GPU."""
    link = lambda number: f"[{number} {title(number)}]({lessons()[number].name}.ipynb)"
    sized = {number: lesson for number, lesson in lessons().items() if lesson.headline and lesson.headline.full_size}
    gpus = list(dict.fromkeys(gpu for lesson in sized.values() for gpu in lesson.main.full_size_gpus))
    rows = [
        f"| {link(number)}: {lesson.headline.label} | {' | '.join(on_each(lesson, gpus))} | {peaks(lesson)} |"
        for number, lesson in sized.items()
    ]
    lines = [
        "# Map of the course",
        "",
        "<!-- made by `make readme` from the committed notebooks -->",
        "Start with [00](00_measuring.ipynb) if you want to trust a number, or with what you see:",
        "",
        "| what you see | lessons, the most likely first |",
        "|---|---|",
        *(f"| {symptom} | {', '.join(map(link, numbers))} |" for symptom, numbers in SYMPTOMS.items()),
        "",
        *measured(link),
        "## What is predicted to pay on which GPU",
        "",
        "Each lesson's technique against the same step without it, at the size of real training. **Predicted**, not",
        "measured: 9 of 10 published times of transformers lay in such ranges ([audit](../docs/predict.md)). The",
        "lesson says what is compared, and at which size. Techniques do not add up: see [16](16_ladder.ipynb).",
        "",
        f"| technique | {' | '.join(gpus)} | peak memory |",
        f"|---|{'---|' * len(gpus)}---|",
        *rows,
        "",
        f"Of these lessons nothing is predicted: {', '.join(link(each) for each in lessons() if each not in sized)}.",
    ]
    return "\n".join(lines) + "\n"


def measured(link) -> list[str]:
    """A table for each GPU whose results are stored: what its lessons measured, beside the prediction for it.

    Left out are techniques that their lesson compares no more.
    """
    by_gpu = defaultdict(list)
    for number, lesson in lessons().items():
        for comparison in stored(lesson.name):
            headline = replace(lesson, comparisons=(comparison,)).headline
            if lesson.main is None or headline.label in [each.label for each in lesson.main]:
                by_gpu[comparison.device.label].append((number, headline))
    lines = []
    for gpu, headlines in by_gpu.items():
        lines += [
            f"## Measured on {with_article(short(gpu))}",
            "",
            f"By {gpu}, at the size that the lesson gives it there, with the 99 % interval; beside it what was",
            "predicted for it before, with its range ([all variants](../docs/predict.md#measured-by-us)).",
            "",
            "| technique | time, measured | predicted | peak memory, measured | predicted |",
            "|---|---|---|---|---|",
        ]
        for number, headline in headlines:
            comparison, label = headline.comparison, headline.label
            labels = comparison.baseline.label, label
            found = " → ".join(format_bytes(comparison[each].peak_allocated) for each in labels)
            time = memory = NOT_MEASURED
            if label in comparison.here:
                time = comparison.here[label].tell_time()
                memory = " → ".join(format_bytes(comparison.here[each].allocated) for each in labels)
            lines.append(f"| {link(number)}: {label} | {comparison.tell(label)} | {time} | {found} | {memory} |")
        lines.append("")
    return lines


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
    device = short(lessons()["07"].main.device.label)
    caption = f"One training step, as lesson 07 measured it on {with_article(device)}: plain, and with checkpointing."
    return base64.b64decode(png), f'<p align="center">{image}<br><em>{caption}</em></p>\n'


def test_lines_on_the_lessons_are_what_the_notebooks_hold():
    assert LESSONS.search(README.read_text())[0] == lists(), "make readme brings it up to date"
    assert sorted(sum(QUESTIONS.values(), ())) == sorted(lessons()), "every lesson answers one question"


def test_the_site_has_the_same_lists():
    assert NAVIGATION.search(SITE.read_text())[0] == navigation(), "make readme brings it up to date"


def test_the_lists_begin_soon_and_leave_numbers_to_the_map():
    before, lists, _ = re.split("<!-- /?lessons.*-->", README.read_text())
    assert len(before.splitlines()) < 75, "two screens"
    assert not re.search(r"\d ×|%", re.sub(r"\]\(.*?\)", "", lists))


def test_the_map_is_what_the_notebooks_hold():
    assert MAP.read_text() == map_of_the_course(), "make readme brings it up to date"
    table = MAP.read_text().partition("## What is predicted")[2]
    predicted = [lesson for lesson in lessons().values() if lesson.main and lesson.main.full_size]
    assert "## Measured on" in MAP.read_text() or not list((ROOT / "effgpu" / "reference").glob("*.json"))
    assert len(predicted) >= 5 and all(f"]({lesson.name}.ipynb): " in table for lesson in predicted)


def test_picture_is_the_notebooks():
    png, lines = picture()
    assert PICTURE.read_bytes() == png, "make readme brings it up to date"
    assert SHOWN.search(README.read_text())[0] == lines


def test_numbers_on_published_runs_are_those_of_the_page():
    readme, page = README.read_text(), (ROOT / "docs" / "predict.md").read_text()
    numbers = r"(\d+)\s+published\s+steps\W+median\s+error\s+([\d.]+)\s?%\W+worst\s+([\d.]+)\s?%"
    assert re.search(numbers, readme).groups() == re.search(numbers, page).groups()
    assert ("no false" in readme) == ("There is none." in page)
    for group in ("transformers", "convolutional networks"):
        count, error = re.search(rf"\| {group} \| (\d+) \| ([\d.]+)% \|", page).groups()
        assert re.search(rf"{re.escape(error)}\s%\s+in\s+{count}\s+(published\s+runs\s+)?of\s+{group}", readme)


def test_readmes_prediction_is_what_its_script_gives(tmp_path):
    script = re.search(r"```python\n(import argparse.*?)```", (ROOT / "docs" / "scripts.md").read_text(), re.DOTALL)[1]
    (tmp_path / "train.py").write_text(script)
    shown = re.search(r"```\n\$ effgpu (predict .*?)\n(.*?)```", README.read_text(), re.DOTALL)
    command = [sys.executable, "-m", "effgpu", *shlex.split(shown[1])]
    told = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True).stdout.splitlines()
    lines = [line for line in shown[2].splitlines() if line.strip() != "..."]
    assert len(lines) > 5 and set(lines) <= {line.rstrip() for line in told}


@pytest.mark.skipif(torch.__version__ < "2.14", reason="README shows what a newer PyTorch gives")
def test_readmes_diagnosis_is_what_its_script_gives(tmp_path, monkeypatch):
    """With a loader that keeps up: another machine, or a busy one, has a slower one."""
    page = (ROOT / "docs" / "scripts.md").read_text()
    (tmp_path / "train.py").write_text(re.search(r"```python\n(import argparse.*?)```", page, re.DOTALL)[1])
    command, shown = re.search(r"```\n\$ effgpu doctor (.*?)\n(.*?)```", README.read_text(), re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()  # which may hold another test's train.py
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    gpu, program = find_gpu("T4"), read_program(command.partition(" -- ")[2])
    asked = Asked((gpu,), gpu.capability)
    predicted, seen = scripts.run(program, "effgpu.diagnosing.scripts:predicting", needs=5, asked=asked)
    found = str(rank(gpu, replace(seen, loading=NOTHING), predicted)).splitlines()
    lines = [line for line in shown.splitlines() if line.strip() != "..."]
    assert len(lines) > 5 and set(lines) <= {line.rstrip() for line in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
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
    unfenced = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", unfenced), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings]


def test_the_examples_run():
    """The examples of README and docs/measuring.md, with a model of one layer on the CPU for the reader's own."""
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
        dtypes.clear()
        exec(example.replace('"samples"', '"samples", seconds=0.01'), names)
        results.append(names["result"])
        assert set(dtypes) == {torch.float32, torch.bfloat16}, "bf16 was never on"
    compared, ablation = results
    assert [m.label for m in compared] == ["fp32", "bf16"]
    assert len(ablation) == 8 and ablation["bf16 + fused + checkpoint"].items == ablation["none"].items == 32


if __name__ == "__main__":
    png, lines = picture()
    PICTURE.write_bytes(png)
    MAP.write_text(map_of_the_course())
    SITE.write_text(NAVIGATION.sub(lambda _: navigation(), SITE.read_text()))
    README.write_text(SHOWN.sub(lambda _: lines, LESSONS.sub(lambda _: lists(), README.read_text())))
