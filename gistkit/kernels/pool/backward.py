"""Max-pool backward on the GPU in gather form: every input pixel adds up the outputs whose code names it. No atomics.

The order of addition is PyTorch's, row-major over the outputs, in fp32 with one rounding at the end as PyTorch does on
CUDA for bf16 and fp16. Sums start at +0, so a gradient of -0.0 alone becomes +0, as in PyTorch's NCHW kernel.

Common windows in NCHW, 2x2 and padded 3x3 of stride 2, have a kernel of half the instructions, 2 x 4 pixels a lane.
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
    base, outer, qh, qw, step, lane = locate_channels(
        start, lanes, inner_groups, by_inner, quad_width, by_width, quad_height, by_height, V, CHANNELS_LAST
    )
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
    base, outer, ih, iw, step, lane = locate_channels(
        start, lanes, inner_groups, by_inner, width, by_width, height, by_height, V, CHANNELS_LAST
    )
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


@triton.jit
def _tags(codes, DTYPE: tl.constexpr):
    """The codes to compare: beside 16-bit gradients as fp32 2**23 + code, in bits 0x4B000000 | code. LLVM packs the
    results of integer comparisons there into bit fields and back: 2 instructions an element."""
    if DTYPE == tl.float32:
        return codes
    else:
        return (codes | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _spread(pixels, grads, tags, ROW: tl.constexpr, K: tl.constexpr):
    """Add a row of outputs to the four pixels of a lane that lie in row ROW of their windows. Sums start at +0 and
    cannot become -0, so that a sum kept is a sum + 0."""
    p, q, r, s = pixels
    a, b, c = grads
    a_tag, b_tag, c_tag = tags
    FIRST: tl.constexpr = ROW * K + (0 if a_tag.dtype == tl.int32 else 1 << 23)
    if K == 2:
        p = tl.where(a_tag == FIRST, p + a, p)
        q = tl.where(a_tag == FIRST + 1, q + a, q)
        r = tl.where(b_tag == FIRST, r + b, r)
        s = tl.where(b_tag == FIRST + 1, s + b, s)
    else:
        p = tl.where(a_tag == FIRST + 1, p + a, p)
        q = tl.where(a_tag == FIRST + 2, q + a, q)
        q = tl.where(b_tag == FIRST, q + b, q)
        r = tl.where(b_tag == FIRST + 1, r + b, r)
        s = tl.where(b_tag == FIRST + 2, s + b, s)
        s = tl.where(c_tag == FIRST, s + c, s)
    return p, q, r, s


@triton.jit
def _outputs_of_row(
    grad_ptrs, codes_ptrs, exists, has_third, K: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr
):
    """Gradients and tags of two outputs a lane and (K = 3) the one after them; gradients are 0 where none exist."""
    DTYPE: tl.constexpr = grad_ptrs.dtype.element_ty
    tile = tl.arange(0, 2)[None, :]
    grad_tile, codes_tile = grad_ptrs[:, None] + tile, codes_ptrs[:, None] + tl.arange(0, BITS // 4)[None, :]
    if MASKED:
        grads = tl.load(grad_tile, exists[:, None], 0.0)
        codes = tl.load(codes_tile, exists[:, None], 0).to(tl.int32)
    else:
        grads = tl.load(grad_tile)
        codes = tl.load(codes_tile).to(tl.int32)
    if BITS == 4:
        codes = tl.join(codes & 15, codes >> 4).reshape(codes.shape[0], 2)
    a, b = tl.split(widen(grads))
    a_tag, b_tag = tl.split(_tags(codes, DTYPE))
    c, c_tag = b, b_tag
    if K == 3:
        present = exists & has_third
        c = widen(tl.load(grad_ptrs + 2, present, 0.0))
        c_code = tl.load(codes_ptrs + BITS // 4, present, 0).to(tl.int32) & (2**BITS - 1)
        c_tag = _tags(c_code, DTYPE)
    return (a, b, c), (a_tag, b_tag, c_tag)


@triton.jit
def _store_four(ptr, pixels, inside, PORTABLE: tl.constexpr, LANES: tl.constexpr):
    p, q, r, s = pixels
    row = tl.reshape(tl.join(tl.join(p, r), tl.join(q, s)), (LANES, 4))
    row = rounded(row, ptr.dtype.element_ty, PORTABLE)
    tl.store(ptr[:, None] + tl.arange(0, 4)[None, :], row, inside[:, None])


@triton.jit(do_not_specialize=["by_pairs", "by_height"])
def backward_pairs_kernel(
    grad_ptr, codes_ptr, grad_x_ptr, pairs, row_pairs, height, out_height, quad_height, by_pairs, by_height,
    K: tl.constexpr, BITS: tl.constexpr, CHECK: tl.constexpr, ODD: tl.constexpr,
    PORTABLE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """2x2 windows without padding and 3x3 with padding 1, stride 2, in NCHW where width = 2 out_width = 4 row_pairs.

    A lane holds 2 x 4 pixels. For K = 3, pixel row 2q is in the middle of the windows of output row q; row 2q + 1 is in
    their last and in the first of output row q + 1's; columns likewise. quad_height is ceil(height / 2).
    """
    start = tl.program_id(0) * LANES
    lanes = tl.arange(0, LANES)
    inside = start + lanes < pairs
    # lanes past the end repeat the last pair, so loads need no mask of their own
    nearest = tl.minimum(lanes, (pairs - 1 - start).to(tl.int32))
    base, outer, q, pair = locate(start, nearest, row_pairs, by_pairs, quad_height, by_height)
    width = row_pairs * 4
    outputs_before = base * out_height * row_pairs * 2
    grad_ptr += outputs_before
    codes_ptr += outputs_before // (8 // BITS)
    first = (outer * out_height + q) * row_pairs + pair
    grad_ptrs, codes_ptrs = grad_ptr + first * 2, codes_ptr + first * (BITS // 4)
    has_third = pair + 1 < row_pairs

    zero = tl.zeros((LANES,), tl.float32)
    grads, tags = _outputs_of_row(grad_ptrs, codes_ptrs, q < out_height, has_third, K, CHECK, BITS)
    top = _spread((zero, zero, zero, zero), grads, tags, K - 2, K)
    bottom = _spread((zero, zero, zero, zero), grads, tags, K - 1, K)
    if K == 3:
        grad_ptrs, codes_ptrs = grad_ptrs + row_pairs * 2, codes_ptrs + row_pairs * (BITS // 4)
        grads, tags = _outputs_of_row(grad_ptrs, codes_ptrs, q + 1 < out_height, has_third, K, True, BITS)
        bottom = _spread(bottom, grads, tags, 0, K)
    ptr = grad_x_ptr + base * height * width + ((outer * height + q * 2) * width + pair * 4)
    _store_four(ptr, top, inside, PORTABLE, LANES)
    if ODD:
        inside = inside & (q * 2 + 1 < height)
    _store_four(ptr + width, bottom, inside, PORTABLE, LANES)
