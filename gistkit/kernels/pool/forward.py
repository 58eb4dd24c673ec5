"""Max-pool forward on the GPU: one lane holds V outputs that follow each other in storage order.

PyTorch's rules: strict > (the first maximum wins), NaN wins and the last NaN of a window stays, padding never wins, and
a window of nothing but -inf names its first position inside the input. A ReLU in front commutes with the maximum, so it
is applied to the result; where that is zero so are all values of the window, and the first position holds the maximum.
KEEP_ZERO is for a ReLU that gives -0.0 for -0.0: a zero maximum then has the sign of that first position's zero.
16-bit values in unrolled windows of more than 4 positions are compared as keys (pool_keys), all others as fp32 beside
their codes (pool_values).
"""

import triton
import triton.language as tl

from gistkit.kernels.pool.keys import finish_keys, keys_of, start_key
from gistkit.kernels.pool.tiles import locate, locate_channels, store_codes
from gistkit.kernels.pool.values import finish, rectified_zero, stored, take


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
    """Any window in either layout: V outputs a lane along the channels (channels_last) or along a row.

    inner_groups: groups of V in the innermost extent (channels or out_width); groups: all of them.
    """
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, V)[None, :]
    if CHANNELS_LAST:
        base, outer, oh, ow, group = locate_channels(
            start, lanes, inner_groups, by_inner, out_width, by_width, out_height, by_height
        )
        columns = (ow * SW - PW)[:, None]
        step = inner_groups * V
        x_ptr += base * height * width * step
        lane_ptr = x_ptr + ((group * V)[:, None] + tile)
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
