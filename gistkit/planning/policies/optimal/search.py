"""Search for `optimal`: a plan that fits from any plan, one step after the other on exact bytes by task.

Repair takes the move that frees most of what is too much a second it costs; its scores for all moves come from one
running sum over the tasks. What fits is made faster by :mod:`.optimal_improve`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gistkit.planning.policies.optimal.problem import Key, Problem, spread
from gistkit.planning.policies.optimal.stalls import loads_of, stalled
from gistkit.planning.policies.optimal.standing import Standing
from gistkit.planning.policies.optimal.steps import Steps

Clock = Callable[[Sequence[int]], tuple[float, int]]
"""(seconds, peak bytes) of the step with the moves taken, by simulation."""
MOST_VAIN = 120
"""Steps that free nothing in a row, after which a repair gives up."""
LINK_WEIGHTS = (0.3, 0.03)
"""What a second of transfer counts for in a score: where the link is busy it is no free good, else it is hidden."""


class Search:
    """Moves of one problem as flat arrays, for scores of all of them at once."""

    def __init__(self, problem: Problem, clock: Clock) -> None:
        self.problem, self.clock = problem, clock
        self.draw = random.Random(0)
        self.keys = [(g, m) for g, group in enumerate(problem.groups) for m in range(len(group))]
        self.offsets = np.concatenate(([0], np.cumsum([len(g) for g in problem.groups]))).astype(int)
        flat = [
            (index, first, last + 1, nbytes)
            for index, (g, m) in enumerate(self.keys)
            for first, last, nbytes in problem.groups[g][m].part.memory
        ]
        self._move, self._first, self._end, self._bytes = np.array(flat, dtype=np.int64).reshape(-1, 4).T
        self._first, self._end = np.maximum(self._first, 0), np.minimum(self._end, problem.tasks)
        self._group = np.repeat(np.arange(len(problem.groups)), np.diff(self.offsets))
        self._floor_s = 1e-9 * max(float(problem.base_s.sum()), 1e-12)
        self.steps = Steps(problem, self.offsets)
        own = [problem.groups[g][m].part for g, m in self.keys]
        self.compute_s = np.array([part.seconds for part in own])
        self.link_s = np.array([sum(problem.link.seconds(t) for t in part.transfers) for part in own])

    def cost_s(self, weight: float) -> np.ndarray:
        """Seconds of each move by itself, those of transfers by their weight."""
        return self.compute_s + weight * self.link_s

    def fastest(self) -> tuple[int, ...]:
        """The move of every group that costs least by itself."""
        costs = self.cost_s(LINK_WEIGHTS[0])
        costs[self.steps.tied] = np.inf
        split = np.split(costs, self.offsets[1:-1])
        return tuple(int(np.argmin(costs)) for costs in split)

    def smallest(self) -> tuple[int, ...]:
        """The move of every group that holds least over the whole step, as far as conflicts allow."""
        held = np.bincount(self._move, self._bytes * (self._end - self._first), len(self.keys))
        shares = 1.0 / (1.0 + held)
        for tie in self.problem.ties:
            shares[self.offsets[tie.on[0]] + tie.on[1]] = 0.0
        return self.settled(shares)

    def bytes_by_task(self, taken: Sequence[int]) -> np.ndarray:
        """Memory during every task."""
        return spread(self.problem.parts(taken), self.problem.base_bytes)

    def stalls(self, moves: Sequence[Key]) -> float:
        """Seconds for which every choice with these moves stalls: theirs alone, all else giving them most to hide
        behind."""
        seconds = self.problem.base_s.copy()
        groups = {g: m for g, m in moves}
        for g, group in enumerate(self.problem.groups):
            candidates = [group[groups[g]]] if g in groups else group
            most: dict[int, float] = {}
            for move in candidates:
                for task, extra in move.part.extra:
                    most[task] = max(most.get(task, 0.0 if len(candidates) > 1 else -np.inf), extra)
            for task, extra in most.items():
                seconds[task] += extra
        for joint in self.problem.joints:
            for task, extra in joint.part.extra:
                seconds[task] += max(0.0, extra)
        link = self.problem.link
        loads = [load for g, m in moves for load in loads_of(link, self.problem.groups[g][m].part)]
        return stalled(seconds, loads, 1.0)  # neither direction slows the other: no less than that

    def settled(self, shares: np.ndarray) -> tuple[int, ...]:
        """The move of every group with the largest share, or the next that no conflict bars: sure groups first.
        Segments before all others: those that run anew by more than half."""
        left = shares.copy()
        left[self.steps.tied] = -1.0
        split = np.split(left, self.offsets[1:-1])
        taken = [int(np.argmax(s)) for s in split]
        fixed: set[int] = set()
        for tie in sorted(self.problem.ties, key=lambda t: -shares[self.offsets[t.on[0]] + t.on[1]]):
            on = shares[self.offsets[tie.on[0]] + tie.on[1]] > 0.5 and fixed.isdisjoint(g for g, _ in tie.members)
            taken[tie.on[0]] = tie.on[1] if on else 0
            fixed.add(tie.on[0])
            for group, move in tie.members if on else ():
                taken[group] = move
                fixed.add(group)
        for group in sorted(range(len(split)), key=lambda g: -float(split[g].max())):
            if group in fixed:
                continue
            fixed.add(group)
            for move in map(int, np.argsort(-split[group], kind="stable")):
                taken[group] = move
                barred = self.problem.barred.get((group, move), ())
                if not any(all(g in fixed and taken[g] == m for g, m in conflict) for conflict in barred):
                    break
        return tuple(taken)

    def standing(self, taken: Sequence[int]) -> Standing:
        """A choice to take steps from."""
        return Standing(self.problem, self.steps, taken)

    def repair(self, taken: Sequence[int], budget_bytes: int, deadline: float, weight: float) -> tuple[int, ...] | None:
        """A choice within the budget from any one, None where single steps do not get there. ``weight``: of a second of
        transfer against one of compute."""
        now = self.standing(taken)
        return tuple(now.taken) if self.mend(now, budget_bytes, deadline, self.cost_s(weight)) else None

    def mend(
        self, now: Standing, budget_bytes: int, deadline: float, cost_s: np.ndarray, spare: Iterable[int] = ()
    ) -> bool:
        """Take steps until a choice fits: whether it does. ``cost_s``: prices, by move; ``spare``: groups that are left
        as they are."""
        barred = {int(i) for g in spare for i in range(self.offsets[g], self.offsets[g + 1])}
        vain, over = 0, _over(now.level, budget_bytes)
        while over:
            if time.monotonic() > deadline or vain > MOST_VAIN:
                return False
            index = self._best(now.taken, now.level, budget_bytes, barred, cost_s)
            if index is None:
                return False
            group, move = self.keys[index]
            barred.add(index)
            vain += 1
            step = now.step(group, move)
            if step is None:
                continue
            level = now.level_after(step)
            left = _over(level, budget_bytes)
            if left < over:
                barred.add(int(self.offsets[group]) + now.taken[group])
                now.take(step, level)
                vain, over = 0, left
        return True

    def _best(
        self, now: Sequence[int], level: np.ndarray, budget_bytes: int, barred: set[int], cost_s: np.ndarray
    ) -> int | None:
        """The move that frees most of the surplus a second; None if none frees any."""
        running = np.zeros(len(level) + 1, dtype=np.int64)
        np.cumsum(level > budget_bytes, out=running[1:])
        held = self._bytes * (running[self._end] - running[self._first])
        weight = np.bincount(self._move, held, len(self.keys))
        current = (self.offsets[:-1] + np.array(now))[self._group]
        freed, dearer = weight[current] - weight, cost_s - cost_s[current]
        tied, owners = self.steps.tied, self.steps.of_tied
        if len(tied):
            freed += np.bincount(owners, freed[tied], len(freed))
            dearer += np.bincount(owners, dearer[tied], len(freed))
            freed[tied] = 0
        freed[list(barred)] = 0
        able = np.flatnonzero(freed > 0)
        if not len(able):
            return None
        return int(able[np.argmax(freed[able] / (np.maximum(dearer[able], 0) + self._floor_s))])


def _over(level: np.ndarray, budget_bytes: int) -> int:
    return int(np.maximum(level - budget_bytes, 0).sum())
