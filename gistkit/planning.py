"""plan: from a model, a batch and a budget in bytes to the plan of a step that fits.

Capture, costs and a policy of :data:`gistkit.plan.policies.registry.POLICIES`, which the simulator judges. A plan that
does not fit is never returned: :class:`BudgetError` says what each class of moves needs at least.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gistkit.captured import step_on
from gistkit.errors import BudgetError, PlanError
from gistkit.graph.saved import SavedGraph
from gistkit.plan.budget import check_budget, parse_budget, parse_bytes
from gistkit.plan.context import is_sparse
from gistkit.plan.cost import CostTable, cost_table
from gistkit.plan.hardware import Hardware
from gistkit.plan.plan import Plan
from gistkit.plan.policies.gist import check_lossy
from gistkit.plan.policies.optimal import optimal
from gistkit.plan.policies.options import FIDELITIES
from gistkit.plan.policies.registry import POLICIES

SEEDS = ("plain", "checkpoint", "gist", "vdnn-all", "vdnn-conv", "cdma", "vdnn-dyn", "vdnn+", "modnn")
"""Policies whose plans `optimal` is given to start from, so that it is never slower than one of them: the slowest to
plan last."""
SEEDS_S = 2.0
"""Seconds after which no more of them are made: modnn takes 4 s for ResNet-152, and more than linearly longer."""
LEAST_S = 3.0
"""Seconds for the least peak of one class of moves, where a budget is refused."""
EXAMPLE_FORMAT = "fp8"
"""The lossy format that a refused budget is told of where the caller named none: the smallest."""


def plan(
    model: torch.nn.Module,
    *batch: Any,
    budget: int | str | None = None,
    policy: str = "optimal",
    fidelity: str = "bitwise",
    lossy: str | None = None,
    hardware: Hardware | str | Path | None = None,
    density: float | Mapping[int, float] | None = None,
    reserve: int | str = 0,
    loss_fn: Callable[..., torch.Tensor] | None = None,
) -> Plan:
    """The plan of one training step (forward and backward) that fits ``budget`` and takes the least time.

    ``model`` and ``batch`` may be real, fake or on the meta device, far larger than this machine; nothing is computed.
    With ``loss_fn`` the first item of the batch is the model's input (a tuple: several positional ones, a dict: named
    ones) and the rest go to the loss, ``loss_fn(model(batch[0]), *batch[1:])``; without, the step is ``model(*batch)``
    and backward from what it returns.

    ``budget`` counts everything on the device during forward and backward: parameters, buffers, gradients, inputs,
    activations, stashes, decoded copies, workspace, what the device's libraries hold (``Hardware.libraries_bytes``),
    and ``reserve`` for what the planner cannot see (optimiser state, another model). Bytes or ``"12GiB"``,
    ``"800MB"``, or ``"60%"`` of what plain PyTorch needs, reserve included. None sets no limit: the fastest step.
    ``policy`` is ``optimal`` or one of the papers' (``plain``, ``gist``, ``vdnn-all``, ``vdnn-conv``, ``vdnn-dyn``,
    ``vdnn+``, ``modnn``, ``cdma``, ``checkpoint``). ``fidelity`` is the class of moves that may be used: ``bitwise``,
    or ``reassociated`` (sums in another order); ``lossy="fp8"`` (``fp16``, ``fp10``, their scaled forms) implies the
    class ``lossy``. ``hardware`` is a preset (``titanx``, ``k40m``, ``h200``, ``cpu``), a file of ``gistkit
    calibrate`` or a Hardware; None is the device that the model is on. ``density`` is the share of elements that are
    not zero in what may hold zeros (default: by the producing op), one number or by storage id.

    The result has ``peak_bytes``, ``step_s``, ``lower_bound_bytes`` (0 where the policy gives none), ``gap``,
    ``sub_batches`` and, in ``settings``, what it was made for. Raises :class:`gistkit.BudgetError` where nothing
    allowed fits, with ``least_bytes`` by class; :class:`gistkit.CaptureError` where the step cannot be captured;
    ValueError or TypeError for an argument that makes no sense.
    """
    check_words(policy, fidelity, lossy, density)
    check_budget(budget)
    parse_bytes(reserve)
    graph, device = step_on("plan", model, batch, loss_fn, hardware)
    costs = cost_table(graph, device, density=density)
    made = plan_graph(graph, costs, budget=budget, policy=policy, fidelity=fidelity, lossy=lossy, reserve=reserve)
    told = density if density is None or isinstance(density, int | float) else "by storage"
    return replace(made, settings={**made.settings, "density": told})


def plan_graph(
    graph: SavedGraph,
    costs: CostTable,
    *,
    budget: int | str | None = None,
    policy: str = "optimal",
    fidelity: str = "bitwise",
    lossy: str | None = None,
    reserve: int | str = 0,
    refuse: bool = True,
) -> Plan:
    """:func:`plan` of a step that is captured already (with its tasks), on given costs. Errors as there.

    With ``refuse`` False, for comparisons, a policy that aims at no budget may exceed it, and one that does refuses it
    in its own words.
    """
    allowed = check_words(policy, fidelity, lossy)
    reserve_bytes = parse_bytes(reserve)
    plain = POLICIES["plain"](graph, costs)
    plain_peak_bytes = plain.peak_bytes + reserve_bytes
    budget_bytes = parse_budget(budget, plain_peak_bytes)
    words = {"fidelity": allowed, "lossy": lossy, "reserve": reserve_bytes}
    try:
        made = _made(policy, graph, costs, budget_bytes, words)
    except BudgetError as error:
        assert budget_bytes is not None
        if policy != "optimal" or not refuse:
            raise
        raise _refusal(graph, costs, budget_bytes, words, error.least_bytes) from None
    if refuse and budget_bytes is not None and made.peak_bytes > budget_bytes:
        raise _unfit(graph, costs, budget_bytes, words, made)
    settings = {"batch": graph.batch, "plain_peak_bytes": plain_peak_bytes, "plain_step_s": plain.step_s}
    settings["densities"] = densities(made, costs)
    return replace(made, budget_bytes=budget_bytes, settings={**made.settings, **words, **settings})


def densities(plan: Plan, costs: CostTable) -> dict[str, float]:
    """The densities that a plan's sparse payloads were counted with, by storage id (as a text, as JSON has it)."""
    coded = (d.storage for d in plan.decisions if is_sparse(d.codec))
    return {str(s): costs.densities[s] for s in coded if s in costs.densities}


