"""Torch oracle of gistkit.kernels.narrow.narrow; also what runs on CPU tensors.

Delayed precision reduction (Gist section IV-A): 1-5-10 (``fp16``), 1-5-4 (``fp10``) and 1-4-3 (``fp8``) floats. With M
mantissa bits, a bias B and the largest finite value F:

**Rounding, unscaled.** To nearest even on the normal grid with unbounded exponent, by integer arithmetic on the fp32
pattern; what is then below 2**(1-B) becomes a zero of its sign; what is above F, infinities too, becomes F with its
sign. NaN becomes the format's quiet NaN of its sign and decodes to 0x7FC00000, 0x7FC0 (bf16) or 0x7E00 (fp16), plus
sign. bf16 and fp16 are widened exactly first. |x - decoded| <= 2**-(M+1) |x| for 2**(1-B) <= |x| <= F, half a unit in
the last place; <= 2**(1-B) below.

**Scaled** (``block``: an exponent byte per 128 elements, the last block may be short). Let E be
floor(log2 F) and A the largest finite |x| of the block. b is the fp32 exponent field of A, plus one where A's mantissa
rounded to M bits exceeds F's; at least E+1, which keeps both factors normal (b <= 255 does so above); 127 where A = 0.
The code is x * 2**(E+127-b) rounded to nearest even with subnormals kept, clamped to F. Decoding multiplies by
S = 2**(b-127-E), clamps to the largest finite value of the target dtype (A may have been rounded up past it), and
rounds to nearest even.

*Products.* Scaling by a power of two is exact in fp32 unless the result is subnormal. In encoding that happens only
below 2**-126, far under half of the smallest code (2**-25 at the least), so the code is a zero either way. In decoding
it rounds to fp32's own grid.

*Error bound.* For finite x in fp32 |x - decoded| <= max(2**-(M+1) |x|, 2**-(B+M) S): docs/kernels.md, "Rounding".

``fp10`` packs three codes to a word in planes (see :mod:`gistkit.formats`); the others are stored as they are.
"""

from __future__ import annotations

import torch

from gistkit.formats import FLOAT_FORMATS, SCALE_BLOCK, FloatFormat, ceil_div, fp10_words, scale_count
from gistkit.kernels.layout import bits_of, code_dtype

# a multiple of SCALE_BLOCK; a handful of int32 temporaries of this length live at a time
BLOCK = 1 << 18
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


_QUIET_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """int32 fp32 patterns of |x|."""
    return x.float().view(torch.int32) & _MAGNITUDE


def _round_mantissa(magnitude: torch.Tensor, f: FloatFormat) -> torch.Tensor:
    """fp32 magnitude patterns to 8 exponent bits | M mantissa bits, to nearest even; a carry raises the exponent."""
    shift = 23 - f.mantissa_bits
    odd = magnitude.bitwise_right_shift(shift).bitwise_and_(1)
    return odd.add_(magnitude).add_((1 << (shift - 1)) - 1).bitwise_right_shift_(shift)


def _finish(code: torch.Tensor, x: torch.Tensor, magnitude: torch.Tensor, f: FloatFormat) -> torch.Tensor:
    """Clamp, put the NaN and the sign in; the sign from x's own pattern, as widening a NaN may lose it."""
    code.clamp_(max=f.max_code).masked_fill_(magnitude > _INFINITY, f.nan_code)
    sign = (bits_of(x) < 0).to(torch.int32)
    return code.bitwise_or_(sign.bitwise_left_shift_(f.bits - 1)).to(code_dtype(f.name, packed=False))


