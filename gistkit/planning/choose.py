"""Policies by name, each given those of the caller's settings that it knows."""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from gistkit.errors import BudgetError, PlanError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import check_fidelity, check_lossy
from gistkit.planning.policies import LARGE_TASKS, POLICIES
from gistkit.planning.wall import fastest_on_the_wall, without_link

SEEDS = ("plain", "checkpoint", "gist", "vdnn-all", "vdnn-conv", "cdma", "vdnn-dyn", "vdnn+", "modnn")
"""Policies whose plans `optimal` is given to start from, so that it is never slower than one of them: the slowest to
plan last."""
SEEDS_S = 2.0
"""Seconds after which no more of them are made for a step of more than LARGE_TASKS tasks: the others are rivals, taken
whole behind the search if they are faster."""
LATE_S = 4.0
"""Seconds of this thread's time after which no more rivals are begun (ResNet-1202's take 9); the plan names them."""
SLOW_TASKS = 1000
"""moDNN is a rival for steps of more tasks where no algorithm can be chosen (up to 16 s for ResNet-152), else for those
of more than LARGE_TASKS."""
WITHOUT_LINK_S = 2.0
"""Seconds of the second search, where the first one's plan sends something to the host."""
RIVAL_S = 30.0
"""Seconds of this thread's time after which a rival moDNN is given up: ResNet-509 takes 3 to 34, ResNet-1202 more."""


def accepts(policy: str, word: str) -> bool:
    """Whether a policy takes a setting of that name (``lossy``, ``fidelity``, ``reserve``, ``seeds``)."""
    return word in inspect.signature(POLICIES[policy]).parameters


def made(policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: dict) -> Plan:
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


def _optimal(
    policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: dict, given: dict
) -> Plan:
    others, late = _seeds(graph, costs, budget_bytes, words)

    def search(on: CostTable, seeds: list[Plan], **more: Any) -> Plan:
        return _by_policy(policy, graph, on, budget_bytes, {**given, "seeds": seeds, **more})

    found = search(costs, others, rivals=_rivals(late, graph, costs, budget_bytes, words))
    if len(graph.tasks) <= LARGE_TASKS:
        others += without_link(costs, found, others, partial(search, time_limit_s=WITHOUT_LINK_S))
    return fastest_on_the_wall(graph, costs, budget_bytes, found, others, words["fidelity"], words["reserve"])


def _by_policy(policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, given: dict) -> Plan:
    try:
        return POLICIES[policy](graph, costs, budget_bytes, **given)
    except PlanError as error:
        if costs.hardware.has_link:
            raise
        raise PlanError(
            f'policy="{policy}" moves tensors to the host, and hardware {costs.hardware.name!r} has no link to one; '
            'take policy="optimal" or "gist", or other hardware'
        ) from error


def _seeds(
    graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]
) -> tuple[list[Plan], list[str]]:
    """The plans of the other policies under the same budget, without those that refuse it, and the policies for which
    there was no time."""
    found: list[Plan | None] = []
    late, begun = [], time.monotonic()
    for name in SEEDS:
        over = len(graph.tasks) > LARGE_TASKS and time.monotonic() - begun > SEEDS_S
        if over or _is_slow(name, graph, costs):
            late.append(name)
        else:
            found.append(_or_none(costs, partial(made, name, graph, costs, budget_bytes, dict(words))))
    return [plan for plan in found if plan is not None], late


def _or_none(costs: CostTable, plan: Callable[[], Plan]) -> Plan | None:
    """A plan, None where the budget refuses it or where it needs a link to the host that there is not."""
    try:
        return plan()
    except BudgetError:
        return None
    except PlanError:
        if costs.hardware.has_link:
            raise
        return None


def _rivals(
    late: Iterable[str], graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]
) -> dict[str, Callable[[float], Plan | None]]:
    """By name what gives the plans of some policies when all else is done: TimeoutError behind LATE_S, counted from the
    first. A slow moDNN is always begun, and given up behind RIVAL_S."""
    begun: list[float] = []

    def rival(name: str, _: float) -> Plan | None:
        if _is_slow(name, graph, costs):
            given = {word: words[word] for word in ("fidelity", "reserve", "batch_norm")}
            modnn = partial(POLICIES[name], graph, costs, budget_bytes, time_limit_s=RIVAL_S, **given)
            return _or_none(costs, modnn)
        begun.append(time.thread_time())
        if begun[-1] - begun[0] > LATE_S:
            raise TimeoutError(name)
        return _or_none(costs, partial(made, name, graph, costs, budget_bytes, dict(words)))

    return {name: partial(rival, name) for name in late}


def _is_slow(name: str, graph: SavedGraph, costs: CostTable) -> bool:
    return name == "modnn" and len(graph.tasks) > (LARGE_TASKS if costs.hardware.tells_algorithms else SLOW_TASKS)


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
