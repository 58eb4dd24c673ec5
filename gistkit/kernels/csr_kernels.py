"""Compressed sparse rows of 256 elements with one-byte columns (Gist's SSDC); a warp a program, some rows each.

Rows are put together in shared memory (see stage.py) and leave it, or reach it, in whole words. An encoder's lane holds
eight neighbours of each of four rows (see octets.py). The interpreter scatters to global memory instead.
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.lanes import LANES
from gistkit.kernels.octet_codes import narrow_octet
from gistkit.kernels.octets import CHUNKS, OCTET, item_of, load_octets, octet_marks, row_places, store_words
from gistkit.kernels.rounding import to_code
from gistkit.kernels.sparse_values import is_negative_zero, load_items, load_values, slot_start, tensor_factor
from gistkit.kernels.stage import (
    clear_stage,
    get_items,
    get_words,
    open_stage,
    push_row,
    put,
    unstage_columns,
    unstage_words,
    warp_sync,
)

COLUMNS = tl.constexpr(CSR_COLUMNS)


@triton.jit(do_not_specialize=["n"])
def csr_encode_kernel(
    x_ptr,
    counts_ptr,
    columns_ptr,
    values_ptr,
    n,
    FMT: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    ASM: tl.constexpr,
):
    """Counts, columns and values of CHUNKS rows, those of row r from 256 * r on.

    WIDE: x_ptr is 16-byte aligned and n a multiple of 8.
    """
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORDS: tl.constexpr = 2 * XB
    first_row = tl.program_id(0).to(tl.int64) * CHUNKS
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - first_row * COLUMNS, CHUNKS * COLUMNS).to(tl.int32)
    words = load_octets(x_ptr + first_row * COLUMNS, left, XB, WIDE)
    marks = ()
    for r in tl.static_range(CHUNKS):
        marks += (octet_marks(words, r * WORDS, XB, ASM),)
    places, counts = row_places(marks, ASM)
    stored = tl.zeros((LANES,), tl.int32)
    for r in tl.static_range(CHUNKS):
        stored = tl.where(lane == r, counts[r], stored)
    tl.store(counts_ptr + first_row + lane, stored.to(tl.int16), lane * COLUMNS < left)
    columns_ptr += first_row * COLUMNS
    values_ptr += first_row * COLUMNS
    if ASM:
        ROW_BYTES: tl.constexpr = 2 * COLUMNS * XB
        STAGED: tl.constexpr = 4096 // ROW_BYTES  # rows that are in shared memory at a time
        stage = open_stage(lane, 4096)
        for first in tl.static_range(0, CHUNKS, STAGED):
            if first:
                stage = warp_sync(stage)
            for r in tl.static_range(STAGED):
                address = stage + r * ROW_BYTES + places[first + r] * XB
                push_row(address, lane * OCTET, words, (first + r) * WORDS, XB)
            stage = warp_sync(stage)
            for r in tl.static_range(STAGED):
                _flush_row(
                    stage + r * ROW_BYTES,
                    columns_ptr + (first + r) * COLUMNS,
                    values_ptr + (first + r) * COLUMNS,
                    lane * OCTET,
                    counts[first + r],
                    FMT,
                    DTYPE,
                    ASM,
                )
    else:
        for r in tl.static_range(CHUNKS):
            _scatter_row(columns_ptr + r * COLUMNS, values_ptr + r * COLUMNS, places[r], words, r * WORDS, FMT, DTYPE)


@triton.jit
def _flush_row(stage, columns_ptr, values_ptr, place, count, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A staged row's columns, and its patterns as values of FMT, with what fills up their last octet."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    words = unstage_words(stage + place * XB, 2 * XB)
    columns = unstage_columns(stage + COLUMNS * XB + place * XB, XB)
    store_words(values_ptr + place, narrow_octet(words, FMT, DTYPE, ASM), place < count)
    store_words(columns_ptr + place, columns, place < count)


@triton.jit
def _scatter_row(columns_ptr, values_ptr, place, words, first: tl.constexpr, FMT: tl.constexpr, DTYPE: tl.constexpr):
    """An octet's values and columns straight to global memory (interpreter)."""
    for i in tl.static_range(OCTET):
        item = item_of(words, first, i, DTYPE.primitive_bitwidth // 8)
        code = item
        if FMT != "raw":
            code = to_code(item.to(DTYPE, bitcast=True), FMT)
        column = tl.arange(0, LANES) * OCTET + i
        tl.store(values_ptr + place, code.to(values_ptr.dtype.element_ty), item != 0)
        tl.store(columns_ptr + place, column.to(tl.uint8), item != 0)
        place += (item != 0).to(tl.int32)


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
