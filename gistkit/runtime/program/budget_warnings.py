"""What makes a budget be exceeded, and the warnings that say so, once a model.

*Fewer zeros.* A plan relies on densities. A storage with fewer zeros than planned has a larger payload, bit for bit as
ever. The excess is summed over all storages of a forward, whether or not they live at the same time. On the CPU
non-zeros are counted before packing. On CUDA the count comes later, perhaps when the step is over.

*Earlier forwards.* A budget counts one forward and its backward. A step that runs the model twice before backward, or
that retains the graph, holds more. A forward has something left as long as a node that made one of its results lives
and backward has not come to any of them: a step pays for a hook at those nodes alone.

*More than planned*: :mod:`gistkit.runtime.program.step_peak`."""

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
from gistkit.runtime.program.step_peak import StepPeak


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

    __slots__ = ("__weakref__", "_earlier", "_observed", "begun")

    def __init__(self, earlier: PendingBackwards, observed: Observed) -> None:
        self._earlier, self._observed, self.begun = earlier, observed, False

    def __call__(self, grads: Any) -> None:
        if not is_retained():
            if not self.begun and self._earlier.peak.watches:
                torch.autograd.Variable._execution_engine.queue_callback(self._earlier.peak.ends)
            self.begun = True
        elif not self.begun:
            self._earlier.retains(self)

    def nbytes(self, *kinds: str) -> int:
        """Bytes that the forward's nodes held when it ended, of these kinds of storages and of what is none."""
        program = self._observed.program
        if program is None:
            return 0
        storages = program.graph.storages
        found = sum(row[3] for row in self._observed.storages if row[0] < 0 or storages[row[0]].kind in kinds)
        return found + sum(nbytes for _, _, nbytes in self._observed.own)


class PendingBackwards:
    """The forwards of one model under a plan with a budget, as far as something of them may still be held."""

    def __init__(self, plan: Plan, budget: Budget) -> None:
        self._budget, self._kept_bytes = budget, plan.kept_bytes
        self._left: list[weakref.ref[PendingBackward]] = []
        self._told = False
        self.peak = StepPeak(budget)

    def follow(self, observed: Observed, out: Any) -> None:
        """A forward has ended: warn where it and earlier ones hold more than there is room for."""
        if self._told and not self.peak.watches:
            return
        nodes = (out.grad_fn,) if isinstance(out, torch.Tensor) else {t.grad_fn for t in tensors_in(out)}
        left = PendingBackward(self, observed)
        for node in nodes:
            if node is not None:
                node.register_prehook(left)
        if self._told:
            return
        found = [e for e in [ref() for ref in self._left] if e is not None and not e.begun]
        self._left = [weakref.ref(e) for e in (*found, left)]
        if found:
            forwards = "an earlier forward" if len(found) == 1 else f"{len(found)} earlier forwards"
            held_bytes = sum(e.nbytes("activation") for e in found)
            self._tell(
                left,
                held_bytes,
                f"it counts one forward and its backward, and this forward ends while {held_bytes} bytes are still "
                f"held that {forwards} of this model kept for a backward that has not run, or has retained the graph",
                "run backward after each forward, plan a module whose forward does all of them",
            )

    def retains(self, left: PendingBackward) -> None:
        held_bytes = left.nbytes("activation")
        self._tell(
            left,
            held_bytes,
            f"it counts on backward to let go of what it has used, and a graph is retained whose nodes hold "
            f"{held_bytes} bytes",
            "call backward once, without retain_graph, on the sum of the losses",
        )

    def _tell(self, left: PendingBackward, held_bytes: int, why: str, remedy: str) -> None:
        """Warn where so many bytes beside that forward, which may keep less than planned, have no room."""
        more_bytes = left.nbytes("activation", "input") - self._kept_bytes
        over_bytes = held_bytes - self._budget.room_bytes
        if self._told or over_bytes + more_bytes <= 0:
            return
        over_bytes, self._told, self._left = over_bytes + max(more_bytes, 0), True, []
        warnings.warn(
            f"the budget of {self._budget.total_bytes} bytes may be exceeded by up to {over_bytes}: {why}; {remedy}, "
            "or plan with so many bytes more as reserved_bytes=",
            BudgetWarning,
            stacklevel=3,
        )
