"""What single decisions and what rebuilds with their sources add, computed by the planner's own effects.

A move's part is :func:`gistkit.plan.block_effects.block_effects` of it. A rebuild needs its sources at its own uses,
and through a rebuilt source that one's sources as well: what that adds to a source is the difference of the source's
effects with and without these tasks. A source that cannot serve them (it is still on the host, it keeps no values)
makes a conflict.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gistkit.errors import PlanError
from gistkit.graph.tasks import Block
from gistkit.plan.block_effects import block_effects
from gistkit.plan.context import NO_VALUES, Context, StepIndex, is_sparse, used_at
from gistkit.plan.cost import CostTable
from gistkit.plan.intervals import Effects, Interval
from gistkit.plan.plan import Decision
from gistkit.plan.policies.optimal_problem import Joint, Key, Part
from gistkit.plan.policies.optimal_segments import Candidate
from gistkit.plan.segments import Segment, lending, lends

Slices = Mapping[int, int]


@dataclass(frozen=True)
class Way:
    """A storage's decision with the batch slices, by task, of the weight gradients that read it, and the task before
    which its segment runs anew (-1: it has none)."""

    decision: Decision
    slices: tuple[tuple[int, int], ...] = ()
    restart: int = -1


@dataclass(frozen=True)
class Demand:
    """A rebuild: its key, its block, the tasks at which it needs its sources, how it is cut, its sources' blocks. Or a
    segment that runs anew: its block is negative, the same for all that start from one storage, as two of them would
    be one to the plan. ``borrows``: the segment, where of all that it needs one source alone may be decoded for it."""

    key: Key
    block: int
    tasks: frozenset[int]
    slices: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]
    borrows: Segment | None = None


class Parts:
    """Parts of moves, joint parts and conflicts of one graph under one context. ``known`` remembers effects, for all
    contexts that differ in their encodings only."""

    def __init__(self, costs: CostTable, index: StepIndex, context: Context, known: dict) -> None:
        self._costs, self._index, self._context, self._known = costs, index, context, known
        self._tasks = len(index.graph.tasks)

    def of(self, block: Block, way: Way) -> Part:
        """What a way of treating a block adds by itself. Raises PlanError where it makes no sense."""
        return self._part(((1, self._effects(block, way)), (1, self._sums(way))))

    def demands(self, key: Key, block: Block, way: Way) -> Demand:
        """The demand of a rebuild."""
        tasks = frozenset(u.task for u in block.uses if u.values or not way.decision.mask)
        sources = tuple(self._index.block(s).id for s in way.decision.sources)
        return Demand(key, block.id, tasks, way.slices, sources)

    def segment(self, candidate: Candidate) -> Part:
        """What the rerun of a segment adds, its storages' lives apart."""
        segment = candidate.segment
        seconds = sum(self._costs.task_s(t) for t in segment.tasks)
        return self._part(((1, Effects(segment.passing(), ((segment.start, seconds),))),))

    def rerun(self, key: Key, candidate: Candidate, coded: frozenset[int]) -> Demand:
        """The demand of a segment: what it starts from has its values when it runs anew. ``coded``: blocks that may be
        kept in a form that is decoded. What several of them take together is no sum, and counted as if the task's own
        memory came on top."""
        segment = candidate.segment
        borrows = segment if len(coded.intersection(segment.needs)) == 1 else None
        return Demand(key, -1 - min(candidate.sources), frozenset((segment.start,)), (), segment.needs, borrows)

    def together(
        self, ways: Mapping[int, Sequence[tuple[Key, Way]]], demands: Sequence[Demand], depth: int
    ) -> tuple[list[Joint], list[tuple[Key, ...]]]:
        """Joint parts and conflicts; ``ways`` by block: the moves of what may be a source. Chains of more than
        ``depth`` rebuilt storages are conflicts."""
        by_source: dict[int, list[Demand]] = defaultdict(list)
        for demand in demands:
            for source in demand.sources:
                by_source[source].append(demand)
        joints: list[Joint] = []
        chained = {b: [d for d in found if d.block >= 0] for b, found in by_source.items()}
        starts = [d for d in demands if d.block >= 0]
        conflicts: list[tuple[Key, ...]] = [c for d in starts for c in _chains((d,), chained, depth)]
        for block, moves in ways.items():
            for key, way in moves:
                found, barred = self._serving(self._index.graph.blocks[block], key, way, by_source)
                joints += found
                conflicts += barred
        return joints, conflicts

    def _serving(
        self, block: Block, key: Key, way: Way, by_source: Mapping[int, list[Demand]]
    ) -> tuple[list[Joint], list[tuple[Key, ...]]]:
        """What a source adds for the rebuilds that start from it, alone, in chains and two at a time."""
        direct = by_source.get(block.id, [])
        joints: list[Joint] = []
        conflicts: list[tuple[Key, ...]] = []
        alone = self._effects(block, way)
        known: dict[tuple[Key, ...], Any] = {(): alone}
        for demand in direct:
            effects = known[(demand.key,)] = self._serves(block, way, (demand,))
            if effects is None:
                conflicts.append((demand.key, key))
            else:
                joints.append(Joint((demand.key, key), self._part(((1, effects), (-1, alone)))))
        for demand in direct:
            for further in by_source.get(demand.block, ()) if demand.block >= 0 else ():
                if known[(demand.key,)] is None or known.get((further.key,), 0) is None:
                    continue
                effects = self._serves(block, way, (demand, further), borrowed=False)
                keys = (further.key, demand.key, key)
                if effects is None:
                    conflicts.append(keys)
                    continue
                terms = [(1, effects), (-1, known[(demand.key,)])]
                if (further.key,) in known:
                    terms += [(-1, known[(further.key,)]), (1, alone)]
                joints.append(Joint(keys, self._part(terms)))
        joints += self._overlaps(block, key, way, direct, known)
        return [j for j in joints if j.part != Part()], conflicts

    def _overlaps(self, block: Block, key: Key, way: Way, direct: Sequence[Demand], known: dict) -> Iterator[Joint]:
        """Two rebuilds of one source that are not one behind the other: what both want is there but once."""
        for a, b in combinations(direct, 2):
            if a.block == b.block or a.block in b.sources or b.block in a.sources:
                continue
            if known[(a.key,)] is None or known[(b.key,)] is None:
                continue
            both = self._serves(block, way, (a, b))
            if both is not None:
                terms = ((1, both), (-1, known[(a.key,)]), (-1, known[(b.key,)]), (1, known[()]))
                yield Joint((a.key, b.key, key), self._part(terms))

    def _serves(self, block: Block, way: Way, demands: Sequence[Demand], *, borrowed: bool = True) -> Effects | None:
        """A source's effects while it serves some rebuilds and reruns, None where it cannot. ``borrowed``: what is
        decoded for a rerun alone is counted with it."""
        tasks = frozenset().union(*(d.tasks for d in demands))
        away = way.decision.place == "host" and min(tasks) < way.decision.prefetch
        if away or way.decision.codec in ("recompute", *NO_VALUES):
            return None
        slices = [item for d in demands for item in d.slices]
        parts = [d.borrows for d in demands if borrowed and _borrows(d, block, way, demands)]
        lent = {s.start: _more_bytes(s, block, self._index) for s in parts if s is not None}
        try:
            found = self._effects(block, way, tasks, slices, frozenset(lent))
        except PlanError:
            return None
        more = (Interval(task, task, nbytes, block.id, "transient") for task, nbytes in lent.items())
        return replace(found, intervals=(*found.intervals, *more)) if lent else found

    def _effects(
        self,
        block: Block,
        way: Way,
        also: frozenset[int] = frozenset(),
        more: Iterable[tuple[int, int]] = (),
        lent: frozenset[int] = frozenset(),
    ) -> Effects:
        slices = dict((*way.slices, *more))
        late = self._context.scratch_end(block.saved) if is_sparse(way.decision.codec) else None
        key = (block.id, way.decision, also, tuple(sorted(slices.items())), late, way.restart, lent)
        found = self._known.get(key)
        if found is None:
            context = self._context
            if slices or also or way.restart >= 0:
                restart = {block.id: way.restart} if way.restart >= 0 else None
                needs = {block.id: also} if also else None
                context = replace(context, slices=slices, also=needs, restart=restart, lent={block.id: lent})
            found = self._known[key] = block_effects(self._index.graph, self._costs, way.decision, block, context)
        return found

    def _sums(self, way: Way) -> Effects:
        """A weight gradient in slices: the sum and one part of it are there at once."""
        graph = self._index.graph
        found = []
        for task, _ in way.slices:
            blocks = (graph.blocks[b] for b in graph.tasks[task].writes)
            nbytes = sum(b.nbytes for b in blocks if b.kind == "weight_gradient")
            found.append(Interval(task, task, nbytes, -1, "transient"))
        return Effects(tuple(found))

    def _part(self, terms: Iterable[tuple[int, Effects]]) -> Part:
        """A sum of effects with signs; transfers are those of the first with any, where the sum has one left."""
        steps: dict[int, int] = defaultdict(int)
        extra: dict[int, float] = defaultdict(float)
        transfers, count = (), 0
        for sign, effects in terms:
            for i in effects.intervals:
                if i.last >= 0 and i.first < self._tasks:
                    steps[max(i.first, 0)] += sign * i.nbytes
                    steps[min(i.last, self._tasks - 1) + 1] -= sign * i.nbytes
            for task, seconds in effects.extra_s:
                extra[task] += sign * seconds
            transfers, count = transfers or effects.transfers, count + sign * len(effects.transfers)
        seconds = tuple((t, s) for t, s in sorted(extra.items()) if abs(s) > 1e-15)
        return Part(_levels(steps), seconds, transfers if count > 0 else ())


