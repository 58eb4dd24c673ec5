"""Linear: gistkit's node, which takes the weight gradient first."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gistkit.capture import Linear
from gistkit.nn.linear import linear, takes
from gistkit.runtime.calls.kinds import SpecialisedCall, TensorKind
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step


def specialise(state: ForwardState, step: Step, b: Linear) -> SpecialisedCall | None:
    """How a linear layer over such operands runs as planned."""
    return SplitLinear(step, state.weight_grad_slices(step), b.x) if takes(b.x, b.weight, b.bias) else None


class SplitLinear(SpecialisedCall):
    """Gistkit's linear layer; it takes an input of that geometry."""

    direct = False

    def __init__(self, step: Step, slices: int, x: torch.Tensor) -> None:
        self._step, self._slices = step, slices
        self._x = TensorKind(x)

    def fits(self, x: Any, *_: Any) -> bool:
        return self._x.fits(x)

    def __call__(self, state: ForwardState, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        keep = partial(state.keep, decision=self._step.input)
        return linear(x, weight, bias, keep=keep, weight_grad_slices=self._slices)
