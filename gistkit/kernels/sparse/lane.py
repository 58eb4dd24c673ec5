"""Sparse storage on its way to a place that the device alone knows, in pinned host memory or its own.

A *lane* is memory that encodings are packed into one behind the other. How long each is, the device knows; so the place
of the next one, the *cursor*, is a number on the device as well, and the host only sees to it that the worst case fits.
:func:`ship` takes the items out of the slots of an encode's scratch and writes whole aligned blocks of them: what
crosses the link is what is stored, in full lines. Few programs do, which leaves the other multiprocessors to the
computation. A program finds the slot of each of a block's items among the running sums of the counts, by bisection
between the slots that the block begins and ends with.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.kernels.launch.tiling import launch
from gistkit.kernels.layout import bits_of
from gistkit.kernels.sparse.ends import ends as running_ends
from gistkit.kernels.sparse.spill import ALIGNMENT

PROGRAMS = 16
STEP = 1024
"""Items of a block: no fewer than a slot has."""
NUM_WARPS = 8
PIECE = 4096
"""Items that a program copies back at a time."""


@triton.jit
def _columns_start(start, total, ITEM: tl.constexpr, ALIGN: tl.constexpr):
    """The byte where the columns' run begins, behind the values'."""
    return start + (total * ITEM + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["slots"])
def place_kernel(
    ends_ptr, cursor_ptr, place_ptr, slots, ITEM: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """The place of the items that end at the slots' ends, and the cursor behind them."""
    total = tl.load(ends_ptr + slots - 1)
    start = tl.load(cursor_ptr)
    end = _columns_start(start, total, ITEM, ALIGN)
    if COLUMNS:
        end = _columns_start(end, total, 1, ALIGN)
    tl.store(place_ptr, start)
    tl.store(place_ptr + 1, total)
    tl.store(cursor_ptr, end)


@triton.jit
def _slot_of(ends_ptr, item, inside, first, last):
    """The first slot from ``first`` to ``last`` whose items end past each item, which the last one's do."""
    low = tl.zeros_like(item) + first
    high = tl.zeros_like(item) + last
    width = last - first
    while width > 0:
        middle = (low + high) // 2
        above = tl.load(ends_ptr + middle, inside, other=0) > item
        high = tl.where(above, middle, high)
        low = tl.where(above, low, middle + 1)
        width = width // 2
    return low


@triton.jit(do_not_specialize=["slots"])
def ship_kernel(
    scratch_ptr, columns_ptr, counts_ptr, ends_ptr, heads_ptr, lane_ptr, lane_bytes_ptr, place_ptr, slots,
    STRIDE: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Blocks of STEP items, every so many a program, from their slots to the lane (lane_ptr: as items)."""
    ITEM: tl.constexpr = scratch_ptr.dtype.element_ty.primitive_bitwidth // 8
    start, total = tl.load(place_ptr), tl.load(place_ptr + 1)
    lane_ptr += start // ITEM
    lane_bytes_ptr += _columns_start(start, total, ITEM, ALIGN)
    block = tl.program_id(0).to(tl.int64)
    while block * STEP < total:
        item = block * STEP + tl.arange(0, STEP)
        inside = item < total
        first = tl.load(heads_ptr + block).to(tl.int64)
        last = tl.load(heads_ptr + block + 1, (block + 1) * STEP < total, other=0).to(tl.int64)
        last = tl.where((block + 1) * STEP < total, last, slots - 1)
        slot = _slot_of(ends_ptr, item, inside, first, last)
        begin = tl.load(ends_ptr + slot, inside, other=0) - tl.load(counts_ptr + slot, inside, other=0)
        source = slot * STRIDE + item - begin
        tl.store(lane_ptr + item, tl.load(scratch_ptr + source, inside), inside)
        if COLUMNS:
            tl.store(lane_bytes_ptr + item, tl.load(columns_ptr + source, inside), inside)
        block += tl.num_programs(0)


@triton.jit
def unship_kernel(
    lane_ptr, lane_bytes_ptr, place_ptr, values_ptr, columns_ptr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """The items at a place to the first of values and columns (lane_ptr: as items)."""
    ITEM: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth // 8
    start, total = tl.load(place_ptr), tl.load(place_ptr + 1)
    lane_ptr += start // ITEM
    lane_bytes_ptr += _columns_start(start, total, ITEM, ALIGN)
    first = tl.program_id(0).to(tl.int64) * PIECE
    while first < total:
        item = first + tl.arange(0, PIECE)
        tl.store(values_ptr + item, tl.load(lane_ptr + item, item < total), item < total)
        if COLUMNS:
            tl.store(columns_ptr + item, tl.load(lane_bytes_ptr + item, item < total), item < total)
        first += tl.num_programs(0).to(tl.int64) * PIECE


def ship(
    scratch: torch.Tensor, columns: torch.Tensor | None, counts: torch.Tensor, stride: int, lane: torch.Tensor,
    cursor: torch.Tensor, place: torch.Tensor,
) -> None:  # fmt: skip
    """As the oracle has it (reference/lane.py). lane may be pinned host memory. Does not synchronise."""
    item, pair, slots = scratch.element_size(), columns is not None, counts.numel()
    if not slots:
        place.zero_()
        place[0:1].copy_(cursor)
        return
    ends = running_ends(counts)
    blocks = torch.arange(0, scratch.numel() + 1, STEP, device=counts.device)
    heads = torch.searchsorted(ends, blocks, right=True, out_int32=True)
    launch(
        place_kernel, 1, scratch, ends, cursor, place, slots, num_warps=1, ITEM=item, COLUMNS=pair, ALIGN=ALIGNMENT
    )  # fmt: skip
    values = bits_of(scratch)
    launch(
        ship_kernel, PROGRAMS, scratch, values, columns if pair else values, counts, ends, heads, _items(lane, values),
        lane, place, slots, num_warps=NUM_WARPS, STRIDE=stride, STEP=STEP, COLUMNS=pair, ALIGN=ALIGNMENT,
    )  # fmt: skip


def unship(lane: torch.Tensor, place: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None) -> None:
    """As the oracle has it (reference/lane.py). lane and place may be pinned host memory. Does not synchronise."""
    pair, out = columns is not None, bits_of(values)
    launch(
        unship_kernel, PROGRAMS, values, _items(lane, out), lane, place, out, columns if pair else out,
        num_warps=NUM_WARPS, PIECE=PIECE, COLUMNS=pair, ALIGN=ALIGNMENT,
    )  # fmt: skip


def _items(lane: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """lane as whole items of the values' size."""
    return lane[: lane.numel() // 4 * 4].view(values.dtype)