def to_codes(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """Unscaled codes of x (fp32/bf16/fp16, any shape), one an element: int16 (fp16, fp10) or uint8 (fp8)."""
    f = FLOAT_FORMATS[fmt]
    magnitude = _magnitude(x)
    code = _round_mantissa(magnitude, f).sub_((127 - f.bias) << f.mantissa_bits)
    code.masked_fill_(code < 1 << f.mantissa_bits, 0)
    return _finish(code, x, magnitude, f)


def _scaled_codes(x: torch.Tensor, exponents: torch.Tensor, f: FloatFormat) -> torch.Tensor:
    """Codes of x under one exponent byte each (``exponents`` broadcasts to x)."""
    scaled = _magnitude(x).view(torch.float32) * _power_of_two(f.max_exponent + 127 - exponents.to(torch.int32))
    magnitude = scaled.view(torch.int32)
    code = _round_mantissa(magnitude, f).sub_((127 - f.bias) << f.mantissa_bits)
    # added to a float whose last bit is worth one subnormal step, a value below the least normal is rounded to steps
    exponent = 1 - f.bias - f.mantissa_bits + 23
    steps = scaled.add(2.0**exponent).view(torch.int32).sub_((exponent + 127) << 23)
    code = torch.where(scaled < f.min_normal, steps, code)
    return _finish(code, x, magnitude, f)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as fp32, for int32 exponents of normal numbers."""
    return (exponent + 127).bitwise_left_shift_(23).view(torch.float32)


def from_codes(
    codes: torch.Tensor, fmt: str, dtype: torch.dtype, exponents: torch.Tensor | None = None
) -> torch.Tensor:
    """Values of dtype from unpacked codes of any shape, rounded to nearest even where dtype is narrower than the value.

    ``exponents`` (uint8, broadcasts to codes) are the exponent bytes of the scaled forms; None for the unscaled ones.
    """
    f = FLOAT_FORMATS[fmt]
    wide = codes.to(torch.int32)
    code = wide & ((1 << (f.bits - 1)) - 1)
    subnormal = code.float().mul_(2.0 ** (1 - f.bias - f.mantissa_bits))
    shift = 23 - f.mantissa_bits
    normal = code.bitwise_left_shift(shift).add_((127 - f.bias) << 23).view(torch.float32)
    value = torch.where(code < 1 << f.mantissa_bits, subnormal, normal)
    if f.exponent_bits == 5:
        value.masked_fill_(code == f.max_code + 1, float("inf"))
    if exponents is not None:
        value.mul_(_power_of_two(exponents.to(torch.int32) - (127 + f.max_exponent)))
        value.clamp_(max=torch.finfo(dtype).max)
    value = value.to(dtype)
    # sign and NaN go in as bits: a cast of NaN keeps neither sign nor payload
    bits = bits_of(value).masked_fill_(code >= f.first_nan_code, _QUIET_NAN[dtype])
    sign = wide.bitwise_right_shift(f.bits - 1).bitwise_left_shift_(8 * dtype.itemsize - 1)
    bits.bitwise_or_(sign.to(bits.dtype))
    return value


def scale_exponents(x: torch.Tensor, fmt: str, scaling: str) -> torch.Tensor:
    """The exponent bytes uint8[scale_count(n, scaling)] of flat x."""
    n = x.numel()
    amax = torch.zeros(scale_count(n, scaling), dtype=torch.int32, device=x.device)
    for start in range(0, n if scaling != "none" else 0, BLOCK):
        magnitude = _magnitude(x[start : start + BLOCK])
        magnitude.masked_fill_(magnitude >= _INFINITY, 0)
        rows = torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % SCALE_BLOCK)).view(-1, SCALE_BLOCK)
        first = start // SCALE_BLOCK
        torch.amax(rows, 1, out=amax[first : first + rows.shape[0]])
    f = FLOAT_FORMATS[fmt]
    no_room = (1 << f.mantissa_bits) - 1 - (f.max_code & ((1 << f.mantissa_bits) - 1))
    b = _round_mantissa(amax, f).add_(no_room).bitwise_right_shift_(f.mantissa_bits)
    return b.clamp_(min=f.max_exponent + 1).masked_fill_(amax == 0, 127).to(torch.uint8)


def element_exponents(exponents: torch.Tensor, start: int, stop: int, scaling: str) -> torch.Tensor | None:
    """Exponent bytes of elements start..stop-1; None where there are none."""
    if scaling == "none":
        return None
    first = start // SCALE_BLOCK
    each = exponents[first : ceil_div(stop, SCALE_BLOCK)].repeat_interleave(SCALE_BLOCK)
    return each[start - first * SCALE_BLOCK : stop - first * SCALE_BLOCK]


def narrow_encode(x: torch.Tensor, fmt: str, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, uint8[scale_count(n, scaling)] exponent bytes) of x fp32/bf16/fp16[n]. Codes: int16[n] for ``fp16``,
    int32[fp10_words(n)] for ``fp10``, uint8[n] for ``fp8``."""
    exponents, f = scale_exponents(x, fmt, scaling), FLOAT_FORMATS[fmt]
    codes = x.new_empty(x.shape, dtype=code_dtype(fmt, packed=False))
    for start in range(0, x.numel(), BLOCK):
        part = x[start : start + BLOCK]
        each = element_exponents(exponents, start, start + part.numel(), scaling)
        codes[start : start + BLOCK] = to_codes(part, fmt) if each is None else _scaled_codes(part, each, f)
    return fp10_pack(codes) if fmt == "fp10" else codes, exponents


def narrow_decode(codes, exponents, n: int, dtype: torch.dtype, fmt: str, scaling: str) -> torch.Tensor:
    """dtype[n] from what :func:`narrow_encode` made with the same fmt and scaling."""
    codes = fp10_unpack(codes, n) if fmt == "fp10" else codes
    x = codes.new_empty((n,), dtype=dtype)
    for start in range(0, n, BLOCK):
        part = codes[start : start + BLOCK]
        each = element_exponents(exponents, start, start + part.numel(), scaling)
        x[start : start + BLOCK] = from_codes(part, fmt, dtype, each)
    return x


def fp10_pack(codes: torch.Tensor) -> torch.Tensor:
    """int32[fp10_words(n)] words in plane layout from unpacked int16[n] codes."""
    n, words = codes.numel(), fp10_words(codes.numel())
    planes = torch.nn.functional.pad(codes, (0, 3 * words - n)).view(3, words).to(torch.int32)
    return planes[0] | planes[1] << 10 | planes[2] << 20


def fp10_unpack(words: torch.Tensor, n: int) -> torch.Tensor:
    """int16[n] codes from the words of :func:`fp10_pack`."""
    return torch.cat([(words >> 10 * plane & 0x3FF).to(torch.int16) for plane in range(3)])[:n]
