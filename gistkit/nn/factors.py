"""A batch norm's output, and what follows it, by gistkit's own kernel."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import torch

from gistkit.kernels import is_channels_last
from gistkit.kernels.launch import direct

Vector = torch.Tensor | None


def as_fp32(t: torch.Tensor) -> torch.Tensor:
    """t itself where it is fp32."""
    return t if t.dtype is torch.float32 else t.float()


@lru_cache(maxsize=1024)
def plane_of(shape: torch.Size, stride: tuple[int, ...]) -> int:
    """Elements of one channel that lie together in a dense tensor of that geometry, contiguous or channels_last."""
    return 1 if is_channels_last(torch.empty_strided(shape, stride, device="meta")) else prod(shape[2:])


class Factors:
    """A batch norm's output from its input by gistkit's own kernel. ``norm``: mean, 1/std, weight and bias, [C] each;
    ``form``: the arithmetic, one of :data:`gistkit.kernels.FORMS`."""

    __slots__ = ("form", "norm")

    def __init__(self, form: str, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector) -> None:
        mean, invstd = as_fp32(mean), as_fp32(invstd)
        weight = torch.ones_like(mean) if weight is None else weight.detach()
        bias = torch.zeros_like(mean) if bias is None else bias.detach()
        self.norm, self.form = [mean, invstd, weight, bias], form

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """BN(x) for dense x [N, C, ...], contiguous or channels_last."""
        y = torch.empty_like(x)
        direct.bn_rebuild(x, self.norm, self.form, plane_of(x.shape, x.stride()), None, [], "", False, y)
        return y
