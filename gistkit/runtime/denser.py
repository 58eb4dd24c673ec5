"""Densities that a plan relies on, and what a step with fewer zeros than planned holds more.

How many zeros an activation will have is not known when a plan is made, and a storage whose payload has come out larger
has no smaller form of the same bits left: what it could have been rebuilt or run anew from is let go of or planned for
something else by then. So the step goes on, and the caller is told at once, with the storages and their bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from gistkit.codecs import CODECS
from gistkit.errors import BudgetWarning
from gistkit.graph.saved import SavedStorage
from gistkit.plan.plan import Plan
from gistkit.plan.policies.reading import dtype_of


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
        """What it takes more than planned."""
        return self.measured_bytes - self.planned_bytes

    def __str__(self) -> str:
        return (
            f"storage {self.storage}: {self.measured_bytes} bytes where {self.planned_bytes} are planned, density "
            f"{self.measured:.3f} instead of {self.planned:.3f}"
        )


def denser(plan: Plan, densities: Mapping[int, float], storages: Mapping[int, SavedStorage]) -> tuple[Denser, ...]:
    """The storages that are denser than the plan counts with, those that take most beyond it first."""
    shares = {int(s): share for s, share in plan.settings.get("densities", {}).items()}
    found = []
    for decision in plan.decisions:
        s, storage = decision.storage, storages.get(decision.storage)
        if s in shares and storage is not None and densities.get(s, 0.0) > shares[s]:
            sizes = (_payload_bytes(decision.codec, storage, share) for share in (shares[s], densities[s]))
            found.append(Denser(s, shares[s], densities[s], *sizes))
    return tuple(sorted(found, key=lambda d: (-d.excess_bytes, d.storage)))


def _payload_bytes(codec: str, storage: SavedStorage, density: float) -> int:
    """A payload's bytes; of what does not pay the tensor itself is kept."""
    dtype = dtype_of(storage.dtype)
    predicted = CODECS[codec].predicted_bytes(storage.nbytes // dtype.itemsize, dtype, density)
    return min(predicted, storage.nbytes)


def remember(known: dict[int, float], measured: Mapping[int, float], plan: Plan | None) -> None:
    """Take a forward's densities into ``known``: the last ones; under a plan of the caller's the largest, as its peak
    is that of the densest sub-batch of the densest step."""
    for storage, share in measured.items():
        known[storage] = share if plan is None else max(share, known.get(storage, 0.0))


def warn_of_denser(plan: Plan, densities: Mapping[int, float], storages: Mapping[int, SavedStorage]) -> bool:
    """Warn where the budget may be exceeded because there are fewer zeros than planned; whether it did."""
    if plan.budget_bytes is None:
        return False
    found = denser(plan, densities, storages)
    excess, room = sum(d.excess_bytes for d in found), plan.budget_bytes - plan.peak_bytes
    if excess <= room:
        return False
    worst = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    warnings.warn(
        f"the budget of {plan.budget_bytes} bytes may be exceeded by up to {excess - room}, as there are fewer zeros "
        f"than it was planned with: {worst}; plan again with density=gistkit.report(model).densities",
        BudgetWarning,
        stacklevel=2,
    )
    return True


__all__ = ["Denser", "denser", "remember", "warn_of_denser"]
