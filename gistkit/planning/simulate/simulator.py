"""The simulator: a step under a plan, task by task: bytes, seconds, stalls.

One compute stream runs the tasks in order; the link has a queue for each direction, and a transfer may span many tasks.
A task begins when the one before it has ended and every transfer due before it is done; that wait is a stall.

All seconds of a :class:`Simulation`, which policies compare, are the device's, with transfers beside the tasks. The
runtime copies on the computation's own stream and waits for its host: :meth:`Simulator.wall_s`,
:meth:`Simulator.sync_peak_bytes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.context import PLAIN_POLICIES
from gistkit.planning.simulate.effects import Composer, Profile
from gistkit.planning.simulate.intervals import Interval, load_of, stalls


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
        busy_s = [seconds + extra for seconds, extra in zip(composed.task_s, composed.extra_s, strict=True)]
        loads = [load_of(t, self.costs) for t in composed.transfers]
        waits = dict(stalls(busy_s, loads, self.costs.hardware.shared_rate)) if loads else {}
        starts, now = [], 0.0
        for task, seconds in enumerate(busy_s):
            starts.append(now + waits.get(task, 0.0))
            now = starts[-1] + seconds
        times = plan.sub_batches
        d2h_bytes, h2d_bytes = (sum(t.nbytes for t in composed.transfers if t.direction == d) for d in ("d2h", "h2d"))
        compute_s, extra_s, stall_s = sum(composed.task_s), sum(composed.extra_s), sum(waits.values())
        return Simulation(
            peak_bytes=peak,
            peak_task=memory.index(peak),
            memory_bytes=tuple(memory),
            step_s=times * (compute_s + extra_s + stall_s),
            compute_s=times * compute_s,
            extra_s=times * extra_s,
            stall_s=times * stall_s,
            d2h_bytes=times * d2h_bytes,
            h2d_bytes=times * h2d_bytes,
            start_s=tuple(starts),
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


def _wall_s(composed: Profile, costs: CostTable, issuing_s: Sequence[float], sized: Collection[int]) -> float:
    """The end of a step of which the host takes ``issuing_s`` to issue each task, and whose transfers take their turn
    on the device: out when the storage is saved, back at its first use. For the size of what is ``sized``, by storage,
    the host waits before that goes out, so it is no longer ahead then."""
    copies: list[list[tuple[float, bool]]] = [[] for _ in range(composed.tasks)]
    for t in composed.transfers:
        issue, due, back, copy_s = load_of(t, costs)
        copies[due if back else issue].append((copy_s, not back and t.storage in sized))
    host = device = 0.0
    for task, ahead in enumerate(copies):
        for copy_s, waited in ahead:
            device = max(host, device)
            host = device if waited else host
            device += copy_s
        host += issuing_s[task]
        device = max(device, host) + composed.task_s[task] + composed.extra_s[task]
    return device
