"""One command in several commits of a git repository, each checked out beside it."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from effgpu.attaching.commands import Command, read_command
from effgpu.benching.processes import ignore_interrupts


@contextlib.contextmanager
def check_out(given: str | Sequence[str], refs: Sequence[str]) -> Iterator[dict[str, Command]]:
    """A command by commit, in checkouts of this repository, which are removed afterwards.

    It runs in the folder that corresponds to the current one. Python imports the checkout's packages, even if they are
    installed from another one. Raises ValueError for what git does not know.
    """
    inside = Path.cwd().resolve().relative_to(Path(_git("rev-parse", "--show-toplevel")).resolve())
    holder, commands = Path(tempfile.mkdtemp(prefix="effgpu-checkout-")), {}
    try:
        for number, ref in enumerate(refs):
            checkout = holder / str(number)
            _git("worktree", "add", "--detach", "--quiet", str(checkout), ref)
            places = filter(None, [str(checkout), str(checkout / "src"), os.environ.get("PYTHONPATH")])
            commands[ref] = read_command(given, checkout / inside, {"PYTHONPATH": os.pathsep.join(places)})
        yield commands
    finally:
        with ignore_interrupts():
            shutil.rmtree(holder, ignore_errors=True)
            _git("worktree", "prune")


def _git(*arguments: str) -> str:
    answer = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if answer.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {answer.stderr.strip()}")
    return answer.stdout.strip()
