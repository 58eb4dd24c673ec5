"""Device helpers of zvc and csr: values written in a format, and read back from slots or from packed arrays.

FMT is ``raw``, ``fp16``, ``fp10`` or ``fp8``. Raw items are bit patterns, the others codes. Packed fp10 codes lie three
to a word in planes: with W words, code p is field p // W of word p % W. Scaled codes (SCALING ``tensor``, ``block``)
occur in packed arrays only, with one exponent byte, or one for every SCALE_BLOCK packed values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import SCALE_BLOCK, ZVC_SLOT
from gistkit.kernels.rounding import decoding_factor, from_code

BLOCK = tl.constexpr(SCALE_BLOCK)
BLOCK_SHIFT = tl.constexpr(SCALE_BLOCK.bit_length() - 1)
LONGEST_SLOT = tl.constexpr(ZVC_SLOT)


@triton.jit
def is_negative_zero(item, FMT: tl.constexpr):
    """True for -0.0 and for its codes."""
    if FMT == "fp8":
        return item == 0x80
    elif FMT == "fp10":
        return item == 0x200
    elif item.dtype == tl.int32:
        return item == -0x80000000
    else:
        return item == -0x8000


@triton.jit
def slot_start(slot, inside, count, ends_ptr, stride, PACKED: tl.constexpr):
    """int64 place of a slot's first value: stride * slot, or where the values of the slots before it end."""
    if PACKED:
        return tl.load(ends_ptr + slot, inside, other=0) - count
    else:
        return slot * stride


@triton.jit
def _places_before(boundary, start):
    """int32: how many places from start on lie before a boundary; no more than a slot can have."""
    return tl.minimum(tl.maximum(boundary - start, 0), LONGEST_SLOT).to(tl.int32)


@triton.jit
def load_items(values_ptr, start, places, mask, plane, FMT: tl.constexpr, PACKED: tl.constexpr):
    """Raw patterns or codes at start (int64, a slot's) + places (int32), 0 where masked; plane: words of fp10."""
    if PACKED and FMT == "fp10":
        words = plane.to(tl.int64)
        in_1 = places >= _places_before(words, start)
        in_2 = places >= _places_before(2 * words, start)
        first = tl.where(in_2, start - 2 * words, tl.where(in_1, start - words, start))
        items = tl.load(values_ptr + first + places, mask, other=0)
        return (items >> tl.where(in_2, 20, tl.where(in_1, 10, 0))) & 0x3FF
    else:
        return tl.load(values_ptr + start + places, mask, other=0)


@triton.jit
def tensor_factor(exponents_ptr, FMT: tl.constexpr, SCALING: tl.constexpr):
    """fp32 factor of all codes where they share one."""
    if SCALING == "tensor":
        return decoding_factor(tl.load(exponents_ptr).to(tl.int32), FMT)
    else:
        return 1.0


@triton.jit
def load_values(
    values_ptr,
    exponents_ptr,
    start,
    places,
    mask,
    plane,
    factor,
    FMT: tl.constexpr,
    SCALING: tl.constexpr,
    PACKED: tl.constexpr,
    dtype: tl.constexpr,
):
    """The elements at start + places as dtype, +0 where masked; see :func:`load_items`, :func:`tensor_factor`."""
    items = load_items(values_ptr, start, places, mask, plane, FMT, PACKED)
    if FMT == "raw":
        return items
    else:
        if SCALING == "block":
            # shifts: a division of what may be negative for all the compiler knows costs three instructions more
            blocks = ((start & (BLOCK - 1)).to(tl.int32) + places) >> BLOCK_SHIFT
            exponents = tl.load(exponents_ptr + (start >> BLOCK_SHIFT) + blocks, mask, other=127)
            factor = decoding_factor(exponents.to(tl.int32), FMT)
        return from_code(items.to(tl.int32), factor, FMT, SCALING != "none", dtype)
