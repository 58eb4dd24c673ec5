"""cDMA (Rhu et al., HPCA 2018): vDNN's schedule, its transfers compressed by zero-value compression.

A window of 32 elements becomes a 32-bit mask and the packed non-zeros, so the ratio at density d is 32 / (1 + 32 d) for
fp32 and 16 / (1 + 16 d) for 16-bit types. Each X is compressed or not, whichever adds less time (CSWAP, 2021): its own
forward hides the way out, the layer that fetches it hides the way back; encoding and decoding are extra.

``engine=True`` is cDMA as published: a hardware engine beside the memory controllers compresses for free. Without it
the device's own kernels do, and their time counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from gistkit.formats import item_bytes
from gistkit.ir import KERNEL_DTYPES, Block, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan, own_decisions
from gistkit.planning.policies.convolutions import ConvAlgorithms
from gistkit.planning.policies.vdnn.offload import ALL, Offload, details_of, host_decision, offloads

CODEC = "zvc"


def zvc_ratio(density: float, dtype: str = "float32") -> float:
    """Dense bytes over compressed bytes at a density: at most the bits of an element."""
    bits = 8 * item_bytes(dtype)
    return bits / (1 + bits * density)


class EngineCosts(CostTable):
    """A cost table whose zero-value compression takes no time and has the paper's ratio."""

    def payload_bytes(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> int:
        if codec != CODEC:
            return super().payload_bytes(codec, nbytes, dtype, density)
        return math.ceil(nbytes / zvc_ratio(1.0 if density is None else density, dtype))

    def encode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().encode_s(codec, nbytes, dtype, density)

    def decode_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().decode_s(codec, nbytes, dtype, density)

    def relu_backward_s(self, codec: str, nbytes: int, dtype: str, density: float | None = None) -> float:
        return 0.0 if codec == CODEC else super().relu_backward_s(codec, nbytes, dtype, density)


def with_engine(costs: CostTable) -> EngineCosts:
    """The same device with cDMA's compressing engine."""
    return EngineCosts(costs.hardware, costs.algorithms, costs.densities)


def cdma(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    offload: str = ALL,
    algorithms: str | Mapping[int, str] = "p",
    engine: bool = False,
    prefetch: bool = True,
) -> Plan:
    """vDNN's schedule (see :func:`gistkit.planning.policies.vdnn.offload.vdnn`) with compressed transfers where they
    pay.

    With ``engine`` its figures hold on :func:`with_engine`'s costs alone. Raises ValueError as ``vdnn`` does.
    """
    priced = with_engine(costs) if engine else costs
    convolutions = ConvAlgorithms(graph, priced)
    by_call = convolutions.of(algorithms)
    names = {t: by_call[call] for call, tasks in convolutions.tasks.items() for t in tasks}
    sent = [_decision(graph, priced, names, o) for o in offloads(graph, offload, prefetch)]
    return make_plan(
        "cdma",
        graph,
        priced,
        budget_bytes,
        (*own_decisions(graph), *sent),
        convolutions.choices(by_call),
        details=details_of(offload, algorithms, engine=engine, prefetch=prefetch),
    )


def _decision(graph: SavedGraph, costs: CostTable, names: Mapping[int, str], sent: Offload) -> Decision:
    raw, block = host_decision(graph, sent), graph.blocks[sent.block]
    density = costs.densities.get(block.storage)
    if density is None or block.dtype not in KERNEL_DTYPES:
        return raw
    out_s = sum(costs.task_s(t, names.get(t, "")) for t in range(sent.offload, sent.release))
    back_s = sum(costs.task_s(t, names.get(t, "")) for t in range(sent.prefetch, sent.ready))
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
