"""Seconds that no choice of `optimal` goes below under a budget, by Lagrangian relaxation.

Bytes above the budget are allowed at a price, by task. Then every group takes the variant that is cheapest by itself,
and whatever the prices, no choice within the budget costs less (Geoffrion, 1974). The prices are raised where the mean
of what is taken holds too much (the volume algorithm; Barahona and Anbil, 2000); that mean also tells which variants a
good choice takes. A variant counts with what it adds at least (:attr:`.Problem.least`), and what a segment adds is
shared among the storages that come back with it.

The link takes part by two spans, forward and backward: a step waits for what is sent to the host within the one, and
back within the other, beyond their compute. That has a price between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gistkit.ir import BACKWARD
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.variants import Delta

ROUNDS = 200
PATIENCE = 6  # rounds without a better bound, after which the steps become smaller
MEMORY = 0.9  # share of the mean of what was taken that stays from one round to the next
EXACT = 1e-9  # what sums of double precision may be off by, relative


class Bounds:
    """The variants of one problem as flat arrays, segments shared out."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._base_s = problem, float(problem.base_s.sum())
        count = len(problem.keys)
        self._group = np.repeat(np.arange(len(problem.groups)), np.diff(problem.offsets))
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
        self._variant, self._task, self._bytes = np.array(flat, dtype=float).reshape(-1, 3).T
        self._variant, self._task = self._variant.astype(int), self._task.astype(int)

    def _shared(self) -> Iterator[tuple[int, Delta, float]]:
        """(variant, delta, share of it): a segment's by the bytes of its storages."""
        problem, offsets = self._problem, self._problem.offsets.tolist()
        yield from ((i, d, 1.0) for i, d in enumerate(problem.least) if problem.keys[i][0] not in problem.members)
        for segment, members in problem.members.items():
            total = sum(problem.blocks[g].nbytes for g, _ in members)
            for g, v in members:
                yield offsets[g] + v, problem.least[offsets[segment] + 1], problem.blocks[g].nbytes / total

    def seconds(self, budget_bytes: int, upper_s: float) -> tuple[float, np.ndarray]:
        """Seconds that no choice within a budget goes below, about ``upper_s`` being enough for one; by variant how
        much of it the relaxation takes."""
        problem, room, target = self._problem, max(budget_bytes, 1), upper_s - self._base_s
        prices, waits, mean = np.zeros(problem.tasks), np.zeros(2), np.zeros(len(self._group))
        best, top, step, vain = -np.inf, (prices, waits), 1.0, 0
        for number in range(ROUNDS):
            ahead = np.cumsum(prices[::-1])[::-1][self._task]
            held = np.bincount(self._variant, self._bytes * ahead / room, len(mean))
            taken, value = self._cheapest(self._cost_s + waits @ self._late_s + held)
            value += float(prices @ (problem.base_bytes / room - 1)) - float(waits @ self._span_s)
            vain = 0 if value > best + 1e-3 * abs(best) else vain + 1
            if value > best:
                best, top, step = value, (prices, waits), min(2.0, 1.05 * step)
            if vain >= PATIENCE:
                step, vain = 0.66 * step, 0
            mean = taken if number == 0 else MEMORY * mean + (1 - MEMORY) * taken
            held = np.bincount(self._task, self._bytes * mean[self._variant], problem.tasks)
            above = (problem.base_bytes + np.cumsum(held)) / room - 1
            late = (self._late_s @ mean - self._span_s) / max(target, 1e-12)
            missing = max(target - best, 1e-3 * abs(target) + 1e-12)
            length = step * missing / max(float(above @ above + late @ late), 1e-12)
            prices = np.maximum(0.0, top[0] + length * above)
            waits = np.clip(top[1] + length * late / max(target, 1e-12), 0.0, 1.0)
        return (self._base_s + best) * (1 - EXACT), mean

    def _cheapest(self, score: np.ndarray) -> tuple[np.ndarray, float]:
        """Of every group its cheapest variant, as ones and zeros, and what they cost together."""
        least = np.minimum.reduceat(score, self._problem.offsets[:-1])
        at = np.flatnonzero(score <= least[self._group])
        taken = np.zeros(len(score))
        taken[at[np.unique(self._group[at], return_index=True)[1]]] = 1.0
        return taken, float(least.sum())
