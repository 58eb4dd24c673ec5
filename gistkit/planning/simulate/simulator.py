"""The simulator (docs/planner.md has its rules): a step under a plan, task by task: bytes, seconds, delays. One compute
stream runs the tasks in order as the host issues them (``Hardware.host_s``, ``runtime_host_s``), and the link has a
queue for each direction. Between two sub-batches the host is not ahead of the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate.effects import Composer
from gistkit.planning.simulate.intervals import Interval, delays, load_of


@dataclass(frozen=True)
class Simulation:
    """What a step holds and takes. ``memory_bytes`` by task, the reserve in it; ``peak_bytes`` their maximum, first
    reached at ``peak_task``. ``step_s`` is compute (``compute_s``), what the plan adds to it (``extra_s``), and waiting
    for link and host with what transfers slow (``stall_s``). Seconds and bytes on the link are those of all
    sub-batches; ``memory_bytes`` and ``start_s``, by task, those of one."""

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
        busy_s = np.array(composed.task_s) + composed.extra_s
        loads = [load_of(t, self.costs) for t in composed.transfers]
        late_s = delays(busy_s, loads, self.costs.hardware.shared_rate, composed.beside)
        starts = np.cumsum(busy_s) - busy_s + late_s[:-1]
        out, back = (sum(t.nbytes for t in composed.transfers if t.direction == d) for d in ("d2h", "h2d"))
        times, peak, stall_s = plan.sub_batches, max(memory), float(late_s[-1])
        compute_s, extra_s = sum(composed.task_s), sum(composed.extra_s)
        return Simulation(
            peak_bytes=peak,
            peak_task=memory.index(peak),
            memory_bytes=tuple(memory),
            step_s=times * (compute_s + extra_s + stall_s),
            compute_s=times * compute_s,
            extra_s=times * extra_s,
            stall_s=times * stall_s,
            d2h_bytes=times * out,
            h2d_bytes=times * back,
            start_s=tuple(starts.tolist()),
        )


def simulate(graph: SavedGraph, plan: Plan, costs: CostTable, *, reserve: int = 0) -> Simulation:
    """Simulate one step. ``reserve`` bytes are there all the time. :class:`Simulator` is this for many plans. Raises
    PlanError (a ValueError) for a graph without tasks and for decisions that make no sense."""
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
