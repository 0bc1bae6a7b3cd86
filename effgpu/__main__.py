"""The commands: `effgpu info`, `effgpu run`, `effgpu report`. Each imports what it needs when it is called."""

import argparse
import math
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

NOTHING_FAILED, SOMETHING_FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
_WITHOUT_GPU = """
No GPU that CUDA can use. Every lesson still runs on this CPU: what is counted (memory, saved bytes, FLOPs) is exact,
times are this CPU's and say so, and the stored results of GPUs are drawn beside them. Not here: energy, tensor cores,
TF32, fp8 and the fused kernels of a GPU."""


def main(arguments: list[str] | None = None) -> int:
    """Answer a command line. Returns the exit code: 0, 1 (a lesson failed), 2 (cannot be done) or 130 (Ctrl-C)."""
    chosen = _parser().parse_args(arguments)
    try:
        return chosen.command(chosen)
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(_refuse(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="effgpu", description="What a training technique does to time, memory and energy, measured.")
    commands = parser.add_subparsers(required=True, metavar="{info,run,report}")

    info = commands.add_parser("info", help="what this machine is and what it supports")
    info.set_defaults(command=_info)

    run = commands.add_parser("run", help="run lessons on this machine and report what they found")
    run.add_argument("lessons", nargs="*", metavar="LESSON", help="02, dataloader, 02_dataloader or a path; else all")
    run.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (out; out/look with --seconds)")
    run.add_argument("--inplace", action="store_true", help="also store the outputs in the lessons that succeeded")
    told = "at most so many for each measurement: for a look, not for results"
    run.add_argument("--seconds", type=float, metavar="S", help=told)
    run.set_defaults(command=_run)

    report = commands.add_parser("report", help="one page from the results files of one or more machines")
    report.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    report.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    report.set_defaults(command=_report)
    return parser


def _info(chosen: argparse.Namespace) -> int:
    from effgpu.device import describe
    from effgpu.units import format_bytes

    device = describe()
    facts = {"device": device.label, "memory": format_bytes(device.memory), "CPU cores": device.cores}
    if device.kind == "cuda":
        facts["compute capability"] = ".".join(map(str, device.capability))
        facts["multiprocessors"] = device.multiprocessors
        facts["driver"] = device.driver or "unknown: NVML does not answer"
    for title, rows in {"": facts, "supports": device.supports, "versions": device.versions}.items():
        if title and rows:
            print(f"\n{title}")
        for name, value in rows.items():
            print(f"{name:20}{value}")
    if device.kind == "cpu":
        print(_WITHOUT_GPU)
    return NOTHING_FAILED


def _run(chosen: argparse.Namespace) -> int:
    from effgpu import course, timing, units

    if missing := [name for name in ("nbclient", "nbformat", "ipykernel") if not find_spec(name)]:
        return _refuse(f'running lessons takes {", ".join(missing)}: pip install "effgpu[lab]"')
    try:
        if chosen.seconds is not None:
            units.check_positive(**{"--seconds": chosen.seconds})
            os.environ[timing.CAP] = str(chosen.seconds)
        whole = timing.cap_seconds(math.inf) == math.inf
        out = chosen.out or (Path("out") if whole else Path("out/look"))  # what was cut short replaces no results
        lessons = course.find_lessons(chosen.lessons)
        if chosen.inplace and not whole:
            raise ValueError("--inplace stores results, and what is cut short (--seconds, EFFGPU_SECONDS) has none")
        course.prepare(out, *{lesson.parent for lesson in lessons if chosen.inplace})
    except (OSError, ValueError) as error:
        return _refuse(error)
    for name in ("SIGTERM", "SIGHUP"):  # a polite kill and a dropped ssh are a Ctrl-C
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
    outcomes, interrupted = [], False
    try:
        for outcome in course.run(lessons, out, inplace=chosen.inplace):
            outcomes.append(outcome)  # and stored at once: whatever stops the run, what is done is not lost
            outcomes[-1] = course.store(outcome, out / "results", outcomes[:-1])
    except KeyboardInterrupt:
        interrupted = True
    return _sum_up(outcomes, len(lessons), out, interrupted)


def _keep(outcomes: list, out: Path) -> Path:
    """Write the page: what an earlier run of this machine left in the folder is on it too."""
    from effgpu import course, report
    from effgpu.device import describe

    device = describe()
    lessons = {
        earlier.name: earlier
        for earlier in course.read_lessons(out / "notebooks")
        if all(comparison.device.slug == device.slug for comparison in earlier.comparisons)
    }
    lessons |= {outcome.name: outcome for outcome in outcomes}
    section = report.Section(device, tuple(lessons[name] for name in sorted(lessons)))
    return report.write(out / "report.html", [section])


def _sum_up(outcomes: list, asked: int, out: Path, interrupted: bool) -> int:
    failed = {outcome.name: outcome.failure for outcome in outcomes if outcome.failure}
    told = f"{len(outcomes) - len(failed)} of {asked} lessons ran without an error"
    try:
        told += f": {_keep(outcomes, out)}"
    except OSError as error:  # a full disk, say
        failed["the page"] = error
    for name, failure in failed.items():
        print(f"failed: {name}: {failure}", file=sys.stderr)
    if interrupted:
        print(f"interrupted: {asked - len(outcomes)} of {asked} lessons were not run", file=sys.stderr)
    print(told)
    return INTERRUPTED if interrupted else SOMETHING_FAILED if failed else NOTHING_FAILED


def _report(chosen: argparse.Namespace) -> int:
    from effgpu import reference, report

    if chosen.out.resolve() in [path.resolve() for path in chosen.results]:
        return _refuse(f"--out: expected a file for the page, got the results in {chosen.out}")
    try:
        machines = {path: reference.load(path) for path in chosen.results}
        if empty := [str(path) for path, comparisons in machines.items() if not comparisons]:
            return _refuse(f"{', '.join(empty)}: no comparisons in it")
        print(report.write(chosen.out, [report.from_results(comparisons) for comparisons in machines.values()]))
    except (OSError, ValueError) as error:
        return _refuse(error)
    return NOTHING_FAILED


def _refuse(reason: object) -> int:
    print(f"effgpu: error: {' '.join(str(reason).split())}", file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
