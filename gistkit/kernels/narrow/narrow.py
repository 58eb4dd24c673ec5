"""Narrow floats ``fp16``, ``fp10`` and ``fp8``, unscaled or under a scale per 128 elements (Gist section IV-A).

Rounding, scaling and error bounds are those of :mod:`gistkit.kernels.reference.narrow`, to the bit; the arithmetic is
in :mod:`gistkit.kernels.narrow.rounding`. Scaled, a row of a tile is a block of 128 elements. One launch either way.

``fp10`` is three codes to a 32-bit word, in planes: of W words, word i holds elements i, i+W and i+2W. W is a whole
number of scale blocks (:func:`gistkit.formats.fp10_words`). So every plane starts at an aligned address, where accesses
are 16 bytes a lane, and with a scale per block the elements of a tile of words are whole blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import SCALE_BLOCK, ceil_div, fp10_words, scale_count
from gistkit.kernels.launch.tiling import launch, launch_tiles, span, tile
from gistkit.kernels.layout import code_dtype
from gistkit.kernels.narrow.fp8_hardware import hardware_codes
from gistkit.kernels.narrow.rounding import (
    decoding_factor,
    encoding_factor,
    exponent_byte,
    finite_amax,
    finite_key,
    from_code,
    to_code,
    to_scaled_code,
)
from gistkit.kernels.warp.lanes import asm_level

BLOCK_ROWS = 32
ENCODE_ROWS, DECODE_ROWS = 16, 8  # blocks of fp10 words a program; 16 takes bf16 encodes from 90 to 95 % of copy (H200)
LINE = tl.constexpr(SCALE_BLOCK)


@triton.jit
def _codes(x, factor, FMT: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """Codes of x, by the hardware's conversion where there is one; factor is ignored unless SCALED."""
    if FMT == "fp8" and ASM >= 90:
        return hardware_codes(x, tl.broadcast_to(factor, x.shape) if SCALED else x, SCALED)
    elif SCALED:
        return to_scaled_code(x, factor, FMT)
    else:
        return to_code(x, FMT)


@triton.jit
def _encode_tile(x_ptr, codes_ptr, offs, mask, FMT: tl.constexpr, ASM: tl.constexpr):
    """Unscaled codes (int16/uint8) of x at the masked offs."""
    code = _codes(tl.load(x_ptr + offs, mask, other=0), 1.0, FMT, False, ASM)
    tl.store(codes_ptr + offs, code.to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, n, FMT: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Unscaled codes (int16/uint8) of x.

    Where n is any number (ALIGNED not set), a tile that is whole has a constant for its bound, which leaves wide
    accesses possible: item by item, the values that zvc stores took three times a copy's time on an H200.
    """
    first, _, _, offs, mask = tile(n, ROWS, ALIGNED)
    x_ptr += first
    codes_ptr += first
    if ALIGNED:
        _encode_tile(x_ptr, codes_ptr, offs, mask, FMT, ASM)
    elif n - first >= ROWS * 8:
        _encode_tile(x_ptr, codes_ptr, offs, offs < ROWS * 8, FMT, ASM)
    else:
        _encode_tile(x_ptr, codes_ptr, offs, mask, FMT, ASM)


@triton.jit
def _decode_kernel(codes_ptr, x_ptr, n, FMT: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr):
    """x of unscaled codes."""
    first, _, _, offs, mask = tile(n, ROWS, ALIGNED)
    code = tl.load(codes_ptr + first + offs, mask, other=0).to(tl.int32)
    tl.store(x_ptr + first + offs, from_code(code, 1.0, FMT, False, x_ptr.dtype.element_ty), mask)


@triton.jit
def _block_tile(n, ROWS: tl.constexpr):
    """(first element, blocks, blocks in bounds, elements, elements in bounds): a row is a block of 128 elements."""
    first, count = span(n, ROWS * 128)
    blocks = tl.arange(0, ROWS)
    offs = blocks[:, None] * 128 + tl.arange(0, 128)[None, :]
    return first, blocks, blocks * 128 < count, offs, offs < count


@triton.jit
def _encode_blocks(
    x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT: tl.constexpr, ASM: tl.constexpr
):
    """Exponent bytes of the masked blocks and the codes under them."""
    x = tl.load(x_ptr + offs, mask, other=0)
    b = exponent_byte(finite_amax(tl.max(finite_key(x), axis=1)), FMT)
    tl.store(exponents_ptr + blocks, b.to(tl.uint8), block_mask)
    code = _codes(x, encoding_factor(b, FMT)[:, None], FMT, True, ASM)
    tl.store(codes_ptr + offs, code.to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _block_encode_kernel(
    x_ptr, codes_ptr, exponents_ptr, n, FMT: tl.constexpr, ASM: tl.constexpr, ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Exponent bytes of blocks of 128 elements and the codes under them; ALIGNED as in _encode_kernel."""
    first, blocks, block_mask, offs, mask = _block_tile(n, ROWS)
    x_ptr += first
    codes_ptr += first
    exponents_ptr += first // 128
    if ALIGNED:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT, ASM)
    elif n - first >= ROWS * 128:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, blocks < ROWS, offs, offs < ROWS * 128, FMT, ASM)
    else:
        _encode_blocks(x_ptr, codes_ptr, exponents_ptr, blocks, block_mask, offs, mask, FMT, ASM)


