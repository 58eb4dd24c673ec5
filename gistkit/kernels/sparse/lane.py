"""Sparse storage on its way to a place that the device alone knows, in pinned host memory or its own.

A *lane* is memory that encodings are packed into one behind the other: where the next one begins is a number on the
device, and the host only sees to it that the worst case fits. Of two launches the first adds up the counts and finds
the slot that each block of items begins in, the second writes whole aligned blocks: what crosses the link is what is
stored, in full lines. A program finds the slot of each of a block's items by bisection among the ends of its first and
last slots. What has a known size, zvc's words and the counts, goes along: a copy engine would take turns with it.

Bytes in flight are what a link wants: its rate times the latency of a block's turn, 80 KB for 55 GB/s and 1.5 us.
Sixteen programs of 8 KiB have 128 KiB, and leave the other multiprocessors to the computation.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from gistkit.formats import CSR_COLUMNS, ceil_div
from gistkit.kernels import compat
from gistkit.kernels.launch.tiling import Ready, launch
from gistkit.kernels.layout import bits_of
from gistkit.kernels.sparse.ends import load_items
from gistkit.kernels.sparse.spill import ALIGNMENT

PROGRAMS = 16
BLOCK_BYTES, MOST_COLUMNS = 8192, 4096
"""Of values in a block, and of csr's columns: no fewer items than a slot has."""
NUM_WARPS = 16
GROUP = 1024
"""Counts that a program of the first launch takes, behind all before them."""
ROUND = 8192
"""Counts that it adds up at a time."""
COUNTING_WARPS = 8
RUN_BYTES = 8192
"""Of words or counts that a program copies at a time."""
PIECE, PIECE_WARPS = 4096, 8
"""Items that a program copies back at a time."""


