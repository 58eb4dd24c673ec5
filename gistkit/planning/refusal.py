"""The errors of budgets that no plan meets: the least budget of each class of moves, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gistkit.errors import BudgetError
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES
from gistkit.planning.policies import minimise_peak

Settings = Mapping[str, Any]
"""The caller's ``fidelity``, ``lossy``, ``reserve`` and ``batch_norm``."""
LEAST_S = 3.0
"""The time limit given to `optimal` for the least peak of a class, of which the search takes a fifth."""
EXAMPLE_FORMAT = "fp8"
"""The lossy format in the error where the caller named none: the smallest."""


def least_bytes(
    graph: SavedGraph,
    costs: CostTable,
    *,
    lossy: str | None = None,
    reserve: int = 0,
    batch_norm: bool = False,
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The least peak found for each class of moves, which is a budget that `optimal` can meet; each class has the moves
    of those before it.

    ``lossy`` names the format of that class (default fp8). ``batch_norm`` accepts sub-batches for a network whose batch
    norms then see other statistics. ``known`` holds the classes whose least peak is known already.
    """
    found: dict[str, int] = {}
    best: int | None = None
    for name in FIDELITIES:
        own = (known or {}).get(name)
        if own is None:
            narrow = (lossy or EXAMPLE_FORMAT) if name == "lossy" else None
            settings = {"lossy": narrow, "reserve": reserve, "batch_norm": batch_norm}
            own = minimise_peak(graph, costs, name, **settings, time_limit_s=LEAST_S).peak_bytes
        best = own if best is None else min(best, own)
        found[name] = best
    return found


def refused(
    graph: SavedGraph, costs: CostTable, budget_bytes: int, settings: Settings, known: Mapping[str, int]
) -> BudgetError:
    """The error of a budget below what the allowed class needs, with what every class needs."""
    narrow = settings["lossy"] or EXAMPLE_FORMAT
    least = _least(graph, costs, settings, narrow, known)
    return BudgetError(budget_bytes, least, remedy(budget_bytes, least, settings["fidelity"], narrow))


def unfit(graph: SavedGraph, costs: CostTable, budget_bytes: int, settings: Settings, plan: Plan) -> BudgetError:
    """The error of a plan above its budget, by a policy that aims at none or cannot reach it."""
    narrow = settings["lossy"] or EXAMPLE_FORMAT
    least = _least(graph, costs, settings, narrow)
    text = f'policy="{plan.policy}" needs {plan.peak_bytes} bytes ({plan.peak_bytes / 2**20:.1f} MiB)'
    return BudgetError(budget_bytes, least, f"{text}; {instead(budget_bytes, least, settings['fidelity'], narrow)}")


def beneath(
    graph: SavedGraph, costs: CostTable, budget_bytes: int, settings: Settings, policy: str, error: BudgetError
) -> BudgetError:
    """The error of a budget below the policy's own bounds, which are in ``error``: for all classes, with what `optimal`
    could do. The policies with such bounds round nothing."""
    narrow, asked = settings["lossy"] or EXAMPLE_FORMAT, settings["fidelity"]
    own = {name: error.least_bytes.get(name, error.least_bytes["reassociated"]) for name in FIDELITIES}
    todo = instead(budget_bytes, _least(graph, costs, settings, narrow), asked, narrow)
    return BudgetError(budget_bytes, own, f'by policy="{policy}": {error.remedy}; {todo}')


def instead(budget_bytes: int, least: Mapping[str, int], asked: str, narrow: str) -> str:
    """What `optimal` can do where another policy has no plan within the budget; arguments as for :func:`remedy`."""
    if least[asked] <= budget_bytes:
        return 'policy="optimal" fits'
    return f'with policy="optimal" {remedy(budget_bytes, least, asked, narrow)}'


def _least(
    graph: SavedGraph, costs: CostTable, settings: Settings, narrow: str, known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """What each class needs at least under the caller's settings."""
    accepted = bool(settings.get("batch_norm"))
    return least_bytes(graph, costs, lossy=narrow, reserve=settings["reserve"], batch_norm=accepted, known=known)


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
