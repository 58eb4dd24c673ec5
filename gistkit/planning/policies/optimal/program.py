"""The mixed-integer program of `optimal`, for HiGHS: least seconds under a budget, or least peak.

Columns: x (1 where a move is taken), w (1 where a joint part is added), the link's (:mod:`.optimal_link`), e
for what the simulator found beyond the program's figure, P for the peak, and the level of memory at every task that can
be the worst. Rows: one move a group; w >= x_a + x_b - 1 and the like; conflicts; levels, each from the one before, so
that a long life costs two coefficients; the link; :class:`Cuts`, what the simulator taught (logic-based Benders
decomposition, Hooker and Ottosson, 2003).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gistkit.planning.policies.optimal.link import LinkRows, Window
from gistkit.planning.policies.optimal.problem import Key, Part, Problem
from gistkit.planning.policies.optimal.rows import Rows, worst_tasks
from gistkit.planning.policies.optimal.solver import INFEASIBLE, Found, solve

SCALE = 1000.0
"""Bytes are counted in thousandths of the budget, seconds in thousandths of the plain step: HiGHS's tolerances are
absolute, 1e-7 to 1e-6."""
MOST_EVENTS = 64
"""Moments at which the link is looked at; 1,231 of them made ResNet-152's relaxation take 9 to
20 s instead of 1 to 2, for a bound 0.2 % higher."""
TOLERANCE = 1e-6
"""What a bound of HiGHS may be off by, relative to the plain step or the plain peak."""


@dataclass
class Cuts:
    """What was learnt: sets of moves that never fit together, sets with which the step takes at least so many seconds,
    sets with which it stalls for at least so many, and windows of the link to be watched."""

    never: list[tuple[Key, ...]] = field(default_factory=list)
    at_least_s: list[tuple[tuple[Key, ...], float]] = field(default_factory=list)
    stalls_s: list[tuple[tuple[Key, ...], float]] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


@dataclass(frozen=True)
class Solved:
    """``taken``: one move a group, None where none was found. ``shares``: the columns x. ``bound``: no solution is
    below it (seconds or bytes; infinite: there is none). ``stalls``: the link's stall columns."""

    taken: tuple[int, ...] | None
    shares: np.ndarray
    bound: float
    stalls: np.ndarray


