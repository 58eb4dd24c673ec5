"""Costs by hand for the papers' policies: one second a task, algorithms with a workspace, a link of a given speed."""

from dataclasses import replace

from gistkit.planning.cost.algorithms import Algorithm
from gistkit.planning.cost.devices import hardware
from gistkit.planning.cost.table import CostTable

WORKSPACE = 40000


def device(link_gbps=1.0, memory_gbps=1000.0, memory_bytes=2**30):
    """A device without launch costs whose link runs at ``link_gbps`` each way."""
    rates = {"d2h_gbps": link_gbps, "h2d_gbps": link_gbps, "both_gbps": 2 * link_gbps}
    memory = {"memory_gbps": memory_gbps, "memory_bytes": memory_bytes}
    return replace(hardware("titanx"), launch_s=0.0, async_counts=False, **memory, **rates)


def costs_of(graph, on=None, densities=None, workspace=0, largest=2**10):
    """One second a task; convolutions of at most ``largest`` rows get three algorithms where there is a workspace."""

    def ways(task):
        if not (task.conv and workspace):
            return (Algorithm("", 1.0, 0),)
        most = workspace if task.conv.h <= largest else 0
        fast = Algorithm("precomp", 1.5, most // 2), Algorithm("winograd", 1.0, most)
        return *fast, Algorithm("implicit_gemm", 2.0, 0)

    return CostTable(on or device(), tuple(ways(t) for t in graph.tasks), densities or {})
