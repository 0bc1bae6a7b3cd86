"""Run the lessons without a browser, each in its own kernel, and collect the results in their outputs."""

import asyncio
import base64
import contextlib
import hashlib
import io
import itertools
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from tqdm import tqdm

from effgpu import results, units
from effgpu.comparison import MIME_TYPE, Comparison
from effgpu.measuring import gpu_lock, timing
from effgpu.measuring.device import AT_ONCE, Device, describe
from effgpu.predicting.full_size import tell_range
from effgpu.predicting.prediction import DOES_NOT_FIT, FITS
from effgpu.storing import write_atomic
from effgpu.verdicts import FASTER, INCONCLUSIVE, SAME

LESSONS = Path(__file__).parents[2] / "notebooks"  # in a clone of the repository
CELL_TIMEOUT = 3600  # seconds
AREA = 0.001  # of a picture: what keeps its colour
NEAR = 12  # of 255: colours that look the same at an edge
INTERRUPTED = "interrupted"
OUT_OF_TIME = "the time was over"
_STABLE_METADATA = {  # instead of what the kernel reports, which differs between machines
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@dataclass(frozen=True)
class Picture:
    """A plot of a lesson: the PNG in base64, and its alternative text."""

    png: str
    alt: str


@dataclass(frozen=True)
class Headline:
    """The main result of a lesson in one line: one variant against the baseline, in time and memory."""

    comparison: Comparison
    label: str

    @property
    def time(self) -> str:
        """The time in words: "1.44 × slower [1.42, 1.47]", "same time (within 1 %)" or why there is none."""
        measured, baseline = self.comparison[self.label], self.comparison.baseline
        if baseline.failed and not measured.failed:
            return f"runs where {baseline.label} does not ({baseline.failed})"
        text = self.comparison.tell(self.label)
        return text.replace(SAME, f"{SAME} time", 1) if self.comparison.verdict(self.label) == SAME else text

    @property
    def memory(self) -> str:
        """The change of the peak memory in words, "−45 % memory"; empty below `min_effect`, or not measured."""
        ratio = self.comparison.ratio(self.label, "memory") or 1
        changed = max(ratio, 1 / ratio) >= 1 + self.comparison.min_effect
        return f"{self.comparison.tell(self.label, 'memory')} memory" if changed else ""

    @property
    def full_size(self) -> str:
        """What the lesson predicts for a GPU, "5.40 × faster, 25.4 → 15.0 GiB on a T4 (predicted)"; else empty.

        The GPU is the first of the prediction; the second where its memory is too small for the variant.
        """
        before, after = (self.comparison.full_size.get(m) for m in (self.comparison.baseline.label, self.label))
        if not (before and after):
            return ""
        place = next((place for place, each in enumerate(after) if each.verdict != DOES_NOT_FIT), 0)
        old, new = before[place], after[place]
        low, high = new.ratio[1:] if new.ratio else (1, 1)
        time = tell_range(new.ratio, brackets=False) if new.ratio else ""
        time = "no clear difference in time" if low < 1 < high else time
        lines = [time, _tell_change(old.allocated, new.allocated)]
        rescued = ", so that it fits" if [old.verdict, new.verdict] == [DOES_NOT_FIT, FITS] else ""
        return f"{', '.join(filter(None, lines))} on {units.with_article(new.gpu)}{rescued} (predicted)"

    def tell(self) -> str:
        """Time and memory in words, what is gained first. An inconclusive time gives way to a change in memory."""
        verdict = self.comparison.verdict(self.label)
        time = "" if verdict == INCONCLUSIVE and self.memory else self.time
        return ", ".join(filter(None, [time, self.memory] if verdict == FASTER else [self.memory, time]))


def _tell_change(before: float, after: float) -> str:
    """Two numbers of bytes, "25.4 → 15.0 GiB"; empty where they differ by less than a per cent."""
    if abs(after / before - 1) < 0.01:
        return ""
    (number, unit), text = units.format_bytes(before).split(), units.format_bytes(after)
    return f"{number if text.endswith(unit) else f'{number} {unit}'} → {text}"


@dataclass(frozen=True)
class Outcome:
    """The results of a lesson. `name` is its file name without .ipynb, `title` its heading.

    `about` is the bold sentence that it begins with. `failure` says in one line why it failed. `seconds` is what it
    took, where it has just run.
    """

    name: str
    title: str
    comparisons: tuple[Comparison, ...] = ()
    pictures: tuple[Picture, ...] = ()
    failure: str | None = None
    about: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def main(self) -> Comparison | None:
        """The comparison that is named like the lesson."""
        return next((comparison for comparison in self.comparisons if comparison.name == self.name), None)

    @property
    def headline(self) -> Headline | None:
        """The variant that README, the report and `effgpu run` tell of; None without a main comparison.

        It is the last variant with a prediction, else the last.
        """
        if self.main is None or len(self.main) < 2:
            return None
        expected = self.main.predicted or self.main
        return Headline(self.main, [m.label for m in self.main if m.label in expected][-1])


def find_lessons(names: Sequence[str] = ()) -> list[Path]:
    """Return the paths of lessons given as a path, `02_dataloader.ipynb`, `02_dataloader`, `02` or `dataloader`.

    Without names, returns all. Looks in ./notebooks, else in the clone that the package is from. Raises ValueError for
    an unknown name, and if there are no lessons.
    """
    here = sorted(Path("notebooks").glob("*.ipynb")) or sorted(LESSONS.glob("*.ipynb"))
    if not names and not here:
        raise ValueError(f"no lessons in ./notebooks nor in {LESSONS}: run effgpu in a clone of it, or name a path")
    known = {alias: path for path in here for alias in (path.name, path.stem, *path.stem.split("_", 1))}
    known |= {name: Path(name) for name in names if name.endswith(".ipynb") and Path(name).is_file()}
    if unknown := [name for name in names if name not in known]:
        stems = ", ".join(path.stem for path in here) or "none"
        raise ValueError(f"unknown lesson {unknown[0]!r}; known: {stems}")
    return list(dict.fromkeys(known[name] for name in names)) if names else here


def prepare(out: Path, *others: Path) -> None:
    """Create the folders of a run, so that problems show before the first lesson runs.

    Raises OSError if they, or `others`, cannot be written to, and ValueError if a results file cannot be read.
    """
    for folder in (out, out / "notebooks", out / "results", *others):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    for path in (out / "results").glob("*.json"):
        results.load(path)


@dataclass(frozen=True)
class Origin:
    """Where a lesson's outputs are from: the device's slug, and a digest of the code cells."""

    device: str
    code: str


def find_origin(path: Path) -> Origin | None:
    """Where the stored outputs of a lesson are from; None for one that has none, or does not say."""
    import nbformat

    with contextlib.suppress(Exception):  # nbformat raises errors of many types
        return Origin(**nbformat.read(path, as_version=4).metadata["effgpu"])


def digest(notebook) -> str:
    """A digest of a notebook's code cells: outputs with another one are of other code."""
    return hashlib.sha256("\n\n".join(cell.source for cell in _code_cells(notebook.cells)).encode()).hexdigest()[:16]


def is_missing(path: Path, device: Device) -> bool:
    """Whether a lesson stores no outputs of the code that it has now; or, on a GPU, none of this one."""
    import nbformat

    origin = find_origin(path)
    if origin is None or origin.code != digest(nbformat.read(path, as_version=4)):
        return True
    return device.kind == "cuda" and origin.device != device.slug


def lessons_of_gpus(lessons: Iterable[Path]) -> list[str]:
    """The names of lessons that store a GPU's outputs of the code that they have now."""
    origins = {path: find_origin(path) for path in lessons}
    on_gpu = [path for path, origin in origins.items() if origin and not origin.device.startswith("cpu-")]
    return [path.stem for path in on_gpu if not is_missing(path, Device("", "cpu", None, 1))]


def run(
    lessons: Sequence[Path],
    out: Path,
    *,
    inplace: bool = False,
    at_once: int = 1,
    budget: float = math.inf,
    seconds: float | None = None,
) -> Iterator[Outcome]:
    """Run lessons, so many at once, with a progress bar, and yield each outcome. A failure does not stop the rest.

    Executed lessons are written to `out`/notebooks. With `inplace`, lessons that succeeded are also overwritten.
    Lessons that run at once take turns on the GPU (gpu_lock.py). `seconds` cap every measurement. Ctrl-C stops the
    running kernels, yields the results of their lessons so far, and raises KeyboardInterrupt.

    All have `budget` seconds together. One that takes twice its share of what is left is stopped while others wait, and
    begun again after them if there is then more time. After the budget those that still run are stopped, and no other
    is begun: these fail as OUT_OF_TIME.
    """
    end, width = time.monotonic() + budget, max(len(path.stem) for path in lessons)
    waiting, running, shares = list(lessons), {}, dict.fromkeys(lessons, 0.0)
    latest: dict[asyncio.Task, float] = {}  # when each is stopped, if others wait
    tried: dict[Path, float] = {}  # seconds of those that were stopped

    def show(path: Path, share: float) -> None:
        shares[path] = share
        bar.n = sum(shares.values())
        bar.refresh()

    with (
        tqdm(total=len(lessons), leave=False, bar_format="{desc} |{bar:30}| {remaining} left") as bar,
        _environment(at_once, seconds),
        asyncio.Runner() as loop,
    ):
        while waiting or running:
            while waiting and len(running) < at_once:
                path, now = waiting.pop(0), time.monotonic()
                if end - now <= tried.get(path, 0.0):
                    yield Outcome(path.stem, path.stem, failure=OUT_OF_TIME, seconds=tried.get(path, 0.0))
                    continue
                task = loop.get_loop().create_task(_run_lesson(path, out / "notebooks", inplace, partial(show, path)))
                running[task] = path
                latest[task] = now + 2 * (end - now) * at_once / (len(waiting) + len(running))
            if not running:
                break
            names = ", ".join(path.stem for path in running.values())
            bar.set_description_str(f"{len(lessons) - len(waiting)}/{len(lessons)} {names:{width}}", refresh=False)
            until = min(end, *map(latest.get, running)) if waiting else end
            try:
                done = loop.run(_first_of(running, until - time.monotonic()))
                done = done or {task for task in running if latest[task] <= until or until == end}
                outcomes = loop.run(_stop(done, OUT_OF_TIME))
            except KeyboardInterrupt:
                yield from loop.run(_stop(running, INTERRUPTED))
                raise
            for task, outcome in zip(done, outcomes):
                path = running.pop(task)
                if outcome.failure == OUT_OF_TIME and until < end:
                    shares[path], tried[path] = 0.0, outcome.seconds
                    waiting.append(path)
                else:
                    shares[path] = 1.0
                    yield outcome


@contextlib.contextmanager
def _environment(at_once: int, seconds: float | None) -> Iterator[None]:
    """Inside, kernels inherit the most seconds of a measurement; at once, a lock on the GPU and a share of the cores.

    PyTorch's warnings in C++, which hold the hour, stay out of the outputs: they do so only if set before torch starts.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if seconds is not None:
            os.environ[timing.CAP] = str(seconds)
        if at_once > 1:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
            os.environ.update({gpu_lock.VARIABLE: os.path.join(folder, "gpu"), AT_ONCE: str(at_once)})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


async def _first_of(tasks: Iterable[asyncio.Task], seconds: float) -> set[asyncio.Task]:
    """The first tasks that are done; none after so many seconds."""
    done, _ = await asyncio.wait(tasks, timeout=min(max(0.0, seconds), 1e6), return_when=asyncio.FIRST_COMPLETED)
    return done


async def _stop(tasks: Iterable[asyncio.Task], why: str) -> list[Outcome]:
    """Stop lessons, with their kernels. Returns their outcomes, which failed for this reason if they had not ended."""
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks)
    return [replace(each, failure=why) if each.failure == INTERRUPTED else each for each in outcomes]


async def _run_lesson(path: Path, folder: Path, inplace: bool, progress: Callable[[float], None]) -> Outcome:
    """Run one lesson in its own kernel, in its folder, and write it into `folder`; nothing, if it is cancelled.

    `progress` is called with the share of the cells that are done, 0 to 1.
    """
    import nbformat

    began = time.monotonic()
    progress(0)
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises errors of many types
        return Outcome(path.stem, path.stem, failure=f"not a notebook: {type(error).__name__}: {_first_line(error)}")
    _clear(notebook)
    try:
        await _execute(notebook, path.parent, progress)
    except asyncio.CancelledError:
        return replace(_outcome(path.stem, notebook), failure=INTERRUPTED, seconds=time.monotonic() - began)
    _drop_blank_output(notebook)
    _lighten_pictures(notebook)
    outcome = replace(_outcome(path.stem, notebook), seconds=time.monotonic() - began)
    device = outcome.comparisons[0].device if outcome.comparisons else describe()
    notebook.metadata["effgpu"] = asdict(Origin(device.slug, digest(notebook)))
    try:
        _write(notebook, path, folder, inplace=inplace and not outcome.failure)
    except OSError as error:  # for example a full disk
        outcome = replace(outcome, failure=outcome.failure or f"could not be written: {error}")
    return outcome


def _write(notebook, path: Path, folder: Path, *, inplace: bool) -> None:
    """Write an executed lesson into `folder` and, with `inplace`, also over the lesson at `path`."""
    import nbformat

    if inplace:
        write_atomic(path, nbformat.writes(notebook) + "\n")
    beside = quote(Path(os.path.relpath(path.resolve().parent.parent, folder.resolve())).as_posix())
    for cell in notebook.cells:
        if cell.cell_type == "markdown":  # the images are not copied
            cell.source = cell.source.replace("](../", f"]({beside}/")
    write_atomic(folder / path.name, nbformat.writes(notebook) + "\n")


def tell(outcome: Outcome) -> str:
    """What a finished lesson showed, in one line: its headline, that it failed, or that it compared nothing."""
    if outcome.failure:
        return outcome.failure if outcome.failure in (INTERRUPTED, OUT_OF_TIME) else "failed"
    if headline := outcome.headline:
        return f"{headline.label}: {headline.tell()}"
    return "nothing to compare on this machine"


def show_line(line: str) -> None:
    """Print a line at once, above the progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


def read_lessons(folder: Path) -> list[Outcome]:
    """Return the outcomes of the executed lessons in a folder. Files that are not notebooks are skipped."""
    outcomes = []
    for path in sorted(folder.glob("*.ipynb")):
        import nbformat  # where there are no lessons, a report needs no nbformat

        try:
            outcomes.append(_outcome(path.stem, nbformat.read(path, as_version=4)))
        except Exception:  # nbformat raises errors of many types
            continue
    return outcomes


def store(outcome: Outcome, folder: Path, earlier: Sequence[Outcome] = ()) -> Outcome:
    """Add a lesson's results to the results file of its machine. Returns the outcome, with a failure if that failed.

    Results of an earlier run with the same name are replaced, those of `earlier` lessons of this run are not.
    """
    owners = {each.name: other.name for other in reversed(earlier) for each in other.comparisons}
    failures = [outcome.failure] if outcome.failure else []
    for name in [each.name for each in outcome.comparisons if each.name in owners]:
        both = f"both {owners[name]} and {outcome.name} have a comparison called {name!r}"
        failures.append(f"{both}, and {owners[name]}'s is stored: give this one a name, compare(..., name=...)")
    if fresh := {each.name: each for each in outcome.comparisons if each.name not in owners}:
        path = folder / f"{outcome.comparisons[0].device.slug}.json"
        try:
            before = {each.name: each for each in results.load(path)} if path.exists() else {}
            results.save((before | fresh).values(), path)
        except (OSError, ValueError) as error:  # for example a full disk
            failures.append(f"results could not be stored: {error}")
    return replace(outcome, failure="; ".join(failures) or None)


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
    import nbformat
    from nbclient.exceptions import CellExecutionError

    waiting = list(enumerate(notebook.cells))
    try:
        await _execute_cells(notebook, waiting, folder, progress)
    except CellExecutionError:
        pass
    except Exception as error:  # the kernel died or did not start, or a cell took too long
        fields = {"ename": type(error).__name__, "evalue": str(error), "traceback": [str(error)]}
        for cell in _code_cells(cell for _, cell in waiting)[:1]:
            cell.outputs.append(nbformat.v4.new_output("error", **fields))


async def _execute_cells(notebook, waiting: list, folder: Path, progress: Callable[[float], None]) -> None:
    """Like nbclient's `execute`, which would swallow a Ctrl-C. Here asyncio cancels this task at one."""
    from nbclient import NotebookClient
    from nbclient.exceptions import DeadKernelError

    from effgpu.course import kernels

    options = {"record_timing": False, "coalesce_streams": True, "extra_arguments": ["--log-level=ERROR"]}
    client = NotebookClient(notebook, kernel_name="python3", timeout=CELL_TIMEOUT, **options)
    kernel = client.create_kernel_manager()
    kernels.fork_kernel(kernel)
    try:
        await client.async_start_new_kernel(cwd=str(folder))
        await client.async_start_new_kernel_client()
        if gpu_lock.VARIABLE in os.environ:
            await _run_silently(client.kc, f"__import__('{gpu_lock.__name__}', fromlist=['*']).hold_in_cells()")
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
    for cell in _code_cells(notebook.cells):
        for stream in (out for out in cell.outputs if out.output_type == "stream"):
            stream.text = re.sub(r" *\r\Z", "", stream.text)
        cell.outputs = [out for out in cell.outputs if out.output_type != "stream" or out.text.strip()]


def _lighten_pictures(notebook) -> None:
    """Store pictures in a palette: plots have few colours, and look the same at a third of the size."""
    for cell in _code_cells(notebook.cells):
        for data in (output.data for output in cell.outputs if "data" in output):
            if png := data.get("image/png"):
                data["image/png"] = lighten(png)


def lighten(png: str) -> str:
    """A PNG in base64 in a palette, if that is smaller; as it is if it is no PNG, or has too many colours.

    Areas keep their colours. Shades at the edges of lines and letters become the nearest colour that is kept.
    """
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    try:
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB"), int)
    except (UnidentifiedImageError, ValueError):
        return png
    packed, where, counts = np.unique(picture @ [1 << 16, 1 << 8, 1], return_inverse=True, return_counts=True)
    colors = np.stack([packed >> 16, packed >> 8 & 255, packed & 255], axis=1)
    kept: list[int] = []
    for index in counts.argsort()[::-1]:
        if counts[index] > AREA * where.size or (_difference(colors[kept], colors[index]) >= NEAR).all():
            kept.append(index)
            if len(kept) > 256:
                return png
    palette = colors[sorted(kept)]
    nearest = _difference(colors[:, None], palette).argmin(axis=1).astype(np.uint8)
    light = Image.fromarray(nearest[where].reshape(picture.shape[:2]))
    light.putpalette(palette.astype(np.uint8).tobytes())
    file = io.BytesIO()
    light.save(file, "png", optimize=True)
    return min(base64.b64encode(file.getvalue()).decode(), "".join(png.split()), key=len)


def _difference(some, others):
    """How different colours look, 0 to 255, in arrays (..., 3). A change of hue counts twice one of brightness."""
    import numpy as np

    apart = some - others
    brightness = apart.mean(axis=-1, keepdims=True)
    return np.maximum(abs(brightness[..., 0]) / 2, abs(apart - brightness).max(axis=-1))


def _outcome(name: str, notebook) -> Outcome:
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    title = _title(prose) or name
    comparisons: dict[str, Comparison] = {}
    pictures = []
    for cell in _code_cells(notebook.cells):
        data = [output.data for output in cell.outputs if "data" in output]
        shown = [results.comparison_from_dict(bundle[MIME_TYPE]) for bundle in data if MIME_TYPE in bundle]
        for comparison in shown:
            free = _free_name(comparison, comparisons)
            comparisons[free] = replace(comparison, name=free)
        if "effgpu.plot(result)" in cell.source:  # of the template: shown in this cell, or in the last one that shows
            shown = list(comparisons.values())[-1:]
        alt = "; ".join(comparison.alt_text() for comparison in shown) or f"Plot of the lesson {title}"
        images = ["".join(bundle["image/png"].split()) for bundle in data if "image/png" in bundle]
        pictures += [Picture(png, alt) for png in images]
    return Outcome(name, title, tuple(comparisons.values()), tuple(pictures), _failure(notebook), _about(prose))


def _title(prose: str) -> str:
    heading = re.search(r"^# +(.+)", prose, re.MULTILINE)
    return heading[1].strip() if heading else ""


def _about(prose: str) -> str:
    """The bold sentence above the table of what a technique buys and costs, as plain text; empty without that table."""
    opening, table, _ = prose.partition("| **Buys** |")
    bold = re.search(r"^\*\*(.+?)\*\*", opening, re.MULTILINE) if table else None
    return re.sub(r"[*`]", "", bold[1]) if bold else ""


def _free_name(comparison: Comparison, taken: Mapping[str, Comparison]) -> str:
    """Return the comparison's name, with a number if another comparison of the lesson has that name."""
    names = itertools.chain([comparison.name], (f"{comparison.name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if name not in taken or taken[name].measurements == comparison.measurements)


def _failure(notebook) -> str | None:
    for number, cell in enumerate(_code_cells(notebook.cells), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                return f"cell [{number}] {_first_line(cell.source)!r}: {output.ename}: {_first_line(output.evalue)}"
    return None


def _code_cells(cells: Iterable) -> list:
    return [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "")
