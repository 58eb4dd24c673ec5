"""Running sums of the counts of sparse storage: where each slot's items end in the packed array.

Where the array has a spill (:mod:`gistkit.kernels.sparse.spill`), the ends of what lies there are *redirected*: so many
items on that, counted from the array's first one, they are where the spill's items lie in memory. Whoever goes by ends,
one base address and 64-bit offsets reads and writes both without knowing.

One launch for few counts, whose programs each add up all counts before their own; else two, the first of which adds up
groups. ``torch.cumsum`` takes three.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.launch.tiling import launch
from gistkit.kernels.layout import bits_of
from gistkit.kernels.sparse import spill as spilling

GROUP = 1024
"""Counts a program."""
FEW = 16 * GROUP
"""Counts that one launch may add up over and over."""
COUNTS_A_ROUND, SUMS_A_ROUND = 4096, 512
SPILL_GROUP = tl.constexpr(spilling.GROUP)


@triton.jit
def load_items(ptr, left, SIZE: tl.constexpr):
    """The first SIZE items from ptr on, 0 from ``left`` on; wide loads where all of them are there."""
    place = tl.arange(0, SIZE)
    if left >= SIZE:
        items = tl.load(ptr + place)
    else:
        items = tl.load(ptr + place, place < left, other=0)
    return items


@triton.jit(do_not_specialize=["n"])
def sums_kernel(counts_ptr, sums_ptr, n, GROUP: tl.constexpr):
    """The sum (int32) of GROUP counts."""
    group = tl.program_id(0).to(tl.int64)
    left = tl.minimum(n - group * GROUP, GROUP).to(tl.int32)
    tl.store(sums_ptr + group, tl.sum(load_items(counts_ptr + group * GROUP, left, GROUP).to(tl.int32), 0))


@triton.jit
def items_between(values_ptr, spill_ptr):
    """int64: how many items of values_ptr after it the spill begins; negative where it lies before."""
    BYTES: tl.constexpr = values_ptr.dtype.element_ty.primitive_bitwidth // 8
    # whole items, so a shift by 0, 1 or 2 bits is the division
    return (spill_ptr.to(tl.int64) - values_ptr.to(tl.int64)) >> (BYTES // 2)


@triton.jit
def columns_base(columns_ptr, values_ptr, spill_ptr, start, capacity, columns_at):
    """From where csr's columns of a program count whose items begin at ``start``, redirected or not. columns_at: bytes
    of the spill before its run of columns. A start at the capacity has no items in the arrays."""
    there = spill_ptr + (columns_at - items_between(values_ptr, spill_ptr))
    return tl.where((start < 0) | (start >= capacity), there, columns_ptr)


@triton.jit
def _redirected(ends, values_ptr, spill_ptr, capacity, SLOTS: tl.constexpr):
    """Ends of whole groups of SLOTS slots, redirected in those that end past the capacity."""
    groups = tl.reshape(ends, (ends.shape[0] // SLOTS, SLOTS))
    shift = items_between(values_ptr, spill_ptr) + SPILL_GROUP - capacity
    groups += tl.where(tl.max(groups, 1) > capacity, shift, 0)[:, None]
    return tl.reshape(groups, ends.shape)


@triton.jit(do_not_specialize=["n", "capacity"])
def ends_kernel(
    counts_ptr, before_ptr, ends_ptr, values_ptr, spill_ptr, total_ptr, n, capacity,
    GROUP: tl.constexpr, EACH: tl.constexpr, ROUND: tl.constexpr, SPILL: tl.constexpr, TOTAL: tl.constexpr,
):  # fmt: skip
    """Running sums (int64) of GROUP counts: before_ptr has EACH items for every group before the program's. SPILL, if
    not 0: groups of so many slots that end past ``capacity`` items of values_ptr are redirected to spill_ptr. TOTAL:
    the sum of all counts (int64) goes to total_ptr, which may be pinned memory."""
    group = tl.program_id(0)
    first = group.to(tl.int64) * GROUP
    left = tl.minimum(n - first, GROUP).to(tl.int32)
    counts = load_items(counts_ptr + first, left, GROUP).to(tl.int32)
    # in a group's sums a lane's part may pass 2**31; so many counts are never added up in one launch
    total = tl.zeros((ROUND,), tl.int64 if EACH == 1 else tl.int32)
    start = tl.full((), 0, tl.int32)
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    while start < group * EACH:
        total += load_items(before_ptr + start, group * EACH - start, ROUND).to(total.dtype)
        start += ROUND
    before = tl.sum(total.to(tl.int64), 0)
    if TOTAL:
        if group == tl.num_programs(0) - 1:
            tl.store(total_ptr, before + tl.sum(counts, 0))
    ends = before + tl.cumsum(counts, 0)
    place = tl.arange(0, GROUP)
    if SPILL:
        ends = _redirected(ends, values_ptr, spill_ptr, capacity, SPILL)
    if left >= GROUP:
        tl.store(ends_ptr + first + place, ends)
    else:
        tl.store(ends_ptr + first + place, ends, place < left)


def rounds(slots: int) -> dict[str, int]:
    """How the kernel is to add up what lies before a group: all counts where they are few, else groups' sums."""
    each, items = (GROUP, COUNTS_A_ROUND) if slots <= FEW else (1, SUMS_A_ROUND)
    return {"GROUP": GROUP, "EACH": each, "ROUND": items}


def ends(
    counts: torch.Tensor, stride: int = 0, values: torch.Tensor | None = None, spill: torch.Tensor | None = None
) -> torch.Tensor:
    """int64[slots]: where each slot's items end in a packed array, of int16[slots] counts; with a spill, those of slots
    of ``stride`` elements that have no room in ``values`` redirected. Does not synchronise."""
    n = counts.numel()
    ends = torch.empty((n,), dtype=torch.int64, device=counts.device)
    groups, before = ceil_div(n, GROUP), counts
    if n > FEW:
        before = torch.empty((groups,), dtype=torch.int32, device=counts.device)
        launch(sums_kernel, groups, counts, counts, before, n, GROUP=GROUP)
    launch(
        ends_kernel, groups, counts, counts, before, ends, counts if values is None else bits_of(values),
        counts if spill is None else spill, ends, n, 0 if values is None else values.numel(),
        SPILL=0 if spill is None else spilling.group_slots(stride), TOTAL=False, **rounds(n),
    )  # fmt: skip
    return ends
