"""vDNN's static policies (Rhu et al., MICRO 2016): feature maps wait in host memory between their two uses.

Sections III-A and III-B, rule by rule:

- Only layers of the feature extraction part are managed (III, IV-A); the classifier is left as it is.
- A layer offloads its X only where it is X's last consumer in forward (the reference counts of Fig. 3) and does not
  write it: activations run in place, use Y and dY alone, and never offload.
- vDNN_all offloads the X of every such layer, vDNN_conv that of CONV layers. An X that a CONV and, after it, a POOL
  read stays with vDNN_conv.
- The transfer overlaps the layer's own forward; the next layer waits for it, and X's memory is free before it begins.
- An X without a use in backward is freed without a transfer.
- Before each managed layer's backward, :func:`find_prefetch_layer` picks the layer whose X is fetched meanwhile; it is
  there before the next layer's backward begins. ``prefetch=False`` copies every X on demand instead (III-A, the naive
  way): it stalls its first use.
- The classifier does not search, so the last managed layer's X comes on demand.

On a library's view (:mod:`bench.papers.library_view`) this is the paper's setting. On a captured step the X of a POOL
has no use in backward, and the batch belongs to the caller and stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gistkit.ir import ACTV, CONV, FORWARD, Block, Decision, Layer, Plan, SavedGraph, layers
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan, own_decisions
from gistkit.planning.policies.convolutions import ConvAlgorithms

ALL, CONVS, NONE = "all", "conv", "none"
NOTHING = -1


@dataclass(frozen=True)
class Offload:
    """One X that goes to the host: block, the layer that offloads it, the task during which it leaves, the task before
    which it is gone from the device, the task during which it comes back, the task before which it has to be back."""

    block: int
    layer: int
    offload: int
    release: int
    prefetch: int
    ready: int


def vdnn(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    offload: str = ALL,
    algorithms: str | Mapping[int, str] = "m",
    prefetch: bool = True,
) -> Plan:
    """vDNN_all or vDNN_conv (``offload``: ``all``, ``conv``, ``none``) with memory- or performance-optimal convolutions
    (``algorithms``: ``m``, ``p`` or names by call)."""
    convolutions = ConvAlgorithms(graph, costs)
    decisions = (*own_decisions(graph), *(host_decision(graph, o) for o in offloads(graph, offload, prefetch)))
    return make_plan(
        "vdnn" if offload == NONE else f"vdnn-{offload}",
        graph,
        costs,
        budget_bytes,
        decisions,
        convolutions.choices(convolutions.of(algorithms)),
        details=details_of(offload, algorithms, prefetch=prefetch),
    )


def details_of(offload: str, algorithms: str | Mapping[int, str], **others: bool) -> dict[str, str | bool]:
    """The settings of :func:`vdnn`, for a plan's details."""
    return {"offload": offload, "algorithms": algorithms if isinstance(algorithms, str) else "by layer", **others}


vdnn_all = partial(vdnn, offload=ALL)
vdnn_conv = partial(vdnn, offload=CONVS)


def host_decision(graph: SavedGraph, sent: Offload) -> Decision:
    """An offload as a plan's decision."""
    return Decision(
        graph.blocks[sent.block].storage,
        "dense",
        place="host",
        offload=sent.offload,
        release=sent.release,
        prefetch=sent.prefetch,
        ready=sent.ready,
        reason="waits on the host between its two uses",
    )


def offloads(graph: SavedGraph, which: str, prefetch: bool = True) -> tuple[Offload, ...]:
    """What vDNN_all (``all``), vDNN_conv (``conv``) or nobody (``none``) offloads, and when it comes back."""
    managed = [layer for layer in layers(graph) if layer.features and layer.backward]
    offloaded = _offloaded(graph, managed, which)
    flags = [LayerFlags(layer.kind, offloaded=i in offloaded) for i, layer in enumerate(managed)]
    fetched_during = prefetches(flags) if prefetch else {}
    found = []
    for position, blocks in sorted(offloaded.items()):
        during = managed[fetched_during[position]].backward if position in fetched_during else ()
        found += [_offload(block, managed[position], during) for block in blocks]
    return tuple(found)


def _offloaded(graph: SavedGraph, managed: list[Layer], which: str) -> dict[int, list[Block]]:
    """By position among the managed layers the feature maps that the layer offloads."""
    last_reader: dict[int, int] = {}
    for task in graph.tasks:
        if task.phase == FORWARD:
            last_reader.update(dict.fromkeys((*task.reads, *task.writes), task.index))
    found: dict[int, list[Block]] = defaultdict(list)
    for position, layer in enumerate(managed):
        if layer.kind == ACTV or which == NONE or (which == CONVS and layer.kind != CONV):
            continue
        for block in (graph.blocks[b] for b in layer.x if b not in layer.y):
            used = block.uses and block.storage >= 0 and block.last < len(graph.tasks)
            if used and last_reader[block.id] == layer.forward:
                found[position].append(block)
    return found


def _offload(block: Block, owner: Layer, during: Sequence[int]) -> Offload:
    """A block's offload by its layer; it is fetched ``during`` these backward tasks of another, on demand if none."""
    use = block.uses[0].task
    start, end = (during[0], during[-1] + 1) if during else (use, use)
    release = max(block.last, block.saved, owner.forward) + 1
    return Offload(block.id, owner.index, owner.forward, release, min(start, use), min(end, use))


@dataclass(frozen=True)
class LayerFlags:
    """What the search looks at: the layer's kind, whether it offloaded its X, whether that was prefetched already."""

    kind: str
    offloaded: bool = False
    prefetched: bool = False


def find_prefetch_layer(layers: Sequence[LayerFlags], current: int) -> int:
    """The layer whose X is fetched while layer ``current`` runs backward, -1 where there is none (Fig. 10).

    The nearest preceding layer that offloaded and was not prefetched yet. The search ends at the next CONV that is no
    hit, so that nothing comes back long before it is used. (The paper prints the test for CONV behind the loop's brace;
    it belongs inside.) The paper's routine also flags its hit as prefetched; here that is :func:`prefetches`.
    """
    for layer in range(current - 1, -1, -1):
        if layers[layer].offloaded and not layers[layer].prefetched:
            return layer
        if layers[layer].kind == CONV:
            return NOTHING
    return NOTHING


def prefetches(layers: Sequence[LayerFlags]) -> dict[int, int]:
    """For each offloaded layer the layer during whose backward its X comes back, all layers run in reverse.

    A layer that nobody prefetched before its own backward begins is missing: its X is copied on demand.
    """
    flags, fetched_during = list(layers), {}
    for current in range(len(flags) - 1, -1, -1):
        hit = find_prefetch_layer(flags, current)
        if hit != NOTHING:
            flags[hit] = replace(flags[hit], prefetched=True)
            fetched_during[hit] = current
    return fetched_during
