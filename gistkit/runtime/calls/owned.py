"""Max-pool and dropout, whose nodes make what they keep: a map of 4 or 8 bits an output, a mask of 1 bit an element."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.nn.dropout import dropout
from gistkit.nn.pool import max_pool2d
from gistkit.runtime.calls.kinds import SpecialisedCall
from gistkit.runtime.forward.state import ForwardState


class MappedMaxPool2d(SpecialisedCall):
    """Gistkit's max-pool; its map carries the mask of the ReLU before it where the plan says so."""

    def __call__(self, state: ForwardState, x: torch.Tensor, *windows: Any) -> torch.Tensor:
        mask = state.carrier(x)
        carries = mask is not None and self.step.choice.mask_in_pool
        state.unread = not carries  # PyTorch's own pool, should it run, reads only the shape of what it saves of x
        y: Any = max_pool2d(x, *windows, mask_in_pool=carries)
        state.unread = False
        if mask is not None:
            if carries and getattr(getattr(y.grad_fn, "kept", None), "zero_code", False):
                mask.carry(y.grad_fn)
            else:
                mask.store(x)
        return _placed(self, state, x, y)


class MaskedDropout(SpecialisedCall):
    """Gistkit's dropout."""

    def __call__(self, state: ForwardState, x: torch.Tensor, p: float, training: bool, inplace: bool) -> torch.Tensor:
        y = dropout(x, p, training, inplace)
        return _placed(self, state, x, y) if training and p > 0 else y  # without drops y is x, whose node is another


def _placed(call: SpecialisedCall, state: ForwardState, x: torch.Tensor, y: Any) -> torch.Tensor:
    """y; what its node keeps is recorded, and brought to where the plan wants it."""
    step, decision = call.step, call.step.own
    if x.requires_grad:
        kept = getattr(y.grad_fn, "kept", None)
        if decision is not None and decision.form.payload and decision.codec != "dense":
            if kept is None:
                state.cannot(decision, "PyTorch's own op ran, for these operands are not ones that gistkit's takes")
            elif decision.on_host:
                y.grad_fn.kept = kept = state.away(kept, x.device, decision)
        state.record_own(step.index, step.op, kept)
    if state.table.tagged(x):
        state.mark_sparse(y)
    return y
