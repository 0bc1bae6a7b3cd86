"""The process in which a script runs as `__main__`, under a plan: `python -m effgpu.attaching.child ORDER`.

The process ends when its plan does, in the middle of the script: nothing that a script does at its end runs, and
`except:` stops nothing. `scripts.py` starts it and reads its answer.
"""

import contextlib
import gc
import importlib
import itertools
import multiprocessing.process
import os
import pickle
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from effgpu.attaching.commands import STARTERS
from effgpu.attaching.terminal import cut, give_size
from effgpu.errors import Refusal

if TYPE_CHECKING:
    from effgpu.attaching.steps import Marks

_OURS = str(Path(__file__).parents[1]) + os.sep
WHERE, TOLD_EVERY = "where", 1.0  # the file, beside the answer, that says how far the script is; seconds
NOTE = "effgpu: "  # begins what a plan adds to an error of the script's
_PATIENCE, _IDLE = 10.0, 0.1  # seconds that a script may wait for a failed thread; a waiting thread's share of a CPU
_STARTS_PYTHON = re.compile(rf"\S*\b({STARTERS}|deepspeed|[\w-]+\.py)\s")
_OTHERS = {"jax": "JAX", "tensorflow": "TensorFlow"}


class CannotFollow(Refusal):
    """Why a plan cannot go on, in one line, for whoever started it."""


class Again(Exception):
    """The script has to run again from its beginning, with these options of the plan."""

    def __init__(self, options: dict[str, object]):
        super().__init__()
        self.options = options


def main(path: str, parent: int | None = None) -> NoReturn:
    """Run the script of an order, a file that `scripts.run` writes, and leave the answer in the file that it names.

    It ends as soon as the other end of the pipe is closed whose descriptor is `parent`, if it is given.
    """
    order = pickle.loads(Path(path).read_bytes())
    process = os.getpid()

    def leave(code: int = 0, **answer: object) -> NoReturn:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if os.getpid() == process:
            _call_all(marks.leaving)
            _call_all(_removing_temporary())
        if os.getpid() != process:
            answer = {"refused": f"trains in a process of its own: {_TRAIN_HERE}"}
        part = Path(f"{order['answer']}.part")
        part.write_bytes(pickle.dumps({"steps": marks.count} | answer))
        part.replace(order["answer"])
        os._exit(code)

    def guarded(plan):
        try:
            if os.getpid() != process:
                leave()
            return (yield from plan)
        except Refusal as why:  # of what the plan does itself
            leave(refused=str(why))

    from effgpu.attaching.steps import Marks

    marks = Marks(lambda result: leave(result=result))
    if parent is not None:
        _end_with(parent, marks.leaving)
    module, _, name = order["plan"].partition(":")
    planned = getattr(importlib.import_module(module), name)
    started = _note_processes()
    give_size()
    watched = Path(order["answer"]).with_name(WHERE), marks, _note_failed_threads(marks), leave
    threading.Thread(target=_watch, args=watched, daemon=True).start()
    try:
        with planned(marks, **order["options"]) as make_plan, marks.pushing(lambda: guarded(make_plan())):
            try:
                _run(order)
            except SystemExit as end:
                if not end.code:
                    marks.end()
                raise
            marks.end()
        code = 0
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except Again as wish:
        leave(again=wish.options)
    except CannotFollow as why:
        leave(refused=str(why), line=find_line(why.__cause__ or why))
    except BaseException as error:
        _show(error)
        line = find_line(error)
        leave(1, failed=f"{describe_error(error)}{f' ({line})' if line else ''}")
    code = code if isinstance(code, int) else int(code is not None)
    if code:
        leave(code, exited=code)
    leave(ended=_explain_end(marks, started, order["needs"]))


_TRAIN_HERE = "let the first process train, as with one process in place of several"


