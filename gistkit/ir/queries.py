"""What planning asks a SavedGraph: what a storage holds when backward comes, who made that, and who reads it; and the
tasks of a step grouped as cuDNN-era frameworks see a network.

A *layer* is one forward call that computes something, with its backward tasks: CONV, ACTV, POOL, FC and so on, its
input feature maps X, output feature maps Y and weights (vDNN, section II-A). Views make no layer. The *feature
extraction* layers are those before the first FC: no FC and nothing behind one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gistkit.formats import item_bytes
from gistkit.ir.saved_graph import Call, Save, SavedGraph, SavedStorage, Value
from gistkit.ir.tasks import FORWARD, by_key


def numel(storage: SavedStorage) -> int:
    """Elements of the dtype that the storage was first seen with."""
    return storage.nbytes // item_bytes(storage.dtype)


def written_late(graph: SavedGraph) -> set[int]:
    """Storages that PyTorch fills in after it has shown them to saved-tensor hooks: they are kept as they are."""
    late = ("RreluWithNoiseBackward0", "noise")
    return {s.storage for c in graph.calls for s in c.saves if (s.node, s.field) == late}


@dataclass(frozen=True)
class Uses:
    """What backward reads of one kept storage. ``value`` is what it finds there, None where the storage is saved in
    parts or at several versions. ``relu`` is the covered ReLU whose output that is: it reads the signs only.
    ``readers`` are the (call, save) pairs of the others, whose backward reads the values."""

    value: Value | None
    relu: Call | None
    readers: tuple[tuple[Call, Save], ...]


class Reading:
    """Answers of one graph, remembered by storage."""

    def __init__(self, graph: SavedGraph) -> None:
        self.graph = graph
        self._makers: dict[tuple[int, int], tuple[Call, Value]] = {}
        self._uses: dict[int, Uses] = {}
        for call in graph.calls:
            for value in (graph.values[i] for i in call.results):
                if value.storage in call.writes:
                    self._makers.setdefault((value.storage, value.version), (call, value))

    def uses(self, storage: int) -> Uses:
        """What backward reads of a storage; remembered."""
        if storage not in self._uses:
            value = self.saved(storage)
            made = None if value is None else self.made((value.storage, value.version))
            # the covered ReLU whose output the value holds, as it is or through a view of all of it
            relu = made[0] if made and made[1].whole and made[0].op == "relu" and made[0].covered >= 0 else None
            own = -1 if relu is None else relu.index
            readers = tuple((c, s) for c, s in self.graph.savers(storage) if s.read and c.index != own)
            self._uses[storage] = Uses(value, relu, readers)
        return self._uses[storage]

    def saved(self, storage: int) -> Value | None:
        """What backward will find in the storage, seen as a whole; None where that is not one value."""
        values = [self.graph.values[s.value] for _, s in self.graph.savers(storage) if s.value >= 0]
        if len({v.version for v in values}) != 1:
            return None
        return next((v for v in values if v.whole), None)

    def made(self, key: tuple[int, int]) -> tuple[Call, Value] | None:
        """The call that wrote a (storage, version) and the value it returned; None for inputs and op internals."""
        return self._makers.get(key)

    def maker(self, value: Value) -> Call | None:
        """The call that made exactly this value; None where the value is a view of what was made."""
        made = self.made((value.storage, value.version))
        return made[0] if made is not None and made[1].id == value.id else None

    def readers_after(self, call: Call, storage: int) -> list[Call]:
        return [c for c in self.graph.readers(storage) if c.index > call.index]

    def operand(self, call: Call, position: int = 0) -> Value:
        return self.graph.values[call.operands[position]]


CONV, ACTV, POOL, FC, BN, LRN = "CONV", "ACTV", "POOL", "FC", "BN", "LRN"
CONCAT, ADD, DROPOUT, LOSS, OTHER = "CONCAT", "ADD", "DROPOUT", "LOSS", "OTHER"
KINDS = {
    CONV: ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    ACTV: ("relu", "relu6", "leaky_relu", "prelu", "elu", "sigmoid", "tanh", "gelu", "silu", "threshold", "hardtanh"),
    POOL: ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool1d", "avg_pool1d"),
    FC: ("linear",),
    BN: ("batch_norm", "layer_norm", "group_norm", "instance_norm"),
    LRN: ("local_response_norm",),
    CONCAT: ("cat", "concat"),
    ADD: ("add",),
    DROPOUT: ("dropout", "dropout2d", "feature_dropout"),
    LOSS: ("loss", "cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
}
_KIND_OF = {op: kind for kind, ops in KINDS.items() for op in ops}
_MAPS = ("activation", "input")


@dataclass(frozen=True)
class Layer:
    """One layer: its forward task, its backward tasks in order, and its blocks by id. ``x`` are the feature maps that
    its forward reads, ``y`` those that it writes and hands on (an in-place layer's are the same), ``own`` what it makes
    for its own backward alone (a pool's map, a dropout's mask, statistics), ``weights`` its parameters. ``features``
    tells whether it belongs to the feature extraction part."""

    index: int
    kind: str
    op: str
    module: str
    call: int
    forward: int
    backward: tuple[int, ...]
    x: tuple[int, ...]
    y: tuple[int, ...]
    own: tuple[int, ...]
    weights: tuple[int, ...]
    features: bool

    @property
    def tasks(self) -> tuple[int, ...]:
        return (self.forward, *self.backward)


def layers(graph: SavedGraph) -> tuple[Layer, ...]:
    """The layers of a step in forward order; ``layers(graph)[i].index == i``. Needs a graph with tasks and blocks."""
    backward = by_key((t.call, t.index) for t in graph.tasks if t.phase != FORWARD)
    readers = by_key((b, t.index) for t in graph.tasks if t.phase == FORWARD for b in t.reads)
    made: list[Layer] = []
    behind_fc: set[int] = set()
    for task in graph.tasks:
        written = tuple(b for b in task.writes if graph.blocks[b].kind in _MAPS)
        if task.phase != FORWARD or not written:
            continue
        kind = _KIND_OF.get(task.op, OTHER)
        x = tuple(b for b in task.reads if graph.blocks[b].kind in _MAPS)
        outlives = {b for b in written if graph.blocks[b].last >= len(graph.tasks)}
        late = {b for b in written if max(readers[b], default=-1) > task.index}
        y = tuple(b for b in written if b in outlives or b in late or b in x) or written[:1]
        own = tuple(b for b in written if b not in y)
        weights = tuple(b for b in task.reads if graph.blocks[b].kind == "weight")
        features = kind not in (FC, LOSS) and behind_fc.isdisjoint(x)
        if not features:
            behind_fc.update(y, own)
        after = tuple(backward.pop(task.call, ())) if task.call >= 0 else ()
        of_task = task.op, task.module, task.call, task.index, after
        made.append(Layer(len(made), kind, *of_task, x, y, own, weights, features))
    return tuple(made)
