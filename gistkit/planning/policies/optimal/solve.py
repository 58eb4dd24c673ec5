"""The choice of least peak of one problem, and the fastest within a budget. The fastest is searched for in rounds: each
repairs choices until they fit and improves the best of them; the next one knows further moments for what that ships
(:func:`.retimed`). A best step at the floor (``Problem.floor_s``) is optimal; else a gap is left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from gistkit.planning.policies.optimal.plans import NO_PEAK, clock, retimed
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS, Search

LAYOUTS = 2  # layouts of segments that are repaired for the least peak, too: those of least peak
LEAST_SHARE = 0.01
"""Of what is between a peak and the one wanted; if no choice is found that is so much below it, the search ends."""
PATIENCE = 100  # kicks in a row without a lower peak, after which the search ends
STARTS, NEAR = 6, 1.2
"""Choices that are improved step by step, of those that fit and take so many times the best one's seconds at most; the
best of what they end in is improved further."""
GRACE_S = 2.0  # time for a repair although time is up: without one there may be no plan at all
ENOUGH = 0.8  # share of a round's time that is left to improve what has been repaired until then
ROUNDS = (0.4, 0.4, 1.0)  # the shares of the time left that rounds take
EXACT = 1e-9  # what sums of double precision may be off by, relative
Reached = tuple[tuple[int, ...], int]
"""A choice and its simulated peak in bytes."""


@dataclass(frozen=True)
class Least:
    """``bound_bytes``: no peak is below. ``taken``: ``search``'s choice of least simulated peak, ``peak_bytes``."""

    search: Search
    bound_bytes: int
    taken: tuple[int, ...]
    peak_bytes: int


def least_peak(search: Search, limit_s: float, room_bytes: int | None = 0) -> Least:
    """The least peak of one problem, within about ``limit_s`` seconds; a choice that fits into ``room_bytes`` (None:
    any does) is enough. What holds least by itself and what is fastest are repaired to lower and lower limits."""
    problem, deadline = search.problem, time.monotonic() + limit_s
    best, bound = _reached(search, search.smallest()), problem.floor_bytes
    if best[1] <= bound or room_bytes is None:
        return Least(search, min(bound, best[1]), *best)
    enough = max(bound, room_bytes)
    layouts = [search.fastest(layout) for layout in problem.layouts]
    layouts = sorted(layouts, key=lambda taken: int(search.state(taken).level.max()))[:LAYOUTS]
    others = [search.smallest(rebuilt=False), search.fastest(), *layouts]
    for start in [best, *(_reached(search, s) for s in others)]:
        best = min(best, _lowered(search, start, enough, deadline), key=lambda r: r[1])
    vain = 0
    while best[1] > enough and vain < PATIENCE and time.monotonic() < deadline:
        found = search.shaken(best[0], best[1] - 1, deadline)
        reached = best if found is None else _reached(search, found.taken)
        vain = 0 if reached[1] < best[1] else vain + 1
        best = min(best, reached, key=lambda r: r[1])
    return Least(search, min(bound, best[1]), *best)


def _lowered(search: Search, best: Reached, wanted: int, deadline: float) -> Reached:
    """The choice of least peak that single steps lead to from one, in search of one of ``wanted`` bytes: repaired to
    half of what is between, or a quarter of it, or less."""
    share = 0.5
    while best[1] > wanted and share > LEAST_SHARE and time.monotonic() < deadline:
        limit = best[1] - max(1, int(share * (best[1] - wanted)))
        found = search.repair(best[0], limit, deadline, LINK_WEIGHTS[-1])
        reached = best if found is None else _reached(search, found)
        if reached[1] < best[1]:
            best = reached
        else:
            share /= 2
    return best


def _reached(search: Search, taken: Sequence[int]) -> Reached:
    """A choice, what contradicts itself kept as it is, and its simulated peak in bytes."""
    for choice in (tuple(search.state(taken).taken), tuple(search.problem.home)):
        peak = clock(search.problem, choice)[1]
        if peak < NO_PEAK:
            break
    return choice, peak


class Fastest:
    """One search for the fastest choice within a budget (None: any), until a deadline. Afterwards ``taken`` is the best
    choice of ``search`` (None: none fits), ``seconds`` are its simulated ones."""

    def __init__(
        self, search: Search, budget_bytes: int | None, starts: Sequence[Sequence[int]], deadline: float
    ) -> None:
        self.search, self._budget, self._deadline = search, budget_bytes, deadline
        self._fitting: dict[tuple[int, ...], float] = {}
        starts = [*starts, search.fastest(), *(search.fastest(layout) for layout in search.problem.layouts)]
        for start in starts:
            self._note(start)
        for number, share in enumerate(ROUNDS):
            if self._meets() or (number and not self._offer()):
                break
            if self._budget is not None:
                starts = self._repaired(starts, self._budget)
            self._polish(share)
        self._polish(1.0)

    @property
    def taken(self) -> tuple[int, ...] | None:
        return min(self._fitting, key=lambda taken: self._fitting[taken], default=None)

    @property
    def seconds(self) -> float:
        return min(self._fitting.values(), default=inf)

    def _repaired(self, starts: Sequence[Sequence[int]], budget_bytes: int) -> list[Sequence[int]]:
        enough_s, able = self._left(ENOUGH), []
        for taken in starts:
            if self._fitting and self._left() <= enough_s:
                break
            for weight in LINK_WEIGHTS:
                until = max(self._deadline, time.monotonic() + GRACE_S)
                mended = self.search.repair(taken, budget_bytes, until, weight)
                if mended is not None and self._note(mended):
                    able.append(taken)
                    break
        return able

    def _note(self, taken: Sequence[int]) -> bool:
        """Note a choice if it fits; whether it does."""
        choice = tuple(self.search.state(taken).taken)
        seconds, peak = clock(self.search.problem, choice)
        fits = peak < NO_PEAK and (self._budget is None or peak <= self._budget)
        if fits:
            self._fitting[choice] = seconds
        return fits

    def _offer(self) -> bool:
        """Offer the best choice's transfers at other moments; whether there are any."""
        problem = self.search.problem
        if self.taken is None:
            return False
        more = problem.offering(retimed(problem, self.taken))
        if len(more.keys) == len(problem.keys):
            return False
        self.search = Search(more)
        return True

    def _left(self, share: float = 1.0) -> float:
        return max(0.0, self._deadline - time.monotonic()) * share

    def _meets(self) -> bool:
        """Whether floor and best step are equal but for rounding."""
        problem = self.search.problem
        return self.seconds <= problem.floor_s * (1 + 2 * EXACT + problem.idle)

    def _polish(self, share: float) -> None:
        if self._fitting and not self._meets():
            until = time.monotonic() + self._left(share)
            near = sorted(self._fitting.items(), key=lambda f: f[1])[:STARTS]
            starts = [f for f in near if f[1] <= NEAR * near[0][1]]
            self._fitting = dict([self.search.improve(starts, self._budget, until)])
