"""moDNN's memory demand, lower bound and sub-batch size (DATE 2018, section IV-A, equations (1) to (3)).

- (1) ``Mmin(t, b)`` = inputs + output + workspace of task t at sub-batch size b, weights left out:
  :meth:`gistkit.planning.policies.modnn.lives.Lives.demand_bytes`.
- (2) the lower bound: weights + max over t of Mmin(t, 1) without workspace: :func:`lower_bound`.
- (3) the sub-batch size, "b = (M - S_W) / max Mmin(t, b)" as printed. That has no unit if Mmin is what (1) says; taken
  as bytes per sample it gives ``b_new = floor(b (M - S_W) / max_t Mmin(t, b))``, which is what :func:`sub_batch`
  iterates, with the workspace of every task's fastest algorithm.

The paper's S_W has every weight gradient all through the step. So it is where gradients are summed over sub-batches;
in a whole batch, under gistkit's own rule, each is there from the task on that makes it, and then the whole batch may
need less than a single row. A step is refused below the lesser of the two (:func:`least_by_class`): other sizes sum
gradients as size 1 does and have larger maps.

Here the caller's whole input batch lies on the device beside the weights, whatever the sub-batch size; and a sub-batch
is one of equal parts, so b is the size of the largest of ``ceil(batch / b)`` parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gistkit.planning.cost import CostTable
from gistkit.planning.policies.modnn.lives import Lives

MOST_ROUNDS = 64
"""Rounds of eq. (3). Each moves b; a walk that has not met an old b by then is cut off where it stands."""


@dataclass(frozen=True)
class Bound:
    """A lower bound: resident bytes (weights, weight gradients that are summed, buffers, input batch, the libraries'
    own), the task that needs most beside them, and what that needs."""

    resident_bytes: int
    task: int
    task_bytes: int

    @property
    def nbytes(self) -> int:
        """The bound."""
        return self.resident_bytes + self.task_bytes


@dataclass(frozen=True)
class Part:
    """A step in equal parts: how many, the size of the largest, its lives and its costs."""

    parts: int
    size: int
    lives: Lives
    costs: CostTable


@dataclass(frozen=True)
class SubBatch:
    """A sub-batch size that eq. (3) converged to, and the sizes on the way, the first one tried first."""

    part: Part
    sizes: tuple[int, ...]


def least_workspace(costs: CostTable, task: int) -> int:
    """Workspace of a task's baseline algorithm: 0 for a convolution that can be told to run as implicit GEMM."""
    return min(a.workspace_bytes for a in costs.algorithms[task])


def fastest_workspace(costs: CostTable, task: int) -> int:
    """Workspace of a task's fastest algorithm."""
    return costs.workspace_bytes(task, costs.performance_optimal(task))


def ideal_s(costs: CostTable) -> float:
    """The paper's ideal case (section V): every task at its fastest, memory enough for everything, nothing moved."""
    return sum(min(a.seconds for a in known) for known in costs.algorithms)


def demand(part: Part, workspace: Callable[[CostTable, int], int]) -> tuple[int, int]:
    """(task, bytes) of the greatest Mmin(t, b), with the given workspace of each task."""
    needs = [part.lives.demand_bytes(t, workspace(part.costs, t)) for t in range(len(part.lives.transient_bytes))]
    most = max(needs, default=0)
    return (needs.index(most) if needs else -1), most


def lower_bound(part: Part) -> Bound:
    """Eq. (2) for a part of the size given: the paper's bound where that size is 1."""
    task, most = demand(part, least_workspace)
    return Bound(part.lives.resident_bytes, task, most)


def least_by_class(at: Callable[[int], Part], most_parts: int) -> dict[str, int]:
    """The least memory that a step can be scheduled in: ``bitwise``, the whole batch; ``reassociated``, also in up to
    ``most_parts`` parts. ``at`` as for :func:`sub_batch`."""
    whole = lower_bound(at(1)).nbytes
    return {"bitwise": whole, "reassociated": min(whole, lower_bound(at(most_parts)).nbytes)}


def sub_batch(at: Callable[[int], Part], batch: int, memory_bytes: int) -> SubBatch:
    """Iterate eq. (3) from the whole batch until b converges; ``at(parts)`` is the step in so many parts.

    Where b comes back to a size that it had without staying there, the largest of that cycle that can be run is taken.
    A part can be run where its baseline algorithms fit (eq. (2) at its size); should the size found not, the next
    smaller one that does is taken, and where none does the whole batch. The memory must be at least
    :func:`least_by_class`'s: then size 1 or the whole batch can be run.
    """
    sizes: list[int] = []
    size = batch
    while size not in sizes and len(sizes) < MOST_ROUNDS:
        sizes.append(size)
        part = at(-(-batch // size))
        size = _settled(batch, next_size(part, batch, memory_bytes))
    cycle = sizes[sizes.index(size) :] if size in sizes else [size]
    smaller = sorted({*cycle, *range(1, min(cycle) + 1)}, reverse=True)
    for candidate in (*smaller, batch):
        if _settled(batch, candidate) != candidate:
            continue
        part = at(-(-batch // candidate))
        if lower_bound(part).nbytes <= memory_bytes:
            return SubBatch(part, (*sizes, candidate) if candidate != sizes[-1] else tuple(sizes))
    raise ValueError(f"memory_bytes must be at least eq. (2)'s bound, got {memory_bytes}; ask least_by_class first")


def next_size(part: Part, batch: int, memory_bytes: int) -> int:
    """One round of eq. (3): at least 1, at most the batch."""
    most = demand(part, fastest_workspace)[1]
    free = memory_bytes - part.lives.resident_bytes
    return batch if most == 0 else max(1, min(batch, part.size * free // most))


def _settled(batch: int, size: int) -> int:
    """The size of the largest of ``ceil(batch / size)`` equal parts."""
    return -(-batch // -(-batch // size))
