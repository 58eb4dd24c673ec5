"""What a rerun does, call by call, for what is wanted of it: the same in every forward that makes the same calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from gistkit.ir import SavedGraph
from gistkit.runtime.recompute.calls import Geometry, Operand, RecordedCall

HIDDEN = -2
Wanted = tuple[tuple[int, int], ...]
"""Storages, each with twice the number of the call at which it was saved, plus one where that call had written it."""


class Place(NamedTuple):
    """An operand of a call that runs anew, its key, and where it goes among the leaves. ``as_is``: what an earlier call
    of the rerun has made is that very tensor, else a view of it may be wanted."""

    operand: Operand
    key: int
    positions: tuple[int, ...]
    as_is: bool


class Step(NamedTuple):
    """One call of a rerun: its operands; which of what is wanted can be handed over then (``gives``) and which storages
    and holds (:attr:`Operand.key`) nobody needs any more (``gone``). ``runs``: not if no more than what autocast makes
    of its operands is wanted."""

    call: RecordedCall
    operands: tuple[Place, ...]
    runs: bool
    gives: tuple[int, ...]
    gone: tuple[int, ...]


Reruns = dict[tuple, tuple[Step, ...]]


class Recordings:
    """What stays of one forward's tape for the next: by segment and number the calls as they were written down, which
    is most of the host's work where they are made once more; and what the tape asks of the graph, by number."""

    def __init__(self, graph: SavedGraph) -> None:
        self.calls: dict[tuple[int, int], RecordedCall] = {}
        self.reruns: dict[int, Reruns] = defaultdict(dict)
        calls = graph.calls
        self.results = cache(lambda number: frozenset(graph.values[v].storage for v in calls[number].results))
        """Storages of a call's results."""
        self.overwrites = frozenset(c.index for c in calls if not set(c.writes).isdisjoint(c.reads))
        """The calls that write to what they read."""
        self.saved_by = cache(
            lambda storage: frozenset(n for c, _ in graph.savers(storage) for n in (c.index, *([HIDDEN] * c.hidden)))
        )
        """The calls that save a storage; HIDDEN for those that no function mode sees."""


def steps(calls: Sequence[RecordedCall], wanted: Wanted) -> tuple[Step, ...]:
    """The calls on which what is wanted depends, in order, with what becomes of their results."""
    needed = _needed(calls, wanted)
    last = {operand.key: call.number for call, _ in needed for operand in call.operands()}
    waiting = sorted(range(len(wanted)), key=lambda i: -wanted[i][1])
    there: set[int] = set()
    made: dict[int, Geometry] = {}
    found = []
    for at, (call, runs) in enumerate(needed):
        following = needed[at + 1][0].number if at + 1 < len(needed) else None
        gives = []
        while waiting and (following is None or wanted[waiting[-1]][1] <= 2 * following):
            gives.append(waiting.pop())
        there |= call.made() | {operand.key for operand in call.operands()}
        waited = {wanted[i][0] for i in waiting}
        gone = {key for key in there if last.get(key, -1) <= call.number and key not in waited}
        there -= gone
        found.append(Step(call, _places(call, made), runs, tuple(gives), tuple(gone)))
        made = {key: where for key, where in made.items() if key not in call.made() and key not in call.changes}
        made |= {storage: where for _, storage, where in call.makes} if runs else {}
    return tuple(found)


def _needed(calls: Sequence[RecordedCall], wanted: Wanted) -> list[tuple[RecordedCall, bool]]:
    """The calls, each with whether more is needed of it than autocast's casts."""
    open_storages: set[int] = set()
    waiting = sorted(wanted, key=lambda w: w[1])
    found = []
    for call in reversed(calls):
        while waiting and waiting[-1][1] > 2 * call.number:
            open_storages.add(waiting.pop()[0])
        made = call.made()
        if open_storages.isdisjoint(made) and open_storages.isdisjoint(call.changes):
            continue
        found.append((call, not open_storages.isdisjoint((*(made - set(call.casts)), *call.changes))))
        open_storages -= made
        open_storages.update(operand.storage for operand in call.operands() if operand.hold < 0)
    return found[::-1]


def _places(call: RecordedCall, made: Mapping[int, Geometry]) -> tuple[Place, ...]:
    """``made``: the geometries of what calls have made before, by storage, that nobody has overwritten since."""
    places: dict[Operand, list[int]] = defaultdict(list)
    for position, leaf in enumerate(call.leaves):
        if isinstance(leaf, Operand):
            places[leaf].append(position)
    return tuple(Place(o, o.key, tuple(where), made.get(o.key) == o.where) for o, where in places.items())
