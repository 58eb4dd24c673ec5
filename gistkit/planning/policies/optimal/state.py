"""A choice of `optimal` that steps are taken from: its bytes and seconds by task, what it sends over the link.

A step changes a variant and what goes with it: a segment takes all its storages along; a storage that leaves a segment
ends it; of a source that cannot serve and what uses it, the one that the step is not about is kept as it is. Then
deltas of what changed, and of all that has to serve something else, are looked up. All figures are the simulator's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.planning.forms import MAX_DEPTH
from gistkit.planning.policies.optimal.problem import NOTHING, SETTLING, Problem, Requirement, SourceUse
from gistkit.planning.policies.optimal.variants import Delta
from gistkit.planning.simulate import Beside, Context, Load, delays, used_at

YIELDS = 20  # rounds in which variants may give way to one step


@dataclass(frozen=True)
class Step:
    """What changes: variants and deltas, by group."""

    variants: Mapping[int, int]
    old: tuple[Delta, ...]
    new: Mapping[int, Delta]

    @cached_property
    def more_s(self) -> float:
        """Seconds of compute that the step adds."""
        return sum(d.seconds for d in self.new.values()) - sum(d.seconds for d in self.old)


class IncrementalState:
    """A choice; ``level``: bytes by task, ``compute_s``: the step without waiting. What clashes is kept as it is."""

    def __init__(self, problem: Problem, taken: Sequence[int]) -> None:
        self._problem, self.taken = problem, list(problem.home)
        self._deltas = [Delta()] * len(problem.groups)
        self._encoded: list[tuple[int, int]] = []
        self._scratches = Context(problem.index)
        self.level, self._task_s, self._host_s = problem.base_bytes, problem.base_s, problem.beside.host_s
        changes = dict(enumerate(taken))
        for segment, members in problem.members.items():
            if (taken[segment] == 1) != all(taken[g] == v for g, v in members):
                self._end(segment, changes)
        changes |= {g: problem.home[g] for (g, v), s in problem.owner.items() if changes[g] == v and changes[s] != 1}
        step = self._closed(changes, set())
        assert step is not None
        self.take(step)

    def copy(self) -> IncrementalState:
        other = copy(self)
        other.taken, other._deltas = list(self.taken), list(self._deltas)
        return other

    def step(self, group: int, variant: int) -> Step | None:
        """The step to a variant with all that has to change with it; None where it cannot be taken."""
        problem = self._problem
        if (group, variant) in problem.owner or self.taken[group] == variant:
            return None
        changes = {group: variant}
        if group in problem.members and variant == 1:
            changes |= dict(problem.members[group])
            for other in problem.alike[problem.segments[group - problem.first_segment].sources]:
                if self.taken[other] == 1:  # the plan would take the two for one
                    self._end(other, changes)
        elif group in problem.members:
            self._end(group, changes)
        for g in tuple(changes):
            owner = problem.owner.get((g, self.taken[g]))
            if owner is not None and owner not in changes:
                self._end(owner, changes)
        return self._closed(changes, set(changes))

    def _end(self, segment: int, changes: dict[int, int]) -> None:
        """A segment that no longer runs anew: its storages are kept but where they change otherwise."""
        changes[segment] = 0
        for g, v in self._problem.members[segment]:
            if changes.get(g, v) == v:
                changes[g] = self._problem.home[g]

    def _closed(self, changes: dict[int, int], wanted: set[int]) -> Step | None:
        """The step of some changes, others giving way to those ``wanted``; None where that does not help."""
        for _ in range(YIELDS if wanted else len(self.taken)):
            new, barred = self._changed(changes)
            if not barred:
                return Step(changes, tuple(self._deltas[g] for g in new), new)
            before = dict(changes)
            for source in barred:
                now = changes.get(source, self.taken[source])
                leaving = [(source, now)]
                if source in wanted or now == self._problem.home[source]:
                    leaving = [use.key for use in self._used(source, changes) if use.key[0] not in wanted]
                for g, v in leaving:
                    owner = self._problem.owner.get((g, v), g if g in self._problem.members else None)
                    if owner is None:
                        changes[g] = self._problem.home[g]
                    else:
                        self._end(owner, changes)
            if changes == before:
                return None
        return None

    def _used(self, group: int, changes: Mapping[int, int]) -> Iterator[SourceUse]:
        for use in self._problem.uses_of.get(group, ()):
            user, variant = use.key
            if (changes[user] if user in changes else self.taken[user]) == variant:
                yield use

    def _changed(self, changes: Mapping[int, int]) -> tuple[dict[int, Delta], list[int]]:
        """The deltas that the changes touch, and the groups that cannot be as they are then."""
        problem, new, barred = self._problem, {}, []
        needs: dict[int, Requirement] = {}
        _, scratches, settled = self._settled(changes)
        for group in dict.fromkeys((*self._touched(changes), *settled)):
            key = (group, changes.get(group, self.taken[group]))
            use, need = problem.uses.get(key), self._requirement(group, changes, needs)
            if use is not None and use.segment is not None:
                start = use.segment.start
                own = (g for g in use.sources if start in self._requirement(g, changes, needs).decoded)
                need = Requirement(decoded=frozenset(problem.blocks[g].id for g in own))
            late = scratches.scratch_end(problem.blocks[group].saved) if key in problem.late else None
            delta = problem.delta(key, need, late)
            if delta is None or (use is not None and need.depth >= MAX_DEPTH):
                barred.append(group)
            else:
                new[group] = delta
        return new, barred

    def _touched(self, changes: Mapping[int, int]) -> Iterator[int]:
        """What changes, what has to serve something else by it, segments that may have that decoded for themselves."""
        problem, work = self._problem, list(changes)
        seen = set(work)
        for group in work:
            yield group
            for variant in {self.taken[group], changes.get(group, self.taken[group])}:
                use = problem.uses.get((group, variant))
                if use is not None:
                    fresh = [g for g in use.sources if g not in seen]
                    seen.update(fresh)
                    work.extend(fresh)
                if (group, variant) in problem.decoded:
                    yield from (u.key[0] for u in self._used(group, changes) if u.segment is not None)

    def _requirement(self, group: int, changes: Mapping[int, int], known: dict[int, Requirement]) -> Requirement:
        if group in known:
            return known[group]
        used = list(self._used(group, changes))
        if not used:
            return NOTHING
        tasks: set[int] = set()
        starts, depth, exact = Counter(), 0, False
        for use in used:
            exact = exact or use.exact
            if use.segment is not None:
                starts[use.segment.start] += 1
            else:
                behind = self._requirement(use.key[0], changes, known)
                tasks |= use.tasks | behind.tasks
                depth, exact = max(depth, behind.depth + 1), exact or behind.exact
        decoded = frozenset()
        if starts and (group, changes.get(group, self.taken[group])) in self._problem.decoded:
            block = self._problem.blocks[group]
            decoded = frozenset(t for t, n in starts.items() if n == 1 and t not in tasks and not used_at(block, t))
        known[group] = Requirement(True, frozenset(tasks | starts.keys()), decoded, exact, depth)
        return known[group]

    def _settled(self, changes: Mapping[int, int]) -> tuple[list[tuple[int, int]], Context, list[int]]:
        """The changed choice's encodings of a size that is known late (CUDA), by task and group; what says when their
        scratches go; the groups of which another than before."""
        problem = self._problem
        changed = [g for g, v in changes.items() if ((g, v) in problem.late) != ((g, self.taken[g]) in problem.late)]
        if not changed:
            return self._encoded, self._scratches, []
        at = {(problem.blocks[g].saved, g) for g in changed}
        encoded = sorted(at.symmetric_difference(self._encoded))
        after = Context(problem.index, encodings=tuple(task for task, _ in encoded))
        places = (bisect_left(encoded, key) for key in at)
        before = {e for place in places for e in encoded[max(0, place - SETTLING) : place]}
        ends = ((g, self._scratches.scratch_end(t), after.scratch_end(t)) for t, g in sorted(before))
        return encoded, after, [g for g, then, now in ends if then != now]

    def level_after(self, step: Step) -> np.ndarray:
        """Bytes by task behind a step."""
        found: dict[int, int] = defaultdict(int)
        for sign, deltas in ((1, step.new.values()), (-1, step.old)):
            for delta in deltas:
                for task, nbytes in delta.memory:
                    found[task] += sign * nbytes
        change = np.zeros(len(self.level), dtype=np.int64)
        change[list(found)] = list(found.values())
        return self.level + np.cumsum(change)

    def seconds(self) -> float:
        """Seconds of the step, as :func:`.plans.clock` has them."""
        return self.compute_s * (1 + self._problem.idle) + self._late_s(self._task_s, self._host_s, self._sent(()))

    def seconds_after(self, step: Step, most_s: float) -> float:
        """Seconds behind a step; where they are above ``most_s``, any number above it."""
        compute_s = (self.compute_s + step.more_s) * (1 + self._problem.idle)
        loads = self._sent(step.new) + [load for delta in step.new.values() for load in delta.loads]
        if compute_s >= most_s or not (loads or self._problem.issue_s):
            return compute_s
        return compute_s + self._late_s(*self._seconds_after(step), loads, most_s - compute_s)

    def _late_s(self, task_s: np.ndarray, host_s: np.ndarray, loads: Collection[Load], most_s: float = np.inf) -> float:
        beside = Beside(host_s, self._problem.beside.slowed)
        return float(delays(task_s, loads, self._problem.costs.hardware.shared_rate, beside, most_s)[-1])

    def _sent(self, but: Collection[int]) -> list[Load]:
        return [load for g, delta in enumerate(self._deltas) if delta.loads and g not in but for load in delta.loads]

    def _seconds_after(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        task_s, host_s = self._task_s.copy(), self._host_s.copy()
        for sign, deltas in ((1, step.new.values()), (-1, step.old)):
            for delta in deltas:
                for task, seconds in delta.extra:
                    task_s[task] += sign * seconds
                for task, count in delta.issued:
                    host_s[task] += sign * count * self._problem.issue_s
        return task_s, host_s

    def take(self, step: Step, level: np.ndarray | None = None) -> None:
        """Take a step; ``level``: what :meth:`level_after` gave for it."""
        self.level = self.level_after(step) if level is None else level
        self._task_s, self._host_s = self._seconds_after(step)
        self.compute_s = float(self._task_s.sum())
        self._encoded, self._scratches, _ = self._settled(step.variants)
        for group, variant in step.variants.items():
            self.taken[group] = variant
        for group, delta in step.new.items():
            self._deltas[group] = delta