def _run(order: dict) -> None:
    gc.freeze()  # what is imported stays: to look at it in each collection takes longer than all else
    sys.argv = [order["name"], *order["arguments"]]
    if order["is_module"]:
        sys.path[0] = os.getcwd()
        runpy.run_module(order["name"], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(order["name"]).resolve().parent)
        runpy.run_path(order["name"], run_name="__main__")


def _note_processes() -> list[str]:
    """What is started from here on: "" for a process of `multiprocessing`, else the command of a Python program."""
    started, start, popen = [], multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__

    def note(process):
        started.append("")
        return start(process)

    def note_command(process, args, *others, **options):
        command = (
            os.fsdecode(args) if isinstance(args, (str, bytes, os.PathLike)) else shlex.join(map(os.fsdecode, args))
        )
        if _STARTS_PYTHON.match(command) and "torch._inductor" not in command:  # which compiles in processes
            started.append(command)
        return popen(process, args, *others, **options)

    multiprocessing.process.BaseProcess.start = note
    subprocess.Popen.__init__ = note_command
    return started


def _note_failed_threads(marks: "Marks") -> list[dict[str, str | None]]:
    """The answers that errors of the script's threads are, from here on. No error is held, nor what its frames hold."""
    answers, tell = [], threading.excepthook

    def note(args):
        marks.in_thread = True
        error, line = args.exc_value, find_line(args.exc_value)
        if isinstance(error, Refusal):
            answers.append({"refused": str(error), "line": line})
        elif not isinstance(error, SystemExit):
            where = f" ({line})" if line else ""
            answers.append({"failed": f"a thread of the script failed: {describe_error(error)}{where}"})
        tell(args)

    threading.excepthook = note
    return answers


def _explain_end(marks: "Marks", processes: list[str], needs: int | str) -> str:
    steps, why = marks.total, f"; not known here: {marks.guessed}" * bool(marks.guessed)
    for name, library in _OTHERS.items():
        if not steps and name in sys.modules:
            return f"uses {library}: only training with PyTorch is understood"
    if not steps and marks.in_thread:
        return "made no step in its main thread, but has another one that may train: let the main thread train"
    if not steps and processes:
        if command := next(filter(None, processes), ""):
            return f"made no step itself, but started another program that may train: give that one, {cut(command)}"
        return f"started processes and made no step itself: {_TRAIN_HERE}"
    if not steps:
        ended = "ended without a step of an optimizer of PyTorch's"
        return f"{ended}: let it train, or call effgpu.tick() once per step{why}"
    made = "a step" if steps == 1 else f"{steps} steps"
    made += f", at most {marks.most} with one optimizer" * (marks.most < steps)
    if isinstance(needs, int) and marks.most >= needs:  # so the plan has waited for one that is like the others
        needs = "more"
        why = f", as the last held what not every step does, such as an evaluation{why}"
    return f"ended after {made}, and {needs} are needed: give it more of them, or more data{why}"


def _is_ours(file: str) -> bool:
    return file.startswith((_OURS, "<frozen"))


def find_line(error: BaseException) -> str | None:
    """The innermost line of the reader's that an error came through."""
    from effgpu.attaching.sites import READER, whose

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    lines = [f"{frame.filename}:{frame.lineno}" for frame in frames if whose(frame.filename) is READER]
    return lines[-1] if lines else None


def _watch(path: Path, marks: "Marks", failures: list[dict], leave: Callable) -> None:
    """Keep writing where the script is, and leave where it does nothing more after one of its threads has failed."""
    script = threading.main_thread().ident
    idle, before, ours = 0.0, (0, 0.0), threading.active_count()  # the script has none yet
    while True:
        time.sleep(TOLD_EVERY)
        now = marks.count, _cpu_seconds(script)
        waits = failures and not marks.doing and now[0] == before[0] and now[1] - before[1] < _IDLE * TOLD_EVERY
        idle, before = idle + TOLD_EVERY if waits else 0.0, now
        if idle >= (TOLD_EVERY if _waits_for_ever(script, ours) else _PATIENCE):
            leave(1, **failures[0])
        _tell_where(path, marks, script)


