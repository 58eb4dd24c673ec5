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
from gistkit.planning.policies.convolutions import MEMORY, PERFORMANCE, ConvAlgorithms
from gistkit.planning.policies.vdnn.offload import ALL, CONVS, NONE, vdnn
from gistkit.planning.simulate import simulate


def vdnn_dyn(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None, *, prefetch: bool = True) -> Plan:
    """vDNN_dyn within a budget (None: the device's memory).

    ``details["phase"]`` is the phase that ended the search. Where even phase 1 overflows, its plan is returned with
    ``details["trainable"]`` False.
    """
    limit_bytes = capacity(costs, budget_bytes)
    phase, plan = 1, vdnn(graph, costs, budget_bytes, offload=ALL, algorithms=MEMORY, prefetch=prefetch)
    if plan.peak_bytes <= limit_bytes:
        for phase, offload in ((2, NONE), (2, CONVS), (2, ALL), (3, CONVS), (3, ALL)):
            names = PERFORMANCE if phase == 2 else downgraded(graph, costs, limit_bytes, offload, prefetch)
            plan = vdnn(graph, costs, budget_bytes, offload=offload, algorithms=names, prefetch=prefetch)
            if plan.peak_bytes <= limit_bytes:
                break
    return replace(plan, policy="vdnn-dyn", details={**plan.details, "phase": phase})


def downgraded(
    graph: SavedGraph, costs: CostTable, limit_bytes: int, offload: str, prefetch: bool = True
) -> dict[int, str]:
    """Phase 3's algorithm of each convolution: the fastest under which its own tasks fit, else the memory-optimal."""
    convolutions = ConvAlgorithms(graph, costs)
    chosen = convolutions.memory_optimal()
    base = vdnn(graph, costs, limit_bytes, offload=offload, algorithms=chosen, prefetch=prefetch)
    free = [limit_bytes - used for used in simulate(graph, base, costs).memory_bytes]
    for call, tasks in convolutions.tasks.items():
        room = {t: free[t] + costs.workspace_bytes(t, chosen[call]) for t in tasks}
        fits = (n for n in convolutions.names(call) if all(costs.workspace_bytes(t, n) <= room[t] for t in tasks))
        chosen[call] = next(fits, chosen[call])
    return chosen
