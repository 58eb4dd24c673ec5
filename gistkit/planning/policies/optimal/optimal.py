"""`optimal`: the fastest step within a budget among all moves of a class, with its optimality gap.

Every storage's forms and, where the order of summation may change, sub-batches (:mod:`.variants`); segments of the
forward may run anew (:mod:`.segments`). A local search finds the plan (:mod:`.search`), and the simulator has the last
word. Plans of other policies may be given as ``seeds``, each of which competes whole, so the result is never slower
than any of them that fits and is of the class.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from gistkit.errors import BudgetError, PlanError
from gistkit.formats import Lossy
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import Replays, own_decisions, with_figures
from gistkit.planning.policies.optimal.engines import TABLES, best_of, leanest
from gistkit.planning.policies.optimal.plans import reasoned
from gistkit.planning.policies.optimal.problem import Problem
from gistkit.planning.policies.optimal.search import Search
from gistkit.planning.policies.optimal.solve import Fastest, Least, least_peak
from gistkit.planning.policies.optimal.variants import Allowed
from gistkit.planning.simulate import Simulator

TIME_LIMIT_S, LARGE_LIMIT_S = 5.0, 16.0
LARGE_TASKS = 3000  # steps of more tasks (ResNet-152 has 1,290, ResNet-1202 10,222) get the longer limit by default
NARROW_SHARE = 0.5
"""Share of the time in which a wider class is first planned with bitwise moves alone, whose plan it might miss."""
PARTS_SHARE = 0.6  # of the time left, for one number of sub-batches of several
PEAK_SHARE = 0.2  # as much time again for the least peak, which every plan reports
SMALL_TASKS, SMALL_S = 200, 4.0
"""The least peak of a step of so few tasks is searched for to the end, whatever the time limit: then it does not depend
on how busy the machine is. A U-Net of 98 tasks takes 0.8 to 1.0 s on one core."""


def optimal(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "bitwise",
    lossy: Lossy = None,
    reserve: int = 0,
    seeds: Sequence[Plan] = (),
    batch_norm: bool = False,
    time_limit_s: float | None = None,
) -> Plan:
    """The fastest plan within ``budget_bytes`` (None: any peak), ``reserve`` bytes of which are left free. ``fidelity``
    and ``lossy`` name the class of moves (:mod:`gistkit.planning.forms`). ``batch_norm`` accepts sub-batches for a
    network whose batch norms would then see other statistics. Convolutions run under PyTorch's choice of algorithms or,
    beyond ``bitwise``, by measured engines of cuDNN (:mod:`.engines`). After about ``time_limit_s`` seconds (None: by
    the size of the step) the best plan found is returned; ``Plan.gap`` is (step - floor) / step: no choice of what is
    offered takes less than the floor. Raises BudgetError, with the least peak found for the class, where nothing fits;
    ValueError for an unknown class or format or a graph without tasks."""
    allowed = Allowed(fidelity, lossy, batch_norm)
    search = partial(_searched, graph, budget_bytes=budget_bytes, allowed=allowed, reserve=reserve, seeds=seeds)
    limit_s = _limit(graph, time_limit_s)
    if not costs.has_engines or fidelity == "bitwise":
        return search(costs.without_engines(), limit_s=limit_s)
    return best_of(partial(search, limit_s=limit_s / TABLES), graph, costs, budget_bytes, reserve)


def _searched(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    allowed: Allowed,
    reserve: int,
    seeds: Sequence[Plan],
    limit_s: float,
) -> Plan:
    """The plan under each task's default algorithm."""
    room_bytes = None if budget_bytes is None else budget_bytes - reserve
    given, narrow_bytes = list(seeds), inf
    share = NARROW_SHARE if allowed.lossy is not None or allowed.part_counts(graph) != [1] else 0.0
    if share:
        narrow = Planning(graph, costs, Allowed(), share * limit_s, room_bytes)
        narrow.run()
        narrow_bytes = narrow.found.peak_bytes
        given = [narrow.plan, *given] if narrow.plan is not None else given
    planning = Planning(graph, costs, allowed, (1 - share) * limit_s, room_bytes)
    planning.run()
    planning.against(given)
    plan = planning.plan
    if plan is None:
        assert budget_bytes is not None
        least = int(min(planning.found.peak_bytes, narrow_bytes)) + reserve
        raise BudgetError(budget_bytes, {allowed.fidelity: least}, "raise the budget")
    return planning.with_figures(plan, budget_bytes, reserve)


def minimise_peak(
    graph: SavedGraph,
    costs: CostTable,
    fidelity: str = "bitwise",
    *,
    lossy: Lossy = None,
    reserve: int = 0,
    batch_norm: bool = False,
    time_limit_s: float | None = None,
) -> Plan:
    """The plan of least peak, whatever its time; arguments and errors as :func:`optimal`, which names its
    ``peak_bytes`` where it refuses a budget under the same time limit. ``peak_bytes`` is a budget that can be met,
    ``lower_bound_bytes`` one below which no plan of the class is: where both are equal there is no smaller peak.
    ``gap`` is None."""
    costs = costs.without_engines() if fidelity == "bitwise" else costs.preferring(leanest)
    planning = Planning(graph, costs, Allowed(fidelity, lossy, batch_norm), _limit(graph, time_limit_s), 0)
    planning.least()
    plan = reasoned(planning.found.search.problem, planning.found.taken)
    return replace(planning.with_figures(plan, None, reserve), gap=None)


