"""Narrow-float kernels on a CUDA device against the oracle on CPU tensors, to the bit."""

import pytest
import torch

from gistkit.formats import FLOAT_FORMATS, SCALINGS
from gistkit.kernels import ops
from tests.support.kernel_laws import assert_decodes, assert_narrow
from tests.support.narrow_values import boundaries
from tests.support.tensors import FLOATS, same_bits, sixteen_bit_values, values_of

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
formats = pytest.mark.parametrize("fmt", FLOAT_FORMATS)
scalings = pytest.mark.parametrize("scaling", SCALINGS)


@dtypes
@formats
@scalings
@pytest.mark.parametrize("n", [0, 1, 2, 127, 128, 2**20, 2**20 + 16, 3 * 2**20 + 5, 2**23])
def test_kernels_equal_the_oracle(fmt, scaling, dtype, n):
    for seed in (0, 4):
        assert_narrow(ops, values_of(n, dtype, seed, 0.2, seed == 4), fmt, scaling, "cuda", (dtype,))


@dtypes
@formats
@scalings
def test_every_sixteen_bit_value(fmt, scaling, dtype):
    assert_narrow(ops, sixteen_bit_values(dtype), fmt, scaling, "cuda")


@formats
@scalings
def test_every_code_its_neighbours_and_every_tie(fmt, scaling):
    assert_narrow(ops, boundaries(FLOAT_FORMATS[fmt]), fmt, scaling, "cuda")


@dtypes
@pytest.mark.parametrize("fmt, bits", [("fp8", 8), ("fp10", 10), ("fp16", 16)])
def test_every_code_decodes_as_the_oracle_does(fmt, bits, dtype):
    exponents = (None, *range(FLOAT_FORMATS[fmt].max_exponent + 1, 256))
    assert_decodes(ops, fmt, bits, dtype, "cuda", exponents)


@pytest.mark.parametrize("scaling", ["none", "block"])
def test_more_than_two_to_the_31_elements(scaling):
    n = 2**31 + 1024
    if torch.cuda.mem_get_info()[0] < 8 * n:
        pytest.skip("needs 17 GB of device memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-1024:] = torch.randn(1024, dtype=torch.bfloat16, device="cuda")
    codes, exponents = ops.narrow_encode(x, "fp8", scaling)
    tail = x[-1024:].cpu()
    expected = ops.narrow_encode(tail, "fp8", scaling)
    assert torch.equal(codes[-1024:].cpu(), expected[0])
    decoded = ops.narrow_decode(codes, exponents, n, torch.bfloat16, "fp8", scaling)
    assert same_bits(decoded[-1024:].cpu(), ops.narrow_decode(*expected, 1024, torch.bfloat16, "fp8", scaling))
    assert not decoded[:4096].any()
