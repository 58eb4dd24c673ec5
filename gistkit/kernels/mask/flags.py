"""A byte a flag (torch.bool) to a bit a flag and back, four flags to a 32-bit word, sixteen to a lane.

Flag by flag the kernels of :mod:`gistkit.kernels.mask.mask` do the same, for any length and address, but they spend
four to
five instructions a flag, and a copy of single bytes leaves no time for that. Here one addition tells which bytes of a
word are not 0, and one product gathers their bits, or spreads them.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.launch.tiling import launch, span

FLAGS = 16
"""Flags a row, which is one 16-byte access and 2 bytes of a mask."""
ROWS = 512


def fits(flags: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether both are whole rows at addresses that allow for such accesses."""
    return flags.numel() % FLAGS == 0 and flags.data_ptr() % 4 == 0 and mask.data_ptr() % 2 == 0


@triton.jit
def _rows(n, ROWS: tl.constexpr):
    """(first row, rows, rows in bounds, words, words in bounds, a word's place in its row) of n rows."""
    first, count = span(n, ROWS)
    rows = tl.arange(0, ROWS)
    place = tl.arange(0, 4)[None, :]
    mask = tl.broadcast_to((rows < count)[:, None], (ROWS, 4))
    return first, rows, rows < count, rows[:, None] * 4 + place, mask, place


@triton.jit
def _pack_flags_kernel(words_ptr, mask_ptr, n, ROWS: tl.constexpr):
    """16 bits of mask_ptr (int16) from four words (int32) of flags, n times."""
    first, rows, row_mask, offs, mask, place = _rows(n, ROWS)
    words = tl.load(words_ptr + first * 4 + offs, mask)
    # a byte that is not 0 sets its own top bit: by itself, or by a carry out of its other seven
    tops = (((words & 0x7F7F7F7F) + 0x7F7F7F7F) | words) & -0x7F7F7F80
    # the product's upper half has the four top bits in order, at bit 0 or at bit 4, and more above bit 8
    factor = tl.where(place % 2 == 0, 0x02040810, 0x20408100)
    octets = tl.umulhi(tops.to(tl.uint32), tl.broadcast_to(factor, (ROWS, 4)).to(tl.uint32)) & 0xFF
    halves = tl.sum(octets << (place // 2 * 8).to(tl.uint32), axis=1)
    tl.store(mask_ptr + first + rows, halves.to(tl.int16), row_mask)


@triton.jit
def _unpack_flags_kernel(mask_ptr, words_ptr, n, ROWS: tl.constexpr):
    """Four words (int32) of flags, 0 or 1, from 16 bits of mask_ptr (int16), n times."""
    first, rows, row_mask, offs, mask, place = _rows(n, ROWS)
    halves = tl.load(mask_ptr + first + rows, row_mask, other=0).to(tl.int32)
    nibbles = (halves[:, None] >> (place * 4)) & 0xF
    # copies of the nibble at bits 0, 7, 14 and 21 put its bit i to bit 8i
    tl.store(words_ptr + first * 4 + offs, (nibbles * 0x00204081) & 0x01010101, mask)


def pack_flags(flags: torch.Tensor, mask: torch.Tensor) -> None:
    """Write the mask (uint8) of flags (uint8) that :func:`fits`: bit j of byte i is "flag 8i + j is not 0"."""
    n = flags.numel() // FLAGS
    launch(_pack_flags_kernel, ceil_div(n, ROWS), flags, flags.view(torch.int32), mask.view(torch.int16), n, ROWS=ROWS)


def unpack_flags(mask: torch.Tensor, flags: torch.Tensor) -> None:
    """Write the flags (uint8, 0 or 1) of a mask (uint8) that :func:`fits`."""
    n = flags.numel() // FLAGS
    launch(
        _unpack_flags_kernel, ceil_div(n, ROWS), flags, mask.view(torch.int16), flags.view(torch.int32), n, ROWS=ROWS
    )
