"""What a person reads of a cause: the lines to change, for what was seen, and what that was."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable

from effgpu.attaching.sites import Site
from effgpu.diagnosing.attention import find_attention, may_mask, runs
from effgpu.diagnosing.observed import TRAINERS, Observed
from effgpu.predicting.timeline import BACKWARD, COPY, KERNEL, NO_BF16, NOT_TAKEN, READ, SWITCHED_OFF, Event
from effgpu.units import format_bytes, format_seconds

_MOST = 0.5  # a share of the calls
_PIECES = 16  # copies, one after the other: of a batch that was taken apart
_AT_ONCE = "whole batches of what is in memory: tensors[rows] for rows in torch.randperm(len(tensors)).split(size)"
_COMPILE = "a larger batch, or torch.compile(model)"
_KEEP = "keep the value on the GPU, loss.detach(), and read it every 100 steps"
_CHOOSE = "torch.where(mask, tensor, 0) in place of tensor[mask] and nonzero(): a known size needs no wait"
_OF_LIBRARY = "the library reads there: an option of it, if it has one; a larger batch waits as often for more work"
_NEEDLESS = {
    "synchronize": "no synchronize() in the loop: only a stopwatch needs it",
    "empty_cache": "no empty_cache() in the loop: PyTorch gives memory back by itself before it runs out",
    "gc.collect": "no gc.collect() in the loop: Python frees what nobody names at once, and circles of it in time",
}
_TRAINER = os.path.normpath(*TRAINERS["transformers"])
_AS_16_BITS = {
    "transformers": "TrainingArguments({}=True)",
    "lightning": 'Trainer(precision="{}-mixed")',
    "accelerate": 'Accelerator(mixed_precision="{}")',
}
_NON_BLOCKING = {  # where accelerate copies what the loader gives
    "transformers": 'TrainingArguments(accelerator_config={"non_blocking": True})',
    "accelerate": "Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))",
}
_AS_FORMULA = {  # why scaled_dot_product_attention runs as a formula
    SWITCHED_OFF: "no sdpa_kernel(SDPBackend.MATH) and no enable_mem_efficient_sdp(False): then "
    "scaled_dot_product_attention takes a fused kernel",
    NO_BF16: "fp16 in place of bf16, for which scaled_dot_product_attention has fused kernels from the A100's "
    "generation on",
    NOT_TAKEN: (
        "what a fused kernel takes: scaled_dot_product_attention inside of "
        "sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION) says what keeps it from one"
    ),
}
_NOT_COMPILED = ("LBFGS", "SparseAdam")  # torch.optim's that torch.compile does not take
# torch.optim's that work in lists, without a fused kernel
_IN_LISTS = ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
_KINDS = {"pageable": False, "pinned": True}


def load_faster(seen: Observed) -> str:
    """What to change of the loader, or of what the script itself computes on the CPU."""
    if sum(seen.working.values()) > seen.loading[0]:
        site = next(iter(seen.working))
        line = site.place
        if needless := _find_needless(site):
            return _NEEDLESS[needless[0]]
        if any(event.kind == READ and event.site == site for event in seen.events):  # no worker has what the GPU made
            return f"what {line} computes, every 100 steps, or on the GPU"
        whose = "the" if seen.has_loader else "a"
        return (
            f"what {line} computes, less often; or in {whose} DataLoader's workers, as its data set's or collate_fn's, "
            "or on the GPU"
        )
    cores = os.cpu_count() or 1
    if not seen.has_loader:
        return "DataLoader(..., num_workers=2), so that batches are made while the GPU works"
    if seen.remade:
        return "one DataLoader for all epochs, with persistent_workers=True: each new one starts its workers anew"
    at_once = "whole batches from the data set itself, with batch_size=None" if seen.streams else _AT_ONCE
    if seen.handing and seen.workers:
        return f"fewer bytes, such as uint8, to hand over; {at_once}, without workers"
    if seen.handing:  # a loader that takes longer may read and decode: nothing tells
        files = "; where each sample is read or decoded: fewer bytes, such as uint8, to hand over, and num_workers=2"
        return at_once + files * (seen.handing < seen.loading[0])
    if seen.trainer == "transformers" and not seen.workers:
        return "TrainingArguments(dataloader_num_workers=2, dataloader_persistent_workers=True)"
    if seen.workers >= 2 * cores:
        return "less work per sample: decode, resize or tokenise once, before the training; augment batches on the GPU"
    keep = "" if seen.persistent else ", persistent_workers=True"
    return f"DataLoader(..., num_workers={max(2, 2 * seen.workers)}{keep})"


def tell_loading(seen: Observed, events: list[Event]) -> str:
    """What loading takes, what the script's own work does, and what handing a batch over does."""
    how = f"num_workers={seen.workers}" if seen.has_loader else "by the script itself"
    loading = [f"loading takes {format_seconds(seen.loading[0])} per step, measured here, {how}"] * (seen.step is None)
    loading = loading if seen.has_loader or seen.loading[0] else []
    working = sum(seen.working.values())
    loading += [f"the script's own work on the CPU takes {format_seconds(working)} per step, here"] * bool(working)
    handing = [f"a worker takes {format_seconds(seen.handing)} to hand a batch over"] * bool(seen.handing)
    return "; ".join(loading + handing)


