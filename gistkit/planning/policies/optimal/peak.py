"""The least peak that a class of moves can reach, whatever the time: the budget below which there is no plan."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gistkit.planning.policies.optimal.attempt import NO_PEAK, Attempt
from gistkit.planning.policies.optimal.program import TOLERANCE, Program
from gistkit.planning.policies.optimal.search import LINK_WEIGHTS

ROUNDS = 4
NEAR = 1.05
"""A choice within a twentieth of the bound is near enough for a large problem."""
HALVINGS = 10
"""Limits that choices are repaired to, at most: each halves what is between the bound and the least peak, or fails."""
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


def least_peak(attempt: Attempt, limit_s: float, room_bytes: int | None = 0, *, quick: bool = False) -> Least:
    """The least peak of one number of sub-batches, within about ``limit_s`` seconds.

    ``quick`` (for large problems) takes the sum of what every storage holds at least for the bound where a choice comes
    near it or fits into ``room_bytes`` (None: any does), and solves no more than the linear relaxation where not. What
    that gives, even segments and the seeds are then repaired to lower and lower limits.
    """
    deadline = time.monotonic() + limit_s
    smallest = _peak(attempt, attempt.search.smallest())
    floor = attempt.problem.floor_bytes
    if smallest[1] == floor or (quick and (room_bytes is None or smallest[1] <= max(NEAR * floor, room_bytes))):
        return Least(floor, *smallest)
    solved = Program(attempt.problem).least_peak(limit_s, relaxed=quick, gap=1e-6)
    bound = max(floor, int(solved.bound)) if math.isfinite(solved.bound) else floor  # infeasible: it cannot be
    reached = smallest
    if solved.taken is not None:
        reached = min(smallest, _peak(attempt, attempt.search.settled(solved.shares)), key=lambda r: r[1])
    for number in range(ROUNDS):
        # On CUDA the scratches of a choice depend on what else it encodes: look again with that known, once at least.
        left_s = max(deadline - time.monotonic(), 0.0 if number else limit_s / 2)
        if quick or not attempt.counts_late or reached[1] <= bound or left_s <= 0:
            break
        again = Program(attempt.problem_of(reached[0])).least_peak(left_s, relaxed=quick)
        if again.taken is None:
            break
        better = _peak(attempt, attempt.search.settled(again.shares))
        if better[1] >= reached[1]:
            break
        reached = better
    if reached[1] > bound + 1:
        wanted = max(int(NEAR * bound), room_bytes or 0) if quick else bound
        starts = [reached[0], *attempt.seeds(), *attempt.frames()]
        reached = _lowered(attempt, starts, reached, wanted, max(deadline, time.monotonic() + limit_s))
    if reached[1] <= _alike(bound):
        bound = reached[1]  # equal, as far as the program can tell
    return Least(min(bound, reached[1]), *reached)


def _lowered(
    attempt: Attempt, starts: Iterable[Sequence[int]], reached: Reached, wanted: int, deadline: float
) -> Reached:
    """The choice of least peak that single steps lead to from any of ``starts``, in search of one of ``wanted`` bytes:
    repaired to ``wanted``, then to what is halfway to the least so far."""
    search = attempt.search
    known = [_clocked(attempt, s) for s in dict.fromkeys(map(tuple, starts)) if attempt.problem.allowed(s)]
    low, limit = wanted - 1, wanted
    for _ in range(HALVINGS):
        known.sort(key=lambda k: k[1])
        reached = min(reached, *known[:1], key=lambda k: k[1])
        if reached[1] <= wanted or limit <= low or time.monotonic() > deadline:
            break
        tried = (search.repair(k[0], limit, deadline, LINK_WEIGHTS[-1]) for k in known)
        found = next((t for t in tried if t is not None), None)
        if found is None:
            low = limit
        else:
            known.append(_clocked(attempt, found))
        limit = (low + min(reached[1], known[-1][1])) // 2
    return reached


def _clocked(attempt: Attempt, taken: tuple[int, ...]) -> Reached:
    return taken, attempt.clock(taken)[1]


def _peak(attempt: Attempt, taken: Sequence[int]) -> Reached:
    peak = attempt.clock(taken)[1] if attempt.problem.allowed(taken) else NO_PEAK
    if peak == NO_PEAK:
        taken = attempt.search.fastest()  # the least bytes of every group alone contradict each other
        peak = attempt.clock(taken)[1]
    return tuple(taken), peak
