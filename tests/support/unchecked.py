"""What a plan holds once nothing is compared any more: what comes back is verified the first time alone."""

from gistkit.api.capturing import step_on
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import Simulator, memory_bytes


def unchecked_peak(plan, model, *batch, loss_fn=None, density=None):
    """Peak of the plan's step on the CPU without the scratch that verifying takes, in bytes."""
    graph, device = step_on("unchecked_peak", model, batch, loss_fn, "cpu")
    found = Simulator(graph, cost_table(graph, device, density=density)).profile(plan)
    return max(memory_bytes([i for i in found.intervals if i.what != "scratch"], found.tasks))
