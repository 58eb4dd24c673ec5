"""All policies by name: ``(graph, costs, budget_bytes, **settings) -> Plan``."""

from __future__ import annotations

from collections.abc import Callable

from gistkit.ir import Plan
from gistkit.planning.policies.cdma import cdma
from gistkit.planning.policies.checkpoint import checkpoint
from gistkit.planning.policies.gist_budget import gist_budget
from gistkit.planning.policies.modnn.modnn import modnn
from gistkit.planning.policies.optimal.optimal import optimal
from gistkit.planning.policies.plain import plain
from gistkit.planning.policies.vdnn.dynamic import vdnn_dyn
from gistkit.planning.policies.vdnn.offload import vdnn_all, vdnn_conv
from gistkit.planning.policies.vdnn.plus import vdnn_plus

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
    "optimal": optimal,
}
