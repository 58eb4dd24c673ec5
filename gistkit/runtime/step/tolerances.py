"""How close two evaluations of one thing must be: results of a model's rows, losses and the sum of their parts.

In other parts, sums are taken in another order. What that makes of a deep network no count of terms bounds, so half of
the digits are asked for, ``sqrt(u)`` relatively, u the unit roundoff of the coarsest type in use: a result of which
fewer survive another order of summation means nothing, and what depends on how many rows there are, or on which, is off
by 1/2 with twice the rows. The *same shapes* are worked off by the same instructions, row by row: there a few units in
the last place are allowed, for kernels that sort their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gistkit.capture import tensors_in

UNITS = 64
"""Units in the last place that equal shapes may differ by."""
TF32 = 2.0**-11
"""The unit roundoff of CUDA's products of float32, unless the caller has them in full."""


def roundoff(items: Iterable[torch.Tensor]) -> float:
    """The unit roundoff of the coarsest floating type among tensors, autocast and CUDA's products."""
    found = [t for t in items if t.is_floating_point() or t.is_complex()]
    units = [torch.finfo(t.dtype).eps / 2 for t in found]
    for device in {t.device.type for t in found}:
        if torch.is_autocast_enabled(device):
            units.append(torch.finfo(torch.get_autocast_dtype(device)).eps / 2)
        if device == "cuda":
            units.append(TF32)
    return max(units, default=torch.finfo(torch.float32).eps / 2)


def halves(item: Any, half: int, like: Any) -> list[torch.Tensor]:
    """The first or second half of the rows of every tensor that has twice the rows of that of ``like``."""
    found = zip(tensors_in(item), tensors_in(like), strict=True)
    return [t.narrow(0, half * len(a), len(a)) for t, a in found if _twice(a, t)]


def with_rows(like: Any, twice: Any) -> list[torch.Tensor]:
    """The tensors of ``like`` of which those of ``twice`` have twice the rows."""
    return [a for a, t in zip(tensors_in(like), tensors_in(twice), strict=True) if _twice(a, t)]


def _twice(a: torch.Tensor, t: torch.Tensor) -> bool:
    return a.dim() > 0 and t.dim() == a.dim() and t.shape == (2 * a.shape[0], *a.shape[1:])


def distance(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """The largest difference of two lists of tensors, each relative to the largest value of its tensor; infinite where
    one is finite and the other not. Synchronises."""
    return max((_apart(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    if torch.equal(a, b) or not a.numel():
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return math.inf
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return math.inf
    a, b = a.where(finite, 0), b.where(finite, 0)
    largest = max(float(a.abs().max()), float(b.abs().max()))
    return float((a - b).abs().max()) / largest if largest else 0.0


def number_tolerance(unit: float) -> float:
    """What may differ, relatively, between other numbers of rows in arithmetic of that roundoff: half the digits."""
    return math.sqrt(unit)


def company_tolerance(items: Sequence[torch.Tensor]) -> float:
    """What may differ, relatively, between rows of tensors of the same shapes."""
    unit = roundoff(items)
    return min(UNITS * unit, math.sqrt(unit))


__all__ = ["company_tolerance", "distance", "halves", "number_tolerance", "roundoff", "with_rows"]