def accepts(policy: str, word: str) -> bool:
    """Whether a policy takes a setting of that name (``lossy``, ``fidelity``, ``reserve``, ``seeds``)."""
    return word in inspect.signature(POLICIES[policy]).parameters


def least_bytes(
    graph: SavedGraph, costs: CostTable, *, lossy: str | None = None, reserve: int = 0, limit_s: float = LEAST_S
) -> dict[str, int]:
    """The least peak found for each class of moves, which is a budget that :func:`plan_graph` can meet.

    ``lossy`` names the format of that class (default fp8). Takes up to about ``limit_s`` seconds a class.
    """
    return _least(graph, costs, {}, lossy or EXAMPLE_FORMAT, reserve, limit_s)


def _least(
    graph: SavedGraph, costs: CostTable, known: Mapping[str, int], narrow: str, reserve: int, limit_s: float
) -> dict[str, int]:
    """By class; each class has the moves of those before it."""
    found: dict[str, int] = {}
    best: int | None = None
    for name in FIDELITIES:
        own = known.get(name)
        if own is None:
            own = _least_of(graph, costs, name, narrow if name == "lossy" else None, reserve, limit_s)
        best = own if best is None else min(best, own)
        found[name] = best
    return found


def _least_of(
    graph: SavedGraph, costs: CostTable, fidelity: str, narrow: str | None, reserve: int, limit_s: float
) -> int:
    """What `optimal` says it needs when it is given nothing."""
    try:
        optimal(graph, costs, 1, fidelity=fidelity, lossy=narrow, reserve=reserve, time_limit_s=limit_s)
    except BudgetError as error:
        return error.least_bytes[fidelity]
    raise AssertionError("a step in one byte")


def _made(policy: str, graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: dict) -> Plan:
    """The policy's plan; a policy that knows no reserve plans for what the reserve leaves."""
    given = {name: value for name, value in words.items() if accepts(policy, name)}
    if accepts(policy, "seeds"):
        given["seeds"] = seeds(graph, costs, budget_bytes, words)
    if accepts(policy, "reserve") or not words["reserve"]:
        return _by_policy(policy, graph, costs, budget_bytes, given)
    reserve = words["reserve"]
    room = None if budget_bytes is None else max(1, budget_bytes - reserve)
    made = _by_policy(policy, graph, costs, room, given)
    bound = made.lower_bound_bytes + reserve if made.lower_bound_bytes else 0
    return replace(made, peak_bytes=made.peak_bytes + reserve, lower_bound_bytes=bound)


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


