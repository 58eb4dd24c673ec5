"""moDNN's memory map: one address space as a list of occupied and free segments (sections III-B and IV-B1).

Virtual allocation for planners: nothing is allocated. A segment is split by an allocation and merged with free
neighbours when it is freed. Free memory in pieces is *fragmentation*; *defragmentation* moves all blocks together.

Planners ask for the largest and the best fitting free segment far more often than they change the map, and try much on
copies of it: free segments are listed by size as well, and segments do not change, so a copy is that of three lists.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

FITS = ("first", "best")


class Segment(NamedTuple):
    """``nbytes`` from address ``start``, occupied by ``key`` (None: free)."""

    start: int
    nbytes: int
    key: Hashable | None


class MemoryMap:
    """An address space of ``capacity_bytes``. Raises ValueError for a capacity below 1."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, got {capacity_bytes}; give the device's memory")
        self.capacity_bytes = capacity_bytes
        self._segments = [Segment(0, capacity_bytes, None)]
        self._starts: dict[Hashable, int] = {}
        self._free = [(capacity_bytes, 0)]  # (bytes, start), the smallest first
        self._free_bytes = capacity_bytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._starts

    def segments(self) -> Iterator[Segment]:
        """All segments by address; two free ones never touch."""
        yield from self._segments

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
        start = self._fitting(nbytes, fit)
        if start is None:
            return None
        at = self._index(start)
        room = self._segments[at].nbytes
        self._segments[at] = Segment(start, nbytes, key)
        self._forget(room, start)
        if room > nbytes:
            self._segments.insert(at + 1, Segment(start + nbytes, room - nbytes, None))
            insort(self._free, (room - nbytes, start + nbytes))
        self._starts[key] = start
        self._free_bytes -= nbytes
        return start

    def free(self, key: Hashable) -> None:
        """Free a segment and merge it with free neighbours. Raises ValueError for a key that is not there."""
        start = self._starts.pop(key, None)
        if start is None:
            raise ValueError(f"free: no segment {key!r} is allocated; it was freed before or never was there")
        first = self._index(start)
        nbytes, end = self._segments[first].nbytes, first + 1
        self._free_bytes += nbytes
        if end < len(self._segments) and self._segments[end].key is None:
            self._forget(self._segments[end].nbytes, self._segments[end].start)
            nbytes, end = nbytes + self._segments[end].nbytes, end + 1
        if first and self._segments[first - 1].key is None:
            first -= 1
            start = self._segments[first].start
            self._forget(self._segments[first].nbytes, start)
            nbytes += self._segments[first].nbytes
        self._segments[first:end] = [Segment(start, nbytes, None)]
        insort(self._free, (nbytes, start))

    def defragment(self) -> int:
        """Move all blocks to the lowest addresses, in their order; the bytes that moved."""
        moved = at = 0
        packed = []
        for start, nbytes, key in self._segments:
            if key is None:
                continue
            moved += nbytes if start != at else 0
            packed.append(Segment(at, nbytes, key))
            self._starts[key] = at
            at += nbytes
        self._free = []
        if at < self.capacity_bytes:
            packed.append(Segment(at, self.capacity_bytes - at, None))
            self._free.append((self.capacity_bytes - at, at))
        self._segments = packed
        return moved

    def copy(self) -> MemoryMap:
        """The same map, to try something on."""
        made = MemoryMap(self.capacity_bytes)
        made._segments, made._starts, made._free = self._segments.copy(), self._starts.copy(), self._free.copy()
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
        return max((s.start + s.nbytes for s in self._segments if s.key is not None), default=0)

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside the largest free segment: 0 where they are in one piece."""
        free = self.free_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    def runs(self, nbytes: int, movable: Callable[[Hashable], bool]) -> Iterator[tuple[Hashable, ...]]:
        """moDNN's offloading schemes (section IV-B1, Fig. 4): the blocks of the shortest runs of neighbouring segments,
        free ones and blocks that may be moved away, that holds ``nbytes``; one run for each block or free segment that
        it may begin with. Equal sets of blocks are given once."""
        sizes, keys = [s.nbytes for s in self._segments], [s.key for s in self._segments]
        free = [k is None or movable(k) for k in keys]
        seen: set[tuple[Hashable, ...]] = set()
        total = end = 0  # a window: sizes[first:end] are `total` bytes
        for first, size in enumerate(sizes):
            if end < first:
                total, end = 0, first
            while total < nbytes and end < len(sizes) and free[end]:
                total += sizes[end]
                end += 1
            if total >= nbytes:
                run = tuple(k for k in keys[first:end] if k is not None)
                if run not in seen:
                    seen.add(run)
                    yield run
            if end > first:
                total -= size

    def _fitting(self, nbytes: int, fit: str) -> int | None:
        if fit == "first":
            return next((s.start for s in self._segments if s.key is None and s.nbytes >= nbytes), None)
        at = bisect_left(self._free, (nbytes, -1))
        return self._free[at][1] if at < len(self._free) else None

    def _index(self, start: int) -> int:
        return bisect_left(self._segments, (start,))

    def _forget(self, nbytes: int, start: int) -> None:
        del self._free[bisect_left(self._free, (nbytes, start))]
