"""conv2d whose backward takes the weight gradient first and lets go of its input before the input gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from gistkit.kernels.layout import is_dense
from gistkit.nn.autocast import cast, disabled
from gistkit.nn.eligible import covered, demand_floating, hooked, recorded
from gistkit.nn.keep import Keep, Kept, hold, keep_dense, take
from gistkit.nn.once import once_differentiable
from gistkit.nn.pool import Pair, Size, pair
from gistkit.nn.slices import demand_slices, row_slices, summed
from gistkit.nn.standin import Geometry, StandIn, settings

Memo = dict[Any, StandIn] | None
# How many geometries one call is remembered in before all are forgotten.
GEOMETRIES = 16


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, geometry: Any, keep: Keep, slices: int, memo: Memo) -> Any:
        ctx.set_materialize_grads(False)
        with disabled(x.device.type):
            y = torch.conv2d(x, weight, bias, *geometry)
        ctx.save_for_backward(weight)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        stand_in = _stand_in(x, weight, geometry, memo) if needs_x else None
        read = needs_weight or needs_bias or (stand_in is not None and stand_in.needs_input)
        hold(ctx, (keep(x) if read else None, stand_in, geometry, slices))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None):
        kept, stand_in, geometry, slices = take(ctx)
        (weight,) = ctx.saved_tensors
        (grad,) = grads
        needs_x, *needs = ctx.needs_input_grad[:3]
        if grad is None:
            return (None,) * 7
        x = grad_x = grad_weight = grad_bias = None
        if any(needs):
            grad_weight, grad_bias, x = _parameter_gradients(kept, grad, weight, geometry, needs, slices)
        if needs_x and stand_in.needs_input:
            x = kept.dense() if x is None else x
        elif needs_x:
            x = kept = None
            x = stand_in.tensor(weight, geometry)
        if needs_x:
            grad_x = geometry.backward(grad, x, weight, (True, False, False))[0]
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _stand_in(x: torch.Tensor, weight: torch.Tensor, geometry: Geometry, memo: Memo) -> StandIn:
    """The stand-in of x, taken from the memo where a call like this one left it there."""
    if memo is None:
        return StandIn.of(x, weight, geometry)
    key = (x.shape, x.stride(), x.dtype, x.device, weight.shape, weight.stride(), weight.dtype, geometry, settings())
    found = memo.get(key)
    if found is None:
        if len(memo) >= GEOMETRIES:
            memo.clear()
        memo[key] = found = StandIn.of(x, weight, geometry)
    return found


def _parameter_gradients(
    kept: Kept, grad: torch.Tensor, weight: torch.Tensor, geometry: Geometry, needs: list[bool], slices: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Weight gradient, bias gradient, and the decoded input where all of it was made."""
    mask = (False, needs[0], needs[1])
    if slices == 1:
        x = kept.dense()
        return *geometry.backward(grad, x, weight, mask)[1:], x
    parts = row_slices(kept, grad.shape[0], slices)
    weights, biases = summed(geometry.backward(grad[part], x, weight, mask)[1:] for part, x in parts)
    return weights, biases, None


def _same_padding(kernel: tuple[int, ...], dilation: Pair) -> tuple[Pair, tuple[int, int, int, int] | None]:
    """``padding="same"`` as symmetric padding, and what PyTorch pads the input with before where that is uneven:
    (left, right, top, bottom)."""
    total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    uneven = (0, total[1] % 2, 0, total[0] % 2)
    return (total[0] // 2, total[1] // 2), uneven if any(uneven) else None


def _geometry(stride: Any, padding: Any, dilation: Any, groups: Any) -> Geometry | None:
    """The geometry as pairs; None for arguments that PyTorch shall judge."""
    step, around, spread = (pair(v) for v in (stride, padding, dilation))
    if step is None or around is None or spread is None or type(groups) is not int:
        return None
    return Geometry(step, around, spread, groups)


def _resolved(kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: Any) -> Any:
    """(geometry with padding in numbers, what to pad the input with before), or None where PyTorch's own conv2d must
    take the call."""
    uneven = None
    if isinstance(padding, str):
        spread = pair(dilation)
        if padding not in ("same", "valid") or spread is None or (padding == "same" and pair(stride) != (1, 1)):
            return None
        padding, uneven = _same_padding(kernel, spread) if padding == "same" else ((0, 0), None)
    geometry = _geometry(stride, padding, dilation, groups)
    return None if geometry is None else (geometry, uneven)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    keep: Keep | None = None,
    slices: int = 1,
    memo: Memo = None,
) -> torch.Tensor:
    """``torch.nn.functional.conv2d``, bit for bit, that keeps its input as ``keep`` makes it (default: the tensor,
    or whatever the saved-tensor hooks in force make of it).

    x: [N, C, H, W] or [C, H, W]; weight: [O, C/groups, KH, KW]; bias: [O] or None; fp32, bf16 or fp16. ``keep``: a
    callable tensor -> Kept. Nothing of x is kept where neither weight nor bias needs a gradient. Backward decodes x,
    takes the weight and bias gradients, lets go of it, then takes the input gradient. ``slices`` > 1 takes the weight
    gradient in that many batch slices, which sums in another order. ``memo``: a dict that the caller keeps from step to
    step for this call, for what depends on sizes, strides and settings alone. Under torch.autocast the operands are
    cast as PyTorch casts them (:func:`gistkit.nn.autocast.cast`). Raises TypeError for integer and complex tensors,
    ValueError for slices < 1, and what ``torch.conv2d`` raises. Does not synchronise.
    """
    demand_floating("conv2d", x=x, weight=weight, bias=bias)
    demand_slices("conv2d", slices)
    own: Any = (x, weight, bias, stride, padding, dilation, groups)
    if not recorded(x, weight, bias) or not covered(x, weight, bias) or (keep is None and hooked()):
        return F.conv2d(*own)
    if x.dim() not in (3, 4) or weight.dim() != 4 or x.numel() == 0 or not is_dense(x):
        return F.conv2d(*own)
    x, weight, bias = cast("conv2d", x.device.type, x, weight, bias)
    resolved = _resolved(weight.shape[2:], stride, padding, dilation, groups)
    if resolved is None:
        return F.conv2d(*own)
    geometry, uneven = resolved
    x = x if uneven is None else F.pad(x, uneven)
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    y = _Conv2d.apply(batch, weight, bias, geometry, keep or keep_dense, slices, memo)
    return y if x.dim() == 4 else y.squeeze(0)
