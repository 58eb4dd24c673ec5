"""Search for `optimal`: a choice that fits from any choice, a faster one from one that fits.

*Repair* takes the step that frees most of what is too much a second it costs; its scores for all variants come from one
running sum over the tasks. *Descent* takes single steps while one is faster. A *kick* takes a few steps that the budget
has no room for, or that cost something, repairs the rest at prices drawn anew and descends again (iterated local
search; Lourenço, Martin and Stützle, 2003). All look at :mod:`.state`; the simulator judges the ends.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from gistkit.planning.policies.optimal.plans import clock
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.state import IncrementalState

LESS = 1 - 1e-12  # a step has to be faster by more than rounding
MOST_VAIN = 120  # steps that free nothing in a row, after which a repair gives up
LINK_WEIGHTS = (0.3, 0.03)
"""What a second of transfer counts for in a score: where the link is busy it is no free good, else it is hidden."""
MOST_KICKED = 4  # steps of one kick, at most
DIRECTED = 0.7  # share of the kicks that begin with a step of less compute
LINK_RANGE = (0.01, 1.0)  # what a second of transfer counts for while a kick is repaired: drawn between these
NOISE = 0.5  # spread of the logarithms of the prices that a kick is repaired at
LOOKED_AT, MOST_LOOKED_AT = 0.15, 60
"""Share of the groups, beside those that a kick changed, whose variants are tried behind it; about how many at most."""
WORSE = 1.02  # so many times the best seconds are what a kick may compute for while it is repaired
PATIENCE = 200  # kicks in a row without success, after which the search ends
Choice = tuple[tuple[int, ...], float]
"""A choice and its simulated seconds."""


class Search:
    """Search for choices of one problem, whose variants are flat arrays, for scores of all of them at once."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.draw, self._random = problem, random.Random(0), np.random.default_rng(0)
        self._last: tuple[tuple[int, ...], IncrementalState] | None = None
        self._group = np.repeat(np.arange(len(problem.groups)), np.diff(problem.offsets))
        flat = [(i, task, nbytes) for i, delta in enumerate(problem.least) for task, nbytes in delta.memory]
        self._variant, self._task, self._bytes = np.array(flat, dtype=np.int64).reshape(-1, 3).T
        self._floor_s = 1e-9 * max(float(problem.base_s.sum()), 1e-12)
        offset = problem.offsets
        self.tied = np.array([offset[g] + v for g, v in problem.owner], dtype=np.int64)
        """Variants that are taken with their segments only."""
        self._owners = np.array([offset[s] + 1 for s in problem.owner.values()], dtype=np.int64)
        self.compute_s = np.array([delta.seconds for delta in problem.least])
        self.link_s = np.array([delta.link_s for delta in problem.least])

    def cost_s(self, weight: float) -> np.ndarray:
        """Seconds of each variant by itself, those of transfers by their weight."""
        return self.compute_s + weight * self.link_s

    def fastest(self, running: Collection[int] = ()) -> list[int]:
        """The variant of every group that costs least by itself, but for the segments ``running`` anew, by number."""
        taken = self._least(self.cost_s(LINK_WEIGHTS[0]))
        for segment in (self.problem.first_segment + s for s in running):
            for g, v in ((segment, 1), *self.problem.members[segment]):
                taken[g] = v
        return taken

    def smallest(self, *, rebuilt: bool = True) -> list[int]:
        """The variant of every group that holds least over the whole step; ``rebuilt``: it may start from others."""
        ends = len(self.problem.base_s) - self._task
        held = np.bincount(self._variant, self._bytes * ends, len(self._group))
        if not rebuilt:
            held[[self.problem.offsets[g] + v for g, v in self.problem.uses]] = np.inf
        return self._least(held)

    def _least(self, score: np.ndarray) -> list[int]:
        score = np.array(score, dtype=float)
        score[self.tied] = np.inf
        score[[self.problem.offsets[s] + 1 for s in self.problem.members]] = np.inf  # no segment runs anew by itself
        return [int(np.argmin(part)) for part in np.split(score, self.problem.offsets[1:-1])]

    def state(self, taken: Sequence[int]) -> IncrementalState:
        """A choice to take steps from."""
        if self._last is None or self._last[0] != tuple(taken):
            self._last = tuple(taken), IncrementalState(self.problem, taken)
        return self._last[1].copy()

    def repair(self, taken: Sequence[int], limit_bytes: int, deadline: float, weight: float) -> tuple[int, ...] | None:
        """A choice within the limit from any one, None where steps do not lead there. ``weight``: of transfers."""
        now = self.state(taken)
        return tuple(now.taken) if self._mend(now, limit_bytes, deadline, self.cost_s(weight)) else None

    def _mend(
        self,
        now: IncrementalState,
        limit_bytes: int,
        deadline: float,
        cost_s: np.ndarray,
        spare: Sequence[int] = (),
        most_s: float = np.inf,
    ) -> bool:
        """Take steps until a choice fits: whether it does, computing for ``most_s`` seconds at most. ``cost_s``:
        prices; ``spare``: groups left as they are."""
        spared = np.isin(self._group, spare)
        barred, over = spared.copy(), _over(now.level, limit_bytes)
        before = over + 1
        while over:
            left = self._mend_once(now, limit_bytes, deadline, cost_s, barred)
            if time.monotonic() > deadline or (left == over >= before) or now.compute_s > most_s:
                return False
            if left == over:
                barred, before = spared.copy(), over  # what was in vain may free something now
            over = left
        return True

    def _mend_once(
        self, now: IncrementalState, limit_bytes: int, deadline: float, cost_s: np.ndarray, barred: np.ndarray
    ) -> int:
        """Take the best step that frees something, of those not ``barred``, if there is one; what is too much then."""
        over = _over(now.level, limit_bytes)
        for index in self._freeing(now, limit_bytes, barred, cost_s)[:MOST_VAIN]:
            group, variant = self.problem.keys[index]
            step = now.step(group, variant) if time.monotonic() < deadline else None
            barred[index] = True
            if step is not None:
                level = now.level_after(step)
                left = _over(level, limit_bytes)
                if left < over:
                    barred[self.problem.offsets[group] + now.taken[group]] = True
                    now.take(step, level)
                    return left
        return over

    def _freeing(self, now: IncrementalState, limit_bytes: int, barred: np.ndarray, cost_s: np.ndarray) -> list[int]:
        """The variants that free some of the surplus, those first that free most a second."""
        above = np.cumsum((now.level > limit_bytes)[::-1])[::-1]  # tasks from each on that hold too much
        held = np.bincount(self._variant, self._bytes * above[self._task], len(cost_s))
        current = (self.problem.offsets[:-1] + np.array(now.taken))[self._group]
        freed, dearer = held[current] - held, cost_s - cost_s[current]
        if len(self.tied):
            freed += np.bincount(self._owners, freed[self.tied], len(freed))
            dearer += np.bincount(self._owners, dearer[self.tied], len(freed))
            freed[self.tied] = 0
        able = np.flatnonzero((freed > 0) & ~barred)
        score = freed[able] / (np.maximum(dearer[able], 0) + self._floor_s)
        return able[np.argsort(-score, kind="stable")].tolist()

    def improve(self, starts: Sequence[Choice], budget_bytes: int | None, deadline: float) -> Choice:
        """A choice as fast as any of ``starts`` (which fit, fastest first), until little helps or time is up."""
        limit = int(np.iinfo(np.int64).max) if budget_bytes is None else budget_bytes
        best = starts[0]
        for start in starts:
            best = min(best, self._descended(start, limit, deadline), key=lambda c: c[1])
        vain = 0
        while vain < PATIENCE and time.monotonic() < deadline:
            found = self._kicked(best, limit, deadline)
            vain += 1
            if found[1] < best[1] * LESS:
                best, vain = self._descended(found, limit, deadline), 0
        return best

    def _descended(self, best: Choice, limit_bytes: int, deadline: float) -> Choice:
        now = self.state(best[0])
        self._descend(now, limit_bytes, deadline)
        return self._judged(now, best, limit_bytes)

    def _judged(self, now: IncrementalState, best: Choice, limit_bytes: int) -> Choice:
        """The faster of a state that fits and the best choice, by the simulator."""
        if tuple(now.taken) == best[0]:
            return best
        seconds, peak = clock(self.problem, now.taken)
        return (tuple(now.taken), seconds) if peak <= limit_bytes and seconds < best[1] * LESS else best

    def _descend(
        self, now: IncrementalState, limit_bytes: int, deadline: float, groups: np.ndarray | None = None
    ) -> float:
        """Take single steps until none is faster; the seconds then. ``groups``: which ones may change (None: all)."""
        seconds, going = now.seconds(), True
        while going and time.monotonic() < deadline:
            going = False
            for index in self._promising(now.taken, deadline, groups):
                step = now.step(*self.problem.keys[index])
                if step is None or now.compute_s + step.more_s >= seconds:
                    continue  # slower even if it did not stall at all
                level = now.level_after(step)
                if int(level.max(initial=0)) > limit_bytes:
                    continue
                took = now.seconds_after(step, seconds)
                if took < seconds * LESS:
                    now.take(step, level)
                    seconds, going = took, True
        return seconds

    def _promising(self, now: Sequence[int], deadline: float, groups: np.ndarray | None) -> Iterator[int]:
        """Variants that may be faster, most gain first: of less compute, or over the link at another time."""
        current = self.problem.offsets[:-1] + np.array(now)
        gain = self._gains(now)
        able = (gain > 0) | (self.link_s[current] > 0)[self._group]
        able[current] = able[self.tied] = False
        if groups is not None:
            able &= groups[self._group]
        found = np.flatnonzero(able)
        for index in found[np.argsort(-gain[found], kind="stable")].tolist():
            if time.monotonic() > deadline:
                return
            yield index

    def _gains(self, now: Sequence[int]) -> np.ndarray:
        """By variant, the seconds of compute that the one taken of its group needs more."""
        current = self.problem.offsets[:-1] + np.array(now)
        gain = self.compute_s[current][self._group] - self.compute_s
        gain[self.tied] = 0.0  # taken with their segments only
        return gain

    def _kicked(self, best: Choice, limit_bytes: int, deadline: float) -> Choice:
        now = self.shaken(best[0], limit_bytes, deadline, WORSE * best[1])
        if now is None:
            return best
        share = min(LOOKED_AT, MOST_LOOKED_AT / len(now.taken))
        groups = (np.array(now.taken) != best[0]) | (self._random.random(len(now.taken)) < share)
        if self._descend(now, limit_bytes, deadline, groups) >= best[1] * LESS:
            return best
        return self._judged(now, best, limit_bytes)

    def shaken(
        self, taken: Sequence[int], limit_bytes: int, deadline: float, most_s: float = np.inf
    ) -> IncrementalState | None:
        """A choice within the limit behind a few steps at random from one; None where they cannot be repaired."""
        now = self.state(taken)
        moved = self._moved(now)
        low, high = np.log(LINK_RANGE)
        noise = np.exp(self._random.normal(0.0, NOISE, len(self.compute_s)))
        prices = self.cost_s(float(np.exp(self.draw.uniform(low, high)))) * noise
        return now if moved and self._mend(now, limit_bytes, deadline, prices, [*moved], most_s) else None

    def _moved(self, now: IncrementalState) -> set[int]:
        moved: set[int] = set()
        for index in self._drawn(now.taken):
            step = now.step(*self.problem.keys[index])
            if step is not None and moved.isdisjoint(step.variants):
                moved.update(step.variants)
                now.take(step)
        return moved

    def _drawn(self, now: Sequence[int]) -> list[int]:
        """The steps of a kick: mostly one that computes for less than what is taken, by how much, and any others."""
        gain = self._gains(now)
        found = self.draw.choices(range(len(gain)), k=self.draw.randint(1, MOST_KICKED))
        better = np.flatnonzero(gain > 0)
        if len(better) and self.draw.random() < DIRECTED:
            found[0] = self.draw.choices(better.tolist(), gain[better].tolist())[0]
        return found


def _over(level: np.ndarray, limit_bytes: int) -> int:
    return int(np.maximum(level - limit_bytes, 0).sum())
