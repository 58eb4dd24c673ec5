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

SEARCH_SHARE, PARTS_SHARE = 0.3, 0.6
"""Share of the time that a search gets at least, however long it took to get there, and of the time left that it gets
where more numbers of sub-batches are to be looked at."""
MORE_SHARE, MORE_S = 0.5, 2.0
"""With a gap above a tenth a search goes on for so much of its time again, at most MORE_S seconds: at the least budgets
4 s are too short for most steps (ResNet-50 on an H200: 74.4 -> 68.1 ms; on a Titan X 778 -> 757)."""
PEAK_SHARE = 0.2
"""Share of the time for the least peak, which every plan reports."""
SMALL_TASKS, SMALL_S = 200, 4.0
"""The least peak of a step of so few tasks is searched for to the end, whatever the time limit: then it does not depend
on how busy the machine is. A U-Net of 98 tasks takes 0.8 to 1.0 s on one core."""


class Planning:
    """One search, about ``limit_s`` seconds long. Problems are made by number of sub-batches, when first looked at.
    ``plan``: the fastest plan found within ``room_bytes`` (None: any peak), with reasons and ``step_s``; ``bound_s``:
    what no plan goes below; ``found``: the least peak."""

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        allowed: Allowed,
        limit_s: float,
        *,
        listed: Options | None = None,
        room_bytes: int | None = None,
    ) -> None:
        self._begun, self._limit_s, self._room_bytes = time.monotonic(), limit_s, room_bytes
        self._graph, self._costs, self._allowed, self._listed = graph, costs, allowed, listed
        self.simulator, self.plan, self.bound_s = Simulator(graph, costs), None, np.inf
        self.plan: Plan | None
        self._searches: dict[int, Search] = {}
        self._least: dict[int, Least] = {}

    def run(self, starts: Sequence[Plan] = ()) -> Planning:
        """Search; ``starts`` are plans of the class to begin from."""
        self.least(self._room_bytes, *(s.sub_batches for s in starts))
        best: Outcome | None = None
        best_s = np.inf
        for parts, least in self._least.items():
            if least.rules_out(self._room_bytes):
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
        return self

    def _fastest(self, parts: int, starts: Iterable[Plan], *, first: bool) -> Outcome:
        search, now = self._search(parts), time.monotonic()
        left_s = max(self._begun + self._limit_s - now, (SEARCH_SHARE if first else 0.02) * self._limit_s)
        until = now + left_s * (1.0 if parts == max(self._least) else PARTS_SHARE)
        more_s = min(MORE_SHARE * self._limit_s, MORE_S)
        fastest = Fastest(search, self._room_bytes, until, more_s=more_s, retimes=self._listed is None)
        return fastest.run([*(choice_of(search.problem, s) for s in starts), self._least[parts].taken])

    def against(self, plans: Iterable[Plan]) -> None:
        """Take over the fastest of other plans if it is faster, whatever it does; the bound is then below it, too."""
        whole = fastest_whole(plans, self._graph, self.simulator, self._allowed, self._room_bytes)
        if whole is not None and (self.plan is None or whole.step_s < self.plan.step_s * (1 - 1e-9)):
            floor_s = min(parts * search.problem.floor_s for parts, search in self._searches.items())
            self.bound_s = floor_s if self.plan is None else min(self.bound_s, whole.step_s)
            self.plan = whole

    def least(self, room_bytes: int | None = 0, *others: int) -> Least:
        """The least peak over all numbers of sub-batches, ``others`` among them where the class has them, or any that
        fits into ``room_bytes`` (None: whatever comes)."""
        deadline = time.monotonic() + PEAK_SHARE * self._limit_s
        for parts in self._allowed.part_counts(self._graph, *others):
            left_s = max(deadline - time.monotonic(), 0.1 * self._limit_s)
            left_s = max(left_s, SMALL_S) if len(self._graph.tasks) <= SMALL_TASKS else left_s
            self._least[parts] = least_peak(self._search(parts), left_s, room_bytes)
        return self.found

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
            problem = Problem(self._graph, self._costs, self.simulator, self._allowed, parts=parts, listed=self._listed)
            self._searches[parts] = Search(problem)
        return self._searches[parts]
