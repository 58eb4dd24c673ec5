"""One sub-batch of a captured step, without a second capture: everything that grows with the batch shrinks.

moDNN section IV-A: a minibatch taken in sub-batches whose gradients are accumulated. Activations, gradient maps, work
and traffic shrink; parameters, their gradients and the input batch, which the caller holds whole, stay.
"""

from __future__ import annotations

from dataclasses import replace

from gistkit.graph.saved import Call, Save, SavedGraph, Value
from gistkit.graph.tasks import Block, Task

_SCALAR_BYTES = 8
"""A single number at most, such as the loss and its gradient: no rows."""
_STAYS = ("weight", "buffer", "weight_gradient", "input")


def scaled(graph: SavedGraph, parts: int) -> SavedGraph:
    """The step of the largest of ``parts`` sub-batches: ``ceil(batch / parts)`` of ``batch`` rows, sizes rounded up.

    A tensor counts as made of rows where its first or second dimension is a multiple of the batch; a gradient map, of
    which no shape is known, always; a weight gradient, also one of which the parameter gets a copy, never. Raises
    ValueError unless 1 <= parts <= batch.
    """
    if type(parts) is not int or not 1 <= parts <= max(graph.batch, 1):
        raise ValueError(
            f"parts must be an int from 1 to the batch size {graph.batch}, got {parts!r}; "
            "take fewer sub-batches, or capture with a batch"
        )
    return graph if parts == 1 else _Scaling(graph, -(-graph.batch // parts)).graph()


class _Scaling:
    def __init__(self, graph: SavedGraph, rows: int) -> None:
        self._graph, self._rows, self._batch = graph, rows, graph.batch
        self._shrinks = {
            s.id for s in graph.storages if s.kind == "activation" and self._shape(s.shape, s.shape) != s.shape
        }
        self._copied = {b for t in graph.tasks if t.op == "accumulate" for b in self._copied_by(t)}
        # of weights that are made in the step
        self._copied |= {b for t in graph.tasks if t.part == "weight" for b in t.writes}

    def _copied_by(self, task: Task) -> list[int]:
        """What a parameter's gradient is a copy of, in the parameter's layout."""
        blocks = self._graph.blocks
        sizes = {blocks[b].nbytes for b in task.writes if blocks[b].kind == "weight_gradient"}
        return [b for b in task.reads if blocks[b].kind == "gradient" and blocks[b].nbytes in sizes]

    def graph(self) -> SavedGraph:
        graph = self._graph
        storages = tuple(
            replace(s, shape=self._shape(s.shape, s.shape), nbytes=self._part(s.nbytes)) if s.id in self._shrinks else s
            for s in graph.storages
        )
        blocks = tuple(self._block(b) for b in graph.blocks)
        return replace(
            graph,
            calls=tuple(self._call(c) for c in graph.calls),
            storages=storages,
            values=tuple(self._seen(v) for v in graph.values),
            tasks=tuple(self._task(t) for t in graph.tasks),
            blocks=blocks,
            batch=self._rows,
        )

    def _part(self, amount: int) -> int:
        return -(-amount * self._rows // self._batch)

    def _shape(self, shape: tuple[int, ...], of: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with its rows scaled: the first of its two outer dimensions that is a multiple of the batch.

        A vector is no such tensor unless it has a length of just the batch: statistics have one of the channels.
        """
        for axis in range(min(2, len(of))):
            if of[axis] % self._batch == 0 and of[axis] and (len(of) > 1 or of[axis] == self._batch):
                return (*shape[:axis], shape[axis] * self._rows // self._batch, *shape[axis + 1 :])
        return shape

    def _seen(self, item: Value) -> Value:
        return replace(item, shape=self._shape(item.shape, item.shape)) if item.storage in self._shrinks else item

    def _save(self, item: Save) -> Save:
        return replace(item, shape=self._shape(item.shape, item.shape)) if item.storage in self._shrinks else item

    def _call(self, call: Call) -> Call:
        return replace(call, saves=tuple(self._save(s) for s in call.saves)) if call.saves else call

    def _block(self, block: Block) -> Block:
        if block.kind in _STAYS or (block.storage >= 0 and block.storage not in self._shrinks):
            return block
        if block.nbytes <= _SCALAR_BYTES or block.id in self._copied:
            return block
        return replace(block, nbytes=self._part(block.nbytes))

    def _task(self, task: Task) -> Task:
        """Work in proportion; of the traffic that of parameters and their gradients stays."""
        blocks = self._graph.blocks
        fixed = sum(blocks[b].nbytes for b in {*task.reads, *task.writes} if blocks[b].kind in _STAYS[:3])
        fixed = min(fixed, task.moved_bytes)
        conv = None if task.conv is None else replace(task.conv, n=self._part(task.conv.n))
        return replace(
            task,
            flops=self._part(task.flops),
            moved_bytes=fixed + self._part(task.moved_bytes - fixed),
            transient_bytes=self._part(task.transient_bytes),
            plain_bytes=self._part(task.plain_bytes),
            conv=conv,
        )
