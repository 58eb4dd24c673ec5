"""moDNN's memory map: one address space as a list of occupied and free segments (sections III-B and IV-B1).

Virtual allocation for planners: nothing is allocated. A segment is split by an allocation and merged with free
neighbours when it is freed. Free memory in pieces is *fragmentation*; *defragmentation* moves all blocks together.

Planners ask for the largest and the best fitting free segment far more often than they change the map, and try much on
copies of it: free segments are listed by size as well, and a copy is that of flat lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

FITS = ("first", "best")


class Segment(NamedTuple):
    """``nbytes`` from address ``start``, occupied by ``key`` (None: free)."""

    start: int
    nbytes: int
    key: Hashable | None


@dataclass(frozen=True)
class Runs:
    """Runs of blocks, ``blocks[first:end]`` for each (first, end) of ``spans``, of which neither end ever goes back.

    Neighbouring runs share most of their blocks, hundreds in a large step: sums and minima take one pass over all.
    """

    blocks: Sequence[Hashable]
    spans: Sequence[tuple[int, int]]

    def __iter__(self) -> Iterator[tuple[Hashable, ...]]:
        return (tuple(self.blocks[first:end]) for first, end in self.spans)

    def sums(self, values: Iterable[float]) -> list[float]:
        """By run the sum of its blocks' values, which are given by block; rounded as sums from the first block on."""
        running = list(accumulate(values, initial=0))
        return [running[end] - running[first] for first, end in self.spans]

    def least(self, values: Sequence[int], none: int) -> list[int]:
        """By run the least of its blocks' values; ``none`` where it has no blocks."""
        found: list[int] = []
        rising: deque[int] = deque()  # blocks that no later one of the run is below
        seen = 0
        for first, end in self.spans:
            for at in range(seen, end):
                while rising and values[rising[-1]] >= values[at]:
                    rising.pop()
                rising.append(at)
            seen = end
            while rising and rising[0] < first:
                rising.popleft()
            found.append(values[rising[0]] if rising else none)
        return found


class MemoryMap:
    """An address space of ``capacity_bytes``. Raises ValueError for a capacity below 1."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, got {capacity_bytes}; give the device's memory")
        self.capacity_bytes = capacity_bytes
        # By segment in order of address: where it starts (and, behind them all, where the last ends), and who has it.
        self._edges: list[int] = [0, capacity_bytes]
        self._keys: list[Hashable | None] = [None]
        self._starts: dict[Hashable, int] = {}
        self._free = [(capacity_bytes, 0)]  # (bytes, start), the smallest first
        self._free_bytes = capacity_bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._starts

    def segments(self) -> Iterator[Segment]:
        """All segments by address; two free ones never touch."""
        for (start, end), key in zip(pairwise(self._edges), self._keys, strict=True):
            yield Segment(start, end - start, key)

    def allocate(self, key: Hashable, nbytes: int, fit: str = "first") -> int | None:
        """The address of a new segment: in the first free one that is large enough, or in the smallest (``best``).

        None where no free segment is large enough, though their sum may be. Raises ValueError for a key that is there,
        a size below 1, another fit.
        """
        if key is None or key in self._starts or nbytes < 1 or fit not in FITS:
            raise ValueError(
                f"allocate: key must be new and not None, nbytes at least 1, fit one of {', '.join(FITS)}; "
                f"got key {key!r}, nbytes {nbytes!r}, fit {fit!r}"
            )
        listed = self._fitting(nbytes, fit)
        if listed is None:
            return None
        room, start = self._free.pop(listed)
        at = bisect_left(self._edges, start)
        self._keys[at] = key
        if room > nbytes:
            self._edges.insert(at + 1, start + nbytes)
            self._keys.insert(at + 1, None)
            insort(self._free, (room - nbytes, start + nbytes))
        self._starts[key] = start
        self._free_bytes -= nbytes
        return start

    def free(self, key: Hashable) -> None:
        """Free a segment and merge it with free neighbours. Raises ValueError for a key that is not there."""
        start = self._starts.pop(key, None)
        if start is None:
            raise ValueError(f"free: no segment {key!r} is allocated; it was freed before or never was there")
        edges, keys = self._edges, self._keys
        at = bisect_left(edges, start)
        end = edges[at + 1]
        self._free_bytes += end - start
        keys[at] = None
        if at + 1 < len(keys) and keys[at + 1] is None:
            end = self._join(at)
        if at and keys[at - 1] is None:
            start = edges[at - 1]
            self._forget(edges[at] - start, start)
            del edges[at], keys[at]
        insort(self._free, (end - start, start))

    def _join(self, at: int) -> int:
        """Make one of a segment and the free one behind it, which is listed no longer; where that ends."""
        start, end = self._edges[at + 1], self._edges[at + 2]
        self._forget(end - start, start)
        del self._edges[at + 1], self._keys[at + 1]
        return end

    def defragment(self) -> int:
        """Move all blocks to the lowest addresses, in their order; the bytes that moved."""
        moved = at = 0
        edges, keys = [0], []
        for start, nbytes, key in self.segments():
            if key is None:
                continue
            moved += nbytes if start != at else 0
            self._starts[key] = at
            at += nbytes
            edges.append(at)
            keys.append(key)
        self._free = []
        if at < self.capacity_bytes:
            self._free.append((self.capacity_bytes - at, at))
            edges.append(self.capacity_bytes)
            keys.append(None)
        self._edges, self._keys = edges, keys
        return moved

    def copy(self) -> MemoryMap:
        """The same map, to try something on."""
        made = MemoryMap(self.capacity_bytes)
        made._edges, made._keys = self._edges.copy(), self._keys.copy()
        made._starts, made._free = self._starts.copy(), self._free.copy()
        made._free_bytes = self._free_bytes
        return made

    @property
    def free_bytes(self) -> int:
        """All free bytes."""
        return self._free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The largest allocation that works without moving anything."""
        return self._free[-1][0] if self._free else 0

    @property
    def extent_bytes(self) -> int:
        """The end of the last occupied segment."""
        return max((s.start + s.nbytes for s in self.segments() if s.key is not None), default=0)

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside the largest free segment: 0 where they are in one piece."""
        free = self.free_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    def runs(self, nbytes: int, movable: Callable[[Hashable], bool]) -> Runs:
        """moDNN's offloading schemes (section IV-B1, Fig. 4): the blocks of the shortest runs of neighbouring segments,
        free ones and blocks that may be moved away, that holds ``nbytes``; one run for each block or free segment that
        it may begin with. Equal sets of blocks are given once (not so the empty one)."""
        blocks: list[Hashable] = []
        spans: list[tuple[int, int]] = []
        window: deque[tuple[int, int]] = deque()  # its segments: where each begins, how many blocks lie before
        last = None
        for (start, end), key in zip(pairwise(self._edges), self._keys, strict=True):
            if key is not None and not movable(key):
                window.clear()
                continue
            window.append((start, len(blocks)))
            if key is not None:
                blocks.append(key)
            while window and end - window[0][0] >= nbytes:
                _, first = window.popleft()
                if (first, len(blocks)) != last:
                    spans.append(last := (first, len(blocks)))
        return Runs(blocks, spans)

    def _fitting(self, nbytes: int, fit: str) -> int | None:
        """Where the free segment to allocate in is listed."""
        at = bisect_left(self._free, (nbytes, -1))
        if at == len(self._free):
            return None
        return min(range(at, len(self._free)), key=lambda i: self._free[i][1]) if fit == "first" else at

    def _forget(self, nbytes: int, start: int) -> None:
        del self._free[bisect_left(self._free, (nbytes, start))]
