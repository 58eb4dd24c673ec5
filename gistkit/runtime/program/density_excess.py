"""Densities that a plan relies on, and what becomes of a storage with fewer zeros than planned.

A payload that the budget has no room for is decoded on the host, and its values are copied for each use: the bits are
the same, the step takes longer, and a BudgetWarning names the storages and their bytes. A use takes no more than the
payload's planned bytes beside its result. A CPU has no other memory, so the payload stays, and the warning says by how
much the budget is exceeded. The excess is summed over all storages of a forward, whether or not they live at the same
time, and a payload on the host gives none back. On the CPU non-zeros are counted before packing. On CUDA the
count comes later: until then the payload is the worst-case scratch, as planned, and one on the host is looked at when
it is to come back."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gistkit.codecs import Encoded, Sparse, dtype_of
from gistkit.errors import BudgetWarning
from gistkit.formats import item_bytes
from gistkit.ir import Budget, Decision, Form, Plan, SavedGraph, SavedStorage, numel
from gistkit.runtime.offload.host import Delegating, HostValues, arrived
from gistkit.runtime.offload.host_memory import does_not_fit
from gistkit.runtime.offload.parcel import Parcel
from gistkit.runtime.sparse_sizes.exact import ExactPacker
from gistkit.runtime.sparse_sizes.forecast import Forecasts
from gistkit.runtime.stash.stash import Body, CodedBody


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
    return tuple(_worst_first(found))


def _worst_first(found: list[Denser]) -> list[Denser]:
    return sorted(found, key=lambda d: (-d.excess_bytes, d.storage))


def _payload_bytes(form: Form, storage: SavedStorage, density: float) -> int:
    return min(form.nbytes(numel(storage), item_bytes(storage.dtype), density), storage.nbytes)


def remember(known: dict[int, float], measured: Mapping[int, float], plan: Plan | None) -> None:
    """Take a forward's densities into ``known``: under a plan of the caller's the largest, as its peak is that of the
    densest step."""
    for storage, share in measured.items():
        known[storage] = share if plan is None else max(share, known.get(storage, 0.0))


class ExcessBudget:
    """What a budget leaves beside its plan's peak, and what of it a forward has used up: one for each forward.

    ``densities`` and ``notes``, by storage, are the forward's, and filled in; ``told`` hears of counts that come when
    the forward is over. ``moved``: storages that went to the host; ``over``: those that would have had to and could
    not."""

    def __init__(
        self,
        plan: Plan,
        budget: Budget,
        graph: SavedGraph,
        densities: dict[int, float],
        notes: dict[int, str],
        told: Forecasts,
    ) -> None:
        self._graph, self.told = graph, told
        self._densities, self._notes = densities, notes
        self._shares = plan.contract.densities
        self._budget, self._left_bytes = budget, budget.left_bytes
        self._link = plan.contract.has_link
        self._lock = threading.Lock()  # backward may settle encodings on threads of several devices
        self.moved: list[Denser] = []
        self.over: list[Denser] = []

    def counts(self, decision: Decision) -> bool:
        """Whether the plan counts on a storage's density."""
        return decision.storage in self._shares

    def body(self, codec: Sparse, x: torch.Tensor, decision: Decision, packer: ExactPacker) -> Body | None:
        """What stands in for x (dense) where its payload may have no room; None where x is encoded as ever, of what
        goes to the host perhaps until it comes back (:meth:`on_return`). Never waits for the device."""
        if not self.counts(decision) or not x.numel():
            return None
        if packer.at_once(x):
            stored = packer.count(x).wait()
            return self.away(codec, decision, x.numel(), stored, x.device, lambda: codec.encode(arrived(x)))
        return None if decision.on_host else PromisedBody(self, codec, x, decision, packer)

    def on_return(self, codec: Sparse, decision: Decision, device: torch.device, parcel: Parcel) -> HostValues | None:
        """The values of a payload on the host that may have no room when it comes back; None where it has. Waits for
        the device only where its size has not arrived yet."""
        stored = parcel.stored(wait=True)
        assert stored is not None
        return self.away(codec, decision, parcel.form.numel, stored, device, parcel.host_copy)

    def away(
        self, codec: Sparse, decision: Decision, n: int, stored: int, device: torch.device, send: Callable[[], Encoded]
    ) -> HostValues | None:
        """A payload of ``stored`` out of n elements on the host; None where it stays on the device: it fits, and its
        room is taken, or the host has no memory for it, or none but the device's."""
        s, share = decision.storage, stored / n
        storage = self._graph.storages[s]
        self._densities[s] = share
        planned_bytes = _payload_bytes(decision.form, storage, self._shares[s])
        real_bytes = decision.form.nbytes(n, item_bytes(storage.dtype), share)
        found = Denser(s, self._shares[s], share, planned_bytes, real_bytes)
        # what packing takes for a moment, beyond what the plan counts of that
        dtype, planned = dtype_of(storage.dtype), round(found.planned * numel(storage))
        passing_bytes = codec.packing_bytes(stored, dtype) - codec.packing_bytes(planned, dtype)
        with self._lock:
            if found.excess_bytes <= 0 or found.excess_bytes + passing_bytes <= self._left_bytes:
                self._left_bytes -= max(0, found.excess_bytes)
                return None
        values = None
        if self._link or device.type != "cpu":
            try:
                with _disable_current_modes():
                    values = HostValues(codec, send(), device, planned_bytes)
            except (RuntimeError, MemoryError) as error:
                if not does_not_fit(error):
                    raise
        with self._lock:
            if values is None:
                self.over.append(found)
                self._left_bytes -= found.excess_bytes
            else:
                self.moved.append(found)
                self._notes[s] = "larger than planned: on the host, so that the budget is kept"
        return values

    def warn(self) -> bool:
        """Warn of what was moved to the host or had to stay beyond the budget; whether there was any."""
        found = _worst_first(self.moved + self.over)
        if not found:
            return False
        budget = f"the budget of {self._budget.total_bytes} bytes"
        sent_bytes = sum(d.measured_bytes for d in self.moved)
        away = f"{len(self.moved)} of these storages, {sent_bytes} bytes, went to the host and come back for each use"
        worst = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        if self.over:
            text = (
                f"{budget} may be exceeded by up to {-self._left_bytes}, as there are fewer zeros than it was planned "
                f"with and the host has no memory {'left' if self._link else 'of its own'}: {worst}"
            )
        else:
            text = f"the step takes longer, as there are fewer zeros than {budget} was planned with: {worst}"
        text += f"; {away}" if self.moved else ""
        again = "plan again with density=gistkit.report(model).densities"
        warnings.warn(f"{text}; {again}", BudgetWarning, stacklevel=2)
        return True


