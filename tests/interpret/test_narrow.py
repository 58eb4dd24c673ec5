"""Narrow-float kernels under Triton's interpreter, bit for bit against the oracle, NaN included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.formats import FLOAT_FORMATS, SCALINGS
from gistkit.kernels.narrow import narrow as kernels
from gistkit.kernels.reference import narrow as reference
from tests.support.narrow_values import boundaries
from tests.support.tensors import FLOATS, same_bits, values_of

# arithmetic on infinities and NaN: numpy, which stands in for the GPU here, reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
formats = pytest.mark.parametrize("fmt", FLOAT_FORMATS)
scalings = pytest.mark.parametrize("scaling", SCALINGS)


def assert_equals_oracle(x: torch.Tensor, fmt: str, scaling: str, targets: tuple[torch.dtype, ...]) -> None:
    codes, exponents = kernels.narrow_encode(x, fmt, scaling)
    expected = reference.narrow_encode(x, fmt, scaling)
    assert torch.equal(exponents, expected[1])
    assert torch.equal(codes, expected[0])
    for dtype in targets:
        args = (codes, exponents, x.numel(), dtype, fmt, scaling)
        assert same_bits(kernels.narrow_decode(*args), reference.narrow_decode(*args))


@dtypes
@formats
@scalings
@settings(max_examples=5)
@given(n=st.one_of(st.integers(0, 400), st.integers(0, 13000)), seed=st.integers(0, 9999))
@example(n=12288, seed=0)
@example(n=1, seed=2)
@example(n=9000, seed=4)
def test_kernels_equal_the_oracle(fmt, scaling, dtype, n, seed):
    x = values_of(n, dtype, seed, 0.2, seed % 3 == 0)
    assert_equals_oracle(x, fmt, scaling, FLOATS if n < 400 else (dtype,))


@formats
@scalings
def test_every_code_its_neighbours_and_every_tie(fmt, scaling):
    x = boundaries(FLOAT_FORMATS[fmt])
    if fmt == "fp16":
        x = x[torch.arange(0, len(x), 7)]  # of 380 000 values
    assert_equals_oracle(x, fmt, scaling, FLOATS)


@dtypes
@pytest.mark.parametrize("fmt, bits", [("fp8", 8), ("fp10", 10), ("fp16", 16)])
def test_every_code_decodes_as_the_oracle_does(fmt, bits, dtype):
    n = 2**bits
    codes = torch.arange(n).to(torch.uint8 if fmt == "fp8" else torch.int16)
    codes = reference.fp10_pack(codes) if fmt == "fp10" else codes
    # the least exponent byte gives subnormals, which bf16 rounds
    for exponent in (None, FLOAT_FORMATS[fmt].max_exponent + 1, 127, 200, 255):
        scaling, count = ("none", 0) if exponent is None else ("block", n // 128)
        exponents = torch.full((count,), exponent or 0, dtype=torch.uint8)
        args = (codes, exponents, n, dtype, fmt, scaling)
        assert same_bits(kernels.narrow_decode(*args), reference.narrow_decode(*args))


@formats
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_every_sixteen_bit_value(fmt, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_equals_oracle(x, fmt, "none", (dtype,))


@given(n=st.integers(0, 5000), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_fp10_pack(n, seed):
    codes = torch.randint(0, 1024, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    assert torch.equal(kernels.fp10_pack(codes), reference.fp10_pack(codes))
