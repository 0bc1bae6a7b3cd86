"""A command in a process of its own, which takes turns: started, awaited, frozen between its turns, and ended."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from effgpu.attaching import startup
from effgpu.attaching.commands import Command
from effgpu.attaching.terminal import cut, empty_input
from effgpu.attaching.ticking import ADDRESS, Connection
from effgpu.measuring import device
from effgpu.measuring.measurement import OUT_OF_MEMORY
from effgpu.storing import read_fields

_LAST_LINES = 12  # of a script's output, shown with a fault
_GRACE = 3.0  # seconds that a process has to end after SIGTERM
_OUT_OF_MEMORY = re.compile(
    "|".join(
        [*device.OUT_OF_MEMORY_PHRASES, "OutOfMemoryError", "NVML_SUCCESS ==.*CUDACachingAllocator", "^MemoryError"]
    ),
    re.M,
)
_FULL_OR_FAILED = re.compile("|".join(device.FULL_OR_FAILED))
_ASSERTED = re.compile("Assertion `.*failed|device-side assert")
_BUSY = "busy or unavailable"  # CUDA's error where a GPU is in the mode EXCLUSIVE_PROCESS
_STARTUP = str(Path(startup.__file__).parent)
_HINT = "let it train with an optimizer of PyTorch's, or call effgpu.tick() once per step"
_NO_EFFGPU = "cannot show its steps to the bench (ModuleNotFoundError: No module named 'effgpu"


def shows_out_of_memory(output: str) -> bool:
    """Whether what a process printed shows that it ran out of memory, and not that an assertion on the GPU failed.

    Before its first traceback it may have told what to do then.
    """
    said = output[max(0, output.find("Traceback (most recent call last)")) :]
    return bool(_OUT_OF_MEMORY.search(said) or (_FULL_OR_FAILED.search(said) and not _ASSERTED.search(output)))


class Fault(Exception):
    """Why a command gives no more measurements. `short` fits into a table; the message has the last lines of output.

    `crowded`: it may be the doing of the commands beside it, which hold memory or the GPU.
    """

    def __init__(self, short: str, message: str, *, crowded: bool = False):
        super().__init__(message)
        self.short, self.crowded = short, crowded


class Ended(Fault):
    """The script came to its end, without an error, after its first step."""


class Process:
    """A running command. `hello` is what its script said at its first step, `last` what it reported most recently.

    `idle` is called every second while nothing comes. `began` is when it started, in seconds of the system's clock.
    """

    def __init__(self, command: Command, log: Path, timeout: float, idle: Callable[[], object] = lambda: None):
        self.command, self.log, self.timeout, self.idle = command, log, timeout, idle
        self.began = 0.0
        self.hello: dict | None = None
        self.last: dict = {}
        self._token = secrets.token_hex(16)
        self._begin = 0
        self._popen: subprocess.Popen | None = None
        self._input = contextlib.ExitStack()
        self._listener: socket.socket | None = None
        self._connection: Connection | None = None
        self._groups: set[int] = set()

    def start(self) -> None:
        """Start the command, its output going to the end of the log, and wait for its first step.

        Raises Fault if it does not start, fails, or makes no step in time.
        """
        self._listener = socket.create_server(("127.0.0.1", 0))
        variables = os.environ | self.command.variables
        variables[ADDRESS] = f"{self._listener.getsockname()[1]}:{self._token}"
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, variables.get("PYTHONPATH")]))
        self.began = time.monotonic()
        with open(self.log, "ab") as output:
            self._begin = output.tell()
            try:
                self._popen = subprocess.Popen(
                    self.command.arguments,
                    stdin=self._input.enter_context(empty_input()),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    cwd=self.command.folder,
                    process_group=0,  # not a session: the system ends a group that is frozen when the bench is killed
                )
            except OSError as error:
                raise Fault("did not start", f"did not start: {error}") from error
        self._groups.add(self._popen.pid)
        deadline = time.monotonic() + self.timeout
        while self.hello is None:
            self._receive(1.0)
            if self.hello is None and time.monotonic() > deadline:
                why = f"made no step within {self.timeout:g} s: {_HINT}, or raise --timeout"
                raise self._fault("no step", why)

    def turn(self, lead: int, steps: int, expected: float = 0.0, meanwhile: Callable[[], object] | None = None) -> dict:
        """Let the script run `lead` steps and time `steps` more; returns its report.

        `meanwhile` is called every few milliseconds. Raises Fault if the script ends, crashes or hangs.
        """
        patience = self.timeout + 3 * expected
        deadline, poll = time.monotonic() + patience, 0.005 if meanwhile else 1.0
        self._connection.send({"lead": lead, "steps": steps})
        self._signal(signal.SIGCONT)
        while (report := self._receive(poll)) is None:
            if meanwhile:
                meanwhile()
            if time.monotonic() > deadline:
                raise self._hangs(patience)
        self._signal(signal.SIGSTOP)  # so that no process loads data ahead or disturbs the other's turn
        return report

    def follow(self, until: int | None) -> Iterator[dict]:
        """Let the script run up to step `until`, or to its end; yields its reports as they come.

        Raises Ended if the script ends by itself, and another Fault if it crashes or hangs.
        """
        self._connection.send({"until": until})
        while until is None or self.last["step"] < until:
            deadline = time.monotonic() + self.timeout
            while (report := self._receive(1.0)) is None:
                if time.monotonic() > deadline:
                    raise self._hangs(self.timeout)
            yield report

    def ask_to_end(self) -> None:
        """Ask all processes of the command to end, frozen ones too."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """End all processes of the command and wait for them."""
        self.ask_to_end()
        if self._popen:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_GRACE)
        self._signal(signal.SIGKILL)
        for pid in _find_processes(self._token):  # those that left the group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if self._popen:
            self._popen.wait()
        for closable in (self._connection, self._listener, self._input):
            if closable:
                closable.close()

    def _signal(self, number: int) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _receive(self, seconds: float) -> dict | None:
        """The next report, or None if there is none within so many seconds. Raises Fault for the end of the script."""
        if self._connection and self._connection.has_message:
            ready = [self._connection]
        else:
            ready = wait([end for end in (self._listener, self._connection) if end], min(seconds, 1.0))
        if self._listener in ready:
            self._admit()
        elif self._connection in ready:
            if message := self._connection.receive():
                self.last = message
                return message
            raise self._ended()
        elif self._connection is None and self._popen.poll() is not None:
            raise self._ended()
        elif not ready and seconds >= 1.0:
            self.idle()
        return None

    def _admit(self) -> None:
        """Take a connection: the script's, or of somebody who should not tick."""
        end, _ = self._listener.accept()
        end.settimeout(5.0)
        connection = Connection(end)
        message = connection.receive() or {}
        end.settimeout(None)
        if message.get("token") != self._token:
            connection.close()
        elif "fault" in message:
            raise self._fault(message["short"], message["fault"])
        elif self._connection:
            both = f"{self.hello['pid']} and {message['pid']}"
            raise self._fault("two processes train", f"two processes train ({both}): only one may")
        else:
            self._connection, self.hello, self.last = connection, message, message
            if message["group"] != os.getpgrp():
                self._groups.add(message["group"])

    def _ended(self) -> Fault:
        """What the end of the process means."""
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._popen.wait(_GRACE)
        how = "its connection is gone" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = signal.Signals(-code).name
        if code and shows_out_of_memory(self._output()):
            return self._fault(OUT_OF_MEMORY, f"is out of memory ({how})", crowded=True)
        if code and _BUSY in self._output():
            return self._fault("refused by the GPU", f"found the GPU in use by another process ({how})", crowded=True)
        if code in (-signal.SIGKILL, 128 + signal.SIGKILL):  # the latter as a shell reports it
            why = f"was killed ({how}), as the system does when the host's memory runs out"
            return self._fault("killed", why, crowded=True)
        if self.hello is None and _NO_EFFGPU in self._output():
            return self._fault("no effgpu", "is run by a Python that has no effgpu: pip install it there")
        if code == 0 and self.hello is None:
            return self._fault("no step", f"ended without two steps: {_HINT}")
        at = f"after step {self.last['step']}" if self.hello else "before its first step"
        if code == 0:
            return self._fault(f"ended {at}", f"ended {at} or later: let it train for more steps", kind=Ended)
        return self._fault(f"failed {at}", f"failed {at} ({how})")

    def _hangs(self, seconds: float) -> Fault:
        at = f"after step {self.last['step']}"
        return self._fault(f"hangs {at}", f"hangs {at}: no answer within {seconds:.3g} s (--timeout)")

    def _fault(self, short: str, why: str, *, crowded: bool = False, kind: type[Fault] = Fault) -> Fault:
        lines = [line for line in self._output().splitlines() if line.strip()][-_LAST_LINES:]
        shown = "".join(f"\n    {cut(line)}" for line in lines)
        return kind(short, f"{why}. Its output is in {self.log}{':' if lines else ''}{shown}", crowded=crowded)

    def _output(self) -> str:
        """The end of what the script has written."""
        with open(self.log, "rb") as output:
            output.seek(max(self._begin, os.path.getsize(self.log) - 20_000))
            return output.read().decode(errors="replace")


