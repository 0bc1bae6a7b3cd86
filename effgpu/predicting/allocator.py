"""Allocations and frees of a step, and what PyTorch's caching allocator makes of them.

The constants and the order of choices are those of c10/cuda/CUDACachingAllocator.cpp (c10/core/AllocatorConfig.h from
PyTorch 2.9 on) in their defaults: no expandable segments, no max_split_size, one stream.
"""

import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from effgpu.attaching.sites import Site
from effgpu.units import MiB

ROUNDED_TO = 512  # kMinBlockSize: every size is rounded up to it
SMALL = MiB  # kSmallSize: blocks up to it come from the small pool
SMALL_SEGMENT = 2 * MiB  # kSmallBuffer: what a segment of the small pool takes
LARGE_SEGMENT = 20 * MiB  # kLargeBuffer: what a segment takes for a block that is not small, below MIN_LARGE
MIN_LARGE = 10 * MiB  # kMinLargeAlloc: a block from here on gets a segment of its own size,
ROUND_LARGE = 2 * MiB  # kRoundLarge: rounded up to this

VARIABLES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_DEFAULTS = "expandable_segments:False", "backend:native", "per_process_memory_fraction:1"
_ELSEWHERE = "pinned_", "release_lock_on_", "throw_on_", "graph_capture_"  # what changes no memory of the GPU

GPU, HOST, PAGED = "gpu", "host", "paged"  # where a block lies; the last moves between the two by itself


def find_settings(given: str) -> list[str]:
    """Of settings such as `"max_split_size_mb:64,pinned_use_background_threads:True"`, those that change GPU memory."""
    each = re.findall(r"[^,:]+(?::(?:\[[^]]*\]|[^,]*))?", given.replace(" ", ""))
    return [one for one in each if one not in _DEFAULTS and not one.startswith(_ELSEWHERE)]


@dataclass
class Block:
    """A storage: its rounded size, the events at which it was allocated and freed, whose it is, and where.

    `place` is one of the three above, or "" where the step does not say. `site` is the reader's line that made it,
    `node` the number of autograd's node that did; -1 outside of a backward pass.
    """

    size: int
    born: int
    owner: str = "other"
    died: float = inf
    place: str = ""
    site: Site | None = None
    node: int = -1


def round_size(size: int) -> int:
    """The bytes that the allocator hands out for a request."""
    return max(ROUNDED_TO, -(-size // ROUNDED_TO) * ROUNDED_TO)


def segment_size(size: int) -> int:
    """The bytes that the allocator asks the GPU for, to hand out a rounded size."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def find_peak(blocks: Sequence[Block], first: int = 0) -> tuple[int, int]:
    """The most bytes alive at any event from `first` on, and the last event at which they are."""
    changes: Counter[int] = Counter()
    for block in blocks:
        changes[block.born] += block.size
        if block.died < inf:
            changes[block.died] -= block.size
    alive = most = sum(block.size for block in blocks if block.born <= first < block.died)
    at = first
    for event in sorted(event for event in changes if event > first):
        alive += changes[event]
        if alive >= most:
            most, at = alive, event
    return most, at


def count_reserved(blocks: Sequence[Block], room: float = inf) -> int:
    """The most bytes that the allocator holds in these allocations and frees, in the order of their events.

    Above `room` bytes, it gives back what it has cached before it asks the GPU for more.
    """
    pool = Pool(room)
    events = [(block.born, 1, number) for number, block in enumerate(blocks)]
    events += [(block.died, 0, number) for number, block in enumerate(blocks) if block.died < inf]
    held = {}
    for _, allocate, number in sorted(events):
        if allocate:
            held[number] = pool.allocate(blocks[number].size)
        else:
            pool.free(held.pop(number))
    return pool.most


class _Piece:
    """A part of a segment, handed out or free, with its neighbours."""

    __slots__ = ("address", "after", "before", "is_free", "size", "small")

    def __init__(self, address: int, size: int, small: bool):
        self.address, self.size, self.small = address, size, small
        self.before = self.after = None
        self.is_free = False


class Pool:
    """The caching allocator: `reserved` bytes in segments, cut into pieces that are handed out and joined again.

    `most` are the most that were reserved. With less `room` than it takes, whole segments that are free are given back.
    """

    def __init__(self, room: float = inf):
        self.reserved = self.most = 0
        self._room, self._end = room, 0  # the latter: of the addresses so far
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted
        self._at: dict[int, _Piece] = {}

    def allocate(self, size: int) -> _Piece:
        """A piece of the rounded size: the smallest free one that is large enough, or of a new segment."""
        size = round_size(size)
        small = size <= SMALL
        free = self._free[small]
        found = bisect_left(free, (size, -1))
        if found < len(free):
            piece = self._at[free.pop(found)[1]]
        else:
            piece = _Piece(self._end, segment_size(size), small)
            self._at[piece.address] = piece
            if self.reserved + piece.size > self._room:
                self._give_back()
            self._end += piece.size
            self.reserved += piece.size
            self.most = max(self.most, self.reserved)
        piece.is_free = False
        rest = piece.size - size
        # should_split: a rest of the small pool is kept from 512 bytes on, one of the large pool from above 1 MiB
        if rest >= ROUNDED_TO if small else rest > SMALL:
            self._split(piece, size)
        return piece

    def _give_back(self) -> None:
        """release_cached_blocks: the segments of which no part is handed out."""
        for piece in list(self._at.values()):
            if piece.is_free and piece.before is piece.after is None:
                self._forget(piece)
                del self._at[piece.address]
                self.reserved -= piece.size

    def free(self, piece: _Piece) -> None:
        """Give a piece back, joined with the free pieces beside it."""
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.is_free:
                self._forget(neighbour)
                first, second = sorted((neighbour, piece), key=lambda part: part.address)
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._at[second.address]
                piece = first
        self._offer(piece)

    def _split(self, piece: _Piece, size: int) -> None:
        rest = _Piece(piece.address + size, piece.size - size, piece.small)
        rest.before, rest.after = piece, piece.after
        if rest.after is not None:
            rest.after.before = rest
        piece.after, piece.size = rest, size
        self._at[rest.address] = rest
        self._offer(rest)

    def _offer(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free[piece.small], (piece.size, piece.address))

    def _forget(self, piece: _Piece) -> None:
        free = self._free[piece.small]
        del free[bisect_left(free, (piece.size, piece.address))]
