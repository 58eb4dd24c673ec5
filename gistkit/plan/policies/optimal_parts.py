"""What single decisions and what rebuilds with their sources add, computed by the planner's own effects.

A move's part is :func:`gistkit.plan.block_effects.block_effects` of it. A rebuild needs its sources at its own uses,
and through a rebuilt source that one's sources as well: what that adds to a source is the difference of the source's
effects with and without these tasks (:mod:`.optimal_joints`). A source that cannot serve them (it is still on the host,
it keeps no values) makes a conflict. Nothing is ever more than in the simulator: bounds are made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from gistkit.errors import PlanError
from gistkit.graph.tasks import Block
from gistkit.plan.block_effects import block_effects
from gistkit.plan.context import NO_VALUES, Context, StepIndex, is_sparse, used_at
from gistkit.plan.cost import CostTable
from gistkit.plan.intervals import Effects, Interval
from gistkit.plan.plan import Decision
from gistkit.plan.policies.lossy import intolerant, rounds
from gistkit.plan.policies.optimal_joints import Event, joints_of, levels
from gistkit.plan.policies.optimal_problem import Joint, Key, Part
from gistkit.plan.policies.optimal_segments import Candidate
from gistkit.plan.policies.reading import Reading
from gistkit.plan.policies.rebuild import MAX_DEPTH
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
    be one to the plan. ``borrows``: the segment, if there is one; ``coded``: those of its sources that may be kept in
    a form that is decoded, for the segment alone where nothing else needs it then."""

    key: Key
    block: int
    tasks: frozenset[int]
    slices: tuple[tuple[int, int], ...]
    sources: tuple[int, ...]
    borrows: Segment | None = None
    coded: frozenset[int] = frozenset()

    def excludes(self, other: Demand) -> bool:
        """Whether the two never go together: ways of one block, segments that bring one back or that are one."""
        again = self.borrows and other.borrows and set(self.borrows.blocks) & set(other.borrows.blocks)
        return bool(again) or self.block == other.block


