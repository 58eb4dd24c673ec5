"""What a plan is predicted to hold once everything that it rebuilds has been verified."""

from gistkit.planning.simulate.effects import profile
from gistkit.planning.simulate.simulator import memory_bytes


def steady_peak_bytes(graph, plan, costs):
    """The peak of every step but the first, in which what comes back is compared: on the CPU that is all scratch."""
    assert not costs.hardware.async_counts
    composed = profile(graph, plan, costs)
    return max(memory_bytes([i for i in composed.intervals if i.what != "scratch"], composed.tasks))
