"""Max-pool backward for the common windows in NCHW: 2x2 and padded 3x3 of stride 2, a lane 2 x 4 pixels.

Half the instructions of :mod:`gistkit.kernels.pool.backward`, whose rules hold here too.
"""

import triton
import triton.language as tl

from gistkit.kernels.narrow.rounding import rounded, widen
from gistkit.kernels.pool.tiles import locate


@triton.jit
def _tags(codes, DTYPE: tl.constexpr):
    """The codes to compare: beside 16-bit gradients as fp32 2**23 + code, in bits 0x4B000000 | code.

    LLVM packs the results of integer comparisons there into bit fields and back: 2 instructions an element.
    """
    if DTYPE == tl.float32:
        return codes
    else:
        return (codes | 0x4B000000).to(tl.float32, bitcast=True)


@triton.jit
def _spread(pixels, grads, tags, ROW: tl.constexpr, K: tl.constexpr):
    """Add a row of outputs to the four pixels of a lane that lie in row ROW of their windows.

    A sum kept is a sum + 0: sums start at +0 and cannot become -0.
    """
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
