"""checkpoint: segments of the forward run anew in backward (Chen et al., "Training deep nets with sublinear memory
cost", 2016). The runtime carries such plans out (:mod:`gistkit.runtime.recompute.recompute`).

The forward is cut where a single feature map connects what is before to what is after. With n such places about sqrt(n)
segments keep the sum of boundaries and of one segment's insides least. Only the boundaries are kept; the last segment
is kept whole, as ``torch.utils.checkpoint.checkpoint_sequential`` does, since its backward comes at once. What an op
keeps for itself (a pool's map, a dropout's mask, a norm's statistics) is small and stays. A segment that cannot run
anew (:mod:`gistkit.planning.forms.recompute`) is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate
from math import isqrt

import numpy as np

from gistkit.ir import FORWARD, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import Replays, held, make_plan, own_decisions
from gistkit.planning.simulate import Simulator

_AROUND_ROOT = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)


@dataclass(frozen=True)
class Cut:
    """A place between two forward tasks: the task before it, and the one block that is read across it."""

    task: int
    block: int


def checkpoint(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None, *, segments: int | None = None
) -> Plan:
    """The plan that keeps the boundaries of ``segments`` segments, which hold about equally many bytes.

    By default the count with the least peak is searched for around sqrt(n), as the paper's Algorithm 3 searches over
    budgets. Raises ValueError for fewer than one; more than the network can be cut into are as many as it can.
    """
    if segments is not None and segments < 1:
        raise ValueError(f"segments must be 1 (nothing runs anew) or more, got {segments}; leave it out for sqrt(n)")
    places = cuts(graph)
    root = isqrt(len(places) + 1)
    counts = [segments] if segments is not None else sorted({max(1, round(root * f)) for f in _AROUND_ROOT})
    own, replays, simulator = own_decisions(graph), Replays(graph), Simulator(graph, costs)
    plans = []
    for chosen in (evenly(graph, places, count) for count in counts):
        decisions = _decisions(replays, own, chosen)
        run = simulator.run(Plan("checkpoint", graph.fingerprint, decisions, ()))
        plans.append((run.peak_bytes, run.step_s, len(chosen) + 1, decisions))
    _, _, count, decisions = min(plans, key=lambda p: p[:2])
    return make_plan("checkpoint", graph, costs, budget_bytes, decisions, details={"segments": count})


def _decisions(replays: Replays, own: tuple[Decision, ...], chosen: list[Cut]) -> tuple[Decision, ...]:
    """What is kept and what runs anew with boundaries at the ``chosen`` places; ``own``: what operators do anyway."""
    graph = replays.graph
    boundaries = {graph.blocks[c.block].storage for c in chosen}
    stays = tuple(d for d in own if d.storage not in boundaries)
    silent = {d.storage for d in stays} | replays.own | replays.late
    return tuple(replays.able((*stays, *rerun_between(graph, chosen, silent))))


def cuts(graph: SavedGraph) -> tuple[Cut, ...]:
    """The places where one block alone is read across, in order; the last of those with the same block."""
    tasks = [t for t in graph.tasks if t.phase == FORWARD]
    forward = {t.index for t in tasks}
    maps = {b.id for b in graph.blocks if b.kind in ("activation", "input")}
    made: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for task in tasks:
        for block in maps.intersection(task.reads):
            last_read[block] = task.index
            made.setdefault(block, -1)
        for block in maps.intersection(task.writes):
            made.setdefault(block, task.index)
    found: dict[int, Cut] = {}
    begins, ends = _turns(made, last_read)
    across: set[int] = set()
    for task in range(tasks[-1].index if tasks else 0):
        across |= begins.get(task, set())
        across -= ends.get(task, set())
        if len(across) == 1 and task in forward:
            (block,) = across
            found[block] = Cut(task, block)
    return tuple(found.values())


def _turns(made: dict[int, int], last_read: dict[int, int]) -> tuple[dict[int, set[int]], dict[int, set[int]]]:
    """By task the blocks that are read across the places from it on, and those that no longer are. Inputs and targets
    are there whatever is cut."""
    begins: dict[int, set[int]] = {}
    ends: dict[int, set[int]] = {}
    for block, last in last_read.items():
        if 0 <= made[block] < last:
            begins.setdefault(made[block], set()).add(block)
            ends.setdefault(last, set()).add(block)
    return begins, ends


def evenly(graph: SavedGraph, places: tuple[Cut, ...], segments: int) -> list[Cut]:
    """Cuts into segments that hold about equally many bytes for backward; a smaller boundary is worth as many bytes of
    unevenness."""
    kept = sorted(held(graph), key=lambda b: b.first)
    firsts, sums = [b.first for b in kept], [0, *accumulate(b.nbytes for b in kept)]
    before = np.array([sums[bisect_right(firsts, c.task)] for c in places], dtype=np.int64)
    boundaries = np.array([graph.blocks[c.block].nbytes for c in places], dtype=np.int64)
    chosen: set[Cut] = set()
    for i in range(1, min(segments, len(places) + 1)):
        target = sums[-1] * i / segments
        chosen.add(places[int(np.argmin(np.abs(before - target) + boundaries))])
    return sorted(chosen, key=lambda c: c.task)


def rerun_between(graph: SavedGraph, chosen: list[Cut], silent: set[int]) -> list[Decision]:
    """What the segments before the last cut keep for backward runs anew, from each segment's own boundary, but for the
    ``silent`` storages."""
    boundaries = {c.block for c in chosen}
    starts = [-1, *(c.task for c in chosen)]
    sources = [inputs(graph), *((graph.blocks[c.block].storage,) for c in chosen)]
    made: list[Decision] = []
    for block in held(graph):
        segment = bisect_left(starts, block.first) - 1
        inside = block.first >= 0 and segment < len(chosen) and block.id not in boundaries
        needed = bool(block.uses) or block.holder >= 0  # of a branch that leads nowhere nothing comes back
        goes = needed and block.storage >= 0 and block.last < len(graph.tasks) and block.storage not in silent
        # of kind parameter: what autocast made of one
        if inside and goes and graph.storages[block.storage].kind == "activation":
            made.append(
                Decision(
                    block.storage,
                    "recompute",
                    place="nowhere",
                    sources=sources[segment],
                    reason=f"segment {segment} runs anew",
                )
            )
    return made


def inputs(graph: SavedGraph) -> tuple[int, ...]:
    """Storages of the step's inputs that the forward reads."""
    read = {b for t in graph.tasks if t.phase == FORWARD for b in t.reads}
    return tuple(b.storage for b in graph.blocks if b.kind == "input" and b.id in read and b.storage >= 0)