class Parts:
    """Parts of moves, joint parts and conflicts of one graph under one context. ``known`` remembers effects, for all
    contexts that differ in their encodings only."""

    def __init__(self, costs: CostTable, index: StepIndex, context: Context, known: dict) -> None:
        self._costs, self._index, self._context, self._known = costs, index, context, known
        self._tasks = len(index.graph.tasks)
        self._reading = Reading(index.graph)

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
        kept in a form that is decoded. The task at which it starts reads what comes back, and is not cut for that."""
        segment = candidate.segment
        able, tasks = coded.intersection(segment.needs), frozenset((segment.start,))
        return Demand(key, -1 - min(candidate.sources), tasks, (), segment.needs, segment, able)

    def together(
        self, ways: Mapping[int, Sequence[tuple[Key, Way]]], demands: Sequence[Demand]
    ) -> tuple[list[Joint], list[tuple[Key, ...]]]:
        """Joint parts and conflicts; ``ways`` by block: the moves of what may be a source. Chains of more than
        MAX_DEPTH rebuilt storages are conflicts."""
        by_source: dict[int, list[Demand]] = defaultdict(list)
        for demand in demands:
            for source in demand.sources:
                by_source[source].append(demand)
        joints: list[Joint] = []
        chained = {b: [d for d in found if d.block >= 0] for b, found in by_source.items()}
        starts = [d for d in demands if d.block >= 0]
        conflicts: list[tuple[Key, ...]] = [c for d in starts for c in _chains((d,), chained)]
        for block, moves in ways.items():
            for key, way in moves:
                found, barred = self._serving(self._index.graph.blocks[block], key, way, by_source)
                joints += found
                conflicts += barred
        for demand in demands:
            if demand.borrows is not None and len(demand.coded) > 1:
                joints += self._borrowing(demand, demand.borrows, ways, by_source)
        return joints, conflicts

    def _serving(
        self, block: Block, key: Key, way: Way, by_source: Mapping[int, list[Demand]]
    ) -> tuple[list[Joint], list[tuple[Key, ...]]]:
        """What a source adds for the rebuilds and reruns that start from it: alone, in chains, and two that want it at
        one time."""
        direct = by_source.get(block.id, [])
        conflicts: set[tuple[Key, ...]] = set()
        added: dict[Event, Part] = {}
        alone = self._effects(block, way)
        for demands in _events(block.id, direct, by_source):
            event = tuple(d.key for d in demands)
            if any((*fewer, key) in conflicts for i in range(len(event)) for fewer in (event[i:], event[i : i + 1])):
                continue
            effects = self._serves(block, way, demands)
            if effects is None:
                conflicts.add((*event, key))
            else:
                added[event] = replace(self._part(((1, effects), (-1, alone))), transfers=())
        return joints_of((key,), added), sorted(conflicts)

    def _borrowing(
        self,
        demand: Demand,
        segment: Segment,
        ways: Mapping[int, Sequence[tuple[Key, Way]]],
        by_source: Mapping[int, list[Demand]],
    ) -> list[Joint]:
        """What a rerun takes more for several decoded sources, one and two at a time. Of one that something else may
        want at that time, nothing: it is then not decoded for the rerun alone."""
        index = self._index
        lent = [b for b in sorted(demand.coded) if not self._wanted(b, demand, by_source)]
        keys = {b: [k for k, way in ways.get(b, ()) if lends(way.decision)] for b in lent}
        added: dict[Event, Part] = {}
        for blocks in (*((b,) for b in lent), *combinations(lent, 2)):
            nbytes = _more_bytes(segment, blocks, index)
            if nbytes > 0:
                part = Part(((segment.start, segment.start, nbytes),))
                added |= dict.fromkeys(product(*(keys[b] for b in blocks)), part)
        return joints_of((demand.key,), added)

    def _wanted(self, block: int, demand: Demand, by_source: Mapping[int, list[Demand]]) -> bool:
        """Whether something else than a rerun may need a source when it runs anew."""
        (start,) = demand.tasks
        direct = by_source.get(block, [])
        needing = [d for event in _events(block, direct, by_source) for d in event if not d.excludes(demand)]
        others = any(start in d.tasks or d.block in demand.sources for d in needing)
        return others or used_at(self._index.graph.blocks[block], start)

    def _serves(self, block: Block, way: Way, demands: Sequence[Demand]) -> Effects | None:
        """A source's effects while it serves some rebuilds and reruns, None where it cannot. What is decoded for a
        rerun alone is counted with it, where it may be the only one."""
        tasks = frozenset().union(*(d.tasks for d in demands))
        away = way.decision.place == "host" and any(t < way.decision.prefetch for t in tasks)
        if away or way.decision.codec in ("recompute", *NO_VALUES):
            return None
        if rounds(way.decision.codec) and not all(map(self._bears_rounding, demands)):
            return None
        slices = [item for d in demands for item in d.slices]
        parts = [(d.borrows, d.coded) for d in demands if _borrows(d, block, way, demands)]
        lent = {s.start: _more_bytes(s, (block.id,), self._index) if len(c) < 2 else 0 for s, c in parts if s}
        try:
            found = self._effects(block, way, tasks, slices, frozenset(lent))
        except PlanError:
            return None
        more = (Interval(task, task, nbytes, block.id, "transient") for task, nbytes in lent.items())
        return replace(found, intervals=(*found.intervals, *more)) if lent else found

    def _bears_rounding(self, demand: Demand) -> bool:
        """Whether all that comes back has readers that may be given rounded values; rebuilt ReLUs have their masks."""
        again = demand.borrows
        storages = (self._index.graph.blocks[b].storage for b in (again.blocks if again else (demand.block,)))
        return all(intolerant(s, self._reading, masked=again is None) is None for s in storages)

    def _effects(
        self,
        block: Block,
        way: Way,
        also: frozenset[int] = frozenset(),
        more: Iterable[tuple[int, int]] = (),
        lent: frozenset[int] = frozenset(),
    ) -> Effects:
        slices = dict((*way.slices, *more))
        sparse = is_sparse(way.decision.codec)
        late = (self._context.scratch_end(block.saved), self._context.least) if sparse else None
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
        return Part(levels(steps), seconds, transfers if count > 0 else ())


def _events(
    block: int, direct: Sequence[Demand], by_source: Mapping[int, Sequence[Demand]]
) -> Iterator[tuple[Demand, ...]]:
    """What may need a block: each of its demands, those behind it with it, and two of which one would have it decoded
    for itself alone at a task at which the other needs it too."""
    work: list[tuple[Demand, ...]] = [(demand,) for demand in direct]
    for chain in work:
        yield chain
        if chain[0].block >= 0 and len(chain) <= MAX_DEPTH:
            work += [(further, *chain) for further in by_source.get(chain[0].block, ()) if further not in chain]
    for a, b in combinations(direct, 2):
        lent = any(d.borrows is not None and block in d.coded for d in (a, b))
        if lent and not a.excludes(b) and a.tasks & b.tasks:
            yield a, b


def _borrows(demand: Demand, block: Block, way: Way, demands: Sequence[Demand]) -> bool:
    """Whether a source is decoded for a rerun and for nothing else at that time: it does not start there by way of
    another's rebuild either."""
    if demand.borrows is None or block.id not in demand.sources or not lends(way.decision):
        return False
    start, others = demand.borrows.start, [d for d in demands if d is not demand]
    chained = any(d.block in demand.sources for d in others)
    return not chained and not used_at(block, start) and not any(start in d.tasks for d in others)


def _more_bytes(segment: Segment, blocks: Iterable[int], index: StepIndex) -> int:
    """Bytes that a rerun takes more for some decoded sources."""
    with_them = lending(segment, blocks, index)
    return sum(i.nbytes for i in with_them.passing()) - sum(i.nbytes for i in segment.passing())


def _chains(chain: tuple[Demand, ...], by_source: Mapping[int, list[Demand]]) -> Iterator[tuple[Key, ...]]:
    """The chains of MAX_DEPTH + 1 rebuilds that begin so."""
    if len(chain) > MAX_DEPTH:
        yield tuple(d.key for d in chain)
        return
    for further in by_source.get(chain[-1].block, ()):
        yield from _chains((*chain, further), by_source)
