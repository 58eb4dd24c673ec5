"""The least peak that a class of moves can reach, whatever the time: the budget below which there is no plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gistkit.planning.policies.optimal.bounds import Bounds
from gistkit.planning.policies.optimal.plans import NO_PEAK, clock
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS, Search

LAYOUTS = 2
"""Layouts of segments that are repaired, too: those of least peak."""
LEAST_SHARE = 0.01
"""Of what is between a peak and the one wanted; if no choice is found that is so much below it, the search ends."""
PATIENCE = 100
"""Kicks in a row without a lower peak, after which the search ends."""
Reached = tuple[tuple[int, ...], int]
"""A choice and its simulated peak in bytes."""


@dataclass(frozen=True)
class Least:
    """``bound_bytes``: no choice's peak is below. ``taken``: the choice of least simulated peak, ``peak_bytes``."""

    bound_bytes: int
    taken: tuple[int, ...]
    peak_bytes: int

    def rules_out(self, budget_bytes: int | None) -> bool:
        """Whether no choice fits into a budget (None: any does)."""
        return budget_bytes is not None and self.bound_bytes > budget_bytes


def least_peak(search: Search, limit_s: float, room_bytes: int | None = 0) -> Least:
    """The least peak of one problem, within about ``limit_s`` seconds; a choice that fits into ``room_bytes`` (None:
    any does) is enough. What holds least by itself, what the relaxation takes most of and what is fastest are repaired
    to lower and lower limits."""
    problem, deadline = search.problem, time.monotonic() + limit_s
    best = _reached(search, search.smallest())
    floor = problem.floor_bytes
    if best[1] <= floor or room_bytes is None:
        return Least(min(floor, best[1]), *best)
    relaxed = Bounds(problem).peak_bytes(best[1])
    bound = max(floor, int(relaxed.value))
    others = [search.smallest(rebuilt=False), search.rounded(relaxed.shares), search.fastest()]
    layouts = [search.fastest(layout) for layout in problem.layouts]
    layouts = sorted(layouts, key=lambda taken: int(search.state(taken).level.max()))[:LAYOUTS]
    starts = [best, *(_reached(search, s) for s in (*others, *layouts))]
    for start in starts:
        best = min(best, _lowered(search, start, max(bound, room_bytes), deadline), key=lambda r: r[1])
    vain = 0
    while best[1] > max(bound, room_bytes) and vain < PATIENCE and time.monotonic() < deadline:
        found = search.shaken(best[0], best[1] - 1, deadline)
        reached = best if found is None else _reached(search, found.taken)
        vain = 0 if reached[1] < best[1] else vain + 1
        best = min(best, reached, key=lambda r: r[1])
    return Least(min(bound, best[1]), *best)


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
