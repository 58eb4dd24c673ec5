"""Narrow codes of eight neighbouring elements, to and from 32-bit words of patterns, by rounding's rules to the bit.

``fp8`` of 16-bit elements is converted to by the hardware from sm_90 on, which on an H200 takes 0.76 to 0.87 of the
time of integers. ``cvt.rn.satfinite`` rounds to nearest even with subnormals kept and clamps infinities, which is the
scaled form; of the unscaled one, what lies below 2**-6 - 2**-11, the least value that rounds up to the least normal,
becomes 0 first. NaN comes out as 0x7F, so the sign is put in as a bit. All else (fp32 elements, the other formats,
decoding) goes through rounding.py one by one: by packed instructions it took 0.90 to 1.0 of the time.
"""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import from_code, to_code
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octets import item_of

# two fp32 elements of the word m
_WIDEN = {
    "bf16": "shl.b32 lo, m, 16; and.b32 hi, m, 0xFFFF0000; ",
    "f16": "mov.b32 {l, h}, m; cvt.f32.f16 lo, l; cvt.f32.f16 hi, h; ",
}
_LEAST = {"bf16": "0x3C783C78", "f16": "0x23C023C0"}


def _to_fp8(kind: str, scaled: bool = False) -> str:
    """PTX: $0 = four codes of the words $1 and $2, times the factors $3 to $6 where scaled."""
    text = "{ .reg .b32 m, f, lo, hi; .reg .b16 l, h, c<2>; "
    for i in range(2):
        text += f"and.b32 m, ${1 + i}, 0x7FFF7FFF; "
        if scaled:
            text += f"{_WIDEN[kind]}mul.rn.f32 lo, lo, ${3 + 2 * i}; mul.rn.f32 hi, hi, ${4 + 2 * i}; "
        else:
            text += f"mov.b32 f, {_LEAST[kind]}; set.geu.u32.{kind}x2 f, m, f; and.b32 m, m, f; "
            text += _WIDEN[kind] if kind == "bf16" else ""
        direct = kind == "f16" and not scaled
        text += f"cvt.rn.satfinite.e4m3x2.{'f16x2' if direct else 'f32'} c{i}, {'m' if direct else 'hi, lo'}; "
    return text + "mov.b32 m, {c0, c1}; prmt.b32 f, $1, $2, 0x7531; and.b32 f, f, 0x80808080; or.b32 $0, m, f; }"


_BF16, _F16 = tl.constexpr(_to_fp8("bf16")), tl.constexpr(_to_fp8("f16"))
_SCALED_BF16, _SCALED_F16 = tl.constexpr(_to_fp8("bf16", True)), tl.constexpr(_to_fp8("f16", True))


@triton.jit
def hardware_codes(x, factor, SCALED: tl.constexpr):
    """uint8 fp8 codes of x bf16/fp16, of whose last axis a lane holds a multiple of 4; times factor if SCALED."""
    if SCALED:
        scaled: tl.constexpr = _SCALED_BF16 if x.dtype == tl.bfloat16 else _SCALED_F16
        return tl.inline_asm_elementwise(scaled, "=r,r,r,r,r,r,r", [x, factor], tl.uint8, is_pure=True, pack=4)
    else:
        unscaled: tl.constexpr = _BF16 if x.dtype == tl.bfloat16 else _F16
        return tl.inline_asm_elementwise(unscaled, "=r,r,r", [x], tl.uint8, is_pure=True, pack=4)


@triton.jit
def hardware_word(w, first: tl.constexpr, factor, DTYPE: tl.constexpr):
    """Four fp8 codes, a word, of the bf16 or fp16 elements of w[first] and w[first + 1], times factor."""
    text: tl.constexpr = _SCALED_BF16 if DTYPE == tl.bfloat16 else _SCALED_F16
    operands = w[first : first + 2] + (factor, factor, factor, factor)
    return tl.inline_asm_elementwise(text, "=r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def narrow_octet(words, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words of an octet's unscaled codes (uint8 for fp8, int16 else) from those of its patterns; ``raw``: the same."""
    PER_WORD: tl.constexpr = 4 if FMT == "fp8" else 2
    codes = ()
    if FMT == "raw":
        codes += words
    elif ASM >= 90 and FMT == "fp8" and DTYPE != tl.float32:
        text: tl.constexpr = _BF16 if DTYPE == tl.bfloat16 else _F16
        for w in tl.static_range(0, 4, 2):
            code = tl.inline_asm_elementwise(text, "=r,r,r", words[w : w + 2], dtype=tl.int32, is_pure=True, pack=1)
            codes += (code,)
    else:
        for first in tl.static_range(0, 8, PER_WORD):
            word = tl.zeros((LANES,), tl.int32)
            for i in tl.static_range(PER_WORD):
                item = item_of(words, 0, first + i, DTYPE.primitive_bitwidth // 8)
                word |= to_code(item.to(DTYPE, bitcast=True), FMT) << (i * 32 // PER_WORD)
            codes += (word,)
    return codes


@triton.jit
def widen_octet(
    words, first: tl.constexpr, WORDS: tl.constexpr, factor, FMT: tl.constexpr, SCALED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Words of an octet's patterns from the WORDS words of its codes from words[first] on, times factor (fp32) where
    SCALED. Codes lie as narrow_octet leaves them, but fp10's 6 bits higher."""
    PER_WORD: tl.constexpr = 4 if FMT == "fp8" else 2
    BELOW: tl.constexpr = 6 if FMT == "fp10" else 0
    items = ()
    if FMT == "raw":
        items += words[first : first + WORDS]
    else:
        for w in tl.static_range(first, first + WORDS):
            for i in tl.static_range(0, PER_WORD, 4 // (DTYPE.primitive_bitwidth // 8)):
                item = from_code(words[w] >> (BELOW + i * 32 // PER_WORD), factor, FMT, SCALED, DTYPE)
                if DTYPE == tl.float32:
                    items += (item.to(tl.int32, bitcast=True),)
                else:
                    low = item.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                    item = from_code(words[w] >> (BELOW + (i + 1) * 32 // PER_WORD), factor, FMT, SCALED, DTYPE)
                    items += (low | (item.to(tl.int16, bitcast=True).to(tl.int32) << 16),)
    return items
