"""linear whose backward takes the weight gradient first and lets go of its input before the input gradient.

As in PyTorch's, the weight is transposed by a node of its own: a node's results, which autograd holds until the last of
them is where it belongs, are then the bias's gradient and the input's, without a sum of weight gradients beside them.
And the weight is kept for the input's gradient alone: one that is made in the step goes where that is not asked for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gistkit.capture import hooks_are_active, takes_linear
from gistkit.nn.autocast import cast
from gistkit.nn.eligible import covered, recorded
from gistkit.nn.keep import Keep, keep_dense, once_differentiable, take


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, matrix: Any, bias: Any, keep: Keep) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        with torch._C._DisableAutocast():
            y = F.linear(x, matrix.t(), bias)
            if y.dim() > 2:
                y = torch.ops.aten._unsafe_view(y, (-1, y.shape[-1]))
        ctx.save_for_backward(matrix if ctx.needs_input_grad[0] else None)
        shapes = x.shape, _column_major(x), matrix.shape, _column_major(matrix)
        ctx.kept = (keep(x) if ctx.needs_input_grad[1] else None, shapes)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        kept, (shape, column_major, features, by_columns) = take(ctx)
        (matrix,) = ctx.saved_tensors
        needs_x, needs_matrix, needs_bias = ctx.needs_input_grad[:3]
        grad_x = grad_matrix = grad_bias = None
        if needs_matrix:
            x = kept.dense().reshape(-1, features[0])
            grad_matrix = grad.t().mm(x).t() if by_columns else x.t().mm(grad)
        x = kept = None
        if needs_bias:
            grad_bias = grad.sum(0)
        if needs_x:
            grad_x = (matrix.mm(grad.t()).t() if column_major else grad.mm(matrix.t())).view(shape)
        return grad_x, grad_matrix, grad_bias, None


def _column_major(x: torch.Tensor) -> bool:
    """Autograd's rule for mm: the gradient of a column-major matrix is made column-major."""
    return x.dim() == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0]


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    keep: Keep | None = None,
) -> torch.Tensor:
    """``torch.nn.functional.linear``, bit for bit, that keeps its input as ``keep`` makes it (default: the tensor,
    or whatever the saved-tensor hooks in force make of it).

    input: [..., I] with at least one leading dimension, contiguous if there are several; weight: [O, I]; bias: [O] or
    None; fp32, bf16 or fp16; any other geometry or dtype is PyTorch's own op. ``keep``: a callable tensor -> Kept.
    Nothing of the input is kept where the weight needs no gradient. Autocast and errors: as
    :func:`gistkit.nn.conv.conv2d`'s. Does not synchronise.
    """
    x = input
    ours = recorded(x, weight, bias) and covered(x, weight, bias) and not (keep is None and hooks_are_active())
    if not ours or not takes_linear(x, weight, bias):
        return F.linear(x, weight, bias)
    x, weight, bias = cast("linear", x.device.type, x, weight, bias)
    y = _Linear.apply(x, weight.t(), bias, keep or keep_dense)
    # a gradient that is not contiguous is copied by a node of its own, which lets go of it; in-place ops find no view
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