def _waits_for_ever(thread: int, ours: int) -> bool:
    """Whether a thread waits, for as long as it takes, for another one, and all that are there are `ours`."""
    frame = sys._current_frames().get(thread)
    waits = frame is not None and frame.f_code is threading.Condition.wait.__code__
    return waits and frame.f_locals["timeout"] is None and threading.active_count() == ours


def _cpu_seconds(thread: int) -> float:
    """What a thread has used of the CPU; where no system tells, what the process has."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    return time.clock_gettime(clock_of(thread)) if clock_of else time.process_time()


def _tell_where(path: Path, marks: "Marks", script: int) -> None:
    """Write how many steps are done, and which line of the reader's the script is at."""
    part = path.with_suffix(".part")
    with contextlib.suppress(OSError):
        doing = f", {marks.doing}" if marks.doing else _find_place(script)
        slowed = f"; {marks.slowed}" if marks.slowed else ""
        part.write_text(f": {marks.count} step{'s' * (marks.count != 1)}{doing}{slowed}")
        part.replace(path)


def _find_place(thread: int) -> str:
    """The line of a reader's file that a thread is at. It holds no frame for long: what a frame holds would live on.

    Code that Python has written itself, as for a dataclass, is in no file.
    """
    from effgpu.attaching.sites import READER, name_file, whose

    for frame, line in traceback.walk_stack(sys._current_frames().get(thread)):
        file = frame.f_code.co_filename
        if whose(file) is READER and not file.startswith("<"):
            return f", now in {name_file(file)}:{line}"
    return ""


def _show(error: BaseException) -> None:
    """Print a traceback as Python would, without effgpu's frames, and PyTorch's inside of what the script called."""
    shown = traceback.TracebackException.from_exception(error)
    one = shown
    while one:
        kept = [frame for frame in one.stack if not _is_ours(frame.filename)]
        one.stack = traceback.StackSummary.from_list(_without_insides(kept) or kept or one.stack)
        one = one.__cause__ or one.__context__
    print("".join(shown.format()), end="", file=sys.stderr)


def _without_insides(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames up to the innermost of the reader's or a library's, and what these call that is not PyTorch's."""
    from effgpu.attaching.sites import LIBRARY, READER, TORCH, whose

    owners = [whose(frame.filename) for frame in frames]
    own = max((number for number, owner in enumerate(owners) if owner in (READER, LIBRARY)), default=-1)
    end = owners.index(TORCH, own + 1) if TORCH in owners[own + 1 :] else None
    return frames[:end]


def describe_error(error: BaseException) -> str:
    """An error's kind and the first line of what it says, with what a plan has noted."""
    lines = str(error).strip().splitlines()
    notes = [f"; {note.removeprefix(NOTE)}" for note in getattr(error, "__notes__", ()) if note.startswith(NOTE)]
    return "".join([type(error).__name__, *(f": {cut(line)}" for line in lines[:1]), *notes])


def _removing_temporary() -> list[Callable]:
    """What removes all that tempfile removes where Python ends by itself: folders, and files that are open."""
    removes = {tempfile.TemporaryDirectory: "cleanup", tempfile._TemporaryFileWrapper: "close"}
    objects = gc.get_objects()  # the script's own. They may be many: in C, to look at each takes a quarter of the time
    found = itertools.compress(objects, map(removes.__contains__, map(type, objects)))
    return [getattr(each, removes[type(each)]) for each in found]


def _call_all(functions: list[Callable]) -> None:
    for each in functions:
        with contextlib.suppress(Exception):
            each()


def _end_with(parent: int, leaving: list[Callable]) -> None:
    """Leave, and end all that was started, as soon as the other end of this pipe is closed."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(parent, 1)
        _call_all(leaving)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    from effgpu.attaching import child  # not as __main__: that is the script's name

    child.main(sys.argv[1], *map(int, sys.argv[2:]))
