"""Which linear layers of a plan run by PyTorch's own node.

Gistkit's node takes the weight gradient first and lets go of the layer's input before the input's gradient is made.
PyTorch's holds it beside both, and costs the host a tenth (GPT-2 small: 250 calls of Python a layer less)."""

from __future__ import annotations

from dataclasses import replace

from gistkit.ir import CallChoice, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import PLAIN_POLICIES, Simulator


def with_joint_gradients(graph: SavedGraph, costs: CostTable, plan: Plan) -> Plan:
    """The plan with PyTorch's node for each linear layer beside whose two gradients its input does not raise the
    peak."""
    if plan.policy in PLAIN_POLICIES:
        return plan
    simulator = Simulator(graph, costs)
    run, index = simulator.run(plan), simulator.part(plan.sub_batches).index
    chosen = {c.covered for c in plan.choices}
    found = []
    for weight in index.input_part:
        call = index.graph.calls[index.graph.tasks[weight].call]
        if call.op != "linear" or call.covered < 0 or call.covered in chosen:
            continue
        most_bytes = max(run.memory_bytes[task] for task in index.input_tasks(call.covered))
        if most_bytes + index.joint_bytes(call.covered) <= run.peak_bytes:
            found.append(CallChoice(call.covered, call.op, joint=True))
    return replace(plan, choices=(*plan.choices, *found))
