"""Narrow codes of eight neighbouring elements, to and from 32-bit words of patterns, by rounding's rules to the bit.

From sm_90 on two 16-bit elements share most instructions, and e4m3 (``fp8``) is converted by the hardware. Magnitudes
are converted, signs put in as bits. The hardware keeps subnormal codes, unscaled formats have none: what lies below
LEAST, the least value that rounds up to the least normal, becomes 0 first. NaN comes out of a conversion as 0x7FFF (of
e4m3 as 0x7F), whichever it was, and a minimum of integers makes it the format's own. Elsewhere, and for formats of fp32
elements other than fp8, rounding.py converts one by one.
"""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import from_code, to_code
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octets import item_of

# patterns, twice a word, of 2**-6 - 2**-11 (fp8), 2**-14 - 2**-20 (fp10) and 2**-14 - 2**-26 (fp16, above whose largest
# neighbour below 2**-14 neither bf16 nor fp16 has a value)
_LEAST = {
    ("bf16", "fp8"): "0x3C783C78",
    ("bf16", "fp10"): "0x387C387C",
    ("bf16", "fp16"): "0x38803880",
    ("f16", "fp8"): "0x23C023C0",
    ("f16", "fp10"): "0x03F003F0",
    ("f16", "fp16"): "0x04000400",
}
_WIDE_LO_HI = "shl.b32 lo, m, 16; and.b32 hi, m, 0xFFFF0000; "


def _magnitudes(word: str, kind: str, fmt: str) -> str:
    """PTX: m = |word|, 0 below LEAST; NaN stays."""
    least = _LEAST[kind, fmt]
    return f"and.b32 m, {word}, 0x7FFF7FFF; mov.b32 f, {least}; set.geu.u32.{kind}x2 f, m, f; and.b32 m, m, f; "


def _to_fp8(kind: str) -> str:
    """PTX: $0 = four codes of the words $1 and $2."""
    text = "{ .reg .b32 m, f, lo, hi; .reg .b16 c<2>; "
    for i in range(2):
        text += _magnitudes(f"${1 + i}", kind, "fp8")
        if kind == "bf16":
            text += _WIDE_LO_HI + f"cvt.rn.satfinite.e4m3x2.f32 c{i}, hi, lo; "
        else:
            text += f"cvt.rn.satfinite.e4m3x2.f16x2 c{i}, m; "
    return text + "mov.b32 m, {c0, c1}; prmt.b32 f, $1, $2, 0x7531; and.b32 f, f, 0x80808080; or.b32 $0, m, f; }"


def _to_fp8_of_fp32() -> str:
    """PTX: $0 = four codes of the words $1 to $4."""
    text = "{ .reg .pred p; .reg .b32 m<4>, f, g; .reg .b16 c<2>; "
    for i in range(4):
        text += f"and.b32 m{i}, ${1 + i}, 0x7FFFFFFF; setp.geu.f32 p, m{i}, 0f3C780000; selp.b32 m{i}, m{i}, 0, p; "
    text += "cvt.rn.satfinite.e4m3x2.f32 c0, m1, m0; cvt.rn.satfinite.e4m3x2.f32 c1, m3, m2; mov.b32 m0, {c0, c1}; "
    text += "prmt.b32 f, $1, $2, 0x0073; prmt.b32 g, $3, $4, 0x7300; and.b32 f, f, 0x8080; and.b32 g, g, 0x80800000; "
    return text + "or.b32 m0, m0, f; or.b32 $0, m0, g; }"


def _to_fp16(kind: str) -> str:
    """PTX: $0 = two codes of the word $1, clamped to the largest finite one."""
    text = "{ .reg .b32 m, f, lo, hi; .reg .b16 l, h; " + _magnitudes("$1", kind, "fp16")
    if kind == "bf16":
        text += _WIDE_LO_HI + "min.NaN.f32 lo, lo, 0f477FE000; min.NaN.f32 hi, hi, 0f477FE000; "
        text += "cvt.rn.f16x2.f32 m, hi, lo; "
    else:
        text += "mov.b32 f, 0x7BFF7BFF; min.NaN.f16x2 m, m, f; "
    return text + "mov.b32 f, 0x7E007E00; min.u16x2 m, m, f; and.b32 f, $1, 0x80008000; or.b32 $0, m, f; }"


