"""moDNN's memory map: one address space as a linked list of occupied and free segments (sections III-B and IV-B1).

Virtual allocation for planners: nothing is allocated. A segment is split by an allocation and merged with free
neighbours when it is freed. Free memory in pieces is *fragmentation*; *defragmentation* moves all blocks together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

FITS = ("first", "best")


class Segment(NamedTuple):
    """``nbytes`` from address ``start``, occupied by ``key`` (None: free)."""

    start: int
    nbytes: int
    key: Hashable | None


@dataclass(eq=False)
class _Node:
    start: int
    nbytes: int
    key: Hashable | None
    before: _Node | None = None
    after: _Node | None = None


class MemoryMap:
    """An address space of ``capacity_bytes``. Raises ValueError for a capacity below 1."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 1:
            raise ValueError(f"capacity_bytes must be at least 1, got {capacity_bytes}; give the device's memory")
        self.capacity_bytes = capacity_bytes
        self._head = _Node(0, capacity_bytes, None)
        self._nodes: dict[Hashable, _Node] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._nodes

    def segments(self) -> Iterator[Segment]:
        """All segments by address; two free ones never touch."""
        for node in self._walk():
            yield Segment(node.start, node.nbytes, node.key)

    def allocate(self, key: Hashable, nbytes: int, fit: str = "first") -> int | None:
        """The address of a new segment: in the first free one that is large enough, or in the smallest (``best``).

        None where no free segment is large enough, though their sum may be. Raises ValueError for a key that is there,
        a size below 1, another fit.
        """
        if key is None or key in self._nodes or nbytes < 1 or fit not in FITS:
            raise ValueError(
                f"allocate: key must be new and not None, nbytes at least 1, fit one of {', '.join(FITS)}; "
                f"got key {key!r}, nbytes {nbytes!r}, fit {fit!r}"
            )
        large = (n for n in self._walk() if n.key is None and n.nbytes >= nbytes)
        node = next(large, None) if fit == "first" else min(large, key=lambda n: n.nbytes, default=None)
        if node is None:
            return None
        if node.nbytes > nbytes:
            rest = _Node(node.start + nbytes, node.nbytes - nbytes, None, node, node.after)
            if node.after is not None:
                node.after.before = rest
            node.after = rest
        node.nbytes, node.key = nbytes, key
        self._nodes[key] = node
        return node.start

    def free(self, key: Hashable) -> None:
        """Free a segment and merge it with free neighbours. Raises ValueError for a key that is not there."""
        node = self._nodes.pop(key, None)
        if node is None:
            raise ValueError(f"free: no segment {key!r} is allocated; it was freed before or never was there")
        node.key = None
        for first in (node, node.before):
            if first is not None and first.key is None:
                self._merge_after(first)

    def defragment(self) -> int:
        """Move all blocks to the lowest addresses, in their order; the bytes that moved."""
        moved = at = 0
        occupied = [n for n in self._walk() if n.key is not None]
        last: _Node | None = None
        for node in occupied:
            moved += node.nbytes if node.start != at else 0
            node.start, node.before, node.after = at, last, None
            if last is not None:
                last.after = node
            at, last = at + node.nbytes, node
        rest = _Node(at, self.capacity_bytes - at, None, last) if at < self.capacity_bytes else None
        if last is not None:
            last.after = rest
        head = occupied[0] if occupied else rest
        assert head is not None  # the capacity is at least 1
        self._head = head
        return moved

    def copy(self) -> MemoryMap:
        """The same map, to try something on."""
        made = MemoryMap(self.capacity_bytes)
        last: _Node | None = None
        for start, nbytes, key in self.segments():
            node = _Node(start, nbytes, key, last)
            if last is None:
                made._head = node
            else:
                last.after = node
            if key is not None:
                made._nodes[key] = node
            last = node
        return made

    @property
    def free_bytes(self) -> int:
        """All free bytes."""
        return sum(n.nbytes for n in self._walk() if n.key is None)

    @property
    def largest_free_bytes(self) -> int:
        """The largest allocation that works without moving anything."""
        return max((n.nbytes for n in self._walk() if n.key is None), default=0)

    @property
    def extent_bytes(self) -> int:
        """The end of the last occupied segment."""
        return max((n.start + n.nbytes for n in self._nodes.values()), default=0)

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside the largest free segment: 0 where they are in one piece."""
        free = self.free_bytes
        return 1 - self.largest_free_bytes / free if free else 0.0

    def runs(self, nbytes: int, movable: Callable[[Hashable], bool]) -> Iterator[tuple[Hashable, ...]]:
        """moDNN's offloading schemes (section IV-B1, Fig. 4): the blocks of the shortest runs of neighbouring segments,
        free ones and blocks that may be moved away, that holds ``nbytes``; one run for each block or free segment that
        it may begin with. Equal sets of blocks are given once."""
        nodes = list(self._walk())
        seen: set[tuple[Hashable, ...]] = set()
        total = end = 0  # a window: nodes[first:end] hold `total` bytes
        for first, node in enumerate(nodes):
            if end < first:
                total, end = 0, first
            while total < nbytes and end < len(nodes) and (nodes[end].key is None or movable(nodes[end].key)):
                total += nodes[end].nbytes
                end += 1
            if total >= nbytes:
                keys = tuple(n.key for n in nodes[first:end] if n.key is not None)
                if keys not in seen:
                    seen.add(keys)
                    yield keys
            if end > first:
                total -= node.nbytes

    def _walk(self) -> Iterator[_Node]:
        node: _Node | None = self._head
        while node is not None:
            yield node
            node = node.after

    def _merge_after(self, node: _Node) -> None:
        gone = node.after
        if gone is not None and gone.key is None:
            node.nbytes += gone.nbytes
            node.after = gone.after
            if gone.after is not None:
                gone.after.before = node