@triton.jit
def _columns_start(start, total, ITEM: tl.constexpr, ALIGN: tl.constexpr):
    """The byte where the columns' run begins, behind the values'."""
    return start + (total * ITEM + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit(do_not_specialize=["slots"])
def index_kernel(
    counts_ptr, ends_ptr, heads_ptr, slots, GROUP: tl.constexpr, ROUND: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Where the items of GROUP slots end, and for each block of STEP items that begins among them the slot of its first
    one. A program adds up all counts before its own."""
    group = tl.program_id(0)
    first = group.to(tl.int64) * GROUP
    left = tl.minimum(slots - first, GROUP).to(tl.int32)
    counts = load_items(counts_ptr + first, left, GROUP).to(tl.int32)
    before = tl.zeros((ROUND,), tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < group * GROUP:
        before += load_items(counts_ptr + start, group * GROUP - start, ROUND).to(tl.int32)
        start += ROUND
    ends = tl.sum(before.to(tl.int64), 0) + tl.cumsum(counts, 0)
    place = tl.arange(0, GROUP)
    tl.store(ends_ptr + first + place, ends, place < left)
    # a slot has no more items than a block, so at most one block begins in it
    block = (ends - counts + (STEP - 1)) // STEP
    tl.store(heads_ptr + block, (first + place).to(tl.int32), block * STEP < ends)


@triton.jit
def _slot_of(ends_ptr, base, item, inside, width):
    """Of ``width`` slots and one more the first whose items end past each item, which the last one's do."""
    low = tl.zeros_like(item)
    high = tl.zeros_like(item) + width
    while width > 0:
        middle = (low + high) // 2
        # the ends of these slots lie within a block and a slot of its begin
        above = (tl.load(ends_ptr + middle, inside, other=0) - base).to(tl.int32) > item
        high = tl.where(above, middle, high)
        low = tl.where(above, low, middle + 1)
        width = width // 2
    return low


@triton.jit
def _store_run(ptr, item, values, left, STEP: tl.constexpr):
    """The first ``left`` of STEP values; wide stores where all of them are there."""
    if left >= STEP:
        tl.store(ptr + item, values)
    else:
        tl.store(ptr + item, values, item < left)


@triton.jit
def _copy_run(to_ptr, from_ptr, n, STEP: tl.constexpr):
    """n items, STEP of them at a time a program."""
    item = tl.arange(0, STEP)
    first = tl.program_id(0).to(tl.int64) * STEP
    while first < n:
        left = tl.minimum(n - first, STEP).to(tl.int32)
        _store_run(to_ptr + first, item, load_items(from_ptr + first, left, STEP), left, STEP)
        first += tl.num_programs(0).to(tl.int64) * STEP


@triton.jit(do_not_specialize=["slots"])
def ship_kernel(
    scratch_ptr, columns_ptr, words_ptr, counts_ptr, ends_ptr, heads_ptr, lane_ptr, lane_bytes_ptr, rest_words_ptr,
    rest_counts_ptr, begin_ptr, after_ptr, place_ptr, slots,
    STRIDE: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Blocks of STEP items, every so many a program, from their slots to the lane (lane_ptr: as items); counts, and
    words where there are no columns, to the rest."""
    ITEM: tl.constexpr = scratch_ptr.dtype.element_ty.primitive_bitwidth // 8
    start, total = tl.load(begin_ptr), tl.load(ends_ptr + slots - 1)
    start = start // ALIGN * ALIGN  # as it is; the compiler sees it, too
    columns_at = _columns_start(start, total, ITEM, ALIGN)
    if tl.program_id(0) == 0:
        tl.store(place_ptr, start)
        tl.store(place_ptr + 1, total)
        tl.store(after_ptr, _columns_start(columns_at, total, 1, ALIGN) if COLUMNS else columns_at)
    if not COLUMNS:
        _copy_run(rest_words_ptr, words_ptr, slots.to(tl.int64) * (STRIDE // 32), RUN // 4)
    _copy_run(rest_counts_ptr, counts_ptr, slots.to(tl.int64), RUN // 2)
    lane_ptr += start // ALIGN * (ALIGN // ITEM)
    lane_bytes_ptr += columns_at
    blocks = ((total + (STEP - 1)) // STEP).to(tl.int32)
    block = tl.program_id(0)
    first = tl.load(heads_ptr + block, block < blocks, other=0)
    last = tl.load(heads_ptr + block + 1, block + 1 < blocks, other=slots - 1)
    item = tl.arange(0, STEP)
    while block < blocks:
        following = block + tl.num_programs(0)
        # the next turn's, so that it does not wait for them
        next_first = tl.load(heads_ptr + following, following < blocks, other=0)
        next_last = tl.load(heads_ptr + following + 1, following + 1 < blocks, other=slots - 1)
        base = block.to(tl.int64) * STEP
        left = tl.minimum(total - base, STEP).to(tl.int32)
        inside = item < left
        slot = first + _slot_of(ends_ptr + first, base, item, inside, last - first)
        begin = (tl.load(ends_ptr + slot - 1, inside & (slot > 0), other=0) - base).to(tl.int32)
        begin = tl.where(slot > 0, begin, (-base).to(tl.int32))
        source = slot.to(tl.int64) * STRIDE + (item - begin)
        _store_run(lane_ptr + base, item, tl.load(scratch_ptr + source, inside), left, STEP)
        if COLUMNS:
            _store_run(lane_bytes_ptr + base, item, tl.load(columns_ptr + source, inside), left, STEP)
        block, first, last = following, next_first, next_last


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


def items_a_block(item: int, columns: bool) -> int:
    """Of so many bytes each."""
    return min(BLOCK_BYTES // item, MOST_COLUMNS if columns else BLOCK_BYTES)


class Ships:
    """Launches of :func:`ship` for scratches of so many slots, whose values are seen as ``bits``; device -1: the
    interpreter. ``work_bytes`` of the device's memory must not be in use while they run."""

    def __init__(self, slots: int, stride: int, bits: torch.dtype, columns: bool, device: int) -> None:
        step = items_a_block(bits.itemsize, columns)
        self._slots, self._groups, self._bits = slots, ceil_div(slots, GROUP), bits
        self._heads_at = ceil_div(8 * slots, 16) * 16
        self.work_bytes = self._heads_at + 4 * ceil_div(slots * stride, step)
        self._index = Ready(index_kernel, device, COUNTING_WARPS, GROUP=GROUP, ROUND=ROUND, STEP=step)
        self._ship = Ready(
            ship_kernel, device, NUM_WARPS, STRIDE=stride, STEP=step, COLUMNS=columns, ALIGN=ALIGNMENT, RUN=RUN_BYTES
        )  # fmt: skip
        self._columns, self._words_bytes = columns, 0 if columns else slots * stride // 8

    def __call__(
        self, stream: int, work: torch.Tensor, scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor,
        lane: torch.Tensor, begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor, rest: torch.Tensor,
        rest_start: int,
    ) -> None:  # fmt: skip
        """:func:`ship` on that stream, with ``work`` as its memory, to ``rest`` from byte ``rest_start`` on."""
        numbers, ends, values, out = (self._slots,), work.data_ptr(), scratch.data_ptr(), lane.data_ptr()
        heads, number, indices, there = ends + self._heads_at, counts.data_ptr(), index.data_ptr(), rest.data_ptr()
        there += rest_start
        addresses = (
            values, indices, indices, number, ends, heads, out, out, there, there + self._words_bytes,
            begin.data_ptr(), after.data_ptr(), place.data_ptr(),
        )  # fmt: skip
        indexed = self._index.at(self._groups, (number, ends, heads), numbers, stream)
        if indexed and self._ship.at(PROGRAMS, addresses, numbers, stream):
            return
        sums = work[: 8 * self._slots].view(torch.int64), work[self._heads_at :].view(torch.int32)
        if not indexed:
            self._index.first(self._groups, (counts, *sums), numbers, stream)
        bits, rest = scratch.view(self._bits), rest[rest_start:]
        columns, words = (index, index) if self._columns else (index.view(torch.uint8), index)
        runs = (
            rest if self._columns else rest[: self._words_bytes].view(torch.int32),
            rest[self._words_bytes :][: 2 * self._slots].view(torch.int16),
        )
        tensors = (bits, columns, words, counts, *sums, _items(lane, bits), lane, *runs, begin, after, place)
        self._ship.first(PROGRAMS, tensors, numbers, stream)


ships = lru_cache(maxsize=1024)(Ships)


def ship(
    scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, stride: int, lane: torch.Tensor,
    begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor, rest: torch.Tensor,
) -> None:  # fmt: skip
    """As the oracle has it (reference/lane.py). lane, place and rest may be pinned. Does not synchronise."""
    slots, device, values = counts.numel(), scratch.get_device(), bits_of(scratch)
    if not slots:
        place.zero_()
        place[0:1].copy_(begin[0:1])
        after[0:1].copy_(begin[0:1])
        return
    launches = ships(slots, stride, values.dtype, stride == CSR_COLUMNS, device)
    work = torch.empty(launches.work_bytes, dtype=torch.uint8, device=scratch.device)
    launches(compat.current_stream(device), work, values, index, counts, lane, begin, after, place, rest, 0)


def unship(lane: torch.Tensor, place: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None) -> None:
    """As the oracle has it (reference/lane.py). lane and place may be pinned host memory. Does not synchronise."""
    pair, out = columns is not None, bits_of(values)
    launch(
        unship_kernel, PROGRAMS, values, _items(lane, out), lane, place, out, columns if pair else out,
        num_warps=PIECE_WARPS, PIECE=PIECE, COLUMNS=pair, ALIGN=ALIGNMENT,
    )  # fmt: skip


def _items(lane: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """lane as whole items of the values' size."""
    return lane[: lane.numel() // 4 * 4].view(values.dtype)
