"""Running sums of the counts of sparse storage: where each slot's items end in the packed array.

One launch for few counts, whose programs each add up all counts before their own; else two, the first of which adds up
groups. ``torch.cumsum`` widens, initialises and scans in three launches.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.tiling import launch

GROUP = 1024
"""Counts a program."""
FEW = 16 * GROUP
"""Counts that one launch may add up over and over."""
COUNTS_A_ROUND, SUMS_A_ROUND = 4096, 512


@triton.jit
def _items(ptr, left, SIZE: tl.constexpr):
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
    tl.store(sums_ptr + group, tl.sum(_items(counts_ptr + group * GROUP, left, GROUP).to(tl.int32), 0))


@triton.jit(do_not_specialize=["n", "heads"])
def ends_kernel(
    counts_ptr,
    before_ptr,
    ends_ptr,
    heads_ptr,
    n,
    heads,
    GROUP: tl.constexpr,
    EACH: tl.constexpr,
    ROUND: tl.constexpr,
    STEP: tl.constexpr,
):
    """Running sums (int64) of GROUP counts: before_ptr has EACH items for every group before the program's.

    STEP, if not 0: head i (int32) becomes the slot that has item STEP * i of the packed array, for i below heads.
    """
    group = tl.program_id(0)
    first = group.to(tl.int64) * GROUP
    left = tl.minimum(n - first, GROUP).to(tl.int32)
    counts = _items(counts_ptr + first, left, GROUP).to(tl.int32)
    # in a group's sums a lane's part may pass 2**31; so many counts are never added up in one launch
    total = tl.zeros((ROUND,), tl.int64 if EACH == 1 else tl.int32)
    start = tl.full((), 0, tl.int32)
    # while, not range: the interpreter of Triton 3.6 cannot take a loop's bounds from tensors
    while start < group * EACH:
        total += _items(before_ptr + start, group * EACH - start, ROUND).to(total.dtype)
        start += ROUND
    ends = tl.sum(total.to(tl.int64), 0) + tl.cumsum(counts, 0)
    place = tl.arange(0, GROUP)
    if STEP:
        # a slot is no longer than STEP, so there is one multiple of STEP in it, or none
        head = (ends - counts + (STEP - 1)) // STEP
        tl.store(heads_ptr + head, (first + place).to(tl.int32), (head * STEP < ends) & (head < heads) & (place < left))
    if left >= GROUP:
        tl.store(ends_ptr + first + place, ends)
    else:
        tl.store(ends_ptr + first + place, ends, place < left)


def ends_and_heads(counts: torch.Tensor, heads: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(int64[slots] where each slot's items end, int32[heads] which slot has packed item step * i) of int16[slots].

    step is at least the largest count, or 0 for no heads. A head past the last item is not defined. Does not
    synchronise.
    """
    n = counts.numel()
    ends = torch.empty((n,), dtype=torch.int64, device=counts.device)
    first = torch.empty((heads,), dtype=torch.int32, device=counts.device) if step else ends
    groups = ceil_div(n, GROUP)
    if n <= FEW:
        before, each, items = counts, GROUP, COUNTS_A_ROUND
    else:
        before, each, items = torch.empty((groups,), dtype=torch.int32, device=counts.device), 1, SUMS_A_ROUND
        launch(sums_kernel, groups, counts, counts, before, n, GROUP=GROUP)
    launch(
        ends_kernel,
        groups,
        counts,
        counts,
        before,
        ends,
        first,
        n,
        heads,
        GROUP=GROUP,
        EACH=each,
        ROUND=items,
        STEP=step,
    )
    return ends, first


def ends(counts: torch.Tensor) -> torch.Tensor:
    """int64[slots]: where each slot's items end in a packed array, of int16[slots] counts. Does not synchronise."""
    return ends_and_heads(counts, 0, 0)[0]
