"""The least peak that a class of moves can reach, whatever the time: the budget below which there is no plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gistkit.plan.policies.optimal_attempt import Attempt
from gistkit.plan.policies.optimal_program import Program

ROUNDS = 4


@dataclass(frozen=True)
class Least:
    """``bound_bytes``: no choice's peak is below. ``taken``: the choice of least simulated peak, ``peak_bytes``."""

    bound_bytes: int
    taken: tuple[int, ...]
    peak_bytes: int


def least_peak(attempt: Attempt, limit_s: float, *, relaxed: bool = False) -> Least:
    """The least peak of one number of sub-batches, within ``limit_s`` seconds.

    ``relaxed`` takes the bound of the linear relaxation and makes its solution whole.
    """
    deadline = time.monotonic() + limit_s
    program = Program(attempt.problem)
    solved = program.least_peak(limit_s, relaxed=relaxed, gap=1e-6)
    bound = max(0, int(solved.bound)) if solved.bound > 0 else 0
    tried: list[Sequence[int]] = [attempt.search.smallest()]
    if solved.taken is not None:
        tried.insert(0, attempt.search.settled(solved.shares))
    reached = min((_peak(attempt, t) for t in tried), key=lambda r: r[1])
    for _ in range(ROUNDS):
        # On CUDA the scratches of a choice depend on what else it encodes: look again with that known.
        if not attempt.counts_late or reached[1] <= bound or time.monotonic() > deadline:
            break
        again = Program(attempt.problem_of(reached[0])).least_peak(deadline - time.monotonic(), relaxed=relaxed)
        if again.taken is None:
            break
        better = _peak(attempt, attempt.search.settled(again.shares))
        if better[1] >= reached[1]:
            break
        reached = better
    return Least(min(bound, reached[1]), *reached)


def _peak(attempt: Attempt, taken: Sequence[int]) -> tuple[tuple[int, ...], int]:
    if not attempt.problem.allowed(taken):
        taken = attempt.search.fastest()  # the least bytes of every group alone contradict each other
    return tuple(taken), attempt.clock(taken)[1]
