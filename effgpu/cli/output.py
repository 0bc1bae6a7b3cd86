"""Where a command's result goes: the terminal, `--json` and `--trace`. What cannot be written is refused before it."""

import argparse
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effgpu.cli.exits import REFUSED, Exit, refusing

if TYPE_CHECKING:
    from effgpu.predicting.timeline import Timeline


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add `--json` and `--trace`, which `predict` and `doctor` share."""
    parser.add_argument("--json", metavar="FILE", help="write the result there; - is standard output, without table")
    trace_help = "write the predicted timeline of one step there, for ui.perfetto.dev"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace_help)


def give(
    result: object,
    chosen: argparse.Namespace,
    shown: object = None,
    save: Callable | None = None,
    timeline: "Timeline | None" = None,
) -> None:
    """Print a result, or what is `shown` of it, then store it with --json, and its timeline with --trace.

    It is stored also where whoever reads what is printed has ended early.
    With --json -, its JSON is all that is printed. `save` writes it in another way than as its JSON.
    """
    to_print = chosen.json == "-"  # whose encoding may be any
    as_json = json.dumps(result.to_dict(), indent=2, ensure_ascii=to_print) if chosen.json else ""
    try:
        print(as_json if to_print else shown or result)
    finally:
        chosen.printed = True
        if chosen.json and not to_print:
            with refusing(OSError, ValueError):
                save([result], chosen.json) if save else Path(chosen.json).write_text(f"{as_json}\n", encoding="utf-8")
        if timeline:
            with refusing(OSError):
                timeline.save(chosen.trace)


def print_failed(why: str) -> None:
    """What stands on standard output where JSON was asked for, and there is no result."""
    print(json.dumps({"failed": why}, indent=2))


def asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether `--json -` is among arguments that argparse does not understand."""
    words = [*itertools.takewhile("--".__ne__, arguments)]
    return "--json=-" in words or ("--json", "-") in itertools.pairwise(words)


def check_files(chosen: argparse.Namespace) -> None:
    """Refuse files that could not be written in the end, and one that would overwrite another."""
    named = {f"--{name}": getattr(chosen, name, None) for name in ("json", "trace", "plot")}
    files = {option: Path(name) for option, name in named.items() if name and str(name) != "-"}
    if str(named["--trace"]) == "-":
        raise Exit(REFUSED, "--trace: expected a file, got -: standard output is for --json")
    for option, file in files.items():
        if not _can_write(file, makes_folders=option in getattr(chosen, "makes_folders", ())):
            raise Exit(REFUSED, f"{option}: expected a file that can be written, in a folder that exists, got {file}")
    if len({file.resolve() for file in files.values()}) < len(files):
        got = " and ".join(map(str, files.values()))
        raise Exit(REFUSED, f"{' and '.join(files)}: expected a file for each, got {got}")


def _can_write(file: Path, makes_folders: bool) -> bool:
    """Whether a file can be written. One that is not there is made for that, and taken away again."""
    try:
        if file.exists():
            return not file.is_dir() and os.access(file, os.W_OK)
        file = file.resolve()
        folder = next(each for each in file.parents if each.exists()) if makes_folders else file.parent
        if folder != file.parent:
            return folder.is_dir() and os.access(folder, os.W_OK)
        file.touch()
        file.unlink()
    except OSError:
        return False
    return True
