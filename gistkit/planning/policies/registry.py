"""All policies by name, ``(graph, costs, budget_bytes, **settings) -> Plan``, for ``gistkit.plan`` and the commands. A
new policy is one file in this folder and its row in the table. Of the caller's settings (``fidelity``, ``lossy``,
``reserve``, ``batch_norm``) it is given those that its signature names. :func:`.make_plan` adds figures."""

from __future__ import annotations

from collections.abc import Callable

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan
from gistkit.planning.policies.blocks import blocks
from gistkit.planning.policies.checkpoint import checkpoint
from gistkit.planning.policies.gist_rules import gist_budget
from gistkit.planning.policies.modnn.modnn import modnn
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.vdnn import cdma, vdnn_all, vdnn_conv, vdnn_dyn, vdnn_plus


def plain(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """What PyTorch does, nothing decided, under each task's default algorithm: what the others are measured against.
    Nothing is refused: a peak above the budget is reported as ``details["trainable"]``."""
    return make_plan("plain", graph, costs, budget_bytes)


POLICIES: dict[str, Callable[..., Plan]] = {
    "plain": plain,
    "gist": gist_budget,
    "vdnn-all": vdnn_all,
    "vdnn-conv": vdnn_conv,
    "vdnn-dyn": vdnn_dyn,
    "vdnn+": vdnn_plus,
    "modnn": modnn,
    "cdma": cdma,
    "checkpoint": checkpoint,
    "blocks": blocks,
    "optimal": optimal,
}
