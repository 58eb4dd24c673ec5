"""What a step under moDNN's schedule takes at least, while the schedule is being made: for who has a faster plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Floor:
    """The seconds of the tasks at their fastest, and of what is known to cross the link.

    Whatever leaves before a task is on the host before it starts, and whatever has its memory again from a task on
    comes back after that. So for every task p, what the step takes is at least the longer of all tasks before p and the
    transfers to the host until then, and the longer of all tasks from p on and the transfers back from then on.
    """

    def __init__(self, fastest_s: Sequence[float]) -> None:
        count = len(fastest_s)
        self._before_s = np.concatenate([[0.0], np.cumsum(fastest_s)])
        # By task; the last entry holds what is away and nobody has fetched yet.
        self._out_s, self._back_s = np.zeros(count + 1), np.zeros(count + 1)

    def leaves(self, task: int, out_s: float, back_s: float) -> None:
        """A block leaves before a task, and will come back some time."""
        self._out_s[task] += out_s
        self._back_s[-1] += back_s

    def comes(self, task: int, back_s: float) -> None:
        """A block that is away is fetched before a task."""
        self._back_s[-1] -= back_s
        self._back_s[task] += back_s

    def in_vain(self, task: int, back_s: float) -> None:
        """What was fetched before a task is away as before."""
        self.comes(task, -back_s)

    def least_s(self, task: int) -> float:
        """What the step takes at least, whatever is decided from ``task`` on."""
        before = self._before_s
        out, back = np.cumsum(self._out_s), np.cumsum(self._back_s[::-1])[::-1]
        both = np.maximum(before, out) + np.maximum(before[-1] - before, back)
        return float(both[: task + 1].max())
