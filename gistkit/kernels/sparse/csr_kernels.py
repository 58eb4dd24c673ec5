"""Compressed sparse rows of 256 elements with one-byte columns (Gist's SSDC); a warp a program, four rows each.

Encoding: rows are put together in shared memory (see stage.py) and leave it in whole words.

Decoding and ReLU's backward: the rows of a program are close together in the packed arrays, so they are read as one
run, in aligned octets (what the neighbouring programs' rows have of the first and the last one is left out), and
converted in whole words; where rows end, an element's row goes up by one. Each goes to its place in the warp's shared
memory, which it leaves in whole words. In a scratch rows start 256 apart. Rows and flags are bytes, an octet's in two
words, made by shifts of the words in which every byte is 1. ReLU's backward puts a byte to the place of each element
that lets the gradient pass: no value is decoded.
"""

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.narrow.rounding import decoding_factor
from gistkit.kernels.sparse.ends import columns_base
from gistkit.kernels.sparse.values import BLOCK, load_octet, scale_address
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octet_codes import narrow_octet, widen_octet
from gistkit.kernels.warp.octets import (
    CHUNK,
    CHUNKS,
    OCTET,
    load_octets,
    octet_marks,
    passed,
    passing_flags,
    row_places,
    spread_program,
    store_octet,
    store_words,
)
from gistkit.kernels.warp.stage import (
    bytes_from,
    clear_stage,
    open_stage,
    push_row,
    put_flags,
    put_octet,
    spread_flags,
    unstage_columns,
    unstage_words,
    warp_sync,
)

COLUMNS = tl.constexpr(CSR_COLUMNS)


