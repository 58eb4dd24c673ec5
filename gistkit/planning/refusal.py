"""The errors of budgets that no plan meets: the least budget of each class of moves, and what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gistkit.errors import BudgetError
from gistkit.formats import Lossy
from gistkit.ir import Plan, SavedGraph
from gistkit.planning.cost import CostTable
from gistkit.planning.forms import FIDELITIES
from gistkit.planning.policies import minimise_peak

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
    for name in FIDELITIES:
        own = (known or {}).get(name)
        if own is None:
            narrow = (EXAMPLE_FORMAT if lossy is None else lossy) if name == "lossy" else None
            settings = {"lossy": narrow, "reserve": reserve, "batch_norm": batch_norm}
            own = minimise_peak(graph, costs, name, **settings, time_limit_s=LEAST_S).peak_bytes
        found[name] = min(own, *found.values(), own)
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
    todo = instead(budget_bytes, least, asked, narrow)
    if isinstance(why, Plan):
        text = f'policy="{policy}" needs {why.peak_bytes} bytes ({why.peak_bytes / 2**20:.1f} MiB)'
        return BudgetError(budget_bytes, least, f"{text}; {todo}")
    own = {name: own.get(name, own["reassociated"]) for name in FIDELITIES}
    return BudgetError(budget_bytes, own, f'by policy="{policy}": {why.remedy}; {todo}')


def instead(budget_bytes: int, least: Mapping[str, int], asked: str, narrow: str) -> str:
    """What `optimal` can do where another policy has no plan within the budget; arguments as for :func:`remedy`."""
    if least[asked] <= budget_bytes:
        return 'policy="optimal" fits'
    return f'with policy="optimal" {remedy(budget_bytes, least, asked, narrow)}'


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