def _to_fp10(kind: str) -> str:
    """PTX: $0 = two codes of the word $1: the mantissa rounded to 4 bits, for bf16 with 112 taken off the exponent."""
    shift, floor, half, largest = (3, 0x3800, 3, 0x4778) if kind == "bf16" else (6, 0, 0x1F, 0x7BC0)
    text = "{ .reg .b32 m, f, k, t; and.b32 m, $1, 0x7FFF7FFF; "
    text += f"mov.b32 k, {_LEAST[kind, 'fp10']}; set.geu.u32.{kind}x2 f, m, k; "
    text += f"mov.b32 k, {largest * 0x10001:#x}; min.NaN.{kind}x2 m, m, k; "
    if floor:
        text += f"mov.b32 k, {floor * 0x10001:#x}; max.u16x2 m, m, k; "
    text += f"shr.u32 t, m, {shift}; and.b32 t, t, 0x00010001; add.u32 t, t, m; "
    text += f"add.u32 t, t, {(half - floor) * 0x10001 % 2**32:#x}; "
    text += f"shr.u32 t, t, {shift}; and.b32 t, t, {(0xFFFF >> shift) * 0x10001:#x}; "
    text += "mov.b32 k, 0x01F801F8; min.u16x2 t, t, k; and.b32 t, t, f; "
    return text + "shr.u32 k, $1, 6; and.b32 k, k, 0x02000200; or.b32 $0, t, k; }"


FP8_BF16, FP8_F16 = tl.constexpr(_to_fp8("bf16")), tl.constexpr(_to_fp8("f16"))
FP8_FP32 = tl.constexpr(_to_fp8_of_fp32())
_FP16_BF16, _FP16_F16 = tl.constexpr(_to_fp16("bf16")), tl.constexpr(_to_fp16("f16"))
_FP10_BF16, _FP10_F16 = tl.constexpr(_to_fp10("bf16")), tl.constexpr(_to_fp10("f16"))


@triton.constexpr_function
def _from_word(fmt, dtype, scaled):
    """PTX: $0 (and $1 for fp8) = two elements each of the codes of the next operand, times the last where scaled."""
    count = 2 if fmt == "fp8" else 1
    source, factor = f"${count}", f"${count + 1}"
    text = "{ .reg .b32 m, s, k; .reg .f32 u, v; .reg .b16 l, h, c<2>; "
    if fmt == "fp8":
        text += f"and.b32 m, {source}, 0x7F7F7F7F; mov.b32 {{c0, c1}}, m; "
    for i in range(count):
        if fmt == "fp8":
            text += f"cvt.rn.f16x2.e4m3x2 m, c{i}; prmt.b32 s, {source}, 0, {('0x1404', '0x3424')[i]}; "
        elif fmt == "fp10":
            text += f"mov.b32 s, {source}; and.b32 m, s, 0x7FC07FC0; "
        else:
            text += f"mov.b32 s, {source}; and.b32 m, s, 0x7FFF7FFF; "
        # bf16 holds fp8's and fp10's values, so their product with a power of two is rounded once there
        pairs = scaled and dtype == "bf16" and fmt != "fp16"
        if scaled or dtype == "bf16":
            text += "mov.b32 {l, h}, m; cvt.f32.f16 u, l; cvt.f32.f16 v, h; "
            if scaled and not pairs:
                largest = "0f7F7F0000" if dtype == "bf16" else "0f477FE000"
                for x in "uv":
                    text += f"mul.rn.f32 {x}, {x}, {factor}; min.NaN.f32 {x}, {x}, {largest}; "
            text += f"cvt.rn.{dtype}x2.f32 m, v, u; "
            if pairs:
                text += f"mov.b32 k, {factor}; prmt.b32 k, k, k, 0x3232; mul.rn.bf16x2 m, m, k; "
                text += "mov.b32 k, 0x7F7F7F7F; min.NaN.bf16x2 m, m, k; "
        elif fmt != "fp8":
            # any NaN becomes 0x7FFF; infinity, the least of what is not to change, stays
            text += "mov.b32 $0, 0x7C007C00; min.NaN.f16x2 m, m, $0; "
        nan = "0x7FC07FC0" if dtype == "bf16" else "0x7E007E00"
        text += f"mov.b32 ${i}, {nan}; min.u16x2 m, m, ${i}; and.b32 s, s, 0x80008000; or.b32 ${i}, m, s; "
    return text + "}"


