"""What PyTorch says of the hardware while a step is walked: the answers of the GPU that is named, not of this machine.

transformers, accelerate and diffusers ask through torch.cuda and torch.accelerator, too: fp16=True, bf16=True, TF32 and
`enabled=torch.cuda.is_available()` are what they are there. Kernels take no time here, so streams and events only wait.
"""

import contextlib
import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from effgpu.attaching.replacing import replaced
from effgpu.attaching.sites import LIBRARY, READER, whose
from effgpu.predicting import tensor_types
from effgpu.predicting.gpus import Gpu
from effgpu.units import MiB

FIRST_GPU = tensor_types.GPU
_CUDA = "12.8"  # where PyTorch was built without
_NOTHING = """init _lazy_init set_device ipc_collect set_stream manual_seed manual_seed_all seed
seed_all set_rng_state set_rng_state_all reset_accumulated_memory_stats set_sync_debug_mode _sleep"""
_ZERO = """current_device initial_seed get_sync_debug_mode utilization memory_usage temperature power_draw clock_rate
device_memory_used _exchange_device _maybe_exchange_device"""
_ACCELERATOR_NOTHING = "set_device_index set_device_idx set_stream reset_accumulated_memory_stats"
_ACCELERATOR_ZERO = "current_device_index current_device_idx"


_NAMES = {  # as drivers have them, where that is not "NVIDIA" and the table's name
    "T4": "Tesla T4",
    "P100": "Tesla P100-PCIE-16GB",
    "V100": "Tesla V100-SXM2-16GB",
    "V100 32 GB": "Tesla V100-SXM2-32GB",
    "RTX 4070 Ti Super": "NVIDIA GeForce RTX 4070 Ti SUPER",
    "RTX A6000": "NVIDIA RTX A6000",
    "RTX PRO 6000": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    "A100 40 GB": "NVIDIA A100-SXM4-40GB",
    "A100 80 GB": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "GH200": "NVIDIA GH200 480GB",
}
# The CUDA C++ Programming Guide, technical specifications per compute capability: threads of a multiprocessor, and KiB
# of shared memory that a block may ask for.
_LIMITS = {(6, 0): (2048, 48), (7, 0): (2048, 96), (7, 5): (1024, 64), (8, 0): (2048, 163), (8, 6): (1536, 99)}
_LIMITS |= {(8, 9): (1536, 99), (9, 0): (2048, 227), (10, 0): (2048, 227), (12, 0): (1536, 99)}


class InUse(NamedTuple):
    """The bytes of tensors on the GPU: `now`, the `most` so far, and what `forget`s the most."""

    now: Callable[[], int]
    most: Callable[[], int]
    forget: Callable[[], None]


class Event:
    """Of torch.cuda: it has always happened, a millisecond after any other."""

    def __init__(self, *_: object, **__: object): ...

    def record(self, *_: object, **__: object) -> None:
        """Nothing to do."""

    wait = record

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds."""
        return 1.0


class Stream(contextlib.AbstractContextManager):
    """Of torch.cuda: all runs in order."""

    device, device_index, stream_id, cuda_stream, priority = FIRST_GPU, 0, 0, 0, 0

    def __init__(self, *_: object, **__: object): ...

    def __exit__(self, *_: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    __hash__ = None

    def wait_stream(self, *_: object, **__: object) -> None:
        """Nothing to do."""

    wait_event = wait_stream

    def query(self) -> bool:
        """Whether its work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """The event, or a new one."""
        return event or Event()


def gives(answer: object) -> Callable:
    """A function of its own each time: torch._dynamo refuses one object under two names."""
    return lambda *_, **__: answer


def _where_asked(do: Callable[[], None]) -> Callable:
    """A call that does this where the reader or a library makes it: not where PyTorch or effgpu itself does."""

    def call(*_: object, **__: object) -> None:
        if whose(sys._getframe(1).f_code.co_filename) in (READER, LIBRARY):
            do()

    return call


def _tell_memory(in_use: InUse) -> dict[str, Callable]:
    """What torch.cuda and torch.accelerator say of memory. PyTorch reserves what it once had, and a little more."""
    now, most, forget = (lambda *_, asked=asked, **__: asked() for asked in in_use)

    def stats(*_: object, **__: object) -> Counter:
        sizes = {"allocated_bytes.all.current": now(), "reserved_bytes.all.current": most()}
        return Counter(sizes | {"allocated_bytes.all.peak": most(), "reserved_bytes.all.peak": most()})

    return {
        "memory_allocated": now,
        "max_memory_allocated": most,
        "memory_reserved": most,
        "max_memory_reserved": most,
        "memory_stats": stats,
        "reset_peak_memory_stats": forget,
    }


