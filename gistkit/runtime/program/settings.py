"""What the caller allows, and how a tensor is kept that no plan speaks of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gistkit.ir import FORMS, NEVER, OPERATORS, Decision
from gistkit.planning.forms import default_form

KEEP_DENSE = Decision(-1, "dense", reason="kept as it is")
WITHOUT_VALUES = tuple(f for f in FORMS.values() if f.returns in (NEVER, OPERATORS) and not f.made_by_op)
"""Forms by which no reader finds the values in a stash."""


@dataclass(frozen=True)
class Settings:
    """What the caller allows: a lossy format or None, whether sums may be reassociated, and the least share of the kept
    bytes that a plan of gistkit's own must save."""

    lossy: str | None = None
    fidelity: str = "bitwise"
    slices: int = 1
    min_gain: float = 0.02


def ad_hoc(x: torch.Tensor, sparse: bool, settings: Settings) -> Decision:
    nbytes = x.numel() * x.element_size()
    return default_form(str(x.dtype).removeprefix("torch."), nbytes, zeros=sparse, lossy=settings.lossy)
