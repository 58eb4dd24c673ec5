"""The peak of a compiled step, predicted from its two graphs.

Counted are forward's inputs (parameters, buffers, the batch), what is kept between the graphs, gradients, and the
buffers that live at a time: what an operator reads from memory or writes there. A pointwise operator whose readers all
fuse has no buffer, one that reads a buffer of its size for the last time writes to that, and in forward one that makes
less of an operand comes right behind it. Each buffer is freed behind its last reader, in the order of the graph, which
Inductor may change; the optimiser's states, workspace of libraries and the allocator's gaps are not seen.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from gistkit.compiled import compat, operators  # noqa: F401 (defines the operator)
from gistkit.compiled.rebuilds.rounding import readers_of
from gistkit.compiled.split import Pair, is_tensor, is_view, storage_bytes, storage_of

_UNWRITTEN = ("prims._low_memory_max_pool_offsets_to_indices.default", "aten.empty_strided.default",
              "gistkit.short.default")  # fmt: skip


def predicted_peak(pair: Pair) -> int:
    """Bytes at the peak of a step of a pair, which may be in the middle of edits."""
    held = _storages(pair.inputs)
    saved = _storages(node for node in (*pair.tensors, *pair.outputs) if is_tensor(node))
    forward = _peak(pair.forward.graph, held, set(saved))
    results = [n for n in tree_leaves(pair.backward.graph.output_node().args[0]) if is_tensor(n)]
    places = {pair.place(node) for node in pair.tensors}
    foreign = pair.foreign_storages
    # the caller's results live on, as the loss does; what is kept is freed behind its last reader
    beside = {key: size for key, size in _storages(pair.outputs).items() if key not in held}
    own = {storage_of(pair.place(n)) for n in pair.tensors if storage_of(n) not in foreign}
    tangents = {n for n in pair.backward.graph.find_nodes(op="placeholder") if is_tensor(n) and n not in places}
    start = {key: size for key, size in _storages(places).items() if key in own} | _storages(tangents)
    fixed = sum(held.values()) + sum(beside.values())
    backward = fixed + _peak(pair.backward.graph, start, {storage_of(n) for n in results}, set(held) | set(beside))
    return max(forward, backward)


def _storages(nodes: Iterable[fx.Node]) -> dict[int, int]:
    return {storage_of(node): storage_bytes(node) for node in nodes if is_tensor(node)}


def _peak(graph: fx.Graph, start: dict[int, int], stay: set[int], elsewhere: set[int] = frozenset()) -> int:  # type: ignore[assignment]
    """The most bytes alive at a node: ``start`` is there from the beginning, ``stay`` to the end, ``elsewhere`` is
    counted by the caller. In forward the inputs are not freed: they are read by no one's leave."""
    last: dict[int, fx.Node] = {}
    inputs_stay = not elsewhere
    nodes = _shrinking_first(graph) if inputs_stay else list(graph.nodes)
    for node in nodes:
        if node.op == "output":  # in the middle of edits it still names what is not kept any more
            continue
        for read in (node, *node.all_input_nodes):
            if is_tensor(read):
                last[storage_of(read)] = node
    ends: dict[fx.Node, list[int]] = {}
    for key, node in last.items():
        if key not in stay and not (inputs_stay and key in start):
            ends.setdefault(node, []).append(key)
    alive = dict(start)
    total = peak = sum(alive.values())
    for node in nodes:
        if is_tensor(node) and node.op == "call_function" and _has_buffer(node, stay):
            key = storage_of(node)
            if key not in alive and key not in elsewhere:
                total -= _reused(node, ends.get(node, ()), alive)
                alive[key] = storage_bytes(node)
                total += alive[key]
                peak = max(peak, total)
        for key in ends.get(node, ()):
            total -= alive.pop(key, 0)
    return peak


def _shrinking_first(graph: fx.Graph) -> list[fx.Node]:
    """The nodes, but what a fused kernel makes smaller than its operand (a mask) where that operand is made."""
    places: dict[fx.Node, tuple[int, ...]] = {}
    for i, node in enumerate(graph.nodes):
        read = [n for n in node.all_input_nodes if is_tensor(n)]
        shrinks = is_tensor(node) and any(storage_bytes(node) < storage_bytes(n) for n in read)
        early = shrinks and node.op == "call_function" and compat.operators().is_fusible(node)
        places[node] = (*max(places[n] for n in node.all_input_nodes), i) if early else (i,)
    return sorted(graph.nodes, key=lambda node: places[node])


def _reused(node: fx.Node, ends: Iterable[int], alive: dict[int, int]) -> int:
    """Bytes of an operand that is read here for the last time and that a fused kernel overwrites; not alive then."""
    if not compat.operators().is_fusible(node):
        return 0
    return next((alive.pop(key) for key in ends if alive.get(key) == storage_bytes(node)), 0)


def _has_buffer(node: fx.Node, stay: set[int]) -> bool:
    table = compat.operators()
    if is_view(node) or str(node.target) in _UNWRITTEN:
        return False
    if storage_of(node) in stay or node.target is operator.getitem or not table.is_fusible(node):
        return True
    same = torch.ops.gistkit.materialised.default, torch.ops.gistkit.short.default  # their operand has no buffer then
    return any(not table.is_fusible(user) and user.target not in same for user in readers_of(node))
