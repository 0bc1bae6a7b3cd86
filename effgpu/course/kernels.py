"""Start a lesson's kernel as a fork of one process, in which what lessons import has been imported.

`python -m effgpu.course.kernels` is that process. It reads requests from stdin, a JSON line each, answers each with the
process number of a fork, and ends when its stdin does; ipykernel ends a kernel whose parent has ended.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from functools import cache
from glob import glob
from typing import Any

from jupyter_client import KernelManager
from jupyter_client.provisioning import LocalProvisioner

LAUNCHER = "ipykernel_launcher"
IMPORTED = ["ipykernel.kernelapp", "datasets", "torch._dynamo", "torchvision", "transformers.trainer"]
IMPORTED += ["effgpu.comparison", "effgpu.predicting.walking", "effgpu.figures.plot"]
IMPORTED += ["effgpu.course.hub", "effgpu.course.workloads"]
INLINE = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # which matplotlib reads when it is imported
OPEN_FILES = "/proc/self/fd/*"
DRIVER = "nvidia-uvm"  # the file that the CUDA driver opens, which does not work in a fork


def fork_kernel(manager: KernelManager) -> None:
    """Let a manager start its kernel as a fork of a process that this one keeps; not where the system is not Linux."""
    if sys.platform == "linux":
        manager.provisioner = _Forking(kernel_spec=manager.kernel_spec, kernel_id=manager.kernel_id, parent=manager)


class _Forking(LocalProvisioner):
    async def launch_kernel(self, cmd: list[str], **options: Any) -> dict[str, Any]:
        if LAUNCHER not in cmd:  # not Python's kernel
            return await super().launch_kernel(cmd, **options)
        folder, environment = os.path.abspath(options.get("cwd") or "."), dict(options.get("env") or os.environ)
        self.process = _Fork(_ask(cmd, folder, environment))
        self.pid = self.pgid = self.process.pid
        return self.connection_info


class _Fork:
    """A process that is not a child of this one, with what jupyter_client asks of a `subprocess.Popen`."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid = pid
        self._handle = os.fdopen(os.pidfd_open(pid), "rb", buffering=0)

    def poll(self) -> int | None:
        """None while it runs, else 0: its exit code is not known."""
        return self._ended(0)

    def wait(self) -> int | None:
        return self._ended(None)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle.fileno(), number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, seconds: float | None) -> int | None:
        return 0 if select.select([self._handle], [], [], seconds)[0] else None


@cache
def _server() -> subprocess.Popen:
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", __name__], env=INLINE | os.environ, **options)


def _ask(*request) -> int:
    """The process number of a new fork. Raises RuntimeError where the process to fork has ended."""
    server = _server()
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(request), file=server.stdin, flush=True)
    if not (answer := server.stdout.readline()):
        _server.cache_clear()
        raise RuntimeError(f"{' '.join(server.args)} ended with exit code {server.wait()}; it starts the kernels")
    return int(answer)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # where an import that prints does no harm
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a kernel that has ended leaves nothing
    while request := sys.stdin.readline():
        if pid := os.fork():
            print(pid, file=answers, flush=True)
            continue
        answers.close()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _become_kernel(*json.loads(request))
        _end()


def _end() -> None:
    """End this process after what is to run at its end. To take apart all that is imported takes two seconds."""
    gc.freeze()
    atexit._run_exitfuncs()
    os._exit(0)


def _become_kernel(command: list[str], folder: str, environment: dict[str, str]) -> None:
    """Run the kernel that this command starts, in a process group of its own."""
    os.setsid()
    if sys.path[0] == os.getcwd():  # by -m: a kernel has its own folder there
        del sys.path[0]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if any(DRIVER in os.readlink(each) for each in glob(OPEN_FILES) if os.path.islink(each)):
        os.execve(command[0], command, environment)

    from ipykernel.kernelapp import IPKernelApp

    parent = f"--IPKernelApp.parent_handle={os.getppid()}"  # with which it ends
    IPKernelApp.launch_instance([*command[command.index(LAUNCHER) + 1 :], parent])


if __name__ == "__main__":
    _serve()
