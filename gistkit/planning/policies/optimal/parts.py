"""What single decisions and what rebuilds with their sources add, computed by the planner's own effects.

A move's part is :func:`gistkit.planning.simulate.block_effects.block_effects` of it. A rebuild needs its sources at
its own uses,
and through a rebuilt source that one's sources as well: what that adds to a source is the difference of the source's
effects with and without these tasks (:mod:`.optimal_joints`). A source that cannot serve them (it is still on the host,
it keeps no values) makes a conflict. Nothing is ever more than in the simulator: bounds are made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from gistkit.errors import PlanError
from gistkit.ir import Block, Decision, Reading
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import intolerant, rounds
from gistkit.planning.policies.optimal.demands import Demand, Need, chains, more_bytes, needs_of
from gistkit.planning.policies.optimal.joints import Event, joints_of, levels
from gistkit.planning.policies.optimal.problem import Joint, Key, Part
from gistkit.planning.policies.optimal.segments import Candidate
from gistkit.planning.simulate import (
    NO_VALUES,
    Context,
    Effects,
    Interval,
    Segment,
    StepIndex,
    Transfer,
    block_effects,
    is_decoded,
    is_sparse,
    used_at,
)

_SERVE_NOTHING = ("recompute", *NO_VALUES)
_NOTHING = Part()


@dataclass(frozen=True)
class Way:
    """A storage's decision with the batch slices, by task, of the weight gradients that read it, and the task before
    which its segment runs anew (-1: it has none)."""

    decision: Decision
    slices: tuple[tuple[int, int], ...] = ()
    restart: int = -1


class Parts:
    """Parts of moves, joint parts and conflicts of one graph under one context. ``known`` remembers effects, for all
    contexts that differ in their encodings only."""

    def __init__(self, costs: CostTable, index: StepIndex, context: Context, known: dict) -> None:
        self._costs, self._index, self._context, self._known = costs, index, context, known
        self._tasks = len(index.graph.tasks)
        self._reading = Reading(index.graph)
        self._bearing: dict[Demand, bool] = {}

    def of(self, block: Block, way: Way) -> Part:
        """What a way of treating a block adds by itself. Raises PlanError where it makes no sense."""
        return self._part(self._effects(block, way), self._sums(way))

    def demands(self, key: Key, block: Block, way: Way) -> Demand:
        """The demand of a rebuild."""
        tasks = frozenset(u.task for u in block.uses if u.values or not way.decision.mask)
        sources = tuple(self._index.block(s).id for s in way.decision.sources)
        return Demand(key, block.id, tasks, way.slices, sources)

    def segment(self, candidate: Candidate) -> Part:
        """What the rerun of a segment adds, its storages' lives apart."""
        segment = candidate.segment
        seconds = sum(self._costs.task_s(t) for t in segment.tasks)
        return self._part(Effects(segment.passing(), ((segment.start, seconds),)))

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
        conflicts: list[tuple[Key, ...]] = [c for d in starts for c in chains((d,), chained)]
        needs = {b: needs_of(self._index.graph.blocks[b], by_source, self._index) for b in ways}
        for number, moves in ways.items():
            for key, way in moves if needs[number] else ():
                found, barred = self._serving(self._index.graph.blocks[number], key, way, needs[number])
                joints += found
                conflicts += barred
        for demand in demands:
            if demand.borrows is not None and len(demand.coded) > 1:
                joints += self._borrowing(demand, demand.borrows, ways, needs)
        return joints, conflicts

    def _serving(
        self, block: Block, key: Key, way: Way, needs: Sequence[Need]
    ) -> tuple[list[Joint], list[tuple[Key, ...]]]:
        """What a source adds for the rebuilds and reruns that start from it: alone, in chains, and two that want it at
        one time."""
        barred: set[Event] = set()
        added: dict[Event, Part] = {}
        own = self._effects(block, way)
        alone = _Sum()
        alone.add(own, -1, self._tasks)
        for need in needs:
            if not barred.isdisjoint(need.fewer):
                continue
            effects = self._serves(block, way, need)
            if effects is None:
                barred.add(need.event)
            elif (effects.intervals, effects.extra_s) == (own.intervals, own.extra_s):
                added[need.event] = _NOTHING
            else:
                both = alone.copy()
                both.add(effects, 1, self._tasks)
                added[need.event] = both.part()
        return joints_of((key,), added), sorted((*event, key) for event in barred)

    def _borrowing(
        self,
        demand: Demand,
        segment: Segment,
        ways: Mapping[int, Sequence[tuple[Key, Way]]],
        needs: Mapping[int, Sequence[Need]],
    ) -> list[Joint]:
        """What a rerun takes more for several decoded sources, one and two at a time. Of one that something else may
        want at that time, nothing: it is then not decoded for the rerun alone."""
        index = self._index
        lent = [b for b in sorted(demand.coded) if not self._wanted(b, demand, needs[b])]
        keys = {b: [k for k, way in ways.get(b, ()) if is_decoded(way.decision)] for b in lent}
        added: dict[Event, Part] = {}
        for blocks in (*((b,) for b in lent), *combinations(lent, 2)):
            nbytes = more_bytes(segment, blocks, index)
            if nbytes > 0:
                part = Part(((segment.start, segment.start, nbytes),))
                added |= dict.fromkeys(product(*(keys[b] for b in blocks)), part)
        return joints_of((demand.key,), added)

    def _wanted(self, block: int, demand: Demand, needs: Sequence[Need]) -> bool:
        """Whether something else than a rerun may need a source when it runs anew."""
        (start,) = demand.tasks
        needing = [d for need in needs for d in need.demands if not d.excludes(demand)]
        others = any(start in d.tasks or d.block in demand.sources for d in needing)
        return others or used_at(self._index.graph.blocks[block], start)

    def _serves(self, block: Block, way: Way, need: Need) -> Effects | None:
        """A source's effects while it serves some rebuilds and reruns, None where it cannot. What is decoded for a
        rerun alone is counted with it, where it may be the only one."""
        decision = way.decision
        away = decision.place == "host" and any(t < decision.prefetch for t in need.tasks)
        if away or decision.codec in _SERVE_NOTHING:
            return None
        if rounds(decision.codec) and not all(map(self._bears_rounding, need.demands)):
            return None
        lent = need.lent if need.lent and is_decoded(decision) else ()
        try:
            found = self._effects(block, way, need.tasks, need.slices, frozenset(task for task, _ in lent))
        except PlanError:
            return None
        more = (Interval(task, task, nbytes, block.id, "transient") for task, nbytes in lent)
        return replace(found, intervals=(*found.intervals, *more)) if lent else found

    def _bears_rounding(self, demand: Demand) -> bool:
        """Whether all that comes back has readers that may be given rounded values; rebuilt ReLUs have their masks."""
        known = self._bearing.get(demand)
        if known is None:
            again = demand.borrows
            storages = (self._index.graph.blocks[b].storage for b in (again.blocks if again else (demand.block,)))
            known = all(intolerant(s, self._reading, masked=again is None) is None for s in storages)
            self._bearing[demand] = known
        return known

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
                context = replace(
                    context, slices=slices, also=needs, restart=restart, decoded_for_segment={block.id: lent}
                )
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

    def _part(self, *terms: Effects) -> Part:
        """A sum of effects; transfers are those of the first with any."""
        total = _Sum()
        for effects in terms:
            total.add(effects, 1, self._tasks)
        return total.part(next((e.transfers for e in terms if e.transfers), ()))


class _Sum:
    """Effects added up with signs: steps of memory and seconds, by task."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._extra: dict[int, float] = {}

    def copy(self) -> _Sum:
        other = _Sum()
        other._steps, other._extra = self._steps.copy(), self._extra.copy()
        return other

    def add(self, effects: Effects, sign: int, tasks: int) -> None:
        steps, extra = self._steps, self._extra
        for first, last, nbytes, _, _ in effects.intervals:
            if last >= 0 and first < tasks:
                begin, end = max(first, 0), min(last, tasks - 1) + 1
                steps[begin] = steps.get(begin, 0) + sign * nbytes
                steps[end] = steps.get(end, 0) - sign * nbytes
        for task, seconds in effects.extra_s:
            extra[task] = extra.get(task, 0.0) + sign * seconds

    def part(self, transfers: tuple[Transfer, ...] = ()) -> Part:
        seconds = tuple((t, s) for t, s in sorted(self._extra.items()) if abs(s) > 1e-15)
        return Part(levels(self._steps), seconds, transfers)
