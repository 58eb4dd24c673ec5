"""Whether the loss of a batch is the mean or the sum of those of its parts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gistkit.graph.ledger import tensors_in
from gistkit.runtime.inputs import joined, repeated
from gistkit.runtime.near import number_tolerance, roundoff
from gistkit.runtime.steady import GivenStatistics, called, twin

Loss = Callable[[Any, Any], torch.Tensor]
ADDED = {"mean": "the mean over its rows", "sum": "the sum over its rows"}
OTHER = {"mean": "sum", "sum": "mean"}


@dataclass(frozen=True)
class Cut:
    """A batch in parts: their bounds, what the loss is (``mean`` or ``sum``), whether batch norms may take a part's
    statistics, and the most bytes that the device may hold (None: any)."""

    bounds: tuple[int, ...]
    reduction: str
    statistics: bool = False
    limit_bytes: int | None = None

    @property
    def batch(self) -> int:
        return self.bounds[-1]

    @property
    def least(self) -> int:
        """The rows of the smallest part."""
        return min(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))


class LossParts:
    """A loss function, on results of a few rows; what it draws at random is taken out, a module's state a copy."""

    def __init__(self, loss_fn: Loss, targets: Any, cut: Cut, statistics: GivenStatistics) -> None:
        self._loss_fn = twin(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
        self._targets, self._cut, self._statistics = targets, cut, statistics
        self._unit = 0.0
        """The roundoff of the coarsest type that losses came in: a loss may be narrower than what it is made of."""

    def loss(self, out: Any, targets: Any) -> float:
        """Of results and targets that it may overwrite. Synchronises."""
        made = called(self._loss_fn, (out, targets), {}, self._statistics)
        if isinstance(made, torch.Tensor) and made.is_floating_point():
            self._unit = max(self._unit, torch.finfo(made.dtype).eps / 2)
        return float(made)

    def few(self, outs: Sequence[tuple[Sequence[slice], Any]], unit: float) -> str:
        """What is wrong with the losses of two parts' results and of both together, in this order; ``unit`` is the
        roundoff of the coarsest type that went into them."""

        def losses(made: Callable[[Any], Any]) -> list[float]:
            return [self.loss(made(out), made(joined(self._targets, parts))) for parts, out in outs]

        rows = [parts[0].stop - parts[0].start for parts, _ in outs]
        return self._differs(losses(copy.deepcopy), partial(losses, _double), (rows[0], rows[1]), unit)

    def all_targets(self, out: Any, out_rows: int, most_rows: int) -> str:
        """What is wrong with the losses of neighbouring parts of the whole batch, of at most ``most_rows`` rows unless
        these are a part's. ``out``, all of whose tensors are made of ``out_rows`` rows, gives the results, over and
        over. Where the loss does not take such results nothing is said."""
        cut, unit = self._cut, roundoff(tensors_in(out))
        bounds = cut.bounds if most_rows >= cut.least else (*range(0, cut.batch, most_rows), cut.batch)

        def loss(start: int, stop: int, double: bool = False) -> float:
            results, targets = repeated(out, out_rows, start, stop), joined(self._targets, [slice(start, stop)])
            return self.loss(_double(results), _double(targets)) if double else self.loss(results, targets)

        def precise(a: int, b: int, c: int) -> list[float]:
            return [loss(a, b, True), loss(b, c, True), loss(a, c, True)]

        try:
            last = loss(bounds[0], bounds[1])
            for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False):
                found = [last, loss(b, c), loss(a, c)]
                last = found[1]
                if said := self._differs(found, partial(precise, a, b, c), (b - a, c - b), unit):
                    return said
        except Exception:  # results of some rows beside the targets of others
            return ""
        return ""

    def _differs(
        self, found: list[float], precise: Callable[[], list[float]], rows: tuple[int, int], unit: float
    ) -> str:
        """What is wrong with the losses of two parts and of both; ``precise`` gives them in float64."""
        if self._same(found, rows, unit):
            return ""
        try:  # sums that cancel are off by more than their size tells
            found = precise()
        except Exception:  # a loss for its own types alone
            pass
        return "" if self._same(found, rows, unit) else self._said(found, rows, unit)

    def _same(self, found: list[float], rows: tuple[int, int], unit: float, reduction: str = "") -> bool:
        """Whether the third loss is made of the first two. One that is not finite says nothing."""
        shares = found[:2]
        if (reduction or self._cut.reduction) == "mean":
            shares = [loss * n / sum(rows) for loss, n in zip(shares, rows, strict=True)]
        if not math.isfinite(found[2]):
            return True
        return abs(found[2] - sum(shares)) <= number_tolerance(max(unit, self._unit)) * sum(map(abs, shares))

    def _said(self, found: list[float], rows: tuple[int, int], unit: float) -> str:
        reduction = self._cut.reduction
        other = OTHER[reduction]
        first, second, whole = found
        text = (
            f"loss_fn must return {ADDED[reduction]} (reduction={reduction!r}) for sub-batches to add up, and of "
            f"{sum(rows)} rows it is {whole:.6g}, of their first {rows[0]} {first:.6g} and of the others {second:.6g}"
        )
        if self._same(found, rows, unit, other):
            return f"{text}: that is {ADDED[other]}; pass reduction={other!r}"
        return (
            f"{text}; where labels are ignored or classes weighted return the sum, divided by the weight of the whole "
            "batch, and pass reduction='sum'; one over pairs of rows has no parts"
        )


def _double(item: Any) -> Any:
    """A copy of a nested item with its floating tensors in float64."""
    copied = copy.deepcopy(item)
    return tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, copied)


__all__ = ["Cut", "Loss", "LossParts"]
