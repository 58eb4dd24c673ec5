"""Maxima of a pool's windows as fp32 values beside the codes of their positions; see pool_forward for the rules."""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import not_positive


@triton.jit
def _comparable(values):
    """fp32; of bf16 by bits, since a conversion may change the payload of a NaN. fp16 comparisons would cost more."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def stored(best, DTYPE: tl.constexpr):
    """The inverse of :func:`_comparable`; a NaN in fp16 may change its payload."""
    if DTYPE == tl.bfloat16:
        return (best.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return best.to(DTYPE)


@triton.jit
def take(best, code, values, position):
    """The larger of best and values with its position."""
    values = _comparable(values)
    wins = (values > best) | (values != values)
    return tl.where(wins, values, best), tl.where(wins, position, code)


@triton.jit
def rectified_zero(values, KEEP_ZERO: tl.constexpr):
    """relu(values) where they are not positive, fp32; KEEP_ZERO: zeros keep their sign."""
    if KEEP_ZERO:
        values = _comparable(values)
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
