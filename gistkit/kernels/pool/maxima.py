"""Maxima of a pool's windows (see forward.py for the rules), as fp32 values beside the codes of their positions or, of
16-bit values, by int32 keys: one integer maximum keeps a value and its place in the window.

A key's high half is the value's bf16 or fp16 pattern in the order of integers, where zeros are equal and a NaN is
NAN | order, so that the last one of a window wins. Its low half begins with the order turned round, so that the first
of equal values wins, and ends with a byte for the caller: the place as the window's code. Overlapping windows share
keys. The bits that a key does not keep, a NaN's and a zero's sign, are read again where the maximum is.
"""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import not_positive, widen

NAN = tl.constexpr(0x7FE0)
"""The high halves from here on are NaN: above both infinities, with room for 32 places."""
FIRST = tl.constexpr(0xFF)
"""The first byte of a low half that precedes every place's."""
LEAST_POSITIVE = tl.constexpr(1 << 16)
"""The key of a positive value or a NaN is at least this."""


@triton.constexpr_function
def _assembly(bf16, relu, sm):
    """PTX for the keys $0 and $1 of two packed values $2, by packed low halves $3 and packed high halves $4 of NaN. The
    maximum with 0 and the sum with 0 both make +0 of -0.0 and 0x7FFF of any NaN."""
    dtype, one, spare = ("bf16", "0x3f803f80", "0x007f007f") if bf16 else ("f16", "0x3c003c00", "0x03ff03ff")
    signs = "prmt.b32 s, s, s, 0xbb99;"
    if relu:
        text = [f"mov.b32 s, 0; max.NaN.{dtype}x2 t, $2, s;"]
    else:
        text = [f"mov.b32 s, 0; mov.b32 u, {one}; fma.rn.{dtype}x2 t, $2, u, s;"]
    if sm < 90:
        # adding spare carries a NaN into the sign, which of positive values nothing else does
        text.append(f"add.u32 s, t, {spare}; {signs}")
        if not relu:
            text.append("prmt.b32 v, t, t, 0xbb99; and.b32 v, v, $4;")
        text.append("xor.b32 u, $4, 0x7fff7fff; and.b32 s, s, u; xor.b32 t, t, s;")
        if not relu:
            # what is negative has now been changed in all bits but the sign: from magnitude to the order of integers
            text.append("xor.b32 t, t, v;")
    else:
        if not relu:
            # from sign and magnitude to the order of integers
            text.append(f"mov.b32 s, t; {signs} and.b32 s, s, 0x7fff7fff; xor.b32 t, t, s;")
        text.append(f"min.{'u' if relu else 's'}16x2 t, t, $4;")
    text.append("prmt.b32 $0, t, $3, 0x1054; prmt.b32 $1, t, $3, 0x3276;")
    return "{ .reg .b32 s, t, u, v; " + " ".join(text) + " }"


@triton.jit
def _infinity(dtype: tl.constexpr):
    return 0x7F80 if dtype == tl.bfloat16 else 0x7C00


@triton.jit
def start_key(code, dtype: tl.constexpr, RELU: tl.constexpr):
    """The int32 key that stands for ``code`` until something exceeds 0 (under RELU) or -infinity."""
    least = 0 if RELU else -1 - _infinity(dtype)
    return (least << 16) + (FIRST << 8) + code


@triton.jit
def keys_of(values, order, code, RELU: tl.constexpr, ASM: tl.constexpr):
    """The int32 keys of values (bf16 or fp16); order (0 to 31) and code (0 to 255) broadcast to their shape. RELU:
    whatever is not positive has a key below LEAST_POSITIVE and loses to start_key. ASM: two at a time (a lane must hold
    an even number), by the instructions from sm_80 (80) or sm_90 (90) on; 0: by Triton's own operations."""
    low = ((FIRST - 1 - order) << 8) | code
    nan = NAN | order
    if ASM:
        zeros = tl.zeros(values.shape, tl.int16)
        return tl.inline_asm_elementwise(
            _assembly(values.dtype == tl.bfloat16, RELU, ASM),
            "=&r,=r,r,r,r",
            [values, zeros + low.to(tl.int16), zeros + nan.to(tl.int16)],
            dtype=tl.int32,
            is_pure=True,
            pack=2,
        )
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7FFF
        if not RELU:
            bits = tl.where(magnitude == 0, 0, bits)
            bits ^= (bits >> 15) & 0x7FFF
        return (tl.where(magnitude > _infinity(values.dtype), nan, bits) << 16) | low


@triton.jit
def finish_keys(best, code, place_ptrs, inside, first_value, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr,
                MARK: tl.constexpr, NONE: tl.constexpr):  # fmt: skip
    """(int16 patterns of the maxima, codes) from the largest keys and their codes; place_ptrs: where the maxima are.
    first_value: of the first position inside, for KEEP_ZERO. MARK: maxima that are not positive have code NONE."""
    place_ptrs = place_ptrs.to(tl.pointer_type(tl.int16), bitcast=True)
    stopped = best < LEAST_POSITIVE
    if RELU:
        patterns = (best >> 16).to(tl.int16)
        if KEEP_ZERO:
            first = first_value.to(tl.int16, bitcast=True)
            patterns = tl.where(stopped, tl.where(first == -0x8000, first, 0), patterns)
        patterns = tl.load(place_ptrs, inside & (best >= (NAN << 16)), patterns)
    else:
        patterns = tl.load(place_ptrs, inside)
    if MARK:
        code = tl.where(stopped, NONE, code)
    return patterns, code


@triton.jit
def stored(best, DTYPE: tl.constexpr):
    """The inverse of :func:`widen`, of bf16 by bits; a NaN in fp16 may change its payload."""
    if DTYPE == tl.bfloat16:
        return (best.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return best.to(DTYPE)


@triton.jit
def take(best, code, values, position):
    """The larger of best and values with its position."""
    values = widen(values)
    wins = (values > best) | (values != values)
    return tl.where(wins, values, best), tl.where(wins, position, code)


@triton.jit
def rectified_zero(values, KEEP_ZERO: tl.constexpr):
    """relu(values) where they are not positive, fp32; KEEP_ZERO: zeros keep their sign."""
    if KEEP_ZERO:
        values = widen(values)
        return tl.where(values == 0.0, values, 0.0)
    else:
        return 0.0


@triton.jit
def finish(best, code, zero, first_code, RELU: tl.constexpr, ZERO_CODE: tl.constexpr, NONE: tl.constexpr):
    """Apply the ReLU to the maxima, where it stops them: zero; mark those that pass no gradient back."""
    stopped = not_positive(best)
    if RELU:
        best = tl.where(stopped, zero, best)
    if ZERO_CODE:
        code = tl.where(stopped, NONE, code)
    elif RELU:
        code = tl.where(stopped, first_code, code)
    return best, code
