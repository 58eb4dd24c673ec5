"""moDNN on several devices of one host (Chen et al., DATE 2018, sections IV and V-C).

The batch is split equally; every device runs the schedule of its part. What the paper names as the two bottlenecks is
what this adds: the devices share one link, so each has its share of the rate while all of them transfer, and in the end
the weight gradients of all others travel to the first device, one after the other, and are added to its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.scale import scaled
from gistkit.planning.cost.table import CostTable
from gistkit.planning.policies.modnn.lives import PLAN
from gistkit.planning.policies.modnn.modnn import Scheduled, modnn_schedule
from gistkit.planning.simulate.sub_batches import scaled_costs


@dataclass(frozen=True)
class OnDevices:
    """A step on several devices: what each of them does, and the seconds in which the gradients come together."""

    devices: int
    each: Scheduled
    gather_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.each.step_s + self.gather_s


def modnn_on_devices(
    graph: SavedGraph,
    costs: CostTable,
    devices: int,
    budget_bytes: int | None = None,
    *,
    rule: str = PLAN,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> OnDevices:
    """moDNN's schedule on ``devices`` devices with ``budget_bytes`` each; the other arguments and errors as
    :func:`gistkit.planning.policies.modnn.modnn.modnn_schedule`. Raises ValueError unless 1 <= devices <= batch."""
    if type(devices) is not int or not 1 <= devices <= max(graph.batch, 1):
        raise ValueError(
            f"devices must be an int from 1 to the batch size {graph.batch}, got {devices!r}; take fewer devices"
        )
    share = scaled(graph, devices)
    table = costs if devices == 1 else scaled_costs(costs, graph, share)
    link = costs.hardware
    shared = replace(
        link,
        d2h_gbps=link.d2h_gbps / devices,
        h2d_gbps=link.h2d_gbps / devices,
        both_gbps=link.both_gbps / devices,
    )
    memory = link.memory_bytes if budget_bytes is None else budget_bytes
    words = {"rule": rule, "fidelity": fidelity, "reserve": reserve, "batch_norm": batch_norm}
    each = modnn_schedule(share, replace(table, hardware=shared), memory, **words)
    gradients = sum(b.nbytes for b in graph.blocks if b.kind == "weight_gradient")
    one_s = costs.h2d_s(gradients) + costs.copy_s(3 * gradients)  # two read, one written
    return OnDevices(devices, each, (devices - 1) * one_s if gradients else 0.0)
