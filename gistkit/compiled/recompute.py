"""Segments of forward that backward runs again, as under ``torch.utils.checkpoint``, where no move meets a budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled.forms.packing import own_tensors
from gistkit.compiled.rebuilds.rounding import behind_views
from gistkit.compiled.split import Pair, is_number, is_tensor, origin, storage_bytes, storage_of, storages, value
from gistkit.planning.segments import Operator, Segment, segments

FACTORS = 2, 4, 8, 16  # how many times what crosses behind a segment plain torch.compile keeps of it, at least


def divisions(pair: Pair) -> list[list[Segment]]:
    """Forward in segments, at each of ``FACTORS``. None where the caller's checkpoints run something again."""
    nodes = [n for n in pair.forward.graph.nodes if n.op == "call_function" and not is_number(n)]
    if any(str(node.meta.get("recompute")).endswith("RECOMPUTE") for node in nodes):
        return []
    places, kept, operators = {n: i for i, n in enumerate(nodes)}, storages(own_tensors(pair)), list[Operator]()
    for node in nodes:
        storage, size = (storage_of(node), storage_bytes(node)) if is_tensor(node) else (None, 0)
        last = max((places[user] for user in node.users if user in places), default=-1)
        operators.append(Operator(node.name, storage, size, storage in kept, last))
    return [found for factor in FACTORS if (found := segments(operators, factor))]


def copied(joint: fx.GraphModule) -> fx.GraphModule:
    """A joint graph of its own, with the same values."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph)


def tagged(joint: fx.GraphModule, segments: Sequence[Segment]) -> fx.GraphModule:
    """A copy of a joint graph, of which PyTorch's cut will have backward run segments again. What draws random numbers,
    as an attention, exchanges tensors between processes or has a tag of the caller's is left to the cut."""
    graph = copied(joint)
    named = {node.name: node for node in graph.graph.nodes}
    for number, segment in enumerate(segments):
        saved = {origin(behind_views(named[name])) for name in segment.saved}
        for node in saved:  # of several results each that is read is saved, as the operator does not run again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in map(named.__getitem__, segment.operators):
            made = origin(node)
            stays = torch.Tag.nondeterministic_seeded in getattr(made.target, "tags", ()) or "c10d" in str(made.target)
            stays |= is_tensor(node) and value(node).dtype == torch.bool  # a dropout's mask, less than its numbers
            if not (stays or made in saved or made.is_impure() or "recompute" in node.meta):
                node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return graph
