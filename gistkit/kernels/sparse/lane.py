"""Sparse storage on its way to a place that the device alone knows, in pinned host memory or its own.

A *lane* is memory that encodings are packed into one behind the other: where the next one begins is a number on the
device, and the host only sees to it that the worst case fits. Of two launches the first adds up the counts and finds
the slot that each block of items begins in, the second writes whole aligned blocks: what crosses the link is what is
stored, in full lines. A program finds the slot of each of a block's items by bisection among the ends of its first and
last slots. What has a known size, zvc's words and the counts, goes along, before the items: a copy engine would take
turns with it. Of GROUP slots or fewer every program adds up the counts itself, which saves the host a launch.

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
    before = tl.zeros((ROUND,), tl.int32)
    start = tl.full((), 0, tl.int32)
    while start < group * GROUP:
        before += load_items(counts_ptr + start, group * GROUP - start, ROUND).to(tl.int32)
        start += ROUND
    _index(counts_ptr, ends_ptr, heads_ptr, first, left, tl.sum(before.to(tl.int64), 0), GROUP, STEP)


@triton.jit
def _index(counts_ptr, ends_ptr, heads_ptr, first, left, before, GROUP: tl.constexpr, STEP: tl.constexpr):
    """Of ``left`` slots from the first on, with so many items before them."""
    counts = load_items(counts_ptr + first, left, GROUP).to(tl.int32)
    ends = before + tl.cumsum(counts, 0)
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
    scratch_ptr, columns_ptr, words_ptr, counts_ptr, ends_ptr, heads_ptr, lane_ptr, lane_bytes_ptr, lane_words_ptr,
    lane_counts_ptr, begin_ptr, after_ptr, place_ptr, slots,
    STRIDE: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Counts, and words where there are no columns, and blocks of STEP items, every so many a program, from their slots
    to the lane, which is seen as items, bytes, words and counts. GROUP: 0 behind :func:`index_kernel`; else a program
    finds ends and heads of up to so many slots itself, in memory of its own."""
    ITEM: tl.constexpr = scratch_ptr.dtype.element_ty.primitive_bitwidth // 8
    WORDS: tl.constexpr = 0 if COLUMNS else STRIDE // 32
    if GROUP:
        ends_ptr += tl.program_id(0) * slots
        heads_ptr += tl.program_id(0) * tl.cdiv(slots * STRIDE, STEP)
        _index(counts_ptr, ends_ptr, heads_ptr, 0, slots, 0, GROUP, STEP)
        tl.debug_barrier()
    line, total = tl.load(begin_ptr) // ALIGN, tl.load(ends_ptr + slots - 1)
    start = line * ALIGN  # as it is; the compiler sees it, too
    values_at = start + tl.cdiv(slots.to(tl.int64) * (4 * WORDS + 2), ALIGN) * ALIGN
    columns_at = _columns_start(values_at, total, ITEM, ALIGN)
    if tl.program_id(0) == 0:
        tl.store(place_ptr, start)
        tl.store(place_ptr + 1, total)
        tl.store(after_ptr, _columns_start(columns_at, total, 1, ALIGN) if COLUMNS else columns_at)
    if not COLUMNS:
        _copy_run(lane_words_ptr + line * (ALIGN // 4), words_ptr, slots.to(tl.int64) * WORDS, RUN // 4)
    lane_counts_ptr += line * (ALIGN // 2) + slots.to(tl.int64) * (2 * WORDS)
    _copy_run(lane_counts_ptr, counts_ptr, slots.to(tl.int64), RUN // 2)
    lane_ptr += values_at // ALIGN * (ALIGN // ITEM)
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


@triton.jit(do_not_specialize=["lines"])
def unship_kernel(
    lane_ptr, lane_bytes_ptr, lane_words_ptr, place_ptr, known_ptr, values_ptr, columns_ptr, lines,
    PIECE: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """The ALIGN-byte lines of known size at a place to known, the items behind them to the first of values and columns.
    The lane is seen as items, bytes and words."""
    ITEM: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth // 8
    line, total = tl.load(place_ptr) // ALIGN, tl.load(place_ptr + 1)
    words = lines.to(tl.int64) * (ALIGN // 4)
    _copy_run(known_ptr, lane_words_ptr + line * (ALIGN // 4), words, RUN // 4)
    start = (line + lines) * ALIGN
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
        step, few = items_a_block(bits.itemsize, columns), slots <= GROUP
        self._slots, self._bits, self._columns = (slots,), bits, columns
        copies = PROGRAMS if few else 1
        self._heads_at = ceil_div(8 * slots * copies, 16) * 16
        self.work_bytes = self._heads_at + 4 * ceil_div(slots * stride, step) * copies
        self._groups = 0 if few else ceil_div(slots, GROUP)
        self._index = Ready(index_kernel, device, COUNTING_WARPS, GROUP=GROUP, ROUND=ROUND, STEP=step)
        self._ship = Ready(
            ship_kernel, device, NUM_WARPS, STRIDE=stride, STEP=step, COLUMNS=columns, ALIGN=ALIGNMENT, RUN=RUN_BYTES,
            GROUP=GROUP if few else 0,
        )  # fmt: skip

    def __call__(
        self, stream: int, work: torch.Tensor, scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor,
        lane: torch.Tensor, begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor,
    ) -> None:  # fmt: skip
        """:func:`ship` on that stream, with ``work`` as its memory."""
        ends, number, indices, to = work.data_ptr(), counts.data_ptr(), index.data_ptr(), lane.data_ptr()
        heads, numbers = ends + self._heads_at, self._slots
        addresses = (
            scratch.data_ptr(), indices, indices, number, ends, heads, to, to, to, to, begin.data_ptr(),
            after.data_ptr(), place.data_ptr(),
        )  # fmt: skip
        indexed = not self._groups or self._index.at(self._groups, (number, ends, heads), numbers, stream)
        if indexed and self._ship.at(PROGRAMS, addresses, numbers, stream):
            return
        sums = work[: self._heads_at].view(torch.int64), work[self._heads_at :].view(torch.int32)
        if not indexed:
            self._index.first(self._groups, (counts, *sums), numbers, stream)
        seen = [_items(lane, dtype) for dtype in (self._bits, torch.uint8, torch.int32, torch.int16)]
        columns = index if self._columns else index.view(torch.uint8)
        tensors = (scratch.view(self._bits), columns, index, counts, *sums, *seen, begin, after, place)
        self._ship.first(PROGRAMS, tensors, numbers, stream)


ships = lru_cache(maxsize=1024)(Ships)


def ship(
    scratch: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, stride: int, lane: torch.Tensor,
    begin: torch.Tensor, after: torch.Tensor, place: torch.Tensor,
) -> None:  # fmt: skip
    """As the oracle has it (reference/lane.py). lane and place may be pinned. Does not synchronise."""
    slots, device, values = counts.numel(), scratch.get_device(), bits_of(scratch)
    if not slots:
        place.zero_()
        place[0:1].copy_(begin[0:1])
        after[0:1].copy_(begin[0:1])
        return
    launches = ships(slots, stride, values.dtype, stride == CSR_COLUMNS, device)
    work = torch.empty(launches.work_bytes, dtype=torch.uint8, device=scratch.device)
    launches(compat.current_stream(device), work, values, index, counts, lane, begin, after, place)


def unship(
    lane: torch.Tensor, place: torch.Tensor, known: torch.Tensor, values: torch.Tensor, columns: torch.Tensor | None
) -> None:
    """As the oracle has it (reference/lane.py). lane and place may be pinned host memory. Does not synchronise."""
    pair, out = columns is not None, bits_of(values)
    launch(
        unship_kernel, PROGRAMS, values, _items(lane, out.dtype), lane, _items(lane, torch.int32), place,
        known.view(torch.int32), out, columns if pair else out, known.numel() // ALIGNMENT, num_warps=PIECE_WARPS,
        PIECE=PIECE, COLUMNS=pair, ALIGN=ALIGNMENT, RUN=RUN_BYTES,
    )  # fmt: skip


def _items(lane: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """lane as whole items of a dtype of up to 4 bytes."""
    return lane[: lane.numel() // 4 * 4].view(dtype)
