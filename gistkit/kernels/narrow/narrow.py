"""Narrow floats ``fp16``, ``fp10`` and ``fp8``, unscaled or under a scale per 128 elements (Gist section IV-A).

Rounding, scaling and error bounds are those of :mod:`gistkit.kernels.reference.narrow`, to the bit; the arithmetic is
in :mod:`gistkit.kernels.narrow.rounding`. Scaled, a row of a tile is a block of 128 elements. One launch either way.

``fp10`` packs three codes to a word in planes (:mod:`gistkit.formats`). Every plane starts at an aligned address, where
accesses are 16 bytes a lane, and with a scale per block the elements of a tile of words are whole blocks.

``fp8`` is encoded by the hardware's conversion to e4m3 (sm_89 on), four elements at a time: ``cvt.rn.satfinite`` rounds
to nearest even with subnormals kept and clamps infinities, which is the scaled form; for the unscaled one see
:mod:`gistkit.kernels.warp.octet_codes`. NaN comes out as 0x7F, so the sign is put in as a bit. An element takes 8.8
instructions in place of 17.0 (bf16, a scale per block, sm_90) and 5.0 in place of 13.8 (unscaled).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gistkit.formats import SCALE_BLOCK, ceil_div, fp10_words, scale_count
from gistkit.kernels.launch.tiling import ROWS, launch, tile
from gistkit.kernels.layout import code_dtype, padded
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
from gistkit.kernels.warp.octet_codes import FP8_BF16, FP8_F16, FP8_FP32

BLOCK_ROWS = 32
ENCODE_ROWS, DECODE_ROWS = 16, 8  # blocks of fp10 words a program; 16 takes bf16 encodes from 90 to 95 % of copy (H200)
LINE = tl.constexpr(SCALE_BLOCK)


_WIDEN = {
    "bf16": "shl.b32 a, $1, 16; and.b32 b, $1, 0xFFFF0000; shl.b32 c, $2, 16; and.b32 d, $2, 0xFFFF0000; ",
    "fp16": "mov.b32 {p, q}, $1; cvt.f32.f16 a, p; cvt.f32.f16 b, q; "
    "mov.b32 {p, q}, $2; cvt.f32.f16 c, p; cvt.f32.f16 d, q; ",
    "fp32": "mov.b32 a, $1; mov.b32 b, $2; mov.b32 c, $3; mov.b32 d, $4; ",
}
_SIGNS = {
    2: "prmt.b32 b, $1, $2, 0x7531; and.b32 b, b, 0x80808080; ",
    4: "prmt.b32 b, $1, $2, 0x0073; prmt.b32 c, $3, $4, 0x7300; and.b32 b, b, 0x8080; and.b32 c, c, 0x80800000; "
    "or.b32 b, b, c; ",
}


def _scaled(kind: str) -> str:
    """PTX: $0 = four codes of the elements in the first registers, each times its factor in the last four."""
    registers = 4 if kind == "fp32" else 2
    text = "{ .reg .b32 a, b, c, d; .reg .b16 p, q; " + _WIDEN[kind]
    for i, register in enumerate("abcd"):
        text += f"mul.rn.f32 {register}, {register}, ${1 + registers + i}; "
    text += "cvt.rn.satfinite.e4m3x2.f32 p, b, a; cvt.rn.satfinite.e4m3x2.f32 q, d, c; mov.b32 a, {p, q}; "
    return text + _SIGNS[registers] + "or.b32 $0, a, b; }"


_BF16, _FP16, _FP32 = (tl.constexpr(_scaled(kind)) for kind in ("bf16", "fp16", "fp32"))


@triton.jit
def _hardware_codes(x, factor, SCALED: tl.constexpr):
    """uint8 fp8 codes of x fp32/bf16/fp16, of whose last axis a lane holds a multiple of 4; times factor if SCALED."""
    if x.dtype == tl.float32:
        if SCALED:
            return tl.inline_asm_elementwise(_FP32, "=r,r,r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=4)
        else:
            return tl.inline_asm_elementwise(FP8_FP32, "=r,r,r,r,r", [x], tl.uint8, is_pure=True, pack=4)
    else:
        if SCALED:
            scaled: tl.constexpr = _BF16 if x.dtype == tl.bfloat16 else _FP16
            return tl.inline_asm_elementwise(scaled, "=r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=4)
        else:
            unscaled: tl.constexpr = FP8_BF16 if x.dtype == tl.bfloat16 else FP8_F16
            return tl.inline_asm_elementwise(unscaled, "=r,r,r", [x], tl.uint8, is_pure=True, pack=4)


@triton.jit
def _codes(x, factor, FMT: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr):
    """Codes of x, by the hardware's conversion where there is one; factor is ignored unless SCALED."""
    if FMT == "fp8" and ASM >= 90:
        return _hardware_codes(x, tl.broadcast_to(factor, x.shape) if SCALED else x, SCALED)
    elif SCALED:
        return to_scaled_code(x, factor, FMT)
    else:
        return to_code(x, FMT)


