"""relu that keeps one bit an element, or what ``keep`` makes of its output."""

from __future__ import annotations

from typing import Any

import torch

from gistkit.errors import renamed
from gistkit.kernels import is_dense
from gistkit.kernels.launch import direct
from gistkit.nn.eligible import covered, overwritable, recorded
from gistkit.nn.keep import Keep, apply, keep_coded, once_differentiable, take


class _Passes:
    """Nothing: what a ReLU keeps whose consumer zeroes its gradient already."""

    def __init__(self, _: torch.Tensor) -> None: ...

    def relu_backward(self, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _ReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inplace: bool, keep: Keep) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        y = torch.relu_(x) if inplace else torch.relu(x)
        ctx.kept = None if inplace else keep(y)
        if inplace:
            ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        return take(ctx).relu_backward(grad), None, None


@renamed(passes="mask_in_pool=")
def relu(
    input: torch.Tensor, inplace: bool = False, *, keep: Keep | None = None, mask_in_pool: bool = False
) -> torch.Tensor:
    """``torch.nn.functional.relu``, bit for bit, that keeps a 1-bit mask instead of its output.

    input: fp32, bf16 or fp16 of any shape and strides; the result has the strides that ``torch.relu`` gives. ``keep``:
    what to keep of the output, a callable tensor -> Kept. ``mask_in_pool=True`` keeps nothing and hands the gradient on
    unchanged; only right where every reader of the output zeroes the gradient where the output is not positive (a pool
    with ``mask_in_pool=True``). In place on views, and for tensors without kernels, PyTorch's own op runs. Does
    not synchronise. Gist (ISCA 2018) section III-A, Binarize.
    """
    if not covered(input):
        return torch.relu_(input) if inplace else torch.relu(input)
    passes: Any = _Passes
    return run(input, inplace, passes if mask_in_pool and keep is None else keep)


def run(x: torch.Tensor, inplace: bool, keep: Keep | None = None) -> torch.Tensor:
    """:func:`relu` for an x that is covered (:func:`gistkit.nn.eligible.covered`)."""
    if not recorded(x) or x.numel() == 0 or (inplace and not (overwritable(x) and is_dense(x))):
        return torch.relu_(x) if inplace else torch.relu(x)
    if keep is None and is_dense(x):
        return apply(_MaskedReLU, x, inplace, direct.Masks(x))
    keep = keep or keep_coded("mask1")
    y = apply(_ReLU, x, inplace, keep)
    if inplace:
        # only now: autograd counts one more version of x when an in-place Function returns
        with torch.no_grad():
            y.grad_fn.kept = keep(y)  # type: ignore[union-attr]
    return y


class _MaskedReLU(torch.autograd.Function):
    """:class:`_ReLU` with a mask of its own, of dense tensors of one kind."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inplace: bool, masks: direct.Masks) -> torch.Tensor:
        ctx.materialize_grads = False
        ctx.masks = masks
        if inplace:
            ctx.kept = masks.relu_(x)
            ctx.dirty_tensors = (x,)
            return x
        y, ctx.kept = masks.relu(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        return ctx.masks.backward(grad, take(ctx)), None, None


masked = super(torch.autograd.Function, _MaskedReLU).apply  # type: ignore[misc]
"""(x, inplace, masks of x's kind) -> :func:`run` without ``keep``, of a dense x that is recorded, and may be
overwritten where ``inplace``, outside compilers (:func:`gistkit.nn.keep.apply`)."""
