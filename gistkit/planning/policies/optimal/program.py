"""The mixed-integer program of `optimal`, for HiGHS: least seconds under a budget, or least peak, as bounds from below.

Columns: x (1 where a variant is taken), those of the link, the level of memory at every task, P for the
peak. Rows: one variant a group; a source that cannot serve is not asked; what a segment takes along; levels,
each from the one before, so that a long life costs two coefficients; the link. A variant counts with what it adds at
least (:meth:`.Problem.least`), so no choice takes less.

The link is a fluid: between two *events* (tasks at which a transfer is issued or due) a direction works for no longer
than passes, which is compute, what the choices add to it, and stalls:

    y_k <= seconds from event k - 1 to k;  waiting_k = waiting_(k-1) + issued at k - 1 - y_k >= 0;
    ahead_k = ahead_(k-1) + y_k - due at k >= 0

With very many events only some are kept: a transfer then counts as issued at the one before and due at the one after,
which bounds less, but validly. What is issued and due at one event is a stall of its own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gistkit.planning.policies.optimal.problem import NOTHING, Problem
from gistkit.planning.policies.optimal.solver import INFEASIBLE, Found, solve

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

SCALE = 1000.0
"""Bytes are counted in thousandths of the budget, seconds in thousandths of the plain step: HiGHS's tolerances are
absolute, 1e-7 to 1e-6."""
MOST_EVENTS = 64
"""Moments at which the link is looked at; 1,231 of them made ResNet-152's relaxation take 9 to 20 s instead of 1 to 2,
for a bound 0.2 % higher."""
TOLERANCE = 1e-6
"""What a bound of HiGHS may be off by, relative to the plain step or the plain peak."""


@dataclass(frozen=True)
class Solved:
    """``shares``: the columns x, None where no solution was found. ``bound``: no choice is below it (seconds or bytes;
    infinite: there is none)."""

    shares: np.ndarray | None
    bound: float


class Rows:
    """Rows low <= sum of coefficients times columns <= high."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, float]] = []
        self._sides: list[tuple[float, float]] = []

    def add(self, terms: Iterable[tuple[int, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """One more row; terms are (column, coefficient), those of one column add up."""
        row = len(self._sides)
        self._entries += ((row, column, value) for column, value in terms)
        self._sides.append((low, high))

    def constraint(self, columns: int) -> LinearConstraint:
        """All rows over that many columns."""
        from scipy.optimize import LinearConstraint  # a quarter of a second: for those who plan, not on import
        from scipy.sparse import csr_array

        row, column, value = zip(*self._entries, strict=True)
        sides: Any = np.array(self._sides).T  # scipy's stubs know no arrays here
        return LinearConstraint(csr_array((value, (row, column)), shape=(len(self._sides), columns)), *sides)


class Program:
    """The program of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = len(problem.keys)
        self._unit = SCALE / max(float(problem.base_s.sum()), 1e-12)
        every = sorted({t for delta in problem.least for load in delta.loads for t in load[:2]})
        picked = np.unique(np.linspace(0, len(every) - 1, min(MOST_EVENTS, len(every))).astype(int))
        self._events = [every[i] for i in picked]
        self._stall = self._choices
        self._peak = self._choices + 7 * len(self._events)
        self._level = self._peak + 1
        self._all = self._level + problem.tasks

    def least_time(self, budget_bytes: int | None, limit_s: float, *, relaxed: bool = False) -> Solved:
        """Least seconds with every task's memory within the budget. ``relaxed``: shares of variants, not whole ones."""
        cost = np.zeros(self._all)
        cost[: self._choices] = [delta.seconds * self._unit for delta in self._problem.least]
        cost[self._stall : self._stall + len(self._events)] = 1.0
        cost[self._peak] = (
            SCALE  # the plain step as a column that is always 1, so that the gap is one of the whole step
        )
        rows = self._common()
        if self._events:
            for back in (0, 1):
                self._fluid(rows, back)
        if budget_bytes is not None:
            self._memory(rows, max(budget_bytes, 1))  # a reserve may leave nothing of a budget
        low, high = self._bounds(1.0, np.inf if budget_bytes is None else SCALE)
        return self._solve(cost, rows, (low, high), limit_s, relaxed, 1 / self._unit)

    def least_peak(self, limit_s: float, *, relaxed: bool = False) -> Solved:
        """Least peak in bytes, whatever the time."""
        unit_bytes = max(int(self._problem.base_bytes.max()), 1)
        cost = np.zeros(self._all)
        cost[self._peak] = 1.0
        rows = self._common()
        self._memory(rows, unit_bytes)
        for level in range(self._level, self._all):
            rows.add([(level, 1.0), (self._peak, -1.0)], high=0.0)
        return self._solve(cost, rows, self._bounds(None, np.inf), limit_s, relaxed, unit_bytes / SCALE)

    def _bounds(self, peak: float | None, level: float) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.zeros(self._all), np.full(self._all, np.inf)
        high[: self._choices] = 1.0
        low[self._level :], high[self._level :] = -np.inf, level
        if peak is not None:
            low[self._peak] = high[self._peak] = peak
        return low, high

    def _common(self) -> Rows:
        problem, rows = self._problem, Rows()
        offsets = problem.offsets.tolist()
        for first, end in zip(offsets, offsets[1:], strict=False):
            rows.add(((c, 1.0) for c in range(first, end)), 1.0, 1.0)
        for (g, v), segment in problem.owner.items():
            rows.add([(offsets[g] + v, 1.0), (offsets[segment] + 1, -1.0)], 0.0, 0.0)
        for segments in problem.alike.values():
            if len(segments) > 1:
                rows.add(((offsets[s] + 1, 1.0) for s in segments), high=1.0)
        for (g, v), use in problem.uses.items():
            need = NOTHING._replace(asked=True, tasks=use.tasks, exact=use.exact)
            for source in use.sources:
                cannot = [i for i, other in enumerate(problem.groups[source]) if not problem.serves(other, need)]
                if cannot:
                    rows.add([(offsets[g] + v, 1.0), *((offsets[source] + i, 1.0) for i in cannot)], high=1.0)
        return rows

    def _memory(self, rows: Rows, unit_bytes: int) -> None:
        unit = SCALE / unit_bytes
        steps: list[list[tuple[int, float]]] = [[] for _ in range(self._problem.tasks)]
        for column, delta in enumerate(self._problem.least):
            for task, nbytes in delta.memory:
                steps[task].append((column, -nbytes * unit))
        for task, change in enumerate(np.diff(self._problem.base_bytes, prepend=0) * unit):
            before = [(self._level + task - 1, -1.0)] if task else []
            rows.add([(self._level + task, 1.0), *before, *steps[task]], change, change)

    def _fluid(self, rows: Rows, back: int) -> None:
        """The rows of one direction of the link."""
        count, before = len(self._events), np.concatenate(([0.0], np.cumsum(self._problem.base_s)))
        y, waiting, ahead = (self._stall + count * (1 + 3 * back + i) for i in range(3))
        issued, due, at_once, extra = ([[] for _ in range(count + 1)] for _ in range(4))
        for column, delta in enumerate(self._problem.least):
            for load in delta.loads:
                if load[2] == back:
                    begin, end = bisect_right(self._events, load[0]) - 1, bisect_left(self._events, load[1])
                    (at_once if load[0] == load[1] else issued)[begin if load[0] != load[1] else end].append(
                        (column, load[3] * self._unit)
                    )
                    if load[0] != load[1]:
                        due[end].append((column, load[3] * self._unit))
            for task, seconds in delta.extra:
                k = bisect_right(self._events, task)
                if 0 < k < count:
                    extra[k].append((column, -seconds * self._unit))
        for k in range(count):
            begun = [(c, -s) for c, s in issued[k - 1]] if k else []
            earlier = ([(waiting + k - 1, -1.0)], [(ahead + k - 1, -1.0)]) if k else ([], [])
            rows.add([(waiting + k, 1.0), *earlier[0], (y + k, 1.0), *begun], 0.0, 0.0)
            rows.add([(ahead + k, 1.0), *earlier[1], (y + k, -1.0), *due[k]], 0.0, 0.0)
            passes = before[self._events[k]] - before[self._events[k - 1]] if k else 0.0
            rows.add([(y + k, 1.0), (self._stall + k, -1.0), *extra[k]], high=passes * self._unit)
            if at_once[k]:
                rows.add([*at_once[k], (self._stall + k, -1.0)], high=0.0)

    def _solve(
        self,
        cost: np.ndarray,
        rows: Rows,
        bounds: tuple[np.ndarray, np.ndarray],
        limit_s: float,
        relaxed: bool,
        unit: float,
    ) -> Solved:
        from scipy.optimize import Bounds  # a quarter of a second: for those who plan, not on import

        whole = np.zeros(self._all)
        whole[: self._choices] = 0 if relaxed else 1
        sides: Any = bounds  # scipy's stubs know no arrays here
        words = {"c": cost, "integrality": whole, "bounds": Bounds(*sides), "options": {"mip_rel_gap": TOLERANCE}}
        return self._read(solve({**words, "constraints": rows.constraint(self._all)}, limit_s), relaxed, unit)

    def _read(self, found: Found, relaxed: bool, unit: float) -> Solved:
        if found.status == INFEASIBLE:
            return Solved(None, np.inf)
        bound = found.bound
        if relaxed or bound is None:
            bound = found.fun if found.status == 0 else None
        figure = -np.inf if bound is None else (bound - TOLERANCE * SCALE) * unit
        return Solved(None if found.x is None else found.x[: self._choices], figure)
