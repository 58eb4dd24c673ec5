"""Slots' items close together: from a scratch of one slot a count to an array of the exact size.

A warp moves several slots, a piece of each at a time, so that many loads are under way before the first store: with a
slot a warp, half of an SM's warps waited for one short run of loads each, at 3 to 27 % of a copy on an H200.
"""

# Triton's constexprs are plain numbers while a kernel is traced; tl.static_range is no iterator to a type checker.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS, ceil_div
from gistkit.kernels.lanes import LANES, launch_warps
from gistkit.kernels.sparse_args import bits_of, check_compact

# (slots a program, vectors of LANES items of each in flight): small pieces, as the mask of a slot's end leaves no wide
# loads, and a vector of more than LANES items would give neighbours to one lane
ZVC_SHAPE = (2, 8)
CSR_SHAPE = (8, 2)


@triton.jit
def _slots(first_slot, slots, counts_ptr, ends_ptr, total, SLOTS: tl.constexpr):
    """(items int32, first places int64, the largest number of items) of SLOTS slots, nothing of them past total."""
    counts = ()
    starts = ()
    most = 0
    for s in tl.static_range(SLOTS):
        inside = first_slot + s < slots
        stored = tl.load(counts_ptr + first_slot + s, inside, other=0).to(tl.int64)
        start = tl.load(ends_ptr + first_slot + s, inside, other=0) - stored
        count = tl.minimum(stored, total - start).to(tl.int32)
        counts += (count,)
        starts += (start,)
        most = tl.maximum(most, count)
    return counts, starts, most


@triton.jit
def _load_pieces(scratch_ptr, first, counts, STRIDE: tl.constexpr, SLOTS: tl.constexpr, PIECES: tl.constexpr):
    """PIECES vectors of LANES items of every slot, from its item ``first`` on."""
    pieces = ()
    for s in tl.static_range(SLOTS):
        for p in tl.static_range(PIECES):
            items = first + (tl.arange(0, LANES) + p * LANES)
            pieces += (tl.load(scratch_ptr + s * STRIDE + items, items < counts[s]),)
    return pieces


@triton.jit
def _store_pieces(packed_ptr, pieces, starts, first, counts, SLOTS: tl.constexpr, PIECES: tl.constexpr):
    for s in tl.static_range(SLOTS):
        for p in tl.static_range(PIECES):
            items = first + (tl.arange(0, LANES) + p * LANES)
            tl.store(packed_ptr + starts[s] + items, pieces[s * PIECES + p], items < counts[s])


@triton.jit(do_not_specialize=["total", "slots"])
def compact_kernel(
    scratch_ptr,
    counts_ptr,
    ends_ptr,
    packed_ptr,
    total,
    slots,
    STRIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """SLOTS slots' items to their places in packed; never past total."""
    first_slot = tl.program_id(0).to(tl.int64) * SLOTS
    counts, starts, most = _slots(first_slot, slots, counts_ptr, ends_ptr, total, SLOTS)
    first = tl.full((), 0, tl.int32)
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    while first < most:
        pieces = _load_pieces(scratch_ptr + first_slot * STRIDE, first, counts, STRIDE, SLOTS, PIECES)
        _store_pieces(packed_ptr, pieces, starts, first, counts, SLOTS, PIECES)
        first += LANES * PIECES


@triton.jit(do_not_specialize=["total", "slots"])
def compact_pair_kernel(
    columns_ptr,
    values_ptr,
    counts_ptr,
    ends_ptr,
    packed_columns_ptr,
    packed_values_ptr,
    total,
    slots,
    STRIDE: tl.constexpr,
    SLOTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    """compact_kernel for two scratches of the same counts."""
    first_slot = tl.program_id(0).to(tl.int64) * SLOTS
    counts, starts, most = _slots(first_slot, slots, counts_ptr, ends_ptr, total, SLOTS)
    first = tl.full((), 0, tl.int32)
    while first < most:
        columns = _load_pieces(columns_ptr + first_slot * STRIDE, first, counts, STRIDE, SLOTS, PIECES)
        values = _load_pieces(values_ptr + first_slot * STRIDE, first, counts, STRIDE, SLOTS, PIECES)
        _store_pieces(packed_columns_ptr, columns, starts, first, counts, SLOTS, PIECES)
        _store_pieces(packed_values_ptr, values, starts, first, counts, SLOTS, PIECES)
        first += LANES * PIECES


def ends(counts: torch.Tensor) -> torch.Tensor:
    """int64: where each slot's items end in a packed array."""
    return counts.cumsum(0, dtype=torch.int64)


def compact(scratch: torch.Tensor, counts: torch.Tensor, stride: int, total: int) -> torch.Tensor:
    """The first counts[i] items of every stride-long slot of scratch, close together.

    scratch: any dtype of 1, 2 or 4 bytes, [stride * slots]; counts: int16[slots]; total: the sum of counts, or more
    (the items past the sum are undefined). Returns scratch's dtype, [total]. Does not synchronise.
    """
    check_compact(scratch, counts, stride, total)
    packed = torch.empty((total,), dtype=scratch.dtype, device=scratch.device)
    slots, pieces = CSR_SHAPE if stride == CSR_COLUMNS else ZVC_SHAPE
    launch_warps(
        compact_kernel,
        ceil_div(counts.numel(), slots),
        scratch,
        bits_of(scratch),
        counts,
        ends(counts),
        bits_of(packed),
        total,
        counts.numel(),
        STRIDE=stride,
        SLOTS=slots,
        PIECES=pieces,
    )
    return packed


def csr_compact(
    columns: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns, values) of csr_encode, each compacted as by :func:`compact`, in one pass. Does not synchronise."""
    check_compact(columns, counts, CSR_COLUMNS, total)
    check_compact(values, counts, CSR_COLUMNS, total)
    packed = [torch.empty((total,), dtype=x.dtype, device=x.device) for x in (columns, values)]
    slots, pieces = CSR_SHAPE
    launch_warps(
        compact_pair_kernel,
        ceil_div(counts.numel(), slots),
        values,
        bits_of(columns),
        bits_of(values),
        counts,
        ends(counts),
        *map(bits_of, packed),
        total,
        counts.numel(),
        STRIDE=CSR_COLUMNS,
        SLOTS=slots,
        PIECES=pieces,
    )
    return packed[0], packed[1]
