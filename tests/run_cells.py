"""Run the cells of notebooks in place, and scripts, each in a fork of this process: imports are made once.

Usage: python tests/run_cells.py NOTEBOOK.ipynb|SCRIPT.py ...

Cells store what they print; what a script prints is written beside it, to SCRIPT.txt. The first one that fails is
shown, and ends it with exit code 1.
"""

import contextlib
import os
import runpy
import sys
from pathlib import Path

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import nbformat
import torchvision  # noqa: F401
import transformers  # noqa: F401
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import effgpu  # noqa: F401
from effgpu.course import hub, workloads  # noqa: F401


def run_script(path: str) -> None:
    """Run one script as `python SCRIPT.py` does. Raises what it raises."""
    sys.argv = [path]
    with open(Path(path).with_suffix(".txt"), "w") as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")


def run(path: str) -> None:
    """Run one notebook and store its outputs. Raises what its first failing cell raises."""
    notebook, shell = nbformat.read(path, as_version=4), InteractiveShell.instance()
    for cell in notebook.cells:
        with capture_output() as captured:
            ran = shell.run_cell(cell.source)
        if not ran.success:
            print(f"{path}: {cell.source}\n{captured.stdout}{captured.stderr}", file=sys.stderr)
            ran.raise_error()
        cell.outputs = [nbformat.v4.new_output("stream", name="stdout", text=captured.stdout)]
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in map(os.path.abspath, sys.argv[1:]):  # a lesson may go to another folder
        if not (child := os.fork()):
            (run if path.endswith(".ipynb") else run_script)(path)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
