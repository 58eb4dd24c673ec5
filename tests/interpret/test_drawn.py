"""Kernels whose other tests list their cases, over drawn shapes and values: packing, parts of storage, rebuilds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gistkit.formats import ceil_div
from gistkit.kernels.rebuild import rebuild
from gistkit.kernels.reference import ranges as range_oracle
from gistkit.kernels.reference import rebuild as rebuild_oracle
from gistkit.kernels.reference import sparse as oracle
from gistkit.kernels.sparse import operators as sparse
from gistkit.kernels.sparse import ranges
from tests.support.rebuild_cases import operands
from tests.support.tensors import FLOATS, float_values, plain_nan, same_bits

# infinities minus infinities and products beyond the range: numpy reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
NO_EXPONENTS = torch.empty(0, dtype=torch.uint8)
SEEDS = st.integers(0, 2**16)
DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32)


def counts_of(stride):
    """Up to 12 slots, many of them empty, short or full."""
    return st.lists(
        st.one_of(st.sampled_from((0, 1, stride - 1, stride)), st.integers(0, 40), st.integers(0, stride)), max_size=12
    )


def items(n, dtype, seed):
    raw = torch.randint(0, 256, (n * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return raw.to(torch.uint8).view(dtype)


def bits(x):
    return x.view(torch.uint8)


@pytest.mark.parametrize("stride", [1024, 256])
@settings(max_examples=8)
@given(data=st.data(), dtype=st.sampled_from(DTYPES), seed=SEEDS, short=st.integers(0, 70))
def test_compact(stride, data, dtype, seed, short):
    counts = torch.tensor(data.draw(counts_of(stride)), dtype=torch.int16)
    scratch, stored = items(stride * counts.numel(), dtype, seed), int(counts.sum())
    total = max(0, stored - short)
    expected = oracle.compact(scratch, counts, stride, stored)[:total]
    assert torch.equal(bits(sparse.compact(scratch, counts, stride, total)), bits(expected))


@settings(max_examples=8)
@given(counts=counts_of(256), dtype=st.sampled_from(DTYPES), seed=SEEDS, short=st.integers(0, 70))
def test_csr_compact(counts, dtype, seed, short):
    counts = torch.tensor(counts, dtype=torch.int16)
    columns, values = (items(256 * counts.numel(), kind, seed) for kind in (torch.uint8, dtype))
    stored = int(counts.sum())
    total = max(0, stored - short)
    made = sparse.csr_compact(columns, values, counts, total)
    for got, want in zip(made, oracle.csr_compact(columns, values, counts, stored), strict=True):
        assert torch.equal(bits(got), bits(want[:total]))


@pytest.mark.parametrize("codec", ["zvc", "csr"])
@settings(max_examples=5)
@given(data=st.data(), dtype=st.sampled_from(FLOATS), packed=st.booleans(), seed=SEEDS)
def test_parts_of_sparse_storage(codec, data, dtype, packed, seed):
    slot = 1024 if codec == "zvc" else 256
    n = data.draw(st.integers(1, 2400 if codec == "zvc" else 1400))
    x = float_values(n, dtype, seed, data.draw(st.sampled_from((0.0, 0.5, 0.95))), False)
    fmt = data.draw(st.sampled_from(("raw", "fp8", "fp16")))
    first = data.draw(st.integers(0, ceil_div(n, slot) - 1))
    whole = data.draw(st.integers(0, 3)) * slot  # as decode_range asks: groups, the tensor's last one as far as it goes
    wanted = min(whole, n - first * slot)
    if codec == "zvc":
        words, counts, values = oracle.zvc_encode(x, fmt)
        values = oracle.compact(values, counts, slot, int(counts.sum())) if packed else values
        payload, name = (words, counts, values), "zvc_decode_slots"
    else:
        counts, columns, values = oracle.csr_encode(x, fmt)
        total = int(counts.sum())
        columns, values = oracle.csr_compact(columns, values, counts, total) if packed else (columns, values)
        payload, name = (counts, columns, values), "csr_decode_rows"
    arguments = (*payload, NO_EXPONENTS, first, wanted, dtype, fmt, "none", packed)
    assert same_bits(getattr(ranges, name)(*arguments), getattr(range_oracle, name)(*arguments))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@settings(max_examples=6)
@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 120)),
    seed=SEEDS,
    beside=st.sampled_from(("nothing", "values", "norm")),
    relu=st.booleans(),
)
def test_rebuild(dtype, size, seed, beside, relu):
    x, other, norm, second = operands(size, dtype, seed)
    more = {"nothing": (None, [], ""), "values": (other, [], ""), "norm": (other, second, "fused")}[beside]
    arguments = (norm, "scaled", size[2], *more, relu)
    got, want = torch.empty_like(x), torch.empty_like(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rebuild, "relu_keeps_negative_zero", lambda x: True)
        rebuild.bn_rebuild(x, *arguments, got)
    rebuild_oracle.bn_rebuild(x, *arguments, want, positive_zero=False)
    assert same_bits(plain_nan(got), plain_nan(want))
