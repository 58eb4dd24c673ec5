"""Policies by name, each given those of the caller's settings that it knows; `optimal` also the others' plans. The
errors of budgets that no plan meets: the least budget of each class of moves, and what to change."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gistkit.errors import BudgetError, PlanError
from gistkit.formats import Lossy
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES, check_fidelity, check_lossy
from gistkit.planning.policies import LARGE_TASKS, POLICIES, minimise_peak
from gistkit.planning.simulate import Simulator

SEEDS = ("plain", "checkpoint", "gist", "vdnn-all", "vdnn-conv", "cdma", "vdnn-dyn", "vdnn+", "modnn")
"""Policies whose plans `optimal` is given, so that it is never slower than one of them; for a step of more than
LARGE_TASKS tasks without the last, which takes minutes (ResNet-509: 3 to 34 s)."""

PACE = 1.5
"""How much longer the host takes than measured, which is at its cores' best pace, when PyTorch's own operators are
weighed against the runtime's: on one H200 a loop took between 6.8 and 14 ms (gistkit.profiling.host)."""


def accepts(policy: str, word: str) -> bool:
    """Whether a policy takes a setting of that name (``lossy``, ``fidelity``, ``reserve``, ``seeds``)."""
    return word in inspect.signature(POLICIES[policy]).parameters


def made(policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]) -> Plan:
    """The policy's plan; a policy that knows no reserve plans for what the reserve leaves."""
    given = {name: value for name, value in words.items() if accepts(policy, name)}
    if accepts(policy, "seeds"):
        names = SEEDS if len(graph.tasks) <= LARGE_TASKS else SEEDS[:-1]
        seeds = list(_plans_of(names, graph, costs, budget_bytes, words))
        plan = _by_policy(policy, graph, costs, budget_bytes, {**given, "seeds": seeds})
        plan = _or_blocks(plan, graph, costs, budget_bytes, words["reserve"])
        return replace(plan, prediction=replace(plan.prediction, not_compared=SEEDS[len(names) :]))
    reserve = words["reserve"]
    if accepts(policy, "reserve") or not reserve:
        return _by_policy(policy, graph, costs, budget_bytes, given)
    room = None if budget_bytes is None else max(1, budget_bytes - reserve)
    plan = _by_policy(policy, graph, costs, room, given)
    bound = plan.lower_bound_bytes + reserve if plan.lower_bound_bytes else 0
    return replace(plan, peak_bytes=plan.peak_bytes + reserve, lower_bound_bytes=bound)


def _or_blocks(plan: Plan, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, reserve: int) -> Plan:
    """The plan or, if it is faster within the budget on a host of less pace, PyTorch's own step, of which modules run
    anew whole as needed: that is no set of moves that `optimal` could choose from."""
    if budget_bytes is None or plan.peak_bytes > budget_bytes:
        return plan
    other = made("blocks", graph, costs, budget_bytes, {"reserve": reserve})
    hardware = costs.hardware
    paced = {"host_s": PACE * hardware.host_s, "runtime_host_s": PACE * hardware.runtime_host_s}
    simulator = Simulator(graph, replace(costs, hardware=replace(hardware, **paced)))
    if other.peak_bytes > budget_bytes or simulator.run(other).step_s >= simulator.run(plan).step_s:
        return plan
    bound_bytes = min(plan.lower_bound_bytes, other.peak_bytes)
    details = {**other.details, "taken_from": "blocks", "fidelity": "bitwise"}
    name = plan.policy if other.modules else "plain"
    return replace(other, policy=name, lower_bound_bytes=bound_bytes, details=details)


def _by_policy(
    policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, given: Mapping[str, Any]
) -> Plan:
    try:
        return POLICIES[policy](graph, costs, budget_bytes, **given)
    except PlanError as error:
        if costs.hardware.has_link:
            raise
        raise PlanError(
            f'policy="{policy}" moves tensors to the host, and hardware {costs.hardware.name!r} has no link to one, '
            'or the plan is for a CUDA graph, which holds no transfers; take policy="optimal" or "gist", or other '
            "hardware"
        ) from error


