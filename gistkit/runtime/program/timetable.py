"""When what a plan places on the host leaves the device and comes back: tasks as covered calls, which nodes count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from gistkit.codecs import CODECS, Sparse
from gistkit.formats import item_bytes
from gistkit.ir import Decision, Plan, SavedGraph, numel

SLACK = 1.125
"""By what a lane is longer than the items that are planned for it."""


class Due(NamedTuple):
    """The storages that are let go of, and those that are fetched, before a covered call's backward."""

    released: tuple[int, ...] = ()
    fetched: tuple[int, ...] = ()


class Timetable(NamedTuple):
    """``leaves``: by storage the covered call before which its source goes, or behind which, if it is sent in that
    call. ``backward``: what is due before the backward of a covered call; what stands nowhere goes when the forward
    ends, and comes back when it is asked for. The bytes are the offloader's sizes."""

    leaves: dict[int, int]
    backward: dict[int, Due]
    arena_bytes: int
    lane_bytes: int


def timetable(graph: SavedGraph, plan: Plan) -> Timetable:
    """The timetable of a plan. Without tasks in its contract all leaves at once and comes back when it is asked for."""
    sent = [d for d in plan.decisions if d.on_host]
    first, tasks = plan.contract.backward_from, plan.contract.task_calls
    forward = _starts(enumerate(tasks[:first]))
    backward = _starts(enumerate(tasks[first:], first))
    leaves, due = {}, {}
    for d in sent:
        if d.release < first or not backward:
            leaves[d.storage] = _at(forward, d.release)
        elif d.release < backward[0][0]:
            leaves[d.storage] = len(graph.calls)
        else:
            due.setdefault(_at(backward, d.release), ([], []))[0].append(d.storage)
        back = next((call for task, call in backward if task >= d.prefetch), None)  # no earlier: that would take memory
        if back is not None:
            due.setdefault(back, ([], []))[1].append(d.storage)
    backward_dues = {call: Due(*map(tuple, found)) for call, found in due.items()}
    return Timetable(leaves, backward_dues, *_host_bytes(graph, plan, sent))


def _starts(tasks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first task, covered call) in the order of the tasks."""
    first: dict[int, int] = {}
    for task, call in tasks:
        if call >= 0:
            first.setdefault(call, task)
    return sorted((task, call) for call, task in first.items())


def _at(starts: list[tuple[int, int]], task: int) -> int:
    """The covered call that begins last among those up to the task; -1 before the first."""
    found = bisect_right(starts, task, key=lambda start: start[0])
    return starts[found - 1][1] if found else -1


def _host_bytes(graph: SavedGraph, plan: Plan, sent: Iterable[Decision]) -> tuple[int, int]:
    """(all of the arena, of it a lane). In the lane is what is packed on its way: its items as planned and some more,
    words and counts, and room for the worst case of two that are in flight."""
    whole_bytes, packed_bytes, known_bytes, most_bytes = 0, 0, 0, 0
    for d in sent:
        storage, codec = graph.storages[d.storage], CODECS[d.codec]
        density = plan.contract.densities.get(d.storage, 1.0)
        none, planned, most = (d.form.nbytes(numel(storage), item_bytes(storage.dtype), s) for s in (0.0, density, 1.0))
        within = isinstance(codec, Sparse) and codec.packs_within
        whole_bytes += 0 if within else planned
        packed_bytes += planned - none if within else 0
        known_bytes += none if within else 0
        most_bytes = max(most_bytes, most if within else 0)
    lane_bytes = int(SLACK * packed_bytes) + known_bytes + 2 * most_bytes
    return whole_bytes + lane_bytes, lane_bytes
