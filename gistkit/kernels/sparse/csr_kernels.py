"""Compressed sparse rows of 256 elements with one-byte columns (Gist's SSDC); a warp a program, some rows each.

Encoding: rows are put together in shared memory (see stage.py) and leave it in whole words. A lane holds eight
neighbours of each of four rows (see octets.py). Decoding and ReLU's
backward: csr_readers.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octet_codes import narrow_octet
from gistkit.kernels.warp.octets import CHUNKS, OCTET, load_octets, octet_marks, row_places, store_words
from gistkit.kernels.warp.stage import open_stage, unstage_words, warp_sync
from gistkit.kernels.warp.stage_rows import push_row, unstage_columns

COLUMNS = tl.constexpr(CSR_COLUMNS)


@triton.jit(do_not_specialize=["n"])
def csr_encode_kernel(
    x_ptr, counts_ptr, columns_ptr, values_ptr, n, FMT: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
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
    places, counts = row_places(marks)
    stored = tl.zeros((LANES,), tl.int32)
    for r in tl.static_range(CHUNKS):
        stored = tl.where(lane == r, counts[r], stored)
    tl.store(counts_ptr + first_row + lane, stored.to(tl.int16), lane * COLUMNS < left)
    columns_ptr += first_row * COLUMNS
    values_ptr += first_row * COLUMNS
    ROW_BYTES: tl.constexpr = 2 * COLUMNS * XB
    STAGED: tl.constexpr = 4096 // ROW_BYTES  # rows that are in shared memory at a time
    stage = open_stage(lane, 4)
    for first in tl.static_range(0, CHUNKS, STAGED):
        if first:
            stage = warp_sync(stage)
        for r in tl.static_range(STAGED):
            address = stage + r * ROW_BYTES + places[first + r] * XB
            push_row(address, lane * OCTET, words, (first + r) * WORDS, XB)
        stage = warp_sync(stage)
        for r in tl.static_range(STAGED):
            _flush_row(
                stage + r * ROW_BYTES, columns_ptr + (first + r) * COLUMNS, values_ptr + (first + r) * COLUMNS,
                lane * OCTET, counts[first + r], FMT, DTYPE, ASM,
            )  # fmt: skip


@triton.jit
def _flush_row(stage, columns_ptr, values_ptr, place, count, FMT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """A staged row's columns, and its patterns as values of FMT, with what fills up their last octet."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    words = unstage_words(stage + place * XB, 2 * XB)
    columns = unstage_columns(stage + COLUMNS * XB + place * XB, XB)
    store_words(values_ptr + place, narrow_octet(words, FMT, DTYPE, ASM), place < count)
    store_words(columns_ptr + place, columns, place < count)
