"""The shape of one max-pool: windows and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gistkit import formats
from gistkit.kernels.ops import pool_size


@dataclass(frozen=True)
class PoolGeometry:
    """Input plane, windows (without dilation) and output plane of a 2-D pool; pairs are (vertical, horizontal)."""

    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    out_height: int
    out_width: int
    images: int  # that one launch takes; 0: an image is beyond its reach

    @property
    def positions(self) -> int:
        return self.kernel[0] * self.kernel[1]

    def last(self, axis: int) -> int:
        """The last input coordinate that a window asks for, inside or not."""
        out = (self.out_height, self.out_width)[axis]
        return (out - 1) * self.stride[axis] - self.padding[axis] + self.kernel[axis] - 1


def none_code(bits: int) -> int:
    """The code that stands for "no gradient" under ``zero_code``."""
    return formats.ARGMAX4_NONE if bits == 4 else formats.ARGMAX8_NONE


def forward_geometry(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool
) -> PoolGeometry:
    """Geometry of a forward pool over x, [N, C, H, W]."""
    channels, height, width = x.shape[1:]
    sides = zip((height, width), kernel, stride, padding, strict=True)
    rows, columns = (pool_size(*side, ceil_mode) for side in sides)
    return _geometry(channels, height, width, kernel, stride, padding, (rows, columns))


def backward_geometry(
    grad_y: torch.Tensor, height: int, width: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> PoolGeometry:
    """Geometry of the backward of a pool over height x width planes; grad_y: [N, C, OH, OW]."""
    return _geometry(grad_y.shape[1], height, width, kernel, stride, padding, (grad_y.shape[2], grad_y.shape[3]))


def _geometry(channels: int, height, width, kernel, stride, padding, out: tuple[int, int]) -> PoolGeometry:
    images = launch_images(channels * max((height + height % 2) * (width + width % 2), out[0] * out[1]))
    kernel, stride, padding = ((int(a), int(b)) for a, b in (kernel, stride, padding))
    return PoolGeometry(height, width, kernel, stride, padding, *out, images)


def launch_images(elements: int) -> int:
    """Images of so many elements that 32-bit offsets reach; an even number, as two codes may share a byte."""
    return 2**30 // max(1, elements) * 2
