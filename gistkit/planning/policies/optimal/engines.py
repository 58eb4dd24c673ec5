"""`optimal` where convolutions may run by engines of cuDNN: which engine runs a task changes its seconds and workspace.

Workspace is there while its own task runs, so the choice of engines follows the choice of forms: the search runs on
three tables, with PyTorch's own algorithms, with each task's fastest, and with that of least workspace, whose plan then
takes for every task the fastest for which its budget has room (as vDNN_dyn's third phase does). The fastest plan stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph
from gistkit.kernels import ENGINE
from gistkit.planning.cost import Algorithm, CostTable
from gistkit.planning.forms import with_figures
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.simulate import simulate

TABLES = 3


def fastest(a: Algorithm) -> tuple[float, float]:
    """A key: seconds, of equals workspace."""
    return a.seconds, a.workspace_bytes


def leanest(a: Algorithm) -> tuple[float, float]:
    """A key: workspace, of equals seconds."""
    return a.workspace_bytes, a.seconds


def best_of(
    search: Callable[[CostTable], Plan], graph: SavedGraph, costs: CostTable, budget_bytes: int | None, reserve: int
) -> Plan:
    """The fastest of the plans that ``search`` finds on the three tables, under ``costs``. Raises BudgetError, with the
    least of the least peaks, where it refuses all."""
    fast, lean = costs.preferring(fastest), costs.preferring(leanest)
    found: list[Plan] = []
    refused: list[BudgetError] = []
    for table in (costs.without_engines(), fast, lean):
        try:
            plan = search(table)
        except BudgetError as error:
            refused.append(error)
            continue
        if table is not fast:
            plan = replace(plan, gap=None)  # of a table on which every task takes longer
        used = table if plan.sub_batches == 1 else table.without_engines(0)
        plan = _named(plan, graph, costs, [known[0].name for known in used.algorithms])
        if table is lean and budget_bytes is not None and plan.sub_batches == 1:
            plan = _raised(plan, graph, costs, budget_bytes - reserve)
        plan = with_figures(plan, graph, costs, budget_bytes, reserve=reserve)
        if budget_bytes is None or plan.peak_bytes <= budget_bytes:
            found.append(plan)
    if not found:
        assert budget_bytes is not None
        least = {c: min(e.least_bytes[c] for e in refused) for c in refused[0].least_bytes} if refused else {}
        raise BudgetError(budget_bytes, least, "raise the budget")
    best = min(found, key=lambda plan: plan.step_s)
    return replace(best, lower_bound_bytes=min(plan.lower_bound_bytes for plan in found))


def _named(plan: Plan, graph: SavedGraph, costs: CostTable, names: Sequence[str]) -> Plan:
    """The plan with these algorithms by task, in the choices of the calls of which one is an engine."""
    convolutions = ConvAlgorithms(graph, costs)
    by_call = {call: name for call, name in convolutions.by_call(names).items() if ENGINE in name}
    choices = {c.covered: c for c in (*plan.choices, *convolutions.choices(by_call))}
    return replace(plan, choices=tuple(choice for _, choice in sorted(choices.items())))


def _raised(plan: Plan, graph: SavedGraph, costs: CostTable, room_bytes: int) -> Plan:
    """A plan of least workspace with the fastest algorithm of every task that fits beside what the step holds then."""
    names = []
    for algorithms, held_bytes in zip(costs.algorithms, simulate(graph, plan, costs).memory_bytes, strict=True):
        known = sorted(algorithms, key=leanest)
        free = room_bytes - held_bytes + known[0].workspace_bytes
        names.append(min((a for a in known if a.workspace_bytes <= free), key=fastest, default=known[0]).name)
    raised = _named(plan, graph, costs, names)
    # a rerun's workspace counts where it runs, beside other tensors
    return raised if simulate(graph, raised, costs).peak_bytes <= room_bytes else plan
