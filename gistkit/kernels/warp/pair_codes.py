"""Scaled ``fp10`` codes of bf16 elements, two to a word: one packed instruction where others take two.

To the bit what :mod:`gistkit.kernels.narrow.rounding` gives one by one, in 15 instructions an element in place of 19.5
with a
scale per block, 11 in place of 15.5 per tensor (sm_90). bf16 itself is fine enough: a product with a power of two is
exact (but for what is far below fp10's least step), and in value + 8 E, with E the power of two at or below the value,
one step of bf16 is one of fp10. A minimum that ignores NaN puts a number in its place, whose code is the NaN's.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import encoding_factor, finite_amax, finite_key, to_scaled_code


def _twice(pattern: int) -> str:
    return f"{pattern * 0x10001:#010x}"


# $0: code magnitudes of the magnitudes $1 times $2. The clamp at 63488, then 98304 for NaN; E is 2**-14 or more; the
# steps, to which E's exponent over 2**-14's is added.
_CODES = tl.constexpr(
    "{ .reg .b32 m, e, k; "
    f"mov.b32 k, {_twice(0x8000)}; fma.rn.bf16x2 m, $1, $2, k; "
    f"mov.b32 k, {_twice(0x4778)}; min.NaN.bf16x2 m, m, k; mov.b32 k, {_twice(0x47C0)}; min.bf16x2 m, m, k; "
    f"and.b32 e, m, {_twice(0x7F80)}; mov.b32 k, {_twice(0x3880)}; max.bf16x2 e, e, k; "
    f"mov.b32 k, {_twice(0x4100)}; fma.rn.bf16x2 m, e, k, m; "
    f"and.b32 m, m, {_twice(0x007F)}; shr.u32 e, e, 3; add.u32 m, m, e; sub.u32 $0, m, {_twice(0x0710)}; }}"
)
# $0: the magnitudes $1, NaN for infinities
_FINITE = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0; fma.rn.bf16x2 $0, $1, z, $1; }")
# $0: the larger of each half; a NaN is none
_LARGER = tl.constexpr("max.bf16x2 $0, $1, $2;")


@triton.jit
def _halves(words):
    """bf16 lower and upper halves of int32 words."""
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pair_amax(words, ASM: tl.constexpr):
    """int32[ROWS] fp32 patterns of the largest finite magnitudes in rows of int32 [ROWS, 64] words; 0 where none is."""
    if ASM:
        ROWS: tl.constexpr = words.shape[0]
        finite = tl.inline_asm_elementwise(_FINITE, "=r,r", [words & 0x7FFF7FFF], dtype=tl.int32, is_pure=True, pack=1)
        evens, odds = tl.split(tl.reshape(finite, (ROWS, 32, 2)))
        evens, odds = tl.split(tl.reshape(_larger(evens, odds), (ROWS, 16, 2)))
        pairs = _larger(_larger(evens, odds), tl.zeros((ROWS, 16), tl.int32))
        return tl.max(tl.maximum(pairs & 0x7FFF0000, pairs << 16), axis=1)
    else:
        low, high = _halves(words)
        return finite_amax(tl.max(tl.maximum(finite_key(low), finite_key(high)), axis=1))


@triton.jit
def pair_codes(words, b, ASM: tl.constexpr):
    """Codes of the words' elements under exponent bytes b (int32), in the same halves."""
    if ASM:
        factor = tl.broadcast_to(((15 + 254 - b) << 7) * 0x10001, words.shape)
        codes = tl.inline_asm_elementwise(
            _CODES, "=r,r,r", [words & 0x7FFF7FFF, factor], dtype=tl.int32, is_pure=True, pack=1
        )
        return codes | ((words >> 6) & 0x02000200)
    else:
        low, high = _halves(words)
        factor = encoding_factor(b, "fp10")
        return to_scaled_code(low, factor, "fp10") | (to_scaled_code(high, factor, "fp10") << 16)
