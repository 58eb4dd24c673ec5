"""Narrow-float kernels under Triton's interpreter, bit for bit against the oracle, NaN included."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.formats import FLOAT_FORMATS, SCALINGS
from gistkit.kernels.narrow import narrow as kernels
from gistkit.kernels.reference import narrow as reference
from tests.support.kernel_laws import assert_decodes, assert_narrow
from tests.support.narrow_values import boundaries
from tests.support.tensors import FLOATS, sixteen_bit_values, values_of

# arithmetic on infinities and NaN: numpy, which stands in for the GPU here, reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
formats = pytest.mark.parametrize("fmt", FLOAT_FORMATS)
scalings = pytest.mark.parametrize("scaling", SCALINGS)


@dtypes
@formats
@scalings
@settings(max_examples=2)
@given(n=st.integers(0, 400), seed=st.integers(0, 9999))
@example(n=6256, seed=0)
@example(n=7001, seed=4)
def test_kernels_equal_the_oracle(fmt, scaling, dtype, n, seed):
    x = values_of(n, dtype, seed, 0.2, seed % 3 == 0)
    assert_narrow(kernels, x, fmt, scaling, "cpu", FLOATS if n < 400 else (dtype,))


@formats
@scalings
def test_every_code_its_neighbours_and_every_tie(fmt, scaling):
    x = boundaries(FLOAT_FORMATS[fmt])
    if fmt == "fp16":
        x = x[torch.arange(0, len(x), 7)]  # of 380 000 values
    assert_narrow(kernels, x, fmt, scaling, "cpu")


@dtypes
@pytest.mark.parametrize("fmt, bits", [("fp8", 8), ("fp10", 10), ("fp16", 16)])
def test_every_code_decodes_as_the_oracle_does(fmt, bits, dtype):
    # the least exponent byte gives subnormals, which bf16 rounds
    assert_decodes(kernels, fmt, bits, dtype, "cpu", (None, FLOAT_FORMATS[fmt].max_exponent + 1, 255))


@pytest.mark.parametrize(
    "fmt, dtype", [*((fmt, torch.bfloat16) for fmt in FLOAT_FORMATS), ("fp16", torch.float16)], ids=str
)
def test_every_sixteen_bit_value(fmt, dtype):
    assert_narrow(kernels, sixteen_bit_values(dtype), fmt, "none", "cpu", (dtype,))


@given(n=st.integers(0, 5000), seed=st.integers(0, 99))
@settings(max_examples=5)
def test_fp10_pack(n, seed):
    codes = torch.randint(0, 1024, (n,), generator=torch.Generator().manual_seed(seed)).to(torch.int16)
    assert torch.equal(kernels.fp10_pack(codes), reference.fp10_pack(codes))
