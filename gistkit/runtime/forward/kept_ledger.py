"""What one forward keeps, for the report: storages that stay dense, what nodes hold of their own, notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gistkit.capture import is_weight
from gistkit.ir import Decision


class DenseStorage(NamedTuple):
    """One storage that stays as it is: weak identity, bytes, planned id (-1: none), reason."""

    ref: StorageWeakRef
    nbytes: int
    storage: int
    reason: str


@dataclass(kw_only=True)
class KeptLedger:
    """``densities`` that the forward has measured and ``notes``, by planned storage; ``dense``: what stays as it is, by
    the address of its storage; ``own``: (covered call, op, hold) of what a node keeps besides storages: masks, maps,
    statistics."""

    densities: dict[int, float] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    dense: dict[int, DenseStorage] = field(default_factory=dict)
    own: list[tuple[int, str, Any]] = field(default_factory=list)

    def record_dense(self, x: torch.Tensor, decision: Decision) -> None:
        """Record that x's storage stays as it is, unless it is known already or a weight's."""
        storage = x.untyped_storage()
        if storage._cdata not in self.dense and not is_weight(x):
            reason = self.notes.get(decision.storage, decision.reason)
            self.dense[storage._cdata] = DenseStorage(
                StorageWeakRef(storage), storage.nbytes(), decision.storage, reason
            )

    def record_own(self, call: int, op: str, kept: Any) -> None:
        """Record what a node keeps of its own."""
        if kept is not None:
            self.own.append((call, op, kept))

    def clear_ledger(self) -> None:
        """Let go of what holds tensors."""
        self.own.clear()
        self.dense.clear()
