"""Rows of a sparse program under construction, and which tasks' memory it has to look at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint


class Rows:
    """Rows low <= sum of coefficients times columns <= high."""

    def __init__(self) -> None:
        self._row: list[int] = []
        self._column: list[int] = []
        self._value: list[float] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def add(self, terms: Iterable[tuple[int, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """One more row; terms are (column, coefficient), those of one column add up."""
        row = len(self._low)
        for column, value in terms:
            self._row.append(row)
            self._column.append(column)
            self._value.append(value)
        self._low.append(low)
        self._high.append(high)

    def constraint(self, columns: int) -> LinearConstraint:
        """All rows over that many columns."""
        from scipy.optimize import LinearConstraint  # a quarter of a second: for those who plan, not on import
        from scipy.sparse import csr_array

        matrix = csr_array((self._value, (self._row, self._column)), shape=(len(self._low), columns))
        sides: Any = (np.array(self._low), np.array(self._high))  # scipy's stubs know no arrays here
        return LinearConstraint(matrix, *sides)


def worst_tasks(base: np.ndarray, intervals: Iterable[tuple[int, int, int]]) -> np.ndarray:
    """The tasks (ascending) of which one holds most, whichever of the intervals (first, last, bytes) are there.

    A task is left out where a neighbour holds all that it holds: the base is no smaller there, and no interval (none of
    negative bytes: begins) in between.
    """
    count = len(base)
    falls, rises = np.zeros(count + 1, bool), np.zeros(count + 1, bool)  # falls[t]: t + 1 may hold less than t
    for first, last, nbytes in intervals:
        first, last = max(first, 0), min(last, count - 1)
        down, up = (last, first) if nbytes >= 0 else (first - 1, last + 1)
        if down >= 0:
            falls[down] = True
        rises[up] = True
    kept = _undominated(np.arange(count), base, falls[:count])
    mirrored = _undominated(count - 1 - kept[::-1], base[::-1], rises[:count][::-1])
    return count - 1 - mirrored[::-1]


def _undominated(tasks: np.ndarray, base: np.ndarray, falls: np.ndarray) -> np.ndarray:
    """Of the given tasks (ascending) those that the next kept one does not stand for."""
    before = np.concatenate(([0], np.cumsum(falls)))
    kept = [int(tasks[-1])]
    for task in map(int, tasks[-2::-1]):
        if before[kept[-1]] > before[task] or base[task] > base[kept[-1]]:
            kept.append(task)
    return np.array(kept[::-1], dtype=np.int64)
