"""The items of a run of places of the packed array, gathered from the slots of a scratch into a warp's shared memory.

A lane takes an octet of some slot, 16 aligned bytes or less a load: which one follows from the octets of the slots
before it, by bisection over the warp. Each item goes to its place, so lanes all have the same to do however the items
are spread, and the places leave the warp in whole words.
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.sparse.values import load_octet
from gistkit.kernels.warp.lanes import LANES, first_above, pick_lane, sum_upto
from gistkit.kernels.warp.octets import OCTET
from gistkit.kernels.warp.stage import with_words

PLACES = tl.constexpr(1024)
"""Places a program: no fewer than a slot has, so that no more than one of their multiples lies in it."""


def _puts(words: int, item_bytes: int) -> str:
    """PTX: the words' items whose bits are set in the last operand to their places from address $1 on."""
    text = "{ .reg .pred p; .reg .b32 bit, item; "
    each = 4 // item_bytes
    for i in range(8):
        text += f"and.b32 bit, ${2 + words}, {1 << i}; setp.ne.b32 p, bit, 0; "
        source = f"${2 + i // each}"
        if i % each:
            text += f"shr.u32 item, {source}, {8 * item_bytes * (i % each)}; "
            source = "item"
        text += f"@p st.shared.b{8 * item_bytes} [$1 + {i * item_bytes}], {source}; "
    return text + "mov.b32 $0, 0; }"


_PUT_2, _PUT_4 = (tl.constexpr(_puts(*shape)) for shape in ((4, 2), (8, 4)))


@triton.jit
def _put_octet(address, w, first: tl.constexpr, marks, XB: tl.constexpr):
    """The marked items of the octet whose words start at w[first], from a shared address on."""
    text: tl.constexpr = _PUT_2 if XB == 2 else _PUT_4
    with_words(text, address, w, first, 2 * XB, marks)


@triton.jit
def program_places(heads_ptr, ends_ptr, total, slots):
    """(base int64, stop int32, slot int32): the program's places are the first ``stop`` from base on; the slot that has
    the first one."""
    program = tl.program_id(0).to(tl.int64)
    base = program * PLACES
    stored = tl.minimum(tl.load(ends_ptr + slots - 1), total)
    stop = tl.minimum(tl.maximum(stored - base, 0), PLACES).to(tl.int32)
    slot = tl.zeros((), tl.int32)
    if stop > 0:
        slot = tl.load(heads_ptr + program)
    return base, stop, slot


@triton.jit
def _window(counts_ptr, ends_ptr, slot, slots, base, stop):
    """(begins, ends, inside): int32[LANES], where the items of the slots from ``slot`` on lie, none at or past stop."""
    lane = tl.arange(0, LANES)
    inside = slot + lane < slots
    end = tl.load(ends_ptr + slot + lane, inside, other=0) - base
    begin = end - tl.load(counts_ptr + slot + lane, inside, other=0)
    begin = tl.where(inside, tl.minimum(begin, stop), stop).to(tl.int32)
    return begin, tl.where(inside, tl.minimum(end, stop), stop).to(tl.int32), inside


@triton.jit
def stage_places(
    stage, scratch_ptr, counts_ptr, ends_ptr, slot, slots, base, stop,
    STRIDE: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The items of the first ``stop`` places from base on, the first of ``slot``, to the stage.

    WIDE: the scratch is 16-byte aligned. PIECES: octets of a lane that are loaded before the first is used.
    """
    XB: tl.constexpr = scratch_ptr.dtype.element_ty.primitive_bitwidth // 8
    WORDS: tl.constexpr = 2 * XB
    lane = tl.arange(0, LANES)
    reached = stop * 0
    while reached < stop:
        begin, end, inside = _window(counts_ptr, ends_ptr, slot, slots, base, stop)
        skipped = tl.maximum(-begin, 0) // OCTET
        octets = tl.maximum((end - begin + (OCTET - 1)) // OCTET - skipped, 0)
        upto = sum_upto(octets)
        # what is to be added to 8 times an octet's number to give its place, and to a place to give the item's
        shift = begin - OCTET * (upto - octets - skipped)
        offset = lane * STRIDE - begin
        start = slot.to(tl.int64) * STRIDE
        first = tl.full((), 0, tl.int32)
        while first < tl.max(upto):
            words = ()
            places = ()
            stops = ()
            for p in tl.static_range(PIECES):
                number = first + (lane + p * LANES)
                mine = first_above(upto, number, LANES)
                place = number * OCTET + pick_lane(shift, mine)
                last = tl.where(number < tl.max(upto), pick_lane(end, mine), place)
                source = pick_lane(offset, mine)
                words += load_octet(scratch_ptr, start, place + source, last + source, 0, "raw", False, WIDE)
                places += (place,)
                stops += (last,)
            for p in tl.static_range(PIECES):
                marks = (1 << tl.minimum(stops[p] - places[p], OCTET)) - (1 << tl.maximum(-places[p], 0))
                _put_octet(stage + places[p] * XB, words, p * WORDS, marks, XB)
            first += PIECES * LANES
        slot += LANES
        reached = tl.where(slot < slots, tl.max(tl.where(inside, end, 0)), stop)
