"""dropout that keeps one bit an element."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import unset_fake_temporarily

from gistkit.kernels import flat, like, ops
from gistkit.nn.eligible import covered, overwritable, recorded
from gistkit.nn.keep import take
from gistkit.nn.once import once_differentiable


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
    def backward(ctx: Any, *grads: torch.Tensor | None):
        mask, shape, stride, scale = take(ctx)
        (grad,) = grads
        if grad is None:
            return None, None, None
        made = stride if grad.stride() == stride else _product_strides(shape, grad.stride(), stride)
        if not _same_order(shape, made, stride):
            mask = _reordered(mask, shape, stride, made)
        if _same_order(shape, grad.stride(), made):
            return like(ops.dropout_backward(flat(grad), mask, scale), shape, made), None, None
        grad_x = torch.empty_strided(shape, made, dtype=grad.dtype, device=grad.device).copy_(grad)
        ops.dropout_backward_(flat(grad_x), mask, scale)
        return grad_x, None, None


@lru_cache(maxsize=64)
def _product_strides(shape: torch.Size, grad: tuple[int, ...], noise: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of PyTorch's product of a gradient and the noise: the gradient's order of dimensions where it has
    one."""
    with unset_fake_temporarily():
        a, b = (torch.empty_strided(shape, stride, device="meta") for stride in (grad, noise))
        return torch.mul(a, b).stride()


def _same_order(shape: torch.Size, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether strides of tensors of that shape are the same wherever they matter."""
    return all(size == 1 or p == q for size, p, q in zip(shape, a, b, strict=True))


def _reordered(mask: torch.Tensor, shape: torch.Size, before: tuple[int, ...], after: tuple[int, ...]) -> torch.Tensor:
    """The bits of a mask in another storage order, so that no gradient is laid out anew beside the one that there is;
    two bytes an element meanwhile."""
    flags = like(ops.bits_decode(mask, shape.numel()), shape, before)
    flags = torch.empty_strided(shape, after, dtype=torch.bool, device=mask.device).copy_(flags)
    return ops.bits_encode(flat(flags))


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