def _limit(graph: SavedGraph, time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return LARGE_LIMIT_S if len(graph.tasks) > LARGE_TASKS else TIME_LIMIT_S
    return time_limit_s


class Planning:
    """One search over all numbers of sub-batches of a class, about ``limit_s`` seconds long. ``plan``: the fastest plan
    found within ``room_bytes`` (None: any peak), with reasons and ``step_s``."""

    def __init__(
        self, graph: SavedGraph, costs: CostTable, allowed: Allowed, limit_s: float, room_bytes: int | None
    ) -> None:
        self._limit_s, self._room_bytes = limit_s, room_bytes
        self._graph, self._costs, self._allowed = graph, costs, allowed
        self._simulator = Simulator(graph, costs)
        self._least: list[Least] = []
        self.plan: Plan | None = None

    def run(self) -> None:
        self.least()
        best, best_s, end = None, inf, time.monotonic() + self._limit_s
        for least in self._within():
            parts, floor_s = least.search.problem.parts, least.search.problem.floor_s
            if parts * floor_s < best_s:
                now = time.monotonic()
                until = now + max(0.0, end - now) * (1.0 if least is self._least[-1] else PARTS_SHARE)
                found = Fastest(least.search, self._room_bytes, [least.taken], until)
                if parts * found.seconds < best_s:
                    best, best_s = found, parts * found.seconds
        if best is not None and best.taken is not None:
            plan = reasoned(best.search.problem, best.taken)
            self.plan = replace(plan, step_s=self._simulator.run(plan).step_s)

    def _within(self) -> list[Least]:
        room_bytes = self._room_bytes
        return [least for least in self._least if room_bytes is None or least.bound_bytes <= room_bytes]

    def against(self, plans: Iterable[Plan]) -> None:
        """Take over the fastest of other plans of the class that fit, as they are, if it is faster."""
        for plan in self._whole(plans):
            try:
                run = self._simulator.run(plan)
            except PlanError:
                continue  # it leans on its own policy's way of running
            fits = self._room_bytes is None or run.peak_bytes <= self._room_bytes
            if fits and (self.plan is None or run.step_s < self.plan.step_s * (1 - 1e-9)):
                self.plan = replace(plan, step_s=run.step_s)

    def _whole(self, plans: Iterable[Plan]) -> Iterator[Plan]:
        """The plans that the class admits, under PyTorch's choice of algorithms."""
        own, replays = own_decisions(self._graph), Replays(self._graph, captured=self._costs.captured)
        for plan in plans:
            admitted = self._allowed.admits(plan, self._graph)
            if not admitted or len(replays.able(plan.decisions)) < len(plan.decisions):
                continue
            decided = {d.storage for d in plan.decisions}
            choices = tuple(replace(c, algorithm="") for c in plan.choices)
            details = {} if plan.policy == "optimal" else {"taken_from": plan.policy}
            # maps and bits: without a decision the operators make them all the same; what goes, only with one
            open_ = tuple(d for d in own if d.storage not in decided)
            for more in dict.fromkeys((tuple(d for d in open_ if not d.form.gone), open_)):
                decisions = (*plan.decisions, *more)
                yield replace(plan, policy="optimal", decisions=decisions, choices=choices, details=details)

    def least(self) -> None:
        """The least peak of every number of sub-batches, or any that fits into ``room_bytes``."""
        deadline = time.monotonic() + PEAK_SHARE * self._limit_s
        for parts in self._allowed.part_counts(self._graph):
            left_s = max(deadline - time.monotonic(), 0.1 * self._limit_s)
            left_s = max(left_s, SMALL_S) if len(self._graph.tasks) <= SMALL_TASKS else left_s
            search = Search(Problem(self._graph, self._costs, self._simulator, self._allowed, parts))
            self._least.append(least_peak(search, left_s, self._room_bytes))

    @property
    def found(self) -> Least:
        """The least peak over all numbers of sub-batches."""
        return min(self._least, key=lambda least: least.peak_bytes)

    def with_figures(self, plan: Plan, budget_bytes: int | None, reserve: int) -> Plan:
        """A plan with what the simulator says of it; its gap above what no choice goes below."""
        plan = with_figures(plan, self._graph, self._costs, budget_bytes, reserve=reserve)
        problems = [least.search.problem for least in self._within()]
        floor_s = min((problem.parts * problem.floor_s for problem in problems), default=0.0)
        gap = max(0.0, (plan.step_s - floor_s) / plan.step_s) if plan.step_s > 0 else 0.0
        bound_bytes = min(least.bound_bytes for least in self._least)
        return replace(
            plan,
            # a whole plan may do what is no move, and be below all moves
            lower_bound_bytes=min(bound_bytes + reserve, plan.peak_bytes),
            gap=0.0 if gap < 1e-5 else gap,
            details={**plan.details, "fidelity": self._allowed.fidelity},
        )
