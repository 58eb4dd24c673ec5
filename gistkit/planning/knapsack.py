"""A multiple-choice knapsack: of each group one choice, least bytes in all, errors that add in variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

UNITS = 2**14


class Choice(NamedTuple):
    """One choice of a group: its error, its bytes."""

    error: float
    nbytes: int


def least_bytes_within(groups: Sequence[Sequence[Choice]], bound: float) -> list[int]:
    """The number of the choice taken of every group: least bytes with the root of the summed squares of the errors at
    most ``bound`` (above 0). The first choice of every group must have error 0. Dynamic programming over the variance:
    each square is rounded up to a 2**14th of the bound's, so the bound holds, and of n groups at most n of these units
    are wasted. Of equal bytes the least error, then the first choice is taken."""
    best, taken = np.zeros(UNITS + 1, dtype=np.int64), []
    units = [[math.ceil(min(choice.error / bound, 2.0) ** 2 * UNITS) for choice in group] for group in groups]
    for group, costs in zip(groups, units, strict=True):
        rows = np.full((len(group), UNITS + 1), np.iinfo(np.int64).max)
        for row, choice, cost in zip(rows, group, costs, strict=True):
            row[cost:] = best[: max(0, UNITS + 1 - cost)] + choice.nbytes
        taken.append(rows.argmin(0).astype(np.uint8))
        best = rows.min(0)
    left, found = int(np.argmin(best)), []
    for choices, costs in zip(reversed(taken), reversed(units), strict=True):
        found.append(int(choices[left]))
        left -= costs[found[-1]]
    return found[::-1]