def _plans_of(
    names: Iterable[str], graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]
) -> Iterator[Plan]:
    """The plans of other policies under the same budget, without those that refuse it."""
    for name in names:
        try:
            yield made(name, graph, costs, budget_bytes, words)
        except BudgetError:
            continue
        except PlanError:
            if costs.hardware.has_link:
                raise


def check_words(policy: str, fidelity: str, lossy: Lossy, density: float | Mapping[int, float] | None = None) -> str:
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


Settings = Mapping[str, Any]
"""The caller's ``fidelity``, ``lossy``, ``reserve`` and ``batch_norm``."""
LEAST_S = 3.0
"""The time limit given to `optimal` for the least peak of a class, of which the search takes a fifth."""
EXAMPLE_FORMAT = "fp8"
"""The lossy format in the error where the caller named none: the smallest of Gist's."""


def least_bytes(
    graph: SavedGraph,
    costs: CostTable,
    *,
    lossy: Lossy = None,
    reserve: int = 0,
    batch_norm: bool = False,
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The least peak found for each class of moves, which is a budget that `optimal` can meet. ``lossy`` names the
    format of that class (default fp8). ``batch_norm`` accepts sub-batches for a network whose batch norms then see
    other statistics. ``known`` holds the classes whose least peak is known already."""
    found: dict[str, int] = {}
    again = POLICIES["checkpoint"](graph, costs).peak_bytes + reserve  # which `optimal` takes where nothing else fits
    for name in FIDELITIES:
        own = (known or {}).get(name)
        if own is None:
            narrow = (EXAMPLE_FORMAT if lossy is None else lossy) if name == "lossy" else None
            settings = {"lossy": narrow, "reserve": reserve, "batch_norm": batch_norm}
            own = minimise_peak(graph, costs, name, **settings, time_limit_s=LEAST_S).peak_bytes
        found[name] = min(own, again, *found.values())
    return found


def refused(
    graph: SavedGraph, costs: CostTable, budget_bytes: int, settings: Settings, policy: str, why: BudgetError | Plan
) -> BudgetError:
    """The error of a budget that a policy refused, or that its plan is above (``why``): what every class of moves needs
    and what to change. The policies other than `optimal` that refuse budgets round nothing."""
    asked, narrow = settings["fidelity"], settings["lossy"] or EXAMPLE_FORMAT
    given = {name: settings[name] for name in ("lossy", "reserve", "batch_norm")}
    own = why.least_bytes if isinstance(why, BudgetError) else {}
    least = least_bytes(graph, costs, **given, known=own if policy == "optimal" else {})
    if policy == "optimal":
        return BudgetError(budget_bytes, least, remedy(budget_bytes, least, asked, narrow))
    todo = 'policy="optimal" fits'
    if least[asked] > budget_bytes:
        todo = f'with policy="optimal" {remedy(budget_bytes, least, asked, narrow)}'
    if isinstance(why, Plan):
        text = f'policy="{policy}" needs {why.peak_bytes} bytes ({why.peak_bytes / 2**20:.1f} MiB)'
        return BudgetError(budget_bytes, least, f"{text}; {todo}")
    own = {name: own.get(name, own["reassociated"]) for name in FIDELITIES}
    return BudgetError(budget_bytes, own, f'by policy="{policy}": {why.remedy}; {todo}')


def remedy(budget_bytes: int, least: Mapping[str, int], asked: str, narrow: str) -> str:
    """Which class of moves would do, of those beyond the one ``asked`` for; ``narrow`` is the format of ``lossy``."""
    ways = {
        "reassociated": 'fidelity="reassociated" (sums in another order: sub-batches)',
        "lossy": f'lossy="{narrow}" (rounded activations)',
    }
    beyond = FIDELITIES[FIDELITIES.index(asked) + 1 :]
    enough = [ways[name] for name in beyond if least[name] <= budget_bytes]
    if enough:
        return f"{' or '.join(enough)} would do; or raise the budget, or take a smaller batch"
    narrowest = next(name for name in FIDELITIES if least[name] == least[asked])
    ask = "" if narrowest == FIDELITIES[0] else f", for {narrowest} moves,"
    return f"no class of moves would do; raise the budget to {least[asked]} bytes{ask} or take a smaller batch"
