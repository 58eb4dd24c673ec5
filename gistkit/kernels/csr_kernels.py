"""Compressed sparse rows of 256 elements with one-byte columns (Gist's SSDC).

Encoding ranks by ballots, a warp four rows, one element a lane (see lanes.py). Decoding fills its rows with zeros and,
past a barrier, scatters what is stored: the work follows the stored elements, few where csr pays (below an eighth).
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.lanes import LANES, load_rows, mark_rows
from gistkit.kernels.rounding import to_code
from gistkit.kernels.sparse_values import is_negative_zero, load_items, load_values, slot_start, tensor_factor

COLUMNS = tl.constexpr(CSR_COLUMNS)
PIECES = tl.constexpr(CSR_COLUMNS // 32)


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
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """Counts, columns and values of ROWS rows, those of row r from 256 * r on; AHEAD rows are loaded at a time."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - first_row * COLUMNS, ROWS * COLUMNS).to(tl.int32)
    counts = tl.zeros((LANES,), tl.int32)
    for first in tl.static_range(0, ROWS, AHEAD):
        pieces = load_rows(x_ptr + first_row * COLUMNS, first * COLUMNS, left, AHEAD * PIECES)
        for r in tl.static_range(AHEAD):
            _, places, done = mark_rows(pieces, r * PIECES, lane * 0, PIECES, ASM)
            for p in tl.static_range(PIECES):
                item = pieces[r * PIECES + p]
                stored = item != 0
                if FMT != "raw":
                    item = to_code(item.to(DTYPE, bitcast=True), FMT).to(values_ptr.dtype.element_ty)
                at = places[p] + (first + r) * COLUMNS
                tl.store(values_ptr + first_row * COLUMNS + at, item, stored)
                tl.store(columns_ptr + first_row * COLUMNS + at, (lane + p * LANES).to(tl.uint8), stored)
            counts = tl.where(lane == first + r, done, counts)
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
):
    """ROWS rows of x: +0, then the stored elements at their columns, a warp's width of every row at a time."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    lane = tl.arange(0, LANES)
    counts, starts, most = _row_places(first_row, n, counts_ptr, ends_ptr, ROWS, PACKED)
    _fill_zero(x_ptr + first_row * COLUMNS, n - first_row * COLUMNS, ROWS * COLUMNS)
    tl.debug_barrier()
    factor = tensor_factor(exponents_ptr, FMT, SCALING)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    first = tl.full((), 0, tl.int32)
    while first < most:
        columns = ()
        values = ()
        for r in tl.static_range(ROWS):
            places = first + lane
            stored = places < counts[r]
            columns += (tl.load(columns_ptr + starts[r] + places, stored, other=0).to(tl.int32),)
            values += (
                load_values(
                    values_ptr, exponents_ptr, starts[r], places, stored, plane, factor, FMT, SCALING, PACKED, dtype
                ),
            )
        for r in tl.static_range(ROWS):
            offs = columns[r] + r * COLUMNS
            tl.store(x_ptr + first_row * COLUMNS + offs, values[r], first + lane < counts[r])
        first += LANES


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
