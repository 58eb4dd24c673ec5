"""Integers of 4 or 2 bits under a lower end and a step per block of 256 elements, rounded at random: to the bit those
of :mod:`gistkit.kernels.reference.integers`. A program has whole blocks, a row of its tiles each, and four tiles of 64
elements a row: what a unit holds lies in one lane."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gistkit.formats import INT_BLOCK, INT_UNITS, ceil_div
from gistkit.kernels.launch.tiling import launch, span
from gistkit.kernels.layout import unit_dtype
from gistkit.kernels.narrow.rounding import round_to, widen
from gistkit.kernels.reference import integers as reference

ROWS = {2: 16, 4: 8}
"""Blocks a program, by bytes an element: 64 bytes a lane."""
BLOCK, UNITS = tl.constexpr(INT_BLOCK), tl.constexpr(INT_UNITS)
_SHARE_4, _SHARE_2 = (tl.constexpr(reference.STEP_SHARE[bits]) for bits in (4, 2))
_LEAST_SPAN, _LARGEST = tl.constexpr(reference.LEAST_SPAN), tl.constexpr(reference.LARGEST)
_SEED, _NUMBER, _LOW, _STEP = (tl.constexpr(factor) for factor in reference.KEY)
_COUNTER, _MIX_1, _MIX_2, _AGAIN = (tl.constexpr(factor) for factor in (reference.COUNTER, *reference.MIX))


@triton.jit
def _rows(n, ROWS: tl.constexpr):
    """(first element, elements in bounds, rows, rows in bounds, offsets of each row's first plane)."""
    first, count = span(n, ROWS * BLOCK)
    rows = tl.arange(0, ROWS)
    return first, count, rows, rows * BLOCK < count, rows[:, None] * BLOCK + tl.arange(0, UNITS)[None, :]


@triton.jit
def _mixed(z):
    z = (z ^ (z >> 16)) * _MIX_1
    z = (z ^ (z >> 15)) * _MIX_2
    return z ^ (z >> 16)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _values(x_ptr, offs, row_mask, count, TAIL: tl.constexpr):
    """fp32 values; TAIL: beyond the last element copies of it, else rows out of bounds 0."""
    if TAIL:
        return widen(tl.load(x_ptr + tl.minimum(offs, count - 1)))
    else:
        return widen(tl.load(x_ptr + offs, tl.broadcast_to(row_mask[:, None], offs.shape), other=0))


@triton.jit
def _code(x, low, inverse, drawn, BITS: tl.constexpr, plane: tl.constexpr):
    """uint32 codes of x in their place in a unit; drawn from 0 to 2**16 - 1."""
    fixed = ((x - low) * inverse + 128.0).to(tl.uint32, bitcast=True)
    return (((fixed + drawn) >> 16) & ((1 << BITS) - 1)) << (BITS * plane)


@triton.jit
def _encode_rows(
    x_ptr, units_ptr, lows_ptr, steps_ptr, first, count, rows, row_mask, offs, seed, BITS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    x0 = _values(x_ptr, offs, row_mask, count, TAIL)
    x1 = _values(x_ptr, offs + UNITS, row_mask, count, TAIL)
    x2 = _values(x_ptr, offs + 2 * UNITS, row_mask, count, TAIL)
    x3 = _values(x_ptr, offs + 3 * UNITS, row_mask, count, TAIL)
    least = _least(_least(x0, x1), _least(x2, x3))
    low = tl.min(tl.where(least != least, float("-inf"), least), axis=1)
    high = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), axis=1)
    low = tl.where(low == 0.0, 0.0, low)
    spread = high - low
    kept = spread <= _LARGEST
    spread = tl.maximum(spread, _LEAST_SPAN)
    step = spread * (_SHARE_4 if BITS == 4 else _SHARE_2)
    inverse = tl.div_rn(tl.full(spread.shape, (1 << BITS) - 1, tl.float32), spread)
    number = (first // BLOCK).to(tl.uint32) + rows.to(tl.uint32)
    key = tl.full(rows.shape, seed, tl.float32).to(tl.uint32) * _SEED + number * _NUMBER
    key += low.to(tl.uint32, bitcast=True) * _LOW + step.to(tl.uint32, bitcast=True) * _STEP
    a = _mixed(_mixed(key)[:, None] + tl.arange(0, UNITS).to(tl.uint32)[None, :] * _COUNTER)
    b = a * _AGAIN
    b ^= b >> 16
    unit = _code(x0, low[:, None], inverse[:, None], a & 0xFFFF, BITS, 0)
    unit |= _code(x1, low[:, None], inverse[:, None], b & 0xFFFF, BITS, 1)
    unit |= _code(x2, low[:, None], inverse[:, None], a >> 16, BITS, 2)
    unit |= _code(x3, low[:, None], inverse[:, None], b >> 16, BITS, 3)
    unit = tl.where(kept[:, None], unit, 0)
    at = rows[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    tl.store(units_ptr + at, unit.to(units_ptr.dtype.element_ty), tl.broadcast_to(row_mask[:, None], at.shape))
    nan = tl.full(low.shape, 0x7FC00000, tl.int32).to(tl.float32, bitcast=True)
    tl.store(lows_ptr + rows, tl.where(kept, low, nan), row_mask)
    tl.store(steps_ptr + rows, tl.where(kept, step, 0.0), row_mask)


@triton.jit
def _encode_kernel(
    x_ptr, units_ptr, lows_ptr, steps_ptr, n, seed, BITS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """Units, lows and steps of x; ALIGNED: n is a multiple of 256. ``seed`` is fp32, a whole number below 2**24:
    launches are looked up by their whole numbers, and not by this."""
    first, count, rows, row_mask, offs = _rows(n, ROWS)
    x_ptr += first
    units_ptr += first // 4
    lows_ptr += first // BLOCK
    steps_ptr += first // BLOCK
    if ALIGNED:
        _encode_rows(x_ptr, units_ptr, lows_ptr, steps_ptr, first, count, rows, row_mask, offs, seed, BITS, False)
    elif count == ROWS * BLOCK:
        _encode_rows(x_ptr, units_ptr, lows_ptr, steps_ptr, first, count, rows, rows < ROWS, offs, seed, BITS, False)
    else:
        _encode_rows(x_ptr, units_ptr, lows_ptr, steps_ptr, first, count, rows, row_mask, offs, seed, BITS, True)


@triton.jit
def _decode_kernel(
    units_ptr, lows_ptr, steps_ptr, x_ptr, n, BITS: tl.constexpr, ROWS: tl.constexpr, ALIGNED: tl.constexpr
):
    """x of units, lows and steps; ALIGNED as in _encode_kernel."""
    first, count, rows, row_mask, offs = _rows(n, ROWS)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    QUIET: tl.constexpr = 0x7FC00000 if dtype == tl.float32 else (0x7FC0 if dtype == tl.bfloat16 else 0x7E00)
    INTEGER: tl.constexpr = tl.int32 if dtype == tl.float32 else tl.int16
    at = rows[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    tile_mask = tl.broadcast_to(row_mask[:, None], at.shape)
    unit = tl.load(units_ptr + first // 4 + at, tile_mask, other=0).to(tl.int32)
    low = tl.load(lows_ptr + first // BLOCK + rows, row_mask, other=0.0)[:, None]
    step = tl.load(steps_ptr + first // BLOCK + rows, row_mask, other=0.0)[:, None]
    for plane in tl.static_range(4):
        code = (unit >> (BITS * plane)) & ((1 << BITS) - 1)
        x = round_to(low + code.to(tl.float32) * step, dtype)
        x = tl.where(low != low, tl.full(x.shape, QUIET, INTEGER).to(dtype, bitcast=True), x)
        where = offs + plane * UNITS
        tl.store(x_ptr + first + where, x, tile_mask if ALIGNED else where < count)


def int_encode(x: torch.Tensor, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the oracle has it (reference/integers.py). Does not synchronise."""
    n, count, rows = x.numel(), ceil_div(x.numel(), INT_BLOCK), ROWS[x.element_size()]
    units = torch.empty((count * INT_UNITS,), dtype=unit_dtype(bits), device=x.device)
    lows, steps = (torch.empty((count,), dtype=torch.float32, device=x.device) for _ in range(2))
    constants = {"BITS": bits, "ROWS": rows, "ALIGNED": n % INT_BLOCK == 0}
    launch(_encode_kernel, ceil_div(count, rows), x, x, units, lows, steps, n, float(seed), **constants)
    return units, lows, steps


def int_decode(
    units: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, n: int, dtype: torch.dtype, bits: int
) -> torch.Tensor:
    """dtype[n] from what :func:`int_encode` made with the same bits. Does not synchronise."""
    x = torch.empty((n,), dtype=dtype, device=units.device)
    rows = ROWS[x.element_size()]
    constants = {"BITS": bits, "ROWS": rows, "ALIGNED": n % INT_BLOCK == 0}
    launch(_decode_kernel, ceil_div(lows.numel(), rows), x, units, lows, steps, x, n, **constants)
    return x
