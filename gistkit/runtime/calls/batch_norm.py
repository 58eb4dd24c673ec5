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
from gistkit.runtime.program.match_plan import check_call
from gistkit.runtime.rebuild.terms import NormSource, geometry_of


class NativeBatchNorm(SpecialisedCall):
    """PyTorch's batch norm."""

    def at(self, state: ForwardState, module: Any, x: Any) -> torch.Tensor:
        own = module._parameters
        if state.bound and state.program is not None:
            of_batch = module.training or module.running_mean is module.running_var is None
            bound = BatchNorm(x, None, None, own["weight"], own["bias"], of_batch, module.momentum, module.eps)
            check_call(state.program, self.step.index, bound)
        y = type(module).forward(module, x)
        if keeps_its_input(y):
            self.replace(state, y, x, own["weight"], own["bias"], module.training)
        return y

    def __call__(
        self, state: ForwardState, x: torch.Tensor, running_mean: Any, running_var: Any, weight: Any, bias: Any,
        training: bool, momentum: float, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        y: Any = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        if keeps_its_input(y):
            self.replace(state, y, x, weight, bias, training)
        return y

    def replace(self, state: ForwardState, y: Any, x: torch.Tensor, weight: Any, bias: Any, training: bool) -> None:
        """Have y's node keep its input as planned, and record a batch norm of batch statistics for rebuilds."""
        step, decision = self.step, self.step.input
        kept: Kept | None = None
        if decision is None or not decision.stays or state.strict or state.table.find(x) is not None:
            kept = state.keep(x, decision)
            replace_saved(y, "input", kept)
        if step.feeds_recipe and training:
            replaced = kept is not None and type(kept) is not SavedAsIs
            where = geometry_of(x) if replaced else None
            state.norms[step.index] = NormSource(y.grad_fn, bias, kept if replaced else None, where)
