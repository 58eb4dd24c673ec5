"""When what a plan places on the host leaves the device and comes back: its tasks as covered calls, which a forward and
its backward nodes can count."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from gistkit.formats import item_bytes
from gistkit.ir import Decision, Plan, SavedGraph, numel

SLACK = 1.125
"""What lanes are longer than the payloads that are planned for them."""


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
    """The timetable of a plan over a forward's graph. Without tasks in the plan's contract everything leaves at once
    and comes back when it is asked for."""
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
    sizes = {d.storage: _sizes(graph, plan, d) for d in sent}
    sparse = [sizes[d.storage] for d in sent if d.form.sparse]
    lane_bytes = int(SLACK * sum(n for n, _ in sparse)) + 2 * max((most for _, most in sparse), default=0)
    return Timetable(
        leaves,
        {call: Due(*map(tuple, found)) for call, found in due.items()},
        sum(n for n, _ in sizes.values()) + lane_bytes,
        lane_bytes,
    )


def _starts(tasks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first task, covered call) in the order of the tasks."""
    first: dict[int, int] = {}
    for task, call in tasks:
        if call >= 0:
            first.setdefault(call, task)
    return sorted((task, call) for call, task in first.items())


def _at(starts: list[tuple[int, int]], task: int) -> int:
    """The covered call that begins last among those up to the task; -1 before the first."""
    found = bisect_right(starts, (task, len(starts) + task))
    return starts[found - 1][1] if found else -1


def _sizes(graph: SavedGraph, plan: Plan, decision: Decision) -> tuple[int, int]:
    """(planned, most) bytes of a payload."""
    storage = graph.storages[decision.storage]
    density, each = plan.contract.densities.get(decision.storage, 1.0), item_bytes(storage.dtype)
    planned, most = (decision.form.nbytes(numel(storage), each, share) for share in (density, 1.0))
    return planned, max(planned, most)
