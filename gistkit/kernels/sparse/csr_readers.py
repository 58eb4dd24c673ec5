"""Rows of csr read back, and ReLU's backward from them; a warp a program, four rows of 256 elements each.

The rows of a program are close together in the packed arrays, so they are read as one run, eight stored elements a
lane, aligned, and converted in whole words; where rows end, an element's row goes up by one. From there each goes to
its place in the warp's shared memory (see stage_rows.py), which leaves it in whole words. A lane a stored element of
each row instead took three rounds at half density, and fp10 40 instructions an element. In a scratch rows
start 256 apart, one after the other.

ReLU's backward puts a byte to the place of each element that lets the gradient pass: no value is decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import decoding_factor
from gistkit.kernels.sparse.csr_rows import COLUMNS, load_pieces, program_rows, row_sites, sites
from gistkit.kernels.sparse.ends import columns_base
from gistkit.kernels.sparse.values import BLOCK, scale_address
from gistkit.kernels.warp.lanes import LANES
from gistkit.kernels.warp.octet_codes import widen_octet
from gistkit.kernels.warp.octet_stores import store_octet
from gistkit.kernels.warp.octets import CHUNK, CHUNKS, OCTET, load_octets, passing_flags, spread_program
from gistkit.kernels.warp.stage import clear_stage, open_stage, unstage_words, warp_sync
from gistkit.kernels.warp.stage_rows import put_flags, put_octet, spread_flags


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
        elements = widen_octet(words, piece * WORDS, WORDS, scale, FMT, SCALED, DTYPE)
        put_octet(stage, columns, rows, flags, elements, XB)


@triton.jit
def _stage_rows(
    stage, columns_ptr, values_ptr, exponents_ptr, start, bounds, plane, lane, FMT: tl.constexpr,
    SCALING: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    FLAGS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The rows' elements to their places of the stage, as patterns of DTYPE; FLAGS: see _put, DTYPE is then that of the
    values' items."""
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
    x_ptr, counts_ptr, ends_ptr, columns_ptr, values_ptr, exponents_ptr, spill_ptr, n, plane, columns_at,
    FMT: tl.constexpr, SCALING: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr, WIDE: tl.constexpr,
    WHOLE: tl.constexpr, PIECES: tl.constexpr, SPILL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """CHUNKS rows of x: the stored elements at their columns, +0 elsewhere.

    WIDE: columns_ptr and values_ptr are 16-byte aligned, WHOLE: n is a multiple of 8. PIECES: octets of a lane that are
    loaded before the first is used. plane: items of values_ptr, which fp10 and SPILL (see columns_base) ask for.
    """
    XB: tl.constexpr = DTYPE.primitive_bitwidth // 8
    first_row = spread_program(PACKED and FMT == "fp10") * CHUNKS
    lane = tl.arange(0, LANES)
    x_ptr += first_row * COLUMNS
    left = tl.minimum(n - first_row * COLUMNS, CHUNKS * COLUMNS).to(tl.int32)
    start, bounds = program_rows(first_row, n, counts_ptr, ends_ptr, PACKED)
    if SPILL:
        columns_ptr = columns_base(columns_ptr, values_ptr, spill_ptr, start, plane, columns_at)
    stage = open_stage(lane, XB)
    clear_stage(stage, lane, CHUNKS * COLUMNS * XB)
    stage = warp_sync(stage)
    _stage_rows(
        stage, columns_ptr, values_ptr, exponents_ptr, start, bounds, plane, lane, FMT, SCALING, PACKED, DTYPE, WIDE,
        PIECES, False, ASM,
    )  # fmt: skip
    stage = warp_sync(stage)
    # 16 bytes a lane beside its neighbours': eight elements of fp32 would fill half a sector a store
    ITEMS: tl.constexpr = 16 // XB
    for first in tl.static_range(0, CHUNKS * COLUMNS, LANES * ITEMS):
        place = lane * ITEMS + first
        store_octet(x_ptr, unstage_words(stage + place * XB, 4), place, left, XB, WHOLE)


@triton.jit(do_not_specialize=["n", "plane", "columns_at"])
def csr_backward_kernel(
    out_ptr, grad_ptr, counts_ptr, ends_ptr, columns_ptr, values_ptr, spill_ptr, n, plane, columns_at,
    FMT: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, GRAD_WIDE: tl.constexpr, WHOLE: tl.constexpr,
    PIECES: tl.constexpr, SPILL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """CHUNKS rows of grad where an element is stored that is not a negative zero, else +0; bit patterns throughout.

    WIDE, WHOLE, PIECES, SPILL: as in csr_decode_kernel; GRAD_WIDE: grad_ptr is 16-byte aligned and n a multiple of 8.
    """
    XB: tl.constexpr = grad_ptr.dtype.element_ty.primitive_bitwidth // 8
    first_row = spread_program(PACKED and FMT == "fp10") * CHUNKS
    lane = tl.arange(0, LANES)
    grad_ptr += first_row * COLUMNS
    out_ptr += first_row * COLUMNS
    left = tl.minimum(n - first_row * COLUMNS, CHUNKS * COLUMNS).to(tl.int32)
    start, bounds = program_rows(first_row, n, counts_ptr, ends_ptr, PACKED)
    if SPILL:
        columns_ptr = columns_base(columns_ptr, values_ptr, spill_ptr, start, plane, columns_at)
    grads = load_octets(grad_ptr, left, XB, GRAD_WIDE)
    stage = open_stage(lane, 1)
    clear_stage(stage, lane, CHUNKS * COLUMNS)
    stage = warp_sync(stage)
    _stage_rows(
        stage, columns_ptr, values_ptr, columns_ptr, start, bounds, plane, lane, FMT, "none", PACKED,
        values_ptr.dtype.element_ty, WIDE, PIECES, True, ASM,
    )  # fmt: skip
    stage = warp_sync(stage)
    for r in tl.static_range(CHUNKS):
        place = lane * OCTET + r * COLUMNS
        flags = spread_flags(unstage_words(stage + place, 2), XB)
        words = ()
        for w in tl.static_range(2 * XB):
            words += (grads[r * 2 * XB + w] & flags[w],)
        store_octet(out_ptr, words, place, left, XB, WHOLE)