def copy_faster(seen: Observed) -> str:
    """What to change of the copies that the CPU waits for, or of their size."""
    if _longest_run(seen.events) >= _PIECES:
        return "one copy of the whole batch: copy it before it is taken apart, or stack its parts on the CPU"
    waiting = [event for event in seen.events if event.kind == COPY and event.waits]
    if not waiting:
        return "fewer bytes: copy uint8 or 16 bits, and convert on the GPU"
    pinned = all(event.pinned for event in waiting)
    if not pinned and seen.pinned and all(event.evaluating for event in waiting if not event.pinned):
        return "DataLoader(..., pin_memory=True), of the evaluation, too, and .to(device, non_blocking=True)"
    if not pinned and seen.pinned:  # so what is copied is not what the loader gave
        return "what the script makes of the loader's batch, made on the GPU, or in the data set or collate_fn"
    # Not tensor.pin_memory() in the loop: it copies, too, and while the step waits
    # (https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html).
    first = "" if pinned or seen.has_loader else "all data on the GPU before the loop, if it fits; or "
    changes = [] if pinned else ["DataLoader(..., pin_memory=True)"]
    blocking = [event for event in waiting if not event.non_blocking]
    by_library = all(event.site and event.site.inside.startswith("accelerate/") for event in blocking)
    trainer = seen.trainer if by_library else ""
    changes += [_NON_BLOCKING.get(trainer, ".to(device, non_blocking=True)")] * bool(blocking)
    return first + " and ".join(changes)


def _longest_run(events: Iterable[Event]) -> int:
    """The most copies of one line and one size between two kernels; 0 where no kernels were seen."""
    longest, runs, kernels = 0, Counter(), False
    for event in events:
        if event.kernels:
            runs.clear()
            kernels = True
        elif event.kind == COPY:
            runs[event.site, event.bytes] += 1
            longest = max(longest, runs[event.site, event.bytes])
    return longest * kernels


def tell_copies(seen: Observed, events: list[Event]) -> str:
    """How many bytes are copied, and from which memory."""
    kinds = {name: [event.bytes for event in events if event.pinned == pinned] for name, pinned in _KINDS.items()}
    told = (
        f"{format_bytes(sum(sizes))} from {kind} memory, {len(sizes)} {'copies' if len(sizes) > 1 else 'copy'}"
        for kind, sizes in kinds.items()
        if sizes
    )
    return "; ".join(told)


def give_fewer_gradients(seen: Observed) -> str:
    """How to leave out the gradients that nothing uses."""
    changes = []
    if seen.untrained:
        without = "torch.no_grad() around what needs no graph: both save memory, too"
        changes.append(f"requires_grad_(False) for the weights that no optimizer has, or {without}")
    if seen.dropped[0]:
        through = "requires_grad_(False) for a network's weights while another one's loss runs through it"
        changes.append(f"{through}, or .detach() of what is not to be trained")
    return "; ".join(changes)


def tell_unused_gradients(seen: Observed, events: list[Event]) -> str:
    """Which gradients nothing uses."""
    told = [f"{seen.untrained} weights get gradients, and no optimizer has them"] * bool(seen.untrained)
    number, sites = seen.dropped
    if number:
        places = f": {', '.join(site.place for site in sites)}" if sites else ""
        told.append(f"{number} gradients are dropped before an optimizer uses them{places}")
    return "; ".join(told)


def update_faster(seen: Observed) -> str:
    """How an optimizer's step takes less."""
    fewer, each = "fewer updates: accumulate gradients over larger batches", dict.fromkeys(seen.optimizers)
    if len(each) != 1:
        return fewer
    ((name, fused),) = each
    if name in _NOT_COMPILED:
        return fewer
    if fused is None:
        in_batches = ", or let it take weights of equal shape in one batch" * (name not in _IN_LISTS)
        return f"{fewer}; or torch.compile the step of {name}{in_batches}"
    return fewer if fused else f"{name}(..., fused=True), or {fewer}"


def tell_update(seen: Observed, events: list[Event]) -> str:
    """Whose step takes longest, where there are several."""
    if len(names := dict.fromkeys(name for name, _ in seen.optimizers)) > 1:
        return f"which takes longest is not known: {', '.join(names)}"
    several = len({event.optimizer for event in events}) > 1
    return f"the step of {seen.optimizers[0][0]} takes longest" if several else ""


