"""Tiny lessons: notebooks of a few cells, for tests that run some."""

from pathlib import Path

import nbformat

from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.measuring.device import Device
from effgpu.measuring.measurement import Measurement

CALCULATOR = Device("Pocket calculator", "cpu", 2**30, 1, versions={"torch": "2.8.0"})
FAILING = "\n# a comment\nraise ArithmeticError('no such number\\nat all')"


def write_lesson(folder: Path, name: str, *sources: str) -> Path:
    """A notebook with a heading and these code cells, as JupyterLab would leave it: executed once, long ago."""
    cells = [nbformat.v4.new_markdown_cell(f"# The {name} lesson\n![a drawing](../images/a.svg)")]
    for number, source in enumerate(sources):
        stale = nbformat.v4.new_output("stream", text="stale")
        timing = {"execution": {"iopub.execute_input": "2020-01-01T00:00:00Z"}}
        cells.append(nbformat.v4.new_code_cell(source, outputs=[stale], execution_count=number + 7, metadata=timing))
    metadata = {"language_info": {"name": "python", "version": "3.1"}, "kernelspec": {"name": "x", "display_name": "X"}}
    metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


def compares(name: str, seconds: float = 0.1) -> str:
    """The source of a cell that shows a comparison, without importing torch in its kernel."""
    slow = Measurement("slow", ((0.2, 0.2),) * 15, CALCULATOR, peak_allocated=2000)
    fast = Measurement("fast", ((seconds, seconds),) * 15, CALCULATOR, peak_allocated=1000)
    shown = {MIME_TYPE: Comparison(name, (slow, fast)).to_dict(), "text/plain": ""}
    return f"from IPython.display import display\ndisplay({shown}, raw=True)"