def keep(labels: Iterable[str], dead: Collection[str]) -> list[str]:
    """The commands that are worth going on with: none without the baseline or anything to compare with it."""
    first, *others = labels
    alive = [label for label in others if label not in dead]
    return [first, *alive] if first not in dead and (alive or not others) else []


def read_device(hello: Mapping) -> device.Device:
    """The device of a script, as it said at its first step; the CPU where it said nothing."""
    if described := hello.get("device"):
        return device.Device(**read_fields(device.Device, described))
    return device.describe_cpu(hello.get("versions", {}))


def end_all(processes: Iterable[Process]) -> None:
    """End all processes; neither Ctrl-C nor `kill` interrupts it."""
    processes = list(processes)
    with ignore_interrupts():
        for process in processes:
            process.ask_to_end()
        for process in processes:
            process.end()


def _find_processes(token: str) -> list[int]:
    """Processes that were started with this token in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if any(token in value for value in process.environ().values()):
                found.append(process.pid)
    return found


@contextlib.contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Inside, Ctrl-C does nothing, nor what acts like it: what ends processes, or removes files, goes on to its end."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGTERM] is not signal.default_int_handler:
        del before[signal.SIGTERM]
    try:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
    except ValueError:  # not in the main thread, which gets no interrupts
        before = {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
