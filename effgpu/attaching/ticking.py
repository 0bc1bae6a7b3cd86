"""The script's side of `effgpu bench`: `tick`, called once per step. It loads nothing but Python's own library."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from threading import get_ident

ADDRESS = "EFFGPU_BENCH"  # the environment variable in which the bench tells a script "PORT:TOKEN"
_ALL_LOSSES, _LOSS_EVERY = 50, 10  # of the first steps every loss is kept, then of every tenth: a copy takes 10 µs
_VERSIONED = ("torch", "torchvision", "transformers", "datasets")


def tick(items: object = None, loss: object = None) -> None:
    """Say that one training step is done: call it once per step, in the loop of the training script.

    `items` are the samples, tokens, ... of the step, `loss` is its loss: numbers, or tensors of one element, which are
    not read before the end of a turn, so that a GPU never waits for them. Outside of `effgpu bench` this does nothing.
    Inside, the script waits here while the other command has its turn.

    Raises RuntimeError in a thread, a DataLoader worker or a second process, and TypeError for what is no number.
    """
    if _script is not None:
        _script.tick(items, loss)


class _Script:
    """What the ticking process of a command knows. `next` is the step at which its next stage begins."""

    def __init__(self, address: str):
        port, _, self.token = address.partition(":")
        self.port, self.step, self.next = int(port), 0, 1
        self.losses, self.items, self.counting = [], [], False
        self.thread = threading.main_thread().ident
        self.connection: Connection | None = None
        self.stages = self._run()

    def tick(self, items: object, loss: object) -> None:
        """Note a step. The stages between turns cost nothing but a comparison here."""
        if get_ident() != self.thread:
            self._refuse()
        self.step = step = self.step + 1
        if loss is not None and (step % _LOSS_EVERY == 0 or step <= _ALL_LOSSES):
            self.losses.append((step, _keep(loss)))
        if self.counting:
            self.items.append(items if items.__class__ is int else _keep(items))
        if step == self.next:
            next(self.stages, None)

    def _refuse(self) -> None:
        """Tell the bench and raise an error: a library may catch it, or a thread end with it."""
        where = "a DataLoader worker" if _is_worker() else "a second process" if self.thread is None else "a thread"
        told = f"effgpu.tick was called in {where}: call it in the training loop, once per step"
        with contextlib.suppress(OSError):
            self._connect().send({"token": self.token, "fault": told})
        raise RuntimeError(told)

    def _run(self) -> Iterator[None]:
        """The stages: each `yield` gives the thread back to the training until step `next`."""
        if not self._join():
            return
        while order := self.connection.receive():
            clock = _GpuClock() if self.on_gpu else _CpuClock()
            if order["lead"]:
                self.next += order["lead"]
                yield
            self.items, self.counting = [], True
            self.next += order["steps"]
            clock.start()
            yield
            seconds, late = clock.stop()
            self.counting = False
            turn = {"seconds": seconds, "late": late, "steps": order["steps"], "items": self._sum()}
            self.connection.send(self._report() | turn)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the bench is gone: end, with all processes that the script started

    def _join(self) -> bool:
        """Connect to the bench after the first step; False in a rank that does not tick."""
        global _script
        rank, ranks = _rank()
        if rank:
            _script = None
            return False
        if _is_worker():
            self._refuse()
        self.on_gpu = _is_on_gpu()
        try:
            self.connection = self._connect()
        except OSError:
            raise SystemExit("effgpu.tick: the bench that started this script is gone") from None
        about = {"pid": os.getpid(), "group": os.getpgrp(), "ranks": ranks, "kind": "cuda" if self.on_gpu else "cpu"}
        self.connection.send({"token": self.token} | about | self._describe() | self._report())
        return True

    def _connect(self) -> "Connection":
        end = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Connection(end)

    def _describe(self) -> dict:
        loaded = {name: sys.modules[name] for name in _VERSIONED if name in sys.modules}
        versions = {"python": ".".join(map(str, sys.version_info[:3]))}
        versions |= {name: str(getattr(module, "__version__", "")) for name, module in loaded.items()}
        if not self.on_gpu:
            return {"versions": versions}
        from dataclasses import asdict

        import torch

        from effgpu.measuring.device import describe

        return {"device": asdict(describe()), "uuid": str(torch.cuda.get_device_properties().uuid)}

    def _report(self) -> dict:
        """Where the script is, with the losses since the last report. Not within a timed window: it reads tensors."""
        losses = [(step, self._number("loss", loss)) for step, loss in self.losses]
        self.losses = []
        return {"step": self.step, "losses": losses, "peak": _peak(self.on_gpu), "workers": _count_workers()}

    def _sum(self) -> float | None:
        """The items of the counted steps; None if a step named none."""
        if any(items is None for items in self.items):
            return None
        return sum(self._number("items", items) for items in self.items)

    def _number(self, name: str, value: object) -> float:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            told = f"effgpu.tick({name}=...): expected a number or a tensor of one element, got {value!r}"
            raise TypeError(told) from error


class Connection:
    """A socket that carries one JSON object a line."""

    def __init__(self, end: socket.socket):
        self.socket, self._reader = end, end.makefile("rb")

    def fileno(self) -> int:
        """What `multiprocessing.connection.wait` waits for."""
        return self.socket.fileno()

    def send(self, message: dict) -> None:
        """Send one message. If the other side is gone, whoever reads next finds out."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict | None:
        """The next message; None if the other side is gone, or sends something else than JSON objects."""
        try:
            line = self._reader.readline()
            message = json.loads(line if line.endswith(b"\n") else b"")
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close the socket."""
        self._reader.close()
        self.socket.close()


class _CpuClock:
    """Seconds of a window, and seconds of work that was still running after it: of a CPU, none."""

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self.began, 0.0


class _GpuClock:
    """Two CUDA events, and one wait when the window is over. Late is the work of other streams than the current one."""

    def __init__(self):
        import torch

        self.cuda = torch.cuda
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (self.began, self.ended):
            event.record()  # the first time, CUDA makes the event: not while steps are timed

    def start(self) -> None:
        self.began.record()

    def stop(self) -> tuple[float, float]:
        self.ended.record()
        self.ended.synchronize()
        done = time.perf_counter()
        self.cuda.synchronize()
        return self.began.elapsed_time(self.ended) / 1000, time.perf_counter() - done


def _keep(value: object) -> object:
    """A tensor's value as of now, without a wait: the script may write to the tensor again."""
    detach = getattr(value, "detach", None)
    return value if detach is None else detach().clone()


