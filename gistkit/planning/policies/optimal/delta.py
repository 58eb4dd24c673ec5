"""What one variant adds to a step: bytes and seconds by task, transfers over the link to the host; their sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import Effects, Transfer

Load = tuple[int, int, int, float]
"""A transfer: the tasks at which it is issued and due, direction (0 to the host, 1 back), seconds alone on the link."""


@dataclass(frozen=True)
class Delta:
    """``memory`` as (task, bytes) in order: from the task on the step holds so many bytes more. ``extra`` as (task,
    seconds of compute)."""

    memory: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[int, float], ...] = ()
    loads: tuple[Load, ...] = ()

    @staticmethod
    def of(effects: Effects, costs: CostTable) -> Delta:
        """The effects of a decision as the simulator has them."""
        tasks, steps, extra = len(costs.algorithms), defaultdict(int), defaultdict(float)
        for first, last, nbytes, _, _ in effects.intervals:
            if last >= max(first, 0) and first < tasks:
                steps[max(first, 0)] += nbytes
                if last + 1 < tasks:
                    steps[last + 1] -= nbytes
        for task, seconds in effects.extra_s:
            extra[task] += seconds
        memory = tuple((t, n) for t, n in sorted(steps.items()) if n)
        loads = ((t.issue, t.due, int(t.direction == "h2d"), transfer_s(t, costs)) for t in effects.transfers)
        return Delta(memory, tuple((t, s) for t, s in sorted(extra.items()) if s), tuple(loads))

    @cached_property
    def seconds(self) -> float:
        """Seconds of compute, waiting for the link not counted."""
        return sum(s for _, s in self.extra)

    @cached_property
    def link_s(self) -> float:
        """Seconds on the link, with the link to itself."""
        return sum(load[3] for load in self.loads)


def transfer_s(transfer: Transfer, costs: CostTable) -> float:
    """Seconds of a transfer with the link to itself."""
    return costs.d2h_s(transfer.nbytes) if transfer.direction == "d2h" else costs.h2d_s(transfer.nbytes)


def level_of(deltas: Iterable[Delta], base_bytes: np.ndarray) -> np.ndarray:
    """Bytes by task of ``base_bytes`` and the deltas."""
    steps = np.zeros(len(base_bytes), dtype=np.int64)
    for delta in deltas:
        for task, nbytes in delta.memory:
            steps[task] += nbytes
    return base_bytes + np.cumsum(steps)


def stalled(
    task_s: Sequence[float] | np.ndarray, loads: Iterable[Load], shared: float, most_s: float = np.inf
) -> float:
    """Seconds for which a step whose tasks take ``task_s`` waits for its transfers, as the simulator's link has them,
    event by event: a direction is first in, first out, so how much of it is done is one number, and rates only change
    when a queue runs empty. ``shared``: the rate of either direction while both are busy, as a share of its own. More
    than ``most_s`` may come out as any number above it."""
    ordered = sorted(loads)
    begins = [0.0, *np.cumsum(task_s).tolist()]
    due: dict[int, list[float]] = {load[1]: [0.0, 0.0] for load in ordered}
    tasks = sorted({*due, *(load[0] for load in ordered)})
    ordered.append((len(begins), 0, 0, 0.0))
    left, sent, now, stalls, position = [0.0, 0.0], [0.0, 0.0], 0.0, 0.0, 0
    for task in tasks:
        begin, need = begins[task] + stalls, due.get(task)
        if begin > now:
            if left[0] > 0 or left[1] > 0:
                _run(left, begin - now, shared)
            now = begin
        while ordered[position][0] == task == ordered[position][1]:  # issued before the task begins, which waits for it
            position = _issue(ordered[position], left, sent, due, position)
        if need is not None:
            waited = _finish(left, sent, need, shared, now)
            now, stalls = now + waited, stalls + waited
            if stalls > most_s:
                break
        while ordered[position][0] == task:
            position = _issue(ordered[position], left, sent, due, position)
    return stalls


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
    """Run until both directions have done all that is ``due`` of what was ``sent`` into them; the seconds that
    takes."""
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
