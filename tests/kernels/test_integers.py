"""Integers rounded at random, on CPU tensors: definition, chances, random numbers, ends, bad arguments."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gistkit.formats import INT_BLOCK, INT_FORMS, INT_UNITS
from gistkit.kernels import ops
from gistkit.kernels.reference import integers as reference
from tests.support.tensors import FLOATS, same_bits, values_of

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
widths = pytest.mark.parametrize("bits", INT_FORMS.values())
QUIET_NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}


def codes_of(units: torch.Tensor, bits: int) -> torch.Tensor:
    """int64[B, 256] codes in the order of the elements."""
    words = units.long().view(-1, 1, INT_UNITS)
    return (words >> torch.arange(4)[:, None] * bits & (1 << bits) - 1).reshape(-1, INT_BLOCK)


def round_trip(x: torch.Tensor, bits: int, seed: int = 0) -> torch.Tensor:
    return ops.int_decode(*ops.int_encode(x, bits, seed), x.numel(), x.dtype, bits)


def mixed(z: int) -> int:
    """Wellons's mixer in plain numbers."""
    z = (z ^ z >> 16) * 0x7FEB352D % 2**32
    z = (z ^ z >> 15) * 0x846CA68B % 2**32
    return z ^ z >> 16


def by_definition(block: np.ndarray, number: int, bits: int, seed: int) -> tuple[list[int], np.float32, np.float32]:
    """(codes, low, step) of one block of fp32 values, element by element."""
    one, highest = np.float32, (1 << bits) - 1
    low, high = one(block.min()) + one(0), one(block.max())
    span = max(one(high - low), one(2.0**-100))
    step, inverse = one(span * one({4: 0.0666666, 2: 0.333333}[bits])), one(one(highest) / span)
    words = (seed, number, int(low.view(np.uint32)), int(step.view(np.uint32)))
    key = mixed(sum(w * k for w, k in zip(words, reference.KEY, strict=True)) % 2**32)
    codes = []
    for i, x in enumerate(block):
        v = float(one(one(one(x - low) * inverse) + one(128))) - 128
        plane, unit = divmod(i, 64)
        word = mixed((key + 0x9E3779B9 * unit) % 2**32)
        again = word * 0xC2B2AE35 % 2**32
        word = again ^ again >> 16 if plane % 2 else word
        drawn = word >> 16 if plane > 1 else word & 0xFFFF
        codes.append(math.floor(v + drawn / 2**16))
    return codes, low, step


@dtypes
@widths
@settings(max_examples=8)
@given(n=st.integers(1, 600), seed=st.integers(0, 2**24 - 1))
def test_encoding_follows_its_definition(bits, dtype, n, seed):
    x = values_of(n, dtype, 2 * seed + 1, 0.2, False)
    assume(x.float().abs().max() < 1e38)
    units, lows, steps = ops.int_encode(x, bits, seed)
    codes, padded = codes_of(units, bits), np.pad(x.float().numpy(), (0, -n % INT_BLOCK), mode="edge")
    for b, block in enumerate(padded.reshape(-1, INT_BLOCK)):
        want, low, step = by_definition(block, b, bits, seed)
        assert (lows[b].item(), steps[b].item()) == (low, step) and codes[b].tolist() == want
    values = lows[:, None] + codes * steps[:, None]
    assert same_bits(round_trip(x, bits, seed), values.view(-1)[:n].to(dtype))


@widths
def test_rounding_is_unbiased(bits):
    """The mean over seeds is x within what chance allows, and the chance of each code is the fraction."""
    x, seeds = torch.randn(INT_BLOCK, generator=torch.Generator().manual_seed(1)), 2000
    span = (x.max() - x.min()).double()
    decoded = torch.stack([round_trip(x, bits, seed) for seed in range(seeds)]).double()
    step = span / ((1 << bits) - 1)
    v = (x.double() - x.min()) / step
    fraction = v - v.floor()
    off = (decoded.mean(0) - x) / step
    # six deviations of a mean of independent steps, with 2**-15 of a step that the grid and the short step may add:
    # each of 256 means is outside with a chance of 2e-9
    deviation = (fraction * (1 - fraction) / seeds).sqrt()
    assert (off.abs() <= 6 * deviation + 2.0**-15).all()
    # and their sum over the block, where the deviations cancel
    assert off.sum().abs() <= 6 * deviation.square().sum().sqrt() + INT_BLOCK * 2.0**-15
    assert (decoded.std(0) / step - (fraction * (1 - fraction)).sqrt()).abs().max() < 0.05


