"""Zero-value compression: a warp a slot of 1024 elements, eight neighbours a lane (see octets.py).

Values go close together in shared memory between x and the array of values: both are read and written 16 bytes a lane,
and a narrow format converts whole words of stored elements only. x and values are bit patterns (int32, int16), but for
the x that a narrow format is decoded to. ReLU's backward goes the decoder's way with a byte a value."""

import triton
import triton.language as tl

from gistkit.formats import ZVC_SLOT
from gistkit.kernels.sparse.values import slot_start, stage_values
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octet_codes import narrow_octet
from gistkit.kernels.warp.octets import (
    CHUNK,
    CHUNKS,
    OCTET,
    load_octets,
    octet_marks,
    octet_places,
    passed,
    spread_program,
    store_octet,
    store_octets,
    store_words,
)
from gistkit.kernels.warp.stage import open_stage, pull_octet, push_octet, unstage_words, warp_sync

SLOT = tl.constexpr(ZVC_SLOT)


@triton.jit(do_not_specialize=["n"])
def zvc_encode_kernel(
    x_ptr, marks_ptr, counts_ptr, values_ptr, n, FMT: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Mask bytes, count and values of one slot, the values from 1024 * slot on."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORDS: tl.constexpr = 2 * XB
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - slot * SLOT, SLOT).to(tl.int32)
    words = load_octets(x_ptr + slot * SLOT, left, XB, WIDE)
    marks = ()
    for c in tl.static_range(CHUNKS):
        marks += (octet_marks(words, c * WORDS, XB, ASM),)
        tl.store(marks_ptr + slot * (SLOT // 8) + c * LANES + lane, marks[c].to(tl.uint8))
    places, count = octet_places(marks)
    tl.store(counts_ptr + slot + lane, count.to(tl.int16), lane == 0)
    values_ptr += slot * SLOT
    stage = open_stage(lane, XB)
    for c in tl.static_range(CHUNKS):
        push_octet(stage + places[c] * XB, words, c * WORDS, XB)
    _flush(warp_sync(stage), values_ptr, lane, tl.max(count, 0), FMT, DTYPE, ASM)


@triton.jit
def _flush(stage, values_ptr, lane, count, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """The stage's first count patterns, and what fills up their last octet, as values of FMT to values_ptr."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first = tl.full((), 0, tl.int32)
    while first < count:
        place = first + lane * OCTET
        words = unstage_words(stage + place * XB, 2 * XB)
        store_words(values_ptr + place, narrow_octet(words, FMT, DTYPE, ASM), place < count)
        first += CHUNK


@triton.jit(do_not_specialize=["n", "plane"])
def zvc_decode_kernel(
    out_ptr, grad_ptr, marks_ptr, counts_ptr, ends_ptr, values_ptr, exponents_ptr, n, plane, FMT: tl.constexpr,
    SCALING: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    GRAD: tl.constexpr, GRAD_WIDE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One slot of x: an element's value stands at its rank among the set bits. GRAD: of grad where an element is stored
    that is not a negative zero, else +0, bit patterns throughout; SCALING is none then. WIDE: values_ptr is 16-byte
    aligned, WHOLE: n is a multiple of 8, GRAD_WIDE: it is and grad_ptr is 16-byte aligned."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    STAGED: tl.constexpr = 1 if GRAD else XB
    slot = spread_program(PACKED and FMT == "fp10")
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - slot * SLOT, SLOT).to(tl.int32)
    count = tl.load(counts_ptr + slot).to(tl.int32)
    start = slot_start(slot, count, ends_ptr, SLOT, PACKED)
    marks = ()
    for c in tl.static_range(CHUNKS):
        marks += (tl.load(marks_ptr + slot * (SLOT // 8) + c * LANES + lane).to(tl.int32),)
    places, _ = octet_places(marks)
    out_ptr += slot * SLOT
    if GRAD:
        grads = load_octets(grad_ptr + slot * SLOT, left, XB, GRAD_WIDE)
    stage = open_stage(lane, STAGED)
    # octets of values are aligned in the whole array, so they start inside the last slot's
    skipped = (start & (OCTET - 1)).to(tl.int32)
    stage_values(
        stage, values_ptr, exponents_ptr, start - skipped, count + skipped, plane, lane, FMT, SCALING, PACKED, DTYPE,
        WIDE, CHUNKS + PACKED, GRAD, ASM,
    )  # fmt: skip
    stage = warp_sync(stage) + skipped * STAGED
    for c in tl.static_range(CHUNKS):
        words = pull_octet(stage + places[c] * STAGED, marks[c], XB, GRAD)
        place = lane * OCTET + c * CHUNK
        if GRAD:
            store_octet(out_ptr, passed(grads, c * 2 * XB, words), place, left, XB, WHOLE)
        else:
            store_octets(out_ptr, words, place, left, XB, WHOLE)
