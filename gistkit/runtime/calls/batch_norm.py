"""Batch norm: PyTorch's own, its node's saved input replaced by what is planned; recorded where rebuilds start from
it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gistkit.capture import BatchNorm
from gistkit.nn.keep import Kept, SavedAsIs, replace_saved
from gistkit.nn.norm import keeps_its_input
from gistkit.runtime.calls.kinds import SpecialisedCall
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step
from gistkit.runtime.rebuild.terms import NormSource, geometry_of


def specialise(state: ForwardState, step: Step, b: BatchNorm) -> SpecialisedCall:
    """How a batch norm runs as planned."""
    return NativeBatchNorm(step)


class NativeBatchNorm(SpecialisedCall):
    """PyTorch's batch norm; it takes operands of any kind."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def fits(self, *_: Any) -> bool:
        return True

    def __call__(
        self, state: ForwardState, x: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        training: bool, momentum: float, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        y: Any = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if keeps_its_input(y):
            self.replace(state, y, x, weight, bias, training)
        return y

    def replace(
        self, state: ForwardState, y: Any, x: torch.Tensor, weight: Any, bias: Any, training: bool
    ) -> None:  # fmt: skip
        """Have y's node keep its input as planned, and record a batch norm of batch statistics for rebuilds."""
        step, decision = self._step, self._step.input
        kept: Kept | None = None
        if decision is None or not decision.stays or state.strict:
            kept = state.keep(x, decision)
            replace_saved(y, "input", kept)
        elif state.table.find(x) is not None:
            kept = state.keep(x, decision)
            replace_saved(y, "input", kept)
        if step.feeds_recipe and training:
            replaced = kept is not None and type(kept) is not SavedAsIs
            source = NormSource(y.grad_fn, weight, bias, kept, geometry_of(x)) if replaced else None
            state.norms[step.index] = source or NormSource(y.grad_fn, weight, bias)
