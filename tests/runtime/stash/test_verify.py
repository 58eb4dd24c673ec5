"""Bits compared in little memory: every bit counts, rows are told apart, and it takes what the planner counts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.ir.returns import digest_bytes
from gistkit.runtime.live import LiveBytes
from gistkit.runtime.stash.verify import blocks, digest

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex128]
few = settings(max_examples=15)
shapes = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def laid_out(shape, order, dtype=torch.float32, seed=0):
    """Random numbers whose dimensions lie in memory in that order, outermost first."""
    x = torch.randn([shape[d] for d in order], generator=torch.Generator().manual_seed(seed))
    inverse = [order.index(d) for d in range(len(order))]
    return (x * 3).to(dtype).permute(inverse)


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.permutations(range(len(s))))), st.integers(1, 2000))
@few
def test_blocks_cover_a_tensor_once_in_dense_pieces(case, nbytes):
    shape, order = case
    x, seen = laid_out(shape, list(order)), torch.zeros(shape, dtype=torch.int64)
    for index in blocks(x, nbytes):
        part = x[index]
        assert part.numel() * 4 <= max(nbytes, 4)
        assert torch.ops.aten.is_non_overlapping_and_dense(part)
        seen[index] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.sampled_from([(5, 7, 3, 3), (1, 900), (64, 50), (2000,)]), st.integers(0, 10**6), st.integers(0, 62))
@settings(max_examples=8)
def test_a_bit_that_differs_is_seen(dtype, shape, at, bit):
    x = laid_out(shape, list(range(len(shape))), dtype)
    expected, y = digest(x), x.clone()
    assert digest(y) == expected
    flat = y.view(-1).view(torch.uint8)
    # a bool has one bit
    at, bit = at % flat.numel(), 0 if dtype is torch.bool else bit % 8
    flat[at] ^= 1 << bit
    assert digest(y) != expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (4, 64, 32, 32), (512, 20), (1, 100_000), (100_000,)])
def test_a_digest_takes_what_the_planner_counts(shape, dtype):
    x = torch.ones(shape, dtype=dtype)
    with LiveBytes() as live:
        live.track(x)
        there = live.current_bytes
        digest(x)
    assert live.peak_bytes - there <= digest_bytes(there, shape[0])
