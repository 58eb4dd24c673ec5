"""Max-pool with window positions for indices: the oracle, and the CPU's training path.

PyTorch's own CPU pool does the arithmetic, so ties (the first maximum wins, strict >), NaN (the last one of a window
wins), padding (never wins) and windows of nothing but -inf (the first position inside the input) are PyTorch's. Its
int64 indices live for one slice of the batch at a time.

Gradients of overlapping windows are added in row-major order of the outputs, on the CPU in the dtype of the gradient:
bf16 and fp16 sums round after every addition there, whereas CUDA (and the Triton kernel) adds in fp32 and rounds once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gistkit.kernels.layout import flat, is_channels_last, maps_like, nibbles_pack, nibbles_unpack
from gistkit.kernels.pool.geometry import PoolGeometry, backward_geometry, forward_geometry, none_code

SLICE_OUTPUTS = 1 << 18
"""Outputs of one slice of the batch (at least one image): 2 MiB of int64 indices."""


def maxpool_forward(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool, relu: bool,
    zero_code: bool, bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Max-pool of x (or of relu(x)) and one code per output: the row-major position of the maximum in its window. x:
    [N, C, H, W] fp32, bf16 or fp16, contiguous or channels_last. Returns y, in x's layout and bit-equal to
    ``F.max_pool2d``, and the codes, uint8 in y's storage order, two to a byte (low nibble first) at ``bits=4``. Under
    ``zero_code`` one whose maximum is not positive (NaN is) has code 15 or 255: no gradient (Gist, section IV-A)."""
    g = forward_geometry(x, kernel, stride, padding, ceil_mode)
    y = maps_like(x, g.out_height, g.out_width, is_channels_last(x))
    codes = torch.empty_like(y, dtype=torch.uint8)
    windows = (g.kernel, g.stride, g.padding, (1, 1), ceil_mode)
    for part in _slices(y):
        values = torch.relu(x[part]) if relu else x[part]
        maxima, indices = torch.ops.aten.max_pool2d_with_indices(values, *windows)
        y[part].copy_(maxima)
        positions = _positions(indices, g)
        if zero_code:
            positions.masked_fill_(maxima <= 0, none_code(bits))
        codes[part].copy_(positions)
    return y, nibbles_pack(flat(codes)) if bits == 4 else flat(codes)


def maxpool_backward(
    grad_y: torch.Tensor, codes: torch.Tensor, height: int, width: int, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], channels_last: bool, zero_code: bool, bits: int,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the pool's input (of the ReLU's, under ``zero_code``), [N, C, height, width] in grad_y's dtype.
    grad_y: [N, C, OH, OW], any strides; codes: as :func:`maxpool_forward` made them for outputs of the layout named by
    ``channels_last``, which grad_x gets too. Bit-equal to PyTorch's CPU backward."""
    g = backward_geometry(grad_y, height, width, kernel, stride, padding)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    grad_x = maps_like(grad_y, height, width, channels_last)
    outputs = torch.empty(grad_y.shape, dtype=torch.uint8, memory_format=layout)
    flat(outputs).copy_(nibbles_unpack(codes, grad_y.numel()) if bits == 4 else codes)
    for part in _slices(outputs):
        grad, positions = grad_y[part], outputs[part]
        indices = _indices(positions, g)
        if zero_code:
            none = positions == none_code(bits)
            indices.masked_fill_(none, 0)
            grad = grad.masked_fill(none, 0)
        grad_x[part].copy_(_scatter(grad.contiguous(memory_format=layout), indices, grad_x[part], g))
    return grad_x


def _slices(y: torch.Tensor) -> Iterator[slice]:
    images = max(1, SLICE_OUTPUTS // max(1, y[:1].numel()))
    return (slice(start, start + images) for start in range(0, y.shape[0], images))


def _window_starts(g: PoolGeometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Row [OH, 1] and column [OW] of every window's position 0 in the input; negative in the padding."""
    rows = torch.arange(g.out_height, dtype=torch.int32) * g.stride[0] - g.padding[0]
    return rows[:, None], torch.arange(g.out_width, dtype=torch.int32) * g.stride[1] - g.padding[1]


def _positions(indices: torch.Tensor, g: PoolGeometry) -> torch.Tensor:
    """PyTorch's indices (row * width + column in the input plane) as uint8 positions in the windows."""
    first_row, first_column = _window_starts(g)
    # Integer division is 3x slower. (index + 1/2) / width is at least 1 / (2 width) off any integer: this is exact.
    rows = indices.to(torch.float64).add_(0.5).div_(g.width).to(torch.int32)
    columns = indices.to(torch.int32).sub_(rows * g.width).sub_(first_column)
    rows.sub_(first_row)
    return rows.mul_(g.kernel[1]).add_(columns).to(torch.uint8)


def _indices(positions: torch.Tensor, g: PoolGeometry) -> torch.Tensor:
    """The inverse of :func:`_positions`, int64; a code beyond the window gives any number."""
    first_row, first_column = _window_starts(g)
    table = torch.arange(256)
    table = table // g.kernel[1] * g.width + table % g.kernel[1]
    offsets = table.index_select(0, flat(positions).to(torch.int32)).as_strided(positions.shape, positions.stride())
    return offsets.add_(first_row.to(torch.int64) * g.width + first_column)


def _scatter(grad: torch.Tensor, indices: torch.Tensor, like: torch.Tensor, g: PoolGeometry) -> torch.Tensor:
    """PyTorch's backward; of ``like`` only shape and layout are read."""
    ceil_mode = g.last(0) >= g.height + g.padding[0] or g.last(1) >= g.width + g.padding[1]
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    return backward(grad, like, g.kernel, g.stride, g.padding, (1, 1), ceil_mode, indices)
