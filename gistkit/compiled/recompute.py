"""Segments of forward that backward runs again, as under ``torch.utils.checkpoint``, where no move meets a budget."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled.rebuilds.flow import library_s
from gistkit.compiled.rebuilds.rounding import behind_views, in_memory
from gistkit.compiled.split import Pair, is_number, is_tensor, origin, storage_bytes, storage_of, value
from gistkit.ir import Kept
from gistkit.planning.segments import Operator, Segment, divided


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


def tagged(joint: fx.GraphModule, segments: Sequence[Segment]) -> fx.GraphModule:
    """A copy of a joint graph with tags for PyTorch's cut: backward runs the segments again. The caller's tags stay."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    named = {node.name: node for node in graph.nodes}
    for number, segment in enumerate(segments):
        saved = {origin(behind_views(named[name])) for name in segment.saved}
        for node in saved:  # of several results each that is read is saved, as the operator does not run again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in map(named.__getitem__, segment.operators):
            made = origin(node)
            if not (made in saved or made.is_impure() or "recompute" in node.meta):
                node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return type(joint).__mro__[1](joint, graph)  # each has a class of its own; Inductor's writes code once it is needed
