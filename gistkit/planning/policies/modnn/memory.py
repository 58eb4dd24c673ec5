"""moDNN's memory map, Fig. 3's delay and Fig. 4's offloading schemes (Chen et al., DATE 2018, sections III-B, IV-B1).

The map is one address space as a list of occupied and free segments. A failed allocation needs contiguous space: each
segment may be the first of a run of free segments and of data that may leave, and the run grows by subsequent addresses
until it is large enough. The run that delays the next task least leaves; of equal delays the one whose data are needed
last, then the one that moves the fewest bytes, then the first. Data with a copy in host memory leave without transfer.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gistkit.planning.policies.modnn.sub_batch import TDFG

TRANSIENT, WORKSPACE = -1, -2
"""Keys in the memory map of what a task's operators make and free, and of its algorithm's workspace."""


class MemoryMap:
    """Free segments (start, bytes) in the order of their addresses, and the occupied ones by key."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free = [(0, capacity_bytes)]
        self._occupied: dict[int, tuple[int, int]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._occupied

    @property
    def used_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._occupied.values())

    def copy(self) -> MemoryMap:
        twin = MemoryMap(0)
        twin._free, twin._occupied = self._free.copy(), self._occupied.copy()
        return twin

    def segments(self) -> list[tuple[int, int, int | None]]:
        """(start, bytes, key) by address; key None: free."""
        occupied = [(start, nbytes, key) for key, (start, nbytes) in self._occupied.items()]
        return sorted([*occupied, *((start, nbytes, None) for start, nbytes in self._free)], key=lambda s: s[:2])

    def fits(self, nbytes: int) -> bool:
        return nbytes == 0 or any(size >= nbytes for _, size in self._free)

    def allocate(self, key: int, nbytes: int) -> None:
        """Occupy the start of the smallest free segment that is large enough."""
        size, at = min((size, at) for at, (_, size) in enumerate(self._free) if size >= nbytes)
        start = self._free[at][0]
        self._free[at : at + 1] = [(start + nbytes, size - nbytes)] if size > nbytes else []
        self._occupied[key] = start, nbytes

    def free(self, key: int) -> None:
        start, nbytes = self._occupied.pop(key)
        first = end = bisect(self._free, (start, 0))
        if first > 0 and sum(self._free[first - 1]) == start:
            first, start, nbytes = first - 1, self._free[first - 1][0], nbytes + self._free[first - 1][1]
        if end < len(self._free) and self._free[end][0] == start + nbytes:
            nbytes, end = nbytes + self._free[end][1], end + 1
        self._free[first:end] = [(start, nbytes)]

    def defragment(self) -> int:
        """Move all occupied segments to the lowest addresses, in their order; the bytes that moved."""
        moved = end = 0
        for key, (start, nbytes) in sorted(self._occupied.items(), key=lambda item: item[1]):
            moved += nbytes if start != end else 0
            self._occupied[key] = end, nbytes
            end += nbytes
        self._free = [(end, sum(nbytes for _, nbytes in self._free))]
        return moved

    def runs(self, nbytes: int, movable: Callable[[int], bool]) -> Iterator[tuple[int, ...]]:
        """Fig. 4's offloading schemes: from each segment on, the movable keys among neighbours of ``nbytes`` in all."""
        segments = self.segments()
        for first in range(len(segments)):
            run, total = [], 0
            for _, size, key in segments[first:]:
                if total >= nbytes or not (key is None or movable(key)):
                    break
                total += size
                if key is not None:
                    run.append(key)
            if total >= nbytes:
                yield tuple(run)


def offload_delay_s(transfers: Iterable[tuple[float, float]], link_free_s: float, now_s: float) -> float:
    """Fig. 3: the delay of the task that would start now by (ready, seconds) transfers, which run one after the other
    from when the link is free. The schedule is made before the step runs, so a transfer may lie in the past."""
    end_s = 0.0
    for ready_s, seconds in sorted(transfers):
        end_s = max(end_s, link_free_s, ready_s) + seconds
    return max(0.0, end_s - now_s)


