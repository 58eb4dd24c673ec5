"""What the caller allows, and how a tensor is kept that no plan speaks of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gistkit.ir import FORMS, NEVER, OPERATORS, Decision
from gistkit.nn.eligible import KERNEL_DTYPES
from gistkit.planning.forms import SMALL_BYTES

KEEP_DENSE = Decision(-1, "dense", reason="kept as it is")
WITHOUT_VALUES = tuple(f.name for f in FORMS.values() if f.returns in (NEVER, OPERATORS) and not f.made_by_op)
"""Forms by which no reader finds the values in a stash."""


@dataclass(frozen=True)
class Settings:
    """What the caller allows: a lossy format or None, and whether sums may be reassociated."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    slices: int = 1


def ad_hoc(x: torch.Tensor, sparse: bool, settings: Settings) -> Decision:
    """The decision for a tensor that no plan speaks of: always correct, not always the smallest."""
    if x.dtype == torch.bool:
        return Decision(-1, "bits", reason="a mask of 1 bit an element")
    if x.dtype not in KERNEL_DTYPES or x.numel() * x.element_size() < SMALL_BYTES:
        return KEEP_DENSE
    suffix = "" if settings.lossy is None else "+" + settings.lossy
    if sparse:
        return Decision(-1, "zvc" + suffix, reason="a ReLU's output, zeros left out")
    return KEEP_DENSE if settings.lossy is None else Decision(-1, settings.lossy, reason="delayed precision reduction")
