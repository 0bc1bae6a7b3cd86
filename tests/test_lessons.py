"""The lessons hold to their template, and run: without a network, twice in one kernel, and alone in an empty folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import nbformat
import pytest

from effgpu import course, timing
from effgpu.comparison import MIME_TYPE

ROOT = Path(__file__).parent.parent
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))
HEADINGS = ["## The idea", "## What changes", "## Same result", "## Prediction", "## Measure", "## When to use it"]
CHECKED = "nbval-check-output"
ADDRESS = re.search(r'^Repository = "(https://github.com/(.+))"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)

each_lesson = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def read(path: Path):
    return nbformat.read(path, as_version=4)


def code(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def outputs(notebook) -> list:
    return [output for cell in code(notebook) for output in cell.outputs]


def text_of(cell) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_lessons_in_reading_order():
    assert len(LESSONS) >= 3
    assert all(re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem) for path in LESSONS)


@each_lesson
def test_follows_the_template(path):
    notebook = read(path)
    title, setup, imports = notebook.cells[:3]
    assert title.cell_type == "markdown" and title.source.startswith("# ")
    assert "**The claim.**" in title.source and "**What it trades.**" in title.source
    assert setup.source == read(LESSONS[0]).cells[1].source
    assert "by_tier" in imports.source
    lines = prose(notebook).splitlines()
    places = [lines.index(heading) for heading in HEADINGS]
    assert places == sorted(places)
    assert len(notebook.cells) <= 18
    assert any(re.search(r"# new$", cell.source, re.MULTILINE) for cell in code(notebook))
    for word in ("**When not", "**Pitfalls.**", "**Exercises.**", "**Sources.**"):
        assert word in notebook.cells[-1].source


@each_lesson
def test_is_committed_executed(path):
    notebook = read(path)
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs(notebook))
    told = json.dumps([{k: v for k, v in output.items() if k != "data"} for output in outputs(notebook)])
    assert not re.search(r"(/(home|root|tmp|work|Users)/)|Warning|\\r", told)
    assert text_of(code(notebook)[1]).startswith("measured on ")
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert all(set(cell.metadata) <= {"tags"} for cell in notebook.cells)


@each_lesson
def test_checked_cells_have_something_to_check(path):
    checked = [cell for cell in code(read(path)) if CHECKED in cell.metadata.get("tags", [])]
    assert len(checked) >= 2
    assert all(text_of(cell).strip() for cell in checked), "nbval passes a checked cell without a stored output"
    cells = read(path).cells
    for heading in ("## Same result", "## Prediction"):
        (at,) = [i for i, c in enumerate(cells) if c.cell_type == "markdown" and heading in c.source.splitlines()]
        end = next((i for i in range(at + 1, len(cells)) if cells[i].source.startswith("## ")), len(cells))
        assert any(CHECKED in c.metadata.get("tags", []) for c in cells[at:end]), heading


@each_lesson
def test_carries_its_results(path):
    data = [output.data[MIME_TYPE] for output in outputs(read(path)) if MIME_TYPE in output.get("data", {})]
    assert path.stem in [stored["name"] for stored in data]


@each_lesson
def test_pictures_exist_and_say_what_they_show(path):
    shown = re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", prose(read(path)))
    drawings = [(alt, target) for alt, target in shown if "/images/" in target]
    assert drawings
    for alt, target in drawings:
        assert len(alt) > 40
        assert (ROOT / "images" / target.rsplit("/", 1)[1]).is_file()


@each_lesson
def test_badge_and_setup_have_the_address(path):
    notebook = read(path)
    badge = f"https://colab.research.google.com/github/{ADDRESS[2]}/blob/main/notebooks/{path.name}"
    assert f"]({badge})" in notebook.cells[0].source
    assert f"git+{ADDRESS[1]}\n" in notebook.cells[1].source + "\n"


@each_lesson
def test_runs_twice_in_one_kernel_without_network(path, tmp_path, monkeypatch):
    """Every cell once, then every cell again, with sockets that refuse; what is checked comes out the same."""
    notebook = read(path)
    first, count = notebook.cells, len(notebook.cells)
    again = [nbformat.from_dict({**cell, "id": f"{cell['id']}-again"}) for cell in first]
    notebook.cells = first + again
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    nbformat.write(notebook, tmp_path / path.name)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    failure, ran = run_lesson(tmp_path / path.name, monkeypatch)
    assert not failure
    for before, after in zip(ran.cells[:count], ran.cells[count:]):
        if CHECKED in before.metadata.get("tags", []):
            assert text_of(before) == text_of(after)


def test_the_network_is_really_cut_off(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    asked = "import urllib.request; urllib.request.urlopen('http://192.0.2.1')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, timeout=60)
    assert "no network in this test" in done.stderr


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
    for path in [copy / "README.md", copy / "pyproject.toml", *sorted((copy / "notebooks").glob("*.ipynb"))]:
        text = path.read_text()
        assert ADDRESS[2] not in text and "some-one/course.x" in text, path.name
    lesson = prose(read(copy / "notebooks" / LESSONS[0].name))
    assert "](https://raw.githubusercontent.com/some-one/course.x/main/images/" in lesson
    refused = subprocess.run(["make", "address", "REPO=nonsense"], cwd=copy, capture_output=True, text=True)
    assert refused.returncode and "usage" in refused.stdout


NO_NETWORK = """
import socket
real = socket.socket.connect
def connect(self, address):
    if self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"):
        return real(self, address)
    raise ConnectionRefusedError(f"no network in this test, asked for {address}")
socket.socket.connect = connect
"""


def run_lesson(path: Path, monkeypatch):
    """Why a lesson failed, or None, and the lesson as executed, with measurements as short as they can be."""
    monkeypatch.setenv(timing.CAP, "0.1")
    (path.parent / "out").mkdir()
    outcome = course.run_lesson(path, path.parent / "out")
    return outcome.failure, read(path.parent / "out" / path.name)


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