@dataclass
class Memory:
    """The memory map, and of the data between two stays the first task of the next one (``waiting``); data with a copy
    in host memory; data not used since they were made or fetched (``fresh``)."""

    tdfg: TDFG
    map: MemoryMap
    waiting: dict[int, int] = field(default_factory=dict)
    host: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)

    def copy(self) -> Memory:
        return Memory(self.tdfg, self.map.copy(), self.waiting.copy(), self.host.copy(), self.fresh.copy())

    def missing(self, task: int) -> list[tuple[int, int]]:
        """(key, bytes) of what a task needs and the device does not hold: what it fetches, then what it makes."""
        absent = sorted((d for d in self.tdfg.starting[task] if d not in self.map), key=lambda d: d not in self.host)
        wanted = [*((d, self.tdfg.data[d].nbytes) for d in absent), (TRANSIENT, self.tdfg.transient_bytes[task])]
        return wanted if wanted[-1][1] else wanted[:-1]

    def fetches(self, task: int) -> list[tuple[int, int]]:
        """(number, bytes) of the data in host memory alone that a task needs."""
        return [(d, nbytes) for d, nbytes in self.missing(task) if d in self.host]

    def next_fetch(self) -> int | None:
        return min((task for d, task in self.waiting.items() if d not in self.map), default=None)

    def scheme(
        self, nbytes: int, task: int, until: int = -1, delay_s: Callable[[Iterable[int]], float] = lambda _: 0.0
    ) -> tuple[int, ...] | None:
        """The data that leave before a task for an allocation of ``nbytes``; None where there is no scheme. (a) What
        the task needs stays, and what is needed up to ``until``, for which one fetches; (b) what is fresh stays."""

        def movable(d: int) -> bool:
            return d not in self.fresh and self.waiting.get(d, -1) > max(task, until)

        def rank(run: tuple[int, ...]) -> tuple[float, int, int]:
            needed = min((self.waiting[d] for d in run), default=-1)
            return delay_s(run), -needed, sum(self.tdfg.data[d].nbytes for d in run if d not in self.host)

        return () if self.map.fits(nbytes) else min(self.map.runs(nbytes, movable), key=rank, default=None)

    def enter(self, key: int, nbytes: int) -> None:
        """Allocate for a block, for what a task makes and frees, or for workspace."""
        self.map.allocate(key, nbytes)
        if key in self.host or (key >= 0 and self.tdfg.data[key].fresh):
            self.fresh.add(key)

    def leave(self, number: int) -> None:
        self.map.free(number)
        self.host.add(number)
        self.fresh.discard(number)

    def force(self, key: int, nbytes: int, task: int, until: int = -1) -> bool:
        """Make room as if no offload caused delay, and allocate; False where there is no scheme. For predictions."""
        scheme = self.scheme(nbytes, task, until)
        for number in scheme or ():
            self.leave(number)
        if scheme is not None:
            self.enter(key, nbytes)
        return scheme is not None

    def retire(self, task: int) -> None:
        """A task has run (lines 29-31): what it wrote has no host copy, what will not be used again is freed."""
        self.host.difference_update(self.tdfg.written[task])
        for number in self.tdfg.starting[task]:
            self.waiting.pop(number, None)
        for number in self.tdfg.ending[task]:
            if self.tdfg.data[number].stays[0] != (task, task):
                self.fresh.discard(number)
            following = next((first for first, _ in self.tdfg.data[number].stays if first > task), None)
            if following is None:
                self.map.free(number)
            else:
                self.waiting[number] = following
        for key in (TRANSIENT, WORKSPACE):
            if key in self.map:
                self.map.free(key)

    def foresees(self, t: int, s: int) -> bool:
        """Line 16: whether what s needs finds room without defragmentation if its inputs are fetched before t: loads
        them and runs the tasks up to s on a copy, without workspaces and as if no offload caused delay."""
        guess = self.copy()
        if not all(guess.force(d, nbytes, t, s) for d, nbytes in guess.fetches(s)):
            return False
        guess.retire(t)
        for u in range(t + 1, s + 1):
            if not all(guess.force(key, nbytes, u) for key, nbytes in guess.missing(u)):
                return False
            guess.retire(u)
        return True
