"""moDNN's schedule of transfers and algorithms: Algorithm 1 of DATE 2018, section IV-B, line by line.

The clock T is simulated. Before each task its inputs and output are allocated (lines 3-8), a convolution's algorithm is
chosen (9-14), and what future tasks need is fetched if now is the time (15-27); then the task runs and dead blocks go
(28-31). Where an allocation fails, blocks leave for the host (:mod:`gistkit.planning.policies.modnn.offload`); where
no run of them gives room, the memory is defragmented.

What the paper leaves open, and how it is settled here:
- Eq. (4) counts from the end of task t; if StrmD is busy beyond that, from when it is free.
- EST(s) takes the tasks in between at their fastest.
- Eq. (5)'s T_pre is the transfer time of the blocks of s that find no room because of the workspace; it counts where
  by (4) they would have to be fetched now, else nothing is delayed.
- Line 16's prediction fetches what s needs and runs the tasks up to s on a copy of the memory map, without workspaces
  and as if no offload caused delay; it fails where an allocation does. It is asked after (4): either ends the loop.
- An algorithm for whose workspace no offloading scheme is found is not a possible one (line 10); for none but the
  baseline's the memory is defragmented. Of equal gains the one with the smaller penalty is taken, then the smaller
  workspace.
- Of offloading schemes of equal delay the one is taken whose blocks are needed last, then the one that moves the fewest
  bytes. Nothing leaves to make room for a prefetch for s that is itself needed before s.
- Allocations take the smallest free segment that is large enough.
- Defragmentation offloads everything and fetches what the task needs (``PAPER``); under ``PLAN`` what the task needs,
  and what cannot leave, stays and is moved together on the device.

Where it departs from the paper: criterion (b), that a block not used since it was made must not leave, spares only what
the forward pass reads again; what waits for backward alone (masks, statistics) would else stay until then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import inf

from gistkit.planning.cost import Algorithm
from gistkit.planning.policies.modnn.bounds import Part
from gistkit.planning.policies.modnn.floor import Floor
from gistkit.planning.policies.modnn.foresight import fitting, foreseen
from gistkit.planning.policies.modnn.lives import PAPER
from gistkit.planning.policies.modnn.offload import Leaving
from gistkit.planning.policies.modnn.result import Absence, Move, Schedule, gain_s, start_prefetch_now
from gistkit.planning.policies.modnn.state import TRANSIENT, WORKSPACE, Places, Streams
from gistkit.planning.simulate import MemoryMap

ASKED = 32
"""Tasks, or looks ahead, between two questions whether a schedule is worth going on with."""


def schedule(part: Part, memory_bytes: int) -> Schedule:
    """Algorithm 1 for one part of a step in ``memory_bytes``, at least ``lower_bound(part).nbytes``."""
    found = schedule_unless(part, memory_bytes, lambda _: False)
    assert found is not None
    return found


def schedule_unless(part: Part, memory_bytes: int, enough: Callable[[float], bool]) -> Schedule | None:
    """As :func:`schedule`; None where ``enough``, asked now and then with the seconds that the part takes at least
    however the schedule goes on, says so."""
    run = _Run(part, memory_bytes, enough)
    for task in range(len(part.lives.needed)):
        if task % ASKED == 0:
            run.ask(task)
        if run.given_up:
            return None
        run.task(task)
    return None if run.given_up else run.result()


class _Run:
    """Algorithm 1 at work."""

    def __init__(self, part: Part, memory_bytes: int, enough: Callable[[float], bool]) -> None:
        self.enough = enough
        self.lives, self.costs = part.lives, part.costs
        self.places = Places(part.lives, MemoryMap(max(1, memory_bytes - part.lives.resident_bytes)))
        self.streams = Streams()
        self.fastest_s = [min(a.seconds for a in known) for known in self.costs.algorithms]
        self.out_s = cache(lambda block: self.costs.d2h_s(self.places.nbytes(block)))
        self.back_s = cache(lambda block: self.costs.h2d_s(self.places.nbytes(block)))
        self.floor, self.given_up = Floor(self.fastest_s), False
        self.made: set[int] = set()
        self.away: list[tuple[int, int]] = []
        self.log: list[tuple[float, float, float, str, int]] = []
        self.moves: list[Move] = []
        self.absences: list[list[int]] = []
        self.absent: dict[int, list[int]] = {}  # the last of a block's absences
        self.defragmented: list[int] = []

    def ask(self, t: int) -> None:
        """Ask whether it is worth going on before task t."""
        self.given_up = self.given_up or self.enough(self.floor.least_s(t))

    def task(self, t: int) -> None:
        """Lines 2 to 31 for one task."""
        finished = self.streams.now_s
        self.made = set()
        self.prepare(t)
        algorithm = self.choose(t)
        start = self.streams.now_s
        self.prefetch(t, algorithm.seconds)
        held = self.places.map.capacity_bytes - self.places.map.free_bytes
        self.streams.now_s += algorithm.seconds
        for block in self.lives.needed[t]:
            if block in self.made or t in self.lives.lives[block].writes:
                self.streams.ready_s[block] = self.streams.now_s
        self.places.retire(t, self.made)
        self.log.append((start, self.streams.now_s, start - finished, algorithm.name, held + self.lives.resident_bytes))

    # Lines 3-8

    def prepare(self, t: int) -> None:
        """Room for the inputs and outputs of a task, its inputs fetched; waits until all are there."""
        if not self.allocate(t):
            self.defragment(t)
            if not self.allocate(t):
                raise AssertionError(f"task {t} does not fit into defragmented memory of its own lower bound")
        arrived = max((self.streams.ready_s.get(b, 0.0) for b in self.lives.needed[t]), default=0.0)
        self.streams.wait(arrived)

    def allocate(self, t: int) -> bool:
        """Lines 3-6; False where an allocation fails and no offloading scheme is found."""
        wanted = [(b, self.places.nbytes(b)) for b in self.places.missing(t)]
        if self.lives.transient_bytes[t] and TRANSIENT not in self.places.map:
            wanted.append((TRANSIENT, self.lives.transient_bytes[t]))
        fetched = []
        for block, nbytes in wanted:
            scheme = self.scheme(nbytes, t)
            if scheme is None:
                for taken in fetched:
                    self.places.leave(taken)
                return False
            self.streams.wait(self.vacate(scheme, t))
            self.places.enter(block, nbytes)
            if block in self.places.host:
                fetched.append(block)
            elif block >= 0:
                self.made.add(block)
        self.fetch(fetched, t)
        return True

    def fetch(self, blocks: Iterable[int], t: int) -> None:
        """Transfers from the host into memory that is allocated."""
        for block in blocks:
            nbytes = self.places.nbytes(block)
            start, finish = self.streams.transfer(self.streams.now_s, self.back_s(block))
            self.moves.append(Move(block, nbytes, "h2d", t, start, finish))
            self.streams.ready_s[block] = finish
            del self.away[bisect_left(self.away, (self.places.next_need(block, t - 1), block))]
            self.absent[block][2] = t
            self.floor.comes(t, self.back_s(block))

    def vacate(self, blocks: Sequence[int], t: int) -> float:
        """Offload blocks before a task, those with a host copy without a transfer; when their memory is free."""
        free_s = 0.0
        for block in sorted(blocks, key=self.ready):
            if block in self.places.fresh and block in self.places.host:
                # Fetched in vain: the absence goes on. Its fetch must be over before the memory has another owner.
                self.floor.in_vain(self.absent[block][2], self.back_s(block))
                self.absent[block][2] = -1
                free_s = max(free_s, self.ready(block))
            else:
                self.absent[block] = [block, t, -1]
                self.absences.append(self.absent[block])
                self.floor.leaves(t, 0.0 if block in self.places.host else self.out_s(block), self.back_s(block))
            if block not in self.places.host:
                nbytes = self.places.nbytes(block)
                start, finish = self.streams.transfer(self.ready(block), self.out_s(block))
                self.moves.append(Move(block, nbytes, "d2h", t, start, finish))
                free_s = max(free_s, finish)
            self.places.leave(block)
            insort(self.away, (self.places.next_need(block, t - 1), block))
        return free_s

    def ready(self, block: int) -> float:
        return self.streams.ready_s.get(block, 0.0)

    def scheme(self, nbytes: int, t: int, until: int = -1) -> tuple[int, ...] | None:
        return self.places.scheme(nbytes, t, self.leaving(), until)

    def leaving(self) -> Leaving:
        """What leaves now, leaves by StrmD as it is."""
        streams = self.streams
        return Leaving(self.places.host, self.out_s, streams.ready_s, streams.link_s, streams.now_s)

    def defragment(self, t: int) -> None:
        """Everything that may be on the host goes there, and what stays is moved together (IV-B1)."""
        self.defragmented.append(t)
        paper, needed = self.lives.rule == PAPER, set(self.lives.needed[t])
        movable = [b for b in sorted(self.places.here) if len(self.lives.lives[b].stays) > 1 and b not in self.made]
        self.streams.wait(self.vacate([b for b in movable if paper or b not in needed], t))
        moved = self.places.map.defragment()
        if moved:
            self.streams.wait(self.streams.now_s + self.costs.copy_s(2 * moved))

    # Lines 9-14

    def choose(self, t: int) -> Algorithm:
        """The algorithm of maximum gain, its workspace allocated; T becomes the start of the task."""
        found = self.most_gain(t)
        if found is None:
            self.defragment(t)
            self.prepare(t)
            base = self.base(t)
            found = base, self.scheme(base.workspace_bytes, t) or ()
        algorithm, scheme = found
        if algorithm.workspace_bytes:
            self.streams.wait(self.vacate(scheme, t))
            self.places.enter(WORKSPACE, algorithm.workspace_bytes)
        return algorithm

    def base(self, t: int) -> Algorithm:
        """The algorithm with the smallest workspace, of equals the fastest."""
        return min(self.costs.algorithms[t], key=lambda a: (a.workspace_bytes, a.seconds))

    def most_gain(self, t: int) -> tuple[Algorithm, tuple[int, ...]] | None:
        """The algorithm that gains most and what leaves for its workspace; None where none has room. Fastest first:
        no gain is above the time saved, so the rest is not looked at once that is below the best gain. Of equal gains
        the last one has the smallest penalty, and of equally fast ones the smallest workspace."""
        known, base = self.costs.algorithms[t], self.base(t)
        best, found = -inf, None
        for a in sorted(known, key=lambda a: (a.seconds, -a.workspace_bytes)):
            if base.seconds - a.seconds < best:
                break
            scheme = self.scheme(a.workspace_bytes, t)
            if scheme is None:
                continue
            gain = self.gain(t, base, a, scheme)
            if gain >= best:
                best, found = gain, (a, scheme)
        return found

    def gain(self, t: int, base: Algorithm, algorithm: Algorithm, scheme: tuple[int, ...]) -> float:
        """Eq. (5) for one algorithm of a task, with a look at the nearest task that needs to fetch."""
        held_up = self.held_up_s(t, algorithm, scheme) if algorithm.workspace_bytes else 0.0
        return gain_s(base.seconds, algorithm.seconds, self.leaving().delay_s(scheme), held_up)

    def held_up_s(self, t: int, algorithm: Algorithm, scheme: tuple[int, ...]) -> float:
        """T_pre,alg(s): transfer time of what s has to fetch now and finds no room for beside the workspace."""
        s = self.next_fetch(t)
        if s is None or not self.is_time(t, s, algorithm.seconds):
            return 0.0
        trial = self.places.copy()
        for block in scheme:
            trial.leave(block)
        trial.enter(WORKSPACE, algorithm.workspace_bytes)
        blocks = [b for b in self.places.missing(s) if b in self.places.host]
        beside = fitting(trial, blocks, t, s)
        without = fitting(self.places.copy(), blocks, t, s) if len(beside) < len(blocks) else beside
        return sum(self.back_s(b) for b in without - beside)

    # Lines 15-27

    def prefetch(self, t: int, task_s: float) -> None:
        """Fetch what future tasks need, the nearest first, as long as it is time and there is room."""
        s, looked = self.next_fetch(t), 0
        while s is not None and self.is_time(t, s, task_s) and foreseen(self.places, self.made, t, s):
            for block in [b for b in self.places.missing(s) if b in self.places.host]:
                scheme = self.scheme(self.places.nbytes(block), t, s)
                if scheme is None:
                    return
                free_s = self.vacate(scheme, t)
                self.streams.link_s = max(self.streams.link_s, free_s)
                self.places.enter(block, self.places.nbytes(block))
                self.fetch([block], t)
            s, looked = self.next_fetch(s), looked + 1
            if looked % ASKED == 0:
                self.ask(t)
            if self.given_up:
                return

    def next_fetch(self, t: int) -> int | None:
        """The first task after t that needs a block that is in host memory only."""
        at = bisect_left(self.away, (t + 1,))
        return self.away[at][0] if at < len(self.away) and self.away[at][0] < len(self.lives.needed) else None

    def is_time(self, t: int, s: int, task_s: float) -> bool:
        """Line 19: eq. (4), from the end of task t or from when StrmD is free."""
        missing = [b for b in self.places.missing(s) if b in self.places.host]
        transfers = [self.back_s(b) for b in missing]
        expected = self.streams.now_s + task_s + sum(self.fastest_s[t + 1 : s])
        return start_prefetch_now(max(self.streams.now_s, self.streams.link_s - task_s), task_s, transfers, expected)

    def result(self) -> Schedule:
        """The schedule, once all tasks have run."""
        starts, ends, delays, names, memory = zip(*self.log, strict=True) if self.log else ((),) * 5
        absences = tuple(Absence(*a) for a in self.absences)
        return Schedule(starts, ends, delays, names, memory, tuple(self.moves), absences, tuple(self.defragmented))
