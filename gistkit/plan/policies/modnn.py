"""moDNN (Chen et al., DATE 2018): any budget down to a lower bound, by sub-batches, offloading and algorithms at once.

The pipeline of the paper's Fig. 2: the task and data flow graph (:mod:`~gistkit.plan.policies.modnn_lives`), profiling
and sub-batch size in turn until it converges (:mod:`~gistkit.plan.policies.modnn_bounds`), the schedule
(:mod:`~gistkit.plan.policies.modnn_schedule`), and in place of code generation a plan. The schedule is static: each
block leaves before a task that is known and comes back before another.

A plan moves what autograd saves, once each; gradient maps, and whatever else has no stash, stay on the device. Without
that restriction (rule ``paper``) :func:`modnn_schedule` gives the paper's own schedule and clock, for its tables.

Sub-batches change the order of summation, and under batch norm in training mode the statistics, of which the paper says
nothing: whoever runs the plan decides whether that is acceptable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from gistkit.errors import BudgetError
from gistkit.graph.saved import SavedGraph
from gistkit.graph.scale import scaled
from gistkit.plan.cost import CostTable
from gistkit.plan.effects import profile
from gistkit.plan.part_algorithms import by_part
from gistkit.plan.plan import CallChoice, Decision, Plan
from gistkit.plan.policies.choices import call_choices
from gistkit.plan.policies.modnn_bounds import Part, SubBatch, ideal_s, lower_bound, sub_batch
from gistkit.plan.policies.modnn_lives import PLAN, lives
from gistkit.plan.policies.modnn_result import Schedule
from gistkit.plan.policies.modnn_schedule import schedule, schedule_unless
from gistkit.plan.policies.predicted import capacity, held, kept_bytes, make_plan, own_decisions
from gistkit.plan.policies.reading import Reading
from gistkit.plan.simulate import simulate
from gistkit.plan.sub_batches import scaled_costs

SMALLER = "give it more memory, or take a smaller input or model: the sub-batch size is 1 already"
REMEDY = {
    "bitwise": 'give it more memory, or allow sub-batches with fidelity="reassociated"',
    "reassociated": SMALLER,
    "lossy": SMALLER,
}


@dataclass(frozen=True)
class Scheduled:
    """moDNN's choice for one step: the sub-batch size and how it was found, and the schedule of one sub-batch."""

    sub_batch: SubBatch
    schedule: Schedule

    @property
    def parts(self) -> int:
        """Sub-batches of a step."""
        return self.sub_batch.part.parts

    @property
    def step_s(self) -> float:
        """Seconds of the whole step on moDNN's own clock."""
        return self.parts * self.schedule.step_s

    def moved_bytes(self, direction: str) -> int:
        """Bytes of the whole step over the link in a direction, d2h or h2d."""
        return self.parts * self.schedule.moved_bytes(direction)


def modnn(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
) -> Plan:
    """moDNN's plan within a budget (None: the device's memory), ``reserve`` bytes of which are left free.

    ``fidelity`` "bitwise" allows no sub-batches, "lossy" no more than "reassociated". The plan's figures are the
    simulator's; those of moDNN's own clock are in ``settings``. Raises BudgetError below the lower bound of eq. (2),
    with that bound by class; ValueError for another word or a graph without tasks.
    """
    found = modnn_schedule(graph, costs, budget_bytes, fidelity=fidelity, reserve=reserve)
    return _planned(graph, costs, budget_bytes, fidelity, reserve, found)


def modnn_unless(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    enough: Callable[[float], bool],
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
) -> Plan | None:
    """As :func:`modnn`; None where ``enough``, asked now and then with the seconds that the step takes at least however
    the schedule goes on, says so: for who has a faster plan or no more time."""
    memory = capacity(costs, budget_bytes) - reserve
    sized = _sized(graph, costs, budget_bytes, PLAN, fidelity, reserve)
    found = schedule_unless(sized.part, memory, lambda seconds: enough(sized.part.parts * seconds))
    if found is None:
        return None
    return _planned(graph, costs, budget_bytes, fidelity, reserve, Scheduled(sized, found))


def _planned(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None, fidelity: str, reserve: int, found: Scheduled
) -> Plan:
    part, batch = found.sub_batch.part, check(graph, fidelity)
    plan = make_plan(
        "modnn",
        graph,
        costs,
        budget_bytes,
        (*own_decisions(graph), *_offloads(graph, found.schedule)),
        _choices(graph, part.costs, found.schedule),
        settings={"fidelity": fidelity, "reserve": reserve, **_told(found, costs)},
    )
    plan = replace(plan, lower_bound_bytes=reserve + lower_bound(parts_of(graph, costs)(batch)).nbytes)
    return with_sub_batches(plan, graph, costs, part.parts, reserve)


