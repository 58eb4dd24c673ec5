"""The link to the host: transfers, how long a step waits for them, moments at which it has time for others.

A direction is first in, first out, so how much of it is done is one number, and rates only change when a queue runs
empty (the simulator's link, :class:`gistkit.planning.simulate.simulator.Link`, event by event).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gistkit.ir import Decision, Plan
from gistkit.planning.cost import Hardware
from gistkit.planning.simulate import Simulator, Transfer

Load = tuple[int, int, int, float]
"""A transfer: the tasks at which it is issued and due, direction (0 to the host, 1 back), seconds alone on the link."""


@dataclass(frozen=True)
class Link:
    """The link to the host. ``shared`` is the rate of either direction while both are busy, as a share of its own."""

    d2h_gbps: float
    h2d_gbps: float
    launch_s: float
    shared: float = 1.0

    @staticmethod
    def of(rates: Hardware) -> Link:
        """The link of a device."""
        alone = rates.d2h_gbps + rates.h2d_gbps
        return Link(rates.d2h_gbps, rates.h2d_gbps, rates.launch_s, min(1.0, rates.both_gbps / alone) if alone else 1.0)

    def load(self, transfer: Transfer) -> Load:
        """A transfer of the simulator's."""
        back = transfer.direction == "h2d"
        rate = self.h2d_gbps if back else self.d2h_gbps
        seconds = transfer.nbytes / (rate * 1e9) + self.launch_s if transfer.nbytes else 0.0
        return transfer.issue, transfer.due, int(back), seconds


def stalled(
    task_s: Sequence[float] | np.ndarray, loads: Iterable[Load], shared: float, most_s: float = np.inf
) -> float:
    """Seconds for which a step whose tasks take ``task_s`` waits for its transfers; ``shared`` as in :class:`Link`.
    More than ``most_s`` may come out as any number above it."""
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


def retimed(plan: Plan, simulator: Simulator, link: Link) -> Iterator[Decision]:
    """What a plan ships at the moments at which the link really has time: let go of as soon as the link is done with it
    and what was before it, fetched when it and what is after it must be, or both."""
    transfers, start_s = simulator.profile(plan).transfers, simulator.run(plan).start_s
    left: dict[int, int] = {}
    fetched: dict[int, int] = {}
    free, latest = 0.0, float("inf")
    for t in (t for t in transfers if t.direction == "d2h"):
        free = max(free, start_s[min(t.issue, len(start_s) - 1)]) + link.load(t)[3]
        left[t.storage] = max(bisect_left(start_s, free), t.issue + 1)
    for t in sorted((t for t in transfers if t.direction == "h2d"), key=lambda t: (-t.due, -t.issue)):
        latest = min(latest, start_s[t.due]) - link.load(t)[3]
        fetched[t.storage] = max(0, min(bisect_right(start_s, latest) - 1, t.due))
    for d in plan.decisions:
        if d.on_host and d.storage in left and d.storage in fetched:
            release, prefetch = left[d.storage], fetched[d.storage]
            for begin, end in ((release, prefetch), (release, d.prefetch), (d.release, prefetch)):
                if begin <= end:
                    yield replace(d, release=begin, prefetch=end)