class Program:
    """The program of one problem. Solved many times, with more cuts each time."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._offsets = np.concatenate(([0], np.cumsum([len(g) for g in problem.groups]))).astype(int)
        moves = [m.part for group in problem.groups for m in group]
        self._parts: list[Part] = [*moves, *(j.part for j in problem.joints)]
        self._choices = len(moves)
        self._base_s = float(problem.base_s.sum())
        self._unit = SCALE / max(self._base_s, 1e-12)
        self.link = LinkRows(problem, self._parts, len(self._parts), self._unit, MOST_EVENTS)
        self._found = len(self._parts) + self.link.columns
        self._worst = worst_tasks(problem.base_bytes, (i for part in self._parts for i in part.memory))
        self._level = self._found + 2
        self._all = self._level + len(self._worst)

    def column(self, key: Key) -> int:
        """The column of a move."""
        return int(self._offsets[key[0]]) + key[1]

    def least_time(
        self,
        budget_bytes: int | None,
        cuts: Cuts,
        limit_s: float,
        *,
        fixed: Sequence[int] | None = None,
        relaxed: bool = False,
        gap: float = 0.0,
    ) -> Solved:
        """Least seconds with every task's memory within the budget. ``fixed``: a move by group, -1 where it is free;
        the bound then holds for these alone. ``relaxed``: shares of moves instead of whole ones."""
        cost = np.zeros(self._all)
        cost[: len(self._parts)] = [part.seconds * self._unit for part in self._parts]
        cost[self.link.stall : self.link.stall + len(self.link.events)] = 1.0
        cost[self._found] = 1.0
        rows = self._common(cuts, budget_bytes)
        self.link.add(rows, cuts.windows)
        for moves, seconds in cuts.at_least_s:
            self._learnt(rows, moves, seconds, cost)
        for moves, seconds in cuts.stalls_s:
            self._stalled(rows, moves, seconds)
        # The plain step as a column that is always 1, so that the gap is one of the whole step.
        cost[self._found + 1] = SCALE
        limit = None if budget_bytes is None else SCALE
        return self._solve(cost, rows, limit, limit_s, fixed, relaxed, gap, 1 / self._unit, 1.0)

    def least_peak(self, limit_s: float, *, relaxed: bool = False, gap: float = 0.0) -> Solved:
        """Least peak in bytes, whatever the time."""
        unit_bytes = max(int(self.problem.base_bytes.max()), 1)
        cost = np.zeros(self._all)
        cost[self._found + 1] = 1.0
        rows = self._common(Cuts(), unit_bytes)
        for i in range(len(self._worst)):
            rows.add([(self._level + i, 1.0), (self._found + 1, -1.0)], high=0.0)
        return self._solve(cost, rows, None, limit_s, None, relaxed, gap, unit_bytes / SCALE)

    def _common(self, cuts: Cuts, unit_bytes: int | None) -> Rows:
        rows = Rows()
        for group in range(len(self.problem.groups)):
            rows.add(((c, 1.0) for c in range(self._offsets[group], self._offsets[group + 1])), 1.0, 1.0)
        self._joined(rows)
        for conflict in (*self.problem.conflicts, *cuts.never):
            rows.add(((self.column(k), 1.0) for k in conflict), high=len(conflict) - 1.0)
        for tie in self.problem.ties:
            for key in tie.members:
                rows.add([(self.column(key), 1.0), (self.column(tie.on), -1.0)], 0.0, 0.0)
        if unit_bytes is not None:
            self._memory(rows, max(unit_bytes, 1))  # a reserve may leave nothing of a budget
        return rows

    def _joined(self, rows: Rows) -> None:
        # At most one move of a group is taken, so the joint parts that differ in their last key only count together at
        # most once; the rows of each alone would let two halves go free.
        together: dict[tuple, dict[int, list[int]]] = {}
        for index, joint in enumerate(self.problem.joints):
            w, own = self._choices + index, [self.column(k) for k in joint.keys]
            events = self._alike(joint.events)
            for columns, others in events:
                terms = [(w, 1.0), *((c, -1.0) for c in (*own, *columns))]
                rows.add(terms, low=1.0 - len(own) - others)
            if joint.part.gives_back:
                for c in own:
                    rows.add([(w, 1.0), (c, -1.0)], high=0.0)
                if joint.events:
                    firsts = {self.column(event[0]) for event in joint.events}
                    rows.add([(w, 1.0), *((c, -1.0) for c in firsts)], high=0.0)
            for case in joint.cases:
                by_move = together.setdefault((case[:-1], case[-1][0]), {})
                by_move.setdefault(self.column(case[-1]), []).append(w)
        for (keys, _), found in together.items():
            if len(found) < 2:
                continue
            for i in range(max(map(len, found.values()))):
                terms = [(ws[min(i, len(ws) - 1)], 1.0) for ws in found.values()] + [(c, -1.0) for c in found]
                rows.add([*terms, *((self.column(k), -1.0) for k in keys)], low=-float(len(keys)))

    def _alike(self, events: Sequence[tuple[Key, ...]]) -> list[tuple[list[int], int]]:
        """The columns of events, those that differ in the move of their last group only together as one, and how many
        moves each has; one without columns where there are no events."""
        if not events:
            return [([], 0)]
        found: dict[tuple, list[int]] = {}
        for event in events:
            found.setdefault((event[:-1], event[-1][0]), []).append(self.column(event[-1]))
        return [([*map(self.column, keys), *last], len(keys) + 1) for (keys, _), last in found.items()]

    def _memory(self, rows: Rows, unit_bytes: int) -> None:
        unit, worst = SCALE / unit_bytes, self._worst.tolist()
        steps: list[dict[int, float]] = [{} for _ in range(len(worst) + 1)]
        for column, part in enumerate(self._parts):
            for first, last, nbytes in part.memory:
                for at, value in ((first, nbytes), (last + 1, -nbytes)):
                    row = steps[bisect_left(worst, at)]
                    row[column] = row.get(column, 0.0) + value * unit
        base = np.concatenate(([0], self.problem.base_bytes[self._worst])) * unit
        for i in range(len(worst)):
            before = [(self._level + i - 1, -1.0)] if i else []
            terms = [(c, -v) for c, v in steps[i].items() if v]
            change = float(base[i + 1] - (base[i] if i else 0.0))
            rows.add([(self._level + i, 1.0), *before, *terms], change, change)

    def _learnt(self, rows: Rows, moves: Sequence[Key], seconds: float, cost: np.ndarray) -> None:
        """Seconds of a solution with all of ``moves``; a solution without one of them only has to take some time."""
        least = seconds - self.problem.floor_s
        terms = [(int(c), float(cost[c])) for c in np.flatnonzero(cost)]
        terms += [(self.column(k), -least * self._unit) for k in moves]
        rows.add(terms, low=(seconds - self._base_s - least * len(moves)) * self._unit)

    def _stalled(self, rows: Rows, moves: Sequence[Key], seconds: float) -> None:
        """Stalls with all of ``moves``; without one of them there may be none."""
        stalls = range(self.link.stall, self.link.stall + len(self.link.events))
        terms = [(c, 1.0) for c in (*stalls, self._found)]
        terms += [(self.column(k), -seconds * self._unit) for k in moves]
        rows.add(terms, low=seconds * (1 - len(moves)) * self._unit)

    def _solve(
        self,
        cost: np.ndarray,
        rows: Rows,
        limit: float | None,
        limit_s: float,
        fixed: Sequence[int] | None,
        relaxed: bool,
        gap: float,
        unit: float,
        constant: float = 0.0,
    ) -> Solved:
        from scipy.optimize import Bounds  # a quarter of a second: for those who plan, not on import

        low, high = np.zeros(self._all), np.full(self._all, np.inf)
        high[: self._choices] = 1.0
        low[self._found + 1] = constant
        if constant:
            high[self._found + 1] = constant
        low[self._level :] = -np.inf
        if limit is not None:
            high[self._level :] = limit
        for group, move in enumerate(fixed or ()):
            if move >= 0:
                high[self._offsets[group] : self._offsets[group + 1]] = 0.0
                low[self._offsets[group] + move] = high[self._offsets[group] + move] = 1.0
        bounds: Any = (low, high)  # scipy's stubs know no arrays here
        whole = np.zeros(self._all)
        whole[: self._choices] = 0 if relaxed else 1
        words = {"c": cost, "integrality": whole, "bounds": Bounds(*bounds), "options": {"mip_rel_gap": gap}}
        found = solve({**words, "constraints": rows.constraint(self._all)}, limit_s)
        return self._read(found, relaxed, unit)

    def _read(self, found: Found, relaxed: bool, unit: float) -> Solved:
        none = np.zeros(0)
        if found.status == INFEASIBLE:
            return Solved(None, none, np.inf, none)
        bound = found.bound
        if relaxed or bound is None:
            bound = found.fun if found.status == 0 else None
        figure = -np.inf if bound is None else (bound - TOLERANCE * SCALE) * unit
        if found.x is None:
            return Solved(None, none, figure, none)
        shares = found.x[: self._choices]
        split = np.split(shares, self._offsets[1:-1])
        taken = tuple(int(np.argmax(s)) for s in split)
        stalls = found.x[self.link.stall : self.link.stall + len(self.link.events)]
        return Solved(taken, shares, figure, stalls)
