"""Narrow-float kernels under Triton's interpreter, bit for bit against the oracle, NaN included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gistkit.formats import FLOAT_FORMATS, SCALINGS
from gistkit.kernels.narrow import narrow as kernels
from gistkit.kernels.narrow import tensor_scale
from gistkit.kernels.reference import narrow as reference
from tests.support.narrow_values import boundaries
from tests.support.tensors import FLOATS, same_bits, values_of

# arithmetic on infinities and NaN: numpy, which stands in for the GPU here, reports what is meant to happen
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)
formats = pytest.mark.parametrize("fmt", FLOAT_FORMATS)
scalings = pytest.mark.parametrize("scaling", SCALINGS)


def assert_equals_oracle(x: torch.Tensor, fmt: str, scaling: str, targets: tuple[torch.dtype, ...]) -> None:
    n = x.numel()
    codes, exponents = getattr(kernels, f"{fmt}_encode")(x, scaling)
    expected = getattr(reference, f"{fmt}_encode")(x, scaling)
    assert torch.equal(exponents, expected[1])
    assert torch.equal(codes, expected[0])
    for dtype in targets:
        decoded = getattr(kernels, f"{fmt}_decode")(codes, exponents, n, dtype, scaling)
        assert same_bits(decoded, getattr(reference, f"{fmt}_decode")(codes, exponents, n, dtype, scaling))


@dtypes
@formats
@scalings
@settings(max_examples=8)
@given(n=st.one_of(st.integers(0, 400), st.integers(0, 13000)), seed=st.integers(0, 9999))
@example(n=12288, seed=0)
@example(n=1, seed=2)
@example(n=9000, seed=4)
@example(n=5000, seed=5)
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
def test_every_code_decodes_as_the_oracle_does(dtype):
    none = torch.empty(0, dtype=torch.uint8)
    eight = torch.arange(256).to(torch.uint8)
    ten = reference.fp10_pack(torch.arange(1024).to(torch.int16))
    sixteen = torch.arange(-(2**15), 2**15).to(torch.int16)
    for fmt, codes, n in (("fp8", eight, 256), ("fp10", ten, 1024), ("fp16", sixteen, 2**16)):
        # the least exponent byte gives subnormals, which bf16 rounds
        for exponent in (None, FLOAT_FORMATS[fmt].max_exponent + 1, 127, 200, 255):
            scaling = "none" if exponent is None else "tensor"
            byte = none if exponent is None else torch.tensor([exponent], dtype=torch.uint8)
            got = getattr(kernels, f"{fmt}_decode")(codes, byte, n, dtype, scaling)
            assert same_bits(got, getattr(reference, f"{fmt}_decode")(codes, byte, n, dtype, scaling))


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


def test_more_stretches_than_one_loop(monkeypatch):
    monkeypatch.setattr(tensor_scale, "AMAX_PROGRAMS", 2)
    block = tensor_scale.AMAX_BLOCK[4]
    for n in (3 * block + 1, 4 * block):
        for largest in (0, block - 1, block, n - 1):
            x = values_of(n, torch.float32, 1, 0.0, False)
            x[largest] = 1e30
            assert torch.equal(kernels.fp8_encode(x, "tensor")[1], reference.fp8_encode(x, "tensor")[1])


def test_bad_arguments():
    x = torch.randn(12)
    codes, exponents = kernels.fp8_encode(x, "block")
    with pytest.raises(ValueError, match="fp8_encode: scaling must be one of none, tensor, block, got 'row'"):
        kernels.fp8_encode(x, "row")
    with pytest.raises(ValueError, match="fp8_decode: codes must have 13 elements to match 13 values, got 12"):
        kernels.fp8_decode(codes, exponents, 13, torch.float32, "block")
    with pytest.raises(ValueError, match="exponents must have 0 elements to match 12 codes with scaling 'none', got 1"):
        kernels.fp8_decode(codes, exponents, 12, torch.float32, "none")
    with pytest.raises(TypeError, match=r"fp10_decode: codes must be of dtype torch.int32, got torch.uint8"):
        kernels.fp10_decode(codes, exponents, 12, torch.float32, "block")
