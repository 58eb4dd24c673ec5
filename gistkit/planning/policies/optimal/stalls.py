"""Stalls of a choice's transfers without a plan: the simulator's link (:mod:`gistkit.planning.simulate.link`) event by
event.

A direction is first in, first out, so how much of it is done is one number, and rates only change when a queue runs
empty. Transfers that are issued and due together may come in any order: the same is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from gistkit.planning.policies.optimal.problem import Link, Part

Load = tuple[int, int, int, float]
"""A transfer: the tasks at which it is issued and due, direction (0 out, 1 back), seconds alone on the link."""


def loads_of(link: Link, part: Part) -> list[Load]:
    """The transfers of a part."""
    return [(t.issue, t.due, int(t.direction == "h2d"), link.seconds(t)) for t in part.transfers]


def stalled(
    task_s: Sequence[float] | np.ndarray, loads: Iterable[Load], shared: float, most_s: float = np.inf
) -> float:
    """Seconds for which a step whose tasks take ``task_s`` waits for its transfers. ``shared``: the rate of either
    direction while both are busy, as a share of its own. More than ``most_s`` may come out as any number above it."""
    ordered = sorted(loads)
    if not ordered:
        return 0.0
    begins = [0.0, *np.cumsum(task_s).tolist()]
    return _apart(begins, ordered, most_s) if shared >= 1.0 else _together(begins, ordered, shared, most_s)


def _apart(begins: Sequence[float], ordered: Sequence[Load], most_s: float) -> float:
    """Directions that do not slow each other: each is free again when its last transfer is done."""
    ready: dict[int, float] = {}
    for load in ordered:
        ready[load[1]] = 0.0
    free, stalls, position, count = [0.0, 0.0], 0.0, 0, len(ordered)
    for task in sorted({*ready, *(load[0] for load in ordered)}):
        now = begins[task] + stalls
        hurried = True
        while position < count and ordered[position][0] == task:
            _, due, way, seconds = ordered[position]
            if hurried and due != task:
                hurried = False
                now, stalls = _waited(now, stalls, ready.get(task, 0.0))
            begun = free[way]
            free[way] = done = (now if now > begun else begun) + seconds
            if done > ready[due]:
                ready[due] = done
            position += 1
        if hurried:
            _, stalls = _waited(now, stalls, ready.get(task, 0.0))
        if stalls > most_s:
            break
    return stalls


def _waited(now: float, stalls: float, ready: float) -> tuple[float, float]:
    return (ready, stalls + ready - now) if ready > now else (now, stalls)


def _together(begins: Sequence[float], ordered: list[Load], shared: float, most_s: float) -> float:
    """Directions that slow each other."""
    out_due, back_due = {}, {}
    for load in ordered:
        (back_due if load[2] else out_due)[load[1]] = 0.0
    link, stalls, position = _Flow(shared), 0.0, 0
    ordered.append((len(begins), 0, 0, 0.0))
    for task in sorted({*out_due, *back_due, *(load[0] for load in ordered[:-1])}):
        link.advance(begins[task] + stalls)
        while ordered[position][0] == task == ordered[position][1]:
            link.issue(ordered[position], out_due, back_due)
            position += 1
        if task in out_due or task in back_due:
            stalls += link.finish(out_due.get(task, 0.0), back_due.get(task, 0.0))
            if stalls > most_s:
                break
        while ordered[position][0] == task:
            link.issue(ordered[position], out_due, back_due)
            position += 1
    return stalls


class _Flow:
    """Both queues: seconds of work left in each (``out``, ``back``) and sent into it so far."""

    __slots__ = ("back", "back_sent", "now", "out", "out_sent", "shared")

    def __init__(self, shared: float) -> None:
        self.shared = shared
        self.now = self.out = self.back = self.out_sent = self.back_sent = 0.0

    def issue(self, load: Load, out_due: dict[int, float], back_due: dict[int, float]) -> None:
        """Put a transfer at the end of its queue and note, at its due time, how much must have been sent by then."""
        _, due, way, seconds = load
        if way:
            self.back += seconds
            self.back_sent = back_due[due] = self.back_sent + seconds
        else:
            self.out += seconds
            self.out_sent = out_due[due] = self.out_sent + seconds

    def advance(self, until: float) -> None:
        """Run until a moment."""
        span = until - self.now
        if span <= 0:
            return
        self.now = until
        both = min(self.out, self.back)
        if both > 0:
            passed = min(both / self.shared, span)
            self._both(passed)
            span -= passed
        if self.out > 0:
            self.out = self.out - span if self.out > span else 0.0
        elif self.back > 0:
            self.back = self.back - span if self.back > span else 0.0

    def finish(self, out_due: float, back_due: float) -> float:
        """Run until both queues are as far as they must be; the seconds that takes."""
        begun = self.now
        while True:
            tiny = 1e-15 * self.now  # what rounding may leave of the sums is no work
            # what must still be done of either
            out = out_due - self.out_sent + self.out
            back = back_due - self.back_sent + self.back
            if out <= tiny and back <= tiny:
                return self.now - begun
            if self.out > 0 and self.back > 0:
                work = min(self.out, self.back)
                if tiny < out < work:
                    work = out
                if tiny < back < work:
                    work = back
                passed = work / self.shared
                self._both(passed)
            elif out > tiny:
                passed, self.out = out, self.out - out
            else:
                passed, self.back = back, self.back - back
            self.now += passed

    def _both(self, passed: float) -> None:
        """Both directions busy for so long."""
        work = passed * self.shared
        self.out = self.out - work if self.out > work * (1 + 1e-14) else 0.0
        self.back = self.back - work if self.back > work * (1 + 1e-14) else 0.0


__all__ = ["Load", "loads_of", "stalled"]
