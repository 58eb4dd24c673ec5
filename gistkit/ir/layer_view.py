"""Layers: the tasks of a step grouped as cuDNN-era frameworks see a network. Pure data.

A *layer* is one forward call that computes something, with its backward tasks: CONV, ACTV, POOL, FC and so on, its
input feature maps X, output feature maps Y and weights (vDNN, section II-A). Views make no layer. The *feature
extraction* layers are those before the first FC: no FC and nothing behind one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.tasks import FORWARD, Task

CONV, ACTV, POOL, FC, BN, LRN = "CONV", "ACTV", "POOL", "FC", "BN", "LRN"
CONCAT, ADD, DROPOUT, LOSS, OTHER = "CONCAT", "ADD", "DROPOUT", "LOSS", "OTHER"
_KINDS = {
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
_KIND_OF = {op: kind for kind, ops in _KINDS.items() for op in ops}
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
    backward = defaultdict(list)
    readers = defaultdict(set)
    for task in graph.tasks:
        if task.phase != FORWARD:
            backward[task.call].append(task.index)
        else:
            for block in task.reads:
                readers[block].add(task.index)
    made: list[Layer] = []
    behind_fc: set[int] = set()
    for task in graph.tasks:
        if task.phase == FORWARD and any(graph.blocks[b].kind in _MAPS for b in task.writes):
            own = tuple(backward.pop(task.call, ())) if task.call >= 0 else ()
            made.append(_layer(len(made), task, own, readers, behind_fc, graph))
            if not made[-1].features:
                behind_fc.update(made[-1].y, made[-1].own)
    return tuple(made)


def _layer(
    index: int, task: Task, backward: tuple[int, ...], readers: dict, behind_fc: set[int], graph: SavedGraph
) -> Layer:
    kind = _KIND_OF.get(task.op, OTHER)
    x = tuple(b for b in task.reads if graph.blocks[b].kind in _MAPS)
    written = tuple(b for b in task.writes if graph.blocks[b].kind in _MAPS)
    outlives = {b for b in written if graph.blocks[b].last >= len(graph.tasks)}
    y = tuple(b for b in written if b in x or b in outlives or max(readers[b], default=-1) > task.index) or written[:1]
    return Layer(
        index,
        kind,
        task.op,
        task.module,
        task.call,
        task.index,
        backward,
        x,
        y,
        tuple(b for b in written if b not in y),
        tuple(b for b in task.reads if graph.blocks[b].kind == "weight"),
        kind not in (FC, LOSS) and not behind_fc & set(x),
    )
