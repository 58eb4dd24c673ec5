"""`optimal`: the fastest step within a budget among all moves of a class, with its optimality gap.

Every storage's forms, convolution algorithms, batch slices and, where the order of summation may change, sub-batches
(:mod:`.variants`); segments of the forward may run anew (:mod:`.segments`). A relaxation bounds the step from below
(:mod:`.bounds`), a local search finds the plan (:mod:`.search`), and the simulator has the last word. Plans of other
policies may be given as ``seeds``, each of which competes whole (:mod:`.whole`), so the result is never slower than any
of them that fits and is of the class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import decidable, held, kept_bytes, slice_counts
from gistkit.planning.policies.optimal.planning import Planning
from gistkit.planning.policies.optimal.variants import Options
from gistkit.planning.policies.optimal.whole import Allowed

TIME_LIMIT_S, LARGE_LIMIT_S = 4.0, 16.0
LARGE_TASKS = 3000
"""Steps of more tasks (ResNet-152 has 1,290, ResNet-1202 10,222) get the longer limit by default."""
NARROW_SHARE, SLICES_SHARE = 0.5, 0.7
"""Share of the time in which a wider class of moves is first planned with bitwise ones alone, whose plan it has too and
may miss in the time that it gets; SLICES_SHARE where batch slices are all that it has more, which change little."""
REMEDIES = {
    "bitwise": 'raise the budget, allow fidelity="reassociated" (slices, sub-batches) or lossy="fp8", or take a '
    "smaller batch",
    "reassociated": 'raise the budget, allow lossy="fp8", or take a smaller batch',
    "lossy": "raise the budget or take a smaller batch",
}


def optimal(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None = None,
    *,
    fidelity: str = "bitwise",
    lossy: str | None = None,
    reserve: int = 0,
    seeds: Sequence[Plan] = (),
    rivals: Mapping[str, Callable[[float], Plan | None]] | None = None,
    batch_norm: bool = False,
    algorithms: bool | None = None,
    recompute: bool = True,
    time_limit_s: float | None = None,
    options: Options | None = None,
) -> Plan:
    """The fastest plan within ``budget_bytes`` (None: any peak), ``reserve`` bytes of which are left free.

    ``fidelity`` and ``lossy`` name the class of moves (:mod:`gistkit.planning.forms`). ``batch_norm`` accepts
    sub-batches for a network whose batch norms would then see other statistics. ``algorithms``: a convolution's
    algorithm is chosen too; None asks the hardware (``Hardware.tells_algorithms``: the papers' cards under their own
    frameworks). ``recompute``: segments may run anew. ``options`` restricts the decisions by storage, without segments
    and whole seeds. ``rivals`` are asked at last, each for its plan if it may take fewer seconds (infinite: none was
    found), which is taken whole if it is faster: for seeds that are slow to make. One that raises TimeoutError is
    named in ``prediction.not_compared``: of the policies there, nothing is promised. After about ``time_limit_s``
    seconds (None: by the size of the step; half as long again, 2 s at most, where the gap is above a tenth) the best
    plan found is returned; ``Plan.gap`` is (step - bound) / step, the bound over all that is offered. Raises
    BudgetError, with the least peak found for the class, where nothing fits; ValueError for an unknown class or format
    or a graph without tasks.
    """
    allowed = Allowed.of(costs, fidelity, lossy, batch_norm, algorithms, recompute)
    narrow = Allowed.of(costs, "bitwise", None, False, algorithms, recompute)
    limit_s, begun = _limit(graph, time_limit_s), time.monotonic()
    room_bytes = None if budget_bytes is None else budget_bytes - reserve
    starts, narrow_bytes = [], inf
    share = 0.0 if options is not None else _narrow_share(graph, allowed, narrow)
    if share:
        first = Planning(graph, costs, narrow, share * limit_s, room_bytes=room_bytes).run()
        starts, narrow_bytes = [] if first.plan is None else [first.plan], first.found.peak_bytes
    left_s = max((1 - share) * limit_s, limit_s - (time.monotonic() - begun))
    planning = Planning(graph, costs, allowed, left_s, listed=options, room_bytes=room_bytes).run(starts)
    planning.against((*starts, *(seeds if options is None else ())))
    given_up = []
    for name, ask in (rivals or {}).items():
        try:
            late = ask(inf if planning.plan is None else planning.plan.step_s)
        except TimeoutError:
            given_up.append(name)
        else:
            planning.against([] if late is None else [late])
    plan = planning.plan
    if plan is None:
        assert budget_bytes is not None
        least = int(min(planning.found.peak_bytes, narrow_bytes)) + reserve
        raise BudgetError(budget_bytes, {fidelity: least}, REMEDIES[fidelity])
    prediction = replace(plan.prediction, not_compared=tuple(given_up))
    plan = _figures(graph, costs, plan, planning, budget_bytes, reserve)
    return replace(plan, prediction=prediction, details=_details(plan, allowed, limit_s))


def _narrow_share(graph: SavedGraph, allowed: Allowed, narrow: Allowed) -> float:
    """The share of the time in which the bitwise class is planned first: none where the class has nothing more."""
    if allowed.fidelity == "lossy" or allowed.part_counts(graph) != [1]:
        return NARROW_SHARE
    sliced = slice_counts(allowed.fidelity, len(decidable(graph))) != (1,)
    return SLICES_SHARE if sliced or allowed.algorithms != narrow.algorithms else 0.0


def minimise_peak(
    graph: SavedGraph,
    costs: CostTable,
    fidelity: str = "bitwise",
    *,
    lossy: str | None = None,
    reserve: int = 0,
    batch_norm: bool = False,
    algorithms: bool | None = None,
    recompute: bool = True,
    time_limit_s: float | None = None,
    options: Options | None = None,
) -> Plan:
    """The plan of least peak, whatever its time; arguments and errors as :func:`optimal`, which names its
    ``peak_bytes`` where it refuses a budget under the same time limit.

    ``peak_bytes`` is a budget that can be met, ``lower_bound_bytes`` one below which no plan of the class is: where
    both are equal there is no smaller peak. ``gap`` is None.
    """
    allowed = Allowed.of(costs, fidelity, lossy, batch_norm, algorithms, recompute)
    limit_s = _limit(graph, time_limit_s)
    planning = Planning(graph, costs, allowed, limit_s, listed=options)
    planning.least()
    plan = _figures(graph, costs, planning.smallest(), planning, None, reserve)
    return replace(plan, gap=None, details=_details(plan, allowed, limit_s))


def _limit(graph: SavedGraph, time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return LARGE_LIMIT_S if len(graph.tasks) > LARGE_TASKS else TIME_LIMIT_S
    return time_limit_s


def _details(plan: Plan, allowed: Allowed, limit_s: float) -> dict:
    moves = {"fidelity": allowed.fidelity, "algorithms": allowed.algorithms, "recompute": allowed.recompute}
    return {**plan.details, **moves, "time_limit_s": limit_s}


def _figures(
    graph: SavedGraph, costs: CostTable, plan: Plan, planning: Planning, budget_bytes: int | None, reserve: int
) -> Plan:
    run = planning.simulator.run(plan, reserve=reserve)
    kept = held(graph)
    decided = {d.storage: d for d in plan.decisions}
    gap = max(0.0, (run.step_s - planning.bound_s) / run.step_s) if run.step_s > 0 else 0.0
    return replace(
        plan,
        plain_bytes=sum(b.nbytes for b in kept),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in kept),
        budget_bytes=budget_bytes,
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        # a whole plan may do what is no move, and be below all moves
        lower_bound_bytes=min(planning.found.bound_bytes + reserve, run.peak_bytes),
        gap=0.0 if gap < 1e-5 else gap,
        hardware=costs.hardware.name,
    )
