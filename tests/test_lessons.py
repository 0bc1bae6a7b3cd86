"""The lessons hold to their template, carry their results, and install themselves. test_lesson_runs.py runs them."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Collection
from pathlib import Path

import nbformat
import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from effgpu.comparison import MIME_TYPE
from effgpu.course.lessons import is_missing
from effgpu.course.ranks import torchrun
from effgpu.measuring.device import describe

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEADINGS = ["## The technique", "## Your guess", "## What happened", "## In your own script", "## When to use it"]
HEADINGS += ["# Why, and the proof", "## What others measured", "## Try it"]
# Loading, copies and sending: a table predicts, from published rates.
BESIDE_THE_STEP = ("02_dataloader", "03_pinned_memory", "20_multi_gpu")
ONLY_ON_A_GPU = ("03_pinned_memory", "20_multi_gpu")  # compare nothing without one, or without two
CHECKED = "nbval-check-output"
NOT_SIMULATED = {"14_compile": "torch.compile does nothing there"}
SHORTER = {"25_doctor_0": {"16384": "128", "% 100 == 99": "% 2 == 1"}}  # scripts to copy that a CPU makes long
MEASURES = ("compare", "doctor", "bench", "plot", "trace")  # functions that no checked cell needs
AS_ON_A_GPU = """
from effgpu.course.sizes import GPU_SIZES
for sizes in GPU_SIZES.values():
    if "layers" in sizes:
        sizes["layers"] = 6
