"""Convolution algorithms of a plan: vDNN's (m), memory-optimal, and (p), performance-optimal (section III-C).

The papers' algorithms run every task of a convolution; a call takes one. An engine of cuDNN runs one task; a call takes
one for each (a text of :func:`gistkit.planning.cost.by_part`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gistkit.ir import CallChoice, SavedGraph, by_key
from gistkit.planning.cost import CostTable, by_part, of_part

MEMORY, PERFORMANCE = "m", "p"


class ConvAlgorithms:
    """The algorithms that each covered convolution can run under: seconds and workspace."""

    def __init__(self, graph: SavedGraph, costs: CostTable) -> None:
        self._costs = costs
        self._op = {c.index: (c.covered, c.op) for c in graph.calls}
        self.part = {t.index: t.part_name for t in graph.tasks}
        convs = (t for t in graph.tasks if t.conv is not None and t.call >= 0)
        self.tasks = by_key((t.call, t.index) for t in convs if graph.calls[t.call].covered >= 0)

    def names(self, call: int) -> list[str]:
        """The algorithms that all tasks of a call have; where there are engines, or none that all have, the fastest of
        each task within every amount of workspace. Fastest first, equals by workspace."""
        known = [self._costs.algorithms[t] for t in self.tasks[call]]
        found = set.intersection(*({a.name for a in algorithms} for algorithms in known))
        if not found or any(a.is_engine for algorithms in known for a in algorithms):
            found = {self._within(call, a.workspace_bytes) for algorithms in known for a in algorithms}
        return sorted(found, key=lambda n: (self.seconds(call, n), self.workspace(call, n), n))

    def _within(self, call: int, nbytes: int) -> str:
        """Each task's fastest algorithm of no more workspace, where it has none its least."""
        names = {}
        for t in self.tasks[call]:
            known = sorted(self._costs.algorithms[t], key=lambda a: (max(a.workspace_bytes, nbytes), a.seconds))
            names[self.part[t]] = known[0].name
        return by_part(names)

    def seconds(self, call: int, name: str) -> float:
        return sum(self._costs.task_s(t, of_part(name, self.part[t])) for t in self.tasks[call])

    def task_workspace(self, task: int, name: str) -> int:
        return self._costs.workspace_bytes(task, of_part(name, self.part[task]))

    def workspace(self, call: int, name: str) -> int:
        return max(self.task_workspace(t, name) for t in self.tasks[call])

    def memory_optimal(self) -> dict[int, str]:
        """(m): the least workspace, of these the fastest (implicit GEMM: none)."""
        return {c: min(self.names(c), key=lambda n: self.workspace(c, n)) for c in self.tasks}

    def performance_optimal(self) -> dict[int, str]:
        """(p): the fastest, of these the least workspace."""
        return {c: self.names(c)[0] for c in self.tasks}

    def of(self, which: str | Mapping[int, str]) -> dict[int, str]:
        """``m``, ``p`` or a mapping by call."""
        if isinstance(which, Mapping):
            return dict(which)
        return self.memory_optimal() if which == MEMORY else self.performance_optimal()

    def by_call(self, names: Sequence[str]) -> dict[int, str]:
        """The text of every call for algorithms by task."""
        return {call: by_part({self.part[t]: names[t] for t in tasks}) for call, tasks in self.tasks.items()}

    def choices(self, by_call: Mapping[int, str]) -> tuple[CallChoice, ...]:
        """The choices that carry the names into a plan, in the order of the covered calls."""
        named = sorted((*self._op[call], name) for call, name in by_call.items())
        return tuple(CallChoice(covered, op, algorithm=name) for covered, op, name in named)
