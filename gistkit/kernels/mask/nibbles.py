"""Codes below 16, two to a byte (``argmax4``): the first in the low nibble, the odd one out alone in the last byte.

The pool kernels write this layout by themselves; here a map of one byte a code is brought into it and back. Four codes
to a 32-bit word, sixteen to a lane: a copy of single bytes leaves time for few instructions a code.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import argmax_bytes, ceil_div
from gistkit.kernels.launch.checks import check_dtype, check_flat, check_length
from gistkit.kernels.launch.tiling import launch, span

CODES = 16
"""Codes a row: a 16-byte access of codes, an 8-byte one of nibbles."""
ROWS = 512


@triton.jit
def _as(ptr, dtype: tl.constexpr):
    return ptr.to(tl.pointer_type(dtype), bitcast=True)


@triton.jit
def _words(count, ROWS: tl.constexpr):
    """(words of four codes of this program's whole rows, those in bounds), count being its codes in bounds."""
    rows = tl.arange(0, ROWS)[:, None]
    return rows * 4 + tl.arange(0, 4)[None, :], tl.broadcast_to(rows < count // 16, (ROWS, 4))


@triton.jit
def _pack_bytes(codes_ptr, packed_ptr, count, SIZE: tl.constexpr):
    """The first count codes at codes_ptr, of SIZE at most."""
    pairs = tl.arange(0, SIZE // 2)
    low = tl.load(codes_ptr + pairs * 2, pairs * 2 < count, 0)
    high = tl.load(codes_ptr + pairs * 2 + 1, pairs * 2 + 1 < count, 0)
    tl.store(packed_ptr + pairs, (low & 15) | (high << 4), pairs * 2 < count)


@triton.jit
def _unpack_bytes(packed_ptr, codes_ptr, count, SIZE: tl.constexpr):
    """The inverse of :func:`_pack_bytes`."""
    pairs = tl.arange(0, SIZE // 2)
    octets = tl.load(packed_ptr + pairs, pairs * 2 < count, 0)
    tl.store(codes_ptr + pairs * 2, octets & 15, pairs * 2 < count)
    tl.store(codes_ptr + pairs * 2 + 1, octets >> 4, pairs * 2 + 1 < count)


@triton.jit
def _pack_nibbles_kernel(codes_ptr, packed_ptr, n, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """Nibbles of n codes; WORDS: addresses allow for accesses by 4 bytes."""
    first, count = span(n, ROWS * 16)
    codes_ptr += first
    packed_ptr += first // 2
    if WORDS:
        offs, mask = _words(count, ROWS)
        words = tl.load(_as(codes_ptr, tl.int32) + offs, mask, 0)
        # bytes 0 and 2 of this are the two packed ones
        pairs = (words & 0x0F0F0F0F) | ((words >> 4) & 0x00F000F0)
        tl.store(_as(packed_ptr, tl.uint16) + offs, ((pairs & 0xFF) | ((pairs >> 8) & 0xFF00)).to(tl.uint16), mask)
        rest = count // 16 * 16
        if rest < count:
            _pack_bytes(codes_ptr + rest, packed_ptr + rest // 2, count - rest, 16)
    else:
        _pack_bytes(codes_ptr, packed_ptr, count, ROWS * 16)


@triton.jit
def _unpack_nibbles_kernel(packed_ptr, codes_ptr, n, ROWS: tl.constexpr, WORDS: tl.constexpr):
    """The inverse of :func:`_pack_nibbles_kernel`."""
    first, count = span(n, ROWS * 16)
    codes_ptr += first
    packed_ptr += first // 2
    if WORDS:
        offs, mask = _words(count, ROWS)
        halves = tl.load(_as(packed_ptr, tl.uint16) + offs, mask, 0).to(tl.int32)
        octets = (halves | (halves << 8)) & 0x00FF00FF
        tl.store(_as(codes_ptr, tl.int32) + offs, (octets | (octets << 4)) & 0x0F0F0F0F, mask)
        rest = count // 16 * 16
        if rest < count:
            _unpack_bytes(packed_ptr + rest // 2, codes_ptr + rest, count - rest, 16)
    else:
        _unpack_bytes(packed_ptr, codes_ptr, count, ROWS * 16)


def _launch(kernel, source: torch.Tensor, target: torch.Tensor, n: int) -> None:
    words = (source.data_ptr() | target.data_ptr()) % 4 == 0
    launch(kernel, ceil_div(n, ROWS * CODES), source, source, target, n, ROWS=ROWS, WORDS=words)


def nibbles_pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8[ceil(n/2)] of uint8[n] codes, of which the lower four bits are kept. Does not synchronise."""
    check_flat("nibbles_pack", "codes", codes)
    check_dtype("nibbles_pack", "codes", codes.dtype, (torch.uint8,))
    packed = torch.empty((argmax_bytes(codes.numel(), 4),), dtype=torch.uint8, device=codes.device)
    _launch(_pack_nibbles_kernel, codes, packed, codes.numel())
    return packed


def nibbles_unpack(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The uint8[n] codes that :func:`nibbles_pack` packed. Does not synchronise."""
    check_dtype("nibbles_unpack", "packed", packed.dtype, (torch.uint8,))
    check_length("nibbles_unpack", "packed", packed, argmax_bytes(n, 4), f"{n} codes")
    codes = torch.empty((n,), dtype=torch.uint8, device=packed.device)
    _launch(_unpack_nibbles_kernel, packed, codes, n)
    return codes
