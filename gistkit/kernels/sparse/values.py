"""Device helpers of zvc and csr: values written in a format, and read back from slots or from packed arrays.

FMT is ``raw``, ``fp16``, ``fp10`` or ``fp8``. Raw items are bit patterns, the others codes. Packed fp10 codes lie three
to a word in planes: with W words, code p is field p // W of word p % W. Scaled codes (SCALING ``block``)
occur in packed arrays only, with an exponent byte for every SCALE_BLOCK packed values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import SCALE_BLOCK, ZVC_SLOT
from gistkit.kernels.narrow.rounding import decoding_factor
from gistkit.kernels.warp.octet_codes import widen_octet
from gistkit.kernels.warp.octets import CHUNK, OCTET, fp10_pair, fp10_words, load_8, load_16, passing_flags
from gistkit.kernels.warp.stage import stage_words

BLOCK = tl.constexpr(SCALE_BLOCK)
BLOCK_SHIFT = tl.constexpr(SCALE_BLOCK.bit_length() - 1)
LONGEST_SLOT = tl.constexpr(ZVC_SLOT)
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def slot_start(slot, count, ends_ptr, stride, PACKED: tl.constexpr):
    """int64 place of a slot's first value: stride * slot, or where the values of the slots before it end."""
    if PACKED:
        return tl.load(ends_ptr + slot) - count
    else:
        return slot * stride


@triton.jit
def _places_before(boundary, start):
    """int32: how many places from start on lie before a boundary; no more than a slot can have."""
    return tl.minimum(tl.maximum(boundary - start, 0), LONGEST_SLOT).to(tl.int32)


@triton.jit
def scale_address(exponents_ptr, start, place):
    """Where the exponent byte of the packed value at start (int64) + place stands."""
    # shifts: a division of what may be negative for all the compiler knows costs three instructions more
    return exponents_ptr + (start >> BLOCK_SHIFT) + (((start & (BLOCK - 1)).to(tl.int32) + place) >> BLOCK_SHIFT)


@triton.jit
def load_octet(values_ptr, start, place, stop, plane, FMT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):
    """Words of the raw patterns or codes at start (int64, a multiple of 8) + place to + 7, those before stop defined.
    fp10's are shifted left by 6, where fp16 has the same fields; the 6 bits below are not defined. WIDE: values_ptr is
    16-byte aligned. No 16 bytes are read of which none lies before stop."""
    PLANES: tl.constexpr = PACKED and FMT == "fp10"
    VB: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth // 8
    shift = 0
    if PLANES:
        # planes are whole blocks of 128 codes, so an octet lies in one of them
        words = plane.to(tl.int64)
        planes = (_places_before(words, start), _places_before(2 * words, start))
        ptr, shift = fp10_words(values_ptr, start, place, planes, plane)
    else:
        ptr = values_ptr + start + place
    words = ()
    if WIDE and VB == 1:
        words += load_8(ptr, place < stop)
    elif WIDE:
        for i in tl.static_range(0, OCTET, 16 // VB):
            words += load_16(ptr + i, place + i < stop, False)
    else:
        for i in tl.static_range(0, OCTET, 4 // VB):
            word = tl.load(ptr + i, place + i < stop, other=0).to(tl.int32)
            for k in tl.static_range(1, 4 // VB):
                item = tl.load(ptr + i + k, place + i + k < stop, other=0).to(tl.int32)
                word = (word & ((1 << (8 * VB * k)) - 1)) | (item << (8 * VB * k))
            words += (word,)
    if PLANES:
        codes = ()
        for w in tl.static_range(0, OCTET, 2):
            codes += (fp10_pair(words[w], words[w + 1], shift),)
        words = codes
    elif FMT == "fp10":
        codes = ()
        for w in tl.static_range(len(words)):
            codes += (words[w] << 6,)
        words = codes
    return words


@triton.jit
def stage_values(
    stage, values_ptr, exponents_ptr, start, stop, plane, lane, FMT: tl.constexpr, SCALING: tl.constexpr,
    PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, OCTETS: tl.constexpr, FLAGS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The elements (patterns of DTYPE) of the values from start (a multiple of 8) on, stop of them, to shared memory.
    OCTETS: the most that a lane takes. AHEAD of them are loaded before the first is used, what lies past stop neither
    loaded nor converted. FLAGS: one byte a value in place of the element, 0 for -0.0 and its codes, 0xFF for all else.
    See :func:`load_octet`."""
    WORDS: tl.constexpr = 4 if FMT == "fp10" else 2 * values_ptr.dtype.element_ty.primitive_bitwidth // 8
    # no more than 20 registers of loaded words
    AHEAD: tl.constexpr = 2 if WORDS == 8 or (PACKED and FMT == "fp10") else 5
    if SCALING == "block":
        exponents_ptr = scale_address(exponents_ptr, start, lane * OCTET)
    for group in tl.static_range(0, OCTETS, AHEAD):
        words = ()
        scales = ()
        for i in tl.static_range(group, tl.constexpr(min(group + AHEAD, OCTETS))):
            place = lane * OCTET + i * CHUNK
            words += load_octet(values_ptr, start, place, stop, plane, FMT, PACKED, WIDE)
            if SCALING == "block":
                exponents = tl.load(exponents_ptr + i * (CHUNK // BLOCK), place < stop)
                scales += (exponents.to(tl.int32),)
        for i in tl.static_range(group, tl.constexpr(min(group + AHEAD, OCTETS))):
            if i * CHUNK < stop:
                place = lane * OCTET + i * CHUNK
                if FLAGS:
                    flags = passing_flags(words, (i - group) * WORDS, WORDS, FMT, ASM)
                    stage_words(stage + place, (flags[0] * 0xFF, flags[1] * 0xFF), place < stop)
                else:
                    scale = tl.full(place.shape, 1.0, tl.float32)
                    if SCALING == "block":
                        scale = decoding_factor(scales[i - group], FMT)
                    elements = widen_octet(words, (i - group) * WORDS, WORDS, scale, FMT, SCALING != "none", DTYPE, ASM)
                    stage_words(stage + place * (DTYPE.primitive_bitwidth // 8), elements, place < stop)
