"""Max-pool forward on the GPU: one lane holds V outputs that follow each other in storage order.

PyTorch's rules: strict > (the first maximum wins), NaN wins and the last NaN of a window stays, padding never wins, and
a window of nothing but -inf names its first position inside the input. A ReLU in front commutes with the maximum, so it
is applied to the result; where that is zero so are all values of the window, and the first position holds the maximum.
KEEP_ZERO is for a ReLU that gives -0.0 for -0.0: a zero maximum then has the sign of that first position's zero.
"""

import triton
import triton.language as tl

from gistkit.kernels.pool_tiles import locate, locate_channels, program_start, store_codes
from gistkit.kernels.rounding import not_positive


@triton.jit
def _comparable(values):
    """fp32; of bf16 by bits, since a conversion may change the payload of a NaN. fp16 comparisons would cost more."""
    if values.dtype == tl.bfloat16:
        return (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.float32)


@triton.jit
def _stored(best, DTYPE: tl.constexpr):
    """The inverse of :func:`_comparable`; a NaN in fp16 may change its payload."""
    if DTYPE == tl.bfloat16:
        return (best.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return best.to(DTYPE)


@triton.jit
def _take(best, code, values, position):
    """The larger of best and values with its position."""
    values = _comparable(values)
    wins = (values > best) | (values != values)
    return tl.where(wins, values, best), tl.where(wins, position, code)


@triton.jit
def _rectified_zero(values):
    """relu(values) where they are not positive: zeros keep their sign."""
    values = _comparable(values)
    return tl.where(values == 0.0, values, 0.0)


@triton.jit
def _finish(best, code, zero, first_code, RELU: tl.constexpr, ZERO_CODE: tl.constexpr, NONE: tl.constexpr):
    """Apply the ReLU to the maxima, where it stops them: zero; mark those that pass no gradient back."""
    stopped = not_positive(best)
    if RELU:
        best = tl.where(stopped, zero, best)
    if ZERO_CODE:
        code = tl.where(stopped, NONE, code)
    elif RELU:
        code = tl.where(stopped, first_code, code)
    return best, code


@triton.jit
def _first_inside(start, DILATION: tl.constexpr):
    """The first window position at or after coordinate 0 along one dimension."""
    return tl.where(start < 0, (DILATION - 1 - start) // DILATION, 0)


@triton.jit
def _visit(best, code, window_ptr, rows, columns, inside, i, j, height, width, step,
           KW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """Compare with position (i, j) of every window; window_ptr points at position (0, 0)."""
    if CHECK:
        row, column = rows + i * DH, columns + j * DW
        inside = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    values = tl.load(window_ptr + (i * DH * width + j * DW) * step, inside, float("-inf"))
    return _take(best, code, values, i * KW + j)


@triton.jit(do_not_specialize=["by_inner", "by_width", "by_height"])
def forward_kernel(
    x_ptr, y_ptr, codes_ptr, groups, inner_groups, height, width, out_height, out_width,
    by_inner, by_width, by_height,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, CHANNELS_LAST: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr,
    ZERO_CODE: tl.constexpr, NONE: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, UNROLL: tl.constexpr,
    WIDE: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Any window in either layout: V outputs a lane along the channels (channels_last) or along a row.

    inner_groups: groups of V in the innermost extent (channels or out_width); groups: all of them.
    """
    start = program_start(LANES, WIDE)
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, V)[None, :]
    if CHANNELS_LAST:
        base, outer, oh, ow, group = locate_channels(
            start, lanes, inner_groups, by_inner, out_width, by_width, out_height, by_height, WIDE
        )
        columns = (ow * SW - PW)[:, None]
        step = inner_groups * V
        x_ptr += base * height * width * step
        lane_ptr = x_ptr + ((group * V)[:, None] + tile)
    else:
        base, outer, oh, group = locate(start, lanes, inner_groups, by_inner, out_height, by_height, WIDE)
        columns = ((group * V)[:, None] + tile) * SW - PW
        step = 1
        lane_ptr = x_ptr + base * height * width
    if WIDE:
        width = tl.cast(width, tl.int64)
    rows = (oh * SH - PH)[:, None]
    window_ptr = lane_ptr + ((outer[:, None] * height + rows) * width + columns) * step
    first = (start.to(tl.int64) + lanes)[:, None] * V
    inside = (start + lanes < groups)[:, None]

    first_code = tl.zeros((LANES, V), tl.int32)
    if PH > 0 or PW > 0:
        first_code += _first_inside(rows, DH) * KW + _first_inside(columns, DW)
    best = tl.full((LANES, V), float("-inf"), tl.float32)
    code = first_code
    if UNROLL:
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                best, code = _visit(
                    best, code, window_ptr, rows, columns, inside, i, j, height, width, step, KW, DH, DW, CHECK
                )
    else:
        for i in range(KH):
            for j in range(KW):
                best, code = _visit(
                    best, code, window_ptr, rows, columns, inside, i, j, height, width, step, KW, DH, DW, CHECK
                )
    zero = 0.0
    if KEEP_ZERO:
        i, j = _first_inside(rows, DH), _first_inside(columns, DW)
        present = inside & (rows + i * DH < height) & (columns + j * DW < width)
        zero = _rectified_zero(tl.load(window_ptr + (i * DH * width + j * DW) * step, present, 0.0))
    best, code = _finish(best, code, zero, first_code, RELU, ZERO_CODE, NONE)
    tl.store(y_ptr + first + tile, _stored(best, y_ptr.dtype.element_ty), inside)
    store_codes(codes_ptr, first, code, inside, BITS)


@triton.jit
def _load_four(ptr, inside, MASKED: tl.constexpr, LANES: tl.constexpr):
    """Four neighbours a lane, as four [LANES] tiles."""
    ptrs = ptr[:, None] + tl.arange(0, 4)[None, :]
    if MASKED:
        quad = tl.load(ptrs, inside[:, None], float("-inf"))
    else:
        quad = tl.load(ptrs)
    even, odd = tl.split(tl.reshape(quad, (LANES, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit(do_not_specialize=["by_pairs", "by_height"])
def forward_pairs_kernel(
    x_ptr, y_ptr, codes_ptr, pairs, row_pairs, height, width, out_height, by_pairs, by_height,
    K: tl.constexpr, P: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr, ZERO_CODE: tl.constexpr,
    NONE: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, ALIGN: tl.constexpr, WIDE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """2x2 (P = 0) and 3x3 (P = 0 or 1) windows of stride 2 in NCHW with an even out_width: two outputs of a row a lane.

    A row of both windows is four neighbours, one wide load, and for 3x3 one more to the left (P = 1) or right (P = 0).
    row_pairs are out_width / 2; width counts ALIGN columns and covers four a pair. CHECK: the last window overhangs.
    """
    start = program_start(LANES, WIDE)
    lanes = tl.arange(0, LANES)
    inside = start + lanes < pairs
    # lanes past the end repeat the last pair, so loads need no mask of their own
    nearest = tl.minimum(lanes, (pairs - 1 - start).to(tl.int32))
    base, outer, oh, pair = locate(start, nearest, row_pairs, by_pairs, out_height, by_height, WIDE)
    if WIDE:
        width = tl.cast(width, tl.int64)
    width = width * ALIGN
    row = oh * 2 - P
    ptr = x_ptr + base * height * width + ((outer * height + row) * width + pair * 4)

    low_first = tl.zeros((LANES,), tl.int32)
    high_first = low_first
    if P > 0:
        high_first += tl.where(row < 0, K, 0)
        low_first = high_first + tl.where(pair == 0, 1, 0)
    low = tl.full((LANES,), float("-inf"), tl.float32)
    high = low
    low_code, high_code = low_first, high_first
    for i in tl.static_range(K):
        present = (row + i >= 0) & (row + i < height)
        row_ptr = ptr + i * width
        a, b, c, d = _load_four(row_ptr, present, CHECK if i > 0 else P > 0, LANES)
        if P > 0:
            left = tl.load(row_ptr - 1, present & (pair > 0), float("-inf"))
            low, low_code = _take(low, low_code, left, i * K)
            high, high_code = _take(high, high_code, b, i * K)
        low, low_code = _take(low, low_code, a, i * K + P)
        low, low_code = _take(low, low_code, b, i * K + P + 1)
        high, high_code = _take(high, high_code, c, i * K + P)
        high, high_code = _take(high, high_code, d, i * K + P + 1)
        if K == 3 and P == 0:
            right = tl.load(row_ptr + 4, present & (pair * 4 + 4 < width), float("-inf"))
            low, low_code = _take(low, low_code, c, i * K + 2)
            high, high_code = _take(high, high_code, right, i * K + 2)
    low_zero, high_zero = 0.0, 0.0
    if KEEP_ZERO:
        first_row_ptr = ptr + tl.where(row < 0, width, 0)
        low_zero = _rectified_zero(tl.load(first_row_ptr - tl.where(pair == 0, 0, P)))
        high_zero = _rectified_zero(tl.load(first_row_ptr + 2 - P))
    low, low_code = _finish(low, low_code, low_zero, low_first, RELU, ZERO_CODE, NONE)
    high, high_code = _finish(high, high_code, high_zero, high_first, RELU, ZERO_CODE, NONE)
    first = (start.to(tl.int64) + lanes)[:, None] * 2
    y = _stored(tl.join(low, high), y_ptr.dtype.element_ty)
    tl.store(y_ptr + first + tl.arange(0, 2)[None, :], y, inside[:, None])
    store_codes(codes_ptr, first, tl.join(low_code, high_code), inside[:, None], BITS)
