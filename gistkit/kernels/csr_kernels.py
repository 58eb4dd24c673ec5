"""Compressed sparse rows of 256 elements with one-byte columns (Gist's SSDC); a warp a program, some rows each.

Rows are put together in shared memory (see stage.py) and leave it, or reach it, in whole 8-byte words. An encoder's
lane holds eight elements of a row, in words of eight bytes, LANES words side by side; a scan over the lanes' counts,
those of each word of a row in a byte of its own, gives the places. The interpreter scatters to global memory instead.
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.lanes import LANES, last_lane, load_rows, sum_upto
from gistkit.kernels.rounding import to_code
from gistkit.kernels.sparse_values import is_negative_zero, load_items, load_values, slot_start, tensor_factor
from gistkit.kernels.stage import clear_stage, get_items, get_words, open_stage, put

COLUMNS = tl.constexpr(CSR_COLUMNS)


@triton.jit
def _load_words(x_ptr, left, ROWS: tl.constexpr, XB: tl.constexpr, WIDE: tl.constexpr):
    """ROWS rows as int64[LANES], COLUMNS * XB / 256 of them a row, 0 from element left on: all loads before any use.

    XB: bytes an element. WIDE: x_ptr is one of int64, and left a whole number of its words.
    """
    PER_WORD: tl.constexpr = 8 // XB
    WORDS: tl.constexpr = ROWS * XB
    if WIDE:
        return load_rows(x_ptr, 0, left // PER_WORD, WORDS)
    else:
        words = ()
        for w in tl.static_range(WORDS):
            word = tl.zeros((LANES,), tl.int64)
            for i in tl.static_range(PER_WORD):
                offs = (tl.arange(0, LANES) + w * LANES) * PER_WORD + i
                item = tl.load(x_ptr + offs, offs < left, other=0).to(tl.int64)
                word |= (item & ((1 << (8 * XB)) - 1)) << (8 * XB * i)
            words += (word,)
        return words


@triton.jit
def _items(words, first: tl.constexpr, XB: tl.constexpr):
    """The eight elements a lane of the row whose words start at words[first]: int32 patterns, zero-extended."""
    items = ()
    for w in tl.static_range(XB):
        for half in tl.static_range(2):
            bits = (words[first + w] >> (32 * half)).to(tl.int32)
            if XB == 4:
                items += (bits,)
            else:
                items += (bits & 0xFFFF, (bits >> 16) & 0xFFFF)
    return items


@triton.jit
def _row_starts(items, XB: tl.constexpr, ASM: tl.constexpr):
    """(places, count) of a row: byte w of places is where the stored elements of the lane's word w start."""
    mine = tl.zeros((LANES,), tl.int32)
    for w in tl.static_range(XB):
        for i in tl.static_range(8 // XB):
            mine += (items[w * (8 // XB) + i] != 0).to(tl.int32) << (8 * w)
    upto = sum_upto(mine, ASM)
    total = last_lane(upto, ASM)
    count = (total & 0xFF) + ((total >> 8) & 0xFF)
    if XB == 4:
        count += ((total >> 16) & 0xFF) + ((total >> 24) & 0xFF)
    # the product adds up the bytes below each: no more than 192 where the byte is read
    return upto - mine + total * 0x01010100, count


@triton.jit
def _flush(stage, out_ptr, count, ITEM_BYTES: tl.constexpr):
    """The first count items of a row, and what fills up their last word, from the stage to out_ptr (8-byte aligned)."""
    out = out_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    for first in tl.static_range(0, COLUMNS * ITEM_BYTES // 8, LANES):
        word = tl.arange(0, LANES) + first
        tl.store(out + word, get_words(stage, word), word * (8 // ITEM_BYTES) < count)


@triton.jit(do_not_specialize=["n"])
def csr_encode_kernel(
    x_ptr,
    counts_ptr,
    columns_ptr,
    values_ptr,
    n,
    FMT: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Counts, columns and values of ROWS rows, those of row r from 256 * r on. x_ptr: int64 words where WIDE."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    VB: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth // 8
    PER_WORD: tl.constexpr = 8 // XB
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - first_row * COLUMNS, ROWS * COLUMNS).to(tl.int32)
    words = _load_words(x_ptr + first_row * (COLUMNS // PER_WORD if WIDE else COLUMNS), left, ROWS, XB, WIDE)
    counts = tl.zeros((LANES,), tl.int32)
    for r in tl.static_range(ROWS):
        items = _items(words, r * XB, XB)
        starts, count = _row_starts(items, XB, ASM)
        if ASM:
            values = open_stage(lane, COLUMNS * VB)
            columns = open_stage(lane, COLUMNS)
        row = (first_row + r) * COLUMNS
        for w in tl.static_range(XB):
            place = (starts >> (8 * w)) & 0xFF
            for i in tl.static_range(PER_WORD):
                item = items[w * PER_WORD + i]
                code = item
                if FMT != "raw":
                    code = to_code(item.to(tl.int32 if XB == 4 else tl.int16).to(DTYPE, bitcast=True), FMT)
                column = (lane + w * LANES) * PER_WORD + i
                if ASM:
                    put(values, place, code, item, VB)
                    put(columns, place, column, item, 1)
                else:
                    tl.store(values_ptr + row + place, code.to(values_ptr.dtype.element_ty), item != 0)
                    tl.store(columns_ptr + row + place, column.to(tl.uint8), item != 0)
                place += (item != 0).to(tl.int32)
        if ASM:
            _flush(values, values_ptr + row, count, VB)
            _flush(columns, columns_ptr + row, count, 1)
        counts = tl.where(lane == r, count, counts)
    tl.store(counts_ptr + first_row + lane, counts.to(tl.int16), lane * COLUMNS < left)


@triton.jit
def _fill_zero(x_ptr, left, SIZE: tl.constexpr):
    """The first min(left, SIZE) elements become +0, 16 bytes at a time where all of them do."""
    offs = tl.arange(0, SIZE)
    zeros = tl.zeros((SIZE,), x_ptr.dtype.element_ty)
    if left >= SIZE:
        tl.store(x_ptr + offs, zeros)
    else:
        tl.store(x_ptr + offs, zeros, offs < left)


@triton.jit
def _row_places(first_row, n, counts_ptr, ends_ptr, ROWS: tl.constexpr, PACKED: tl.constexpr):
    """(counts int32, first places int64 of the values, the largest count) of ROWS rows; rows past the end have none."""
    counts = ()
    starts = ()
    most = 0
    for r in tl.static_range(ROWS):
        inside = (first_row + r) * COLUMNS < n
        count = tl.load(counts_ptr + first_row + r, inside, other=0).to(tl.int32)
        counts += (count,)
        starts += (slot_start(first_row + r, inside, count, ends_ptr, COLUMNS, PACKED),)
        most = tl.maximum(most, count)
    return counts, starts, most


@triton.jit
def _store_row(stage, x_ptr, left, XB: tl.constexpr):
    """A staged row to x_ptr (8-byte aligned), no further than element left."""
    if left >= COLUMNS:
        out = x_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        for first in tl.static_range(0, COLUMNS * XB // 8, LANES):
            word = tl.arange(0, LANES) + first
            tl.store(out + word, get_words(stage, word))
    else:
        for first in tl.static_range(0, COLUMNS, LANES):
            offs = tl.arange(0, LANES) + first
            item = get_items(stage, offs, XB).to(tl.int32 if XB == 4 else tl.int16)
            tl.store(x_ptr + offs, item.to(x_ptr.dtype.element_ty, bitcast=True), offs < left)


@triton.jit(do_not_specialize=["n", "plane"])
def csr_decode_kernel(
    x_ptr,
    counts_ptr,
    ends_ptr,
    columns_ptr,
    values_ptr,
    exponents_ptr,
    n,
    plane,
    FMT: tl.constexpr,
    SCALING: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS rows of x: +0, then the stored elements at their columns, PIECES warp's widths of every row at a time."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    XB: tl.constexpr = dtype.primitive_bitwidth // 8
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, LANES)
    counts, starts, most = _row_places(first_row, n, counts_ptr, ends_ptr, ROWS, PACKED)
    x_ptr += first_row * COLUMNS
    if ASM:
        stages = ()
        for r in tl.static_range(ROWS):
            stages += (open_stage(lane, COLUMNS * XB),)
            clear_stage(stages[r], lane, COLUMNS * XB)
    else:
        _fill_zero(x_ptr, n - first_row * COLUMNS, ROWS * COLUMNS)
    factor = tensor_factor(exponents_ptr, FMT, SCALING)
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    first = tl.full((), 0, tl.int32)
    while first < most:
        columns = ()
        values = ()
        for r in tl.static_range(ROWS):
            for p in tl.static_range(PIECES):
                places = first + (lane + p * LANES)
                stored = places < counts[r]
                columns += (tl.load(columns_ptr + starts[r] + places, stored, other=0).to(tl.int32),)
                values += (
                    load_values(
                        values_ptr, exponents_ptr, starts[r], places, stored, plane, factor, FMT, SCALING, PACKED, dtype
                    ),
                )
        for r in tl.static_range(ROWS):
            for p in tl.static_range(PIECES):
                stored = first + (lane + p * LANES) < counts[r]
                column = columns[r * PIECES + p]
                value = values[r * PIECES + p]
                if ASM:
                    item = value.to(tl.int32 if XB == 4 else tl.int16, bitcast=True).to(tl.int32)
                    put(stages[r], column, item, stored.to(tl.int32), XB)
                else:
                    tl.store(x_ptr + r * COLUMNS + column, value, stored)
        first += LANES * PIECES
    if ASM:
        left = tl.minimum(n - first_row * COLUMNS, ROWS * COLUMNS).to(tl.int32)
        for r in tl.static_range(ROWS):
            _store_row(stages[r], x_ptr + r * COLUMNS, left - r * COLUMNS, XB)


@triton.jit(do_not_specialize=["n", "plane"])
def csr_backward_kernel(
    out_ptr,
    grad_ptr,
    counts_ptr,
    ends_ptr,
    columns_ptr,
    values_ptr,
    n,
    plane,
    FMT: tl.constexpr,
    PACKED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of grad where an element is stored that is not a negative zero, else +0; reads no other gradient."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, LANES)
    counts, starts, most = _row_places(first_row, n, counts_ptr, ends_ptr, ROWS, PACKED)
    _fill_zero(out_ptr + first_row * COLUMNS, n - first_row * COLUMNS, ROWS * COLUMNS)
    tl.debug_barrier()
    first = tl.full((), 0, tl.int32)
    while first < most:
        columns = ()
        passing = ()
        for r in tl.static_range(ROWS):
            places = first + lane
            stored = places < counts[r]
            columns += (tl.load(columns_ptr + starts[r] + places, stored, other=0).to(tl.int32),)
            item = load_items(values_ptr, starts[r], places, stored, plane, FMT, PACKED)
            passing += (stored & ~is_negative_zero(item, FMT),)
        grads = ()
        for r in tl.static_range(ROWS):
            offs = first_row * COLUMNS + r * COLUMNS + columns[r]
            grads += (tl.load(grad_ptr + offs, passing[r], other=0),)
        for r in tl.static_range(ROWS):
            offs = first_row * COLUMNS + r * COLUMNS + columns[r]
            tl.store(out_ptr + offs, grads[r], passing[r])
        first += LANES