def _borrows(demand: Demand, block: Block, way: Way, demands: Sequence[Demand]) -> bool:
    """Whether a source is decoded for a rerun and for nothing else at that time."""
    if demand.borrows is None or block.id not in demand.sources or not lends(way.decision):
        return False
    start = demand.borrows.start
    return not used_at(block, start) and not any(start in d.tasks for d in demands if d is not demand)


def _more_bytes(segment: Segment, block: Block, index: StepIndex) -> int:
    """Bytes that a rerun takes more for one decoded source."""
    with_it = lending(segment, (block.id,), index)
    return sum(i.nbytes for i in with_it.passing()) - sum(i.nbytes for i in segment.passing())


def _levels(steps: Mapping[int, int]) -> tuple[tuple[int, int, int], ...]:
    """(first, last, bytes) of the runs in which a sum of steps is not zero."""
    found, level, before = [], 0, 0
    for task in sorted(steps):
        if steps[task] == 0:
            continue
        if level:
            found.append((before, task - 1, level))
        level, before = level + steps[task], task
    return tuple(found)


def _chains(chain: tuple[Demand, ...], by_source: Mapping[int, list[Demand]], depth: int) -> Iterator[tuple[Key, ...]]:
    """The chains of depth + 1 rebuilds that begin so."""
    if len(chain) > depth:
        yield tuple(d.key for d in chain)
        return
    for further in by_source.get(chain[-1].block, ()):
        yield from _chains((*chain, further), by_source, depth)
