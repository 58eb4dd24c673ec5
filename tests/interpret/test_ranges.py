"""Decoding a part of sparse storage: the kernels against the oracle, bit for bit."""

import pytest
import torch

from gistkit.kernels.reference import ranges as oracle
from gistkit.kernels.reference import sparse as whole_oracle
from gistkit.kernels.sparse import operators as sparse
from gistkit.kernels.sparse import ranges
from gistkit.runtime.stash.verify import same_bits

NONE = torch.empty(0, dtype=torch.uint8)


def sample(n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    x[x < 0.2] = 0
    x[5::11] = -0.0
    return x


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", ["raw", "fp8"])
def test_slots_equal_the_oracle(fmt, dtype, packed):
    words, counts, values = sparse.zvc_encode(sample(2500, dtype), fmt)
    if packed:
        values = whole_oracle.compact(values, counts, 1024, int(counts.sum()))
    for first, n in ((0, 1024), (1, 1476), (2, 452), (2, 0)):
        args = (words, counts, values, NONE, first, n, dtype, fmt, "none", packed)
        assert same_bits(ranges.zvc_decode_slots(*args), oracle.zvc_decode_slots(*args))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_equal_the_oracle(dtype, packed):
    counts, columns, values = sparse.csr_encode(sample(1300, dtype), "raw")
    if packed:
        total = int(counts.sum())
        columns, values = (whole_oracle.compact(t, counts, 256, total) for t in (columns, values))
    for first, n in ((0, 256), (1, 1044), (5, 20), (3, 512)):
        args = (counts, columns, values, NONE, first, n, dtype, "raw", "none", packed)
        assert same_bits(ranges.csr_decode_rows(*args), oracle.csr_decode_rows(*args))
