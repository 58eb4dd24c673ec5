"""vDNN+: vDNN with moDNN's sub-batch size (Chen et al., DATE 2018, section V-B), moDNN's own comparison.

The size comes from moDNN's eq. (3); at that size vDNN_dyn chooses. vDNN keeps more than that equation counts (whatever
it does not offload): where its best does not fit, the next smaller sub-batch is tried, down to one sample.
"""

from __future__ import annotations

from dataclasses import replace

from gistkit.ir import Plan, SavedGraph, scaled
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import capacity
from gistkit.planning.policies.modnn.modnn import in_parts
from gistkit.planning.policies.modnn.sub_batch import choose_sub_batch, most_parts, splits
from gistkit.planning.policies.vdnn.dynamic import vdnn_dyn
from gistkit.planning.simulate import scaled_costs


def vdnn_plus(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
    prefetch: bool = True,
) -> Plan:
    """vDNN_dyn in sub-batches within a budget (None: the device's memory), ``reserve`` bytes of which are left free.

    As with vDNN, a network that does not fit even one sample at a time gets the last plan tried, with
    ``details["trainable"]`` False; below moDNN's lower bound, which holds for vDNN too, a BudgetError is raised.
    ``fidelity`` "bitwise" allows no sub-batches, ``batch_norm`` accepts them for batch norms, as in moDNN.
    """
    memory_bytes, batch = capacity(costs, budget_bytes), max(graph.batch, 1)
    words = {"fidelity": fidelity, "reserve": reserve}
    first = choose_sub_batch(graph, costs, memory_bytes, batch_norm=batch_norm, **words)[0].parts
    most = 1 if fidelity == "bitwise" else most_parts(graph, batch_norm)
    plan = None
    for parts in splits(batch, first, most):
        plan = _of_parts(graph, costs, memory_bytes - reserve, parts, prefetch)
        plan = replace(plan, details={**plan.details, "sub_batch": -(-batch // parts)})
        plan = in_parts(plan, graph, costs, budget_bytes, parts, reserve)
        if plan.details["trainable"]:
            break
    assert plan is not None
    return plan


def _of_parts(graph: SavedGraph, costs: CostTable, memory_bytes: int, parts: int, prefetch: bool) -> Plan:
    """vDNN_dyn's choice for one of so many parts. While gradients accumulate, a new one lies beside its sum."""
    one = scaled(graph, parts)
    table = costs if parts == 1 else scaled_costs(costs, graph, one)
    newest = max((b.nbytes for b in graph.blocks if b.kind == "weight_gradient"), default=0) if parts > 1 else 0
    return replace(vdnn_dyn(one, table, memory_bytes - newest, prefetch=prefetch), policy="vdnn+")
