"""`optimal`: the fastest step within a budget among all moves of a class, with its optimality gap.

A mixed-integer program over every storage's decisions (:mod:`.options`), convolution algorithms, batch slices and,
where order of summation may change, sub-batches; segments of the forward may run anew (:mod:`.optimal_segments`). Bytes
are exact at every task, the link's stalls bounded from below, and the simulator has the last word
(:mod:`.optimal_refine`). Plans of other policies may be given as ``seeds``: what they do is offered too, and each
competes whole (:mod:`.optimal_whole`), so the result is never slower than any of them that fits and is of the class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import check_fidelity, decidable, held, kept_bytes, slice_counts
from gistkit.planning.policies.optimal.build import Options
from gistkit.planning.policies.optimal.peak import Least
from gistkit.planning.policies.optimal.planning import PEAK_SHARE, Common, Planning, Settings, part_counts
from gistkit.planning.policies.optimal.reasons import reasoned
from gistkit.planning.simulate import Simulator

TIME_LIMIT_S, LARGE_LIMIT_S = 4.0, 16.0
LARGE_TASKS = 3000
"""Steps of more tasks (ResNet-152 has 1,290, ResNet-1202 10,222) get the longer limit by default."""
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

    ``fidelity`` and ``lossy`` name the class of moves (:mod:`.options`). ``batch_norm`` accepts sub-batches for a
    network whose batch norms would then see other statistics. ``algorithms``: a convolution's algorithm is chosen too;
    None asks the hardware (``Hardware.tells_algorithms``: the papers' cards under their own frameworks). ``recompute``:
    segments may run anew. ``options`` restricts the decisions by storage, without segments and whole seeds. ``rivals``
    are asked at last, each for its plan if it may take fewer seconds (infinite: none was found), which is taken whole
    if it is faster: for seeds that are slow to make. One that raises TimeoutError is named in
    ``prediction.not_compared``: of the policies there, nothing is promised. After about ``time_limit_s`` seconds (None:
    by the size of the step; half as long again, 2 s at most, where the gap is above a tenth) the best plan found is
    returned; ``Plan.gap`` is (step - bound) / step, the bound over all that is offered.
    Raises BudgetError, with the least peak found for the class, where nothing fits; ValueError for an unknown class or
    format or a graph without tasks.
    """
    check_fidelity(fidelity, lossy)
    told = costs.hardware.tells_algorithms if algorithms is None else algorithms
    settings = Settings(fidelity, lossy, batch_norm, reserve, _limit(graph, time_limit_s), told, recompute)
    room, common = None if budget_bytes is None else budget_bytes - reserve, Common(Simulator(graph, costs))
    begun, narrow = time.monotonic(), _bitwise(settings)
    share = 0.0 if options is not None else _narrow_share(graph, settings, narrow)
    if share:
        narrow = replace(narrow, time_limit_s=share * settings.time_limit_s)
        plan, _, _ = _fastest(Planning(graph, costs, narrow, seeds, None, room, common), seeds, room)
        seeds = (*seeds, *(() if plan is None else (plan,)))
    left_s = max(settings.time_limit_s - (time.monotonic() - begun), (1 - share) * settings.time_limit_s)
    planning = Planning(graph, costs, replace(settings, time_limit_s=left_s), seeds, options, room, common)
    plan, bound_s, least = _fastest(planning, () if options is not None else seeds, room)
    plan, bound_s, given_up = _against(rivals or {}, planning, plan, room, bound_s)
    if plan is None:
        assert budget_bytes is not None
        raise BudgetError(budget_bytes, {fidelity: least.peak_bytes + reserve}, REMEDIES[fidelity])
    plan = replace(plan, prediction=replace(plan.prediction, not_compared=tuple(given_up)))
    return _figures(graph, costs, plan, common.simulator, settings, budget_bytes, least, bound_s)


def _bitwise(settings: Settings) -> Settings:
    """The narrowest class, whose plan every wider one has too: its larger program alone may miss it in the time that it
    gets."""
    return replace(settings, fidelity="bitwise", lossy=None, batch_norm=False)


def _narrow_share(graph: SavedGraph, settings: Settings, narrow: Settings) -> float:
    """The share of the time in which the narrowest class is planned first: none where the class has nothing more."""
    if settings.fidelity == "bitwise":
        return 0.0
    if settings.fidelity == "lossy" or part_counts(graph, settings) != [1]:
        return NARROW_SHARE
    more = slice_counts(settings.fidelity, len(decidable(graph))) != (1,) or settings.algorithms != narrow.algorithms
    return SLICES_SHARE if more else 0.0