"""
LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
ADDRESS = re.search(r'^Repository = "(https://github.com/(.+))"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def text_of(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_lessons_in_reading_order():
    numbers = [re.fullmatch(r"(\d\d)_[a-z0-9_]+", path.stem)[1] for path in LESSONS]
    assert len(set(numbers)) == len(numbers) > 0


@each_lesson
def test_follows_the_template(path):
    notebook = read(path)
    title, setup, imports = notebook.cells[:3]
    assert title.source.startswith("# ") and "colab-badge.svg" in title.source
    assert setup.source == read(LESSONS[0]).cells[1].source
    assert 'print(f"measured on ' in imports.source
    lines = prose(notebook).splitlines()
    places = [lines.index(heading) for heading in HEADINGS]
    assert places == sorted(places)
    assert any(re.search(r"# new$", cell.source, re.MULTILINE) for cell in code(notebook))
    for word in ("**When not", "**Pitfalls.**", "**Sources.**"):
        assert word in prose(notebook)
    check_first_screen(path)


def check_first_screen(path: Path):
    first = read(path).cells[0].source
    for row in ("**Buys**", "**Costs**", "**Changes the result?**"):
        assert re.search(rf"^\| {re.escape(row)} \| \S.* \|$", first, re.MULTILINE), row
    assert re.search(r"\]\((\.\./|https://raw\.githubusercontent\.com/[^)]+/main/)images/", first)


@each_lesson
def test_the_reader_guesses_and_the_lesson_predicts_before_it_measures(path):
    sources = [cell.source for cell in code(read(path))]
    guess = next(i for i, source in enumerate(sources) if re.match(r"guess = .* # @param", source))
    measured = next(i for i, source in enumerate(sources) if f'name="{path.stem}"' in source)
    assert guess < measured < 10
    if path.stem in BESIDE_THE_STEP:
        assert any("effgpu.predict(" in source for source in sources[guess : measured + 1])
    else:
        assert "full_size=" in sources[measured]


@each_lesson
def test_every_exercise_has_a_solution_with_code(path):
    tasks = prose(read(path)).partition("\n## Try it\n")[2].partition("\n## ")[0]
    _, *numbered = re.split(r"^\*\*\d\.\*\*", tasks, flags=re.MULTILINE)
    assert len(numbered) >= 2
    for task in numbered:
        assert re.search(r"<details>\s*<summary>Solution</summary>.*```python\n.*</details>", task, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("tens", range(3))
def test_the_scripts_to_copy_run_as_they_stand(tens, tmp_path):
    chosen = [path for path in LESSONS if path.stem[0] == str(tens) and path.stem != "20_multi_gpu"]
    scripts = {f"{path.stem}_{number}": text for path in chosen for number, text in enumerate(scripts_to_copy(path))}
    for name, text in scripts.items():
        assert "effgpu" not in text
        for long, short in SHORTER.get(name, {}).items():
            assert long in text
            text = text.replace(long, short)
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "tests" / "run_cells.py"), *(f"{name}.py" for name in scripts)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for name in scripts:
        assert re.search(r"loss \d", (tmp_path / f"{name}.txt").read_text()), name


def scripts_to_copy(path: Path) -> list[str]:
    """The complete scripts of a lesson: its first code to copy, and what else prints the loss of each epoch."""
    section = prose(read(path)).partition("## In your own script")[2].partition("\n## ")[0]
    first, *others = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return [first, *(each for each in others if "epoch {epoch}: loss" in each)]


def run_script(folder: Path, launched: bool, **environment: str) -> str:
    """What train.py prints in a process of its own."""
    command = [sys.executable, *(LAUNCHER if launched else ()), "train.py"]
    options = {"cwd": folder, "env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run(command, **options, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_packed_script_keeps_texts_apart_and_without_its_triangle_an_encoders(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    script = {}
    exec(scripts_to_copy(ROOT / "notebooks" / "04_padding_and_packing.ipynb")[1], script)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = BertForMaskedLM(BertConfig(vocab_size=1000, **sizes))
    rows = script["first_fit"](script["texts"])[:3]
    tokens, _, positions, mask = script["pack"](rows)
    torch.manual_seed(0)
    for model, seen in ((script["model"], mask), (encoder, mask | mask.mT)):
        for weight in model.eval().parameters():
            if weight.dim() > 1:
                weight.data.normal_(0, 0.3)  # as made, the weights are too small for one token to matter to another
        with torch.no_grad():
            packed = model(tokens, position_ids=positions, attention_mask=seen).logits
            for row, logits in zip(rows, packed):
                alone = torch.cat([model(text[None]).logits[0] for text in row])
                torch.testing.assert_close(logits[: len(alone)], alone, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_the_script_for_several_gpus_trains_the_same_on_two_ranks(tmp_path, monkeypatch):
    """On two ranks one of them prints, and the weights that it saves are those of one process."""
    (tmp_path / "train.py").write_text(scripts_to_copy(ROOT / "notebooks" / "20_multi_gpu.ipynb")[0])
    monkeypatch.chdir(tmp_path)
    told = torchrun("train.py", cpu=True)
    assert re.findall(r"^epoch (\d): loss \d", told, re.MULTILINE) == ["0", "1"], "rank 0 alone prints"
    two_ranks = torch.load("model.pt")
    assert re.search(r"loss \d", run_script(tmp_path, launched=True, CUDA_VISIBLE_DEVICES=""))
    for name, weight in torch.load("model.pt").items():
        assert (two_ranks[name] - weight).norm() < 0.001 * weight.norm()


@each_lesson
def test_is_committed_executed_with_its_results(path):
    notebook = read(path)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "effgpu"}
    assert path.stat().st_size < 150_000, "smaller pictures, or fewer: see CONTRIBUTING.md"
    assert not is_missing(path, describe()), "the code has changed since: run it again with --inplace"
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    told = json.dumps([{k: v for k, v in output.items() if k != "data"} for output in outputs])
    assert not re.search(r"(/(home|root|tmp|work|Users)/)|Warning|\\r|\[W\d{4} ", told)
    data = [output.get("data", {}) for output in outputs]
    assert any("image/png" in each for each in data)
    assert not [each for each in data if each.get("text/plain", "").startswith("tensor(")], "numbers of a tensor"
    device = text_of(cells[1])
    assert device.startswith("measured on ")
    names = [each[MIME_TYPE]["name"] for each in data if MIME_TYPE in each]
    assert path.stem in names or ("(CPU, " in device and path.stem in ONLY_ON_A_GPU)
    checked = [cell for cell in cells if CHECKED in cell.metadata.get("tags", [])]
    assert len(checked) >= 2
    assert all(text_of(cell).strip() for cell in checked), "nbval passes a checked cell without a stored output"


@each_lesson
def test_pictures_exist_and_say_what_they_show_and_badge_and_setup_have_the_address(path):
    notebook = read(path)
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+/images/[^)]+)\)", prose(notebook))
    assert shown
    for alt, target in shown:
        assert len(alt) > 40 and (ROOT / "images" / target.rsplit("/", 1)[1]).is_file()
    badge = f"https://colab.research.google.com/github/{ADDRESS[2]}/blob/main/notebooks/{path.name}"
    assert f"]({badge})" in notebook.cells[0].source
    assert f"git+{ADDRESS[1]}\n" in notebook.cells[1].source + "\n"


@pytest.mark.slow
def test_lesson_alone_installs_effgpu_and_leaves_torch_alone(tmp_path):
    """As on Colab: torch and friends are there, effgpu is not, and the notebook is alone in an empty folder."""
    python = make_environment(tmp_path / "venv", tmp_path / "friends")
    repository = make_repository(tmp_path / "repository")
    before = list_distributions(python)
    assert "torch" in before and "effgpu" not in before
    alone = tmp_path / "content"
    alone.mkdir()
    notebook = read(LESSONS[0])
    notebook.cells = [*notebook.cells[:3], nbformat.v4.new_code_cell("print(effgpu.__file__, torch.__file__)")]
    nbformat.write(notebook, alone / "lesson.ipynb")
    environment = os.environ | {
        "PYTHONPATH": "",  # which could lead to this effgpu
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf",
        "GIT_CONFIG_VALUE_0": ADDRESS[1],
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads this the wrong way round: no isolation, so no network
    }
    command = [python, "-c", "from nbclient.cli import main; main()", "lesson.ipynb", "--inplace"]
    subprocess.run(command, cwd=alone, env=environment, check=True, timeout=300)
    effgpu_file, torch_file = text_of(read(alone / "lesson.ipynb").cells[-1]).split()
    assert effgpu_file.startswith(str(tmp_path / "venv")), "effgpu was to be installed into the new environment"
    assert torch_file.startswith(str(tmp_path / "friends")), "torch was to be left alone"
    after = list_distributions(python)
    assert after.pop("effgpu") and after == before


def test_address_points_everything_at_the_published_copy(tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "*.egg-info"))
    subprocess.run(["make", "address", "REPO=some-one/course.x"], cwd=copy, check=True, capture_output=True)
    lessons = sorted((copy / "notebooks").glob("*.ipynb"))
    for path in [
        copy / "README.md",
        copy / "pyproject.toml",
        copy / "mkdocs.yml",
        *lessons,
        *(copy / "docs").glob("*.md"),
    ]:
        assert ADDRESS[2] not in path.read_text() and ("docs" in path.parts or "some-one/course.x" in path.read_text())
    for path in lessons:
        check_first_screen(path)
    pictures = "](https://raw.githubusercontent.com/some-one/course.x/main/images/"
    assert pictures in prose(read(lessons[0]))
    refused = subprocess.run(["make", "address", "REPO=nonsense"], cwd=copy, capture_output=True, text=True)
    assert refused.returncode and "usage" in refused.stdout


def make_environment(folder: Path, friends: Path) -> Path:
    """The python of a new virtual environment that has all of this one's packages but effgpu."""
    venv.create(folder, with_pip=True)
    friends.mkdir()
    packages = next(path for path in map(Path, sys.path) if (path / "torch" / "__init__.py").exists())
    for entry in packages.iterdir():
        if "effgpu" not in entry.name and not entry.name.startswith(("pip", "~")):
            (friends / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"  # whose own setuptools, up to Python 3.11, is too old to build anything here
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "setuptools"], check=True)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "friends.pth").write_text(f"{friends}\n")
    return python


