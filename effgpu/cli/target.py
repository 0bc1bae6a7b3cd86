"""What `predict` and `doctor` look at: a training script as it is, or FILE.py:VARIANT, a function of a file."""

import argparse
import contextlib
import itertools
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from effgpu.attaching.commands import read_program
from effgpu.attaching.scripts import ScriptEnded, ScriptFailed
from effgpu.cli.exits import FAILED, REFUSED, Exit, refusing
from effgpu.errors import Refusal
from effgpu.predicting.gpus import TABLE, read_table

_HELP = "a training script as it is, after --, as in -- python train.py --batch 12; or a function of a file"


def add_words(parser: argparse.ArgumentParser) -> None:
    """Add the argument `words`: those of the command, or the one that names a function."""
    parser.add_argument("words", nargs="*", metavar="COMMAND | FILE.py:VARIANT", help=_HELP)


def tell_more(*examples: str, gpus: bool = True) -> dict[str, object]:
    """What a command's --help ends with: examples and, with `gpus`, the names of GPUs. Options of `add_parser`."""
    told = "\n  ".join(["examples:", *examples])
    if gpus:
        names = f'GPUs: {", ".join(read_table(TABLE))}, those of effgpu calibrate, or a size such as "16 GiB"'
        told += f"\n\n{textwrap.fill(names, 100)}"
    return {"epilog": told, "formatter_class": argparse.RawDescriptionHelpFormatter}


def put_variant_last(arguments: list[str]) -> list[str]:
    """The arguments, with FILE.py:VARIANT behind the --, where its own follow: argparse takes them together."""
    found = _find_variants(arguments)
    if not found or "--" not in arguments:
        return arguments
    end = arguments.index("--")
    rest = [word for word in arguments[:end] if word not in found]
    return [*rest, "--", *found, *arguments[end + 1 :]]


def check_one_variant(arguments: list[str]) -> None:
    """Refuse arguments that name several functions."""
    if len(found := _find_variants(arguments)) > 1:
        raise Exit(REFUSED, f"{arguments[0]}: expected one FILE.py:VARIANT, got {' and '.join(found)}")


def _find_variants(arguments: list[str]) -> list[str]:
    """Each FILE.py:VARIANT that `predict` or `doctor` is given, and not the function's file behind the --."""
    if arguments[:1] not in (["predict"], ["doctor"]):
        return []
    return [word for word in itertools.takewhile("--".__ne__, arguments) if re.search(r"\.py:\w*$", word)]


def read_words(words: list[str]) -> str | list[str] | None:
    """The command among them, None where they name a function. Refuses, before anything runs, what is neither."""
    only = words[0] if len(words) == 1 else " "  # a command in quotes has a space
    is_command = " " in only or only.endswith(".py") or Path(only).is_file() or shutil.which(only)  # as if installed
    if not is_command or re.fullmatch(r"\S+\.py:\w*", words[0]):
        _find_file(words[0])
        return None
    with refusing(ValueError):
        read_program(only.strip() or words)
    return only.strip() or words


@contextlib.contextmanager
def opened(
    words: list[str], command: str | list[str] | None, before: str
) -> Iterator[tuple[object, dict[str, object]]]:
    """The variant or the command, and the names of the variant's file. Inside, errors of either become exit codes.

    `command` is what `read_words` gives for the words. `before` is said before it starts; {} stands for it.
    """
    if command is None:
        with _failing(words[0]):
            found = _load(words[0], words[1:])
            with refusing(Refusal):
                yield found
        return
    print(before.format(command if isinstance(command, str) else shlex.join(command)), file=sys.stderr)
    with refusing(TypeError, ValueError, RuntimeError):
        try:
            yield command, {}
        except ScriptEnded as ended:
            if ended.output:
                print(ended.output, file=sys.stderr)
            if isinstance(ended, ScriptFailed):
                raise Exit(FAILED, str(ended)) from ended
            raise


@contextlib.contextmanager
def _failing(name: str) -> Iterator[None]:
    """An error of the file that `name` is in, as one line that says where it is."""
    from effgpu.attaching.child import describe_error, find_line

    try:
        yield
    except Exit:
        raise
    except (Exception, SystemExit) as error:
        line = find_line(error)
        raise Exit(FAILED, f"{name} failed: {describe_error(error)}{f' ({line})' if line else ''}") from error


def _find_file(asked: str) -> tuple[Path, str]:
    """The file and the name of FILE.py:VARIANT, or package.module:VARIANT."""
    path, _, name = asked.rpartition(":")
    if not path:
        raise Exit(REFUSED, f"expected a command, as in -- python train.py, or FILE.py:VARIANT; got {asked}")
    if not name:
        raise Exit(REFUSED, f"{asked}: expected the name of a function after the colon, as in {asked}variant")
    path = Path(path)
    if not path.is_file() and (found := Path(*str(path).split(".")).with_suffix(".py")).is_file():
        path = found
    if not path.is_file() or path.suffix != ".py":
        raise Exit(REFUSED, f"{path}: expected a Python file")
    return path, name


def _load(asked: str, arguments: Sequence[str]) -> tuple[Callable, dict[str, object]]:
    """The function of FILE.py:VARIANT, or package.module:VARIANT, and all names of the file, which sees `arguments`.

    The file is run as a module, of its package where it is in one: so a DataLoader's workers find its classes. It stays
    one, and its folder a place of modules: a step may import what lies beside it, and pickle looks for its classes.
    """
    from effgpu.measuring.variants import is_function

    path, name = _find_file(asked)
    folder, full_name = path.resolve().parent, path.stem
    while (folder / "__init__.py").is_file():
        folder, full_name = folder.parent, f"{folder.name}.{full_name}"
    sys.path.insert(0, str(folder))
    if package := full_name.rpartition(".")[0]:
        import_module(package)
    spec = spec_from_file_location(full_name, path)
    module = module_from_spec(spec)
    sys.modules[full_name] = module
    before, sys.argv = sys.argv, [str(path), *arguments]
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = before
    names = vars(module)
    if not is_function(names.get(name)):
        raise Exit(REFUSED, f"{path}: expected a function called {name}")
    return names[name], names
