"""Tests of the package as a whole: rooms import one way, importing it costs little, and what is declared holds."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import effgpu

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "effgpu"
# Each room may import those above it, and itself.
ROOMS = ["units", "measuring", "predicting", "comparison", "benching", "ablation", "results", "figures", "course"]
ROOMS.append("__main__")
PATHS = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__init__"
}
MODULES = list(PATHS)
with_each_module = pytest.mark.parametrize("module", MODULES)


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


@with_each_module
def test_rooms_import_one_way(module):
    room = module.split(".")[0]
    assert room in ROOMS, "a new room takes its place in the order"
    for name in imported(module):
        if name.split(".")[0] == "effgpu":
            other = name.split(".")[1]
            assert other in ROOMS[: ROOMS.index(room) + 1], f"{module} imports {name}, which is in no room above it"


def test_only_figures_imports_matplotlib():
    importers = {module for module in MODULES if any(name.split(".")[0] == "matplotlib" for name in imported(module))}
    assert importers == {"figures"}


def is_written(name):
    return effgpu._MODULES[name] in MODULES


@pytest.mark.parametrize("name", [name for name in effgpu.__all__ if is_written(name)])
def test_every_public_name_is_there_and_explained(name):
    found = getattr(effgpu, name)
    assert name in dir(effgpu)
    if callable(found):
        assert inspect.getdoc(found) and not inspect.getdoc(found).startswith(f"{name}("), "no docstring of its own"
        assert found.__module__.startswith("effgpu.")


def test_no_public_name_shadows_a_module():
    assert not set(effgpu.__all__) & set(MODULES)
    for module in MODULES:
        found = importlib.import_module(f"effgpu.{module}")
        functions = {name for name, value in vars(found).items() if inspect.isfunction(value)}
        assert not functions & (set(MODULES) - {module}), f"{module} has a function with another module's name"


def test_editors_see_exactly_the_public_names():
    """The imports for type checkers name what is loaded on first use, each from its own module."""
    (block,) = (
        node
        for node in parsed(PACKAGE / "__init__.py").body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    assert all(isinstance(node, ast.ImportFrom) and node.level == 0 for node in block.body)
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == {name: f"effgpu.{module}" for name, module in effgpu._MODULES.items()}


@pytest.mark.parametrize("name", ["compare", "GiB", "plot"])
def test_a_public_name_can_be_imported_as_from_any_package(name):
    namespace = {}
    exec(f"from effgpu import {name}", namespace)
    assert namespace[name] is getattr(effgpu, name)


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="module 'effgpu' has no attribute 'speed_up'"):
        effgpu.speed_up  # noqa: B018


def test_importing_the_package_loads_nothing_heavy():
    heavy = ["torch", "matplotlib", "transformers", "datasets", "numpy", "tqdm", "pynvml"]
    code = f"import sys, effgpu; print([name for name in {heavy} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert (told.stdout, told.stderr) == ("[]\n", "")


# What the project declares


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def required(lines):
    """The names of the distributions that requirement lines ask for."""
    return {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in lines or ()}


def test_what_the_package_imports_is_declared_or_comes_with_what_is(project):
    lab = project["project"]["optional-dependencies"]["lab"]
    declared = required([*project["project"]["dependencies"], *lab])
    declared |= {name for one in declared for name in required(metadata.requires(one))}
    used = {name.split(".")[0] for module in MODULES for name in imported(module)}
    owners = metadata.packages_distributions()
    for name in used - set(sys.stdlib_module_names) - {"effgpu"}:
        assert required(owners[name]) & declared, f"{name} is imported, but nothing declared brings it"


def test_the_conda_environment_installs_what_pip_declares(project):
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == project["project"]["name"]
    assert environment["channels"] == ["conda-forge"]
    packages = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    names = {re.match(r"[\w-]+", entry)[0]: entry for entry in packages}
    assert set(names) == {"python", "pip"}
    floor = project["project"]["requires-python"]
    assert re.sub(r"^python\s*", "", names["python"]).replace(" ", "") == floor == f">={floor.removeprefix('>=')}"
    (by_pip,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert by_pip == ["-e .[dev]"]
    assert "dev" in project["project"]["optional-dependencies"]


def is_shipped(path, setuptools):
    """Whether a wheel has a file of the package, by what `pyproject.toml` tells setuptools."""
    parent = path.parent if path.parent.joinpath("__init__.py").exists() else PACKAGE
    package = ".".join(["effgpu", *parent.relative_to(PACKAGE).parts])
    if package not in setuptools["packages"]:
        return False
    rules = setuptools["package-data"].get(package, [])
    return path.suffix == ".py" or any(path.relative_to(parent).match(rule) for rule in rules)


def test_the_package_is_shipped_whole_with_its_data(project):
    setuptools = project["tool"]["setuptools"]
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert PACKAGE / "course" / "report.css" in files
    assert not [path.name for path in files if not is_shipped(path, setuptools)]
    assert is_shipped(PACKAGE / "reference" / "nvidia-h200.json", setuptools)
    assert not is_shipped(PACKAGE / "reference" / "notes.txt", setuptools)
