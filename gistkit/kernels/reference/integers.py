"""Torch oracle of gistkit.kernels.narrow.integers; also what runs on CPU tensors.

Integers of 4 or 2 bits under a lower end and a step per block of 256 elements, rounded at random without bias (ActNN,
Chen et al., ICML 2021). L = 2**bits - 1 is the highest code; the last block may be short.

**Encoding.** All in fp32, every operation rounded by itself; bf16 and fp16 are widened exactly. ``low`` is the block's
least value, of zeros +0; span = max(highest - low, 2**-100); ``step`` = span * S, S a millionth below 1 / L, so that
L * step is no more than the span. With v = (x - low) * (L / span) on a grid of 2**-16 (by adding 128, whose fp32
neighbours are so far apart), the code is floor(v + r / 2**16), where r is drawn from 0 to 2**16 - 1: v is rounded up
with the probability of its fraction, exactly. A block with a NaN, an infinity or a span above fp32's largest value has
low NaN, step 0 and codes 0: all of it decodes to NaN.

**Decoding.** low + code * step, rounded to nearest even to the tensor's dtype; +0 for either zero; NaN is 0x7FC00000,
0x7FC0 (bf16) or 0x7E00 (fp16). A block of equal values comes back exactly, any block within its own ends.

**Random numbers.** Products, shifts and exclusive ors of 32-bit words: the seed, the block's number, its low and step,
and the unit's place. So they are the same on every device and at every encoding of the same tensor, change with the
block's contents from step to step, and take none from PyTorch's generators.

**Layout.** A unit is the codes of elements i, i + 64, i + 128 and i + 192 of its block, the first in the lowest bits:
64 units a block, of 16 bits or 8. Codes beyond the last element are those of copies of it.
"""

from __future__ import annotations

import torch

from gistkit.formats import INT_BLOCK, INT_UNITS, ceil_div
from gistkit.kernels.layout import unit_dtype

BLOCKS = 1 << 10
"""Blocks that are worked on at a time."""
STEP_SHARE = {4: 0.0666666, 2: 0.333333}
LEAST_SPAN, LARGEST = 2.0**-100, torch.finfo(torch.float32).max
KEY, COUNTER = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F), 0x9E3779B9
MIX = (0x7FEB352D, 0x846CA68B, 0xC2B2AE35)
"""Odd multipliers: xxHash's for seed, block, low and step; the golden ratio; Wellons's mixer, and MurmurHash's last."""
_WORD = 0xFFFFFFFF


def int_encode(x: torch.Tensor, bits: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(units, lows, steps) of x fp32/bf16/fp16[n]: int16 (4 bits) or uint8 (2 bits) [64 a block], fp32 [a block]."""
    n, count = x.numel(), ceil_div(x.numel(), INT_BLOCK)
    units = x.new_empty((count * INT_UNITS,), dtype=unit_dtype(bits))
    lows, steps = (x.new_empty((count,), dtype=torch.float32) for _ in range(2))
    for first in range(0, count, BLOCKS):
        values = x[first * INT_BLOCK : (first + BLOCKS) * INT_BLOCK].float()
        values = torch.cat((values, values[-1:].expand(-n % INT_BLOCK))) if first + BLOCKS >= count else values
        planes, stop = values.view(-1, 4, INT_UNITS), first + values.numel() // INT_BLOCK
        numbers = torch.arange(first, stop, device=x.device)
        found = _encoded(planes, numbers, bits, seed)
        units[first * INT_UNITS : stop * INT_UNITS] = found[0].view(-1).to(units.dtype)
        lows[first:stop], steps[first:stop] = found[1:]
    return units, lows, steps


def _encoded(
    planes: torch.Tensor, numbers: torch.Tensor, bits: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(units, lows, steps) of blocks fp32[B, 4, 64] with these numbers."""
    low, high = planes.amin((1, 2)), planes.amax((1, 2))
    low.masked_fill_(low == 0, 0.0)
    span = high - low
    lost = ~(span <= LARGEST)
    span.clamp_(min=LEAST_SPAN)
    step = span * STEP_SHARE[bits]
    highest = (1 << bits) - 1
    inverse = torch.full_like(span, highest) / span  # of a number by a tensor torch makes a product with its reciprocal
    v = (planes - low[:, None, None]) * inverse[:, None, None]
    fixed = (v + 128.0).view(torch.int32)
    codes = (fixed + _drawn(numbers, low, step, seed).to(torch.int32)).bitwise_right_shift_(16)
    shifts = torch.arange(0, 4 * bits, bits, dtype=torch.int32, device=planes.device)
    units = codes.bitwise_and_(highest).bitwise_left_shift_(shifts[:, None]).sum(1)
    units.masked_fill_(lost[:, None], 0)
    return units, low.masked_fill_(lost, torch.nan), step.masked_fill_(lost, 0.0)


def _drawn(numbers: torch.Tensor, low: torch.Tensor, step: torch.Tensor, seed: int) -> torch.Tensor:
    """int64[B, 4, 64] numbers from 0 to 2**16 - 1, four of each unit's word of 32 bits: independent in pairs."""
    low_bits, step_bits = (t.view(torch.int32).long() & _WORD for t in (low, step))
    key = _mixed(seed * KEY[0] + numbers * KEY[1] + low_bits * KEY[2] + step_bits * KEY[3])
    word = _mixed(key[:, None] + torch.arange(INT_UNITS, device=low.device) * COUNTER)
    again = (word * MIX[2]) & _WORD
    again ^= again >> 16
    return torch.stack((word & 0xFFFF, again & 0xFFFF, word >> 16, again >> 16), 1)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """32-bit words of z modulo 2**32, mixed; int64."""
    z = z & _WORD
    z = ((z ^ (z >> 16)) * MIX[0]) & _WORD
    z = ((z ^ (z >> 15)) * MIX[1]) & _WORD
    return z ^ (z >> 16)


def int_decode(
    units: torch.Tensor, lows: torch.Tensor, steps: torch.Tensor, n: int, dtype: torch.dtype, bits: int
) -> torch.Tensor:
    """dtype[n] from what :func:`int_encode` made with the same bits."""
    x = units.new_empty((n,), dtype=dtype)
    for first in range(0, lows.numel(), BLOCKS):
        low, step = lows[first : first + BLOCKS, None, None], steps[first : first + BLOCKS, None, None]
        words = units[first * INT_UNITS : (first + BLOCKS) * INT_UNITS].to(torch.int32).view(-1, 1, INT_UNITS)
        shifts = torch.arange(0, 4 * bits, bits, dtype=torch.int32, device=units.device)[:, None]
        codes = words.bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
        part = x[first * INT_BLOCK : (first + BLOCKS) * INT_BLOCK]
        values = low + codes * step
        part.copy_(values.view(-1)[: part.numel()])
        # put in after the cast, which rewrites a NaN
        part.masked_fill_(low.isnan().expand_as(values).reshape(-1)[: part.numel()], torch.nan)
    return x
