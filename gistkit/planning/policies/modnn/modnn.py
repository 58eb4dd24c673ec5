"""moDNN (Chen et al., DATE 2018): any budget down to a lower bound, by sub-batches, offloading and algorithms at once.

The pipeline of the paper's Fig. 2: the task and data flow graph (:mod:`~gistkit.planning.policies.modnn.lives`),
profiling and sub-batch size in turn until it converges (:mod:`~gistkit.planning.policies.modnn.bounds`), the schedule
(:mod:`~gistkit.planning.policies.modnn.schedule`), and in place of code generation a plan. The schedule is static: each
block leaves before a task that is known and comes back before another.

A plan moves what autograd saves, once each; gradient maps, and whatever else has no stash, stay on the device. Without
that restriction (rule ``paper``) :func:`modnn_schedule` gives the paper's own schedule and clock, for its tables.

Sub-batches change the order of summation, and under batch norm in training mode the statistics, of which the paper says
nothing: such a network is cut only where ``batch_norm`` accepts that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gistkit.ir import CallChoice, Decision, Plan, SavedGraph, scaled
from gistkit.planning.cost import CostTable, by_part
from gistkit.planning.forms import capacity, held, kept_bytes, make_plan, own_decisions
from gistkit.planning.policies.modnn.bounds import SubBatch, ideal_s, sub_batch
from gistkit.planning.policies.modnn.lives import PLAN
from gistkit.planning.policies.modnn.parts import check, demand_room, inplace_choices, least_bytes, parts_of
from gistkit.planning.policies.modnn.result import Schedule
from gistkit.planning.policies.modnn.schedule import schedule, schedule_unless
from gistkit.planning.simulate import simulate


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
    batch_norm: bool = False,
) -> Plan:
    """moDNN's plan within a budget (None: the device's memory), ``reserve`` bytes of which are left free.

    ``fidelity`` "bitwise" allows no sub-batches, "lossy" no more than "reassociated"; ``batch_norm`` accepts them for a
    network whose batch norms then see other statistics. The plan's figures are the simulator's; those of moDNN's own
    clock are in ``details``. ``lower_bound_bytes`` is the least that the allowed class can do with
    (:func:`.modnn_bounds.least_by_class`). Raises BudgetError below that, with the least of each class; ValueError for
    another word or a graph without tasks.
    """
    found = modnn_schedule(graph, costs, budget_bytes, fidelity=fidelity, reserve=reserve, batch_norm=batch_norm)
    return _planned(graph, costs, budget_bytes, fidelity, reserve, batch_norm, found)


def modnn_unless(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    enough: Callable[[float], bool],
    *,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> Plan | None:
    """As :func:`modnn`; None where ``enough``, asked now and then with the seconds that the step takes at least however
    the schedule goes on, says so: for who has a faster plan or no more time."""
    memory = capacity(costs, budget_bytes) - reserve
    sized = _sized(graph, costs, budget_bytes, PLAN, fidelity, reserve, batch_norm)
    found = schedule_unless(sized.part, memory, lambda seconds: enough(sized.part.parts * seconds))
    if found is None:
        return None
    return _planned(graph, costs, budget_bytes, fidelity, reserve, batch_norm, Scheduled(sized, found))


def _planned(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    fidelity: str,
    reserve: int,
    batch_norm: bool,
    found: Scheduled,
) -> Plan:
    part, least = found.sub_batch.part, least_bytes(graph, costs, batch_norm=batch_norm)
    plan = make_plan(
        "modnn",
        graph,
        costs,
        budget_bytes,
        (*own_decisions(graph), *_offloads(graph, found.schedule)),
        _choices(graph, part.costs, found.schedule),
        details=_told(found, costs),
    )
    plan = replace(plan, lower_bound_bytes=reserve + least[fidelity if fidelity == "bitwise" else "reassociated"])
    return with_sub_batches(plan, graph, costs, part.parts, reserve)


def modnn_schedule(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    rule: str = PLAN,
    fidelity: str = "reassociated",
    reserve: int = 0,
    batch_norm: bool = False,
) -> Scheduled:
    """Sub-batch size and schedule under a rule of :mod:`~gistkit.planning.policies.modnn.lives`: ``plan``, what
    gistkit can run, or ``paper``. Errors as :func:`modnn`."""
    sized = _sized(graph, costs, budget_bytes, rule, fidelity, reserve, batch_norm)
    return Scheduled(sized, schedule(sized.part, capacity(costs, budget_bytes) - reserve))


def _sized(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    rule: str,
    fidelity: str,
    reserve: int,
    batch_norm: bool,
) -> SubBatch:
    parts, at = check(graph, fidelity, batch_norm), parts_of(graph, costs, rule)
    memory = capacity(costs, budget_bytes)
    demand_room(graph, at, memory, fidelity, reserve, batch_norm)
    return sub_batch(at, parts, memory - reserve) if parts > 1 else SubBatch(at(1), (max(graph.batch, 1),))


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
        details={**plan.details, "trainable": trainable},
    )


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
