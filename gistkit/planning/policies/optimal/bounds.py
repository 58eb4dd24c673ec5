"""What no choice of `optimal` goes below: seconds under a budget, and bytes, by Lagrangian relaxation.

Bytes above the budget are allowed at a price, by task; then every group takes the variant that is cheapest by itself, and
whatever the prices, no choice within the budget costs less (Geoffrion, 1974). The prices are raised where the mean of
what is taken holds too much (the volume algorithm; Barahona and Anbil, 2000). A variant counts with what it adds at least
(:attr:`.Problem.least`), what a segment adds is shared among the storages that come back with it.

The link takes part by two spans, forward and backward: a step waits for what is sent to the host within the one, and back
within the other, beyond their compute. That has a price between 0 and 1.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from gistkit.ir import BACKWARD
from gistkit.planning.policies.optimal.problem import Problem

ROUNDS = 200
PATIENCE = 6
"""Rounds without a better bound, after which the steps become smaller."""
MEMORY = 0.9
"""Share of the mean of what was taken that stays from one round to the next."""
EXACT = 1e-9
"""What sums of double precision may be off by, relative."""


class Bounds:
    """The variants of one problem as flat arrays, segments shared out."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        count, offsets = len(problem.keys), problem.offsets
        self._group = np.repeat(np.arange(len(problem.groups)), np.diff(offsets))
        backward = next((t.index for t in problem.graph.tasks if t.phase == BACKWARD), problem.tasks)
        spans = [(0, backward), (backward, problem.tasks)]
        self._span_s = np.array([problem.base_s[first:end].sum() for first, end in spans])
        self._cost_s, self._late_s = np.zeros(count), np.zeros((2, count))
        flat: list[tuple[int, int, float]] = []
        for index, delta, share in self._shared():
            self._cost_s[index] += share * delta.seconds
            flat += ((index, task, share * nbytes) for task, nbytes in delta.memory)
            for back, (first, end) in enumerate(spans):
                within = (s for issue, due, way, s in delta.loads if way == back and issue >= first and due < end)
                self._late_s[back, index] += sum(within) - share * sum(s for t, s in delta.extra if first <= t < end)
        columns = zip(*flat, strict=True) if flat else ((), (), ())
        self._variant, self._task, self._bytes = (np.array(column) for column in columns)

    def _shared(self):
        """(variant, delta, share of it): a segment's by the bytes of its storages."""
        problem, offsets = self._problem, self._problem.offsets.tolist()
        yield from ((i, d, 1.0) for i, d in enumerate(problem.least) if problem.keys[i][0] not in problem.members)
        for segment, members in problem.members.items():
            total = sum(problem.blocks[g].nbytes for g, _ in members)
            for g, v in members:
                yield offsets[g] + v, problem.least[offsets[segment] + 1], problem.blocks[g].nbytes / total

    def seconds(self, budget_bytes: int | None, upper_s: float) -> float:
        """Seconds that no choice within a budget goes below; about ``upper_s`` are known to be enough."""
        base_s = float(self._problem.base_s.sum())
        if budget_bytes is None:
            return (base_s + float(np.minimum.reduceat(self._cost_s, self._problem.offsets[:-1]).sum())) * (1 - EXACT)
        best, _ = self._ascend(self._cost_s, max(budget_bytes, 1), upper_s - base_s, True)
        return (base_s + best) * (1 - EXACT)

    def peak_bytes(self, upper_bytes: int) -> int:
        """Bytes that no choice's peak is below; there is one of ``upper_bytes``."""
        _, share = self._ascend(np.zeros(len(self._group)), upper_bytes, 0.0, False)
        return int(upper_bytes * (1 + min(share, 0.0)) * (1 - EXACT))

    def _ascend(self, cost: np.ndarray, room: int, target: float, link: bool) -> tuple[float, float]:
        """The greatest sum of costs and prices found, and the greatest sum of prices by unit of price: by how much of the
        ``room`` all choices are above it."""
        problem, first = self._problem, self._problem.offsets[:-1]
        prices, waits = np.zeros(problem.tasks), np.zeros(2)
        best, best_share, top, step, vain, mean = -np.inf, -np.inf, (prices, waits), 1.0, 0, None
        for _ in range(ROUNDS):
            ahead = np.cumsum(prices[::-1])[::-1]
            score = cost + waits @ self._late_s + np.bincount(self._variant, self._bytes * ahead[self._task] / room, len(cost))
            least = np.minimum.reduceat(score, first)
            paid = float(prices @ (problem.base_bytes / room - 1))
            value = float(least.sum()) + paid - float(waits @ self._span_s)
            best_share = max(best_share, value / prices.sum() if prices.any() else -np.inf)
            ahead_s = best
            if value > best:
                vain = 0 if value > best + 1e-3 * abs(best) else vain
                best, top, step = value, (prices, waits), min(2.0, 1.05 * step)
            else:
                vain += 1
            if vain >= PATIENCE:
                step, vain = 0.66 * step, 0
            at = np.flatnonzero(score <= least[self._group])
            taken = np.zeros(len(cost))
            taken[at[np.unique(self._group[at], return_index=True)[1]]] = 1.0
            mean = taken if mean is None else MEMORY * mean + (1 - MEMORY) * taken
            level = problem.base_bytes + np.cumsum(np.bincount(self._task, self._bytes * mean[self._variant], problem.tasks))
            above = level / room - 1
            late = (self._late_s @ mean - self._span_s) / max(target, 1e-12) if link else np.zeros(2)
            length = step * max(target - best, 1e-3 * abs(target) + 1e-12) / float(above @ above + late @ late)
            prices = np.maximum(0.0, top[0] + length * above)
            waits = np.clip(top[1] + length * late / max(target, 1e-12), 0.0, 1.0)
        return best, best_share
