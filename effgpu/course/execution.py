"""One lesson in a kernel of its own, without a browser: run, read, and written with its outputs."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import quote

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from effgpu.course import kernels
from effgpu.course.lessons import Origin, code_cells, digest
from effgpu.course.outcomes import INTERRUPTED, Outcome, first_line, read_outcome
from effgpu.course.pictures import lighten
from effgpu.measuring import device_lock
from effgpu.measuring.device import describe
from effgpu.storing import write_atomic

CELL_TIMEOUT = 3600  # seconds
_STABLE_METADATA = {  # instead of what the kernel reports, which differs between machines
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


async def run_lesson(path: Path, folder: Path, inplace: bool, progress: Callable[[float], None]) -> Outcome:
    """Run one lesson in its own kernel, in its folder, and write it into `folder`; nothing, if it is cancelled.

    `progress` is called with the share of the cells that are done, 0 to 1.
    """
    began = time.monotonic()
    progress(0)
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises errors of many types
        return Outcome(path.stem, path.stem, failure=f"not a notebook: {type(error).__name__}: {first_line(error)}")
    _clear(notebook)
    try:
        await _execute(notebook, path.parent, progress)
    except asyncio.CancelledError:
        return replace(read_outcome(path.stem, notebook), failure=INTERRUPTED, seconds=time.monotonic() - began)
    _drop_blank_output(notebook)
    _lighten_pictures(notebook)
    outcome = replace(read_outcome(path.stem, notebook), seconds=time.monotonic() - began)
    device = outcome.comparisons[0].device if outcome.comparisons else describe()
    notebook.metadata["effgpu"] = asdict(Origin(device.slug, digest(notebook)))
    try:
        _write(notebook, path, folder, inplace=inplace and not outcome.failure)
    except OSError as error:  # for example a full disk
        outcome = replace(outcome, failure=outcome.failure or f"could not be written: {error}")
    return outcome


def _write(notebook, path: Path, folder: Path, *, inplace: bool) -> None:
    """Write an executed lesson into `folder` and, with `inplace`, also over the lesson at `path`."""
    if inplace:
        write_atomic(path, nbformat.writes(notebook) + "\n")
    beside = quote(Path(os.path.relpath(path.resolve().parent.parent, folder.resolve())).as_posix())
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # the images are not copied
            cell.source = cell.source.replace("](../", f"]({beside}/")
    write_atomic(folder / path.name, nbformat.writes(notebook) + "\n")


def _clear(notebook) -> None:
    """Remove all outputs of an earlier execution."""
    notebook.metadata.update(_STABLE_METADATA)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


async def _execute(notebook, folder: Path, progress: Callable[[float], None]) -> None:
    """Run the cells up to the first that fails. Its output then holds the error."""
    waiting = list(enumerate(notebook.cells))
    try:
        await _execute_cells(notebook, waiting, folder, progress)
    except CellExecutionError:
        pass
    except Exception as error:  # the kernel died or did not start, or a cell took too long
        fields = {"ename": type(error).__name__, "evalue": str(error), "traceback": [str(error)]}
        for cell in code_cells(cell for _, cell in waiting)[:1]:
            cell.outputs.append(nbformat.v4.new_output("error", **fields))


async def _execute_cells(notebook, waiting: list, folder: Path, progress: Callable[[float], None]) -> None:
    """Like nbclient's `execute`, which would swallow a Ctrl-C. Here asyncio cancels this task at one."""
    options = {"record_timing": False, "coalesce_streams": True, "extra_arguments": ["--log-level=ERROR"]}
    client = NotebookClient(notebook, kernel_name="python3", timeout=CELL_TIMEOUT, **options)
    kernel = client.create_kernel_manager()
    kernels.fork_kernel(kernel)
    try:
        await client.async_start_new_kernel(cwd=str(folder))
        await client.async_start_new_kernel_client()
        if device_lock.VARIABLE in os.environ:
            await _run_silently(client.kc, f"__import__('{device_lock.__name__}', fromlist=['*']).hold_in_cells()")
        while waiting:
            index, cell = waiting[0]
            await client.async_execute_cell(cell, index, execution_count=client.code_cells_executed + 1)
            del waiting[0]
            progress((index + 1) / len(notebook.cells))
    except DeadKernelError as error:
        if asyncio.current_task().cancelling():  # by Ctrl-C, not a dead kernel
            raise asyncio.CancelledError from error
        raise
    finally:
        if client.kc:
            client.kc.stop_channels()
        await kernel.shutdown_kernel(now=bool(waiting))


async def _run_silently(kernel, source: str) -> None:
    """Run code in a kernel without a trace. Raises RuntimeError where it fails."""
    reply = await kernel.execute_interactive(
        source, silent=True, timeout=CELL_TIMEOUT, output_hook=lambda message: None
    )
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"{source}: {reply['content'].get('evalue')}")


def _drop_blank_output(notebook) -> None:
    """Remove the blanks that a progress bar leaves when it erases itself."""
    for cell in code_cells(notebook.cells):
        for stream in (out for out in cell.outputs if out.output_type == "stream"):
            stream.text = re.sub(r" *\r\Z", "", stream.text)
        cell.outputs = [out for out in cell.outputs if out.output_type != "stream" or out.text.strip()]


def _lighten_pictures(notebook) -> None:
    """Store pictures in a palette: plots have few colours, and look the same at a third of the size."""
    for cell in code_cells(notebook.cells):
        for data in (output.data for output in cell.outputs if "data" in output):
            if png := data.get("image/png"):
                data["image/png"] = lighten(png)
