"""The least peak that a class of moves can reach, whatever the time: the budget below which there is no plan."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gistkit.planning.policies.optimal.plans import NO_PEAK, clock
from gistkit.planning.policies.optimal.program import TOLERANCE, Program
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS, Search

WHOLE_SIZE = 1500
"""Up to so many variants the whole program is solved, beyond only its relaxation."""
NEAR = 1.05
"""A choice within a twentieth of the bound is near enough for a large problem."""
LAYOUTS = 2
"""Layouts of segments that are repaired, too: those of least peak."""
LEAST_SHARE = 0.01
"""Of what is between a peak and the one wanted; if no choice is found that is so much below it, the search ends."""
Reached = tuple[tuple[int, ...], int]
"""A choice and its simulated peak in bytes."""


@dataclass(frozen=True)
class Least:
    """``bound_bytes``: no choice's peak is below. ``taken``: the choice of least simulated peak, ``peak_bytes``."""

    bound_bytes: int
    taken: tuple[int, ...]
    peak_bytes: int

    def rules_out(self, budget_bytes: int | None) -> bool:
        """Whether no choice fits into a budget (None: any does), though the bound be a peak that :func:`least_peak`
        could not tell from it."""
        return budget_bytes is not None and self.bound_bytes > _alike(budget_bytes)


def _alike(nbytes: int) -> float:
    """The most bytes that the program cannot tell from ``nbytes``: the tolerances of two of its figures, and a byte."""
    return nbytes * (1 + 2 * TOLERANCE) + 1


def least_peak(search: Search, limit_s: float, room_bytes: int | None = 0) -> Least:
    """The least peak of one problem, within about ``limit_s`` seconds.

    Of a large problem a choice is enough that comes near what every storage holds at least, or that fits into
    ``room_bytes`` (None: any does), and no more than the linear relaxation is solved. What that gives, what holds least
    and what is fastest are repaired to lower and lower limits.
    """
    problem, deadline = search.problem, time.monotonic() + limit_s
    quick = problem.size > WHOLE_SIZE
    best = _reached(search, search.smallest())
    floor = problem.floor_bytes
    if best[1] == floor or (quick and (room_bytes is None or best[1] <= max(NEAR * floor, room_bytes))):
        return Least(floor, *best)
    solved = Program(problem).least_peak(limit_s, relaxed=quick)
    bound = max(floor, int(solved.bound)) if math.isfinite(solved.bound) else floor
    starts = [search.fastest(), *([] if solved.shares is None else [search.rounded(solved.shares)])]
    layouts = [search.fastest(layout) for layout in problem.layouts]
    starts += sorted(layouts, key=lambda taken: int(search.state(taken).level.max()))[:LAYOUTS]
    wanted = max(bound, room_bytes or 0) if quick else bound
    deadline = max(deadline, time.monotonic() + limit_s)
    for start in (best, *(_reached(search, s) for s in starts)):
        best = min(best, _lowered(search, start, wanted, deadline), key=lambda r: r[1])
    if best[1] <= _alike(bound):
        bound = best[1]  # equal, as far as the program can tell
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
    choice = tuple(search.state(taken).taken)
    peak = clock(search.problem, choice)[1]
    return (
        (choice, peak)
        if peak < NO_PEAK
        else (tuple(search.problem.home), clock(search.problem, search.problem.home)[1])
    )
