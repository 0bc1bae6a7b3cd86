"""The script's side of `effgpu bench`: what ends a step, `tick` or a mark. It loads only Python's own library."""

import atexit
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
_REPORT_EVERY = 0.5  # seconds, where all steps are followed
TICKS, BACKWARD = "effgpu.tick", "backward passes"  # what may end a step, beside an optimizer's
_VERSIONED = ("torch", "torchvision", "transformers", "datasets")


def tick(items: object = None, loss: object = None, metric: object = None) -> None:
    """Say that one training step is done: call it once per step, in the loop of the training script.

    `items` are the samples, tokens, ... of the step, `loss` is its loss, `metric` another number to judge it by, such
    as an accuracy, at the steps that know one: numbers, or tensors of one element, which are not read before the end of
    a turn, so that a GPU never waits for them. A loss that is not given is what the step called `backward` on. Outside
    of `effgpu bench` this does nothing. Inside, the script waits here while the other command has its turn. A script
    without it works, too: its steps are those of its optimizer.

    Raises RuntimeError in a thread, a DataLoader worker or a second process, and TypeError for what is no number.
    """
    if _script is not None:
        _script.tick(items, loss, metric)


class _Script:
    """What the training process of a command knows. `next` is the step at which its next stage begins.

    `source` is what ends its steps: its own calls of `tick`, or else its optimizer. `seen` has what the step did so far
    (`marking.py`); None where there is no PyTorch.
    """

    def __init__(self, address: str):
        port, _, self.token = address.partition(":")
        self.port, self.step, self.next = int(port), 0, 1
        self.source: str | None = None
        self.seen = None
        self.first: tuple | None = None  # the optimizer's first step, while it is not clear whether the script ticks
        self.losses, self.metrics, self.items, self.counting = [], [], [], False
        self.stamps: list | None = None  # when each step ended, where all are followed
        self.thread = threading.main_thread().ident
        self.connection: Connection | None = None
        self.stages = self._run()

    def tick(self, items: object, loss: object, metric: object) -> None:
        """A step that the script says itself. From the first on, the optimizer's no longer count."""
        if self.source != TICKS:
            self._count_ticks()
        (_, before), self.first = self.first or (None, None), None
        if loss is None and self.seen:
            loss = self.seen.take_loss() or before
        self._end_step(items, loss, metric)

    def mark(self, source: str) -> None:
        """A step of the optimizer. The first is counted with the second: a call of `tick` may follow it."""
        if self.source == TICKS:
            return
        step = self.seen.take_samples(), self.seen.take_loss()
        if self.source is None and self.first is None:
            self.first = step
            return
        if self.first:
            self.source = source
            (items, loss), self.first = self.first, None
            self._end_step(items, loss)
        self._end_step(*step)

    def keeps_loss(self) -> bool:
        """Whether the loss of the step that is under way is wanted."""
        step = self.step + 1
        return self.stamps is not None or step <= _ALL_LOSSES or step % _LOSS_EVERY == 0

    def _count_ticks(self) -> None:
        """Count the script's own calls from 1, whatever the optimizer's count was."""
        self.source, self.restarted = TICKS, self.counting
        self.next -= self.step
        self.step, self.losses, self.metrics = 0, [], []
        if self.stamps is not None:
            self.stamps = []

    def _end_step(self, items: object, loss: object, metric: object = None) -> None:
        """Note a step. The stages between turns cost nothing but a comparison here."""
        if get_ident() != self.thread:
            self._refuse()
        if loss is not None and self.keeps_loss():
            self.losses.append((self.step + 1, _keep(loss)))
        self.step = step = self.step + 1
        if metric is not None:
            self.metrics.append((step, _keep(metric)))
        if self.counting:
            self.items.append(items if items.__class__ is int else _keep(items))
        if self.stamps is not None:
            self.stamps.append(self.clock.stamp())
        if step == self.next:
            next(self.stages, None)

    def _refuse(self) -> None:
        """Tell the bench and raise an error: a library may catch it, or a thread end with it."""
        where = "a DataLoader worker" if _is_worker() else "a second process" if self.thread is None else "a thread"
        if self.source == TICKS:
            short = f"tick was called in {where}"
            text = f"effgpu.{short}: call it in the training loop, once per step"
        else:
            short = f"a step was made in {where}"
            text = f"{short}: let one process train, in its main thread"
        with contextlib.suppress(OSError):
            self._connect().send({"token": self.token, "fault": text, "short": short})
        raise RuntimeError(text)

    def _run(self) -> Iterator[None]:
        """The stages: each `yield` gives the thread back to the training until step `next`."""
        if not self._join():
            return
        while order := self.connection.receive():
            self.clock = _GpuClock() if self.on_gpu else _CpuClock()
            if "until" in order:
                yield from self._follow(order["until"])
                continue
            if order["lead"]:
                self.next += order["lead"]
                yield
            self.restarted = True
            while self.restarted:  # again where the script's first call of `tick` came in a turn
                self.items, self.counting, self.restarted = [], True, False
                self.next = self.step + order["steps"]
                self.clock.start()
                yield
            seconds, late = self.clock.stop()
            self.counting = False
            turn = {"seconds": seconds, "late": late, "steps": order["steps"], "items": self._sum()}
            self.connection.send(self._report() | turn)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # the bench is gone: end, with all processes that the script started

    def _follow(self, until: int | None) -> Iterator[None]:
        """Report each step with its time, up to step `until` or to the script's end."""
        self.stamps, sent = [], time.perf_counter()
        atexit.register(self._report_rest, os.getpid())
        while until is None or self.step < until:
            self.next = self.step + 1
            yield
            if self.step == until or time.perf_counter() - sent > _REPORT_EVERY:
                self.connection.send(self._report())
                sent = time.perf_counter()

    def _report_rest(self, process: int) -> None:
        if self.stamps and os.getpid() == process:
            self.connection.send(self._report())

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
        about["at"] = time.monotonic()
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
        fields = {"step": self.step, "source": self.source, "peak": _peak(self.on_gpu), "workers": _count_workers()}
        fields["losses"] = [(step, self._number("loss", loss)) for step, loss in self.losses]
        fields["metrics"] = [(step, self._number("metric", metric)) for step, metric in self.metrics]
        self.losses, self.metrics = [], []
        if self.stamps:
            fields["stamps"], self.stamps = self.clock.read(self.stamps), []
        return fields

    def _sum(self) -> float | None:
        """The items of the counted steps; None if a step named none."""
        if any(items is None for items in self.items):
            return None
        return sum(self._number("items", items) for items in self.items)

    def _number(self, name: str, value: object) -> float:
        if isinstance(value, Pieces):
            return sum(map(float, value))
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            text = f"effgpu.tick({name}=...): expected a number or a tensor of one element, got {value!r}"
            raise TypeError(text) from error


