"""From the program to a proven plan: solve, simulate, learn, solve again (logic-based Benders decomposition).

The program bounds the step from below (stalls as a fluid, bytes and seconds as sums that are never above the
simulator's); the simulator says what a choice really takes. Every solution that the simulator finds slower, or over the
budget, becomes a cut. Where the program's bound meets the best simulated step, that step is optimal. Large problems get
the bound of the relaxation first, its solution made whole, and the program with what the relaxation is sure of fixed;
their gap is what is left at the limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gistkit.planning.policies.optimal.improve import improve
from gistkit.planning.policies.optimal.problem import Part, Problem
from gistkit.planning.policies.optimal.program import TOLERANCE, Cuts, Program, Solved
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS, Search

WHOLE_SIZE = 1500
"""Up to so many moves the whole program is solved, beyond only what the relaxation leaves open."""
SURE = 0.999
MENDS = 6
STARTS, NEAR = 6, 1.2
"""Choices that are improved step by step, of those that fit and take so many times the best one's seconds at most; the
best of what they end in is improved further."""
GRACE_S = 2.0
"""Time for a repair although time is up: without one there may be no plan at all."""
UNFIT = 25
"""Solutions that turn out not to fit, after which a problem of more than so many moves is left as it is."""
SMALL = 200
HUGE_SIZE, FIRST = 10_000, 0.25
"""Of a problem of more moves the relaxation may take all the time that there is: the best seed is improved before, for
this share of it (ResNet-509 at 0.16 of plain's peak on a K40: 216.7 ms for 230.2). ResNet-152, of 5,300 moves, loses by
it."""


@dataclass(frozen=True)
class Outcome:
    """The best choice found (None: none fits), its simulated seconds, what no choice goes below, and whether that is
    the program's word rather than the sum of the fastest moves."""

    taken: tuple[int, ...] | None
    seconds: float
    bound_s: float
    bounded: bool

    @property
    def gap(self) -> float:
        """How far the choice may be from the best, relative to it."""
        return max(0.0, (self.seconds - self.bound_s) / self.seconds) if 0 < self.seconds < np.inf else 0.0


class Refinement:
    """One search for the fastest choice within a budget (None: any)."""

    def __init__(
        self, problem: Problem, search: Search, budget_bytes: int | None, deadline: float, *, prove: bool = True
    ) -> None:
        self._problem, self._search, self._proves = problem, search, prove
        self._budget, self._deadline = budget_bytes, deadline
        self._program = Program(problem)
        self._cuts = Cuts()
        self._best: tuple[int, ...] | None = None
        self._fitting: dict[tuple[int, ...], float] = {}
        self._best_s, self._floor_s = np.inf, problem.floor_s * (1 - TOLERANCE)
        self._bound_s = self._floor_s
        self._limit_s = self._left()

    def run(self, seeds: Sequence[Sequence[int]], frames: Sequence[Sequence[int]]) -> Outcome:
        """Best of the seeds, of the frames repaired and of what the program finds."""
        start = [*seeds, self._search.fastest()]
        for seed in start:
            self._try(seed)
        if self._problem.size == 0:
            self._bound_s = self._best_s
        if self._problem.size == 0 or self._meets():
            return self._outcome()
        if self._problem.size > HUGE_SIZE:
            self._polish(FIRST)
        if self._problem.size > SMALL:
            self._begin(frames)
        relaxed = self._program.least_time(self._budget, self._cuts, self._left(0.8), relaxed=True)
        self._bound_s = max(self._bound_s, relaxed.bound)
        if relaxed.bound == np.inf:
            return self._outcome()
        if relaxed.taken is not None:
            self._mend(self._search.settled(relaxed.shares))
        for seed in start:
            if self._best is None:
                self._mend(seed)
        if self._problem.size > WHOLE_SIZE:
            self._polish(0.5)
            self._partial(relaxed)
        self._polish(0.3)
        if self._problem.size <= WHOLE_SIZE and self._proves:
            self._prove()
        self._polish(1.0)
        return self._outcome()

    def _outcome(self) -> Outcome:
        bounded = self._bound_s > self._floor_s or self._meets()
        return Outcome(self._best, self._best_s, min(self._bound_s, self._best_s), bounded)

    def _left(self, share: float = 1.0) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share

    def _meets(self) -> bool:
        """Whether bound and best step are equal to the program's tolerance."""
        room = 2 * TOLERANCE * float(self._problem.base_s.sum())
        return self._best_s <= self._bound_s + room

    def _fits(self, taken: Sequence[int], limit: float) -> bool:
        return self._problem.allowed(taken) and int(self._search.bytes_by_task(taken).max(initial=0)) <= limit

    def _begin(self, frames: Sequence[Sequence[int]]) -> None:
        """Every frame repaired, those with the least to repair first, by moves over the link only where nothing else
        fits; after half of the time no more than one that can be."""
        found = np.inf
        for frame in sorted(frames, key=lambda f: int(self._search.bytes_by_task(f).max(initial=0))):
            for weight in LINK_WEIGHTS:
                if (found < np.inf and self._left() < 0.5 * self._limit_s) or not self._left():
                    return
                seconds = self._try(frame, weight)
                found = min(found, seconds)
                if seconds < np.inf:
                    break

    def _mend(self, taken: Sequence[int]) -> None:
        """Try a choice repaired, the link being dear and cheap."""
        for weight in LINK_WEIGHTS:
            if self._best is None or self._left():
                self._try(taken, weight)

    def _try(self, taken: Sequence[int], weight: float | None = None) -> float:
        """Simulate a choice and keep it if it is the best that fits: its seconds, infinite where it does not fit.

        ``weight`` (of :meth:`Search.repair`) repairs it first. Where the simulator finds more bytes than the problem
        knows of (scratches on CUDA), it is repaired to a limit so much lower.
        """
        budget = limit = np.inf if self._budget is None else self._budget
        for _ in range(MENDS):
            if not self._fits(taken, limit):
                mended = None
                if weight is not None and self._problem.allowed(taken):
                    until = max(self._deadline, time.monotonic() + GRACE_S)
                    mended = self._search.repair(taken, int(limit), until, weight)
                if mended is None:
                    return np.inf
                taken = mended
            seconds, peak = self._search.clock(taken)
            if peak <= budget:
                self._fitting[tuple(taken)] = seconds
                if seconds < self._best_s:
                    self._best, self._best_s = tuple(taken), seconds
                return seconds
            if weight is None:
                return np.inf
            limit = int(self._search.bytes_by_task(taken).max(initial=0)) - (peak - budget)
        return np.inf

    def _polish(self, share: float) -> None:
        if self._best is not None and not self._meets():
            until = time.monotonic() + self._left(share)
            near = [f for f in self._fitting.items() if f[1] <= NEAR * self._best_s]
            starts = sorted(near, key=lambda f: f[1])[:STARTS]
            self._best, self._best_s = improve(self._search, starts, self._budget, until)
            self._fitting = {self._best: self._best_s}

    def _partial(self, relaxed: Solved) -> None:
        """The program with the groups fixed of which the relaxation takes one move whole. With a link its figure is too
        far from the simulator's for a solution to be worth the time."""
        if relaxed.taken is None or any(p.transfers for group in self._problem.groups for p in (m.part for m in group)):
            return
        offset, fixed = 0, []
        for group, move in zip(self._problem.groups, relaxed.taken, strict=True):
            fixed.append(move if relaxed.shares[offset + move] > SURE else -1)
            offset += len(group)
        solved = self._program.least_time(self._budget, self._cuts, self._left(0.6), fixed=fixed, gap=1e-4)
        if solved.taken is not None:
            self._mend(solved.taken)

    def _prove(self) -> None:
        """Solve and learn until bound and best meet, or time is up."""
        while not self._meets() and self._left() > 0.05:
            if self._problem.size > SMALL and len(self._cuts.never) > UNFIT:
                return
            solved = self._program.least_time(self._budget, self._cuts, self._left())
            self._bound_s = max(self._bound_s, solved.bound)
            if solved.taken is None:
                return
            seconds = self._try(solved.taken)
            if self._meets():
                return
            self._learn(solved, seconds)

    def _learn(self, solved: Solved, seconds: float) -> None:
        """Cut off a solution that is not what the program took it for."""
        taken = solved.taken
        assert taken is not None
        keys = tuple((g, m) for g, m in enumerate(taken) if len(self._problem.groups[g]) > 1)
        if seconds == np.inf:
            self._cuts.never.append(keys)
            return
        parts: list[Part] = list(self._problem.parts(taken))
        exact = self._program.link.exact
        windows = [w for w in self._program.link.missed(parts, solved.stalls) if exact and w not in self._cuts.windows]
        self._cuts.windows += windows
        moved = tuple(k for k in keys if self._problem.groups[k[0]][k[1]].part.transfers)
        stalled = self._search.stalls(moved) if moved else 0.0
        if stalled > 0 and (moved, stalled) not in self._cuts.stalls_s:
            self._cuts.stalls_s.append((moved, stalled))
        if not windows:
            self._cuts.at_least_s.append((keys, seconds))
