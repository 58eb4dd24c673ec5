"""What is where while moDNN's schedule is made: the memory map with its virtual allocations, host copies, two clocks.

``Places`` is the memory half, which predictions copy. ``Streams`` is the time half: StrmC's clock, and StrmD, on which
transfers run one after the other in the order in which they were decided (DATE 2018, section IV-B1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from gistkit.planning.policies.modnn.lives import Lives
from gistkit.planning.policies.modnn.offload import Leaving, best_scheme
from gistkit.planning.simulate import MemoryMap

TRANSIENT, WORKSPACE = -1, -2
"""Names in the memory map of what a task makes and frees itself, and of its algorithm's workspace."""


@dataclass
class Places:
    """The memory map, and of every block: on the device (``here``), in host memory (``host``), not used since it was
    made or fetched (``fresh``)."""

    lives: Lives
    map: MemoryMap
    here: set[int] = field(default_factory=set)
    host: set[int] = field(default_factory=set)
    fresh: set[int] = field(default_factory=set)

    def copy(self) -> Places:
        """The same places, to try something on."""
        return Places(self.lives, self.map.copy(), set(self.here), set(self.host), set(self.fresh))

    def missing(self, task: int) -> list[int]:
        """Blocks that a task needs and that are not on the device: inputs in host memory first, then outputs."""
        return sorted((b for b in self.lives.needed[task] if b not in self.here), key=lambda b: (b not in self.host, b))

    def may_leave(self, task: int, until: int) -> set[int]:
        """Blocks that may be offloaded just before a task: not (a) what it needs, not (b) what was not used since it
        was made or fetched. To fetch for a later task ``until``, nothing leaves that is needed before that."""
        free = self.here.difference(self.fresh, self.lives.needed[task], self.lives.pinned)
        return free if until < 0 else free.difference(*self.lives.starting[task + 1 : until + 1])

    def next_need(self, block: int, task: int) -> int:
        """The first task after the given one that needs the block."""
        return self.lives.lives[block].next_stay(task + 1) or len(self.lives.needed)

    def nbytes(self, block: int) -> int:
        """Size of a block."""
        return self.lives.lives[block].nbytes

    def scheme(self, nbytes: int, task: int, leaving: Leaving | None, until: int = -1) -> tuple[int, ...] | None:
        """Blocks to vacate so that an allocation succeeds: () where it does at once, None where there is no way.
        ``leaving`` as for :func:`.modnn_offload.best_scheme`."""
        if self.map.largest_free_bytes >= nbytes:
            return ()
        movable = self.may_leave(task, until)
        runs = self.map.runs(nbytes, movable.__contains__)
        lives, host, end = self.lives.lives, self.host, len(self.lives.needed)
        found = best_scheme(
            runs,
            leaving,
            lambda block: lives[block].next_stay(task + 1) or end,
            lambda block: 0 if block in host else lives[block].nbytes,
        )
        return None if found is None else found.blocks

    def leave(self, block: int) -> None:
        """The block's memory is free; its bytes are in host memory."""
        self.map.free(block)
        self.here.discard(block)
        self.host.add(block)
        self.fresh.discard(block)

    def enter(self, block: int, nbytes: int) -> None:
        """The block's memory is taken. What no forward task reads again counts as used."""
        if self.map.allocate(block, nbytes, "best") is None:
            raise AssertionError(f"no room for {nbytes} bytes that a scheme has just made room for")
        if block >= 0:
            self.arrive(block)

    def arrive(self, block: int) -> None:
        """A block that has its memory is here."""
        self.here.add(block)
        if block in self.host or not self.lives.lives[block].idle:
            self.fresh.add(block)

    def retire(self, task: int, made: Iterable[int] = ()) -> None:
        """A task has run: its workspace goes, what it read is used, what it wrote has no host copy, the dead go."""
        self.used(task, made)
        for name in (*self.lives.ending[task], TRANSIENT, WORKSPACE):
            if name >= 0 or name in self.map:
                self.map.free(name)

    def used(self, task: int, made: Iterable[int]) -> None:
        """What a task that has run leaves behind, but for the memory."""
        ending = self.lives.ending[task]
        self.fresh.difference_update(set(self.lives.needed[task]).difference(made))
        self.fresh.difference_update(ending)
        self.host.difference_update(self.lives.written[task])
        self.here.difference_update(ending)


@dataclass
class Streams:
    """StrmC's present moment, the moment from which StrmD is free, and when each block was written or fetched."""

    now_s: float = 0.0
    link_s: float = 0.0
    ready_s: dict[int, float] = field(default_factory=dict)

    def wait(self, until_s: float) -> None:
        """StrmC waits."""
        self.now_s = max(self.now_s, until_s)

    def transfer(self, earliest_s: float, seconds: float) -> tuple[float, float]:
        """(start, finish) of the next transfer on StrmD."""
        start = max(self.link_s, earliest_s)
        self.link_s = start + seconds
        return start, self.link_s
