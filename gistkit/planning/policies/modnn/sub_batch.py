"""moDNN's memory demand, lower bound and sub-batch size (Chen et al., DATE 2018, section IV-A, equations 1 to 3).

- (1) ``Mmin(t, b)`` = inputs + output + workspace of task t at sub-batch size b: :func:`demand_bytes`.
- (2) The lower bound: weights + max over t of Mmin(t, 1) without workspace: :func:`lower_bound`.
- (3) The sub-batch size, printed as "b = (M - S_W) / max Mmin(t, b)". That has a unit only if Mmin is bytes per sample,
  so :func:`sub_batch` iterates ``b_new = floor(b (M - S_W) / max_t Mmin(t, b))`` with the workspace of every task's
  fastest algorithm.

A sub-batch is one of equal parts, so b is the size of the largest of ``ceil(batch / b)`` parts; the caller's whole
input batch resides on the device. While weight gradients are summed over sub-batches all of them reside; in a whole
batch each is there from the task on that makes it. So a whole batch may need less memory than single samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph, scaled
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import check_fidelity, kept_by_ops, own_decisions
from gistkit.planning.policies.modnn.tdfg import TDFG, paper_tdfg, plan_tdfg
from gistkit.planning.simulate import Simulator, scaled_costs, trains_batch_norm

PAPER, PLAN = "paper", "plan"
"""Rules of :mod:`~gistkit.planning.policies.modnn.tdfg`."""


@dataclass(frozen=True)
class Part:
    """A step in equal parts: how many, and of the largest its size, its graph and its costs."""

    parts: int
    size: int
    tdfg: TDFG
    costs: CostTable


def demand_bytes(part: Part, *, fastest: bool) -> int:
    """The greatest Mmin(t, b) of eq. (1), with the workspace of each task's fastest algorithm, or with the least."""
    costs, needs = part.costs, part.tdfg.demand_bytes
    names = costs.performance_optimal if fastest else costs.memory_optimal
    return max((need + costs.workspace_bytes(t, names(t)) for t, need in enumerate(needs)), default=0)


def lower_bound(part: Part) -> int:
    """Eq. (2) for the part's size: the paper's lower bound where that is 1."""
    return part.tdfg.resident_bytes + demand_bytes(part, fastest=False)


