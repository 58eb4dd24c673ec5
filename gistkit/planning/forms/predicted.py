"""The figures of a policy's plan: kept bytes, peak and seconds on the simulator, whether it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from gistkit.ir import Block, CallChoice, Decision, Plan, SavedGraph, scaled
from gistkit.kernels import ENGINE
from gistkit.planning.cost import CostTable
from gistkit.planning.simulate import simulate


def make_plan(
    policy: str,
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    decisions: Iterable[Decision] = (),
    choices: Iterable[CallChoice] = (),
    *,
    details: Mapping[str, Any] | None = None,
    fidelity: str = "bitwise",
    modules: tuple[str, ...] = (),
) -> Plan:
    """A plan with its predicted figures. ``details`` are the policy's own; ``trainable`` is added, whether the peak is
    within the budget (without one: the device's memory)."""
    decided = {d.storage: d for d in decisions}
    bare = Plan(policy, graph.fingerprint, tuple(decided.values()), tuple(choices), fidelity=fidelity, modules=modules)
    plan = with_figures(bare, graph, costs, budget_bytes)
    return replace(plan, details={**(details or {}), "trainable": plan.peak_bytes <= capacity(costs, budget_bytes)})


def with_figures(
    plan: Plan, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, *, reserve: int = 0
) -> Plan:
    """A plan with simulated figures, ``reserve`` in its peak; ``kept_bytes`` is what one of its sub-batches keeps. One
    that names engines of cuDNN is ``reassociated`` at least."""
    if plan.fidelity == "bitwise" and any(ENGINE in c.algorithm for c in plan.choices):
        plan = replace(plan, fidelity="reassociated")
    run = simulate(graph, plan, costs, reserve=reserve)
    decided = {d.storage: d for d in plan.decisions}
    return replace(
        plan,
        plain_bytes=sum(b.nbytes for b in held(graph)),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in held(scaled(graph, plan.sub_batches))),
        budget_bytes=budget_bytes,
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        hardware=costs.hardware.name,
    )


def capacity(costs: CostTable, budget_bytes: int | None) -> int:
    """The budget, or the device's memory where none is given."""
    return costs.hardware.memory_bytes if budget_bytes is None else budget_bytes


def held(graph: SavedGraph) -> list[Block]:
    """Blocks that plain PyTorch holds for backward, parameters left out."""
    return [b for b in graph.blocks if b.saved >= 0 and b.kind in ("input", "activation")]


def kept_bytes(block: Block, decision: Decision | None, costs: CostTable) -> int:
    """Bytes on the device that a decision keeps of a block between its two uses."""
    density = costs.densities.get(block.storage)
    return block.nbytes if decision is None else decision.kept_bytes(block.nbytes, block.dtype, density)
