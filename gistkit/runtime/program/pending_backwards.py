"""What earlier forwards of a model still hold when the next one begins, and graphs that backward retains.

A budget counts one forward and its backward. A step that runs the model twice before backward, or that retains the
graph, holds more; a warning says so once a model. A forward has something left as long as a node that made one of its
results lives and backward has not come to any of them: a step pays for a hook at those nodes alone."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from gistkit.capture import tensors_in
from gistkit.errors import BudgetWarning
from gistkit.ir import Budget, Plan
from gistkit.nn.keep import is_retained
from gistkit.runtime.program.stats import Observed


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
        """What the budget leaves beside a step of so many rows; of fewer than planned their share of what the plan
        keeps too."""
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
