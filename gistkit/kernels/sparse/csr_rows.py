"""Where the stored elements of four neighbouring rows of csr are, eight of them a lane, and which row each is of.

Rows are close together in the packed arrays, so those of a program are one run there, read in aligned octets: what the
neighbouring programs' rows have of the first and the last octet is left out. In a scratch a row starts at 256 times its
number. Rows and flags are bytes, an octet's in two words, made by shifts of the words in which every byte is 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS
from gistkit.kernels.sparse.values import load_octet
from gistkit.kernels.warp.octets import CHUNK, CHUNKS, OCTET
from gistkit.kernels.warp.stage_rows import bytes_from

COLUMNS = tl.constexpr(CSR_COLUMNS)


@triton.jit
def program_rows(first_row, n, counts_ptr, ends_ptr, PACKED: tl.constexpr):
    """(start, bounds): from start (int64, a multiple of 8) on, the rows' items lie between the bounds (int32).

    Packed, row r's between bounds r and r + 1; in a scratch, from 256 * r to bound r. Rows past the end have none.
    """
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
