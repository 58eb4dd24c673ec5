"""The least peak that a class of moves can reach, whatever the time: the budget below which there is no plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gistkit.plan.policies.optimal_attempt import NO_PEAK, Attempt
from gistkit.plan.policies.optimal_program import TOLERANCE, Program

ROUNDS = 4
NEAR = 1.05
"""A choice within a twentieth of the bound is near enough for a large problem."""


@dataclass(frozen=True)
class Least:
    """``bound_bytes``: no choice's peak is below. ``taken``: the choice of least simulated peak, ``peak_bytes``."""

    bound_bytes: int
    taken: tuple[int, ...]
    peak_bytes: int


def least_peak(attempt: Attempt, limit_s: float, room_bytes: int | None = 0, *, quick: bool = False) -> Least:
    """The least peak of one number of sub-batches, within about ``limit_s`` seconds.

    ``quick`` (for large problems) takes the sum of what every storage holds at least for the bound where a choice comes
    near it or fits into ``room_bytes`` (None: any does), and solves no more than the linear relaxation where not.
    """
    deadline = time.monotonic() + limit_s
    smallest = _peak(attempt, attempt.search.smallest())
    floor = attempt.problem.floor_bytes
    if smallest[1] == floor or (quick and (room_bytes is None or smallest[1] <= max(NEAR * floor, room_bytes))):
        return Least(floor, *smallest)
    solved = Program(attempt.problem).least_peak(limit_s, relaxed=quick, gap=1e-6)
    bound = max(floor, int(solved.bound) if solved.bound > 0 else 0)
    reached = smallest
    if solved.taken is not None:
        reached = min(smallest, _peak(attempt, attempt.search.settled(solved.shares)), key=lambda r: r[1])
    for _ in range(ROUNDS):
        # On CUDA the scratches of a choice depend on what else it encodes: look again with that known.
        if quick or not attempt.counts_late or reached[1] <= bound or time.monotonic() > deadline:
            break
        again = Program(attempt.problem_of(reached[0])).least_peak(deadline - time.monotonic(), relaxed=quick)
        if again.taken is None:
            break
        better = _peak(attempt, attempt.search.settled(again.shares))
        if better[1] >= reached[1]:
            break
        reached = better
    if reached[1] <= bound * (1 + 2 * TOLERANCE) + 1:
        bound = reached[1]  # equal, as far as the program can tell
    return Least(min(bound, reached[1]), *reached)


def _peak(attempt: Attempt, taken: Sequence[int]) -> tuple[tuple[int, ...], int]:
    peak = attempt.clock(taken)[1] if attempt.problem.allowed(taken) else NO_PEAK
    if peak == NO_PEAK:
        taken = attempt.search.fastest()  # the least bytes of every group alone contradict each other
        peak = attempt.clock(taken)[1]
    return tuple(taken), peak