@triton.jit(do_not_specialize=["n"])
def csr_encode_kernel(
    x_ptr, counts_ptr, columns_ptr, values_ptr, n, FMT: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Counts, columns and values of CHUNKS rows, those of row r from 256 * r on. WIDE: x_ptr is 16-byte aligned and n a
    multiple of 8."""
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


@triton.jit
def program_rows(first_row, n, counts_ptr, ends_ptr, PACKED: tl.constexpr):
    """(start, bounds): from start (int64, a multiple of 8) on, the rows' items lie between the bounds (int32). Packed,
    row r's between bounds r and r + 1; in a scratch, from 256 * r to bound r. Rows past the end have none."""
    start = first_row * COLUMNS
    bounds = ()
    for r in tl.static_range(CHUNKS):
        count = tl.load(counts_ptr + first_row + r, (first_row + r) * COLUMNS < n, other=0).to(tl.int32)
        if PACKED:
            if r == 0:
                start = tl.load(ends_ptr + first_row) - count
                bounds += ((start & (OCTET - 1)).to(tl.int32),)
                start -= bounds[0]
            bounds += (bounds[r] + count,)
        else:
            bounds += (r * COLUMNS + count,)
    return start, bounds


@triton.jit
def sites(place, bounds):
    """(flags, rows) of the octet at place of a packed run: whether its items are the program's, and their rows."""
    inside, past = bytes_from(bounds[0] - place), bytes_from(bounds[4] - place)
    second, third, fourth = bytes_from(bounds[1] - place), bytes_from(bounds[2] - place), bytes_from(bounds[3] - place)
    flags = (inside[0] - past[0], inside[1] - past[1])
    return flags, (second[0] + third[0] + fourth[0], second[1] + third[1] + fourth[1])


@triton.jit
def row_sites(place, stop, row: tl.constexpr):
    """As :func:`sites`, of a scratch's row that ends at stop."""
    past = bytes_from(stop - place)
    rows = place * 0 + row * 0x01010101
    return (0x01010101 - past[0], 0x01010101 - past[1]), (rows, rows)


@triton.jit
def load_pieces(
    columns_ptr, values_ptr, start, place, stop, plane, FMT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """(columns, words) of a lane's PIECES octets of bytes and values, the first at start + place."""
    columns = ()
    words = ()
    for p in tl.static_range(PIECES):
        columns += load_octet(columns_ptr, start, place + p * CHUNK, stop, plane, "raw", PACKED, WIDE)
        words += load_octet(values_ptr, start, place + p * CHUNK, stop, plane, FMT, PACKED, WIDE)
    return columns, words


@triton.jit
def _put(
    stage, columns, flags, rows, words, piece: tl.constexpr, scale, FMT: tl.constexpr, SCALED: tl.constexpr,
    DTYPE: tl.constexpr, FLAGS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The piece's elements to their places; FLAGS: the byte 0xFF to those of all that are not negative zeros."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    WORDS: tl.constexpr = 2 if FMT == "fp8" else (2 * XB if FMT == "raw" else 4)
    columns = (columns[2 * piece], columns[2 * piece + 1])
    if FLAGS:
        passing = passing_flags(words, piece * WORDS, WORDS, FMT, ASM)
        put_flags(stage, columns, rows, (flags[0] & passing[0], flags[1] & passing[1]))
    else:
        elements = widen_octet(words, piece * WORDS, WORDS, scale, FMT, SCALED, DTYPE, ASM)
        put_octet(stage, columns, rows, flags, elements, XB)


@triton.jit
def _stage_rows(
    stage, columns_ptr, values_ptr, exponents_ptr, start, bounds, plane, lane, FMT: tl.constexpr,
    SCALING: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    FLAGS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The rows' elements to the stage, as patterns of DTYPE; FLAGS: see _put."""
    scale = tl.full((LANES,), 1.0, tl.float32)
    if PACKED:
        if SCALING == "block":
            exponents_ptr = scale_address(exponents_ptr, start, lane * OCTET)
        first = tl.full((), 0, tl.int32)
        while first < bounds[4]:
            place = first + lane * OCTET
            columns, words = load_pieces(
                columns_ptr, values_ptr, start, place, bounds[4], plane, FMT, PACKED, WIDE, PIECES
            )
            scales = ()
            if SCALING == "block":
                for p in tl.static_range(PIECES):
                    address = exponents_ptr + (first + p * CHUNK) // BLOCK
                    scales += (tl.load(address, place + p * CHUNK < bounds[4]).to(tl.int32),)
            for p in tl.static_range(PIECES):
                if first + p * CHUNK < bounds[4]:
                    flags, rows = sites(place + p * CHUNK, bounds)
                    if SCALING == "block":
                        scale = decoding_factor(scales[p], FMT)
                    _put(stage, columns, flags, rows, words, p, scale, FMT, SCALING != "none", DTYPE, FLAGS, ASM)
            first += PIECES * CHUNK
    else:
        for r in tl.static_range(CHUNKS):
            if r * CHUNK < bounds[r]:
                place = r * CHUNK + lane * OCTET
                columns, words = load_pieces(
                    columns_ptr, values_ptr, start, place, bounds[r], plane, FMT, PACKED, WIDE, 1
                )
                flags, rows = row_sites(place, bounds[r], r)
                _put(stage, columns, flags, rows, words, 0, scale, FMT, False, DTYPE, FLAGS, ASM)


@triton.jit(do_not_specialize=["n", "plane", "columns_at"])
def csr_decode_kernel(
    out_ptr, grad_ptr, counts_ptr, ends_ptr, columns_ptr, values_ptr, exponents_ptr, spill_ptr, n, plane, columns_at,
    FMT: tl.constexpr, SCALING: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    WHOLE: tl.constexpr, GRAD: tl.constexpr, GRAD_WIDE: tl.constexpr, PIECES: tl.constexpr, SPILL: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """CHUNKS rows of x: the stored elements at their columns, +0 elsewhere. GRAD: of grad where an element is stored
    that is not a negative zero, else +0, bit patterns throughout; SCALING is none then. WIDE: columns_ptr and
    values_ptr are 16-byte aligned, WHOLE: n is a multiple of 8, GRAD_WIDE: it is and grad_ptr is 16-byte aligned.
    PIECES: octets of a lane that are loaded before the first is used. plane: items of values_ptr, which fp10 and SPILL
    (see columns_base) ask for."""
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    STAGED: tl.constexpr = 1 if GRAD else XB
    first_row = spread_program(PACKED and FMT == "fp10") * CHUNKS
    lane = tl.arange(0, LANES)
    out_ptr += first_row * COLUMNS
    left = tl.minimum(n - first_row * COLUMNS, CHUNKS * COLUMNS).to(tl.int32)
    start, bounds = program_rows(first_row, n, counts_ptr, ends_ptr, PACKED)
    if SPILL:
        columns_ptr = columns_base(columns_ptr, values_ptr, spill_ptr, start, plane, columns_at)
    if GRAD:
        grads = load_octets(grad_ptr + first_row * COLUMNS, left, XB, GRAD_WIDE)
    stage = open_stage(lane, STAGED)
    clear_stage(stage, lane, CHUNKS * COLUMNS * STAGED)
    stage = warp_sync(stage)
    _stage_rows(
        stage, columns_ptr, values_ptr, exponents_ptr, start, bounds, plane, lane, FMT, SCALING, PACKED, DTYPE, WIDE,
        PIECES, GRAD, ASM,
    )  # fmt: skip
    stage = warp_sync(stage)
    # 16 bytes a lane beside its neighbours': eight elements of fp32 would fill half a sector a store
    ITEMS: tl.constexpr = OCTET if GRAD else 16 // XB
    for first in tl.static_range(0, CHUNKS * COLUMNS, LANES * ITEMS):
        place = lane * ITEMS + first
        words = unstage_words(stage + place * STAGED, ITEMS * STAGED // 4)
        if GRAD:
            words = passed(grads, first // LANES // OCTET * 2 * XB, spread_flags(words, XB))
        store_octet(out_ptr, words, place, left, XB, WHOLE)