def next_size(part: Part, memory_bytes: int) -> int:
    """One round of eq. (3): at least 1."""
    return max(1, part.size * (memory_bytes - part.tdfg.resident_bytes) // max(1, demand_bytes(part, fastest=True)))


def sub_batch(at: Callable[[int], Part], batch: int, memory_bytes: int) -> Part:
    """Iterate eq. (3) from the whole batch until b converges; ``at(parts)`` is the step in so many parts.

    Where b comes back to an earlier size, the largest size of that cycle counts. A size that does not fit by eq. (2)
    gives way to the next smaller one that does, and where none does to the whole batch. Raises ValueError where that
    does not fit either.
    """
    tried: list[int] = []
    parts = 1
    while parts not in tried:
        tried.append(parts)
        parts = -(-batch // min(batch, next_size(at(parts), memory_bytes)))
    for candidate in (*splits(batch, min(tried[tried.index(parts) :]), batch), 1):
        if lower_bound(at(candidate)) <= memory_bytes:
            return at(candidate)
    raise ValueError(f"memory_bytes must be at least the bound of eq. (2), got {memory_bytes}; give more memory")


def splits(batch: int, first: int, last: int) -> list[int]:
    """Numbers of parts from ``first`` to ``last``, one for each size of the largest part."""
    return [n for n in range(first, last + 1) if n == first or -(-batch // n) < -(-batch // (n - 1))]


def choose_sub_batch(
    graph: SavedGraph,
    costs: CostTable,
    memory_bytes: int,
    *,
    rule: str = PLAN,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> tuple[Part, dict[str, int]]:
    """Eq. (3) in ``memory_bytes``, ``reserve`` of them left free, or the whole batch where ``fidelity`` is "bitwise";
    and the least budgets (:func:`least_bytes`). Raises BudgetError below them, ValueError for another word or a graph
    without tasks."""
    check_fidelity(fidelity, None)
    at, most = parts_of(graph, costs, rule), most_parts(graph, batch_norm)
    least = {name: nbytes + reserve for name, nbytes in _least(at, most).items()}
    if least["bitwise" if fidelity == "bitwise" else "reassociated"] > memory_bytes:
        with_norms = _least(at, most_parts(graph, True))["reassociated"] + reserve
        raise BudgetError(memory_bytes, least, _remedy(memory_bytes, least["reassociated"], with_norms, fidelity))
    whole = fidelity == "bitwise" or most == 1
    return at(1) if whole else sub_batch(at, graph.batch, memory_bytes - reserve), least


def least_bytes(graph: SavedGraph, costs: CostTable, rule: str = PLAN, *, batch_norm: bool = False) -> dict[str, int]:
    """The least budget of each class of moves: ``bitwise`` is the whole batch, ``reassociated`` any number of parts."""
    return _least(parts_of(graph, costs, rule), most_parts(graph, batch_norm))


def most_parts(graph: SavedGraph, batch_norm: bool) -> int:
    """The batch size, or 1 where single rows take another way through the model, or where a batch norm would see other
    statistics and ``batch_norm`` does not accept that."""
    alone = graph.least_rows == 1 and (batch_norm or not trains_batch_norm(graph))
    return max(graph.batch, 1) if alone else 1


def parts_of(graph: SavedGraph, costs: CostTable, rule: str = PLAN) -> Callable[[int], Part]:
    """The step in any number of equal parts: profiled anew for every sub-batch size (Fig. 2)."""
    simulator, bare = Simulator(graph, costs), bare_plan(graph)
    stay = {d.storage for d in bare.decisions} | kept_by_ops(graph) | {-1}
    saved = (b for b in graph.blocks if b.saved >= 0 and b.uses and b.last < len(graph.tasks))
    movable = {b.id for b in saved if b.storage not in stay} if costs.hardware.has_link else set()

    @cache
    def at(parts: int) -> Part:
        seen, one = simulator.profile(replace(bare, sub_batches=parts)), scaled(graph, parts)
        table = costs if parts == 1 else scaled_costs(costs, graph, one)
        pairs = zip(table.algorithms, seen.extra_s, strict=True)  # what the runtime's own operators add
        slower = tuple(tuple(replace(a, seconds=a.seconds + extra_s) for a in known) for known, extra_s in pairs)
        paper = rule == PAPER
        tdfg = paper_tdfg(one, costs.hardware.libraries_bytes) if paper else plan_tdfg(one, seen.intervals, movable)
        return Part(parts, -(-max(graph.batch, 1) // parts), tdfg, replace(table, algorithms=slower))

    return at


def bare_plan(graph: SavedGraph) -> Plan:
    """What holds for every plan of moDNN: operators keep small maps by themselves."""
    return Plan("modnn", graph.fingerprint, own_decisions(graph), ())


def _least(at: Callable[[int], Part], most: int) -> dict[str, int]:
    whole = lower_bound(at(1))
    return {"bitwise": whole, "reassociated": min(whole, lower_bound(at(most)))}


def _remedy(memory_bytes: int, least_bytes: int, with_norms_bytes: int, fidelity: str) -> str:
    """What gives moDNN a plan: sub-batches need ``least_bytes``, or ``with_norms_bytes`` where batch norms may see
    parts of the batch."""
    if with_norms_bytes > memory_bytes:
        return "give it more memory, or take a smaller input or model: no size of sub-batches would do"
    ways = ['fidelity="reassociated"'] if fidelity == "bitwise" else []
    if least_bytes > memory_bytes:
        ways.append("per_sub_batch_norm=True (batch norms see parts of the batch)")
    return f"give it more memory, or allow sub-batches with {' and '.join(ways)}"
