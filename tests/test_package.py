"""Tests of the package as a whole: rooms import one way, importing it costs little, and what is declared holds."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from test_lessons import make_environment

import effgpu

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "effgpu"
# Each room may import those above it, and itself.
ROOMS = ["errors", "units", "storing", "measuring", "attaching", "predicting", "diagnosing"]
ROOMS += ["verdicts", "comparison", "benching", "ablation", "results", "figures", "course", "cli", "__main__"]
PATHS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__init__"
}
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def required(lines):
    """The names of the distributions that requirement lines ask for."""
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines or ()}


EXTRAS = required(PROJECT["optional-dependencies"]["plot"] + PROJECT["optional-dependencies"]["course"]) - {"effgpu"}


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(module):
    """The full names of all that a module imports, also in its functions."""
    for node in ast.walk(parsed(PATHS[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("module", PATHS)
def test_rooms_import_one_way(module):
    room = module.split(".")[0]
    assert room in ROOMS, "a new room takes its place in the order"
    for package, _, other in (name.partition(".") for name in imported(module)):
        above = package != "effgpu" or other.split(".")[0] in ["__version__", *ROOMS[: ROOMS.index(room) + 1]]
        assert above, f"{module} imports {other}, which is in no room above it"


def test_the_map_lists_the_rooms_in_their_order():
    firsts = re.findall(r"^\| (`\w+(?:\.py|/)`(?:, `\w+(?:\.py|/)`)*) \|", MAP, re.MULTILINE)
    assert re.findall(r"`(\w+)", " ".join(firsts)) == ROOMS


@pytest.mark.parametrize("module", PATHS)
def test_the_map_says_where_each_module_comes_in(module):
    """By its path, or by its name alone where no other module has it."""
    place, alone = f"{module.replace('.', '/')}.py", f"{module.split('.')[-1]}.py"
    shared = sum(other.split(".")[-1] == module.split(".")[-1] for other in PATHS) > 1
    told = re.findall(r"[\w/]+\.py", MAP)
    assert place in told or (alone in told and not shared), "a new module takes its place in docs/architecture.md"


def test_what_the_map_names_is_there():
    find = lambda path: next((folder / path for folder in (PACKAGE, ROOT) if (folder / path).exists()), None)
    assert [path for path in re.findall(r"[\w-]+/[\w/-]+\.\w+", MAP) if not find(path)] == []
    for names, place in re.findall(r"((?:`\w+`(?:, | and )?)+) in `([\w/]+\.py)`", MAP):
        source = find(place).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^ *(?:def |class )?{name}\b", source, re.MULTILINE), f"{name} is not in {place}"


def test_only_figures_imports_matplotlib():
    importers = {
        module.split(".")[0] for module in PATHS if any(name.split(".")[0] == "matplotlib" for name in imported(module))
    }
    assert {module.split(".")[0] for module in importers} == {"figures"}


def test_every_public_name_is_there_and_explained_and_no_other():
    for name in effgpu.__all__:
        found = getattr(effgpu, name)
        assert name in dir(effgpu)
        if callable(found):
            assert inspect.getdoc(found) and not inspect.getdoc(found).startswith(f"{name}("), "no docstring of its own"
            assert found.__module__.startswith("effgpu.")
    with pytest.raises(AttributeError, match="module 'effgpu' has no attribute 'speed_up'"):
        effgpu.speed_up  # noqa: B018


def test_editors_see_exactly_the_public_names():
    """The imports for type checkers name what is loaded on first use, each from its own module."""
    (block,) = (node for node in parsed(PACKAGE / "__init__.py").body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"effgpu.{module}" for name, module in effgpu._MODULES.items()}


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "matplotlib", "transformers", "datasets", "numpy", "tqdm", "pynvml"]
    code = f"import sys, effgpu; print([name for name in {heavy} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (told.stdout, told.stderr) == ("[]\n", "")


def test_what_the_package_imports_is_declared_or_comes_with_what_is():
    declared = required(PROJECT["dependencies"]) | EXTRAS
    declared |= {name for one in declared for name in required(metadata.requires(one))}
    used = {name.split(".")[0] for module in PATHS for name in imported(module)}
    owners = metadata.packages_distributions()
    for name in used - set(sys.stdlib_module_names) - {"effgpu"}:
        assert required(owners[name]) & declared, f"{name} is imported, but nothing declared brings it"


def test_the_package_measures_and_predicts_without_its_extras():
    absent = EXTRAS - {"ipykernel"} | {"numpy"}  # an entry for ipykernel says that this is a notebook
    code = f"""
