"""Run the cells of notebooks in place, each notebook in a fork of this process: imports are made once.

Usage: python tests/run_cells.py NOTEBOOK.ipynb ...

Cells store what they print. The first one that fails is shown, and ends it with exit code 1.
"""

import os
import sys

import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import nbformat
import torchvision  # noqa: F401
import transformers  # noqa: F401
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import effgpu  # noqa: F401
from effgpu.course import hub, workloads  # noqa: F401


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
            run(path)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)
