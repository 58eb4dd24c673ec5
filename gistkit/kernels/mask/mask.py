"""One-bit masks: a ReLU's or a dropout's backward needs the sign of an element, not its value (Gist section III-A).

Bit j of byte i is element 8i+j, set where not (x <= 0), so NaN passes as in PyTorch; bits past the last element are 0.
A row of 8 elements is a mask byte, so a lane builds or reads whole bytes (:mod:`gistkit.kernels.launch.tiling`). Where
n is no multiple of 8 the kernels are correct but lose the wide accesses. Values and gradients may be dense tensors of
any shape. Flags (torch.bool) are encoded by a kernel of their own where they are a multiple of 16, four to a 32-bit
word, sixteen to a lane: flag by flag it takes 1.17 times as long on an H200.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div, mask1_bytes
from gistkit.kernels.launch.tiling import launch, launch_tiles, repeated_tiles, span, tile
from gistkit.kernels.narrow.rounding import not_positive, rounded, widen
from gistkit.kernels.signed_zero import relu_keeps_negative_zero

FLAGS = 16
"""Flags a row of the kernel for flags: one 16-byte access and 2 bytes of a mask."""
FLAG_ROWS = 512


@triton.jit
def _pack_kernel(
    x_ptr, y_ptr, mask_ptr, n, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """mask of x (fp32/bf16/fp16, or uint8 flags); with RELU also y = relu(x), with NaN payloads, -0.0 if KEEP_ZERO."""
    first, rows, row_mask, offs, mask = tile(n, ROWS, ALIGNED)
    x = tl.load(x_ptr + first + offs, mask, other=0)
    # 16-bit floats are compared as fp32, which is exact; only the comparison's result is used, so NaN payloads survive
    closed = x == 0 if x.dtype == tl.uint8 else not_positive(widen(x))
    if RELU:
        y = tl.where(widen(x) < 0 if KEEP_ZERO else closed, 0.0, x)
        tl.store(y_ptr + first + offs, y, mask)
    octets = tl.sum(tl.where(closed, 0, 1 << tl.arange(0, 8)[None, :]), axis=1)
    tl.store(mask_ptr + first // 8 + rows, octets.to(tl.uint8), row_mask)


@triton.jit
def _pack_flags_kernel(words_ptr, mask_ptr, n, ROWS: tl.constexpr):
    """16 bits of mask_ptr (int16) from four words (int32) of flags, n times."""
    first, count = span(n, ROWS)
    rows, place = tl.arange(0, ROWS), tl.arange(0, 4)[None, :]
    mask = tl.broadcast_to((rows < count)[:, None], (ROWS, 4))
    words = tl.load(words_ptr + first * 4 + rows[:, None] * 4 + place, mask)
    # a byte that is not 0 sets its own top bit: by itself, or by a carry out of its other seven
    tops = (((words & 0x7F7F7F7F) + 0x7F7F7F7F) | words) & -0x7F7F7F80
    # the product's upper half has the four top bits in order, at bit 0 or at bit 4, and more above bit 8
    factor = tl.where(place % 2 == 0, 0x02040810, 0x20408100)
    octets = tl.umulhi(tops.to(tl.uint32), tl.broadcast_to(factor, (ROWS, 4)).to(tl.uint32)) & 0xFF
    halves = tl.sum(octets << (place // 2 * 8).to(tl.uint32), axis=1)
    tl.store(mask_ptr + first + rows, halves.to(tl.int16), rows < count)


@triton.jit
def _bits(mask_ptr, first, rows, row_mask):
    """[ROWS, 8] int32 of 0 and 1."""
    octets = tl.load(mask_ptr + first // 8 + rows, row_mask, other=0).to(tl.int32)
    return (octets[:, None] >> tl.arange(0, 8)[None, :]) & 1


@triton.jit
def _unpack_kernel(mask_ptr, x_ptr, n, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    first, rows, row_mask, offs, mask = tile(n, ROWS, ALIGNED)
    tl.store(x_ptr + first + offs, _bits(mask_ptr, first, rows, row_mask).to(tl.uint8), mask)


@triton.jit
def _select_kernel(grad_ptr, mask_ptr, out_ptr, n, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """grad where the bit is set, else +0; no arithmetic touches the value."""
    first, rows, row_mask, offs, mask = tile(n, ROWS, ALIGNED)
    grad = tl.load(grad_ptr + first + offs, mask, other=0)
    tl.store(out_ptr + first + offs, tl.where(_bits(mask_ptr, first, rows, row_mask) != 0, grad, 0.0), mask)


@triton.jit
def _scale_kernel(
    grad_ptr, mask_ptr, out_ptr, scale, n, PORTABLE: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """grad * (scale or 0) in fp32, rounded once; by the hardware, whose NaN is PyTorch's, unless PORTABLE."""
    first, rows, row_mask, offs, mask = tile(n, ROWS, ALIGNED)
    grad = tl.load(grad_ptr + first + offs, mask, other=0)
    noise = tl.where(_bits(mask_ptr, first, rows, row_mask) != 0, scale, 0.0)
    tl.store(out_ptr + first + offs, rounded(widen(grad) * noise, grad.dtype, PORTABLE), mask)


