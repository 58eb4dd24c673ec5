"""The fastest choice of one problem within a budget: bound, repair and local search, in rounds.

A round bounds the step from below (:mod:`.bounds`), makes what that takes most of whole, repairs it and other choices
until they fit, and improves the best of them. The next round knows further moments for what the best choice ships
(:func:`.retimed`). Where bound and best step meet, that step is optimal; else the gap is what is left when time is up.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gistkit.planning.policies.optimal.bounds import EXACT, Bounds
from gistkit.planning.policies.optimal.link import retimed
from gistkit.planning.policies.optimal.plans import clock, plan_of
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
    """One search for the fastest choice within a budget (None: any), until a deadline, or ``more_s`` later where the
    gap is above WORTH. ``retimes``: what is shipped may leave and come back at further moments."""

    def __init__(
        self, search: Search, budget_bytes: int | None, deadline: float, *, more_s: float = 0.0, retimes: bool = True
    ) -> None:
        self._search, self._budget, self._deadline = search, budget_bytes, deadline
        self._more_s, self._retimes = more_s, retimes
        self._fitting: dict[tuple[int, ...], float] = {}
        self._bound_s = search.problem.floor_s

    def run(self, seeds: Sequence[Sequence[int]]) -> Outcome:
        """The best choice from seeds, which need not fit, and from layouts of segments."""
        layouts = (set(), *self._search.problem.layouts)
        starts: Sequence[Sequence[int]] = [*seeds, *(self._search.fastest(layout) for layout in layouts)]
        for start in starts:
            self._note(start)
        for number, share in enumerate(ROUNDS):
            if self._meets() or (number and not self._offer()):
                break
            if self._budget is not None:
                starts = self._repaired(starts, self._budget)
            if number == 0 and self._best[1] * (1 - WORTH) > self._bound_s:
                self._deadline += self._more_s
            self._polish(share)
        self._polish(1.0)
        taken, seconds = self._best
        return Outcome(self._search, taken if self._fitting else None, seconds, min(self._bound_s, seconds))

    def _repaired(self, starts: Sequence[Sequence[int]], budget_bytes: int) -> list[Sequence[int]]:
        """Bound the step; repair what the relaxation takes most of and the ``starts``: those that could be."""
        problem = self._search.problem
        upper_s = self._best[1] if self._fitting else 1.1 * float(problem.base_s.sum())
        bound = Bounds(problem).seconds(budget_bytes, upper_s)
        self._bound_s = max(problem.floor_s, bound.value)
        enough_s, able = self._left(ENOUGH), []
        for taken in (self._search.rounded(bound.shares), *starts):
            if self._fitting and self._left() <= enough_s:
                break
            if any(self._repair(taken, budget_bytes, weight) for weight in LINK_WEIGHTS):
                able.append(taken)
        return able

    def _repair(self, taken: Sequence[int], budget_bytes: int, weight: float) -> bool:
        """Note what a choice is repaired to, if that fits; ``weight`` as for :meth:`.Search.repair`."""
        until = max(self._deadline, time.monotonic() + GRACE_S)
        mended = self._search.repair(taken, budget_bytes, until, weight)
        return mended is not None and self._note(mended)

    def _note(self, taken: Sequence[int]) -> bool:
        """Note a choice if it fits; whether it does."""
        choice = tuple(self._search.state(taken).taken)
        seconds, peak = clock(self._search.problem, choice)
        fits = seconds < np.inf and (self._budget is None or peak <= self._budget)
        if fits:
            self._fitting[choice] = seconds
        return fits

    def _offer(self) -> bool:
        """Offer the best choice's transfers at other moments; whether there are any."""
        problem = self._search.problem
        if not self._retimes or not self._fitting:
            return False
        more = problem.offering(retimed(plan_of(problem, self._best[0]), problem.simulator, problem.link))
        if more.size == problem.size:
            return False
        self._search = Search(more)
        return True

    @property
    def _best(self) -> tuple[tuple[int, ...], float]:
        return min(self._fitting.items(), key=lambda f: f[1], default=((), np.inf))

    def _left(self, share: float = 1.0) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share

    def _meets(self) -> bool:
        """Whether bound and best step are equal but for rounding."""
        return self._best[1] <= self._bound_s * (1 + 2 * EXACT)

    def _polish(self, share: float) -> None:
        """Improve the best choices, for a share of the time left."""
        if self._fitting and not self._meets():
            until = time.monotonic() + self._left(share)
            near = sorted(self._fitting.items(), key=lambda f: f[1])[:STARTS]
            starts = [f for f in near if f[1] <= NEAR * near[0][1]]
            self._fitting = dict([self._search.improve(starts, self._budget, until)])
