"""Zero-value compression: a warp a slot of 1024 elements, 32 rows of 32, one element a lane (see lanes.py).

The running count lives in a register. AHEAD rows are loaded before the first of them is used, so that a warp has enough
bytes in flight; x and values are bit patterns (int32, int16) for the format ``raw``.
"""

# tl.static_range is unrolled by the compiler: to a type checker it is no iterator
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from gistkit.formats import ZVC_SLOT, ZVC_WORDS
from gistkit.kernels.lanes import LANES, load_rows, mark_rows, marked_rows
from gistkit.kernels.rounding import to_code
from gistkit.kernels.sparse_values import is_negative_zero, load_items, load_values, slot_start, tensor_factor

SLOT = tl.constexpr(ZVC_SLOT)
ROWS = tl.constexpr(ZVC_WORDS)


@triton.jit(do_not_specialize=["n"])
def zvc_encode_kernel(
    x_ptr,
    words_ptr,
    counts_ptr,
    values_ptr,
    n,
    FMT: tl.constexpr,
    DTYPE: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """Mask words, count and values of one slot, the values from 1024 * slot on."""
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - slot * SLOT, SLOT).to(tl.int32)
    words = tl.zeros((LANES,), tl.int32)
    done = tl.zeros((LANES,), tl.int32)
    for first in tl.static_range(0, ROWS, AHEAD):
        rows = load_rows(x_ptr + slot * SLOT, first * LANES, left, AHEAD)
        marks, places, done = mark_rows(rows, 0, done, AHEAD, ASM)
        for r in tl.static_range(AHEAD):
            item = rows[r]
            if FMT != "raw":
                item = to_code(item.to(DTYPE, bitcast=True), FMT).to(values_ptr.dtype.element_ty)
            tl.store(values_ptr + slot * SLOT + places[r], item, rows[r] != 0)
            words = tl.where(lane == first + r, marks[r], words)
    tl.store(words_ptr + slot * ROWS + lane, words)
    tl.store(counts_ptr + slot + lane, done.to(tl.int16), lane == 0)


@triton.jit(do_not_specialize=["n", "plane"])
def zvc_decode_kernel(
    x_ptr,
    words_ptr,
    counts_ptr,
    ends_ptr,
    values_ptr,
    exponents_ptr,
    n,
    plane,
    FMT: tl.constexpr,
    SCALING: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """One slot of x: an element's value stands at its rank among the set bits."""
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - slot * SLOT, SLOT).to(tl.int32)
    words = tl.load(words_ptr + slot * ROWS + lane)
    start = slot_start(slot, True, tl.load(counts_ptr + slot), ends_ptr, SLOT, PACKED)
    done = tl.zeros((LANES,), tl.int32)
    factor = tensor_factor(exponents_ptr, FMT, SCALING)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for first in tl.static_range(0, ROWS, AHEAD):
        stored, places, done = marked_rows(words, first, done, AHEAD, ASM)
        rows = ()
        for r in tl.static_range(AHEAD):
            rows += (
                load_values(
                    values_ptr, exponents_ptr, start, places[r], stored[r], plane, factor, FMT, SCALING, PACKED, dtype
                ),
            )
        for r in tl.static_range(AHEAD):
            offs = lane + (first + r) * LANES
            tl.store(x_ptr + slot * SLOT + offs, rows[r], offs < left)


@triton.jit(do_not_specialize=["n", "plane"])
def zvc_backward_kernel(
    out_ptr,
    grad_ptr,
    words_ptr,
    counts_ptr,
    ends_ptr,
    values_ptr,
    n,
    plane,
    FMT: tl.constexpr,
    PACKED: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """One slot of grad where an element is stored that is not a negative zero, else +0; bit patterns throughout."""
    slot = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    left = tl.minimum(n - slot * SLOT, SLOT).to(tl.int32)
    words = tl.load(words_ptr + slot * ROWS + lane)
    start = slot_start(slot, True, tl.load(counts_ptr + slot), ends_ptr, SLOT, PACKED)
    done = tl.zeros((LANES,), tl.int32)
    for first in tl.static_range(0, ROWS, AHEAD):
        stored, places, done = marked_rows(words, first, done, AHEAD, ASM)
        grads = ()
        items = ()
        for r in tl.static_range(AHEAD):
            offs = lane + (first + r) * LANES
            grads += (tl.load(grad_ptr + slot * SLOT + offs, stored[r], other=0),)
            items += (load_items(values_ptr, start, places[r], stored[r], plane, FMT, PACKED),)
        for r in tl.static_range(AHEAD):
            offs = lane + (first + r) * LANES
            grad = tl.where(is_negative_zero(items[r], FMT), 0, grads[r])
            tl.store(out_ptr + slot * SLOT + offs, grad, offs < left)
