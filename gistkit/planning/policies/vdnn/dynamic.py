"""vDNN_dyn (Rhu et al., MICRO 2016, section III-C): the offloaded layers and the algorithms by trial passes.

1. vDNN_all with memory-optimal algorithms: whether the network can be trained at all.
2. The fastest algorithms, without offloading; else with vDNN_conv; else with vDNN_all. The first that fits is taken.
3. Greedy: with vDNN_conv, then with vDNN_all, every layer starts at its fastest algorithm and is downgraded, by itself,
   until its tasks fit, down to the memory-optimal one. If neither fits, phase 1's configuration.

A pass is a simulation here. Workspace is the only memory that an algorithm changes, and only while its own tasks run,
so a layer's choice is seen at that layer's tasks. So phase 3 with vDNN_all cannot fail where phase 1 did not: at worst
every layer ends at its memory-optimal algorithm, which is phase 1's configuration.
"""

from __future__ import annotations

from dataclasses import replace

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import capacity
from gistkit.planning.policies.vdnn.conv_choices import MEMORY, PERFORMANCE, ConvAlgorithms
from gistkit.planning.policies.vdnn.offload import ALL, CONVS, NONE, vdnn
from gistkit.planning.simulate import simulate


def vdnn_dyn(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None, *, prefetch: bool = True) -> Plan:
    """vDNN_dyn within a budget (without one: the device's memory).

    ``details["phase"]`` tells which phase ended the search. Where even phase 1 overflows, its plan is returned with
    ``details["trainable"]`` False.
    """
    limit = capacity(costs, budget_bytes)
    smallest = vdnn(graph, costs, budget_bytes, offload=ALL, algorithms=MEMORY, prefetch=prefetch)
    if not _fits(smallest, limit):
        return _named(smallest, 1)
    for offload in (NONE, CONVS, ALL):
        plan = vdnn(graph, costs, budget_bytes, offload=offload, algorithms=PERFORMANCE, prefetch=prefetch)
        if _fits(plan, limit):
            return _named(plan, 2)
    by_call = downgraded(graph, costs, limit, CONVS, prefetch)
    plan = vdnn(graph, costs, budget_bytes, offload=CONVS, algorithms=by_call, prefetch=prefetch)
    if not _fits(plan, limit):
        by_call = downgraded(graph, costs, limit, ALL, prefetch)
        plan = vdnn(graph, costs, budget_bytes, offload=ALL, algorithms=by_call, prefetch=prefetch)
    return _named(plan, 3)


def downgraded(
    graph: SavedGraph, costs: CostTable, limit_bytes: int, offload: str, prefetch: bool = True
) -> dict[int, str]:
    """Phase 3's algorithm of each convolution: the fastest under which its own tasks fit, else the memory-optimal."""
    found = ConvAlgorithms(graph, costs)
    least = found.memory_optimal()
    base = vdnn(graph, costs, limit_bytes, offload=offload, algorithms=least, prefetch=prefetch)
    held = simulate(graph, base, costs).memory_bytes
    chosen = dict(least)
    for call, tasks in found.tasks.items():
        for name in found.names(call):
            more = (costs.workspace_bytes(t, name) - costs.workspace_bytes(t, least[call]) for t in tasks)
            if all(held[t] + extra <= limit_bytes for t, extra in zip(tasks, more, strict=True)):
                chosen[call] = name
                break
    return chosen


def _fits(plan: Plan, limit_bytes: int) -> bool:
    return plan.peak_bytes <= limit_bytes


def _named(plan: Plan, phase: int) -> Plan:
    return replace(plan, policy="vdnn-dyn", details={**plan.details, "phase": phase})
