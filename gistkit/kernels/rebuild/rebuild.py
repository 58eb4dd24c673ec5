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
operators do it one after the other. The tensor is seen as [outer, inner]: planes of one channel (NCHW), or pixels of
all channels (channels_last), so a program reads a channel's four factors once for all its elements of that channel.
Planes that are no whole number of 16-byte accesses, 7x7 for one, are taken in rows of 8, in one channel or two each.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
import triton
import triton.language as tl

from gistkit.formats import ceil_div
from gistkit.kernels.launch.tiling import Ready, launch
from gistkit.kernels.narrow.rounding import not_positive, rounded, widen
from gistkit.kernels.signed_zero import relu_keeps_negative_zero

# elements a program, by bytes an element: 64 bytes of each tensor a lane
TILE = {2: 4096, 4: 2048}
# where rows have odd lengths, every element is an access of its own
SMALL_TILE = 1024
# rows of 8 elements a program where a plane is no whole number of 16-byte accesses; 512 take registers and gain nothing
ACROSS_ROWS = 256
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
    x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, mask, FORM: tl.constexpr, PORTABLE: tl.constexpr
):
    """BN(x) in fp32; ``channel`` is shaped to be broadcast over x."""
    mean = tl.broadcast_to(tl.load(mean_ptr + channel, mask), x.shape)
    invstd = tl.broadcast_to(tl.load(invstd_ptr + channel, mask), x.shape)
    weight = tl.broadcast_to(widen(tl.load(weight_ptr + channel, mask)), x.shape)
    bias = tl.broadcast_to(widen(tl.load(bias_ptr + channel, mask)), x.shape)
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
    return y


@triton.jit
def _finish(
    y, other, dtype: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr,
    PORTABLE: tl.constexpr,
):  # fmt: skip
    """relu?(y [+ other]) of fp32, each rounded to dtype."""
    if OTHER == "values":
        y = widen(rounded(y, dtype, PORTABLE)) + widen(other)
    elif OTHER != "":
        y = widen(rounded(y, dtype, PORTABLE)) + widen(rounded(other, dtype, PORTABLE))
    if RELU and KEEP_ZERO:
        y = rounded(y, dtype, PORTABLE)
        return tl.where(widen(y) < 0, 0.0, y)
    elif RELU:
        # before it is rounded, which changes no sign but a tiny value's, a zero then in either order; the NaN of a sum
        # is the processor's own, which its maximum keeps
        y = tl.where(not_positive(y), 0.0, y) if PORTABLE else tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return rounded(y, dtype, PORTABLE)


