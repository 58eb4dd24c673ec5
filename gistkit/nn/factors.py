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
    """A batch norm's output from its input by gistkit's own kernel. ``vectors``: mean [C], 1/std [C], weight and bias
    [2C], fp32, never written to; ``form``: the arithmetic, one of :data:`gistkit.kernels.launch.checks.FORMS`."""

    __slots__ = ("form", "vectors")

    def __init__(self, mean: torch.Tensor, invstd: torch.Tensor, affine: torch.Tensor, form: str) -> None:
        self.vectors, self.form = [mean, invstd, affine], form

    @classmethod
    def of(
        cls, form: str, mean: torch.Tensor, invstd: torch.Tensor, weight: Vector, bias: Vector, affine: Vector = None
    ) -> Factors:
        """The factors with a copy of weight and bias: ``affine`` where there is one already, in fp32."""
        if affine is not None:
            pass
        elif weight is not None and bias is not None and weight.dtype == bias.dtype:
            affine = as_fp32(torch.cat((weight, bias)))
        else:
            scale = torch.ones_like(mean) if weight is None else weight
            affine = torch.cat((scale.float(), torch.zeros_like(mean).float() if bias is None else bias.float()))
        if mean.dtype is not torch.float32 or invstd.dtype is not torch.float32:
            mean, invstd = as_fp32(mean), as_fp32(invstd)
        return cls(mean, invstd, affine, form)

    def plane(self, x: torch.Tensor) -> int:
        """Elements of one channel of x that lie together."""
        return plane_of(x.shape, x.stride())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """BN(x) for dense x [N, C, ...], contiguous or channels_last."""
        y = torch.empty_like(x)
        direct.bn_rebuild(x, self.vectors, self.form, self.plane(x), None, [], "", False, y)
        return y

    def relu(
        self, x: torch.Tensor, y: torch.Tensor, other: Vector = None, factors: Factors | None = None
    ) -> torch.Tensor:
        """y, overwritten by relu(BN(x)), relu(BN(x) + other) or, with its ``factors``, relu(BN(x) + BN(other)); all of
        one geometry. y may be x or other."""
        vectors, form = ([], "") if factors is None else (factors.vectors, factors.form)
        plane = plane_of(x.shape, x.stride())
        direct.bn_rebuild(x, self.vectors, self.form, plane, other, vectors, form, True, y)
        return y
