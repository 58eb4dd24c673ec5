"""Segments of forward that backward runs again, as under ``torch.utils.checkpoint``, where no move meets a budget."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from gistkit.compiled.split import Pair, is_tensor, is_view, origin, storage_of, storages

FACTORS = 2, 4, 8, 16
"""How many times the bytes that a segment leaves for the next one those must be that plain torch.compile keeps of it."""

_AGAIN = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(frozen=True)
class Segment:
    """Operators of forward, by name, and of what they and earlier ones make that which later ones read: it is saved."""

    operators: tuple[str, ...]
    saved: tuple[str, ...]


def divisions(pair: Pair) -> list[list[Segment]]:
    """Forward in segments, in order, as short as each of ``FACTORS`` allows; without the last one, with which backward
    begins. None where the caller's checkpoints run something again."""
    if any(node.meta.get("recompute") in _AGAIN for node in pair.forward.graph.nodes):
        return []
    found = (_segments(pair, factor) for factor in FACTORS)
    return [segments for segments in found if segments]


def _segments(pair: Pair, factor: int) -> list[Segment]:
    nodes = [n for n in pair.forward.graph.nodes if n.op == "call_function"]
    places = {node: place for place, node in enumerate(nodes)}
    last = {n: max((places[user] for user in n.users if user in places), default=-1) for n in nodes}
    kept = storages(n for n in pair.tensors if n in places)
    found, operators, alive, kept_bytes = list[Segment](), list[fx.Node](), list[fx.Node](), 0
    for place, node in enumerate(nodes):
        operators.append(node)
        kept_bytes += kept.pop(storage_of(node), 0) if is_tensor(node) else 0
        alive = [n for n in (*alive, node) if last[n] > place]
        if all(map(is_tensor, alive)) and factor * sum(storages(alive).values()) <= kept_bytes:
            found.append(Segment(tuple(n.name for n in operators), tuple(n.name for n in alive)))
            operators, kept_bytes = [], 0
    return found


def tagged(joint: fx.GraphModule, segments: Sequence[Segment]) -> fx.GraphModule:
    """A copy of a joint graph, of which PyTorch's cut will have backward run segments again. What draws random numbers,
    as an attention, exchanges tensors between processes or has a tag of the caller's is left to the cut."""
    graph = copy.deepcopy(joint)
    named = {node.name: node for node in graph.graph.nodes}
    for number, segment in enumerate(segments):
        saved = {origin(n) for name in segment.saved for n in (named[name], *_bases(named[name]))}
        for node in saved:  # of several results each that is read is saved, as the operator does not run again
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in map(named.__getitem__, segment.operators):
            made = origin(node)
            draws = torch.Tag.nondeterministic_seeded in getattr(made.target, "tags", ())
            stays = made in saved or draws or made.is_impure() or "c10d" in str(made.target)
            if not stays and "recompute" not in node.meta:
                node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": number}
    return graph


def _bases(node: fx.Node) -> list[fx.Node]:
    """What a view is of, and what that is of in turn."""
    return [node.all_input_nodes[0], *_bases(node.all_input_nodes[0])] if is_view(node) else []
