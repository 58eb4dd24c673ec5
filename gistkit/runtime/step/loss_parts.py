"""Whether the loss of a batch is the mean or the sum of those of its parts, and its gradients are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gistkit.capture import joined, repeated, tensors_in
from gistkit.runtime.step.deterministic_forward import GivenStatistics, called, twin
from gistkit.runtime.step.loss_grads import Made, differentiated, grads_apart, largest, made_of
from gistkit.runtime.step.tolerances import number_tolerance, roundoff

Loss = Callable[[Any, Any], torch.Tensor]
ADDED = {"mean": "the mean over its rows", "sum": "the sum over its rows"}
Again = Callable[[torch.dtype], list[Made]]
Scales = Sequence[float]
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
        self._with_grads, self._unit = True, 0.0
        """The roundoff of the coarsest type that losses came in: a loss may be narrower than what it is made of."""

    def loss(self, make: Callable[[], tuple[Any, Any]]) -> Made:
        """Of results and targets that are made for it, and that it may overwrite. Synchronises."""
        made = self._differentiated(make) or made_of(called(self._loss_fn, make(), {}, self._statistics))
        self._unit = max(self._unit, made.unit)
        return made

    def _differentiated(self, make: Callable[[], tuple[Any, Any]]) -> Made | None:
        if not self._with_grads:
            return None
        try:
            return differentiated(self._loss_fn, *make(), self._statistics)
        except Exception:  # it may do without gradients, or raises again
            return None

    def few(self, outs: Sequence[tuple[Sequence[slice], Any]], unit: float, with_grads: bool = True) -> str:
        """What is wrong with the losses of two parts' results and of both together, in this order; ``unit`` is the
        roundoff of the coarsest type that went into them. Only values are compared, here and of all targets, where
        there is no room ``with_grads``."""
        self._with_grads = with_grads

        def losses(dtype: torch.dtype | None) -> list[Made]:
            return [self.loss(lambda o=o, p=p: _retyped((o, joined(self._targets, p)), dtype)) for p, o in outs]

        rows = [parts[0].stop - parts[0].start for parts, _ in outs]
        return self._differs(losses(None), losses, (rows[0], rows[1]), unit)

    def all_targets(self, out: Any, out_rows: int, most_rows: int) -> str:
        """What is wrong with the losses of neighbouring parts of the whole batch, of at most ``most_rows`` rows unless
        these are a part's. ``out``, all of whose tensors are made of ``out_rows`` rows, gives the results, over and
        over. Where the loss does not take such results nothing is said."""
        cut, unit = self._cut, roundoff(tensors_in(out))
        bounds = cut.bounds if most_rows >= cut.least else (*range(0, cut.batch, most_rows), cut.batch)

        def given(start: int, stop: int) -> tuple[Any, Any]:
            return repeated(out, out_rows, start, stop), joined(self._targets, [slice(start, stop)])

        def loss(start: int, stop: int) -> Made:
            return self.loss(lambda: given(start, stop))

        def again(a: int, b: int, c: int, dtype: torch.dtype) -> list[Made]:
            return [self.loss(lambda o=o: _retyped(given(*o), dtype)) for o in ((a, b), (b, c), (a, c))]

        try:
            last = loss(bounds[0], bounds[1])
            for a, b, c in zip(bounds, bounds[1:], bounds[2:], strict=False):
                following = loss(b, c)
                if said := self._differs([last, following, loss(a, c)], partial(again, a, b, c), (b - a, c - b), unit):
                    return said
                last = following
        except Exception:  # results of some rows beside the targets of others
            return ""
        return ""

    def _differs(self, found: list[Made], again: Again, rows: tuple[int, int], unit: float) -> str:
        """What is wrong with the losses of two parts and of both; ``again`` gives them in another type."""
        if self._same(found, rows, unit):
            return ""
        scales: list[float] = []
        own_unit = self._unit
        try:  # sums that cancel are off by more than their size tells; gradients that are noise shrink with the type's
            coarse = found if any(g.dtype != torch.float64 for g in found[2].grads) else again(torch.float32)
            scales, found = largest(coarse[2]), again(torch.float64)
        except Exception:  # a loss for its own types alone
            pass
        self._unit = own_unit
        return "" if self._same(found, rows, unit, scales) else self._said(found, rows, unit, scales)

    def _same(
        self, found: list[Made], rows: tuple[int, int], unit: float, scales: Scales = (), other: str = ""
    ) -> bool:
        """Whether the third loss is made of the first two, and its gradients of theirs. One that is not finite says
        nothing."""
        whole, shares = found[2].loss, self._shares(rows, other)
        if not math.isfinite(whole):
            return True
        parts = [made.loss * share for made, share in zip(found[:2], shares, strict=True)]
        tolerance = number_tolerance(max(unit, self._unit))
        near = abs(whole - sum(parts)) <= tolerance * sum(map(abs, parts))  # not where a part's is not a number
        return near and grads_apart(found, shares, rows, scales) <= tolerance

    def _shares(self, rows: tuple[int, int], reduction: str = "") -> list[float]:
        return [n / sum(rows) if (reduction or self._cut.reduction) == "mean" else 1.0 for n in rows]

    def _said(self, found: list[Made], rows: tuple[int, int], unit: float, scales: Scales) -> str:
        reduction = self._cut.reduction
        other = OTHER[reduction]
        first, second, whole = (made.loss for made in found)
        text = (
            f"loss_fn must return {ADDED[reduction]} (reduction={reduction!r}) for sub-batches to add up, and of "
            f"{sum(rows)} rows it is {whole:.6g}, of their first {rows[0]} {first:.6g} and of the others {second:.6g}"
        )
        off = grads_apart(found, self._shares(rows), rows, scales)
        if off > number_tolerance(max(unit, self._unit)):
            text += f", its gradients off by {off:.1e} of the largest"
        if self._same(found, rows, unit, scales, other):
            return f"{text}: that is {ADDED[other]}; pass reduction={other!r}"
        return (
            f"{text}; where labels are ignored or classes weighted return the sum, divided by the weight of the whole "
            "batch, and pass reduction='sum'; one over pairs of rows has no parts"
        )


def _retyped(item: Any, dtype: torch.dtype | None) -> Any:
    """A copy of a nested item, with its floating tensors of another type."""
    copied = copy.deepcopy(item)
    if dtype is None:
        return copied
    return tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, copied)


__all__ = ["Cut", "Loss", "LossParts"]
