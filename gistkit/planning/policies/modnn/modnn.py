"""moDNN (Chen et al., DATE 2018): any budget down to a lower bound, by sub-batches, offloading and algorithms at once.

The pipeline of the paper's Fig. 2: the task and data flow graph (:mod:`~gistkit.planning.policies.modnn.tdfg`),
profiling and sub-batch size in turn until it converges (:mod:`~gistkit.planning.policies.modnn.sub_batch`), the
schedule (:mod:`~gistkit.planning.policies.modnn.schedule`), and in place of generated code a plan.

A plan moves what autograd saves, once each; gradient maps and whatever else has no stash stay on the device.
Sub-batches change the order of summation and, under batch norm in training mode, the statistics, of which the paper
says nothing: such a network is cut only where ``batch_norm`` accepts that.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from gistkit.ir import CallChoice, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable, by_part
from gistkit.planning.forms import capacity, with_figures
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.policies.modnn.schedule import Schedule, schedule
from gistkit.planning.policies.modnn.sub_batch import bare_plan, choose_sub_batch


def modnn(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
    time_limit_s: float = inf,
) -> Plan:
    """moDNN's plan within a budget (None: the device's memory), ``reserve`` bytes of which are left free.

    ``fidelity`` "bitwise" allows no sub-batches, "lossy" no more than "reassociated"; ``batch_norm`` accepts them for a
    network whose batch norms then see other statistics. The plan's figures are the simulator's; those of moDNN's own
    clock are in ``details``. ``lower_bound_bytes`` is the least budget for the allowed class of moves. Raises
    BudgetError below that, with the least of each class; TimeoutError where the schedule takes longer than
    ``time_limit_s`` seconds of this thread's time; ValueError for another word or a graph without tasks.
    """
    memory_bytes = capacity(costs, budget_bytes)
    part, least = choose_sub_batch(
        graph, costs, memory_bytes, fidelity=fidelity, reserve=reserve, batch_norm=batch_norm
    )
    found = schedule(part, memory_bytes - reserve, time_limit_s)
    own_clock = {"own_step_s": found.step_s, "defragmentations": len(found.defragmented)}
    reason, bare = "waits on the host between its two uses", bare_plan(graph)
    sent = (
        Decision(graph.blocks[block].storage, "dense", place="host", release=release, prefetch=prefetch, reason=reason)
        for block, release, prefetch in found.absences
    )
    plan = replace(
        bare,
        decisions=(*bare.decisions, *sent),
        choices=_algorithms(graph, costs, found),
        details={"sub_batch": part.size, **own_clock},
        lower_bound_bytes=least["bitwise" if fidelity == "bitwise" else "reassociated"],
    )
    return in_parts(plan, graph, costs, budget_bytes, part.parts, reserve)


def in_parts(
    plan: Plan, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, parts: int, reserve: int
) -> Plan:
    """A plan of one sub-batch as the plan of the step: what one sub-batch keeps, the simulator's peak and seconds."""
    plan = replace(plan, sub_batches=parts, fidelity="reassociated" if parts > 1 else "bitwise")
    plan = with_figures(plan, graph, costs, budget_bytes, reserve=reserve, parts=parts)
    return replace(plan, details={**plan.details, "trainable": plan.peak_bytes <= capacity(costs, budget_bytes)})


def _algorithms(graph: SavedGraph, costs: CostTable, found: Schedule) -> tuple[CallChoice, ...]:
    """Of every covered convolution the algorithms of its tasks."""
    convolutions, by_call = ConvAlgorithms(graph, costs), {}
    for call, tasks in convolutions.tasks.items():
        by_call[call] = by_part({graph.tasks[t].part_name: found.runs[t].algorithm for t in tasks})
    return convolutions.choices(by_call)
