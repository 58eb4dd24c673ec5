"""What the caller allows, and how a tensor is kept that no plan speaks of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gistkit.ir import Decision
from gistkit.nn.eligible import KERNEL_DTYPES
from gistkit.planning.forms import SMALL_BYTES

KEEP_DENSE = Decision(-1, "dense", reason="kept as it is")
WITHOUT_VALUES = ("rebuild", "mask1", "drop")
"""Codecs by which a tensor is not kept with its values."""


@dataclass(frozen=True)
class Settings:
    """What the caller allows: a lossy format or None, whether sums may be reassociated, and the share of the kept bytes
    that a plan of gistkit's own must save for the model not to run untouched."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    slices: int = 1
    min_gain: float = 0.02


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
