"""moDNN's own schedule and clock, on one device and on several (Chen et al., DATE 2018, sections IV and V-C).

On several devices of one host the batch is split equally; every device runs the schedule of its part. What the paper
names as the two bottlenecks is what this adds: the devices share one link, so each has its share of the rate while all
of them transfer, and in the end the weight gradients of all others travel to the first device, one after the other, and
are added to its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gistkit.ir.saved_graph import SavedGraph
from gistkit.ir.scale import scaled
from gistkit.ir.tasks import BACKWARD, by_key
from gistkit.planning.cost.table import CostTable
from gistkit.planning.policies.modnn.modnn import Schedule
from gistkit.planning.policies.modnn.sub_batch import TDFG, Data, choose_sub_batch, written_by
from gistkit.planning.simulate.simulator import scaled_costs


@dataclass(frozen=True)
class OnDevices:
    """A step on several devices: what each of them does, and the seconds in which the gradients come together."""

    devices: int
    each: Schedule
    gather_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.each.step_s + self.gather_s


def paper_tdfg(graph: SavedGraph) -> TDFG:
    """The paper's rule: a block stays for each task that reads or writes it; weight gradients reside. A
    block that only backward reads again is not kept by criterion (b), which else would keep it until then."""
    end, resident_bytes, data = len(graph.tasks), 0, []
    written = written_by(graph)
    used = by_key((b, t.index) for t in graph.tasks for b in (*t.reads, *t.writes))
    for block in graph.blocks:
        tasks = sorted({*used[block.id], *written[block.id], *(use.task for use in block.uses)})
        if block.kind in ("weight", "buffer", "weight_gradient") or (block.kind == "input" and block.last >= end):
            resident_bytes += block.nbytes
        elif block.nbytes and (tasks or block.last >= end):
            stays = ((max(block.first, 0), end),) if block.last >= end else tuple((t, t) for t in tasks)
            again = next((graph.tasks[t].phase for t in tasks if t > block.first), "")
            fresh = block.first >= 0 and (block.saved < 0 or again != BACKWARD)
            data.append(Data(block.id, block.nbytes, stays, tuple(written[block.id]), fresh))
    return TDFG(resident_bytes, tuple(data), tuple(t.transient_bytes for t in graph.tasks))


def modnn_schedule(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Schedule:
    """moDNN's schedule by the paper's rule within a budget (None: the device's memory). Batch norms, of which the paper
    says nothing, may see sub-batches. Raises BudgetError below the lower bound."""
    memory_bytes = costs.hardware.memory_bytes if budget_bytes is None else budget_bytes
    part, _ = choose_sub_batch(graph, costs, memory_bytes, rule=paper_tdfg, batch_norm=True)
    return Schedule(part, memory_bytes)


def modnn_on_devices(graph: SavedGraph, costs: CostTable, devices: int, budget_bytes: int | None = None) -> OnDevices:
    """:func:`modnn_schedule` on ``devices`` devices with ``budget_bytes`` each. Raises ValueError for fewer than one
    device, or more than the batch has samples."""
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
    each = modnn_schedule(share, replace(table, hardware=shared), budget_bytes)
    gradients = sum(b.nbytes for b in graph.blocks if b.kind == "weight_gradient")
    one_s = costs.h2d_s(gradients) + costs.copy_s(3 * gradients)  # two read, one written
    return OnDevices(devices, each, (devices - 1) * one_s if gradients else 0.0)
