"""The shape of one max-pool: windows, sizes, and what its operators demand of their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gistkit import formats
from gistkit.kernels.launch.checks import check_dtype
from gistkit.kernels.layout import is_channels_last
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
    images: int  # that one launch takes

    @property
    def positions(self) -> int:
        """Positions in one window."""
        return self.kernel[0] * self.kernel[1]

    def out_sizes(self, ceil_mode: bool) -> tuple[int, int]:
        """Height and width of the outputs under either rounding."""
        return _out_sizes(self.height, self.width, self.kernel, self.stride, self.padding, ceil_mode)


def none_code(bits: int) -> int:
    """The code that stands for "no gradient" under ``zero_code``."""
    return formats.ARGMAX4_NONE if bits == 4 else formats.ARGMAX8_NONE


def forward_geometry(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    zero_code: bool, bits: int,
) -> PoolGeometry:  # fmt: skip
    """Geometry of a forward pool over x. Raises ValueError or TypeError for what the operator cannot take."""
    _check_values("maxpool_forward", "x", x)
    if not (x.is_contiguous() or is_channels_last(x)):
        raise ValueError(
            f"maxpool_forward: x must be contiguous (NCHW) or channels_last, got shape {tuple(x.shape)} with strides "
            f"{x.stride()}; pass x.contiguous()"
        )
    _check_windows("maxpool_forward", kernel, stride, padding, zero_code, bits)
    height, width = x.shape[2:]
    out = _out_sizes(height, width, kernel, stride, padding, ceil_mode)
    if min(out) < 1:
        raise ValueError(
            f"maxpool_forward: the pool of a {height} x {width} plane with kernel {tuple(kernel)}, padding "
            f"{tuple(padding)} has no output; use a smaller window or a larger input"
        )
    return _geometry("maxpool_forward", x.shape[1], height, width, kernel, stride, padding, out)


def backward_geometry(
    grad_y: torch.Tensor, codes: torch.Tensor, height: int, width: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], zero_code: bool, bits: int,
) -> PoolGeometry:  # fmt: skip
    """Geometry of the backward of a pool over height x width planes; raises as :func:`forward_geometry`."""
    _check_values("maxpool_backward", "grad_y", grad_y)
    _check_windows("maxpool_backward", kernel, stride, padding, zero_code, bits)
    out = (grad_y.shape[2], grad_y.shape[3])
    floor, ceil = (_out_sizes(height, width, kernel, stride, padding, mode) for mode in (False, True))
    if out not in (floor, ceil):
        raise ValueError(
            f"maxpool_backward: grad_y must have the planes that the pool makes of {height} x {width} inputs, got "
            f"shape {tuple(grad_y.shape)} for kernel {tuple(kernel)}, stride {tuple(stride)}, padding "
            f"{tuple(padding)}; pass the forward's height, width and windows"
        )
    expected = formats.argmax_bytes(grad_y.numel(), bits)
    if codes.dtype != torch.uint8 or codes.numel() != expected or not codes.is_contiguous():
        raise ValueError(
            f"maxpool_backward: codes must be {expected} contiguous uint8 for {grad_y.numel()} outputs at {bits} bits, "
            f"got {codes.numel()} of {codes.dtype}; pass the codes of the forward that made grad_y's outputs"
        )
    return _geometry("maxpool_backward", grad_y.shape[1], height, width, kernel, stride, padding, out)


def _out_sizes(height, width, kernel, stride, padding, ceil_mode: bool) -> tuple[int, int]:
    rows = pool_size(height, kernel[0], stride[0], padding[0], ceil_mode)
    return rows, pool_size(width, kernel[1], stride[1], padding[1], ceil_mode)


def _geometry(op: str, channels: int, height, width, kernel, stride, padding, out: tuple[int, int]) -> PoolGeometry:
    images = launch_images(channels * max((height + height % 2) * (width + width % 2), out[0] * out[1]))
    if not images:
        raise ValueError(
            f"{op}: an image must have at most 2**30 elements, got {channels} planes of {height} x {width}; use "
            "PyTorch's own max_pool2d"
        )
    kernel, stride, padding = ((int(a), int(b)) for a, b in (kernel, stride, padding))
    return PoolGeometry(height, width, kernel, stride, padding, *out, images)


def launch_images(elements: int) -> int:
    """Images of so many elements that 32-bit offsets reach; an even number, as two codes may share a byte."""
    return 2**30 // max(1, elements) * 2


def _check_values(operator: str, name: str, x: torch.Tensor) -> None:
    check_dtype(operator, name, x.dtype)
    if x.dim() != 4:
        raise ValueError(f"{operator}: {name} must be 4-D (N, C, H, W), got shape {tuple(x.shape)}; unsqueeze it first")


def _check_windows(operator: str, kernel, stride, padding, zero_code: bool, bits: int) -> None:
    for name, pair, least in (("kernel", kernel, 1), ("stride", stride, 1), ("padding", padding, 0)):
        if len(pair) != 2 or min(pair) < least:
            raise ValueError(
                f"{operator}: {name} must be two integers of at least {least}, got {tuple(pair)}; give one for the "
                "height, one for the width"
            )
    if any(p > k // 2 for p, k in zip(padding, kernel, strict=True)):
        raise ValueError(
            f"{operator}: padding must be at most half of the kernel, got padding {tuple(padding)} for kernel "
            f"{tuple(kernel)}; pad the input beforehand instead"
        )
    if bits not in (4, 8):
        raise ValueError(f"{operator}: bits must be 4 or 8, got {bits}; 8 takes windows of any size that has a map")
    capacity = formats.ARGMAX4_POSITIONS if bits == 4 else formats.ARGMAX8_POSITIONS
    capacity -= bool(zero_code)
    if kernel[0] * kernel[1] > capacity:
        remedy = "use bits=8" if bits == 4 else "use PyTorch's own max_pool2d"
        raise ValueError(
            f"{operator}: {bits}-bit codes name at most {capacity} window positions (zero_code={bool(zero_code)}), got "
            f"kernel {tuple(kernel)} with {kernel[0] * kernel[1]}; {remedy}"
        )
