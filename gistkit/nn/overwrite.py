"""relu that takes over the memory of its input although the caller did not ask for it in place.

Gist section III-C: ReLU reads and writes each element once, so a convolution's output that only a ReLU reads need not
exist beside the ReLU's. Unlike ``relu_``, the input stays a tensor of its own for autograd, with its own version
counter: whoever reads it later would read wrong values, so the runtime, which is the only caller, watches it.
"""

from __future__ import annotations

from typing import Any

import torch

from gistkit.codecs import Encoded
from gistkit.kernels import Masks, flat, ops
from gistkit.nn.keep import Coded, Keep, hold, take
from gistkit.nn.once import apply, once_differentiable


class _OverwritingReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: Keep | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        y = x.data
        if keep is None:
            hold(ctx, Coded(Encoded("mask1", (ops.relu_mask1_(flat(y)),), y)))
        else:
            hold(ctx, keep(y.relu_()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None):
        kept = take(ctx)
        (grad,) = grads
        return None if grad is None else kept.relu_backward(grad), None


class _MaskedOverwritingReLU(torch.autograd.Function):
    """:class:`_OverwritingReLU` with a mask of its own, of dense tensors of one kind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, masks: Masks) -> torch.Tensor:
        ctx.materialize_grads = False
        ctx.masks, y = masks, x.data
        ctx.kept = masks.relu_(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None):
        mask = take(ctx)
        return None if grads[0] is None else ctx.masks.backward(grads[0], mask), None


def not_a_number(x: torch.Tensor) -> torch.Tensor:
    """A 0-d NaN of x's dtype and device."""
    return torch.full((), float("nan"), dtype=x.dtype, device=x.device)


def overwrite_relu(x: torch.Tensor, *, keep: Keep | None = None, nan: torch.Tensor | None = None) -> torch.Tensor:
    """relu(x) in x's memory; x must be dense, of a kernel's dtype, part of a recorded graph, and never read again.

    The result is a new tensor with a version counter of its own. ``keep`` as in :func:`gistkit.functional.relu`. x lets
    go of its memory and reads as NaN afterwards, so that a reader nobody foresaw cannot go unnoticed. ``nan``: a 0-d
    NaN of x's dtype and device that several calls may share. Does not synchronise.
    """
    y = apply(_OverwritingReLU, x, keep)
    x.data = (not_a_number(x) if nan is None else nan).expand(x.shape)
    return y


_masked = super(torch.autograd.Function, _MaskedOverwritingReLU).apply  # type: ignore[misc]


def overwrite_masked(x: torch.Tensor, masks: Masks, nan: torch.Tensor) -> torch.Tensor:
    """:func:`overwrite_relu` without ``keep``, of an x of the masks' kind, outside compilers."""
    y = _masked(x, masks)
    x.data = nan.expand(x.shape)
    return y
