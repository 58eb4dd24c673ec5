"""How close two evaluations of one thing must be.

Other numbers of rows take other kernels, and with them other orders of summation. What that makes of a deep network no
count of terms bounds, so half of the digits are demanded, ``sqrt(u)`` relatively, u the unit roundoff of the coarsest
type in use. Equal shapes take equal instructions, row by row: there UNITS times u are allowed, for kernels that sort
their rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch.linalg import vector_norm

UNITS = 64
TF32 = 2.0**-11
"""The unit roundoff of CUDA's products of float32, unless the caller has them in full."""


def _of_dtype(dtype: torch.dtype) -> float:
    """The unit roundoff of a type, 0 for whole numbers."""
    return torch.finfo(dtype).eps / 2 if dtype.is_floating_point or dtype.is_complex else 0.0


def roundoff(items: Iterable[torch.Tensor]) -> float:
    """The unit roundoff of the coarsest floating type among tensors, autocast and CUDA's products."""
    found = [t for t in items if _of_dtype(t.dtype)]
    units = [_of_dtype(t.dtype) for t in found]
    for device in {t.device.type for t in found}:
        if torch.is_autocast_enabled(device):
            units.append(_of_dtype(torch.get_autocast_dtype(device)))
        if device == "cuda":
            units.append(TF32)
    return max(units, default=_of_dtype(torch.float32))


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two tensors relative to their largest value; infinite where one is finite and the other
    not. Takes another tensor of their size where all is finite, else five. Synchronises."""
    if torch.equal(a, b):
        return 0.0
    if not _of_dtype(a.dtype):
        return math.inf
    off = float(vector_norm(a - b, math.inf))
    if not math.isfinite(off):
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            return math.inf
        a, b = a.where(finite, 0), b.where(finite, 0)
        off = float(vector_norm(a - b, math.inf))
    return off / max(float(vector_norm(a, math.inf)), float(vector_norm(b, math.inf))) if off else 0.0


def number_tolerance(unit: float) -> float:
    """What may differ, relatively, between other numbers of rows in arithmetic of that roundoff."""
    return math.sqrt(unit)


def company_tolerance(unit: float) -> float:
    """What may differ, relatively, between rows of tensors of the same shapes."""
    return min(UNITS * unit, math.sqrt(unit))


__all__ = ["UNITS", "company_tolerance", "distance", "number_tolerance", "roundoff"]
