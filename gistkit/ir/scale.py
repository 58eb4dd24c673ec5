"""One sub-batch of a captured step, without another capture: everything that grows with the batch shrinks.

moDNN section IV-A: a minibatch taken in sub-batches whose gradients are accumulated. Activations, gradient maps, work
and traffic shrink; parameters, their gradients and the input batch, which the caller holds whole, stay.

What a step of n rows has of anything is a + b * n: two captured steps, the batch's and the one of the fewest rows that
goes the same way (``SavedGraph.small``), tell a and b of every block, storage and task. Shapes alone do not: 16
channels of a weight that is made in the step look like 16 rows. Where the graph holds no small step they have to do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value
from gistkit.ir.tasks import Block, Task

_SCALAR_BYTES = 8
"""A single number at most, such as the loss and its gradient: no rows."""
_STAYS = ("weight", "buffer", "weight_gradient", "input")
Shape = tuple[int, ...]
Seen = TypeVar("Seen", Value, Save)


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
        small = _ByShape(graph).without_rows()
    return _Between(graph, small).graph(-(-graph.batch // parts))


def goes_as(small: SavedGraph, graph: SavedGraph) -> bool:
    """Whether a step of fewer rows is the same but for sizes: its calls, tasks, values and blocks with their lives."""
    return small.fingerprint == graph.fingerprint and _frame(small) == _frame(graph)


def _frame(graph: SavedGraph) -> list:
    """A step without its sizes."""
    return [
        [(c.op, c.reads, c.writes, c.operands, c.results) for c in graph.calls],
        [[(s.storage, s.node, s.field, s.value, len(s.shape)) for s in c.saves] for c in graph.calls],
        [(s.kind, s.dtype, s.producer, len(s.shape)) for s in graph.storages],
        [(v.storage, v.version, len(v.shape)) for v in graph.values],
        [(t.phase, t.op, t.call, t.part, t.reads, t.writes, t.conv is None) for t in graph.tasks],
        [(b.kind, b.storage, b.first, b.last, b.saved, b.uses, b.holder, b.read) for b in graph.blocks],
    ]


class _Between:
    """Steps between two that are the same but for the number of their rows."""

    def __init__(self, whole: SavedGraph, small: SavedGraph) -> None:
        self._whole, self._small = whole, small

    def graph(self, rows: int) -> SavedGraph:
        whole, small = self._whole, self._small
        self._less, self._rows = whole.batch - rows, whole.batch - small.batch
        return replace(
            whole,
            calls=tuple(map(self._call, whole.calls, small.calls)),
            storages=tuple(map(self._storage, whole.storages, small.storages)),
            values=tuple(map(self._seen, whole.values, small.values)),
            tasks=tuple(map(self._task, whole.tasks, small.tasks)),
            blocks=tuple(map(self._block, whole.blocks, small.blocks)),
            batch=rows,
        )

    def _part(self, whole: int, small: int) -> int:
        return whole - (whole - small) * self._less // self._rows

    def _shape(self, whole: Shape, small: Shape) -> Shape:
        return tuple(map(self._part, whole, small))

    def _storage(self, whole: SavedStorage, small: SavedStorage) -> SavedStorage:
        if whole.kind != "activation":
            return whole
        return replace(
            whole, shape=self._shape(whole.shape, small.shape), nbytes=self._part(whole.nbytes, small.nbytes)
        )

    def _seen(self, whole: Seen, small: Seen) -> Seen:
        return replace(whole, shape=self._shape(whole.shape, small.shape))

    def _call(self, whole: Call, small: Call) -> Call:
        return replace(whole, saves=tuple(map(self._seen, whole.saves, small.saves))) if whole.saves else whole

    def _block(self, whole: Block, small: Block) -> Block:
        return whole if whole.kind in _STAYS else replace(whole, nbytes=self._part(whole.nbytes, small.nbytes))

    def _task(self, whole: Task, small: Task) -> Task:
        amounts = ("flops", "moved_bytes", "transient_bytes", "plain_bytes")
        found = {name: self._part(getattr(whole, name), getattr(small, name)) for name in amounts}
        conv = whole.conv
        if conv is not None and small.conv is not None:
            conv = replace(conv, n=self._part(conv.n, small.conv.n))
        return replace(whole, **found, conv=conv)


class _ByShape:
    """What shapes tell of a step of no rows at all."""

    def __init__(self, graph: SavedGraph) -> None:
        self._graph, self._batch = graph, graph.batch
        self._shrinks = {s.id for s in graph.storages if s.kind == "activation" and self._shape(s.shape) != s.shape}
        self._copied = {b for t in graph.tasks if t.op == "accumulate" for b in self._copied_by(t)}
        # of weights that are made in the step
        self._copied |= {b for t in graph.tasks if t.part == "weight" for b in t.writes}

    def _copied_by(self, task: Task) -> list[int]:
        """What a parameter's gradient is a copy of, in the parameter's layout."""
        blocks = self._graph.blocks
        sizes = {blocks[b].nbytes for b in task.writes if blocks[b].kind == "weight_gradient"}
        return [b for b in task.reads if blocks[b].kind == "gradient" and blocks[b].nbytes in sizes]

    def without_rows(self) -> SavedGraph:
        graph = self._graph
        return replace(
            graph,
            calls=tuple(replace(c, saves=tuple(map(self._seen, c.saves))) if c.saves else c for c in graph.calls),
            storages=tuple(map(self._storage, graph.storages)),
            values=tuple(map(self._seen, graph.values)),
            tasks=tuple(map(self._task, graph.tasks)),
            blocks=tuple(map(self._block, graph.blocks)),
            batch=0,
        )

    def _shape(self, shape: Shape) -> Shape:
        """A shape with no rows in it: in the first of its two outer dimensions that is a multiple of the batch.

        A vector is no such tensor unless it has a length of just the batch: statistics have one of the channels.
        """
        for axis in range(min(2, len(shape))):
            if shape[axis] % self._batch == 0 and shape[axis] and (len(shape) > 1 or shape[axis] == self._batch):
                return (*shape[:axis], 0, *shape[axis + 1 :])
        return shape

    def _seen(self, item: Seen) -> Seen:
        return replace(item, shape=self._shape(item.shape)) if item.storage in self._shrinks else item

    def _storage(self, item: SavedStorage) -> SavedStorage:
        return replace(item, shape=self._shape(item.shape), nbytes=0) if item.id in self._shrinks else item

    def _block(self, block: Block) -> Block:
        if block.kind in _STAYS or (block.storage >= 0 and block.storage not in self._shrinks):
            return block
        if block.nbytes <= _SCALAR_BYTES or block.id in self._copied:
            return block
        return replace(block, nbytes=0)

    def _task(self, task: Task) -> Task:
        """No work; the traffic of parameters and their gradients."""
        blocks = self._graph.blocks
        fixed = sum(blocks[b].nbytes for b in {*task.reads, *task.writes} if blocks[b].kind in _STAYS[:3])
        conv = None if task.conv is None else replace(task.conv, n=0)
        moved_bytes = min(fixed, task.moved_bytes)
        return replace(task, flops=0, moved_bytes=moved_bytes, transient_bytes=0, plain_bytes=0, conv=conv)
