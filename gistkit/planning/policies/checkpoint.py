"""checkpoint: segments of the forward run again in backward (Chen et al., "Training deep nets with sublinear memory
cost", 2016). The runtime carries such plans out (:mod:`gistkit.runtime.recompute.replay`).

The forward is cut where a single feature map connects what is before to what is after, and where such places are far
apart (skips of a U-Net, two streams of a transformer) where few bytes do. With n places about sqrt(n) segments keep the
sum of boundaries and of one segment's insides least. Only the boundaries are kept; the last segment is kept whole, as
``torch.utils.checkpoint.checkpoint_sequential`` does, since its backward comes at once. What an op keeps for itself (a
pool's map, a dropout's mask) stays, and what is small (a norm's statistics), whose return costs the host as much as a
feature map's. A segment that cannot run again (:mod:`gistkit.planning.forms.recompute`) is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, pairwise
from math import isqrt
from typing import NamedTuple

from gistkit.ir import FORWARD, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import SMALL_SHARE, Replays, held, make_plan, own_decisions
from gistkit.planning.simulate import Simulator

_AROUND_ROOT = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)


_APART = 0.15  # of the bytes that are held: places with more between them are far apart
_WIDE = 2  # times the bytes that the second of two such places adds to what is read across are held between them


class Cut(NamedTuple):
    """A place between two forward tasks: the task before it, and the blocks that are read across it, by age."""

    task: int
    blocks: tuple[int, ...]


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
        boundaries = {graph.blocks[b].storage for c in chosen for b in c.blocks}
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
    """The places where one block alone is read across, in order; the last of those with the same block. Where these
    are far apart, also places between them: those that add few bytes to what is read across the place before, where a
    cut behind the next task would add more. The step's inputs and targets are there whatever is cut; what does not
    come of both them and parameters, as a mask or a bias by position, is there or made anew."""
    crossing = _crossing(graph)
    found = {c.blocks[-1]: c for c in crossing if len(c.blocks) == 1}
    sums, places = _held_until(graph), [*found.values()]
    far = _APART * sums(len(graph.tasks))
    for before, behind in pairwise([None, *places, None]):
        first, end = before.task + 1 if before else 0, behind.task if behind else len(crossing)
        if sums(end) - sums(first - 1) > far:
            found.update(_narrow(graph, crossing[first:end], before, sums))
    return tuple(sorted(found.values()))


def _crossing(graph: SavedGraph) -> list[Cut]:
    """Behind each task of the forward but the last, what is read across."""
    forward = [t for t in graph.tasks if t.phase == FORWARD]
    made = graph.trained & graph.made_of("input")
    maps = {b.id for b in graph.blocks if b.kind in ("activation", "input") and (b.storage < 0 or b.storage in made)}
    last_read = {b: t.index for t in forward for b in t.reads}
    before: set[int] = set()
    across: dict[int, None] = {}
    found = []
    for task in forward[:-1]:
        new = maps.intersection(task.writes) - before
        before.update(task.reads, task.writes)
        across.update(dict.fromkeys(sorted(b for b in new if last_read.get(b, -1) > task.index)))
        across = {b: None for b in across if last_read[b] > task.index}
        found.append(Cut(task.index, tuple(across)))
    return found


def _narrow(
    graph: SavedGraph, crossing: list[Cut], before: Cut | None, sums: Callable[[int], int]
) -> Iterator[tuple[int, Cut]]:
    """The further places behind ``before``, by their youngest block. What they add is saved for backward anyhow."""
    known, begun = before or Cut(-1, ()), before.task if before else -1
    for place, following in pairwise(crossing):
        new, behind = (set(c.blocks).difference(known.blocks) for c in (place, following))
        added, there = _bytes(graph, new), all(graph.blocks[b].saved >= 0 for b in new)
        there = there and all(graph.blocks[b].storage >= 0 for b in place.blocks)
        if there and 0 < _WIDE * added <= sums(place.task) - sums(begun) and _bytes(graph, behind) > added:
            known, begun = place, place.task
            yield place.blocks[-1], place


def _bytes(graph: SavedGraph, blocks: Iterable[int]) -> int:
    return sum(graph.blocks[b].nbytes for b in blocks)


def _held_until(graph: SavedGraph) -> Callable[[int], int]:
    """The bytes that plain PyTorch holds for backward of what is made until a task, that one among them."""
    kept = sorted(held(graph), key=lambda b: b.first)
    firsts, sums = [b.first for b in kept], [0, *accumulate(b.nbytes for b in kept)]
    return lambda task: sums[bisect_right(firsts, task)]


def evenly(graph: SavedGraph, places: tuple[Cut, ...], segments: int) -> list[Cut]:
    """Cuts into segments of about equally many bytes; a smaller boundary is worth as much unevenness."""
    until = _held_until(graph)
    sizes = [(until(c.task), _bytes(graph, c.blocks), c) for c in places]
    most = until(len(graph.tasks))
    targets = [most * i / segments for i in range(1, min(segments, len(places) + 1))]
    return sorted({min(sizes, key=lambda s: abs(s[0] - target) + s[1])[2] for target in targets})


def rerun_between(graph: SavedGraph, chosen: list[Cut], dense: set[int]) -> list[Decision]:
    """What the segments before the last cut keep for backward runs again, each from its boundary, but for ``dense``."""
    boundaries = {b for c in chosen for b in c.blocks}
    starts = [-1, *(c.task for c in chosen)]
    sources = [inputs(graph), *(sources_of(graph, begin, end) for begin, end in pairwise(chosen))]
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


def sources_of(graph: SavedGraph, begin: Cut, end: Cut) -> tuple[int, ...]:
    """What a segment between two places starts from: the storages of its tasks' operands that are read across the first
    one, and of the youngest, by which two segments differ."""
    read = {b for t in graph.tasks[begin.task + 1 : end.task + 1] for b in t.reads}
    return tuple(graph.blocks[b].storage for b in begin.blocks if b in read or b == begin.blocks[-1])


def inputs(graph: SavedGraph) -> tuple[int, ...]:
    """Storages of the step's inputs that the forward reads."""
    read = {b for t in graph.tasks if t.phase == FORWARD for b in t.reads}
    return tuple(b.storage for b in graph.blocks if b.kind == "input" and b.id in read and b.storage >= 0)
