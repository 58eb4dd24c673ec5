"""Device helpers of the max-pool kernels: where a lane is, and window positions in and out of their bytes."""

import triton
import triton.language as tl

from gistkit.formats import ceil_div


def divisor(d: int) -> int:
    """What :func:`divide` needs to divide by d (1 <= d < 2**31): l = ceil(log2 d) and m = ceil(2**(31 + l) / d). m d
    exceeds 2**(31 + l) by less than d <= 2**l, so n m >> (31 + l) is n // d for every n < 2**31 (Granlund and
    Montgomery, "Division by invariant integers using multiplication", 1994). The five bits below m's 32 hold l."""
    log = (d - 1).bit_length()
    return (ceil_div(1 << (31 + log), d) << 5) | log


@triton.jit
def divide(n, d, by):
    """(n // d, n % d) of int32 n >= 0, where ``by`` is divisor(d): three instructions for twenty."""
    product = tl.umulhi((n * 2).to(tl.uint32, bitcast=True), (by >> 5).to(tl.uint32))
    quotient = (product >> (by & 31).to(tl.uint32)).to(tl.int32, bitcast=True)
    return quotient, n - quotient * d


@triton.jit
def locate(start, lanes, inner, by_inner, middle, by_middle):
    """Where the flat indices start + lanes of an [outer, middle, inner] array are; lanes is a small tile. Returns
    (base, outer, middle, inner): base is the int64 scalar to which outer is relative, so that offsets within a program
    stay int32: 64-bit address arithmetic was half of all instructions."""
    first_row, first_i = divide(start, inner, by_inner)
    carry, i = divide(first_i + lanes, inner, by_inner)
    base, first_m = divide(first_row, middle, by_middle)
    outer, m = divide(first_m + carry, middle, by_middle)
    return base.to(tl.int64), outer, m, i


@triton.jit
def locate_channels(
    start, lanes, groups, by_groups, inner, by_inner, middle, by_middle, V: tl.constexpr, CHANNELS_LAST: tl.constexpr
):
    """:func:`locate` of pixels, and their distance and each lane's first place in one: (base, outer, middle, inner,
    step, place [LANES, 1]). Channels_last groups of V channels run fastest."""
    if CHANNELS_LAST:
        first_pixel, first_group = divide(start, groups, by_groups)
        carry, group = divide(first_group + lanes, groups, by_groups)
        base, outer, m, i = locate(first_pixel, carry, inner, by_inner, middle, by_middle)
        return base, outer, m, i, groups * V, (group * V)[:, None]
    else:
        base, outer, m, i = locate(start, lanes, inner, by_inner, middle, by_middle)
        return base, outer, m, i, 1, tl.zeros((lanes.shape[0], 1), tl.int32)


@triton.jit
def store_codes(codes_ptr, first, codes, inside, BITS: tl.constexpr):
    """Write int32 [LANES, V] codes; first [LANES, 1] is the output index of a lane's first, inside its mask."""
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
    """The inverse of :func:`store_codes`: int32 [LANES, V]; no code in particular where not inside."""
    LANES: tl.constexpr = first.shape[0]
    if BITS == 8:
        return tl.load(codes_ptr + first + tl.arange(0, V)[None, :], inside, 0).to(tl.int32)
    elif V == 1:
        pair = tl.load(codes_ptr + (first >> 1), inside, 0).to(tl.int32)
        return (pair >> ((first & 1).to(tl.int32) * 4)) & 15
    else:
        pairs = tl.load(codes_ptr + (first >> 1) + tl.arange(0, V // 2)[None, :], inside, 0).to(tl.int32)
        return tl.reshape(tl.join(pairs & 15, pairs >> 4), (LANES, V))
