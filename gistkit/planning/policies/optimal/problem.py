"""The problem that `optimal` searches: groups of variants, and what each adds to the step under what is asked of it."""

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
from gistkit.planning.forms import call_choices, intolerant, options
from gistkit.planning.policies.optimal.segments import candidates
from gistkit.planning.policies.optimal.variants import Allowed, Delta, Variant, level_of, of_storages
from gistkit.planning.simulate import (
    Context,
    Effects,
    Segment,
    Simulator,
    StepIndex,
    block_effects,
    decoding,
    scaled_costs,
)

Key = tuple[int, int]
"""(group, variant)."""
IDLE = 1e-6  # what a second of compute counts for beside a second of the step: where the host decides, less is better
SETTLING = 16  # encodings at one task that settle an earlier scratch there, more than any needs


@dataclass(frozen=True)
class SourceUse:
    """What a variant (``key``) asks of the groups ``sources``: their values before ``tasks``. ``exact``: something
    that comes back has a reader that bears no rounded values."""

    key: Key
    sources: tuple[int, ...]
    tasks: frozenset[int]
    exact: bool
    segment: Segment | None = None


class Requirement(NamedTuple):
    """What is asked of one storage, if it is: its values before ``tasks``; ``decoded``: those of the tasks at which a
    segment alone has it decoded, and counts that; ``depth``: rebuilds that follow from it, one from the other."""

    asked: bool = False
    tasks: frozenset[int] = frozenset()
    decoded: frozenset[int] = frozenset()
    exact: bool = False
    depth: int = 0


NOTHING = Requirement()