def _fastest(planning: Planning, seeds: Sequence[Plan], room_bytes: int | None) -> tuple[Plan | None, float, Least]:
    """The plan that is found or taken over whole, what no plan goes below (seconds), and the least peak."""
    best, least = planning.run(room_bytes)
    whole = planning.whole(seeds, room_bytes)
    if whole is not None and (best is None or whole.step_s < best[0].parts * best[1].seconds * (1 - 1e-9)):
        return whole, planning.floor_s if best is None else min(best[2], whole.step_s), least
    if best is None:
        return None, np.inf, least
    attempt, outcome, bound_s = best
    plan = reasoned(attempt, outcome.taken or ())
    return replace(plan, step_s=attempt.parts * outcome.seconds), bound_s, least


def _against(
    rivals: Mapping[str, Callable[[float], Plan | None]],
    planning: Planning,
    plan: Plan | None,
    room_bytes: int | None,
    bound_s: float,
) -> tuple[Plan | None, float, list[str]]:
    """The faster of a plan and those of rivals, which may not fit or not be of the class, the bound below all, and the
    rivals that were given up."""
    best_s, given_up = np.inf if plan is None else planning.seconds(plan), []
    for name, ask in rivals.items():
        try:
            late = ask(best_s)
        except TimeoutError:
            given_up.append(name)
            continue
        whole = None if late is None else planning.whole([late], room_bytes)
        if whole is not None and whole.step_s < best_s:
            bound_s = min(planning.floor_s if plan is None else bound_s, whole.step_s)
            plan, best_s = whole, whole.step_s
    return plan, bound_s, given_up


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
    common: Common | None = None,
) -> Plan:
    """The plan of least peak, whatever its time; arguments and errors as :func:`optimal`, which names its
    ``peak_bytes`` where it refuses a budget under the same time limit.

    ``peak_bytes`` is a budget that can be met, ``lower_bound_bytes`` one below which no plan of the class is: where
    both are equal there is no smaller peak. ``gap`` is None. ``common``: what other searches over the same graph and
    costs have looked at.
    """
    check_fidelity(fidelity, lossy)
    told = costs.hardware.tells_algorithms if algorithms is None else algorithms
    settings = Settings(fidelity, lossy, batch_norm, reserve, _limit(graph, time_limit_s), told, recompute)
    common = common or Common(Simulator(graph, costs))
    planning = Planning(graph, costs, settings, (), options, None, common)
    least = planning.least(time.monotonic() + PEAK_SHARE * settings.time_limit_s)
    plan = planning.smallest()
    return replace(_figures(graph, costs, plan, common.simulator, settings, None, least, 0.0), gap=None)


def _limit(graph: SavedGraph, time_limit_s: float | None) -> float:
    if time_limit_s is None:
        return LARGE_LIMIT_S if len(graph.tasks) > LARGE_TASKS else TIME_LIMIT_S
    return time_limit_s


def _figures(
    graph: SavedGraph,
    costs: CostTable,
    plan: Plan,
    simulator: Simulator,
    settings: Settings,
    budget_bytes: int | None,
    least: Least,
    bound_s: float,
) -> Plan:
    run = simulator.run(plan, reserve=settings.reserve)
    kept = held(graph)
    decided = {d.storage: d for d in plan.decisions}
    gap = max(0.0, (run.step_s - bound_s) / run.step_s) if run.step_s > 0 else 0.0
    return replace(
        plan,
        plain_bytes=sum(b.nbytes for b in kept),
        kept_bytes=sum(kept_bytes(b, decided.get(b.storage), costs) for b in kept),
        details={
            **plan.details,
            "fidelity": settings.fidelity,
            "algorithms": settings.algorithms,
            "recompute": settings.recompute,
            "time_limit_s": settings.time_limit_s,
        },
        budget_bytes=budget_bytes,
        peak_bytes=run.peak_bytes,
        step_s=run.step_s,
        # a whole plan may do what is no move, and be below all moves
        lower_bound_bytes=min(least.bound_bytes + settings.reserve, run.peak_bytes),
        gap=0.0 if gap < 1e-5 else gap,
        hardware=costs.hardware.name,
    )
