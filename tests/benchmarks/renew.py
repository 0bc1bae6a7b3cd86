"""Predict anew in the lessons that store what a GPU measured: PYTHONPATH=tests python -m benchmarks.renew [LESSON ...]

Rules of prediction change, and a GPU is seldom at hand. So what was measured stays as it is, and what was predicted
is predicted again: in the comparison of each lesson, in its plot, and in cells that only predict. Files in
effgpu/reference/ stay, too: they hold what was predicted before the GPU measured. Texts are for people to change:
cells whose outputs differ from before are named.
"""

import argparse
import ast
import base64
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import nbformat
from benchmarks.measured import (
    OnCpu,
    WithGpu,
    find_batch,
    find_statements,
    find_variants,
    names,
    read_cells,
    sized_for_gpu,
    with_what_they_need,
)
from matplotlib.figure import Figure
from nbformat import NotebookNode

import effgpu
from effgpu.comparison import GPUS, MIME_TYPE, Comparison
from effgpu.course.lessons import find_lessons, find_origin
from effgpu.course.pictures import lighten
from effgpu.figures.panels import shown_size, to_png
from effgpu.predicting.full_size import predict_full_size, predict_here
from effgpu.predicting.predict import predict
from effgpu.predicting.prediction import Prediction
from effgpu.results import comparison_from_dict

_MEASURE = {"compare", "trace", "doctor", "saved_bytes", "perf_counter", "synchronize", "elapsed_time"}


def renew(path: Path) -> list[str]:
    """Predict anew what a lesson stores, in place. Returns the first lines of the cells whose output changed."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    before, batches, comparison = [*map(_shown, cells)], [], None
    for cell in cells:
        for data in (output.data for output in cell.outputs if "data" in output):
            if MIME_TYPE in data:
                comparison = _predict(comparison_from_dict(data[MIME_TYPE]), batches, path.parent)
                data.update(comparison._repr_mimebundle_())
        if comparison and cell.source.strip() == "effgpu.plot(result)":
            _draw(cell.outputs[0], effgpu.plot(comparison))
    statements = read_cells(path)
    with sized_for_gpu(*batches[:1] or [1]):
        for number in _find_predicting(statements):
            if cells[number].outputs and "tags" not in cells[number].metadata:  # a checked cell says nothing of a GPU
                _rerun(cells[number], [each for cell in statements[:number] for each in cell], statements[number])
    nbformat.write(notebook, path)
    return [cell.source.splitlines()[0] for cell, old in zip(cells, before) if _shown(cell) != old]


def _shown(cell: NotebookNode) -> list[str]:
    """What a reader sees of a cell's output, but for pictures."""
    return [output.get("text") or output.data["text/plain"] for output in cell.outputs]


def _predict(stored: Comparison, batches: list[int], folder: Path) -> Comparison:
    path, batch = find_batch(stored, batches, folder)
    if batch is None:
        return stored
    with sized_for_gpu(batch):
        variants, options = find_variants(find_statements(path, stored.name), folder)
        full_size = predict_full_size(variants, options["full_size"], options.get("gpus", GPUS))
        return replace(stored, full_size=full_size, here=predict_here(variants, stored.device.name))


def _draw(output: NotebookNode, figure: Figure) -> None:
    output.data["image/png"] = lighten(base64.b64encode(to_png(figure)).decode())
    output.metadata["image/png"] = shown_size(figure)


def _find_predicting(cells: list[list[ast.stmt]]) -> Iterator[int]:
    """The numbers of the cells that use what `effgpu.predict` gave, and nothing that was measured."""
    predicted, measured = set(), set()
    for number, statements in enumerate(cells):
        found = set()
        for statement in statements:
            uses, gives = names(statement)
            called = {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
            measures = bool(called & _MEASURE or uses & measured)
            predicts = not measures and bool("predict" in called or uses & predicted)
            predicted, measured = predicted - gives, measured - gives
            (measured if measures else predicted if predicts else set()).update(gives)
            found.add("measures" if measures else "predicts" if predicts else "")
        if "predicts" in found and "measures" not in found:
            yield number


def _rerun(cell: NotebookNode, before: list[ast.stmt], statements: list[ast.stmt]) -> None:
    """Run a cell with what it needs of those before it, as on the GPU, and store what it prints and shows."""
    needed = [each for each in with_what_they_need(before, statements) if each not in statements]
    space, printed, value = {"__name__": "lesson"}, io.StringIO(), None
    *statements, last = (WithGpu().visit(each) for each in statements)
    with OnCpu() as mode, patch.object(effgpu, "predict", partial(_predict_outside, mode)):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(_compile(ast.Module([WithGpu().visit(each) for each in needed], []), "exec"), space)
        with contextlib.redirect_stdout(printed):
            exec(_compile(ast.Module(statements, []), "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(_compile(ast.Expression(last.value), "eval"), space)
            else:
                exec(_compile(ast.Module([last], []), "exec"), space)
    for output in cell.outputs:
        if output.output_type == "stream":
            output.text = printed.getvalue()
        elif "image/png" in output.data:
            _draw(output, value)
        else:
            output.data.update({"text/plain": repr(value), "text/html": value._repr_html_()})


def _predict_outside(mode: OnCpu, *args: object, **options: object) -> Prediction:
    """`effgpu.predict` without the mode that takes a GPU's tensors to the CPU: it has its own."""
    mode.__exit__(None, None, None)
    try:
        return predict(*args, **options)
    finally:
        mode.__enter__()


def _compile(tree: ast.AST, kind: str) -> CodeType:
    return compile(ast.fix_missing_locations(tree), "lesson", kind)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("lessons", nargs="*", help="such as 08; all that a GPU measured without any")
    for path in find_lessons(parser.parse_args(arguments).lessons):
        if (origin := find_origin(path)) and not origin.device.startswith("cpu"):
            for line in renew(path):
                print(f"{path.stem}: {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
