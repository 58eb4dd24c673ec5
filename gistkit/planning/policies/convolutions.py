"""Convolution algorithms of a plan: vDNN's (m), memory-optimal, and (p), performance-optimal (section III-C)."""

from __future__ import annotations

from collections.abc import Mapping

from gistkit.ir import CallChoice, SavedGraph
from gistkit.planning.cost import CostTable

MEMORY, PERFORMANCE = "m", "p"


class ConvAlgorithms:
    """The algorithms that each covered convolution can run under, all its tasks alike: seconds and workspace."""

    def __init__(self, graph: SavedGraph, costs: CostTable) -> None:
        self._costs = costs
        self._op = {c.index: (c.covered, c.op) for c in graph.calls}
        self.tasks: dict[int, list[int]] = {}
        for task in graph.tasks:
            if task.conv is not None and task.call >= 0 and graph.calls[task.call].covered >= 0:
                self.tasks.setdefault(task.call, []).append(task.index)

    def names(self, call: int) -> list[str]:
        """The algorithms that all tasks of a call have, fastest first; equals by workspace."""
        known = [{a.name for a in self._costs.algorithms[t]} for t in self.tasks[call]]
        return sorted(set.intersection(*known), key=lambda n: (self.seconds(call, n), self.workspace(call, n), n))

    def seconds(self, call: int, name: str) -> float:
        return sum(self._costs.task_s(t, name) for t in self.tasks[call])

    def workspace(self, call: int, name: str) -> int:
        return max(self._costs.workspace_bytes(t, name) for t in self.tasks[call])

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

    def choices(self, by_call: Mapping[int, str]) -> tuple[CallChoice, ...]:
        """The choices that carry the names into a plan, in the order of the covered calls."""
        named = sorted((*self._op[call], name) for call, name in by_call.items())
        return tuple(CallChoice(covered, op, algorithm=name) for covered, op, name in named)