@triton.jit
def _rebuild_kernel(
    x_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr,
    other_ptr, other_mean_ptr, other_invstd_ptr, other_weight_ptr, other_bias_ptr, y_ptr,
    outer, inner_steps, channels,
    FORM: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr, CHANNELS_INNER: tl.constexpr,
    STEP: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr, WRAPS: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """y = relu?(BN(x) [+ other, or BN(other) where OTHER is a form]) over [outer, inner_steps * STEP] elements. STEP
    tells the compiler what divides a row's length, WRAPS that a program's rows may pass the last channel."""
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
    x = tl.load(x_ptr + first + offs, mask)
    y = _batch_norm(x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, channel, channel_mask, FORM, PORTABLE)
    other = y
    if OTHER != "":
        other = tl.load(other_ptr + first + offs, mask)
        if OTHER != "values":
            other = _batch_norm(
                other, other_mean_ptr, other_invstd_ptr, other_weight_ptr, other_bias_ptr, channel, channel_mask,
                OTHER, PORTABLE,
            )  # fmt: skip
    tl.store(y_ptr + first + offs, _finish(y, other, x.dtype, OTHER, RELU, KEEP_ZERO, PORTABLE), mask)


@triton.jit
def _either_norm(
    x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, left, in_left, channels, FORM: tl.constexpr, PORTABLE: tl.constexpr
):
    """BN(x) in fp32 of rows that begin in channel ``left`` and end there, or in the next from where in_left is not set.
    Both are computed: to select the factors takes as many instructions, and from the slower half of the processor."""
    first = _batch_norm(x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, left, None, FORM, PORTABLE)
    last = left < channels - 1
    second = _batch_norm(x, mean_ptr + 1, invstd_ptr + 1, weight_ptr + 1, bias_ptr + 1, left, last, FORM, PORTABLE)
    return tl.where(in_left, first, second)


@triton.jit
def _across_kernel(
    x_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr,
    other_ptr, other_mean_ptr, other_invstd_ptr, other_weight_ptr, other_bias_ptr, y_ptr,
    planes, plane, reciprocal, channels,
    FORM: tl.constexpr, OTHER: tl.constexpr, RELU: tl.constexpr, KEEP_ZERO: tl.constexpr,
    PLANES: tl.constexpr, ROWS: tl.constexpr, WHOLE: tl.constexpr, PORTABLE: tl.constexpr,
):  # fmt: skip
    """As :func:`_rebuild_kernel`, for planes whose ends lie within rows of 8 elements: at least 8 long, and a multiple
    of 8 channels, so that images end where rows do. A program does PLANES planes, at most ``channels``, where WHOLE,
    else a part of them. The plane in which a row begins is found by one product with ``reciprocal`` = 2**32 / plane,
    rounded up, which is at most one too large."""
    if WHOLE:
        group, block = tl.program_id(0), 0
    else:
        blocks = tl.cdiv(PLANES * plane, ROWS * 8).to(tl.uint32)
        program = tl.program_id(0).to(tl.uint32)
        group, block = (program // blocks).to(tl.int32), (program % blocks).to(tl.int32)
    plane_first = group * PLANES
    first = plane_first.to(tl.int64) * plane
    start = block * (ROWS * 8) + tl.arange(0, ROWS)[:, None] * 8
    columns = tl.arange(0, 8)[None, :]
    row_mask = start < tl.minimum(planes - plane_first, PLANES) * plane
    offs, mask = start + columns, tl.broadcast_to(row_mask, (ROWS, 8))
    number = tl.minimum(tl.umulhi(start.to(tl.uint32), reciprocal.to(tl.uint32)).to(tl.int32), PLANES - 1)
    number = tl.where(number * plane > start, number - 1, number)
    in_left = columns < (number + 1) * plane - start
    left = (plane_first.to(tl.uint32) % channels.to(tl.uint32)).to(tl.int32) + number
    left = tl.where(left < channels, left, left - channels)
    x = tl.load(x_ptr + first + offs, mask)
    y = _either_norm(x, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, left, in_left, channels, FORM, PORTABLE)
    other = y
    if OTHER != "":
        other = tl.load(other_ptr + first + offs, mask)
        if OTHER != "values":
            other = _either_norm(
                other, other_mean_ptr, other_invstd_ptr, other_weight_ptr, other_bias_ptr, left, in_left, channels,
                OTHER, PORTABLE,
            )  # fmt: skip
    tl.store(y_ptr + first + offs, _finish(y, other, x.dtype, OTHER, RELU, KEEP_ZERO, PORTABLE), mask)


def shape_of(n: int, channels: int, plane: int, item_bytes: int) -> tuple[int, int, int, int, int]:
    """(outer, inner, STEP, OUTER, INNER) for n elements."""
    inner = channels if plane == 1 else plane
    step = next(s for s in (8, 4, 1) if inner % s == 0)
    tile = TILE[item_bytes] if step > 1 else SMALL_TILE
    block = min(tile if plane > 1 else CHANNELS, triton.next_power_of_2(inner))
    return n // inner, inner, step, tile // block, block


def planes_across(channels: int, plane: int, item_bytes: int) -> int:
    """Planes a group of :func:`_across_kernel`, a multiple of 8 (0: the other kernel is to run): as many as fill one
    program, or several, best. 40 planes of 49 elements are 245 rows of 256."""
    if plane < 8 or channels % 8 or plane % (16 // item_bytes) == 0:
        return 0
    filled = {
        k: k * plane / (ceil_div(k * plane, ACROSS_ROWS) * ACROSS_ROWS) for k in range(1, min(channels // 8, 32) + 1)
    }
    whole = min(ACROSS_ROWS // plane, channels // 8)
    return 8 * (whole if whole and filled.get(whole, 0.0) > 0.9 else max(filled, key=lambda k: filled[k]))


@lru_cache(maxsize=1024)
def _launch_of(
    n: int, channels: int, plane: int, item_bytes: int, form: str, other: str, relu: bool, keep_zero: bool,
    portable: bool,
) -> tuple[Any, int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """(kernel, programs, number arguments, constants) for n elements; ``other``: its form, ``values`` or nothing."""
    how: dict[str, Any] = {"FORM": form, "OTHER": other, "RELU": relu, "KEEP_ZERO": keep_zero, "PORTABLE": portable}
    planes = planes_across(channels, plane, item_bytes)
    if planes:
        outer, blocks = n // plane, ceil_div(planes * plane, ACROSS_ROWS * 8)
        numbers = (outer, plane, ceil_div(2**32, plane), channels)
        how |= {"PLANES": planes, "ROWS": ACROSS_ROWS, "WHOLE": blocks == 1}
        return _across_kernel, ceil_div(outer, planes) * blocks, numbers, how
    outer, inner, step, rows, columns = shape_of(n, channels, plane, item_bytes)
    how |= {
        "CHANNELS_INNER": plane == 1, "STEP": step, "OUTER": rows, "INNER": columns, "WRAPS": channels % rows != 0
    }  # fmt: skip
    return _rebuild_kernel, ceil_div(outer, rows) * ceil_div(inner, columns), (outer, inner // step, channels), how


def bn_rebuild(
    x: torch.Tensor, norm: list[torch.Tensor], form: str, plane: int, other: torch.Tensor | None,
    other_norm: list[torch.Tensor], other_form: str, relu: bool, out: torch.Tensor,
) -> None:  # fmt: skip
    """out = relu?(BN(x) [+ other | + BN(other)]), rounded as the forms above say. x, other, out: fp32/bf16/fp16 of one
    dtype and dense geometry; out may be x or other. ``norm``: mean and 1/std, fp32[C], weight and bias, fp32, bf16 or
    fp16 [C]. ``plane``: elements of one channel that lie together, 1 for channels_last. ``other_norm`` is empty where
    other is added as it is. Does not synchronise but to ask about -0.0, once."""
    n = x.numel()
    if not n:
        return
    how = other_form if other_norm else "" if other is None else "values"
    keep_zero = relu_keeps_negative_zero(x) if relu else False
    kernel, programs, numbers, constexprs = _launch_of(
        n, norm[0].numel(), plane, x.element_size(), form, how, relu, keep_zero, not x.is_cuda
    )
    tensors = (x, *norm, x if other is None else other, *(other_norm or norm), out)
    launch(kernel, programs, x, *tensors, *numbers, **constexprs)


def repeated_rebuild(x: torch.Tensor, channels: int, form: str, plane: int, how: str) -> partial[None]:
    """Launches of (x, mean, 1/std, weight, bias, other, its four, out) that do :func:`bn_rebuild` with a ReLU. ``how``:
    the other's form, ``values`` where it is added as it is, nothing where x and its four stand in its place."""
    kernel, programs, numbers, constexprs = _launch_of(
        x.numel(), channels, plane, x.element_size(), form, how, True, relu_keeps_negative_zero(x), not x.is_cuda
    )
    return partial(Ready(kernel, x.get_device(), **constexprs), programs, numbers)
