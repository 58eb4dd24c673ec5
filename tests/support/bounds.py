"""How far a lossy value format may move a finite element, and why.

Notation: m mantissa bits, E = floor(log2 max_finite), min_normal = 2^(1 - bias), u = 2^-(m + 1).

*Unscaled* (docs/kernels.md, "Rounding"). Rounding to nearest on a grid of m mantissa bits moves x by at most u|x|. What
then lies below min_normal becomes zero: an error of |x|, and only for |x| < min_normal, since min_normal lies on the
grid and rounding is monotone. Clamping moves |x| > max_finite by |x| - max_finite.

*Scaled*. Let M be the largest finite |x| of the block. Codes hold x / s with s = 2^(b - 127 - E), b - 127 at most
floor(log2 M) + 1, and b at least E + 1 so that s is a normal fp32 number. Above the least normal code the error is at
most u|x|, below it half a subnormal step: s * 2^(1 - bias - m) / 2. b leaves M room, so nothing finite is clamped.

*Decoding to the tensor's dtype* adds nothing. Around x, codes and dtype are both spaced by powers of two: where the
codes are the coarser ones, the code lies on the dtype's grid; where they are the finer ones, x lies on theirs and is
kept. The one exception, clamped bf16 values under ``fp16`` (65504 is no bf16 number), comes out nearer to x.

*Integers rounded at random* (:mod:`gistkit.kernels.reference.integers`). A code is one of the two beside v, which lies
on a grid of 2^-16: an error below (1 + 2^-16) spans / L. The step is a millionth short, at the highest code less than
2^-16 of it; three roundings of fp32, of magnitudes up to the block's largest and the span, give 2^-22 of their sum at
most; decoding to the tensor's dtype half a unit in the last place of what is no larger than the block's largest.
"""

import torch

from gistkit.codecs import Codec
from gistkit.formats import INT_BLOCK, SCALE_BLOCK
from gistkit.kernels import flat


def error_bound(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """float64 tensor of x's geometry (dense, a float dtype): the largest |decode(encode(x)) - x| of a lossy codec, per
    finite element; nan where x is nan and in blocks of integers that decode to NaN, inf where x is infinite."""
    values = flat(x.detach())
    if codec.form.sparse and codec.scaling != "none":  # blocks are counted over what is stored
        stored = values.view(torch.int32 if x.dtype == torch.float32 else torch.int16) != 0
        bound = torch.zeros(values.shape, dtype=torch.float64)
        bound[stored] = _of_floats(codec, values[stored])
    else:
        bound = _of_integers(codec, values) if hasattr(codec, "bits") else _of_floats(codec, values)
    return bound.as_strided(x.shape, x.stride())


def _of_floats(codec, values: torch.Tensor) -> torch.Tensor:
    size, fmt = values.double().abs(), codec.fmt
    relative = size * codec.relative_error
    if codec.scaling == "none":
        clamped = torch.maximum(relative, size - fmt.max_finite)
        return torch.where(size < fmt.min_normal, size, clamped)
    return torch.maximum(relative, _scales(fmt, size) * fmt.min_normal * 2.0**-fmt.mantissa_bits / 2)


def _scales(fmt, size: torch.Tensor) -> torch.Tensor:
    """The largest s that each element's block may use."""
    n = size.numel()
    padded = torch.nn.functional.pad(torch.where(size.isfinite(), size, 0.0), (0, -n % SCALE_BLOCK))
    largest = padded.view(-1, SCALE_BLOCK).amax(1)
    exponent = torch.frexp(largest).exponent  # floor(log2 M) + 1
    scale = torch.ldexp(torch.ones_like(largest), exponent - fmt.max_exponent)
    return scale.clamp_min(2.0**-126).repeat_interleave(SCALE_BLOCK)[:n]


def _of_integers(codec, x: torch.Tensor) -> torch.Tensor:
    values, n, info = x.double(), x.numel(), torch.finfo(x.dtype)
    blocks = torch.cat((values, values[-1:].expand(-n % INT_BLOCK))).view(-1, INT_BLOCK)
    spans, largest = blocks.amax(1) - blocks.amin(1), blocks.abs().amax(1)
    spans = torch.where(spans <= torch.finfo(torch.float32).max, spans, torch.nan)
    bound = spans.clamp_min(2.0**-100) * codec.relative_error * (1 + 2.0**-15) + (largest + spans) * 2.0**-22
    bound += (largest + info.smallest_normal) * info.eps / 2
    return bound.repeat_interleave(INT_BLOCK)[:n]
