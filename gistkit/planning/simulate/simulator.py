"""The simulator: a step under a plan, task by task: bytes, seconds, stalls.

One compute stream runs the tasks in order; the link has a queue for each direction, and a transfer may span many tasks.
A task begins when the one before it has ended and every transfer due before it is done; that wait is a stall.

All seconds of a :class:`Simulation`, which policies compare, are the device's, with transfers beside the tasks. The
runtime copies on the computation's own stream and waits for its host: :meth:`Simulator.wall_s`,
:meth:`Simulator.sync_peak_bytes`.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.context import PLAIN_POLICIES
from gistkit.planning.simulate.effects import Composer, Profile
from gistkit.planning.simulate.intervals import Interval, Transfer

DIRECTIONS: tuple[str, ...] = ("d2h", "h2d")


@dataclass(frozen=True)
class Simulation:
    """What a step holds and takes.

    ``memory_bytes`` by task, the reserve in it; ``peak_bytes`` their maximum, first reached at ``peak_task``.
    ``step_s`` is compute (``compute_s``), what the plan adds to it (``extra_s``) and waiting for the link
    (``stall_s``). Seconds and bytes on the link are those of all sub-batches; ``memory_bytes`` and ``start_s``, by
    task, those of one.
    """

    peak_bytes: int
    peak_task: int
    memory_bytes: tuple[int, ...]
    step_s: float
    compute_s: float
    extra_s: float
    stall_s: float
    d2h_bytes: int
    h2d_bytes: int
    start_s: tuple[float, ...]


class Simulator(Composer):
    """One graph on one device, for many plans. Raises PlanError for a graph without tasks."""

    def run(self, plan: Plan, *, reserve: int = 0) -> Simulation:
        composed = self.profile(plan)
        memory = memory_bytes(composed.intervals, composed.tasks, reserve)
        peak = max(memory)
        start_s, stall_s, link = _clock(composed, self.costs)
        times = plan.sub_batches
        compute_s, extra_s = sum(composed.task_s), sum(composed.extra_s)
        return Simulation(
            peak_bytes=peak,
            peak_task=memory.index(peak),
            memory_bytes=tuple(memory),
            step_s=times * (compute_s + extra_s + stall_s),
            compute_s=times * compute_s,
            extra_s=times * extra_s,
            stall_s=times * stall_s,
            d2h_bytes=times * link.carried_bytes["d2h"],
            h2d_bytes=times * link.carried_bytes["h2d"],
            start_s=start_s,
        )

    def sync_peak_bytes(self, plan: Plan, *, reserve: int = 0) -> int:
        """The peak of the step with every transfer as a copy among the tasks, as the runtime runs it today: at most
        ``run(plan, reserve=reserve).peak_bytes``. Raises what that raises."""
        composed = self.profile(plan, synchronous=True)
        return max(memory_bytes(composed.intervals, composed.tasks, reserve))

    def wall_s(self, plan: Plan) -> float:
        """Seconds of the step as the runtime runs it today: with the host's share (``Hardware.host_s``,
        ``runtime_host_s``) and every transfer as a copy among the tasks. Between two sub-batches the host is not ahead
        of the device."""
        costs = self.costs
        each_s = costs.hardware.host_s if plan.policy in PLAIN_POLICIES else costs.hardware.runtime_host_s
        issuing_s = [each_s * count for count in self.issued(plan)]
        sized = {d.storage for d in plan.decisions if d.on_host and d.form.sparse}
        return plan.sub_batches * _wall_s(self.profile(plan), costs, issuing_s, sized)


def simulate(graph: SavedGraph, plan: Plan, costs: CostTable, *, reserve: int = 0) -> Simulation:
    """Simulate one step. ``reserve`` bytes are there all the time. :class:`Simulator` is this for many plans.

    Raises PlanError (a ValueError) for a graph without tasks and for decisions that make no sense.
    """
    return Simulator(graph, costs).run(plan, reserve=reserve)


def memory_bytes(intervals: Iterable[Interval], tasks: int, reserve: int = 0) -> list[int]:
    """The sum of the intervals during every task, plus ``reserve``."""
    change = [0] * (tasks + 1)
    for first, last, nbytes, _, _ in intervals:
        if first < tasks and last >= first:
            change[first if first > 0 else 0] += nbytes
            if last < tasks:
                change[last + 1] -= nbytes
    change[0] += reserve
    return list(accumulate(change[:tasks]))


class Link:
    """The link's two queues, first in, first out, at ``now``.

    A transfer runs at its direction's own rate; while both directions are busy they share ``both_gbps`` where that is
    less than the sum of theirs. What is left of a transfer is counted in seconds of a link to itself.
    """

    def __init__(self, costs: CostTable) -> None:
        rates = costs.hardware
        alone = rates.d2h_gbps + rates.h2d_gbps
        self._costs = costs
        self._shared = min(1.0, rates.both_gbps / alone) if alone else 1.0
        self.now = 0.0
        self._left: dict[str, deque[float]] = {d: deque() for d in DIRECTIONS}
        self._issued = dict.fromkeys(DIRECTIONS, 0)
        self._done = dict.fromkeys(DIRECTIONS, 0)
        self.carried_bytes = dict.fromkeys(DIRECTIONS, 0)

    def issue(self, transfer: Transfer) -> int:
        """Queue a transfer; its number in that direction."""
        direction = transfer.direction
        seconds = self._costs.d2h_s(transfer.nbytes) if direction == "d2h" else self._costs.h2d_s(transfer.nbytes)
        self._left[direction].append(seconds)
        self.carried_bytes[direction] += transfer.nbytes
        self._issued[direction] += 1
        return self._issued[direction]

    def finish(self, direction: str, number: int) -> float:
        """Run until transfer ``number`` of a direction is done; the time then, not before ``now``."""
        while self._done[direction] < number:
            self._run(math.inf)
        return self.now

    def advance(self, until: float) -> None:
        while self.now < until:
            self._run(until)

    def _run(self, until: float) -> None:
        busy = [d for d in DIRECTIONS if self._left[d]]
        if not busy:
            self.now = until
            return
        rate = self._shared if len(busy) == 2 else 1.0
        first = min(self._left[d][0] for d in busy) / rate
        span = min(first, until - self.now)
        ends = span == first
        for direction in busy:
            queue = self._left[direction]
            if ends and queue[0] / rate <= first:
                queue.popleft()
                self._done[direction] += 1
            else:
                queue[0] -= span * rate
        self.now = self.now + span if ends or until == math.inf else until


def _clock(composed: Profile, costs: CostTable) -> tuple[tuple[float, ...], float, Link]:
    """Start of every task, seconds waited for the link, the link when all is done."""
    link = Link(costs)
    issued: dict[int, list[Transfer]] = defaultdict(list)
    due: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in composed.transfers:
        issued[transfer.issue].append(transfer)
        due[transfer.due].append(transfer)
    numbers: dict[Transfer, int] = {}
    starts, now, stall_s = [], 0.0, 0.0
    for task, (seconds, extra) in enumerate(zip(composed.task_s, composed.extra_s, strict=True)):
        waits = due.get(task)
        coming = issued.get(task)
        if waits or coming:
            link.advance(now)
            numbers |= {t: link.issue(t) for t in coming or () if t.due == task}
            ready = max((link.finish(t.direction, numbers[t]) for t in waits or ()), default=now)
            stall_s += ready - now
            now = ready
            numbers |= {t: link.issue(t) for t in coming or () if t.due != task}
        starts.append(now)
        now += seconds + extra
    return tuple(starts), stall_s, link


def _wall_s(composed: Profile, costs: CostTable, issuing_s: Sequence[float], sized: Collection[int]) -> float:
    """The end of a step of which the host takes ``issuing_s`` to issue each task, and whose transfers take their turn
    on the device: out when the storage is saved, back at its first use. For the size of what is ``sized``, by storage,
    the host waits before that goes out, so it is no longer ahead then."""
    copies: list[list[tuple[float, bool]]] = [[] for _ in range(composed.tasks)]
    for t in composed.transfers:
        out = t.direction == "d2h"
        copy_s = costs.d2h_s(t.nbytes) if out else costs.h2d_s(t.nbytes)
        copies[t.issue if out else t.due].append((copy_s, out and t.storage in sized))
    host = device = 0.0
    for task, ahead in enumerate(copies):
        for copy_s, waited in ahead:
            device = max(host, device)
            host = device if waited else host
            device += copy_s
        host += issuing_s[task]
        device = max(device, host) + composed.task_s[task] + composed.extra_s[task]
    return device
