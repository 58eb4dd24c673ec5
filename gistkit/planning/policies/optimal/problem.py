"""The choice that `optimal` makes, as data: groups of moves with what each adds to memory, seconds and link.

Every kept storage is a *group*, and so is every convolution with several algorithms; a plan takes one *move* of each.
What moves add is a sum (:mod:`gistkit.planning.simulate.effects`), but for a rebuild, whose sources have to live and
to be decoded
for it: that is a *joint* part, added where certain moves are taken together (:mod:`.optimal_joints`). *Conflicts* are
moves that never go together. A segment that may run anew is a group of two moves, off and on; *ties* say which moves of
others go with on, and only so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from gistkit.ir import CallChoice, Decision
from gistkit.planning.simulate import Transfer

Key = tuple[int, int]
"""(group, move)."""


@dataclass(frozen=True)
class Part:
    """What one choice adds: ``memory`` as (first task, last task, bytes), ``extra`` as (task, seconds), transfers."""

    memory: tuple[tuple[int, int, int], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    transfers: tuple[Transfer, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """Seconds of compute, stalls not counted."""
        return sum(s for _, s in self.extra)

    @property
    def gives_back(self) -> bool:
        """Whether it takes anything away: bytes or seconds below zero."""
        return any(n < 0 for _, _, n in self.memory) or any(s < 0 for _, s in self.extra)


@dataclass(frozen=True)
class Move:
    """One way to treat a storage (``decision``; weight gradients that read it run in ``slices``) or a convolution
    (``choice``)."""

    part: Part
    decision: Decision | None = None
    choice: CallChoice | None = None
    slices: int = 1


@dataclass(frozen=True)
class Joint:
    """What moves of different groups add together, beyond what each of them adds: where all of ``keys`` are taken and,
    if there are ``events``, all moves of any one of these. May be negative."""

    keys: tuple[Key, ...]
    part: Part
    events: tuple[tuple[Key, ...], ...] = ()

    def met(self, taken: Sequence[int]) -> bool:
        """Whether it is added."""
        for g, m in self.keys:
            if taken[g] != m:
                return False
        if not self.events:
            return True
        return any(all(taken[g] == m for g, m in event) for event in self.events)

    @cached_property
    def cases(self) -> tuple[tuple[Key, ...], ...]:
        """The sets of moves of which one is enough."""
        return tuple((*event, *self.keys) for event in self.events or ((),))


@dataclass(frozen=True)
class Tie:
    """A segment's move on, and the moves of its storages that are taken if it is, and only then."""

    on: Key
    members: tuple[Key, ...]


@dataclass(frozen=True)
class Link:
    """The link to the host. ``shared`` is the rate of either direction while both are busy, as a share of its own."""

    d2h_gbps: float
    h2d_gbps: float
    launch_s: float
    shared: float = 1.0

    def seconds(self, transfer: Transfer) -> float:
        """Seconds of one transfer that has the link to itself."""
        rate = self.d2h_gbps if transfer.direction == "d2h" else self.h2d_gbps
        return transfer.nbytes / (rate * 1e9) + self.launch_s if transfer.nbytes else 0.0


@dataclass(frozen=True)
class Problem:
    """All choices of one step. ``base_bytes`` and ``base_s`` (one entry a task) are what no choice changes."""

    base_bytes: np.ndarray
    base_s: np.ndarray
    groups: tuple[tuple[Move, ...], ...]
    joints: tuple[Joint, ...]
    conflicts: tuple[tuple[Key, ...], ...]
    link: Link
    ties: tuple[Tie, ...] = ()

    @property
    def tasks(self) -> int:
        """Tasks of the step."""
        return len(self.base_s)

    @cached_property
    def floor_s(self) -> float:
        """Seconds that no choice goes below: of every group the fastest move. Joint parts take seconds, as a rule; what
        any may save is taken off."""
        fastest = sum(min(m.part.seconds for m in group) for group in self.groups)
        fastest += sum(min(0.0, joint.part.seconds) for joint in self.joints)
        return float(self.base_s.sum()) + fastest

    @cached_property
    def floor_bytes(self) -> int:
        """Bytes that every choice holds at its worst task: of every group what holds least during the task."""
        total = self.base_bytes.copy()
        for group in self.groups:
            spans = [(f, e) for move in group for f, e, _ in move.part.memory]
            if spans:
                first, end = min(f for f, _ in spans), max(e for _, e in spans) + 1
                none = np.zeros(end - first, dtype=np.int64)
                levels = (spread([_moved(move.part, first)], none) for move in group)
                total[first:end] += reduce(np.minimum, levels)
        for joint in self.joints:
            for first, last, nbytes in joint.part.memory:
                total[first : last + 1] += min(0, nbytes)
        return int(total.max(initial=0))

    @property
    def size(self) -> int:
        """Moves in all groups that leave a choice."""
        return sum(len(g) for g in self.groups if len(g) > 1)

    @cached_property
    def joint(self) -> dict[Key, tuple[Joint, ...]]:
        """By move the joint parts that it is in."""
        table: dict[Key, list[Joint]] = {}
        for joint in self.joints:
            for key in {key for case in joint.cases for key in case}:
                table.setdefault(key, []).append(joint)
        return {key: tuple(found) for key, found in table.items()}

    @cached_property
    def barred(self) -> dict[Key, tuple[tuple[Key, ...], ...]]:
        """By move the conflicts that it is in."""
        table: dict[Key, list[tuple[Key, ...]]] = {}
        for conflict in self.conflicts:
            for key in conflict:
                table.setdefault(key, []).append(conflict)
        return {key: tuple(found) for key, found in table.items()}

    @cached_property
    def _first_of(self) -> dict[Key, tuple[list[Joint], list[tuple[Key, ...]]]]:
        """By move the joint parts and the conflicts that name it first."""
        table: dict[Key, tuple[list[Joint], list[tuple[Key, ...]]]] = defaultdict(lambda: ([], []))
        for joint in self.joints:
            table[joint.keys[0]][0].append(joint)
        for conflict in self.conflicts:
            table[conflict[0]][1].append(conflict)
        return dict(table)

    def parts(self, taken: Sequence[int]) -> Iterable[Part]:
        """What the moves ``taken`` (one index a group) add."""
        for group, move in enumerate(taken):
            yield self.groups[group][move].part
            for joint in self._first_of.get((group, move), _NONE)[0]:
                if joint.met(taken):
                    yield joint.part

    def allowed(self, taken: Sequence[int]) -> bool:
        """Whether no conflict is met and no segment runs anew in parts."""
        if any((taken[t.on[0]] == t.on[1]) != (taken[g] == m) for t in self.ties for g, m in t.members):
            return False
        met = (c for key in enumerate(taken) for c in self._first_of.get(key, _NONE)[1])
        return not any(all(taken[g] == m for g, m in conflict) for conflict in met)


_NONE: tuple[tuple, tuple] = ((), ())


def _moved(part: Part, by: int) -> Part:
    """The memory of a part, counted from a task on."""
    return Part(tuple((f - by, e - by, n) for f, e, n in part.memory))


def spread(parts: Iterable[Part], base_bytes: np.ndarray) -> np.ndarray:
    """Bytes by task of ``base_bytes`` and the parts."""
    steps = np.zeros(len(base_bytes) + 1, dtype=np.int64)
    for part in parts:
        for first, last, nbytes in part.memory:
            steps[max(first, 0)] += nbytes
            steps[min(last, len(base_bytes) - 1) + 1] -= nbytes
    return base_bytes + np.cumsum(steps)[:-1]
