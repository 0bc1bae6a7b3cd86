"""Tests of the package as a whole: imports run one way, importing it costs little, and what is declared holds."""

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
ORDER = [
    *("units", "device", "variants", "timing", "memory", "power", "flops", "measurement", "comparison", "ablation"),
    *("reference", "figures", "corpus", "course", "report", "__main__"),
]
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem != "__init__")
with_each_module = pytest.mark.parametrize("module", MODULES)


def imported(module):
    """The full names of all that a module imports, also in its functions."""
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@with_each_module
def test_imports_run_one_way(module):
    assert module in ORDER, "a new module takes its place in the order"
    above = ORDER[: ORDER.index(module)]
    for name in imported(module):
        package, *rest = name.split(".")
        if package == "effgpu":
            assert rest and rest[0] in above, f"{module} imports {name}, which is not a module above it"


def test_contributing_tells_the_order_of_imports():
    named = re.search(r"in this order: ([\w,\s]+)\.", (PACKAGE.parent / "CONTRIBUTING.md").read_text())[1]
    assert re.findall(r"\w+", named) == ORDER[:-1]


def test_only_figures_imports_matplotlib():
    importers = {module for module in MODULES if any(name.split(".")[0] == "matplotlib" for name in imported(module))}
    assert importers == {"figures"}


@pytest.mark.parametrize("name", effgpu.__all__)
def test_every_public_name_is_there_and_explained(name):
    found = getattr(effgpu, name)
    assert name in dir(effgpu)
    if callable(found):
        assert inspect.getdoc(found) and not inspect.getdoc(found).startswith(f"{name}("), "no docstring of its own"
        assert found.__module__.startswith("effgpu.")


def test_no_public_name_shadows_a_module():
    assert not set(effgpu.__all__) & set(MODULES)
    for module in MODULES:
        public = [name for name in vars(importlib.import_module(f"effgpu.{module}")) if not name.startswith("_")]
        functions = {name for name in public if inspect.isfunction(getattr(sys.modules[f"effgpu.{module}"], name))}
        assert not functions & set(MODULES), f"{module} has a function with a module's name"


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"__main__", "variants"}))
def test_modules_are_attributes_of_the_package(module):
    """As the lessons use them: `effgpu.corpus.load_text`, with nothing imported but effgpu."""
    assert module in effgpu._ROOMS and inspect.ismodule(effgpu.__getattr__(module))


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


def test_the_data_of_the_package_is_shipped(project):
    shipped = project["tool"]["setuptools"]["package-data"]["effgpu"]
    tracked = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    left_out = [path.name for path in tracked if not any(path.relative_to(PACKAGE).match(rule) for rule in shipped)]
    assert not left_out
