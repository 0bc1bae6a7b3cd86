"""Commands that start a training script: how a shell reads one, and what Python would run for it as `__main__`."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TAKE_A_VALUE = ("-W", "-X")  # Python's own options that are two words
_HAS_EFFGPU = "from importlib.util import find_spec; exit(not (find_spec('effgpu') and find_spec('torch')))"
_ONE_PROCESS = "one process is predicted"
_LAUNCHERS = {  # their options that take no value, as far as they are in use; all others take one
    "torchrun": "standalone no-python run-path virtual-local-rank use-env",
    "accelerate": """cpu mps multi_gpu tpu use_xpu use_deepspeed use_fsdp use_megatron_lm use_parallelism_config quiet
    dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation same_network no_python debug no_tpu_cluster
    enable_cpu_affinity""",
}
_PYTHON = r"python[\d.]*"
STARTERS = "|".join((_PYTHON, *_LAUNCHERS))  # a pattern: programs that start a script, and do nothing without one
_COUNTS = ("num_processes", "nproc_per_node", "nnodes", "num_machines")
_SPREADS = ("multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config")
_PRECISION = "mixed_precision"


@dataclass(frozen=True)
class Command:
    """What is run: the arguments, the variables that are set before them, and in which folder."""

    arguments: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def __str__(self) -> str:
        return shlex.join(self.arguments)


def read_command(
    given: str | Sequence[str], folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> Command:
    """A command as a shell would read it, without the shell: `OMP_NUM_THREADS=1 python train.py --lr 0.1`.

    It runs in `folder`, with `variables` and its own. Raises ValueError for an empty command or a program that is not
    there.
    """
    words, own = _split(given)
    program = words[0]
    if folder and os.sep in program:  # the folder's own, else such as .venv/bin/python, which a checkout does not have
        program = shutil.which(os.path.join(folder, program)) or os.path.abspath(program)
    if not shutil.which(program):
        raise ValueError(f"command {shlex.join(words)!r}: there is no program {words[0]!r}")
    return Command((program, *words[1:]), {**(variables or {}), **own}, folder)


def _split(given: str | Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The words of a command, from its program on, and the variables that are set before it."""
    words, variables = shlex.split(given) if isinstance(given, str) else list(map(str, given)), {}
    while words and re.match(r"[A-Za-z_]\w*=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if not words:
        raise ValueError(f"command: expected a program with its arguments, such as 'python train.py', got {given!r}")
    return words, variables


@dataclass(frozen=True)
class Program:
    """What a command runs as `__main__`: a file, or with `is_module` a module's name; with its arguments.

    `python` is the interpreter with its own options, `command` what it was read from, with variables and folder.
    `called` is what it is called where that is not its name.
    """

    python: tuple[str, ...]
    name: str
    is_module: bool
    arguments: tuple[str, ...]
    command: Command
    called: str = ""

    def __str__(self) -> str:
        return self.called or self.name


def read_program(given: str | Sequence[str]) -> Program:
    """The Python program of a command: `train.py --lr 1`, `python -m package.train`, `accelerate launch train.py`.

    `torchrun` and `accelerate launch` are left out, with what they would set, as only one process is run. Raises
    ValueError for several, for what is no Python program, and for a file that is not there.
    """
    words, variables = _split(given)
    python, name = (sys.executable,), Path(words[0]).name
    if os.sep in words[0] and (beside := Path(words[0]).with_name("python")).is_file() and name in _LAUNCHERS:
        python = (str(beside),)
    if name in _LAUNCHERS:
        words = _without_launcher(name, words[1:], variables)
    elif re.fullmatch(_PYTHON, name):
        python, words = _read_python(words)
        if words[:2] == ["-m", "torch.distributed.run"]:
            words = _without_launcher("torchrun", words[2:], variables)
        elif words[:2] == ["-m", "torch.distributed.launch"]:
            words = _without_launch(words[2:], variables)
        elif words[:2] == ["-m", "accelerate.commands.launch"]:
            words = _without_launcher("accelerate", ["launch", *words[2:]], variables)
    if (ranks := {**os.environ, **variables}.get("WORLD_SIZE") or "1") != "1":
        raise ValueError(f"WORLD_SIZE is {ranks}, and {_ONE_PROCESS}: leave it out, or set it to 1")
    command = Command((*python, *words), variables)
    if words[:1] == ["-m"] and len(words) > 1:
        return Program(python, words[1], True, tuple(words[2:]), command)
    if not words or words[0].startswith("-"):
        raise ValueError(f"command: expected a Python file or -m and a module, got {shlex.join(words) or given!r}")
    path = Path(words[0])
    if not path.is_file() and path.suffix != ".py" and (found := shutil.which(words[0])):
        path = Path(found)  # such as a library's own command: a script of Python's, if it is one
    if not path.is_file():
        raise ValueError(f"{words[0]}: expected a Python file, as in `python train.py`, and there is none of this name")
    if path.suffix != ".py" and not _starts_python(path):
        raise ValueError(f"{words[0]}: expected a Python program, as in `python train.py`: what it starts is not seen")
    return Program(python, str(path), False, tuple(words[1:]), command)


def _starts_python(path: Path) -> bool:
    with path.open("rb") as file:
        return re.match(rb"#!.*python", file.readline(200)) is not None


def _read_python(words: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The interpreter with its own options, and the words after them. The plain name is one that has effgpu."""
    python, words = words[0], words[1:]
    if not (found := shutil.which(python)):
        raise ValueError(f"command: there is no program {python!r}")
    if os.sep not in python and Path(found).absolute() != Path(sys.executable).absolute():
        has = subprocess.run([found, "-c", _HAS_EFFGPU], capture_output=True).returncode == 0
        found = found if has else sys.executable
    options = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        options.append(words.pop(0))
        if options[-1] in _TAKE_A_VALUE and words:
            options.append(words.pop(0))
    if words[:1] == ["-c"]:
        raise ValueError("command: expected a Python file or a module, got -c: write it to a file")
    return (found, *options), words


def _without_launcher(launcher: str, words: list[str], variables: dict[str, str]) -> list[str]:
    """The program that a launcher starts, with its arguments; `variables` get what it would set for one process.

    Raises ValueError where it would start several processes.
    """
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise ValueError("command: of accelerate, only `accelerate launch` is understood")
        words = words[1:]
    lone, options = _LAUNCHERS[launcher].replace("-", "_").split(), {}
    while words and words[0].startswith("-"):
        name, given, value = words.pop(0).lstrip("-").replace("-", "_").partition("=")
        if name in ("m", "module"):
            words.insert(0, "-m")
            break
        if not given and name not in lone and words:
            value = words.pop(0)
        options[name] = value
    several = [name for name in _COUNTS if options.get(name, "1") not in ("1", "1:1")]
    several += [name for name in _SPREADS if name in options]
    if several:
        raise ValueError(
            f"{launcher} --{several[0]}: {_ONE_PROCESS}, so start it for one, as in `python {_file(words)}`"
        )
    if launcher == "torchrun":
        one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        variables.update({**one, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    elif _PRECISION in options:
        variables["ACCELERATE_MIXED_PRECISION"] = options[_PRECISION]
    if "gradient_accumulation_steps" in options:
        variables["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = options["gradient_accumulation_steps"]
    return words


def _without_launch(given: list[str], variables: dict[str, str]) -> list[str]:
    """The same of torch.distributed.launch, which without `--use-env` tells the program its rank by an argument."""
    words = _without_launcher("torchrun", [*given], variables)
    its_own = given[: len(given) - len(words)]
    if not {"--use-env", "--use_env"}.isdisjoint(its_own):
        return words
    after = 2 if words[:1] == ["-m"] else 1  # the name of the program
    return [*words[:after], "--local-rank=0", *words[after:]]


def _file(words: Sequence[str]) -> str:
    return next((word for word in words if word.endswith(".py")), "train.py")
