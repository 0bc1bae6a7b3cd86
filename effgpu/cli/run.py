"""`effgpu run`: the lessons on this machine, and a report of what they measured."""

import argparse
import math
import sys
from numbers import Integral
from pathlib import Path

from effgpu.cli.exits import FAILED, INTERRUPTED, SUCCEEDED, check_installed, refusing

_LIBRARIES = ("nbclient", "ipykernel", "matplotlib", "torchvision", "transformers", "datasets", "accelerate")


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    parser = commands.add_parser("run", help="run lessons on this machine and write a report")
    parser.add_argument(
        "lessons", nargs="*", metavar="LESSON", help="02, dataloader, 02_dataloader or a path; else all"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (out; out/look with --seconds)")
    parser.add_argument("--inplace", action="store_true", help="also store the outputs in the lessons that succeeded")
    seconds_help = "most seconds of a measurement: for a quick look, not for results"
    parser.add_argument("--seconds", type=float, metavar="S", help=seconds_help)
    once_help = "lessons that run at once, and take turns to measure; default: 1, on a CPU of several cores 2"
    parser.add_argument("--at-once", type=int, metavar="N", help=once_help)
    budget_help = "share out so long, such as 450s or 10m, then stop and say what was left out"
    parser.add_argument("--budget", type=duration, default=math.inf, metavar="TIME", help=budget_help)
    missing_help = "only lessons that store outputs of other code or, on a GPU, of another device"
    parser.add_argument("--missing", action="store_true", help=missing_help)
    parser.set_defaults(command=run)


def duration(text: str) -> float:
    """Seconds from "450s", "450" or "7.5m". argparse shows the function's name: invalid duration value."""
    number, minutes = text.strip().removesuffix("s"), 1
    if number.endswith("m"):
        number, minutes = number.removesuffix("m"), 60
    if not 0 < float(number) < math.inf:
        raise ValueError
    return float(number) * minutes


def run(chosen: argparse.Namespace) -> int:
    """Run the lessons; returns the exit code."""
    check_installed("running lessons", *_LIBRARIES)
    from effgpu.course import runner

    with refusing(OSError, ValueError):
        lessons, out = _choose(chosen)
    if not lessons:
        print("every lesson stores outputs of its code")
        return SUCCEEDED
    outcomes, interrupted = [], False
    width = max(len(lesson.stem) for lesson in lessons)
    try:
        options = {name: getattr(chosen, name) for name in ("inplace", "at_once", "budget", "seconds")}
        for outcome in runner.run(lessons, out, **options):
            outcomes.append(outcome)  # stored at once, so that an interruption loses no results
            outcomes[-1] = runner.store(outcome, out / "results", outcomes[:-1])
            runner.show_line(f"{outcome.name:{width}}  {outcome.seconds:4.0f} s  {outcomes[-1].tell()}")
    except KeyboardInterrupt:
        interrupted = True
    return _sum_up(outcomes, len(lessons), out, interrupted)


def _choose(chosen: argparse.Namespace) -> tuple[list[Path], Path]:
    """The lessons to run, none where nothing is missing, and the folder of their results, which is made.

    Raises OSError or ValueError, in one line, for what cannot be run as asked.
    """
    from effgpu import units
    from effgpu.course.lessons import find_lessons, is_missing, lessons_of_gpus
    from effgpu.course.runner import prepare
    from effgpu.measuring import timing
    from effgpu.measuring.device import describe

    if chosen.seconds is not None:
        units.check_positive(**{"--seconds": chosen.seconds})
    capped = chosen.seconds is not None or timing.cap_seconds(math.inf) < math.inf
    out = chosen.out or Path("out/look" if capped else "out")  # a quick look must not replace results
    lessons, device = find_lessons(chosen.lessons), describe()
    if chosen.at_once is None:
        chosen.at_once = 2 if device.kind == "cpu" and device.cores > 1 and sys.platform != "win32" else 1
    units.check_positive(Integral, **{"--at-once": chosen.at_once})
    if chosen.at_once > 1 and sys.platform == "win32":
        raise ValueError("--at-once: expected 1, as Windows has no lock that lessons take turns by")
    if chosen.missing:
        lessons = [path for path in lessons if is_missing(path, device)]
        if not lessons:
            return [], out
    if chosen.inplace and device.kind == "cpu" and (kept := lessons_of_gpus(lessons)):
        raise ValueError(f"--inplace: {kept[0]} stores a GPU's outputs, which a CPU's would replace: say --missing")
    if chosen.inplace and capped:
        raise ValueError("--inplace stores results, but --seconds or EFFGPU_SECONDS cuts measurements short")
    prepare(out, *{lesson.parent for lesson in lessons if chosen.inplace})
    return lessons, out


def _write_page(outcomes: list, out: Path) -> Path:
    """Write the report, with the lessons of earlier runs of this machine in the same folder."""
    from effgpu.course import report
    from effgpu.course.outcomes import read_lessons
    from effgpu.measuring.device import describe

    device = describe()
    lessons = {
        earlier.name: earlier
        for earlier in read_lessons(out / "notebooks")
        if all(comparison.device.slug == device.slug for comparison in earlier.comparisons)
    }
    lessons |= {outcome.name: outcome for outcome in outcomes}
    section = report.Section(device, tuple(lessons[name] for name in sorted(lessons)))
    return report.write(out / "report.html", [section])


def _sum_up(outcomes: list, asked: int, out: Path, interrupted: bool) -> int:
    from effgpu.course.outcomes import OUT_OF_TIME

    left_out = [outcome for outcome in outcomes if outcome.failure == OUT_OF_TIME]
    outcomes = [outcome for outcome in outcomes if outcome not in left_out]
    failed = {outcome.name: outcome.failure for outcome in outcomes if outcome.failure}
    summary = f"{len(outcomes) - len(failed)} of {asked} lessons ran without an error"
    if left_out:
        stopped = {each.name: f" (stopped after {each.seconds:.0f} s)" * (each.seconds > 0) for each in left_out}
        print(f"left out, as the time was over: {', '.join(map(''.join, stopped.items()))}")
    try:
        summary += f": {_write_page(outcomes, out)}"
    except OSError as error:  # for example a full disk
        failed["the report"] = error
    for name, failure in failed.items():
        print(f"failed: {name}: {failure}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {asked - len(left_out) - len(outcomes)} of {asked} lessons were not run", file=sys.stderr)
    print(summary)
    return INTERRUPTED if interrupted else FAILED if failed else SUCCEEDED