@triton.jit
def _encode_tile(
    x_ptr, codes_ptr, exponents_ptr, rows, row_mask, offs, mask, FMT: tl.constexpr, SCALED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Codes of the masked elements, if SCALED with an exponent byte a row."""
    x, factor = tl.load(x_ptr + offs, mask, other=0), 1.0
    if SCALED:
        b = exponent_byte(finite_amax(tl.max(finite_key(x), axis=1)), FMT)
        tl.store(exponents_ptr + rows, b.to(tl.uint8), row_mask)
        factor = encoding_factor(b, FMT)[:, None]
    code = _codes(x, factor, FMT, SCALED, ASM)
    tl.store(codes_ptr + offs, code.to(codes_ptr.dtype.element_ty), mask)


@triton.jit
def _encode_kernel(
    x_ptr, codes_ptr, exponents_ptr, n, FMT: tl.constexpr, SCALED: tl.constexpr, ASM: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Codes (int16/uint8) of x; if SCALED a row is a block of 128 elements. ALIGNED: n is a multiple of 16. Else a
    whole tile has a constant bound, so that accesses are wide: item by item zvc's values took thrice a copy's time."""
    first, rows, row_mask, offs, mask = tile(n, ROWS, False, COLUMNS)
    x_ptr += first
    codes_ptr += first
    exponents_ptr += first // COLUMNS
    if ALIGNED:
        _encode_tile(x_ptr, codes_ptr, exponents_ptr, rows, row_mask, offs, mask, FMT, SCALED, ASM)
    elif n - first >= ROWS * COLUMNS:
        all_rows, all_offs = rows < ROWS, offs < ROWS * COLUMNS
        _encode_tile(x_ptr, codes_ptr, exponents_ptr, rows, all_rows, offs, all_offs, FMT, SCALED, ASM)
    else:
        _encode_tile(x_ptr, codes_ptr, exponents_ptr, rows, row_mask, offs, mask, FMT, SCALED, ASM)


@triton.jit
def _decode_kernel(
    codes_ptr, exponents_ptr, x_ptr, n, FMT: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """x of codes, if SCALED under an exponent byte a row."""
    first, rows, row_mask, offs, mask = tile(n, ROWS, False, COLUMNS)
    code, factor = tl.load(codes_ptr + first + offs, mask, other=0).to(tl.int32), 1.0
    if SCALED:
        b = tl.load(exponents_ptr + first // COLUMNS + rows, row_mask, other=127).to(tl.int32)
        factor = decoding_factor(b, FMT)[:, None]
    tl.store(x_ptr + first + offs, from_code(code, factor, FMT, SCALED, x_ptr.dtype.element_ty), mask)


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
    """As the oracle has it (reference/narrow.py). Does not synchronise."""
    n = x.numel()
    exponents = torch.empty((scale_count(n, scaling),), dtype=torch.uint8, device=x.device)
    if fmt == "fp10":
        return _pack10(x, exponents, scaling), exponents
    codes = padded(n, code_dtype(fmt), x.device)
    shape = _shape(x, scaling)
    programs, constants = ceil_div(n, shape["ROWS"] * shape["COLUMNS"]), {"ALIGNED": n % 16 == 0, **shape}
    launch(_encode_kernel, programs, x, x, codes, exponents, n, FMT=fmt, ASM=asm_level(x), **constants)
    return codes, exponents


def _shape(x: torch.Tensor, scaling: str) -> dict[str, Any]:
    """The tile of an unpacked format; x: what is not the codes."""
    scaled = scaling != "none"
    rows, columns = (BLOCK_ROWS, SCALE_BLOCK) if scaled else (ROWS[x.element_size()], 8)
    return {"SCALED": scaled, "ROWS": rows, "COLUMNS": columns}


def narrow_decode(
    codes: torch.Tensor, exponents: torch.Tensor, n: int, dtype: torch.dtype, fmt: str, scaling: str
) -> torch.Tensor:
    """As the oracle has it. Does not synchronise."""
    x = torch.empty((n,), dtype=dtype, device=codes.device)
    if fmt == "fp10":
        words, programs = codes.numel(), ceil_div(codes.numel(), DECODE_ROWS * SCALE_BLOCK)
        launch(_unpack10_kernel, programs, x, codes, exponents, x, n, words, SCALING=scaling, ROWS=DECODE_ROWS)
        return x
    shape = _shape(x, scaling)
    programs = ceil_div(n, shape["ROWS"] * shape["COLUMNS"])
    launch(_decode_kernel, programs, x, codes, exponents, x, n, FMT=fmt, **shape)
    return x


def fp10_pack(codes: torch.Tensor) -> torch.Tensor:
    """int32[fp10_words(n)] words in plane layout from unpacked int16[n] codes. Does not synchronise."""
    return _pack10(codes, codes, "none")


def _pack10(x: torch.Tensor, exponents: torch.Tensor, scaling: str) -> torch.Tensor:
    """int32[fp10_words(n)] of x fp32/bf16/fp16[n], or int16[n] codes; exponents are written unless scaling is none."""
    n, length = x.numel(), fp10_words(x.numel())
    words = torch.empty((length,), dtype=torch.int32, device=x.device)
    programs = ceil_div(length, ENCODE_ROWS * SCALE_BLOCK)
    launch(_pack10_kernel, programs, x, x, words, exponents, n, length, SCALING=scaling, ROWS=ENCODE_ROWS)
    return words
