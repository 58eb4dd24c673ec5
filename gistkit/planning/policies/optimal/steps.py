"""Single steps of a search over `optimal`'s choices: what else has to change with a move.

A segment that runs anew takes all its storages with it; a storage that leaves it ends it, and the others are kept; a
move that others bar makes these give way where they can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from gistkit.planning.policies.optimal.problem import Problem

YIELDS = 40
"""Moves that may give way to one step."""


class Steps:
    """The steps of one problem. ``offsets``: the index of each group's first move among all."""

    def __init__(self, problem: Problem, offsets: np.ndarray) -> None:
        self._problem = problem
        self._members = {tie.on[0]: tie.members for tie in problem.ties}
        self._owner = {key: tie.on[0] for tie in problem.ties for key in tie.members}
        self.tied = np.array([int(offsets[g]) + m for g, m in self._owner], dtype=np.int64)
        """Moves that are taken with their segments only."""
        self.of_tied = np.array([int(offsets[s]) + 1 for s in self._owner.values()], dtype=np.int64)
        """By entry of ``tied`` its segment's move."""
        self._kept = {g: self._home(g) for g in range(len(problem.groups))}

    def _home(self, group: int) -> int:
        """The move that a storage falls back to: it is kept as it is."""
        moves = self._problem.groups[group]
        plain = (i for i, m in enumerate(moves) if m.decision and m.decision.codec == "dense")
        return next((i for i in plain if moves[i].decision.place == "device"), 0)  # type: ignore[union-attr]

    @staticmethod
    def changed(taken: Sequence[int], changes: Mapping[int, int]) -> list[int]:
        """The choice with the changes."""
        found = list(taken)
        for group, move in changes.items():
            found[group] = move
        return found

    def changes(self, taken: Sequence[int], group: int, move: int) -> dict[int, int] | None:
        """All that changes, by group, where a move is taken; None where it cannot be."""
        if (group, move) in self._owner or taken[group] == move:
            return None
        found = {group: move}
        if group in self._members:
            for g, m in self._members[group]:
                found[g] = m if move == 1 else self._kept[g]
        for g in tuple(found):
            owner = self._owner.get((g, taken[g]))
            if owner is not None and owner != group:
                self._end(owner, found)
        return found if self._give_way(taken, found) else None

    def _end(self, segment: int, found: dict[int, int]) -> None:
        found[segment] = 0
        for g, _ in self._members[segment]:
            found.setdefault(g, self._kept[g])

    def _give_way(self, taken: Sequence[int], found: dict[int, int]) -> bool:
        """Others that the changes bar are kept instead; False where that does not help."""
        for _ in range(YIELDS):
            barred = self._barred(taken, found)
            if barred is None:
                return True
            others = [g for g, _ in barred if g not in found]
            if not others:
                return False
            group = others[-1]
            owner = self._owner.get((group, taken[group]), group if group in self._members else None)
            if owner is not None:
                self._end(owner, found)
            elif self._kept[group] == taken[group]:
                return False
            else:
                found[group] = self._kept[group]
        return False

    def _barred(self, taken: Sequence[int], found: Mapping[int, int]) -> tuple[tuple[int, int], ...] | None:
        for g, m in found.items():
            for conflict in self._problem.barred.get((g, m), ()):
                if all(found.get(a, taken[a]) == b for a, b in conflict):
                    return conflict
        return None
