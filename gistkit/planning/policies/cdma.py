"""cDMA (Rhu et al., HPCA 2018): vDNN's schedule, its transfers compressed by zero-value compression.

A window of 32 elements becomes a 32-bit mask and the packed non-zeros, so the ratio at density d is 32 / (1 + 32 d) for
fp32 and 16 / (1 + 16 d) for 16-bit types. Each X is compressed or not, whichever adds less time (CSWAP, 2021): its own
forward hides the way out, the layer that fetches it hides the way back; encoding and decoding are extra.

The paper's hardware engine beside the memory controllers compresses for free (:mod:`bench.papers.cdma`); here the
device's own kernels do, and their time counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gistkit.ir import KERNEL_DTYPES, Block, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan, own_decisions
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.policies.vdnn import ALL, offloads

CODEC = "zvc"


def cdma(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """vDNN_all's schedule (:func:`gistkit.planning.policies.vdnn.vdnn`) under performance-optimal convolutions, with
    compressed transfers where they pay."""
    convolutions = ConvAlgorithms(graph, costs)
    by_call = convolutions.performance_optimal()
    names = {t: by_call[call] for call, tasks in convolutions.tasks.items() for t in tasks}
    blocks = {b.storage: b for b in graph.blocks}
    sent = (_packed(blocks[raw.storage], costs, names, raw) for raw in offloads(graph, ALL))
    decisions, choices = (*own_decisions(graph), *sent), convolutions.choices(by_call)
    return make_plan("cdma", graph, costs, budget_bytes, decisions, choices)


def _packed(block: Block, costs: CostTable, names: Mapping[int, str], raw: Decision) -> Decision:
    density = costs.densities.get(block.storage)
    if density is None or block.dtype not in KERNEL_DTYPES:
        return raw
    out_s = sum(costs.task_s(t, names.get(t, "")) for t in range(raw.offload, raw.release))
    back_s = sum(costs.task_s(t, names.get(t, "")) for t in range(raw.prefetch, raw.ready))
    if round_trip_s(block, costs, density, out_s, back_s) < round_trip_s(block, costs, None, out_s, back_s):
        return replace(raw, codec=CODEC, reason=f"{1 - density:.0%} zeros need not cross the link")
    return raw


def round_trip_s(block: Block, costs: CostTable, density: float | None, out_s: float, back_s: float) -> float:
    """Seconds that a block's way to the host and back adds to the step: encoding, decoding, and what ``out_s`` and
    ``back_s`` of compute do not hide of the transfers. ``density`` None: uncompressed."""
    if density is None:
        return max(0.0, costs.d2h_s(block.nbytes) - out_s) + max(0.0, costs.h2d_s(block.nbytes) - back_s)
    payload = costs.payload_bytes(CODEC, block.nbytes, block.dtype, density)
    extra = costs.encode_s(CODEC, block.nbytes, block.dtype, density)
    extra += sum(costs.decode_s(CODEC, block.nbytes, block.dtype, density) for use in block.uses if use.values)
    return extra + max(0.0, costs.d2h_s(payload) - out_s) + max(0.0, costs.h2d_s(payload) - back_s)
