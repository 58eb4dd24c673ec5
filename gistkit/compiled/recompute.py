"""Segments of forward that backward runs again, as under ``torch.utils.checkpoint``, where no move meets a budget."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled.rebuilds.flow import BYTES_A_S, library_s
from gistkit.compiled.rebuilds.rounding import behind_views, in_memory
from gistkit.compiled.split import Pair, is_number, is_tensor, origin, storage_bytes, storage_of, value
from gistkit.planning.segments import Operator, Segment


def operators(pair: Pair, kept: dict[Any, int], stays: dict[Any, int]) -> list[Operator]:
    """Forward's operators; ``kept`` and ``stays``: bytes by storage, which are taken out. Empty where the caller's
    checkpoints run something again."""
    needed = {node for node in pair.outputs if isinstance(node, fx.Node)}
    for node in reversed(pair.forward.graph.nodes):  # the others are made for backward alone, as a weight's transpose
        if node in needed or (node.op == "call_function" and node.is_impure()):
            needed |= {node, *node.all_input_nodes}
    nodes = [n for n in pair.forward.graph.nodes if n.op == "call_function" and n in needed and not is_number(n)]
    if any(str(node.meta.get("recompute")).endswith("RECOMPUTE") for node in nodes):
        return []
    places, found = {n: i for i, n in enumerate(nodes)}, list[Operator]()
    for node in nodes:
        storage, size = (storage_of(node), storage_bytes(node)) if is_tensor(node) else (None, 0)
        own = kept.pop(storage, 0)
        last = max((places[user] for user in node.users if user in places), default=-1)
        last = len(nodes) if own and _stays(node) else last
        reads = tuple(places[n] for n in node.all_input_nodes if n in places)
        single = node.target is not operator.getitem and in_memory(node)
        time_s = library_s(node) if single else 2 * own / BYTES_A_S
        found.append(Operator(node.name, storage, size, own, stays.pop(storage, 0), last, reads, time_s))
    return found


def _stays(node: fx.Node) -> bool:
    """Whether an operator must not run again: what draws random numbers, as an attention, or exchanges tensors between
    processes; and a dropout's mask, which takes less than its numbers."""
    made = origin(node)
    drawn = torch.Tag.nondeterministic_seeded in getattr(made.target, "tags", ()) or "c10d" in str(made.target)
    return drawn or made.is_impure() or (is_tensor(node) and value(node).dtype == torch.bool)


def copied(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph of its own, with the same values."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph)


def tagged(joint: fx.GraphModule, segments: Sequence[Segment]) -> fx.GraphModule:
    """A copy of a joint graph, of which PyTorch's cut will have backward run segments again. What must
    not run again or has a tag of the caller's is left to the cut."""
    graph = copied(joint)
    named = {node.name: node for node in graph.graph.nodes}
    for number, segment in enumerate(segments):
        saved = {origin(behind_views(named[name])) for name in segment.saved}
        for node in saved:  # of several results each that is read is saved, as the operator does not run again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in map(named.__getitem__, segment.operators):
            if not (_stays(node) or origin(node) in saved or "recompute" in node.meta):
                node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return graph
