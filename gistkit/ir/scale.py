"""One sub-batch of a captured step, without another capture: everything that grows with the batch shrinks.

moDNN section IV-A: a minibatch taken in sub-batches whose gradients are accumulated. Activations, gradient maps, work
and traffic shrink; parameters, their gradients and the input batch, which the caller holds whole, stay.

What a step of n rows has of anything is a + b * n: two captured steps, the batch's and the one of the fewest rows that
goes the same way (``SavedGraph.small``), give a and b of every block, storage and task. Where the graph holds no small
step, a step of no rows at all is made up from the shapes; 16 channels of a weight made in the step then look like rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value
from gistkit.ir.tasks import Block, ConvShape, Task

_SCALAR_BYTES = 8
"""A single number at most, such as the loss and its gradient: no rows."""
_STAYS = ("weight", "buffer", "weight_gradient", "input")
_AMOUNTS = ("flops", "moved_bytes", "transient_bytes", "plain_bytes")
_SIZES = {
    SavedGraph: ("calls", "storages", "values", "tasks", "blocks"),
    Call: ("saves",),
    Save: ("shape",),
    Value: ("shape",),
    SavedStorage: ("shape", "nbytes"),
    Task: (*_AMOUNTS, "conv"),
    ConvShape: ("n",),
    Block: ("nbytes",),
}
"""The fields of each kind that change with the number of rows."""


def scaled(graph: SavedGraph, parts: int) -> SavedGraph:
    """The step of the largest of ``parts`` sub-batches: ``ceil(batch / parts)`` of ``batch`` rows, sizes rounded up.

    Sizes lie on the line through those of the graph and of its ``small``. Without that, a tensor counts as made of rows
    where its first or second dimension is a multiple of the batch; a gradient map, of which no shape is known, always;
    a weight gradient, also one of which the parameter gets a copy, never. Raises ValueError unless 1 <= parts <= batch.
    """
    if type(parts) is not int or not 1 <= parts <= max(graph.batch, 1):
        raise ValueError(
            f"parts must be an int from 1 to the batch size {graph.batch}, got {parts!r}; "
            "take fewer sub-batches, or capture with a batch"
        )
    if parts == 1:
        return graph
    small = graph.small
    if small is None or small.batch >= graph.batch:
        small = _without_rows(graph)
    rows = -(-graph.batch // parts)
    part = _between(graph, small, graph.batch - rows, graph.batch - small.batch)
    return replace(part, batch=rows, blocks=tuple(map(_released, part.blocks)))


def _released(block: Block) -> Block:
    """As in a step in parts, which lets go of each part's output before the part's backward."""
    return replace(block, last=block.released) if block.released >= 0 else block


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


def _without_rows(graph: SavedGraph) -> SavedGraph:
    """What shapes say of a step of no rows at all."""
    shapes = {s.id: _no_rows(s.shape, graph.batch) for s in graph.storages if s.kind == "activation"}
    shrinks = {s for s, shape in shapes.items() if shape != graph.storages[s].shape}
    copied = {b for t in graph.tasks if t.op == "accumulate" for b in _copied_by(t, graph)}
    copied |= {b for t in graph.tasks if t.part == "weight" for b in t.writes}  # of weights made in the step

    def seen(item: Any) -> Any:
        return replace(item, shape=_no_rows(item.shape, graph.batch)) if item.storage in shrinks else item

    def grows(block: Block) -> bool:
        made_of_rows = block.storage < 0 or block.storage in shrinks
        return made_of_rows and block.kind not in _STAYS and block.nbytes > _SCALAR_BYTES and block.id not in copied

    def task(t: Task) -> Task:
        """No work; the traffic of parameters and their gradients."""
        fixed = sum(graph.blocks[b].nbytes for b in {*t.reads, *t.writes} if graph.blocks[b].kind in _STAYS[:3])
        conv = t.conv and replace(t.conv, n=0)
        return replace(t, **dict.fromkeys(_AMOUNTS, 0) | {"moved_bytes": min(fixed, t.moved_bytes)}, conv=conv)

    return replace(
        graph,
        calls=tuple(replace(c, saves=tuple(map(seen, c.saves))) if c.saves else c for c in graph.calls),
        storages=tuple(replace(s, shape=shapes[s.id], nbytes=0) if s.id in shrinks else s for s in graph.storages),
        values=tuple(map(seen, graph.values)),
        tasks=tuple(map(task, graph.tasks)),
        blocks=tuple(replace(b, nbytes=0) if grows(b) else b for b in graph.blocks),
        batch=0,
    )


def _no_rows(shape: tuple[int, ...], batch: int) -> tuple[int, ...]:
    """A shape with no rows in it: in the first of its two outer dimensions that is a multiple of the batch; of a vector
    in a length of just the batch, as statistics have one of the channels."""
    for axis in range(min(2, len(shape))):
        if shape[axis] % batch == 0 and shape[axis] and (len(shape) > 1 or shape[axis] == batch):
            return (*shape[:axis], 0, *shape[axis + 1 :])
    return shape


def _copied_by(task: Task, graph: SavedGraph) -> list[int]:
    """What a parameter's gradient is a copy of, in the parameter's layout."""
    sizes = {graph.blocks[b].nbytes for b in task.writes if graph.blocks[b].kind == "weight_gradient"}
    return [b for b in task.reads if graph.blocks[b].kind == "gradient" and graph.blocks[b].nbytes in sizes]
