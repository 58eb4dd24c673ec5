"""What a plan is predicted to hold once everything that it rebuilds has been verified: the first time alone."""

from gistkit.api.capturing import step_on
from gistkit.planning.cost.table import cost_table
from gistkit.planning.simulate.simulator import Simulator, memory_bytes


def steady_peak_bytes(graph, plan, costs):
    """The peak of every step but the first, in which what comes back is compared: on the CPU that is all scratch."""
    assert not costs.hardware.async_counts
    composed = Simulator(graph, costs).profile(plan)
    return max(memory_bytes([i for i in composed.intervals if i.what != "scratch"], composed.tasks))


def unchecked_peak(plan, model, *batch, loss_fn=None, density=None):
    """That peak of the plan's step on the CPU, of a model on a batch."""
    graph, device = step_on("unchecked_peak", model, batch, loss_fn, "cpu")
    return steady_peak_bytes(graph, plan, cost_table(graph, device, density=density))