class Asks(NamedTuple):
    """Whom to call where an answer is the named GPU's own: of its kind, of its name, and of its memory.

    And where the CPU waits until the GPU has done all, or has it `give_back` what it has reserved.
    """

    kind: Callable[[], None]
    name: Callable[[], None]
    memory: Callable[[], None]
    wait: Callable[[], None]
    give_back: Callable[[], None]


class _Properties:
    """What torch.cuda.get_device_properties says of a GPU: its name and memory, for which it asks, and all else."""

    def __init__(self, ask_name: Callable[[], str], ask_memory: Callable[[], int], ask_others: Callable[[], dict]):
        self._ask_name, self._ask_memory, self._ask_others = ask_name, ask_memory, ask_others

    @property
    def name(self) -> str:
        """As the driver has it."""
        return self._ask_name()

    @property
    def total_memory(self) -> int:
        """Bytes."""
        return self._ask_memory()

    def __getattr__(self, name: str) -> object:
        others = {} if name.startswith("_") else self._ask_others()
        if name not in others:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return others[name]


def driver_name(gpu: Gpu) -> str:
    """What a GPU's driver calls it."""
    if gpu.name.startswith(("NVIDIA ", "Tesla ")):  # a reader's own, named by its driver
        return gpu.name
    maker = "NVIDIA GeForce" if re.match(r"RTX \d0[5-9]0\b", gpu.name) else "NVIDIA"
    return _NAMES.get(gpu.name, f"{maker} {gpu.name}")


