"""Policies by name, each given those of the caller's settings that it knows.

`optimal` proves its plan on the device's clock, where the link is nearly free and launches cost nothing. The plan that
is handed out is the fastest on the wall (:meth:`gistkit.planning.simulate.Simulator.wall_s`) of three kinds: what the
search found, what it finds without the link, and the other policies' plans.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, check_fidelity, check_lossy, own_decisions, with_figures
from gistkit.planning.policies import LARGE_TASKS, POLICIES
from gistkit.planning.simulate import Simulator

SEEDS = ("plain", "checkpoint", "gist", "vdnn-all", "vdnn-conv", "cdma", "vdnn-dyn", "vdnn+", "modnn")
"""Policies whose plans `optimal` is given, so that it is never slower than one of them: the slowest to plan last."""
SEEDS_S = 6.0
"""Seconds of this thread's time after which no more of them are begun for a step of more than LARGE_TASKS tasks
(ResNet-1202's take 9); the plan names the others."""
MODNN_S = 30.0
"""Seconds of this thread's time after which moDNN is given up: ResNet-509 takes 3 to 34, ResNet-1202 more."""
WITHOUT_LINK_S = 2.0
"""Seconds of the second search, where the first one's plan sends something to the host."""


def accepts(policy: str, word: str) -> bool:
    """Whether a policy takes a setting of that name (``lossy``, ``fidelity``, ``reserve``, ``seeds``)."""
    return word in inspect.signature(POLICIES[policy]).parameters


def made(policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]) -> Plan:
    """The policy's plan; a policy that knows no reserve plans for what the reserve leaves."""
    given = {name: value for name, value in words.items() if accepts(policy, name)}
    if accepts(policy, "seeds"):
        return _optimal(policy, graph, costs, budget_bytes, words, given)
    reserve = words["reserve"]
    if accepts(policy, "reserve") or not reserve:
        return _by_policy(policy, graph, costs, budget_bytes, given)
    room = None if budget_bytes is None else max(1, budget_bytes - reserve)
    plan = _by_policy(policy, graph, costs, room, given)
    bound = plan.lower_bound_bytes + reserve if plan.lower_bound_bytes else 0
    return replace(plan, peak_bytes=plan.peak_bytes + reserve, lower_bound_bytes=bound)


def _by_policy(
    policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, given: Mapping[str, Any]
) -> Plan:
    try:
        return POLICIES[policy](graph, costs, budget_bytes, **given)
    except PlanError as error:
        if costs.hardware.has_link:
            raise
        raise PlanError(
            f'policy="{policy}" moves tensors to the host, and hardware {costs.hardware.name!r} has no link to one; '
            'take policy="optimal" or "gist", or other hardware'
        ) from error


def _optimal(
    policy: str,
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    words: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Plan:
    others, late = _seeds(graph, costs, budget_bytes, words)
    found = _by_policy(policy, graph, costs, budget_bytes, {**given, "seeds": others})
    found = replace(found, prediction=replace(found.prediction, not_compared=late))
    if len(graph.tasks) <= LARGE_TASKS and any(d.on_host for d in found.decisions):
        alone = replace(costs, hardware=replace(costs.hardware, d2h_gbps=0.0, h2d_gbps=0.0, both_gbps=0.0))
        seeds = [plan for plan in others if not any(d.on_host for d in plan.decisions)]
        with suppress(BudgetError):
            without = {**given, "seeds": seeds, "time_limit_s": WITHOUT_LINK_S}
            others.append(_by_policy(policy, graph, alone, budget_bytes, without))
    return fastest_on_the_wall(graph, costs, budget_bytes, found, others, words["fidelity"], words["reserve"])


def _seeds(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]
) -> tuple[list[Plan], tuple[str, ...]]:
    """The plans of the other policies under the same budget, without those that refuse it, and the policies for which
    there was no time."""
    found: list[Plan] = []
    late, begun = [], time.thread_time()
    for name in SEEDS:
        if name != "modnn" and len(graph.tasks) > LARGE_TASKS and time.thread_time() - begun > SEEDS_S:
            late.append(name)
            continue
        try:
            found.append(made(name, graph, costs, budget_bytes, {**words, "time_limit_s": MODNN_S}))
        except TimeoutError:
            late.append(name)
        except BudgetError:
            continue
        except PlanError:
            if costs.hardware.has_link:
                raise
    return found, tuple(late)


