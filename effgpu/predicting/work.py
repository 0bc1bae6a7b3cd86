"""The work of the step that counts: its kernels, copies and waits, in their order, and what is not known of them."""

import math
import os
import sys
from collections import Counter
from collections.abc import Iterable
from traceback import walk_stack
from typing import TYPE_CHECKING

import torch
from torch.utils import checkpoint

from effgpu.attaching import sites
from effgpu.attaching.steps import drive
from effgpu.measuring.ops import lists_of, tensors_of
from effgpu.measuring.torch_internals import _current_graph_task_id, _engine_run_backward
from effgpu.predicting.experts import joined
from effgpu.predicting.facts import ASSUMED, UNKNOWN, UNTIMED
from effgpu.predicting.gpus import FP8, FP8_FROM
from effgpu.predicting.kernels import TIMED, copy_over_bus, has_sparse, lacks_rule, note, touching
from effgpu.predicting.kinds import CONVOLUTION, Kernel
from effgpu.predicting.kinds import COPY as OVER_BUS
from effgpu.predicting.rules import convolution_workspace
from effgpu.predicting.scores import Scores
from effgpu.predicting.timeline import (
    BACKWARD,
    COPY,
    FORWARD,
    GRADIENTS,
    KERNEL,
    LISTED,
    LOAD,
    OWN,
    READ,
    UPDATE,
    WEIGHTS,
    Event,
    copy_waits,
    looks_for_nan,
)
from effgpu.units import MiB

if TYPE_CHECKING:
    from effgpu.predicting.recorder import Recorder

aten = torch.ops.aten
_VIEW, _CUDNN = 0.3, 3  # what the CPU takes for a view, and for a convolution, in calls of an operation
# The same for each Python frame of a traceback: 5 to 6 µs in Python 3.11, where a call takes 13, and 9 beside 22 on the
# H100's host of docs/predict.md. Below a step, a measurement in a notebook has so many frames, 20 of them IPython's.
_FRAME, _NOTEBOOK = 0.4, 30
_BLOCKING = "CUDA_LAUNCH_BLOCKING"  # the variable with which the CPU waits for each kernel
_OWN_LOOPS = ("/nn/", "/optim/")  # of PyTorch: as in clip_grad_norm_, load_state_dict and AveragedModel
OWN_READS = ("/amp/", "/optim/", "/utils/data/")  # PyTorch's, which a reader cannot leave out