class Connection:
    """A socket that carries one JSON object a line."""

    def __init__(self, end: socket.socket):
        self.socket, self._rest = end, b""

    @property
    def has_message(self) -> bool:
        """Whether a message is here already: the socket says nothing of it."""
        return b"\n" in self._rest

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
            while not self.has_message:
                if not (received := self.socket.recv(2**16)):
                    return None
                self._rest += received
            line, _, self._rest = self._rest.partition(b"\n")
            message = json.loads(line)
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


class Pieces(list):
    """The losses of the backward passes of one step, which are added when they are read."""


class _CpuClock:
    """Seconds of a window, and seconds of work that was still running after it: of a CPU, none.

    `stamp` notes a moment, and `read` gives the noted ones as seconds of the system's clock.
    """

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self.began, 0.0

    def stamp(self) -> float:
        return time.monotonic()

    def read(self, stamps: list) -> list[float]:
        return stamps


class _GpuClock:
    """Two CUDA events, and one wait when the window is over. Late is the work of other streams than the current one."""

    def __init__(self):
        import torch

        self.cuda = torch.cuda
        self.began, self.ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for event in (self.began, self.ended):
            event.record()  # the first time, CUDA makes the event: not while steps are timed
        self.cuda.synchronize()
        self.origin = time.monotonic()  # when `began` was recorded, as far as stamps are read

    def start(self) -> None:
        self.began.record()

    def stop(self) -> tuple[float, float]:
        self.ended.record()
        self.ended.synchronize()
        done = time.perf_counter()
        self.cuda.synchronize()
        return self.began.elapsed_time(self.ended) / 1000, time.perf_counter() - done

    def stamp(self) -> object:
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self, stamps: list) -> list[float]:
        stamps[-1].synchronize()
        return [self.origin + self.began.elapsed_time(event) / 1000 for event in stamps]


def _keep(value: object) -> object:
    """A tensor's value as of now, without a wait: the script may write to the tensor again."""
    if isinstance(value, Pieces):
        return value
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
