"""Linear: gistkit's node, which takes the weight gradient first."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gistkit.capture import Linear
from gistkit.nn import functional
from gistkit.runtime.calls.kinds import SpecialisedCall
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step


def specialise(state: ForwardState, step: Step, b: Linear) -> SpecialisedCall:
    """How a linear layer runs as planned."""
    return SplitLinear(step, state.weight_grad_slices(step))


class SplitLinear(SpecialisedCall):
    """Gistkit's linear layer; it takes operands of any kind."""

    direct = False

    def __init__(self, step: Step, slices: int) -> None:
        self._step, self._slices = step, slices

    def fits(self, *_: Any) -> bool:
        return True

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        keep = partial(state.keep, decision=self._step.input)
        return functional.linear(x, weight, bias, keep=keep, weight_grad_slices=self._slices)
