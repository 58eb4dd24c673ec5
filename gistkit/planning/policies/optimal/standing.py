"""A choice of `optimal` as sums: its bytes and seconds by task, what it sends over the link, and what a step changes.

Bytes and seconds are sums of parts, so a step away from a choice costs the parts that it touches, and its stalls are
those of the transfers alone: some ten to a hundred times cheaper than a plan for the simulator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.planning.policies.optimal.problem import Part, Problem, spread
from gistkit.planning.policies.optimal.stalls import Load, loads_of, stalled
from gistkit.planning.policies.optimal.steps import Steps


@dataclass(frozen=True)
class Step:
    """What changes, by group, with the parts that go and those that come."""

    changes: Mapping[int, int]
    old: tuple[Part, ...]
    new: tuple[Part, ...]

    @cached_property
    def more_s(self) -> float:
        """Seconds of compute that the step adds."""
        return sum(p.seconds for p in self.new) - sum(p.seconds for p in self.old)


class Standing:
    """A choice that steps are taken from. ``level``: bytes by task; ``compute_s``: the step without stalls."""

    def __init__(self, problem: Problem, steps: Steps, taken: Sequence[int]) -> None:
        self._problem, self._steps = problem, steps
        self.taken = list(taken)
        parts = list(problem.parts(taken))
        self.level = spread(parts, problem.base_bytes)
        self._task_s = problem.base_s.copy()
        for task, seconds in (e for p in parts for e in p.extra):
            self._task_s[task] += seconds
        self.compute_s = float(self._task_s.sum())
        self._loads = [load for p in parts for load in loads_of(problem.link, p)]

    def copy(self) -> Standing:
        """Another one at the same choice."""
        other = copy(self)
        other.taken, other._loads = list(self.taken), list(self._loads)
        other.level, other._task_s = self.level.copy(), self._task_s.copy()
        return other

    def step(self, group: int, move: int) -> Step | None:
        """The step to a move with all that has to change with it; None where it cannot be taken."""
        changes = self._steps.changes(self.taken, group, move)
        return None if changes is None else self.stepping(changes)

    def stepping(self, changes: Mapping[int, int]) -> Step:
        """The step of given changes."""
        taken = self._steps.changed(self.taken, changes)
        return Step(changes, tuple(self._touching(self.taken, changes)), tuple(self._touching(taken, changes)))

    def _touching(self, taken: Sequence[int], groups: Iterable[int]) -> Iterator[Part]:
        """The parts of some groups' moves, and the joint parts that they are in."""
        seen: set[int] = set()
        for group in groups:
            key = (group, taken[group])
            yield self._problem.groups[group][taken[group]].part
            for joint in self._problem.joint.get(key, ()):
                if id(joint) not in seen and joint.met(taken):
                    seen.add(id(joint))
                    yield joint.part

    def level_after(self, step: Step) -> np.ndarray:
        """Bytes by task behind a step."""
        last_task = len(self.level) - 1
        found: dict[int, int] = defaultdict(int)
        for part in step.new:
            for first, last, nbytes in part.memory:
                found[first if first > 0 else 0] += nbytes
                found[(last if last < last_task else last_task) + 1] -= nbytes
        for part in step.old:
            for first, last, nbytes in part.memory:
                found[first if first > 0 else 0] -= nbytes
                found[(last if last < last_task else last_task) + 1] += nbytes
        change = np.zeros(last_task + 2, dtype=np.int64)
        change[list(found)] = list(found.values())
        return self.level + np.cumsum(change)[:-1]

    def seconds(self) -> float:
        """Seconds of the step, as the simulator has them."""
        return self.compute_s + stalled(self._task_s, self._loads, self._problem.link.shared)

    def seconds_after(self, step: Step, most_s: float = np.inf) -> float:
        """Seconds behind a step; where they are above ``most_s``, any number above it."""
        compute_s = self.compute_s + step.more_s
        if compute_s >= most_s:
            return compute_s
        loads = self._loads_after(step)
        if not loads:
            return compute_s
        return compute_s + stalled(self._after(step), loads, self._problem.link.shared, most_s - compute_s)

    def _after(self, step: Step) -> np.ndarray:
        task_s = self._task_s.copy()
        for sign, parts in ((1.0, step.new), (-1.0, step.old)):
            for task, seconds in (e for p in parts for e in p.extra):
                task_s[task] += sign * seconds
        return task_s

    def _loads_after(self, step: Step) -> list[Load]:
        link, loads = self._problem.link, self._loads
        gone = [load for p in step.old for load in loads_of(link, p)]
        come = [load for p in step.new for load in loads_of(link, p)]
        if gone or come:
            loads = [*loads, *come]
            for load in gone:
                loads.remove(load)
        return loads

    def take(self, step: Step, level: np.ndarray | None = None) -> None:
        """Take a step; ``level`` is what :meth:`level_after` gave for it, if that was asked."""
        self.level = self.level_after(step) if level is None else level
        self._loads, self._task_s = self._loads_after(step), self._after(step)
        self.compute_s = float(self._task_s.sum())
        self.taken = self._steps.changed(self.taken, step.changes)
