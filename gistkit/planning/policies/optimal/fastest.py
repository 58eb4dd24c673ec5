"""The fastest choice of one problem within a budget: program, repair and local search, in rounds.

A round solves the linear relaxation of :mod:`.program`, which bounds the step from below, makes its solution whole,
repairs that and other policies' plans until they fit, and improves the best of them. The next one knows further moments
for what the best choice ships (:func:`.retimed`). A small program is solved whole as well. Where bound and best step
meet, that step is optimal; else the gap is what is left when time is up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gistkit.planning.policies.optimal.least import WHOLE_SIZE
from gistkit.planning.policies.optimal.link import retimed
from gistkit.planning.policies.optimal.plans import clock, plan_of
from gistkit.planning.policies.optimal.program import TOLERANCE, Program
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS, Search

STARTS, NEAR = 6, 1.2
"""Choices that are improved step by step, of those that fit and take so many times the best one's seconds at most; the
best of what they end in is improved further."""
GRACE_S = 2.0
"""Time for a repair although time is up: without one there may be no plan at all."""
ENOUGH = 0.8
"""Share of a round's time that is left to improve what has been repaired until then."""
ROUNDS = (0.4, 0.4, 1.0)
"""The shares of the time left that rounds take."""
WORTH = 0.1
"""The gap above which a search gets more time."""


@dataclass(frozen=True)
class Outcome:
    """The best choice found (None: none fits), the search that it is of, its simulated seconds, what no choice goes
    below."""

    search: Search
    taken: tuple[int, ...] | None
    seconds: float
    bound_s: float


class Fastest:
    """One search for the fastest choice within a budget (None: any), until a deadline, or ``more_s`` later where the gap is wide.
    ``retimes``: what is shipped may leave and come back at further moments."""

    def __init__(
        self, search: Search, budget_bytes: int | None, deadline: float, *, more_s: float = 0.0, retimes: bool = True
    ) -> None:
        self._search, self._budget, self._deadline = search, budget_bytes, deadline
        self._more_s, self._retimes = more_s, retimes
        self._fitting: dict[tuple[int, ...], float] = {}
        self._floor_s = search.problem.floor_s * (1 - TOLERANCE)
        self._bound_s = np.inf
        self._room_s = 2 * TOLERANCE * float(search.problem.base_s.sum())

    def run(self, seeds: Sequence[Sequence[int]]) -> Outcome:
        """The best choice from seeds, which need not fit, from layouts of segments and from what the program finds."""
        problem = self._search.problem
        starts = [*seeds, *(self._search.fastest(layout) for layout in (set(), *problem.layouts))]
        for start in starts:
            self._try(start)
        for number, share in enumerate(ROUNDS):
            if self._best[1] <= self._floor_s + self._room_s:
                break
            starts = self._relax(starts)
            if number == 0 and self._best[1] * (1 - WORTH) > self._bound_s:
                self._deadline += self._more_s
            if number == 0 and problem.size <= WHOLE_SIZE:
                self._solve()
            self._polish(share)
            if self._meets() or not self._offer():
                break
        self._polish(1.0)
        taken, seconds = self._best
        bound_s = self._floor_s if self._bound_s == np.inf and self._fitting else self._bound_s
        return Outcome(self._search, taken if self._fitting else None, seconds, min(bound_s, seconds))

    def _relax(self, starts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Solve the relaxation, repair what it takes most of and the ``starts``: those that could be."""
        relaxed = Program(self._search.problem).least_time(self._budget, self._left(0.8), relaxed=True)
        self._bound_s = min(self._bound_s, max(self._floor_s, relaxed.bound))
        enough_s, able = self._left(ENOUGH), []
        for taken in starts if relaxed.shares is None else (self._search.rounded(relaxed.shares), *starts):
            if self._fitting and self._left() <= enough_s:
                break
            if self._try(taken, LINK_WEIGHTS[0]) or self._try(taken, LINK_WEIGHTS[1]):
                able.append(taken)
        return able

    def _solve(self) -> None:
        """Solve the program whole."""
        self._polish(0.2)
        if not self._meets():
            solved = Program(self._search.problem).least_time(self._budget, self._left(0.5))
            self._bound_s = max(self._bound_s, solved.bound)
            if solved.shares is not None:
                self._try(self._search.rounded(solved.shares), LINK_WEIGHTS[0])

    def _offer(self) -> bool:
        """Offer the best choice's transfers at other moments; whether there are any."""
        problem = self._search.problem
        if not self._retimes or not self._fitting:
            return False
        more = problem.offering(retimed(plan_of(problem, self._best[0]), problem.simulator, problem.link))
        if more.size > problem.size:
            self._search = Search(more)
        return more.size > problem.size

    @property
    def _best(self) -> tuple[tuple[int, ...], float]:
        return min(self._fitting.items(), key=lambda f: f[1], default=((), np.inf))

    def _left(self, share: float = 1.0) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share

    def _meets(self) -> bool:
        """Whether bound and best step are equal to the program's tolerance."""
        return self._best[1] <= self._bound_s + self._room_s

    def _try(self, taken: Sequence[int], weight: float | None = None) -> bool:
        """Note a choice if it fits, repaired first where a ``weight`` (of :meth:`.Search.repair`) is given; whether it
        does."""
        if weight is not None and self._budget is not None:
            until = max(self._deadline, time.monotonic() + GRACE_S)
            mended = self._search.repair(taken, self._budget, until, weight)
            if mended is None:
                return False
            taken = mended
        choice = tuple(self._search.state(taken).taken)
        seconds, peak = clock(self._search.problem, choice)
        fits = seconds < np.inf and (self._budget is None or peak <= self._budget)
        if fits:
            self._fitting[choice] = seconds
        return fits

    def _polish(self, share: float) -> None:
        """Improve the best choices, for a share of the time left."""
        if self._fitting and not self._meets():
            until = time.monotonic() + self._left(share)
            near = sorted(self._fitting.items(), key=lambda f: f[1])[:STARTS]
            starts = [f for f in near if f[1] <= NEAR * near[0][1]]
            self._fitting = dict([self._search.improve(starts, self._budget, until)])
