"""What one variant adds to a step: bytes and seconds by task, transfers over the link to the host; their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import Effects, Load, load_of


@dataclass(frozen=True)
class Delta:
    """``memory`` as (task, bytes) in order: from the task on the step holds so many bytes more. ``extra`` as (task,
    seconds of compute)."""

    memory: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    loads: tuple[Load, ...] = ()

    @staticmethod
    def of(effects: Effects, costs: CostTable) -> Delta:
        """The effects of a decision as the simulator has them."""
        tasks, steps, extra = len(costs.algorithms), defaultdict(int), defaultdict(float)
        for first, last, nbytes, _, _ in effects.intervals:
            if last >= max(first, 0) and first < tasks:
                steps[max(first, 0)] += nbytes
                if last + 1 < tasks:
                    steps[last + 1] -= nbytes
        for task, seconds in effects.extra_s:
            extra[task] += seconds
        memory = tuple((t, n) for t, n in sorted(steps.items()) if n)
        loads = tuple(load_of(t, costs) for t in effects.transfers)
        return Delta(memory, tuple((t, s) for t, s in sorted(extra.items()) if s), loads)

    @cached_property
    def seconds(self) -> float:
        """Seconds of compute, waiting for the link not counted."""
        return sum(s for _, s in self.extra)

    @cached_property
    def link_s(self) -> float:
        """Seconds on the link, with the link to itself."""
        return sum(load[3] for load in self.loads)


def level_of(deltas: Iterable[Delta], base_bytes: np.ndarray) -> np.ndarray:
    """Bytes by task of ``base_bytes`` and the deltas."""
    steps = np.zeros(len(base_bytes), dtype=np.int64)
    for delta in deltas:
        for task, nbytes in delta.memory:
            steps[task] += nbytes
    return base_bytes + np.cumsum(steps)
