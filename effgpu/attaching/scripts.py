"""Runs a script under a plan, in a process of its own, and brings back what the plan returned."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from effgpu.attaching.child import WHERE
from effgpu.attaching.commands import Program
from effgpu.attaching.terminal import cut, empty_input

_PATIENCE = 15.0  # seconds of silence before a line says that it goes on, and between such lines
_LEAVES = 2.0  # seconds that a script which is interrupted has to delete what it computed
_LAST, _MOST = 20, 200  # lines of a script's output, shown where it fails: so many, or with tracebacks up to so many
_KILLED = 9  # the number of SIGKILL, which not every system has


class ScriptEnded(RuntimeError):
    """A script ended before its steps were made. `output` is the end of what it printed."""

    def __init__(self, text: str, output: str):
        super().__init__(text)
        self.output = output


class ScriptFailed(ScriptEnded):
    """A script ended with an error of its own, whose traceback is in the output."""


def run(program: Program, plan: str, *, needs: int | str = 3, **options: object) -> object:
    """What the plan returns that "package.module:function" gives for these options, run under the script's steps.

    The function is a context manager in the script's process, which also gets the script's Marks. The plan takes
    `needs` steps or more. The script does not outlive this process, however that one ends. Raises ScriptFailed for an
    error of the script's, ScriptEnded where it makes too few steps, and RuntimeError where the plan cannot be followed:
    one line that says why, and what to do.
    """
    while "again" in (found := _run(program, plan, needs, options)):
        options |= found["again"]
    return found["result"]


def _run(program: Program, plan: str, needs: int | str, options: dict[str, object]) -> dict[str, object]:
    """The answer of the script's process: {"result": ...}, or {"again": options}. Raises as `run`."""
    with tempfile.TemporaryDirectory(prefix="effgpu-", ignore_cleanup_errors=True) as folder:
        order, answer, log = (Path(folder) / name for name in ("order", "answer", "log"))
        asked = {name: getattr(program, name) for name in ("name", "is_module", "arguments")}
        order.write_bytes(
            pickle.dumps(asked | {"plan": plan, "needs": needs, "options": options, "answer": str(answer)})
        )
        code = _wait(program, order, log)
        output = log.read_text(errors="replace")
        if not answer.exists():
            raise ScriptFailed(f"{program} {_tell_end(code, output)}", _shorten(output))
        found = pickle.loads(answer.read_bytes())
    if "result" in found or "again" in found:
        return found
    at = f"after step {found['steps']}" if found["steps"] else "before its first step"
    if "exited" in found:
        above = ", see its message above" if output.strip() else ""
        raise ScriptFailed(f"{program} ended itself {at} (exit code {found['exited']}){above}", _shorten(output))
    if "failed" in found:
        raise ScriptFailed(f"{program} failed {at}: {found['failed']}", _shorten(output))
    if "refused" in found:
        line = f" ({found['line']})" if found.get("line") else ""
        raise RuntimeError(f"{program}: {found['refused']}{line}")
    raise ScriptEnded(f"{program} {found['ended']}", _shorten(output))


def _wait(program: Program, order: Path, log: Path) -> int:
    """Start the script's process, wait for its end, and end all that it started. Returns its exit code."""
    command = [*program.python, "-m", "effgpu.attaching.child", str(order)]
    group, held = {}, contextlib.ExitStack()
    if os.name == "posix":
        watched, ours = os.pipe()  # the child reads its end until ours is closed, by whatever ends this process
        held.callback(os.close, ours)
        command.append(str(watched))
        group = {"start_new_session": True, "pass_fds": (watched,)}  # which has no terminal that one could ask
    with held, empty_input() as nothing, log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=nothing,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | program.command.variables,
            cwd=program.command.folder,
            **group,
        )
        if group:
            os.close(watched)
        return _wait_for(process, program, order.with_name(WHERE), held.close)


def _wait_for(process: subprocess.Popen, program: Program, where: Path, let_go: Callable[[], None]) -> int:
    began = time.monotonic()
    try:
        while True:
            try:
                return process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                told = where.read_text() if where.exists() else ""
                print(f"effgpu: {program} has run for {time.monotonic() - began:.0f} s{told}", file=sys.stderr)
    finally:
        let_go()
        if os.name == "posix":
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LEAVES)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()


def _tell_end(code: int, output: str) -> str:
    if "No module named effgpu" in output or "No module named 'effgpu" in output:
        return "is run by a Python that has no effgpu: pip install it there"
    if code in (-_KILLED, 128 + _KILLED):
        return "was killed, as the system does when the host's memory runs out"
    return f"ended by itself in the middle (exit code {code})"


def _shorten(output: str) -> str:
    """The end of the output, with all of its tracebacks up to a length, and how many lines came before."""
    lines = output.splitlines()
    first = max(0, len(lines) - _MOST)
    starts = [number for number in range(first, len(lines)) if lines[number].startswith("Traceback (most recent")]
    start = min([*starts, max(0, len(lines) - _LAST)])
    before = [f"[lines of its output before these: {start}]"] if start else []
    return "\n".join([*before, *map(cut, lines[start:])])
