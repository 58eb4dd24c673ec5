"""The step in equal parts, as moDNN sees it: profiled anew for every sub-batch size (DATE 2018, Fig. 2), how many there
may be, and whether there is memory enough for one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from gistkit.errors import BudgetError
from gistkit.ir import CallChoice, Decision, Plan, Reading, SavedGraph, scaled
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import call_choices, own_decisions
from gistkit.planning.policies.modnn.bounds import Part, least_by_class
from gistkit.planning.policies.modnn.lives import PLAN, lives
from gistkit.planning.simulate import PER_SUB_BATCH, profile, scaled_costs, trains_batch_norm

FIDELITIES = ("bitwise", "reassociated", "lossy")
MORE = "give it more memory"


def check(graph: SavedGraph, fidelity: str, batch_norm: bool = False) -> int:
    """How many parts the batch may be taken in. Raises ValueError for another word or a graph without tasks."""
    if fidelity not in FIDELITIES:
        raise ValueError(
            f'fidelity must be one of {", ".join(FIDELITIES)}, got {fidelity!r}; sub-batches are "reassociated"'
        )
    if not graph.tasks:
        raise ValueError("graph must hold the tasks of a whole step, got none: capture it with backward=True")
    return 1 if fidelity == "bitwise" else _most_parts(graph, batch_norm)


def _most_parts(graph: SavedGraph, batch_norm: bool) -> int:
    """Any number of parts, down to single rows, or none at all where these take another way through the model, or a
    batch norm would see other statistics."""
    alone = graph.least_rows == 1 and (batch_norm or not trains_batch_norm(graph))
    return max(graph.batch, 1) if alone else 1


def least_bytes(graph: SavedGraph, costs: CostTable, rule: str = PLAN, *, batch_norm: bool = False) -> dict[str, int]:
    """The least memory by class of moves, eq. (2): ``bitwise`` for the whole batch, ``reassociated`` also for
    sub-batches down to a single row. ``batch_norm`` as for :func:`modnn`."""
    return least_by_class(parts_of(graph, costs, rule), _most_parts(graph, batch_norm))


def demand_room(
    graph: SavedGraph,
    at: Callable[[int], Part],
    memory_bytes: int,
    fidelity: str,
    reserve: int,
    batch_norm: bool,
) -> None:
    """Raise BudgetError where the class of moves has no plan in so much memory, ``reserve`` of it left free. ``at`` as
    for :func:`.modnn_bounds.sub_batch`."""
    most = _most_parts(graph, batch_norm)
    least = {name: n + reserve for name, n in least_by_class(at, most).items()}
    if least["bitwise" if fidelity == "bitwise" else "reassociated"] > memory_bytes:
        accepted = least_by_class(at, _most_parts(graph, True))["reassociated"] + reserve
        raise BudgetError(memory_bytes, least, _remedy(memory_bytes, least["reassociated"], accepted, fidelity))


def _remedy(memory_bytes: int, least_bytes: int, accepted_bytes: int, fidelity: str) -> str:
    """What gives moDNN a plan: less than ``least_bytes`` do no sub-batches with, ``accepted_bytes`` those of a network
    whose batch norms may see other statistics."""
    ways = [] if fidelity != "bitwise" else ['fidelity="reassociated"']
    if accepted_bytes <= memory_bytes < least_bytes:
        ways.append(f"batch_statistics={PER_SUB_BATCH!r} (batch norms see parts of the batch)")
    if ways and accepted_bytes <= memory_bytes:
        return f"{MORE}, or allow sub-batches with {' and '.join(ways)}"
    return f"{MORE}, or take a smaller input or model: no size of sub-batches would do"


def parts_of(graph: SavedGraph, costs: CostTable, rule: str = PLAN) -> Callable[[int], Part]:
    """The step in any number of equal parts: profiled anew for every sub-batch size (Fig. 2)."""
    inplace = inplace_choices(graph)

    @cache
    def at(parts: int) -> Part:
        one = scaled(graph, parts)
        table = costs if parts == 1 else scaled_costs(costs, graph, one)
        own = own_decisions(one)
        alive = lives(
            one,
            rule,
            inplace=[c.covered for c in inplace],
            forms=_forms(one, table, own),
            link=costs.hardware.has_link,
            accumulates=rule == PLAN and parts > 1,
        )
        alive = replace(
            alive,
            resident_bytes=alive.resident_bytes + costs.hardware.libraries_bytes,
            transient_bytes=_with_noise(alive.transient_bytes, one, own),
        )
        bare = Plan("modnn", graph.fingerprint, own, inplace)
        return Part(
            parts, -(-max(graph.batch, 1) // parts), alive, _with_extra(table, profile(one, bare, table).extra_s)
        )

    return at


def _with_extra(costs: CostTable, extra_s: Iterable[float]) -> CostTable:
    """The costs with what the runtime's own operators add to every task, whatever its algorithm."""
    pairs = zip(costs.algorithms, extra_s, strict=True)
    return replace(costs, algorithms=tuple(tuple(replace(a, seconds=a.seconds + e) for a in k) for k, e in pairs))


def inplace_choices(graph: SavedGraph) -> tuple[CallChoice, ...]:
    """ReLUs that run in place."""
    return tuple(c for c in call_choices(Reading(graph), {}) if c.inplace)


def _forms(graph: SavedGraph, costs: CostTable, own: Iterable[Decision]) -> dict[int, int]:
    """Bytes by storage of what the runtime's own operators keep in place of a block: a map that its op makes in this
    form, nothing, or, where a dense form was there first, at most that."""
    blocks, found = {b.storage: b for b in graph.blocks if b.storage >= 0}, {}
    for decision in own:
        block = blocks[decision.storage]
        small = decision.codec.startswith("argmax") or block.first == block.last == block.saved
        if decision.codec == "drop":
            found[decision.storage] = 0
        elif small:
            found[decision.storage] = costs.payload_bytes(decision.codec, block.nbytes, block.dtype)
        else:
            found[decision.storage] = block.nbytes
    return found


def _with_noise(transient_bytes: Iterable[int], graph: SavedGraph, own: Iterable[Decision]) -> tuple[int, ...]:
    """By task what it makes and frees itself, with the noise of dropouts that keep bits of it."""
    found, bits = list(transient_bytes), {d.storage for d in own if d.codec == "bits"}
    for block in graph.blocks:
        if block.storage in bits and block.first == block.last == block.saved:
            found[block.first] += block.nbytes
    return tuple(found)