def update_in_lists(seen: Observed) -> str:
    """The calls that take lists."""
    calls = dict.fromkeys(name for each in seen.updates for name in each.instead())
    return f"{'; '.join(calls)}: lists in place of the loop, made once where their tensors stay"


def read_less(seen: Observed) -> str:
    """Which reads of the GPU's values can wait, and which calls are needless."""
    sites = [event.site for event in seen.events if event.kind == READ and event.site]
    filters = [(site.inside.rpartition(":")[0] or site.file).endswith(_TRAINER) for site in sites]
    if any(filters) and all(filter or site.inside for filter, site in zip(filters, sites)):  # libraries' reads alone
        return "TrainingArguments(logging_nan_inf_filter=False): else the Trainer looks at the loss of each step"
    needless = {site: _find_needless(site) for site in sites}
    chosen = {
        event.site for before, event in itertools.pairwise(seen.events) if event.kind == READ and _chooses(before)
    }
    others = [site for site in sites if site not in chosen and not needless[site]]
    read = [_KEEP] * (not sites or bool(others))
    if sites and all(site.inside for site in sites):
        read = [_OF_LIBRARY] * (not all(needless.values()))
    elif chosen:
        read.insert(0 if 2 * len(others) < len(sites) else 1, _CHOOSE)
    return "; ".join([*read, *dict.fromkeys(_NEEDLESS[each] for calls in needless.values() for each in calls)])


def _find_needless(site: Site) -> list[str]:
    """The calls of a line that a loop can do without."""
    return [each for each in _NEEDLESS if f"{each}(" in site.code]


def _chooses(event: Event) -> bool:
    """Whether what it finds by a mask has a size that the CPU reads next."""
    return event.kind == KERNEL and runs(event, ("nonzero",))


def launch_less(seen: Observed) -> str:
    """How the CPU calls fewer operations."""
    if _updating_share(seen.events) > _MOST:
        return update_faster(seen)
    if loop := seen.loop:
        return f"one call for all {loop.rounds} rounds of the loop at {loop.site.place}, if none needs the one before"
    if seen.graphed:
        return "a larger batch"
    return 'a larger batch, or torch.compile(model, mode="reduce-overhead")' if seen.compiled else _COMPILE


def tell_launching(seen: Observed, events: list[Event]) -> str:
    """Where most of the CPU's calls are, if they are in one place."""
    share = _updating_share(seen.events)
    if share > _MOST:
        return f"{share:.0%} of the CPU's calls are in the optimizer's step"
    loop = seen.loop
    return f"{loop.share:.0%} of the forward pass's calls are in a loop of {loop.rounds} rounds" if loop else ""


def _updating_share(events: Iterable[Event]) -> float:
    """The share of the CPU's calls that are in an optimizer's step."""
    calls = {True: 0.0, False: 0.0}
    for event in events:
        calls[event.optimizing] += event.calls
    return calls[True] / max(1.0, sum(calls.values()))


def halve(seen: Observed) -> str:
    """How a step comes to 16 bits, or the rest of it does."""
    now, then = map(_formats, (seen.events, seen.halved))
    if "bf16" in now - then:
        return "fp16 with a GradScaler (the Trainer's fp16=True): this GPU has no tensor cores for bf16"
    if now & {"fp16", "bf16"}:
        return "the rest of it, too: the loss and all forward passes under torch.autocast(...)"
    if seen.trainer:
        return _AS_16_BITS[seen.trainer].format(next(iter(then & {"fp16", "bf16"}), "bf16")).replace("fp16-", "16-")
    around = "with torch.autocast(...): around the forward pass and the loss; fp16 needs a GradScaler"
    refused = any(runs(event, ("binary_cross_entropy",)) for event in seen.events)
    return around + ", and BCELoss to be BCEWithLogitsLoss" * refused


def _formats(events: Iterable[Event]) -> set[str]:
    """In which numbers are multiplied."""
    return {kernel.format for event in events for kernel in event.kernels if kernel.product}


def called_at(event: Event) -> Site | None:
    """The innermost line of a forward pass that called an operation."""
    return event.inner if event.phase != BACKWARD else None


def attend_at_once(seen: Observed) -> str:
    """The call of fused attention."""
    scores, _ = find_attention(seen.events)
    formulas = [seen.events[at].formula for at in scores if runs(seen.events[at], ("_softmax",))]
    if formulas and all(formulas):
        return _AS_FORMULA[Counter(why for why, _ in formulas).most_common(1)[0][0]]
    inside = [site.inside for place in scores if (site := called_at(seen.events[place]))]
    if inside and all(file.startswith("transformers/") for file in inside):
        return 'attn_implementation="sdpa", as an argument of from_pretrained or of the config'
    causal = " (is_causal=True in place of a causal mask)" * may_mask(seen.events, scores)
    return f"scaled_dot_product_attention(q, k, v){causal}, or need_weights=False for nn.MultiheadAttention"
