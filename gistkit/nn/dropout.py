"""dropout that keeps one bit an element."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gistkit.kernels import flat, is_dense, ops
from gistkit.nn.eligible import covered, overwritable, recorded
from gistkit.nn.keep import once_differentiable, take


@lru_cache(maxsize=64)
def _scale(dtype: torch.dtype, p: float) -> float:
    """1 / (1 - p) as PyTorch's CPU path rounds it: noise of that dtype divided by 1 - p. Computed on the host."""
    with unset_fake_temporarily():
        return torch.ones((), dtype=dtype, device="cpu").div_(1 - p).item()


def _drop(x: torch.Tensor, p: float, inplace: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Size, tuple, float]:
    """dropout(x) by the ops that PyTorch itself runs, then the mask bits, their geometry and the scale.

    On CUDA PyTorch has a fused kernel with random numbers of its own, except in place.
    """
    if x.device.type == "cuda" and not inplace:
        y, kept = torch.ops.aten.native_dropout(x, p, True)
        return y, ops.bits_encode(flat(kept)), kept.shape, kept.stride(), 1.0 / (1.0 - p)
    scale = _scale(x.dtype, p)  # the first time from a tensor of its own: before there is any of x's size
    noise = torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)
    y = x.mul_(noise) if inplace else x * noise
    return y, ops.mask1_encode(flat(noise)), noise.shape, noise.stride(), scale


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, inplace: bool) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        y, *ctx.kept = _drop(x, p, inplace)
        if inplace:
            ctx.mark_dirty(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        mask, shape, stride, scale = take(ctx)
        if grad.stride() != stride:
            flags = ops.bits_decode(mask, shape.numel()).as_strided(shape, stride)
            if not is_dense(grad):
                return grad.mul(flags).mul_(scale), None, None
            # the bits in the gradient's order; two bytes an element until the result is made
            flags = torch.empty_strided(shape, grad.stride(), dtype=torch.bool, device=mask.device).copy_(flags)
            mask = ops.bits_encode(flat(flags))
            del flags
            factors = (torch.empty_strided(shape, s, device="meta") for s in (grad.stride(), stride))
            stride = torch.mul(*factors).stride()  # PyTorch's where sizes of 1 leave them open
        return ops.dropout_backward(flat(grad), mask, scale).as_strided(shape, stride), None, None


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """``torch.nn.functional.dropout`` with the same random numbers, bit for bit, that keeps a 1-bit mask.

    input: fp32, bf16 or fp16 of any shape and strides. p = 0, p = 1, inference, other dtypes, and in place on views are
    PyTorch's own. Raises ValueError as PyTorch for p outside [0, 1]. Does not synchronise.
    """
    x = input
    direct = training and recorded(x) and covered(x) and x.numel() > 0 and 0.0 < p < 1.0
    if not direct or (inplace and not overwritable(x)):
        return F.dropout(x, p, training, inplace)
    return _Dropout.apply(x, p, inplace)