def test_the_random_numbers_are_even_and_independent():
    """Against chance: bytes of all numbers (chi-square), neighbours, the halves of a word, seeds, blocks, contents."""
    numbers, blocks = torch.arange(400), 400
    low, step = torch.zeros(blocks), torch.full((blocks,), 0.25)
    drawn = reference._drawn(numbers, low, step, 7).double().flatten(1)
    counts = torch.bincount(torch.cat((drawn.long() & 255, drawn.long() >> 8)).flatten(), minlength=256).double()
    expected = counts.sum() / 256
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 255) < 6 * math.sqrt(2 * 255)
    centred = (drawn / 65536 - 0.5 + 2.0**-17) * math.sqrt(12)
    others = [
        *(centred.roll(shift, dim) for shift, dim in ((1, 1), (64, 1), (128, 1), (1, 0))),
        (reference._drawn(numbers, low, step, 8).double().flatten(1) / 65536 - 0.5) * math.sqrt(12),
        (reference._drawn(numbers, low, step * (1 + 2.0**-23), 7).double().flatten(1) / 65536 - 0.5) * math.sqrt(12),
        (reference._drawn(numbers, low + 2.0**-30, step, 7).double().flatten(1) / 65536 - 0.5) * math.sqrt(12),
    ]
    for other in others:  # a correlation of so many pairs deviates by 1 / sqrt(pairs)
        assert (centred * other).mean().abs() < 6 / math.sqrt(centred.numel())


@dtypes
@widths
def test_blocks_of_one_value_come_back_and_any_within_its_ends(bits, dtype):
    for value in (0.0, 1.0, -3.25, 2.0**-14, 60000.0):
        x = torch.full((300,), value).to(dtype)
        assert same_bits(round_trip(x, bits), x)
    x = torch.tensor([-0.0, 0.0] * 200).to(dtype)
    assert same_bits(round_trip(x, bits), x.abs())
    for seed in range(20):
        x = values_of(INT_BLOCK, dtype, 2 * seed + 1, 0.3, False)
        got = round_trip(x, bits, seed)
        lowest, highest = x.min(), x.max()
        if highest.double() - lowest.double() < 3e38 and highest.double() - lowest.double() > 2.0**-100:
            assert (got >= lowest).all() and (got <= highest).all() and (got == lowest).any()


@dtypes
@widths
def test_blocks_that_are_not_finite_are_nan_and_no_other(bits, dtype):
    for lost in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(5 * INT_BLOCK).to(dtype)
        x[INT_BLOCK + 7] = lost
        units, lows, steps = ops.int_encode(x, bits, 0)
        assert not codes_of(units, bits)[1].any() and lows[1].isnan() and steps[1] == 0
        got = round_trip(x, bits)
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        assert (got[INT_BLOCK : 2 * INT_BLOCK].view(integer) == QUIET_NAN[dtype]).all()
        assert got.isnan().sum() == INT_BLOCK
    if dtype != torch.float16:  # a span that fp32 does not have
        assert round_trip(torch.tensor([3e38, -3e38]).to(dtype), bits).isnan().all()
        top = torch.tensor([3e38, 0.0, torch.finfo(dtype).max]).to(dtype)
        assert round_trip(top, bits).isfinite().all()


@widths
def test_spans_near_zero(bits):
    tiny = torch.tensor([1e-45, 0.0, 1e-40, 3e-39])
    assert round_trip(tiny, bits).tolist() == [0.0] * 4
    small = torch.tensor([2.0**-101, 0.0])
    assert (round_trip(small, bits) - small).abs().max() <= 2.0**-100 / ((1 << bits) - 1)


@widths
def test_working_parts_join_without_a_seam(bits, monkeypatch):
    x = values_of(2000, torch.float32, 1, 0.1, False)
    whole, back = ops.int_encode(x, bits, 3), round_trip(x, bits, 3)
    monkeypatch.setattr(reference, "BLOCKS", 3)
    assert all(torch.equal(a, b) for a, b in zip(whole, ops.int_encode(x, bits, 3), strict=True))
    assert same_bits(round_trip(x, bits, 3), back)
