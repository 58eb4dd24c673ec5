"""One sub-batch of a step: its costs, from those of the whole batch, what the sum over sub-batches holds, and whether
batch norms would see other statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gistkit.ir import BACKWARD, SavedGraph
from gistkit.planning.cost import Algorithm, CostTable, cost_table

LOSS_BYTES = 16
"""The sum of the sub-batches' losses, and a sub-batch's weighted share of it."""


def check_per_sub_batch_norm(caller: str, accepted: object) -> None:
    """Raise TypeError, in the name of ``caller``, for anything but True and False."""
    if not isinstance(accepted, bool):
        raise TypeError(
            f"{caller}: per_sub_batch_norm must be True or False, got {accepted!r}; False refuses batch norms that "
            "would see other statistics"
        )


def trains_batch_norm(graph: SavedGraph) -> bool:
    """Whether the statistics of a batch norm in training mode depend on which rows are taken together."""
    norms = (c for c in graph.calls if c.op == "batch_norm")
    backward = any(t.phase == BACKWARD and "BatchNorm" in t.op for t in graph.tasks)
    return backward or any((c.options or {}).get("training", True) for c in norms)


def passing(graph: SavedGraph) -> Iterator[tuple[int, int, int]]:
    """(first task, last task, bytes) of what is there in passing because gradients are summed over sub-batches: each
    new weight gradient beside its sum, until its node has ended; the losses."""
    tasks = graph.tasks
    yield 0, len(tasks) - 1, LOSS_BYTES
    for block in graph.blocks:
        if block.kind == "weight_gradient" and block.first >= 0 and tasks[block.first].op != "accumulate":
            last, after = block.first, block.first + 1
            if tasks[last].part == "weight" and after < len(tasks) and tasks[after].call == tasks[last].call:
                last += tasks[after].part == "input"
            yield block.first, last, block.nbytes


def scaled_costs(costs: CostTable, graph: SavedGraph, part: SavedGraph) -> CostTable:
    """The costs of ``part``, one of a graph's sub-batches (:func:`gistkit.ir.scaled`). A task's seconds keep their
    ratio to what the roofline says of it, so measured seconds carry over."""
    whole, small = (cost_table(g, costs.hardware, density=dict(costs.densities)) for g in (graph, part))
    tables = zip(costs.algorithms, whole.algorithms, small.algorithms, strict=True)
    return replace(costs, algorithms=tuple(_scaled(*table) for table in tables))


def _scaled(
    given: tuple[Algorithm, ...], whole: tuple[Algorithm, ...], small: tuple[Algorithm, ...]
) -> tuple[Algorithm, ...]:
    roofline = {a.name: a.seconds for a in whole}
    known = {a.name: a for a in small}
    out = []
    for algorithm in given:
        like, base = known.get(algorithm.name, small[0]), roofline.get(algorithm.name, whole[0].seconds)
        ratio = algorithm.seconds / base if base else 1.0
        out.append(Algorithm(algorithm.name, like.seconds * ratio, like.workspace_bytes))
    return tuple(out)
