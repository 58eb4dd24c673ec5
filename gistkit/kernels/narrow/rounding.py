"""Device helpers between fp32, bf16, fp16 and the narrow codes (rules: :mod:`gistkit.kernels.reference.narrow`), by
integer arithmetic on bit patterns: the same on every GPU and in Triton's interpreter, whose own bf16 and float8 casts
lose subnormals and roundings."""

import triton
import triton.language as tl


@triton.jit
def widen(x):
    """fp32 from fp32/bf16/fp16, exact, subnormals included. A NaN's payload and sign are not to be relied on."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _bf16_bits(x):
    """int32 bf16 pattern of fp32 x, to nearest even; not for NaN."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x fp32 to dtype (fp32/bf16/fp16), to nearest even; NaN becomes a quiet NaN."""
    if dtype == tl.bfloat16:
        return tl.where(x != x, 0x7FC0, _bf16_bits(x)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr, PORTABLE: tl.constexpr):
    """fp32 x to nearest even: by the hardware's conversion, or by integers where the interpreter's loses bits."""
    if PORTABLE:
        return round_to(x, dtype)
    else:
        return x.to(dtype)


@triton.jit
def not_positive(x):
    """x <= 0 of an fp32 tensor, false for NaN; written as x < the least subnormal. ptxas makes an instruction of
    ``x <= 0 ? 0 : x`` that rewrites the payload of a NaN, and does not know this form. The constant is made of its
    bits: written as a number, Triton 3.6 compares in fp64."""
    return x < tl.full(x.shape, 1, tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _place_sign(code, x, BITS: tl.constexpr):
    """code with x's sign bit as bit BITS - 1; fp16's is read before widening, in which a NaN may lose its sign."""
    if x.dtype == tl.float16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = widen(x).to(tl.int32, bitcast=True)
    return code | ((bits >> (32 - BITS)) & (1 << (BITS - 1)))


@triton.jit
def _round_mantissa(magnitude, M: tl.constexpr, BIAS: tl.constexpr):
    """fp32 magnitude patterns to 8 exponent bits of another bias | M mantissa bits, to nearest even. A carry raises the
    exponent; what lies below the bias comes out negative."""
    return (magnitude + ((1 << (22 - M)) - 1 - ((127 - BIAS) << 23)) + ((magnitude >> (23 - M)) & 1)) >> (23 - M)


@triton.jit
def to_code(x, FMT: tl.constexpr):
    """int32 unscaled codes (0 <= code < 2**bits) of x fp32/bf16/fp16; FMT is ``fp16``, ``fp10`` or ``fp8``."""
    M: tl.constexpr = 3 if FMT == "fp8" else (4 if FMT == "fp10" else 10)
    BIAS: tl.constexpr = 7 if FMT == "fp8" else 15
    LARGEST: tl.constexpr = 448.0 if FMT == "fp8" else (63488.0 if FMT == "fp10" else 65504.0)
    NAN: tl.constexpr = 0x7F if FMT == "fp8" else (0x1F8 if FMT == "fp10" else 0x7E00)
    BITS: tl.constexpr = 8 if FMT == "fp8" else (10 if FMT == "fp10" else 16)
    # clamped before it is rounded, which gives the same: the limit is on the grid; NaN stays NaN, above every code
    clamped = tl.minimum(tl.abs(widen(x)), LARGEST, propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)
    if FMT == "fp16" and x.dtype == tl.bfloat16:
        # bits that bf16 and the limit do not have: the compiler sees that nothing is rounded
        clamped = clamped & 0x7FFFE000
    code = tl.minimum(_round_mantissa(clamped, M, BIAS), NAN)
    return _place_sign(tl.where(code < (1 << M), 0, code), x, BITS)


@triton.jit
def to_scaled_code(x, factor, FMT: tl.constexpr):
    """int32 codes (0 <= code < 2**bits) of x * factor (fp32, a normal power of two; :func:`encoding_factor`),
    subnormals kept. One fused addition rounds: with E the power of two at or below the value, or the format's least
    normal, value + E * 2**(23 - M) is on the grid there, E * 2**-M, and counts its steps in the low bits of its
    pattern; E's own exponent, added above them, makes the code."""
    M: tl.constexpr = 3 if FMT == "fp8" else (4 if FMT == "fp10" else 10)
    BITS: tl.constexpr = 8 if FMT == "fp8" else (10 if FMT == "fp10" else 16)
    LARGEST: tl.constexpr = 448.0 if FMT == "fp8" else (63488.0 if FMT == "fp10" else 65504.0)
    # fp32 patterns of the value that the NaN code would stand for, and of the least normal
    NAN: tl.constexpr = 0x43F00000 if FMT == "fp8" else 0x47C00000
    LEAST: tl.constexpr = (121 if FMT == "fp8" else 113) << 23
    # 2**(23 - M), and as many steps more as make the code come out right modulo 2**(bits - 1): for E the least normal
    # they and its exponent cancel
    MAGIC: tl.constexpr = 1048583.0 if FMT == "fp8" else (524303.0 if FMT == "fp10" else 8207.0)
    scaled = tl.minimum(tl.abs(widen(x)) * factor, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    magnitude = tl.minimum(scaled.to(tl.int32, bitcast=True), NAN)
    exponent = tl.maximum(magnitude & 0x7F800000, LEAST)
    # the product is exact, so it makes no difference where an addition that is not fused comes after it
    steps = tl.fma(
        exponent.to(tl.float32, bitcast=True),
        tl.full(magnitude.shape, MAGIC, tl.float32),
        magnitude.to(tl.float32, bitcast=True),
    )
    code = steps.to(tl.int32, bitcast=True) + (exponent >> (23 - M))
    return _place_sign(code & ((1 << (BITS - 1)) - 1), x, BITS)


@triton.jit
def finite_key(x):
    """uint32 keys of x fp32/bf16/fp16 whose largest gives the largest finite magnitude; see :func:`finite_amax`. The
    magnitude pattern shifted over the sign, plus one exponent step: infinities and NaN wrap around below 0's key."""
    return (widen(x).to(tl.uint32, bitcast=True) << 1) + 0x01000000


@triton.jit
def finite_amax(key):
    """int32 fp32 pattern of the largest finite magnitude, from the largest key; 0 where nothing was finite."""
    return ((tl.maximum(key, 0x01000000) - 0x01000000) >> 1).to(tl.int32)


@triton.jit
def exponent_byte(amax, FMT: tl.constexpr):
    """int32 exponent byte b from the fp32 pattern of the largest finite magnitude of a block. What is added carries
    into the exponent where the mantissa, rounded, exceeds the largest finite value's: from 2 - 2**-(M + 1) on, a tie,
    which goes up; for fp8, whose largest is 1.75, past 1.8125, a tie, which goes down."""
    CARRY: tl.constexpr = 0x17FFFF if FMT == "fp8" else (0x40000 if FMT == "fp10" else 0x1000)
    LEAST: tl.constexpr = 9 if FMT == "fp8" else 16
    return tl.where(amax == 0, 127, tl.maximum((amax + CARRY) >> 23, LEAST))


@triton.jit
def encoding_factor(b, FMT: tl.constexpr):
    """fp32 2**(E + 127 - b), what an encoder multiplies by."""
    E: tl.constexpr = 8 if FMT == "fp8" else 15
    return ((E + 254 - b) << 23).to(tl.float32, bitcast=True)


@triton.jit
def decoding_factor(b, FMT: tl.constexpr):
    """fp32 2**(b - 127 - E), what a decoder multiplies by."""
    E: tl.constexpr = 8 if FMT == "fp8" else 15
    return ((b - E) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _magnitude_value(code, FMT: tl.constexpr, DOWN: tl.constexpr):
    """fp32 value of a sign-less code times 2**-DOWN (0 or 16), exact; not for fp8's NaN. The wider formats go through
    fp16, of which they are a part. fp8 is read as fp32: the exponent is 120 too small."""
    if FMT == "fp8":
        return (code << 20).to(tl.float32, bitcast=True) * (2.0 ** (120 - DOWN))
    elif FMT == "fp10":
        return (code << 6).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * (2.0**-DOWN)
    else:
        return code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def from_code(code, factor, FMT: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr):
    """Values of dtype (fp32/bf16/fp16) from int32 codes: code * factor, clamped and rounded to nearest even. factor is
    fp32 and is ignored unless SCALED. NaN codes become sign | quiet NaN. Bits above the code's are ignored."""
    BITS: tl.constexpr = 8 if FMT == "fp8" else (10 if FMT == "fp10" else 16)
    FIRST_NAN: tl.constexpr = 0x7F if FMT == "fp8" else (0x1F1 if FMT == "fp10" else 0x7C01)
    # bf16 has room for the mantissas of fp8 and fp10 and rounds subnormals only; 2**16 below, fp32's own are as coarse
    DOWN: tl.constexpr = 16 if SCALED and dtype == tl.bfloat16 and FMT != "fp16" else 0
    magnitude = code & ((1 << (BITS - 1)) - 1)
    value = _magnitude_value(magnitude, FMT, DOWN)
    if SCALED:
        LARGEST: tl.constexpr = (
            65504.0
            if dtype == tl.float16
            else (3.3895313892515355e38 if dtype == tl.bfloat16 else 3.4028234663852886e38)
        )
        value = tl.minimum(value * factor * (2.0**DOWN), LARGEST)
    is_nan = magnitude >= FIRST_NAN
    if dtype == tl.float32:
        bits = tl.where(is_nan, 0x7FC00000, value.to(tl.int32, bitcast=True))
        return (bits | ((code << (32 - BITS)) & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        if dtype == tl.float16:
            bits = tl.where(is_nan, 0x7E00, value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32))
        elif FMT == "fp16":
            bits = tl.where(is_nan, 0x7FC0, _bf16_bits(value))
        else:
            bits = tl.where(is_nan, 0x7FC0, value.to(tl.int32, bitcast=True) >> 16)
        return (bits | ((code << (16 - BITS)) & 0x8000)).to(tl.int16).to(dtype, bitcast=True)
