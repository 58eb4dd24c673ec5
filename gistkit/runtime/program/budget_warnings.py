"""What makes a budget be exceeded, and the warnings that say so, once a model.

*Fewer zeros.* A plan relies on densities. A storage with fewer zeros than planned has a larger payload, bit for bit as
ever. The excess is summed over all storages of a forward, whether or not they live at the same time. On the CPU
non-zeros are counted before packing. On CUDA the count comes later, perhaps when the step is over.

*Earlier forwards.* A budget counts one forward and its backward. A step that runs the model twice before backward, or
that retains the graph, holds more. A forward has something left as long as a node that made one of its results lives
and backward has not come to any of them: a step pays for a hook at those nodes alone."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gistkit.capture import tensors_in
from gistkit.errors import BudgetWarning
from gistkit.formats import item_bytes
from gistkit.ir import Budget, Form, Plan, SavedStorage, numel
from gistkit.nn.keep import is_retained
from gistkit.runtime.program.stats import Observed


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


class PendingBackward:
    """What one forward left for its backward: a hook at the nodes of its results, which alone hold on to it."""

    __slots__ = ("__weakref__", "_earlier", "_observed", "_rows", "begun")

    def __init__(self, earlier: PendingBackwards, observed: Observed, rows: int) -> None:
        self._earlier, self._observed, self._rows = earlier, observed, rows
        self.begun = False

    def __call__(self, grads: Any) -> None:
        if not is_retained():
            self.begun = True
        elif not self.begun:
            self._earlier.retains(self, self._rows)

    def nbytes(self) -> int:
        """Bytes that the forward's nodes held when it ended; its inputs, which are the caller's, left out."""
        program = self._observed.program
        if program is None:
            return 0
        storages = program.graph.storages
        found = sum(row[3] for row in self._observed.storages if row[0] < 0 or storages[row[0]].kind == "activation")
        return found + sum(nbytes for _, _, nbytes in self._observed.own)


class PendingBackwards:
    """The forwards of one model under a plan with a budget, as far as something of them may still be held."""

    def __init__(self, plan: Plan, budget: Budget) -> None:
        self._budget = budget
        self._kept_bytes = plan.kept_bytes
        self._most_rows = plan.planned_rows
        self._left: list[weakref.ref[PendingBackward]] = []
        self._told = False

    def begin(self, rows: int) -> None:
        """A forward of so many rows begins: warn where earlier ones still hold more than there is room for."""
        if not self._left:
            return
        found = [left for left in [ref() for ref in self._left] if left is not None and not left.begun]
        self._left = [weakref.ref(left) for left in found]
        if found:
            forwards = "an earlier forward" if len(found) == 1 else f"{len(found)} earlier forwards"
            held_bytes = sum(left.nbytes() for left in found)
            self._tell(
                held_bytes - self._room(rows),
                f"it counts one forward and its backward, and this forward begins while {held_bytes} bytes are still "
                f"held that {forwards} of this model kept for a backward that has not run, or has retained the graph",
                "run backward after each forward, plan a module whose forward does all of them",
            )

    def follow(self, observed: Observed, out: Any, rows: int) -> None:
        if self._told:
            return
        nodes = (out.grad_fn,) if isinstance(out, torch.Tensor) else {t.grad_fn for t in tensors_in(out)}
        left = PendingBackward(self, observed, rows)
        for node in nodes:
            if node is not None:
                node.register_prehook(left)
        self._left.append(weakref.ref(left))

    def retains(self, left: PendingBackward, rows: int) -> None:
        held_bytes = left.nbytes()
        self._tell(
            held_bytes - self._room(rows),
            f"it counts on backward to let go of what it has used, and a graph is retained whose nodes hold "
            f"{held_bytes} bytes",
            "call backward once, without retain_graph, on the sum of the losses",
        )

    def _room(self, rows: int) -> int:
        """What the budget leaves beside a step of so many rows; of fewer their share of what the plan keeps."""
        fewer = max(0, self._most_rows - rows) if rows else 0
        return self._budget.room_bytes + (self._kept_bytes * fewer // self._most_rows if fewer else 0)

    def _tell(self, over_bytes: int, why: str, remedy: str) -> None:
        if self._told or over_bytes <= 0:
            return
        self._told, self._left = True, []
        warnings.warn(
            f"the budget of {self._budget.total_bytes} bytes may be exceeded by up to {over_bytes}: {why}; {remedy}, "
            "or plan with so many bytes more as reserved_bytes=",
            BudgetWarning,
            stacklevel=3,
        )
