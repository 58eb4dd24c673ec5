"""Slots' items close together: from a scratch of one slot a count to an array of the exact size.

A warp takes some slots and goes through their places in the packed array, a run of neighbours a lane. A lane finds the
slot of its first item among the slots' ends, by bisection over the warp, and reads each item from that slot or, past
its end, from the next one; where some lane's run has a third slot, the warp looks for each item's. So stores are whole
words at aligned addresses, and lanes all have the same to do however the items are spread: slot by slot a warp had a
quarter to a half of a copy's speed on an H200.

With a spill (:mod:`gistkit.kernels.sparse.spill`) slots' ends are redirected, all of a program's or none; nothing else
differs but the place of csr's columns.
"""

import triton
import triton.language as tl

from gistkit.kernels.sparse.ends import columns_base
from gistkit.kernels.warp.lanes import LANES, first_above, pick_lane
from gistkit.kernels.warp.octets import store_words


@triton.jit
def _slots(
    first_slot, slots, counts_ptr, ends_ptr, total, STRIDE: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """(base int64, first place, end, slots' ends, slots after, offsets) of SLOTS slots' items, nothing past total.

    Places count from base, a multiple of RUN, in the packed array. Int32[LANES], one a slot: where its items end; the
    next slot with any; what is to be added to a place to give the item's in the scratch, counted from the first slot.
    """
    start = tl.load(ends_ptr + first_slot) - tl.load(counts_ptr + first_slot).to(tl.int64)
    start = tl.minimum(start, total)
    base = start - (start & (RUN - 1))  # of a redirected start, which may be negative, as well
    lane = tl.arange(0, LANES)
    inside = (first_slot + lane < slots) & (lane < SLOTS)
    end = tl.load(ends_ptr + first_slot + lane, inside, other=0)
    stored = tl.load(counts_ptr + first_slot + lane, inside, other=0).to(tl.int64)
    begins = tl.where(inside, (tl.minimum(end - stored, total) - base).to(tl.int32), 0)
    ends = tl.where(inside, (tl.minimum(end, total) - base).to(tl.int32), 0)
    last = tl.max(ends)
    ends = tl.where(inside, ends, last)
    offsets = tl.where(inside, lane * STRIDE - begins, 0)
    return base, (start - base).to(tl.int32), last, ends, first_above(ends, ends, SLOTS), offsets


@triton.jit
def _runs(place, last, ends, after, offsets, SLOTS: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr):
    """(slots, stops, shifts, next shifts) of PIECES runs, the first at ``place``, and whether none has a third slot.
    The slot of a run's first item, the place where its items stop, what is to be added to a place before it to give the
    item's in the scratch, and to one from there on."""
    slots = ()
    stops = ()
    shifts = ()
    next_shifts = ()
    left = place * 0
    for p in tl.static_range(PIECES):
        at = place + p * RUN * LANES
        slot = first_above(ends, at, SLOTS)
        second = pick_lane(after, slot)
        slots += (slot,)
        stops += (pick_lane(ends, slot),)
        shifts += (pick_lane(offsets, slot),)
        next_shifts += (pick_lane(offsets, second),)
        left = tl.maximum(left, tl.minimum(at + RUN, last) - pick_lane(ends, second))
    return slots, stops, shifts, next_shifts, tl.max(left) <= 0


@triton.jit
def _whole(at, begin, last, RUN: tl.constexpr):
    """Whether runs from ``at`` on are of the program's slots altogether."""
    return (at >= begin) & (at + RUN <= last)


@triton.jit
def _load_of_two(scratch_ptr, place, begin, last, stops, shifts, next_shifts, RUN: tl.constexpr):
    """Items of whole runs, each of no more than two slots."""
    items = ()
    for p in tl.static_range(len(stops)):
        at = place + p * RUN * LANES
        ptr, next_ptr = scratch_ptr + (at + shifts[p]), scratch_ptr + (at + next_shifts[p])
        for i in tl.static_range(RUN):
            items += (tl.load(tl.where(at + i < stops[p], ptr, next_ptr) + i, _whole(at, begin, last, RUN), other=0),)
    return items


@triton.jit
def _load_of_any(scratch_ptr, place, begin, last, slots, ends, after, offsets, RUN: tl.constexpr):
    """Items of whole runs that start in ``slots``."""
    items = ()
    for p in tl.static_range(len(slots)):
        at = place + p * RUN * LANES
        slot = slots[p]
        for i in tl.static_range(RUN):
            slot = tl.where(pick_lane(ends, slot) <= at + i, pick_lane(after, slot), slot)
            source = at + i + pick_lane(offsets, slot)
            items += (tl.load(scratch_ptr + source, _whole(at, begin, last, RUN), other=0),)
    return items


@triton.jit
def _store_runs(packed_ptr, items, place, begin, last, RUN: tl.constexpr):
    """Whole runs of items to their places, as words."""
    BITS: tl.constexpr = packed_ptr.dtype.element_ty.primitive_bitwidth
    for p in tl.static_range(len(items) // RUN):
        at = place + p * RUN * LANES
        words = ()
        for i in tl.static_range(p * RUN, p * RUN + RUN, 32 // BITS):
            word = items[i].to(tl.int32)
            for k in tl.static_range(1, 32 // BITS):
                word = (word & ((1 << (BITS * k)) - 1)) | (items[i + k].to(tl.int32) << (BITS * k))
            words += (word,)
        if len(words) > 1:
            store_words(packed_ptr + at, words, _whole(at, begin, last, RUN))
        else:
            for w in tl.static_range(len(words)):
                word_ptr = (packed_ptr + at).to(tl.pointer_type(tl.int32)) + w
                tl.store(word_ptr, words[w], _whole(at, begin, last, RUN))


@triton.jit
def _edges(begin, last, ends, offsets, SLOTS: tl.constexpr, RUN: tl.constexpr):
    """(places, sources, which) of the items of the first and the last run, if they are not whole."""
    lane = tl.arange(0, LANES)
    inner = lane % (LANES // 2)
    start = tl.where(lane < LANES // 2, 0, last - last % RUN)
    place = start + inner
    mine = (inner < RUN) & (place >= begin) & (place < last) & (_whole(start, begin, last, RUN) == 0)
    return place, place + pick_lane(offsets, first_above(ends, place, SLOTS)), mine


@triton.jit(do_not_specialize=["total", "slots", "capacity", "columns_at"])
def compact_kernel(
    columns_ptr, values_ptr, counts_ptr, ends_ptr, packed_columns_ptr, packed_ptr, spill_ptr,
    total, slots, capacity, columns_at,
    STRIDE: tl.constexpr, SLOTS: tl.constexpr, RUN: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr,
    SPILL: tl.constexpr,
):  # fmt: skip
    """SLOTS slots' items, and with COLUMNS their columns, to their places in the packed arrays; never past total.
    SPILL: see columns_base."""
    first_slot = tl.program_id(0).to(tl.int64) * SLOTS
    base, begin, last, ends, after, offsets = _slots(first_slot, slots, counts_ptr, ends_ptr, total, STRIDE, SLOTS, RUN)
    if SPILL:
        packed_columns_ptr = columns_base(packed_columns_ptr, packed_ptr, spill_ptr, base + begin, capacity, columns_at)
    columns_ptr += first_slot * STRIDE
    values_ptr += first_slot * STRIDE
    packed_columns_ptr += base
    packed_ptr += base
    edge, source, mine = _edges(begin, last, ends, offsets, SLOTS, RUN)
    if COLUMNS:
        edge_columns, edge_values = tl.load(columns_ptr + source, mine), tl.load(values_ptr + source, mine)
        tl.store(packed_columns_ptr + edge, edge_columns, mine)
        tl.store(packed_ptr + edge, edge_values, mine)
    else:
        tl.store(packed_ptr + edge, tl.load(values_ptr + source, mine), mine)
    place = tl.arange(0, LANES) * RUN
    first = tl.full((), 0, tl.int32)
    while first < last:
        found, stops, shifts, next_shifts, two = _runs(place, last, ends, after, offsets, SLOTS, RUN, PIECES)
        if two:
            if COLUMNS:
                columns = _load_of_two(columns_ptr, place, begin, last, stops, shifts, next_shifts, RUN)
            values = _load_of_two(values_ptr, place, begin, last, stops, shifts, next_shifts, RUN)
        else:
            if COLUMNS:
                columns = _load_of_any(columns_ptr, place, begin, last, found, ends, after, offsets, RUN)
            values = _load_of_any(values_ptr, place, begin, last, found, ends, after, offsets, RUN)
        if COLUMNS:
            _store_runs(packed_columns_ptr, columns, place, begin, last, RUN)
        _store_runs(packed_ptr, values, place, begin, last, RUN)
        place += PIECES * RUN * LANES
        first += PIECES * RUN * LANES
