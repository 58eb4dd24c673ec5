"""plain: what PyTorch does, nothing decided. Every other policy is measured against it."""

from __future__ import annotations

from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import make_plan


def plain(graph: SavedGraph, costs: CostTable, budget_bytes: int | None = None) -> Plan:
    """The plan without a decision, under each task's default algorithm. Nothing is refused: a peak above the budget is
    reported as ``details["trainable"]``."""
    return make_plan("plain", graph, costs, budget_bytes)