class Work:
    """The events of the step that counts, and what libraries take to work in."""

    def __init__(self, recorder: "Recorder"):
        self.counts = False  # whether the step that runs is the one whose events are noted, on a GPU
        self.events: list[Event] = []
        self.evaluations: list[tuple[Event, ...]] = []  # in this step, or in one that did not count
        self.loop = (drive.__code__,)  # the code that runs the steps: lines further out are not the step's
        self._evaluations_before = 0  # of the step that counts
        self._recorder = recorder
        self._scores = Scores()  # of attention
        self._convolved, self._multiplied = 0, False
        self.formula: tuple[str, str] | None = None  # of `Event`, while attention runs as one
        self._traced = 0.0  # calls, for the operation that follows
        self._blocking = False

    def begin(self) -> None:
        """Note the events of the step that follows, in place of those before."""
        self.counts, self.events, self._scores = bool(self._recorder.capability), [], Scores()
        self._evaluations_before = len(self.evaluations)
        self._traced, self._blocking = 0.0, os.environ.get(_BLOCKING) == "1"
        if self._blocking and self.counts:
            self._recorder.say(ASSUMED, f"the CPU waits for each kernel, as {_BLOCKING}=1 asks for")

    def note_evaluation(self, begin: int) -> None:
        """What was noted since, so many events after the step's first, is an evaluation, if nothing was trained.

        A batch after which nothing is multiplied is the training's, whose loop has gone on.
        """
        multiplies = [any(kernel.product for kernel in event.kernels) for event in self.events]
        last = max((place for place, each in enumerate(multiplies) if each), default=-1)
        batches = [place for place, event in enumerate(self.events) if event.kind == LOAD and place > last]
        end = max(begin, batches[0]) if batches else len(self.events)
        while end > begin and self.events[end - 1].kind == COPY:  # as of a batch without a loader
            end -= 1
        events = [event._replace(evaluating=True) for event in self.events[begin:end]]
        if any(event.kind not in (LOAD, OWN) for event in events) and all(event.phase == FORWARD for event in events):
            self.events[begin:end] = events
            self.evaluations.append(tuple(events))

    def forget_evaluations(self) -> None:
        """What was noted as evaluations in this step are a part of the training."""
        self.events[:] = [event._replace(evaluating=False) for event in self.events]
        del self.evaluations[self._evaluations_before :]

    def find_shown(self) -> sites.Site | None:
        """The line that sends most to the CPU outside of a backward pass, if it is much, as to plot a first batch."""
        sent: Counter[sites.Site | None] = Counter()
        for event in self.events:
            for kernel in event.kernels:
                if event.phase == FORWARD and (kernel.kind, kernel.layout) == (OVER_BUS, "ordinary"):
                    sent[event.site] += kernel.bytes
        return max(sent, key=sent.get) if sent.total() > MiB else None

    @property
    def phase(self) -> str:
        """The part of the step that runs."""
        if self._recorder.optimizers.working:
            return UPDATE
        return FORWARD if _current_graph_task_id() == -1 else BACKWARD

    def workspaces(self) -> tuple[int, int]:
        """The least and the most bytes that cuBLAS and cuDNN take to work in, on any GPU.

        aten/src/ATen/cuda/CUDABlas.cpp and CublasHandlePool.cpp, parseChosenWorkspaceSize: 8,320 KiB for a handle, or
        32 MiB from compute capability 9.0 on; one handle for the forward thread, one for autograd's. cuDNN's
        heuristics choose a convolution's workspace, and no rule tells which: `convolution_workspace` gives a bound.
        Only `tiles_of_winograd` is in the step's peak.
        """
        if not self._recorder.capability:
            return 0, 0
        least = int((32 if self._recorder.capability >= (9, 0) else 8.125) * MiB) * self._multiplied
        return least, 2 * 32 * MiB * self._multiplied + self._convolved

    def note_libraries(self, name: str, args: tuple) -> None:
        """Note, of an operation of any step, that it runs in a library with a workspace of its own."""
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self._multiplied = True
        elif name in ("convolution", "convolution_backward"):
            self._convolved = max(self._convolved, convolution_workspace(*args[name == "convolution_backward" :][:2]))

    def note(self, func, args: tuple, kwargs: dict, result: object) -> None:
        """Note the kernels of an operation, with the calls that the CPU makes for it."""
        optimizers, say = self._recorder.optimizers, self._recorder.say
        kernels = note(func, args, kwargs, result, bool(optimizers.working))
        if kernels and func.namespace != "aten":
            name = f"{func.namespace}::{func.overloadpacket.__name__}"
            if func.namespace == "torch_nn":  # PyTorch's own, in Python: linear_cross_entropy in chunks
                say(UNKNOWN, f"what {name} computes, and takes while it does", until=math.inf)
            else:
                say(ASSUMED, f"{name} takes as long as reading its arguments and writing its results")
        if kernels and lacks_rule(func, args):
            name = f"{func.overloadpacket.__name__}{' of a sparse tensor' * has_sparse(args)}"
            say(UNTIMED, f"{name} computes: only what it reads and writes")
        if kernels and func.overloadpacket is aten.linalg_matrix_exp:  # powers of the matrix, the longer the more
            say(UNKNOWN, "what linalg_matrix_exp takes to work in, beside its result", until=math.inf)
        for kernel in kernels:
            if kernel.product and kernel.format.startswith(FP8) and self._recorder.capability >= FP8_FROM:
                say(ASSUMED, "products in 8 bits take half as long as in fp16")
            elif kernel.product and kernel.format not in TIMED:
                say(UNTIMED, f"products in {kernel.format} take")
        if kernels and optimizers.working:
            optimizers.note_kernel()
        convolves = any(kernel.kind == CONVOLUTION for kernel in kernels)
        if convolves and not torch.backends.cudnn.enabled:
            say(UNTIMED, "convolutions take without cuDNN")
        elif convolves and (torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()):
            say(ASSUMED, "cuDNN's deterministic convolutions take as long as others")
        call = _CUDNN if convolves else 1 if kernels else _VIEW
        reads_on = self.phase == FORWARD and self._scores.read_on(func, args, kwargs, result)
        lasting = self._find_lasting(func, args, kwargs) if kernels and self.counts else ""
        calls = call + LISTED * sum(map(len, lists_of(args)))
        self._add(kernels, calls, reads_on=reads_on, lasting=lasting)

    def _find_lasting(self, func, args: tuple, kwargs: dict) -> str:
        """What of it outlives a forward pass, if an operation takes only such a tensor, and others of its shape."""
        given = [tensor for tensor in tensors_of((args, kwargs)) if tensor.dim()]
        if self.phase != FORWARD or lists_of(args) or len({tensor.shape for tensor in given}) != 1:
            return ""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
            return ""
        if sites.asked_by_torch(_OWN_LOOPS) or self._recorder.compiled.has(sys._getframe()):
            return ""
        found = set()
        for place, tensor in enumerate(given):
            block = self._recorder.storages.of(tensor)
            if block is None or tensor.nbytes != tensor.untyped_storage().nbytes():
                continue
            if block.owner == GRADIENTS or block.node != -1:  # made by a backward pass
                found.add(GRADIENTS)
            elif block.owner == WEIGHTS or (block.owner != "activations" and not place and func._schema.is_mutable):
                found.add(WEIGHTS)
        return min(found, default="")  # gradients, if any

    def _add(self, kernels: list[Kernel], calls: float, **about: object) -> bool:
        """Note kernels, if they are in the step that counts, and return whether they are."""
        if self.counts:
            site = sites.find_site(outermost=True, until=self.loop) if kernels else None
            inner = sites.find_site(until=self.loop) if kernels else None
            again = self.phase == BACKWARD and torch.is_grad_enabled() and _is_checkpointing()
            about |= {"calls": calls + self._traced, "traced": self._traced}
            about |= dict.fromkeys(("waits", "blocking"), self._blocking and bool(kernels))
            self._traced = 0.0
            about |= {"inner": inner, "again": again, "formula": self.formula}
            self._append(KERNEL, site, kernels=tuple(kernels), **about)
        return self.counts

    def _append(self, kind: str, site: sites.Site | None, **about: object) -> None:
        self.events.append(Event(kind, site, phase=self.phase, optimizer=self._recorder.optimizers.at_work, **about))

    def note_traceback(self) -> None:
        """Anomaly mode keeps the traceback of the operation that follows: in autograd's threads, one of their own."""
        in_notebook = False
        for frame, _ in walk_stack(sys._getframe(1)):
            in_notebook = frame.f_code is drive.__code__
            if in_notebook or frame.f_code is _engine_run_backward.__code__:
                break
            self._traced += _FRAME * (sites.whose(frame.f_code.co_filename) is not sites.OTHER)
        if in_notebook:
            self._traced += _FRAME * _NOTEBOOK
            self._recorder.say(ASSUMED, "anomaly mode keeps tracebacks that are as deep as in a notebook")

    def note_recurrent(self, kernels: Iterable[tuple[Kernel, int]], packed: bool = False) -> None:
        """One call of cuDNN, which runs each of these kernels so often; `packed` says that it gets no padding."""
        self._multiplied = True
        self._add([kernel for kernel, number in kernels for _ in range(number)], _CUDNN, packed=packed)

    def note_cell(self, kernel: Kernel) -> None:
        """One kernel of a cell's."""
        self._add([kernel], 1)

    def note_groups(self, kernel: Kernel, count: int, read: int | None) -> None:
        """So many equal products, after a read of so many bytes that say how they are cut; None: in one kernel."""
        self._multiplied = True
        if read is None:
            self._add([joined(kernel, count)], 1)
        else:
            self.wait(read, own=True)
            self._add([kernel] * count, count * (1 + 3 * _VIEW))  # of two matrices and the result

    def note_custom(self, name: str, tensors: list[torch.Tensor]) -> None:
        """A kernel of Triton's with these arguments."""
        if self._add([touching(name, tensors)], 1):
            self._recorder.say(UNTIMED, f"the Triton kernel {name} computes: only what it reads and writes")

    def note_8_bits(self, kernel: Kernel) -> None:
        """A product of bitsandbytes'."""
        self._multiplied = True
        if self._add([kernel], 1):
            self._recorder.say(ASSUMED, "products in 8 bits take as long as in fp16")

    def note_bus(self, tensor: torch.Tensor, *, pinned: bool = True) -> None:
        """A copy over the bus that is the GPU's work, in the same stream as its kernels."""
        if self._add([copy_over_bus(tensor, pinned)], 1) and pinned:
            text = "what is sent to the CPU, and fetched from there, lies in pinned memory behind PCI Express"
            self._recorder.say(ASSUMED, text)

    def note_copy(self, size: int, pinned: bool, non_blocking: bool) -> None:
        """A copy to the GPU of so many bytes that a script has on the CPU."""
        if self.counts:
            waits = copy_waits(size, pinned=pinned, non_blocking=non_blocking)
            about = {"bytes": size, "waits": waits, "pinned": pinned, "non_blocking": non_blocking}
            self.events.append(Event(COPY, sites.find_site(until=self.loop), **about))

    def note_host(self, kind: str, site: sites.Site | None = None) -> None:
        """The CPU takes a batch of a loader here, or works itself."""
        if self.counts:
            self.events.append(Event(kind, site, calls=0.0, beside=True))

    def wait(self, size: int = 0, *, own: bool = False) -> None:
        """The CPU waits for the GPU, and for a copy of so many bytes. Nobody is to blame for a library's own reads."""
        if self.counts:
            own = own or (bool(self.events) and looks_for_nan(self.events[-1]))
            site = None if own or sites.asked_by_torch(OWN_READS) else sites.find_site(until=self.loop)
            self._append(READ if site else KERNEL, site, bytes=size, waits=True)


def _is_checkpointing() -> bool:
    """Whether a checkpoint of PyTorch's runs what is running."""
    return any(frame.f_code.co_filename == checkpoint.__file__ for frame, _ in walk_stack(sys._getframe(1)))
