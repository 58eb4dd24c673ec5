"""One search of `optimal` over all numbers of sub-batches that its class allows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.policies.optimal.fastest import Fastest, Outcome
from gistkit.planning.policies.optimal.least import Least, least_peak
from gistkit.planning.policies.optimal.plans import choice_of, reasoned
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.search import Search
from gistkit.planning.policies.optimal.variants import Options
from gistkit.planning.policies.optimal.whole import Allowed, fastest_whole
from gistkit.planning.simulate import Simulator

SEARCH_SHARE = 0.3
"""Share of the time that a search gets at least, however long it took to get there."""
PEAK_SHARE = 0.2
"""Share of the time for the least peak, which every plan reports."""


class Planning:
    """One search, about ``limit_s`` seconds long, ``more_s`` more where the gap is wide. Problems are made by number of
    sub-batches, when first looked at. ``plan``: the fastest plan found within ``room_bytes``, with reasons and
    ``step_s``; ``bound_s``: what no plan goes below; ``found``: the least peak."""

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        simulator: Simulator,
        allowed: Allowed,
        limit_s: float,
        *,
        more_s: float = 0.0,
        listed: Options | None = None,
        room_bytes: int | None = None,
    ) -> None:
        self._begun, self._limit_s, self._more_s = time.monotonic(), limit_s, more_s
        self._graph, self._simulator, self._allowed, self._room_bytes = graph, simulator, allowed, room_bytes
        self._make = lambda parts: Search(Problem(graph, costs, simulator, allowed, parts=parts, listed=listed))
        self._retimes = listed is None
        self._searches: dict[int, Search] = {}
        self._least: dict[int, Least] = {}
        self._counts = allowed.part_counts(graph)
        self.plan: Plan | None = None
        self.bound_s = np.inf

    @property
    def step_s(self) -> float:
        """Seconds of the plan, infinite without one."""
        return np.inf if self.plan is None else self.plan.step_s

    def run(self, starts: Sequence[Plan] = ()) -> None:
        """Search; ``starts`` are plans of the class to begin from."""
        self._counts = self._allowed.part_counts(self._graph, *(s.sub_batches for s in starts))
        self.least(self._begun + PEAK_SHARE * self._limit_s, self._room_bytes)
        best: Outcome | None = None
        best_s = np.inf
        for parts in self._counts:
            if self._least[parts].rules_out(self._room_bytes):
                continue
            bound_s = self._search(parts).problem.floor_s
            if parts * bound_s < best_s:
                outcome = self._fastest(parts, [s for s in starts if s.sub_batches == parts], first=best is None)
                bound_s = outcome.bound_s
                if outcome.taken is not None and parts * outcome.seconds < best_s:
                    best, best_s = outcome, parts * outcome.seconds
            self.bound_s = min(self.bound_s, parts * bound_s)
        if best is not None:
            self.plan = replace(reasoned(best.search.problem, best.taken or ()), step_s=best_s)

    def _fastest(self, parts: int, starts: Iterable[Plan], *, first: bool) -> Outcome:
        search, now = self._search(parts), time.monotonic()
        share = 1.0 if parts == self._counts[-1] else 0.6
        left_s = max(self._begun + self._limit_s - now, (SEARCH_SHARE if first else 0.02) * self._limit_s)
        fastest = Fastest(search, self._room_bytes, now + share * left_s, more_s=self._more_s, retimes=self._retimes)
        return fastest.run([*(choice_of(search.problem, s) for s in starts), self._least[parts].taken])

    def against(self, plans: Iterable[Plan]) -> None:
        """Take over the fastest of other plans if it is faster, whatever it does; the bound is then below it, too."""
        whole = fastest_whole(plans, self._graph, self._simulator, self._allowed, self._room_bytes)
        if whole is not None and whole.step_s < self.step_s * (1 - 1e-9):
            floor_s = min(parts * search.problem.floor_s for parts, search in self._searches.items())
            self.bound_s = floor_s if self.plan is None else min(self.bound_s, whole.step_s)
            self.plan = whole

    def least(self, deadline: float, room_bytes: int | None = 0) -> None:
        """Look for the least peak over all numbers of sub-batches, until a deadline; of a large problem no more than what
        fits into ``room_bytes`` (None: anything does)."""
        for parts in self._counts:
            left_s = max(deadline - time.monotonic(), 0.1 * self._limit_s)
            self._least[parts] = least_peak(self._search(parts), left_s, room_bytes)

    @property
    def found(self) -> Least:
        """The least peak over all numbers of sub-batches."""
        fewest = min(self._least.values(), key=lambda least: least.peak_bytes)
        return replace(fewest, bound_bytes=min(least.bound_bytes for least in self._least.values()))

    def smallest(self) -> Plan:
        """The plan of least peak, without its figures."""
        parts = min(self._least, key=lambda parts: self._least[parts].peak_bytes)
        return reasoned(self._search(parts).problem, self._least[parts].taken)

    def _search(self, parts: int) -> Search:
        if parts not in self._searches:
            self._searches[parts] = self._make(parts)
        return self._searches[parts]