@triton.jit
def _four_fp8(words, first: tl.constexpr, DTYPE: tl.constexpr):
    if DTYPE == tl.float32:
        return tl.inline_asm_elementwise(
            FP8_FP32, "=r,r,r,r,r", [words[first], words[first + 1], words[first + 2], words[first + 3]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        text: tl.constexpr = FP8_BF16 if DTYPE == tl.bfloat16 else FP8_F16
        return tl.inline_asm_elementwise(
            text, "=r,r,r", [words[first], words[first + 1]], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def narrow_octet(words, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Words of an octet's unscaled codes (uint8 for fp8, int16 else) from those of its patterns; ``raw``: the same."""
    PER_WORD: tl.constexpr = 4 if FMT == "fp8" else 2
    codes = ()
    if FMT == "raw":
        codes += words
    elif ASM >= 90 and (FMT == "fp8" or DTYPE != tl.float32):
        if FMT == "fp8":
            codes += (_four_fp8(words, 0, DTYPE), _four_fp8(words, len(words) // 2, DTYPE))
        else:
            if FMT == "fp16":
                text: tl.constexpr = _FP16_BF16 if DTYPE == tl.bfloat16 else _FP16_F16
            else:
                text: tl.constexpr = _FP10_BF16 if DTYPE == tl.bfloat16 else _FP10_F16
            for w in tl.static_range(4):
                codes += (tl.inline_asm_elementwise(text, "=r,r", [words[w]], dtype=tl.int32, is_pure=True, pack=1),)
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
    DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Words of an octet's patterns from the WORDS words of its codes from words[first] on, times factor (fp32) where
    SCALED. Codes lie as narrow_octet leaves them, but fp10's 6 bits higher."""
    PER_WORD: tl.constexpr = 4 if FMT == "fp8" else 2
    BELOW: tl.constexpr = 6 if FMT == "fp10" else 0
    items = ()
    if FMT == "raw":
        for w in tl.static_range(WORDS):
            items += (words[first + w],)
    elif ASM >= 90 and DTYPE != tl.float32:
        text: tl.constexpr = _from_word(FMT, "bf16" if DTYPE == tl.bfloat16 else "f16", SCALED)
        RESULTS: tl.constexpr = 2 if FMT == "fp8" else 1
        registers: tl.constexpr = "=&r," * RESULTS + ("r,f" if SCALED else "r")
        for w in tl.static_range(first, first + WORDS):
            operands = (words[w],)
            if SCALED:
                operands += (factor,)
            items += tl.inline_asm_elementwise(
                text, registers, operands, dtype=(tl.int32,) * RESULTS, is_pure=True, pack=1
            )
    else:
        for w in tl.static_range(first, first + WORDS):
            for i in tl.static_range(0, PER_WORD, 4 // (DTYPE.primitive_bitwidth // 8)):
                code = words[w] >> (BELOW + i * 32 // PER_WORD)
                item = from_code(code, factor, FMT, SCALED, DTYPE)
                if DTYPE == tl.float32:
                    items += (item.to(tl.int32, bitcast=True),)
                else:
                    low = item.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                    item = from_code(words[w] >> (BELOW + (i + 1) * 32 // PER_WORD), factor, FMT, SCALED, DTYPE)
                    items += (low | (item.to(tl.int16, bitcast=True).to(tl.int32) << 16),)
    return items
