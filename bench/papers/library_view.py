"""library_view: a captured step as the frameworks of the papers ran it (Caffe, Torch, CNTK on cuDNN). Pure data.

The papers' tables compare with baselines of their time, which kept other things than PyTorch does:

| layer | backward reads there | PyTorch |
|---|---|---|
| max- and average-pool | X and Y | an int64 index, X's shape |
| ReLU, sigmoid, tanh | Y; Y overwrites X, dX overwrites dY (vDNN, footnote 1) | Y |
| dropout | a mask of one byte an element | a float or bool mask |
| local response norm | X and Y, in one kernel each way | what its parts keep |
| CONV, FC | X until both gradients are done: a layer at a time (vDNN, Fig. 8) | X until the weight gradient |

The first layer's X is the framework's own and may go after its last use; in PyTorch the caller holds the batch. That X
stays through both halves of a CONV's backward is not a use of its own (nothing is decoded twice): simulations of a
graph with ``source == "library"`` know it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from gistkit.ir.queries import ACTV, DROPOUT, LRN, Layer, layers
from gistkit.ir.saved_graph import LIBRARY, SavedGraph
from gistkit.ir.tasks import FORWARD, Block, Task, Use

_POOLS = ("max_pool2d", "avg_pool2d")
_ON_OUTPUT = ("relu", "sigmoid", "tanh")


FORWARD_ALONE = "forward"
"""In place in forward alone: Y overwrites X, dX does not overwrite dY."""


def library_view(graph: SavedGraph, *, inplace: bool | str = True, maps: bool = False) -> SavedGraph:
    """The same step with the blocks, lives and uses of the table above; calls, storages and values stay.

    ``inplace`` False leaves activations out of place where the model has them so (Gist's baseline before its own
    in-place step), FORWARD_ALONE is that step as Gist's section III-C has it. ``maps`` True leaves max-pool its
    position map and X and Y unread, as Gist's Binarize makes it: the view for Gist's own plans. Raises ValueError for a
    graph without tasks.
    """
    if not graph.tasks:
        raise ValueError("graph must hold the tasks of a whole step, got none: capture it with backward=True")
    view = _View(graph)
    for layer in layers(graph):
        view.rewrite(layer, inplace, maps)
    for block in graph.blocks:
        view.settle(block.id)
    return view.finish()


class _View:
    """Blocks and tasks under revision; ``gone`` maps a removed block to the one that took it over, or None."""

    def __init__(self, graph: SavedGraph) -> None:
        self.graph = graph
        self.blocks = list(graph.blocks)
        self.tasks = list(graph.tasks)
        self.gone: dict[int, int | None] = {}
        self.readers: dict[int, list[int]] = defaultdict(list)
        for task in graph.tasks:
            for block in task.reads:
                self.readers[block].append(task.index)

    def rewrite(self, layer: Layer, inplace: bool | str, maps: bool) -> None:
        if layer.kind == ACTV and layer.op in _ON_OUTPUT and inplace:
            self._in_place(layer, layer.backward if inplace is True else ())
        elif layer.op in _POOLS and layer.backward and not (maps and layer.op == "max_pool2d"):
            self._reads_x_and_y(layer)
        elif layer.kind == LRN and layer.backward:
            self._reads_x_and_y(layer)
        elif layer.kind == DROPOUT:
            self._byte_masks(layer)

    def _in_place(self, layer: Layer, backward: Sequence[int]) -> None:
        x, y = (self._now(b) for b in (layer.x[0], layer.y[0]))
        a = self.blocks[x]
        if x != y and a.kind == "activation" and a.last == layer.forward and not a.uses and self._fit(x, y):
            b = self.blocks[y]
            self.blocks[x] = replace(b, id=x, first=a.first)
            self.gone[y] = x
        for task in backward:
            reads, writes = (self._gradients(ids) for ids in (self.tasks[task].reads, self.tasks[task].writes))
            if len(reads) == len(writes) == 1:
                dy, dx = reads[0], writes[0]
                fresh = self.blocks[dx].first == task and self.blocks[dy].last == task
                if dy != dx and fresh and self._fit(dy, dx):
                    self.blocks[dy] = replace(self.blocks[dy], last=self.blocks[dx].last)
                    self.gone[dx] = dy

    def _reads_x_and_y(self, layer: Layer) -> None:
        """One kernel each way: backward reads X, Y, dY and writes dX; what the parts kept and made is gone."""
        end = layer.backward[-1]
        inside = self._inside(layer)
        for block in layer.own:
            self.gone[block] = None
        dys: dict[int, None] = {}
        dxs: dict[int, None] = {}
        for task in sorted(inside):
            dys.update(
                dict.fromkeys(b for b in self._gradients(self.tasks[task].reads) if self.blocks[b].first not in inside)
            )
            for b in self._gradients(self.tasks[task].writes):
                if self.blocks[b].first in inside and self.blocks[b].last <= end and not self._read_after(b, end):
                    self.gone[b] = None
                else:
                    dxs[b] = None
            self._empty(task)
        for b in dys:
            self.blocks[b] = replace(self.blocks[b], last=max(self.blocks[b].last, end))
        maps = [self._now(b) for b in (*layer.x, *layer.y)]
        for b in maps:
            kept = tuple(u for u in self.blocks[b].uses if u.task not in inside)
            self.blocks[b] = replace(self.blocks[b], uses=kept)
            self._use(b, end)
        self._one_kernel(layer.forward, layer.x, layer.y)
        self._one_kernel(end, (*maps, *dys), tuple(dxs))

    def _inside(self, layer: Layer) -> set[int]:
        """A layer's backward tasks and, between them, the sums of gradients that they made."""
        inside = set(layer.backward)
        for task in self.tasks[layer.backward[0] : layer.backward[-1]]:
            made = [self.graph.blocks[b].first in inside for b in task.reads]
            if task.call < 0 and made and all(made):
                inside.add(task.index)
        return inside

    def _byte_masks(self, layer: Layer) -> None:
        for b in layer.own:
            block = self.blocks[b]
            n = self._elements(layer)
            if block.uses and n <= block.nbytes:
                self.blocks[b] = replace(block, nbytes=n, dtype="bool")

    def _elements(self, layer: Layer) -> int:
        call = self.graph.calls[layer.call]
        total = 1
        for size in self.graph.values[call.results[0]].shape:
            total *= size
        return total

    def _one_kernel(self, task: int, reads: tuple[int, ...], writes: tuple[int, ...]) -> None:
        moved = sum(self.blocks[self._now(b)].nbytes for b in (*reads, *writes))
        self.tasks[task] = replace(
            self.tasks[task], reads=reads, writes=writes, moved_bytes=moved, flops=0, transient_bytes=0
        )

    def _empty(self, task: int) -> None:
        self.tasks[task] = replace(self.tasks[task], reads=(), writes=(), flops=0, moved_bytes=0, transient_bytes=0)

    def _use(self, block: int, task: int) -> None:
        b = self._now(block)
        old = self.blocks[b]
        if task not in {u.task for u in old.uses}:
            uses = tuple(sorted((*old.uses, Use(task)), key=lambda u: u.task))
            saved = old.saved if old.saved >= 0 else max(0, old.first)
            self.blocks[b] = replace(old, uses=uses, saved=saved)

    def settle(self, b: int) -> None:
        """The batch goes after its last forward reader; nothing is held that backward does not read."""
        block = self.blocks[b]
        if block.kind == "input":
            forward = [t for t in self.readers[b] if self.tasks[t].phase == FORWARD]
            block = replace(block, last=max(forward, default=block.first))
        held = block.uses[-1].task if block.uses else -1
        self.blocks[b] = replace(block, holder=held, saved=block.saved if block.uses else -1)

    def finish(self) -> SavedGraph:
        kept = [b for b in self.blocks if b.id not in self.gone]
        number: dict[int, int] = {b.id: i for i, b in enumerate(kept)}

        def ids(blocks: tuple[int, ...]) -> tuple[int, ...]:
            now = (self._there(b) for b in blocks)
            return tuple(dict.fromkeys(number[b] for b in now if b is not None))

        blocks: tuple[Block, ...] = tuple(replace(b, id=number[b.id]) for b in kept)
        tasks: tuple[Task, ...] = tuple(replace(t, reads=ids(t.reads), writes=ids(t.writes)) for t in self.tasks)
        return replace(self.graph, source=LIBRARY, blocks=blocks, tasks=tasks, small=None)

    def _there(self, block: int) -> int | None:
        """The block that holds what this one held, None where it is gone."""
        now: int | None = block
        while now is not None and now in self.gone:
            now = self.gone[now]
        return now

    def _now(self, block: int) -> int:
        now = self._there(block)
        return block if now is None else now

    def _gradients(self, blocks: tuple[int, ...]) -> list[int]:
        now = (self._there(b) for b in blocks)
        return [b for b in now if b is not None and self.blocks[b].kind == "gradient"]

    def _read_after(self, block: int, task: int) -> bool:
        return any(t > task for t in self.readers[block])

    def _fit(self, a: int, b: int) -> bool:
        return self.blocks[a].nbytes == self.blocks[b].nbytes
