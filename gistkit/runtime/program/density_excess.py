"""Densities that a plan relies on, and what is said of a storage with fewer zeros than planned.

Its payload takes more than planned, bit for bit as ever. Where a budget has no room for that a BudgetWarning names the
storages and by how much the budget may be exceeded: the excess is summed over all storages of a forward, whether or not
they live at the same time. On the CPU non-zeros are counted before packing. On CUDA the count comes later, perhaps when
the step is over, and so does the warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from gistkit.errors import BudgetWarning
from gistkit.formats import item_bytes
from gistkit.ir import Budget, Form, Plan, SavedStorage, numel


@dataclass(frozen=True)
class Denser:
    """A storage with fewer zeros than planned: the densities planned and measured, and its payload's bytes at each."""

    storage: int
    planned: float
    measured: float
    planned_bytes: int
    measured_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.measured_bytes - self.planned_bytes

    def __str__(self) -> str:
        return (
            f"storage {self.storage}: {self.measured_bytes} bytes where {self.planned_bytes} are planned, density "
            f"{self.measured:.3f} instead of {self.planned:.3f}"
        )


def denser(plan: Plan, densities: Mapping[int, float], storages: Mapping[int, SavedStorage]) -> tuple[Denser, ...]:
    """The storages that are denser than the plan counts with, those that take most beyond it first."""
    shares = plan.contract.densities
    found = []
    for decision in plan.decisions:
        s, storage = decision.storage, storages.get(decision.storage)
        if s in shares and storage is not None and densities.get(s, 0.0) > shares[s]:
            sizes = (_payload_bytes(decision.form, storage, share) for share in (shares[s], densities[s]))
            found.append(Denser(s, shares[s], densities[s], *sizes))
    return tuple(sorted(found, key=lambda d: (-d.excess_bytes, d.storage)))


def _payload_bytes(form: Form, storage: SavedStorage, density: float) -> int:
    return min(form.nbytes(numel(storage), item_bytes(storage.dtype), density), storage.nbytes)


def remember(known: dict[int, float], measured: Mapping[int, float], plan: Plan | None) -> None:
    """Take a forward's densities into ``known``: under a given plan the largest, as its peak is the densest step's."""
    for storage, share in measured.items():
        known[storage] = share if plan is None else max(share, known.get(storage, 0.0))


def warn_of_excess(found: tuple[Denser, ...], budget: Budget) -> bool:
    """Warn of storages that are denser than planned, should a budget have no room for them; whether it has none."""
    over_bytes = sum(d.excess_bytes for d in found) - budget.left_bytes
    if over_bytes <= 0:
        return False
    worst = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    warnings.warn(
        f"the budget of {budget.total_bytes} bytes may be exceeded by up to {over_bytes}, as there are fewer zeros "
        f"than it was planned with: {worst}; plan again with density=gistkit.report(model).densities",
        BudgetWarning,
        stacklevel=2,
    )
    return True
