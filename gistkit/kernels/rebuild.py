"""Batch norm's elementwise half, a residual sum and a ReLU in one pass: what a rebuild reads and writes once.

Which arithmetic a forward used depends on the library behind it (cuDNN's is not documented), so there are several
forms, each rounded exactly as written, fused multiply-adds where the form says so and nowhere else:

| form | BN(x) with mean m, 1/std s, weight w, bias b, alpha = w * s |
|---|---|
| ``scaled`` | fma(w * (x - m), s, b): PyTorch's own kernels |
| ``fused`` | fma(x, alpha, fma(-m, alpha, b)) |
| ``split`` | fma(x, alpha, b - m * alpha) |
| ``centred`` | fma(x - m, alpha, b) |
| ``normalised`` | fma((x - m) * s, w, b) |

All in fp32, rounded to x's dtype; the sum is one more fp32 addition of rounded values, rounded again, as PyTorch's
operators do it one after the other. The tensor is seen as [outer, inner]: planes of one channel (NCHW), or pixels
of all channels (channels_last), so a program reads a channel's four factors once for all its elements of that channel.
"""

# Triton's constexprs are plain numbers while a kernel is traced.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.checks import check_length, check_norm, check_values
from gistkit.kernels.rounding import not_positive, rounded, widen
from gistkit.kernels.signed_zero import relu_keeps_negative_zero
from gistkit.kernels.tiling import launch

# elements a program, by bytes an element: 64 bytes of each tensor a lane
TILE = {2: 4096, 4: 2048}
# where rows have odd lengths, every element is an access of its own
SMALL_TILE = 1024
# channels a program where they lie together: several pixels then share a lane's factors
CHANNELS = 256


@triton.jit
def _fma(a, b, c, PORTABLE: tl.constexpr):
    """a * b + c of fp32, rounded once; the interpreter, which has none, goes through fp64."""
    if PORTABLE:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _batch_norm(
    x, mean_ptr, invstd_ptr, affine_ptr, channel, mask, channels, FORM: tl.constexpr, PORTABLE: tl.constexpr
):
    """BN(x), rounded to x's dtype; ``channel`` is shaped to be broadcast over x."""
    mean = tl.broadcast_to(tl.load(mean_ptr + channel, mask, other=0.0), x.shape)
    invstd = tl.broadcast_to(tl.load(invstd_ptr + channel, mask, other=0.0), x.shape)
    weight = tl.broadcast_to(tl.load(affine_ptr + channel, mask, other=0.0), x.shape)
    bias = tl.broadcast_to(tl.load(affine_ptr + channels + channel, mask, other=0.0), x.shape)
    wide = widen(x)
    if FORM == "scaled":
        y = _fma(weight * (wide - mean), invstd, bias, PORTABLE)
    elif FORM == "normalised":
        y = _fma((wide - mean) * invstd, weight, bias, PORTABLE)
    elif FORM == "centred":
        y = _fma(wide - mean, weight * invstd, bias, PORTABLE)
    else:
        alpha = weight * invstd
        beta = _fma(-mean, alpha, bias, PORTABLE) if FORM == "fused" else bias - mean * alpha
        y = _fma(wide, alpha, beta, PORTABLE)
    return rounded(y, x.dtype, PORTABLE)


