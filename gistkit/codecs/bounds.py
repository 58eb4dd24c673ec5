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

from __future__ import annotations

from dataclasses import dataclass

import torch

from gistkit.formats import INT_BLOCK, SCALE_BLOCK, FloatFormat
from gistkit.kernels import flat, like


@dataclass(frozen=True)
class ErrorBound:
    """The bound of one value format. ``packed``: blocks of scaled forms are counted over the elements whose bit
    pattern is not zero, in storage order, as sparse storage keeps them."""

    fmt: FloatFormat
    scaling: str
    packed: bool = False

    @property
    def relative(self) -> float:
        """Share of itself by which a value in the format's normal range may move."""
        return 2.0 ** -(self.fmt.mantissa_bits + 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float64 tensor of x's geometry: the largest |decode(encode(x)) - x| per finite element; nan where x is nan,
        inf where x is infinite (unscaled formats clamp infinities). x is a dense tensor of a float dtype."""
        values = flat(x.detach())
        if not self.packed:
            return like(self._flat_bound(values), x.shape, x.stride())
        integer = torch.int32 if x.dtype == torch.float32 else torch.int16
        stored = values.view(integer) != 0
        bound = torch.zeros(values.shape, dtype=torch.float64, device=x.device)
        bound[stored] = self._flat_bound(values[stored])
        return like(bound, x.shape, x.stride())

    def _flat_bound(self, values: torch.Tensor) -> torch.Tensor:
        size = values.double().abs()
        relative = size * self.relative
        if self.scaling == "none":
            clamped = torch.maximum(relative, size - self.fmt.max_finite)
            return torch.where(size < self.fmt.min_normal, size, clamped)
        step = self._scales(size) * self.fmt.min_normal * 2.0**-self.fmt.mantissa_bits
        return torch.maximum(relative, step / 2)

    def _scales(self, size: torch.Tensor) -> torch.Tensor:
        """The largest s that each element's block may use."""
        n = size.numel()
        padded = torch.nn.functional.pad(torch.where(size.isfinite(), size, 0.0), (0, -n % SCALE_BLOCK))
        largest = padded.view(-1, SCALE_BLOCK).amax(1)
        exponent = torch.frexp(largest).exponent  # floor(log2 M) + 1
        scale = torch.ldexp(torch.ones_like(largest), exponent - self.fmt.max_exponent)
        return scale.clamp_min(2.0**-126).repeat_interleave(SCALE_BLOCK)[:n]


@dataclass(frozen=True)
class RandomBound:
    """The bound of integers of so many bits."""

    bits: int

    @property
    def relative(self) -> float:
        """Share of its block's span by which a value may move."""
        return 1 / ((1 << self.bits) - 1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float64 tensor of x's geometry: the largest |decode(encode(x)) - x|; nan in blocks that decode to NaN. x is a
        dense tensor of a float dtype."""
        values, n, info = flat(x.detach()).double(), x.numel(), torch.finfo(x.dtype)
        blocks = torch.cat((values, values[-1:].expand(-n % INT_BLOCK))).view(-1, INT_BLOCK)
        spans, largest = blocks.amax(1) - blocks.amin(1), blocks.abs().amax(1)
        spans = torch.where(spans <= torch.finfo(torch.float32).max, spans, torch.nan)
        bound = spans.clamp_min(2.0**-100) * self.relative * (1 + 2.0**-15) + (largest + spans) * 2.0**-22
        bound += (largest + info.smallest_normal) * info.eps / 2
        return like(bound.repeat_interleave(INT_BLOCK)[:n], x.shape, x.stride())