def _properties(gpu: Gpu) -> dict[str, object]:
    """What a GPU has that all of its kind have."""
    major, minor = gpu.capability
    threads, shared = _LIMITS[max((each for each in _LIMITS if each <= gpu.capability), default=(6, 0))]
    return dict(
        major=major,
        minor=minor,
        multi_processor_count=gpu.multiprocessors or 1,
        max_threads_per_multi_processor=threads,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared * 1024,
        L2_cache_size=gpu.cache,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


def _answers(gpu: Gpu, asks: Asks, in_use: InUse) -> Iterator[tuple[object, str, object]]:
    """(module, name, what stands there inside)."""
    memory = _tell_memory(in_use)

    def ask_memory() -> int:
        asks.memory()
        return gpu.memory

    def left(*_: object, **__: object) -> tuple[int, int]:
        return max(0, ask_memory() - gpu.context[1] - in_use.most()), gpu.memory

    def ask_name(device: object = None) -> str:
        asks.name()
        return driver_name(gpu)

    waiting = {"synchronize": _where_asked(asks.wait), "empty_cache": _where_asked(asks.give_back)}
    event, stream = (type(kind.__name__, (kind,), {"synchronize": waiting["synchronize"]}) for kind in (Event, Stream))

    def ask(answer: object) -> Callable:
        def give(*_: object, **__: object) -> object:
            asks.kind()
            return answer

        return give

    cuda = {
        "is_available": gives(True),
        "is_initialized": gives(True),
        "device_count": gives(1),
        "get_device_name": ask_name,
        "get_device_capability": ask(gpu.capability),
        "get_device_properties": gives(_Properties(ask_name, ask_memory, ask(_properties(gpu)))),
        "get_arch_list": ask(["sm_{}{}".format(*gpu.capability)]),
        "mem_get_info": left,
        **memory,
        **waiting,
        "reset_max_memory_allocated": memory["reset_peak_memory_stats"],
        "reset_max_memory_cached": memory["reset_peak_memory_stats"],
        "host_memory_stats": lambda *_, **__: Counter(),
        "memory_summary": gives(""),
        "memory_snapshot": lambda *_, **__: [],
        "list_gpu_processes": gives(""),
        "get_per_process_memory_fraction": gives(1.0),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "default_generators": (torch.default_generator,),
        "is_current_stream_capturing": gives(False),
        "is_tf32_supported": ask(gpu.capability >= (8, 0)),
        "can_device_access_peer": gives(False),
        "Event": event,
        "Stream": stream,
        "current_stream": lambda *_, **__: stream(),
        "default_stream": lambda *_, **__: stream(),
        "stream": lambda *_, **__: contextlib.nullcontext(),
        **{name: gives(None) for name in _NOTHING.split()},
        **{name: gives(0) for name in _ZERO.split()},
    }
    accelerator = {
        "is_available": gives(True),
        "device_count": gives(1),
        "current_accelerator": lambda *_, **__: FIRST_GPU,
        "current_stream": lambda *_, **__: stream(),
        "get_memory_info": left,
        **memory,
        **waiting,
        **{name: gives(None) for name in _ACCELERATOR_NOTHING.split()},
        **{name: gives(0) for name in _ACCELERATOR_ZERO.split()},
    }
    yield from ((torch.cuda, name, answer) for name, answer in cuda.items())
    others = memory | {"mem_get_info": left, "empty_cache": waiting["empty_cache"]}
    yield from ((torch.cuda.memory, name, answer) for name, answer in others.items())
    yield from ((torch.accelerator, name, answer) for name, answer in accelerator.items())
    yield subprocess.Popen, "__init__", _with_smi(subprocess.Popen.__init__, _smi(gpu, ask_name, left))
    yield from tensor_types.on_gpu()
    yield from _elsewhere()


_SMI = "nvidia-smi"
_IN_SHELL = re.compile(rf"(?<![\w.-]){_SMI}((?:\s+(?:-[^\s|;&<>]+|\d+(?![\d<>])))*)(?![\w.-])")


def _with_smi(start: Callable, tell: Callable[[list[str]], str]) -> Callable:
    """`Popen.__init__`, where nvidia-smi prints what `tell` gives of its arguments, if this machine has none."""

    def printing(arguments: list[str]) -> list[str]:
        return ["printf", "%s\\n", tell(arguments)]

    @functools.wraps(start)
    def starting(process, args, *others, **options):
        if shutil.which(_SMI) is None:
            if options.get("shell") and isinstance(args, str):
                args = _IN_SHELL.sub(lambda found: shlex.join(printing(found[1].split())), args)
            elif (words := list(args) if isinstance(args, list | tuple) else [args])[:1] == [_SMI]:
                args = printing(words[1:])
        start(process, args, *others, **options)

    return starting


def _smi(gpu: Gpu, ask_name: Callable[[], str], ask_memory: Callable[[], tuple[int, int]]) -> Callable:
    """What nvidia-smi prints of a GPU: what it is queried for, as far as that is known, else its name and memory."""

    def tell(arguments: list[str]) -> str:
        given = dict(each.partition("=")[::2] for each in arguments)
        if "--query-gpu" not in given:
            return f"GPU 0: {driver_name(gpu)}, {gpu.memory // MiB} MiB (predicted: it is not here)"
        (free, total), name, form = ask_memory(), ask_name(), given.get("--format", "")
        known = {"name": name, "gpu_name": name, "index": 0, "count": 1}
        for key, size in {"total": total, "free": free, "used": total - free}.items():
            known[f"memory.{key}"] = f"{size // MiB}{' MiB' * ('nounits' not in form)}"
        names = [each.strip() for each in given["--query-gpu"].split(",")]
        header = [f"{each} [MiB]" if each.startswith("memory.") else each for each in names]
        row = [str(known.get(each, "[N/A]")) for each in names]
        return "\n".join(map(", ".join, [header] * ("noheader" not in form) + [row]))

    return tell


def _elsewhere() -> Iterator[tuple[object, str, object]]:
    """What other modules say that asks for no particular GPU."""
    yield torch.version, "cuda", torch.version.cuda or _CUDA
    yield torch.backends.cuda, "is_built", gives(True)
    yield torch.backends.cudnn, "is_available", gives(True)
    yield torch.backends.cudnn, "is_acceptable", gives(False)  # weights of an LSTM that would be laid out anew
    yield torch.Tensor, "record_stream", gives(None)  # which takes no other stream than PyTorch's own
    for name in ("_record_memory_history", "_dump_snapshot"):
        yield torch.cuda.memory, name, gives(None)
    optimizer = torch.optim.Optimizer  # which looks whether a CUDA graph is being captured
    for check in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        yield optimizer, check, gives(None)


_true: list[tuple[object, str, object]] = []  # what stands behind the answers that are in force


@contextlib.contextmanager
def answering_as(gpu: Gpu | None, asks: Asks, in_use: InUse) -> Iterator[None]:
    """Inside, PyTorch says that this GPU is the only one here, so much of it `in_use`; with None, what is true."""
    answers = list(_answers(gpu, asks, in_use)) if gpu else []
    there = [each[:2] for each in answers if hasattr(*each[:2])]
    behind = [(owner, name, vars(owner).get(name, getattr(owner, name))) for owner, name in there]
    before, _true[:] = list(_true), [*_true, *behind]
    try:
        with replaced(answers):
            yield
    finally:
        _true[:] = before


def as_it_is() -> contextlib.AbstractContextManager:
    """Inside, also within `answering_as`, PyTorch says what is true of this machine."""
    return replaced(reversed(_true))
