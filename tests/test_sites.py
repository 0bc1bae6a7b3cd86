"""Tests of the search for the reader's line: whose a file is, and which line of a stack is named."""

import inspect
import linecache
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import effgpu
from effgpu.attaching.sites import LIBRARY, OTHER, READER, TORCH, Site, asked_by_torch, find_site, whose

PACKAGE, SITE = Path(effgpu.__file__).parent, Path(torch.__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "owner"),
    [
        (f"{SITE}/torch/nn/functional.py", TORCH),
        (f"{SITE}/torchmetrics/metric.py", LIBRARY),  # no part of PyTorch
        (f"{SITE}/numpy/_core/numeric.py", LIBRARY),
        ("/usr/lib/python3/dist-packages/numpy/matlib.py", LIBRARY),
        (f"{PACKAGE}/units.py", OTHER),
        (f"{PACKAGE}/course/workloads.py", READER),  # the course stands for a reader
        (f"{PACKAGE}_scripts/train.py", READER),  # no part of effgpu
        ("/home/a/course/venv/lib/python3.11/site-packages/transformers/trainer.py", LIBRARY),
        ("/home/a/course/train.py", READER),
        (sysconfig.get_path("stdlib") + "/runpy.py", OTHER),
        ("<frozen runpy>", OTHER),
        ("numpy/random/mtrand.pyx", OTHER),  # as Cython names what it has compiled
        ("<stdin>", READER),
        ("/tmp/ipykernel_7/2972.py", READER),
    ],
)
def test_whose_a_file_is(file, owner):
    assert whose(file) is owner


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is installed below a folder called course, and calls what it is given."""
    folder = tmp_path / "course" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "lib_that_calls.py").write_text("def call(function):\n    return function()\n")
    monkeypatch.syspath_prepend(str(folder))
    import lib_that_calls

    return lib_that_calls


def test_a_line_is_the_readers_and_says_in_which_library_it_was(library):
    find = eval("lambda: find_site()", {"find_site": find_site})
    find.__code__ = find.__code__.replace(co_filename=library.__file__)
    line = find_site().line + 1
    site = library.call(find)
    assert (site.file, site.line) == (__file__, line)
    assert str(site) == f"test_sites.py:{line} (in lib_that_calls.py:1): site = library.call(find)"


def test_the_outermost_line_is_that_of_the_code_where_the_search_ends():
    def step():
        def inner():
            return find_site(outermost=True, until=(step.__code__,))

        return inner()

    assert step().line == step.__code__.co_firstlineno + 4


def test_without_a_line_of_the_readers_the_librarys_stands_for_it(library):
    code = compile("found = find_site(until=until)", library.__file__, "exec")
    names = {"find_site": find_site, "until": (code,)}
    exec(code, names)
    assert str(names["found"]) == "lib_that_calls.py:1: def call(function):"


def test_pytorchs_own_reads_are_told_from_those_that_it_is_asked_for():
    parameter, asked = torch.nn.Parameter(torch.ones(1)), []

    class Asks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                asked.append(asked_by_torch(("/utils/clip_grad.py",)))
            return func(*args, **kwargs or {})

    see = inspect.unwrap(Asks.__torch_dispatch__)
    see.__code__ = see.__code__.replace(co_filename=f"{PACKAGE}/diagnosing/watch.py")  # a mode of effgpu's
    parameter.grad = torch.ones(1)
    with Asks():
        torch.nn.utils.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
        parameter.item()
    assert asked == [True, False]


def test_a_cell_is_named_as_in_ipythons_tracebacks():
    cells = "from effgpu.attaching.sites import find_site", "2 + 2\n\nprint(find_site())"
    script = f"""from IPython.core.interactiveshell import InteractiveShell
for cell in {cells}: InteractiveShell.instance().run_cell(cell, store_history=True)"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "In[2]:3: print(find_site())\n", done.stderr
    assert Site("/tmp/ipython-input-2972.py", 3).where == "cell:3", "of a kernel that is gone"
    assert Site(f"{os.sep}x{os.sep}train.py", 3).where == "train.py:3"


def test_a_line_is_shown_as_the_file_has_it_now(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    linecache.clearcache()  # which may hold another test's train.py
    for code in ("first = 1\n", "second = 22\n"):
        Path("train.py").write_text(code)
        assert str(Site("train.py", 1)) == f"train.py:1: {code.strip()}"
