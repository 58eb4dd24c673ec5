"""Which convolutions and linear layers of a plan run by PyTorch's own node.

Gistkit's node takes the weight gradient first and lets go of the input before the input's gradient is made. PyTorch's
holds it beside both, and costs the host less: GPT-2 small 250 calls of Python a layer, a thin ResNet-50 on a CPU 4 of
its 29 ms of backward and 2 of its 31 of forward."""

from __future__ import annotations

from dataclasses import replace

from gistkit.ir import CallChoice, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import Simulator, by_pytorch

JOINT = ("conv2d", "linear")


def with_joint_gradients(graph: SavedGraph, costs: CostTable, plan: Plan) -> Plan:
    """The plan with PyTorch's node for each convolution and linear layer whose input beside its two gradients does not
    raise the peak."""
    if by_pytorch(plan):
        return plan
    simulator = Simulator(graph, costs)
    run, index = simulator.run(plan), simulator.part(plan.sub_batches).index
    chosen = {c.covered for c in plan.choices}
    found = []
    for weight in index.input_part:
        call = index.graph.calls[index.graph.tasks[weight].call]
        if call.op not in JOINT or call.covered < 0 or call.covered in chosen:
            continue
        beside = index.joint_bytes(call.covered)
        if all(run.memory_bytes[task] + nbytes <= run.peak_bytes for task, nbytes in beside.items()):
            found.append(CallChoice(call.covered, call.op, joint=True))
    return replace(plan, choices=(*plan.choices, *found))
