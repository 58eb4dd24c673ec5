"""Max-pool: a map of 4 or 8 bits an output; it carries the mask of the ReLU before it where the plan says so."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.capture import MaxPool2d
from gistkit.nn.pool import max_pool2d
from gistkit.runtime.calls.kinds import SpecialisedCall
from gistkit.runtime.calls.owned import place_own
from gistkit.runtime.forward.state import ForwardState
from gistkit.runtime.program.program import Step


def specialise(state: ForwardState, step: Step, b: MaxPool2d) -> SpecialisedCall:
    """How a max-pool runs as planned."""
    return MappedMaxPool2d(step)


class MappedMaxPool2d(SpecialisedCall):
    """Gistkit's max-pool; it takes operands of any kind."""

    direct = False

    def __init__(self, step: Step) -> None:
        self._step = step

    def fits(self, *_: Any) -> bool:
        return True

    def __call__(self, state: ForwardState, x: torch.Tensor, *windows: Any) -> torch.Tensor:
        step = self._step
        mask = state.carrier(x)
        carries = mask is not None and step.choice.mask_in_pool
        if mask is not None and not carries:
            mask.store(x)
        state.unread = not carries  # PyTorch's own pool, should it run, reads only the shape of what it saves of x
        y: Any = max_pool2d(x, *windows, mask_in_pool=carries)
        state.unread = False
        kept = getattr(y.grad_fn, "kept", None)
        if mask is not None and carries:
            if getattr(kept, "zero_code", False):
                mask.carry(y.grad_fn)
            else:
                mask.store(x)
        if x.requires_grad:
            place_own(state, step, step.own, y)
        if state.table.tagged(x):
            state.mark_sparse(y)
        return y
