"""What a plan does, as additive parts: intervals of memory, extra seconds by task, transfers; the clock of the link.

Named tuples where a search makes thousands of them for every plan. The link has a queue for each direction, first in,
first out. A transfer runs at its direction's own rate; while both directions are busy they share ``both_gbps`` where
that is less than the sum of theirs. What is left of a transfer is counted in seconds of a link to itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gistkit.planning.cost import CostTable


class Interval(NamedTuple):
    """``nbytes`` of memory during the tasks ``first`` to ``last``, both counted (-1: from before the step; the number
    of tasks: beyond it), for a block (-1: of no block). ``what`` says what it is."""

    first: int
    last: int
    nbytes: int
    block: int
    what: str


class Transfer(NamedTuple):
    """A storage's payload on the link, direction ``d2h`` or ``h2d``. A ``d2h`` may start once task ``issue`` has
    started (so it overlaps the last forward reader itself, vDNN section III-A), an ``h2d`` is issued when task
    ``issue`` starts; either is done before task ``due`` begins. Where both are the same task, the transfer is issued
    when the task before it ends."""

    storage: int
    nbytes: int
    direction: str
    issue: int
    due: int


@dataclass(frozen=True)
class Effects:
    """What a decision does: intervals, (task, extra seconds), transfers, (task, how many tasks more the host
    takes with it)."""

    intervals: tuple[Interval, ...] = ()
    extra_s: tuple[tuple[int, float], ...] = ()
    transfers: tuple[Transfer, ...] = ()
    issued: tuple[tuple[int, float], ...] = ()


Load = tuple[int, int, int, float]
"""A transfer: the tasks at which it is issued and due, direction (0 to the host, 1 back), seconds alone on the link."""


class Beside(NamedTuple):
    """By task: seconds in which the host issues it, and the share by which a transfer beside it makes it longer."""

    host_s: np.ndarray
    slowed: np.ndarray


def load_of(transfer: Transfer, costs: CostTable) -> Load:
    """A transfer as the link's clock takes it."""
    back = transfer.direction == "h2d"
    return transfer.issue, transfer.due, int(back), (costs.h2d_s if back else costs.d2h_s)(transfer.nbytes)


def delays(
    task_s: Sequence[float] | np.ndarray, loads: Iterable[Load], shared: float, beside: Beside, most_s: float = np.inf
) -> np.ndarray:
    """Seconds by which every task, and last the step's end, come later than ``task_s`` in a row: a task begins when the
    host has issued it, the one before has ended, and every transfer due before it is done. It ends above ``most_s``.

    Event by event: a direction is first in, first out, so how much of it is done is one number, and rates only change
    when a queue runs empty. ``shared``: ``Hardware.shared_rate``. What transfers slow is spread evenly between two
    events: of the seconds that the tasks in between would take more beside the link, the share during which it is busy.
    """
    begins = np.concatenate(((0.0,), np.cumsum(task_s)))
    # a task that waits for the host makes all later ones wait: the delay of one is the most of those up to it
    late = np.maximum.accumulate(np.cumsum(beside.host_s) - begins[:-1])
    found = np.append(late, late[-1])
    ordered = sorted(loads)
    if not ordered:
        return found
    slowed = np.concatenate(((0.0,), np.cumsum(beside.slowed * task_s))).tolist()
    starts, host, due = begins.tolist(), found.tolist(), {load[1]: [0.0, 0.0] for load in ordered}
    tasks = sorted({*due, *(load[0] for load in ordered)})
    ordered.append((len(starts), 0, 0, 0.0))
    left, sent, now, total_s, position, before = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0, 0
    for task in tasks:
        need, more_s = due.get(task), slowed[task] - slowed[before]
        if more_s > 0:
            total_s += more_s * _busy(left, starts[task] - starts[before] + more_s, shared)
        total_s, before = max(total_s, host[task]), task
        begin = starts[task] + total_s
        if begin > now:
            if left[0] > 0 or left[1] > 0:
                _run(left, begin - now, shared)
            now = begin
        while ordered[position][0] == task == ordered[position][1]:  # issued before the task begins, which waits for it
            position = _issue(ordered[position], left, sent, due, position)
        if need is not None:
            waited = _finish(left, sent, need, shared, now)
            now, total_s = now + waited, total_s + waited
        found[task] = max(found[task], total_s)
        if total_s > most_s:
            break
        while ordered[position][0] == task:
            position = _issue(ordered[position], left, sent, due, position)
    return np.maximum.accumulate(found)


def _busy(left: Sequence[float], span: float, shared: float) -> float:
    """The share of a span during which a direction is busy, of which so many seconds are ``left``."""
    less, more = sorted(left)
    return min(1.0, (less / shared + more - less) / span)


def _issue(load: Load, left: list[float], sent: list[float], due: dict[int, list[float]], position: int) -> int:
    """Put a transfer into its queue and note how much of that must be done by when it is due; the next position."""
    _, end, back, seconds = load
    left[back] += seconds
    sent[back] = due[end][back] = sent[back] + seconds
    return position + 1


def _run(left: list[float], span: float, shared: float) -> None:
    """Run both directions, of which so many seconds are ``left``, for a span."""
    out, back = left
    if out > 0 and back > 0:
        passed = min(min(out, back) / shared, span)
        work, span = passed * shared, span - passed
        left[0] = out = out - work if out > work * (1 + 1e-14) else 0.0
        left[1] = back = back - work if back > work * (1 + 1e-14) else 0.0
    if span > 0:
        left[0] = out - span if out > span else 0.0
        left[1] = back - span if back > span else 0.0


def _finish(left: list[float], sent: Sequence[float], due: Sequence[float], shared: float, now: float) -> float:
    """Run until both directions have done all that is ``due`` of what was ``sent``; the seconds."""
    begun, tiny = now, 1e-15 * now  # what rounding may leave of the sums is no work
    while True:
        out, back = due[0] - sent[0] + left[0], due[1] - sent[1] + left[1]
        if out <= tiny and back <= tiny:
            return now - begun
        if left[0] > 0 and left[1] > 0:
            span = min(w for w in (out, back, *left) if w > tiny or w in left) / shared
        else:
            span = out if out > tiny else back
        _run(left, span, shared)
        now += span