import sys
sys.modules.update(dict.fromkeys({absent}))
import effgpu
for name in effgpu.__all__:
    try:
        getattr(effgpu, name)
    except ModuleNotFoundError as error:
        print(error)
import torch
def variant():
    model = torch.nn.Linear(8, 8)
    return lambda: model(torch.ones(4, 8)).sum().backward()
effgpu.tick(items=1)
assert effgpu.predict(variant, "T4").verdict() == "fits"
assert [one.label for one in effgpu.compare({{"a": variant, "b": variant}})] == ["a", "b"]
"""
    environment = os.environ | {"EFFGPU_SECONDS": "0.1"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        "effgpu.TickCallback needs transformers: pip install transformers",
        "effgpu.plot needs matplotlib: pip install matplotlib",
    ]


def test_the_changelog_begins_with_this_version():
    versions = re.findall(
        r"^## \[(.+)\] - (?:Unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert versions[0] == effgpu.__version__ and len(set(versions)) == len(versions) >= 4


def test_the_conda_environment_installs_what_pip_declares():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    python, *pip = environment["dependencies"]
    assert python.replace(" ", "") == f"python{PROJECT['requires-python']}" and pip == ["pip", {"pip": ["-e .[dev]"]}]
    assert environment["channels"] == ["conda-forge"]


def test_a_wheel_has_the_whole_package_with_its_data(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "effgpu", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    for later in ("reference/nvidia-h200.json", "a_new_room/__init__.py", "a_new_room/gpus.csv"):
        path = tmp_path / "effgpu" / later
        path.parent.mkdir(exist_ok=True)
        path.touch()
    expected = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("effgpu/**/*") if path.is_file()}
    assert "effgpu/course/report.css" in expected
    (tmp_path / "effgpu" / "reference" / "notes.txt").touch()
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "."]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("effgpu/")}
    assert shipped == expected


TRAINING = """
import torch
model = torch.nn.Linear(512, 512).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    model(torch.ones(8, 512).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_what_is_built_installs_and_predicts_where_there_is_only_pytorch(tmp_path):
    """Built as `python -m build` does: the sources into an archive, and the wheel from that."""
    copy, dist = tmp_path / "copy", tmp_path / "dist"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "site", "*.egg-info", "__pycache__"))
    archive = f"from setuptools import build_meta; print(build_meta.build_sdist({str(dist)!r}))"
    built = subprocess.run([sys.executable, "-c", archive], cwd=copy, check=True, capture_output=True, text=True)
    archive = dist / built.stdout.split()[-1]
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", dist, archive]
    subprocess.run(wheel, check=True, capture_output=True)
    (wheel,) = dist.glob("*.whl")
    shipped = zipfile.ZipFile(wheel).namelist()
    references = [path.relative_to(ROOT).as_posix() for path in (PACKAGE / "reference").glob("*.json")]
    assert {"effgpu/predicting/gpus.csv", *references} <= set(shipped) and references
    assert {name.split("/")[0] for name in shipped} == {"effgpu", f"effgpu-{effgpu.__version__}.dist-info"}
    with tarfile.open(archive) as packed:
        shipped = {name.split("/")[1] for name in packed.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "effgpu"} <= shipped and not {"tests", "notebooks"} & shipped

    python = make_environment(tmp_path / "venv", tmp_path / "friends")
    for name in EXTRAS:
        (tmp_path / "friends" / name.replace("-", "_")).unlink(missing_ok=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    (tmp_path / "train.py").write_text(TRAINING)
    alone = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": ""}, "capture_output": True, "text": True}
    told = lambda *words: subprocess.run([python.parent / "effgpu", *words], check=True, **alone).stdout
    assert told("--version") == f"effgpu {effgpu.__version__}\n"
    assert "effgpu predict --gpu T4" in told()
    predicted = told("predict", "--gpu", "T4", "--", "python", "train.py")
    assert re.search(r"optimizer state +2\.00 MiB", predicted) and re.search(r"^T4 .* fits ", predicted, re.MULTILINE)
