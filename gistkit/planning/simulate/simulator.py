"""The simulator: a step under a plan, task by task: bytes, seconds, stalls.

One compute stream runs the tasks in order; the link has a queue for each direction, and a transfer may span many tasks.
A task begins when the one before it has ended and every transfer due before it is done; that wait is a stall.

All seconds of a :class:`Simulation`, which is what policies compare, are the device's, with transfers beside the tasks.
On the wall a step takes longer (:meth:`Simulator.wall_s`): where the host is late, as a task begins no sooner than it
is issued, and by every transfer, as the runtime copies on the computation's own stream
(:mod:`gistkit.runtime.offload.host`); for the same reason it holds less (:meth:`Simulator.sync_peak_bytes`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.context import PLAIN_POLICIES
from gistkit.planning.simulate.effects import Composer, Profile
from gistkit.planning.simulate.intervals import Interval, Transfer
from gistkit.planning.simulate.link import Link


@dataclass(frozen=True)
class Simulation:
    """What a step holds and takes.

    ``memory_bytes`` by task, the reserve in it; ``peak_bytes`` their maximum, first reached at ``peak_task``.
    ``step_s`` is compute (``compute_s``), what the plan adds to it (``extra_s``) and waiting for the link
    (``stall_s``); ``start_s`` by task. ``d2h_bytes`` and ``h2d_bytes`` cross the link. Seconds and bytes on the link
    are those of all sub-batches; ``memory_bytes`` and ``start_s`` those of one.
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
    """One graph on one device, for many plans: what does not change is computed once, what every (block, decision)
    does is remembered. Raises PlanError for a graph without tasks."""

    def run(self, plan: Plan, *, reserve: int = 0) -> Simulation:
        """As :func:`simulate`."""
        _check_reserve(reserve)
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
        """The peak of the step as the runtime runs it: with every transfer as the copy among the tasks that it is
        today. Nothing is there then while it leaves beside later tasks or because it comes back ahead of its use, so
        this is at most ``run(plan, reserve=reserve).peak_bytes``. Raises what that raises."""
        _check_reserve(reserve)
        composed = self.profile(plan, synchronous=True)
        return max(memory_bytes(composed.intervals, composed.tasks, reserve))

    def wall_s(self, plan: Plan) -> float:
        """Seconds of the step as the runtime runs it: with the host's share (``Hardware.host_s``, ``runtime_host_s``)
        and with every transfer as the copy that it is today, which takes its turn among the tasks and hides behind
        none. At least ``step_s``, at least the host's own. Sub-batches follow each other, the host not ahead of the
        device between two."""
        costs = self.costs
        each_s = costs.hardware.host_s if plan.policy in PLAIN_POLICIES else costs.hardware.runtime_host_s
        issuing_s = [each_s * count for count in self.issued(plan)]
        sized = {d.storage for d in plan.decisions if d.on_host and d.form.sparse}
        return plan.sub_batches * _wall_s(self.profile(plan), costs, issuing_s, sized)


def simulate(graph: SavedGraph, plan: Plan, costs: CostTable, *, reserve: int = 0) -> Simulation:
    """Simulate one step. ``reserve`` bytes are there all the time. :class:`Simulator` is this for many plans.

    Raises PlanError (a ValueError) for a graph without tasks and for decisions that make no sense, ValueError for a
    reserve that is no number of bytes.
    """
    return Simulator(graph, costs).run(plan, reserve=reserve)


def _check_reserve(reserve: int) -> None:
    if type(reserve) is not int or reserve < 0:
        raise ValueError(f"reserve must be a number of bytes of at least 0, got {reserve!r}; leave it out for none")


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
