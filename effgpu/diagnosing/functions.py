"""What holds a function's step back: the step is called here, or walked on fake tensors with what its loader gives."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

import torch

from effgpu import units
from effgpu.attaching.replacing import replaced
from effgpu.attaching.steps import Plan, drive
from effgpu.diagnosing.agreement import check_walked, find_branches
from effgpu.diagnosing.batches import Batches, change_tensors, time_handing
from effgpu.diagnosing.causes import PRECISION
from effgpu.diagnosing.diagnosis import Diagnosis
from effgpu.diagnosing.loops import find_loop, find_updates
from effgpu.diagnosing.observed import Observed
from effgpu.diagnosing.observing import Moves
from effgpu.diagnosing.ranking import rank
from effgpu.diagnosing.turns import Supply, are_16_bits_on, in_16_bits, observe, tell_failure, time_turns
from effgpu.errors import BadType
from effgpu.measuring.device import find_device, gc_frozen, is_out_of_memory, random_states_kept
from effgpu.measuring.ops import tensors_in
from effgpu.measuring.variants import Variant, check_worked, run_variant
from effgpu.predicting.asked import Asked
from effgpu.predicting.gpus import Gpu
from effgpu.predicting.predict import Largest, largest
from effgpu.predicting.prediction import Prediction
from effgpu.predicting.recorder import Recorder
from effgpu.predicting.timeline import READ
from effgpu.predicting.walking import walk


def diagnose_function(variant: Variant, loader: object, target: Gpu, *, measured: bool) -> Diagnosis:
    """What holds a variant's step back on this GPU. With `measured`, it is the one that is here. Raises as doctor."""
    with gc_frozen(), random_states_kept():
        batches = Batches(loader)
        seen = run_variant(variant, partial(_examine, batches=batches, target=target if measured else None))
        if batches.loader is None:
            seen.notes += (
                "data loading and copies were not looked at: give the loader, and let the step take a batch",
            )
        if target.bandwidth is None:
            return rank(target, seen, None, f"{target.name} is not in the table of GPUs")
        try:
            predicted = walk_step(variant, batches, target)
            seen.notes += (*check_walked(seen, predicted), *find_branches(variant))
            try:
                seen.halved = walk_step(variant, batches, target, halve=True).events
            except Exception as error:
                seen.notes = tuple(dict.fromkeys([*seen.notes, tell_failure(error)]))
            seen.loop, seen.updates = find_loop(predicted.events), find_updates(predicted.events)
            seen.graphed = predicted.graphed
            largest_batch = None
            if seen.time_first:
                seen.notes += ("how many times the batch fits was not looked at: its first dimension is time",)
            else:
                largest_batch = _largest_batch(variant, batches.batch, target)
        except RuntimeError as error:
            if not measured:
                error.add_note(f"doctor: measured all the same: {_what_was_measured(seen)}")
                raise
            return rank(target, seen, None, str(error))
    return replace(rank(target, seen, predicted), batches=largest_batch)


def _what_was_measured(seen: Observed) -> str:
    """What was measured of a step that cannot be predicted, in one line."""
    parts = [f"the loader takes {units.format_seconds(seen.loading[0])} per batch"] * seen.has_loader
    parts += [f"the CPU waits at {event.site}" for event in seen.events if event.kind == READ]
    parts += [f"{seen.padding:.0%} of the tokens are padding"] * bool(seen.padding)
    return "; ".join(dict.fromkeys(parts)) or "nothing"


class _StepWithBatch:
    """A function's step that takes nothing: it is given its batch, counts its calls, and says which one failed."""

    def __init__(self, step: Callable, batches: Batches):
        self._step, self._batches = step, batches
        self._same, self._on_gpu = False, None
        self.made, self.batch = 0, batches.batch
        self.refused = ""  # why the step cannot be in 16 bits, once that has shown

    def __call__(self) -> None:
        self.made += 1
        self.batch = self._batches.batch if self._same else self._batches.next()
        batch = self.batch if self._on_gpu is None else self._on_gpu
        try:
            check_worked(self._step(*batch))
        except Exception as error:
            self.refused = tell_failure(error) if are_16_bits_on() else ""
            if self.made == 1 and isinstance(error, TypeError) and error.__traceback__.tb_next is None:
                takes = "one batch, as there is a loader" if batch else "nothing, as there is no loader"
                raise BadType(f"step: expected one that takes {takes} ({error})") from error
            how = "ran out of memory" if is_out_of_memory(error) else "failed"
            error.add_note(f"doctor: the step {how} in call {self.made}. A diagnosis calls it often.")
            raise

    def same(self) -> AbstractContextManager:
        """Inside, the batch is the same one."""
        return replaced([(self, "_same", True)])

    def on_gpu(self) -> AbstractContextManager:
        """Inside, the batch is one that is on the GPU."""
        device = find_device()
        return replaced([(self, "_on_gpu", change_tensors(self._batches.batch, lambda tensor: tensor.to(device)))])

    def settle(self) -> int:
        """Take what workers have loaded ahead; no step has to."""
        self._batches.drain()
        return 0


def _examine(step: Callable, batches: Batches, target: Gpu | None) -> Observed:
    """Observe two calls of the step, and time the loader or, with a target, the changes that can be made here."""
    fed = _StepWithBatch(step, batches)
    supply = Supply(
        loader=batches.loader,
        same=fed.same,
        on_gpu=fed.on_gpu,
        last=lambda: tensors_in(fed.batch),
        settle=fed.settle,
        handing=lambda: time_handing(batches.batch, batches.time()),
        batch=batches.batch,
    )

    def plan() -> Plan:
        seen, optimizers = yield from observe(supply)
        if target is None:
            seen.loading = batches.time()
            seen.handing = time_handing(batches.batch, seen.loading)
        else:
            yield from time_turns(seen, optimizers, supply, target)
        return seen

    try:
        return drive(plan(), fed)
    except Exception:
        if not fed.refused:
            raise
    supply.fixed = (PRECISION,)
    seen = drive(plan(), fed)
    seen.notes += (fed.refused,)
    return seen


def walk_step(variant: Variant, batches: Batches, gpu: Gpu, *, halve: bool = False) -> Prediction:
    """Walk a variant's step as it is, or with `halve` under autocast, with the 16-bit format that the GPU is fast in.

    Raises RuntimeError, with the reason, for a step that cannot run without values.
    """

    def recorded_by(recorder: Recorder) -> Variant:
        def note(event) -> None:
            if recorder.work.counts:
                recorder.work.events.append(event._replace(beside=True))

        def fed() -> Callable[[], object]:
            step = variant()

            def run() -> object:
                moves = Moves(batches.batch, note, pinned=batches.pinned)
                with moves, in_16_bits(gpu) if halve else contextlib.nullcontext():
                    return step(*batches.batch)

            return run

        return fed

    return walk(recorded_by, Asked((gpu,), gpu.capability))


def _largest_batch(variant: Variant, batch: tuple, gpu: Gpu) -> Largest | None:
    """How many times the batch fits; None without one, and for a step that takes no other size than this one."""

    def variant_of(times: int) -> Variant:
        larger = change_tensors(batch, lambda tensor: _repeat(tensor, times))
        return lambda: partial(variant(), *larger)

    with contextlib.suppress(Exception):  # of the step: any error says that it takes no other size
        return largest(variant_of, gpu) if batch else None


def _repeat(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """A tensor of so many times as many samples: only its shape counts, so nothing is written into it."""
    return tensor.new_empty(times * len(tensor), *tensor.shape[1:], device="cpu") if tensor.dim() else tensor