def _rank() -> tuple[int, int]:
    """This process's rank and the number of ranks, by torch.distributed or by the launcher's variables."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def _is_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _is_on_gpu() -> bool:
    """Whether the first step has put anything on the current GPU.

    Raises RuntimeError or ValueError for another GPU, for several, and for an accelerator that is no CUDA GPU.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    from effgpu.measuring.device import NO_CACHING, check_accelerator, check_gpus

    check_accelerator()
    if not torch.cuda.is_initialized():
        return False
    used = [gpu for gpu in range(torch.cuda.device_count()) if torch.cuda.max_memory_allocated(gpu)]
    check_gpus(used, "the script")
    return bool(used or os.environ.get(NO_CACHING))  # with it, the allocator counts nothing


def _peak(on_gpu: bool) -> int | None:
    """Peak bytes of this process: of the GPU's allocator, or the most that was resident in the host's memory."""
    if on_gpu:
        import torch

        return torch.cuda.max_memory_allocated() or None  # None where the allocator counts nothing
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        # ru_maxrss would count what the bench itself had resident when it started this process
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _count_workers() -> int:
    """Processes that `multiprocessing` started, as DataLoader's workers are."""
    process = sys.modules.get("multiprocessing.process")
    return len(process.active_children()) if process else 0


def _after_fork() -> None:
    """In a process that was forked after the first step: only the process that trains may tick, and owns the socket."""
    if _script is not None and _script.connection:
        _script.connection.close()
        _script.thread = None


_script = _Script(os.environ[ADDRESS]) if os.environ.get(ADDRESS) else None
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
