"""Ranks plans by the seconds that a step takes on the wall (:meth:`gistkit.planning.simulate.Simulator.wall_s`).

`optimal` proves its plan on the device's clock, where the link is nearly free and launches cost nothing. The plan that
is handed out is the fastest on the wall of three kinds: what the search found, what it finds without the link, and the
other policies' plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, held, kept_bytes, own_decisions
from gistkit.planning.simulate import Simulator

Search = Callable[[CostTable, list[Plan]], Plan]
"""`optimal` on given costs, from given plans of other policies."""


def fastest_on_the_wall(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    found: Plan,
    others: Iterable[Plan],
    fidelity: str,
    reserve: int = 0,
) -> Plan:
    """The plan of least ``wall_s`` among ``found``, a plan of `optimal`, and the ``others`` that fit the budget and are
    of the class ``fidelity``; of equals the one of least ``step_s``, and ``found`` before others. One of the others
    becomes a plan of `optimal` whose ``gap`` and ``lower_bound_bytes`` follow from what was proven for ``found``."""
    simulator = Simulator(graph, costs)
    best, best_s = found, (simulator.wall_s(found), found.step_s)
    for other in others:
        if FIDELITIES.index(other.fidelity) > FIDELITIES.index(fidelity):
            continue
        plan = _as_optimal(graph, costs, budget_bytes, found, other)
        try:
            run, wall_s = simulator.run(plan, reserve=reserve), simulator.wall_s(plan)
        except PlanError:
            continue  # it leans on its own policy's way of running
        limit = best_s[0] * (1 - 1e-9), best_s[1] * (1 - 1e-9)
        fits = budget_bytes is None or run.peak_bytes <= budget_bytes
        if fits and (wall_s < limit[0] or (wall_s <= best_s[0] and run.step_s < limit[1])):
            best, best_s = _with_figures(plan, found, run.peak_bytes, run.step_s), (wall_s, run.step_s)
    return best


def without_link(costs: CostTable, found: Plan, others: Iterable[Plan], search: Search) -> list[Plan]:
    """What the search finds without a link, from the others that need none: one plan where ``found`` needs one and the
    budget allows it, else none."""
    if not any(d.on_host for d in found.decisions):
        return []
    alone = replace(costs.hardware, d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0)
    try:
        return [search(replace(costs, hardware=alone), [p for p in others if not any(d.on_host for d in p.decisions)])]
    except BudgetError:
        return []


def _as_optimal(graph: SavedGraph, costs: CostTable, budget_bytes: int | None, found: Plan, other: Plan) -> Plan:
    """Another policy's plan with what covered operators keep small by themselves."""
    decided = {d.storage for d in other.decisions}
    own = (d for d in own_decisions(graph) if d.storage not in decided and not d.form.gone)
    decisions = (*other.decisions, *own)
    kept, by_storage = held(graph), {d.storage: d for d in decisions}
    taken = other.details if other.policy == found.policy else {"taken_from": other.policy}
    return replace(
        other,
        policy=found.policy,
        decisions=decisions,
        plain_bytes=sum(b.nbytes for b in kept),
        kept_bytes=sum(kept_bytes(b, by_storage.get(b.storage), costs) for b in kept),
        budget_bytes=budget_bytes,
        hardware=costs.hardware.name,
        prediction=found.prediction,
        details={**found.details, **taken, "trainable": True},
    )


def _with_figures(plan: Plan, found: Plan, peak_bytes: int, step_s: float) -> Plan:
    bound_s, least_bytes = found.step_s * (1 - (found.gap or 0.0)), min(found.lower_bound_bytes, peak_bytes)
    gap = max(0.0, (step_s - bound_s) / step_s) if step_s > 0 else 0.0
    gap = 0.0 if gap < 1e-5 else gap
    return replace(plan, peak_bytes=peak_bytes, step_s=step_s, lower_bound_bytes=least_bytes, gap=gap)