def modnn_schedule(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    rule: str = PLAN,
    fidelity: str = "reassociated",
    reserve: int = 0,
) -> Scheduled:
    """Sub-batch size and schedule under a rule of :mod:`~gistkit.plan.policies.modnn_lives`: ``plan``, what gistkit can
    run, or ``paper``. Errors as :func:`modnn`."""
    sized = _sized(graph, costs, budget_bytes, rule, fidelity, reserve)
    return Scheduled(sized, schedule(sized.part, capacity(costs, budget_bytes) - reserve))


def _sized(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None, rule: str, fidelity: str, reserve: int
) -> SubBatch:
    batch, at = check(graph, fidelity), parts_of(graph, costs, rule)
    memory = capacity(costs, budget_bytes)
    if lower_bound(at(batch)).nbytes > memory - reserve:
        least = least_bytes(graph, costs, rule)
        raise BudgetError(memory, {name: n + reserve for name, n in least.items()}, REMEDY[fidelity])
    return sub_batch(at, batch, memory - reserve) if batch > 1 else SubBatch(at(1), (max(graph.batch, 1),))


def check(graph: SavedGraph, fidelity: str) -> int:
    """How many parts the batch may be taken in. Raises ValueError for another word or a graph without tasks."""
    if fidelity not in REMEDY:
        raise ValueError(
            f'fidelity must be one of {", ".join(REMEDY)}, got {fidelity!r}; sub-batches are "reassociated"'
        )
    if not graph.tasks:
        raise ValueError("graph must hold the tasks of a whole step, got none: capture it with backward=True")
    return 1 if fidelity == "bitwise" else _most_parts(graph)


def _most_parts(graph: SavedGraph) -> int:
    """Any number of parts, down to single rows, or none at all where these take another way through the model."""
    return max(graph.batch, 1) if graph.least_rows == 1 else 1


def least_bytes(graph: SavedGraph, costs: CostTable, rule: str = PLAN) -> dict[str, int]:
    """Eq. (2) by class of moves: ``bitwise`` for the whole batch, ``reassociated`` for sub-batch size 1."""
    at = parts_of(graph, costs, rule)
    return {"bitwise": lower_bound(at(1)).nbytes, "reassociated": lower_bound(at(_most_parts(graph))).nbytes}


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


def with_sub_batches(plan: Plan, graph: SavedGraph, costs: CostTable, parts: int, reserve: int = 0) -> Plan:
    """A plan of one sub-batch as the plan of the step: what one sub-batch keeps, the simulator's peak and seconds."""
    plan = replace(plan, sub_batches=parts, fidelity="reassociated" if parts > 1 else "bitwise")
    run = simulate(graph, plan, costs, reserve=reserve)
    decided, kept = {d.storage: d for d in plan.decisions}, held(scaled(graph, parts))
    trainable = run.peak_bytes <= capacity(costs, plan.budget_bytes)
    return replace(
        plan,
        plain_bytes=sum(b.nbytes for b in held(graph)),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in kept),
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        settings={**plan.settings, "trainable": trainable},
    )


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


def _offloads(graph: SavedGraph, found: Schedule) -> Iterable[Decision]:
    """The absences of a schedule as decisions."""
    for absence in found.absences:
        yield Decision(
            graph.blocks[absence.block].storage,
            "dense",
            place="host",
            release=absence.release,
            prefetch=absence.prefetch,
            reason="waits on the host between its two uses",
        )


def _choices(graph: SavedGraph, costs: CostTable, found: Schedule) -> tuple[CallChoice, ...]:
    """ReLUs in place, and of every covered convolution the algorithms of its tasks."""
    by_call: dict[int, dict[str, str]] = {}
    for task in graph.tasks:
        if task.conv is not None and task.call >= 0 and graph.calls[task.call].covered >= 0:
            by_call.setdefault(task.call, {})[task.part_name] = found.algorithms[task.index]
    named = tuple(
        CallChoice(graph.calls[call].covered, graph.calls[call].op, algorithm=by_part(names))
        for call, names in by_call.items()
    )
    return tuple(sorted((*inplace_choices(graph), *named), key=lambda c: c.covered))


def _told(found: Scheduled, costs: CostTable) -> dict:
    """What moDNN's own clock says, for the report."""
    return {
        "sub_batch": found.sub_batch.part.size,
        "sub_batch_sizes": list(found.sub_batch.sizes),
        "own_step_s": found.step_s,
        "own_d2h_bytes": found.moved_bytes("d2h"),
        "own_h2d_bytes": found.moved_bytes("h2d"),
        "defragmentations": len(found.schedule.defragmented),
        "ideal_s": ideal_s(costs),
    }