def _pack(x: torch.Tensor, y: torch.Tensor, relu: bool = False, keep_zero: bool = False) -> torch.Tensor:
    mask = torch.empty(((x.numel() + 7) // 8,), dtype=torch.uint8, device=x.device)
    launch_tiles(_pack_kernel, x, x, y, mask, RELU=relu, KEEP_ZERO=keep_zero)
    return mask


def mask1_encode(x: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/8)] of not (x <= 0), for x fp32/bf16/fp16[n]."""
    return _pack(x, x)


def relu_mask1(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(relu(x), its mask) of a dense x, in one pass. NaN payloads stay, a -0.0 becomes what ``torch.relu`` makes of it:
    does not synchronise but for asking that once (:mod:`gistkit.kernels.signed_zero`)."""
    y = torch.empty_like(x)
    return y, _pack(x, y, True, relu_keeps_negative_zero(x))


def relu_mask1_(x: torch.Tensor) -> torch.Tensor:
    """The mask of relu(x); x is overwritten by relu(x) in the same pass. Zeros and waiting as :func:`relu_mask1`."""
    return _pack(x, x, True, relu_keeps_negative_zero(x))


def repeated_relu(x: torch.Tensor) -> partial[None]:
    """Launches of (x, y, mask) that make y = relu(x) and its mask."""
    return repeated_tiles(_pack_kernel, x, RELU=True, KEEP_ZERO=relu_keeps_negative_zero(x))


def repeated_backward(grad: torch.Tensor) -> partial[None]:
    """Launches of (gradient, mask, result) that do what :func:`mask1_backward` does."""
    return repeated_tiles(_select_kernel, grad)


def mask1_backward(grad: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """grad fp32/bf16/fp16[n] where the bit is set, else +0."""
    grad_x = torch.empty_like(grad)
    launch_tiles(_select_kernel, grad, grad, mask, grad_x)
    return grad_x


def mask1_backward_(grad: torch.Tensor, mask: torch.Tensor) -> None:
    """:func:`mask1_backward` that overwrites its gradient."""
    launch_tiles(_select_kernel, grad, grad, mask, grad)


def bits_encode(b: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/8)] from bool[n]."""
    flags = b.view(torch.uint8)
    if flags.numel() % FLAGS or flags.data_ptr() % 4:
        return _pack(flags, flags)
    mask = torch.empty((mask1_bytes(b.numel()),), dtype=torch.uint8, device=b.device)
    rows, words = flags.numel() // FLAGS, flags.view(torch.int32)
    launch(_pack_flags_kernel, ceil_div(rows, FLAG_ROWS), flags, words, mask.view(torch.int16), rows, ROWS=FLAG_ROWS)
    return mask


def bits_decode(mask: torch.Tensor, n: int) -> torch.Tensor:
    """bool[n] from a mask."""
    flags = torch.empty((n,), dtype=torch.uint8, device=mask.device)
    launch_tiles(_unpack_kernel, flags, mask, flags)
    return flags.view(torch.bool)


def dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """As the oracle has it (reference/mask.py), of grad fp32/bf16/fp16[n]."""
    grad_x = torch.empty_like(grad)
    launch_tiles(_scale_kernel, grad, grad, mask, grad_x, scale, PORTABLE=not grad.is_cuda)
    return grad_x
