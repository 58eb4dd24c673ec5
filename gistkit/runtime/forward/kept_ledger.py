"""What one forward keeps, for the report: storages that stay dense, what nodes hold of their own, notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gistkit.capture import is_weight
from gistkit.ir import Decision
from gistkit.nn.keep import Alias
from gistkit.nn.norm import STATISTICS
from gistkit.runtime.program.program import Step
from gistkit.runtime.stash.stash import Reader

OWNERS = frozenset(("relu", "max_pool2d", "dropout", "batch_norm"))
SHARED = frozenset((Reader, Alias))
"""Holds that are counted elsewhere."""


class Held(NamedTuple):
    """One storage that stays dense: weak identity (None: as long as the region's ``aliases``), bytes, planned id,
    reason."""

    ref: StorageWeakRef | None
    nbytes: int
    storage: int
    reason: str


@dataclass(kw_only=True)
class Accounts:
    """``densities`` that the forward has measured and ``notes``, by planned storage; ``held``: what stays dense, by the
    address of its storage; ``own``: (covered call, op, hold or its bytes)."""

    densities: dict[int, float] = field(default_factory=dict)
    held: dict[int, Held] = field(default_factory=dict)
    own: list[tuple[int, str, Any]] = field(default_factory=list)
    notes: dict[int, str] = field(default_factory=dict)

    def hold(self, x: torch.Tensor, decision: Decision) -> None:
        """Remember that x's storage stays as it is, unless it is known already or a weight's."""
        storage = x.untyped_storage()
        if storage._cdata not in self.held and not is_weight(x):
            reason = self.notes.get(decision.storage, decision.reason) if self.notes else decision.reason
            self.held[storage._cdata] = Held(StorageWeakRef(storage), storage.nbytes(), decision.storage, reason)

    def account(self, step: Step, y: torch.Tensor) -> None:
        """Remember what the node of one of the OWNERS holds of its own (masks, maps, statistics), for the report."""
        kept = getattr(y.grad_fn, "kept", None)
        if kept is not None and type(kept) not in SHARED:
            self.own.append((step.index, step.op, kept[STATISTICS] if step.op == "batch_norm" else kept))

    def clear_accounts(self) -> None:
        """Let go of what holds tensors or counts them."""
        self.own.clear()
        self.held.clear()


__all__ = ["OWNERS", "Accounts", "Held"]
