"""Max-pool forward on the GPU: one lane holds V outputs that follow each other in storage order.

PyTorch's rules: strict > (the first maximum wins), NaN wins and the last NaN of a window stays, padding never wins, and
a window of nothing but -inf names its first position inside the input. A ReLU in front commutes with the maximum, so it
is applied to the result; where that is zero so are all values of the window, and the first position holds the maximum.
KEEP_ZERO is for a ReLU that gives -0.0 for -0.0: a zero maximum then has the sign of that first position's zero. 16-bit
values in unrolled windows of more than 4 positions are compared as keys (maxima.py), others as fp32.

The common windows of stride 2 in NCHW have a kernel of their own, in which a lane holds two outputs of a row: both
windows look at the same rows of four or five columns, and the keys of 3x3 windows in 16 bits are made once for both.
"""

import triton
import triton.language as tl

from gistkit.kernels.pool.maxima import finish, finish_keys, keys_of, rectified_zero, start_key, stored, take
from gistkit.kernels.pool.tiles import locate, locate_channels, store_codes


@triton.jit
def _first_inside(start):
    """The first window position at or after coordinate 0 along one dimension."""
    return tl.where(start < 0, -start, 0)


@triton.jit
def _visit(best, code, window_ptr, rows, columns, inside, i, j, height, width, step,
           KW: tl.constexpr, RELU: tl.constexpr, CHECK: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Compare with position (i, j) of every window; window_ptr points at position (0, 0). best: fp32, or int32 keys."""
    if CHECK:
        row, column = rows + i, columns + j
        inside = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    values = tl.load(window_ptr + (i * width + j) * step, inside, float("-inf"))
    position = i * KW + j
    if best.dtype == tl.int32:
        best = tl.maximum(best, keys_of(values, position, position, RELU, ASM))
    else:
        best, code = take(best, code, values, position)
    return best, code


@triton.jit(do_not_specialize=["by_inner", "by_width", "by_height"])
def forward_kernel(
    x_ptr, y_ptr, codes_ptr, groups, inner_groups, height, width, out_height, out_width,
    by_inner, by_width, by_height,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr,
    ZERO_CODE: tl.constexpr, NONE: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, UNROLL: tl.constexpr,
    ASM: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Any window in either layout: V outputs a lane along the channels (channels_last) or along a row. inner_groups:
    groups of V in the innermost extent (channels or out_width); groups: all of them."""
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, V)[None, :]
    if CHANNELS_LAST:
        base, outer, oh, ow, step, lane = locate_channels(
            start, lanes, inner_groups, by_inner, out_width, by_width, out_height, by_height, V, True
        )
        columns = (ow * SW - PW)[:, None]
        x_ptr += base * height * width * step
        lane_ptr = x_ptr + (lane + tile)
    else:
        base, outer, oh, group = locate(start, lanes, inner_groups, by_inner, out_height, by_height)
        columns = ((group * V)[:, None] + tile) * SW - PW
        step = 1
        lane_ptr = x_ptr + base * height * width
    rows = (oh * SH - PH)[:, None]
    window_ptr = lane_ptr + ((outer[:, None] * height + rows) * width + columns) * step
    first = (start.to(tl.int64) + lanes)[:, None] * V
    inside = (start + lanes < groups)[:, None]

    first_code = tl.zeros((LANES, V), tl.int32)
    if PH > 0 or PW > 0:
        first_code += _first_inside(rows) * KW + _first_inside(columns)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    # keys of single outputs along a row spill on sm_90; those are odd shapes, which values serve as well
    KEYS: tl.constexpr = UNROLL and KH * KW > 4 and DTYPE != tl.float32 and (CHANNELS_LAST or V > 1)
    if KEYS:
        best = start_key(first_code * 0 + NONE if RELU and ZERO_CODE else first_code, DTYPE, RELU)
    else:
        best = tl.full((LANES, V), float("-inf"), tl.float32)
    code = first_code
    if UNROLL:
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                best, code = _visit(
                    best, code, window_ptr, rows, columns, inside, i, j, height, width, step,
                    KW, RELU, CHECK, ASM,
                )  # fmt: skip
    else:
        for i in range(KH):
            for j in range(KW):
                best, code = _visit(
                    best, code, window_ptr, rows, columns, inside, i, j, height, width, step,
                    KW, RELU, CHECK, ASM,
                )  # fmt: skip
    first_value = 0.0
    if KEEP_ZERO:
        i, j = _first_inside(rows), _first_inside(columns)
        present = inside & (rows + i < height) & (columns + j < width)
        first_value = tl.load(window_ptr + (i * width + j) * step, present, 0.0)
    if KEYS:
        code = best & 0xFF
        place_ptrs = window_ptr + (code // KW * ((width - KW) * step) + code * step)
        y, code = finish_keys(
            best, code, place_ptrs, inside, first_value, RELU, KEEP_ZERO, ZERO_CODE and not RELU, NONE
        )
        y = y.to(DTYPE, bitcast=True)
    else:
        best, code = finish(best, code, rectified_zero(first_value, KEEP_ZERO), first_code, RELU, ZERO_CODE, NONE)
        y = stored(best, DTYPE)
    tl.store(y_ptr + first + tile, y, inside)
    store_codes(codes_ptr, first, code, inside, BITS)


@triton.jit
def _load_row(ptr, present, beside, K: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr):
    """One row of both windows: four neighbours, [LANES, 4], and the odd column of 3x3 windows, [LANES], to their left
    (P = 1) or right (P = 0), in the plane where ``beside``. 2x2 windows have none: anything, as Triton 3.6 takes no
    None from a function. MASKED: only present rows are."""
    ptrs = ptr[:, None] + tl.arange(0, 4)[None, :]
    if MASKED:
        quad = tl.load(ptrs, present[:, None], float("-inf"))
        beside = beside & present
    else:
        quad = tl.load(ptrs)
    if K == 2:
        return quad, beside
    else:
        return quad, tl.load(ptr + (-1 if P > 0 else 4), beside, float("-inf"))


@triton.jit
def _columns(quad, odd, K: tl.constexpr, P: tl.constexpr):
    """A row's columns from the left, four or five [LANES] tiles; the right window begins at the third."""
    evens, odds = tl.split(tl.reshape(quad, (quad.shape[0], 2, 2)))
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    if K == 2:
        return first, second, third, fourth
    elif P > 0:
        return odd, first, second, third, fourth
    else:
        return first, second, third, fourth, odd


@triton.jit
def _keys(values, i, j, RELU: tl.constexpr, ASM: tl.constexpr):
    """Keys of row i, columns j of both 3x3 windows in the order of either; the right one's code is in the high nibble
    of the code byte."""
    codes = (((i * 3 + j - 2) & 15) << 4) | ((i * 3 + j) & 15)
    return keys_of(values, i * 5 + j, codes, RELU, ASM)


@triton.jit
def _larger(a, b):
    """Maxima of five columns each; both windows share the third."""
    larger = ()
    for i in tl.static_range(5):
        larger += (tl.maximum(a[i], b[i]),)
    return larger


@triton.jit
def _firsts_inside(columns, pair, P: tl.constexpr):
    """The values of a row at the first columns inside the plane of both windows."""
    low = columns[0]
    if P > 0:
        low = tl.where(pair == 0, columns[1], low)
    return low, columns[2]


@triton.jit
def _finish_keys(best, start_code, window_ptr, width, first_value, HIGH: tl.constexpr, RELU: tl.constexpr,
                 KEEP_ZERO: tl.constexpr, ZERO_CODE: tl.constexpr, NONE: tl.constexpr):  # fmt: skip
    """:func:`finish_keys` of one 3x3 window; HIGH: the right one. Codes of nibbles hold NONE where it is 15."""
    MARKED: tl.constexpr = RELU and ZERO_CODE and NONE == 15
    best = tl.maximum(best, start_key((NONE if MARKED else start_code) << (4 if HIGH else 0), first_value.dtype, RELU))
    code = (best >> 4) & 15 if HIGH else best & 15
    place_ptr = window_ptr + (code // 3 * (width - 3) + code)
    return finish_keys(best, code, place_ptr, True, first_value, RELU, KEEP_ZERO, ZERO_CODE and not MARKED, NONE)


@triton.jit(do_not_specialize=["by_pairs", "by_height"])
def forward_pairs_kernel(
    x_ptr, y_ptr, codes_ptr, pairs, row_pairs, height, width, out_height, by_pairs, by_height,
    K: tl.constexpr, P: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr, ZERO_CODE: tl.constexpr,
    NONE: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, ALIGN: tl.constexpr,
    ASM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """2x2 (P = 0) and 3x3 (P = 0 or 1) windows of stride 2 in NCHW with an even out_width: two outputs of a row a lane.
    A row of both windows is four neighbours, one wide load, and for 3x3 one more to the left (P = 1) or right (P = 0).
    row_pairs are out_width / 2; width counts ALIGN columns and covers four a pair. CHECK: the last window overhangs."""
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    inside = start + lanes < pairs
    # lanes past the end repeat the last pair, so loads need no mask of their own
    nearest = tl.minimum(lanes, (pairs - 1 - start).to(tl.int32))
    base, outer, oh, pair = locate(start, nearest, row_pairs, by_pairs, out_height, by_height)
    width = width * ALIGN
    row = oh * 2 - P
    ptr = x_ptr + base * height * width + ((outer * height + row) * width + pair * 4)

    low_first = tl.zeros((LANES,), tl.int32)
    high_first = low_first
    if P > 0:
        high_first += tl.where(row < 0, K, 0)
        low_first = high_first + tl.where(pair == 0, 1, 0)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    KEYS: tl.constexpr = K == 3 and DTYPE != tl.float32
    low = tl.full((LANES,), float("-inf"), tl.float32)
    high = low
    low_code, high_code = low_first, high_first
    for i in tl.static_range(K):
        # only the first row can lie above the plane, and only others below it
        present = row >= 0 if i == 0 else row + i < height
        beside = pair > 0 if P > 0 else pair * 4 + 4 < width
        quad, odd = _load_row(ptr + i * width, present, beside, K, P, CHECK if i > 0 else P > 0)
        columns = _columns(quad, odd, K, P)
        if i == 0:
            low_value, high_value = _firsts_inside(columns, pair, P)
        elif i == 1 and P > 0:
            below = _firsts_inside(columns, pair, P)
            low_value, high_value = tl.where(row < 0, below[0], low_value), tl.where(row < 0, below[1], high_value)
        if KEYS:
            quad = _keys(quad, i, P + tl.arange(0, 4)[None, :], RELU, ASM)
            columns = _columns(quad, _keys(odd, i, 0 if P > 0 else 4, RELU, ASM), K, P)
        if KEYS:
            if i == 0:
                tops = columns
            else:
                tops = _larger(tops, columns)
        else:
            for j in tl.static_range(K):
                low, low_code = take(low, low_code, columns[j], i * K + j)
                high, high_code = take(high, high_code, columns[2 + j], i * K + j)
    if KEYS:
        low = tl.maximum(tl.maximum(tops[0], tops[1]), tops[2])
        high = tl.maximum(tl.maximum(tops[2], tops[3]), tops[4])
        low, low_code = _finish_keys(low, low_first, ptr - P, width, low_value, False, RELU, KEEP_ZERO, ZERO_CODE, NONE)
        high, high_code = _finish_keys(
            high, high_first, ptr + (2 - P), width, high_value, True, RELU, KEEP_ZERO, ZERO_CODE, NONE
        )
        y = tl.join(low, high).to(DTYPE, bitcast=True)
    else:
        low, low_code = finish(low, low_code, rectified_zero(low_value, KEEP_ZERO), low_first, RELU, ZERO_CODE, NONE)
        high, high_code = finish(
            high, high_code, rectified_zero(high_value, KEEP_ZERO), high_first, RELU, ZERO_CODE, NONE
        )
        y = stored(tl.join(low, high), DTYPE)
    first = (start.to(tl.int64) + lanes)[:, None] * 2
    tl.store(y_ptr + first + tl.arange(0, 2)[None, :], y, inside[:, None])
    store_codes(codes_ptr, first, tl.join(low_code, high_code), inside[:, None], BITS)
