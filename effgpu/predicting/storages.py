"""The storages of a walk: when each was made and let go of, whose it is, where it lies, and what stays after a step."""

import gc
import math
from collections import Counter
from collections.abc import Iterable
from threading import current_thread, main_thread

import torch

from effgpu.attaching.sites import Site, find_site
from effgpu.measuring.torch_internals import _current_autograd_node, storage_key
from effgpu.predicting.allocator import GPU, HOST, PAGED, Block, find_peak, round_size

_NO_SUM = None, None, 0
Life = tuple[int, int, float]  # of a storage: its size, the events at which it was allocated and freed
_MADE_ONCE = ("gradients", "optimizer state")  # for each weight, if not in the first step: no leak


class Storages:
    """Every storage that operations create, as a `Block` with its owner, in order of events.

    `rounded` says whether a block has the size that the GPU's allocator gives, or that of its tensor.
    """

    def __init__(self, rounded: bool):
        self.blocks: list[Block] = []
        self.now = 0  # the last event
        self.first = 0  # the event from which on the walk counts
        self.emptied = 0  # the event at which the allocator last held no more than what was in use, as all was full
        self.names_gpu = False  # for a tensor: then what does not say where it lies, and never meets one, is on the CPU
        self.kept: tuple[tuple[Site | None, int], ...] = ()  # bytes that each of the last two steps has added to
        self._rounded = rounded
        self._most_from = 0  # the event from which on the most in use is asked for
        self._alive_now: dict[int, Block] = {}  # by storage
        self._sources: dict[int, list[Block]] = {}  # of what lies where they lie, which is not said; by its block
        self._supposed: set[int] = set()  # blocks that nothing says are on the host, but that the GPU's are copied to
        self._summed: tuple = _NO_SUM  # a gradient, the sum that was just made of it, and the sum's storage
        self._continued: dict[int, Block] = {}  # the block that a sum's goes on in, by the sum's
        self._ends: list[int] = []  # of steps
        self._made: list[list[Block]] = [[]]  # by the forward pass of each step, and of the one that has begun
        self._before: dict[Site | None, list[int]] = {}  # sizes of what was there at the end of the last step
        self._grew: set[Site | None] = set()  # where that was more than a step before
        self._stayed: set[int] = set()  # blocks that a forward pass has made, and that were there a whole step later

    def start(self) -> None:
        """Count from here on."""
        self.first, self._made = self.now, [[]]
        self._before, self._grew = self._sizes_alive(), set()

    def of(self, tensor: torch.Tensor) -> Block | None:
        """The block that a tensor lies in, if it has one."""
        return self._alive_now.get(storage_key(tensor)) if tensor.layout is torch.strided else None

    def were_there(self, before: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor's storage was allocated before such an event, or at it."""
        block = self.of(tensor)
        return block is not None and block.born <= before

    def add(self, tensor: torch.Tensor, place: str, *, forward: bool) -> Block | None:
        """Count a tensor's storage, if it is new and not empty. `forward` says whether it is a forward pass's."""
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        if key in self._alive_now or not (size := storage.nbytes()):
            return None
        self.now += 1
        size = round_size(size) if self._rounded or tensor.is_cuda else size
        owner, node = ("activations", -1) if forward else ("other", _number_node())
        block = Block(size, self.now, owner, place=place, site=find_site(), node=node)
        if forward and torch.is_grad_enabled() and self.is_on_gpu(block) and current_thread() is main_thread():
            self._made[-1].append(block)
        self.blocks.append(block)
        self._alive_now[key] = block
        return block

    def add_on_host(self, tensor: torch.Tensor) -> Block | None:
        """Note, of a tensor's storage that is new, that it is in the host's memory. An empty one may grow."""
        if (key := storage_key(tensor)) in self._alive_now:
            return None
        block = self._alive_now[key] = Block(0, self.now, place=HOST)
        return block

    def take_for_a_moment(self, size: int) -> None:
        """Count what an operation takes while it runs."""
        self.blocks.append(Block(round_size(size), self.now + 1, died=self.now + 2, place=GPU))
        self.now += 2

    def lives_since(self, began: int) -> list[Life]:
        """What was made on the GPU since an event; of what is left, as if it ended now."""
        made = (block for block in self.on_gpu if block.born > began)
        return [(block.size, block.born - began, min(block.died, self.now + 1) - began) for block in made]

    def repeat(self, lives: list[Life]) -> None:
        """Count these lives again."""
        self.blocks += (Block(size, self.now + born, died=self.now + died, place=GPU) for size, born, died in lives)
        self.now += max((died for *_, died in lives), default=0)

    def link(self, made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """Note what results were made of, as a cast weight is of its weight: they lie in one place, also if none says.

        A number may lie elsewhere.
        """
        sources = [block for tensor in given if tensor.dim() and (block := self.of(tensor)) and self._is_open(block)]
        for block in filter(None, map(self.of, made)):
            if not block.place and not any(block is source for source in sources):  # not: a view
                self._sources.setdefault(id(block), sources)

    def _is_open(self, block: Block) -> bool:
        return not block.place or id(block) in self._supposed

    def suppose_on_host(self, block: Block) -> None:
        """What lies on the GPU is copied to a block of which nothing says where it lies."""
        block.place = HOST
        self._supposed.add(id(block))

    def bring(self, block: Block) -> None:
        """A block has met the GPU's: it lies there, and so did what it was made of.

        One that the step has put on the host was copied by a name that is not seen.
        """
        if not self._is_open(block):  # tensor.to(other.device)
            self.now += 1
            block.born = self.now
        met = [block]
        while met:
            block = met.pop()
            block.place = GPU
            self._supposed.discard(id(block))
            met += filter(self._is_open, self._sources.pop(id(block), ()))

    def drop(self, key: int, block: Block) -> bool:
        """A storage is let go of. Returns whether nothing else lies under its key."""
        block = self._continued.pop(id(block), block)
        if is_last := self._alive_now.get(key) is block:
            del self._alive_now[key]
        if block is self._summed[0] and self._summed[1] is self.blocks[-1]:
            self._go_on(*self._summed)
        else:
            self.now += 1
            block.died = self.now
        return is_last

    def note_sum(self, one: torch.Tensor, result: torch.Tensor) -> None:
        """Autograd adds a gradient to the one that it holds, which is in another node's result, by an operation."""
        block, made = self.of(one), self.of(result)
        if block and made and block.node not in (-1, _number_node()) and block.size == made.size:
            self._summed = block, made, storage_key(result)

    def _go_on(self, block: Block, made: Block, key: int) -> None:
        """A sum takes the place of what nobody else holds. PyTorch only makes a new tensor as it sees us looking on.

        torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace.
        """
        self.blocks.pop()
        self._alive_now[key], self._summed = block, _NO_SUM
        self._continued[id(made)] = block

    def name(self, tensors: Iterable[object], owner: str) -> None:
        """Say of tensors whose they are, if nobody has."""
        for tensor in tensors:
            block = self.of(tensor) if isinstance(tensor, torch.Tensor) else None
            if block is not None and block.owner in ("other", "activations"):
                block.owner = owner

    def is_on_gpu(self, block: Block) -> bool:
        """Whether a block takes memory of the GPU."""
        return block.place == GPU or (not block.place and not self.names_gpu)

    @property
    def on_gpu(self) -> list[Block]:
        """The blocks that lie on the GPU: all but those on the CPU, or those that are said to, if any tensor is."""
        return [block for block in self.blocks if self.is_on_gpu(block)]

    @property
    def paged(self) -> int:
        """The most bytes of what lies on the GPU only as far as there is room."""
        return find_peak([block for block in self.blocks if block.place == PAGED])[0]

    def in_use(self) -> int:
        """Bytes on the GPU now."""
        return sum(block.size for block in self._alive_now.values() if self.is_on_gpu(block))

    def most_in_use(self) -> int:
        """The most bytes on the GPU since `forget_most`."""
        return find_peak(self.on_gpu, self._most_from)[0]

    def forget_most(self) -> None:
        """What torch.cuda.reset_peak_memory_stats does."""
        self._most_from = self.now

    def peak(self) -> tuple[int, int]:
        """The most bytes on the GPU since the walk counts, and the event at which they were."""
        return find_peak(self.on_gpu, self.first)

    def peak_until(self, event: float) -> int:
        """The most bytes on the GPU in the last step, up to an event; nothing for one before that step."""
        begun = self._ends[-2] if len(self._ends) > 1 else self.first
        return find_peak([block for block in self.on_gpu if block.born <= event], begun)[0] * (event >= begun)

    def peak_before(self) -> tuple[int, Site | None]:
        """The most bytes on the GPU before that, and the line that took the last of them."""
        blocks = [block for block in self.on_gpu if self.emptied < block.died and block.born <= self.first]
        peak, at = find_peak(blocks, self.emptied)
        return peak, next((block.site for block in self.blocks if block.born == at), None)

    def at_peak(self) -> list[Block]:
        """The blocks on the GPU when most is."""
        _, at = self.peak()
        return [block for block in self.on_gpu if block.born <= at < block.died]

    @property
    def made(self) -> list[dict[Site | None, list[int]]]:
        """Sizes of the activations that the forward pass of each step has made, by line.

        Of what stays, only what the last step has made, too, as a batch that is fetched a step ahead.
        """
        again = {block.site for blocks in self._made[-2:-1] for block in blocks}

        def counts(block: Block) -> bool:
            return block.owner == "activations" or (id(block) in self._stayed and block.site in again)

        return [_sizes(filter(counts, blocks)) for blocks in self._made[:-1]]

    def made_smaller(self) -> bool:
        """Whether the last step's forward pass made less than that of the step before."""
        *_, before, last, _ = (sum(block.size for block in blocks) for blocks in [[], *self._made])
        return before > last

    def leave_out(self) -> None:
        """The last step was no usual one: its forward pass is not compared with others."""
        del self._made[-2]

    def made_less(self) -> bool:
        """Whether the last step's forward pass made fewer storages than that of the step before."""
        *_, before, last, _ = map(len, self._made)
        return before > last

    def end_step(self) -> None:
        """A step is over: find what it leaves behind more than the one before."""
        self._ends.append(self.now)
        self._name_what_stays()
        more, alive = self._find_more()
        if self._grew.intersection(site for site, _ in more) and gc.collect():  # that only awaited it
            more, alive = self._find_more()
        self.kept = tuple((site, size) for site, size in more if site in self._grew)  # not: what comes and goes
        self._before, self._grew = alive, {site for site, _ in more}
        self._made.append([])

    def _name_what_stays(self) -> None:
        """What a step has made, and a whole one after it leaves there, is no activation: another library's state."""
        for block in self.blocks if len(self._ends) > 1 else ():
            if block.owner == "activations" and block.died == math.inf and block.born <= self._ends[-2]:
                block.owner = "other"
                self._stayed.add(id(block))

    def _sizes_alive(self) -> dict[Site | None, list[int]]:
        """By line, the sizes of what is on the GPU now."""
        alive = (block for block in self.blocks if block.died == math.inf and self.is_on_gpu(block))
        return _sizes(block for block in alive if block.owner not in _MADE_ONCE)

    def _find_more(self) -> tuple[tuple[tuple[Site | None, int], ...], dict[Site | None, list[int]]]:
        """What is alive at the end of this step more than at the end of the one before, and the sizes of what is."""
        alive = self._sizes_alive()
        sites = dict.fromkeys([*alive, *self._before])
        now, before = ({site: sizes.get(site, []) for site in sites} for sizes in (alive, self._before))
        more = Counter({site: sum(now[site]) - sum(before[site]) for site in sites})
        added = (site for site in more if len(now[site]) > len(before[site]))  # not: a larger batch in place of one
        grown = tuple((site, more[site]) for site in sorted(added, key=more.get, reverse=True) if more[site] > 0)
        return grown if more.total() > 0 else (), alive


def _sizes(blocks: Iterable[Block]) -> dict[Site | None, list[int]]:
    """The sizes of blocks, by the line that made them."""
    sizes: dict[Site | None, list[int]] = {}
    for block in blocks:
        sizes.setdefault(block.site, []).append(block.size)
    return sizes


def running_node() -> torch.autograd.graph.Node | None:
    """Autograd's node that is running, without a graph of its own; None outside of a backward pass."""
    return None if torch.is_grad_enabled() else _current_autograd_node()


def _number_node() -> int:
    """Which node that is; -1 outside of a backward pass."""
    return node._sequence_nr() if (node := running_node()) is not None else -1