@triton.jit
def _block_decode_kernel(codes_ptr, exponents_ptr, x_ptr, n, FMT: tl.constexpr, ROWS: tl.constexpr):
    """x of codes under one exponent byte per 128 elements."""
    first, blocks, block_mask, offs, mask = _block_tile(n, ROWS)
    b = tl.load(exponents_ptr + first // 128 + blocks, block_mask, other=127).to(tl.int32)
    code = tl.load(codes_ptr + first + offs, mask, other=0).to(tl.int32)
    x = from_code(code, decoding_factor(b, FMT)[:, None], FMT, True, x_ptr.dtype.element_ty)
    tl.store(x_ptr + first + offs, x, mask)


@triton.jit
def _plane(n, words, plane: tl.constexpr, ROWS: tl.constexpr):
    """(first element of this program's words in a plane, its blocks, those in bounds, elements, those in bounds)."""
    first_word = tl.program_id(0).to(tl.int64) * (ROWS * LINE)
    first = first_word + words.to(tl.int64) * plane
    # the last program's tile may reach past the plane
    inside = tl.minimum(tl.minimum(words - first_word, n - first), ROWS * LINE).to(tl.int32)
    rows = tl.arange(0, ROWS)
    offs = rows[:, None] * LINE + tl.arange(0, LINE)[None, :]
    return first, rows, rows * LINE < inside, offs, offs < inside


@triton.jit
def _plane_code(x_ptr, exponents_ptr, n, words, plane: tl.constexpr, SCALING: tl.constexpr, ROWS: tl.constexpr):
    """One plane's part of this program's words, and its exponent bytes per block; int16 x are codes already."""
    first, rows, row_mask, offs, mask = _plane(n, words, plane, ROWS)
    x = tl.load(x_ptr + first + offs, mask, other=0)
    if x.dtype == tl.int16:
        code = x.to(tl.int32) & 0x3FF
    elif SCALING == "none":
        code = to_code(x, "fp10")
    else:
        b = exponent_byte(finite_amax(tl.max(finite_key(x), axis=1)), "fp10")
        tl.store(exponents_ptr + first // LINE + rows, b.to(tl.uint8), row_mask)
        code = to_scaled_code(x, encoding_factor(b, "fp10")[:, None], "fp10")
    return code << (10 * plane)


@triton.jit
def _word_tile(words, ROWS: tl.constexpr):
    first, _, row_mask, offs, _ = _plane(words, words, 0, ROWS)
    return first, offs, tl.broadcast_to(row_mask[:, None], (ROWS, LINE))


@triton.jit
def _pack10_kernel(x_ptr, words_ptr, exponents_ptr, n, words, SCALING: tl.constexpr, ROWS: tl.constexpr):
    """fp10 words of x (values, or int16 codes), and exponent bytes per block."""
    word = _plane_code(x_ptr, exponents_ptr, n, words, 0, SCALING, ROWS)
    word |= _plane_code(x_ptr, exponents_ptr, n, words, 1, SCALING, ROWS)
    word |= _plane_code(x_ptr, exponents_ptr, n, words, 2, SCALING, ROWS)
    first, offs, mask = _word_tile(words, ROWS)
    tl.store(words_ptr + first + offs, word, mask)


@triton.jit
def _unpack10_kernel(words_ptr, exponents_ptr, x_ptr, n, words, SCALING: tl.constexpr, ROWS: tl.constexpr):
    """x of fp10 words."""
    first, offs, mask = _word_tile(words, ROWS)
    word = tl.load(words_ptr + first + offs, mask, other=0)
    for plane in tl.static_range(3):
        first, rows, row_mask, offs, mask = _plane(n, words, plane, ROWS)
        code = word >> (10 * plane)
        if SCALING == "none":
            x = from_code(code, 1.0, "fp10", False, x_ptr.dtype.element_ty)
        else:
            b = tl.load(exponents_ptr + first // LINE + rows, row_mask, other=127).to(tl.int32)
            x = from_code(code, decoding_factor(b, "fp10")[:, None], "fp10", True, x_ptr.dtype.element_ty)
        tl.store(x_ptr + first + offs, x, mask)


def narrow_encode(x: torch.Tensor, fmt: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, uint8[scale_count(n, scaling)] exponent bytes) of x fp32/bf16/fp16[n]. Does not synchronise.

    Codes: int16[n] for ``fp16``, int32[fp10_words(n)] for ``fp10``, uint8[n] for ``fp8``.
    """
    n = x.numel()
    exponents = torch.empty((scale_count(n, scaling),), dtype=torch.uint8, device=x.device)
    if fmt == "fp10":
        return _pack10(x, exponents, scaling), exponents
    codes = torch.empty((n,), dtype=code_dtype(fmt), device=x.device)
    if scaling == "none":
        launch_tiles(_encode_kernel, x, x, codes, FMT=fmt, ASM=asm_level(x))
    else:
        programs, constants = ceil_div(n, SCALE_BLOCK * BLOCK_ROWS), {"ROWS": BLOCK_ROWS, "ALIGNED": n % 16 == 0}
        launch(_block_encode_kernel, programs, x, x, codes, exponents, n, FMT=fmt, ASM=asm_level(x), **constants)
    return codes, exponents


def narrow_decode(
    codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, fmt: str, scaling: str
) -> torch.Tensor:
    """dtype[n] from what :func:`narrow_encode` made with the same fmt and scaling. Does not synchronise."""
    if fmt == "fp10":
        return _unpack10(codes, exponents, n, dtype, scaling)
    x = torch.empty((n,), dtype=dtype, device=codes.device)
    if scaling == "none":
        launch_tiles(_decode_kernel, x, codes, x, FMT=fmt)
    else:
        programs = ceil_div(n, SCALE_BLOCK * BLOCK_ROWS)
        launch(_block_decode_kernel, programs, x, codes, exponents, x, n, FMT=fmt, ROWS=BLOCK_ROWS)
    return x


def fp10_pack(codes: torch.Tensor) -> torch.Tensor:
    """int32[fp10_words(n)] words in plane layout from unpacked int16[n] codes. Does not synchronise."""
    return _pack10(codes, codes, "none")


def _pack10(x: torch.Tensor, exponents: torch.Tensor, scaling: str) -> torch.Tensor:
    """int32[fp10_words(n)] words of x fp32/bf16/fp16[n], or of int16[n] codes.

    exponents are written but where scaling is ``none``.
    """
    n, length = x.numel(), fp10_words(x.numel())
    words = torch.empty((length,), dtype=torch.int32, device=x.device)
    programs = ceil_div(length, ENCODE_ROWS * SCALE_BLOCK)
    launch(_pack10_kernel, programs, x, x, words, exponents, n, length, SCALING=scaling, ROWS=ENCODE_ROWS)
    return words


def _unpack10(words: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """dtype[n] of the words that :func:`_pack10` made of values."""
    x = torch.empty((n,), dtype=dtype, device=words.device)
    programs = ceil_div(words.numel(), DECODE_ROWS * SCALE_BLOCK)
    launch(_unpack10_kernel, programs, x, words, exponents, x, n, words.numel(), SCALING=scaling, ROWS=DECODE_ROWS)
    return x