def fastest_on_the_wall(
    graph: SavedGraph,
    costs: CostTable,
    budget_bytes: int | None,
    found: Plan,
    others: Iterable[Plan],
    fidelity: str,
    reserve: int = 0,
) -> Plan:
    """The plan of least ``wall_s`` among ``found``, a plan of `optimal`, and the ``others`` that fit the budget and are
    of the class ``fidelity``; of equals the one of least ``step_s``, and ``found`` before others. One of the others
    becomes a plan of `optimal` whose ``gap`` and ``lower_bound_bytes`` follow from what was proven for ``found``."""
    simulator, own = Simulator(graph, costs), [d for d in own_decisions(graph) if not d.form.gone]
    best, best_s = found, (simulator.wall_s(found), found.step_s)
    for other in others:
        if FIDELITIES.index(other.fidelity) > FIDELITIES.index(fidelity):
            continue
        decided = {d.storage for d in other.decisions}
        decisions = (*other.decisions, *(d for d in own if d.storage not in decided))
        plan = replace(other, policy=found.policy, decisions=decisions)
        try:
            run, wall_s = simulator.run(plan, reserve=reserve), simulator.wall_s(plan)
        except PlanError:
            continue  # it leans on its own policy's way of running
        limit = best_s[0] * (1 - 1e-9), best_s[1] * (1 - 1e-9)
        fits = budget_bytes is None or run.peak_bytes <= budget_bytes
        if fits and (wall_s < limit[0] or (wall_s <= best_s[0] and run.step_s < limit[1])):
            taken = other.details if other.policy == found.policy else {"taken_from": other.policy}
            best = replace(plan, details={**found.details, **taken, "trainable": True})
            best_s = wall_s, run.step_s
    return best if best is found else _proven(with_figures(best, graph, costs, budget_bytes, reserve=reserve), found)


def _proven(plan: Plan, found: Plan) -> Plan:
    bound_s, step_s = found.step_s * (1 - (found.gap or 0.0)), plan.step_s
    gap = max(0.0, (step_s - bound_s) / step_s) if step_s > 0 else 0.0
    lower_bound_bytes = min(found.lower_bound_bytes, plan.peak_bytes)
    gap = 0.0 if gap < 1e-5 else gap
    return replace(plan, lower_bound_bytes=lower_bound_bytes, gap=gap, prediction=found.prediction)


def check_words(
    policy: str, fidelity: str, lossy: str | None, density: float | Mapping[int, float] | None = None
) -> str:
    """The class of moves that is allowed. Raises ValueError for words that mean nothing, alone or together, TypeError
    for densities by anything but numbers."""
    _check_density(density)
    if policy not in POLICIES:
        near = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "take 'optimal'"
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}; {hint}")
    check_fidelity(fidelity)
    check_lossy(lossy)
    if fidelity == "lossy" and lossy is None:
        raise ValueError('fidelity="lossy" needs a format, got lossy=None; pass lossy="fp16", "fp10" or "fp8"')
    if lossy is not None and not accepts(policy, "lossy"):
        able = [name for name in POLICIES if accepts(name, "lossy")]
        raise ValueError(
            f'lossy must be None for policy="{policy}", which rounds nothing, got {lossy!r}; leave it out, or take '
            f"{' or '.join(able)}"
        )
    return "lossy" if lossy is not None else fidelity


def _check_density(density: float | Mapping[int, float] | None) -> None:
    by_storage = density if isinstance(density, Mapping) else {}
    for key in by_storage:
        if isinstance(key, bool) or not isinstance(key, int):
            raise TypeError(
                f"density must have storage ids, whole numbers, as keys, got {key!r}; take those of "
                "plan.contract.densities or of gistkit.report(model).densities"
            )
    for value in by_storage.values() if isinstance(density, Mapping) else () if density is None else (density,):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"density must be a share of elements from 0 to 1 (or a dict of them by storage id), got {value!r}; "
                "leave it out for what the ops suggest"
            )
