"""A run of lessons: which has its turn when, within a budget of time, and where their results are kept."""

import asyncio
import contextlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from tqdm import tqdm

from effgpu import results
from effgpu.course.execution import run_lesson
from effgpu.course.outcomes import INTERRUPTED, OUT_OF_TIME, Outcome
from effgpu.measuring import device_lock, timing
from effgpu.measuring.device import AT_ONCE, find_device


def prepare(out: Path, *others: Path) -> None:
    """Create the folders of a run, so that problems show before the first lesson runs.

    Raises OSError if they, or `others`, cannot be written to, and ValueError if a results file cannot be read.
    """
    for folder in (out, out / "notebooks", out / "results", *others):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    try:
        for path in (out / "results").glob("*.json"):
            results.load(path)
    except ValueError as error:
        raise ValueError(f"{error}: move it away, or give another folder with --out") from error


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
    Lessons that run at once take turns to measure (device_lock.py). `seconds` cap every measurement. Ctrl-C stops the
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
                task = loop.get_loop().create_task(run_lesson(path, out / "notebooks", inplace, partial(show, path)))
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
    """Inside, kernels inherit the most seconds of a measurement; at once, a lock and, on a GPU, a share of the cores.

    PyTorch's warnings in C++, which hold the hour, stay out of the outputs: they do so only if set before torch starts.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if seconds is not None:
            os.environ[timing.CAP] = str(seconds)
        if at_once > 1:
            os.environ[device_lock.VARIABLE] = os.path.join(folder, "lock")
            if find_device().type != "cpu":  # which is all for whoever has the lock
                os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // at_once)))
                os.environ[AT_ONCE] = str(at_once)
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


def show_line(line: str) -> None:
    """Print a line at once, above the progress bar."""
    tqdm.write(line)
    sys.stdout.flush()


def store(outcome: Outcome, folder: Path, earlier: Sequence[Outcome] = ()) -> Outcome:
    """Add a lesson's results to the results file of its machine. Returns the outcome, with a failure if that failed.

    Results of an earlier run with the same name are replaced, those of `earlier` lessons of this run are not. The file
    has them by name, whichever lesson ended first.
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
            results.save(sorted((before | fresh).values(), key=attrgetter("name")), path)
        except (OSError, ValueError) as error:  # for example a full disk
            failures.append(f"results could not be stored: {error}")
    return replace(outcome, failure="; ".join(failures) or None)