class Problem:
    """All choices for a step in ``parts`` sub-batches. Seconds and bytes are those of one of them."""

    def __init__(
        self, graph: SavedGraph, costs: CostTable, simulator: Simulator, allowed: Allowed, parts: int = 1
    ) -> None:
        self.parts, self.simulator = parts, simulator
        self.graph = scaled(graph, parts)
        self.costs = costs if parts == 1 else scaled_costs(costs, graph, self.graph)
        self.index = StepIndex(self.graph)
        listed = options(self.graph, self.costs, allowed.lossy)
        reading = Reading(self.graph)
        choices = call_choices(reading, {s: found[0] for s, found in listed.items() if found[0].form.gone})
        self.segments, self.layouts = candidates(self.index, listed, self.costs.captured)
        self._strict = cache(lambda storage, masked: intolerant(storage, reading, masked) is not None)
        self.bare = Plan("optimal", graph.fingerprint, (), choices, sub_batches=parts, fidelity=allowed.fidelity)
        self._context = Context.of(self.bare, self.index)
        self._known: dict[tuple, Delta | None] = {}
        self.blocks, forms = of_storages(self.index, listed, self.segments)
        self.of_block = {block.id: g for g, block in enumerate(self.blocks)}
        profile = simulator.profile(self.bare)
        rest = Effects(tuple(i for i in profile.intervals if i.block not in self.of_block))
        self.tasks = profile.tasks
        self.base_bytes = level_of([Delta.of(rest, self.costs)], np.zeros(self.tasks, dtype=np.int64))
        self.base_s = np.array(profile.task_s) + np.array(profile.extra_s)
        self.task_s, self.beside, self.issue_s = profile.task_s, profile.beside, self.costs.hardware.runtime_host_s
        self.idle = IDLE if self.issue_s else 0.0
        groups = [self._possible(block, variants) for block, variants in zip(self.blocks, forms, strict=True)]
        self.first_segment = len(groups)
        self._set_groups([*groups, *([Variant(), Variant(segment=s)] for s in range(len(self.segments)))])

    def _possible(self, block: Block, variants: Iterable[Variant]) -> list[Variant]:
        found = [v for v in variants if self._effects(block, v, NOTHING, None, False) is not None]
        return found or [Variant(Decision(block.storage, "dense", reason="kept: nothing else is allowed"))]

    def offering(self, decisions: Iterable[Decision]) -> Problem:
        """The same problem with more forms of storages; variants keep their numbers."""
        other, groups = copy(self), [list(group) for group in self.groups]
        for decision in decisions:
            group = self.of_block[self.index.block(decision.storage).id]
            if all(v.decision != decision for v in groups[group]):
                groups[group] += self._possible(self.blocks[group], [Variant(decision)])
        other._set_groups(groups)
        return other

    def _set_groups(self, groups: list[list[Variant]]) -> None:
        self.groups = groups
        self.keys = [(g, v) for g, group in enumerate(groups) for v in range(len(group))]
        self.offsets = np.concatenate(([0], np.cumsum([len(group) for group in groups]))).astype(int)
        self.home = [_home(group) for group in groups]
        self.members: dict[int, list[Key]] = {self.first_segment + s: [] for s in range(len(self.segments))}
        """By the group of a segment the variants of storages that are taken with it."""
        for g, v in self.keys:
            if g < self.first_segment and groups[g][v].segment >= 0:
                self.members[self.first_segment + groups[g][v].segment].append((g, v))
        self.owner = {key: segment for segment, keys in self.members.items() for key in keys}
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
                segment = self.segments[variant.segment]
                tasks, blocks = frozenset((segment.start,)), segment.needs
                exact = any(self._strict(self.graph.blocks[b].storage, masked=False) for b in segment.blocks)
                self.alike[self.segments[variant.segment].sources].append(g)
            else:
                continue
            sources = tuple(dict.fromkeys(self.of_block[b] for b in blocks if b in self.of_block))
            self.uses[g, v] = use = SourceUse((g, v), sources, tasks, exact, segment)
            for source in sources:
                self.uses_of[source].append(use)

    def _set_least(self) -> None:
        decisions = [(key, d) for key in self.keys if (d := self.groups[key[0]][key[1]].decision) is not None]
        self.decoded = {key for key, decision in decisions if decision.form.decoded_by_reader}
        """Variants whose values are decoded at each use."""
        sparse = {key for key, decision in decisions if decision.form.sparse}
        self.late = sparse if self.costs.hardware.async_counts else set()
        """Variants of a size that is known late (CUDA): their scratches go once some later ones are encoded."""
        every = Context(self.index, encodings=tuple(sorted({self.blocks[g].saved for g, _ in self.late})))
        backward = next((t.index for t in self.graph.tasks if t.phase == BACKWARD), self.tasks)
        self.least: list[Delta] = []
        for key in self.keys:
            settled = every.scratch_end(self.blocks[key[0]].saved) if key in self.late else None
            late = backward if key in self.late and settled is None else settled
            found = self.delta(key, NOTHING, late, least=True)
            assert found is not None
            self.least.append(found)

    def delta(self, key: Key, need: Requirement, late: int | None = None, *, least: bool = False) -> Delta | None:
        """What a variant adds where ``need`` is asked of its storage; None where it cannot serve that. ``late``: the
        task at which its scratch goes, if before its use; ``least``: at the earliest. Of a segment ``need.decoded`` are
        the blocks that it has decoded for itself."""
        group, number = key
        variant = self.groups[group][number]
        if variant.decision is not None and not _serves(variant.decision, need):
            return None
        known = (key, need.tasks, need.decoded, late, least)
        if known not in self._known:
            if variant.decision is None:
                self._known[known] = self._rerun(variant, need.decoded)
            else:
                self._known[known] = self._effects(self.blocks[group], variant, need, late, least)
        return self._known[known]

    def _rerun(self, variant: Variant, decoded: frozenset[int]) -> Delta:
        if variant.segment < 0:
            return Delta()
        segment = decoding(self.segments[variant.segment], decoded, self.index)
        return Delta.of(segment.effects(self.task_s, self.costs.hardware.move_host_factor), self.costs)

    def _effects(
        self, block: Block, variant: Variant, need: Requirement, late: int | None, least: bool
    ) -> Delta | None:
        context = replace(
            self._context,
            also={block.id: need.tasks},
            encodings=() if late is None else (late,) * SETTLING,
            restart={block.id: self.segments[variant.segment].start} if variant.segment >= 0 else None,
            decoded_for_segment={block.id: need.decoded},
            least=least,
        )
        try:
            return Delta.of(block_effects(self.graph, self.costs, variant.decision, block, context), self.costs)
        except PlanError:
            return None

    @property
    def floor_s(self) -> float:
        """No choice takes fewer seconds: every group's fastest variant, behind the host's first task; or the host's."""
        compute_s = float(self.base_s.sum()) + sum(min(d.seconds for d in deltas) for deltas in self._least_by_group())
        return max(self.issue_s + compute_s, self.issue_s * self.tasks)

    @property
    def floor_bytes(self) -> int:
        """Bytes that every choice holds at its worst task: of every group what holds least during the task."""
        none = np.zeros(self.tasks, dtype=np.int64)
        lowest = (reduce(np.minimum, (level_of([d], none) for d in deltas)) for deltas in self._least_by_group())
        return int(sum(lowest, self.base_bytes).max(initial=0))

    def _least_by_group(self) -> Iterator[list[Delta]]:
        return (self.least[first:end] for first, end in pairwise(self.offsets.tolist()))


def _serves(decision: Decision, need: Requirement) -> bool:
    if not need.asked:
        return True
    if decision.form.returns in (RERUN, NEVER) or (need.exact and decision.form.rounds_to):
        return False
    return not decision.on_host or all(t >= decision.prefetch for t in need.tasks)


def _home(group: Sequence[Variant]) -> int:
    """The variant that a storage falls back to: it is kept as it is."""
    return next((i for i, v in enumerate(group) if v.decision is not None and v.decision.stays), 0)
