"""vDNN's baselines (Rhu et al., MICRO 2016, sections II-C, IV-A, V-C): what the frameworks of its time allocate.

*Network-wide* allocation holds every feature map of the network at once, from the first iteration to the last, so its
maximum and its average are the same. The paper improves it: of the gradient maps only as many buffers as are needed at
once, each as large as the largest map, used again and again on the way back; and one workspace for all layers.
Meant for a library's view of a step, where activations run in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gistkit.ir.queries import layers
from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.tasks import BACKWARD, Block
from gistkit.planning.cost.table import CostTable
from gistkit.planning.simulate.simulator import Simulation


@dataclass(frozen=True)
class NetworkWide:
    """Bytes by function, as in vDNN's Fig. 4. ``weight_bytes`` holds weights, buffers and weight gradients."""

    weight_bytes: int
    feature_map_bytes: int
    gradient_map_bytes: int
    workspace_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it: maximum and average at once."""
        return self.weight_bytes + self.feature_map_bytes + self.gradient_map_bytes + self.workspace_bytes


def network_wide(
    graph: SavedGraph, costs: CostTable, algorithms: Mapping[int, str] | None = None, *, improved: bool = True
) -> NetworkWide:
    """The network-wide allocation of a step; ``algorithms`` by task (others: the default).

    ``improved`` False gives every gradient map its own memory.
    """
    named = algorithms or {}
    gradients = gradient_maps(graph)
    own = sum(b.nbytes for b in gradients)
    reused = most_at_once(gradients) * max((b.nbytes for b in gradients), default=0)
    return NetworkWide(
        weight_bytes=_total(graph, ("weight", "buffer", "weight_gradient")),
        feature_map_bytes=_total(graph, ("input", "activation")),
        gradient_map_bytes=min(own, reused) if improved else own,
        workspace_bytes=max((costs.workspace_bytes(t.index, named.get(t.index, "")) for t in graph.tasks), default=0),
    )


def gradient_maps(graph: SavedGraph) -> list[Block]:
    """dX and dY of all layers. The one that autograd starts from, the loss's own gradient of 1, is there all through
    backward and is no layer's: as a buffer of the largest map's size it would count as much as a dY."""
    seeds: set[int] = set()
    first = next((t for t in graph.tasks if t.phase == BACKWARD), None)
    if first is not None and first.call < 0:
        seeds = set(first.writes)
    return [b for b in graph.blocks if b.kind == "gradient" and b.id not in seeds]


def most_at_once(blocks: Iterable[Block]) -> int:
    """The most of the blocks that exist during one task: the buffers that they can share."""
    changes = sorted(c for b in blocks for c in ((b.first, 1), (b.last + 1, -1)))
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def oracular_s(graph: SavedGraph, costs: CostTable, *, features_only: bool = False) -> float:
    """Seconds on a device without a limit to its memory: every layer under its fastest algorithm, added up (V-C).

    ``features_only``: the feature extraction layers alone, which the paper compares.
    """
    tasks = [t for layer in layers(graph) if layer.features for t in layer.tasks] if features_only else None
    return sum(
        min(a.seconds for a in costs.algorithms[t]) for t in (range(len(graph.tasks)) if tasks is None else tasks)
    )


def average_bytes(run: Simulation) -> float:
    """Mean memory of a step over its time (vDNN's Fig. 11): each task's bytes weighted by the time until the next
    task starts, waits included."""
    ends = (*run.start_s[1:], run.step_s)
    spans = [end - start for start, end in zip(run.start_s, ends, strict=True)]
    return sum(m * s for m, s in zip(run.memory_bytes, spans, strict=True)) / run.step_s


def _total(graph: SavedGraph, kinds: tuple[str, ...]) -> int:
    return sum(b.nbytes for b in graph.blocks if b.kind in kinds)