@triton.jit
def _rebuild_kernel(
    x_ptr, mean_ptr, invstd_ptr, affine_ptr, other_ptr, other_mean_ptr, other_invstd_ptr, other_affine_ptr, y_ptr,
    outer, inner_steps, channels,
    FORM: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr, CHANNELS_INNER: tl.constexpr,
    STEP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, WRAPS: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """y = relu?(BN(x) [+ other, or BN(other) where OTHER is a form]) over [outer, inner_steps * STEP] elements.

    STEP tells the compiler what divides a row's length, WRAPS that a program's rows may pass the last channel. One base
    address a program is 64-bit arithmetic.
    """
    inner = inner_steps * STEP
    blocks = tl.cdiv(inner, INNER)
    row = (tl.program_id(0) // blocks) * OUTER
    column = (tl.program_id(0) % blocks) * INNER
    first = row.to(tl.int64) * inner + column
    rows, columns = tl.arange(0, OUTER)[:, None], tl.arange(0, INNER)[None, :]
    row_mask, column_mask = rows < outer - row, columns < inner - column
    mask, offs = row_mask & column_mask, rows * inner + columns
    if CHANNELS_INNER:
        channel, channel_mask = column + columns, column_mask
    else:
        channel, channel_mask = row % channels + rows, row_mask
        if WRAPS:
            channel = channel % channels
    x = tl.load(x_ptr + first + offs, mask, other=0.0)
    y = _batch_norm(x, mean_ptr, invstd_ptr, affine_ptr, channel, channel_mask, channels, FORM, PORTABLE)
    if OTHER != "":
        other = tl.load(other_ptr + first + offs, mask, other=0.0)
        if OTHER != "values":
            other = _batch_norm(
                other, other_mean_ptr, other_invstd_ptr, other_affine_ptr, channel, channel_mask, channels,
                OTHER, PORTABLE,
            )  # fmt: skip
        y = rounded(widen(y) + widen(other), x.dtype, PORTABLE)
    if RELU:
        y = tl.where(widen(y) < 0 if KEEP_ZERO else not_positive(widen(y)), 0.0, y)
    tl.store(y_ptr + first + offs, y, mask)


@lru_cache(maxsize=256)
def shape_of(n: int, channels: int, plane: int, item_bytes: int) -> tuple[int, int, int, int, int]:
    """(outer, inner, STEP, OUTER, INNER) for n elements."""
    inner = channels if plane == 1 else plane
    step = next(s for s in (8, 4, 1) if inner % s == 0)
    tile = TILE[item_bytes] if step > 1 else SMALL_TILE
    block = min(tile if plane > 1 else CHANNELS, triton.next_power_of_2(inner))
    return n // inner, inner, step, tile // block, block


def bn_rebuild(
    x: torch.Tensor,
    norm: list[torch.Tensor],
    form: str,
    plane: int,
    other: torch.Tensor | None,
    other_norm: list[torch.Tensor],
    other_form: str,
    relu: bool,
    out: torch.Tensor,
) -> None:
    """out = relu?(BN(x) [+ other | + BN(other)]), rounded as the forms above say.

    x, other, out: fp32/bf16/fp16[n] of one dtype, in storage order; out may be x or other. ``norm``: mean [C], 1/std
    [C], weight and bias [2C], all fp32. ``plane``: elements of one channel that lie together, 1 for channels_last.
    ``other_norm`` is empty where other is added as it is. Raises ValueError and TypeError for operands that do not
    fit. Does not synchronise but for asking once about -0.0 (:mod:`gistkit.kernels.signed_zero`).
    """
    channels, n = norm[0].numel(), x.numel()
    check_values("bn_rebuild", "x", x)
    check_norm("bn_rebuild", "norm", norm, form, n, plane)
    for name, t in (("other", other), ("out", out)):
        if t is not None:
            check_values("bn_rebuild", name, t)
            check_length("bn_rebuild", name, t, n, f"x of {n} elements")
    how = "" if other is None else "values"
    if other_norm:
        check_norm("bn_rebuild", "other_norm", other_norm, other_form, n, plane)
        how = other_form
    if not n:
        return
    keep_zero = relu_keeps_negative_zero(x) if relu else False
    outer, inner, step, rows, columns = shape_of(n, channels, plane, x.element_size())
    launch(
        _rebuild_kernel, ceil_div(outer, rows) * ceil_div(inner, columns), x,
        x, *norm, x if other is None else other, *(other_norm or norm), out, outer, inner // step, channels,
        FORM=form, OTHER=how, RELU=relu and keep_zero is not None, KEEP_ZERO=bool(keep_zero),
        CHANNELS_INNER=plane == 1, STEP=step, OUTER=rows, INNER=columns,
        WRAPS=channels % rows != 0, PORTABLE=not x.is_cuda,
    )  # fmt: skip
    if keep_zero is None:
        torch.relu_(out)
