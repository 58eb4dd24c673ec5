"""`optimal`: the fastest step within a budget among all moves of a class, with its optimality gap.

Every storage's forms, convolution algorithms, batch slices and, where the order of summation may change, sub-batches
(:mod:`.variants`); segments of the forward may run anew (:mod:`.segments`). A program bounds the step from below
(:mod:`.program`), a local search finds the plan (:mod:`.search`), and the simulator has the last word. Plans of other
policies may be given as ``seeds``: what they do is offered too, and each competes whole (:mod:`.whole`), so the result is
never slower than any of them that fits and is of the class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import check_fidelity, decidable, held, kept_bytes, slice_counts
from gistkit.planning.policies.optimal.least import Least
from gistkit.planning.policies.optimal.sub_batches import PEAK_SHARE, Planning
from gistkit.planning.policies.optimal.variants import Options
from gistkit.planning.policies.optimal.whole import Allowed
from gistkit.planning.simulate import Simulator

TIME_LIMIT_S, LARGE_LIMIT_S = 4.0, 16.0
LARGE_TASKS = 3000
"""Steps of more tasks (ResNet-152 has 1,290, ResNet-1202 10,222) get the longer limit by default."""
MORE_SHARE, MORE_S = 0.5, 2.0
"""With a gap above a tenth the search goes on for so much of its time again, at most MORE_S seconds: at the least budgets
4 s are too short for most steps (ResNet-50 on an H200: 74.4 -> 68.1 ms; on a Titan X 778 -> 757)."""
NARROW_SHARE, SLICES_SHARE = 0.4, 0.7
"""Share of the time in which a wider class of moves is first planned without them; SLICES_SHARE where batch slices are
all that it has more, which change little and make the search slow. ResNet-50 at its least budget on an H200, with 0.4
and 0.7: with slices 61.5 and 57.6 ms, with fp8 34.0 and 39.5; VGG-216 on a K40, with sub-batches, 16.3 and 19.8 s."""
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

    ``fidelity`` and ``lossy`` name the class of moves (:mod:`gistkit.planning.forms`). ``batch_norm`` accepts sub-batches for a
    network whose batch norms would then see other statistics. ``algorithms``: a convolution's algorithm is chosen too;
    None asks the costs (:meth:`.CostTable.tells_algorithms`: the papers' cards under their own frameworks, and switches
    of cuDNN that were measured). ``recompute``: segments may run anew. ``options`` restricts the decisions by storage,
    without segments and whole seeds. ``rivals`` are asked at last, each for its plan if it may take fewer seconds
    (infinite: none was found), which is taken whole if it is faster: for seeds that are slow to make. One that raises
    TimeoutError is named in ``prediction.not_compared``: of the policies there, nothing is promised. After about
    ``time_limit_s`` seconds (None: by the size of the step; half as long again, 2 s at most, where the gap is above a
    tenth) the best plan found is returned; ``Plan.gap`` is (step - bound) / step, the bound over all that is offered.
    Raises BudgetError, with the least peak found for the class, where nothing fits; ValueError for an unknown class or
    format or a graph without tasks.
    """
    check_fidelity(fidelity, lossy)
    allowed = _allowed(costs, fidelity, lossy, batch_norm, algorithms, recompute)
    limit_s, simulator, begun = _limit(graph, time_limit_s), Simulator(graph, costs), time.monotonic()
    given = {"listed": options, "room_bytes": None if budget_bytes is None else budget_bytes - reserve}
    narrow = _allowed(costs, "bitwise", None, False, algorithms, recompute)
    share = 0.0 if options is not None else _narrow_share(graph, allowed, narrow)
    starts: list[Plan] = []
    if share:
        first = Planning(graph, costs, simulator, narrow, share * limit_s, **given)
        first.run()
        starts += [] if first.plan is None else [first.plan]
    left_s, more_s = max((1 - share) * limit_s, limit_s - (time.monotonic() - begun)), min(MORE_SHARE * limit_s, MORE_S)
    planning = Planning(graph, costs, simulator, allowed, left_s, more_s=more_s, **given)
    planning.run(starts)
    planning.against((*starts, *(seeds if options is None else ())))
    given_up = []
    for name, ask in (rivals or {}).items():
        try:
            late = ask(planning.step_s)
        except TimeoutError:
            given_up.append(name)
        else:
            planning.against([] if late is None else [late])
    plan, least = planning.plan, planning.found
    if plan is None:
        assert budget_bytes is not None
        raise BudgetError(budget_bytes, {fidelity: least.peak_bytes + reserve}, REMEDIES[fidelity])
    told = {**plan.details, "fidelity": fidelity, "algorithms": allowed.algorithms, "recompute": recompute}
    prediction = replace(plan.prediction, not_compared=tuple(given_up))
    plan = replace(plan, details={**told, "time_limit_s": limit_s}, prediction=prediction)
    return _figures(graph, costs, plan, simulator, budget_bytes, least, planning.bound_s, reserve)


def _allowed(
    costs: CostTable, fidelity: str, lossy: str | None, batch_norm: bool, algorithms: bool | None, recompute: bool
) -> Allowed:
    told = costs.tells_algorithms(fidelity) if algorithms is None else algorithms
    return Allowed(fidelity, lossy, batch_norm, told, recompute)


def _narrow_share(graph: SavedGraph, allowed: Allowed, narrow: Allowed) -> float:
    """The share of the time in which the bitwise class is planned first, whose plan every wider one has too and may miss
    in the time that it gets: none where the class has nothing more."""
    if allowed.fidelity == "bitwise":
        return 0.0
    if allowed.fidelity == "lossy" or allowed.part_counts(graph) != [1]:
        return NARROW_SHARE
    more = slice_counts(allowed.fidelity, len(decidable(graph))) != (1,) or allowed.algorithms != narrow.algorithms
    return SLICES_SHARE if more else 0.0


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
    check_fidelity(fidelity, lossy)
    allowed = _allowed(costs, fidelity, lossy, batch_norm, algorithms, recompute)
    limit_s, simulator = _limit(graph, time_limit_s), Simulator(graph, costs)
    planning = Planning(graph, costs, simulator, allowed, limit_s, listed=options)
    planning.least(time.monotonic() + PEAK_SHARE * limit_s)
    told = {"fidelity": fidelity, "algorithms": allowed.algorithms, "recompute": recompute, "time_limit_s": limit_s}
    plan = replace(planning.smallest(), details=told)
    return replace(_figures(graph, costs, plan, simulator, None, planning.found, 0.0, reserve), gap=None)


def _limit(graph: SavedGraph, time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return LARGE_LIMIT_S if len(graph.tasks) > LARGE_TASKS else TIME_LIMIT_S
    return time_limit_s


def _figures(
    graph: SavedGraph,
    costs: CostTable,
    plan: Plan,
    simulator: Simulator,
    budget_bytes: int | None,
    least: Least,
    bound_s: float,
    reserve: int,
) -> Plan:
    run = simulator.run(plan, reserve=reserve)
    kept = held(graph)
    decided = {d.storage: d for d in plan.decisions}
    gap = max(0.0, (run.step_s - bound_s) / run.step_s) if run.step_s > 0 else 0.0
    return replace(
        plan,
        plain_bytes=sum(b.nbytes for b in kept),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in kept),
        budget_bytes=budget_bytes,
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        # a whole plan may do what is no move, and be below all moves
        lower_bound_bytes=min(least.bound_bytes + reserve, run.peak_bytes),
        gap=0.0 if gap < 1e-5 else gap,
        hardware=costs.hardware.name,
    )