def _on_host(encoded: Encoded) -> Encoded:
    return encoded.over(tuple(map(arrived, encoded.payload)))


class PromisedBody(Delegating):
    """The payload of a storage whose size only the device knows yet: the scratch, then the packed payload, or values on
    the host where :class:`ExcessBudget` has no room."""

    def __init__(
        self, room: ExcessBudget, codec: Sparse, x: torch.Tensor, decision: Decision, packer: ExactPacker
    ) -> None:
        self._room, self._codec, self._decision, self._device = room, codec, decision, x.device
        self._lock = threading.Lock()
        encoded = packer.encode(codec, x, room.told.of(decision.storage), settle=weakref.WeakMethod(self.settle))
        assert encoded is not None
        self._form: CodedBody | HostValues = CodedBody(encoded)

    def settle(self, encoded: Encoded, total: int) -> None:
        """Take the final form: called by the packer when the number of stored elements has come."""
        with self._lock:
            if encoded.pending and isinstance(self._form, CodedBody):
                form = (self._codec, self._decision, encoded.numel, total, self._device)
                away = self._room.away(*form, lambda: _on_host(encoded))
                if away is None:
                    self._codec.settle(encoded, total)
                else:
                    self._form = away

    def here(self) -> CodedBody | HostValues:
        """The form from which values are decoded. A scaled format's scratch is packed first: decoded as it is, it would
        take several times the tensor (Sparse._rounded)."""
        form = self._form
        if self._codec.scaling != "none" and isinstance(form, CodedBody) and form.encoded.pending:
            self.settle(form.encoded, int(self._codec.total(form.encoded)))
        return self._form

    @property
    def nbytes(self) -> int:
        return self._form.nbytes

    @property
    def density(self) -> float | None:
        return self._form.density if isinstance(self._form, CodedBody) else None

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return self._form.relu_backward(grad)
