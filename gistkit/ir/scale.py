"""One sub-batch of a captured step, without another capture: everything that grows with the batch shrinks.

moDNN section IV-A: a minibatch taken in sub-batches whose gradients are accumulated. Activations, gradient maps, work
and traffic shrink; parameters, their gradients and the input batch, which the caller holds whole, stay.

What a step of n rows has of anything is a + b * n: two captured steps, the batch's and the one of the fewest rows that
goes the same way (``SavedGraph.small``), give a and b of every block, storage and task.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value
from gistkit.ir.tasks import Block, ConvShape, Task

_STAYS = ("weight", "buffer", "weight_gradient", "input")
_SIZES = {
    SavedGraph: ("calls", "storages", "values", "tasks", "blocks"),
    Call: ("saves",),
    Save: ("shape",),
    Value: ("shape",),
    SavedStorage: ("shape", "nbytes"),
    Task: ("flops", "moved_bytes", "transient_bytes", "plain_bytes", "conv"),
    ConvShape: ("n",),
    Block: ("nbytes",),
}
"""The fields of each kind that change with the number of rows."""


def scaled(graph: SavedGraph, parts: int) -> SavedGraph:
    """The step of the largest of ``parts`` sub-batches: ``ceil(batch / parts)`` of ``batch`` rows, sizes rounded up.

    Sizes lie on the line through those of the graph and of its ``small``. Raises ValueError unless 1 <= parts <= batch,
    and where ``small`` has more rows or is not there.
    """
    if type(parts) is not int or not 1 <= parts <= max(graph.batch, 1):
        raise ValueError(
            f"parts must be an int from 1 to the batch size {graph.batch}, got {parts!r}; "
            "take fewer sub-batches, or capture with a batch"
        )
    if parts == 1:
        return graph
    small, rows = graph.small, -(-graph.batch // parts)
    if small is None or rows < small.batch:
        known = "none" if small is None else f"one of {small.batch} rows"
        raise ValueError(f"graph must hold a step of at most {rows} rows for {parts} parts, got {known}; capture one")
    return replace(_between(graph, small, graph.batch - rows, graph.batch - small.batch), batch=rows)


def goes_as(small: SavedGraph, graph: SavedGraph) -> bool:
    """Whether a step of fewer rows is the same but for sizes: its calls, tasks, values and blocks with their lives."""
    return small.fingerprint == graph.fingerprint and _frame(small) == _frame(graph)


def _frame(graph: SavedGraph) -> list:
    return [
        [(c.op, c.reads, c.writes, c.operands, c.results) for c in graph.calls],
        [[(s.storage, s.node, s.field, s.value, len(s.shape)) for s in c.saves] for c in graph.calls],
        [(s.kind, s.dtype, s.producer, len(s.shape)) for s in graph.storages],
        [(v.storage, v.version, len(v.shape)) for v in graph.values],
        [(t.phase, t.op, t.call, t.part, t.reads, t.writes, t.conv is None) for t in graph.tasks],
        [(b.kind, b.storage, b.first, b.last, b.saved, b.uses, b.holder, b.read) for b in graph.blocks],
    ]


def _between(whole: Any, small: Any, less: int, rows: int) -> Any:
    """A size, or anything with sizes, ``less`` rows below ``whole``, which has ``rows`` more than ``small``."""
    if isinstance(whole, int):
        return whole - (whole - small) * less // rows
    if isinstance(whole, tuple):
        return tuple(_between(w, s, less, rows) for w, s in zip(whole, small, strict=True))
    fixed = isinstance(whole, SavedStorage) and whole.kind != "activation"
    if whole is None or fixed or (isinstance(whole, Block) and whole.kind in _STAYS):
        return whole
    sizes = {name: (getattr(whole, name), getattr(small, name)) for name in _SIZES[type(whole)]}
    return replace(whole, **{name: _between(*two, less, rows) for name, two in sizes.items() if two[0] != two[1]})