def make_repository(folder: Path) -> Path:
    """A git repository of the package as it stands in the working tree."""
    shutil.copytree(ROOT / "effgpu", folder / "effgpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost", "-C", str(folder)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "as it stands"]):
        subprocess.run([*git, *arguments], check=True)
    return folder


def list_distributions(python: Path) -> dict[str, str]:
    """Name and version of everything that can be imported from."""
    code = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    listed = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd=python.parent)
    return json.loads(listed.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.skipif(not (torch.version.cuda or "").startswith("13"), reason="not a PyTorch for CUDA 13")
@pytest.mark.parametrize("tens", range(3))
def test_the_checked_cells_print_the_same_on_a_gpu(tens, tmp_path):
    """On a simulated GPU with a GPU's number of layers, heads, formats and kernels, and a width that a CPU has not."""
    chosen = [path for path in LESSONS if path.stem[0] == str(tens) and path.stem not in NOT_SIMULATED]
    expected = {}
    for path in chosen:
        notebook = read(path)
        notebook.cells = [nbformat.v4.new_code_cell(AS_ON_A_GPU), *checked_with_what_they_need(notebook)]
        expected[path.name] = {cell.id: text_of(cell) for cell in notebook.cells if is_checked(cell)}
        nbformat.write(notebook, tmp_path / path.name)
    gpu = [sys.executable, str(ROOT / "tests" / "simulated_gpu"), "H100"]
    command = [*gpu, sys.executable, str(ROOT / "tests" / "run_cells.py"), *expected]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, texts in expected.items():
        found = read(tmp_path / name)
        assert any("measured on Simulated H100" in text_of(cell) for cell in found.cells), name
        assert {cell.id: text_of(cell) for cell in found.cells if is_checked(cell)} == texts, name


def is_checked(cell) -> bool:
    return CHECKED in cell.metadata.get("tags", [])


def checked_with_what_they_need(notebook) -> list:
    """The checked cells, and of the others those whose names they use, without the statements that measure."""
    imports, *cells = [cell for cell in code(notebook) if "importlib.util" not in cell.source]
    measured = set()
    for cell in cells:
        if not is_checked(cell) and not is_magic(cell):
            kept = []
            for statement in ast.parse(cell.source).body:
                if measures(statement) or used(statement) & measured:
                    measured |= defined(statement)
                else:
                    kept.append(ast.unparse(statement))
            cell.source = "\n".join(kept)
    needed, kept = set(), []
    for cell in reversed(cells):
        statements = [] if is_magic(cell) else ast.parse(cell.source).body
        if is_magic(cell) or is_checked(cell) or any(defined(each) & needed for each in statements):
            for statement in reversed(statements):
                needed = needed - defined(statement) | used(statement)
            kept.append(cell)
    return [imports, *reversed(kept)]


def is_magic(cell) -> bool:
    return cell.source.startswith("%%")


def measures(statement: ast.stmt, names: Collection[str] = MEASURES) -> bool:
    """Whether it calls one of these functions; a function that does so is only defined."""
    if isinstance(statement, ast.FunctionDef):
        return False
    calls = [each.func for each in ast.walk(statement) if isinstance(each, ast.Call)]
    return any(isinstance(called, ast.Attribute) and called.attr in names for called in calls)


def used(statement: ast.stmt) -> set[str]:
    """The names that it reads, without those that a function or a loop defines for itself."""
    named = [each for each in ast.walk(statement) if isinstance(each, ast.Name)]
    read = {each.id for each in named if isinstance(each.ctx, ast.Load)}
    own = {each.id for each in named if isinstance(each.ctx, ast.Store)}
    own |= {each.arg for each in ast.walk(statement) if isinstance(each, ast.arg)}
    return read - own if isinstance(statement, (ast.FunctionDef, ast.For)) else read


def defined(tree: ast.AST) -> set[str]:
    """The names that it defines in the notebook: not those inside of a function or class."""
    if isinstance(tree, (ast.FunctionDef, ast.ClassDef)):
        return {tree.name}
    if isinstance(tree, ast.Name):
        return {tree.id} if isinstance(tree.ctx, ast.Store) else set()
    return set().union(*map(defined, ast.iter_child_nodes(tree)))


OUT_OF_MEMORY_IN_A_BACKWARD_PASS = """
import torch
from torch.utils.data import DataLoader

calls, backward, iterate = [], torch.Tensor.backward, DataLoader.__iter__

def failing(self):
    backward(self)
    calls.append(1)
    if len(calls) == 41:  # 4 times 10 steps of the first batch size went well
        raise torch.OutOfMemoryError("CUDA out of memory")

def first(self):
    if len(calls) == 41:
        left = [parameter.grad for parameter in model.parameters()]
        print("no gradient is left" if left == [None] * len(left) else "gradients are left")
    return iterate(self)

torch.Tensor.backward, DataLoader.__iter__ = failing, first
"""


def test_a_search_for_the_batch_leaves_no_gradient_of_a_failed_backward_pass(tmp_path):
    script = scripts_to_copy(ROOT / "notebooks" / "05_batch_size.ipynb")[0]
    (tmp_path / "train.py").write_text(OUT_OF_MEMORY_IN_A_BACKWARD_PASS + script)
    told = run_script(tmp_path, launched=False, CUDA_VISIBLE_DEVICES="")
    assert "no gradient is left" in told and "batches of 8:" in told
