"""Device helpers of the max-pool kernels: where a lane is, and window positions in and out of their bytes."""

import triton
import triton.language as tl


@triton.jit
def program_start(LANES: tl.constexpr, WIDE: tl.constexpr):
    """First lane of this program; int32 where the launcher knows that all lanes fit."""
    if WIDE:
        return tl.program_id(0).to(tl.int64) * LANES
    return tl.program_id(0) * LANES


@triton.jit
def divide(a, b, FLOAT: tl.constexpr):
    """(a // b, a % b) of an int32 tile a >= 0 by an integer scalar b > 0.

    FLOAT takes five instructions instead of twenty and is exact for a below 2**20: (a + 1/2) / b is at least 1 / (2 b)
    off any integer, and the computed product is off by less than a * 2**-21 / b.
    """
    if FLOAT:
        quotient = ((a.to(tl.float32) + 0.5) * (1.0 / b)).to(tl.int32)
    else:
        quotient = a // b
    return quotient, a - quotient * b


@triton.jit
def locate(start, lanes, inner, middle, FLOAT: tl.constexpr):
    """Coordinates (outer int64, middle int32, inner int32) of the flat indices start + lanes; lanes is a small tile."""
    first_row = start // inner
    carry, i = divide((start - first_row * inner).to(tl.int32) + lanes, inner, FLOAT)
    first_outer = first_row // middle
    outer, m = divide((first_row - first_outer * middle).to(tl.int32) + carry, middle, FLOAT)
    return first_outer.to(tl.int64) + outer, m, i


@triton.jit
def locate_channels(start, lanes, groups, inner, middle, FLOAT: tl.constexpr):
    """:func:`locate` one level deeper: (outer, middle, inner, group) where group runs fastest."""
    first_pixel = start // groups
    carry, group = divide((start - first_pixel * groups).to(tl.int32) + lanes, groups, FLOAT)
    outer, m, i = locate(first_pixel, carry, inner, middle, FLOAT)
    return outer, m, i, group


@triton.jit
def store_codes(codes_ptr, first, codes, inside, BITS: tl.constexpr):
    """Write int32 [LANES, V] codes; first int64 [LANES, 1] is the output index of a lane's first, inside its mask."""
    LANES: tl.constexpr = codes.shape[0]
    V: tl.constexpr = codes.shape[1]
    if BITS == 8:
        tl.store(codes_ptr + first + tl.arange(0, V)[None, :], codes.to(tl.uint8), inside)
    elif V == 1:
        # An odd innermost extent: the two outputs of a byte lie in neighbouring lanes.
        low, high = tl.split(tl.reshape(tl.where(inside, codes, 0), (LANES // 2, 2)))
        firsts, _ = tl.split(tl.reshape(first, (LANES // 2, 2)))
        insides, _ = tl.split(tl.reshape(inside.to(tl.int32), (LANES // 2, 2)))
        tl.store(codes_ptr + (firsts >> 1), (low | (high << 4)).to(tl.uint8), insides != 0)
    else:
        low, high = tl.split(tl.reshape(codes, (LANES, V // 2, 2)))
        tl.store(codes_ptr + (first >> 1) + tl.arange(0, V // 2)[None, :], (low | (high << 4)).to(tl.uint8), inside)


@triton.jit
def load_codes(codes_ptr, first, inside, V: tl.constexpr, BITS: tl.constexpr):
    """The inverse of :func:`store_codes`: int32 [LANES, V]; 0 where not inside."""
    LANES: tl.constexpr = first.shape[0]
    if BITS == 8:
        return tl.load(codes_ptr + first + tl.arange(0, V)[None, :], inside, 0).to(tl.int32)
    elif V == 1:
        pair = tl.load(codes_ptr + (first >> 1), inside, 0).to(tl.int32)
        return (pair >> ((first & 1).to(tl.int32) * 4)) & 15
    else:
        pairs = tl.load(codes_ptr + (first >> 1) + tl.arange(0, V // 2)[None, :], inside, 0).to(tl.int32)
        return tl.reshape(tl.join(pairs & 15, pairs >> 4), (LANES, V))
