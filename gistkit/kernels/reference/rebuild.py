"""Oracle of gistkit.kernels.rebuild.rebuild: the same arithmetic by PyTorch's operators, one rounding each."""

from __future__ import annotations

import torch


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c rounded once: PyTorch's addcmul is a fused multiply-add on the CPU."""
    return torch.addcmul(c, a, b)


def batch_norm(x: torch.Tensor, norm: list[torch.Tensor], form: str, plane: int) -> torch.Tensor:
    """BN(x) of x[n] in one of the forms, rounded to x's dtype."""
    channels = norm[0].numel()
    mean, invstd, weight, bias = (v.float().view(channels, 1) for v in norm)
    wide = x.float().view(-1, channels, plane)
    if form == "scaled":
        y = _fma(weight * (wide - mean), invstd, bias)
    elif form == "normalised":
        y = _fma((wide - mean) * invstd, weight, bias)
    elif form == "centred":
        y = _fma(wide - mean, weight * invstd, bias)
    else:
        alpha = weight * invstd
        y = _fma(wide, alpha, _fma(-mean, alpha, bias) if form == "fused" else bias - mean * alpha)
    return y.to(x.dtype).view(-1)


def bn_rebuild(
    x: torch.Tensor, norm: list[torch.Tensor], form: str, plane: int, other: torch.Tensor | None,
    other_norm: list[torch.Tensor], other_form: str, relu: bool, out: torch.Tensor,
) -> None:  # fmt: skip
    """out = relu?(BN(x) [+ other | + BN(other)]); arguments as the kernel's."""
    y = batch_norm(x, norm, form, plane)
    if other is not None:
        y = y + (batch_norm(other, other_norm, other_form, plane) if other_norm else other)
    out.copy_(torch.relu(y) if relu else y)
