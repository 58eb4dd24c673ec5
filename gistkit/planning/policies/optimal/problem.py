"""The choice that `optimal` makes: groups of variants, what each adds to the step, what each asks of others.

What a variant adds is the simulator's own figure (:func:`gistkit.planning.simulate.block_effects`). A rebuild needs the
values of the storages that it is made from, a segment those of the storages that it starts from: that is a
:class:`SourceUse`, and what all uses ask of one storage together is a :class:`Requirement`. ``delta(key, requirement)``
is exact. ``least(key)``, without any requirement, is never more: bounds are made of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gistkit.errors import PlanError
from gistkit.ir import BACKWARD, NEVER, OPERATORS, RERUN, Block, Decision, Plan, Reading, SavedGraph, scaled
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import call_choices, intolerant, options, rounds, shipped_until
from gistkit.planning.policies.optimal.delta import Delta, level_of
from gistkit.planning.policies.optimal.link import Link
from gistkit.planning.policies.optimal.segments import candidates
from gistkit.planning.policies.optimal.variants import Options, Variant, of_convolutions, of_storages
from gistkit.planning.policies.optimal.whole import Allowed
from gistkit.planning.simulate import (
    Context,
    Effects,
    Interval,
    Segment,
    Simulator,
    StepIndex,
    block_effects,
    decoding,
    is_decoded,
    scaled_costs,
)

Key = tuple[int, int]
"""(group, variant)."""
SETTLING = 16
"""Encodings at one task that settle an earlier scratch there, more than any needs."""


@dataclass(frozen=True)
class SourceUse:
    """What a variant (``key``) asks of the groups ``sources``: their values before ``tasks``, where those run in
    ``slices``. ``exact``: something that comes back has a reader that bears no rounded values."""

    key: Key
    sources: tuple[int, ...]
    tasks: frozenset[int]
    slices: tuple[tuple[int, int], ...]
    exact: bool
    segment: Segment | None = None


class Requirement(NamedTuple):
    """What is asked of one storage, if it is: its values before ``tasks``, which run in ``slices``; ``decoded``: those
    of the tasks at which a segment alone has it decoded, and counts that; ``depth``: rebuilds that follow from it, one
    from the other."""

    asked: bool = False
    tasks: frozenset[int] = frozenset()
    slices: tuple[tuple[int, int], ...] = ()
    decoded: frozenset[int] = frozenset()
    exact: bool = False
    depth: int = 0


NOTHING = Requirement()


class Problem:
    """All choices for a step in ``parts`` sub-batches. Seconds and bytes are those of one of them.

    ``listed`` restricts the forms by storage, and leaves segments out.
    """

    def __init__(
        self,
        graph: SavedGraph,
        costs: CostTable,
        simulator: Simulator,
        allowed: Allowed,
        *,
        parts: int = 1,
        listed: Options | None = None,
    ) -> None:
        self.parts, self.simulator, self.allowed = parts, simulator, allowed
        self.graph = scaled(graph, parts)
        self.costs = costs if parts == 1 else scaled_costs(costs, graph, self.graph)
        self.index, self.link = StepIndex(self.graph), Link.of(costs.hardware)
        again = allowed.recompute and listed is None
        found = options(self.graph, self.costs, allowed.fidelity, allowed.lossy) if listed is None else listed
        self.listed = {s: tuple(decisions) for s, decisions in found.items()}
        free = {s: decisions[0] for s, decisions in self.listed.items() if decisions[0].form.gone}
        self.choices = call_choices(Reading(self.graph), free)
        self.segments, self.layouts = candidates(self.index, self.listed) if again else ((), [])
        self._offer_early()
        reading = Reading(self.graph)
        self._strict = cache(lambda storage, masked: intolerant(storage, reading, masked) is not None)
        self.bare = Plan("optimal", graph.fingerprint, (), self.choices, sub_batches=parts, fidelity=allowed.fidelity)
        self._context = Context.of(self.bare, self.index)
        self._known: dict[tuple, Delta | None] = {}
        self.blocks, forms = of_storages(self.index, self.listed, self.segments, allowed.fidelity)
        self.of_block = {block.id: g for g, block in enumerate(self.blocks)}
        self._base()
        groups = [self._possible(block, variants) for block, variants in zip(self.blocks, forms, strict=True)]
        self.first_segment = len(groups)
        groups += [(Variant(), Variant(segment=s)) for s in range(len(self.segments))]
        self.first_convolution = len(groups)
        self._set_groups((*groups, *(of_convolutions(self.index, self.costs) if allowed.algorithms else ())))

    def _offer_early(self) -> None:
        """What a segment starts from may come back from the host for it, before its own first use."""
        starts: dict[int, set[int]] = defaultdict(set)
        for candidate in self.segments:
            for storage in candidate.sources:
                if len(self.listed.get(storage, ())) > 1:
                    starts[storage].add(candidate.segment.start)
        for storage, more in shipped_until(self.graph, self.costs, starts, self.allowed.lossy).items():
            self.listed[storage] = tuple(dict.fromkeys((*self.listed[storage], *more)))

    def _base(self) -> None:
        """What no choice changes."""
        bare = self.simulator.profile(self.bare)
        rest = Effects(tuple(i for i in bare.intervals if i.block not in self.of_block))
        self.tasks = bare.tasks
        self.base_bytes = level_of([Delta.of(rest, bare.tasks, self.link)], np.zeros(bare.tasks, dtype=np.int64))
        self.base_s = np.array(bare.task_s) + np.array(bare.extra_s)

    def _possible(self, block: Block, variants: Iterable[Variant]) -> tuple[Variant, ...]:
        """The variants that make sense; a seed's may lean on its own policy's way of running."""
        found = tuple(v for v in variants if self._effects(block, v, NOTHING, None, False) is not None)
        return found or (Variant(Decision(block.storage, "dense", reason="kept: nothing else is allowed")),)

    def offering(self, decisions: Iterable[Decision]) -> Problem:
        """The same problem with more forms of storages; variants keep their numbers."""
        other, groups = copy(self), list(self.groups)
        for decision in decisions:
            group = self.of_block[self.index.block(decision.storage).id]
            if all(v.decision != decision for v in groups[group]):
                groups[group] += self._possible(self.blocks[group], [Variant(decision)])
        other._set_groups(tuple(groups))
        return other

    def _set_groups(self, groups: tuple[tuple[Variant, ...], ...]) -> None:
        """Groups of storages, of segments, of convolutions, in this order, and what is looked up of them."""
        self.groups = groups
        self.keys = [(g, v) for g, group in enumerate(groups) for v in range(len(group))]
        self.offsets = np.concatenate(([0], np.cumsum([len(group) for group in groups]))).astype(int)
        self.home = [_home(group) for group in groups]
        self.owner: dict[Key, int] = {}
        """By variant of a storage the group of the segment with which it is taken."""
        self.members: dict[int, list[Key]] = {g: [] for g in range(self.first_segment, self.first_convolution)}
        for g, v in self.keys:
            segment = self.first_segment + groups[g][v].segment
            if segment >= self.first_segment and g < self.first_segment:
                self.owner[g, v] = segment
                self.members[segment].append((g, v))
        self._set_uses()
        self._set_least()

    def _set_uses(self) -> None:
        self.uses: dict[Key, SourceUse] = {}
        self.uses_of: dict[int, list[SourceUse]] = defaultdict(list)
        self.alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """Groups of segments by what they start from."""
        for g, v in self.keys:
            variant = self.groups[g][v]
            if variant.decision is not None and variant.decision.form.returns == OPERATORS:
                block, segment = self.blocks[g], None
                tasks = frozenset(u.task for u in block.uses if u.values or not variant.decision.mask)
                blocks = [self.index.block(s).id for s in variant.decision.sources]
                exact = self._strict(block.storage, masked=True)
            elif variant.segment >= 0 and variant.decision is None:
                segment = self.segments[variant.segment].segment
                tasks, blocks = frozenset((segment.start,)), segment.needs
                exact = any(self._strict(self.graph.blocks[b].storage, masked=False) for b in segment.blocks)
            else:
                continue
            sources = tuple(dict.fromkeys(self.of_block[b] for b in blocks if b in self.of_block))
            self.uses[g, v] = use = SourceUse((g, v), sources, tasks, variant.slices, exact, segment)
            if segment is not None:
                self.alike[self.segments[variant.segment].sources].append(g)
            for source in sources:
                self.uses_of[source].append(use)

    def _set_least(self) -> None:
        """What every variant adds at least."""
        decisions = {key: self.groups[key[0]][key[1]].decision for key in self.keys}
        self.decoded = {key for key, decision in decisions.items() if is_decoded(decision)}
        """Variants whose values are decoded at each use."""
        sparse = (key for key, decision in decisions.items() if decision is not None and decision.form.sparse)
        self.late = set(sparse if self.costs.hardware.async_counts else ())
        """Variants of a size that is known late (CUDA): their scratches go once some later ones are encoded."""
        every = Context(self.index, encodings=tuple(sorted({self.blocks[g].saved for g, _ in self.late})))
        backward = next((t.index for t in self.graph.tasks if t.phase == BACKWARD), self.tasks)
        self.least: list[Delta] = []
        for g, v in self.keys:
            late = None
            if (g, v) in self.late:
                settled = every.scratch_end(self.blocks[g].saved)
                late = backward if settled is None else settled
            found = self.delta((g, v), NOTHING, late, least=True)
            assert found is not None
            self.least.append(found)

    def delta(self, key: Key, need: Requirement, late: int | None = None, *, least: bool = False) -> Delta | None:
        """What a variant adds where ``need`` is asked of its storage; None where it cannot serve that. ``late``: the
        task at which its scratch goes, if before its use; ``least``: at the earliest. Of a segment ``need.decoded`` are
        the blocks that it has decoded for itself."""
        group, number = key
        variant = self.groups[group][number]
        if group >= self.first_convolution:
            return variant.delta
        known = (key, need.tasks, need.slices, need.decoded, late, least)
        if group < self.first_segment and not self.serves(variant, need):
            return None
        if known not in self._known:
            if group < self.first_segment:
                self._known[known] = self._effects(self.blocks[group], variant, need, late, least)
            else:
                self._known[known] = self._rerun(variant, need.decoded)
        return self._known[known]

    @staticmethod
    def serves(variant: Variant, need: Requirement) -> bool:
        decision = variant.decision
        assert decision is not None
        if not need.asked:
            return True
        if decision.form.returns in (RERUN, NEVER) or (need.exact and rounds(decision.codec)):
            return False
        return not decision.on_host or all(t >= decision.prefetch for t in need.tasks)

    def _rerun(self, variant: Variant, decoded: frozenset[int]) -> Delta:
        if variant.segment < 0:
            return Delta()
        segment = decoding(self.segments[variant.segment].segment, decoded, self.index)
        seconds = sum(self.costs.task_s(t) for t in segment.tasks)
        return Delta.of(Effects(segment.passing(), ((segment.start, seconds),)), len(self.graph.tasks), self.link)

    def _effects(
        self, block: Block, variant: Variant, need: Requirement, late: int | None, least: bool
    ) -> Delta | None:
        assert variant.decision is not None
        context = replace(
            self._context,
            slices=dict((*need.slices, *variant.slices)),
            also={block.id: need.tasks},
            encodings=() if late is None else (late,) * SETTLING,
            restart={block.id: self.segments[variant.segment].segment.start} if variant.segment >= 0 else None,
            decoded_for_segment={block.id: need.decoded},
            least=least,
        )
        try:
            found = block_effects(self.graph, self.costs, variant.decision, block, context)
        except PlanError:
            return None
        sums = tuple(self._sums(variant))
        return Delta.of(replace(found, intervals=(*found.intervals, *sums)), len(self.graph.tasks), self.link)

    def _sums(self, variant: Variant) -> Iterator[Interval]:
        """A weight gradient in slices: the sum and one part of it are there at once."""
        for task, _ in variant.slices:
            blocks = (self.graph.blocks[b] for b in self.graph.tasks[task].writes)
            nbytes = sum(b.nbytes for b in blocks if b.kind == "weight_gradient")
            yield Interval(task, task, nbytes, -1, "transient")

    @property
    def size(self) -> int:
        """Variants in all groups that leave a choice."""
        return sum(len(group) for group in self.groups if len(group) > 1)

    @property
    def floor_s(self) -> float:
        """Seconds that no choice goes below: of every group the fastest variant."""
        fastest = (min(d.seconds for d in deltas) for deltas in self._least_by_group())
        return float(self.base_s.sum()) + sum(fastest)

    @property
    def floor_bytes(self) -> int:
        """Bytes that every choice holds at its worst task: of every group what holds least during the task."""
        total = self.base_bytes.copy()
        for deltas in self._least_by_group():
            tasks = [t for delta in deltas for t, _ in delta.memory]
            if tasks:
                first, end = min(tasks), max(tasks) + 1
                none = np.zeros(end - first, dtype=np.int64)
                moved = ([Delta(tuple((t - first, n) for t, n in delta.memory))] for delta in deltas)
                lowest = reduce(np.minimum, (level_of(delta, none) for delta in moved))
                total[first:end] += lowest
                total[end:] += lowest[-1]
        return int(total.max(initial=0))

    def _least_by_group(self) -> Iterator[list[Delta]]:
        offsets = self.offsets.tolist()
        return (self.least[first:end] for first, end in pairwise(offsets))


def _home(group: Sequence[Variant]) -> int:
    """The variant that a storage falls back to: it is kept as it is."""
    forms = ((v.decision.codec, v.decision.place) if v.decision else None for v in group)
    return next((i for i, form in enumerate(forms) if form == ("dense", "device")), 0)
