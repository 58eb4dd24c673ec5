"""What one choice adds to a step: bytes by task, seconds by task, transfers over the link to the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.planning.policies.optimal.link import Link, Load
from gistkit.planning.simulate import Effects

MemoryDelta = tuple[int, int]
"""(task, bytes): from the task on the step holds so many bytes more."""


@dataclass(frozen=True)
class Delta:
    """``memory`` by task in order, ``extra`` as (task, seconds), ``loads`` on the link."""

    memory: tuple[MemoryDelta, ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    loads: tuple[Load, ...] = ()

    @staticmethod
    def of(effects: Effects, tasks: int, link: Link) -> Delta:
        """The effects of a decision, as the simulator has them, in a step of so many tasks."""
        steps: dict[int, int] = {}
        for first, last, nbytes, _, _ in effects.intervals:
            if last >= max(first, 0) and first < tasks:
                steps[max(first, 0)] = steps.get(max(first, 0), 0) + nbytes
                if last + 1 < tasks:
                    steps[last + 1] = steps.get(last + 1, 0) - nbytes
        extra: dict[int, float] = {}
        for task, seconds in effects.extra_s:
            extra[task] = extra.get(task, 0.0) + seconds
        memory = tuple((t, n) for t, n in sorted(steps.items()) if n)
        return Delta(
            memory, tuple((t, s) for t, s in sorted(extra.items()) if s), tuple(map(link.load, effects.transfers))
        )

    @cached_property
    def seconds(self) -> float:
        """Seconds of compute, waiting for the link not counted."""
        return sum(s for _, s in self.extra)

    @cached_property
    def link_s(self) -> float:
        """Seconds on the link."""
        return sum(load[3] for load in self.loads)


NO_DELTA = Delta()


def level_of(deltas: Iterable[Delta], base_bytes: np.ndarray) -> np.ndarray:
    """Bytes by task of ``base_bytes`` and the deltas."""
    steps = np.zeros(len(base_bytes), dtype=np.int64)
    for delta in deltas:
        for task, nbytes in delta.memory:
            steps[task] += nbytes
    return base_bytes + np.cumsum(steps)
