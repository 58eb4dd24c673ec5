"""What every policy says of its plan in the end: kept bytes, peak and seconds on the simulator, whether it trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gistkit import formats
from gistkit.codecs import dtype_of
from gistkit.ir import LIBRARY, Block, CallChoice, Decision, Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms.rules import CARRIED, Planner
from gistkit.planning.simulate import simulate

KEEPERS = ("max_pool2d", "dropout", "batch_norm")
"""Covered ops that keep for themselves what they make besides their result."""
WITHOUT_BYTES = ("rebuild", "recompute", "drop")


def make_plan(
    policy: str,
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    decisions: Iterable[Decision] = (),
    choices: Iterable[CallChoice] = (),
    *,
    settings: Mapping | None = None,
    fidelity: str = "bitwise",
) -> Plan:
    """A plan with its predicted figures.

    ``settings["trainable"]`` tells whether its peak is within the budget (without one: the device's memory); vDNN marks
    such a policy with (*) in its figures (section V) and goes on.
    """
    decided = {d.storage: d for d in decisions}
    bare = Plan(policy, graph.fingerprint, tuple(decided.values()), tuple(choices), settings=dict(settings or {}))
    run = simulate(graph, bare, costs)
    kept = held(graph)
    return replace(
        bare,
        plain_bytes=sum(b.nbytes for b in kept),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in kept),
        budget_bytes=budget_bytes,
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        settings={**bare.settings, "trainable": run.peak_bytes <= capacity(costs, budget_bytes)},
        fidelity=fidelity,
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
    if decision is None or (decision.codec == "dense" and decision.place == "device"):
        return block.nbytes
    mask = formats.mask1_bytes(block.nbytes // dtype_of(block.dtype).itemsize) if decision.mask else 0
    if decision.place == "host" or decision.codec in WITHOUT_BYTES:
        return mask
    density = costs.densities.get(block.storage)
    return costs.payload_bytes(decision.codec, block.nbytes, block.dtype, density) + mask


def own_decisions(graph: SavedGraph) -> tuple[Decision, ...]:
    """What the runtime's operators do under any plan, whatever the policy: pools write small maps, dropouts bits, what
    backward reads the shape of is let go of. Nothing in a library's view, whose operators are the library's."""
    if graph.source == LIBRARY:
        return ()
    planner = Planner(graph, None, None)
    found = (planner.decide(b.storage) for b in held(graph) if b.storage >= 0)
    return tuple(d for d in found if d is not None and _by_itself(d))


def kept_by_ops(graph: SavedGraph) -> set[int]:
    """Storages that the runtime's operators make and keep for themselves besides their results: statistics, maps,
    masks. Nothing in a library's view."""
    if graph.source == LIBRARY:
        return set()
    found: set[int] = set()
    for call in graph.calls:
        if call.covered >= 0 and call.op in KEEPERS:
            results = {graph.values[v].storage for v in call.results}
            made = {s.storage for s in call.saves if graph.storages[s.storage].producer == call.index}
            found |= made - results
    return found


def _by_itself(decision: Decision) -> bool:
    if decision.codec == "drop":
        return decision.reason != CARRIED
    return decision.codec == "bits" or decision.codec.startswith("argmax")
