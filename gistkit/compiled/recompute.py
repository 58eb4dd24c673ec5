"""Segments of forward that backward runs again, as under ``torch.utils.checkpoint``, where no move meets a budget."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled.edit import Builder
from gistkit.compiled.operators import materialised
from gistkit.compiled.rebuilds.flow import library_s
from gistkit.compiled.rebuilds.rounding import behind_views, in_memory
from gistkit.compiled.split import (
    Pair,
    elements,
    is_number,
    is_pointwise,
    is_tensor,
    is_view,
    origin,
    storage_bytes,
    storage_of,
    storages,
    value,
)
from gistkit.ir import Kept
from gistkit.planning.segments import Operator, Segment, divided

_LARGE = 64  # gradients of fewer elements than the largest tensor's over this are left as they are


def divisions(pair: Pair, rows: Sequence[Kept]) -> list[list[Segment]]:
    """Forward in segments, in several ways, where ``rows`` are kept. None beside the caller's own checkpoints."""
    needed = {node for node in pair.outputs if isinstance(node, fx.Node)}
    for node in reversed(pair.forward.graph.nodes):  # the others are made for backward alone, as a weight's transpose
        if node in needed or (node.op == "call_function" and node.is_impure()):
            needed |= {node, *node.all_input_nodes}
    nodes = [n for n in pair.forward.graph.nodes if n.op == "call_function" and n in needed and not is_number(n)]
    if any(str(node.meta.get("recompute")).endswith("RECOMPUTE") for node in nodes):
        return []
    places, kept, operators = {n: i for i, n in enumerate(nodes)}, {row.name: row for row in rows}, list[Operator]()
    for node in nodes:
        storage, size = (storage_of(node), storage_bytes(node)) if is_tensor(node) else (None, 0)
        last = max((places[user] for user in node.users if user in places), default=-1)
        own = (row.plain_bytes, row.kept_bytes) if (row := kept.get(node.name)) else (0, 0)
        # what draws random numbers, as an attention, or exchanges tensors between processes does not run again
        target = origin(node).target
        stays = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()) or "c10d" in str(target)
        stays |= is_tensor(node) and value(node).dtype == torch.bool  # a dropout's mask, less than its numbers
        images = target is torch.ops.aten.convolution.default and value(node.args[0]).shape[1] < 8
        time_s = library_s(node) * 10**images if in_memory(node) else 0.0  # cuDNN has no quick kernel for few channels
        stays |= images and size < 1e11 * time_s  # ViT-S's patches take 0.53 ms for 19 MB
        operators.append(Operator(node.name, storage, size, *own, last, None if stays else time_s))
    return divided(operators)


def rerun(pair: Pair, segments: Sequence[Segment]) -> Pair:
    """A copy of a pair on which no moves were made, with backward running the segments again, each operator right
    before what needs it. What is kept of the rest stays as it is."""
    pair = Pair(copied(pair.forward), copied(pair.backward), pair.results)
    again, graph, copies = _again(pair, segments), pair.backward.graph, dict[fx.Node, fx.Node]()
    due = {pair.place(node): node for node in pair.tensors if node in again}
    numbers, begun = {name: i for i, segment in enumerate(segments) for name in segment.operators}, set[int]()
    large = max((elements(node) for node in graph.nodes if is_tensor(node)), default=0) // _LARGE
    held = set(storages(pair.inputs))
    for reader in list(graph.nodes):
        for place in [node for node in reader.all_input_nodes if node in due]:
            nodes = _missing(due[place], again, copies)
            if new := {numbers[node.name] for node in nodes if node.name in numbers} - begun:
                begun |= new
                _write_gradients(graph, reader, set(copies.values()), large, held)
            with graph.inserting_before(reader):
                for node in nodes:
                    copies[node] = graph.node_copy(node, lambda n: copies.get(n) or pair.place(n))
            place.replace_all_uses_with(copies[due.pop(place)])
    pair.drop_unread()
    return pair


def _again(pair: Pair, segments: Sequence[Segment]) -> dict[fx.Node, int]:
    """The operators of forward that run again, by their places: those of the segments, and what is taken of their
    results for backward alone. What is kept of a segment is not rounded: all that is made of it would be off."""
    named = {node.name: node for node in pair.forward.graph.nodes}
    kept = {origin(behind_views(named[name])) for segment in segments for name in segment.saved}
    for node in kept:  # of several results each that is read is saved
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    wanted, again = {named[name] for segment in segments for name in segment.operators}, dict[fx.Node, int]()
    for place, node in enumerate(pair.forward.graph.nodes):
        taken = (is_view(node) or origin(node) is not node) and node.args[0] in again
        given = any(n.op == "get_attr" or n in pair.overwritten for n in node.all_input_nodes)
        stays = origin(node) in kept or origin(node).is_impure() or "recompute" in node.meta  # the caller's tags stay
        if (node in wanted or taken) and not (given or stays):
            again[node] = place
    return again


def _write_gradients(graph: fx.Graph, reader: fx.Node, again: Set[fx.Node], least: int, held: Set[int]) -> None:
    """Have gradients of at least so many elements that are made before ``reader`` and read behind written by kernels of
    their own, where that is less than what they are made of: fused with what waits for a segment that runs again in
    between, all of that would be there meanwhile. ``held``: storages that stay anyway."""
    nodes = list(graph.nodes)
    place = nodes.index(reader)
    read = {n for node in nodes[place:] for n in node.all_input_nodes}
    made = [n for n in nodes[:place] if n in read and n not in again and is_tensor(n)]
    late, staying = [n for n in made if is_pointwise(n) and elements(n) >= least], held | set(storages(read))
    for node in dict.fromkeys(map(_before_casts, late)):
        freed = {storage: size for storage, size in storages(_loaded(node)).items() if storage not in staying}
        if storage_bytes(node) < sum(freed.values()):
            written = Builder(graph, node.next, backward=True)(materialised(), node, node)
            node.replace_all_uses_with(written, delete_user_cb=lambda user: user.target is not materialised())


def _before_casts(node: fx.Node) -> fx.Node:
    """What a pointwise operator made, before casts to no fewer bits."""
    while node.target is torch.ops.prims.convert_element_type.default:
        operand: Any = node.args[0]
        if value(operand).dtype.itemsize > value(node).dtype.itemsize or not is_pointwise(operand):
            break
        node = operand
    return node


def _loaded(node: fx.Node) -> set[fx.Node]:
    """What the kernel of a pointwise operator loads, where all pointwise operators before it are fused with it."""
    found, due = set[fx.Node](), {node}
    while due:
        found |= due
        within = [n for n in due if is_pointwise(n) or is_view(n)]
        due = {operand for n in within for operand in n.all_input_nodes} - found
    return {n for n in found if not (is_pointwise(n) or is_view(n))}


def _missing(node: fx.Node, again: dict[fx.Node, int], made: Collection[fx.Node]) -> list[fx.Node]:
    """The operators that run for a node's value, itself included, in order, without those that were ``made``."""
    found, due = set[fx.Node](), [node]
    while due:
        if (one := due.pop()) not in found and one not in made:
            found.add(one)
            due.extend(n for n in one.all_input_nodes if n in again)
    return sorted(found, key=again.__getitem__)


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A graph module with a graph of its own, whose nodes have the same names and values."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.output_node().meta = dict(module.graph.output_node().meta)
    # each has a class of its own; Inductor's writes code once it is needed
    return type(module).__mro__[1](module, graph)