def seeds(graph: SavedGraph, costs: CostTable, budget_bytes: int | None, words: Mapping[str, Any]) -> list[Plan]:
    """The plans of the other policies under the same budget, without those that refuse it, as many as there is time.

    ``words`` are the settings ``fidelity``, ``lossy`` and ``reserve``, of which each policy takes what it knows.
    """
    found: list[Plan] = []
    begun = time.monotonic()
    for name in SEEDS:
        if time.monotonic() - begun > SEEDS_S:
            break
        try:
            found.append(_made(name, graph, costs, budget_bytes, dict(words)))
        except BudgetError:
            continue
        except PlanError:
            if costs.hardware.has_link:
                raise
    return found


def _refusal(
    graph: SavedGraph, costs: CostTable, budget_bytes: int, words: Mapping[str, Any], known: Mapping[str, int]
) -> BudgetError:
    """The error of a budget below what the allowed class needs, with what every class needs."""
    narrow = words["lossy"] or EXAMPLE_FORMAT
    least = _least(graph, costs, known, narrow, words["reserve"], LEAST_S)
    return BudgetError(budget_bytes, least, remedy(budget_bytes, least, words["fidelity"], narrow))


def _unfit(graph: SavedGraph, costs: CostTable, budget_bytes: int, words: Mapping[str, Any], made: Plan) -> BudgetError:
    """The error of a plan above its budget, by a policy that aims at none or cannot reach it."""
    narrow = words["lossy"] or EXAMPLE_FORMAT
    least = least_bytes(graph, costs, lossy=narrow, reserve=words["reserve"])
    text = f'policy="{made.policy}" needs {made.peak_bytes} bytes ({made.peak_bytes / 2**20:.1f} MiB)'
    if least[words["fidelity"]] <= budget_bytes:
        return BudgetError(budget_bytes, least, f'{text}; policy="optimal" fits')
    todo = remedy(budget_bytes, least, words["fidelity"], narrow)
    return BudgetError(budget_bytes, least, f'{text}; with policy="optimal" {todo}')


def remedy(budget_bytes: int, least: Mapping[str, int], asked: str, narrow: str) -> str:
    """Which class of moves would do, of those beyond the one ``asked`` for; ``narrow`` is the format of ``lossy``."""
    ways = {
        "reassociated": 'fidelity="reassociated" (sums in another order: batch slices, sub-batches)',
        "lossy": f'lossy="{narrow}" (rounded activations)',
    }
    beyond = FIDELITIES[FIDELITIES.index(asked) + 1 :]
    enough = [ways[name] for name in beyond if least[name] <= budget_bytes]
    if enough:
        return f"{' or '.join(enough)} would do; or raise the budget, or take a smaller batch"
    return f"no class of moves would do; raise the budget to {min(least.values())} bytes or take a smaller batch"


def check_words(
    policy: str, fidelity: str, lossy: str | None, density: float | Mapping[int, float] | None = None
) -> str:
    """The class of moves that is allowed. Raises ValueError for words that mean nothing, alone or together."""
    _check_density(density)
    if policy not in POLICIES:
        near = difflib.get_close_matches(str(policy), POLICIES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "take 'optimal'"
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}; {hint}")
    if fidelity not in FIDELITIES:
        raise ValueError(
            f"fidelity must be one of {', '.join(FIDELITIES)}, got {fidelity!r}; bitwise changes no bit of the result"
        )
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
    values = density.values() if isinstance(density, Mapping) else () if density is None else (density,)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(
                f"density must be a share of elements from 0 to 1 (or a dict of them by storage id), got {value!r}; "
                "leave it out for what the ops suggest"
            )


class PlanPackage(ModuleType):
    """The package ``gistkit.plan``, which is also the function: ``gistkit.plan(model, batch, budget="12GiB")``."""

    def __call__(
        self,
        model: torch.nn.Module,
        *batch: Any,
        budget: int | str | None = None,
        policy: str = "optimal",
        fidelity: str = "bitwise",
        lossy: str | None = None,
        hardware: Hardware | str | Path | None = None,
        density: float | Mapping[int, float] | None = None,
        reserve: int | str = 0,
        loss_fn: Callable[..., torch.Tensor] | None = None,
    ) -> Plan:
        return plan(
            model, *batch, budget=budget, policy=policy, fidelity=fidelity, lossy=lossy, hardware=hardware,
            density=density, reserve=reserve, loss_fn=loss_fn,
        )  # fmt: skip


PlanPackage.__call__.__doc__ = plan.__doc__

__all__ = ["PlanPackage", "accepts", "check_words", "least_bytes", "plan", "plan_graph", "remedy", "seeds"]
