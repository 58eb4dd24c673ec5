"""checkpoint: segments of the forward run again in backward (Chen et al., "Training deep nets with sublinear memory
cost", 2016). The runtime carries such plans out (:mod:`gistkit.runtime.recompute.replay`).

The forward is cut where a single feature map connects what is before to what is after. With n such places about sqrt(n)
segments keep the sum of boundaries and of one segment's insides least. Only the boundaries are kept; the last segment
is kept whole, as ``torch.utils.checkpoint.checkpoint_sequential`` does, since its backward comes at once. What an op
keeps for itself (a pool's map, a dropout's mask) stays, and what is small (a norm's statistics), whose return costs the
host as much as a feature map's. A segment that cannot run again (:mod:`gistkit.planning.forms.recompute`) is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

from gistkit.ir import FORWARD, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import SMALL_SHARE, Replays, held, make_plan, own_decisions
from gistkit.planning.simulate import Simulator

_AROUND_ROOT = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)


class Cut(NamedTuple):
    """A place between two forward tasks: the task before it, and the one block that is read across it."""

    task: int
    block: int


def checkpoint(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None, *, segments: int | None = None
) -> Plan:
    """The plan that keeps the boundaries of ``segments`` segments, which hold about equally many bytes. By default
    counts around sqrt(n) are tried and the one with the least peak is taken, as the paper's Algorithm 3 searches over
    budgets. More than the network can be cut into are as many as it can."""
    places = cuts(graph)
    root = isqrt(len(places) + 1)
    counts = [segments] if segments is not None else sorted({max(1, round(root * f)) for f in _AROUND_ROOT})
    own, replays, simulator = own_decisions(graph), Replays(graph, captured=costs.captured), Simulator(graph, costs)
    plans, small = [], small_storages(graph)
    for chosen in (evenly(graph, places, count) for count in counts):
        boundaries = {graph.blocks[c.block].storage for c in chosen}
        kept = tuple(d for d in own if d.storage not in boundaries)
        dense = {d.storage for d in kept} | replays.own | replays.late | small
        decisions = tuple(replays.able((*kept, *rerun_between(graph, chosen, dense))))
        run = simulator.run(Plan("checkpoint", graph.fingerprint, decisions, ()))
        plans.append((run.peak_bytes, run.step_s, len(chosen) + 1, decisions))
    _, _, count, decisions = min(plans, key=lambda p: p[:2])
    return make_plan("checkpoint", graph, costs, budget_bytes, decisions, details={"segments": count})


def small_storages(graph: SavedGraph) -> set[int]:
    """Storages of less than a share of all that is kept which an op makes besides its results, as a norm its
    statistics: not worth what a look into the op costs the host. Autocast's copies are made without the op."""
    made = {graph.values[v].storage for c in graph.calls for v in c.results}
    lowered = {c.index for c in graph.calls if c.op in ("conv2d", "linear")}
    small = (s for s in graph.kept() if s.nbytes * SMALL_SHARE < graph.kept_bytes)
    return {s.id for s in small if s.id not in made and s.producer not in lowered}


def cuts(graph: SavedGraph) -> tuple[Cut, ...]:
    """The places where one block alone is read across, in order; the last of those with the same block. The step's
    inputs and targets are there whatever is cut; what does not come of both them and parameters, as a mask or a bias by
    position, is there or made anew."""
    forward = [t for t in graph.tasks if t.phase == FORWARD]
    made = graph.trained & graph.made_of("input")
    maps = {b.id for b in graph.blocks if b.kind in ("activation", "input") and (b.storage < 0 or b.storage in made)}
    last_read = {b: t.index for t in forward for b in t.reads}
    before, across = set(), set()
    found: dict[int, Cut] = {}
    for task in forward[:-1]:
        new = maps.intersection(task.writes) - before
        before.update(task.reads, task.writes)
        across.update(b for b in new if last_read.get(b, -1) > task.index)
        across -= {b for b in task.reads if last_read[b] == task.index}
        if len(across) == 1:
            (block,) = across
            found[block] = Cut(task.index, block)
    return tuple(found.values())


def evenly(graph: SavedGraph, places: tuple[Cut, ...], segments: int) -> list[Cut]:
    """Cuts into segments of about equally many bytes; a smaller boundary is worth as much unevenness."""
    kept = sorted(held(graph), key=lambda b: b.first)
    firsts, sums = [b.first for b in kept], [0, *accumulate(b.nbytes for b in kept)]
    sizes = [(sums[bisect_right(firsts, c.task)], graph.blocks[c.block].nbytes, c) for c in places]
    targets = [sums[-1] * i / segments for i in range(1, min(segments, len(places) + 1))]
    return sorted({min(sizes, key=lambda s: abs(s[0] - target) + s[1])[2] for target in targets})


def rerun_between(graph: SavedGraph, chosen: list[Cut], dense: set[int]) -> list[Decision]:
    """What the segments before the last cut keep for backward runs again, each from its boundary, but for ``dense``."""
    boundaries = {c.block for c in chosen}
    starts = [-1, *(c.task for c in chosen)]
    sources = [inputs(graph), *((graph.blocks[c.block].storage,) for c in chosen)]
    found: list[Decision] = []
    for block in held(graph):
        segment = bisect_left(starts, block.first) - 1
        inside = block.first >= 0 and segment < len(chosen) and block.id not in boundaries
        needed = bool(block.uses) or block.holder >= 0  # of a branch that leads nowhere nothing comes back
        goes = needed and block.storage >= 0 and block.last < len(graph.tasks) and block.storage not in dense
        # of kind parameter: what autocast made of one
        if inside and goes and graph.storages[block.storage].kind == "activation":
            reason = f"segment {segment} runs anew"
            found.append(Decision(block.storage, "recompute", place="nowhere", sources=sources[segment], reason=reason))
    return found


def inputs(graph: SavedGraph) -> tuple[int, ...]:
    """Storages of the step's inputs that the forward reads."""
    read = {b for t in graph.tasks if t.phase == FORWARD for b in t.reads}
    return tuple(b.storage for b in graph.blocks if b.kind == "input" and b.id in read and b.storage >= 0)
