"""`effgpu report`: one report of the results files of one or more machines."""

import argparse
from pathlib import Path

from effgpu.cli.exits import REFUSED, SUCCEEDED, Exit, check_installed, refusing


def add(commands: argparse._SubParsersAction) -> None:
    """Add the command with its options."""
    parser = commands.add_parser("report", help="write a report from the results files of one or more machines")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    parser.set_defaults(command=run)


def run(chosen: argparse.Namespace) -> int:
    """Write the report; returns the exit code."""
    check_installed("a report", "matplotlib")
    from effgpu import results
    from effgpu.course import report

    if chosen.out.resolve() in [path.resolve() for path in chosen.results]:
        raise Exit(REFUSED, f"--out: expected a file for the report, got the results file {chosen.out}")
    with refusing(OSError, ValueError):
        machines = {path: results.load(path) for path in chosen.results}
        if empty := [str(path) for path, comparisons in machines.items() if not comparisons]:
            raise ValueError(f"{', '.join(empty)}: expected comparisons, got none")
        page = report.write(chosen.out, [report.from_results(comparisons) for comparisons in machines.values()])
    print(page)
    return SUCCEEDED
