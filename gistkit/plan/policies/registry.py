"""All policies by name: ``(graph, costs, budget_bytes, **settings) -> Plan``."""

from __future__ import annotations

from collections.abc import Callable

from gistkit.plan.plan import Plan
from gistkit.plan.policies.cdma import cdma
from gistkit.plan.policies.checkpoint import checkpoint
from gistkit.plan.policies.gist_budget import gist_budget
from gistkit.plan.policies.modnn import modnn
from gistkit.plan.policies.optimal import optimal
from gistkit.plan.policies.plain import plain
from gistkit.plan.policies.vdnn import vdnn_all, vdnn_conv
from gistkit.plan.policies.vdnn_dyn import vdnn_dyn
from gistkit.plan.policies.vdnn_plus import vdnn_plus

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
