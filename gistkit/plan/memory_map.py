"""A memory map with virtual allocations: moDNN's linked list of occupied and free segments (DATE 2018, section IV-B1).

Addresses are bytes from the start of the map. An allocation takes the first free segment that is large enough, so
memory fragments as it does on a device; :meth:`MemoryMap.defragment` moves what is occupied together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """``nbytes`` bytes from address ``start``, occupied by a block or free (None)."""

    start: int
    nbytes: int
    block: int | None


class _Node:
    """One element of the list."""

    __slots__ = ("block", "following", "nbytes", "previous", "start")

    def __init__(self, start: int, nbytes: int, block: int | None = None) -> None:
        self.start, self.nbytes, self.block = start, nbytes, block
        self.previous: _Node | None = None
        self.following: _Node | None = None


class MemoryMap:
    """``capacity`` bytes, all of them free at first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._head = _Node(0, capacity)
        self._nodes: dict[int, _Node] = {}

    def alloc(self, block: int, nbytes: int) -> bool:
        """Occupy the first free segment of at least ``nbytes`` (above 0); False where there is none. Raises ValueError
        for a block that is there already."""
        if block in self._nodes:
            raise ValueError(f"block must not be in the map yet, got {block}; free it first")
        node: _Node | None = self._head
        while node is not None and (node.block is not None or node.nbytes < nbytes):
            node = node.following
        if node is None:
            return False
        if node.nbytes > nbytes:
            rest = _Node(node.start + nbytes, node.nbytes - nbytes)
            _link(rest, node.following)
            _link(node, rest)
            node.nbytes = nbytes
        node.block = block
        self._nodes[block] = node
        return True

    def free(self, block: int) -> None:
        """Free a block's segment, merged with free neighbours. Raises ValueError for a block that is not there."""
        if block not in self._nodes:
            raise ValueError(f"block must be in the map, got {block}; allocate it first")
        node = self._nodes.pop(block)
        node.block = None
        _merge(node, node.following)
        _merge(node.previous, node)

    def segments(self) -> Iterator[Segment]:
        """All segments by address."""
        node: _Node | None = self._head
        while node is not None:
            if node.nbytes:
                yield Segment(node.start, node.nbytes, node.block)
            node = node.following

    def defragment(self) -> int:
        """Move the occupied segments together, at the lowest addresses, in their order; bytes that had to move."""
        moved, start, tail = 0, 0, None
        node: _Node | None = self._head
        while node is not None:
            if node.block is not None:
                moved += node.nbytes if node.start != start else 0
                node.start = start
                start += node.nbytes
                self._append(tail, node)
                tail = node
            node = node.following
        rest = _Node(start, self.capacity - start)
        self._append(tail, rest)
        rest.following = None
        return moved

    def copy(self) -> MemoryMap:
        """The same map, to try something on."""
        twin, tail = MemoryMap(self.capacity), None
        for segment in self.segments():
            node = _Node(segment.start, segment.nbytes, segment.block)
            twin._append(tail, node)
            tail = node
            if segment.block is not None:
                twin._nodes[segment.block] = node
        return twin

    @property
    def used_bytes(self) -> int:
        """Bytes of all occupied segments."""
        return sum(node.nbytes for node in self._nodes.values())

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def _append(self, tail: _Node | None, node: _Node) -> None:
        if tail is None:
            self._head = node
            node.previous = None
        else:
            tail.following, node.previous = node, tail


def _link(left: _Node, right: _Node | None) -> None:
    left.following = right
    if right is not None:
        right.previous = left


def _merge(left: _Node | None, right: _Node | None) -> None:
    """Make one free segment of two free neighbours."""
    if left is not None and right is not None and left.block is None and right.block is None:
        left.nbytes += right.nbytes
        _link(left, right.following)
