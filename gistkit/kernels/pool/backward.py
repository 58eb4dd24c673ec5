"""Max-pool backward on the GPU in gather form: every input pixel adds up the outputs whose code names it. No atomics.

The order of addition is PyTorch's, row-major over the outputs, in fp32 with one rounding at the end as PyTorch does on
CUDA for bf16 and fp16. Sums start at +0, so a gradient of -0.0 alone becomes +0, as in PyTorch's NCHW kernel.
"""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import rounded, widen
from gistkit.kernels.pool.tiles import load_codes, locate, locate_channels


@triton.jit
def _add(acc, grad, code, A: tl.constexpr, B: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """Add grad where code names the pixel A rows and B columns after the window's first; no-op for no such position."""
    if A >= 0 and A < KH and B >= 0 and B < KW:
        return acc + tl.where(code == A * KW + B, grad, 0.0)
    else:
        return acc


@triton.jit(do_not_specialize=["by_inner", "by_width", "by_height"])
def backward_quads_kernel(
    grad_ptr, codes_ptr, grad_x_ptr, groups, inner_groups, height, width, out_height, out_width, quad_height,
    quad_width, by_inner, by_width, by_height,
    KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, ODD: tl.constexpr,
    PORTABLE: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Stride 2: a lane holds 2x2 input pixels (of V channels) and reads each output that may name one of them once.

    Output row q + e meets input row 2q + a at offset a + PH - 2e of its window: known at compile time, as e's range is.
    quad_width is ceil(width / 2) (inner_groups in NCHW); CHECK: some q + e has no output; ODD: height or width is odd.
    """
    E_FIRST: tl.constexpr = -((KH - 1 - PH) // 2)
    F_FIRST: tl.constexpr = -((KW - 1 - PW) // 2)
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, V)[None, :]
    if CHANNELS_LAST:
        base, outer, qh, qw, group = locate_channels(
            start, lanes, inner_groups, by_inner, quad_width, by_width, quad_height, by_height
        )
        step = inner_groups * V
        lane = (group * V)[:, None]
    else:
        base, outer, qh, qw = locate(start, lanes, quad_width, by_width, quad_height, by_height)
        step = 1
        lane = tl.zeros((LANES, 1), tl.int32)
    inside = (start + lanes < groups)[:, None]
    qh, qw, outer = qh[:, None], qw[:, None], outer[:, None]
    outputs_before = base * out_height * out_width * step
    first = ((outer * out_height + qh) * out_width + qw) * step + lane
    if V == 1:
        # the codes of the program's first plane may begin in the high nibble of a byte
        odd = (outputs_before & 1).to(tl.int32)
        outputs_before -= odd
        first += odd
    grad_ptr += outputs_before
    codes_ptr += outputs_before // (8 // BITS)
    top_left = tl.zeros((LANES, V), tl.float32)
    top_right, bottom_left, bottom_right = top_left, top_left, top_left
    for e in tl.static_range(E_FIRST, (PH + 1) // 2 + 1):
        for f in tl.static_range(F_FIRST, (PW + 1) // 2 + 1):
            exists = inside
            if CHECK:
                exists = inside & (qh + e >= 0) & (qh + e < out_height) & (qw + f >= 0) & (qw + f < out_width)
            output = first + (e * out_width + f) * step
            # where no output exists the gradient is 0, and adding that changes no sum, whatever the code says
            grad = widen(tl.load(grad_ptr + output + tile, exists, 0.0))
            code = load_codes(codes_ptr, output, exists, V, BITS)
            top_left = _add(top_left, grad, code, PH - 2 * e, PW - 2 * f, KH, KW)
            top_right = _add(top_right, grad, code, PH - 2 * e, PW - 2 * f + 1, KH, KW)
            bottom_left = _add(bottom_left, grad, code, PH - 2 * e + 1, PW - 2 * f, KH, KW)
            bottom_right = _add(bottom_right, grad, code, PH - 2 * e + 1, PW - 2 * f + 1, KH, KW)
    _store_quads(
        grad_x_ptr, base, outer, qh, qw, lane, step, inside, height, width, quad_width,
        top_left, top_right, bottom_left, bottom_right, CHANNELS_LAST, ODD, PORTABLE, V, LANES,
    )  # fmt: skip


@triton.jit
def _store_quads(grad_x_ptr, base, outer, qh, qw, lane, step, inside, height, width, quad_width,
                 top_left, top_right, bottom_left, bottom_right, CHANNELS_LAST: tl.constexpr, ODD: tl.constexpr,
                 PORTABLE: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr):  # fmt: skip
    DTYPE: tl.constexpr = grad_x_ptr.dtype.element_ty
    top_left, top_right = rounded(top_left, DTYPE, PORTABLE), rounded(top_right, DTYPE, PORTABLE)
    bottom_left, bottom_right = rounded(bottom_left, DTYPE, PORTABLE), rounded(bottom_right, DTYPE, PORTABLE)
    bottom, right = inside, inside
    if ODD:
        bottom, right = inside & (qh * 2 + 1 < height), inside & (qw * 2 + 1 < width)
    else:
        width = quad_width * 2
    grad_x_ptr += base * height * width * step
    pixel = (outer * height + qh * 2) * width + qw * 2
    if CHANNELS_LAST:
        tile = tl.arange(0, V)[None, :]
        ptr = grad_x_ptr + (pixel * step + lane) + tile
        tl.store(ptr, top_left, inside)
        tl.store(ptr + step, top_right, right)
        tl.store(ptr + width * step, bottom_left, bottom)
        tl.store(ptr + (width * step + step), bottom_right, bottom & right)
    else:
        tile = tl.arange(0, 2)[None, :]
        ptr = grad_x_ptr + pixel + tile
        top_inside, bottom_inside = inside, bottom
        if ODD:
            present = (tile == 0) | right
            top_inside, bottom_inside = inside & present, bottom & present
        tl.store(ptr, tl.reshape(tl.join(top_left, top_right), (LANES, 2)), top_inside)
        tl.store(ptr + width, tl.reshape(tl.join(bottom_left, bottom_right), (LANES, 2)), bottom_inside)


@triton.jit(do_not_specialize=["by_inner", "by_width", "by_height"])
def backward_kernel(
    grad_ptr, codes_ptr, grad_x_ptr, groups, inner_groups, height, width, out_height, out_width,
    by_inner, by_width, by_height,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, BITS: tl.constexpr,
    PORTABLE: tl.constexpr, V: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Any stride: a lane holds one input pixel (of V channels) and visits every output whose window may reach it."""
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    tile = tl.arange(0, V)[None, :]
    if CHANNELS_LAST:
        base, outer, ih, iw, group = locate_channels(
            start, lanes, inner_groups, by_inner, width, by_width, height, by_height
        )
        step = inner_groups * V
        lane = (group * V)[:, None]
    else:
        base, outer, ih, iw = locate(start, lanes, width, by_width, height, by_height)
        step = 1
        lane = tl.zeros((LANES, 1), tl.int32)
    inside = (start + lanes < groups)[:, None]
    h, w = ih[:, None] + PH, iw[:, None] + PW
    first_row = (base + outer)[:, None] * out_height
    acc = tl.zeros((LANES, V), tl.float32)
    # outputs in ascending order: the last window to reach row h starts at row h // SH of the outputs
    for e in range(-((KH - 1) // SH), 1):
        oh = h // SH + e
        i = h - oh * SH
        row_exists = inside & (oh >= 0) & (oh < out_height) & (i < KH)
        for f in range(-((KW - 1) // SW), 1):
            ow = w // SW + f
            j = w - ow * SW
            exists = row_exists & (ow >= 0) & (ow < out_width) & (j < KW)
            output = ((first_row + oh) * out_width + ow) * step + lane
            grad = widen(tl.load(grad_ptr + output + tile, exists, 0.0))
            code = load_codes(codes_ptr, output, exists, V, BITS)
            acc += tl.where(code == i * KW + j, grad, 0.0)
    first = (start.to(tl.int64) + lanes)[:, None] * V
    tl.store(grad_x_ptr + first + tile, rounded(acc, grad_x_ptr.dtype.element_ty, PORTABLE), inside)
