"""Dropout: a mask of 1 bit an element."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.capture import Dropout
from gistkit.nn.dropout import dropout
from gistkit.runtime.calls.kinds import SpecialisedCall
from gistkit.runtime.calls.owned import place_own
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step


def specialise(state: ForwardState, step: Step, b: Dropout) -> SpecialisedCall:
    """How a dropout runs as planned."""
    return MaskedDropout(step)


class MaskedDropout(SpecialisedCall):
    """Gistkit's dropout; it takes operands of any kind."""

    direct = False

    def __init__(self, step: Step) -> None:
        self._step = step

    def fits(self, *_: Any) -> bool:
        return True

    def __call__(self, state: ForwardState, x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        y = dropout(x, p, training, inplace)
        if training and x.requires_grad:
            place_own(state, self._step, self._step.own, y)
        if training and state.table.tagged(x):
            state.mark_sparse(y)
        return y
