"""What the effects of one storage's decision depend on besides: the rest of the plan, read once, asked many times."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from gistkit.errors import PlanError
from gistkit.ir import LIBRARY, OPERATORS, RERUN, Decision, Plan
from gistkit.planning.simulate.segments import Segment, decoding, segments
from gistkit.planning.simulate.step_index import StepIndex, used_at

PLAIN_POLICIES = ("plain", "blocks")
"""Policies whose steps PyTorch's own operators run; see docs/planner.md, "plain and the runtime differ"."""
LAG = 4
"""How many later encodings a CUDA scratch lives on for, at most (``runtime.exact``)."""


def by_pytorch(plan: Plan) -> bool:
    """Whether PyTorch's own operators run a plan's step: all of it, or whole modules anew."""
    return plan.policy in PLAIN_POLICIES or bool(plan.modules)


@dataclass(frozen=True)
class Context:
    """What one block's effects read of the plan around it. ``plain``: the operators are PyTorch's own, or a library's.
    ``also``: tasks, by block, at which a rebuild or a rerun needs its values. ``encodings``: forward tasks that make a
    sparse encoding, in order. ``restart``: by block the task at which its segment runs anew. ``decoded_for_segment``:
    tasks, by block, before which it is decoded for a segment alone, which counts it. ``least``: the least memory that
    any set of encodings may take."""

    index: StepIndex
    plain: bool = False
    also: Mapping[int, frozenset[int]] = field(default_factory=dict)
    encodings: tuple[int, ...] = ()
    restart: Mapping[int, int] = field(default_factory=dict)
    segments: tuple[Segment, ...] = ()
    decoded_for_segment: Mapping[int, frozenset[int]] = field(default_factory=dict)
    least: bool = False

    @staticmethod
    def of(plan: Plan, index: StepIndex) -> Context:
        """The context that a plan gives. Raises PlanError for decisions that contradict each other."""
        decided = {index.block(d.storage).id: d for d in plan.decisions}
        if len(decided) < len(plan.decisions):
            raise PlanError("plan.decisions must hold one decision a storage, got two for one; drop one of them")
        parts, also = _needs(decided, index)
        parts = _with_decoded(parts, decided, index)
        if plan.modules:
            _hold_given(parts, index, also)
        return Context(
            index,
            by_pytorch(plan) or index.graph.source == LIBRARY,
            {b: frozenset(tasks) for b, tasks in also.items()},
            tuple(sorted(index.graph.blocks[b].saved for b, d in decided.items() if d.form.sparse)),
            {b: part.start for part in parts for b in part.blocks},
            parts,
            {b: frozenset(p.start for p in parts if b in p.decoded) for part in parts for b in part.decoded},
        )

    def scratch_end(self, task: int) -> int | None:
        """The task at which a scratch made at ``task`` is settled; None where no later encoding makes it so."""
        following = bisect_right(self.encodings, task) + LAG - 1
        return self.encodings[following] if following < len(self.encodings) else None


def _needs(decided: Mapping[int, Decision], index: StepIndex) -> tuple[tuple[Segment, ...], dict[int, set[int]]]:
    """The segments that run anew, and the tasks, by block, at which they and what is rebuilt need values. What is
    rebuilt from a segment's storage may need it earlier than its own uses: then starts move forward until they stay."""
    again = {b: d for b, d in decided.items() if d.form.returns == RERUN}
    rebuilt = (d for d in decided.values() if d.form.returns == OPERATORS) if again else ()
    chained = any(index.block(s).id in again for d in rebuilt for s in d.sources)
    parts = () if chained else segments(tuple(again.values()), index, decided)
    while True:
        also: dict[int, set[int]] = defaultdict(set)
        for part in parts:
            for block in part.needs:
                also[block].add(part.start)
        _spread(decided, index, also)
        if not chained:
            return parts, also
        found = segments(tuple(again.values()), index, decided, also)
        if [f.start for f in found] == [p.start for p in parts]:
            return found, also
        parts = found


def _hold_given(parts: Iterable[Segment], index: StepIndex, also: dict[int, set[int]]) -> None:
    """Add to ``also`` that what a module was given is held until nothing holds what it makes anew."""
    for part in parts:
        end = max((u.task for b in part.blocks for u in index.graph.blocks[b].uses), default=part.start)
        for block in part.needs:
            also[block].add(end)


def _with_decoded(parts: tuple[Segment, ...], decided: Mapping[int, Decision], index: StepIndex) -> tuple[Segment, ...]:
    """The segments, each with what is decoded for it alone: nothing else needs that at the task at which it starts."""
    able = {b for part in parts for b in part.needs if b in decided and decided[b].form.decoded_by_reader}
    if not able:
        return parts
    rebuilds: dict[int, set[int]] = defaultdict(set)
    for part in parts:
        for block in set(part.needs) - able:
            rebuilds[block].add(part.start)
    _spread(decided, index, rebuilds)
    wanted = Counter((b, part.start) for part in parts for b in part.needs)
    found = []
    for part in parts:
        own = {b for b in able.intersection(part.needs) if wanted[b, part.start] == 1}
        own = {b for b in own if part.start not in rebuilds[b] and not used_at(index.graph.blocks[b], part.start)}
        found.append(decoding(part, own, index) if own else part)
    return tuple(found)


def _spread(decided: Mapping[int, Decision], index: StepIndex, also: dict[int, set[int]]) -> None:
    """Add to ``also`` when the sources of rebuilt storages are needed, through chains of them. Raises PlanError where a
    source keeps no values, or a storage would be rebuilt from itself."""
    work = [b for b, d in decided.items() if d.form.returns == OPERATORS]
    turns = (len(work) + 1) ** 2
    while work:
        block = index.graph.blocks[work.pop()]
        decision = decided[block.id]
        tasks = also[block.id] | {u.task for u in block.uses if u.values or not decision.mask}
        turns -= 1
        for storage in decision.sources:
            source = index.block(storage)
            kept = decided.get(source.id)
            if turns < 0 or source.id == block.id:
                raise PlanError(f"storage {block.storage}: rebuilt from itself through {storage}; break the circle")
            if kept is not None and not kept.form.values:
                raise PlanError(
                    f"storage {block.storage} is rebuilt from storage {storage}, whose values {kept.codec!r} does not "
                    "keep; keep them in another form"
                )
            if not tasks <= also[source.id]:
                also[source.id] |= tasks
                if kept is not None and kept.form.returns == OPERATORS:
                    work.append(source.id)
